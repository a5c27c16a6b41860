"""DM3 and DM4 of Gatan's DigitalMicrograph: the largest image of a file, read where it lies.

Not here: the reading itself (flat). The format is not published; what is known of it is that of ncempy
(ncempy.io.dm) and of www.er-c.org/cbb/info/dmformat: a tree of tags, in which an image is one::

    ImageList > 0, 1, … > ImageData > Data, DataType, Dimensions (x first), Calibrations > Dimension > Scale, Units

The tree is big-endian, values are of the order that the file says. Files have a small picture of their image, too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.affine import decimals
from volpipe.volumes.formats.flat import check_end, num_bytes
from volpipe.volumes.formats.format import Format, ReadRow, one_array
from volpipe.volumes.storage.metadata import Header, Place, flat_chunk, place, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_links

VERSIONS = {3: "I", 4: "Q"}  # and how the tree counts
GROUP, VALUE = 20, 21  # tags
VALUES = {2: "h", 3: "i", 4: "H", 5: "I", 6: "f", 7: "d", 8: "B", 9: "b", 10: "B", 11: "q", 12: "Q"}
STRUCT, TEXT, ARRAY = 15, 18, 20  # of values
TYPES = {1: "i2", 2: "f4", 6: "u1", 7: "i4", 9: "i1", 10: "u2", 11: "u4", 12: "f8", 14: "?", 39: "i8", 40: "u8"}
RGB = 23
OTHER_TYPES = {3: "complex floats", 5: "packed complex floats", 8: "RGB colours", 13: "complex floats",
               RGB: "RGB colours", 27: "packed complex floats", 28: "packed complex floats"}  # fmt: skip
MAX_DEPTH, MAX_TAGS, MAX_TEXT = 64, 2**20, 256

Tree = dict[str, "Tree | float | StoredRun"]


@dataclass(frozen=True)
class StoredRun:
    """An array of values in a file: its first byte, the bytes of all, and the type of one, "" of a structure."""

    offset: int
    size: int
    type: str


@dataclass
class TagReader:
    """Reads the tree of tags of `file`, whose values are of an `order`; numbers of the tree are of a `count`."""

    file: Path
    stream: BinaryIO
    count: str
    order: str
    num_tags: int = field(default=0)

    def next_numbers(self, form: str) -> tuple[int, ...]:
        """Return the big-endian numbers of the tree that come next."""
        return struct.unpack(f">{form}", self.next_bytes(struct.calcsize(f">{form}")))

    def next_bytes(self, count: int) -> bytes:
        data = self.stream.read(count)
        if len(data) < count:
            raise VolumeError(
                f"{self.file} has {self.file.stat().st_size} bytes, and its tags lead further: it is cut short or "
                "damaged; copy it again"
            )
        return data

    def group(self, depth: int = 0) -> Tree:
        """Return the group of tags that comes next; tags without a name have their number."""
        _, _, count = self.next_numbers(f"BB{self.count}")
        if depth > MAX_DEPTH:
            raise VolumeError(f"{self.file} has groups in {MAX_DEPTH} others; it is damaged")
        tags: Tree = {}
        for number in range(count):
            self.num_tags += 1
            if self.num_tags > MAX_TAGS:
                raise VolumeError(f"{self.file} has more than {MAX_TAGS} tags; it is damaged")
            kind, length = self.next_numbers("BH")
            name = self.next_bytes(length).decode("latin-1") or str(number)
            if self.count == "Q":
                self.next_numbers("Q")  # the bytes of the tag
            if kind not in (GROUP, VALUE):
                raise VolumeError(
                    f"{self.file}: tag {name[:40]!r} is of kind {kind}, which is not known; it is damaged"
                )
            tags[name] = self.group(depth + 1) if kind == GROUP else self._tag_value(name)
        return tags

    def _tag_value(self, name: str) -> float | StoredRun:
        """Return the number, or the place of the values, that comes next; of structures their place alone."""
        mark, length = self.next_bytes(4), self.next_numbers(self.count)[0]
        if mark != b"%%%%" or not 0 < length < MAX_TEXT:
            raise VolumeError(f"{self.file}: tag {name[:40]!r} has no value; it is damaged")
        info = self.next_numbers(f"{length}{self.count}")
        if length == 1 and info[0] in VALUES:
            stored = np.dtype(self.order + VALUES[info[0]])
            return float(decimals(np.frombuffer(self.next_bytes(stored.itemsize), stored))[0])
        size = self._value_bytes(name, info)
        is_plain = info[0] == ARRAY and info[1] in VALUES
        run = StoredRun(self.stream.tell(), size, VALUES[info[1]] if is_plain else "")
        check_end(self.file, run.offset + size)
        self.stream.seek(size, 1)
        return run

    def _value_bytes(self, name: str, info: tuple[int, ...]) -> int:
        """Return the bytes of the values that `info` describes."""
        kind, rest = info[0], info[1:]
        if kind in VALUES and not rest:
            return struct.calcsize(f"={VALUES[kind]}")
        if kind == TEXT and len(rest) == 1:
            return rest[0]
        if kind == STRUCT and len(rest) >= 2 and len(rest) == 2 + 2 * rest[1]:
            return sum(self._value_bytes(name, (each,)) for each in rest[3::2])
        if kind == ARRAY and len(rest) >= 2:
            return self._value_bytes(name, rest[:-1]) * rest[-1]
        raise VolumeError(f"{self.file}: tag {name[:40]!r} has values {info[:4]}, which are not known; it is damaged")

    def text(self, run: object) -> str:
        """Return the text that lies in an array of letters, "" of others."""
        if not isinstance(run, StoredRun) or run.type != "H" or run.size > 2 * MAX_TEXT:
            return ""
        self.stream.seek(run.offset)
        coding = "utf-16-le" if self.order == "<" else "utf-16-be"
        return self.next_bytes(run.size).decode(coding, errors="replace").strip("\0 ")


def is_dm(file: Path, start: bytes) -> bool:
    """Return whether a file that begins with `start` is of DigitalMicrograph: its version, order and first group."""
    version = int.from_bytes(start[:4], "big")
    at = 4 + struct.calcsize(f">{VERSIONS.get(version, 'I')}")
    return (
        version in VERSIONS
        and start[at : at + 4] in (b"\0\0\0\0", b"\0\0\0\1")
        and set(start[at + 4 : at + 6]) <= {0, 1}
    )


def read_header(file: Path) -> Header:
    """Return the header of the largest image in `file`.

    Raises:
        VolumeError: it is damaged or cut short, or the image is of a kind that is not read.
    """
    try:
        with file.open("rb") as stream:
            count = VERSIONS[int.from_bytes(stream.read(4), "big")]
            _, is_little = struct.unpack(f">{count}I", stream.read(struct.calcsize(f">{count}I")))
            reader = TagReader(file, stream, count, "<" if is_little else ">")
            tree = reader.group()
            return _image_header(reader, tree)
    except VolumeError:
        raise
    except struct.error as error:
        raise VolumeError(f"{file} has {file.stat().st_size} bytes, and no whole header: it is cut short") from error
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error


def _tag_group(tree: object, *names: str) -> Tree:
    """Return the group of tags by its `names` from the outermost on, {} where there is none."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _image_header(reader: TagReader, tree: Tree) -> Header:
    file = reader.file
    images = [_tag_group(each, "ImageData") for each in _tag_group(tree, "ImageList").values()]
    images = [each for each in images if isinstance(each.get("Data"), StoredRun)]
    if not images:
        raise VolumeError(f"{file} holds no image")
    if images[0].get("DataType") == RGB and len(images) > 1:  # the small picture
        del images[0]
    image = max(images, key=lambda each: each["Data"].size if isinstance(each["Data"], StoredRun) else 0)
    data, code = image["Data"], image.get("DataType")
    assert isinstance(data, StoredRun)
    if code not in TYPES or not isinstance(code, float):
        kind = next((name for number, name in OTHER_TYPES.items() if number == code), f"voxels of type {code}")
        raise VolumeError(f"{file} holds {kind}; volpipe reads integers and floats: save another image of it")
    lengths = [
        int(n) if isinstance(n, float) and n.is_integer() else 0 for n in _tag_group(image, "Dimensions").values()
    ]
    if len(lengths) not in (2, 3):
        raise VolumeError(
            f"{file} has the axes {' × '.join(map(str, lengths))}, fastest first; volpipe reads x, y and z: save a part"
        )
    shape = voxels(lengths[::-1], "dimensions", file)
    stored = np.dtype(reader.order + TYPES[int(code)])
    if num_bytes(shape, stored) > data.size:
        raise VolumeError(
            f"{file}: {shape} voxels of {stored.name} take {num_bytes(shape, stored)} bytes, and its data have "
            f"{data.size}: it is damaged"
        )
    others = [each for each in images if each is not image and each.get("DataType") in TYPES]
    notes = [f"it holds {len(others) + 1} images, of which the largest is read"] if others else []
    brightness = _tag_group(image, "Calibrations", "Brightness")
    if brightness.get("Scale", 1.0) not in (0.0, 1.0) or brightness.get("Origin", 0.0) != 0.0:
        notes.append("values are read as they are stored; its brightness is calibrated")
    axes = ("z", "y", "x")[-len(shape) :]
    return Header(
        folder=file,
        format="dm",
        shape=shape,
        dtype=voxel_dtype(stored, file),
        chunks=flat_chunk(shape),
        axes=axes,
        known={"offset": data.offset, "stored": np.dtype(np.uint8) if stored.kind == "b" else stored},
        unsupported="a DigitalMicrograph file",
        place=_calibrated_place(reader, _tag_group(image, "Calibrations", "Dimension"), axes),
        notes=tuple(notes),
    )


