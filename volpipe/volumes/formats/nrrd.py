"""NRRD (.nrrd, .nhdr with its data file): one array behind lines of text, x fastest, read where it lies or from gzip.

Not here: gzip (gzipped), or what an affine map means (dialects.affine). Format: teem.sourceforge.net/nrrd/format.html;
of packed data, lines are skipped before they are unpacked and bytes after, as Teem's encodingGzip.c does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.affine import affine_place
from volpipe.volumes.dialects.attributes import COLOUR_CHANNELS
from volpipe.volumes.formats import gzipped
from volpipe.volumes.formats.flat import check_size, num_bytes
from volpipe.volumes.formats.format import Format, ReadRow, one_array
from volpipe.volumes.storage.metadata import Header, Place, place, usual_axes, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_beside, check_links

MAGIC = b"NRRD000"
MAX_HEADER_BYTES, MAX_SKIPPED_BYTES = 2**24, 2**24
TYPES = {
    **dict.fromkeys(("signed char", "int8", "int8_t"), "i1"),
    **dict.fromkeys(("uchar", "unsigned char", "uint8", "uint8_t"), "u1"),
    **dict.fromkeys(("short", "short int", "signed short", "signed short int", "int16", "int16_t"), "i2"),
    **dict.fromkeys(("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"), "u2"),
    **dict.fromkeys(("int", "signed int", "int32", "int32_t"), "i4"),
    **dict.fromkeys(("uint", "unsigned int", "uint32", "uint32_t"), "u4"),
    **dict.fromkeys(
        ("longlong", "long long", "long long int", "signed long long", "signed long long int", "int64", "int64_t"), "i8"
    ),
    **dict.fromkeys(("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"), "u8"),
    "float": "f4",
    "double": "f8",
}
ENDS = {"little": "<", "big": ">"}
PACKINGS = ("gzip", "gz")
SPACES = {
    **dict.fromkeys(("right-anterior-superior", "ras"), "RAS"),
    **dict.fromkeys(("left-anterior-superior", "las"), "LAS"),
    **dict.fromkeys(("left-posterior-superior", "lps"), "LPS"),
}
OF_SPACE, OF_TIME = ("domain", "space"), ("time",)  # kinds of axes
OF_CHANNELS = (
    "list", "point", "vector", "covariant-vector", "normal", "stub", "scalar", "2-vector", "3-vector", "4-vector",
    "3-color", "rgb-color", "hsv-color", "xyz-color", "4-color", "rgba-color", "3-gradient", "3-normal",
)  # fmt: skip
COLOURS = ("3-color", "rgb-color", "4-color", "rgba-color")
UNKNOWN = ("", "???", "none")


@dataclass(frozen=True)
class HeaderText:
    """The fields of a header, by their names in small letters without spaces, and the byte at which it ends."""

    file: Path
    fields: Mapping[str, str]
    end: int

    def get(self, name: str) -> str:
        """Return the value of a field, "" where the header has none."""
        return self.fields.get(name, "")

    def number(self, name: str) -> int:
        """Return a field as a whole number; 0 where the header has none."""
        try:
            return int(self.get(name) or 0)
        except ValueError:
            raise VolumeError(f"{self.file}: {name} {self.get(name)!r} is no number; its header is damaged") from None


def read_header(file: Path) -> Header:
    """Return the header of the array in `file`, or of that whose header `file` is.

    Raises:
        VolumeError: it is broken or cut short, or holds what volpipe does not read.
    """
    try:
        with file.open("rb") as stream:
            text = _read_fields(file, stream)
    except VolumeError:
        raise
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    shape, stored, encoding = _shape_of_sizes(text), _named_type(text), text.get("encoding").lower()
    if encoding not in ("raw", *PACKINGS):
        raise VolumeError(
            f"{file} has the encoding {encoding!r}; volpipe reads raw and gzip: save it so (`unu save -f nrrd -e raw`)"
        )
    is_packed, data = encoding in PACKINGS, _data_file(text)
    start = text.end if data is None else 0
    start = _skip_lines(data or file, start, text.number("lineskip"))
    skipped, known = text.number("byteskip"), dict[str, object](stored=stored)
    if skipped < (0 if is_packed else -1):
        raise VolumeError(f"{file}: {skipped} bytes cannot be skipped of data that are {encoding}")
    if is_packed:
        known |= {"offset": skipped, "gzip_at": start}
    else:
        last = (data or file).stat().st_size - num_bytes(shape, stored)
        known["offset"] = max(start, last) if skipped == -1 else start + skipped
        check_size(data or file, start if skipped == -1 else start + skipped, shape, stored)
    axes = _axis_names(text, shape)
    where, place_notes = _place_of_axes(text, axes or usual_axes(shape))
    notes = [*place_notes, *(gzipped.slow_notes(num_bytes(shape, stored)) if is_packed else ())]
    if any(kind in COLOURS for kind in _axis_words(text, "kinds")):
        notes.append(COLOUR_CHANNELS)
    if text.get("oldmin") or text.get("oldmax"):
        low, high = text.get("oldmin") or "the least", text.get("oldmax") or "the greatest value"
        notes.append(f"values are read as they are stored; before they were quantised, they were {low} to {high}")
    plane = min(len(shape), 3 if axes is not None and axes[-1] == "c" else 2)
    return Header(
        folder=file,
        format="nrrd",
        shape=shape,
        dtype=voxel_dtype(stored, file),
        chunks=(*(1,) * (len(shape) - plane), *shape[-plane:]),
        codec="gzip" if is_packed else "raw",
        axes=axes,
        attributes={name: value for name, value in text.fields.items() if name in ("content", "sampleunits")},
        known=known,
        unsupported="a NRRD file",
        place=where,
        notes=tuple(notes),
        data_files=() if data is None else (data,),
    )


def _read_fields(file: Path, stream: BinaryIO) -> HeaderText:
    fields: dict[str, str] = {}
    stream.readline(MAX_HEADER_BYTES)
    while line := stream.readline(MAX_HEADER_BYTES):
        if stream.tell() > MAX_HEADER_BYTES:
            raise VolumeError(f"{file} has a header of more than {MAX_HEADER_BYTES >> 20} MiB; it is damaged")
        text = line.decode("utf-8", errors="replace").strip()
        if not text:
            break
        name, colon, value = text.partition(":")
        if text.startswith("#") or value.startswith("="):
            continue
        if not colon:
            raise VolumeError(f"{file}: its header has the line {text[:40]!r}, which is no field; it is damaged")
        name = re.sub(r"[\s_-]", "", name).lower()
        fields[name] = value.strip()
        if name == "datafile" and fields[name].split()[:1] == ["LIST"]:
            break
    return HeaderText(file, fields, stream.tell())


def _axis_words(text: HeaderText, name: str) -> list[str]:
    """Return the words of a field with one for each axis, in small letters."""
    return text.get(name).lower().split()


def _axis_numbers(words: list[str]) -> list[float]:
    """Return `words` as numbers; those that are none are nan."""
    return [float(word) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", word) else math.nan for word in words]


def _quoted_words(text: HeaderText, name: str) -> list[str]:
    """Return the texts of a field with one in quotes for each axis."""
    return [re.sub(r"\\(.)", r"\1", word).strip() for word in re.findall(r'"((?:[^"\\]|\\.)*)"', text.get(name))]


def _shape_of_sizes(text: HeaderText) -> tuple[int, ...]:
    sizes = _axis_words(text, "sizes")
    if not sizes or len(sizes) != text.number("dimension") or not all(size.isdecimal() for size in sizes):
        raise VolumeError(
            f"{text.file}: sizes {text.get('sizes')!r} of dimension {text.get('dimension')!r} cannot be; its header is "
            "damaged"
        )
    return voxels([int(size) for size in reversed(sizes)], "sizes", text.file)


def _named_type(text: HeaderText) -> np.dtype:
    name, end = " ".join(_axis_words(text, "type")), text.get("endian").lower()
    if name not in TYPES:
        raise VolumeError(f"{text.file} holds the type {name!r}; volpipe reads int8 to uint64, float and double")
    if np.dtype(TYPES[name]).itemsize > 1 and end not in ENDS:
        raise VolumeError(f"{text.file}: endian {end!r} of values of type {name} cannot be; it is little or big")
    return np.dtype(ENDS.get(end, "=") + TYPES[name])


def _data_file(text: HeaderText) -> Path | None:
    """Return the file with the voxels where that is another than the header's."""
    name = text.get("datafile")
    if not name:
        return None
    if name.split()[0] == "LIST" or re.search(r"%\d*d", name):
        raise VolumeError(
            f"{text.file} names a list of data files, {name}; volpipe reads one: join them (`unu save -f nrrd`)"
        )
    data = check_beside(name, text.file)
    if not data.is_file():
        check_links(data)
        raise VolumeError(f"{text.file} names the data file {name}, which is not there; bring it there")
    return data


