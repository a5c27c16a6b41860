"""Texts that people write: recipes, tables, lists, descriptions of nets, metadata that they mend.

Not here: what volpipe writes itself, which is UTF-8. Editors of Windows begin a text with a byte order mark and end its
lines with a carriage return, and PowerShell's `>` writes UTF-16 (about_Character_Encoding, learn.microsoft.com).
"""

from __future__ import annotations

import codecs
from pathlib import Path

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
