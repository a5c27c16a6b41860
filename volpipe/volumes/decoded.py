"""A volume decoded on a node's disk, once for all processes of the node: their memory is then the system's file cache.

Not here: who shares (training.data.samples), or how the file is made once and deleted (node_cache). The copy lies in
the folder that the site names, else in that of temporary files. Its name has the states of all files of the volume, so
that a volume that has changed is another one.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.file_states import KnownStates
from volpipe.volumes.formats import npy
from volpipe.volumes.formats.container import FILES
from volpipe.volumes.formats.flat import Part
from volpipe.volumes.node_cache import node_cache, node_directory, warn
from volpipe.volumes.storage.metadata import ArraySpec
from volpipe.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20  # that are decoded at a time
FILE = "voxels.npy"  # (c, z, y, x)


def decoded(volume: Volume, most_bytes: int) -> Volume:
    """Return the copy of `volume` on this node, made by whoever asks first; `volume` where there can be none.

    That is where it has more than `most_bytes` or lies decoded in a file already, its store does not tell the states
    of files, or the disk is full.
    """
    num_bytes = volume.num_channels * math.prod(volume.spatial_shape) * volume.dtype.itemsize
    if num_bytes > most_bytes or (volume.codec == "raw" and volume.format in FILES):
        return volume

    def look() -> str:
        return KnownStates(volume).hash(Box.from_shape(volume.spatial_shape))

    def write(file: Path) -> None:
        spec = ArraySpec(
            (volume.num_channels, *volume.spatial_shape), volume.dtype, (1, 1, 1, 1), axes=("c", "z", "y", "x")
        )
        log.info("%s is decoded for all trainings of this node", volume)
        npy.write(file, spec, _slabs(volume))
        if look() != state:
            raise VolumeError("it changed while it was read")

    try:
        state = look()
        if not state:
            return volume
        base = node_directory() or tempfile.gettempdir()
        seen = (volume.path, volume.key, volume.view, volume.resampling, state)
        return open_volume(node_cache(base, f"decoded {seen}").place(FILE, num_bytes, write))
    except Exception as error:  # of the disk, or of a chunk that no window may need
        warn(f"{volume} is not shared by the trainings of this node: {type(error).__name__}: {error}")
        return volume


def _slabs(volume: Volume) -> Iterator[Part]:
    """Yield the voxels of `volume` by whole layers of chunks, or of so many planes as make SLAB_BYTES."""
    reader, (depth, *plane) = volume.open(), volume.spatial_shape
    row = volume.num_channels * math.prod(plane) * volume.dtype.itemsize
    layer = volume.spatial_chunks[0]
    step = layer * max(1, SLAB_BYTES // (row * layer))
    for z in range(0, depth, step):
        box = Box((z, 0, 0), (min(depth, z + step), *plane))
        yield box, reader.read(box)
