"""Weights that join overlapping windows: one vector per axis and window, summing to one at every voxel.

Not here: arrays of voxels or any reading. A window's weight is the product of its three vectors. Each axis is a
partition of unity of its own, so the products are one too, at faces, edges and corners: weighted windows simply add
up to the output, with no weight volume and no division.

Families of profile over a window of W voxels, u = (x + 1/2) / W in (0, 1):

    crop       one on the core, zero on the halo: each voxel comes from one window
    constant   1
    hann       sin²(πu), the Hann window (Blackman & Tukey 1958)
    gaussian   exp(-(u - 1/2)² / (2 σ²)) with σ = 1/8, as nnU-Net weighs (Isensee et al. 2021)
    bump       exp(4 - 1 / (u (1 - u))), smooth and flat at both ends (Wu et al. 2021, chunkflow)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from volpipe.geometry.grid import Lattice, Shape

Family = Literal["crop", "constant", "hann", "gaussian", "bump"]
FAMILIES: tuple[Family, ...] = get_args(Family)

GAUSSIAN_SIGMA = 1 / 8


@dataclass(frozen=True, slots=True)
class Span:
    """The weights of one window along one axis, trimmed to where they are not zero.

    Attributes:
        start: first output voxel, counted from the window's own first output voxel.
        weights: (voxels,), float32, all above zero.
    """

    start: int
    weights: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + len(self.weights)


def profile(family: Family, size: int) -> np.ndarray:
    """Return the weights of one window before normalisation, (size,), float64, all above zero."""
    u = (np.arange(size) + 0.5) / size
    if family == "hann":
        return np.asarray(np.sin(np.pi * u) ** 2)
    if family == "gaussian":
        return np.asarray(np.exp(-0.5 * ((u - 0.5) / GAUSSIAN_SIGMA) ** 2))
    if family == "bump":
        # Underflows beyond u = 1/745: the floor keeps a voxel that only one window's edge covers well defined.
        return np.asarray(np.exp(np.maximum(4.0 - 1.0 / (u * (1.0 - u)), -600.0)))
    return np.ones(size)


@lru_cache(maxsize=4096)
def span(family: Family, lattice: Lattice, axis: int, index: int, scale: int = 1) -> Span:
    """Return the weights of window `index` along `axis` of `lattice`, on a grid of `scale` output voxels per voxel.

    Voxels outside the volume get none. At each voxel of the volume the weights of all windows sum to one, to float32
    rounding.
    """
    stride, margin = lattice.stride[axis], lattice.margin[axis]
    start = (index * stride - margin) * scale
    low = max(0, -start)
    high = min(lattice.window[axis], lattice.shape[axis] - index * stride + margin) * scale
    if family == "crop":
        first = margin * scale
        return Span(first, np.ones(min(high, first + stride * scale) - first, np.float32))
    own = profile(family, lattice.window[axis] * scale)
    total = np.zeros(high - low)
    for other in _neighbours(lattice, axis, index):
        shift = (other - index) * stride * scale
        a, b = max(low, shift), min(high, shift + len(own))
        total[a - low : b - low] += own[a - shift : b - shift]
    return Span(low, (own[low:high] / total).astype(np.float32))


def support(lattice: Lattice, family: Family) -> tuple[Shape, Shape]:
    """Return by how many input voxels (before, after) a weighted window reaches past its core, per axis."""
    if family == "crop":
        return (0,) * len(lattice.shape), (0,) * len(lattice.shape)
    after = tuple(o - m for o, m in zip(lattice.overlap, lattice.margin, strict=True))
    return lattice.margin, after


def _neighbours(lattice: Lattice, axis: int, index: int) -> range:
    """Return the windows along `axis` that share a voxel with window `index`, itself included."""
    reach = (lattice.window[axis] - 1) // lattice.stride[axis]
    return range(max(0, index - reach), min(lattice.counts[axis], index + reach + 1))
