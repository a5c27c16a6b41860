"""Event files: what TensorBoard shows of a training, written here so that a worker need not have TensorBoard.

Not here: what is logged (train). A file is a row of records, each a message of protocol buffers (https://protobuf.dev,
the encoding) between its length and checksums, as TensorFlow's record files have them (tensorflow/core/lib/io)::

    length, 8 bytes | masked CRC32C of it, 4 | message | masked CRC32C of it, 4      all little-endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from volpipe.formats.files import whole_file

NAME = "events.out.tfevents.0.volpipe"
MASK = 0xA282EAD8  # of TensorFlow's checksums
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
VERSION = b"brain.Event:2"


def write_events(folder: Path, entries: Iterable[Mapping[str, float]]) -> None:
    """Write the scalars of all `entries` of a log, each with its "step" and "time", to the event file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / NAME) as partial, partial.open("wb") as file:
        file.write(record(_double(1, 0.0) + _bytes(3, VERSION)))
        for entry in entries:
            file.write(event(entry))


def append_event(folder: Path, entry: Mapping[str, float]) -> None:
    """Add the scalars of one entry of a log to the event file in `folder`."""
    with (folder / NAME).open("ab") as file:
        file.write(event(entry))


def event(entry: Mapping[str, float]) -> bytes:
    """Return a record with the scalars of one step: message Event of wall_time 1, step 2, summary 5."""
    values = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _float(2, value))  # Summary.Value: tag 1, simple_value 2
        for name, value in entry.items()
        if name not in ("step", "time")
    )
    return record(_double(1, entry.get("time", 0.0)) + _number(2, int(entry["step"])) + _bytes(5, values))


def record(message: bytes) -> bytes:
    """Return `message` as a record."""
    length = struct.pack("<Q", len(message))
    return length + _checksum(length) + message + _checksum(message)


def _checksum(data: bytes) -> bytes:
    from google_crc32c import value

    crc = value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _key(field, VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, FIXED64) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _key(field, FIXED32) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value
