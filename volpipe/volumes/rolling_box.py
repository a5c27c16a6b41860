"""Boxes of a volume that are read one after the other along z, as those of a block's slabs are.

Not here: where the boxes are (inference), or how voxels are read (volume).
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, align_up
from volpipe.volumes.file_states import hash_voxels, known_files
from volpipe.volumes.storage.fetched_array import noting_stamps
from volpipe.volumes.storage.object_store import Remote, Stamp
from volpipe.volumes.storage.requests import in_turn, num_at_once
from volpipe.volumes.storage.tensorstore import num_threads
from volpipe.volumes.volume import Reader

# Voxels along z that are read at a time where a block has several slabs: whole chunks, unless one is thicker.
LEAST_LAYER, MOST_LAYER = 32, 128
PIECE_VOXELS = 1 << 22  # that are read at a time, about: mirrored at a face they are copied twice
FEWEST_PIECES = 2  # at a time, on a disk with as many threads: one comes or is unpacked while another is put in place


def pieces_at_once(voxel_bytes: int) -> int:
    """Return how many pieces of a volume are read at a time, whose voxels have so many bytes, all channels."""
    return num_at_once(PIECE_VOXELS * voxel_bytes, FEWEST_PIECES)


class RollingBox:
    """Boxes of a volume one after the other along z, which share voxels: each is read once, with all of its chunk.

    Args:
        reader: of the volume.
        boxes: ascending along z, alike in y and x; they reach outside the volume at the faces, where it is mirrored.
        allocate: makes the array of a box, of a shape and a type.
    """

    def __init__(self, reader: Reader, boxes: Sequence[Box], allocate: Callable[..., np.ndarray] = np.empty) -> None:
        self._reader, self._boxes, self._files, self._allocate = reader, boxes, known_files(reader.volume), allocate
        self.whole = boxes[0].along(0, boxes[0].start[0], boxes[-1].stop[0])
        # Files that are fetched tell their states themselves.
        self._stamps: dict[Remote, Stamp | None] | None = {} if reader.is_fetched else None
        self._before = "" if reader.is_fetched else self._files.hash(self.whole, may_be_old=self._files.is_remote)
        self._is_changed = False
        self._hashes: list[str] = []
        depth, height, _ = reader.volume.spatial_chunks
        self._step = align_up(LEAST_LAYER, depth) if depth <= MOST_LAYER else 1
        row = self.whole.shape[2] * max(self._step, LEAST_LAYER)
        self._height = align_up(-(-PIECE_VOXELS // row), height)
        self._with_chunks = [box.along(0, box.start[0], self._stop(box.stop[0])) for box in boxes]
        self._arrays: dict[int, np.ndarray] = {}  # of the boxes that are being read, and of the last one

    @property
    def at_once(self) -> int:
        """How many pieces are to be read at a time."""
        volume = self._reader.volume
        at_once = pieces_at_once(volume.num_channels * volume.dtype.itemsize)
        return at_once if self.is_fetched else min(num_threads(), at_once)

    @property
    def is_fetched(self) -> bool:
        return self._reader.is_fetched

    def works(self) -> Iterator[Callable[[], str]]:
        """Yield what reads the pieces of all boxes, one after the other, for `read`."""
        for index in range(len(self._boxes)):
            yield from self._piece_reads(index, self._shared(index))

    def read(self, index: int, pieces: Iterator[Future[str]] | None = None) -> np.ndarray:
        """Return the voxels (c, z, y, x) of box `index`; boxes are asked for in ascending order.

        Args:
            index: number of the box.
            pieces: those of `works`, of which the ones of this box come next; read here where none are given.
        """
        last = self._arrays.pop(index - 1, None)
        shared = self._shared(index) if last is not None else Box.from_shape((0, 0, 0))
        works = list(self._piece_reads(index, shared))
        if last is not None and not shared.is_empty:
            place = shared.relative_to(self._with_chunks[index - 1].start).slices
            self._array(index)[:, : shared.shape[0]] = last[:, *place]
        del last
        if pieces is None:
            self._hashes += in_turn(works, self.at_once)
        else:
            self._hashes += [next(pieces).result() for _ in works]
        return self._array(index)[:, : self._boxes[index].shape[0]]

    def _shared(self, index: int) -> Box:
        return self._with_chunks[index] & self._with_chunks[index - 1] if index else Box.from_shape((0, 0, 0))

    def _piece_reads(self, index: int, shared: Box) -> Iterator[Callable[[], str]]:
        """Yield what reads the pieces of box `index`, but for those that are in `shared`."""
        box = self._with_chunks[index]
        rest = box if shared.is_empty else box.along(0, shared.stop[0], box.stop[0])
        return (partial(self._read, piece, self._array(index), box) for piece in self._pieces(rest))

    def _array(self, index: int) -> np.ndarray:
        volume, box = self._reader.volume, self._with_chunks[index]
        if index not in self._arrays:
            self._arrays[index] = self._allocate((volume.num_channels, *box.shape), volume.dtype)
        return self._arrays[index]

    def _read(self, piece: Box, data: np.ndarray, box: Box) -> str:
        """Put the voxels of `piece` into `data`, those of `box`, note the stamps of fetched files; return a hash."""
        with noting_stamps() as stamps:
            voxels = self._reader.read_mirrored(piece)
        if self._stamps is not None:
            before = [self._stamps.setdefault(file, stamp) for file, stamp in stamps.items()]
            if before != list(stamps.values()):  # no |=, which would forget what another thread notes meanwhile
                self._is_changed = True
        data[:, *piece.relative_to(box.start).slices] = voxels
        return hash_voxels(voxels)

    def _stop(self, stop: int) -> int:
        """Return where to read until, if all up to `stop` is needed: the end of its chunks."""
        end = align_up(stop, self._step)
        return min(end, self.whole.stop[0]) if end < self._reader.volume.spatial_shape[0] else self.whole.stop[0]

    def _pieces(self, box: Box) -> Iterator[Box]:
        """Yield `box` in pieces of whole chunks, layer by layer; what is mirrored belongs to the piece at the face."""
        if not box.is_empty:
            for top, bottom in self._cuts(0, box, self._step if self._step > 1 else sys.maxsize):
                for left, right in self._cuts(1, box, self._height):
                    yield box.along(0, top, bottom).along(1, left, right)

    def _cuts(self, axis: int, box: Box, step: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of `box` along `axis` between multiples of `step` in the volume."""
        first, last, size = box.start[axis], box.stop[axis], self._reader.volume.spatial_shape[axis]
        inner = (place for place in range(align_up(first + 1, step), last, step) if 0 < place < size)
        yield from itertools.pairwise([first, *inner, last])

    def fingerprint(self) -> str:
        """Return the fingerprint of all voxels that were read.

        Raises:
            VolumeError: their files changed meanwhile.
        """
        if self._stamps is None:
            state = self._files.hash(self.whole)
            self._is_changed = state != self._before
        else:
            state = self._files.hash_stamps(self.whole, self._stamps)
        if self._is_changed:
            raise VolumeError(
                f"{self._reader.volume} changed while its voxels {self.whole} were read; let whoever writes it come to "
                "an end, and give the same command again"
            )
        return f"{state}:{hashlib.blake2b(''.join(self._hashes).encode(), digest_size=8).hexdigest()}"
