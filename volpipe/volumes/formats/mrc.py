"""MRC, CCP4 and IMOD files (.mrc, .map, .rec, .st): one array after a header of 1024 bytes, read where it lies.

Not here: the reading itself (flat). Format: MRC2014 (Cheng et al., J. Struct. Biol. 192 (2015) 146, www.ccpem.ac.uk);
its dialect: bio3d.colorado.edu/imod/doc/mrc_format.txt. The header counts x, y, z in Å; what is stored is sections of
rows of columns; the header says which axis each of these is. Old and odd headers are read as mrcfile and IMOD do, with
a note of what was assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import listed_place
from volpipe.volumes.formats.flat import Part, check_size, num_bytes, write_planes
from volpipe.volumes.formats.format import PACKED, Format, ReadRow, Writing, one_array
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Header,
    Place,
    flat_chunk,
    shown,
    voxel_dtype,
    voxels,
)

Order = Literal["<", ">"]

SIZE = 1024
FIELDS = np.dtype(
    {
        "names": [
            "shape", "mode", "start", "grid", "cell", "angles", "axes", "statistics", "space_group", "extended",
            "dialect", "version", "imod_stamp", "imod_flags", "origin", "map", "stamp", "rms", "num_labels", "labels",
        ],
        "formats": [
            "3<i4", "<i4", "3<i4", "3<i4", "3<f4", "3<f4", "3<i4", "3<f4", "<i4", "<i4",
            "S4", "<i4", "<i4", "<i4", "3<f4", "S4", "4u1", "<f4", "<i4", "10S80",
        ],
        "offsets": [0, 12, 16, 28, 40, 52, 64, 76, 88, 92, 104, 108, 152, 156, 196, 208, 212, 216, 220, 224],
        "itemsize": SIZE,
    }
)  # fmt: skip
MODES = {0: "i1", 1: "i2", 2: "f4", 6: "u2", 12: "f2"}
OTHER_MODES = {3: "complex integers", 4: "complex floats", 16: "RGB colours", 101: "values of 4 bits"}
WRITTEN = {"int8": 0, "int16": 1, "float32": 2, "uint16": 6, "float16": 12}
SUFFIXES = (".mrc", ".mrcs", ".map", ".ccp4", ".rec", ".st", ".ali", ".preali")
MARK_BYTE, MARK = 208, b"MAP"
ENDS: dict[Order, str] = {"<": "little", ">": "big"}
VALUES_AT_ONCE = 2**18
VERSIONS = range(20140, 21000)  # of MRC2014: its year and a number
MAX_SKEW = 0.01  # degrees, of rounding
IMOD_STAMP = 1146047817  # "IMOD"
# Flags: bytes are signed; the origin is the first voxel's place, not minus that; a byte has two values.
IMOD_SIGNED, IMOD_ORIGIN, IMOD_PACKED = 1, 4, 16
PACKED_LABEL = "4 bits packed"  # SerialEM's
VOLUMES = range(401, 631)  # space groups of a stack of volumes: 400 more than the group


def read_header(file: Path) -> Header:
    """Return the header of the array in `file`.

    Raises:
        VolumeError: it is broken or cut short, or holds what volpipe does not read.
    """
    fields, order = _fields(file)
    shape, axes = _stored_shape(fields, file)
    stored = _stored_type(fields, file).newbyteorder(order)
    offset = SIZE + int(fields["extended"])
    if offset < SIZE:
        raise VolumeError(f"{file}: an extended header of {offset - SIZE} bytes cannot be")
    check_size(file, offset, shape, stored)
    excess = file.stat().st_size - offset - num_bytes(shape, stored)
    return Header(
        folder=file,
        format="mrc",
        shape=shape,
        dtype=voxel_dtype(stored, file),
        chunks=flat_chunk(shape),
        axes=axes,
        attributes={"labels": _label_texts(fields)},
        known={"offset": offset, "stored": stored},
        unsupported="an MRC file",
        place=_header_place(fields),
        notes=tuple(_notes(fields, order, excess)),
    )


def is_unmarked(file: Path, text: bytes) -> bool:
    """Return whether a file that starts with `text` is one of MRC without the mark, as old software wrote them.

    Its header makes sense, and its name is one of MRC's, or its size is that which the header says.
    """
    if len(text) < SIZE or text.startswith(tuple(PACKED)):
        return False
    size = file.stat().st_size
    readings = [fields for order in ENDS if _is_header(fields := _fields_in(text, order))]
    is_named = file.suffix.lower() in SUFFIXES
    return any(is_named or _expected_size(fields) == size for fields in readings)


def _fields_in(text: bytes, order: Order) -> np.void:
    fields: np.void = np.frombuffer(text[:SIZE], FIELDS.newbyteorder(order))[0]
    return fields


def _is_header(fields: np.void) -> bool:
    return int(fields["mode"]) in {*MODES, *OTHER_MODES} and bool((fields["shape"] > 0).all())


def _expected_size(fields: np.void) -> int:
    """Return the bytes of a file with this header; 0 where voxels are of a kind that is not read."""
    stored = np.dtype(MODES.get(int(fields["mode"]), "V0"))
    size = num_bytes(tuple(fields["shape"].tolist()), stored)
    return SIZE + max(0, int(fields["extended"])) + size if size else 0


def _stamped(text: bytes) -> Order | None:
    stamps: dict[int, Order] = {0x44: "<", 0x11: ">"}
    return stamps.get(text[FIELDS.fields["stamp"][1]]) if FIELDS.fields is not None else None


def _fields(file: Path) -> tuple[np.void, Order]:
    """Return the header's fields and the byte order in which it makes sense; if it does in both, the stamp's."""
    with file.open("rb") as stream:
        text = stream.read(SIZE)
    if len(text) < SIZE:
        raise VolumeError(f"{file} has {len(text)} bytes, an MRC header has {SIZE}: it is cut short; copy it again")
    size, stamped = file.stat().st_size, _stamped(text)
    readings = {order: _fields_in(text, order) for order in ENDS}
    order = max(
        ENDS,
        key=lambda each: (
            _is_header(readings[each]),
            0 < _expected_size(readings[each]) <= size,
            each == stamped,
            each == "<",
        ),
    )
    if not _is_header(readings[order]):
        fields = readings[stamped or "<"]
        shape = tuple(fields["shape"].tolist())
        raise VolumeError(f"{file}: mode {fields['mode']} and shape {shape} make no MRC header; it is damaged")
    return readings[order], order


def _notes(fields: np.void, order: Order, excess: int) -> Iterator[str]:
    """Yield what was assumed where a header says little: of its order, of the sign of integers, of size and place."""
    stamped = _stamped(fields.tobytes())
    if stamped is not None and stamped != order:
        yield (
            f"its machine stamp says {ENDS[stamped]}-endian, and its header makes sense as {ENDS[order]}-endian alone, "
            "as which it is read"
        )
    if not fields["map"].startswith(MARK):
        yield "its header has no mark 'MAP ', and is read as one of MRC2014: look whether size and origin are right"
    low, high = (float(value) for value in fields["statistics"][:2])
    is_known = _has_statistics(fields)
    mode, from_imod = int(fields["mode"]), int(fields["imod_stamp"]) == IMOD_STAMP
    if mode == 0 and not from_imod and not is_known:
        yield (
            "bytes are read as signed, -128 to 127, as MRC2014 has them; the header says neither IMOD's flag nor their "
            "range. If they are 0 to 255, set its greatest value (mrcfile: header.dmax) to 255"
        )
    if mode == 0 and not from_imod and is_known and low < 0 and high > 127:
        yield f"bytes are read as unsigned; the header says {low:g} to {high:g}, which no byte has"
    if mode == 1 and is_known and high > 32767:
        yield f"voxels are read as signed, up to 32767, and the header says up to {high:g}: larger ones are negative"

    if excess > 0:
        yield (
            f"the file has {excess:,} bytes behind its voxels, which are not read; if its header does not count an "
            "extended header, all voxels are shifted"
        )
    if int(fields["space_group"]) == 0 and int(fields["grid"][2]) == 1 and int(fields["shape"][2]) > 1:
        yield f"the header says a stack of {fields['shape'][2]} images and not a volume; they are read as slices"
    odd = [f"{angle:g}" for angle in fields["angles"].tolist() if abs(angle - 90) > MAX_SKEW and angle != 0]
    if odd:
        yield f"its cell has angles of {', '.join(odd)} degrees; it is read as if they were 90"
    size = _voxel_lengths(fields)
    if size is not None and (size == 1).all():
        yield "a voxel of 1 Å is also what programs write that know no size"
    start, origin = _nstart(fields), fields["origin"].astype(np.float64)
    if size is not None and start.any() and origin.any() and (np.abs(start * size - origin) > size / 2).any():
        yield "the header says two places, ORIGIN and NSTART; ORIGIN counts"


def _has_statistics(fields: np.void) -> bool:
    """Return whether the header says the least and the greatest value; 0 for both, or greatest below least, is none."""
    low, high = (float(value) for value in fields["statistics"][:2])
    return bool(np.isfinite([low, high]).all()) and low <= high and (low, high) != (0.0, 0.0)


def _stored_shape(fields: np.void, file: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return shape and axes as stored: sections, rows, columns; a stack of volumes has an axis before these."""
    columns = [int(n) for n in fields["axes"]]
    if columns == [0, 0, 0]:  # not said, in old files
        columns = [1, 2, 3]
    if sorted(columns) != [1, 2, 3]:
        raise VolumeError(
            f"{file}: columns, rows and sections are axes {columns}; they must be 1, 2 and 3 in any order"
        )
    axes = tuple("xyz"[n - 1] for n in reversed(columns))
    shape = voxels([int(n) for n in reversed(fields["shape"])], "shape", file)
    sections = int(fields["grid"][2])
    if int(fields["space_group"]) not in VOLUMES:
        return shape, axes
    if sections < 1 or shape[0] % sections:
        raise VolumeError(f"{file}: {shape[0]} sections are no stack of volumes of {sections}")
    return (shape[0] // sections, sections, *shape[1:]), ("t", *axes)


def _stored_type(fields: np.void, file: Path) -> np.dtype:
    """Return the type of the voxels; bytes are signed, except IMOD's without its flag, and those of old software.

    Old software wrote unsigned bytes without a flag; a maximum above 127 in the header shows them.
    """
    mode = int(fields["mode"])
    if mode in OTHER_MODES:
        raise VolumeError(
            f"{file} has mode {mode}, {OTHER_MODES[mode]}; volpipe reads modes {', '.join(map(str, MODES))}"
        )
    from_imod, flags = int(fields["imod_stamp"]) == IMOD_STAMP, int(fields["imod_flags"])
    if mode == 0 and (
        (from_imod and flags & IMOD_PACKED) or any(PACKED_LABEL in label for label in _label_texts(fields))
    ):
        raise VolumeError(
            f"{file} says that each of its bytes holds two values of 4 bits; copy it as bytes (IMOD: newstack -mode 0)"
        )
    if mode == 0:
        unsigned = not flags & IMOD_SIGNED if from_imod else _has_statistics(fields) and fields["statistics"][1] > 127
        return np.dtype("u1" if unsigned else "i1")
    return np.dtype(MODES[mode])


def _axis_order(fields: np.void) -> Sequence[int]:
    """Return which axis, x 0, columns, rows and sections are."""
    return [int(n) - 1 for n in fields["axes"]] if fields["axes"].any() else [0, 1, 2]


def _nstart(fields: np.void) -> np.ndarray:
    """Return the place of the first voxel, in voxels (x, y, z), by NSTART."""
    start = np.zeros(3)
    start[_axis_order(fields)] = fields["start"]
    return start


def _voxel_lengths(fields: np.void) -> np.ndarray | None:
    """Return the lengths of a voxel in Å (x, y, z), None where the header says none."""
    grid, cell = fields["grid"].astype(np.float64), fields["cell"].astype(np.float64)
    return cell / grid if (grid > 0).all() and np.isfinite(cell).all() else None


def _header_place(fields: np.void) -> Place:
    """Return where the array lies: ORIGIN if there is one, or else NSTART in voxels, which is what viewers do."""
    size = _voxel_lengths(fields)
    if size is None:
        grid, cell = (shown(fields[name].tolist()) for name in ("grid", "cell"))
        return Place(reason=f"its header says a cell of {cell} Å and a grid of {grid}")
    origin = fields["origin"].astype(np.float64)
    if not np.isfinite(origin).all() or not origin.any():
        origin = _nstart(fields) * size
    elif int(fields["imod_stamp"]) == IMOD_STAMP:
        is_usual = bool(int(fields["imod_flags"]) & IMOD_ORIGIN) or int(fields["version"]) in VERSIONS
        origin = origin if is_usual else -origin
    shift = origin.tolist() if origin.any() else None  # a header has zeros where nobody stated one
    return listed_place("xyz", size.tolist(), shift, ["angstrom"] * 3)


def _label_texts(fields: np.void) -> list[str]:
    count = min(10, max(0, int(fields["num_labels"])))
    return [label.decode("ascii", errors="replace").strip("\0 ") for label in fields["labels"][:count]]


def write(path: Path, key: str, spec: ArraySpec, where: Place, parts: Iterable[Part]) -> None:
    """Write an array (z, y, x) to the file `path` from its parts, whole planes, in any order."""
    with path.open("wb") as stream:
        stream.truncate(SIZE + num_bytes(spec.shape, spec.dtype))
        statistics = np.array([np.inf, -np.inf, 0, 0, 0])
        for box, data in parts:
            write_planes(stream, SIZE, spec.shape[0], box.start[0], data)
            statistics = reduce(_merged_statistics, _statistics(data), statistics)
        stream.seek(0)
        stream.write(_new_header(spec, where, statistics).tobytes())


def stored_dtype(dtype: np.dtype, shape: tuple[int, ...], path: Path) -> np.dtype:
    """Return the type as which MRC holds voxels of `dtype`: uint8, which it lacks, as uint16.

    Raises:
        VolumeError: it has no such type, or no such shape.
    """
    held = np.dtype(np.uint16) if dtype == np.uint8 else dtype
    if held.name not in WRITTEN:
        raise VolumeError(f"{path}: MRC has no {dtype}; it has {', '.join(WRITTEN)} (and uint8 as uint16)")
    if len(shape) != 3:
        raise VolumeError(f"{path}: MRC has no channels, and the volume has {shape[0]}; write another format")
    return held


def _statistics(data: np.ndarray) -> Iterator[np.ndarray]:
    """Yield least and greatest value, number, sum and sum of squares of the voxels of `data`, a part at a time."""
    rows = data.reshape(-1, data.shape[-1])
    step = max(1, VALUES_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), step):
        values = rows[first : first + step].astype(np.float64).ravel()
        yield np.array([values.min(), values.max(), values.size, values.sum(), values.dot(values)])


