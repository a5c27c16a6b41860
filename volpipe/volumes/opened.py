"""The open arrays of this process, each kept until its metadata change, and by what they are read.

Not here: what is kept (reader, writer, file_states).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from volpipe.errors import VolumeError
from volpipe.volumes.formats import precomputed, single_file, zarr
from volpipe.volumes.storage import damage, paths, tensorstore
from volpipe.volumes.storage.fetched_array import LocalArray
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import Location

log = logging.getLogger(__name__)

METADATA_FILES = {"n5": "attributes.json", "zarr2": ".zarray", "zarr3": "zarr.json"}  # beside the chunks
MOST_OPENED = 256  # arrays that a process keeps, 30 KiB each (2026-11-23); the oldest is opened anew where it is needed
T = TypeVar("T")
_opened: dict[tuple[int, Location, object], tuple[object, object]] = {}
_lock = threading.Lock()


def once(folder: Location, purpose: object, make: Callable[[], T], *, has_slices: bool = False) -> T:
    """Return this process's object for the folder and purpose, made anew if the metadata have changed."""
    place = (os.getpid(), folder, purpose)
    now = state(folder, has_slices=has_slices)
    known = _opened.get(place)
    if known is None or known[0] != now:
        with _lock:
            known = _opened.get(place)
            if known is None or known[0] != now:
                while len(_opened) >= MOST_OPENED:  # a batch opens those of thousands of datasets
                    del _opened[next(iter(_opened))]
                known = _opened[place] = (now, make())
    return known[1]  # type: ignore[return-value]  # the purpose decides which


def state(folder: Location, *, has_slices: bool = False) -> tuple[object, ...]:
    """Return a value that changes when an array's metadata do; those of slices are their names."""
    states = () if has_slices else paths.state(folder, METADATA_FILES.values())
    if states or not (has_slices or isinstance(folder, Path)):
        return states
    within = single_file.split(folder)
    if within is not None:
        return paths.state(within[0].parent, [within[0].name])
    if has_slices or not isinstance(folder, Path):
        return paths.state(folder.parent, [folder.name])
    return tuple(entry for root in precomputed.roots(folder) for entry in paths.state(root, [precomputed.FILE]))


def open_for_reading(header: Header, cache_bytes: int, *, live: bool) -> tensorstore.StoredArray:
    """Return the array through its format, or through tensorstore, or zarr-python what tensorstore does not know."""
    if header.format in single_file.FORMATS:
        return single_file.open_array(header, cache_bytes)
    try:
        if not header.unsupported:
            array = tensorstore.open_array(header, cache_bytes=cache_bytes, live=live)
            return LocalArray(header, array) if isinstance(header.folder, Path) else array
    except ValueError as error:
        if header.format == "n5":
            raise VolumeError(f"{header.folder}: {error}") from error
        log.info("%s: %s; zarr-python is tried", header.folder, error)
    return zarr.ZarrArray(header)


def is_there(shape: tuple[int, ...], header: Header) -> bool:
    """Return whether an array of `shape` is there: no more than it, or with more behind, where chunks keep places."""
    if header.format not in damage.CHUNKED:
        return header.shape == shape
    return len(header.shape) == len(shape) and all(now >= n for now, n in zip(header.shape, shape, strict=True))
