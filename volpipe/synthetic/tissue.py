"""Structures in a box of synthetic tissue: cells and their walls, mitochondria, vesicles.

Not here: grey levels (render), or the rods (neurites).

A voxel belongs to the cell whose rod is nearest (less the rod's radius), in space bent by smooth noise; the
membrane lies where two cells are equally near::

    o====o====o      rods of one cell            f1 = distance to the nearest cell
     |||||||||||     wall = (f2 - f1) / 2        f2 = distance to the nearest other cell
    o====o  o===     rods of two other cells
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.synthetic.neurites import BENDS, RANGE, Rods, axis_distance, rods_near
from volpipe.synthetic.random_field import Array, Axes, Stream, smooth, uniform, voxels

# Lengths are in nm, chosen by eye beside FIB-SEM of fly medulla at 10 nm (Takemura et al., PNAS 2015).
HALF_MEMBRANE = 11.0
_RIM = 24.0  # between an organelle and the middle of a wall
_FOLD_PERIOD = 42.0  # of cristae
_VESICLE_SPACING = 72.0
_VESICLE_RADIUS = (17.0, 22.0)
_VESICLE_JITTER = 9.0
_TURN = np.array([[2, -1, 2], [2, 2, -1], [-1, 2, 2]]) / 3  # a rotation, of the lattice of vesicles
_CROWD_SPACING = 330.0  # of crowds of vesicles
_RELEASING_SHARE = 0.5  # of the cells have vesicles

_BRICK = (8, 16, 16)  # voxels that share a list of near rods and an origin of coordinates


@dataclass(frozen=True)
class Tissue:
    """A box of tissue: arrays (z, y, x), distances float32 in nm, negative inside."""

    seed: int
    box: Box
    voxel_size_nm: tuple[float, float, float]
    roots: Array  # (3, cells)
    cell: Array  # int32, column of `roots`
    wall: Array  # distance to the nearest wall, at most RANGE
    mitochondrion: Array  # distance to the surface of a mitochondrion of the voxel's own cell, at most RANGE
    crista: Array  # 0 to 1, brightness of the folds inside

    @property
    def at(self) -> Axes:
        return _positions(self.box, self.voxel_size_nm)


def grow(seed: int, box: Box, voxel_size_nm: tuple[float, float, float]) -> Tissue:
    """Return the cells and mitochondria of `box`, brick by brick.

    The wall's distance comes from differences between neighbours: a voxel more is grown on each side and cut.
    """
    full = box
    box = Box(tuple(a - 1 for a in box.start), tuple(b + 1 for b in box.stop))
    at = _positions(box, voxel_size_nm)
    rods = rods_near(seed, np.array([axis[0] for axis in at]), np.array([axis[-1] for axis in at]))
    bend = [_bend(seed, at, axis) for axis in range(3)]
    wall, mitochondrion = (np.full(box.shape, RANGE, np.float32) for _ in range(2))
    crista = np.zeros(box.shape, np.float32)
    tissue = Tissue(seed, box, voxel_size_nm, rods.roots, np.empty(box.shape, np.int32), wall, mitochondrion, crista)
    for brick in _bricks(box):
        inside = brick.relative_to(box.start).slices
        origin = tuple(a // b * b for a, b in zip(brick.start, _BRICK, strict=True))
        z, y, x = (axis.astype(np.float32) for axis in _positions(brick.relative_to(origin), voxel_size_nm))
        point = (z[:, None, None] + bend[0][inside], y[:, None] + bend[1][inside], x + bend[2][inside])
        moved = rods.counted_from(np.array(origin) * np.array(voxel_size_nm))
        _divide(tissue, inside, moved, point)
        _fill_mitochondria(tissue, inside, moved, point)
    core = (slice(1, -1),) * 3
    wall = _true_distance(wall, voxel_size_nm)
    mitochondrion = np.maximum(mitochondrion[core], _RIM - wall)
    return Tissue(seed, full, voxel_size_nm, rods.roots, tissue.cell[core], wall, mitochondrion, crista[core])


def _positions(box: Box, voxel_size_nm: tuple[float, float, float]) -> Axes:
    """Return the positions of the voxels of `box` in nm, float64."""
    z, y, x = (axis * size for axis, size in zip(voxels(box), voxel_size_nm, strict=True))
    return z, y, x


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
        slope += (rise * np.float32(1 / size)) ** 2
    return np.minimum(wall[core] / np.maximum(np.sqrt(slope), 0.2), RANGE)


def _bend(seed: int, at: Axes, axis: int) -> Array:
    """Return the displacement (z, y, x) of tissue along `axis`, float32 in nm."""
    (wide, far), (narrow, near) = BENDS
    return smooth(seed, Stream.BEND + axis, at, wide) * far + smooth(seed, Stream.BEND + 3 + axis, at, narrow) * near


def _bricks(box: Box) -> Iterator[Box]:
    """Yield the parts of `box` on a lattice of bricks fixed in the volume, so that a voxel has one origin."""
    ranges = (range(a // b, -(-c // b)) for a, b, c in zip(box.start, _BRICK, box.stop, strict=True))
    for index in product(*ranges):
        start = tuple(i * b for i, b in zip(index, _BRICK, strict=True))
        yield box & Box(start, tuple(a + b for a, b in zip(start, _BRICK, strict=True)))


def _divide(tissue: Tissue, inside: tuple[slice, ...], rods: Rods, point: Axes) -> None:
    """Set the cell of each voxel of a brick and the distance to its wall."""
    rods = rods.deciding(point)
    distance = _surface_distance(rods, rods.radius, point)
    cell = np.empty(point[0].shape, np.int32)
    nearest, second = (np.full(cell.shape, np.inf, np.float32) for _ in range(2))
    for number, to_cell in _by_cell(rods.cell, distance):
        np.copyto(cell, number, where=to_cell < nearest)
        second = np.minimum(second, np.maximum(nearest, to_cell))
        nearest = np.minimum(nearest, to_cell)
    tissue.cell[inside] = cell
    tissue.wall[inside] = np.minimum((second - nearest) * 0.5, RANGE)


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


def _fill_mitochondria(tissue: Tissue, inside: tuple[slice, ...], rods: Rods, point: Axes) -> None:
    """Set the distance to the mitochondria of a brick and the folds inside them."""
    rods = rods.filled(point)
    if not rods.cell.size:
        return
    distance = _surface_distance(rods, rods.mitochondrion, point)
    nearest, crista = tissue.mitochondrion[inside], tissue.crista[inside]
    for i, number in enumerate(rods.cell):
        closer = (tissue.cell[inside] == number) & (distance[i] < nearest)
        if closer.any():
            np.copyto(nearest, distance[i], where=closer)
            np.copyto(crista, _folds(rods.start[:, i], rods.along[:, i], point), where=closer)


def _surface_distance(rods: Rods, radius: Array, point: Axes) -> Array:
    """Return the distance (rod, z, y, x), float32 in nm, from points to the surface of each rod of `radius` (rod,)."""
    arrays = (rods.start, rods.along, rods.length, radius)
    start, along, length, thick = (a.astype(np.float32)[..., None, None, None] for a in arrays)
    return axis_distance(point, start, along, length) - thick


def _folds(start: Array, along: Array, point: Axes) -> Array:
    """Return a triangle wave (z, y, x), float32 in 0 to 1, in a direction that leans away from the rod."""
    lean = along[[1, 2, 0]] * 0.5 + along
    phase = np.zeros_like(point[0])
    for p, s, d in zip(point, start, lean, strict=True):
        phase += (p - np.float32(s)) * np.float32(d / _FOLD_PERIOD)
    return np.abs(phase - np.floor(phase) - 0.5) * 2


def vesicles(tissue: Tissue) -> Array:
    """Return the distance (z, y, x), float32 in nm, to the surface of a vesicle; negative inside.

    A cube of a lattice holds at most one, wholly inside: a voxel looks at its own cube alone.
    """
    seed = tissue.seed
    cubes, own, offsets = _cubes(tissue.at)
    lattice = np.stack(np.meshgrid(*cubes, indexing="ij"))
    surface = np.zeros(tissue.box.shape, np.float32)
    for dim, offset in enumerate(offsets):
        shift = (uniform(seed, Stream.VESICLE + dim, lattice) * 2.0 - 1.0) * _VESICLE_JITTER
        surface += (offset - shift.astype(np.float32).ravel()[own]) ** 2
    surface = np.sqrt(surface) - _vesicle_radius(seed, cubes, lattice).ravel()[own]
    releasing = uniform(seed, Stream.RELEASING, tissue.roots) < _RELEASING_SHARE
    surface = np.where(releasing[tissue.cell], surface, np.float32(RANGE))
    return np.maximum(surface, _RIM - np.minimum(tissue.wall, tissue.mitochondrion))


def _cubes(at: Axes) -> tuple[list[Array], Array, list[Array]]:
    """Return the cubes of the vesicles' lattice around voxels, and the place of each voxel in its own.

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
        first, last = int(cube.min()), int(cube.max())
        cubes.append(np.arange(first, last + 1))
        offsets.append(((place - cube - 0.5) * _VESICLE_SPACING).astype(np.float32))
        own = own * (last + 1 - first) + (cube.astype(np.int64) - first)
    return cubes, own, offsets


def _vesicle_radius(seed: int, cubes: list[Array], lattice: Array) -> Array:
    """Return the radius (z, y, x), float32 in nm, of each cube's vesicle; far below 0 where none is."""
    z, y, x = ((c + 0.5) * _VESICLE_SPACING for c in cubes)
    crowd = smooth(seed, Stream.CROWD, (z, y, x), _CROWD_SPACING)
    present = uniform(seed, Stream.PRESENT, lattice) < np.minimum((crowd - np.float32(0.05)) * 5.0, 0.85)
    low, high = _VESICLE_RADIUS
    radius = low + (high - low) * uniform(seed, Stream.VESICLE_RADIUS, lattice)
    return np.where(present, radius, -2.0 * RANGE).astype(np.float32)
