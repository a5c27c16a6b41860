"""Agglomeration: always the best pair first, against a search through all pairs; connected components."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from arrays import renumbered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csgraph

from volpipe.errors import PlanError
from volpipe.recipes.segmentation import ObjectRules
from volpipe.segmentation import agglomerate as agglomerate_module
from volpipe.segmentation.agglomerate import agglomerate, connected_components, rule_of
from volpipe.segmentation.edges import Edges

SHAPES = st.tuples(*[st.integers(1, 13)] * 3)
BLOCKS = st.tuples(*[st.sampled_from([4, 6, 8, 14])] * 3)
LAWS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_edges(rng: np.random.Generator, num: int, most: int = 10**6) -> Edges:
    """Return edges between some pairs of `num` fragments, of up to `most` voxels each and means that all differ."""
    pairs = rng.integers(0, num, (4 * num, 2))
    counts = rng.integers(1, most, (4 * num, 2))
    sums = (rng.random((4 * num, 2)) * counts * 255).astype(int)
    columns = np.stack([sums[:, 0], counts[:, 0], sums[:, 1], counts[:, 1]], axis=1)
    return Edges.total(pairs, columns, np.arange(8 * num).reshape(-1, 2))


def owners(num: int, edges: Edges, choice: ObjectRules) -> np.ndarray:
    """Return the object of each fragment, none of which is open."""
    return agglomerate(edges, rule_of(choice), np.zeros(num, bool), np.ones(num, int))[0]


def merged_by_search(num: int, edges: Edges, threshold: float) -> np.ndarray:
    """Return the owner of each fragment, the best pair being looked for among all after each merge."""
    owner = np.arange(num)
    between = {(a, b): sums for (a, b), sums in zip(edges.pairs.tolist(), edges.sums[:, :2].tolist(), strict=True)}
    while between:
        a, b = max(between, key=lambda pair: between[pair][0] / between[pair][1])
        if between[a, b][0] / between[a, b][1] / 255 < threshold:
            break
        owner[owner == b] = a
        left: dict[tuple[int, int], list[int]] = {}
        for pair, (total, count) in between.items():
            low, high = sorted(a if c == b else c for c in pair)
            if low != high:
                known = left.get((low, high), [0, 0])
                left[low, high] = [known[0] + total, known[1] + count]
        between = left
    return owner


@pytest.mark.parametrize("few", [0.0, 0.1, 2.0])  # all at once, some, one by one
def test_agglomeration_always_takes_the_best_pair(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agglomerate_module, "FEW", few)
    rng = np.random.default_rng(7)
    for most in (10**6, 10**4) * 15:  # of few voxels, means are compared as floats
        num, threshold = int(rng.integers(2, 30)), float(rng.random())
        edges = random_edges(rng, num, most)
        found = owners(num, edges, ObjectRules(threshold=threshold))
        known = merged_by_search(num, edges, threshold)
        np.testing.assert_array_equal(renumbered(found + 1), renumbered(known + 1))


@pytest.mark.parametrize("few", [0.0, 2.0])
def test_a_mutex_keeps_apart_what_something_surer_forbids(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agglomerate_module, "FEW", few)
    rng = np.random.default_rng(8)
    for most in (10**6, 10**4) * 15:
        num = int(rng.integers(2, 30))
        edges = random_edges(rng, num, most)
        weights = edges.sums[:, [0, 2]] / edges.sums[:, [1, 3]] / 255 - 0.5
        all_edges = [(w, *pair) for pair, ws in zip(edges.pairs.tolist(), weights, strict=True) for w in
                     ((ws[0],) if ws[0] > 0 else ()) + ((ws[1],) if ws[1] < 0 else ())]  # fmt: skip
        owner, forbidden = np.arange(num), set[frozenset[int]]()
        for weight, a, b in sorted(all_edges, key=lambda edge: -abs(edge[0])):
            here, there = int(owner[a]), int(owner[b])
            if here == there:
                continue
            if weight < 0:
                forbidden.add(frozenset((here, there)))
            elif frozenset((here, there)) not in forbidden:
                owner[owner == there] = here
                forbidden = {frozenset(here if c == there else c for c in pair) for pair in forbidden}
        found = owners(num, edges, ObjectRules(agglomerate="mutex", threshold=0.5, far_threshold=0.5))
        np.testing.assert_array_equal(renumbered(found + 1), renumbered(owner + 1))


@pytest.mark.parametrize("few", [0.0, 2.0])  # all at once, one by one
def test_means_that_are_one_float_keep_their_order(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of 1 and 2 is higher by 2**-60, that of 0 and 1 comes first in C order; 0 and 2 keep the third apart."""
    monkeypatch.setattr(agglomerate_module, "FEW", few)
    num = 2**30
    lower, higher = (201 * (num - 1) - 1, num - 1), (201 * num - 1, num)
    assert Fraction(*lower) < Fraction(*higher) and lower[0] / lower[1] == higher[0] / higher[1]
    edges = Edges(np.array([[0, 1], [0, 2], [1, 2]]), np.array([lower, (0, num), higher]), np.arange(3).reshape(-1, 1))
    assert owners(3, edges, ObjectRules(threshold=0.6)).tolist() == [0, 1, 1]


