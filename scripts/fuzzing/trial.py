"""One input tried: a damaged volume laid down, opened, listed and read; and what came of it.

Not here: how inputs are handed out, or what happens to a process that dies of one (main).
"""

from __future__ import annotations

import logging
import shutil
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fuzzing import readers
from fuzzing.mutations import mutate
from fuzzing.originals import Original, make

MAX_BYTES = 2**18  # of a volume that is read whole
MAX_READS = 64  # chunks of a volume that are read one by one
GOOD = ("refused", "same", "as another", "differs", "unjudged")
FAILED = ("error", "wrong", "memory", "hang", "crash")


@dataclass(frozen=True)
class Outcome:
    """What came of an input.

    Attributes:
        kind: "refused" with a VolpipeError; read: the "same" voxels as without the mutation, the same "as another"
            reader, or it "differs" from that, or no other reads it, "unjudged". Failed: another "error", voxels that
            are "wrong" though their chunk was not touched, too much "memory", a "hang", a "crash".
        text: why.
        chunk_bytes: what a chunk takes, as far as the metadata say.
    """

    kind: str
    text: str = ""
    chunk_bytes: int = 0


def seed_of(name: str, seed: int, number: int) -> list[int]:
    return [zlib.crc32(name.encode()), seed, number]


def lay(original: Original, changed: Mapping[str, bytes | None], pristine: Path, place: Path) -> None:
    """Put a volume at `place`: files that do not change are links to those at `pristine`."""
    for name in original.files.keys() | changed.keys():
        text = changed.get(name, b"")
        if text is None:
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name in changed:
            target.write_bytes(text)
        else:
            target.hardlink_to(pristine / name)


def attempt(name: str, seed: int, number: int, pristine: Path, place: Path) -> Outcome:
    """Return what comes of input `number` of the original `name`, which lies whole at `pristine`; made at `place`."""
    from volpipe.errors import VolpipeError
    from volpipe.volumes.formats import container

    original = make(name)
    changed = mutate(original.files, np.random.default_rng(seed_of(name, seed, number)))
    lay(original, changed, pristine, place)
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        return _read(original, changed, place)
    except VolpipeError as error:
        return Outcome("refused", str(error), _chunk_bytes(place / original.location))
    except Exception:  # the point of it all
        return Outcome("error", traceback.format_exc())
    finally:
        logging.disable(before)
        container._opened.clear()
        shutil.rmtree(place, ignore_errors=True)


def _chunk_bytes(location: Path) -> int:
    from volpipe.errors import VolpipeError
    from volpipe.volumes.volume import open_volume

    try:
        found = open_volume(location)
    except VolpipeError:
        return 0
    return int(np.prod(found.chunks, dtype=float)) * found.dtype.itemsize


def _read(original: Original, changed: Mapping[str, bytes | None], place: Path) -> Outcome:
    from volpipe.volumes.volume import list_arrays, open_volume

    location = place / original.location
    list_arrays(location)
    found = open_volume(location)
    text = str(found.attributes) + str(found) + found.codec
    assert "\0" not in str(found.path), text
    if np.prod(found.shape, dtype=float) * found.dtype.itemsize > MAX_BYTES:
        found.open().read_raw(tuple(slice(0, 1) for _ in found.shape))
        found.open().read_raw(tuple(slice(n - 1, n) for n in found.shape))
        return Outcome("unjudged", f"{found.shape}")
    if _only_chunks(original, changed) and found.shape == original.data.shape:
        return _read_chunks(original, found, changed)
    data = found.open()[...]
    if data.shape == original.data.shape and np.array_equal(data, original.data):
        return Outcome("same")
    other = readers.read(original, place, found.key)
    if other is None:
        return Outcome("unjudged")
    other = other.view(np.uint8) if other.dtype == bool else other
    is_alike = np.array_equal(data.ravel(), other.ravel(), equal_nan=other.dtype.kind == "f")
    return Outcome("as another" if is_alike else "differs", f"{data.shape} {data.dtype}, {other.shape} {other.dtype}")


def _only_chunks(original: Original, changed: Mapping[str, bytes | None]) -> bool:
    """Tell whether nothing but chunks changed, of an array whose chunks are files of their own."""
    return original.chunks is not None and all(Path(name).name.strip("0123456789.c") == "" for name in changed)


def _read_chunks(original: Original, found: object, changed: Mapping[str, bytes | None]) -> Outcome:
    """Read chunk by chunk: one that was not touched must be as it was, and one that cannot be read must be named."""
    from volpipe.errors import ChunkError
    from volpipe.volumes.formats.container import read_header
    from volpipe.volumes.storage.damage import file_of
    from volpipe.volumes.volume import Volume

    assert isinstance(found, Volume) and original.chunks is not None
    header, reader, kinds = read_header(found.folder), found.open(), set()
    assert header is not None
    counts = [-(-n // c) for n, c in zip(found.shape, original.chunks, strict=True)]
    for index in np.ndindex(*counts):
        box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, original.chunks, strict=True))
        file = str(file_of(header, index))
        is_touched = any(file.endswith(name) for name in changed)
        try:
            is_same = np.array_equal(reader[box], original.data[box])
        except ChunkError as error:
            if not is_touched or file not in str(error) or str(index) not in str(error):
                return Outcome("wrong", f"chunk {index} in {file}: {error}")
            kinds.add("refused")
            continue
        if not is_same and not is_touched:
            return Outcome("wrong", f"chunk {index} in {file} was not touched and reads otherwise")
        kinds.add("same" if is_same else "unjudged")
    return Outcome("refused" if "refused" in kinds else "unjudged" if "unjudged" in kinds else "same")
