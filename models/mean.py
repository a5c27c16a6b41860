"""The net that bins its input: a voxel of its output is the mean of a box of voxels, a known answer for coarser grids.

Not a pyramid: a run makes the coarser levels of its output itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def mean(*, bin: Sequence[int] = (1, 1, 1), channels: int = 1) -> nn.Module:
    """Return a net whose output voxels are the means of `bin` (z, y, x) voxels each."""
    if len(bin) != 3 or not all(isinstance(b, int) and b >= 1 for b in bin):
        raise ValueError(f"mean: bin is {bin}; give three whole numbers from 1 up, z, y, x")
    if channels < 1:
        raise ValueError(f"mean: channels is {channels}; give 1 or more")
    z, y, x = bin
    return Mean((z, y, x), channels)


class Mean(nn.Module):
    """The known answer for a net whose output is coarser by `bin` per axis."""

    def __init__(self, bin: tuple[int, int, int], channels: int) -> None:
        super().__init__()
        self.bin = bin
        self.volpipe = {
            "in_channels": channels, "out_channels": channels, "scale": (1, 1, 1), "shrink": bin, "stride": bin,
            "halo": (0, 0, 0), "tile_invariant": True, "intensity": "same",
            "window": (64 * bin[0], 64 * bin[1], 64 * bin[2]),
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        # float64 holds the sum of any whole numbers that float32 holds
        return nn.functional.avg_pool3d(x.double(), self.bin).to(x.dtype)  # n,c,z/b,y/b,x/b
