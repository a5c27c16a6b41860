"""Agglomeration: supervoxels merged to objects along the edges between them, all of them or those of a box.

Not here: fragments, supervoxels and boxes (solve), or files (tasks). A node that is open may have edges that are
not known yet. It is merged with nothing, and nothing is merged that its edges may still change: a merge is made only
along the edge that is the best of both its ends, of which all edges are known. What follows from it is the same
wherever the border lies:

    mean   the mean of two edges that become one lies between theirs, so that no edge becomes better by a merge. Two
           that are each other's best stay that until they are merged (reciprocal nearest neighbours, Murtagh 1983).
    mutex  edges keep their weights. When the turn of an edge comes that is the best of both ends, these have been
           merged with nothing since, and a heavier edge that forbids lies between the two themselves or nowhere.

With a mean, smaller objects may join below the threshold (`small_voxels`). Nodes only grow: of two large ones whose
edge is below the threshold, none becomes small again, and what their edge is summed with stays below and between large
ones. So no edge becomes better, and no merge possible, by another merge.

The order of edges is total: of equal means or weights the edge of the first pair of voxels in C order is the best, and
an edge that two become has the earlier of their pairs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from volpipe.errors import PlanError
from volpipe.recipes.segmentation import ObjectRules
from volpipe.segmentation.boundary_maps import FULL
from volpipe.segmentation.edges import NO_PAIR, Edges, grouped

FEW = 0.01  # share of active nodes: below it, merging one by one is faster than all at once
BATCH = 100_000  # edges between nodes that are merged one by one at a time, about: a GB has a million
ONE_BY_ONE_BYTES = 1050  # of each; 0.85 of it was measured, 2026-11
MOST_FLOAT = 1 << 23  # pairs of voxels of all edges: two means, up to 255, differ by 2**-44 or more, floats by 2**-45
BITS = 31  # of a part of a mean: two means with fewer than 2**31 pairs of voxels differ in twice as many bits


Key = Callable[[Edges], np.ndarray]


@dataclass(frozen=True)
class Mean:
    """Mean agglomeration: the highest mean first, while it reaches the threshold; edges to one neighbour are summed.

    Below the threshold, down to `small_threshold`, a node of fewer than `small_voxels` is merged still.
    """

    threshold: float
    small_voxels: int
    small_threshold: float

    def prepared(self, edges: Edges, is_open: np.ndarray) -> tuple[Edges, np.ndarray]:
        """Return the edges that matter, and the nodes that may not be merged."""
        return edges[edges.sums[:, 1] > 0], is_open

    def is_live(self, edges: Edges, voxels: np.ndarray) -> np.ndarray:
        """Return the edges along which nodes of so many `voxels` (nodes,) may be merged; open nodes have more."""
        mean = mean_of(edges.sums)
        is_live = mean >= self.threshold
        if self.small_voxels:
            is_live |= edges.any_end(voxels < self.small_voxels) & (mean >= self.small_threshold)
        return np.asarray(is_live)

    @property
    def keys(self) -> Sequence[Key]:
        """The order of edges, the highest first, by the first key, then the next: means as floats, then exact."""
        return (
            lambda edges: np.asarray(edges.sums[:, 0] / edges.sums[:, 1]),  # never in another order by rounding
            lambda edges: _exact_means(edges)[0],
            lambda edges: _exact_means(edges)[1],
            lambda edges: -edges.first[:, 0],
        )

    def merged(self, edges: Edges, owner: np.ndarray) -> Edges:
        """Return the edges between the owners of nodes, in any order; those of nodes that stay alone are as they were.

        Owners are in the order of their first nodes.
        """
        has_moved = edges.any_end(np.bincount(owner)[owner] > 1)
        rest, moved = edges[~has_moved], edges[has_moved]
        return Edges.joined(
            replace(rest, pairs=owner[rest.pairs]), Edges.total(owner[moved.pairs], moved.sums, moved.first)
        )

    def joined(self, edges: Edges, owner: np.ndarray, is_locked: np.ndarray) -> Edges:
        """Return the edges between the owners of nodes, of which the locked ones own themselves alone."""
        return Edges.total(owner[edges.pairs], edges.sums, edges.first)

    def one_by_one(self, edges: Edges, is_active: np.ndarray, voxels: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the pairs to be merged, of active nodes; a node whose best edge leads to another is active no more."""
        around, is_free, size = _edges_by_node(edges, is_active), is_active.tolist(), voxels.tolist()
        place = _exact if edges.sums[:, 1].sum() >= MOST_FLOAT else _rounded
        live = edges[self.is_live(edges, voxels)]
        columns = zip(*(column.tolist() for column in _edge_columns(live)), strict=True)
        heap = [(*place(total, count, first), a, b) for a, b, total, count, first in columns]
        heapq.heapify(heap)
        while heap:
            mean, first, a, b = heapq.heappop(heap)
            known = around.get(a, {}).get(b) or around.get(b, {}).get(a)
            if known is None or place(*known) != (mean, first):
                continue  # stale: one of the two was merged, or their edge changed
            if known[0] / known[1] / FULL < self._least_mean(size[a], size[b]):
                continue  # both have become large
            if not (is_free[a] and is_free[b]):
                is_free[a] = is_free[b] = False
                continue
            yield a, b
            keep, drop = (a, b) if len(around[a]) >= len(around[b]) else (b, a)
            size[keep] += size[drop]
            for c in _absorb(around, keep, drop):
                total, count, first = around[keep][c]
                if total / count / FULL >= self._least_mean(size[keep], size[c]):
                    heapq.heappush(heap, (*place(total, count, first), keep, c))

    def _least_mean(self, voxels: int, others: int) -> float:
        """Return the least mean by which two nodes of so many voxels are merged."""
        return self.small_threshold if min(voxels, others) < self.small_voxels else self.threshold


