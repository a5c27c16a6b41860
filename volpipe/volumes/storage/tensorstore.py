"""Voxels through tensorstore: arrays opened from metadata that was read, checked and cleaned elsewhere.

Not here: metadata (formats). The only file that imports tensorstore, and only in the process that reads.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.indexing import Index as Index
from volpipe.volumes.storage import object_store, zipped
from volpipe.volumes.storage.metadata import Header, Tree
from volpipe.volumes.storage.object_store import credentials_file, find_credentials
from volpipe.volumes.storage.paths import Location, check_letters

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")

COUNTERS = ("bytes_read", "bytes_written")
# Asked for these alone: tensorstore keeps for good what it tells, 0.6 KB a counter; of all 9 of a disk that is 5.5 KB a
# call, and a driver of 10,000 datasets or a worker of a million tasks asks often (2026-11-23).
STORES = ("file", "s3", "http", "memory")
# Of requests to S3 and web servers. Left alone tensorstore tries 32 times, up to 32 s apart, and waits without end for
# a server that says nothing. It reads the environment at its first request.
RETRIES = {"max_retries": 3, "initial_delay": "500ms", "max_delay": "4s"}
LOOK_SECONDS = 5.0  # of a read of a disk, after which its files are looked at: one that is a pipe is never read
TIMEOUTS = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "5",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_contexts: dict[tuple[int, bool], ts.Context] = {}
_owner: int | None = None  # the process that uses tensorstore
_lock = threading.Lock()


@dataclass(frozen=True)
class Transferred:
    """Stored bytes, that is compressed ones, read and written."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Transferred) -> Transferred:
        return Transferred(self.read + other.read, self.written + other.written)

    def __sub__(self, other: Transferred) -> Transferred:
        return Transferred(self.read - other.read, self.written - other.written)


class StoredArray(Protocol):
    """An open array in stored axes, C order, native byte order."""

    def read(self, index: Index) -> np.ndarray:
        """Return the voxels at `index`: slices with a positive step, and integers."""


class TensorStoreArray:
    """An array that tensorstore reads and writes; a chunk, or a shard, is written whole or not at all."""

    def __init__(self, array: ts.TensorStore, *, sharded: bool = False, tells_stored: bool = True) -> None:
        self._array = array
        self._sharded = sharded
        self._tells_stored = tells_stored

    def read(self, index: Index, look: Callable[[], None] | None = None) -> np.ndarray:
        """Return the voxels at `index`; where they take long, `look` tells whether a file is one to wait for."""
        check_process()
        return np.asarray(_result(self._array[index].read(order="C"), look))

    def is_stored(self, index: Index, look: Callable[[], None] | None = None) -> bool:
        """Return whether some chunk at `index` is stored, also where only a read can tell; `look` is as of `read`."""
        check_process()
        if not self._tells_stored:
            return True
        return not _result(self._array[index].storage_statistics(query_not_stored=True), look).not_stored

    def write(self, index: Index, data: np.ndarray) -> None:
        import tensorstore as ts

        check_process()
        if not self._sharded:
            self._array[index].write(data).result()
            return
        with ts.Transaction() as transaction:  # so that all chunks of a shard go into one write of its file
            self._array.with_transaction(transaction)[index].write(data).result()


def _result(future: ts.Future[T], look: Callable[[], None] | None) -> T:
    """Return the result of `future`; `look` is called once where that takes long, and may raise."""
    if look is not None:
        try:
            return future.result(timeout=LOOK_SECONDS)
        except TimeoutError:
            look()
    return future.result()


def open_array(
    header: Header, *, write: bool = False, cache_bytes: int = 0, live: bool = False, kvstore: Tree | None = None
) -> TensorStoreArray:
    """Return the array of `header`; its metadata on disk is not read again.

    Args:
        header: as read by the format's own file.
        write: whether it will be written to.
        cache_bytes: decoded chunks kept in memory, shared by all arrays of the process opened with the same number.
        live: whether a chunk in memory is compared with its file each time, 2 µs on a disk; else at the first read.
        kvstore: tensorstore's name for the folder of its chunk files, where that is not the header's.

    Raises:
        ValueError: tensorstore does not know this metadata.
    """
    import tensorstore as ts

    assert header.scheme is not None
    if kvstore is None:
        folder = header.folder
        for _ in PurePosixPath(header.scheme.key(header)).parts:
            folder = folder.parent
        kvstore = kvstore_of(folder)
    spec = {"driver": header.scheme.driver, "kvstore": kvstore, **header.scheme.metadata(header)}
    if cache_bytes:
        spec["recheck_cached_data"] = True if live else "open"
    own = context(cache_bytes)
    try:
        array = ts.open(spec, open=True, assume_metadata=True, read=True, write=write, context=own).result()
    except OverflowError as error:
        raise ValueError(f"a number is out of range: {error}") from error
    if header.scheme.is_reversed:
        array = array[ts.d[:].translate_to[0]].T
        array = array[0] if array.rank > len(header.shape) else array
    is_sharded, tells_stored = header.shards is not None, header.scheme.tells_stored
    return TensorStoreArray(array, sharded=is_sharded, tells_stored=tells_stored)


