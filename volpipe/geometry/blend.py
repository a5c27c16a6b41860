"""Weights that join overlapping windows: one vector per axis and window, summing to one at every voxel.

Not here: arrays of voxels or any reading. A window's weight is the product of its three vectors. Each axis is a
partition of unity of its own, so the products are one too, at faces, edges and corners: weighted windows simply add
up to the output, with no weight volume and no division.

Families of profile over a window of W voxels, u = (x + 1/2) / W in (0, 1):

    crop       one on the core, zero on the halo: each voxel comes from one window
    constant   1
    hann       sin²(πu), the Hann window (Blackman & Tukey 1958)
    gaussian   exp(-(u - 1/2)² / (2 σ²)) with σ = 1/8, as nnU-Net weighs (Isensee et al. 2021)
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from volpipe.geometry.grid import Lattice, Placement, Shape

Family = Literal["crop", "constant", "hann", "gaussian"]
FAMILIES: tuple[Family, ...] = get_args(Family)

GAUSSIAN_SIGMA = 1 / 8
LEAST_EDGE = 1e-3  # of MONAI's gaussian


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
    return np.ones(size)


@functools.lru_cache(maxsize=4096)
def span(family: Family, lattice: Lattice, axis: int, index: int, scale: int = 1) -> Span:
    """Return the weights of window `index` along `axis` of `lattice`, on a grid of `scale` output voxels per voxel.

    Voxels outside the volume get none. At each voxel of the volume the weights of all windows sum to one, to float32
    rounding.
    """
    start = lattice.start_along(axis, index)
    # What of the window lies in the volume, counted from where it begins.
    low, high = max(0, -start) * scale, min(lattice.window[axis], lattice.shape[axis] - start) * scale
    if family == "crop":
        first, stop = reach("crop", lattice, axis, index)
        first = max(low, (first - start) * scale)
        return Span(first, np.ones(min(high, (stop - start) * scale) - first, np.float32))
    own = profile(family, lattice.window[axis] * scale)
    total = np.zeros(high - low)
    for other in _neighbours(lattice, axis, index):
        shift = (lattice.start_along(axis, other) - start) * scale
        a, b = max(low, shift), min(high, shift + len(own))
        total[a - low : b - low] += own[a - shift : b - shift]
    return Span(low, (own[low:high] / total).astype(np.float32))


def reach(family: Family, lattice: Lattice, axis: int, index: int) -> tuple[int, int]:
    """Return the voxels along `axis` to which window `index` adds, some of them outside the volume.

    At the edge, cropped windows meet in the middle of what they share.
    """
    if lattice.placement == "lattice":
        before, after = support(lattice, family)
        return index * lattice.stride[axis] - before[axis], (index + 1) * lattice.stride[axis] + after[axis]
    if family == "crop":
        return _met(lattice, axis, index), _met(lattice, axis, index + 1)
    start = lattice.start_along(axis, index)
    return start, start + lattice.window[axis]


def _met(lattice: Lattice, axis: int, index: int) -> int:
    """Return the voxel at which cropped windows at the edge change from `index - 1` to `index`; or the face."""
    if index == 0:
        return lattice.start_along(axis, 0)
    before = lattice.start_along(axis, index - 1) + lattice.window[axis]
    return before if index == lattice.counts[axis] else (before + lattice.start_along(axis, index)) // 2


def windows_over(family: Family, lattice: Lattice, axis: int, start: int, stop: int) -> range:
    """Return the windows along `axis` that add to any voxel from `start` to `stop`, which lie in the volume."""
    count = lattice.counts[axis]
    if lattice.placement == "lattice":
        before, after = support(lattice, family)
        stride = lattice.stride[axis]
        return range(max(0, (start - after[axis]) // stride), min(count, -(-(stop + before[axis]) // stride)))
    first = bisect.bisect_right(range(count), start, key=lambda i: reach(family, lattice, axis, i)[1])
    return range(first, bisect.bisect_left(range(count), stop, key=lambda i: reach(family, lattice, axis, i)[0]))


def support(lattice: Lattice, family: Family) -> tuple[Shape, Shape]:
    """Return by how many voxels (before, after) a weighted window of a lattice reaches past its core, per axis."""
    if family == "crop":
        return (0,) * len(lattice.shape), (0,) * len(lattice.shape)
    after = tuple(o - m for o, m in zip(lattice.overlap, lattice.margin, strict=True))
    return lattice.margin, after


def _neighbours(lattice: Lattice, axis: int, index: int) -> range:
    """Return the windows along `axis` that share a voxel with window `index`, itself included."""
    start = lattice.start_along(axis, index)
    return lattice.windows_between(axis, start - lattice.window[axis] + 1, start + lattice.window[axis])


def places_around(lattice: Lattice, axis: int, index: int) -> tuple[int, ...]:
    """Return where windows that share a voxel along `axis` with window `index` start, counted from its own start."""
    start = lattice.start_along(axis, index)
    return tuple(lattice.start_along(axis, i) - start for i in _neighbours(lattice, axis, index))


def importance(placement: Placement, shape: Shape) -> np.ndarray:
    """Return the weights (z, y, x) of the makers' gaussian over a window of `shape`, float64.

    edge: MONAI's `compute_importance_map`, none of them below a thousandth. even: nnU-Net's `compute_gaussian`, whose
    middle is a whole voxel, times 10 in 16 bits, where those that would be 0 take the least other one.
    """
    centre = [n // 2 if placement == "even" else (n - 1) / 2 for n in shape]
    sides = (
        np.exp(-0.5 * ((np.arange(n) - c) / (n * GAUSSIAN_SIGMA)) ** 2) for n, c in zip(shape, centre, strict=True)
    )
    weights = np.asarray(functools.reduce(np.multiply, np.ix_(*sides)), np.float64)
    if placement == "even":
        weights = (10 * weights).astype(np.float16).astype(np.float64)
        return np.asarray(np.maximum(weights, weights[weights > 0].min()))
    return np.asarray(np.maximum(weights, max(float(weights.min()), LEAST_EDGE)))
