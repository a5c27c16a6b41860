"""The graph of a segmentation, solved box by box: fragments joined to supervoxels, these agglomerated to objects.

Not here: how supervoxels are agglomerated (agglomerate), or files (tasks). A box is solved from what its parts handed
up. What lies at its faces is open: it may go on outside. An object that can grow no more is final and stays behind, the
rest is handed up as a smaller graph. The whole volume has no such faces, and leaves nothing::

    box 0       | box 1          a is final in box 0, d in box 1. b and c touch the face: they are handed up, and with
    ( a )   ( b | c )   ( d )    them what may still be merged with them. In both boxes together they become one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from volpipe.geometry.grid import Box, Shape
from volpipe.recipes.segmentation import ObjectRules
from volpipe.segmentation.agglomerate import BATCH, ONE_BY_ONE_BYTES, agglomerate, connected_components, rule_of
from volpipe.segmentation.boxes import border
from volpipe.segmentation.edges import NO_PAIR, Edges
from volpipe.segmentation.stitch import stitched

FIRST = 1  # column of a table: number of the first voxel
LEAST, MOST = (FIRST, 2, 3, 4), (5, 6, 7)
NO_OBJECT = np.iinfo(np.int64).min
# Upper bounds, of tables and working memory, measured on lattices, 2026-11 (tests/segmentation/test_solve.py).
NODE_BYTES, JOIN_BYTES = 250, 112
EDGE_BYTES = {"mean": 300, "mutex": 520}


@dataclass(frozen=True)
class GraphPart:
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
    ) -> GraphPart:
        """Return the graph of a block, whose joins and pairs are of fragments by their ids."""
        number = np.arange(len(table))
        return cls(table, (block << 32) + 1 + number, number, table[:, 2:8], joins, pairs, sums, first)

    @classmethod
    def joined(cls, parts: Iterable[GraphPart]) -> GraphPart:
        """Return the graphs of several boxes as one, its nodes in their order.

        The columns of parts that nobody else holds are freed one after the other.
        """
        each, base = [dict[str, np.ndarray](vars(part)) for part in parts], 0
        for columns in each:
            num = len(columns["table"])
            if base:
                columns["nodes"] = columns["nodes"] + base
                for name in ("joins", "pairs"):
                    columns[name] = np.where(columns[name] < 0, columns[name] - base, columns[name])
            base += num
        return cls(**{name: np.concatenate([columns.pop(name) for columns in each]) for name in list(each[0])})


@dataclass(frozen=True)
class Solved:
    """A solved box.

    Attributes:
        rest: what is handed up.
        target: (nodes,), int64: the node of `rest` that each became; ~n of object n; NO_OBJECT of one that
            is too small.
        objects: (objects, columns), int64: the table of the final objects, in the order of their first voxels.
    """

    rest: GraphPart
    target: np.ndarray
    objects: np.ndarray


@dataclass(frozen=True)
class Frame:
    """Where a graph lies.

    Attributes:
        box: of the graph, in voxels (z, y, x).
        shape: of the volume.
        reach: how far from a face in voxels (z, y, x) a fragment may have a neighbour beyond it.
        has_blocks: returns for numbers of blocks whether they lie in `box`.
    """

    box: Box
    shape: Shape
    reach: Shape
    has_blocks: Callable[[np.ndarray], np.ndarray]

    def is_border(self, bounds: np.ndarray) -> np.ndarray:
        """Return for each of `bounds`, as in GraphPart, whether it may have neighbours outside."""
        return border(bounds, self.box, self.shape, self.reach)


def solve(part: GraphPart, frame: Frame, choice: ObjectRules, *, most_edges: int = NO_PAIR) -> Solved:
    """Return the final objects of a box, and what is handed up.

    Args:
        part: its graph, as blocks or smaller boxes handed it up.
        frame: where it lies.
        choice: how supervoxels become objects.
        most_edges: as of `agglomerate`.

    Raises:
        ValueError: the graph names a fragment of the box that it lacks.
        PlanError: see `agglomerate`.
    """
    columns = dict(vars(part))
    del part  # of a large box, most of the memory
    graph, edges = _Graph.of(columns, frame)
    is_open = np.ones(graph.num_owners, bool)
    is_open[: len(graph.rows)] = frame.is_border(graph.rows[:, 2:8])
    if not choice.has_edges:
        return _split(graph, edges, is_open, choice.min_voxels)
    if choice.stitch:
        merged, edges = stitched(edges, choice.stitch, is_open, graph.voxels)
        graph, live = graph.merged(merged), np.ones(len(edges), bool)
    else:
        rule = rule_of(choice)
        merged, edges = agglomerate(edges, rule, is_open, graph.voxels, most_edges=most_edges)
        graph = graph.merged(merged)
        live = rule.is_live(edges, graph.voxels)
    is_kept = np.zeros(graph.num_owners, bool)
    is_kept[merged] = is_open
    is_kept[edges.pairs[live]] = True
    return _split(graph, edges, is_kept, choice.min_voxels)


@dataclass(frozen=True)
class _Graph:
    """The nodes of a box, and after them the fragments `outside`, which own themselves.

    Attributes:
        rows: (owners, columns), int64: the table of the supervoxels or objects that own the nodes.
        owner: (nodes and fragments outside,), int64: the owner of each.
        outside: (fragments,), int64: their ids, ascending.
        joins: (joins, 2), int64: of one supervoxel, by number.
        ids, nodes, bounds: as in GraphPart, of the fragments at the faces of the box.
    """

    rows: np.ndarray
    owner: np.ndarray
    outside: np.ndarray
    joins: np.ndarray
    ids: np.ndarray
    nodes: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, columns: dict[str, np.ndarray], frame: Frame) -> tuple[_Graph, Edges]:
        """Return the supervoxels of a part, whose columns it takes out one by one, and the edges between them."""
        table, ids, nodes, bounds = (columns.pop(name) for name in ("table", "ids", "nodes", "bounds"))
        order, num = np.argsort(ids), len(table)
        ends = columns.pop("joins"), columns.pop("pairs")
        outside, (joins, columns["pairs"]) = _numbered(ends, ids[order], nodes[order], num)
        del ends
        if frame.has_blocks(outside >> 32).any():
            raise ValueError(f"a fragment of {frame.box} is named by a neighbour, and is not there: scratch is damaged")
        first = np.concatenate([table[:, FIRST], np.full(len(outside), NO_PAIR)])
        owner = connected_components(len(first), joins[(joins < num).all(axis=1)], first)
        at_border = frame.is_border(bounds)
        graph = cls(
            add_up(owner[:num], table), owner, outside, joins, ids[at_border], nodes[at_border], bounds[at_border]
        )
        del table, ids, nodes, bounds
        columns["pairs"] = owner[columns["pairs"]]
        return graph, Edges.total(*(columns.pop(name) for name in ("pairs", "sums", "first")))

    @property
    def num_owners(self) -> int:
        """Owners of nodes, and fragments outside."""
        return len(self.rows) + len(self.outside)

    @property
    def voxels(self) -> np.ndarray:
        """The voxels (owners,), int64, of each owner; fragments outside have 0, which are not known."""
        return np.concatenate([self.rows[:, 0], np.zeros(len(self.outside), np.int64)])

    def merged(self, owner: np.ndarray) -> _Graph:
        """Return the graph in which the owners have an `owner` themselves; fragments outside stay alone."""
        return replace(self, rows=add_up(owner[: len(self.rows)], self.rows), owner=owner[self.owner])


def _numbered(
    ends: Sequence[np.ndarray], ids: np.ndarray, nodes: np.ndarray, num: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the fragments of `ends` that are not among `ids`, and `ends` as nodes, of these from `num` on."""
    names = [each[each > 0] for each in ends]
    places = [np.minimum(np.searchsorted(ids, each), max(0, len(ids) - 1)) for each in names]
    lacks = [ids[place] != each if len(ids) else each > 0 for each, place in zip(names, places, strict=True)]
    outside = np.unique(np.concatenate([each[lack] for each, lack in zip(names, lacks, strict=True)]))
    numbers = []
    for each, name, place, lack in zip(ends, names, places, lacks, strict=True):
        number = nodes[place] if len(ids) else place
        number[lack] = num + np.searchsorted(outside, name[lack])
        result = ~each
        result[each > 0] = number
        numbers.append(result)
    return outside, numbers


