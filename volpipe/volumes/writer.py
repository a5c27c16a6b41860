"""Voxels into stored arrays, by whole chunks or shards.

Not here: arrays that are made (formats), or voxels that are read (volume).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Index, cells
from volpipe.volumes import checksums
from volpipe.volumes.formats import n5
from volpipe.volumes.formats.container import absolute, once, read_header
from volpipe.volumes.storage import damage, object_store, paths, tensorstore, zipped
from volpipe.volumes.storage.chunk_files import ABSENT, CHECKSUM_BYTES, ChunkFiles
from volpipe.volumes.storage.damage import naming
from volpipe.volumes.storage.fetched_array import FetchedArray, can_fetch
from volpipe.volumes.storage.growing import GrowingFile, open_growing
from volpipe.volumes.storage.metadata import check_aligned
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.requests import each, in_turn, room

# Of chunks of a shard that are encoded at a time, where one row of them is less: bytes, about, and chunks for each
# thread, since the last one keeps all waiting.
ENCODED_BYTES, CHUNKS_EACH = 16 << 20, 4


class Writer:
    """An open array to be written by whole chunks or shards, which appear whole or not at all."""

    def __init__(self, folder: Location, into: Location | None = None) -> None:
        if isinstance(folder, object_store.Remote):
            object_store.check_writable(folder)
        header = read_header(folder)
        if header is None:
            raise VolumeError(f"no array at {folder}; create it before writing to it")
        header = header if into is None else replace(header, folder=into)
        if isinstance(folder, Path) and zipped.find(folder) is not None:
            raise VolumeError(f"{folder}: an array in a zip file cannot be written; unpack it")
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
        self._check_box(box, data)
        if self._is_put:
            self._put_files(box, data)
            return
        with naming(self.header.folder, box, self.header.folder):
            self._array.write(box.slices, data)

    def write_summed(self, box: Box, data: np.ndarray) -> str:
        """Write `data` to `box` as `write` does; return the checksums of its files, see `checksums.take`.

        Those on a disk are read back. A bucket's server checks what it is sent, so that they are of that.
        """
        if isinstance(self.header.folder, Path) or not self._is_put:
            self.write(box, data)
            return checksums.take(self.header, box)
        self._check_box(box, data)
        return checksums.joined(self._put_files(box, data))

    def _check_box(self, box: Box, data: np.ndarray) -> None:
        folder = self.header.folder
        if data.dtype != self.dtype:
            raise VolumeError(f"{folder} holds {self.dtype}, the data is {data.dtype}; cast it first")
        if data.shape != box.shape:
            raise VolumeError(f"{folder}: data of shape {data.shape} does not fill the box {box} of shape {box.shape}")
        check_aligned(self.header, box.start, box.shape)

    @property
    def _is_put(self) -> bool:
        """Whether files are made in memory, and each is written whole, into a bucket by one request."""
        is_named = bool(ChunkFiles(self.header).name((0,) * len(self.shape)))
        return is_named and (isinstance(self.header.folder, object_store.Remote) or n5.is_gzip(self.header))

    def _put_files(self, box: Box, data: np.ndarray) -> list[int]:
        works = [partial(self._put_file, box, data, unit) for unit in cells(box, self.header.write_unit)]
        is_remote = isinstance(self.header.folder, object_store.Remote)
        return each(works) if is_remote else in_turn(works, tensorstore.num_threads())

    def _put_file(self, box: Box, data: np.ndarray, unit: Index) -> int:
        header, starts = self.header, zip(unit, self.header.write_unit, strict=True)
        own = box & Box((0,) * len(unit), header.write_unit).shift(tuple(i * n for i, n in starts))
        name, part = ChunkFiles(header).name(unit), data[own.relative_to(box.start).slices]
        with self._at_once, naming(header.folder, own, header.folder):
            made = n5.as_raw(header) if n5.is_gzip(header) else header
            content = tensorstore.ArrayInMemory(made, write=True).encode(own.slices, part, name)
            store = object_store if isinstance(header.folder, object_store.Remote) else paths
            if content is None:
                store.delete_file(header.folder / name)
                return checksums.ABSENT
            content = content if made is header else n5.gzipped(header, content)
            store.write(header.folder / name, content)
        tensorstore.count(written=len(content))
        return checksums.of_bytes(content)

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box`, in stored axes, as they are on disk now."""
        if box.is_empty or not Box.from_shape(self.shape).contains(box):
            raise VolumeError(f"{self.header.folder}: box {box} is empty or leaves the array {self.shape}")
        if self._fetched is not None:
            return damage.read(self.header.folder, self.header, self._fetched, box.slices, is_checked=True)
        return damage.read(self.header.folder, self.header, self._array, box.slices)