Around = dict[int, dict[int, tuple[int, int, int]]]


def _edge_columns(edges: Edges) -> tuple[np.ndarray, ...]:
    """Return both nodes, sum and number of the nearest affinities, and first pair of each edge."""
    return *edges.pairs.T, *edges.sums[:, :2].T, edges.first[:, 0]


def _exact_means(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of the nearest affinities of each edge, in two parts of which the first counts more."""
    total, count = edges.sums[:, 0], edges.sums[:, 1]
    whole, rest = np.divmod(total, count)
    high, rest = np.divmod(rest << BITS, count)
    return (whole << BITS) | high, (rest << BITS) // count


def _exact(total: int, count: int, first: int) -> tuple[float, int]:
    """Return the place of an edge in the order of `Mean.keys`, the best first."""
    return -((total << 2 * BITS) // count), first


def _rounded(total: int, count: int, first: int) -> tuple[float, int]:
    """Return the same for fewer than `MOST_FLOAT` pairs of voxels, of which two means never round to one float."""
    return -total / count, first


def _edges_by_node(edges: Edges, is_active: np.ndarray) -> Around:
    """Return the edges of each active node."""
    around: Around = {node: {} for node in np.flatnonzero(is_active).tolist()}
    first, second, *columns = (column.tolist() for column in _edge_columns(edges))
    for a, b, edge in zip(first, second, zip(*columns, strict=True), strict=True):
        for here, there in ((a, b), (b, a)):
            if here in around:
                around[here][there] = edge
    return around


def _absorb(around: Around, keep: int, drop: int) -> Iterator[int]:
    """Merge `drop` into `keep`, and yield the neighbours whose edges changed."""
    own = around[keep]
    del own[drop], around[drop][keep]
    for c, edge in around.pop(drop).items():
        if before := own.get(c):
            edge = before[0] + edge[0], before[1] + edge[1], min(before[2], edge[2])
        own[c] = edge
        if beyond := around.get(c):
            del beyond[drop]
            beyond[keep] = edge
        yield c


@dataclass(frozen=True)
class Mutex:
    """Mutex watershed (Wolf et al. 2018): near edges above a threshold join, far ones below another forbid.

    The one farthest from its threshold comes first. Of edges between the same two, the best of each kind counts.
    """

    threshold: float
    far_threshold: float

    def prepared(self, edges: Edges, is_open: np.ndarray) -> tuple[Edges, np.ndarray]:
        """Return the edges that matter, and the nodes that may not be merged.

        Those are the neighbours of open nodes too: an edge that grows yet has no weight that may be kept for a group.
        """
        is_locked = is_open.copy()
        is_locked[edges.pairs[edges.any_end(is_open)]] = True
        return self._effective(edges, is_open), is_locked

    def is_live(self, edges: Edges, voxels: np.ndarray) -> np.ndarray:
        """Return the edges along which nodes may be merged, whatever their `voxels`."""
        return np.asarray(edges.sums[:, 1] > 0)

    @property
    def keys(self) -> Sequence[Key]:
        """The order of edges, the highest first, by the first key, then the next."""
        return self._pulls, lambda edges: -edges.first[:, 0]

    def merged(self, edges: Edges, owner: np.ndarray) -> Edges:
        """Return the edges between the owners of nodes, none of which is open."""
        kinds = [self._best(edges, owner, kind) for kind in (0, 1)]
        return self._effective(Edges.total(*(np.concatenate(parts) for parts in zip(*kinds, strict=True))), None)

    def one_by_one(self, edges: Edges, is_active: np.ndarray, voxels: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield the pairs to be merged, of active nodes; a node whose best edge leads to another is active no more."""
        owner, is_free = list(range(len(is_active))), is_active.tolist()
        foes: list[set[int]] = [set() for _ in owner]

        def root(node: int) -> int:
            while owner[node] != node:
                owner[node] = node = owner[owner[node]]
            return node

        for joins, a, b in self._in_order(edges):
            here, there = root(a), root(b)
            if here == there or there in foes[here]:
                continue
            if not joins:
                foes[here].add(there)
                foes[there].add(here)
            elif not (is_free[here] and is_free[there]):
                is_free[here] = is_free[there] = False
            else:
                yield here, there
                keep, drop = (here, there) if len(foes[here]) >= len(foes[there]) else (there, here)
                owner[drop] = keep
                for foe in foes[drop]:
                    foes[foe].remove(drop)
                    foes[foe].add(keep)
                foes[keep] |= foes[drop]

    def joined(self, edges: Edges, owner: np.ndarray, is_locked: np.ndarray) -> Edges:
        """Return the edges between the owners of nodes, of which the locked ones own themselves alone."""
        is_between_locked = edges.both_ends(is_locked)
        rest, own = edges[is_between_locked], self.merged(edges[~is_between_locked], owner)
        pairs = np.concatenate([owner[rest.pairs], own.pairs])
        sums, first = np.concatenate([rest.sums, own.sums]), np.concatenate([rest.first, own.first])
        return Edges.total(pairs, sums, first)

    def _in_order(self, edges: Edges) -> list[tuple[bool, int, int]]:
        """Return whether each edge joins, and its nodes, the edge farthest from its threshold first."""
        near, far = edges.sums[:, 1] > 0, edges.sums[:, 3] > 0
        joins = np.repeat([True, False], [near.sum(), far.sum()])
        weight = np.concatenate([self._pulls(edges)[near], self._pushes(edges)[far]])
        first = np.concatenate([edges.first[near, 0], edges.first[far, 1]])
        pairs = np.concatenate([edges.pairs[near], edges.pairs[far]])
        order = np.lexsort((first, -weight))
        return list(zip(joins[order].tolist(), *pairs[order].T.tolist(), strict=True))

    def _effective(self, edges: Edges, is_open: np.ndarray | None) -> Edges:
        """Return `edges` without what has no effect, but for those of open nodes, which may grow."""
        pull, push = self._pulls(edges), self._pushes(edges)
        joins, forbids = (edges.sums[:, 1] > 0) & (pull > 0), (edges.sums[:, 3] > 0) & (push > 0)
        is_later = (push > pull) | ((push == pull) & (edges.first[:, 1] < edges.first[:, 0]))
        joins &= ~(forbids & is_later)
        if is_open is not None:
            grows = edges.any_end(is_open)
            joins, forbids = joins | grows, forbids | grows
        kept = np.stack([joins, forbids], axis=1)
        sums, first = np.where(np.repeat(kept, 2, axis=1), edges.sums, 0), np.where(kept, edges.first, NO_PAIR)
        return Edges(edges.pairs, sums, first)[joins | forbids]

    def _best(self, edges: Edges, owner: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return pairs, sums and first pairs of the best edge of a `kind` between any two owners."""
        edges = edges[edges.sums[:, 2 * kind + 1] > 0]
        weight = self._pushes(edges) if kind else self._pulls(edges)
        order, pairs, starts = grouped(*owner[edges.pairs].T, -weight, edges.first[:, kind])
        best = edges.take(order[starts])
        sums, first = np.zeros_like(best.sums), np.full_like(best.first, NO_PAIR)
        sums[:, 2 * kind : 2 * kind + 2] = best.sums[:, 2 * kind : 2 * kind + 2]
        first[:, kind] = best.first[:, kind]
        return pairs, sums, first

    def _pulls(self, edges: Edges) -> np.ndarray:
        return np.asarray(mean_of(edges.sums) - self.threshold)

    def _pushes(self, edges: Edges) -> np.ndarray:
        return np.asarray(self.far_threshold - mean_of(edges.sums[:, 2:]))


Rule = Mean | Mutex


def rule_of(choice: ObjectRules) -> Rule:
    """Return how supervoxels are agglomerated."""
    if choice.agglomerate == "mean":
        return Mean(choice.threshold, choice.small_voxels, choice.small_threshold)
    return Mutex(choice.threshold, choice.far_threshold)


def mean_of(sums: np.ndarray) -> np.ndarray:
    """Return the mean affinity (edges,), 0 to 1, of sums and numbers as in Edges."""
    return np.asarray(sums[:, 0] / np.maximum(sums[:, 1], 1) / FULL)


def agglomerate(
    edges: Edges, rule: Rule, is_open: np.ndarray, voxels: np.ndarray, *, most_edges: int = NO_PAIR
) -> tuple[np.ndarray, Edges]:
    """Return the owner (nodes,), from 0, of each node, and the edges that matter between owners.

    Owners are in the order of their first nodes.

    Args:
        edges: between the nodes.
        rule: how they are merged.
        is_open: (nodes,), bool; open nodes own themselves alone.
        voxels: (nodes,), int64: of each; of an open node those that are known.
        most_edges: that may be held to merge nodes one by one, about `ONE_BY_ONE_BYTES` each.

    Raises:
        PlanError: more edges lie between nodes of which each merge decides the next.
    """
    num = len(is_open)
    edges, is_locked = rule.prepared(edges, is_open)
    links = np.concatenate([np.zeros((0, 2), np.int64), *_links(edges, rule, ~is_locked, voxels, most_edges)])
    owner = connected_components(num, links, np.arange(num))
    return owner, rule.joined(edges, owner, is_locked) if len(links) else edges


def _links(
    edges: Edges, rule: Rule, is_active: np.ndarray, voxels: np.ndarray, most_edges: int
) -> Iterator[np.ndarray]:
    """Yield the pairs (n, 2) of nodes to be merged, as long as there are some.

    A node whose best edge leads to one that is not active can only wait, and so can those that wait for it.
    """
    names = np.arange(len(is_active))
    while True:
        live = rule.is_live(edges, voxels)
        has_live = np.zeros(len(is_active), bool)
        has_live[edges.pairs[live]] = True
        is_active = is_active & has_live
        edges = edges[edges.any_end(is_active)]
        if not len(edges):
            return
        edges, names, is_active, voxels = _compact(edges, names, is_active, voxels)
        links, is_active = _mutual(edges[rule.is_live(edges, voxels)], rule, is_active)
        if not is_active.any():
            return
        if len(links) <= FEW * np.count_nonzero(is_active):
            for own, own_names, *nodes in _batches(edges, names, is_active, voxels, rule):
                check_one_by_one(len(own), most_edges)
                pairs = np.array(list(rule.one_by_one(own, *nodes)), np.int64).reshape(-1, 2)
                yield own_names[pairs]
            return
        yield names[links]
        owner = connected_components(len(names), links, np.arange(len(names)))
        edges = rule.merged(edges, owner)
        names, is_active = _of_owners(owner, names), _of_owners(owner, is_active)
        voxels = np.bincount(owner, voxels).astype(np.int64)  # exact below 2**53


def check_one_by_one(num_edges: int, most_edges: int) -> None:
    """Refuse more edges between nodes that are merged one by one than there is memory for.

    Raises:
        PlanError: naming both.
    """
    if num_edges > most_edges:
        raise PlanError(
            f"{num_edges:,} edges lie between fragments that can only be merged one by one, output.graph_gib leaves "
            f"memory for {most_edges:,}; segment with --fresh and more of it, or more objects.smooth"
        )


def _batches(
    edges: Edges, names: np.ndarray, is_active: np.ndarray, voxels: np.ndarray, rule: Rule
) -> Iterator[tuple[Edges, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield edges, names, flags and voxels of groups of active nodes, about BATCH edges at a time.

    Nodes of two groups are never merged: no live edge leads from one to the other.
    """
    first, second = (is_active[end] for end in edges.pairs.T)
    live = first & second & rule.is_live(edges, voxels)
    group = connected_components(len(names), edges.pairs[live], np.arange(len(names)))
    of_first, of_second = (group[end] for end in edges.pairs.T)
    own = np.where(first, of_first, of_second)
    num = np.bincount(own, minlength=len(names))
    batch = ((np.cumsum(num) - num) // BATCH)[own]
    batch[first & second & (of_first != of_second)] = -1
    for number in np.unique(batch[batch >= 0]).tolist():
        yield _compact(edges[batch == number], names, is_active, voxels)


def _of_owners(owner: np.ndarray, values: np.ndarray) -> np.ndarray:
    result = np.empty(int(owner.max(initial=-1)) + 1, values.dtype)
    result[owner] = values
    return result


def _compact(
    edges: Edges, names: np.ndarray, is_active: np.ndarray, voxels: np.ndarray
) -> tuple[Edges, np.ndarray, np.ndarray, np.ndarray]:
    """Return `edges` with their nodes numbered from 0, and the names, flags and voxels of these nodes."""
    has_edge = np.zeros(len(names), bool)
    has_edge[edges.pairs] = True
    number = np.cumsum(has_edge) - 1
    return replace(edges, pairs=number[edges.pairs]), names[has_edge], is_active[has_edge], voxels[has_edge]


def _mutual(edges: Edges, rule: Rule, is_active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs (n, 2) of active nodes that are each other's best, and the nodes that stay active."""
    num, own = len(is_active), np.arange(len(edges))
    best = _best_edges(num, edges, rule)
    is_mutual = (best[edges.pairs[:, 0]] == own) & (best[edges.pairs[:, 1]] == own)
    leads = np.arange(num)
    has_best = best >= 0
    leads[has_best] = edges.pairs[best[has_best]].sum(axis=1) - leads[has_best]
    leads[~is_active] = np.flatnonzero(~is_active)
    pairs = edges.pairs[is_mutual]
    is_pair = is_active[pairs].all(axis=1)
    leads[pairs[is_pair]] = pairs[is_pair]
    while not np.array_equal(leads, farther := leads[leads]):
        leads = farther
    return pairs[is_pair], is_active & is_active[leads]


def _best_edges(num: int, edges: Edges, rule: Rule) -> np.ndarray:
    """Return the best edge of each of `num` nodes, -1 where it has none."""
    nodes, edge = edges.pairs.T.ravel(), np.tile(np.arange(len(edges)), 2)
    own, place = edges, edge
    for key in rule.keys:
        values = key(own)[place]
        lowest = -np.inf if np.issubdtype(values.dtype, np.floating) else np.iinfo(values.dtype).min
        highest = np.full(num, lowest, values.dtype)
        np.maximum.at(highest, nodes, values)
        best = values == highest[nodes]
        nodes, edge = nodes[best], edge[best]
        own, place = edges.take(edge), np.arange(len(edge))
    result = np.full(num, -1)
    result[nodes] = edge
    return result


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

    Every round hooks each root to its lowest neighbour, which removes at least half of the roots with a neighbour.
    """
    root = np.arange(num)
    while True:
        ends = root[joins]
        low, high = ends.min(axis=1, initial=num), ends.max(axis=1, initial=-1)
        apart = low < high
        if not apart.any():
            return root
        joins = joins[apart]
        np.minimum.at(root, high[apart], low[apart])
        while not np.array_equal(root, farther := root[root]):
            root = farther
