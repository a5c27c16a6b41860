"""Nets of kinds that do not ship, as users write them: convolutions without padding, and slices.

Not here: what they are compared with (bare). Nothing is declared; sizes of windows and margins are measured.
"""

from __future__ import annotations

import torch
from torch import nn

FEATURES = (12, 24)  # of the default recipe's net


class UNet(nn.Module):
    """A U-Net of two levels, of volumes or of slices, with padding or without."""

    def __init__(self, num_axes: int, padding: int) -> None:
        super().__init__()
        conv, up = (nn.Conv3d, nn.ConvTranspose3d) if num_axes == 3 else (nn.Conv2d, nn.ConvTranspose2d)
        fine, coarse = FEATURES

        def pair(num_in: int, num_out: int) -> nn.Sequential:
            first, second = conv(num_in, num_out, 3, padding=padding), conv(num_out, num_out, 3, padding=padding)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

        self.before, self.below, self.after = pair(1, fine), pair(fine, coarse), pair(2 * fine, fine)
        self.pool = nn.MaxPool3d(2) if num_axes == 3 else nn.MaxPool2d(2)
        self.up, self.head = up(coarse, fine, 2, stride=2), conv(fine, 1, 1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        fine = self.before(data)
        coarse: torch.Tensor = self.up(self.below(self.pool(fine)))
        for axis in range(2, data.ndim):
            fine = fine.narrow(axis, (fine.shape[axis] - coarse.shape[axis]) // 2, coarse.shape[axis])
        out: torch.Tensor = self.head(self.after(torch.cat([fine, coarse], 1)))
        return out


def _seeded(num_axes: int, padding: int) -> nn.Module:
    torch.manual_seed(0)
    return UNet(num_axes, padding)


def valid() -> nn.Module:
    """Return a net of volumes whose output lacks a margin of its window."""
    return _seeded(3, 0)


def slices() -> nn.Module:
    """Return a net of slices (n, c, y, x)."""
    return _seeded(2, 1)
