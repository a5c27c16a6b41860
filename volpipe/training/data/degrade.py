"""Degradations in numbers: the context that each needs, and the weights of its blur; for the driver, without torch.

Not here: the voxels that are degraded (augment). The grids share their corners: voxel k of the input covers voxels
k * factor to (k + 1) * factor of the truth, as the nets and the planner have it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from volpipe.geometry.grid import Triple, triple

if TYPE_CHECKING:
    from torch import Tensor

FWHM = 2 * math.sqrt(2 * math.log(2))  # of a Gaussian, in standard deviations
REACH = 3.0  # standard deviations of a Gaussian that are summed: 0.3 % lies beyond


class Coarsening(ABC):
    """A way to make an input of coarser voxels from the truth; `COARSENINGS` lists them.

    Attributes:
        name: as `degrade.kind` has it.
        is_coarser: whether the input has fewer voxels than the truth.
        keeps_means: whether a voxel of the input is the mean of its voxels of the truth.
    """

    name: ClassVar[str]
    is_coarser: ClassVar[bool] = True
    keeps_means: ClassVar[bool] = False

    def context(self, scale: Triple) -> Triple:
        """Return the context (z, y, x) at each face of a window of the truth, in voxels."""
        return (0, 0, 0)

    @abstractmethod
    def along(self, data: Tensor, axis: int, factor: int) -> Tensor:
        """Return `data` (n, c, z, y, x) with voxels `factor` times as long along `axis`, without its context."""


class NoCoarsening(Coarsening):
    """The voxels as they are."""

    name = "none"
    is_coarser = False

    def along(self, data: Tensor, axis: int, factor: int) -> Tensor:
        return data


class Binning(Coarsening):
    """The mean of the voxels."""

    name = "bin"
    keeps_means = True

    def along(self, data: Tensor, axis: int, factor: int) -> Tensor:
        shape = (*data.shape[:axis], -1, factor, *data.shape[axis + 1 :])
        return data.reshape(shape).mean(axis + 1)


class Subsampling(Coarsening):
    """One of the voxels: the middle one, and of an even number the one after the middle."""

    name = "subsample"

    def along(self, data: Tensor, axis: int, factor: int) -> Tensor:
        return data[(*(slice(None),) * axis, slice(factor // 2, None, factor))]


class GaussianSampling(Coarsening):
    """A Gaussian about the middle, whose full width at half maximum is the coarser voxel."""

    name = "gaussian"

    def context(self, scale: Triple) -> Triple:
        return triple(0 if s == 1 else math.ceil(radius(s / FWHM) / s) * s for s in scale)

    def along(self, data: Tensor, axis: int, factor: int) -> Tensor:
        import torch

        # The centre of a coarse voxel lies between two voxels where the factor is even.
        half, beyond = 0.5 if factor % 2 == 0 else 0.0, radius(factor / FWHM)
        weights = _weights(np.arange(-beyond, beyond + 1 + int(2 * half)) - half, factor / FWHM)
        reach, before = self.context((factor, 1, 1))[0], (slice(None),) * axis
        count = data.shape[axis] // factor - 2 * (reach // factor)
        first = reach + (factor - 1) // 2 - (len(weights) - 1) // 2
        taps = [
            data[(*before, slice(first + tap, first + tap + (count - 1) * factor + 1, factor))]
            for tap in range(len(weights))
        ]
        result = torch.zeros_like(taps[0])
        for tap, weight in zip(taps, weights.tolist(), strict=True):
            result.add_(tap, alpha=weight)
        return result


COARSENINGS = (NoCoarsening(), Binning(), Subsampling(), GaussianSampling())


def coarsening(name: str) -> Coarsening:
    """Return the way to make voxels coarser of that name."""
    return next(way for way in COARSENINGS if way.name == name)


def context(kind: str, scale: Triple) -> Triple:
    """Return the context (z, y, x) at each face of a window of the truth that its degradation needs, in voxels."""
    return coarsening(kind).context(scale)


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
