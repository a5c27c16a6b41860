"""How many values a compressed picture says that it unpacks to: JPEG, JPEG 2000, PNG and WebP, which TIFF may hold.

Not here: the other codecs of TIFF, which are given the size of a strip or tile and stop there. Decoders of pictures
take what the picture itself says. Specifications: ITU T.81 (B.1), ITU T.800 (A.5.1), RFC 2083 (4.1.1), RFC 9649 (2).
"""

from __future__ import annotations

import re
import struct

UNSIZED = (
    "jpegxl",
    "jpegxr",
    "lerc",
    "jetraw",
)  # of these the size cannot be told here; no volume is known to use them
PNG = b"\x89PNG\r\n\x1a\n"
J2K = b"\xff\x4f\xff\x51"
J2K_SEARCHED_BYTES = 4096  # the codestream of a JP2 file stands behind a few small boxes


def count_values(text: bytes) -> int | None:
    """Return the number of values of the picture in `text`, samples counted; None where it is no picture."""
    try:
        if text.startswith(b"\xff\xd8"):
            return _jpeg(text)
        if text.startswith(PNG):
            width, height = struct.unpack_from(">II", text, 16)
            return int(width * height * 4)
        if text.startswith(b"RIFF") and text[8:12] == b"WEBP":
            return _webp(text)
        place = text[:J2K_SEARCHED_BYTES].find(J2K)
        if place == 0 or (place > 0 and text[4:8] == b"jP  "):
            return _j2k(text, place)
    except struct.error:  # cut short: the decoder says so
        return 0
    return None


def _jpeg(text: bytes) -> int:
    """Return the values of the largest frame."""
    most = 0
    for found in re.finditer(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]", text):
        if found.end() + 8 <= len(text):
            height, width, samples = struct.unpack_from(">HHB", text, found.end() + 3)
            is_frame = struct.unpack_from(">H", text, found.end())[0] == 8 + 3 * samples
            most = max(most, height * width * samples if is_frame else 0)
    return most


def _j2k(text: bytes, place: int) -> int:
    right, bottom, left, top = struct.unpack_from(">4I", text, place + 8)
    (samples,) = struct.unpack_from(">H", text, place + 40)
    return int(max(0, right - left) * max(0, bottom - top) * samples)


def _webp(text: bytes) -> int:
    kind = text[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(text[i : i + 3], "little") + 1 for i in (24, 27))
    elif kind == b"VP8L":
        bits = int.from_bytes(text[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (n & 0x3FFF for n in struct.unpack_from("<HH", text, 26))
    return width * height * 4
