"""How far a net sees, without a gradient: one plane of a window is changed, and the outputs that differ are looked at.

Not here: nets that have a gradient (reach). A voxel that differs in any bit was seen to depend on the plane, so what is
found is never too much. It may be too little only where nothing comes through, for which planes are changed by little
and by very much, both ways, among voxels of nothing and among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volpipe.geometry import UnmeasurableError, run_net
from volpipe.grid import align_up

if TYPE_CHECKING:
    import torch

    Net = Callable[[torch.Tensor], torch.Tensor]

FIRST_REACH, MOST_REACH = 32, 256
LATERAL = 4  # voxels of a window along the other axes, at least
# What the voxels of a window are drawn up to, and those of the plane: positive weights spread without loss or growth,
# so that what 100 layers leave of 1e20 in float32 is no zero.
PROBES = ((1.0, -1.0), (1.0, 1e6), (0.0, 1e20), (0.0, -1e20))
LARGEST_HALF = 1e4  # of float16


def reach_along(
    net: Net, in_channels: int, axis: int, *, strides: Sequence[int], scale: int, sizes: Sequence[int]
) -> tuple[int, int]:
    """Return how far the input of any output voxel lies below and above it along `axis` (0, 1, 2: z, y, x).

    Args:
        net: that takes windows (1, c, z, y, x), with weights that let things through.
        strides: of the net, by which what is found repeats.
        scale: output voxels per input voxel along `axis`.
        sizes: of the only window that it takes, 0 along an axis where it takes others too.

    Raises:
        UnmeasurableError: it sees more than the largest window.
    """
    reach, stride = FIRST_REACH, strides[axis]
    while reach <= MOST_REACH:
        shape = [n or align_up(LATERAL, s) for n, s in zip(sizes, strides, strict=True)]
        shape[axis] = sizes[axis] or 2 * align_up(reach, stride) + stride
        middle = shape[axis] // 2 // stride * stride
        planes = range(middle, min(middle + stride, shape[axis]))
        before, after, touched = _extent(Change(net, (in_channels, *shape), axis), planes, scale)
        if not touched:
            return before, after
        if sizes[axis]:
            raise UnmeasurableError(
                f"an output voxel may see more than the window, of {sizes[axis]} voxels along axis {'zyx'[axis]}"
            )
        reach *= 2
    raise UnmeasurableError(f"an output voxel sees more than {MOST_REACH} voxels along axis {'zyx'[axis]}")


def reaches_past(
    net: Net, in_channels: int, axis: int, *, window: Sequence[int], halo: int, stride: int, scale: int
) -> bool:
    """Return whether voxels at the faces of a window act on output voxels that lie further inside than `halo`.

    Args:
        net: as for `reach_along`.
        window: (z, y, x), longer along `axis` than a halo and a stride.
        halo, stride: of the net along `axis`; the halo in whole strides, as windows have it.
        scale: output voxels per input voxel along `axis`.
    """
    change, length = Change(net, (in_channels, *window), axis), window[axis]
    inner = halo + stride
    has_core = length > 2 * inner
    sides = [((0, stride), (length - stride, length))] if has_core else [((0, stride),), ((length - stride, length),)]
    for parts in sides:
        first = inner if parts[0][0] == 0 else 0
        last = length - inner if parts[-1][1] == length else length
        for probe in PROBES:
            if any(change.of(parts, probe)[first * scale : last * scale]):
                return True
    return False


@dataclass
class Change:
    """The changes in the output of `net` along `axis` when planes of a window of `shape` (c, z, y, x) change."""

    net: Net
    shape: tuple[int, ...]
    axis: int
    _still: dict[float, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def of(self, parts: Sequence[tuple[int, int]], probe: tuple[float, float]) -> list[bool]:
        """Return for each output voxel along the axis whether it differs when the planes of `parts` do."""
        import torch

        base, change = probe
        if base not in self._still:
            window = torch.rand((1, *self.shape)) * base
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


def _extent(change: Change, planes: range, scale: int) -> tuple[int, int, bool]:
    """Return how far `planes` of the input act on the output above and below each, and whether as far as its faces.

    All of them together act at least as far as each, so that most need no look of their own after the outer ones.
    """
    before, after, touched = 0, 0, False
    together = _places([change.of([(planes.start, planes.stop)], probe) for probe in PROBES], scale)
    for plane in sorted(planes, key=lambda plane: min(plane - planes.start, planes.stop - 1 - plane)):
        if together and together[-1] - plane <= before and plane - together[0] <= after:
            continue
        flags = [change.of([(plane, plane + 1)], probe) for probe in PROBES]
        if places := _places(flags, scale):
            before, after = max(before, places[-1] - plane), max(after, plane - places[0])
            touched |= any(each[0] or each[-1] for each in flags)
    return before, after, touched


def _places(several: Sequence[Sequence[bool]], scale: int) -> list[int]:
    """Return the input voxels whose output voxels are flagged in any of `several`, ascending."""
    return [place // scale for place, flags in enumerate(zip(*several, strict=True)) if any(flags)]
