"""The net that enlarges its input by whole factors: a known answer for output on a finer grid.

Not super-resolution: nothing is learnt. The grids share their corners, not their centres (torch calls it
align_corners=False): output voxel o of an axis that grows s times lies at input voxel (o + 1/2) / s - 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MODES = ("nearest", "linear")


def upsample(*, scale: Sequence[int] = (2, 2, 2), mode: str = "nearest", channels: int = 1) -> nn.Module:
    """Return a net that repeats every voxel ("nearest") or interpolates linearly per axis ("linear")."""
    if len(scale) != 3 or not all(isinstance(s, int) and s >= 1 for s in scale):
        raise ValueError(f"upsample: scale is {scale}; give three whole numbers from 1 up, z, y, x")
    if mode not in MODES:
        raise ValueError(f"upsample: mode is {mode!r}; give one of {', '.join(MODES)}")
    if channels < 1:
        raise ValueError(f"upsample: channels is {channels}; give 1 or more")
    z, y, x = scale
    return Upsample((z, y, x), mode, channels)


class Upsample(nn.Module):
    """The known answer for a net whose output has `scale` times as many voxels per axis."""

    def __init__(self, scale: tuple[int, int, int], mode: str, channels: int) -> None:
        super().__init__()
        self.mode = mode
        self.scale = scale
        reach = [1 if mode == "linear" and s > 1 else 0 for s in scale]
        self.volpipe = {
            "in_channels": channels, "out_channels": channels, "scale": scale, "stride": (1, 1, 1),
            "halo": (reach[0], reach[1], reach[2]), "tile_invariant": True, "intensity": "same", "window": (64, 64, 64),
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        for axis, factor in enumerate(self.scale, start=2):
            if factor > 1:
                x = stretch(x, axis, factor) if self.mode == "linear" else x.repeat_interleave(factor, axis)
        return x  # n,c,z*s,y*s,x*s


def stretch(x: Tensor, axis: int, factor: int) -> Tensor:
    """Return `x` linearly interpolated to `factor` times as many voxels along `axis`, edges repeated.

    torch's own interpolate computes in float32 where in the window a voxel lies: for a factor of 3 the last
    bits depend on the window. Here a voxel's weights depend on its phase alone.
    """
    size = x.shape[axis]
    before = torch.cat([x.narrow(axis, 0, 1), x.narrow(axis, 0, size - 1)], axis)  # x[i - 1]
    after = torch.cat([x.narrow(axis, 1, size - 1), x.narrow(axis, size - 1, 1)], axis)  # x[i + 1]
    phases = []
    for phase in range(factor):
        place = (phase + 0.5) / factor - 0.5  # of this output voxel, from the centre of its input voxel
        other = before if place < 0 else after
        phases.append(x * (1 - abs(place)) + other * abs(place))
    return torch.stack(phases, axis + 1).flatten(axis, axis + 1)
