"""The decoded size of compressed chunks and pictures, checked before a decoder takes the memory.

Not here: decoders that stop at the end of a chunk, strip or tile: tensorstore's, and most of tifffile's. Pictures in
pages state their own size: JPEG (ITU T.81, B.1), JPEG 2000 (ITU T.800, A.5.1), JPEG XL (ISO 18181-1, D.2 and D.3), PNG
(RFC 2083, 4.1.1) and WebP (RFC 9649, 2).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from volpipe.errors import ChunkError

COMPRESSORS = ("blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd")
MOST_GROWTH = 8  # of what a filter is given: bits to bytes, bytes to float64
SPARE_BYTES = 1024  # for a checksum or a scale
LZMA_DICTIONARY_BYTES = 2**30
UNSIZED = ("jpegxr", "lerc", "jetraw")  # pictures whose size is not read; no volume is known to use them
PNG = b"\x89PNG\r\n\x1a\n"
J2K = b"\xff\x4f\xff\x51"
JXL, JXL_BOXES = b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"  # a codestream, and a file of boxes with one
MOST_BOXES = 100
JXL_LENGTHS = ((1, 9), (1, 13), (1, 18), (1, 30))  # least number, and bits
JXL_RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # of width to height
SEVERAL_PICTURES = 1 << 62  # values: more than fit anywhere
J2K_SEARCHED_BYTES = 4096  # the codestream of a JP2 file stands behind a few small boxes
SUFFIXES: Mapping[str, str] = {
    ".gz": "gzip",
    ".br": "br",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}  # of files that something packed, and how
MAGIC: Mapping[str, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}


class _Decoder(Protocol):
    eof: bool
    unused_data: bytes

    def decompress(self, text: bytes, limit: int, /) -> bytes: ...


DECODERS: Mapping[str, Callable[[], Any]] = {  # Any: _Decoder, which zlib's do not say that they are
    "bz2": bz2.BZ2Decompressor,
    "gzip": lambda: zlib.decompressobj(47),
    "zlib": zlib.decompressobj,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=LZMA_DICTIONARY_BYTES),
}


def check(text: bytes, compressor: str, chunk_bytes: int) -> None:
    """Raise where `text`, a chunk of `chunk_bytes` before filters, unpacks to more than filters can make of that.

    Raises:
        ChunkError: it does, or is cut short where decoders would not say so.
    """
    limit = MOST_GROWTH * chunk_bytes + SPARE_BYTES
    if compressor in DECODERS:
        size = _inflated_size(text, DECODERS[compressor], limit)
    elif compressor == "zstd":
        size = _zstd(text, limit)
    elif compressor == "blosc":
        size = _blosc(text)
    else:
        size = int.from_bytes(text[:4], "little") if compressor == "lz4" else len(text)
    if size > limit:
        raise ChunkError(f"it unpacks to more than {limit} bytes and a chunk has {chunk_bytes}")


def _inflated_size(text: bytes, make: Callable[[], _Decoder], limit: int) -> int:
    """Return the size of `text` unpacked, all members of it, or one more than `limit` if it is larger."""
    size = 0
    try:
        while text and size <= limit:
            decoder = make()
            size += len(decoder.decompress(text, limit + 1 - size))
            text = decoder.unused_data if decoder.eof else b""
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise ChunkError(str(error)) from error
    return size


def unpack(data: bytes, encoding: str, most: int) -> bytes:
    """Return `data` without `encoding`: "gzip", "deflate", "br", "zstd", "bzip2" or "xz"; of several members, all.

    Raises:
        ValueError: it is cut short or damaged, or holds more than `most` bytes.
    """
    if encoding in ("br", "zstd"):
        return _unpack_at_once(data, encoding, most)
    make = {"gzip": lambda: zlib.decompressobj(31), "deflate": zlib.decompressobj, "bzip2": DECODERS["bz2"]}
    unpacked, rest, is_whole = b"", data, False
    try:
        while rest and len(unpacked) <= most:
            decoder = make.get(encoding, DECODERS["lzma"])()
            unpacked += decoder.decompress(rest, most + 1 - len(unpacked))
            is_whole = decoder.eof
            rest = decoder.unused_data.lstrip(b"\0") if is_whole else b""  # tools pad with zeros
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise ValueError(f"DATA_LOSS: {encoding}: {error}") from None
    if len(unpacked) > most or not is_whole:
        raise ValueError(f"DATA_LOSS: {encoding}: cut short, or it unpacks to more than {most} bytes")
    return unpacked


def _unpack_at_once(data: bytes, encoding: str, most: int) -> bytes:
    import imagecodecs

    decode = imagecodecs.brotli_decode if encoding == "br" else imagecodecs.zstd_decode
    try:
        return bytes(decode(data, out=most))
    except (imagecodecs.BrotliError, imagecodecs.ZstdError) as error:
        raise ValueError(f"DATA_LOSS: {encoding}: {error}; it may hold at most {most} bytes") from None


def undo(data: bytes, encodings: Sequence[str], most: int, own: str = "") -> bytes:
    """Return `data` as it was before `encodings` were put on it, the last one last.

    Where `data` is not in an encoding, whoever says so is wrong, and it is left out. `own` is the encoding that `data`
    had before: where it would be undone as well, it was the only one.

    Raises:
        ValueError: it is damaged, or holds more than `most` bytes.
    """
    for encoding in reversed(encodings):
        if not data.startswith(MAGIC.get(encoding, b"")):
            continue
        content = unpack(data, encoding, most)
        if encoding == own and not content.startswith(MAGIC[own]):
            return data
        data = content
    return data


def pack(data: bytes, encoding: str) -> bytes:
    """Return `data` in one member of "gzip", "bzip2" or "zstd", fast rather than small."""
    if encoding == "zstd":
        import imagecodecs

        return bytes(imagecodecs.zstd_encode(data, 1))
    return bz2.compress(data, 1) if encoding == "bzip2" else gzip.compress(data, 1, mtime=0)


def check_xz(text: bytes, chunk_bytes: int) -> None:
    """Raise where `text` is no whole xz streams of a chunk: some that are damaged end the process in tensorstore.

    Raises:
        ChunkError: it is damaged, cut short, followed by something, or unpacks to more than `chunk_bytes`.
    """
    decoder, size = DECODERS["lzma"](), 0
    try:
        size = len(decoder.decompress(text, chunk_bytes + 1))
        while decoder.eof and decoder.unused_data.startswith(MAGIC["xz"]) and size <= chunk_bytes:
            text, decoder = decoder.unused_data, DECODERS["lzma"]()
            size += len(decoder.decompress(text, chunk_bytes + 1 - size))
    except (lzma.LZMAError, EOFError) as error:
        raise ChunkError(f"xz: {error}") from error
    if size > chunk_bytes:
        raise ChunkError(f"xz: it unpacks to more than the {chunk_bytes} bytes of a chunk")
    if not decoder.eof and size < chunk_bytes:
        raise ChunkError("xz: it is cut short")
    if decoder.eof and decoder.unused_data:
        raise ChunkError(f"xz: {len(decoder.unused_data)} bytes follow its end")


def _zstd(text: bytes, limit: int) -> int:
    try:
        return len(_unpack_at_once(text, "zstd", limit))
    except ValueError as error:  # it says alike that it is damaged and that it is too large
        raise ChunkError(str(error).removeprefix("DATA_LOSS: ")) from error


def _blosc(text: bytes) -> int:
    """Return the size of a blosc chunk unpacked; one that is cut short makes the library read past its end."""
    stored = int.from_bytes(text[12:16], "little")
    if len(text) < 16 or stored != len(text):
        raise ChunkError(f"blosc: it has {len(text)} bytes and says {stored}")
    return int.from_bytes(text[4:8], "little")


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
        if text.startswith((JXL, JXL_BOXES)):
            return _jxl(text)
        place = text[:J2K_SEARCHED_BYTES].find(J2K)
        if place == 0 or (place > 0 and text[4:8] == b"jP  "):
            return _j2k(text, place)
    except struct.error:  # cut short: the decoder says so
        return 0
    return None


def _jpeg(text: bytes) -> int:
    """Return the values of the largest frame."""
    most = 0
    for match in re.finditer(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]", text):
        if match.end() + 8 <= len(text):
            height, width, samples = struct.unpack_from(">HHB", text, match.end() + 3)
            is_frame = struct.unpack_from(">H", text, match.end())[0] == 8 + 3 * samples
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


class _Bits:
    """The bits of `text`, the lowest of each byte first; zeros behind its end."""

    def __init__(self, text: bytes) -> None:
        self._number, self._place = int.from_bytes(text, "little"), 0

    def take(self, count: int) -> int:
        self._place += count
        return (self._number >> self._place - count) & ((1 << count) - 1)

    def choice(self, cases: Sequence[tuple[int, int]]) -> int:
        """Return a number that two bits say the least value, and the number of bits, of."""
        least, count = cases[self.take(2)]
        return least + self.take(count)


def _jxl(text: bytes) -> int:
    """Return the values with all extra channels; SEVERAL_PICTURES of an animation, or where there is a preview."""
    bits = _Bits(_jxl_codestream(text)[len(JXL) : len(JXL) + 64])
    is_small = bits.take(1)
    height = (bits.take(5) + 1) * 8 if is_small else bits.choice(JXL_LENGTHS)
    ratio = bits.take(3)
    if ratio:
        above, below = JXL_RATIOS[ratio - 1]
        width = height * above // below
    else:
        width = (bits.take(5) + 1) * 8 if is_small else bits.choice(JXL_LENGTHS)
    if bits.take(1):  # all other fields are the usual ones
        return height * width * 3
    if bits.take(1):
        bits.take(3)  # orientation
        if bits.take(3):  # an intrinsic size, a preview, an animation
            return SEVERAL_PICTURES
    if bits.take(1):  # floats
        bits.choice(((32, 0), (16, 0), (24, 0), (1, 6)))
        bits.take(4)
    else:
        bits.choice(((8, 0), (10, 0), (12, 0), (1, 6)))
    bits.take(1)  # whether 16 bits are enough for it
    return height * width * (3 + bits.choice(((0, 0), (1, 0), (2, 4), (1, 12))))


def _jxl_codestream(text: bytes) -> bytes:
    """Return `text` from where the codestream in it begins, b"" where none does."""
    place = 0 if text.startswith(JXL) else len(text)
    at = len(JXL_BOXES) if place else 0
    for _ in range(MOST_BOXES if place else 0):
        length, kind = int.from_bytes(text[at : at + 4], "big"), text[at + 4 : at + 8]
        inner = at + (16 if length == 1 else 8)
        length = int.from_bytes(text[at + 8 : at + 16], "big") if length == 1 else length
        if kind in (b"jxlc", b"jxlp"):
            place = inner + (4 if kind == b"jxlp" else 0)
            break
        if length < 8:
            break
        at += length
    return text[place:]