def _calibrated_place(reader: TagReader, calibrations: Tree, axes: tuple[str, ...]) -> Place:
    """Return the place by the calibration of each axis, x first: a scale, a unit, and which voxel is at 0."""
    scale, shift, units = dict[str, float](), dict[str, float](), dict[str, object]()
    for axis, each in zip(reversed(axes), calibrations.values(), strict=False):
        calibration = _tag_group(each)
        size, origin = calibration.get("Scale"), calibration.get("Origin", 0.0)
        if isinstance(size, float) and isinstance(origin, float) and np.isfinite([size, origin]).all():
            scale[axis], shift[axis], units[axis] = size, 0.0 - origin * size, reader.text(calibration.get("Units"))
    if scale.keys() != set(axes):
        missing = ", ".join(axis for axis in axes if axis not in scale)
        return Place(reason=f"it says no scale of {missing}")
    return place(scale, shift if any(shift.values()) else {}, units)


DM = Format(
    name="dm",
    title="DM3, DM4",
    row=ReadRow(
        "DM3, DM4 (Gatan DigitalMicrograph)",
        "the largest image of a file, integers and floats, y, x or z, y, x",
        "`Calibrations`, where each axis has a unit of length",
    ),
    suffixes=(".dm3", ".dm4"),
    recognises=is_dm,
    files=one_array(read_header),
)
