"""The net that returns its input: a known answer for everything around a net.

Not a baseline for quality: any seam, shift or hole in its output was made by the tiling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def identity(*, channels: int = 1) -> nn.Module:
    """Return a net whose output is its input, voxel by voxel and bit by bit."""
    if channels < 1:
        raise ValueError(f"identity: channels is {channels}; give 1 or more")
    return Identity(channels)


class Identity(nn.Module):
    """The known answer x -> x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.volpipe = {
            "in_channels": channels, "out_channels": channels, "scale": (1, 1, 1), "stride": (1, 1, 1),
            "halo": (0, 0, 0), "tile_invariant": True, "intensity": "same", "window": (64, 64, 64), "integers": True,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        return torch.clone(x)  # a copy: no caller can write into its input through the output
