"""The net that moves its input by whole voxels: a known answer that needs exactly its halo.

Not a registration: what moves in from outside the window is zero, so that a halo one voxel too small shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def shift(*, offset: Sequence[int] = (1, 2, 3), channels: int = 1) -> nn.Module:
    """Return a net with output[x] = input[x - offset], `offset` in voxels (z, y, x) of either sign."""
    if len(offset) != 3 or not all(isinstance(d, int) for d in offset):
        raise ValueError(f"shift: offset is {offset}; give three whole numbers of voxels, z, y, x")
    if channels < 1:
        raise ValueError(f"shift: channels is {channels}; give 1 or more")
    z, y, x = offset
    return Shift((z, y, x), channels)


class Shift(nn.Module):
    """The known answer x[i] -> x[i - offset], zero where the window ends."""

    def __init__(self, offset: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        dz, dy, dx = (abs(d) for d in offset)
        self.offset = offset
        self.volpipe = {
            "in_channels": channels, "out_channels": channels, "scale": (1, 1, 1), "stride": (1, 1, 1),
            "halo": (dz, dy, dx), "tile_invariant": True, "intensity": "same",
            "window": (64 + 2 * dz, 64 + 2 * dy, 64 + 2 * dx),
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        spans = list(zip(self.offset, x.shape[2:], strict=True))
        out = torch.zeros_like(x)  # n,c,z,y,x
        out[:, :, *(landing(d, n) for d, n in spans)] = x[:, :, *(landing(-d, n) for d, n in spans)]
        return out


def landing(offset: int, size: int) -> slice:
    """Return the part of an axis of `size` voxels that is written when the axis moves by `offset`."""
    return slice(min(max(offset, 0), size), max(size + min(offset, 0), 0))