def _merged_statistics(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.array([min(some[0], others[0]), max(some[1], others[1]), *(some[2:] + others[2:])])


def _new_header(spec: ArraySpec, where: Place, statistics: np.ndarray) -> np.ndarray:
    """Return the header of a new file: MRC2014, little-endian; an unknown voxel size is a cell of 0."""
    low, high, num, total, squares = statistics
    header = np.zeros((), FIELDS)
    shape = np.array(spec.shape[::-1])
    header["shape"] = header["grid"] = shape
    header["mode"] = WRITTEN[spec.dtype.name]
    if where.voxel_size_nm is not None:
        header["cell"] = np.array(where.voxel_size_nm[::-1]) * 10 * shape
        header["origin"] = np.array(where.origin_nm[::-1]) * 10
    header["angles"] = 90
    header["axes"] = (1, 2, 3)
    header["statistics"] = (low, high, total / num)
    header["rms"] = np.sqrt(max(0.0, squares / num - (total / num) ** 2))
    header["space_group"] = 1
    header["version"] = 20141
    header["map"] = b"MAP "
    header["stamp"] = (0x44, 0x44, 0, 0)
    header["num_labels"] = 1
    header["labels"][0] = b"written by volpipe"
    return header


MRC = Format(
    name="mrc",
    title="MRC",
    row=ReadRow("MRC, CCP4", f"modes {', '.join(map(str, MODES))}, any order of axes", "the cell"),
    suffixes=(".mrc", ".map", ".rec"),
    magics=((MARK_BYTE, MARK),),
    recognises=is_unmarked,
    files=one_array(read_header),
    writing=Writing(
        ("raw",), "8-bit unsigned voxels become 16-bit", write, has_keys=False, has_chunks=False, has_record=False,
        stored_dtype=stored_dtype,
    ),
)  # fmt: skip
