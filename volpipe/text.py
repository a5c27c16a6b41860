"""Texts that people write: recipes, tables, lists, descriptions of nets, metadata that they mend.

Texts that lie in the place of data, too: a pointer that git-lfs left, or a web page that was downloaded.

Not here: what volpipe writes itself, which is UTF-8. Editors of Windows begin a text with a byte order mark and end its
lines with a carriage return, and PowerShell's `>` writes UTF-16 (about_Character_Encoding, learn.microsoft.com).
"""

from __future__ import annotations

import codecs
from pathlib import Path

from volpipe.errors import VolpipeError

MOST_LOOKED_AT = 212  # bytes of a file
POINTER = b"version https://git-lfs"  # see the specification of git-lfs, "The Pointer"
PAGE = (b"<!doctype html", b"<html", b"<?xml")
MARKS = {  # the longer first: that of UTF-32 begins as that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def decoded(data: bytes, errors: str = "strict") -> str:
    """Return the text in `data`, without its byte order mark, and with the ends of lines that Python has.

    Raises:
        UnicodeDecodeError: it is neither UTF-8 nor what its mark says, unless `errors` says otherwise.
    """
    coding = next((name for mark, name in MARKS.items() if data.startswith(mark)), "utf-8")
    return data.decode(coding, errors).replace("\r\n", "\n").replace("\r", "\n")


def read_text(file: Path) -> str:
    """Return the text in `file`, as `decoded` does.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it holds no such text.
    """
    return decoded(file.read_bytes())


def stand_in(start: bytes) -> str:
    """Return what stands in the place of a file that begins with `start`, and what to do; "" where nothing does."""
    text = start[:MOST_LOOKED_AT].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(POINTER):
        return "a pointer of git-lfs: fetch the file with `git lfs pull`"
    if text.startswith(PAGE):
        return "a web page: download the file itself"
    return ""


def looks(start: bytes) -> str:
    """Return what the first bytes of a file look like, for people; "" where that is unknown."""
    start = start[:MOST_LOOKED_AT]
    if not start:
        return ", for it is empty"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)  # which may end within a letter
        is_text = text.replace("\n", " ").replace("\t", " ").replace("\r", " ").isprintable()
    except UnicodeDecodeError:
        is_text = False
    instead = stand_in(start)
    return f", and looks like a text ({instead})" if instead else ", and looks like a text" if is_text else ""


def check_no_text(file: Path, what: str) -> None:
    """Refuse a `file` that should hold `what`, data, and is empty or a text.

    Raises:
        VolpipeError: saying what it looks like.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(MOST_LOOKED_AT)
    except OSError as error:
        raise VolpipeError(f"{file} cannot be read: {error.strerror}") from error
    if seen := looks(start):
        raise VolpipeError(f"{file} is no {what}{seen}")
