"""Boxes of blocks, in which a graph is solved: each level joins two of the level before, up to the whole volume.

Not here: the graph (solve). Units are numbered level by level, the finest first::

    blocks      0   1   2   3   4        children of units 0, 1, 2
    level 0     | 0   | | 1   | | 2      children of units 3, 4
    level 1     | 3           | | 4      children of unit 5
    level 2     | 5
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from volpipe.geometry.grid import Box, Grid, Shape

EDGE = 256  # voxels of a box of the finest level, of blocks no longer than that
SLAB = 1 << 33  # voxels whose objects are numbered by one task


@dataclass(frozen=True)
class Boxes:
    """The boxes over `blocks`, and the slabs of voxels by which objects are numbered.

    Attributes:
        edge: voxels of a box of the finest level.
        slab: voxels of a slab, which is a range of voxels in C order.
    """

    blocks: Grid
    edge: int = EDGE
    slab: int = SLAB

    @cached_property
    def levels(self) -> tuple[Grid, ...]:
        """The boxes of each level, in blocks (z, y, x).

        Two boxes are joined at a time, along the axis where they are shortest: at the faces between eight lies three
        times as much.
        """
        cell, counts = tuple(max(1, self.edge // b) for b in self.blocks.cell), self.blocks.counts
        levels = [Grid(counts, cell)]
        while len(levels[-1]) > 1:
            sizes = zip(cell, self.blocks.cell, counts, strict=True)
            _, shortest = min((c * b, axis) for axis, (c, b, n) in enumerate(sizes) if c < n)
            cell = tuple(c * (2 if axis == shortest else 1) for axis, c in enumerate(cell))
            levels.append(Grid(counts, cell))
        return tuple(levels)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(sum(map(len, self.levels[:level])) for level in range(len(self.levels)))

    def __len__(self) -> int:
        return sum(map(len, self.levels))

    @property
    def num_slabs(self) -> int:
        return -(-math.prod(self.blocks.shape) // self.slab)

    def level(self, unit: int) -> int:
        """Return the level of `unit`."""
        return sum(unit >= start for start in self._starts) - 1

    def in_blocks(self, unit: int) -> Box:
        """Return the box of `unit` in blocks (z, y, x)."""
        level = self.level(unit)
        return self.levels[level].box(unit - self._starts[level])

    def box(self, unit: int) -> Box:
        """Return the box of `unit` in voxels (z, y, x)."""
        return self.in_blocks(unit).scaled(self.blocks.cell) & Box.from_shape(self.blocks.shape)

    def children(self, unit: int) -> list[int]:
        """Return the units in `unit`, of the finest level the blocks, ascending."""
        level, box = self.level(unit), self.in_blocks(unit)
        if not level:
            return list(Grid(self.blocks.counts, (1, 1, 1)).touching(box))
        return [self._starts[level - 1] + number for number in self.levels[level - 1].touching(box)]

    def parent(self, unit: int) -> int | None:
        """Return the unit around `unit`; None for the whole volume."""
        level = self.level(unit) + 1
        if level == len(self.levels):
            return None
        return self._starts[level] + next(self.levels[level].touching(self.in_blocks(unit)))

    def around(self, block: int) -> Iterator[int]:
        """Yield the units around `block`, the finest first."""
        place = self.blocks.index(block)
        box = Box(place, tuple(i + 1 for i in place))
        yield from (start + next(grid.touching(box)) for grid, start in zip(self.levels, self._starts, strict=True))

    def has_blocks(self, unit: int, numbers: np.ndarray) -> np.ndarray:
        """Return for `numbers` of blocks whether they lie in `unit`."""
        box, places = self.in_blocks(unit), np.unravel_index(numbers, self.blocks.counts)
        ends = zip(places, box.start, box.stop, strict=True)
        return np.asarray(np.all([(p >= a) & (p < b) for p, a, b in ends], axis=0))

    def slabs(self, unit: int) -> range:
        """Return the slabs that may hold the first voxel of an object in `unit`."""
        plane, box = self._plane, self.box(unit)
        return range(box.start[0] * plane // self.slab, (box.stop[0] * plane - 1) // self.slab + 1)

    def units_in(self, slab: int) -> Iterator[int]:
        """Yield the units of which objects may begin in `slab`, ascending."""
        planes = self.slab_box(slab)
        depth = self.blocks.cell[0]
        blocks = Box((planes.start[0] // depth, 0, 0), (-(-planes.stop[0] // depth), *self.blocks.counts[1:]))
        for grid, start in zip(self.levels, self._starts, strict=True):
            yield from (start + number for number in grid.touching(blocks))

    def slab_box(self, slab: int) -> Box:
        """Return the planes in which `slab` lies, in voxels (z, y, x)."""
        first, last = (n // self._plane for n in (slab * self.slab, (slab + 1) * self.slab - 1))
        return Box((first, 0, 0), (last + 1, *self.blocks.shape[1:])) & Box.from_shape(self.blocks.shape)

    @property
    def _plane(self) -> int:
        """Voxels of a plane along y and x."""
        return math.prod(self.blocks.shape[1:])


def border(bounds: np.ndarray, box: Box, shape: Shape, reach: Shape) -> np.ndarray:
    """Return for each of `bounds` (n, 6), first and last z, y, x, whether it lies at a face of `box` that is no face of
    the volume of `shape`, `reach` voxels deep."""
    low = (bounds[:, :3] - box.start < reach) & (np.array(box.start) > 0)
    high = (np.array(box.stop) - bounds[:, 3:] < reach) & (np.array(box.stop) < shape)
    return np.asarray((low | high).any(axis=1))
