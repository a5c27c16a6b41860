"""Files that an option names and a command writes: each begins with a mark, by which its own option knows it again.

Not here: what is written, or when a command's work begins (monitoring.results). A folder of chunks is no such file.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from volpipe.errors import VolpipeError
from volpipe.resolve import path_of
from volpipe.volumes.storage.paths import whole_file

STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
MOST_START = 1 << 12  # bytes of a file, in which its mark ends
PNG_HEAD = 33  # bytes of a PNG before its first chunk of text


@dataclass(frozen=True)
class Kind:
    """What an option writes to its file.

    Attributes:
        writer: the option, with its command, as each of its files says.
        start: how these files begin, and no others; None where users go on with them, so that none is replaced.
    """

    writer: str
    start: re.Pattern[bytes] | None


def json_kind(writer: str) -> Kind:
    """Return the kind of files of JSON that `json_bytes` makes for `writer`."""
    return Kind(writer, re.compile(re.escape(json_bytes(writer, {})[:-3])))


def json_bytes(writer: str, tree: Mapping[str, Any]) -> bytes:  # Any: JSON
    """Return `tree` as JSON that says first by which option it was written."""
    return f"{json.dumps({'written_by': writer, **tree}, indent=1, allow_nan=False)}\n".encode()


def page_kind(writer: str, *others: str) -> Kind:
    """Return the kind of HTML pages that name `writer`, or one of `others`, as their generator."""
    known = b"|".join(re.escape(generator(each)) for each in (writer, *others))
    return Kind(writer, re.compile(rb"<!DOCTYPE html>\n(?:<(?!/)[^>]*>\n)*?(?:" + known + rb")"))


def generator(writer: str) -> bytes:
    """Return the element by which a page names what wrote it."""
    return f'<meta name="generator" content="{writer}">'.encode()


def png_kind(writer: str) -> Kind:
    """Return the kind of pictures that `png_bytes` makes for `writer`."""
    head = rb"\x89PNG\r\n\x1a\n" + rb"[\x00-\xff]" * (PNG_HEAD - 8)
    return Kind(writer, re.compile(head + re.escape(_png_text(writer))))


def png_bytes(writer: str, picture: bytes) -> bytes:
    """Return a PNG that names `writer` as its software."""
    return picture[:PNG_HEAD] + _png_text(writer) + picture[PNG_HEAD:]


def _png_text(writer: str) -> bytes:
    """Return the chunk of a PNG that names its software (PNG specification, 11.3.4.3)."""
    content = b"tEXt" + b"Software\0" + writer.encode()
    return (len(content) - 4).to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")


def text_kind(writer: str) -> Kind:
    """Return the kind of texts whose first line is the `comment` of `writer`."""
    return Kind(writer, re.compile(re.escape(comment(writer).encode())))


def comment(writer: str) -> str:
    """Return the line by which a text whose comments begin with # says what wrote it."""
    return f"# written by {writer}\n"


def is_stream(path: Path) -> bool:
    """Return whether `path` is a terminal, a pipe, the null device or a descriptor of this process, and no file."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _descriptor(path: Path) -> int | None:
    """Return the number of the descriptor of this process that `path` stands for; None of other paths."""
    match = DESCRIPTOR.fullmatch(str(path))
    return int(match[1]) if match else STREAMS.get(str(path))


@dataclass(frozen=True)
class ResultFile:
    """A file that an option names and its command writes last, whole or not at all.

    It takes the place of a file that this option wrote before, or of an empty one, and of nothing else: `check` refuses
    any other before there is work. Whoever begins the work calls `clear`, so that the file of an earlier command is not
    taken for the result of this one if it fails. A command that is refused leaves that file as it is.

    Attributes:
        option: what sentences call it.
        path: as the user wrote it. A link is followed to what may be replaced; streams are written as they are.
    """

    option: str
    path: Path
    kind: Kind

    @classmethod
    def named(cls, option: str, file: str | os.PathLike[str], kind: Kind) -> ResultFile:
        """Return the file that the user's text `file` names."""
        return cls(option, path_of(file), kind)

    @property
    def is_stream(self) -> bool:
        """Whether it is no file on a disk."""
        return is_stream(self.path)

    def check(self) -> None:
        """Refuse a file that cannot be written at the end, or that something else wrote; nothing is changed.

        Raises:
            VolpipeError: it is a folder, an input or any other file, or a dead link, or there is no folder for it.
        """
        if self.is_stream:
            return
        if self.path.is_dir():
            raise VolpipeError(f"{self}: it is a folder; name a file in it")
        folder = self.path.absolute().parent
        if not folder.is_dir():
            raise VolpipeError(f"{self}: there is no folder {self.path.parent}; make it first")
        if not self.path.exists():
            if self.path.is_symlink():
                raise VolpipeError(
                    f"{self}: it is a link to {self.path.readlink()}, which is not there; remove the link"
                )
            if not os.access(folder, os.W_OK | os.X_OK):
                raise VolpipeError(f"{self}: you may not write in {folder}; name a file elsewhere")
            return
        if not self._is_own():
            why = f"and was not written by `{self.kind.writer}`, so that" if self.kind.start else "and"
            raise VolpipeError(
                f"{self}: this file is there already, {why} it is not replaced; name another file, or remove it"
            )

    def _is_own(self) -> bool:
        """Return whether the file that is there is empty, or begins as those of its kind."""
        if not self.path.is_file():
            return False
        try:
            with self.path.open("rb") as stream:
                start = stream.read(MOST_START)
        except OSError as error:
            raise VolpipeError(f"{self}: it cannot be read ({error.strerror}); name another file") from error
        return not start or (self.kind.start is not None and self.kind.start.match(start) is not None)

    def clear(self) -> None:
        """Delete what the option wrote there before; work begins, of which it is not the result.

        Where a link leads there it is emptied: the link is the user's.
        """
        if self.is_stream or not self.path.exists() or not self._is_own():
            return
        if self.path.is_symlink():
            os.truncate(self.path, 0)
        else:
            self.path.unlink()

    def write(self, data: bytes) -> None:
        """Write `data`, which begins as files of its kind do, whole or not at all.

        Raises:
            VolpipeError: what came there meanwhile is something else, or it cannot be written.
        """
        known = self.kind.start
        assert known is None or known.match(data), (
            f"{self.kind.writer} writes files by which it does not know them again"
        )
        try:
            if self.is_stream:
                with self._stream() as stream:
                    stream.write(data)
                return
            self.check()
            with whole_file(self.path.resolve(), lasting=False) as partial:
                partial.write_bytes(data)
        except OSError as error:
            raise VolpipeError(
                f"{self}: it cannot be written ({error.strerror or error}); name another file"
            ) from error

    def _stream(self) -> BinaryIO:
        """Return the stream, open; a descriptor is not opened anew, for what was printed to it is not to be lost."""
        descriptor = _descriptor(self.path)
        if descriptor is None:
            return self.path.open("wb", buffering=0)
        sys.stdout.flush()
        return os.fdopen(os.dup(descriptor), "wb")

    def __str__(self) -> str:
        return f"{self.option} {self.path}"
