"""Checksums of stored data: the CRC-32C of the files of a box of an array, read back from storage.

Not here: their use (inference.output), storage (journal) or comparison (runs.verify).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from volpipe.geometry.grid import Box, cells
from volpipe.volumes.storage import object_store
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import Location

PIECE_BYTES = 8 << 20
ABSENT = 0  # where there is no file, which is how formats store a chunk of fill values
DIGITS = 8  # of a checksum, hexadecimal


def checksum(file: Location) -> int:
    """Return the CRC-32C of `file`, never 0; ABSENT where there is none.

    Raises:
        OSError: it cannot be read.
    """
    import google_crc32c

    crc = 0
    if isinstance(file, Path):
        try:
            with file.open("rb") as stream:
                while piece := stream.read(PIECE_BYTES):
                    crc = google_crc32c.extend(crc, piece)
        except (FileNotFoundError, NotADirectoryError):
            return ABSENT
        return crc or 1
    start, tag = 0, ""
    while part := object_store.fetch(file, (start, start + PIECE_BYTES), tag, denied_ok=True):
        crc, tag, start = google_crc32c.extend(crc, part.data), part.stamp.tag, start + PIECE_BYTES
        if start >= part.stamp.num_bytes:
            return crc or 1
    return ABSENT


def of_bytes(data: bytes) -> int:
    """Return the checksum of a file with this content."""
    import google_crc32c

    return google_crc32c.value(data) or 1


def stored_files(header: Header, box: Box) -> Iterator[Location]:
    """Yield the files, in C order, that hold `box` of an array of ours, in stored axes; they need not exist."""
    name = ChunkFiles(header).name
    return (header.folder / name(index) for index in cells(box, header.write_unit))


def take(header: Header, box: Box) -> str:
    """Return the checksums of the files that hold `box`, one after the other, eight hexadecimal digits each."""
    return joined(map(checksum, stored_files(header, box)))


def joined(sums: Iterable[int]) -> str:
    """Return checksums as the text that `split` takes apart."""
    return "".join(f"{crc:0{DIGITS}x}" for crc in sums)


def split(sums: str) -> list[int]:
    """Return the checksums in a text of `take`, as numbers."""
    return [int(sums[i : i + DIGITS], 16) for i in range(0, len(sums), DIGITS)]
