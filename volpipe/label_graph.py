"""The graph of a labelling: which pieces are one fragment, which fragments one object, and how objects are numbered.

Not here: voxels (label_pieces), or files (label_tasks). What comes out depends on fragments alone, not on how blocks
cut them into pieces: sums are of whole numbers, and ties are broken by the first voxel in C order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.label_fields import FULL
from volpipe.label_recipe import Objects

FIRST = 1  # column of a table with the number of the first voxel
LEAST, MOST = slice(2, 5), slice(5, 8)
# Of the tables and what is made of them: an upper bound; 0.4 and 0.5 of it were measured on noisy affinities, 2026-11.
PIECE_BYTES, JOIN_BYTES = 400, 64
EDGE_BYTES = {"mean": 900, "mutex": 500}
FEW = 0.02  # of the fragments: when so few are merged at once, one by one is faster


@dataclass(frozen=True)
class Edges:
    """What lies between pairs of fragments.

    Attributes:
        pairs: (pairs, 2), int64: fragments, the lower number first; each pair once, ascending.
        sums: (pairs, 4), int64: of nearest affinities, as bytes, and how many; the same of farther ones.
    """

    pairs: np.ndarray
    sums: np.ndarray

    @classmethod
    def total(cls, pairs: np.ndarray, sums: np.ndarray) -> Edges:
        """Return the edges of pairs that may come more than once and in either order; none to itself."""
        low, high = pairs.min(axis=1), pairs.max(axis=1)
        kept = low != high
        low, high, sums = low[kept], high[kept], sums[kept]
        order = np.lexsort((high, low))
        low, high, sums = low[order], high[order], sums[order]
        begins = np.ones(len(low), bool)
        begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        starts = np.flatnonzero(begins)
        added = np.add.reduceat(sums, starts, axis=0) if len(starts) else sums
        return cls(np.stack([low[starts], high[starts]], axis=1), added)


@dataclass(frozen=True)
class Solution:
    """What a labelling comes to.

    Attributes:
        labels: of each piece, int64; 0 where its object is too small.
        objects: as the table of Pieces, one row per label from 1 on.
    """

    labels: np.ndarray
    objects: np.ndarray


def solve(table: np.ndarray, joins: np.ndarray, pairs: np.ndarray, sums: np.ndarray, choice: Objects) -> Solution:
    """Return the objects of pieces.

    Args:
        table: of all pieces, as in Pieces.
        joins: (joins, 2), int64: pieces, by their place in the table, that are of one fragment.
        pairs, sums: as in Edges, but of pieces.
        choice: how fragments become objects.
    """
    fragment = united(len(table), joins, table[:, FIRST])
    if choice.method == "watershed":
        edges = Edges.total(fragment[pairs], sums)
        num = int(fragment.max(initial=-1)) + 1
        fragment = merged(num, edges, choice)[fragment]
    rows = add_up(fragment, table)
    large = rows[:, 0] >= choice.min_voxels
    number = np.zeros(len(rows), np.int64)
    order = np.flatnonzero(large)
    order = order[np.argsort(rows[order, FIRST], kind="stable")]
    number[order] = np.arange(1, len(order) + 1)
    return Solution(number[fragment], rows[order])


def united(num: int, joins: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the number of the set of each of `num` things that `joins` unite; sets in the order of their `first`."""
    least = np.full(num, np.iinfo(np.int64).max)
    roots = _roots(num, joins)
    np.minimum.at(least, roots, first)
    order = np.flatnonzero(roots == np.arange(num))
    order = order[np.argsort(least[order], kind="stable")]
    rank = np.empty(num, np.int64)
    rank[order] = np.arange(len(order))
    return np.asarray(rank[roots])


def _roots(num: int, joins: np.ndarray) -> np.ndarray:
    """Return the lowest number of the set of each of `num` things.

    All sets at once: whatever is joined to something of a lower root gets that as its own, so that in each round at
    least half of the sets that are joined to others go.
    """
    root = np.arange(num)
    while True:
        ends = root[joins]
        low, high = ends.min(axis=1, initial=num), ends.max(axis=1, initial=-1)
        apart = low < high
        if not apart.any():
            return root
        np.minimum.at(root, high[apart], low[apart])
        while not np.array_equal(root, farther := root[root]):
            root = farther


