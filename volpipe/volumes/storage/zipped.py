"""Zip files whose members are stored as they are: which members a zip has, and the bytes of one of them.

A path leads into a zip as into a folder: `a.ozx/s0/zarr.json`. Not here: who asks for files (paths), or chunks in a zip
(tensorstore). Specifications: PKWARE's APPNOTE 6.3.10, sections 4.3.7 to 4.3.16; RFC-9 of OME-NGFF (.ozx).
"""

from __future__ import annotations

import bisect
import os
import stat
import struct
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from volpipe.errors import VolumeError

SUFFIXES = (".ozx", ".zip")
STARTS = (b"PK\x03\x04", b"PK\x05\x06")  # of a zip, and of one without members
MEMBER_START, MEMBER_HEADER = b"PK\x03\x04", struct.Struct("<4s22xHH")  # then a name and more, so many bytes
END, END_BYTES, COMMENT_BYTES = b"PK\x05\x06", 22, 1 << 16
LOCATOR, LOCATOR_BYTES, END64_BYTES, MANY = (
    b"PK\x06\x07",
    20,
    56,
    0xFFFF,
)  # of the end of zips with more than 65,534 members
MOST_MEMBERS = 300_000  # 100 bytes of memory each in every process, and seven times that while the zip is opened
KEPT = 8  # zips that a process keeps the members of


@dataclass(frozen=True, eq=False)
class Archive:
    """The members of a zip: sorted names, and for each where its header begins, its bytes, and their CRC-32."""

    file: Path
    names: tuple[str, ...]
    starts: array[int]
    sizes: array[int]
    sums: array[int]

    def size(self, name: str) -> int | None:
        """Return the bytes of a member, None where there is none of this name."""
        number = bisect.bisect_left(self.names, name)
        return self.sizes[number] if self.names[number : number + 1] == (name,) else None

    def read(self, name: str, first: int = 0, last: int | None = None) -> bytes | None:
        """Return the bytes of a member from `first` on, before `last`; None where there is none of this name.

        Raises:
            VolumeError: it is damaged.
        """
        number = bisect.bisect_left(self.names, name)
        if self.names[number : number + 1] != (name,):
            return None
        at, num_bytes, crc = self.starts[number], self.sizes[number], self.sums[number]
        last = num_bytes if last is None else min(last, num_bytes)
        try:
            with self.file.open("rb") as stream:
                stream.seek(at)
                start, *lengths = MEMBER_HEADER.unpack(stream.read(MEMBER_HEADER.size))
                stream.seek(at + MEMBER_HEADER.size + sum(lengths) + first)
                data = stream.read(max(0, last - first))
        except (OSError, ValueError, struct.error) as error:
            raise VolumeError(f"{self.file}: its member {name} cannot be read: {error}; copy the file again") from error
        is_whole = (first, last) == (0, num_bytes)
        if start != MEMBER_START or len(data) != max(0, last - first) or (is_whole and zlib.crc32(data) != crc):
            raise VolumeError(f"{self.file}: its member {name} is damaged; copy the file again")
        return data

    def is_folder(self, folder: str) -> bool:
        """Return whether members lie in `folder`, "" for the zip itself."""
        return not folder or next(self.below(folder), None) is not None

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield the members in `folder` and in folders of it: the name from there on, and the bytes."""
        prefix = f"{folder}/" if folder else ""
        for number in range(bisect.bisect_left(self.names, prefix), len(self.names)):
            name = self.names[number]
            if not name.startswith(prefix):
                return
            yield name[len(prefix) :], self.sizes[number]

    def entries(self, folder: str) -> Iterator[tuple[str, bool]]:
        """Yield the names in `folder`, sorted as its members are, and whether each is a folder; none is looked into."""
        prefix = f"{folder}/" if folder else ""
        number = bisect.bisect_left(self.names, prefix)
        while number < len(self.names) and self.names[number].startswith(prefix):
            name, slash, _ = self.names[number][len(prefix) :].partition("/")
            yield name, bool(slash)
            after = f"{prefix}{name}{chr(ord('/') + 1)}" if slash else f"{prefix}{name}\0"
            number = bisect.bisect_left(self.names, after)


def find(place: Path) -> tuple[Archive, str] | None:
    """Return the zip that `place` is or leads into, and the name there; None where no zip is on its way.

    Raises:
        VolumeError: the zip cannot be read in parts.
    """
    for file in (place, *place.parents):
        try:
            status = os.stat(file)  # noqa: PTH116  # asked for by each file that is read
        except OSError:
            continue
        if not stat.S_ISREG(status.st_mode):
            return None
        archive = _open(file, (status.st_ino, status.st_mtime_ns, status.st_size))
        return None if archive is None else (archive, "/".join(place.relative_to(file).parts))
    return None


@lru_cache(maxsize=KEPT)
def _open(file: Path, state: tuple[int, int, int]) -> Archive | None:
    """Return the members of the zip `file`, which is in this `state`; None where it is another file."""
    try:
        with file.open("rb") as stream:
            if not stream.read(len(STARTS[0])).startswith(STARTS):
                return None
            _check_end(file, stream, state[-1])
            with zipfile.ZipFile(stream) as opened:
                members = [each for each in opened.infolist() if not each.is_dir()]
    except VolumeError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise VolumeError(f"{file} is a damaged zip of {state[-1]} bytes: {error}; copy it again") from error
    except OSError as error:
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    for each in members:
        if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & 1:
            what = "encrypted" if each.flag_bits & 1 else "compressed"
            raise VolumeError(
                f"{file}: its member {each.filename} is {what} by the zip, so that no part of it can be read alone: "
                "unpack it, or pack the folder without compression (`zip -0 -r`): its chunks are compressed already"
            )
    members.sort(key=lambda each: each.filename)
    return Archive(
        file,
        tuple(each.filename for each in members),
        array("q", (each.header_offset for each in members)),
        array("q", (each.file_size for each in members)),
        array("q", (each.CRC for each in members)),
    )


def _check_end(file: Path, stream: BinaryIO, num_bytes: int) -> None:
    """Refuse a zip without the list of its members, which stands at the end, or with more than fit into memory."""
    stream.seek(max(0, num_bytes - END_BYTES - COMMENT_BYTES))
    tail = stream.read()
    at = tail.rfind(END)
    if at < 0 or len(tail) - at < END_BYTES:
        raise VolumeError(f"{file} has {num_bytes} bytes, and no list of the zip's members at its end: it is cut short")
    count = int.from_bytes(tail[at + 10 : at + 12], "little")
    locator = tail[max(0, at - LOCATOR_BYTES) : at]
    if count == MANY and locator.startswith(LOCATOR):
        stream.seek(min(int.from_bytes(locator[8:16], "little"), num_bytes))
        count = int.from_bytes(stream.read(END64_BYTES)[32:40], "little")
    if count > MOST_MEMBERS:
        raise VolumeError(
            f"{file} has {count:,} members, and volpipe reads zips of up to {MOST_MEMBERS:,}; unpack it, or write it "
            "with shards, which are few"
        )
