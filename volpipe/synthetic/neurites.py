"""Rods, of which the cells of a synthetic tissue are made: their places, radii and cells.

Not here: voxels (tissue); a rod is known by hashes of the nodes that it joins, and lies in space not yet bent.

Cells are chains of rods. Each cube of a lattice holds one node; most nodes grow a rod to a neighbouring node
and so join its cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from volpipe.synthetic.random_field import Array, Axes, Stream, uniform

# Lengths are in nm, chosen by eye beside FIB-SEM of fly medulla at 10 nm (Takemura et al., PNAS 2015).
_NODE_SPACING = 300.0  # edge of the cube that holds one node
_NODE_JITTER = (0.2, 0.6)  # a node lies at 0.2 to 0.2 + 0.6 of its cube's edge
_MAX_CHAIN = 12  # nodes; a longer chain is cut into several cells
_ROOT_SHARE = 0.16  # of the nodes end a chain
_TRACT_SHARE = 0.65  # of the nodes grow as their neighbourhood does
_TRACT_NODES = 4  # edge of a neighbourhood
_RADIUS = (5.0, 190.0)  # of rods
_MITOCHONDRION_RADIUS = (60.0, 160.0)
BENDS = ((420.0, 280.0), (150.0, 60.0))  # spacing and amplitude of the noise that bends space
RANGE = 80.0  # distances to walls and mitochondria are not distinguished beyond this

# Half of the 26 neighbours: a chain never returns to where it was.
_STEPS = np.array([s for s in product((-1, 0, 1), repeat=3) if s > (0, 0, 0)], dtype=np.int64).T  # (3, 13)


@dataclass(frozen=True)
class Rods:
    """Rods near a box; positions (3, n) in nm, the rest (n,). Sorted by cell."""

    start: Array
    along: Array  # unit vector, or zero where the length is zero
    length: Array
    radius: Array
    cell: Array  # number of the cell in `roots`, ascending
    mitochondrion: Array  # its radius, 0 where there is none
    roots: Array  # (3, cells) lattice point where a cell's chains end

    def __getitem__(self, index: Array) -> Rods:
        fields = (self.start[:, index], self.along[:, index], self.length[index], self.radius[index])
        return Rods(*fields, self.cell[index], self.mitochondrion[index], self.roots)

    def counted_from(self, origin: Array) -> Rods:
        """Return the rods in coordinates that count from `origin` (3,) nm."""
        return replace(self, start=self.start - origin[:, None])

    def deciding(self, point: Axes) -> Rods:
        """Return the rods that are nearest to some of the points (z, y, x), or nearest of another cell.

        A distance changes by no more than the point moves: a rod much too far from their centre is too far.
        """
        distance, spread = self._from_centre(point)
        distance -= self.radius
        first = distance.argmin()
        other = np.where(self.cell == self.cell[first], np.inf, distance).min()
        limit = min(other, distance[first] + 2 * RANGE)
        return self[np.flatnonzero(distance <= limit + 2 * spread)]

    def filled(self, point: Axes) -> Rods:
        """Return the rods whose mitochondrion comes within the range of some of the points (z, y, x)."""
        distance, spread = self._from_centre(point)
        close = distance - self.mitochondrion <= spread + RANGE
        return self[np.flatnonzero(close & (self.mitochondrion > 0))]

    def _from_centre(self, point: Axes) -> tuple[Array, float]:
        """Return each rod's distance (n,) to the centre of the points, and the radius of a ball around them all."""
        low = [float(p.min()) for p in point]
        high = [float(p.max()) for p in point]
        z, y, x = (np.full(1, (a + b) / 2) for a, b in zip(low, high, strict=True))
        spread = math.dist(low, high) / 2 + 1.0  # 1 nm for rounding
        return axis_distance((z, y, x), self.start, self.along, self.length), spread


def axis_distance(point: Axes, start: Array, along: Array, length: Array) -> Array:
    """Return the distance in nm from points to line segments; everything broadcasts, dtypes are kept."""
    dz, dy, dx = (p - s for p, s in zip(point, start, strict=True))
    forward = dz * along[0] + dy * along[1] + dx * along[2]
    reached = forward.clip(0, length)
    square = dz * dz + dy * dy + dx * dx - reached * (forward + forward - reached)
    distance: Array = np.sqrt(square.clip(0))
    return distance


