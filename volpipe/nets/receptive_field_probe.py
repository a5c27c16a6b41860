"""The reach of a net: planes of a window are changed, and outputs are compared bit by bit.

Not here: scale and stride (receptive_field). A voxel that differs depends on the plane, so a reach is never
too long. It is too short only where no change comes through: planes change by little and by very much, up and down,
among zeros and among other voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volpipe.geometry.grid import align_up
from volpipe.nets.net_geometry import (
    KEYS,
    FarReachError,
    OutputError,
    Ratio,
    SlowNetError,
    UnmeasurableError,
    run_net,
)

if TYPE_CHECKING:
    import torch

    Net = Callable[[torch.Tensor], torch.Tensor]

# Voxels. Windows of slices are one voxel thick, so that much longer ones are tried.
FIRST_REACH, MOST_REACH, MOST_REACH_OF_SLICES = 32, 256, 2048
MOST_VOXELS = 1 << 20  # of a window that is tried, once it is longer than the first one
LATERAL = 4  # voxels of a window along the other axes, at least
# Positive weights spread without loss or growth, so that 100 layers do not bring 1e20 in float32 to zero, nor 1e100 in
# float64 to less than the last bit of a sigmoid after them.
VERY_MUCH, VERY_MUCH_DOUBLE = 1e20, 1e100
# For nets that compute in float32: 55 layers of 3 voxels take 1e20 to a last bit of 1, so that a sigmoid after more of
# them would hide it, and 90 take 1e37 there. Where that grows to infinity, it differs from what was there before.
MOST_SINGLE = 1e37


def reach_along(
    net: Net, in_channels: int, axis: int, *,
    strides: Sequence[int], ratios: Sequence[Ratio], sizes: Sequence[int], least: Sequence[int],
    first: int, most: int, known: tuple[int, int] = (0, 0), is_double: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return how far an output voxel sees below and above its place, along one axis, in input voxels.

    Args:
        net: (1, c, z, y, x) -> (1, C, z', y', x'), with weights that let changes through.
        axis: 0, 1, 2 for z, y, x.
        strides: of the net (z, y, x): its reach repeats by them.
        ratios: output voxels per input voxel (z, y, x).
        sizes: the only window (z, y, x) that it takes, 0 along an axis where it takes others.
        least: a small window (z, y, x) that it takes, for nets that take none that is thinner along the other axes.
        first, most: reach that is tried first, and last.
        known: reach below and above that counts in any case.
        is_double: whether it computes in float64.

    Raises:
        DeadNetError: no voxel acts on another.
        FarReachError: it sees more than the largest window.
        UnmeasurableError: it takes none of the windows, or may see more than the only one.
    """
    reach, tried, stride, ratio = first, 0, strides[axis], ratios[axis]
    # Two voxels of a coarser output: programs may be fixed to several.
    thin = [align_up(max(LATERAL, 2 * r.shrink), s) for r, s in zip(ratios, strides, strict=True)]
    while True:
        length = 2 * align_up(reach, stride) + stride
        shapes = [
            tuple(only or (length if i == axis else n) for i, (only, n) in enumerate(zip(sizes, lateral, strict=True)))
            for lateral in dict.fromkeys((tuple(thin), tuple(least)))
        ]
        if tried and (reach > most or math.prod(shapes[0]) > MOST_VOXELS):
            raise far_reach(axis, tried)
        middle = shapes[0][axis] // 2 // stride * stride
        planes = range(middle, min(middle + stride, shapes[0][axis]))
        extent = _first_extent(
            net, in_channels, shapes, axis, planes, ratio, known=known, is_double=is_double, is_last=2 * reach > most
        )
        if extent is not None:
            before, after, touched = extent
            if not touched:
                return before, after
            if sizes[axis]:
                raise UnmeasurableError(
                    f"an output voxel may see more than the only window that it takes, of {sizes[axis]} voxels along "
                    f"axis {'zyx'[axis]}",
                    f"export it with a free size; or {KEYS}",
                )
            tried = reach
        reach *= 2


def _first_extent(
    net: Net, in_channels: int, shapes: Sequence[tuple[int, ...]], axis: int, planes: range, ratio: Ratio, *,
    known: tuple[int, int], is_double: bool, is_last: bool,
) -> tuple[int, int, bool] | None:  # fmt: skip
    """Return the reach of changed `planes` in the first window of `shapes` that the net takes.

    None where it takes none of them, as a net that mirrors more than its window has, unless that is the last chance.
    """
    for shape in shapes:
        try:
            extent = _extent_of_planes(Change(net, (in_channels, *shape), axis, is_double), planes, ratio, known)
        except (SlowNetError, OutputError):
            raise
        except UnmeasurableError:
            if is_last and shape == shapes[-1]:
                raise
            continue
        if extent is None:
            raise DeadNetError(
                f"no input voxel acts on output voxel {ratio.out(planes.start)} along axis {'zyx'[axis]}",
                f"return numbers from before a threshold, argmax or rounding, which hide it; or {KEYS}",
            )
        return extent
    return None


class DeadNetError(UnmeasurableError):
    """A net whose output is the same whatever its input is."""


def far_reach(axis: int, reach: int) -> FarReachError:
    """Return the error of a net whose reach along `axis` has no end within `reach` voxels."""
    return FarReachError(
        f"an output voxel sees more than {reach} voxels along axis {'zyx'[axis]}",
        f"if its halo is longer but known, {KEYS}", reach=reach,
    )  # fmt: skip


