"""The graph of a segmentation, solved box by box: fragments joined to supervoxels, these agglomerated to objects.

Not here: how supervoxels are agglomerated (agglomerate), or files (tasks). A box is solved from what its parts handed
up. What lies at its faces is open: it may go on outside. An object that can grow no more is final and stays behind, the
rest is handed up as a smaller graph. The whole volume has no such faces, and leaves nothing::

    box 0       | box 1          a is final in box 0, d in box 1. b and c touch the face: they are handed up, and with
    ( a )   ( b | c )   ( d )    them what may still be merged with them. In both boxes together they become one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box, Shape
from volpipe.recipes.segmentation import Objects
from volpipe.segmentation.agglomerate import NO_PAIR, Edges, agglomerate, connected_components, rule_of
from volpipe.segmentation.boxes import border

FIRST = 1  # column of a table: number of the first voxel
LEAST, MOST = slice(2, 5), slice(5, 8)
NO_OBJECT = np.iinfo(np.int64).min
# Upper bounds, of tables and working memory; 0.4 of them were measured, 1.0 where all were merged one by one, 2026-11.
NODE_BYTES, JOIN_BYTES = 400, 64
EDGE_BYTES = {"mean": 1050, "mutex": 1050}


@dataclass(frozen=True)
class Part:
    """The undecided part of the graph of a box; of a block, all of it.

    Nodes are numbered from 0. In `joins` and `pairs` a node n is ~n, and a fragment its id, which is above 0.

    Attributes:
        table: (nodes, columns), int64: as in Fragments.
        ids: (fragments,), int64: those that neighbours may name, block << 32 | id.
        nodes: (fragments,), int64: the node of each.
        bounds: (fragments, 6), int64: the first and the last z, y, x of each.
        joins: (joins, 2), int64: of one supervoxel.
        pairs, sums, first: as in Edges.
    """

    table: np.ndarray
    ids: np.ndarray
    nodes: np.ndarray
    bounds: np.ndarray
    joins: np.ndarray
    pairs: np.ndarray
    sums: np.ndarray
    first: np.ndarray

    @classmethod
    def from_block(
        cls, block: int, table: np.ndarray, joins: np.ndarray, pairs: np.ndarray, sums: np.ndarray, first: np.ndarray
    ) -> Part:
        """Return the graph of a block, whose joins and pairs are of fragments by their ids."""
        number = np.arange(len(table))
        return cls(table, (block << 32) + 1 + number, number, table[:, 2:8], joins, pairs, sums, first)

    @classmethod
    def joined(cls, parts: Sequence[Part]) -> Part:
        """Return the graphs of several boxes as one, its nodes in their order."""
        bases = np.cumsum([0, *(len(part.table) for part in parts[:-1])]).tolist()
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("table", "ids", "bounds", "sums", "first")
        }
        columns["nodes"] = np.concatenate([part.nodes + base for part, base in zip(parts, bases, strict=True)])
        for name in ("joins", "pairs"):
            ends = zip((getattr(part, name) for part in parts), bases, strict=True)
            columns[name] = np.concatenate([np.where(values < 0, values - base, values) for values, base in ends])
        return cls(**columns)


@dataclass(frozen=True)
class Solved:
    """A solved box.

    Attributes:
        rest: what is handed up.
        target: (nodes,), int64: the node of `rest` that each became; ~n of object n; NO_OBJECT of one that
            is too small.
        objects: (objects, columns), int64: the table of the final objects, in the order of their first voxels.
    """

    rest: Part
    target: np.ndarray
    objects: np.ndarray


@dataclass(frozen=True)
class Frame:
    """Where a graph lies.

    Attributes:
        box: of the graph, in voxels (z, y, x).
        shape: of the volume.
        reach: how far from a face in voxels (z, y, x) a fragment may have a neighbour beyond it.
        has_blocks: tells of numbers of blocks whether they lie in `box`.
    """

    box: Box
    shape: Shape
    reach: Shape
    has_blocks: Callable[[np.ndarray], np.ndarray]

    def is_border(self, bounds: np.ndarray) -> np.ndarray:
        """Return for each of `bounds`, as in Part, whether it may have neighbours outside."""
        return border(bounds, self.box, self.shape, self.reach)


def solve(part: Part, frame: Frame, choice: Objects) -> Solved:
    """Return the final objects of a box, and what is handed up.

    Args:
        part: its graph, as blocks or smaller boxes handed it up.
        frame: where it lies.
        choice: how supervoxels become objects.

    Raises:
        ValueError: the graph names a fragment of the box that it lacks.
    """
    graph = _Graph.of(part, frame)
    num = len(part.table)
    owner = _supervoxels(graph)
    rows = add_up(owner[:num], part.table)
    is_open = np.ones(len(rows) + len(graph.outside), bool)
    is_open[: len(rows)] = frame.is_border(rows[:, 2:8])
    edges = Edges.total(owner[graph.pairs], part.sums, part.first)
    is_kept = is_open.copy()
    if choice.method == "watershed":
        rule = rule_of(choice)
        merged, edges = agglomerate(len(is_open), edges, rule, is_open)
        owner, rows = merged[owner], add_up(merged[: len(rows)], rows)
        is_kept = np.zeros(len(rows) + len(graph.outside), bool)
        is_kept[merged] = is_open
        is_kept[edges.pairs[rule.is_live(edges)]] = True
    return _split(graph, frame, rows, owner, is_kept, edges, choice.min_voxels)


@dataclass(frozen=True)
class _Graph:
    """The graph of a box: its nodes, and after them the fragments `outside`, by their ids."""

    part: Part
    outside: np.ndarray
    joins: np.ndarray
    pairs: np.ndarray

    @classmethod
    def of(cls, part: Part, frame: Frame) -> _Graph:
        order = np.argsort(part.ids)
        outside, (joins, pairs) = _numbered(
            (part.joins, part.pairs), part.ids[order], part.nodes[order], len(part.table)
        )
        if frame.has_blocks(outside >> 32).any():
            raise ValueError(f"a fragment of {frame.box} is named by a neighbour, and is not there: scratch is damaged")
        return cls(part, outside, joins, pairs)


def _numbered(
    ends: Sequence[np.ndarray], ids: np.ndarray, nodes: np.ndarray, num: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the fragments of `ends` that are not among `ids`, and `ends` as nodes, of these from `num` on."""
    places = [np.minimum(np.searchsorted(ids, each), max(0, len(ids) - 1)) for each in ends]
    is_id = [(each > 0) & (ids[place] == each if len(ids) else False) for each, place in zip(ends, places, strict=True)]
    lacks = [(each > 0) & ~known for each, known in zip(ends, is_id, strict=True)]
    outside = np.unique(np.concatenate([each[lack] for each, lack in zip(ends, lacks, strict=True)]))
    numbers = []
    for each, place, known, lack in zip(ends, places, is_id, lacks, strict=True):
        result = ~each
        result[known] = nodes[place[known]]
        result[lack] = num + np.searchsorted(outside, each[lack])
        numbers.append(result)
    return outside, numbers