def count_keys(spec: Tree, first: bytes, last: bytes) -> int:
    """Return how many keys the store of `spec` has from `first` on, before `last`.

    Raises:
        ValueError: what it reads is damaged.
    """
    import tensorstore as ts

    return len(ts.KvStore.open(spec, context=context()).result().list(ts.KvStore.KeyRange(first, last)).result())


def read_key(spec: Tree, key: bytes) -> bytes | None:
    """Return what the store of `spec` has by this key, None where it has none.

    Raises:
        ValueError: what it reads is damaged.
    """
    import tensorstore as ts

    check_process()
    result = ts.KvStore.open(spec, context=context()).result().read(key).result()
    return bytes(result.value) if result.state == "value" else None


def kvstore_of(folder: Location) -> Tree:
    """Return tensorstore's spec of `folder`."""
    if isinstance(folder, Path):
        check_letters(folder)
        within = zipped.find(folder)
        if within is None:
            return {"driver": "file", "path": f"{folder}/"}
        place = f"{within[1]}/" if within[1] else ""
        return {"driver": "zip", "base": {"driver": "file", "path": str(within[0].file)}, "path": place}
    path = f"{folder.key}/" if folder.parts else ""
    if not folder.is_s3:
        return {"driver": "http", "base_url": folder.root, "path": path}
    credentials = find_credentials()
    signed: dict[str, str] = {"type": credentials.kind}
    if credentials.kind == "profile":
        signed |= {"profile": credentials.profile, "filename": str(credentials_file())}
    spec: Tree = {"driver": "s3", "bucket": folder.bucket, "path": path, "aws_credentials": signed}
    if folder.endpoint:
        spec |= {"endpoint": folder.endpoint, "aws_region": folder.region or object_store.DEFAULT_REGION}
    elif folder.region:
        spec["aws_region"] = folder.region
    return spec


class ArrayInMemory:
    """An array of `header` with chunk files in memory alone; those that nobody put there count as absent."""

    def __init__(self, header: Header, cache_bytes: int = 0, *, write: bool = False) -> None:
        import tensorstore as ts

        place = {"driver": "memory", "path": f"{uuid.uuid4().hex}/"}
        self._files = ts.KvStore.open(place, context=context(cache_bytes)).result()
        self._array = open_array(header, kvstore=place, cache_bytes=cache_bytes, write=write)
        assert header.scheme is not None
        self._prefix = f"{key}/" if (key := header.scheme.key(header)) else ""

    def put(self, name: str, data: bytes | None) -> None:
        """Store the chunk file `name`, or forget it where there are no `data`."""
        self._files.write(self._prefix + name, data).result()

    def read(self, index: Index) -> np.ndarray:
        return self._array.read(index)

    def encode(self, index: Index, data: np.ndarray, name: str) -> bytes | None:
        """Return the content of the file `name` that `data`, all its voxels, make; None where there is to be none."""
        self._array.write(index, data)
        result = self._files.read(self._prefix + name).result()
        self.put(name, None)
        return bytes(result.value) if result.state == "value" else None


