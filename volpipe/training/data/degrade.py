"""Degradations in numbers: the context that each needs, and the weights of its blur; for the driver, without torch.

Not here: the voxels that are degraded (augment). The grids share their corners: voxel k of the input covers voxels
k * factor to (k + 1) * factor of the truth, as the nets and the planner have it.
"""

from __future__ import annotations

import math

import numpy as np

from volpipe.geometry.grid import Triple, triple

FWHM = 2 * math.sqrt(2 * math.log(2))  # of a Gaussian, in standard deviations
REACH = 3.0  # standard deviations of a Gaussian that are summed: 0.3 % lies beyond


def context(kind: str, scale: Triple) -> Triple:
    """Return the context (z, y, x) at each face of a window of the truth that its degradation needs, in voxels."""
    if kind != "gaussian":
        return (0, 0, 0)
    return triple(0 if s == 1 else math.ceil(radius(s / FWHM) / s) * s for s in scale)


def gaussian(factor: int) -> np.ndarray:
    """Return the weights, float32, of a blur of `factor` voxels' full width at half maximum, about a coarse centre."""
    # The centre of a coarse voxel lies between two voxels where the factor is even.
    half = 0.5 if factor % 2 == 0 else 0.0
    reach = radius(factor / FWHM)
    return _weights(np.arange(-reach, reach + 1 + int(2 * half)) - half, factor / FWHM)


def blur(deviation: float, reach: int) -> np.ndarray:
    """Return the weights, float32, of a Gaussian of `deviation` voxels, with `reach` of them on each side."""
    own = radius(deviation)
    weights = _weights(np.arange(-own, own + 1), deviation) if own else np.ones(1, np.float32)
    return np.pad(weights, reach - own)


def radius(deviation: float) -> int:
    """Return the radius of a Gaussian of `deviation` voxels, in whole voxels."""
    return math.ceil(REACH * deviation)


def _weights(places: np.ndarray, deviation: float) -> np.ndarray:
    weights: np.ndarray = np.exp(-0.5 * (places / deviation) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)
