"""The open arrays of this process, each kept until its metadata change.

Not here: what is kept (reader, writer, file_states).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from volpipe.volumes.formats import precomputed, single_file
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location

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
