"""The graph of a segmentation: fragments joined to supervoxels, supervoxels agglomerated to objects, objects numbered.

Not here: voxels (fragments), or files (tasks). Objects depend on supervoxels alone, not on the blocks that cut
them into fragments: sums are of integers, and ties are broken by the first voxel in C order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.recipes.segmentation import Objects
from volpipe.segmentation.boundary_maps import FULL

FIRST = 1  # column of a table: number of the first voxel
LEAST, MOST = slice(2, 5), slice(5, 8)
# Upper bounds, of tables and working memory; 0.4 and 0.5 of them were measured on noisy affinities, 2026-11.
FRAGMENT_BYTES, JOIN_BYTES = 400, 64
EDGE_BYTES = {"mean": 900, "mutex": 500}
FEW = 0.02  # share of supervoxels: below it, merging one by one is faster than all at once


@dataclass(frozen=True)
class Edges:
    """Edges of the region adjacency graph, of fragments or of supervoxels.

    Attributes:
        pairs: (pairs, 2), int64: two regions, the lower number first; unique, ascending.
        sums: (pairs, 4), int64: sum and number of the nearest affinities, as bytes; the same of farther ones.
    """

    pairs: np.ndarray
    sums: np.ndarray

    @classmethod
    def total(cls, pairs: np.ndarray, sums: np.ndarray) -> Edges:
        """Return the edges of `pairs` in any order, duplicates summed, self-edges dropped."""
        low, high = pairs.min(axis=1), pairs.max(axis=1)
        apart = low != high
        low, high, sums = low[apart], high[apart], sums[apart]
        order = np.lexsort((high, low))
        low, high, sums = low[order], high[order], sums[order]
        begins = np.ones(len(low), bool)
        begins[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        starts = np.flatnonzero(begins)
        added = np.add.reduceat(sums, starts, axis=0) if len(starts) else sums
        return cls(np.stack([low[starts], high[starts]], axis=1), added)


@dataclass(frozen=True)
class Solution:
    """Labels and objects of the whole volume.

    Attributes:
        labels: (fragments,), int64; 0 where the object is too small.
        objects: a table as in Fragments, one row per label from 1 on.
    """

    labels: np.ndarray
    objects: np.ndarray


def solve(table: np.ndarray, joins: np.ndarray, pairs: np.ndarray, sums: np.ndarray, choice: Objects) -> Solution:
    """Return the objects of all fragments.

    Args:
        table: of all fragments, as in Fragments.
        joins: (joins, 2), int64: rows of the table that are of one supervoxel.
        pairs, sums: as in Edges, of fragments by their rows.
        choice: how supervoxels become objects.
    """
    owner = connected_components(len(table), joins, table[:, FIRST])
    if choice.method == "watershed":
        edges = Edges.total(owner[pairs], sums)
        num = int(owner.max(initial=-1)) + 1
        owner = agglomerate(num, edges, choice)[owner]
    rows = add_up(owner, table)
    large = rows[:, 0] >= choice.min_voxels
    number = np.zeros(len(rows), np.int64)
    order = np.flatnonzero(large)
    order = order[np.argsort(rows[order, FIRST], kind="stable")]
    number[order] = np.arange(1, len(order) + 1)
    return Solution(number[owner], rows[order])


def connected_components(num: int, joins: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the component (num,), int64, of each of `num` nodes connected by `joins`, in order of `first`."""
    least = np.full(num, np.iinfo(np.int64).max)
    roots = _roots(num, joins)
    np.minimum.at(least, roots, first)
    order = np.flatnonzero(roots == np.arange(num))
    order = order[np.argsort(least[order], kind="stable")]
    rank = np.empty(num, np.int64)
    rank[order] = np.arange(len(order))
    return np.asarray(rank[roots])


