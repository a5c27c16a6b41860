"""Voxels into stored arrays, by whole chunks or shards.

Not here: arrays that are made (volume, formats), or voxels that are read (reader).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Index, cells
from volpipe.volumes import checksums
from volpipe.volumes.formats.container import absolute, read_header
from volpipe.volumes.reader import naming, once
from volpipe.volumes.storage import damage, object_store, tensorstore
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.storage.fetched_array import FetchedArray, can_fetch
from volpipe.volumes.storage.metadata import check_aligned
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.requests import each, room


class Writer:
    """An open array to be written by whole chunks or shards, which appear whole or not at all."""

    def __init__(self, folder: Location, into: Location | None = None) -> None:
        if isinstance(folder, object_store.Remote):
            object_store.check_writable(folder)
        header = read_header(folder)
        if header is None:
            raise VolumeError(f"no array at {folder}; create it before writing to it")
        header = header if into is None else replace(header, folder=into)
        if header.unsupported:
            raise VolumeError(f"{folder}: {header.unsupported} cannot be written")
        self.header = header
        self.shape = header.shape
        self.dtype = header.dtype
        try:
            self._array = tensorstore.open_array(header, write=True)
        except ValueError as error:
            raise VolumeError(f"{folder}: cannot be written to: {error}") from error
        self._fetched = FetchedArray(header) if can_fetch(header) else None
        self._at_once = room(math.prod(header.write_unit) * header.dtype.itemsize, fewest=1)

    def write(self, box: Box, data: np.ndarray) -> None:
        """Write `data` to `box`, both in stored axes.

        Raises:
            VolumeError: another dtype or shape, a box that is not made of whole chunks (shards, where there are any) or
                that leaves the array, or a disk that is full.
        """
        self._check(box, data)
        if self._is_put:
            self._put(box, data)
            return
        with naming(self.header.folder, box, self.header.folder):
            self._array.write(box.slices, data)

    def write_summed(self, box: Box, data: np.ndarray) -> str:
        """Write `data` to `box` as `write` does; return the checksums of its files, see `checksums.take`.

        Those on a disk are read back. A bucket's server checks what it is sent, so that they are of that.
        """
        if not self._is_put:
            self.write(box, data)
            return checksums.take(self.header, box)
        self._check(box, data)
        return checksums.joined(self._put(box, data))

    def _check(self, box: Box, data: np.ndarray) -> None:
        folder = self.header.folder
        if data.dtype != self.dtype:
            raise VolumeError(f"{folder} holds {self.dtype}, the data is {data.dtype}; cast it first")
        if data.shape != box.shape:
            raise VolumeError(f"{folder}: data of shape {data.shape} does not fill the box {box} of shape {box.shape}")
        check_aligned(self.header, box.start, box.shape)

    @property
    def _is_put(self) -> bool:
        """Whether files are made in memory, and each is written by one request."""
        is_named = bool(ChunkFiles(self.header).name((0,) * len(self.shape)))
        return isinstance(self.header.folder, object_store.Remote) and is_named

    def _put(self, box: Box, data: np.ndarray) -> list[int]:
        """Write the files of `box`; return the checksum of each."""
        units = cells(box, self.header.write_unit)
        return each([partial(self._put_file, box, data, unit) for unit in units])

    def _put_file(self, box: Box, data: np.ndarray, unit: Index) -> int:
        header, starts = self.header, zip(unit, self.header.write_unit, strict=True)
        own = box & Box((0,) * len(unit), header.write_unit).shift(tuple(i * n for i, n in starts))
        name, part = ChunkFiles(header).name(unit), data[own.relative_to(box.start).slices]
        with self._at_once, naming(header.folder, own, header.folder):
            content = tensorstore.ArrayInMemory(header, write=True).encode(own.slices, part, name)
            assert isinstance(header.folder, object_store.Remote)
            if content is None:
                object_store.delete_file(header.folder / name)
                return checksums.ABSENT
            object_store.write(header.folder / name, content)
        tensorstore.count(written=len(content))
        return checksums.of_bytes(content)

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box`, in stored axes, as they are on disk now."""
        if box.is_empty or not Box.from_shape(self.shape).contains(box):
            raise VolumeError(f"{self.header.folder}: box {box} is empty or leaves the array {self.shape}")
        if self._fetched is not None:
            return damage.read(self.header.folder, self.header, self._fetched, box.slices, is_checked=True)
        return damage.read(self.header.folder, self.header, self._array, box.slices)


def open_writer(path: str | Path | object_store.Remote, key: str, into: Location | None = None) -> Writer:
    """Return this process's writer of an array that `create_array` made; the same one each time.

    Args:
        path: the container.
        key: the array in it.
        into: where its chunks go; beside its metadata where it is not said.
    """
    folder = absolute(path) / key.strip("/")
    return once(folder, ("write", into), lambda: Writer(folder, into))
