"""Where windows, blocks and shards lie: integer arithmetic on boxes, per axis and in closed form.

Not here: weights (blend), arrays (volume), choice of sizes (plan). Nothing is ever listed: a window, a block or a
shard is computed from its index, so that ten million of them cost no memory.

One axis of a lattice with window 8, overlap 4 (stride 4) and two windows per block, over a volume of 14 voxels::

    voxels              0   4   8   12 14
    window 0        |--|====|--|                 core 0:4,  window -2:6    = core, - overlap (halo with `crop`)
    window 1            |--|====|--|             core 4:8,  window  2:10
    window 2                |--|====|--|         core 8:12, window  6:14
    window 3                    |--|====|--|     core 12:16, window 10:18, clipped to the volume where it is written
    block 0            |========|                core 0:8
    block 1                    |=======|         core 8:14
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]
Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of voxels; `start` and `stop` have one integer per axis and may lie outside a volume."""

    start: Index
    stop: Index

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box start {self.start} and stop {self.stop} differ in number of axes")

    @classmethod
    def of(cls, shape: Shape) -> Box:
        """Return the box of a whole array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_voxels(self) -> int:
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return self.num_voxels == 0

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __and__(self, other: Box) -> Box:
        """Return the part that both boxes share; it may be empty."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, tuple(max(a, b) for a, b in zip(start, stop, strict=True)))

    def shift(self, by: Index) -> Box:
        """Return the box moved by `by` voxels per axis."""
        start = tuple(a + d for a, d in zip(self.start, by, strict=True))
        return Box(start, tuple(b + d for b, d in zip(self.stop, by, strict=True)))

    def relative_to(self, origin: Index) -> Box:
        """Return the same box in coordinates that count from `origin`."""
        return self.shift(tuple(-o for o in origin))

    def scaled(self, factor: Shape) -> Box:
        """Return the box on a grid with `factor` times as many voxels per axis."""
        start = tuple(a * f for a, f in zip(self.start, factor, strict=True))
        return Box(start, tuple(b * f for b, f in zip(self.stop, factor, strict=True)))

    def contains(self, other: Box) -> bool:
        return other.is_empty or (self & other) == other

    def __str__(self) -> str:
        return ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True, slots=True)
