"""Texts in the place of what a file should hold: a pointer that git-lfs left, or a web page that was downloaded.

Not here: any format's own text, such as a recipe.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from volpipe.errors import VolpipeError

MOST_LOOKED_AT = 212  # bytes of a file
POINTER = b"version https://git-lfs"  # see the specification of git-lfs, "The Pointer"
PAGE = (b"<!doctype html", b"<html", b"<?xml")


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
