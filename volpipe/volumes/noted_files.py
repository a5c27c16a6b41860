"""The files of voxels that work of ours left in its output: noted there at its end, looked up where one is missing.

Not here: what the files hold (checksums, and the journal), or the mark of what is not complete (completeness). A flag
for each file is noted, as fill values have none: an output of 10⁷ files takes up to 1.3 MB, 2 KB where all are stored.
"""

from __future__ import annotations

import base64
import itertools
import math
import shlex
import time
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Index
from volpipe.volumes.formats.container import ARRAYS, RECORD, RUN_KEY, inside, read_attributes
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import Location

FILES = "files"  # in what an output says of its run
DEPTH = 3  # folders above an array in which an output may begin
OLD_SECONDS = 1.0  # after which what was noted is read again, for a missing file
LOOKS, REMOTE_LOOKS = 1000, 50  # files of a volume that are looked for before it is read; 2 ms, and 50 requests


def note(flags: Mapping[str, np.ndarray], command: str) -> dict[str, object]:
    """Return, as JSON, which files the arrays of an output have, and the `command` that made it, "" if it is unknown.

    `flags` has one for each chunk file, or shard, in the axes of the array, by the array's key.
    """
    arrays = {key: base64.b64encode(zlib.compress(np.packbits(each).tobytes())).decode() for key, each in flags.items()}
    return {"arrays": arrays, "command": command, "folder": str(Path.cwd()) if command else ""}


class NotedFiles:
    """The files that the array of `header` should have, where it lies in an output of ours that was closed."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._known: tuple[float, np.ndarray | None] = -OLD_SECONDS, None  # since when

    def check(self, unit: Index) -> None:
        """Raise where the file at `unit` of the grid, which is not there, was written.

        Raises:
            VolumeError: with the file, and the command that makes the output again.
        """
        at, flags = self._known
        if time.monotonic() - at > OLD_SECONDS or (flags is not None and flags[unit]):
            flags = self._flags()
            self._known = time.monotonic(), flags
        if flags is not None and flags[unit]:
            raise VolumeError(self._lost(self._header.folder / ChunkFiles(self._header).name(unit)))

    def look(self) -> None:
        """Raise where one of some files that were written is gone: those of a sample, if there are many."""
        flags = self._flags()
        if flags is None:
            return
        files, is_local = ChunkFiles(self._header), isinstance(self._header.folder, Path)
        stored = np.flatnonzero(flags)
        most = min(LOOKS if is_local else REMOTE_LOOKS, len(stored))
        for place in np.sort(np.random.default_rng(0).choice(stored, most, replace=False)).tolist():
            index = tuple(map(int, np.unravel_index(place, flags.shape)))
            file = self._header.folder / files.name(index)
            if not (paths.find_file(file) if isinstance(file, Path) else paths.exists(file)):
                raise VolumeError(self._lost(file))

    def _flags(self) -> np.ndarray | None:
        if self._header.scheme is None:
            return None
        noted = self._noted()
        counts = ChunkFiles(self._header).grid.counts
        text = noted[0].get("arrays", {}).get(noted[2]) if noted is not None else None
        return None if text is None else _unpacked(str(text), counts)

    def _noted(self) -> tuple[dict[str, Any], Location, str] | None:  # Any: JSON
        """Return what was noted, the output, and the key of the array in it; None where nothing was."""
        names = sorted({each.attributes_file for each in ARRAYS})
        folders: Iterable[Location] = self._header.folder.parents
        for root in itertools.islice(folders, DEPTH):
            entry = _read_noted(root / RUN_KEY, paths.state(root / RUN_KEY, names))
            if entry is not None:
                return entry, root, "/".join(inside(self._header.folder, root))
        return None

    def _lost(self, file: Location) -> str:
        noted = self._noted()
        assert noted is not None
        entry, root, _ = noted
        command, folder = str(entry.get("command") or ""), str(entry.get("folder") or "")
        there = f"cd {shlex.quote(folder)} && " if folder not in ("", str(Path.cwd())) else ""
        again = f"`{there}{command} --fresh` makes it again" if command else "give its command with --fresh"
        return (
            f"{root} has lost files that were written, such as {file}, which would read as zeros; put them back "
            f"(`volpipe verify {root}` names all), or {again}"
        )


@lru_cache(maxsize=64)
def _read_noted(group: Location, state: tuple[object, ...]) -> dict[str, Any] | None:  # Any: JSON
    """Return what the attributes of `group`, whose files are in that `state`, say of files; None where nothing."""
    try:
        record = read_attributes(group).get(RECORD) if state or not isinstance(group, Path) else None
    except VolumeError:  # of something else by that name, or above what a bucket or a web server shows
        return None
    entry = record.get(FILES) if isinstance(record, dict) else None
    return entry if isinstance(entry, dict) else None


@lru_cache(maxsize=64)
def _unpacked(text: str, counts: tuple[int, ...]) -> np.ndarray | None:
    """Return the flags in `text`, None where they are of another grid: the array has grown since."""
    size = math.prod(counts)
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text), size // 8 + 1)
    except (ValueError, zlib.error):
        return None
    if len(packed) != -(-size // 8):
        return None
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=size).astype(bool).reshape(counts)
