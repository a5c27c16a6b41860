"""Degradations: a truth as a coarser or noisier microscope images it; for training, and for evaluation.

Not here: the windows (samples). The grids share their corners: voxel k of the input covers voxels
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
    return triple(0 if s == 1 else math.ceil(_radius(s) / s) * s for s in scale)


def degrade(data: np.ndarray, kind: str, scale: Triple) -> np.ndarray:
    """Return `data` (c, z, y, x), float32, coarser by `scale` and without its `context`.

    Args:
        data: whole coarse voxels, with the voxels of `context` on each side.
        kind: "none", "bin", "subsample" or "gaussian".
        scale: voxels (z, y, x) of the truth per voxel of the result.
    """
    for axis, factor in enumerate(scale, start=1):
        if factor > 1 and kind != "none":
            data = _coarser(data, axis, factor, kind)
    return data


def _coarser(data: np.ndarray, axis: int, factor: int, kind: str) -> np.ndarray:
    if kind == "subsample":  # of an even factor no voxel lies in the middle: the one after it
        return np.ascontiguousarray(np.take(data, range(factor // 2, data.shape[axis], factor), axis))
    if kind == "gaussian":
        radius = _radius(factor)
        weights = gaussian(factor)
        reach = context(kind, (factor, 1, 1))[0]
        count = data.shape[axis] // factor - 2 * (reach // factor)
        first = [reach + (factor - 1) // 2 - radius + tap for tap in range(len(weights))]
        taps = [np.take(data, range(a, a + (count - 1) * factor + 1, factor), axis) for a in first]
        return np.asarray(sum(t * w for t, w in zip(taps, weights, strict=True)), np.float32)
    shape = (*data.shape[:axis], data.shape[axis] // factor, factor, *data.shape[axis + 1 :])
    binned: np.ndarray = data.reshape(shape).mean(axis=axis + 1, dtype=np.float32)
    return binned


def gaussian(factor: int) -> np.ndarray:
    """Return the weights, float32, of a blur of `factor` voxels' full width at half maximum, about a coarse centre."""
    radius = _radius(factor)
    # the centre of a coarse voxel lies between two voxels where the factor is even
    half = 0.5 if factor % 2 == 0 else 0.0
    places = np.arange(-radius, radius + 1 + int(2 * half)) - half
    weights: np.ndarray = np.exp(-0.5 * (places / (factor / FWHM)) ** 2)
    return np.asarray(weights / weights.sum(), np.float32)


def blurred(data: np.ndarray, deviation: float) -> np.ndarray:
    """Return `data` (c, z, y, x), float32, under a Gaussian of `deviation` voxels, mirrored at its faces."""
    radius = math.ceil(REACH * deviation)
    if not radius:
        return data
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (1, 2, 3):
        size, reach = data.shape[axis], [(radius, radius) if a == axis else (0, 0) for a in range(4)]
        around = np.moveaxis(np.pad(data, reach, mode="reflect"), axis, 0)
        taps = (weight * around[tap : tap + size] for tap, weight in enumerate(weights))
        data = np.moveaxis(sum(taps, np.zeros_like(around[:size])), 0, axis)
    return data


def _radius(factor: int) -> int:
    """Return the radius of the blur in whole voxels."""
    return math.ceil(REACH * factor / FWHM)
