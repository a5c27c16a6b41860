"""A box of a volume decoded on a node's disk, once for all processes there: their memory is then the file cache.

Not here: who shares (training.data.samples), or how the file is made once and deleted (node_cache). The copy lies in
the folder that the site names, else in that of temporary files. Its name has the states of all files of the box, so
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
from volpipe.volumes.formats.flat import Part
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.node_cache import node_cache, node_directory, warn
from volpipe.volumes.storage.metadata import ArraySpec, Place
from volpipe.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

SLAB_BYTES = 64 << 20  # that are decoded at a time
FILE = "voxels.npy"  # (c, z, y, x)


def decoded(volume: Volume, most_bytes: int, box: Box | None = None) -> Volume:
    """Return the copy of `box` of `volume` on this node, made by whoever asks first; `volume` where there can be none.

    That is where it has more than `most_bytes` or lies decoded in a file already, its store does not tell the states
    of files, or the disk is full. Without a box, all is copied.
    """
    box = box or Box.from_shape(volume.spatial_shape)
    num_bytes = volume.num_channels * box.num_voxels * volume.dtype.itemsize
    if num_bytes > most_bytes or (volume.codec == "raw" and format_named(volume.format).files is not None):
        return volume

    def look() -> str:
        return KnownStates(volume).hash(box)

    def write(file: Path) -> None:
        spec = ArraySpec((volume.num_channels, *box.shape), volume.dtype, (1, 1, 1, 1), axes=("c", "z", "y", "x"))
        log.info("%s is decoded for all trainings of this node", volume)
        npy.write(file, "", spec, Place(), _slabs(volume, box))
        if look() != state:
            raise VolumeError("it changed while it was read")

    try:
        state = look()
        if not state:
            return volume
        base = node_directory() or tempfile.gettempdir()
        seen = (volume.path, volume.key, volume.view, volume.resampling, box, state)
        return open_volume(node_cache(base, f"decoded {seen}").place(FILE, num_bytes, write))
    except Exception as error:  # of the disk, or of a chunk that no window may need
        warn(f"{volume} is not shared by the trainings of this node: {type(error).__name__}: {error}")
        return volume


def _slabs(volume: Volume, box: Box) -> Iterator[Part]:
    """Yield the voxels of `box` by whole layers of chunks, or of so many planes as make SLAB_BYTES."""
    reader, layer = volume.open(), volume.spatial_chunks[0]
    row = volume.num_channels * math.prod(box.shape[1:]) * volume.dtype.itemsize
    step = layer * max(1, SLAB_BYTES // (row * layer))
    for slab in box.cut(0, step, 0):
        yield slab.relative_to(box.start), reader.read(slab)
