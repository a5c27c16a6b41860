"""Voxels that lie one after another in a file, in C order: read where they lie, run by run; written plane by plane.

Not here: where in which file they start (npy, mrc, tiff). Files are read, not mapped into memory: a file cut short, or
a disk that fails, is then an error and not the end of the process.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.geometry.indexing import ranges
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import check_links
from volpipe.volumes.storage.tensorstore import Index

Part = tuple[Box, np.ndarray]  # a box (z, y, x) of an array that is written, and its voxels (c, z, y, x)

NEAR_BYTES = 4096  # runs closer than a page of the disk's cache are read as one,
MAX_JOINED_BYTES = 2**23  # if that takes little memory


class ByteSource(Protocol):
    """Bytes that several threads may read at any place."""

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fill `target`, contiguous, with the bytes from `offset` on."""


class RawFile:
    """A file that several threads may read at any place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fill `target`, contiguous, with the bytes from `offset` on."""
        left = target.reshape(-1).view(np.uint8).data
        tensorstore.count(read=len(left))
        while left:
            count = os.preadv(self._descriptor, [left], offset)
            if count == 0:
                raise OSError(f"{self.path} ends at byte {offset}, {len(left)} bytes too early; copy it again")
            left, offset = left[count:], offset + count

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on."""
        data = np.empty(count, np.uint8)
        self.read_into(offset, data)
        return data.tobytes()


class FlatArray:
    """An array in bytes, from `offset` on, of type `stored`, in any byte order; `shape` in C order."""

    def __init__(self, file: ByteSource, offset: int, stored: np.dtype, shape: tuple[int, ...]) -> None:
        self._file = file
        self._offset = offset
        self._stored = stored
        self._shape = shape

    def read(self, index: Index) -> np.ndarray:
        """Return the voxels at `index`, in native byte order; no more is held in memory than them and one run."""
        positions = ranges(index, self._shape)
        out = np.empty([len(along) for along in positions], self._stored)
        if out.size:
            self._fill_from_file(out, positions)
        if not out.dtype.isnative:
            out = out.byteswap(inplace=True).view(out.dtype.newbyteorder("="))
        return out.reshape([n for n, i in zip(out.shape, index, strict=True) if not isinstance(i, int)])

    def _fill_from_file(self, out: np.ndarray, ranges: list[range]) -> None:
        """Fill `out`: axes that are read as a whole go with the run of the axis before them."""
        steps = self._strides()
        last = len(ranges) - 1
        while last and len(ranges[last]) == self._shape[last]:
            last -= 1
        if ranges[last].step > 1 and last < len(ranges) - 1:
            last += 1  # else skipped elements would be read
        elif self._joins(ranges, last, steps):
            last -= 1
        inner = tuple(slice(p[0] - p.start, p[-1] + 1 - p.start, p.step) for p in ranges[last:])
        shape = [p[-1] + 1 - p.start for p in ranges[last:]]
        first = self._offset + sum(p.start * step for p, step in zip(ranges, steps, strict=True))
        for place in np.ndindex(*map(len, ranges[:last])):
            start = sum(i * p.step * step for i, p, step in zip(place, ranges, steps, strict=False))
            self._read_runs(out[place], first + start, shape, steps[last:], inner)

    def _joins(self, ranges: list[range], last: int, steps: list[int]) -> bool:
        """Return whether the runs of axis `last` lie near enough to read them as one."""
        if not last or ranges[last - 1].step != 1:
            return False
        run = (ranges[last][-1] + 1 - ranges[last].start) * steps[last]
        return steps[last - 1] - run <= NEAR_BYTES and len(ranges[last - 1]) * steps[last - 1] <= MAX_JOINED_BYTES

    def _read_runs(
        self, out: np.ndarray, offset: int, shape: list[int], steps: Sequence[int], inner: tuple[slice, ...]
    ) -> None:
        """Fill `out` from the one run of bytes at `offset` that holds all of it."""
        count = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) // self._stored.itemsize + 1
        if out.flags.c_contiguous and out.size == count:
            self._file.read_into(offset, out)
            return
        run = np.empty(count, self._stored)
        self._file.read_into(offset, run)
        out[...] = np.lib.stride_tricks.as_strided(run, shape, steps)[inner]

    def _strides(self) -> list[int]:
        return [num_bytes(self._shape[axis + 1 :], self._stored) for axis in range(len(self._shape))]


class Turned:
    """An array in Fortran order: the axes of `array`, reversed."""

    def __init__(self, array: FlatArray) -> None:
        self._array = array

    def read(self, index: Index) -> np.ndarray:
        return self._array.read(index[::-1]).T


def open_array(header: Header, cache_bytes: int = 0) -> FlatArray | Turned:
    """Return the array of `header`, which knows its offset, its type and, where it is in Fortran order, its turn."""
    known, is_turned = header.known, header.known.get("turned", False)
    shape = header.shape[::-1] if is_turned else header.shape
    file = file_of(header)
    try:
        raw = RawFile(file)
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    array = FlatArray(raw, known["offset"], known["stored"], shape)
    return Turned(array) if is_turned else array


def file_of(header: Header) -> Path:
    """Return the file in which the voxels of `header` lie: the first data file that it names, or else its own."""
    own = header.known.get("file", header.path)  # of an array that has a key in its file
    return header.data_files[0] if header.data_files else Path(own)


def check_size(path: Path, offset: int, shape: tuple[int, ...], stored: np.dtype) -> None:
    """Raise unless the file is large enough for an array of `shape` from byte `offset` on."""
    check_end(path, offset + num_bytes(shape, stored))


def check_end(path: Path, end: int) -> None:
    """Raise unless the file reaches byte `end`."""
    size = path.stat().st_size
    if size < end:
        raise VolumeError(f"{path} has {size} bytes, its header asks for {end}: it is cut short; copy it again")


def num_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def write_planes(stream: BinaryIO, offset: int, depth: int, z: int, data: np.ndarray) -> None:
    """Write `data` (c, z, y, x), whole planes from plane `z` on, into an array (c, depth, y, x) at byte `offset`."""
    plane = num_bytes(data.shape[2:], data.dtype)
    for channel, planes in enumerate(data):
        stream.seek(offset + (channel * depth + z) * plane)
        stream.write(np.ascontiguousarray(planes).data)
