"""Edges of a graph of nodes: how sure they are, summed where several join the same two nodes.

Not here: which nodes are merged along them (agglomerate).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_PAIR = np.iinfo(np.int64).max  # of voxels: an edge has none of that kind


@dataclass(frozen=True)
class Edges:
    """Edges of a graph.

    Attributes:
        pairs: (pairs, 2), int64: two nodes, the lower number first; unique, ascending.
        sums: (pairs, 2 or 4), int64: sum and number of the nearest affinities, as bytes; the same of farther ones.
        first: (pairs, 1 or 2), int64: number of the first pair of voxels of each kind, NO_PAIR of none.
    """

    pairs: np.ndarray
    sums: np.ndarray
    first: np.ndarray

    @classmethod
    def total(cls, pairs: np.ndarray, sums: np.ndarray, first: np.ndarray) -> Edges:
        """Return the edges of `pairs` in any order, duplicates summed, self-edges dropped."""
        order, pairs, starts = grouped(*pairs.T)
        return cls(pairs, _reduced(np.add, sums, order, starts), _reduced(np.minimum, first, order, starts))

    def __getitem__(self, chosen: np.ndarray) -> Edges:
        """Return the edges of which `chosen` (edges,), bool, is true; all of them are not copied."""
        return self if chosen.all() else self.take(np.flatnonzero(chosen))

    @classmethod
    def joined(cls, *parts: Edges) -> Edges:
        """Return the edges of several graphs, in their order."""
        columns = zip(*((part.pairs, part.sums, part.first) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def take(self, places: np.ndarray) -> Edges:
        """Return the edges at `places`, int64."""
        return Edges(*(values.take(places, axis=0) for values in (self.pairs, self.sums, self.first)))

    def any_end(self, flags: np.ndarray) -> np.ndarray:
        """Return for each edge whether one of its nodes has a flag (nodes,), bool."""
        return np.asarray(flags[self.pairs[:, 0]] | flags[self.pairs[:, 1]])

    def both_ends(self, flags: np.ndarray) -> np.ndarray:
        """Return for each edge whether both of its nodes have a flag (nodes,), bool."""
        return np.asarray(flags[self.pairs[:, 0]] & flags[self.pairs[:, 1]])

    def __len__(self) -> int:
        return len(self.pairs)


def grouped(a: np.ndarray, b: np.ndarray, *keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the order of pairs of nodes `a` and `b` (pairs,) by their nodes, then by `keys`, then as they are.

    Returned too are the unique pairs (n, 2), int64, the lower node first, and where each starts in that order.
    Self-edges are left out. Nodes are below 2**31.
    """
    packed = np.minimum(a, b).astype(np.int64)
    packed <<= 32
    packed |= np.maximum(a, b)
    num_selves = np.count_nonzero(is_self := a == b)
    packed[is_self] = -1  # which come first
    # Most pairs follow each other in order, from which a stable sort gains.
    order = (np.lexsort((*reversed(keys), packed)) if keys else np.argsort(packed, kind="stable"))[num_selves:]
    packed = packed[order]
    starts = np.flatnonzero(np.diff(packed, prepend=-1))
    packed = packed[starts]
    unique = np.empty((len(starts), 2), np.int64)
    np.right_shift(packed, 32, out=unique[:, 0])
    np.bitwise_and(packed, 0xFFFFFFFF, out=unique[:, 1])
    return order, unique, starts


def _reduced(reduce: np.ufunc, values: np.ndarray, order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return `values` (n, columns) in `order`, those from one of `starts` to the next made one; a column at a time."""
    result = np.empty((len(starts), values.shape[1]), values.dtype)
    for column in range(values.shape[1] if len(starts) else 0):
        reduce.reduceat(values[:, column][order], starts, out=result[:, column])
    return result