class ChunkEncoder:
    """The chunks in the shards of an array of `header`, as they are stored; none where all is the fill value.

    `shape` of voxels, in stored axes, is encoded at a time; it starts with a chunk.
    """

    def __init__(self, header: Header, shape: tuple[int, ...]) -> None:
        import tensorstore as ts

        assert header.scheme is not None
        inner = header.scheme.without_shards(header)
        metadata = {**inner.known, "shape": list(shape)}
        place = {"driver": "memory", "path": f"{uuid.uuid4().hex}/"}
        spec = {"driver": header.scheme.driver, "kvstore": place, "metadata": metadata}
        own = context(encodes=True)
        self._files = ts.KvStore.open(place, context=own).result()
        self._array = ts.open(spec, open=True, assume_metadata=True, write=True, context=own).result()
        self._inner, self._scheme, self._style = inner, header.scheme, header.scheme.style(inner)

    def encode(self, data: np.ndarray) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Yield the place of each chunk of `data`, counted in chunks, and its bytes, in C order; past its end are fill
        values.
        """
        import tensorstore as ts

        check_process()
        self._array[tuple(slice(0, n) for n in data.shape)].write(data).result()
        names = {self._chunk_place(name.decode()): name for name in self._files.list().result()}
        for place, result in [(place, self._files.read(name)) for place, name in sorted(names.items())]:
            yield place, result.result().value
        self._files.delete_range(ts.KvStore.KeyRange()).result()

    def _chunk_place(self, name: str) -> tuple[int, ...]:
        words = name.removeprefix(self._style.prefix).split(self._style.separator)
        return tuple(self._scheme.index(self._inner, words) or ())


def context(cache_bytes: int = 0, *, encodes: bool = False) -> ts.Context:
    """Return this process's tensorstore context with a chunk cache of `cache_bytes`.

    Chunk files are on disk before they are renamed into place: a mark in the journal never speaks of what a power cut
    takes away. What `encodes` has threads of its own: behind the chunks that are read ahead, 8 chunks at a time took 8
    ms with 8 threads, which would be 1 ms alone, and a GPU waited for them (H100, 2026-11-27).

    Raises:
        VolumeError: this process was forked from one that had used tensorstore, whose threads it lacks.
    """
    import tensorstore as ts

    global _owner
    check_process()
    with _lock:
        _owner = os.getpid()
        kind = cache_bytes, encodes
        if kind not in _contexts:
            threads = {"limit": num_threads()}
            settings: dict[str, Any] = {"file_io_sync": True}  # Any: JSON
            settings |= {"data_copy_concurrency": threads, "file_io_concurrency": threads}
            settings |= {"s3_request_retries": RETRIES, "http_request_retries": RETRIES}
            for name, seconds in TIMEOUTS.items():
                os.environ.setdefault(name, seconds)
            if cache_bytes:
                settings["cache_pool"] = {"total_bytes_limit": int(cache_bytes)}
            _contexts[kind] = ts.Context(settings)
        return _contexts[kind]


def check_process() -> None:
    """Raise in a process forked from one that used tensorstore: its next call would abort the process."""
    if _owner not in (None, os.getpid()):
        raise VolumeError(
            "this process was forked from one that had opened volumes, and cannot read any; start "
            'workers with multiprocessing.get_context("spawn"), or open volumes only in workers'
        )


def num_threads() -> int:
    """Return how many threads read and decode in this process: VOLPIPE_THREADS, or one per core."""
    text = os.environ.get("VOLPIPE_THREADS", "")
    if not text:
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise VolumeError(f"VOLPIPE_THREADS is {text!r}; it must be a number of threads, at least 1")
    return int(text)


_elsewhere = Transferred()


def transferred() -> Transferred:
    """Return the stored bytes of chunks that this process has read and written so far, by all of its threads."""
    # Another thread may be importing it at this moment; then nothing has been read.
    collect = getattr(sys.modules.get("tensorstore"), "experimental_collect_matching_metrics", None)
    counts = dict.fromkeys(COUNTERS, 0)
    for store in STORES:
        for metric in collect(f"/tensorstore/kvstore/{store}/bytes_") if collect is not None else ():
            name = metric["name"].rpartition("/")[2]
            if name in counts:
                counts[name] += sum(value["value"] for value in metric["values"])
    return Transferred(*counts.values()) + _elsewhere


def count(read: int = 0, written: int = 0) -> None:
    """Add stored bytes that bypassed tensorstore to `transferred`."""
    global _elsewhere
    with _lock:
        _elsewhere += Transferred(read, written)


def downsample(data: np.ndarray, factors: Sequence[int], method: str) -> np.ndarray:
    """Return `data` coarser by `factors` per axis, same dtype: the "mean" (integers round half to even) or the "mode".

    A voxel at the end that `data` covers in part is computed from that part.
    """
    import tensorstore as ts

    if method == "mean" and _is_halved(data, factors):
        return _halved(data, factors)
    known: Literal["mean", "mode"] = "mode" if method == "mode" else "mean"
    coarse: np.ndarray = ts.downsample(ts.array(data), list(factors), known).read(order="C").result()
    return coarse


def _is_halved(data: np.ndarray, factors: Sequence[int]) -> bool:
    if data.ndim != 4 or data.dtype not in (np.uint8, np.uint16) or factors[0] != 1 or max(factors) != 2:
        return False
    return all(n % factor == 0 for n, factor in zip(data.shape, factors, strict=True))


def _halved(data: np.ndarray, factors: Sequence[int]) -> np.ndarray:
    """Return the mean of `data` (c, z, y, x) over pairs of voxels along the axes whose factor is 2, half to even.

    Plane by plane, which stay in the processor's cache, and two neighbours along x as one number of twice the bits: a
    third of tensorstore's time, 0.3 ns a voxel (2026-11-27).
    """
    _, thickness, height, width = factors
    wide = np.dtype(f"u{2 * data.itemsize}").type
    bits = sum(factor == 2 for factor in factors)
    mask, shift, most = wide(np.iinfo(data.dtype).max), wide(8 * data.itemsize), wide(2 ** (bits - 1) - 1)
    coarse = np.empty(tuple(n // f for n, f in zip(data.shape, factors, strict=True)), data.dtype)
    for channel, place in np.ndindex(coarse.shape[:2]):
        planes = np.ascontiguousarray(data[channel, place * thickness : (place + 1) * thickness])
        if width == 2:
            pairs = planes.view(wide)
            planes = pairs & mask
            planes += pairs >> shift
        else:
            planes = planes.astype(wide)
        if height == 2:
            planes = planes[:, ::2] + planes[:, 1::2]
        total = planes[0] + planes[1] if thickness == 2 else planes[0]
        rounded = total >> wide(bits)
        rounded &= wide(1)  # a half is rounded up where that makes it even
        rounded += total
        rounded += most
        coarse[channel, place] = rounded >> wide(bits)
    return coarse
