"""The input by way of a node's own disk: its chunk files are fetched once for all workers of the node, and kept there.

Not here: the folder on that disk (shelf), or who names it (the site: `VOLPIPE_NODE_DIRECTORY` in a worker's
environment). Whatever that disk does, the volume itself is there, and is then read straight.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from volpipe.formats import files, store
from volpipe.formats.census import ChunkFiles
from volpipe.formats.damage import CHUNKED
from volpipe.formats.metadata import Header
from volpipe.shelf import Shelf, open_shelf
from volpipe.volume import Reader, Volume

VARIABLE = "VOLPIPE_NODE_DIRECTORY"
# Of a file that is kept: chunk files are fetched and held whole, and of larger shards a block needs a part alone.
LARGEST_BYTES = 64 * 2**20

FETCHERS = 16  # files of a box at a time

_notes: dict[str, bool] = {}  # words for the driver, and whether they were taken
_shelves: dict[tuple[str, str], Shelf] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class StagedVolume(Volume):
    """A volume whose chunk files are kept on the shelf of `run` below `base`, where they can be."""

    base: str
    run: str

    def open(self, *, cache_bytes: int = 0) -> Reader:
        reader = super().open(cache_bytes=cache_bytes)
        reader.read_through(lambda header, array: _staged_array(header, array, self, cache_bytes))
        return reader


def _staged_array(
    header: Header, array: store.StoredArray, volume: StagedVolume, cache_bytes: int
) -> store.StoredArray:
    # What zarr-python alone reads is left to it.
    known = isinstance(array, store.TensorStoreArray)
    return StagedArray(header, array, volume, cache_bytes) if known else array


class StagedArray:
    """An array that is read by way of a shelf, or straight where that fails."""

    def __init__(self, header: Header, array: store.StoredArray, volume: StagedVolume, cache_bytes: int) -> None:
        self._header, self._array, self._volume = header, array, volume
        self._here = store.ArrayInMemory(header, cache_bytes)
        self._lock = threading.Lock()  # what one thread takes out of memory, another may be about to read

    def read(self, index: store.Index) -> np.ndarray:
        names = list(files_at(self._header, index))
        try:
            return self._read(names, index)
        except Exception as error:  # whatever the node's disk does, or what lies on it: the volume may be well
            data = self._array.read(index)
            note(f"the input is read straight, not by way of {self._volume.base}: {type(error).__name__}: {error}")
            return data

    def _read(self, names: list[str], index: store.Index) -> np.ndarray:
        shelf = shelf_of(self._volume.base, self._volume.run)
        found = list(fetchers().map(lambda name: shelf.get(name, lambda: self._fetch(name)), names))
        stored = [(name, data) for name, data in zip(names, found, strict=True) if data is not None]
        with self._lock:
            try:
                for name, data in stored:
                    self._here.put(name, data)
                return self._here.read(index)
            except ValueError:  # a chunk that cannot be decoded, here at least
                for name in names:
                    shelf.forget(name)
                raise
            finally:
                for name, _ in stored:
                    self._here.drop(name)

    def _fetch(self, name: str) -> bytes | None:
        data = files.read(self._header.folder / name, LARGEST_BYTES + 1)
        if data is not None and len(data) > LARGEST_BYTES:
            raise OSError(f"{name} has more than {LARGEST_BYTES >> 20} MiB")
        store.count(read=len(data or b""))
        return data


def files_at(header: Header, index: store.Index) -> Iterator[str]:
    """Yield the name of every chunk file, or shard, that holds voxels at `index`, counted from the array's folder."""
    ranges = []
    for i, n, unit in zip(index, header.shape, header.write_unit, strict=True):
        positions = range(i, i + 1) if isinstance(i, int) else range(*i.indices(n))
        ranges.append(range(positions[0] // unit, positions[-1] // unit + 1) if positions else range(0))
    return map(ChunkFiles(header).name, itertools.product(*ranges))


def staged(volume: Volume, run: str) -> Volume:
    """Return `volume`, read by way of this node's directory if the site names one and `obstacle` sees none."""
    base = os.path.expanduser(os.path.expandvars(os.environ.get(VARIABLE, "")))  # noqa: PTH111  # "" is no path
    if not base or obstacle(volume):
        return volume
    given = {field.name: getattr(volume, field.name) for field in fields(volume)}
    return StagedVolume(**given, base=base, run=f"{run} {volume.path} {volume.key}")


def obstacle(volume: Volume) -> str:
    """Return why `volume` cannot be read by way of a node's directory, "" where it can."""
    if volume.format not in CHUNKED:
        return f"{volume.format} is read in parts of files"
    size = math.prod(volume.shards or volume.chunks) * volume.dtype.itemsize
    if size > LARGEST_BYTES:
        return f"its shards hold {size / 2**20:.0f} MiB, more than {LARGEST_BYTES >> 20}, and are read in part"
    return ""


def shelf_of(base: str, run: str) -> Shelf:
    """Return this process's shelf; it is let go when Python ends, and by the system when that is killed.

    Raises:
        OSError: there can be none.
    """
    if not Path(base).is_absolute() or "$" in base:
        raise OSError(f"{VARIABLE} is {base!r} on this node, which is no absolute path")
    with _lock:
        if (base, run) not in _shelves:
            _shelves[base, run] = open_shelf(Path(base), run)
        return _shelves[base, run]


@atexit.register
def close_shelves() -> None:
    """Let go of all shelves of this process."""
    while _shelves:
        _shelves.popitem()[1].close()


@lru_cache(maxsize=1)
def fetchers() -> ThreadPoolExecutor:
    """Return this process's threads that fetch files, most of whose time is waiting."""
    return ThreadPoolExecutor(FETCHERS, "volpipe-fetch")


def note(word: str) -> None:
    """Keep something that the driver's log should say, once for each process."""
    with _lock:
        _notes.setdefault(word, False)


def take_notes() -> tuple[str, ...]:
    """Return what was noted and nobody has taken yet."""
    with _lock:
        fresh = tuple(word for word, taken in _notes.items() if not taken)
        _notes.update(dict.fromkeys(fresh, True))
    return fresh
