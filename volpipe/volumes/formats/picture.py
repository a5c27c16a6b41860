"""PNG and JPEG: a slice each, decoded whole.

Not here: folders of them (tiff_folder), or how a decoded picture is cut to a box (tiff_pages). A picture whose colours
are equal in each pixel, and opaque, is grey; one with a palette is the numbers of its colours. Sources: RFC 2083 (PNG),
ITU T.81, annex B (JPEG).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import COLOUR_CHANNELS, palette_notes
from volpipe.volumes.formats.flat import num_bytes
from volpipe.volumes.formats.format import Format, ReadRow, one_array
from volpipe.volumes.formats.tiff_pages import Decoder, Layout, PagedArray, StoredPage
from volpipe.volumes.storage.decoded_size import PNG
from volpipe.volumes.storage.memory import check_memory
from volpipe.volumes.storage.metadata import Header, Place, voxels
from volpipe.volumes.storage.paths import check_links

JPEG = b"\xff\xd8\xff"
MAGICS = (PNG, JPEG)
PNG_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
GREY_TYPE, PALETTE_TYPE = 0, 3  # of these
MAX_PALETTE = 768  # bytes
TYPE_BYTE = 25  # of a PNG: its colour type
COLOURED = (3, 4)  # numbers of samples of which the first are red, green and blue
FRAMES = range(0xC0, 0xD0)  # markers of JPEG that begin a frame, but for
NO_FRAMES = (0xC4, 0xC8, 0xCC)
HUFFMAN = (0xC0, 0xC1, 0xC2)  # the frames that decoders read
OPAQUE = (2, 4)  # numbers of samples of which the last is how opaque a pixel is


def read_header(file: Path) -> Header:
    """Return the header of the picture in `file`, by its first bytes: colours are channels.

    Raises:
        VolumeError: it is damaged, or of a kind that is not read.
    """
    try:
        with file.open("rb") as stream:
            is_png = stream.read(len(PNG)) == PNG
            height, width, samples, bits, palette = _png(stream) if is_png else _jpeg(stream, file)
    except (struct.error, KeyError) as error:
        raise VolumeError(f"{file} is no whole PNG or JPEG: it is damaged or cut short; copy it again") from error
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror or error}") from error
    shape = voxels((height, width, samples)[: 3 if samples > 1 else 2], "shape", file)
    dtype = np.dtype(np.uint16 if bits == 16 else np.uint8)
    check_memory(num_bytes(shape, dtype), f"{file}: a picture of {shape}")
    is_indexed, table_notes = palette is not None, () if palette is None else palette_notes(palette)
    notes = [] if is_png else ["JPEG is lossy: the voxels are not quite those that were taken"]
    notes += [*table_notes]
    notes += [f"grey values of {bits} bits are scaled to 0 to 255"] if bits < 8 and not is_indexed else []
    notes += [COLOUR_CHANNELS] if samples in COLOURED else []
    return Header(
        folder=file,
        format="picture",
        shape=shape,
        dtype=dtype,
        chunks=shape,
        codec="png" if is_png else "jpeg",
        axes=("y", "x", "c")[: len(shape)],
        known={
            "file": file,
            "samples": samples,
            "colours": "palette" if table_notes else "grey" if samples == 1 else "colours",
            "palette": palette or b"",
        },
        notes=tuple(notes),
        unsupported="a picture",
        place=Place(),
    )


def has_equal_colours(header: Header, files: Iterable[Path]) -> bool:
    """Return whether the pictures in `files`, of this `header`, have colours, the same and opaque in each pixel."""
    return header.known["samples"] > 1 and all(_is_grey(_decode(file.read_bytes(), file)) for file in files)


def read_as_grey(file: Path) -> Header:
    """Return the header of the picture in `file`, without colours that are equal."""
    header = read_header(file)
    return without_colours(header) if has_equal_colours(header, [file]) else header


def without_colours(header: Header) -> Header:
    """Return the `header` of a picture whose colours are equal as one of grey values."""
    return replace(
        header,
        shape=header.shape[:2],
        chunks=header.chunks[:2],
        axes=("y", "x"),
        notes=(
            *(note for note in header.notes if note != COLOUR_CHANNELS),
            "the colours of each pixel are equal: they are read as one grey value",
        ),
    )


def open_array(header: Header, cache_bytes: int) -> PagedArray:
    """Return the array of `header`; a decoded picture is kept in memory where `cache_bytes` allow."""
    file, samples = header.known["file"], header.known["samples"]
    is_reduced = samples > 1 and len(header.shape) == 2
    page = (1, 1, *header.shape[:2], 1 if is_reduced else samples)

    def decode(text: bytes, *_: object, **__: object) -> tuple[np.ndarray, None, None]:
        data = _decode(text, file)
        if is_reduced and not _is_grey(data):
            raise VolumeError(
                f"{file} has colours, and others of its folder, which were looked at, have none; save all as grey "
                "values, or all with the colours that they have"
            )
        return (data[..., :1] if is_reduced else data).reshape(page[1:]), None, None

    decoder = Decoder(page, header.dtype, plain=False, decode=decode)
    pages = [StoredPage(file, (0,), (file.stat().st_size,), None, decoder)]
    return PagedArray(pages, Layout(header.shape, 0, page, decoder), cache_bytes)


def _decode(text: bytes, file: Path) -> np.ndarray:
    """Return the picture in `text`, (y, x) or (y, x, samples)."""
    import imagecodecs

    is_png = text.startswith(PNG)
    if not is_png and not text.rstrip(b"\0").endswith(b"\xff\xd9"):  # the decoder would fill it up with grey
        raise VolumeError(f"{file} has {len(text)} bytes and no end of a JPEG: it is cut short; copy it again")
    is_indexed = is_png and text[TYPE_BYTE] == PALETTE_TYPE
    try:
        if is_indexed:
            scale = 255 // (2 ** text[TYPE_BYTE - 1] - 1)
            return np.asarray(imagecodecs.png_decode(_without_palette(text))) // np.uint8(scale)
        return np.asarray(imagecodecs.png_decode(text) if is_png else imagecodecs.jpeg8_decode(text))
    except (RuntimeError, ValueError) as error:  # imagecodecs' own, and messages of libpng that are no UTF-8
        raise VolumeError(f"{file}: {error}; it is damaged or cut short") from error


def _without_palette(text: bytes) -> bytes:
    """Return a PNG whose grey values are the numbers of the palette of `text`, scaled to 255 where they have few bits.

    Decoders return the colours of a palette. Its numbers are stored as grey values are (RFC 2083, section 4.1.1).
    """
    parts, at = [PNG], len(PNG)
    while at + 8 <= len(text):
        size, name = struct.unpack(">I4s", text[at : at + 8])
        if name == b"IHDR":
            old, check = text[at + 4 : at + 8 + size], text[at + 8 + size : at + 12 + size]
            new = old[: TYPE_BYTE - at - 4] + bytes([GREY_TYPE]) + old[TYPE_BYTE - at - 3 :]
            is_whole = check == struct.pack(">I", zlib.crc32(old))
            parts += [text[at : at + 4], new, struct.pack(">I", zlib.crc32(new)) if is_whole else check]
        elif name in (b"IDAT", b"IEND"):
            parts.append(text[at : at + 12 + size])
        at += 12 + size
    return b"".join(parts)


def _is_grey(data: np.ndarray) -> bool:
    """Return whether the colours of each pixel of `data`, (y, x, samples), are equal and opaque."""
    has_opacity = data.shape[2] in OPAQUE
    colours = data[..., :-1] if has_opacity else data
    is_opaque = not has_opacity or bool((data[..., -1] == np.iinfo(data.dtype).max).all())
    return is_opaque and bool((colours[..., 1:] == colours[..., :1]).all())


def _png(stream: BinaryIO) -> tuple[int, int, int, int, bytes | None]:
    """Return height, width, samples, bits and palette, None without one; a transparent colour adds a sample to grey."""
    _, _, width, height, bits, colours = struct.unpack(">I4sIIBB", stream.read(18))
    stream.seek(7, 1)
    samples, palette = PNG_SAMPLES[colours], b"" if colours == PALETTE_TYPE else None
    while True:
        size, name = struct.unpack(">I4s", stream.read(8))
        if name == b"IDAT":
            return height, width, samples, bits, palette
        if name == b"PLTE" and palette is not None and size <= MAX_PALETTE:
            palette = stream.read(size)
            stream.seek(-size, 1)
        samples += name == b"tRNS" and palette is None
        stream.seek(size + 4, 1)


def _jpeg(stream: BinaryIO, file: Path) -> tuple[int, int, int, int, None]:
    """Return height, width, samples and bits of the first frame, and that it has no palette."""
    stream.seek(2)
    while True:
        mark, marker = struct.unpack(">BB", stream.read(2))
        while marker == 0xFF:
            (marker,) = stream.read(1) or b"\0"
        if mark != 0xFF or marker in (0xD9, 0xDA, 0):
            raise KeyError(marker)
        (size,) = struct.unpack(">H", stream.read(2))
        if marker in FRAMES and marker not in NO_FRAMES:
            bits, height, width, samples = struct.unpack(">BHHB", stream.read(6))
            if bits != 8 or samples not in (1, 3) or marker not in HUFFMAN:
                raise VolumeError(
                    f"{file} is a JPEG of {bits} bits and {samples} colours in process {marker - FRAMES[0]}; volpipe "
                    "reads 8 bits, grey or three colours; save it as PNG or TIFF"
                )
            return height, width, samples, bits, None
        stream.seek(size - 2, 1)


PICTURE = Format(
    name="picture",
    title="PNG, JPEG",
    row=ReadRow(
        "PNG, JPEG",
        "one slice a file, 8 and 16 bits; equal colours are read as grey, others are channels, palettes are their "
        "numbers",
        "–",
    ),
    suffixes=(".png", ".jpg", ".jpeg"),
    magics=tuple((0, magic) for magic in MAGICS),
    files=one_array(read_as_grey, open_array),
)