def _split(graph: _Graph, edges: Edges, is_kept: np.ndarray, min_voxels: int) -> Solved:
    """Return the box, of which the owners that `is_kept` are handed up."""
    rows, num = graph.rows, len(graph.rows)
    target = np.full(num, NO_OBJECT)
    kept = np.flatnonzero(is_kept[:num])
    target[kept] = np.arange(len(kept))
    final = np.flatnonzero(~is_kept[:num] & (rows[:, 0] >= min_voxels))
    final = final[np.argsort(rows[final, FIRST], kind="stable")]
    target[final] = ~np.arange(len(final))
    names = np.concatenate([~target, graph.outside])  # in which a kept node n is ~n
    edges = edges[edges.both_ends(is_kept)]
    joins = graph.owner[graph.joins]
    joins = np.unique(joins[joins.max(axis=1, initial=0) >= num], axis=0) if len(joins) else joins
    target = target[graph.owner[: len(graph.owner) - len(graph.outside)]]
    rest = GraphPart(
        rows[kept],
        graph.ids,
        target[graph.nodes],
        graph.bounds,
        names[joins],
        names[edges.pairs],
        edges.sums,
        edges.first,
    )
    return Solved(rest, target, rows[final])


def add_up(owner: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the table of the owners of the rows of `table`; `owner` (rows,) counts from 0, each has a row."""
    if not len(owner):
        return table
    order = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rows = np.empty((len(starts), table.shape[1]), table.dtype)
    for column in range(table.shape[1]):
        extreme = np.minimum if column in LEAST else np.maximum if column in MOST else np.add
        extreme.reduceat(table[:, column][order], starts, out=rows[:, column])
    return rows


def bytes_needed(num_nodes: int, num_joins: int, num_edges: int, choice: ObjectRules) -> int:
    """Return an upper bound of the memory of `solve`, in bytes, if few nodes in a row are merged one by one."""
    if not choice.has_edges:
        return num_nodes * NODE_BYTES + num_joins * JOIN_BYTES
    edges = num_edges * EDGE_BYTES[choice.agglomerate] + min(num_edges, BATCH) * ONE_BY_ONE_BYTES
    return num_nodes * NODE_BYTES + num_joins * JOIN_BYTES + edges
