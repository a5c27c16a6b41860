"""A graph solved box by box has the objects of the graph in one piece, number by number, whatever the boxes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_piece import Fragmented, by_boxes, in_one_piece

from volpipe.geometry.grid import Box, Grid
from volpipe.recipes.segmentation import ObjectRules
from volpipe.segmentation import agglomerate as agglomerate_module
from volpipe.segmentation import solve as solve_module
from volpipe.segmentation.boxes import Boxes, border
from volpipe.segmentation.solve import Frame, GraphPart, bytes_needed, solve

METHODS = ("components", "mean", "small", "mutex")


def choice_of(method: str, threshold: float, far_threshold: float, min_voxels: int) -> ObjectRules:
    """Return how objects are found."""
    common = {"threshold": threshold, "min_voxels": min_voxels}
    if method == "small":
        return ObjectRules(small_voxels=8, small_threshold=min(threshold, far_threshold), **common)
    if method == "components":
        return ObjectRules(method="components", **common)
    return ObjectRules(agglomerate=method, far_threshold=far_threshold, **common)


def check_law(data: st.DataObject, few: float, edges: tuple[int, int]) -> None:
    """Fragments of random voxels, a few levels of affinities: most edges are ties; merged one by one below `few`."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = tuple(data.draw(st.integers(*edges)) for _ in range(3))
    block = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    method = data.draw(st.sampled_from(METHODS))
    thresholds = (data.draw(st.sampled_from([0.2, 0.4, 120 / 255, 0.6])) for _ in range(2))
    choice = choice_of(method, *thresholds, data.draw(st.sampled_from([0, 3])))
    graph = Fragmented.random(rng, shape, block, data.draw(st.integers(1, 8)), far=method == "mutex")
    expected = in_one_piece(graph, choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agglomerate_module, "FEW", few)
        patch.setattr(agglomerate_module, "BATCH", data.draw(st.sampled_from([1, 9, agglomerate_module.BATCH])))
        for edge in (1, 2, 4, 8):
            np.testing.assert_array_equal(by_boxes(graph, choice, edge)[0], expected, f"boxes of {edge} voxels")


@pytest.mark.parametrize("few", [-1.0, 0.02, 2.0])  # all at once, some, one by one
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_objects_of_boxes_are_those_of_one_piece(few: float, data: st.DataObject) -> None:
    check_law(data, few, (2, 7))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("few", [-1.0, 0.02, 2.0])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_objects_of_boxes_are_those_of_one_piece_at_length(few: float, data: st.DataObject) -> None:
    check_law(data, few, (5, 14))


