"""Volumes, opened: references that slice as numpy does.

Not here: how they are read (volumes).
"""

from __future__ import annotations

from pathlib import Path

from volpipe.volumes.reader import View, Volume
from volpipe.volumes.volume import AS_STORED, open_volume


def open(location: str | Path, key: str | None = None, level: int = 0, *, view: View = AS_STORED) -> Volume:
    """Return the volume at `location`, of which nothing but metadata is read.

    Args:
        location: an N5 or Zarr container, an HDF5, TIFF, MRC or .npy file, a folder of TIFF slices, or a path into one;
            N5 and Zarr also as s3://bucket/… or https://host/… .
        key: the array or group inside; needed where there are several.
        level: of a multiscale group, 0 for the finest.
        view: one channel or point in time, and another voxel size in nm or origin in nm than the file says.

    Raises:
        VolumeError: nothing there, several to choose from, or metadata that are broken or not supported.
    """
    return open_volume(location, key, level, view=view)
