"""The places of a volume's levels: shape, voxel size and origin of each, where the metadata do not say them too.

Not here: voxels, or what a browser may read (sources).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from volpipe.geometry.grid import Triple, triple
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume

UNKNOWN_SIZE_NM: Lengths = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Raster:
    """One level of a layer: voxels (z, y, x), their size, and the centre of the first."""

    shape: Triple
    voxel_size_nm: Lengths
    origin_nm: Lengths = (0.0, 0.0, 0.0)

    @classmethod
    def from_volume(cls, volume: Volume) -> Raster:
        return cls(volume.spatial_shape, volume.voxel_size_nm or UNKNOWN_SIZE_NM, volume.origin_nm)

    def every(self, step: Triple) -> Raster:
        """Return the raster of one voxel in `step` (z, y, x), each in the middle of those that it stands for."""
        sizes = zip(self.voxel_size_nm, step, strict=True)
        moves = zip(self.origin_nm, self.voxel_size_nm, step, strict=True)
        shape = triple(-(-n // s) for n, s in zip(self.shape, step, strict=True))
        return Raster(shape, triple(v * s for v, s in sizes), triple(o + v * (s - 1) / 2 for o, v, s in moves))


def levels_of(volume: Volume) -> tuple[Volume, ...]:
    """Return `volume` and the coarser levels of its group; itself alone where it was given a place of its own."""
    if volume.key not in volume.levels or volume.view.voxel_size_nm is not None or volume.view.origin_nm is not None:
        return (volume,)
    coarser = (volume.level(number) for number in range(volume.levels.index(volume.key) + 1, len(volume.levels)))
    return (volume, *(v for v in coarser if (v.dtype, v.axes, v.format) == (volume.dtype, volume.axes, volume.format)))


def rasters_of(levels: Sequence[Volume]) -> tuple[Raster, ...]:
    """Return the rasters of a group's levels; without voxel sizes the coarser ones cover what the first does."""
    base = Raster.from_volume(levels[0])
    if all(level.voxel_size_nm is not None for level in levels):
        return tuple(map(Raster.from_volume, levels))
    rasters = [base]
    for level in levels[1:]:
        step = triple(max(1, round(n / m)) for n, m in zip(base.shape, level.spatial_shape, strict=True))
        rasters.append(replace(base.every(step), shape=level.spatial_shape))
    return tuple(rasters)


def factors_between(base: Raster, level: Raster) -> Triple | None:
    """Return how many voxels of `base` one of `level` joins (z, y, x); None if no whole number, or not in step."""
    exact = np.array(level.voxel_size_nm) / base.voxel_size_nm
    z, y, x = (round(n) for n in exact.tolist())
    middle = np.array(base.origin_nm) + (exact - 1) / 2 * base.voxel_size_nm
    is_middle = np.allclose(middle, level.origin_nm, rtol=0, atol=1e-3 * min(base.voxel_size_nm))
    is_even = is_middle and np.allclose(exact, (z, y, x), rtol=1e-6)
    return (z, y, x) if is_even and min(z, y, x) > 0 else None


def extent_nm(raster: Raster) -> Lengths:
    """Return the lengths (z, y, x) of the whole raster."""
    return triple(n * v for n, v in zip(raster.shape, raster.voxel_size_nm, strict=True))
