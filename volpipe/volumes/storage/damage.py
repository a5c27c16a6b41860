"""Damaged chunks, named by dataset, chunk and file; also those that libraries read without an error.

Not here: reading (tensorstore, formats). Each check reads a few bytes of a file, once for each chunk.
"""

from __future__ import annotations

import errno
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from volpipe.errors import ChunkError, RemoteError, VolumeError
from volpipe.geometry.grid import Box, cells
from volpipe.geometry.indexing import bounds, ranges
from volpipe.volumes.storage import decoded_size, object_store, paths
from volpipe.volumes.storage.chunk_files import ABSENT, ChunkFiles
from volpipe.volumes.storage.memory import check_memory
from volpipe.volumes.storage.metadata import ChunkScheme, Header
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.requests import is_damage
from volpipe.volumes.storage.tensorstore import Index, StoredArray, check_process

PASSING = {
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
MAX_TRIED = 100_000  # chunks of one box that are read again to find which is damaged
KNOWN_CHUNKS = 2**16
BLOSC_BYTES = 16
XZ_BYTES = 2**16  # of headers and tables, at most, beside what an xz stream holds


def read(what: object, header: Header, array: StoredArray, index: Index, *, is_checked: bool = False) -> np.ndarray:
    """Return the voxels at `index` of `array`, in stored axes.

    Args:
        what: the array, for errors.
        header: of `array`.
        array: open.
        index: what to read.
        is_checked: whether the array itself checks its chunks, by `check_content`.

    Raises:
        ChunkError: a chunk is damaged, cut short, of a wrong length, or unpacks to more than a chunk.
        VolumeError: it is more than memory holds, or cannot be read for another reason.
    """
    check_process()
    box = bounds(index, header.shape)
    check_memory(box.num_voxels * header.dtype.itemsize, f"{what}: a box to be read at once")
    place = f"{what}, voxels {box}"
    if not is_checked:
        _check_before(place, header, box)
    with _naming_chunk(place, header, array, box):
        data = array.read(index)
    if not is_checked:
        _check_after(place, header, index, data)
    return data


def check_chunk(header: Header) -> None:
    """Raise where a chunk, which is decoded whole, is more than memory holds."""
    if header.codec != "raw" or header.scheme is not None:
        size = math.prod(header.chunks) * header.dtype.itemsize
        check_memory(size, f"{header.folder}: a chunk {header.chunks} of {header.dtype}")


@contextmanager
def _naming_chunk(place: str, header: Header, array: StoredArray, box: Box) -> Iterator[None]:
    """Turn errors of reading `box` of `array` into one that names array, box, chunk and file."""
    try:
        yield
    except RemoteError as error:
        raise RemoteError(f"{place}: {error}") from error
    except (VolumeError, ValueError, OSError, RuntimeError, MemoryError, OverflowError) as error:
        if isinstance(error, MemoryError):
            raise VolumeError(f"{place}: too much for the memory of this process; read less") from error
        if isinstance(header.folder, object_store.Remote) and not is_damage(error):
            raise VolumeError(f"{place}: {object_store.explain(header.folder, error)}") from error
        chunk, reason = _find_damaged(header, array, box) or (None, error)
        if chunk is None:
            raise VolumeError(f"{place}: {_message(reason)}") from error
        file = file_of(header, chunk)
        raise ChunkError(
            f"{place}: chunk {chunk} in {file} cannot be read: {_message(_name_fault(file) or reason)}",
            may_mend=_is_of_system(reason),
        ) from error


def _find_damaged(header: Header, array: StoredArray, box: Box) -> tuple[tuple[int, ...], Exception] | None:
    """Return the first chunk in `box` that cannot be read, and why; None where each can."""
    whole = Box((0,) * len(header.chunks), header.chunks)
    for chunk in itertools.islice(cells(box, header.chunks), MAX_TRIED):
        inner = box & whole.shift(tuple(i * c for i, c in zip(chunk, header.chunks, strict=True)))
        try:
            array.read(inner.slices)
        except (VolumeError, ValueError, OSError, RuntimeError) as error:
            return chunk, error
    return None


def _name_fault(file: Location) -> VolumeError | None:
    """Return why the name of `file` leads to none, None where it does not."""
    try:
        if isinstance(file, Path):
            paths.check_links(file)
    except VolumeError as error:
        return error
    return None


def _is_of_system(error: Exception) -> bool:
    """Return whether `error` is a passing failure of the system, not damage of the file."""
    match = re.search(r"os_error_code='(\d+)'", str(error))  # as tensorstore says it
    number = int(match[1]) if match else getattr(error, "errno", None)
    return number in PASSING


def _message(error: Exception) -> str:
    return " ".join(str(error).partition("\n\nDebug source")[0].split())


def file_of(header: Header, chunk: Sequence[int]) -> Location:
    """Return the file that holds the chunk of the array of `header` at the index `chunk`, stored axes."""
    if header.has_slices:
        return header.folder / header.slice_name(chunk)
    if header.scheme is not None:
        units = zip(chunk, header.chunks, header.write_unit, strict=True)
        return header.folder / ChunkFiles(header).name(tuple(i * c // unit for i, c, unit in units))
    file = header.known.get("file")
    return file if isinstance(file, Path) else header.folder


def check_content(header: Header, chunk: Sequence[int], content: bytes) -> None:
    """Raise where the `content` of the file of a chunk tells that it is damaged, and its codec would not.

    Raises:
        ValueError: a blosc or xz chunk unpacks to more than a chunk, or a chunk says that it has too few voxels.
    """
    assert header.scheme is not None
    start, codec = header.scheme.head_bytes(len(header.shape)), header.scheme.codec(header).name
    most = math.prod(header.chunks) * header.dtype.itemsize
    try:
        _check_shape("it", header.scheme, content[:start], _expected_shape(header, chunk))
        if codec == "xz":
            decoded_size.check_xz(content[start:], most)
        if codec == "blosc":
            _check_blosc_size("it", content[start : start + BLOSC_BYTES], most)
    except ChunkError as error:
        raise ValueError(f"DATA_LOSS: {error}") from error


def _check_before(place: str, header: Header, box: Box) -> None:
    """Raise where a blosc chunk in `box` says that it unpacks to more than a chunk; on disks alone.

    Blosc takes that memory, up to 2 GiB, before it looks at the data; the other codecs unpack as they are read.

    Raises:
        ChunkError: with both numbers.
    """
    if header.scheme is None:
        return
    codec, most = header.scheme.codec(header).name, math.prod(header.chunks) * header.dtype.itemsize
    if codec == "xz":
        _check_xz_chunks(place, header, box, most)
    if codec != "blosc" or not isinstance(header.folder, Path):
        return
    places: dict[Location, np.ndarray | None] = {}
    head_bytes = header.scheme.head_bytes(len(header.shape))
    for chunk in cells(box, header.chunks):
        file = file_of(header, chunk)
        assert isinstance(file, Path)
        offset = 0
        if header.shards:
            start = _place_in_shard(header, chunk, places)
            if start is None:
                continue
            offset = start
        elif head_bytes:
            offset = header.scheme.start(len(header.shape), _bytes(file, 0, head_bytes))
        try:
            _check_blosc(file, offset, most)
        except ChunkError as error:
            raise ChunkError(f"{place}: chunk {chunk} in {error}") from error


def _check_xz_chunks(place: str, header: Header, box: Box, most: int) -> None:
    """Raise where an xz chunk in `box` is damaged; it costs unpacking it twice."""
    assert header.scheme is not None
    for chunk in cells(box, header.chunks):
        file = file_of(header, chunk)
        text = paths.read(file, header.scheme.head_bytes(len(header.shape)) + 2 * most + XZ_BYTES) or b""
        offset = header.scheme.start(len(header.shape), text)
        try:
            if len(text) >= offset:
                decoded_size.check_xz(text[offset:], most)
        except ChunkError as error:
            raise ChunkError(f"{place}: chunk {chunk} in {file} cannot be read: {error}") from error


def _place_in_shard(header: Header, chunk: tuple[int, ...], known: dict[Location, np.ndarray | None]) -> int | None:
    """Return the first byte of `chunk` in its shard's file, None where it is not stored or unknown.

    The indices of shards are `known` for as long as one reading lasts: a shard may be written anew.
    """
    per = [u // c for u, c in zip(header.write_unit, header.chunks, strict=True)]
    shard = tuple(i // n for i, n in zip(chunk, per, strict=True))
    file = file_of(header, chunk)
    if file not in known:
        known[file] = ChunkFiles(header).places_in_shard(shard)
    places = known[file]
    if places is None:
        return None
    place = int(places[tuple(i % n for i, n in zip(chunk, per, strict=True))][0])
    return None if place == ABSENT else place


def _bytes(file: Path, offset: int, count: int) -> bytes:
    """Return up to `count` bytes of a file; none where it cannot be read, since reading the chunk gives the error."""
    with suppress(OSError, ValueError, OverflowError):
        part = paths.fetch(file, (offset, offset + count))
        return b"" if part is None else part.data
    return b""


@lru_cache(maxsize=KNOWN_CHUNKS)  # of valid chunks: one that raises is checked again
def _check_blosc(file: Path, offset: int, most: int) -> None:
    _check_blosc_size(file, _bytes(file, offset, BLOSC_BYTES), most)


def _check_blosc_size(file: object, text: bytes, most: int) -> None:
    if len(text) == BLOSC_BYTES:
        size = int.from_bytes(text[4:8], "little")
        if size > most:
            raise ChunkError(f"{file} unpacks to {size} bytes and a chunk has {most}: it is damaged")


def _check_after(place: str, header: Header, index: Index, data: np.ndarray) -> None:
    """Raise where a chunk says that it has fewer voxels than it should; tensorstore takes the rest for zeros.

    Where chunks say their own shape, it may be less than a chunk's only at the end of an array. What is missing is
    zero in `data`, the voxels at `index`, so the files are looked at only where a chunk's last voxel there is zero.

    Raises:
        ChunkError: with both shapes.
    """
    if header.scheme is None or not header.scheme.head_bytes(len(header.shape)) or not data.size:
        return
    axes = zip(ranges(index, header.shape), header.chunks, strict=True)
    chunks, last = zip(*(_last_of_chunks(along, c) for along, c in axes), strict=True)
    ends = tuple(at for i, at in zip(index, last, strict=True) if not isinstance(i, int))
    corners = data[np.ix_(*ends)] if ends else data
    for zero in np.argwhere(corners.reshape([len(at) for at in last]) == 0):
        chunk = tuple(int(numbers[k]) for numbers, k in zip(chunks, zero, strict=True))
        try:
            _check_head(header.scheme, file_of(header, chunk), _expected_shape(header, chunk))
        except ChunkError as error:
            raise ChunkError(f"{place}: chunk {chunk} in {error}") from error


def _last_of_chunks(positions: range, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the chunks that `positions` of an axis touch, and the last of them in each."""
    numbers = np.array(positions, int) // chunk
    last = np.flatnonzero(np.diff(numbers, append=-1))
    return numbers[last], last


def _expected_shape(header: Header, chunk: Sequence[int]) -> tuple[int, ...]:
    """Return the voxels, C order, that the chunk at the index `chunk` must have: those inside of the array."""
    axes = zip(chunk, header.chunks, header.shape, strict=True)
    return tuple(min(c, n - i * c) for i, c, n in axes)


@lru_cache(maxsize=KNOWN_CHUNKS)
def _check_head(scheme: ChunkScheme, file: Location, expected: tuple[int, ...]) -> None:
    """Raise where the chunk in `file`, if there is one, says that it has fewer voxels than `expected`, C order."""
    _check_shape(file, scheme, paths.read(file, scheme.head_bytes(len(expected))) or b"", expected)


def _check_shape(file: object, scheme: ChunkScheme, head: bytes, expected: tuple[int, ...]) -> None:
    shape = scheme.stated_shape(len(expected), head)
    if shape is not None and any(n < m for n, m in zip(shape, expected, strict=True)):
        raise ChunkError(f"{file} holds {shape} voxels instead of {expected}: it is damaged")


@contextmanager
def naming(what: object, where: object, folder: Location) -> Iterator[None]:
    """Turn errors of a chunk into one that names the array and the box."""
    try:
        yield
    except VolumeError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        reason = object_store.explain(folder, error) if isinstance(folder, object_store.Remote) else error
        raise VolumeError(f"{what}, voxels {where}: {reason}") from error