class Grid:
    """A regular grid of boxes of one `cell` shape over an array of `shape`; the last cells are clipped.

    Used for blocks, shards and chunks alike: cells are disjoint, cover the array once, and are numbered in C order.
    """

    shape: Shape
    cell: Shape

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.cell) or min(self.cell) < 1 or min(self.shape) < 1:
            raise ValueError(f"no grid of cells {self.cell} over shape {self.shape}")

    @property
    def counts(self) -> Shape:
        """Number of cells per axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def index(self, number: int) -> Index:
        """Return the position per axis of cell `number`."""
        if not 0 <= number < len(self):
            raise IndexError(f"cell {number} is outside 0..{len(self) - 1}")
        return unravel(number, self.counts)

    def number(self, index: Index) -> int:
        """Return the number of the cell at `index`."""
        return ravel(index, self.counts)

    def box(self, number: int) -> Box:
        """Return the voxels of cell `number`, clipped to the array."""
        start = tuple(i * c for i, c in zip(self.index(number), self.cell, strict=True))
        stop = tuple(min(a + c, n) for a, c, n in zip(start, self.cell, self.shape, strict=True))
        return Box(start, stop)

    def touching(self, box: Box) -> Iterator[int]:
        """Yield, in ascending order, the numbers of the cells that share a voxel with `box`."""
        box = box & Box.of(self.shape)
        if box.is_empty:
            return
        lows = tuple(a // c for a, c in zip(box.start, self.cell, strict=True))
        highs = tuple(-(-b // c) for b, c in zip(box.stop, self.cell, strict=True))
        for offset in np.ndindex(*(h - low for low, h in zip(lows, highs, strict=True))):
            yield self.number(tuple(low + o for low, o in zip(lows, offset, strict=True)))


@dataclass(frozen=True, slots=True)
class Lattice:
    """Overlapping windows over a volume, gathered into blocks.

    Attributes:
        shape: the volume (z, y, x) in voxels.
        window: what the net sees (z, y, x) in voxels.
        overlap: voxels (z, y, x) that two neighbouring windows share.
        block: windows (z, y, x) per block.

    Windows step by `window - overlap`; window i along an axis starts half an overlap before its core, at
    ``i * stride - overlap // 2``, and reaches outside the volume at its faces. Windows are numbered block by block:
    ``number = block * windows_per_block + place in the block``, so that the windows of a block are neighbours
    in storage. Blocks at the far faces may hold fewer windows; the numbers they lack are never used.
    """

    shape: Shape
    window: Shape
    overlap: Shape
    block: Shape

    def __post_init__(self) -> None:
        for axis, n, w, o, b in zip("zyx", self.shape, self.window, self.overlap, self.block, strict=True):
            if n < 1 or w < 1 or b < 1 or not 0 <= o < w:
                raise ValueError(f"axis {axis}: shape {n}, window {w}, overlap {o}, block {b} make no lattice")

    @property
    def stride(self) -> Shape:
        return tuple(w - o for w, o in zip(self.window, self.overlap, strict=True))

    @property
    def margin(self) -> Shape:
        """Voxels by which a window reaches before its core; it reaches `overlap - margin` behind it."""
        return tuple(o // 2 for o in self.overlap)

    @property
    def counts(self) -> Shape:
        """Number of windows per axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def num_windows(self) -> int:
        return math.prod(self.counts)

    @property
    def blocks(self) -> Grid:
        """The blocks' cores as a grid over the volume."""
        return Grid(self.shape, tuple(b * s for b, s in zip(self.block, self.stride, strict=True)))

    @property
    def windows_per_block(self) -> int:
        return math.prod(self.block)

    @property
    def max_number(self) -> int:
        """One more than the largest window number."""
        return len(self.blocks) * self.windows_per_block

    def windows_of(self, block: int) -> list[int]:
        """Return the window numbers of `block`, ascending."""
        counts = self._windows_in(block)
        base = block * self.windows_per_block
        return [base + ravel(local, self.block) for local in np.ndindex(*counts)]

    def window_index(self, number: int) -> Index:
        """Return the position per axis of window `number`."""
        block, local = divmod(number, self.windows_per_block)
        if not 0 <= block < len(self.blocks):
            raise IndexError(f"window {number} is outside the lattice of {len(self.blocks)} blocks")
        corner = self.blocks.index(block)
        place = unravel(local, self.block)
        index = tuple(c * b + p for c, b, p in zip(corner, self.block, place, strict=True))
        if any(i >= n for i, n in zip(index, self.counts, strict=True)):
            raise IndexError(f"window {number} does not exist: block {block} at the face holds fewer windows")
        return index

    def window_box(self, number: int) -> Box:
        """Return what the net sees of window `number`; it reaches outside the volume at the faces."""
        start = self._window_start(self.window_index(number))
        return Box(start, tuple(a + w for a, w in zip(start, self.window, strict=True)))

    def input_box(self, block: int) -> Box:
        """Return the union of the windows of `block`; it reaches outside the volume at the faces."""
        first = tuple(i * b for i, b in zip(self.blocks.index(block), self.block, strict=True))
        start = self._window_start(first)
        span = zip(start, self._windows_in(block), self.stride, self.overlap, strict=True)
        return Box(start, tuple(a + n * s + o for a, n, s, o in span))

    def dense(self, position: int) -> int:
        """Return the window number at `position` in 0..num_windows-1, counting only windows that exist.

        The count of windows before a block is separable, so this needs no list.
        """
        if not 0 <= position < self.num_windows:
            raise IndexError(f"window {position} is outside 0..{self.num_windows - 1}")
        nz, ny, nx = self.counts
        bz, by, bx = self.block
        iz, rest = divmod(position, bz * ny * nx)
        cz = min(bz, nz - iz * bz)
        iy, rest = divmod(rest, cz * by * nx)
        cy = min(by, ny - iy * by)
        ix, rest = divmod(rest, cz * cy * bx)
        cx = min(bx, nx - ix * bx)
        local = unravel(rest, (cz, cy, cx))
        return self.blocks.number((iz, iy, ix)) * self.windows_per_block + ravel(local, self.block)

    def positions_of(self, block: int) -> range:
        """Return the positions, as `dense` takes them, of the windows of `block`."""
        _, ny, nx = self.counts
        bz, by, bx = self.block
        iz, iy, ix = self.blocks.index(block)
        cz, cy, cx = self._windows_in(block)
        first = iz * bz * ny * nx + cz * (iy * by * nx + cy * ix * bx)
        return range(first, first + cz * cy * cx)

    def _windows_in(self, block: int) -> Shape:
        index = self.blocks.index(block)
        return tuple(min(b, n - i * b) for i, b, n in zip(index, self.block, self.counts, strict=True))

    def _window_start(self, index: Index) -> Index:
        return tuple(i * s - m for i, s, m in zip(index, self.stride, self.margin, strict=True))


def ravel(index: Index, counts: Shape) -> int:
    """Return the C-order number of `index` in an array of `counts` cells."""
    number = 0
    for i, n in zip(index, counts, strict=True):
        number = number * n + i
    return int(number)


def unravel(number: int, counts: Shape) -> Index:
    """Return the index per axis of C-order `number` in an array of `counts` cells."""
    index = []
    for n in reversed(counts):
        number, i = divmod(number, n)
        index.append(i)
    return tuple(reversed(index))


def mirror(start: int, stop: int, size: int) -> np.ndarray:
    """Return, for each position start..stop-1 of one axis, the voxel 0..size-1 that it shows (int64).

    Outside the volume the axis is reflected without repeating its edge voxel (``2 1 0 1 2``), as often as needed.
    """
    positions = np.arange(start, stop)
    if size == 1:
        return np.zeros_like(positions)
    period = 2 * (size - 1)
    return np.abs((positions + size - 1) % period - (size - 1))


def align_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
