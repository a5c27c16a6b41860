"""A folder of TIFF files, each one slice: a volume whose first axis counts the files, in natural order.

Not here: what is in a file (tiff). Gaps in the numbers are no gaps in the volume: the slices follow each other, and
the header has a note of the numbers that lack a file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.formats import tiff
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Facts, Header
from volpipe.volumes.storage.tensorstore import Index, StoredArray

SUFFIXES = (".tif", ".tiff")
OPEN_SLICES = 128  # in a process: each is a descriptor, and keeps its share of the decoded chunks of its volume
CHECKED_AT_ONCE = 8  # each mostly waits, where the disk is behind a network
MAX_DIFFERENT = 5  # of which an error speaks
FACTS = Facts(
    "a folder of TIFF slices",
    "in natural order (`s_2.tif` before `s_10.tif`); every shape and type is checked",
    "the first slice, if it says its thickness",
)


def read_header(folder: Path) -> Header | None:
    """Return the header of the slices in `folder` by the first of them, None where there are none.

    Raises:
        VolumeError: the first is not a single slice.
    """
    names = find_names(folder)
    if not names:
        return None
    first = _slice_header(folder / names[0])
    shape = (len(names), *first.shape)
    return Header(
        folder=folder,
        format="tiff",
        shape=shape,
        dtype=first.dtype,
        chunks=(1, *first.chunks),
        codec=first.codec,
        axes=("z", *(first.axes or ())),
        is_guessed=first.is_guessed,
        channel_names=first.channel_names,
        known={"names": names},
        notes=missing_note(names),
        unsupported="a folder of TIFF slices",
        place=first.place,
    )


def find_names(folder: Path) -> tuple[str, ...]:
    """Return the names of the TIFF files in `folder`, slice_2 before slice_10; none if it holds a container too."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return ()
    if any(name.lower().endswith((".n5", ".zarr")) for name in names):
        return ()
    return tuple(sorted((name for name in names if name.lower().endswith(SUFFIXES)), key=natural))


def hash_names(header: Header) -> str:
    """Return a hash of the names of the slices in `header`, in their order; "" of what is no folder of slices."""
    names = header.known.get("names", ())
    return hashlib.sha256("/".join(names).encode()).hexdigest()[:16] if names else ""


def as_it_was(header: Header, num: int, names_hash: str) -> Header:
    """Return the `header` of a folder as it was before slices came behind its `num` slices, of names with this hash.

    One of fewer slices, or of something else, is returned as it is.

    Raises:
        VolumeError: the first `num` slices have other names.
    """
    names = header.known.get("names", ())[:num]
    if len(names) < num:
        return header
    before = replace(header, shape=(num, *header.shape[1:]), known={**header.known, "names": names})
    if hash_names(before) != names_hash:
        raise VolumeError(f"{header.folder} has other slices than when it was opened; open it again")
    return before


def natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    """Return a sort key as people sort names: numbers by value, before letters."""
    parts = re.findall(r"\d+|\D+", name)
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part.lower()) for part in parts], name


def missing_note(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note of the files that are missing between the first and the last of `names`, () where none is.

    Names count if they differ in one number alone; the step is the one most common between neighbours.
    """
    parts = [re.findall(r"\d+|\D+", name) for name in names]
    if len({len(part) for part in parts}) != 1:
        return ()
    varying = [column for column in zip(*parts, strict=True) if len({_value(part) for part in column}) > 1]
    if len(varying) != 1 or not all(part.isdecimal() for part in varying[0]):
        return ()
    numbers = [int(part) for part in varying[0]]
    gaps = [(a, b) for a, b in itertools.pairwise(numbers) if b > a]
    step = Counter(b - a for a, b in gaps).most_common(1)[0][0]
    absent = [(a + step, b - step) for a, b in gaps if b - a > step]
    if not absent:
        return ()
    ranges = ", ".join(f"{a}" if a >= b else f"{a} to {b}" for a, b in absent[:MAX_DIFFERENT])
    more = f" and {len(absent) - MAX_DIFFERENT} more gaps" if len(absent) > MAX_DIFFERENT else ""
    return (f"no slice has the number {ranges}{more}: the slices on both sides lie next to each other here",)


def _value(part: str) -> int | str:
    return int(part) if part.isdecimal() else part


def check(folder: Path) -> None:
    """Raise unless all slices in `folder` have the shape and type of the first.

    Raises:
        VolumeError: with those that differ.
    """
    first, *others = find_names(folder)
    expected = _slice_header(folder / first)
    different = []
    with ThreadPoolExecutor(CHECKED_AT_ONCE) as pool:
        try:
            headers = pool.map(_slice_header, (folder / name for name in others))
            for name, other in zip(others, headers, strict=True):
                if (other.shape, other.dtype) != (expected.shape, expected.dtype):
                    different.append(f"{name} is {other.dtype} {other.shape}")
        finally:
            pool.shutdown(cancel_futures=True)
    if different:
        more = f" and {len(different) - MAX_DIFFERENT} more" if len(different) > MAX_DIFFERENT else ""
        raise VolumeError(
            f"{folder}: the slices differ: {first} is {expected.dtype} {expected.shape}, "
            f"{', '.join(different[:MAX_DIFFERENT])}{more}; keep only those of one stack in a folder"
        )


def _slice_header(file: Path) -> Header:
    header = tiff.read_header(file, "")
    if header is None or {"z", "t"} & set(header.axes or ()):
        raise VolumeError(f"{file} is not a single slice; name the file itself, or keep one slice a file in its folder")
    return header


class SliceArray:
    """An open folder of slices, which several threads may read; `shape` and `dtype` are those of one slice."""

    def __init__(self, header: Header, cache_bytes: int) -> None:
        self._header = header
        self._files = [header.folder / name for name in header.known["names"]]
        self._cache_bytes = cache_bytes // OPEN_SLICES

    def read(self, index: Index) -> np.ndarray:
        first, *rest = index
        if isinstance(first, int):
            return self._slice(self._files[first]).read(tuple(rest))
        files = self._files[first]
        sizes = zip(rest, self._header.shape[1:], strict=True)
        shape = [len(range(*i.indices(n))) for i, n in sizes if not isinstance(i, int)]
        out = np.empty((len(files), *shape), self._header.dtype)
        for z, file in enumerate(files):
            out[z] = self._slice(file).read(tuple(rest))
        return out

    def _slice(self, file: Path) -> StoredArray:
        _, *shape = self._header.shape
        return _open_slice(file, paths.file_state(file), tuple(shape), self._header.dtype, self._cache_bytes)


@lru_cache(maxsize=OPEN_SLICES)
def _open_slice(
    file: Path, state: paths.State, shape: tuple[int, ...], dtype: np.dtype, cache_bytes: int
) -> StoredArray:
    """Return the slice in `file`, which is in this `state`: one that was written again is opened again."""
    header = _slice_header(file)
    if header.shape != shape or header.dtype != dtype:
        raise VolumeError(f"{file} is {header.dtype} {header.shape}, and the other slices are {dtype} {shape}")
    return tiff.open_array(header, cache_bytes)
