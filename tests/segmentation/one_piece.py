"""Graphs of random fragments of blocks, and what their objects are: found in one piece, by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import mwatershed
import numpy as np
from scipy.sparse import coo_array, csgraph

from volpipe.geometry.grid import Grid
from volpipe.recipes.segmentation import ObjectRules
from volpipe.segmentation.boxes import Boxes
from volpipe.segmentation.solve import Frame, GraphPart, Solved, solve

NEAR = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))


@dataclass(frozen=True)
class Fragmented:
    """A volume cut into fragments at random, by voxels.

    Attributes:
        blocks: of the volume.
        ids: (z, y, x), int64: the fragment of each voxel, block << 32 | number; 0 is background.
        joined: pairs (n, 2) of fragments of one supervoxel.
        near, far: affinities (offsets, z, y, x), uint8.
        offsets: of all affinities, the nearest first.
    """

    blocks: Grid
    ids: np.ndarray
    joined: np.ndarray
    data: np.ndarray
    offsets: tuple[tuple[int, int, int], ...]

    @classmethod
    def random(
        cls, rng: np.random.Generator, shape: tuple[int, ...], block: tuple[int, ...], most: int, far: bool
    ) -> Fragmented:
        """Return up to `most` fragments per block, many of equal affinities."""
        blocks, ids = Grid(shape, block), np.zeros(shape, np.int64)
        for number in range(len(blocks)):
            box = blocks.box(number)
            local = np.unique(rng.integers(0, most + 1, box.shape), return_inverse=True)[1].reshape(box.shape)
            ids[box.slices] = np.where(local > 0, (number << 32) | local, 0)
        offsets = NEAR + (((-2, 0, 0), (0, -3, 1), (0, 2, -2)) if far else ())
        levels = np.array([0, 60, 120, 120, 200, 255])
        data = levels[rng.integers(0, len(levels), (len(offsets), *shape))]
        graph = cls(blocks, ids, np.zeros((0, 2), np.int64), data, offsets)
        a, b, _, _ = graph.contacts(int(rng.integers(3)))
        across = np.flatnonzero((a >> 32) != (b >> 32))
        joined = rng.choice(across, size=int(len(across) * rng.choice([0, 0.1, 0.4])), replace=False)
        return cls(blocks, ids, np.stack([a[joined], b[joined]], axis=1), data, offsets)

    def contacts(self, channel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the pairs of voxels at an offset that are of two fragments: these, the affinity and the number."""
        offset, shape = self.offsets[channel], self.ids.shape
        here = tuple(slice(max(0, -o), min(n, n - o)) for o, n in zip(offset, shape, strict=True))
        there = tuple(slice(max(0, o), min(n, n + o)) for o, n in zip(offset, shape, strict=True))
        voxel = np.arange(self.ids.size).reshape(shape)[here]
        a, b = self.ids[here], self.ids[there]
        apart = (a != b) & (a > 0) & (b > 0)
        return a[apart], b[apart], self.data[channel][here][apart], voxel[apart] * len(self.offsets) + channel

    def part(self, block: int) -> GraphPart:
        """Return the graph of `block`; an edge is of the block of its first voxel."""
        table, joined = self.table(), self.joined
        rows = table[0][(table[1] >> 32) == block]
        kinds = 2 if len(self.offsets) > len(NEAR) else 1
        edges: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for channel in range(len(self.offsets)):
            for a, b, value, number in zip(*(x.tolist() for x in self.contacts(channel)), strict=True):
                if a >> 32 != block:
                    continue
                sums, first = edges.setdefault((min(a, b), max(a, b)), ([0] * 2 * kinds, [2**63 - 1] * kinds))
                kind = int(channel >= len(NEAR))
                sums[2 * kind] += value
                sums[2 * kind + 1] += 1
                first[kind] = min(first[kind], number)
        return GraphPart.from_block(
            block, rows, joined[(joined[:, 0] >> 32) == block].reshape(-1, 2),
            np.array(list(edges), np.int64).reshape(-1, 2),
            np.array([sums for sums, _ in edges.values()], np.int64).reshape(-1, 2 * kinds),
            np.array([first for _, first in edges.values()], np.int64).reshape(-1, kinds),
        )  # fmt: skip

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of all fragments, and their ids, ascending."""
        ids, index, count = np.unique(self.ids, return_index=True, return_counts=True)
        rows = np.zeros((len(ids), 11), np.int64)
        rows[:, 0], rows[:, 1] = count, index
        for row, number in zip(rows, ids.tolist(), strict=True):
            places = np.argwhere(self.ids == number)
            row[2:5], row[5:8], row[8:] = places.min(0), places.max(0) + 1, places.sum(0)
        return rows[ids > 0], ids[ids > 0]

    def reach(self) -> tuple[int, ...]:
        """Return how far a voxel has neighbours on each axis."""
        return tuple(max(abs(offset[axis]) for offset in self.offsets) for axis in range(3))


def by_boxes(graph: Fragmented, choice: ObjectRules, edge: int) -> tuple[np.ndarray, list[Solved]]:
    """Return the label of each fragment, in the order of `table`, and every solved box."""
    boxes = Boxes(graph.blocks, edge)
    solved: list[Solved] = []
    blocks = [graph.part(block) for block in range(len(graph.blocks))]
    for unit in range(len(boxes)):
        frame = Frame(boxes.box(unit), graph.ids.shape, graph.reach(), lambda n, unit=unit: boxes.has_blocks(unit, n))
        children = boxes.children(unit)
        parts = [solved[c].rest if boxes.level(unit) else blocks[c] for c in children]
        solved.append(solve(GraphPart.joined(parts), frame, choice))
    firsts = np.sort(np.concatenate([each.objects[:, 1] for each in solved]))
    names: dict[int, np.ndarray] = {len(boxes) - 1: np.zeros(0, np.int64)}
    labels: dict[int, np.ndarray] = {}
    for unit in reversed(range(len(boxes))):
        each = solved[unit]
        final = 1 + np.searchsorted(firsts, each.objects[:, 1])
        own = np.concatenate([[0], final, names[unit]])
        found = own[
            np.where(each.target < -len(own), 0, np.where(each.target < 0, -each.target, each.target + 1 + len(final)))
        ]
        children = boxes.children(unit)
        sizes = [len(solved[c].rest.table) if boxes.level(unit) else len(blocks[c].table) for c in children]
        for child, part in zip(children, np.split(found, np.cumsum(sizes)[:-1]), strict=True):
            (names if boxes.level(unit) else labels)[child] = part
    return np.concatenate([labels[block] for block in range(len(graph.blocks))]), solved


def in_one_piece(graph: Fragmented, choice: ObjectRules) -> np.ndarray:
    """Return the label of each fragment, in the order of `table`."""
    table, ids = graph.table()
    num, firsts = len(ids), table[:, 1]
    rows = np.searchsorted(ids, graph.joined)
    owner = _components(num, rows, firsts)
    if choice.method == "watershed":
        edges: dict[tuple[int, int], list[list[int]]] = {}
        for channel in range(len(graph.offsets)):
            for a, b, value, number in zip(*(x.tolist() for x in graph.contacts(channel)), strict=True):
                low, high = sorted((int(owner[np.searchsorted(ids, a)]), int(owner[np.searchsorted(ids, b)])))
                if low != high:
                    edges.setdefault((low, high), [[], []])[channel >= len(NEAR)].append((value, number))
        sizes = np.bincount(owner, table[:, 0]).astype(int).tolist()
        links = best_first(edges, choice, sizes) if choice.agglomerate == "mean" else mutex(edges, choice)
        owner = _components(owner.max(initial=-1) + 1, np.array(links, np.int64).reshape(-1, 2), np.arange(num))[owner]
    voxels = np.bincount(owner, table[:, 0])
    order = sorted(range(len(voxels)), key=lambda o: firsts[owner == o].min())
    large = [o for o in order if voxels[o] >= choice.min_voxels]
    return np.array([large.index(o) + 1 if o in large else 0 for o in owner.tolist()])


def best_first(edges: dict, choice: ObjectRules, sizes: list[int]) -> list[tuple[int, int]]:
    """Return the pairs that are merged: always the highest mean of all, of equal ones that of the first voxels.

    Below the threshold one of both must be small as it is then.
    """
    between = {
        p: (sum(v for v, _ in near), len(near), min(n for _, n in near)) for p, (near, _) in edges.items() if near
    }
    links = []

    def may_merge(pair: tuple[int, int]) -> bool:
        is_small = min(sizes[c] for c in pair) < choice.small_voxels
        return between[pair][0] / between[pair][1] / 255 >= (choice.small_threshold if is_small else choice.threshold)

    while mergeable := [p for p in between if may_merge(p)]:
        pair = max(mergeable, key=lambda p: (Fraction(between[p][0], between[p][1]), -between[p][2]))
        links.append(pair)
        sizes[pair[0]] += sizes[pair[1]]
        left: dict[tuple[int, int], tuple[int, int, int]] = {}
        for (a, b), (total, count, number) in between.items():
            low, high = sorted(pair[0] if c == pair[1] else c for c in (a, b))
            if low != high:
                t, c, n = left.get((low, high), (0, 0, 2**63))
                left[low, high] = t + total, c + count, min(n, number)
        between = left
    return links


def mutex(edges: dict, choice: ObjectRules) -> list[tuple[int, int]]:
    """Return the pairs that are merged by mwatershed, in the order of weights, then of first voxels."""
    ordered = []
    for pair, kinds in edges.items():
        for kind, voxels in enumerate(kinds):
            if not voxels:
                continue
            mean = sum(v for v, _ in voxels) / len(voxels) / 255
            weight = mean - choice.threshold if not kind else choice.far_threshold - mean
            if weight > 0:
                ordered.append((-weight, min(n for _, n in voxels), (not kind, *pair)))
    ordered.sort()
    return mwatershed.cluster([edge for *_, edge in ordered]) if ordered else []


def _components(num: int, joins: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    graph = coo_array((np.ones(len(joins)), (joins[:, 0], joins[:, 1])), shape=(num, num))
    found = csgraph.connected_components(graph, directed=False)[1]
    leaders = sorted(set(found.tolist()), key=lambda c: firsts[: len(found)][found == c].min())
    rank = {c: i for i, c in enumerate(leaders)}
    return np.array([rank[c] for c in found.tolist()], np.int64)