@pytest.mark.parametrize(("method", "least", "most"), [("components", 1, 169), ("mean", 169, 300), ("mutex", 218, 440)])
def test_what_lies_within_a_box_stays_there(method: str, least: int, most: int) -> None:
    """Fragments of single voxels, 16³ of them, few of which are alike: of a box of 8³ little but its faces goes up.

    Three of its faces lie in the volume, which are 8³ - 7³ = 169 voxels, and 8³ - 7·7·6 = 218 where two voxels along x
    count. Others stay only where they may join those, or, with a mutex, are beside them.
    """
    rng, shape = np.random.default_rng(3), (16, 16, 16)
    ids = np.arange(1, 16**3 + 1).reshape(shape)
    blocks = Grid(shape, (8, 8, 8))
    for number in range(len(blocks)):
        part = ids[blocks.box(number).slices]
        part[:] = (number << 32) + 1 + np.arange(part.size).reshape(part.shape)
    data = rng.choice([20, 230], (3, *shape), p=[0.8, 0.2])
    graph = Fragmented(blocks, ids, np.zeros((0, 2), np.int64), data, ((-1, 0, 0), (0, -1, 0), (0, 0, -1)))
    choice = choice_of(method, 0.5, 0.5, 0)
    labels, solved = by_boxes(graph, choice, 8) if method != "mutex" else by_boxes(with_far(graph, rng), choice, 8)
    inner = solved[:8]
    assert all(len(each.target) == 8**3 for each in inner)
    assert all(least <= len(each.rest.table) <= most for each in inner)
    assert all(len(each.objects) > 10 for each in inner)
    assert len(solved[-1].rest.table) == 0
    assert labels.max() == sum(len(each.objects) for each in solved)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "few"), [("components", 0.0), ("mean", 0.0), ("mean", 2.0), ("mutex", 0.0), ("mutex", 2.0)]
)
@pytest.mark.parametrize("share", [pytest.param(0.2, marks=pytest.mark.long), 0.9])
def test_a_graph_takes_no_more_memory_than_is_counted(
    method: str, few: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lattice of 30³ fragments, most of them alike or few, merged all at once or one by one."""
    monkeypatch.setattr(agglomerate_module, "FEW", few)
    if not few:
        monkeypatch.setattr(solve_module, "BATCH", 0)
    rng, shape = np.random.default_rng(5), (30, 30, 30)
    parts, choice = [lattice(rng, shape, share, far=method == "mutex")], choice_of(method, 0.5, 0.4, 0)
    if method == "components":
        part = parts.pop()
        parts.append(replace(part, joins=part.pairs, **{n: getattr(part, n)[:0] for n in ("pairs", "sums", "first")}))
        del part
    sizes = [len(getattr(parts[0], name)) for name in ("table", "joins", "pairs")]
    held = sum(array.nbytes for array in vars(parts[0]).values())
    tracemalloc.start()
    try:
        solve(parts.pop(), Frame(Box.from_shape(shape), (60, 30, 30), (1, 1, 1), lambda blocks: blocks == 0), choice)
        measured = tracemalloc.get_traced_memory()[1] + held
    finally:
        tracemalloc.stop()
    needed = bytes_needed(*sizes, choice)
    assert 0.25 * needed < measured < needed


def lattice(rng: np.random.Generator, shape: tuple[int, ...], share: float, *, far: bool) -> GraphPart:
    """Return fragments of a voxel each, a `share` of whose edges joins."""
    number = np.arange(np.prod(shape)).reshape(shape)
    sides = [(number[1:], number[:-1]), (number[:, 1:], number[:, :-1]), (number[:, :, 1:], number[:, :, :-1])]
    pairs = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in sides]) + 1
    count = rng.integers(60, 160, len(pairs))
    mean = np.where(
        rng.random(len(pairs)) < share, rng.integers(140, 250, len(pairs)), rng.integers(0, 110, len(pairs))
    )
    sums, first = [mean * count, count], [np.arange(len(pairs))]
    if far:
        sums, first = [*sums, rng.integers(0, 256, len(pairs)) * count, count], [*first, first[0] + len(pairs)]
    corner = np.stack(np.unravel_index(number.ravel(), shape), axis=1)
    table = np.concatenate([np.ones((number.size, 1), int), number.reshape(-1, 1), corner, corner + 1, corner], axis=1)
    return GraphPart.from_block(
        0, table, np.zeros((0, 2), np.int64), pairs, np.stack(sums, axis=1), np.stack(first, axis=1)
    )


def with_far(graph: Fragmented, rng: np.random.Generator) -> Fragmented:
    """Return `graph` with affinities two voxels along x as well."""
    more = rng.choice([20, 230], (1, *graph.ids.shape))
    return Fragmented(
        graph.blocks, graph.ids, graph.joined, np.concatenate([graph.data, more]), (*graph.offsets, (0, 0, -2))
    )


def test_a_fragment_that_a_part_lacks_is_refused() -> None:
    graph = Fragmented.random(np.random.default_rng(0), (4, 4, 4), (2, 4, 4), 5, far=False)
    parts = [graph.part(0), graph.part(1)]
    frame = Frame(Box((0, 0, 0), (4, 4, 4)), (4, 4, 4), (1, 1, 1), lambda blocks: blocks < 2)
    solve(GraphPart.joined(parts), frame, ObjectRules())
    with pytest.raises(ValueError, match=r"a fragment of 0:4,0:4,0:4 is named by a neighbour, and is not there"):
        solve(parts[1], frame, ObjectRules())


# ---- boxes and slabs


@given(
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    block=st.tuples(*[st.integers(1, 9)] * 3),
    edge=st.integers(1, 20),
    slab=st.integers(1, 3000),
)
def test_boxes_of_every_level_hold_every_block_once(
    shape: tuple[int, ...], block: tuple[int, ...], edge: int, slab: int
) -> None:
    boxes = Boxes(Grid(shape, block), edge, slab)
    blocks = sorted(child for unit in range(len(boxes.levels[0])) for child in boxes.children(unit))
    assert blocks == list(range(len(boxes.blocks)))
    top = len(boxes) - 1
    assert boxes.box(top) == Box.from_shape(shape) and boxes.parent(top) is None
    for unit in range(len(boxes)):
        if unit != top:
            parent = boxes.parent(unit)
            assert parent is not None and parent > unit and unit in boxes.children(parent)
            assert boxes.box(parent).contains(boxes.box(unit))
    for block_number in {0, len(boxes.blocks) // 2, len(boxes.blocks) - 1}:
        around = list(boxes.around(block_number))
        assert [boxes.level(unit) for unit in around] == list(range(len(boxes.levels)))
        assert all(boxes.has_blocks(unit, np.array([block_number]))[0] for unit in around)
        assert all(boxes.box(unit).contains(boxes.blocks.box(block_number)) for unit in around)


@given(shape=st.tuples(*[st.integers(1, 12)] * 3), block=st.tuples(*[st.integers(1, 9)] * 3), slab=st.integers(1, 300))
def test_slabs_have_the_boxes_in_which_their_voxels_lie(
    shape: tuple[int, ...], block: tuple[int, ...], slab: int
) -> None:
    boxes = Boxes(Grid(shape, block), 4, slab)
    voxels = np.arange(np.prod(shape)).reshape(shape) // slab
    assert boxes.num_slabs == voxels.max() + 1
    units_in = [set(boxes.units_in(number)) for number in range(boxes.num_slabs)]
    for unit in range(len(boxes)):
        own = set(np.unique(voxels[boxes.box(unit).slices]).tolist())
        assert own <= set(boxes.slabs(unit))
        assert all(unit in units_in[number] for number in own)


def test_a_border_is_as_deep_as_neighbours_reach() -> None:
    box, shape = Box((0, 10, 10), (10, 20, 20)), (10, 20, 40)
    bounds = np.array(
        [[z, y, x, z + 1, y + 1, x + 1] for z, y, x in [(0, 11, 10), (9, 12, 12), (5, 19, 13), (5, 15, 18)]]
    )
    assert border(bounds, box, shape, (1, 1, 1)).tolist() == [True, False, False, False]
    assert border(bounds, box, shape, (1, 2, 2)).tolist() == [True, False, False, True]
    assert border(bounds, box, shape, (1, 3, 0)).tolist() == [True, True, False, False]
