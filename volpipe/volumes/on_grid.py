"""A volume that is read on another grid than it is stored. Not here: the interpolation (resampling)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import triple
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.storage.metadata import shown
from volpipe.volumes.volume import Volume


def resampled(volume: Volume, grid: Resampling | None) -> Volume:
    """Return `volume` as it is read on another `grid`, which lies where the volume does; itself without one.

    Raises:
        VolumeError: the grid is for a volume of another shape or type.
    """
    if grid is None:
        return volume
    if (volume.spatial_shape, volume.dtype.name) != (grid.stored, grid.dtype):
        raise VolumeError(
            f"{volume} is {volume.dtype} {volume.spatial_shape} (z, y, x), and was {grid.dtype} {grid.stored} when its "
            "grid for the net was planned, of which all voxels depend on that; use --fresh to start over"
        )
    size, steps = volume.voxel_size_nm or (1.0, 1.0, 1.0), grid.steps
    coarse = triple(s * n for s, n in zip(size, steps, strict=True))
    places = zip(size, volume.origin_nm, steps, strict=True)
    return replace(
        volume,
        resampling=grid,
        dtype=np.dtype(np.float32),
        voxel_size_nm=coarse,
        origin_nm=triple(o + (n - 1) / 2 * s for s, o, n in places),
        notes=(
            *volume.notes,
            f"resampled from voxels of {shown(size)} nm to {shown(coarse)} nm, those of the net's training",
        ),
    )