@pytest.mark.parametrize("few", [-1.0, 2.0])  # all at once, one by one
@pytest.mark.parametrize(
    ("voxels", "is_open", "expected"),
    [
        ((100, 1, 1), False, [0, 1, 0]),  # what the last brings along keeps the second apart
        ((100, 1, 1), True, [0, 1, 2]),
        ((100, 1, 10), False, [0, 0, 1]),  # of the first and the last, none is small
        ((100, 10, 10), False, [0, 1, 2]),
    ],
)
def test_a_small_object_joins_below_the_threshold_once_its_neighbours_are_known(
    few: float, voxels: tuple[int, ...], is_open: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first likes the last best, which may be open, then the second; these two lie side by side."""
    monkeypatch.setattr(agglomerate_module, "FEW", few)
    sums = np.array([[51 * 10, 10], [64 * 10, 10], [0, 100]])
    edges = Edges(np.array([[0, 1], [0, 2], [1, 2]]), sums, np.arange(3).reshape(-1, 1))
    rule = rule_of(ObjectRules(threshold=0.3, small_voxels=10, small_threshold=0.1))
    owner = agglomerate(edges, rule, np.array([False, False, is_open]), np.array(voxels))[0]
    assert owner.tolist() == expected


def test_a_chain_that_there_is_no_memory_for_is_refused() -> None:
    """Each node of a chain likes the next one better, so that they are merged one by one from its end."""
    num = 100
    pairs = np.stack([np.arange(num - 1), np.arange(1, num)], axis=1)
    edges = Edges(pairs, np.stack([150 + pairs[:, 0], np.ones(num - 1, int)], axis=1), pairs[:, :1])
    rule, nodes = rule_of(ObjectRules(threshold=0.5)), (np.zeros(num, bool), np.ones(num, int))
    assert not agglomerate(edges, rule, *nodes, most_edges=num - 1)[0].any()
    with pytest.raises(PlanError, match=r"^99 edges lie between fragments that can only be merged one by one, out"):
        agglomerate(edges, rule, *nodes, most_edges=num - 2)


@given(num=st.integers(1, 40), data=st.data())
def test_components_are_numbered_by_their_first(num: int, data: st.DataObject) -> None:
    pair = st.tuples(st.integers(0, num - 1), st.integers(0, num - 1))
    joins = np.array(data.draw(st.lists(pair, max_size=60)), np.int64).reshape(-1, 2)
    first = np.array(data.draw(st.permutations(range(num))))
    graph = coo_array((np.ones(len(joins)), (joins[:, 0], joins[:, 1])), shape=(num, num))
    known = csgraph.connected_components(graph, directed=False)[1]
    found = connected_components(num, joins, first)
    np.testing.assert_array_equal(renumbered(found + 1), renumbered(known + 1))
    leaders = [first[found == group].min() for group in range(found.max() + 1)]
    assert leaders == sorted(leaders)
