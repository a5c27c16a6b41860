"""The weighted sum of one block's windows, as it grows on the net's device.

Not here: how windows are weighted (blend), or how sums are stored (scratch) and finished (output).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import InitVar, dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from volpipe.blockwise.malloc import mapped
from volpipe.errors import NonfiniteError
from volpipe.geometry.blend import importance, places_around, span
from volpipe.geometry.grid import Box, Placement, Slab, Triple, triple, unravel
from volpipe.inference.intensity import ALL_FINITE, Affine, ClippedVoxels, Nonfinite
from volpipe.inference.output import finish
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Bus
from volpipe.inference.scratch import NO_SUM
from volpipe.inference.selection import Selection

if TYPE_CHECKING:
    import torch


MOST_WEIGHTS = 8  # kinds of windows whose makers' weights are kept
LEAST_SLICE = 1e-30  # weight of a slice that lacks neighbours, which counts where no other window has it


@dataclass
class _Side:
    """Where a window adds to a sum along one axis.

    Attributes:
        inner: voxels of the window's output.
        place: the same voxels in the sum.
        weights: of these.
    """

    inner: slice
    place: slice
    weights: np.ndarray
    _lifted: torch.Tensor | None = None

    def on_device(self, bus: Bus) -> torch.Tensor:
        """Return the weights on the device of `bus`."""
        if self._lifted is None:
            self._lifted = bus.up(self.weights)
        return self._lifted


@dataclass
class BlockSum:
    """The weighted sum of one block's windows while it grows on the device of `bus`, (c, z, y, x).

    With `crop` each voxel comes from one window, so that it is finished at once and held as it will be stored; a sum of
    several windows, or one that other blocks add to, is of the type `Plan.sum_dtype` until it is written. Nothing asks
    the device for values while the sum grows, so that a GPU never waits for it. It is of one `slab` of the block, and
    starts with what the slab `before` left of its own; `box` is what no later slab adds to.
    """

    selection: Selection
    normalise: Affine
    block: int
    slab: Slab
    bus: Bus
    is_last: bool = True  # whether the slab is the last one of its block
    before: InitVar[BlockSum | None] = None
    _parts: tuple[BlockSum, ...] = field(default=(), init=False, repr=False)  # of several arrays; no other sum is held
    _total: torch.Tensor = field(init=False, repr=False)
    _tally: ClippedVoxels = field(default_factory=ClippedVoxels)
    _flags: torch.Tensor | None = field(default=None, repr=False)  # NaN, infinite; on a CPU once there are any
    _sides: dict[tuple[int, int], _Side] = field(default_factory=dict, repr=False)
    _ready: torch.cuda.Event | None = field(default=None, repr=False)

    @property
    def plan(self) -> Plan:
        return self.selection.plan

    @property
    def box(self) -> Box:
        return self.slab.made

    @property
    def _reached(self) -> Box:
        return self.slab.reached

    @property
    def arrays(self) -> tuple[BlockSum, ...]:
        """The sums of the arrays of the output; it keeps none of itself, or its memory would stay until garbage is
        collected.
        """
        return self._parts or (self,)

    def __post_init__(self, before: BlockSum | None) -> None:
        selections = self.selection.arrays
        if len(selections) > 1:
            earlier = [None] * len(selections) if before is None else before._parts
            self._parts = tuple(map(self._of_array, selections, earlier))
            return
        self._total = self._begun()
        if before is not None:
            left = self._reached & before._reached
            self._sum_in(left).copy_(before._sum_in(left))
            if before._flags is not None:
                self._raise_flags()[:, :, *self._slices_in_sum(left)] = before._flags[
                    :, :, *before._slices_in_sum(left)
                ]

    def _of_array(self, selection: Selection, before: BlockSum | None) -> BlockSum:
        """Return the sum of one of several arrays, whose slabs have the same windows."""
        (slab,) = (each for each in selection.slabs(self.block) if each.numbers == self.slab.numbers)
        return BlockSum(selection, self.normalise, self.block, slab, self.bus, self.is_last, before)

    def _begun(self) -> torch.Tensor:
        """Return the sum of no window, on the device."""
        import torch

        channels = self.plan.num_channels if self.is_finished else self.plan.net.out_channels
        shape = (channels, *self._reached.shape)
        dtype = self.plan.dtype if self.is_finished else self.plan.sum_dtype
        if self.bus.device == "cpu":
            total = torch.from_numpy(mapped(shape, dtype))
        else:
            total = torch.empty(shape, dtype=getattr(torch, dtype.name), device=self.bus.device)
        if self.is_finished and self.selection.cells is None:  # its windows have all of its voxels
            return total
        return total.fill_(0 if self.is_finished else float(NO_SUM))

    @cached_property
    def is_finished(self) -> bool:
        """Whether it holds voxels as they are stored, not sums."""
        plan = self.plan
        is_direct = not plan.num_sums or all(map(plan.is_direct, plan.shards_of_block(self.block)))
        return plan.blend == "crop" and is_direct

    def add(self, number: int, out: torch.Tensor) -> None:
        """Add window `number`, whose net output is `out` (c, z, y, x), on the device, with its weights."""
        import torch

        plan = self.plan
        if self._parts:
            for array in self._parts:
                array.add(number, out)
            return
        for own in plan.net.arrays:
            out = own.cut(out)
        places = unravel(number % plan.lattice.windows_per_block, plan.lattice.places)
        sides = [self._side_of_window(axis, place) for axis, place in enumerate(places)]
        z, y, x = (side.place for side in sides)
        with torch.inference_mode():
            part = self._flag_nonfinite(out[:, *(side.inner for side in sides)], (z, y, x))
            if plan.is_as_stored:
                self._total[:, z, y, x] = part
            elif self.is_finished:
                self._total[:, z, y, x] = finish(plan, self.normalise, part, self._tally)
            elif plan.blend == "crop":
                self._total[:, z, y, x] += part
            else:
                self._total[:, z, y, x] += self._weighted(part, sides, number)

    def _side_of_window(self, axis: int, place: int) -> _Side:
        """Return where window `place` of the block along `axis` adds; a region of interest may cut through it."""
        if (axis, place) not in self._sides:
            plan, low = self.plan, self._reached.start[axis]
            lattice, scale = plan.lattice, plan.net.scale[axis]
            index = lattice.windows_along(axis, lattice.blocks.index(self.block)[axis])[place]
            own = span(plan.blend, lattice, axis, index, scale)
            first = (lattice.start_along(axis, index) - plan.region.start[axis]) * scale
            start = max(first + own.start, low)
            stop = max(start, min(first + own.stop, self._reached.stop[axis]))
            weights = own.weights[start - first - own.start : stop - first - own.start]
            self._sides[axis, place] = _Side(
                slice(start - first, stop - first), slice(start - low, stop - low), weights
            )
        return self._sides[axis, place]

    def _weighted(self, part: torch.Tensor, sides: list[_Side], number: int) -> torch.Tensor:
        """Return `part` of window `number` times its weights along z, y and x."""
        plan = self.plan
        if plan.blend == "gaussian" and plan.lattice.placement != "lattice":
            index = plan.lattice.window_index(number)
            around = triple(places_around(plan.lattice, axis, i) for axis, i in enumerate(index))
            weights = makers_weights(
                plan.lattice.placement, triple(plan.lattice.window), plan.net.scale, around, self.bus.device,
                across=plan.net.across, context=plan.net.context,
            )  # fmt: skip
            return part * weights[*(side.inner for side in sides)]
        z, y, x = (side.on_device(self.bus) for side in sides)
        weighted = part * z[:, None, None]
        weighted *= y[:, None]
        weighted *= x
        return weighted

    def _flag_nonfinite(self, part: torch.Tensor, place: tuple[slice, ...]) -> torch.Tensor:
        """Return `part` (c, z, y, x), which belongs to `place`, for integers without NaN and infinity; flag these."""
        import torch

        if not part.is_floating_point() or 0 in part.shape:
            return part
        if not self.bus.is_gpu and all(math.isfinite(float(end)) for end in torch.aminmax(part)):
            return part
        nan, infinite = self._raise_flags()[:, :, *place]
        # A voxel that is finished has fewer channels than the net gives: classes, or nets that are combined.
        given = part.reshape(-1, len(nan), *part.shape[1:])
        nan |= torch.isnan(given).any(0)
        infinite |= torch.isinf(given).any(0)
        if self.plan.dtype.kind == "f":
            return part
        return torch.where(torch.isfinite(part), part, 0.0)  # not selected, or the block fails: no integer can hold it

    def _raise_flags(self) -> torch.Tensor:
        """Return the flags, which there are from now on."""
        import torch

        if self._flags is None:
            self._flags = torch.zeros((2, *self._total.shape), dtype=torch.bool, device=self.bus.device)
        return self._flags

    def close(self) -> None:
        """Note that the last window was added."""
        for array in self.arrays:
            array._ready = self.bus.mark()

    @cached_property
    def _bad(self) -> np.ndarray | None:
        """Flags (2, c, z, y, x) of the selected voxels of `box` that are NaN, and infinite; None if there are none."""
        if self._flags is None:
            return None
        flags = self._flags[:, :, *self._slices_in_sum(self.box)]
        if not self.bus.down(lambda: flags.any(), self._ready):
            return None
        mask = self.selection.mask(self.box)
        bad = self.bus.down(lambda: flags, self._ready) & (True if mask is None else mask)
        return bad if bad.any() else None

    @property
    def bad(self) -> Nonfinite:
        """Number of voxels that are not finite in a window; NaN counts before infinity."""
        if self._bad is None:
            return ALL_FINITE
        nan, infinite = self._bad
        return Nonfinite(int(np.count_nonzero(nan)), int(np.count_nonzero(infinite & ~nan)))

    def check(self) -> None:
        """Refuse voxels that are not finite, unless the recipe keeps them.

        Raises:
            NonfiniteError: with how many there are, and where.
        """
        if self.plan.recipe.infer.nonfinite == "refuse" and self._bad is not None:
            place = bounds(np.any(self._bad, axis=(0, 1))).shift(self.box.start)
            label, is_function = self.plan.net.label, bool(self.plan.net.dtype)
            raise NonfiniteError(
                f"{'function' if is_function else 'net'} {label} gave {self.bad} voxels in box {place} of the output; "
                + (
                    "let it give numbers there"
                    if is_function
                    else "mend the net, its weights or the input there, or keep them with infer.nonfinite=keep and "
                    "output.dtype=float32"
                )
            )

    @property
    def clipped(self) -> int:
        """Voxels that were clipped to the type of the output so far."""
        return self._count_clipped(self._tally)

    def part(self, box: Box) -> np.ndarray:
        """Return the sum (c, z, y, x) in `box` of the output: float32, or as it will be stored where it is finished.

        Raises:
            NonfiniteError: as `check`.
        """
        self.check()
        return self.bus.down(lambda: self._sum_in(box), self._ready)

    def finished(self, box: Box, tally: ClippedVoxels) -> np.ndarray:
        """Return `box` of the output (c, z, y, x), to which no other block adds, as it will be stored.

        Raises:
            NonfiniteError: as `check`.
        """
        self.check()
        data = self.bus.down(lambda: finish(self.plan, self.normalise, self._sum_in(box), tally), self._ready)
        self._count_clipped(tally)
        return data

    def _sum_in(self, box: Box) -> torch.Tensor:
        return self._total[:, *self._slices_in_sum(box)]

    def _slices_in_sum(self, box: Box) -> tuple[slice, ...]:
        return box.relative_to(self._reached.start).slices

    def _count_clipped(self, tally: ClippedVoxels) -> int:
        """Return the voxels of `tally`, with those that the device has counted."""
        if (elsewhere := tally.elsewhere) is not None:
            tally.clipped += int(self.bus.down(lambda: elsewhere, self._ready))
            tally.elsewhere = None
        return tally.clipped


@lru_cache(maxsize=MOST_WEIGHTS)
def makers_weights(
    placement: Placement,
    window: Triple,
    scale: Triple,
    around: tuple[tuple[int, ...], ...],
    device: str,
    *,
    across: int | None = None,
    context: int = 0,
) -> torch.Tensor:
    """Return the weights (z, y, x) of a window by its maker's gaussian, float32, on `device`.

    That gaussian is no product of one for each axis, so that weights are divided here by their sum over all windows
    that share a voxel with this one.

    Args:
        window: its voxels (z, y, x), of which the net makes `scale` output voxels each.
        around: where these windows start along each axis, counted from this one.
        across: the axis across slices, which the maker weighs one by one.
        context: slices on each side that a slice needs.
    """
    import torch

    seen = triple(1 if axis == across else n for axis, n in enumerate(window))
    weights = np.broadcast_to(importance(placement, seen), window).copy()
    if across is not None and context:
        slices = np.moveaxis(weights, across, 0)
        slices[:context] *= LEAST_SLICE
        slices[max(context, len(slices) - context) :] *= LEAST_SLICE
    for axis, factor in enumerate(scale):
        weights = np.repeat(weights, factor, axis)
    own = torch.from_numpy(weights).to(device)
    total = torch.zeros_like(own)
    for shift in itertools.product(*around):
        sides = [(d * s, n) for d, s, n in zip(shift, scale, own.shape, strict=True)]
        here = tuple(slice(max(0, d), min(n, n + d)) for d, n in sides)
        total[here] += own[tuple(slice(max(0, -d), min(n, n - d)) for d, n in sides)]
    return (own / total).float()


def bounds(flags: np.ndarray) -> Box:
    """Return the smallest box around the set `flags`, of which there is one at least."""
    places = np.nonzero(flags)
    return Box(tuple(int(p.min()) for p in places), tuple(int(p.max()) + 1 for p in places))
