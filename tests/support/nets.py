"""Nets for tests: run over one volume, and what an interpolation must answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from volpipe.geometry.grid import Shape

# A file of a net whose voxels are the means of their 27 neighbours.
SMOOTH = """
import torch
class Smooth(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1))
    def forward(self, x):
        return torch.nn.functional.conv3d(x, torch.ones(1, 1, 3, 3, 3, dtype=x.dtype) / 27, padding=1)
def smooth():
    return Smooth()
"""
Net = Any  # torch types every attribute of a module as Tensor | Module, so that none can be used


def run(net: Net, volume: np.ndarray) -> np.ndarray:
    """Return the one output channel (z, y, x) of `net` for `volume` (z, y, x)."""
    with torch.inference_mode():
        out: np.ndarray = net(torch.from_numpy(volume)[None, None].to(weights_dtype(net)))[0, 0].numpy()
    return out


def weights_dtype(net: Net) -> torch.dtype:
    return next((parameter.dtype for parameter in net.parameters()), torch.float32)


def interpolate(volume: np.ndarray, scale: Shape) -> np.ndarray:
    """Return `volume` at positions (o + 1/2) / s - 1/2 per axis, by numpy's own interpolation."""
    for axis, factor in enumerate(scale):
        n = volume.shape[axis]
        at = (np.arange(n * factor) + 0.5) / factor - 0.5
        lines = np.moveaxis(volume, axis, -1)
        stretched = np.array([np.interp(at, np.arange(n), line) for line in lines.reshape(-1, n)])
        volume = np.moveaxis(stretched.reshape(*lines.shape[:-1], n * factor), -1, axis)
    return volume


def align_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step
