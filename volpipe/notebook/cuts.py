"""Cuts: a part of an orthogonal slice of a volume, as coarse as a screen shows it, by few reads.

Not here: greys, colours and the widget (explore). Lengths are in nm, z, y, x; a cut lies on two axes::

    plane   xy      xz      yz          low, high: the edges of the part that is asked for, (down, across)
    down    y       z       y
    across  x       x       z
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from volpipe.geometry.grid import Box, triple
from volpipe.viewer.layers import is_labels
from volpipe.volumes.places import Raster, levels_of, rasters_of
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume

Plane = Literal["xy", "xz", "yz"]
Pair = tuple[float, float]
AXES: dict[Plane, tuple[int, int, int]] = {"xy": (0, 1, 2), "xz": (1, 0, 2), "yz": (2, 1, 0)}  # cut, down, across
MAX_BYTES = 2**26  # of voxels, uncompressed, that a cut reads; of more chunks only some are read
MAX_READS = 1024  # of a cut: each takes about a millisecond


@dataclass(frozen=True)
class Region:
    """The part of a plane that a screen shows.

    Attributes:
        at: a point of it.
        low, high: edges, down and across.
        pixel: what one pixel of the screen covers.
        level: of the volume, None for the one that fits the pixel.
    """

    plane: Plane
    at: Lengths
    low: Pair
    high: Pair
    pixel: float
    level: int | None = None


@dataclass(frozen=True)
class Cut:
    """Voxels of a region.

    Attributes:
        data: (c, down, across).
        is_known: (down, across), False where no voxel was read.
        low, high: edges of the voxels.
        level, index: the level and the voxel along the axis that is cut.
        steps: of so many voxels one is shown, down and across.
        share: of the chunks in sight that were read, 0 to 1.
    """

    data: np.ndarray
    is_known: np.ndarray
    low: Pair
    high: Pair
    level: int
    index: int
    steps: tuple[int, int]
    share: float


@dataclass(frozen=True)
class Stack:
    """A volume and its coarser levels, with the place of each, and whether its voxels are numbers of objects."""

    levels: tuple[Volume, ...]
    rasters: tuple[Raster, ...]
    is_labels: bool

    @classmethod
    def from_volume(cls, volume: Volume) -> Stack:
        levels = levels_of(volume)
        return cls(levels, rasters_of(levels), is_labels(volume))

    @property
    def bounds(self) -> tuple[Lengths, Lengths]:
        """The faces of the volume, low and high."""
        raster = self.rasters[0]
        places = list(zip(raster.origin_nm, raster.voxel_size_nm, raster.shape, strict=True))
        return triple(o - s / 2 for o, s, _ in places), triple(o + s * (n - 0.5) for o, s, n in places)

    def fitting(self, region: Region) -> int:
        """Return the coarsest level whose voxels are no larger than a pixel; the finest where all are."""
        if region.level is not None:
            return max(0, min(region.level, len(self.levels) - 1))
        _, down, across = AXES[region.plane]
        sizes = [max(raster.voxel_size_nm[down], raster.voxel_size_nm[across]) for raster in self.rasters]
        return max((number for number, size in enumerate(sizes) if size <= region.pixel * 1.001), default=0)

    def cut(self, region: Region) -> Cut | None:
        """Return the voxels of `region`, None where there are none.

        Raises:
            VolumeError: a chunk is damaged, or the volume is gone.
        """
        level = self.fitting(region)
        raster, (axis, *axes) = self.rasters[level], AXES[region.plane]
        index = _nearest(region.at[axis], raster, axis)
        spans = [_span(low, high, raster, a) for low, high, a in zip(region.low, region.high, axes, strict=True)]
        if not 0 <= index < raster.shape[axis] or any(first >= last for first, last in spans):
            return None
        return self._read_cut(region, level, index, spans)

    def _read_cut(self, region: Region, level: int, index: int, spans: list[tuple[int, int]]) -> Cut:
        """Return voxels of a slice, one for each pixel, from all chunks in sight or evenly spread ones of them."""
        volume, raster, (_, *axes) = self.levels[level], self.rasters[level], AXES[region.plane]
        sizes = [raster.voxel_size_nm[a] for a in axes]
        steps = [
            max(1, min(int(region.pixel * 1.001 / size), last - first))
            for size, (first, last) in zip(sizes, spans, strict=True)
        ]
        along = zip(spans, steps, strict=True)  # each voxel that is shown is the middle of those that it stands for
        grids = [np.arange(first + (step - 1) // 2, last, step) for (first, last), step in along]
        data = np.zeros((volume.num_channels, len(grids[0]), len(grids[1])), volume.dtype)
        is_known = np.zeros(data.shape[1:], bool)
        parts, share = _parts_to_read(volume, axes, grids)
        for places in parts:
            start, stop = [index] * 3, [index + 1] * 3
            for a, grid, place in zip(axes, grids, places, strict=True):
                start[a], stop[a] = int(grid[place][0]), int(grid[place][-1]) + 1
            box = Box(tuple(start), tuple(stop))
            data[:, places[0], places[1]] = _turned_to_plane(volume.crop(box), region.plane)[
                :, :: steps[0], :: steps[1]
            ]
            is_known[places] = True
        low = [raster.origin_nm[a] + (first - 0.5) * n for a, (first, _), n in zip(axes, spans, sizes, strict=True)]
        high = [edge + len(g) * step * n for edge, g, step, n in zip(low, grids, steps, sizes, strict=True)]
        return Cut(data, is_known, (low[0], low[1]), (high[0], high[1]), level, index, (steps[0], steps[1]), share)


def _nearest(place: float, raster: Raster, axis: int) -> int:
    return math.floor((place - raster.origin_nm[axis]) / raster.voxel_size_nm[axis] + 0.5)


def _span(low: float, high: float, raster: Raster, axis: int) -> tuple[int, int]:
    """Return the first voxel between two edges, and the one after the last."""
    first = _nearest(low, raster, axis)
    last = math.ceil((high - raster.origin_nm[axis]) / raster.voxel_size_nm[axis] + 0.5)
    return max(0, first), min(raster.shape[axis], last)


def _parts_to_read(volume: Volume, axes: list[int], grids: list[np.ndarray]) -> tuple[list[tuple[slice, slice]], float]:
    """Return the parts of both grids that are read one after the other, and the share of the visible chunks in them.

    That is all at once where no chunk is in vain; else chunk by chunk, and where these are too many, one in so many.
    """
    chunks = volume.spatial_chunks
    numbers = [grid // chunks[a] for a, grid in zip(axes, grids, strict=True)]
    unique = [np.unique(each) for each in numbers]
    num_bytes = math.prod(chunks) * volume.num_channels * volume.dtype.itemsize
    num_chunks = math.prod(map(len, unique))
    if num_chunks * num_bytes <= MAX_BYTES and all(int(np.ptp(each)) < len(each) for each in unique):
        return [(slice(None), slice(None))], 1.0
    skips = _skips([len(each) for each in unique], min(MAX_READS, MAX_BYTES // num_bytes))
    chosen = [each[(min(skip, len(each)) - 1) // 2 :: skip] for each, skip in zip(unique, skips, strict=True)]
    runs = [
        [slice(*np.searchsorted(n, [c, c + 1]).tolist()) for c in some] for n, some in zip(numbers, chosen, strict=True)
    ]
    return list(product(runs[0], runs[1])), math.prod(map(len, chosen)) / num_chunks


def _turned_to_plane(data: np.ndarray, plane: Plane) -> np.ndarray:
    """Return voxels (c, z, y, x) of one slice as (c, down, across)."""
    axis, down, across = AXES[plane]
    flat: np.ndarray = data.take(0, axis + 1)
    return flat if down < across else flat.swapaxes(1, 2)


def _skips(counts: list[int], most: int) -> list[int]:
    """Return, for both axes, one in how many chunks is read, so that `most` chunks at most are read in all."""
    skips = [1, 1]
    while math.prod(-(-n // skip) for n, skip in zip(counts, skips, strict=True)) > max(1, most):
        longer = 0 if counts[0] / skips[0] >= counts[1] / skips[1] else 1
        skips[longer] += 1
    return skips