def _roots(num: int, joins: np.ndarray) -> np.ndarray:
    """Return the lowest node of the component of each of `num` nodes.

    Every round hooks each root to the lowest root beside it, which removes at least half of the roots with a neighbour.
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
    """Return the table of the owners of the rows of `table`; `owner` (rows,) counts from 0."""
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


def agglomerate(num: int, edges: Edges, choice: Objects) -> np.ndarray:
    """Return the object (num,), from 0, of each of `num` supervoxels."""
    if choice.agglomerate == "mean":
        return mean_agglomeration(num, edges, choice)
    return connected_components(num, mutex_watershed(edges, choice), np.arange(num))


def mutex_watershed(edges: Edges, choice: Objects) -> np.ndarray:
    """Return pairs (n, 2), int64, of supervoxels of one object, by the mutex watershed (Wolf et al. 2018)."""
    import mwatershed

    near, far = edges.sums[:, :2], edges.sums[:, 2:]
    pulls, pushes = _mean(near) - choice.threshold, _mean(far) - choice.far_threshold
    joins, forbids = (near[:, 1] > 0) & (pulls > 0), (far[:, 1] > 0) & (pushes < 0)
    weight = np.concatenate([pulls[joins], pushes[forbids]])
    pairs = np.concatenate([edges.pairs[joins], edges.pairs[forbids]])
    order = np.lexsort((weight > 0, pairs[:, 1], pairs[:, 0], -np.abs(weight)))
    sorted_edges = list(zip((weight > 0)[order].tolist(), *pairs[order].T.tolist(), strict=True))
    links = mwatershed.cluster(sorted_edges) if sorted_edges else []
    # A segment is named by one of its supervoxels.
    return np.array(links, np.int64).reshape(-1, 2)


def _mean(sums: np.ndarray) -> np.ndarray:
    """Return the mean affinity (edges,), 0 to 1, of sums and numbers as in Edges."""
    return np.asarray(sums[:, 0] / np.maximum(sums[:, 1], 1) / FULL)


def mean_agglomeration(num: int, edges: Edges, choice: Objects) -> np.ndarray:
    """Return the object (num,), from 0, of each of `num` supervoxels by mean affinity agglomeration.

    The pair with the highest mean is merged first, while it reaches the threshold; edges to a common neighbour are
    summed. A mean cannot exceed the higher of two, so that all mutually best pairs may be merged at once, with the same
    objects (reciprocal nearest neighbours, Murtagh 1983): done while there are many.
    """
    near = edges.sums[:, 1] > 0
    edges = Edges(edges.pairs[near], edges.sums[near, :2])
    owner, num_left = np.arange(num), num
    while True:
        best = _mutual(num_left, edges, choice.threshold)
        merging = connected_components(num_left, best, np.arange(num_left))
        if len(best) > FEW * num_left:
            owner, num_left = merging[owner], num_left - len(best)
            edges = Edges.total(merging[edges.pairs], edges.sums)
            continue
        return connected_components(num_left, one_by_one(num_left, edges, choice.threshold), np.arange(num_left))[owner]


def _mutual(num: int, edges: Edges, threshold: float) -> np.ndarray:
    """Return the mutually best pairs (n, 2) of `num` supervoxels with a mean of at least `threshold`.

    Of equal pairs the first is the best.
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
    """Return the pairs (n, 2) of supervoxels to merge, as in `mean_agglomeration`; of ties the lowest numbers first."""
    around: list[dict[int, tuple[int, int]]] = [{} for _ in range(num)]
    heap = []
    for (a, b), (total, count) in zip(edges.pairs.tolist(), edges.sums.tolist(), strict=True):
        around[a][b] = around[b][a] = (total, count)
        if total / count / FULL >= threshold:
            heap.append((-total / count, a, b))
    heapq.heapify(heap)
    links: list[tuple[int, int]] = []
    while heap:
        mean, a, b = heapq.heappop(heap)
        known = around[a].get(b)
        if known is None or -known[0] / known[1] != mean:
            continue  # stale: one of the two was merged, or their edge changed
        links.append((a, b))
        keep, drop = (a, b) if len(around[a]) >= len(around[b]) else (b, a)
        for c in _absorb(around, keep, drop):
            total, count = around[keep][c]
            if total / count / FULL >= threshold:
                heapq.heappush(heap, (-total / count, min(keep, c), max(keep, c)))
    return np.array(links, np.int64).reshape(-1, 2)


def _absorb(around: list[dict[int, tuple[int, int]]], keep: int, drop: int) -> Iterator[int]:
    """Merge `drop` into `keep`, and yield the neighbours whose edges changed."""
    del around[keep][drop], around[drop][keep]
    for c, (total, count) in around[drop].items():
        before = around[keep].get(c, (0, 0))
        del around[c][drop]
        around[keep][c] = around[c][keep] = (before[0] + total, before[1] + count)
        yield c
    around[drop] = {}


def bytes_needed(num_fragments: int, num_joins: int, num_edges: int, choice: Objects) -> int:
    """Return an upper bound of the memory of `solve`, in bytes."""
    edge = EDGE_BYTES[choice.agglomerate] if choice.method == "watershed" else 0
    return num_fragments * FRAGMENT_BYTES + num_joins * JOIN_BYTES + num_edges * edge