class ShardStream:
    """A shard of a Zarr v3 array, written layer by layer along z; it appears whole or not at all.

    Chunks go to a growing file as soon as they are whole. The bytes are those of the shard written at once. Chunks of
    several channels are put in order at the end, which a file in a bucket cannot be.

    Args:
        writer: of the array.
        box: the shard, in stored axes, clipped to the array.
        allocate: makes the array in which layers wait for the rest of their chunks, of a shape and a type.
    """

    def __init__(self, writer: Writer, box: Box, allocate: Callable[..., np.ndarray] = np.empty) -> None:
        header, files = writer.header, ChunkFiles(writer.header)
        assert header.shards is not None
        unit = header.write_unit
        self._header, self._box = header, box
        file = header.folder / files.name(tuple(a // n for a, n in zip(box.start, unit, strict=True)))
        self._growing = open_growing(file, shard_bytes(unit, header.dtype))
        self._entries = np.full((*(s // c for s, c in zip(unit, header.chunks, strict=True)), 2), ABSENT, np.uint64)
        depth, height, width = header.chunks[-3:]
        row = math.prod(box.shape[:-3]) * box.shape[-1]
        num_rows = -(-CHUNKS_EACH * tensorstore.num_threads() // -(-row // width))
        most_rows = ENCODED_BYTES // (row * depth * height * header.dtype.itemsize)
        self._height = height * max(1, min(num_rows, most_rows))
        self._encoder = tensorstore.ChunkEncoder(header, (*box.shape[:-3], depth, self._height, box.shape[-1]))
        self._waiting: np.ndarray | None = None  # one for all layers of chunks: it is large
        self._allocate = allocate
        self._num_layers = self._num_appended = self._size = 0

    @property
    def position(self) -> int:
        """Where the next layer lies along z in the array."""
        return self._box.start[-3] + self._num_appended

    def append(self, data: np.ndarray) -> None:
        """Write the next layers, `data` in stored axes; a part of a chunk waits for the rest of it.

        Raises:
            VolumeError: a disk that is full.
        """
        thickness, num_layers = self._header.chunks[-3], data.shape[-3]
        with naming(self._header.folder, self._box, self._header.folder):
            start = 0
            while start < num_layers:
                num_waiting = self._num_appended % thickness
                stop = min(start + thickness - num_waiting, num_layers)
                self._num_appended += stop - start
                layer, start = data[..., start:stop, :, :], stop
                is_whole = self._num_appended % thickness == 0 or self._num_appended == self._box.shape[-3]
                if num_waiting or not is_whole:
                    layer = self._with_waiting(layer, num_waiting)
                if is_whole:
                    self._append_chunks(layer)
        if self._num_appended == self._box.shape[-3]:
            self._waiting = None

    def _with_waiting(self, layer: np.ndarray, num_waiting: int) -> np.ndarray:
        """Return `layer` with the layers of its chunks that wait before it; it waits with them."""
        shape = self._box.shape
        if self._waiting is None:
            self._waiting = self._allocate((*shape[:-3], self._header.chunks[-3], *shape[-2:]), self._header.dtype)
        stop = num_waiting + layer.shape[-3]
        self._waiting[..., num_waiting:stop, :, :] = layer
        return self._waiting[..., :stop, :, :]

    def fill(self, stop: int) -> None:
        """Append zeros up to `stop` along z, if anything is missing there."""
        shape, thickness = self._box.shape, self._header.chunks[-3]
        while (missing := stop - self.position) > 0:
            depth = min(missing, thickness)
            self.append(np.zeros((*shape[:-3], depth, *shape[-2:]), self._header.dtype))

    def _append_chunks(self, layer: np.ndarray) -> None:
        """Append the chunks of a `layer` as thick as a chunk, or the last one, to the file."""
        for start in range(0, layer.shape[-2], self._height):
            pieces, row = [], start // self._header.chunks[-2]
            for place, data in self._encoder.encode(layer[..., start : start + self._height, :]):
                self._entries[*place[:-3], self._num_layers, row + place[-2], place[-1]] = self._size, len(data)
                pieces.append(data)
                self._size += len(data)
            if pieces:
                self._growing.write(pieces)
                tensorstore.count(written=sum(map(len, pieces)))
        self._num_layers += 1

    def settle(self) -> None:
        """Wait until nothing is on its way to a bucket, so that little is in memory."""
        self._growing.settle()

    def persist(self) -> None:
        """Store for good what was written so far, so that less is left at the end; another thread may write more."""
        if math.prod(self._box.shape[:-3]) == 1:  # chunks of several channels will be put in order
            with naming(self._header.folder, self._box, self._header.folder):
                self._growing.persist()

    def close(self) -> None:
        """Put the shard in its place, all of whose layers were written; where it holds nothing, there is no file."""
        assert self._num_appended == self._box.shape[-3]
        with naming(self._header.folder, self._box, self._header.folder):
            if not self._size:
                self._growing.remove()
                return
            self._order_chunks()
            import google_crc32c

            index = self._entries.astype("<u8").tobytes()
            index += google_crc32c.value(index).to_bytes(CHECKSUM_BYTES, "little")
            self._growing.write([index])
            tensorstore.count(written=len(index))
            self._growing.close()

    def checksums(self) -> str:
        """Return the checksums of the closed shard, as `checksums.take` does."""
        return checksums.joined([self._growing.checksum() or 1 if self._size else checksums.ABSENT])

    def _order_chunks(self) -> None:
        """Give the chunks in the file the order of the shard's, where channels were written in turn."""
        entries = self._entries.reshape(-1, 2)
        stored = entries[entries[:, 0] != ABSENT].tolist()
        if stored == sorted(stored):
            return
        assert isinstance(self._growing, GrowingFile)
        self._growing.reorder([(start, num_bytes) for start, num_bytes in stored])
        size = 0
        for entry in entries:
            if entry[0] != ABSENT:
                entry[0], size = size, size + int(entry[1])

    def abort(self) -> None:
        """Delete what was written."""
        self._growing.abort()


def shard_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the most bytes of a shard of `shape`, with its index, and what codecs add where nothing compresses."""
    return math.prod(shape) * dtype.itemsize * 11 // 10 + (1 << 20)


def open_writer(path: str | Path | object_store.Remote, key: str, into: Location | None = None) -> Writer:
    """Return this process's writer of an array that `create_array` made; the same one each time.

    Args:
        path: the container.
        key: the array in it.
        into: where its chunks go; beside its metadata where it is not said.
    """
    folder = absolute(path) / key.strip("/")
    return once(folder, ("write", into), lambda: Writer(folder, into))
