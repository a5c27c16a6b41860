"""Files of DigitalMicrograph, DM3 and DM4, as few bytes as readers need: no library writes them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

CODES = {"int16": 1, "float32": 2, "complex64": 3, "uint8": 6, "int32": 7, "int8": 9, "uint16": 10, "uint32": 11,
         "float64": 12, "rgb": 23}  # fmt: skip
ENCODED = {"int16": 2, "int32": 3, "uint16": 4, "uint32": 5, "float32": 6, "float64": 7, "int8": 9, "uint8": 10,
           "complex64": 6, "rgb": 3}  # fmt: skip
Calibration = tuple[float, str, float]  # scale, unit, and the voxel at 0


def write_dm(
    path: Path, data: np.ndarray, version: int = 3, *, calibrations: list[Calibration] | None = None, kind: str = "",
    others: tuple[np.ndarray, ...] = (),
) -> None:  # fmt: skip
    """Write `data`, x fastest, behind a small picture and before the `others`; calibrations are of x, y, z."""
    tags = Tags(version, ">" if data.dtype.byteorder == ">" else "<")
    thumbnail = np.zeros((4, 4), np.dtype("i4").newbyteorder(tags.order))
    images = [tags.image(thumbnail, "rgb", [])]
    images += [tags.image(data, kind or data.dtype.name, calibrations or [])]
    images += [tags.image(other, other.dtype.name, []) for other in others]
    listed = tags.group([("", image) for image in images])
    tree = tags.group([("ImageList", listed), ("InImageMode", tags.number("uint8", 1))])
    size = struct.pack(f">{tags.count}", len(tree))
    path.write_bytes(struct.pack(">I", version) + size + struct.pack(">I", tags.order == "<") + tree)


class Tags:
    """Tags of a version and a byte order; a tag is (20 or 21, its bytes)."""

    def __init__(self, version: int, order: str) -> None:
        self.count, self.order = {3: "I", 4: "Q"}[version], order

    def numbers(self, *numbers: int) -> bytes:
        return struct.pack(f">{len(numbers)}{self.count}", *numbers)

    def group(self, tags: list[tuple[str, bytes]]) -> bytes:
        parts = [struct.pack(">BB", 1, 0) + self.numbers(len(tags))]
        for name, content in tags:
            is_value = content.startswith(b"%%%%")
            parts.append(struct.pack(">BH", 20 + is_value, len(name)) + name.encode())
            parts += [self.numbers(len(content))] if self.count == "Q" else []
            parts.append(content)
        return b"".join(parts)

    def number(self, kind: str, value: float) -> bytes:
        data = np.array(value, np.dtype(kind).newbyteorder(self.order)).tobytes()
        return b"%%%%" + self.numbers(1, ENCODED[kind]) + data

    def array(self, kind: str, count: int, data: bytes) -> bytes:
        return b"%%%%" + self.numbers(3, 20, ENCODED[kind], count) + data

    def text(self, text: str) -> bytes:
        coding = "utf-16-le" if self.order == "<" else "utf-16-be"
        return self.array("uint16", len(text), text.encode(coding))

    def image(self, data: np.ndarray, kind: str, calibrations: list[Calibration]) -> bytes:
        dimension = [
            ("", self.group([("Origin", self.number("float32", origin)), ("Scale", self.number("float32", scale)),
                             ("Units", self.text(unit))]))
            for scale, unit, origin in calibrations or [(1.0, "", 0.0)] * data.ndim
        ]  # fmt: skip
        count = data.size * (2 if kind == "complex64" else 1)
        tags = [
            ("Calibrations", self.group([("Dimension", self.group(dimension))])),
            ("Data", self.array(kind, count, np.ascontiguousarray(data).tobytes())),
            ("DataType", self.number("uint32", CODES[kind])),
            ("Dimensions", self.group([("", self.number("uint32", n)) for n in reversed(data.shape)])),
            ("PixelDepth", self.number("uint32", data.dtype.itemsize)),
        ]
        return self.group([("ImageData", self.group(tags)), ("ImageTags", self.group([]))])
