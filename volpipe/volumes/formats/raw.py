"""Headerless files (.raw, .bin, .dat, .vol): voxels alone, whose shape and type the user names behind the file.

Not here: the reading itself (flat). What no header says stands where other files have the key of an array, so that each
command, each recipe (`input.key`) and each worker that names a volume names it too::

    scan.raw/100x512x512,uint16         z, y, x, x fastest, little-endian
    scan.raw/3x100x512x512,>f4,1024     channels first, big-endian, from byte 1024 on
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.formats import flat
from volpipe.volumes.formats.flat import num_bytes
from volpipe.volumes.formats.format import FileReader, Format, ReadRow
from volpipe.volumes.storage.metadata import Header, Place, flat_chunk, voxel_dtype, voxels

SUFFIXES = (".raw", ".bin", ".dat", ".vol")
KEY = "ZxYxX,TYPE[,OFFSET]"
TYPE = re.compile(r"[<>]?(?:[iu][1248]|f[248])|u?int(?:8|16|32|64)|float(?:16|32|64)|bool")
PARTS = re.compile(r"(\d+(?:x\d+){1,3}),([<>]?[a-z]\w*)(?:,(\d+))?")


def read_header(file: Path, key: str) -> Header | None:
    """Return the header of the voxels that `key` describes; None where it describes none.

    Raises:
        VolumeError: there is no key, or what it describes is not the size of the file.
    """
    if not key:
        raise VolumeError(
            f"{file} has no header: name shape, type and the byte at which voxels begin behind it, {file}/{KEY}, such "
            f"as {file}/100x512x512,uint16 (>u2: big-endian), or by input.key in a recipe"
        )
    parts = PARTS.fullmatch(key)
    if parts is None:
        return None
    shape = voxels([int(n) for n in parts[1].split("x")], "shape", file / key)
    if not TYPE.fullmatch(parts[2]):
        raise VolumeError(f"{file}: no type is named {parts[2]}; write uint8, int16, >u2, float32 or the like")
    stored = np.dtype(parts[2])
    offset, size = int(parts[3] or 0), file.stat().st_size
    dtype, end = voxel_dtype(stored, file / key), offset + num_bytes(shape, stored)
    if end != size:
        raise VolumeError(
            f"{file} has {size} bytes, and {parts[1]} voxels of {parts[2]} from byte {offset} on end at byte {end}, "
            f"{abs(size - end)} bytes {'too early' if end < size else 'too late'}; name another shape, type or offset"
        )
    return Header(
        folder=file / key,
        format="raw",
        shape=shape,
        dtype=dtype,
        chunks=flat_chunk(shape),
        axes=("c", "z", "y", "x")[-len(shape) :],
        known={"offset": offset, "stored": dtype if stored.kind == "b" else stored, "file": file},
        unsupported="a headerless file",
        place=Place(),
    )


def walk(file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
    """Yield that `key` names the one array there is, or how a key is written."""
    yield "" if key else KEY


RAW = Format(
    name="raw",
    title="headerless files",
    row=ReadRow(
        "headerless (`.raw`, `.bin`, `.dat`, `.vol`)",
        "what stands behind the name: `scan.raw/100x512x512,uint16`; [more](#headerless-files)",
        "–",
    ),
    suffixes=SUFFIXES,
    recognises=lambda file, start: file.suffix.lower() in SUFFIXES,
    files=FileReader(
        read_header=read_header,
        open_array=lambda header, cache_bytes: flat.open_array(header),
        read_attributes=lambda file, key: {},
        read_datasets=lambda file, key: None,
        exists=lambda file, key: not key or PARTS.fullmatch(key) is not None,
        walk=walk,
    ),
)
