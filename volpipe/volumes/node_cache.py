"""Files on a node's own disk, made once for all workers of the node, and kept there: chunks of the input, above all.

Not here: who names the folder on that disk (the site: `VOLPIPE_NODE_DIRECTORY` in a worker's environment). Where that
disk fails, the volume is read directly. Each process that uses a cache holds a shared lock on it, which the system
takes from a killed process; the next process deletes caches that nobody holds. Every file in a cache is whole.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from volpipe.geometry.grid import Index, cells
from volpipe.geometry.indexing import bounds
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.storage import paths, tensorstore
from volpipe.volumes.storage.chunk_files import ChunkFiles, ChunkSource
from volpipe.volumes.storage.fetched_array import FetchedArray, LocalArray
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Stamp
from volpipe.volumes.volume import Reader, Volume

LOCK_FILE = "lock"
PREFIX = "volpipe"
FREE_SHARE = 0.05  # of a node's disk, which others need as well, is left free
PARTIAL = ".partial"
VARIABLE = "VOLPIPE_NODE_DIRECTORY"
# Of a cached file: chunk files are fetched whole, and of a larger shard a block needs only a part.
LARGEST_BYTES = 64 * 2**20

MOST_STATES = 2**16  # of files that a process remembers
FETCHERS = 16  # files of a box at a time

T = TypeVar("T")

_warnings: dict[str, bool] = {}  # for the driver, and whether each was taken
_caches: dict[tuple[str, str], NodeCache] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class NodeCache:
    """A folder of this user and this run, held by this process from `open_cache` until it ends or closes it."""

    folder: Path
    lock: int

    def get(self, name: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        """Return the bytes of the file `name`, fetched on first use; None where there is no such file.

        One worker of a node fetches it; the others wait.

        Raises:
            OSError: the disk is full or gone.
        """

        def write(partial: Path) -> bytes | None:
            data = fetch()
            if data is not None:
                self._make_room(len(data))
                partial.write_bytes(data)
            return data

        return self._once(name, Path.read_bytes, write)

    def place(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Path:
        """Return the file `name`, which `write` makes on first use with `num_bytes`; the other workers wait.

        Raises:
            OSError: the disk is full or gone.
        """

        def make(partial: Path) -> Path:
            try:
                self._make_room(num_bytes)
                write(partial)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            return self.folder / name

        file = self._once(name, lambda file: file.resolve(strict=True), make)
        assert file is not None
        return file

    def _once(self, name: str, take: Callable[[Path], T], make: Callable[[Path], T | None]) -> T | None:
        """Return what `take` gives of the file `name`, or else `make`, which writes it; None where there is none."""
        file = self.folder / name.replace("/", "_")
        with contextlib.suppress(FileNotFoundError):
            return take(file)
        partial = file.with_name(file.name + PARTIAL)
        while True:
            with partial.open("ab") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                with contextlib.suppress(FileNotFoundError):  # another worker was faster
                    return take(file)
                if not _is_at(stream.fileno(), partial):  # what others write there now is not this worker's
                    continue
                made = make(partial)
                if made is None:
                    partial.unlink(missing_ok=True)
                else:
                    partial.rename(file)
            return made

    def drop(self, name: str) -> None:
        """Delete the file `name`, if it is here."""
        (self.folder / name.replace("/", "_")).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the cache, and delete it if nobody else holds it."""
        os.close(self.lock)
        remove_stale(self.folder.parent)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest files until there is room: a run reads a volume in order."""
        if self._has_room(num_bytes):
            return
        others = (file for file in self.folder.iterdir() if file.name != LOCK_FILE and file.suffix != PARTIAL)
        files = sorted(others, key=lambda file: (paths.stamp(file) or Stamp(0)).time_ns)
        for file in files[: len(files) // 2 + 1]:
            file.unlink(missing_ok=True)
        if not self._has_room(num_bytes):
            raise OSError(errno.ENOSPC, f"less than {FREE_SHARE:.0%} of the disk is free", str(self.folder))

    def _has_room(self, num_bytes: int) -> bool:
        disk = shutil.disk_usage(self.folder)
        return disk.free - num_bytes >= FREE_SHARE * disk.total


def open_cache(base: Path, run: str) -> NodeCache:
    """Return the cache of `run` below `base`; caches that nobody holds, as killed workers leave them, are deleted.

    Raises:
        OSError: it cannot be made, or its folder is another user's.
    """
    remove_stale(base)
    folder = base / f"{PREFIX}-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    base.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "is another user's", str(folder))
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # deleted just now
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_at(lock, folder / LOCK_FILE):
            return NodeCache(folder, lock)
        os.close(lock)


def remove_stale(base: Path) -> None:
    """Delete this user's caches below `base` that nobody holds."""
    for folder in base.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # deleted meanwhile, or not ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, folder / LOCK_FILE):
                # Renamed first: a process that opens it meanwhile makes a new one.
                shutil.rmtree(folder.rename(f"{folder}-{uuid.uuid4().hex}"), ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True, kw_only=True)
class CachedVolume(Volume):
    """A volume read through the cache of `run` below `base`."""

    base: str
    run: str

    def open(self, *, cache_bytes: int = 0, session: str = "", live: bool = False) -> Reader:
        reader = super().open(cache_bytes=cache_bytes, session=session, live=live)

        def cached(header: Header, array: tensorstore.StoredArray) -> tensorstore.StoredArray:
            is_cached = isinstance(array, FetchedArray | LocalArray)  # others are read by zarr-python alone
            return CachedArray(header, array, self, cache_bytes) if is_cached else array

        reader.read_through(cached)
        return reader