def add_up(owner: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the table of what owns the rows of `table`; `owner` numbers that from 0 on."""
    num = int(owner.max(initial=-1)) + 1
    rows = np.zeros((num, table.shape[1]), np.int64)
    np.add.at(rows, owner, table)
    for columns, extreme, worst in (
        (slice(FIRST, FIRST + 1), np.minimum, np.iinfo(np.int64).max),
        (LEAST, np.minimum, np.iinfo(np.int64).max),
        (MOST, np.maximum, 0),
    ):
        rows[:, columns] = worst
        extreme.at(rows[:, columns], owner, table[:, columns])
    return rows


def merged(num: int, edges: Edges, choice: Objects) -> np.ndarray:
    """Return a number for each of `num` fragments, the same for those of one object, from 0 on."""
    if choice.agglomerate == "mean":
        return by_mean(num, edges, choice)
    return united(num, by_mutex(edges, choice), np.arange(num))


def by_mutex(edges: Edges, choice: Objects) -> np.ndarray:
    """Return pairs of fragments of one object, by the mutex watershed (Wolf et al. 2018) of the fragments' graph."""
    import mwatershed

    near, far = edges.sums[:, :2], edges.sums[:, 2:]
    pulls, pushes = _mean(near) - choice.threshold, _mean(far) - choice.far_threshold
    joins, forbids = (near[:, 1] > 0) & (pulls > 0), (far[:, 1] > 0) & (pushes < 0)
    weight = np.concatenate([pulls[joins], pushes[forbids]])
    pairs = np.concatenate([edges.pairs[joins], edges.pairs[forbids]])
    order = np.lexsort((weight > 0, pairs[:, 1], pairs[:, 0], -np.abs(weight)))
    sorted_edges = list(zip((weight > 0)[order].tolist(), *pairs[order].T.tolist(), strict=True))
    links = mwatershed.cluster(sorted_edges) if sorted_edges else []
    # A segment goes by the name of one of its fragments.
    return np.array(links, np.int64).reshape(-1, 2)


def _mean(sums: np.ndarray) -> np.ndarray:
    """Return the mean, 0 to 1, of affinities as in Edges."""
    found: np.ndarray = sums[:, 0] / np.maximum(sums[:, 1], 1) / FULL
    return found


def by_mean(num: int, edges: Edges, choice: Objects) -> np.ndarray:
    """Return a number for each of `num` fragments, the same for those that are merged.

    Always the two with the highest mean affinity are, while it suffices; what lies between them and a third is added
    up. A mean cannot rise above the higher of two, so that all pairs that are each other's best may be merged at once:
    the objects are the same (reciprocal nearest neighbours, Murtagh 1983). That is done while there are many.
    """
    near = edges.sums[:, 1] > 0
    edges = Edges(edges.pairs[near], edges.sums[near, :2])
    owner, num_left = np.arange(num), num
    while True:
        best = _mutual(num_left, edges, choice.threshold)
        merging = united(num_left, best, np.arange(num_left))
        if len(best) > FEW * num_left:
            owner, num_left = merging[owner], num_left - len(best)
            edges = Edges.total(merging[edges.pairs], edges.sums)
            continue
        return united(num_left, one_by_one(num_left, edges, choice.threshold), np.arange(num_left))[owner]


def _mutual(num: int, edges: Edges, threshold: float) -> np.ndarray:
    """Return the pairs of `num` fragments with a mean of at least `threshold` that are each other's best.

    Of equals the first counts as the best.
    """
    mean = _mean(edges.sums)
    place = np.flatnonzero(mean >= threshold)
    pairs, mean = edges.pairs[place], mean[place]
    highest, first = np.full(num, -1.0), np.full(num, len(pairs))
    for side in pairs.T:
        np.maximum.at(highest, side, mean)
    for side in pairs.T:
        is_best = np.flatnonzero(mean == highest[side])
        np.minimum.at(first, side[is_best], is_best)
    own = np.arange(len(pairs))
    return np.asarray(pairs[(first[pairs[:, 0]] == own) & (first[pairs[:, 1]] == own)])


def one_by_one(num: int, edges: Edges, threshold: float) -> np.ndarray:
    """Return pairs of fragments that are merged, as in `by_mean`. Ties go to the pair with the lowest numbers."""
    around: list[dict[int, tuple[int, int]]] = [{} for _ in range(num)]
    for (a, b), (total, count) in zip(edges.pairs.tolist(), edges.sums.tolist(), strict=True):
        around[a][b] = around[b][a] = (total, count)
    heap = [(-total / count, a, b) for a, b, (total, count) in _each(around) if total / count / FULL >= threshold]
    heapq.heapify(heap)
    links: list[tuple[int, int]] = []
    while heap:
        mean, a, b = heapq.heappop(heap)
        known = around[a].get(b)
        if known is None or -known[0] / known[1] != mean:
            continue  # one of them has been merged, or what lies between them has grown
        links.append((a, b))
        keep, gone = (a, b) if len(around[a]) >= len(around[b]) else (b, a)
        for c in _absorb(around, keep, gone):
            total, count = around[keep][c]
            if total / count / FULL >= threshold:
                heapq.heappush(heap, (-total / count, min(keep, c), max(keep, c)))
    return np.array(links, np.int64).reshape(-1, 2)


def _each(around: list[dict[int, tuple[int, int]]]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    return ((a, b, sums) for a, others in enumerate(around) for b, sums in others.items() if a < b)


def _absorb(around: list[dict[int, tuple[int, int]]], keep: int, gone: int) -> Iterator[int]:
    """Merge `gone` into `keep`, and yield what lies beside it and changed."""
    del around[keep][gone], around[gone][keep]
    for c, (total, count) in around[gone].items():
        before = around[keep].get(c, (0, 0))
        del around[c][gone]
        around[keep][c] = around[c][keep] = (before[0] + total, before[1] + count)
        yield c
    around[gone] = {}


def bytes_needed(num_pieces: int, num_joins: int, num_edges: int, choice: Objects) -> int:
    """Return the memory that `solve` takes, an upper bound."""
    edge = EDGE_BYTES[choice.agglomerate] if choice.method == "watershed" else 0
    return num_pieces * PIECE_BYTES + num_joins * JOIN_BYTES + num_edges * edge
