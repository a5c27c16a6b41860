"""The reach of a net: planes of a window are changed, and outputs are compared bit by bit.

Not here: scale and stride (receptive_field). A voxel that differs depends on the plane, so a reach is never
too long. It is too short only where no change comes through: planes change by little and by very much, up and down,
among zeros and among other voxels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volpipe.geometry.grid import align_up
from volpipe.nets.net_geometry import KEYS, Ratio, UnmeasurableError, WholeWindowError, run_net

if TYPE_CHECKING:
    import torch

    Net = Callable[[torch.Tensor], torch.Tensor]

FIRST_REACH, MOST_REACH = 32, 256
LATERAL = 4  # voxels of a window along the other axes, at least
# Positive weights spread without loss or growth, so that 100 layers do not bring 1e20 in float32 to zero, nor 1e100 in
# float64 to less than the last bit of a sigmoid after them.
VERY_MUCH, VERY_MUCH_DOUBLE = 1e20, 1e100


def reach_along(
    net: Net, in_channels: int, axis: int, *,
    strides: Sequence[int], ratios: Sequence[Ratio], sizes: Sequence[int], is_double: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return the largest distance of input below and above an output voxel that depends on it, along one axis.

    Args:
        net: (1, c, z, y, x) -> (1, C, z', y', x'), with weights that let changes through.
        axis: 0, 1, 2 for z, y, x.
        strides: of the net (z, y, x): its reach repeats by them.
        ratios: output voxels per input voxel (z, y, x).
        sizes: the only window (z, y, x) that it takes, 0 along an axis where it takes others.
        is_double: whether it computes in float64.

    Raises:
        UnmeasurableError: it sees more than the largest window.
    """
    reach, stride, ratio = FIRST_REACH, strides[axis], ratios[axis]
    # Two voxels of a coarser output: programs may be fixed to several.
    thin = [align_up(max(LATERAL, 2 * r.shrink), s) for r, s in zip(ratios, strides, strict=True)]
    while reach <= MOST_REACH:
        shape = [only or n for only, n in zip(sizes, thin, strict=True)]
        shape[axis] = sizes[axis] or 2 * align_up(reach, stride) + stride
        middle = shape[axis] // 2 // stride * stride
        planes = range(middle, min(middle + stride, shape[axis]))
        extent = _extent(Change(net, (in_channels, *shape), axis, is_double), planes, ratio)
        if extent is None:
            raise UnmeasurableError(
                f"no input voxel acts on output voxel {ratio.out(middle)} along axis {'zyx'[axis]}",
                f"return numbers from before a threshold, argmax or rounding, which hide it; or {KEYS}",
            )
        before, after, touched = extent
        if not touched:
            return before, after
        if sizes[axis]:
            raise past_window(axis, sizes[axis])
        reach *= 2
    raise far_reach(axis)


def far_reach(axis: int) -> WholeWindowError:
    """Return the error of a net whose reach along `axis` has no end within the largest window."""
    return WholeWindowError(
        f"an output voxel sees more than {MOST_REACH} voxels along axis {'zyx'[axis]}",
        f"if its halo is longer but known, {KEYS}",
    )


def past_window(axis: int, size: int) -> UnmeasurableError:
    """Return the error of a net whose reach along `axis` may have no end within the only window that it takes."""
    return UnmeasurableError(
        f"an output voxel may see more than the only window that it takes, of {size} voxels along axis {'zyx'[axis]}",
        f"export it with a free size; or {KEYS}",
    )


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
        """The largest value of the window's voxels, and of the plane's, of each change that is tried."""
        most = VERY_MUCH_DOUBLE if self.is_double else VERY_MUCH
        return (0.0, most), (0.0, -most), (1.0, 1e6), (1.0, -1.0)

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


def _extent(change: Change, planes: range, ratio: Ratio) -> tuple[int, int, bool] | None:
    """Return the reach of `planes` of the input below and above, and whether it touches the window's faces.

    None where they act on nothing.

    All planes together act at least as far as each, so that most need no probe of their own after the outer ones.
    """
    before, after, lines = 0, 0, list[list[bool]]()
    wide = ratio.shrink - 1  # input voxels of an output voxel after its first
    for probe in change.probes:
        lines.append(change.outputs([(planes.start, planes.stop)], probe))
        if lines[-1][0] or lines[-1][-1]:
            return before, after, True
    together = _places(lines, ratio)
    if not together:
        return None
    for plane in sorted(planes, key=lambda plane: min(plane - planes.start, planes.stop - 1 - plane)):
        for probe in change.probes:
            if together[-1] - plane <= before and plane - together[0] - wide <= after:
                break
            if places := _places([change.outputs([(plane, plane + 1)], probe)], ratio):
                before, after = max(before, places[-1] - plane), max(after, plane - places[0] - wide)
    return before, after, False


def _places(several: Sequence[Sequence[bool]], ratio: Ratio) -> list[int]:
    """Return the input voxels whose output voxels are flagged in any of `several`, ascending."""
    return [ratio.back(place) for place, flags in enumerate(zip(*several, strict=True)) if any(flags)]
