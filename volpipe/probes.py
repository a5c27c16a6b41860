"""How far a net sees, without a gradient: one plane of a window is changed, and the outputs that differ are looked at.

Not here: nets that have a gradient (reach). A voxel that differs in any bit was seen to depend on the plane, so what is
found is never too much. It may be too little only where nothing comes through, for which planes are changed by little
and by very much, both ways, among voxels of nothing and among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from volpipe.geometry import UnmeasurableError, run_net
from volpipe.grid import align_up

if TYPE_CHECKING:
    import torch
    from torch import nn

FIRST_REACH, MOST_REACH = 32, 256
LATERAL = 4  # voxels of a window along the other axes, at least
# What the voxels of a window are drawn up to, and those of the plane: positive weights spread without loss or growth,
# so that what 100 layers leave of 1e20 in float32 is no zero.
PROBES = ((1.0, -1.0), (1.0, 1e6), (0.0, 1e20), (0.0, -1e20))
LARGEST_HALF = 1e4  # of float16


def reach_along(
    net: nn.Module, in_channels: int, axis: int, *, strides: Sequence[int], scale: int, sizes: Sequence[int]
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
        before, after, touched = 0, 0, False
        for plane in range(middle, min(middle + stride, shape[axis])):
            changed = _changed(net, (in_channels, *shape), axis, plane)
            places = [place // scale for place, differs in enumerate(changed) if differs]
            if places:
                before, after = max(before, places[-1] - plane), max(after, plane - places[0])
                touched |= changed[0] or changed[-1]
        if not touched:
            return before, after
        if sizes[axis]:
            raise UnmeasurableError(
                f"an output voxel may see more than the window, of {sizes[axis]} voxels along axis {'zyx'[axis]}"
            )
        reach *= 2
    raise UnmeasurableError(f"an output voxel sees more than {MOST_REACH} voxels along axis {'zyx'[axis]}")


def _changed(net: nn.Module, shape: tuple[int, ...], axis: int, plane: int) -> list[bool]:
    """Return for each output voxel along `axis` whether it differs when `plane` of the input does."""
    found: list[bool] = []
    for still, moved in _pairs(shape, axis, plane):
        old, new = run_net(net, still), run_net(net, moved)
        differs = (old != new) & ~(old.isnan() & new.isnan())
        flags = differs.movedim(2 + axis, 0).flatten(1).any(dim=1).tolist()
        found = [a or b for a, b in zip(found or flags, flags, strict=True)]
    return found


def _pairs(shape: tuple[int, ...], axis: int, plane: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import torch

    for base, change in PROBES:
        still = torch.rand((1, *shape)) * base
        moved = still.clone()
        drawn = (torch.rand_like(moved.select(2 + axis, plane)) + 0.5) * change
        moved.select(2 + axis, plane).copy_(drawn)
        yield still, moved