def _supervoxels(graph: _Graph) -> np.ndarray:
    """Return the supervoxel of each node in the order of their first voxels; fragments outside follow, unjoined."""
    num = len(graph.part.table)
    first = np.concatenate([graph.part.table[:, FIRST], np.full(len(graph.outside), NO_PAIR)])
    return connected_components(len(first), graph.joins[(graph.joins < num).all(axis=1)], first)


def _split(
    graph: _Graph, frame: Frame, rows: np.ndarray, owner: np.ndarray, is_kept: np.ndarray, edges: Edges, min_voxels: int
) -> Solved:
    """Return the box, of which the owners that `is_kept` are handed up."""
    num = len(rows)
    target = np.full(num, NO_OBJECT)
    kept = np.flatnonzero(is_kept[:num])
    target[kept] = np.arange(len(kept))
    final = np.flatnonzero(~is_kept[:num] & (rows[:, 0] >= min_voxels))
    final = final[np.argsort(rows[final, FIRST], kind="stable")]
    target[final] = ~np.arange(len(final))
    names = np.concatenate([~target, graph.outside])  # in which a kept node n is ~n
    edges = edges[is_kept[edges.pairs].all(axis=1)]
    joins = owner[graph.joins]
    joins = np.unique(joins[joins.max(axis=1, initial=0) >= num], axis=0) if len(joins) else joins
    part, at_border = graph.part, frame.is_border(graph.part.bounds)
    nodes = target[owner[part.nodes[at_border]]]
    rest = Part(
        rows[kept], part.ids[at_border], nodes, part.bounds[at_border], names[joins],
        names[edges.pairs], edges.sums, edges.first,
    )  # fmt: skip
    return Solved(rest, target[owner[: len(part.table)]], rows[final])


def add_up(owner: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the table of the owners of the rows of `table`; `owner` (rows,) counts from 0, each has a row."""
    if not len(owner):
        return table
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(int(owner.max()) + 1))
    table = table[order]
    rows = np.add.reduceat(table, starts, axis=0)
    for columns, extreme in (
        (slice(FIRST, FIRST + 1), np.minimum),
        (LEAST, np.minimum),
        (MOST, np.maximum),
    ):
        rows[:, columns] = extreme.reduceat(table[:, columns], starts, axis=0)
    return rows


def bytes_needed(num_nodes: int, num_joins: int, num_edges: int, choice: Objects) -> int:
    """Return an upper bound of the memory of `solve`, in bytes."""
    edge = EDGE_BYTES[choice.agglomerate] if choice.method == "watershed" else 0
    return num_nodes * NODE_BYTES + num_joins * JOIN_BYTES + num_edges * edge
