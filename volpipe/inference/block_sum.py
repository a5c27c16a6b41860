"""The weighted sum of one block's windows, as it grows in memory.

Not here: how windows are weighted (blend), or how sums are stored (scratch) and finished (output).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from volpipe.errors import NonfiniteError
from volpipe.geometry.blend import span
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.inference.output import finish
from volpipe.inference.plan import Plan
from volpipe.inference.scratch import NO_SUM
from volpipe.inference.selection import Selection


@dataclass
class BlockSum:
    """The weighted sum of one block's windows while it grows, (c, z, y, x).

    With `crop` each voxel comes from one window, so that it is finished at once and held as it will be stored; a sum of
    several windows, or one that other blocks add to, is float32 until it is written.
    """

    selection: Selection
    normalise: Affine
    block: int
    box: Box = field(init=False)
    total: np.ndarray = field(init=False, repr=False)
    tally: Tally = field(default_factory=Tally)
    _bad: np.ndarray | None = field(default=None, repr=False)  # flags of NaN and of infinite voxels, once there are any

    @property
    def plan(self) -> Plan:
        return self.selection.plan

    def __post_init__(self) -> None:
        self.box = self.plan.sum_box(self.block)
        shape = (self.plan.net.out_channels, *self.box.shape)
        if self.is_finished:
            self.total = np.zeros(shape, self.plan.dtype)
        else:
            self.total = np.full(shape, NO_SUM, np.float32)

    @cached_property
    def is_finished(self) -> bool:
        """Whether `total` holds voxels as they are stored, not sums."""
        plan = self.plan
        return plan.recipe.windows.blend == "crop" and all(map(plan.is_direct, plan.shards_of_block(self.block)))

    def add(self, number: int, out: np.ndarray) -> None:
        """Add window `number`, whose net output is `out` (c, z, y, x), with its weights."""
        plan = self.plan
        index = plan.lattice.window_index(number)
        blend, scale = plan.recipe.windows.blend, plan.net.scale
        z, y, x = (span(blend, plan.lattice, axis, i, scale[axis]) for axis, i in enumerate(index))
        part = out[:, z.start : z.stop, y.start : y.stop, x.start : x.stop]
        corner = plan.lattice.window_box(number).relative_to(plan.roi_box.start).scaled(scale).start
        start = tuple(c + s.start for c, s in zip(corner, (z, y, x), strict=True))
        box = Box.from_shape(part.shape[1:]).shift(start)
        inside = box & self.box  # a region of interest may cut through windows
        place, inner = inside.relative_to(self.box.start).slices, inside.relative_to(start).slices
        part = part[:, *inner]
        finite = np.isfinite(part)
        if not finite.all():
            if self._note_bad(part, finite, inside) and plan.recipe.infer.nonfinite == "refuse":
                return  # the block fails once all of it is counted
            if plan.dtype.kind != "f":
                part = np.where(finite, part, np.float32(0))  # not selected, and not finite: no integer can hold it
        if self.is_finished:
            self.total[:, *place] = finish(plan, self.normalise, part, self.tally)
        elif blend == "crop":
            self.total[:, *place] += part
        else:
            weighted = part * z.weights[inner[0], None, None]
            weighted *= y.weights[inner[1], None]
            weighted *= x.weights[inner[2]]
            self.total[:, *place] += weighted

    def _note_bad(self, part: np.ndarray, finite: np.ndarray, box: Box) -> bool:
        """Flag the selected voxels of `part` (c, z, y, x), at `box`, that are not `finite`; return whether any are."""
        mask = self.selection.mask(box)
        flags = ~finite if mask is None else ~finite & mask
        if not flags.any():
            return False
        if self._bad is None:
            self._bad = np.zeros((2, *self.total.shape), bool)
        nan, infinite = self._bad[:, :, *box.relative_to(self.box.start).slices]
        nan |= np.isnan(part) & flags
        infinite |= np.isinf(part) & flags
        return True

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
        if self._bad is not None and self.plan.recipe.infer.nonfinite == "refuse":
            place = bounds(np.any(self._bad, axis=(0, 1))).shift(self.box.start)
            raise NonfiniteError(
                f"net {self.plan.net.label} gave {self.bad} voxels in box {place} of the output; mend the net, "
                "its weights or the input there, or keep them with infer.nonfinite=keep and output.dtype=float32"
            )

    def part(self, box: Box) -> np.ndarray:
        """Return the voxels of `total` (c, z, y, x) in `box` of the output."""
        return self.total[:, *box.relative_to(self.box.start).slices]


def bounds(flags: np.ndarray) -> Box:
    """Return the smallest box around the set `flags`, of which there is one at least."""
    places = np.nonzero(flags)
    return Box(tuple(int(p.min()) for p in places), tuple(int(p.max()) + 1 for p in places))