def rods_near(seed: int, low: Array, high: Array) -> Rods:
    """Return every rod that can decide a point between `low` and `high` (3,) nm, before bending."""
    reach = _farthest_rod()
    first = np.floor((low - reach) / _NODE_SPACING).astype(np.int64) - 1
    last = np.floor((high + reach) / _NODE_SPACING).astype(np.int64) + 1
    grid = np.meshgrid(*(np.arange(a, b + 1) for a, b in zip(first, last, strict=True)), indexing="ij")
    nodes = np.stack([axis.ravel() for axis in grid])
    ends = nodes  # of the chain of each node, which identify the cell
    for _ in range(_MAX_CHAIN):
        ends = _next_node(seed, ends)
    roots, cell = np.unique(ends, axis=1, return_inverse=True)
    order = np.argsort(cell.ravel(), kind="stable")
    nodes, cell = nodes[:, order], cell.ravel()[order]

    start = _node_position(seed, nodes)
    way = _node_position(seed, _next_node(seed, nodes)) - start
    length = np.sqrt(way[0] * way[0] + way[1] * way[1] + way[2] * way[2])
    calibre = uniform(seed, Stream.CALIBRE, roots)[cell]
    swelling = uniform(seed, Stream.SWELLING, nodes)
    share = calibre * calibre * (0.4 + 0.6 * swelling)
    radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * share
    along = way / np.maximum(length, 1.0)
    return Rods(start, along, length, radius, cell, _mitochondrion_radius(seed, nodes, share), roots)


def _farthest_rod() -> float:
    """Return how far in nm a rod may lie from a point and still count there.

    A point is within (0.2 + 0.6) * sqrt(3) edges of the node in its own cube, plus its shift by bending;
    beyond the nearest cell, another matters up to twice the range.
    """
    own = sum(_NODE_JITTER) * math.sqrt(3) * _NODE_SPACING
    return own + _RADIUS[1] + 2 * RANGE + sum(amplitude for _, amplitude in BENDS)


def _mitochondrion_radius(seed: int, nodes: Array, share: Array) -> Array:
    """Return the radius (n,) nm of the mitochondrion in each rod, 0 for most; thick rods have more."""
    low, high = _MITOCHONDRION_RADIUS
    radius = low + (high - low) * (0.4 * uniform(seed, Stream.FILLING, nodes) + 0.6 * share)
    return np.where(uniform(seed, Stream.MITOCHONDRION, nodes) < 0.10 + 0.45 * share, radius, 0.0)


def _node_position(seed: int, nodes: Array) -> Array:
    """Return the positions of nodes (3, n) in nm."""
    offset = np.stack([uniform(seed, Stream.NODE + i, nodes) for i in range(3)])
    return (nodes + _NODE_JITTER[0] + _NODE_JITTER[1] * offset) * _NODE_SPACING


def _next_node(seed: int, nodes: Array) -> Array:
    """Return the node (3, n) to which each node grows its rod; itself where a chain ends."""
    tract = uniform(seed, Stream.TRACT, nodes // _TRACT_NODES)
    own = uniform(seed, Stream.STEP, nodes)
    choice = np.where(uniform(seed, Stream.OWN_WAY, nodes) < _TRACT_SHARE, tract, own)
    step = _STEPS[:, (choice * _STEPS.shape[1]).astype(np.int64)]
    return np.where(uniform(seed, Stream.ROOT, nodes) < _ROOT_SHARE, nodes, nodes + step)


def number_cells(roots: Array, shape: tuple[int, int, int], voxel_size_nm: tuple[float, float, float]) -> Array:
    """Return the label (n,) uint64 of the cells that end at `roots`: their place in the volume's lattice."""
    reach = np.ceil(_farthest_rod() / _NODE_SPACING) + _MAX_CHAIN + 2
    size = np.array(shape) * np.array(voxel_size_nm)
    low = -int(reach)
    count = (np.ceil(size / _NODE_SPACING) + 2 * reach).astype(np.int64)
    z, y, x = roots - low
    number: Array = (z * count[1] + y) * count[2] + x + 1
    return number.astype(np.uint64)
