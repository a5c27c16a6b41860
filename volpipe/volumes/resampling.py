"""Volumes on another grid: the stored voxels from which its voxels are interpolated, and their values.

Not here: the grid that a net was trained on (nets.facts), or what reads stored voxels (volume). Voxel i of the grid
lies at p = (i + 0.5) * stored / shape - 0.5 of the stored ones, whose outermost are repeated beyond the faces::

    stored   |---0---|---1---|---2---|---3---|        a cubic spline through all of them, of which p sees REACH to
    grid     |-----0-----|-----1-----|-...            either side: what it leaves out is below the rounding of float32

Each voxel is a weighted sum of the same stored ones in the same order, whatever box it is read with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from volpipe.geometry.grid import Box, Triple, triple

Order = Literal[0, 1, 3]
# The weight of a voxel falls by this factor with each voxel of distance (Unser 1999, IEEE Signal Processing Magazine
# 16:22): that of the first one left out is below 2e-8.
POLE = math.sqrt(3) - 2
REACH = 14


@dataclass(frozen=True)
class Resampling:
    """The grid on which a volume is read, (z, y, x).

    Attributes:
        shape: voxels of the grid, which covers the volume.
        stored: voxels of the array.
        dtype: of the array; voxels of the grid are float32.
        orders: along each axis 0, the nearest voxel, 1, linear, or 3, a cubic spline.
        limits: to which stored voxels of each channel are clipped before, None where they are not; none of any.
        sigmas: of a Gaussian along each axis, in stored voxels, which goes before where voxels become longer: without
            it, detail that the grid cannot hold would come back as noise. 0 for none.
    """

    shape: Triple
    stored: Triple
    dtype: str
    orders: tuple[Order, Order, Order] = (3, 3, 3)
    limits: tuple[tuple[float, float] | None, ...] = ()
    sigmas: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def smoothed(self) -> Resampling:
        """Return this grid with a Gaussian along each axis where its voxels are longer, as scikit-image's `resize` has.

        That takes (step - 1) / 2 stored voxels for its deviation.
        """
        return replace(self, sigmas=triple(max(0.0, (step - 1) / 2) for step in self.steps))

    @property
    def steps(self) -> tuple[float, float, float]:
        """Stored voxels per voxel of the grid."""
        z, y, x = (n / m for n, m in zip(self.stored, self.shape, strict=True))
        return z, y, x

    @property
    def widths(self) -> Triple:
        """Stored voxels along each axis from which a voxel of the grid is interpolated, at most."""
        return triple(2 * (REACH + _radius(sigma)) for sigma in self.sigmas)

    def seen(self, box: Box) -> Box:
        """Return the stored voxels from which those of `box` of the grid are interpolated."""
        ends = [self._seen(axis, a, b) for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True))]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def sees(self, box: Box) -> Box:
        """Return voxels of the grid around all that are interpolated from stored ones of `box`, if there are any."""
        ends = [self._sees(axis, a, b) for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True))]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def own(self, box: Box) -> Box:
        """Return the stored voxels that lie in `box` of the grid: each lies in one of several boxes side by side."""
        sizes = list(zip(self.stored, self.shape, strict=True))
        start = tuple(a * n // m for a, (n, m) in zip(box.start, sizes, strict=True))
        return Box(start, tuple(b * n // m for b, (n, m) in zip(box.stop, sizes, strict=True)))

    def pick(self, data: np.ndarray, box: Box) -> np.ndarray:
        """Return the voxels (c, z, y, x) of `box` of a grid of order 0, of the type of `data`, the stored ones."""
        seen, ends = self.seen(box), zip(range(3), box.start, box.stop, strict=True)
        places = (self._taps(*each, seen.start[each[0]])[0][0] for each in ends)
        return np.asarray(data[:, *np.ix_(*places)])

    def interpolate(self, data: np.ndarray, box: Box) -> np.ndarray:
        """Return the voxels (c, z, y, x) of `box` of the grid, float32, from `data`, the stored ones that it sees."""
        seen, result = self.seen(box), np.empty((len(data), *box.shape), np.float32)
        ends = zip(range(3), box.start, box.stop, seen.start, strict=True)
        taps = [self._taps(*each) for each in ends]
        for channel, voxels in enumerate(data):
            self._interpolate(voxels, taps, self.limits[channel] if self.limits else None, result[channel])
        if np.dtype(self.dtype).kind in "iu":  # a spline swings beyond the ends of saturated voxels
            info = np.iinfo(self.dtype)
            np.clip(result, info.min, info.max, out=result)
        return result

    def _interpolate(
        self,
        voxels: np.ndarray,
        taps: list[tuple[np.ndarray, np.ndarray]],
        limits: tuple[float, float] | None,
        result: np.ndarray,
    ) -> None:
        """Write what `taps` make of `voxels` (z, y, x) to `result`; few layers are interpolated at a time."""
        (places, weights), along_y, along_x = taps
        layers: dict[int, np.ndarray] = {}
        for out, own, shares in zip(result, places.T, weights.T, strict=True):
            layers = {z: layer for z, layer in layers.items() if z >= own[0]}
            total = np.zeros(result.shape[1:])
            for z, share in zip(own.tolist(), shares, strict=True):
                if z not in layers:
                    layer = voxels[z].astype(np.float64)
                    layer = layer if limits is None else layer.clip(*limits)
                    layers[z] = _along(_along(layer, along_y).T.copy(), along_x).T
                total += layers[z] * share
            out[...] = total

    def _seen(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        (first, last), _ = self._stored_places(axis, np.array([start, stop - 1]))
        before, after = self._stored_reach(axis)
        size = self.stored[axis]
        return min(max(int(first) - before, 0), size - 1), min(max(int(last) + after, 0), size - 1) + 1

    def _sees(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        before, after = self._stored_reach(axis)
        size, step = self.shape[axis], self.steps[axis]
        first = 0 if start == 0 else math.floor((start - after - 0.5) / step - 0.5)
        last = size if stop == self.stored[axis] else math.ceil((stop + before + 1.5) / step + 0.5)
        return min(max(first, 0), size - 1), min(max(last, 1), size)

    def _stored_reach(self, axis: int) -> tuple[int, int]:
        """Return how many stored voxels before that at or before a place it sees, and how many after."""
        if self.shape[axis] == self.stored[axis]:
            return 0, 0
        before, after = {0: (0, 0), 1: (0, 1), 3: (REACH - 1, REACH)}[self.orders[axis]]
        radius = _radius(self.sigmas[axis])
        return before + radius, after + radius

    def _stored_places(self, axis: int, voxels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the stored voxel at or before each of `voxels` of the grid, the nearest by order 0, and how far on."""
        if self.shape[axis] == self.stored[axis]:
            return voxels, np.zeros(len(voxels))
        place = self.steps[axis] * (voxels + 0.5) - 0.5
        first = np.floor(place + 0.5 if self.orders[axis] == 0 else place)
        return first.astype(np.int64), place - first

    def _taps(self, axis: int, start: int, stop: int, origin: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of `start:stop` of the grid, the stored voxels counted from `origin`, and their weights."""
        first, rest = self._stored_places(axis, np.arange(start, stop))
        before, after = self._stored_reach(axis)
        radius, last = _radius(self.sigmas[axis]), self.stored[axis] - 1
        offsets = np.arange(-before, after + 1)
        places = np.clip(first + offsets[:, None], 0, last)
        own = offsets[radius : len(offsets) - radius]
        if len(own) == 1:
            weights = np.ones((1, len(first)))
        else:
            weights = np.stack([1 - rest, rest]) if self.orders[axis] == 1 else _spline(own, rest)
        if radius and self.shape[axis] < self.stored[axis]:
            sharp, weights = weights, np.zeros(places.shape)
            around = np.clip(first + own[:, None], 0, last)
            for shift, share in zip(range(-radius, radius + 1), _gaussian(self.sigmas[axis], radius), strict=True):
                for row, seen in zip(sharp, np.clip(around + shift, 0, last), strict=True):
                    weights[seen - first + before, np.arange(len(first))] += row * share
        return places - origin, weights


def _along(layer: np.ndarray, taps: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the rows that `taps` make of those of `layer`."""
    places, weights = taps
    total = np.zeros((places.shape[1], layer.shape[1]))
    for rows, shares in zip(places, weights, strict=True):
        total += layer[rows] * shares[:, None]
    return total


def _radius(sigma: float) -> int:
    """Return how many voxels to either side a Gaussian of `sigma` sees, as SciPy's `gaussian_filter` cuts it off."""
    return int(4 * sigma + 0.5)


def _gaussian(sigma: float, radius: int) -> np.ndarray:
    """Return the weights of a Gaussian at -radius to radius; their sum is one."""
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return np.asarray(weights / weights.sum())


def _spline(offsets: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Return the weights of voxels at `offsets` of a cubic spline at each of `rest`, 0 to 1; their sum is one."""
    weights = np.zeros((len(offsets), len(rest)))
    for knot in range(-1, 3):
        apart = np.abs(rest - knot)
        basis = np.where(apart < 1, 2 / 3 - apart**2 + apart**3 / 2, np.maximum(2 - apart, 0) ** 3 / 6)
        weights += (math.sqrt(3) * POLE ** np.abs(knot - offsets))[:, None] * basis
    total = np.zeros(len(rest))
    for row in weights:  # in an order that does not depend on how many there are
        total += row
    return weights / total


def coarsened(lengths: Triple, steps: tuple[float, float, float]) -> Triple:
    """Return `lengths` of stored voxels in voxels of a grid of such `steps`, at least one."""
    return triple(max(1, round(n / step)) for n, step in zip(lengths, steps, strict=True))