class CachedArray:
    """An array read through a node's cache, or directly where the cache fails."""

    def __init__(self, header: Header, array: tensorstore.StoredArray, volume: CachedVolume, cache_bytes: int) -> None:
        self._header, self._array, self._volume, self._cache_bytes = header, array, volume, cache_bytes
        self._here = tensorstore.ArrayInMemory(header, cache_bytes)
        self._source, self._name, self._scheme = ChunkSource(header), ChunkFiles(header).name, ChunkFiles(header).scheme
        self._states: dict[str, str] = {}  # of the files whose chunks may be in memory
        self._lock = threading.Lock()  # one thread may read what another drops from memory

    def read(self, index: tensorstore.Index) -> np.ndarray:
        units = list(cells(bounds(index, self._header.shape), self._header.write_unit))
        try:
            return self._read_cached({self._name(unit): unit for unit in units}, index)
        except Exception as error:  # of the node's disk: the volume itself may be readable
            data = self._array.read(index)
            warn(f"the input is read straight, not by way of {self._volume.base}: {type(error).__name__}: {error}")
            return data

    def _read_cached(self, names: Mapping[str, Index], index: tensorstore.Index) -> np.ndarray:
        """Return the voxels at `index`, given the names of its files and their places in the grid of files."""
        cache = node_cache(self._volume.base, self._volume.run)
        states = dict(zip(names, fetchers().map(self._unit_state, names.values()), strict=True))
        kept = {name: f"{name}@{state}" for name, state in states.items()}  # what has changed is another file
        contents = fetchers().map(lambda name: cache.get(kept[name], lambda: self._fetch(names[name])), names)
        stored = [(name, data) for name, data in zip(names, contents, strict=True) if data is not None]
        with self._lock:
            self._remember(states)
            try:
                for name, data in stored:
                    self._here.put(name, data)
                return self._here.read(index)
            except ValueError:  # a chunk that cannot be decoded
                for name in names:
                    cache.drop(kept[name])
                raise
            finally:
                for name, _ in stored:
                    self._here.put(name, None)

    def _unit_state(self, unit: Index) -> str:
        state = paths.file_state(self._header.folder / self._name(unit))
        if state == paths.ABSENT and self._source.is_elsewhere(unit):
            state = paths.file_state(self._source.file(unit))
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def _remember(self, states: dict[str, str]) -> None:
        """Forget the chunks in memory if one of the files in these `states` has changed since it was read."""
        if len(self._states) > MOST_STATES or any(self._states.get(name, now) != now for name, now in states.items()):
            self._here, self._states = tensorstore.ArrayInMemory(self._header, self._cache_bytes), {}
        self._states |= states

    def _fetch(self, unit: Index) -> bytes | None:
        part = self._source.fetch(unit)
        if part is not None and len(part.data) > LARGEST_BYTES:
            raise OSError(f"{self._name(unit)} has more than {LARGEST_BYTES >> 20} MiB")
        tensorstore.count(read=0 if part is None else len(part.data))
        return None if part is None else self._scheme.as_tensorstore_reads(self._header, part.data)


def through_cache(volume: Volume, run: str) -> Volume:
    """Return `volume`, read through this node's cache if the site names a directory and there is no `obstacle`."""
    base = node_directory()
    if not base or obstacle(volume):
        return volume
    return CachedVolume(**vars(volume), base=base, run=f"{run} {volume.path} {volume.key}")


def node_directory() -> str:
    """Return the folder on this node's disk that the site names, "" where it names none."""
    return os.path.expanduser(os.path.expandvars(os.environ.get(VARIABLE, "")))  # noqa: PTH111  # "" is no path


def obstacle(volume: Volume) -> str:
    """Return why `volume` cannot be read through a node's cache, "" where it can."""
    arrays = format_named(volume.format).arrays
    if arrays is None or not arrays.scheme.is_regular:
        return f"{volume.format} is read in parts of files"
    size = math.prod(volume.shards or volume.chunks) * volume.dtype.itemsize
    if size > LARGEST_BYTES:
        return f"its shards hold {size / 2**20:.0f} MiB, more than {LARGEST_BYTES >> 20}, and are read in part"
    return ""


def node_cache(base: str, run: str) -> NodeCache:
    """Return this process's cache of `run` below `base`, held until the process ends.

    Raises:
        OSError: it cannot be made.
    """
    if not Path(base).is_absolute() or "$" in base:
        raise OSError(f"{VARIABLE} is {base!r} on this node, which is no absolute path")
    with _lock:
        if (base, run) not in _caches:
            _caches[base, run] = open_cache(Path(base), run)
        return _caches[base, run]


@atexit.register
def close_caches() -> None:
    """Release all caches of this process."""
    while _caches:
        _caches.popitem()[1].close()


@lru_cache(maxsize=1)
def fetchers() -> ThreadPoolExecutor:
    """Return this process's threads that fetch files; they mostly wait."""
    return ThreadPoolExecutor(FETCHERS, "volpipe-fetch")


def warn(text: str) -> None:
    """Add a warning for the driver's log, once in each process."""
    with _lock:
        _warnings.setdefault(text, False)


def take_warnings() -> tuple[str, ...]:
    """Return the warnings that were not yet taken."""
    with _lock:
        fresh = tuple(text for text, was_taken in _warnings.items() if not was_taken)
        _warnings.update(dict.fromkeys(fresh, True))
    return fresh
