"""The selection: the windows, blocks and shards of a plan that its region of interest, mask and empty space leave.

Not here: how a recipe says it (roi). The core of a window is its cell, which is selected or not, whole: one bit
each, in C order. An output voxel is selected if it lies in the region and in a selected cell. Whatever adds to a
selected voxel is computed, so that it has the bits of the whole run; the sums of other voxels may be partial, and they
are written as 0::

    cells            |----|----|####|----|----|----|     one is selected
    windows                 |=========|                  computed: they overlap it (hann)
                       |=========|  |=========|
    output           |0000|0000|####|0000|0000|0000|
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from volpipe.errors import PlanError, RunError
from volpipe.geometry.blend import reach
from volpipe.geometry.block_shape import SLAB_VOXELS
from volpipe.geometry.grid import Box, Slab, mirrored, ravel
from volpipe.inference.plan import Plan, load_plan
from volpipe.syntax import one_thread
from volpipe.volumes.storage.paths import whole_file
from volpipe.volumes.volume import Volume

SELECTION_FILE = "wanted.npy"  # in the folder of a run
Range = tuple[int, int]  # half-open; empty where it does not ascend


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected part of `plan`.

    Attributes:
        cells: (z, y, x / 8), uint8: a bit for each window's core, packed along x; None where all are selected.
        unwritten: a flag for each shard of level 0, whether it is still to be written; None where all are that a
            computed block adds to.
    """

    plan: Plan
    cells: np.ndarray | None = None
    unwritten: np.ndarray | None = None

    @property
    def arrays(self) -> tuple[Selection, ...]:
        """The selected part of each array of the output."""
        return self._array_selections or (self,)

    @cached_property
    def _array_selections(self) -> tuple[Selection, ...]:
        """The selections of several arrays; one of a single array would refer to itself until garbage is collected."""
        plans = self.plan.arrays
        return () if len(plans) == 1 else tuple(replace(self, plan=plan) for plan in plans)

    @property
    def is_everything(self) -> bool:
        return self.cells is None and self.plan.is_whole

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the cells, "" where all are selected."""
        return "" if self.cells is None else hashlib.sha256(self.cells.tobytes()).hexdigest()[:16]

    @cached_property
    def num_cells(self) -> int:
        """Number of windows whose cores are selected."""
        return sum(int(np.unpackbits(slab).sum()) for slab in self.cells) if self.cells is not None else 0

    @cached_property
    def blocks(self) -> np.ndarray | None:
        """A flag for each block: whether a window of it is computed; None where all are."""
        if self.is_everything and self.plan.num_active == len(self.plan.blocks):
            return None
        return self._flags(
            [[self._cells_of(axis, r) for r in along] for axis, along in enumerate(self.plan.reaches)]
        ).ravel()

    @property
    def owners(self) -> np.ndarray | None:
        """A flag for each block: whether one of its cells touches the region; None where all do."""
        if self.plan.is_whole:
            return None
        inside = []
        for axis, (count, side) in enumerate(zip(self.plan.blocks.counts, _sides(self.plan.region), strict=True)):
            first, last = self._cells_of(axis, side)
            own = (_own_cells(self.plan, axis, k) for k in range(count))
            inside.append([max(cells.start, first) < min(cells.stop, last) for cells in own])
        return crossed(inside).ravel()

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks that are computed."""
        return len(self.plan.blocks) if self.blocks is None else int(np.count_nonzero(self.blocks))

    @cached_property
    def num_windows(self) -> int:
        """Number of windows that are computed."""
        z, *others = ([*self._cells_under(axis, range(n))] for axis, n in enumerate(self.plan.lattice.counts))
        if self.cells is None:
            return math.prod(sum(a < b for a, b in along) for along in (z, *others))
        return sum(int(np.count_nonzero(self._flags([[slab], *others]))) for slab in z)

    def shards(self, level: int) -> np.ndarray | None:
        """Return a flag for each shard of `level`, whether it is written; None where all are."""
        if self.cells is None:
            return None
        plan, grid = self.plan, self.plan.shards(level)
        ranges = []
        for axis, (count, size) in enumerate(zip(grid.counts, grid.cell, strict=True)):
            factor, end = plan.factors[level][axis], (plan.shown_shape if level else plan.out_shape)[axis]
            along = ((i * size * factor, min((i + 1) * size * factor, end)) for i in range(count))
            made = (self._made_range(axis, r) if level else r for r in along)
            ranges.append([self._cells_of(axis, self._lattice_range(axis, r)) for r in made])
        return self._flags(ranges).ravel()

    @cached_property
    def num_sums(self) -> int:
        """Number of shards that are written and are added from several blocks' sums."""
        flags = self.shards(0)
        if flags is None:
            return self.plan.num_sums
        direct = crossed(self.plan.direct).ravel()
        return int(np.count_nonzero(flags & ~direct))

    def is_unwritten(self, shard: int) -> bool:
        """Return whether `shard` of level 0 is selected, and still to be written."""
        return (self.unwritten is None or bool(self.unwritten[shard])) and self.touches(self.plan.shards().box(shard))

    def has_block(self, block: int) -> bool:
        """Return whether some window of `block` is computed."""
        return self.touches(self.plan.sum_box(block))

    def touches(self, box: Box) -> bool:
        """Return whether a voxel of `box` of the output is selected."""
        ranges = zip(box.start, box.stop, strict=True)
        spans = [self._cells_of(axis, self._lattice_range(axis, r)) for axis, r in enumerate(ranges)]
        return all(a < b for a, b in spans) if self.cells is None else bool(self._unpacked(spans).any())

    def windows_of(self, block: int) -> list[int]:
        """Return the numbers, ascending, of the windows of `block` that are computed."""
        lattice = self.plan.lattice
        if self.is_everything:
            return lattice.windows_of(block)
        return [self._window_number(block, place) for place in self._computed(block).tolist()]

    def input_box(self, block: int) -> Box:
        """Return the voxels that the computed windows of `block` see; it reaches outside the volume at the faces."""
        if self.is_everything:
            return self.plan.lattice.input_box(block)
        places = self._computed(block)
        first, last = (
            self._window_number(block, corner.tolist()) for corner in (places.min(axis=0), places.max(axis=0))
        )
        return Box(self.plan.lattice.window_box(first).start, self.plan.lattice.window_box(last).stop)

    @property
    def seen(self) -> Box:
        """The smallest box of the volume (z, y, x) around the voxels that its windows see."""
        blocks = range(len(self.plan.blocks)) if self.blocks is None else np.flatnonzero(self.blocks)
        first, last = (self.input_box(int(block)) for block in (blocks[0], blocks[-1]))
        return mirrored(Box(first.start, last.stop), self.plan.source.shape)

    def slabs(self, block: int) -> list[Slab]:
        """Return the slabs of `block` that have windows to be computed, ascending."""
        plan, lattice = self.plan, self.plan.lattice
        numbers, seen, total = self.windows_of(block), self.input_box(block), plan.sum_box(block)
        layers = lattice.windows_along(0, lattice.blocks.index(block)[0])
        per_layer = lattice.places[1] * lattice.places[2]
        slabs, base = list[Slab](), block * lattice.windows_per_block

        def output(voxel: int) -> int:
            return min(max((voxel - plan.region.start[0]) * plan.net.scale[0], total.start[0]), total.stop[0])

        for place, group in itertools.groupby(numbers, lambda number: (number - base) // per_layer // plan.slab):
            own = tuple(group)
            low, high = lattice.window_box(own[0]), lattice.window_box(own[-1])
            along = layers[place * plan.slab : (place + 1) * plan.slab]
            (first, _), (_, last) = (reach(plan.blend, lattice, 0, along[i]) for i in (0, -1))
            start, stop = output(first), output(last)
            if slabs:
                slabs[-1] = replace(slabs[-1], made=slabs[-1].reached & total.along(0, total.start[0], start))
            reached = total.along(0, start, stop)
            slabs.append(Slab(own, seen.along(0, low.start[0], high.stop[0]), reached, reached))
        return slabs

    def mask(self, box: Box) -> np.ndarray | None:
        """Return for each voxel of `box` of the output whether it is selected, (z, y, x), bool; None where all are."""
        if self.cells is None:
            return None
        cells, places = (
            self._unpacked([self._cells_of(i, self._lattice_range(i, r)) for i, r in enumerate(_sides(box))]),
            [],
        )
        for axis, (start, stop) in enumerate(_sides(box)):
            scale, stride = self.plan.net.scale[axis], self.plan.lattice.stride[axis]
            cell = (self.plan.region.start[axis] + np.arange(start, stop) // scale) // stride
            places.append(cell - cell[0])
        return None if cells.all() else cells[np.ix_(*places)]

    def input_mask(self, box: Box) -> np.ndarray:
        """Return for each voxel of `box` of the volume whether it is selected, (z, y, x), bool."""
        flags = np.zeros(box.shape, bool)
        inside = box & self.plan.roi_box
        if not inside.is_empty:
            unit = self.plan.net.shrink
            ends = zip(inside.start, inside.stop, unit, strict=True)
            cells = Box(*zip(*((a // u, -(-b // u)) for a, b, u in ends), strict=True))
            mask, (z, y, x) = self.mask(self.plan.in_output(cells)), self.plan.net.scale
            if mask is not None:
                mask = mask[::z, ::y, ::x]
                places = zip(inside.start, inside.stop, cells.start, unit, strict=True)
                mask = mask[np.ix_(*(np.arange(a, b) // u - c for a, b, c, u in places))]
            flags[inside.relative_to(box.start).slices] = True if mask is None else mask
        return flags

    @cached_property
    def num_voxels(self) -> int:
        """Number of voxels of the output that are selected, of one channel."""
        if self.cells is None:
            return math.prod(self.plan.out_shape)
        sizes = []
        for axis, stride in enumerate(self.plan.lattice.stride):
            starts = np.arange(self.plan.lattice.cells[axis]) * stride
            low, high = self.plan.region.start[axis], self.plan.region.stop[axis]
            lengths = np.minimum(starts + stride, high) - np.maximum(starts, low)
            sizes.append(np.maximum(lengths, 0) * self.plan.net.scale[axis])
        z, y, x = sizes
        rows = (np.unpackbits(slab, axis=-1, count=len(x)) for slab in self.cells)
        return int(sum(int(n) * int(y @ flags.astype(np.int64) @ x) for n, flags in zip(z, rows, strict=True)))

    def _computed(self, block: int) -> np.ndarray:
        """Return the places (z, y, x) within `block` of the windows that are computed, (windows, 3)."""
        lattice = self.plan.lattice
        along = (lattice.windows_along(axis, k) for axis, k in enumerate(lattice.blocks.index(block)))
        return np.argwhere(self._flags([self._cells_under(axis, windows) for axis, windows in enumerate(along)]))

    def _cells_under(self, axis: int, windows: Iterable[int]) -> list[Range]:
        """Return for each of `windows` along `axis` the cells to which it adds."""
        return [self._cells_of(axis, reach(self.plan.blend, self.plan.lattice, axis, i)) for i in windows]

    def _window_number(self, block: int, place: Sequence[int]) -> int:
        lattice = self.plan.lattice
        return block * lattice.windows_per_block + ravel(tuple(place), lattice.places)

    def _made_range(self, axis: int, side: Range) -> Range:
        """Return the voxels of level 0 from which voxels `side` of the finest level that readers see are made."""
        if not self.plan.finest:
            return side
        shape = self.plan.shown_shape
        box = self.plan.finer_box(1, Box.from_shape(shape).along(axis, *side))
        return box.start[axis], box.stop[axis]

    def _lattice_range(self, axis: int, side: Range) -> Range:
        """Return the voxels of the lattice that make output voxels `side`."""
        first, scale = self.plan.region.start[axis], self.plan.net.scale[axis]
        return first + side[0] // scale, first - (-side[1] // scale)

    def _cells_of(self, axis: int, side: Range) -> Range:
        """Return the cells that voxels `side` of the lattice touch within the region."""
        start, stop = max(side[0], self.plan.region.start[axis]), min(side[1], self.plan.region.stop[axis])
        stride = self.plan.lattice.stride[axis]
        return (start // stride, -(-stop // stride)) if start < stop else (0, 0)

    def _flags(self, ranges: Sequence[Sequence[Range]]) -> np.ndarray:
        """Return for each combination of ranges of cells (z, y, x) whether one of these cells is selected, bool."""
        if self.cells is None:
            return crossed([a < b for a, b in along] for along in ranges)
        out = np.zeros([len(along) for along in ranges], bool)
        rows, columns = (_hull(along) for along in ranges[1:])
        inner = [[(0, 1)], _shift_ranges(ranges[1], rows[0]), _shift_ranges(ranges[2], columns[0])]
        for i, slab in enumerate(ranges[0]):  # slab by slab: the cells are never unpacked all at once
            flags = self._unpacked([slab, rows, columns])
            out[i] = any_within(np.asarray(flags.any(axis=0, keepdims=True)), inner)[0]
        return out

    def _unpacked(self, ranges: Sequence[Range]) -> np.ndarray:
        """Return the cells in ranges (z, y, x), bool."""
        assert self.cells is not None
        (z0, z1), (y0, y1), (x0, x1) = ranges
        bits = np.unpackbits(self.cells[z0:z1, y0:y1, x0 // 8 : -(-x1 // 8)], axis=-1)
        return bits[..., x0 % 8 : x0 % 8 + max(0, x1 - x0)].astype(bool)


def crossed(along: Iterable[Sequence[bool] | np.ndarray]) -> np.ndarray:
    """Return for each combination of places (z, y, x) whether all three flags are set, bool."""
    z, y, x = (np.asarray(flags, bool) for flags in along)
    return np.asarray(z[:, None, None] & y[:, None] & x)


def any_within(flags: np.ndarray, ranges: Sequence[Sequence[Range]]) -> np.ndarray:
    """Return for each combination of ranges (z, y, x) whether `flags` (z, y, x) has one within, bool."""
    for axis, along in enumerate(ranges):
        turned = np.moveaxis(flags, axis, 0)
        flags = np.moveaxis(np.stack([turned[a:b].any(axis=0) for a, b in along]), 0, axis)
    return flags


def scan(plan: Plan, volume: Volume, mask: Volume | None, block: int) -> str:
    """Return the selected cells of `block`, packed, in hexadecimal digits; "" where there are none.

    A cell is selected if the region of interest and a nonzero voxel of the mask touch it, and if its window, halo
    included, is not empty.
    """
    cores = _cores(plan, block)
    cells = crossed([a < b for a, b in along] for along in cores)
    if mask is not None and cells.any():
        cells &= _masked(plan, mask, cores)
    empty = plan.recipe.input.empty
    if empty == "missing" and cells.any():
        cells &= _windows_stored(plan, volume, block, cells)
    elif empty is not None and cells.any():
        cells &= _windows_not_empty(plan, volume, block, cells, float(empty))
    return np.packbits(cells).tobytes().hex() if cells.any() else ""


def _own_cells(plan: Plan, axis: int, place: int) -> range:
    """Return the cells along `axis` that begin in the cores of the blocks at `place` of that axis."""
    lattice, cell = plan.lattice, plan.blocks.cell[axis]
    ends = (k * cell - lattice.phase[axis] for k in (place, place + 1))
    first, last = (min(max(0, -(-end // lattice.stride[axis])), lattice.cells[axis]) for end in ends)
    return range(first, last)


def _cells_in(plan: Plan, block: int) -> list[range]:
    """Return the cells, per axis, that begin in the core of `block`; a scan looks at these."""
    return [_own_cells(plan, axis, k) for axis, k in enumerate(plan.blocks.index(block))]


def _cores(plan: Plan, block: int) -> list[list[Range]]:
    """Return the voxels of the volume within the region, per axis, in each cell of `block`."""
    steps = (s * u for s, u in zip(plan.lattice.stride, plan.lattice.unit, strict=True))
    sides = zip(_cells_in(plan, block), steps, *plan.roi, strict=True)
    return [[(max(i * s, low), min((i + 1) * s, high)) for i in own] for own, s, low, high in sides]


def _seen_of(plan: Plan, axis: int, cell: int) -> Range:
    """Return the voxels of the volume that the window around `cell` along `axis` sees; they may lie outside."""
    lattice = plan.lattice
    start = cell * lattice.stride[axis] - lattice.margin[axis]
    return lattice.seen_along(axis, start, start + lattice.window[axis])


def _masked(plan: Plan, mask: Volume, cores: Sequence[Sequence[Range]]) -> np.ndarray:
    """Return for each combination of `cores` whether the mask has a voxel over it that is not zero."""
    over, whole = _mask_box(plan, cores)
    if whole.is_empty:
        return np.zeros([len(along) for along in over], bool)
    reader = mask.open(live=True)

    def flags(box: Box) -> np.ndarray:
        data = reader.read(box)[0]
        if np.issubdtype(data.dtype, np.floating) and np.isnan(data).any():
            raise PlanError(f"mask {mask} has NaN in its box {box}; make these voxels 0 or 1")
        return np.asarray(data != 0)

    return _any_in_layers(whole, over, mask.spatial_chunks[0], flags)


def _mask_box(plan: Plan, cores: Sequence[Sequence[Range]]) -> tuple[list[list[Range]], Box]:
    """Return the voxels of the mask over `cores`, per axis, and the box of all of them, which may be empty."""
    position = plan.mask
    assert position is not None
    over = [[position.under(axis, a, b) for a, b in along] for axis, along in enumerate(cores)]
    hulls = [_hull(along) for along in over]
    return over, Box(tuple(a for a, _ in hulls), tuple(b for _, b in hulls))


def scanned_box(plan: Plan, block: int) -> Box:
    """Return the union of the windows of the cells of `block`; it reaches outside the volume at the faces."""
    ends = []
    for axis, own in enumerate(_cells_in(plan, block)):
        seen = [_seen_of(plan, axis, own[i]) for i in (0, -1)] if own else [(0, 0), (0, 0)]
        ends.append((seen[0][0], seen[1][1]))
    return Box(*zip(*ends, strict=True))


def scanned_boxes(plan: Plan, block: int) -> tuple[Box | None, Box | None]:
    """Return the boxes of the volume and of the mask that a scan of `block` reads; None where it reads none."""
    of_mask = None if plan.mask is None else _mask_box(plan, _cores(plan, block))[1]
    return (
        None if plan.recipe.input.empty is None else scanned_box(plan, block),
        None if of_mask is None or of_mask.is_empty else of_mask,
    )


def _windows_not_empty(plan: Plan, volume: Volume, block: int, cells: np.ndarray, value: float) -> np.ndarray:
    """Return for each window of `block` whose flag in `cells` is set whether it holds anything but `value`."""
    seen = [[_seen_of(plan, axis, i) for i in own] for axis, own in enumerate(_cells_in(plan, block))]
    filled = (np.flatnonzero(cells.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3))
    box = Box(
        *zip(*((along[some[0]][0], along[some[-1]][1]) for along, some in zip(seen, filled, strict=True)), strict=True)
    )
    ranges = [[(max(low, a), max(low, b)) for a, b in along] for low, along in zip(box.start, seen, strict=True)]
    reader = volume.open(live=True)
    return _any_in_layers(
        box, ranges, volume.spatial_chunks[0], lambda layer: (reader.read_mirrored(layer) != value).any(axis=0)
    )


def _any_in_layers(
    box: Box, ranges: Sequence[Sequence[Range]], step: int, flags: Callable[[Box], np.ndarray]
) -> np.ndarray:
    """Return for each combination of ranges (z, y, x) whether one of the `flags` in it is set, bool.

    These are looked at in layers of `box`, whole steps of `step` voxels, so that few are in memory at a time.
    """
    thickness = step * max(1, SLAB_VOXELS // (step * math.prod(box.shape[1:])))
    along_z, *sides = ([(a - start, b - start) for a, b in r] for r, start in zip(ranges, box.start, strict=True))
    layers = []
    for layer in box.cut(0, thickness, 0):
        each = [(i, i + 1) for i in range(layer.shape[0])]
        layers.append(any_within(flags(layer), [each, *sides]))
    whole = [[(i, i + 1) for i in range(len(side))] for side in sides]
    return any_within(np.concatenate(layers), [along_z, *whole])


def _windows_stored(plan: Plan, volume: Volume, block: int, cells: np.ndarray) -> np.ndarray:
    """Return for each window of `block` whose flag in `cells` is set whether a chunk under it is stored."""
    reader, stored = volume.open(), np.zeros_like(cells)
    seen = [[_seen_of(plan, axis, i) for i in own] for axis, own in enumerate(_cells_in(plan, block))]
    if not reader.is_stored(scanned_box(plan, block)):
        return stored
    for place in np.argwhere(cells).tolist():
        stored[tuple(place)] = reader.is_stored(
            Box(*zip(*(along[i] for i, along in zip(place, seen, strict=True)), strict=True))
        )
    return stored


def gather(plan: Plan, results: Iterable[tuple[int, str]]) -> Selection:
    """Return the selection that `results` of `scan` make: the number of each block, and its cells; the last counts."""
    nz, ny, nx = plan.lattice.cells
    selection, is_put = Selection(plan, np.zeros((nz, ny, -(-nx // 8)), np.uint8)), np.zeros(len(plan.blocks), bool)
    for block, digits in results:
        if digits or is_put[block]:
            empty = bytes(-(-max(plan.lattice.windows_per_block, math.prod(plan.block)) // 8))
            _set_cells(selection, block, np.frombuffer(bytes.fromhex(digits) or empty, np.uint8))
            is_put[block] = True
    return selection


def _set_cells(selection: Selection, block: int, packed: np.ndarray) -> None:
    assert selection.cells is not None
    z, y, x = _cells_in(selection.plan, block)
    own = np.unpackbits(packed, count=len(z) * len(y) * len(x)).reshape(len(z), len(y), len(x))
    place = selection.cells[z.start : z.stop, y.start : y.stop, x.start // 8 : -(-x.stop // 8)]
    bits = np.unpackbits(place, axis=-1)
    bits[..., x.start % 8 : x.start % 8 + len(x)] = own
    place[...] = np.packbits(bits, axis=-1)


def store_selection(path: Path, selection: Selection) -> None:
    """Write the cells to `path`, whole or not at all; a resume rests on them."""
    assert selection.cells is not None
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, selection.cells)


def read_selection(path: Path, plan: Plan) -> Selection:
    """Return the selection of `plan` whose cells are stored at `path`.

    Raises:
        RunError: they are damaged, or of another plan.
    """
    nz, ny, nx = plan.lattice.cells
    try:
        with one_thread:
            cells = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise RunError(f"{path} cannot be read ({error}); use --fresh to start over") from error
    if not isinstance(cells, np.ndarray) or cells.dtype != np.uint8 or cells.shape != (nz, ny, -(-nx // 8)):
        raise RunError(f"{path} does not hold the {nz} × {ny} × {nx} windows of its plan; use --fresh to start over")
    return Selection(plan, cells)


def store_unwritten(path: Path, unwritten: np.ndarray) -> str:
    """Write the flags of the shards that are still to be written to `path`; return their fingerprint."""
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, unwritten)
    return hashlib.sha256(unwritten.tobytes()).hexdigest()[:16]


@lru_cache(maxsize=4)
def load_unwritten(path: str, fingerprint: str) -> np.ndarray:
    """Return the flags that `store_unwritten` wrote.

    Raises:
        RunError: they are not those of `fingerprint`.
    """
    with one_thread:
        unwritten: np.ndarray = np.load(path)
    if hashlib.sha256(unwritten.tobytes()).hexdigest()[:16] != fingerprint:
        raise RunError(f"{path} holds the shards of another session, not those of {fingerprint}")
    return unwritten


@lru_cache(maxsize=4)
def load_selection(plan_path: str, identity: str, path: str, fingerprint: str) -> Selection:
    """Return the selection in a run's folder; without a `fingerprint`, all of the region.

    Raises:
        RunError: the cells at `path` are not those of `fingerprint`.
    """
    plan = load_plan(plan_path, identity)
    if not fingerprint:
        return Selection(plan)
    selection = read_selection(Path(path), plan)
    if selection.fingerprint != fingerprint:
        raise RunError(f"{path} holds windows {selection.fingerprint}, not {fingerprint}: another run took its place")
    return selection


def _sides(box: Box) -> list[Range]:
    return list(zip(box.start, box.stop, strict=True))


def _hull(ranges: Iterable[Range]) -> Range:
    """Return the smallest range around all of `ranges` that are not empty."""
    filled = [(a, b) for a, b in ranges if a < b] or [(0, 0)]
    return min(a for a, _ in filled), max(b for _, b in filled)


def _shift_ranges(ranges: Iterable[Range], by: int) -> list[Range]:
    return [(a - by, b - by) if a < b else (0, 0) for a, b in ranges]
