"""Where windows, blocks and shards lie: integer arithmetic on boxes, per axis and in closed form.

Not here: weights (blend), arrays (volumes.volume), choice of sizes (inference.plan). Nothing is ever listed: a window,
a block or a shard is computed from its index, so that ten million of them cost no memory.

One axis of a lattice with window 8, overlap 4 (stride 4) and two windows per block, over a volume of 14 voxels::

    voxels              0   4   8   12 14
    window 0        |--|====|--|                 core 0:4,  window -2:6    = core, - overlap (halo with `crop`)
    window 1            |--|====|--|             core 4:8,  window  2:10
    window 2                |--|====|--|         core 8:12, window  6:14
    window 3                    |--|====|--|     core 12:16, window 10:18, clipped to the volume where it is written
    block 0            |========|                core 0:8
    block 1                    |=======|         core 8:14

Windows that are blended add to voxels on both sides of their core. A shift of one gives the first block a window more,
and all later blocks begin one window later, so that what a block adds lies in its own core and in later ones only::

    block 0, windows 0, 1, 2    |==========|----|     core 0:8,  adds to 0:14
    block 1, window 3                    |=======|    core 8:14, adds to 10:14

The blocks of a region begin at its corner, here voxel 5. The block there begins with the first window that adds to the
region, of a net that is cropped, and the next one with the first that adds to its own core alone::

    block 0, window 0           |==|                  core 0:5,  adds to 0:4
    block 1, windows 1, 2, 3       |=========|        core 5:13, adds to 4:16, of which the region begins at 5

Windows at the edge lie inside the volume, the last one moved back; a block has those that start in its core::

    voxels              0   4   8   12 14
    block 0, windows 0, 1   |=======|                 window 0 at 0:8, window 1 at 4:12
    block 1, window 2             |=======|           window 2 at 6:14, not at 8:16

A net of valid convolutions gives less than it sees, and one of a coarser output fewer voxels. A lattice counts voxels
of the net's output, before it is scaled up: `unit`, `before` and `after` say what a window sees of the volume::

    window 4:12, unit 2, before 3, after 4    sees voxels 2 * 4 - 3 to 2 * 12 + 4 of the volume
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

Shape = tuple[int, ...]
Index = tuple[int, ...]
Triple = tuple[int, int, int]  # (z, y, x)
T = TypeVar("T")

# Of windows. edge: as MONAI steps them; even: as nnU-Net spreads them.
Placement = Literal["lattice", "edge", "even"]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of voxels; `start` and `stop` have one integer per axis and may lie outside a volume."""

    start: Index
    stop: Index

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"box start {self.start} and stop {self.stop} differ in number of axes")

    @classmethod
    def from_shape(cls, shape: Shape) -> Box:
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

    def grown(self, by: Shape) -> Box:
        """Return the box with `by` more voxels per axis on both sides."""
        start = tuple(a - n for a, n in zip(self.start, by, strict=True))
        return Box(start, tuple(b + n for b, n in zip(self.stop, by, strict=True)))

    def relative_to(self, origin: Index) -> Box:
        """Return the same box in coordinates that count from `origin`."""
        return self.shift(tuple(-o for o in origin))

    def scaled(self, factor: Shape) -> Box:
        """Return the box on a grid with `factor` times as many voxels per axis."""
        start = tuple(a * f for a, f in zip(self.start, factor, strict=True))
        return Box(start, tuple(b * f for b, f in zip(self.stop, factor, strict=True)))

    def without(self, hole: Box) -> Iterator[Box]:
        """Yield disjoint boxes that make this one together with `hole`, which lies in it or is empty."""
        if hole.is_empty:
            yield self
            return
        rest = self
        for axis, (a, b) in enumerate(zip(hole.start, hole.stop, strict=True)):
            for start, stop in ((rest.start[axis], a), (b, rest.stop[axis])):
                if start < stop:
                    yield rest.along(axis, start, stop)
            rest = rest.along(axis, a, b)

    def along(self, axis: int, start: int, stop: int) -> Box:
        """Return the box with another start and stop on `axis`."""
        return Box(_with_entry(self.start, axis, start), _with_entry(self.stop, axis, stop))

    def cut(self, axis: int, step: int, origin: int) -> Iterator[Box]:
        """Yield the box in parts along `axis`, between places that lie whole steps from `origin`."""
        start, stop = self.start[axis], self.stop[axis]
        inner = range(start + step - (start - origin) % step, stop, step)
        yield from (self.along(axis, a, b) for a, b in itertools.pairwise([start, *inner, stop]) if a < b)

    def layers(self, most: int, step: int = 1) -> Iterator[Box]:
        """Yield the box in layers along z, of `most` voxels where whole steps of `step` voxels are no more."""
        (first, *_), (depth, *rest) = self.start, self.shape
        thickness = max(step, most // max(1, math.prod(rest)) // step * step)
        for start in range(first, first + depth, thickness):
            yield self.along(0, start, min(start + thickness, self.stop[0]))

    def contains(self, other: Box) -> bool:
        return other.is_empty or (self & other) == other

    def __str__(self) -> str:
        return ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Slab:
    """Layers of windows of a block that are computed together, one slab after the other along z.

    Attributes:
        numbers: of the windows that are computed.
        seen: voxels of the volume that a block's slabs see there; it reaches outside the volume at the faces.
        reached: voxels of the output that its windows and those of slabs before it add to, and that are not made.
        made: of these, the layers that no later slab of the block adds to.
    """

    numbers: tuple[int, ...]
    seen: Box
    reached: Box
    made: Box


@dataclass(frozen=True)
class Grid:
    """A regular grid of boxes of one `cell` shape over an array of `shape`; the last cells are clipped.

    Used for blocks, shards and chunks alike: cells are disjoint, cover the array once, and are numbered in C order.
    """

    shape: Shape
    cell: Shape

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.cell) or min(self.cell) < 1 or min(self.shape) < 1:
            raise ValueError(f"no grid of cells {self.cell} over shape {self.shape}")

    @cached_property
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
        box = box & Box.from_shape(self.shape)
        if box.is_empty:
            return
        yield from map(self.number, cells(box, self.cell))

    def num_voxels_touching(self, box: Box) -> int:
        """Return the voxels of all cells that touch `box`, as if no cell were clipped."""
        return math.prod((-(-b // c) - a // c) * c for a, b, c in zip(box.start, box.stop, self.cell, strict=True))


@dataclass(frozen=True)
class Lattice:
    """Overlapping windows over a volume, gathered into blocks.

    Attributes:
        shape: the volume (z, y, x) in voxels.
        window: what a window gives (z, y, x) in voxels.
        overlap: voxels (z, y, x) that two neighbouring windows share.
        block: windows (z, y, x) per block.
        shift: windows (z, y, x) by which blocks begin later than at multiples of their windows, or earlier if negative;
            the first begins at the volume's face, and so holds as many more.
        corner: a voxel (z, y, x) at which the core of a block begins.
        first: window (z, y, x) with which this block begins; it is no later than that of `shift`.
        unit: voxels (z, y, x) of the volume that make one voxel here.
        before, after: voxels (z, y, x) of the volume that a window sees beside what it gives.
        placement: of windows, along all axes.

    On a lattice windows step by `window - overlap`; window i along an axis starts half an overlap before its core, at
    ``i * stride - overlap // 2``, and reaches outside the volume at its faces. At the edge, window i starts at
    ``i * stride``, and the last one ends with the volume; spread evenly, all starts are moved for that. A volume
    smaller than a window lies in its middle. Windows are numbered block by block:
    ``number = block * windows_per_block + place in the block``, so that the windows of a block are neighbours
    in storage. Blocks at the far faces may hold fewer windows, with a shift none at all; the numbers they lack are
    never used.
    """

    shape: Shape
    window: Shape
    overlap: Shape
    block: Shape
    shift: Shape = (0, 0, 0)
    corner: Shape = (0, 0, 0)
    first: Shape = (0, 0, 0)
    unit: Shape = (1, 1, 1)
    before: Shape = (0, 0, 0)
    after: Shape = (0, 0, 0)
    placement: Placement = "lattice"

    def __post_init__(self) -> None:
        sizes = zip("zyx", self.shape, self.window, self.overlap, self.block, self.shift, strict=True)
        for axis, n, w, o, b, s in sizes:
            if n < 1 or w < 1 or b < 1 or not 0 <= o < w:
                raise ValueError(
                    f"axis {axis}: shape {n}, window {w}, overlap {o}, block {b}, shift {s} make no lattice"
                )
        if min(self.unit) < 1 or min(*self.before, *self.after) < 0:
            raise ValueError(f"unit {self.unit}, before {self.before}, after {self.after} make no lattice")
        if self.placement != "lattice" and any((*self.shift, *self.corner, *self.first)):
            raise ValueError(f"windows of placement {self.placement} have no shift, corner or first window")
        starts = (at * b + s if at else 0 for at, b, s in zip(self._corner_block, self.block, self.shift, strict=True))
        early = zip(self.shift, self.stride, self.phase, strict=True)
        places = zip("zyx", self.shape, self.corner, self.first, starts, early, strict=True)
        for axis, n, c, first, start, (s, stride, phase) in places:
            if not 0 <= c < n or not 0 <= first <= min(start, -(-n // stride)) or s * stride + phase < 0:
                raise ValueError(f"axis {axis}: shift {s}, corner {c}, first {first} make no lattice of {n} voxels")

    @cached_property
    def stride(self) -> Shape:
        return tuple(w - o for w, o in zip(self.window, self.overlap, strict=True))

    @cached_property
    def margin(self) -> Shape:
        """Voxels by which a window reaches before its core; it reaches `overlap - margin` behind it."""
        return tuple(o // 2 for o in self.overlap)

    @cached_property
    def counts(self) -> Shape:
        """Number of windows per axis."""
        return tuple(map(len, self._starts)) if self._starts else self.cells

    @cached_property
    def cells(self) -> Shape:
        """Number of cells per axis, a stride long: the cores of windows, where these lie on a lattice."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.stride, strict=True))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """Where windows start, per axis; nothing on a lattice, whose starts need no list."""
        if self.placement == "lattice":
            return ()
        sizes = zip(self.shape, self.window, self.stride, strict=True)
        return tuple(_edge_starts(*size, even=self.placement == "even") for size in sizes)

    def start_along(self, axis: int, window: int) -> int:
        """Return the first voxel of `window` along `axis`; it may lie before the volume."""
        return self._starts[axis][window] if self._starts else window * self.stride[axis] - self.margin[axis]

    def windows_between(self, axis: int, first: int, last: int) -> range:
        """Return the windows along `axis` that start at voxels `first` to `last`, the latter excluded."""
        if self._starts:
            starts = self._starts[axis]
            return range(bisect.bisect_left(starts, first), bisect.bisect_left(starts, last))
        stride, margin, count = self.stride[axis], self.margin[axis], self.counts[axis]
        return range(*(min(max(0, -(-(voxel + margin) // stride)), count) for voxel in (first, last)))

    @property
    def seen(self) -> Shape:
        """Shape (z, y, x) of the voxels of the volume that a window sees."""
        sizes = zip(self.window, self.unit, self.before, self.after, strict=True)
        return tuple(w * u + b + a for w, u, b, a in sizes)

    def seen_along(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        """Return the voxels of the volume along `axis` that windows see to give voxels `start` to `stop` here."""
        unit = self.unit[axis]
        return start * unit - self.before[axis], stop * unit + self.after[axis]

    @property
    def is_padded(self) -> bool:
        """Whether windows hold a constant outside the volume; else they show it mirrored."""
        return self.placement != "lattice" and not any((*self.before, *self.after))

    def _seen_box(self, box: Box) -> Box:
        sides = [self.seen_along(axis, a, b) for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True))]
        return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))

    @property
    def num_windows(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def blocks(self) -> Grid:
        """The blocks' cores as a grid, whose cells count from `phase` voxels before the volume."""
        return Grid(tuple(n + p for n, p in zip(self.shape, self.phase, strict=True)), self._block_cell)

    @cached_property
    def phase(self) -> Shape:
        """Voxels by which the core of the first block would begin before the volume."""
        return tuple(-c % size for c, size in zip(self.corner, self._block_cell, strict=True))

    @cached_property
    def _block_cell(self) -> Shape:
        return tuple(b * s for b, s in zip(self.block, self.stride, strict=True))

    @cached_property
    def _corner_block(self) -> Index:
        """The place of the block at the corner."""
        return tuple(-(-c // size) for c, size in zip(self.corner, self._block_cell, strict=True))

    def core_box(self, block: int) -> Box:
        """Return the voxels of the core of `block`."""
        return self.blocks.box(block).relative_to(self.phase) & Box.from_shape(self.shape)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that hold windows."""
        along = (range(n) for n in self.blocks.counts)
        return math.prod(sum(bool(self.windows_along(axis, k)) for k in ks) for axis, ks in enumerate(along))

    @cached_property
    def places(self) -> Shape:
        """Windows per axis of the largest block."""
        if self._starts:
            along = ((len(self.windows_along(axis, k)) for k in range(n)) for axis, n in enumerate(self.blocks.counts))
            return tuple(map(max, along))
        sides = zip(self.block, self.shift, self._corner_block, self.first, self.counts, strict=True)
        return tuple(min(b + max(0, s, at * b + s - first), n) for b, s, at, first, n in sides)

    @cached_property
    def windows_per_block(self) -> int:
        """Window numbers that each block takes, used or not."""
        return math.prod(self.places)

    @property
    def max_number(self) -> int:
        """One more than the largest window number."""
        return len(self.blocks) * self.windows_per_block

    def windows_of(self, block: int) -> list[int]:
        """Return the window numbers of `block`, ascending."""
        counts, places = self._windows_in(block), self.places
        base = block * self.windows_per_block
        return [base + ravel(local, places) for local in np.ndindex(*counts)]

    def windows_along(self, axis: int, block: int) -> range:
        """Return the windows along `axis` of the blocks at `block` of that axis; empty where they hold none."""
        return range(self._first_window(axis, block), self._first_window(axis, block + 1))

    def block_along(self, axis: int, window: int) -> int:
        """Return the place along `axis` of the block that holds `window` of that axis."""
        if self._starts:
            return max(0, self._starts[axis][window] // self._block_cell[axis])
        block = max(0, (window - self.shift[axis]) // self.block[axis])
        return max(block, self._corner_block[axis]) if window >= self.first[axis] else block

    def _first_window(self, axis: int, block: int) -> int:
        if self._starts:
            return bisect.bisect_left(self._starts[axis], block * self._block_cell[axis]) if block else 0
        at, first = self._corner_block[axis], self.first[axis]
        if block in (0, at):
            return first if block else 0
        later = min(max(0, block * self.block[axis] + self.shift[axis]), self.counts[axis])
        return min(later, first) if block < at else later

    def window_index(self, number: int) -> Index:
        """Return the position per axis of window `number`."""
        block, local = divmod(number, self.windows_per_block)
        if not 0 <= block < len(self.blocks):
            raise IndexError(f"window {number} is outside the lattice of {len(self.blocks)} blocks")
        place = unravel(local, self.places)
        along = [self.windows_along(axis, k) for axis, k in enumerate(self.blocks.index(block))]
        if any(p >= len(windows) for p, windows in zip(place, along, strict=True)):
            raise IndexError(f"window {number} does not exist: block {block} holds fewer windows")
        return tuple(windows[p] for p, windows in zip(place, along, strict=True))

    def window_box(self, number: int) -> Box:
        """Return the box that window `number` sees; it reaches outside the volume at the faces."""
        start = self.window_start(self.window_index(number))
        return self._seen_box(Box(start, tuple(a + w for a, w in zip(start, self.window, strict=True))))

    def input_box(self, block: int) -> Box:
        """Return the box that the windows of `block`, of which there are some, see; it may leave the volume."""
        along = [self.windows_along(axis, k) for axis, k in enumerate(self.blocks.index(block))]
        start, last = (self.window_start(tuple(windows[i] for windows in along)) for i in (0, -1))
        return self._seen_box(Box(start, tuple(a + w for a, w in zip(last, self.window, strict=True))))

    def dense(self, position: int) -> int:
        """Return the window number at `position` in 0..num_windows-1, counting only windows that exist.

        The count of windows before a block is separable, so this needs no list.
        """
        if not 0 <= position < self.num_windows:
            raise IndexError(f"window {position} is outside 0..{self.num_windows - 1}")
        _, ny, nx = self.counts
        iz = self.block_along(0, position // (ny * nx))
        slab, rest = self.windows_along(0, iz), position - self._first_window(0, iz) * ny * nx
        iy = self.block_along(1, rest // (len(slab) * nx))
        row, rest = self.windows_along(1, iy), rest - self._first_window(1, iy) * len(slab) * nx
        ix = self.block_along(2, rest // (len(slab) * len(row)))
        own, rest = self.windows_along(2, ix), rest - self._first_window(2, ix) * len(slab) * len(row)
        local = unravel(rest, (len(slab), len(row), len(own)))
        return self.blocks.number((iz, iy, ix)) * self.windows_per_block + ravel(local, self.places)

    def positions_of(self, block: int) -> range:
        """Return the positions, as `dense` takes them, of the windows of `block`."""
        _, ny, nx = self.counts
        cz, cy, cx = self._windows_in(block)
        z, y, x = (self._first_window(axis, k) for axis, k in enumerate(self.blocks.index(block)))
        first = z * ny * nx + cz * (y * nx + cy * x)
        return range(first, first + cz * cy * cx)

    def _windows_in(self, block: int) -> Shape:
        return tuple(len(self.windows_along(axis, k)) for axis, k in enumerate(self.blocks.index(block)))

    def window_start(self, index: Index) -> Index:
        """Return the first voxel of the window at `index`."""
        return tuple(self.start_along(axis, i) for axis, i in enumerate(index))


def _edge_starts(size: int, window: int, stride: int, *, even: bool) -> tuple[int, ...]:
    """Return where windows start along an axis of `size` voxels that they cover from its first to its last voxel.

    As MONAI's `dense_patch_slices` has them, which moves the last one back; or `even`, as nnU-Net's
    `compute_steps_for_sliding_window`. Both pad a small volume on both sides.
    """
    if size <= window:
        return (-((window - size) // 2),)
    last = size - window
    count = -(-last // stride) + 1
    if even:
        return tuple(round(last / (count - 1) * i) for i in range(count))
    return tuple(min(i * stride, last) for i in range(count))


def _with_entry(index: Index, axis: int, value: int) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])


def cells(box: Box, cell: Shape) -> Iterator[Index]:
    """Yield, in C order, the index of every cell of shape `cell`, counted from the origin, that `box` touches."""
    return itertools.product(*(range(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, cell, strict=True)))


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


def mirrored_runs(start: int, stop: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the positions start..stop-1 of one axis in runs, each with the voxels that it shows; see `mirror`.

    Positions are counted from `start`, voxels from the first of those that are shown; in a mirror image they descend.
    """
    places = mirror(start, stop, size)
    places -= places.min()
    turns = np.flatnonzero(np.diff(places, n=2)) + 2 if size > 1 else np.arange(1, len(places))
    for first, last in itertools.pairwise([0, *turns.tolist(), len(places)]):
        low, high = int(places[first]), int(places[last - 1])
        shown = slice(low, high + 1) if low <= high else slice(low, high - 1 if high else None, -1)
        yield slice(first, last), shown


def mirrored(box: Box, shape: Sequence[int]) -> Box:
    """Return the smallest box around the voxels of a volume of `shape` that `box` shows, mirrored at its faces."""
    if Box.from_shape(tuple(shape)).contains(box):
        return box
    seen = [mirror(a, b, n) for a, b, n in zip(box.start, box.stop, shape, strict=True)]
    return Box(tuple(int(places.min()) for places in seen), tuple(int(places.max()) + 1 for places in seen))


def triple(values: Iterable[T]) -> tuple[T, T, T]:
    """Return three values as (z, y, x): a type of a known length."""
    z, y, x = values
    return z, y, x


def align_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def divisor_near(value: int, target: int) -> int:
    """Return the divisor of `value` nearest to `target` by ratio."""
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    return min(divisors, key=lambda d: max(d / target, target / d) if target > 0 else d)
