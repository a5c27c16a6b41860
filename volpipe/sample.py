"""An invented electron-microscopy volume of any size, with its truth, for tests, demos and benchmarks.

Not a simulation of a microscope, and no substitute for real tissue when a net is trained or judged.

Every voxel is a function of the seed and of its own coordinates, so a volume is made box by box, in any order
and by any number of processes, with the same bytes. Three things make that true:

* random numbers are hashes of lattice coordinates, never drawn in sequence;
* the blur reads a halo around its box and adds its terms in a fixed order;
* voxels see only ``+ - * /``, square roots, rounding and minima, one at a time. IEEE 754 defines these to the
  last bit, while exp, log, sin and sums by BLAS depend on the machine and on a value's place in its array.

Cells are chains of rods. Each cube of a lattice holds one node; most nodes grow a rod to a neighbouring node
and so join its cell. A voxel belongs to the cell whose rod is nearest (less the rod's radius), in space bent
by smooth noise; the membrane lies where two cells are equally near::

    o====o====o      rods of one cell            f1 = distance to the nearest cell
     |||||||||||     wall = (f2 - f1) / 2        f2 = distance to the nearest other cell
    o====o  o===     rods of two other cells
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import RecipeError
from volpipe.grid import Box, Grid

Array = np.ndarray[Any, np.dtype[Any]]  # shape and dtype differ; each function says which
Axes = tuple[Array, Array, Array]  # one 1-D array per axis (z, y, x)

CYTOPLASM, MEMBRANE, MITOCHONDRION, VESICLE = range(4)  # what `organelles` returns

# Lengths are in nm, chosen by eye beside FIB-SEM of fly medulla at 10 nm (Takemura et al., PNAS 2015).
_NODE_SPACING = 300.0  # edge of the cube that holds one node
_NODE_JITTER = (0.2, 0.6)  # a node lies at 0.2 to 0.2 + 0.6 of its cube's edge
_MAX_CHAIN = 12  # nodes; a longer chain is cut into several cells
_ROOT_SHARE = 0.16  # of the nodes end a chain
_TRACT_SHARE = 0.65  # of the nodes grow as their neighbourhood does
_TRACT_NODES = 4  # edge of a neighbourhood
_RADIUS = (5.0, 190.0)  # of rods
_BENDS = ((420.0, 280.0), (150.0, 60.0))  # spacing and amplitude of the noise that bends space
_HALF_MEMBRANE = 11.0
_RANGE = 80.0  # distances to walls and mitochondria are not told apart beyond this
_MITOCHONDRION_RADIUS = (60.0, 160.0)
_VESICLE_SPACING = 72.0
_VESICLE_RADIUS = (17.0, 22.0)
_VESICLE_JITTER = 9.0
_TURN = np.array([[2, -1, 2], [2, 2, -1], [-1, 2, 2]]) / 3  # a rotation, of the lattice of vesicles
_CROWD_SPACING = 330.0  # of crowds of vesicles
_RELEASING_SHARE = 0.5  # of the cells have vesicles
_RIM = 24.0  # between an organelle and the middle of a wall
_FOLD_PERIOD = 42.0  # of cristae
_NOISE = 6.0  # grey levels, deviation

_BRICK = (8, 16, 16)  # voxels that share a list of near rods and an origin of coordinates
_TILE = (64, 128, 128)  # voxels made at once
_HALO = (2, 1, 1)  # voxels that the blur reads on each side

# Half of the 26 neighbours: a chain never returns to where it was.
_STEPS = np.array([s for s in product((-1, 0, 1), repeat=3) if s > (0, 0, 0)], dtype=np.int64).T  # (3, 13)


class _Stream(IntEnum):
    """What a random number is for; vectors take three numbers in a row."""

    NODE = 1
    ROOT = 4
    STEP = 5
    TRACT = 6
    OWN_WAY = 7
    CALIBRE = 8
    SWELLING = 9
    SHADE = 10
    RELEASING = 11
    MITOCHONDRION = 12
    FILLING = 13
    BEND = 20  # and 21 to 25: three axes, two scales
    CROWD = 30
    VESICLE = 31
    VESICLE_RADIUS = 34
    PRESENT = 35
    GRAIN = 40
    MOTTLE = 41
    RETICULUM = 42
    PLACE = 43
    SHADING = 44
    SECTION = 45
    NOISE = 46


@dataclass(frozen=True)
class Sample:
    """A volume (z, y, x) that is invented where it is looked at; it holds no voxel.

    Attributes:
        shape: the volume in voxels.
        seed: any integer; another seed gives another tissue.
        voxel_size_nm: edge of a voxel per axis (z, y, x); tissue is recognisable from about 2 to 40 nm.
        noise: times the usual noise, whose deviation is 6 grey levels; 0 leaves the same picture without noise.
    """

    shape: tuple[int, int, int]
    seed: int = 0
    voxel_size_nm: tuple[float, float, float] = (16.0, 8.0, 8.0)
    noise: float = 1.0

    def __post_init__(self) -> None:
        for axis, n, size in zip("zyx", self.shape, self.voxel_size_nm, strict=True):
            if n < 1:
                raise RecipeError(f"sample shape is {n} on axis {axis}; give at least 1 voxel")
            if not 0 < size < math.inf:
                raise RecipeError(f"sample voxel size is {size} nm on axis {axis}; give a length above 0")
        if not 0 <= self.noise < math.inf:
            raise RecipeError(f"sample noise is {self.noise}; give 0 for none, 1 for the usual or another factor")

    def raw(self, box: Box) -> Array:
        """Return the picture of `box` (z, y, x), uint8: dark membranes and organelles in grey cytoplasm."""
        return self._fill(box, np.uint8, self._raw_tile)

    def labels(self, box: Box) -> Array:
        """Return the cell of each voxel of `box` (z, y, x), uint64 from 1; 0 is membrane."""
        return self._fill(box, np.uint64, self._label_tile)

    def organelles(self, box: Box) -> Array:
        """Return the kind of each voxel of `box` (z, y, x), uint8: CYTOPLASM, MEMBRANE and so on."""
        return self._fill(box, np.uint8, self._organelle_tile)

    def _fill(self, box: Box, dtype: type[np.generic], make: Callable[[Box], Array]) -> Array:
        """Return `box` made tile by tile, so that a box of any size takes the memory of one tile."""
        for axis, a, b, n in zip("zyx", box.start, box.stop, self.shape, strict=True):
            if a < 0 or b > n:
                raise ValueError(f"box {a}:{b} leaves the sample 0:{n} on axis {axis}; clip it first")
        out = np.empty(box.shape, dtype)
        if box.is_empty:
            return out
        tiles = Grid(box.shape, _TILE)
        for number in range(len(tiles)):
            tile = tiles.box(number)
            out[tile.slices] = make(tile.shift(box.start))
        return out

    def _raw_tile(self, box: Box) -> Array:
        start = tuple(a - h for a, h in zip(box.start, _HALO, strict=True))
        stop = tuple(b + h for b, h in zip(box.stop, _HALO, strict=True))
        grey = _blur(_paint(_grow(self, Box(start, stop))))
        grey += np.float32(_NOISE * self.noise) * _noise(self.seed, box)
        grey += _sections(self.seed, box)
        np.clip(grey, 0, 255, out=grey)
        return np.rint(grey, out=grey).astype(np.uint8)

    def _label_tile(self, box: Box) -> Array:
        tissue = _grow(self, box)
        labels: Array = _number(tissue.roots, self)[tissue.cell]
        labels[tissue.wall < _HALF_MEMBRANE] = 0
        return labels

    def _organelle_tile(self, box: Box) -> Array:
        tissue = _grow(self, box)
        out = np.full(box.shape, CYTOPLASM, np.uint8)
        out[_vesicles(tissue) < 0] = VESICLE
        out[tissue.mitochondrion < 0] = MITOCHONDRION
        out[tissue.wall < _HALF_MEMBRANE] = MEMBRANE
        return out


# --- random numbers -----------------------------------------------------------------------------------------


def _mix(h: Array) -> Array:
    """Return uint64 `h` scrambled: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def _hash(seed: int, stream: int, z: Array, y: Array, x: Array) -> Array:
    """Return random uint64 at int64 lattice points; the arrays broadcast."""
    h = np.full(1, (seed * 0x9E3779B97F4A7C15 + stream * 0xD1342543DE82EF95) % 2**64, np.uint64)
    for axis in (z, y, x):
        h = _mix(h + axis.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return h


def _uniform(seed: int, stream: int, at: Array) -> Array:
    """Return random float64 in [0, 1) at lattice points `at` (3, ...)."""
    return _fraction(_hash(seed, stream, at[0], at[1], at[2]))


def _fraction(h: Array) -> Array:
    """Return uint64 `h` as float64 in [0, 1)."""
    fraction: Array = (h >> np.uint64(11)).astype(np.float64)
    fraction *= 2.0**-53
    return fraction


def _smooth(seed: int, stream: int, at: Axes, spacing: float) -> Array:
    """Return smooth noise (z, y, x), float32 in (-1, 1), at the positions `at` in nm.

    Random numbers on a lattice of `spacing` nm, through quadratic B-splines; x first and z last, since the
    last axis costs most and is copied in whole planes.
    """
    taps = [_spline(axis, spacing) for axis in at]
    z, y, x = (np.arange(nodes.min() - 1, nodes.max() + 2) for nodes, _ in taps)
    lattice = _hash(seed, stream, z[:, None, None], y[None, :, None], x[None, None, :])
    values = (_fraction(lattice) * 2.0 - 1.0).astype(np.float32)
    for dim, origin in ((2, x[0]), (1, y[0]), (0, z[0])):
        nodes, weights = taps[dim]
        terms = [np.take(values, nodes - origin + step, axis=dim) for step in (-1, 0, 1)]
        for term, weight in zip(terms, weights, strict=True):
            term *= _along(dim, weight)
        values = terms[0]
        values += terms[1]
        values += terms[2]
    return values


def _spline(positions: Array, spacing: float) -> tuple[Array, list[Array]]:
    """Return the nearest lattice point (int64) and the weights (float32) of it and its two neighbours."""
    scaled = positions / spacing
    nodes = np.floor(scaled + 0.5)
    t = scaled - nodes
    weights = (0.5 * (0.5 - t) * (0.5 - t), 0.75 - t * t, 0.5 * (0.5 + t) * (0.5 + t))
    return nodes.astype(np.int64), [w.astype(np.float32) for w in weights]


def _noise(seed: int, box: Box) -> Array:
    """Return white noise of `box` (z, y, x), float32, mean 0, deviation 1: the sum of a hash's bytes."""
    z, y, x = _voxels(box)
    rows = _hash(seed, _Stream.NOISE, z[:, None], y[None, :], np.zeros(1, np.int64)).astype(np.uint32)
    h = rows[:, :, None] ^ x.astype(np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # lowbias32, C. Wellons, 2018
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    pairs = (h & np.uint32(0x00FF00FF)) + ((h >> np.uint32(8)) & np.uint32(0x00FF00FF))
    total = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
    return (total.astype(np.float32) - np.float32(510)) * np.float32(1 / 147.8)


def _voxels(box: Box) -> Axes:
    """Return the coordinates of the voxels of `box`, int64."""
    z, y, x = (np.arange(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return z, y, x


def _positions(box: Box, voxel_size_nm: tuple[float, float, float]) -> Axes:
    """Return the positions of the voxels of `box` in nm, float64."""
    z, y, x = (axis * size for axis, size in zip(_voxels(box), voxel_size_nm, strict=True))
    return z, y, x


# --- cells --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rods:
    """Rods near a box; positions (3, n) in nm, the rest (n,). Sorted by cell."""

    start: Array
    along: Array  # unit vector, or zero where the length is zero
    length: Array
    radius: Array
    cell: Array  # number of the cell in `roots`, ascending
    mitochondrion: Array  # its radius, 0 where there is none
    roots: Array  # (3, cells) lattice point where a cell's chains end

    def __getitem__(self, chosen: Array) -> _Rods:
        fields = (self.start[:, chosen], self.along[:, chosen], self.length[chosen], self.radius[chosen])
        return _Rods(*fields, self.cell[chosen], self.mitochondrion[chosen], self.roots)

    def seen_from(self, origin: Array) -> _Rods:
        """Return the same rods in coordinates that count from `origin` (3,) nm."""
        return replace(self, start=self.start - origin[:, None])

    def deciding(self, point: Axes) -> _Rods:
        """Return the rods that are nearest, or nearest of another cell, somewhere among the points (z, y, x).

        A distance changes by no more than the point moves: what is much too far at their centre is too far.
        """
        distance, spread = self._from_centre(point)
        distance -= self.radius
        first = distance.argmin()
        rival = np.where(self.cell == self.cell[first], np.inf, distance).min()
        limit = min(rival, distance[first] + 2 * _RANGE)
        return self[np.flatnonzero(distance <= limit + 2 * spread)]

    def filled(self, point: Axes) -> _Rods:
        """Return the rods whose mitochondrion comes within the range of some of the points (z, y, x)."""
        distance, spread = self._from_centre(point)
        close = distance - self.mitochondrion <= spread + _RANGE
        return self[np.flatnonzero(close & (self.mitochondrion > 0))]

    def _from_centre(self, point: Axes) -> tuple[Array, float]:
        """Return each rod's distance (n,) to the centre of the points, and the radius that holds them all."""
        low = [float(p.min()) for p in point]
        high = [float(p.max()) for p in point]
        z, y, x = (np.full(1, (a + b) / 2) for a, b in zip(low, high, strict=True))
        spread = math.dist(low, high) / 2 + 1.0  # 1 nm for rounding
        return _axis_distance((z, y, x), self.start, self.along, self.length), spread


def _axis_distance(point: Axes, start: Array, along: Array, length: Array) -> Array:
    """Return the distance in nm from points to line segments; everything broadcasts, dtypes are kept."""
    dz, dy, dx = (p - s for p, s in zip(point, start, strict=True))
    forward = dz * along[0]
    forward += dy * along[1]
    forward += dx * along[2]
    reached = np.minimum(np.maximum(forward, 0), length)
    forward += forward
    forward -= reached
    reached *= forward
    dz *= dz
    dy *= dy
    dx *= dx
    dz += dy
    dz += dx
    dz -= reached
    np.maximum(dz, 0, out=dz)
    distance: Array = np.sqrt(dz, out=dz)
    return distance


def _rods_near(sample: Sample, low: Array, high: Array) -> _Rods:
    """Return every rod that can decide a point between `low` and `high` (3,) nm, before bending."""
    seed = sample.seed
    reach = _reach()
    first = np.floor((low - reach) / _NODE_SPACING).astype(np.int64) - 1
    last = np.floor((high + reach) / _NODE_SPACING).astype(np.int64) + 1
    grid = np.meshgrid(*(np.arange(a, b + 1) for a, b in zip(first, last, strict=True)), indexing="ij")
    nodes = np.stack([axis.ravel() for axis in grid])
    roots, cell = np.unique(_chain_end(seed, nodes), axis=1, return_inverse=True)
    order = np.argsort(cell.ravel(), kind="stable")
    nodes, cell = nodes[:, order], cell.ravel()[order]

    start = _node_position(seed, nodes)
    way = _node_position(seed, _next_node(seed, nodes)) - start
    length = np.sqrt(way[0] * way[0] + way[1] * way[1] + way[2] * way[2])
    calibre = _uniform(seed, _Stream.CALIBRE, roots)[cell]
    swelling = _uniform(seed, _Stream.SWELLING, nodes)
    share = calibre * calibre * (0.4 + 0.6 * swelling)
    radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * share
    along = way / np.maximum(length, 1.0)
    return _Rods(start, along, length, radius, cell, _mitochondrion_radius(seed, nodes, share), roots)


def _reach() -> float:
    """Return how far in nm a rod may lie from a point and still count there.

    A point is within (0.2 + 0.6) * sqrt(3) edges of the node in its own cube, plus what bending moves it;
    beyond the nearest cell, another matters up to twice the range.
    """
    own = sum(_NODE_JITTER) * math.sqrt(3) * _NODE_SPACING
    return own + _RADIUS[1] + 2 * _RANGE + sum(amplitude for _, amplitude in _BENDS)


def _mitochondrion_radius(seed: int, nodes: Array, share: Array) -> Array:
    """Return the radius (n,) nm of the mitochondrion in each rod, 0 for most; thick rods have more."""
    low, high = _MITOCHONDRION_RADIUS
    radius = low + (high - low) * (0.4 * _uniform(seed, _Stream.FILLING, nodes) + 0.6 * share)
    return np.where(_uniform(seed, _Stream.MITOCHONDRION, nodes) < 0.10 + 0.45 * share, radius, 0.0)


def _node_position(seed: int, nodes: Array) -> Array:
    """Return where nodes (3, n) lie, in nm."""
    offset = np.stack([_uniform(seed, _Stream.NODE + i, nodes) for i in range(3)])
    return (nodes + _NODE_JITTER[0] + _NODE_JITTER[1] * offset) * _NODE_SPACING


def _next_node(seed: int, nodes: Array) -> Array:
    """Return the node (3, n) to which each node grows its rod; itself where a chain ends."""
    tract = _uniform(seed, _Stream.TRACT, nodes // _TRACT_NODES)
    own = _uniform(seed, _Stream.STEP, nodes)
    choice = np.where(_uniform(seed, _Stream.OWN_WAY, nodes) < _TRACT_SHARE, tract, own)
    step = _STEPS[:, (choice * _STEPS.shape[1]).astype(np.int64)]
    return np.where(_uniform(seed, _Stream.ROOT, nodes) < _ROOT_SHARE, nodes, nodes + step)


def _chain_end(seed: int, nodes: Array) -> Array:
    """Return the node (3, n) at which the chain of each node ends, which names its cell."""
    for _ in range(_MAX_CHAIN):
        nodes = _next_node(seed, nodes)
    return nodes


def _number(roots: Array, sample: Sample) -> Array:
    """Return the label (n,) uint64 of the cells that end at `roots`: their place in the volume's lattice."""
    reach = np.ceil(_reach() / _NODE_SPACING) + _MAX_CHAIN + 2
    size = np.array(sample.shape) * np.array(sample.voxel_size_nm)
    low = -int(reach)
    count = (np.ceil(size / _NODE_SPACING) + 2 * reach).astype(np.int64)
    z, y, x = roots - low
    number: Array = (z * count[1] + y) * count[2] + x + 1
    return number.astype(np.uint64)


@dataclass(frozen=True)
class _Tissue:
    """A box of tissue: arrays (z, y, x), distances float32 in nm, negative inside."""

    sample: Sample
    box: Box
    roots: Array  # (3, cells)
    cell: Array  # int32, column of `roots`
    wall: Array  # distance to the nearest wall, at most _RANGE
    mitochondrion: Array  # distance to the surface of a mitochondrion of the voxel's own cell, at most _RANGE
    crista: Array  # 0 to 1, brightness of the folds inside

    @property
    def at(self) -> Axes:
        return _positions(self.box, self.sample.voxel_size_nm)


def _grow(sample: Sample, box: Box) -> _Tissue:
    """Return the cells and mitochondria of `box`, brick by brick.

    The wall's distance comes from differences between neighbours: a voxel more is grown on each side and cut.
    """
    full = box
    box = Box(tuple(a - 1 for a in box.start), tuple(b + 1 for b in box.stop))
    sizes = sample.voxel_size_nm
    at = _positions(box, sizes)
    rods = _rods_near(sample, np.array([axis[0] for axis in at]), np.array([axis[-1] for axis in at]))
    bend = [_bend(sample.seed, at, axis) for axis in range(3)]
    wall, mitochondrion = (np.full(box.shape, _RANGE, np.float32) for _ in range(2))
    crista = np.zeros(box.shape, np.float32)
    tissue = _Tissue(sample, box, rods.roots, np.empty(box.shape, np.int32), wall, mitochondrion, crista)
    for brick in _bricks(box):
        inside = brick.relative_to(box.start).slices
        origin = tuple(a // b * b for a, b in zip(brick.start, _BRICK, strict=True))
        z, y, x = (axis.astype(np.float32) for axis in _positions(brick.relative_to(origin), sizes))
        point = (z[:, None, None] + bend[0][inside], y[:, None] + bend[1][inside], x + bend[2][inside])
        moved = rods.seen_from(np.array(origin) * np.array(sizes))
        _divide(tissue, inside, moved, point)
        _fill(tissue, inside, moved, point)
    core = (slice(1, -1),) * 3
    wall = _true_distance(wall, sizes)
    mitochondrion = np.maximum(mitochondrion[core], np.float32(_RIM) - wall)
    return _Tissue(sample, full, rods.roots, tissue.cell[core], wall, mitochondrion, crista[core])


def _true_distance(wall: Array, voxel_size_nm: tuple[float, float, float]) -> Array:
    """Return the distance to a wall in nm, one voxel less on each side: `wall` over its own slope.

    Where two rods pull nearly alike, and where space is bent, `wall` rises by less than one nm per nm and
    membranes would become blots. Slopes are one-sided, since the wall itself is a kink.
    """
    core = (slice(1, -1),) * 3
    slope = np.zeros(wall[core].shape, np.float32)
    for dim, size in enumerate(voxel_size_nm):
        before, after = list(core), list(core)
        before[dim], after[dim] = slice(0, -2), slice(2, None)
        rise = np.maximum(np.abs(wall[tuple(before)] - wall[core]), np.abs(wall[tuple(after)] - wall[core]))
        rise *= np.float32(1 / size)
        rise *= rise
        slope += rise
    np.sqrt(slope, out=slope)
    return np.minimum(wall[core] / np.maximum(slope, np.float32(0.2)), np.float32(_RANGE))


def _bend(seed: int, at: Axes, axis: int) -> Array:
    """Return by how many nm (z, y, x), float32, tissue is displaced along `axis`."""
    (wide, far), (narrow, near) = _BENDS
    bend = _smooth(seed, _Stream.BEND + axis, at, wide)
    bend *= np.float32(far)
    fine = _smooth(seed, _Stream.BEND + 3 + axis, at, narrow)
    fine *= np.float32(near)
    bend += fine
    return bend


def _bricks(box: Box) -> Iterator[Box]:
    """Yield the parts of `box` on a lattice of bricks fixed in the volume, so that a voxel has one origin."""
    ranges = (range(a // b, -(-c // b)) for a, b, c in zip(box.start, _BRICK, box.stop, strict=True))
    for index in product(*ranges):
        start = tuple(i * b for i, b in zip(index, _BRICK, strict=True))
        yield box & Box(start, tuple(a + b for a, b in zip(start, _BRICK, strict=True)))


def _divide(tissue: _Tissue, inside: tuple[slice, ...], rods: _Rods, point: Axes) -> None:
    """Set the cell of each voxel of a brick and the distance to its wall."""
    rods = rods.deciding(point)
    distance = _axis_distance(*_stacked(rods, point))
    distance -= rods.radius.astype(np.float32)[:, None, None, None]
    cell = np.empty(point[0].shape, np.int32)
    nearest, second = (np.full(cell.shape, np.inf, np.float32) for _ in range(2))
    for number, to_cell in _by_cell(rods.cell, distance):
        np.copyto(cell, number, where=to_cell < nearest)
        second = np.minimum(second, np.maximum(nearest, to_cell))
        nearest = np.minimum(nearest, to_cell)
    second -= nearest
    second *= np.float32(0.5)
    tissue.cell[inside] = cell
    tissue.wall[inside] = np.minimum(second, np.float32(_RANGE))


def _by_cell(cell: Array, distance: Array) -> Iterator[tuple[int, Array]]:
    """Yield each cell (n, ascending) with the smallest of its rods' distances (n, z, y, x)."""
    last, smallest = int(cell[0]), distance[0]
    for number, other in zip(cell[1:].tolist(), distance[1:], strict=True):
        if number == last:
            smallest = np.minimum(smallest, other)
        else:
            yield last, smallest
            last, smallest = number, other
    yield last, smallest


def _fill(tissue: _Tissue, inside: tuple[slice, ...], rods: _Rods, point: Axes) -> None:
    """Set the distance to the mitochondria of a brick and the folds inside them."""
    rods = rods.filled(point)
    if not rods.cell.size:
        return
    distance = _axis_distance(*_stacked(rods, point))
    distance -= rods.mitochondrion.astype(np.float32)[:, None, None, None]
    nearest, crista = tissue.mitochondrion[inside], tissue.crista[inside]
    for i, number in enumerate(rods.cell):
        closer = (tissue.cell[inside] == number) & (distance[i] < nearest)
        if closer.any():
            np.copyto(nearest, distance[i], where=closer)
            np.copyto(crista, _folds(rods.start[:, i], rods.along[:, i], point), where=closer)


def _stacked(rods: _Rods, point: Axes) -> tuple[Axes, Array, Array, Array]:
    """Return what `_axis_distance` takes for arrays (rod, z, y, x), float32."""
    z, y, x = (p[None] for p in point)
    start, along, length = (a.astype(np.float32)[..., None, None, None] for a in (rods.start, rods.along, rods.length))
    return (z, y, x), start, along, length


def _folds(start: Array, along: Array, point: Axes) -> Array:
    """Return a triangle wave (z, y, x), float32 in 0 to 1, in a direction that leans away from the rod."""
    lean = along[[1, 2, 0]] * 0.5 + along
    phase = np.zeros_like(point[0])
    for p, s, d in zip(point, start, lean, strict=True):
        phase += (p - np.float32(s)) * np.float32(d / _FOLD_PERIOD)
    phase -= np.floor(phase)
    return np.abs(phase - np.float32(0.5)) * np.float32(2)


def _vesicles(tissue: _Tissue) -> Array:
    """Return the distance (z, y, x), float32 in nm, to the surface of a vesicle; negative inside.

    A cube of a lattice holds at most one, wholly inside: a voxel looks at its own cube alone.
    """
    seed = tissue.sample.seed
    cubes, own, offsets = _cubes(tissue.at)
    lattice = np.stack(np.meshgrid(*cubes, indexing="ij"))
    surface = np.zeros(tissue.box.shape, np.float32)
    for dim, offset in enumerate(offsets):
        shift = (_uniform(seed, _Stream.VESICLE + dim, lattice) * 2.0 - 1.0) * _VESICLE_JITTER
        offset -= shift.astype(np.float32).ravel()[own]
        offset *= offset
        surface += offset
    np.sqrt(surface, out=surface)
    surface -= _vesicle_radius(seed, cubes, lattice).ravel()[own]
    releasing = _uniform(seed, _Stream.RELEASING, tissue.roots) < _RELEASING_SHARE
    np.copyto(surface, np.float32(_RANGE), where=~releasing[tissue.cell])
    np.maximum(surface, np.float32(_RIM) - tissue.wall, out=surface)
    return np.maximum(surface, np.float32(_RIM) - tissue.mitochondrion, out=surface)


def _cubes(at: Axes) -> tuple[list[Array], Array, list[Array]]:
    """Return the cubes of the vesicles' lattice around voxels, and where each voxel lies in its own.

    The lattice is turned against the volume: along an axis, slices and rows of vesicles would show.

    Returns:
        The cubes per axis of the lattice, int64; for each voxel (z, y, x) the number of its cube among them,
        int64; and per axis of the lattice the voxel's place from its cube's centre in nm, float32.
    """
    cubes, offsets = [], []
    own = np.zeros((1, 1, 1), np.int64)
    for turn in _TURN:
        z, y, x = (axis * (part / _VESICLE_SPACING) for axis, part in zip(at, turn, strict=True))
        place = (z[:, None, None] + y[:, None]) + x
        cube = np.floor(place)
        place -= cube
        place -= 0.5
        place *= _VESICLE_SPACING
        first, last = int(cube.min()), int(cube.max())
        cubes.append(np.arange(first, last + 1))
        offsets.append(place.astype(np.float32))
        own = own * (last + 1 - first) + (cube.astype(np.int64) - first)
    return cubes, own, offsets


def _vesicle_radius(seed: int, cubes: list[Array], lattice: Array) -> Array:
    """Return the radius (z, y, x), float32 in nm, of each cube's vesicle; far below 0 where none is."""
    z, y, x = ((c + 0.5) * _VESICLE_SPACING for c in cubes)
    crowd = _smooth(seed, _Stream.CROWD, (z, y, x), _CROWD_SPACING)
    present = _uniform(seed, _Stream.PRESENT, lattice) < np.minimum((crowd - np.float32(0.05)) * 5.0, 0.85)
    low, high = _VESICLE_RADIUS
    radius = low + (high - low) * _uniform(seed, _Stream.VESICLE_RADIUS, lattice)
    return np.where(present, radius, -2.0 * _RANGE).astype(np.float32)


def _along(dim: int, values: Array) -> Array:
    """Return `values` (n,) shaped to lie along axis `dim` of (z, y, x)."""
    return np.expand_dims(values, tuple(d for d in range(3) if d != dim))


# --- picture ------------------------------------------------------------------------------------------------


def _paint(tissue: _Tissue) -> Array:
    """Return the grey levels (z, y, x), float32, of `tissue` as a perfect microscope would see them."""
    seed, at = tissue.sample.seed, tissue.at
    shade = 154.0 + 50.0 * _uniform(seed, _Stream.SHADE, tissue.roots)
    grey = shade.astype(np.float32)[tissue.cell]
    for stream, spacing, amplitude in ((_Stream.GRAIN, 16.0, 75.0), (_Stream.MOTTLE, 50.0, 60.0)):
        grain = _smooth(seed, stream, at, spacing)
        grain *= np.float32(amplitude)
        grey += grain
    vesicle = _vesicles(tissue)
    _cover(grey, 200.0, _ramp(vesicle, 0.0, -6.0))
    _cover(grey, 25.0, _ramp(np.abs(vesicle + np.float32(3.0)), 10.0, 3.0))
    _cover(grey, 62.0, _ramp(tissue.mitochondrion, 4.0, -4.0), plus=_cristae(tissue))
    _cover(grey, 40.0, _ramp(np.abs(tissue.mitochondrion), 10.0, 3.0))
    place = _smooth(seed, _Stream.PLACE, at, 260.0)
    _cover(grey, 90.0, _sheets(tissue, place))
    _cover(grey, 25.0, _ramp(tissue.wall, 34.0, 12.0) * _ramp(place, -0.30, -0.42))
    _cover(grey, 38.0, _ramp(tissue.wall, 15.0, 6.0))
    shading = _smooth(seed, _Stream.SHADING, at, 2500.0)
    shading *= np.float32(0.2)
    shading += np.float32(1.0)
    grey *= shading
    return grey


def _cristae(tissue: _Tissue) -> Array:
    """Return by how many grey levels (z, y, x), float32, mitochondria are lighter between their folds."""
    light = _ramp(tissue.crista, 0.25, 0.75)
    light *= _ramp(tissue.mitochondrion, -8.0, -20.0)
    light *= np.float32(60)
    return light


def _sheets(tissue: _Tissue, place: Array) -> Array:
    """Return how much (z, y, x), float32 in 0 to 0.7, a voxel shows of sheets of endoplasmic reticulum."""
    cover = _ramp(np.abs(_smooth(tissue.sample.seed, _Stream.RETICULUM, tissue.at, 150.0)), 0.035, 0.012)
    cover *= _ramp(place, 0.12, 0.25)
    cover *= _ramp(tissue.wall, 18.0, 28.0)
    cover *= _ramp(tissue.mitochondrion, 10.0, 20.0)
    cover *= np.float32(0.7)
    return cover


def _cover(grey: Array, level: float, weight: Array, plus: Array | None = None) -> None:
    """Move `grey` towards `level` (and `plus`) by `weight` 0 to 1, in place."""
    change = np.float32(level) - grey
    if plus is not None:
        change += plus
    change *= weight
    grey += change


def _ramp(values: Array, zero: float, one: float) -> Array:
    """Return a smooth step (z, y, x), float32: 0 at and beyond `zero`, 1 at and beyond `one`."""
    t = values - np.float32(zero)
    t *= np.float32(1 / (one - zero))
    np.clip(t, 0, 1, out=t)
    bend = np.float32(3) - t - t
    t *= t
    t *= bend
    return t


def _blur(grey: Array) -> Array:
    """Return `grey` less its halo, blurred by section and beam: 1 4 6 4 1 along z, 1 2 1 along y and x."""
    wide: Array = grey[:-4] + grey[4:]
    wide += np.float32(4) * (grey[1:-3] + grey[3:-1])
    wide += np.float32(6) * grey[2:-2]
    tall = wide[:, :-2] + wide[:, 2:]
    tall += np.float32(2) * wide[:, 1:-1]
    out: Array = tall[:, :, :-2] + tall[:, :, 2:]
    out += np.float32(2) * tall[:, :, 1:-1]
    out *= np.float32(1 / 256)
    return out


def _sections(seed: int, box: Box) -> Array:
    """Return by how much each section is lighter (z, 1, 1), float32 grey levels."""
    z = np.arange(box.start[0], box.stop[0])
    light = _uniform(seed, _Stream.SECTION, np.stack([z, np.zeros_like(z), np.zeros_like(z)]))
    return (light * 4.0 - 2.0).astype(np.float32)[:, None, None]


# --- on disk ------------------------------------------------------------------------------------------------


def write_sample(
    path: Path,
    sample: Sample,
    *,
    chunk: int = 64,
    format: str = "n5",
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `sample` at `path` as the arrays `raw` (uint8) and `labels` (uint64), 2 x 2 x 2 chunks at a time.

    Args:
        path: a new or existing container of `format`.
        sample: what to write.
        chunk: edge of the chunks in voxels.
        format: n5, zarr2 or zarr3.
        workers: number of processes; the bytes do not depend on it.
        on_progress: called with the number of boxes written and the number of boxes, after each.

    Raises:
        VolumeError: `path` holds one of the arrays with other metadata.
    """
    _create_arrays(path, sample, chunk, format)
    boxes = Grid(sample.shape, (2 * chunk,) * 3)
    for done, _ in enumerate(_written(path, sample, boxes, workers), start=1):
        if on_progress is not None:
            on_progress(done, len(boxes))


def _create_arrays(path: Path, sample: Sample, chunk: int, format: str) -> None:
    """Write the metadata of both arrays; the codec is one that every reader of N5 and Zarr has."""
    from volpipe.volume import ArraySpec, create_array

    chunks = tuple(min(chunk, n) for n in sample.shape)
    size = sample.voxel_size_nm[::-1] if format == "n5" else sample.voxel_size_nm  # N5 counts x, y, z
    attributes = {"resolution": list(size), "units": ["nm"] * 3, "seed": sample.seed}
    if sample.noise != 1:
        attributes["noise"] = sample.noise
    for key, dtype in (("raw", np.dtype(np.uint8)), ("labels", np.dtype(np.uint64))):
        create_array(path, key, ArraySpec(sample.shape, dtype, chunks, codec="gzip", attributes=attributes), format)


def _written(path: Path, sample: Sample, boxes: Grid, workers: int) -> Iterator[None]:
    """Write every box of the grid, yielding after each; at most two boxes per worker wait."""
    if workers == 1:
        for number in range(len(boxes)):
            _write_box(path, sample, boxes.box(number))
            yield
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = set()
        for number in range(len(boxes)):
            waiting.add(pool.submit(_write_box, path, sample, boxes.box(number)))
            if len(waiting) >= 2 * workers:
                done = next(as_completed(waiting))
                waiting.remove(done)
                done.result()
                yield
        for done in as_completed(waiting):
            done.result()
            yield


def _write_box(path: Path, sample: Sample, box: Box) -> None:
    from volpipe.volume import open_writer

    open_writer(path, "raw").write(box, sample.raw(box))
    open_writer(path, "labels").write(box, sample.labels(box))
