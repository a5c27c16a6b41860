"""The content of a file in gzip at any place: unpacked from the nearest of the places that are remembered.

Not here: what the content means (nifti, nrrd), or voxels that are not packed (flat). A file in gzip (RFC 1952) can be
unpacked from its start alone. So the state of the unpacker, 45 KB with the 32 KiB that it looks back upon, is copied
every few MiB on the way; this index lies in memory, and grows as far as somebody has read::

    file     |--------------------------------------------|
    places   0         1         2         3                   the fourth is not reached yet
    a read                          [===]                      unpacked from place 2 on
"""

from __future__ import annotations

import bisect
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.formats import flat
from volpipe.volumes.formats.flat import FlatArray, RawFile, num_bytes
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import check_links

if TYPE_CHECKING:
    from zlib import _Decompress

MAGIC = b"\x1f\x8b"
GZIP = 16 + zlib.MAX_WBITS  # with the header and the checksum of gzip, as zlib names it
FED_BYTES = 2**16  # of the file at a time
BLOCK_BYTES = 2**20  # of the content that are unpacked at once, at most, and kept in memory, at least one block
PLACE_BYTES, MOST_PLACES = 2**22, 128  # of the content from place to place at least, and places: 6 MB of memory
SLOW_BYTES = 2**26  # of the content, which takes about 0.2 s to unpack (2026-11)


@dataclass
class UnpackingState:
    """How far a file is unpacked: byte `packed` of the file is next, byte `at` of the content."""

    packed: int
    at: int
    unpack: _Decompress
    left: bytes = b""  # unpacked, up to `at`, and not asked for
    ended: bool = False  # whether the last that was fed ended in a checksum, which was right

    def copy(self) -> UnpackingState:
        return replace(self, unpack=self.unpack.copy())


class UnpackedFile:
    """The content of a file in gzip that several threads may read at any place, as they read a `RawFile`."""

    def __init__(self, path: Path, start: int, length: int, cache_bytes: int = 0) -> None:
        """Unpack from byte `start` of the file on; of the content, `length` bytes are of interest."""
        self.path = path
        self._file, self._size = RawFile(path), path.stat().st_size
        self._length, self._step = length, max(PLACE_BYTES, -(-length // MOST_PLACES))
        self._places = [UnpackingState(start, 0, zlib.decompressobj(GZIP))]
        self._now = self._places[0].copy()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._most_blocks = max(1, cache_bytes // BLOCK_BYTES)
        self._lock = threading.Lock()

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fill `target`, contiguous, with the bytes of the content from `offset` on."""
        left = target.reshape(-1).view(np.uint8)
        while len(left):
            number, skipped = divmod(offset, BLOCK_BYTES)
            with self._lock:
                part = self._read_block(number)[skipped : skipped + len(left)]
            left[: len(part)] = np.frombuffer(part, np.uint8)
            left, offset = left[len(part) :], offset + len(part)

    def _read_block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * BLOCK_BYTES
            block = self._unpack_span(start, min(start + BLOCK_BYTES, self._length))
            while len(self._blocks) >= self._most_blocks:
                self._blocks.popitem(last=False)
            self._blocks[number] = block
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _unpack_span(self, start: int, stop: int) -> bytes:
        """Return the content from byte `start` to `stop`; at its end, its checksum is looked at."""
        nearest = self._places[bisect.bisect_right(self._places, start, key=lambda place: place.at) - 1]
        if not nearest.at <= self._now.at - len(self._now.left) <= start:
            self._now = nearest.copy()
        now, parts = self._now, []
        at = now.at - len(now.left)
        while at < stop:
            data, now.left = now.left or self._unpack_next(), b""
            parts.append(data[max(0, start - at) : max(0, stop - at)])
            at += len(data)
            now.left = data[len(data) - max(0, at - stop) :]
        while stop == self._length and not now.left and not now.ended:
            now.left = self._unpack_next()
        return b"".join(parts)

    def _unpack_next(self) -> bytes:
        """Return what the next bytes of the file unpack to, maybe none; the place behind them may be remembered.

        Raises:
            VolumeError: they are damaged, or the file ends before its content does.
        """
        now = self._now
        data = self._file.read(now.packed, max(0, min(FED_BYTES, self._size - now.packed)))
        try:
            content = now.unpack.decompress(data, BLOCK_BYTES)
        except zlib.error as error:
            raise VolumeError(
                f"{self.path} cannot be unpacked behind byte {now.packed}: {error}; it is damaged, copy it again"
            ) from error
        now.at, now.ended = now.at + len(content), now.unpack.eof
        now.packed += len(data) - len(now.unpack.unconsumed_tail) - len(now.unpack.unused_data)
        if now.ended:  # and another part may follow, as those of bgzip do
            now.unpack = zlib.decompressobj(GZIP)
        elif not data and not content:
            raise VolumeError(
                f"{self.path} ends at byte {self._size}, where {now.at} of {self._length} bytes are unpacked: it is "
                "cut short; copy it again"
            )
        if now.at >= self._places[-1].at + self._step and not now.unpack.unconsumed_tail:
            self._places.append(now.copy())
        return content


def unpacked_start(start: bytes, count: int) -> bytes:
    """Return up to `count` bytes of the content of a file that begins with `start`; none where that is no gzip."""
    content = b""
    while start and len(content) < count:
        unpack = zlib.decompressobj(GZIP)
        try:
            content += unpack.decompress(start, count - len(content))
        except zlib.error:
            return b""
        start = unpack.unused_data
    return content


def slow_notes(length: int) -> tuple[str, ...]:
    """Return what a user should know of `length` bytes in gzip: none where they are unpacked in no time."""
    if length < SLOW_BYTES:
        return ()
    return (
        "it is packed by gzip, in one piece: a box costs unpacking all from its first voxel to its last, and each "
        "process unpacks once from the start; a copy is faster (`volpipe convert`, or gunzip)",
    )


def open_array(header: Header, cache_bytes: int) -> flat.FlatArray | flat.Turned:
    """Return the array of `header`, whose `known` says where in the file the gzip begins; else it lies there as it is.

    Raises:
        VolumeError: the file cannot be read.
    """
    known = header.known
    if "gzip_at" not in known:
        return flat.open_array(header)
    file, length = flat.file_of(header), known["offset"] + num_bytes(header.shape, known["stored"])
    try:
        content = UnpackedFile(file, known["gzip_at"], length, cache_bytes)
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    return FlatArray(content, known["offset"], known["stored"], header.shape)
