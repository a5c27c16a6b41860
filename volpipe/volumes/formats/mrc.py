"""MRC, CCP4 and IMOD files (.mrc, .map, .rec, .st): one array after a header of 1024 bytes, read where it lies.

Not here: the reading itself (flat). Format: MRC2014 (Cheng et al., J. Struct. Biol. 192 (2015) 146, www.ccpem.ac.uk);
its dialect: bio3d.colorado.edu/imod/doc/mrc_format.txt. The header counts x, y, z in Å; what is stored is sections of
rows of columns; the header says which axis each of these is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import listed_place
from volpipe.volumes.formats.flat import Part, check_size, num_bytes, write_planes
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Facts,
    Header,
    Place,
    flat_chunk,
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
VALUES_AT_ONCE = 2**18
IMOD_STAMP = 1146047817  # "IMOD"
IMOD_SIGNED, IMOD_ORIGIN = 1, 4  # flags: bytes are signed; the origin is the first voxel's place, not minus that
VOLUMES = range(401, 631)  # space groups of a stack of volumes: 400 more than the group
FACTS = Facts(
    "MRC, CCP4",
    f"modes {', '.join(map(str, MODES))}, any order of axes",
    "the cell",
    "8-bit unsigned voxels become 16-bit",
)


def read_header(file: Path) -> Header:
    """Return the header of the array in `file`.

    Raises:
        VolumeError: it is broken or cut short, or holds what volpipe does not read.
    """
    fields, order = _fields(file)
    shape, axes = _shape(fields, file)
    stored = _stored(fields, file).newbyteorder(order)
    offset = SIZE + int(fields["extended"])
    if offset < SIZE:
        raise VolumeError(f"{file}: an extended header of {offset - SIZE} bytes cannot be")
    check_size(file, offset, shape, stored)
    return Header(
        folder=file,
        format="mrc",
        shape=shape,
        dtype=voxel_dtype(stored, file),
        chunks=flat_chunk(shape),
        axes=axes,
        attributes={"labels": _labels(fields)},
        known={"offset": offset, "stored": stored},
        unsupported="an MRC file",
        place=_place(fields),
    )


def _fields(file: Path) -> tuple[np.void, Order]:
    """Return the header's fields and the byte order: that of the machine stamp, or else the one that makes sense."""
    with file.open("rb") as stream:
        text = stream.read(SIZE)
    if len(text) < SIZE:
        raise VolumeError(f"{file} has {len(text)} bytes, an MRC header has {SIZE}: it is cut short; copy it again")
    stamps: dict[int, Order] = {0x44: "<", 0x11: ">"}
    stamped = stamps.get(text[212])
    orders: tuple[Order, ...] = (stamped,) if stamped else ("<", ">")
    for order in orders:
        fields = np.frombuffer(text, FIELDS.newbyteorder(order))[0]
        if int(fields["mode"]) in {*MODES, *OTHER_MODES} and (fields["shape"] > 0).all():
            return fields, order
    fields = np.frombuffer(text, FIELDS.newbyteorder(orders[0]))[0]
    raise VolumeError(
        f"{file}: mode {fields['mode']} and shape {tuple(fields['shape'].tolist())} make no MRC header; it is damaged"
    )


def _shape(fields: np.void, file: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
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


def _stored(fields: np.void, file: Path) -> np.dtype:
    """Return the type of the voxels; bytes are signed, except IMOD's without its flag, and those of old software.

    Old software wrote unsigned bytes without a flag; a maximum above 127 in the header shows them.
    """
    mode = int(fields["mode"])
    if mode in OTHER_MODES:
        raise VolumeError(
            f"{file} has mode {mode}, {OTHER_MODES[mode]}; volpipe reads modes {', '.join(map(str, MODES))}"
        )
    if mode == 0:
        from_imod = int(fields["imod_stamp"]) == IMOD_STAMP
        unsigned = not int(fields["imod_flags"]) & IMOD_SIGNED if from_imod else fields["statistics"][1] > 127
        return np.dtype("u1" if unsigned else "i1")
    return np.dtype(MODES[mode])


def _place(fields: np.void) -> Place:
    """Return where the array lies: ORIGIN if there is one, or else NSTART in voxels, which is what viewers do."""
    grid, cell = fields["grid"].astype(np.float64), fields["cell"].astype(np.float64)
    if not ((grid > 0).all() and np.isfinite(cell).all()):
        return Place()
    size = cell / grid
    origin = fields["origin"].astype(np.float64)
    if not np.isfinite(origin).all() or not origin.any():
        columns = [int(n) - 1 for n in fields["axes"]] if fields["axes"].any() else [0, 1, 2]
        start = np.zeros(3)
        start[columns] = fields["start"]
        origin = start * size
    elif int(fields["imod_stamp"]) == IMOD_STAMP and not int(fields["imod_flags"]) & IMOD_ORIGIN:
        origin = -origin
    return listed_place("xyz", size.tolist(), origin.tolist(), ["angstrom"] * 3)


def _labels(fields: np.void) -> list[str]:
    count = min(10, max(0, int(fields["num_labels"])))
    return [label.decode("ascii", errors="replace").strip("\0 ") for label in fields["labels"][:count]]


def write(path: Path, spec: ArraySpec, where: Place, parts: Iterable[Part]) -> None:
    """Write an array (z, y, x) to the file `path` from its parts, whole planes, in any order."""
    with path.open("wb") as stream:
        stream.truncate(SIZE + num_bytes(spec.shape, spec.dtype))
        statistics = np.array([np.inf, -np.inf, 0, 0, 0])
        for box, data in parts:
            write_planes(stream, SIZE, spec.shape[0], box.start[0], data)
            statistics = reduce(_joined, _statistics(data), statistics)
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


def _joined(some: np.ndarray, others: np.ndarray) -> np.ndarray:
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