def sees_all(net: Net, in_channels: int, axis: int, window: Sequence[int], step: int) -> bool:
    """Return whether each output voxel of a window (z, y, x) changes with the first or the last planes along `axis`."""
    change, length = Change(net, (in_channels, *window), axis), window[axis]
    return any(all(change.outputs([side], (1.0, 1e6))) for side in ((0, step), (length - step, length)))


def reaches_middle(net: Net, in_channels: int, axis: int, window: Sequence[int], step: int) -> bool:
    """Return whether the middle of the output of a window (z, y, x) changes with its first planes along `axis`."""
    change = Change(net, (in_channels, *window), axis)
    lines = (change.outputs([(0, step)], probe) for probe in change.probes)
    return any(line[len(line) // 2] for line in lines)


def reaches_past(
    net: Net, in_channels: int, axis: int, *, window: Sequence[int], halo: int, stride: int, ratio: Ratio
) -> bool:
    """Return whether voxels at the faces of a window act on output voxels further inside than `halo`.

    Args:
        net: as for `reach_along`.
        window: (z, y, x), longer along `axis` than halo + stride.
        halo, stride: of the net along `axis`; the halo in whole strides.
        ratio: output voxels per input voxel along `axis`.
    """
    change, length = Change(net, (in_channels, *window), axis), window[axis]
    inner = halo + stride
    has_core = length > 2 * inner
    sides = [((0, stride), (length - stride, length))] if has_core else [((0, stride),), ((length - stride, length),)]
    for parts in sides:
        first = inner if parts[0][0] == 0 else 0
        last = length - inner if parts[-1][1] == length else length
        for probe in change.probes:
            if any(change.outputs(parts, probe)[ratio.out(first) : ratio.out(last)]):
                return True
    return False


@dataclass
class Change:
    """Changes of planes along `axis` of a window (c, z, y, x), and of the output of `net`."""

    net: Net
    shape: tuple[int, ...]
    axis: int
    is_double: bool = False
    _still: dict[float, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def probes(self) -> tuple[tuple[float, float], ...]:
        """The changes to try: the largest value of the window's voxels, and that of the changed plane's."""
        most = VERY_MUCH_DOUBLE if self.is_double else VERY_MUCH
        further = () if self.is_double else ((0.0, MOST_SINGLE),)
        # Large values push offsets that a net takes from its data as far as they go, to both sides.
        return (0.0, most), (0.0, -most), *further, (1.0, 1e6), (1.0, -1.0), (100.0, 1e6), (-100.0, -1e6)

    def outputs(self, parts: Sequence[tuple[int, int]], probe: tuple[float, float]) -> list[bool]:
        """Return for each output voxel along the axis whether it changes with the planes of `parts` (start, stop)."""
        import torch

        base, change = probe
        if base not in self._still:
            dtype = torch.float64 if self.is_double else torch.float32
            window = torch.rand((1, *self.shape), dtype=dtype) * base
            self._still[base] = window, run_net(self.net, window)
        still, old = self._still[base]
        moved = still.clone()
        for first, last in parts:
            planes = moved.narrow(2 + self.axis, first, last - first)
            planes.copy_((torch.rand_like(planes) + 0.5) * change)
        new = run_net(self.net, moved)
        differs = (old != new) & ~(old.isnan() & new.isnan())
        flags: list[bool] = differs.movedim(2 + self.axis, 0).flatten(1).any(dim=1).tolist()
        return flags


def _extent_of_planes(
    change: Change, planes: range, ratio: Ratio, known: tuple[int, int]
) -> tuple[int, int, bool] | None:
    """Return the reach of `planes` of the input below and above, and whether it touches the window's faces.

    What is `known` counts in any case. None where they act on nothing.

    All planes together act at least as far as each, so that most need no probe of their own after the outer ones.
    """
    (before, after), lines = known, list[list[bool]]()
    wide = ratio.shrink - 1  # input voxels of an output voxel after its first
    for probe in change.probes:
        lines.append(change.outputs([(planes.start, planes.stop)], probe))
        if lines[-1][0] or lines[-1][-1]:
            return before, after, True
    together = _flagged_places(lines, ratio)
    if not together:
        return None
    # Of the changes, the first that reaches as far as any below, and above: halos are in whole strides in any case.
    ranges = [
        (places[0], places[-1]) if (places := _flagged_places([line], ratio)) else (together[-1], together[0])
        for line in lines
    ]
    widest = [
        change.probes[i]
        for i in dict.fromkeys(
            next(i for i, ends in enumerate(ranges) if ends[side] == together[-side]) for side in (0, 1)
        )
    ]
    for plane in sorted(planes, key=lambda plane: min(plane - planes.start, planes.stop - 1 - plane)):
        for probe in widest:
            if together[-1] - plane <= before and plane - together[0] - wide <= after:
                break
            if places := _flagged_places([change.outputs([(plane, plane + 1)], probe)], ratio):
                before, after = max(before, places[-1] - plane), max(after, plane - places[0] - wide)
    return before, after, False


def _flagged_places(several: Sequence[Sequence[bool]], ratio: Ratio) -> list[int]:
    """Return the input voxels whose output voxels are flagged in any of `several`, ascending."""
    return [ratio.back(place) for place, flags in enumerate(zip(*several, strict=True)) if any(flags)]