def _skip_lines(file: Path, start: int, count: int) -> int:
    """Return the byte of `file` that is `count` lines behind `start`."""
    if count < 0:
        raise VolumeError(f"{file}: {count} lines cannot be skipped")
    with file.open("rb") as stream:
        stream.seek(start)
        for _ in range(count):
            if not stream.readline(MAX_SKIPPED_BYTES) or stream.tell() - start > MAX_SKIPPED_BYTES:
                raise VolumeError(f"{file} has no {count} lines to skip; it is damaged or cut short")
        return stream.tell()


def _axis_names(text: HeaderText, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Return the names of the axes, slowest first, by their kinds or else directions; None where nothing tells.

    Raises:
        VolumeError: there are several axes of channels or of time, more than three of space, or some of another kind.
    """
    rank, directions = len(shape), _space_directions(text)
    kinds = _axis_words(text, "kinds") or [""] * rank
    if len(kinds) != rank or (directions is not None and len(directions) != rank):
        raise VolumeError(f"{text.file}: kinds or directions are not of its {rank} axes; its header is damaged")
    roles = []
    for axis, kind in enumerate(kinds):
        if kind in UNKNOWN and directions is not None:
            kind = "list" if directions[axis] is None else "space"
        if kind not in (*OF_SPACE, *OF_TIME, *OF_CHANNELS, *UNKNOWN):
            raise VolumeError(f"{text.file} has an axis of kind {kind}; volpipe reads space, time and lists or vectors")
        roles.append("s" if kind in OF_SPACE else "t" if kind in OF_TIME else "" if kind in UNKNOWN else "c")
    if not any(roles):
        return ("z", "y", "x") if usual_axes(shape) == ("z", "y", "x") else None
    roles = [role or "s" for role in roles]
    if roles.count("s") > 3 or max(roles.count("c"), roles.count("t")) > 1:
        raise VolumeError(
            f"{text.file} has the axes {', '.join(kinds)}; volpipe reads up to three of space, one of channels and one "
            "of time"
        )
    names = iter("xyz")
    return tuple(reversed([next(names) if role == "s" else role for role in roles]))


def _space_directions(text: HeaderText) -> list[list[float] | None] | None:
    """Return the steps along each axis, the fastest first, None of one that is not of space; None where none is."""
    words = re.findall(r"\(([^)]*)\)|none", text.get("spacedirections").lower())
    return [_axis_numbers(word.replace(" ", "").split(",")) if word else None for word in words] or None


def _place_of_axes(text: HeaderText, axes: tuple[str, ...]) -> tuple[Place, tuple[str, ...]]:
    """Return the place by `space directions`, else by `spacings`, and notes on it."""
    spatial, directions = [axis for axis in reversed(axes) if axis in "xyz"], _space_directions(text)
    if directions is not None:
        units, space = (
            _quoted_words(text, "spaceunits"),
            SPACES.get(text.get("space").lower().removesuffix("-time"), ""),
        )
        steps = [step for axis, step in zip(reversed(axes), directions, strict=True) if axis in "xyz" and step]
        origin = _axis_numbers(text.get("spaceorigin").strip("()").replace(" ", "").split(","))
        if spatial != ["x", "y", "z"] or [len(step) for step in steps] != [3, 3, 3]:
            return Place(reason=f"its space directions are {text.get('spacedirections')[:60]}"), ()
        if len(set(units)) > 1:
            return Place(reason=f"its space units are {', '.join(units)}"), ()
        first = np.array(origin) if len(origin) == 3 else None
        return affine_place(np.array(steps).T, first, "".join(units[:1]), space, guess=bool(space))
    sizes = dict(zip(reversed(axes), _axis_numbers(_axis_words(text, "spacings")), strict=False))
    units_by_axis = dict(zip(reversed(axes), _quoted_words(text, "units"), strict=False))
    sizes = {axis: size for axis, size in sizes.items() if axis in spatial and math.isfinite(size)}
    if sizes.keys() != set(spatial):
        missing = ", ".join(axis for axis in spatial if axis not in sizes)
        return Place(reason=f"its header says no spacing of {missing}"), ()
    mirrored = [axis for axis, size in sizes.items() if size < 0]
    notes = (
        [f"its spacing along {', '.join(mirrored)} is below 0: voxels are read in the file's order"] if mirrored else []
    )
    return place({axis: abs(size) for axis, size in sizes.items()}, {}, units_by_axis), tuple(notes)


NRRD = Format(
    name="nrrd",
    title="NRRD",
    row=ReadRow(
        "NRRD (`.nrrd`, `.nhdr` with its data file)",
        "all types but block; encodings raw and gzip; [more](#nifti-and-nrrd)",
        "`space directions`, else `spacings`, with their units",
    ),
    suffixes=(".nrrd", ".nhdr"),
    magics=((0, MAGIC),),
    files=one_array(read_header, gzipped.open_array),
    is_x_first=True,
)
