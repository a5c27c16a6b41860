"""Pages: the strips and tiles that a box touches, read, decoded and put in their place; and the directories of TIFF.

Not here: which pages make up an array and how they are decoded (tiff, picture). Pages that are not compressed are read
row by row (flat).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Grid, cells, ravel
from volpipe.geometry.indexing import bounds, ranges
from volpipe.volumes.formats.flat import FlatArray, RawFile, check_end
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.metadata import voxel_dtype
from volpipe.volumes.storage.tensorstore import Index

MOST_GROWTH = 4  # a picture may have colours, or fill a tile up, that are then cut off
OPEN_FILES = 16  # of one array; an OME-TIFF may be spread over many


PLACES = (273, 279, 324, 325)  # StripOffsets, StripByteCounts, TileOffsets, TileByteCounts
PROBED_BYTES = 512  # most pages' tags are in them
TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q"}  # BYTE, SHORT, LONG …, by TIFF's numbers
SIZES = {kind: struct.calcsize(form) for kind, form in TYPES.items()}
MAX_PAGES = 10_000_000
MAX_SAMPLES = 1024  # of which a tag may speak one by one
WIDTH, LENGTH, ROWS_PER_STRIP = 256, 257, 278
CODING = {  # tags by which a page's bytes become voxels, and what a page without one means (TIFF 6.0)
    WIDTH: (), LENGTH: (),
    258: (1,),  # BitsPerSample
    259: (1,),  # Compression
    262: (1,),  # PhotometricInterpretation
    266: (1,),  # FillOrder
    277: (1,),  # SamplesPerPixel
    ROWS_PER_STRIP: (), 284: (1,),  # PlanarConfiguration
    292: (0,), 293: (0,),  # T4Options, T6Options
    317: (1,),  # Predictor
    322: (), 323: (),  # TileWidth, TileLength
    338: (),  # ExtraSamples
    339: (1,),  # SampleFormat
    530: (2, 2),  # YCbCrSubSampling
    32997: (1,), 32998: (1,),  # ImageDepth, TileDepth
}  # fmt: skip
Coding = tuple[object, ...]  # a value that is the same for pages whose bytes become voxels alike


class Directories:
    """The directories (IFDs) of the pages of a TIFF file, read without tifffile: it looks at each page's places alone.

    Attributes:
        file: where they are.
        codings: of the pages that were looked at, by the offset of their directory.
    """

    def __init__(self, file: Path) -> None:
        self.codings: dict[int, Coding] = {}
        self.file = file
        self._size = file.stat().st_size
        self._raw = RawFile(file)
        start = self._raw.read(0, min(16, self._size))
        self._order = "<" if start[:2] == b"II" else ">"
        big = start[2:4] in (b"+\0", b"\0+")
        if self._size < (16 if big else 8):
            raise VolumeError(f"{file} has {self._size} bytes: it is cut short; copy it again")
        forms = ("Q", "Q", "HHQQ") if big else ("I", "H", "HHII")
        self._number, self._counter, self._tag = (struct.Struct(self._order + form) for form in forms)
        self._first = int(self._number.unpack(start[self._number.size : 2 * self._number.size])[0])
        self._known: dict[
            tuple[tuple[int, int, int, int | bytes], ...], Coding
        ] = {}  # by tags: of 10^5 pages few differ

    def check_chain(self) -> None:
        """Raise if the chain of pages leaves the file; tifffile would take the rest for the whole."""
        offset = self._first
        while offset:
            if offset in self.codings or len(self.codings) >= MAX_PAGES:
                raise VolumeError(f"{self.file} has more than {MAX_PAGES} pages, or they go in circles; it is damaged")
            offset = self._look_at(offset)

    def coding(self, offset: int) -> Coding:
        """Return what decides how the bytes of the page whose directory is at `offset` become voxels."""
        if offset not in self.codings:
            self._look_at(offset)
        return self.codings[offset]

    def _look_at(self, offset: int) -> int:
        """Keep the coding of the page at `offset`, and return the offset of the next page, 0 after the last."""
        self._check_end(offset + self._counter.size)
        text = self._raw.read(offset, min(PROBED_BYTES, self._size - offset))
        (count,) = self._counter.unpack_from(text)
        end = self._counter.size + count * self._tag.size
        if end + self._number.size > len(text):
            self._check_end(offset + end + self._number.size)
            text = self._raw.read(offset, end + self._number.size)
        tags = list(self._tag.iter_unpack(text[self._counter.size : end]))
        # Where the numbers end that say where the voxels are.
        placed = ((num * SIZES.get(kind, 0), at) for code, kind, num, at in tags if code in PLACES)
        self._check_end(max((at + size for size, at in placed if size > self._number.size), default=0))
        coding = tuple([(*tag[:3], self._content(offset, text, *tag[1:])) for tag in tags if tag[0] in CODING])
        if coding not in self._known:
            self._known[coding] = (self._order, *_normal({tag[0]: self._numbers(*tag[1:]) for tag in coding}))
        self.codings[offset] = self._known[coding]
        return int(self._number.unpack_from(text, end)[0])

    def _content(self, offset: int, text: bytes, kind: int, num: int, at: int) -> int | bytes:
        """Return what a tag of the directory `text` at `offset` holds: its own bytes, or those that it leads to."""
        size = num * SIZES.get(kind, 0)
        if size <= self._number.size or num > MAX_SAMPLES:
            return at
        self._check_end(at + size)
        is_near = offset <= at and at + size <= offset + len(text)
        return text[at - offset :][:size] if is_near else self._raw.read(at, size)

    def _numbers(self, kind: int, num: int, content: int | bytes) -> tuple[int, ...]:
        """Return the numbers of a tag; () of what are none."""
        data = self._number.pack(content) if isinstance(content, int) else content
        size = num * SIZES.get(kind, 0)
        return struct.unpack(f"{self._order}{num}{TYPES[kind]}", data[:size]) if 0 < size <= len(data) else ()

    def _check_end(self, end: int) -> None:
        """Raise where the file ends before `end`; its size is asked for once."""
        if end > self._size:
            check_end(self.file, end)


def _normal(coding: dict[int, tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the values of all CODING tags; what means the same is the same."""
    for code, usual in CODING.items():
        values = coding.get(code, usual)
        if code == ROWS_PER_STRIP:
            rows = coding.get(LENGTH, ())
            yield min(values or rows, rows)  # more rows than there are mean one strip
        else:
            yield values[:1] if len(set(values)) == 1 and code != 338 else values


@dataclass(frozen=True)
class Decoder:
    """How the bytes of a page become voxels.

    Attributes:
        segment: shape of a strip or tile (samples, depth, length, width, samples).
        stored: type of the voxels, in the file's byte order.
        plain: whether a page whose strips lie one after another can be read without decoding.
        decode: tifffile's, of a strip or tile.
        jpegheader: for `decode`.
        white: the value that is read as 0, and 0 as it; None where values are read as they are.
    """

    segment: tuple[int, ...]
    stored: np.dtype
    plain: bool
    decode: Callable[..., Any]  # Any: tifffile's signature differs by codec
    jpegheader: bytes | None = None
    white: int | None = None


@dataclass(frozen=True)
class Page:
    """Where the strips or tiles of a page lie, and how they are decoded."""

    file: Path
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    jpegtables: bytes | None
    decoder: Decoder

    @property
    def is_one_run(self) -> bool:
        places = zip(self.offsets[1:], self.offsets, self.counts, strict=False)
        return all(following == offset + count for following, offset, count in places)


@dataclass(frozen=True)
class Layout:
    """How the pages of a series make up its array.

    Attributes:
        shape: of the series.
        num_outer: axes of the series before those of a page.
        page: shape of a page (samples, depth, length, width, samples); one of the two samples is 1.
        decoder: of most of the pages.
    """

    shape: tuple[int, ...]
    num_outer: int
    page: tuple[int, ...]
    decoder: Decoder

    def page_box(self, index: Index) -> Box:
        """Return the box of a page around `index`, an index of the page's axes in the series."""
        sizes = self.shape[self.num_outer :]
        around = bounds(index, sizes)
        long = iter(span for *span, n in zip(around.start, around.stop, sizes, strict=True) if n > 1)
        full = [next(long) if n > 1 else (0, 1) for n in self.page]
        return Box(tuple(a for a, _ in full), tuple(b for _, b in full))


class PagedArray:
    """An array of pages, compressed or not, that several threads may read."""

    def __init__(self, pages: list[Page], layout: Layout, cache_bytes: int) -> None:
        self._pages = pages
        self._layout = layout
        self._dtype = voxel_dtype(layout.decoder.stored, "a page")
        self._open = lru_cache(maxsize=OPEN_FILES)(RawFile)
        largest = max(math.prod(decoder.segment) for decoder in {id(p.decoder): p.decoder for p in pages}.values())
        most = cache_bytes // (largest * self._dtype.itemsize)
        # no method of self: a cycle would keep the files open until the collector comes by
        self._segment = lru_cache(maxsize=most)(partial(_decode, pages, self._open))

    def read(self, index: Index) -> np.ndarray:
        """Return the voxels at `index`, in native byte order; page by page."""
        at = self._layout.num_outer
        counts, sizes = self._layout.shape[:at], self._layout.shape[at:]
        numbers = np.arange(math.prod(counts)).reshape(counts)[index[:at]]
        box = self._layout.page_box(index[at:])
        positions = zip(ranges(index[at:], sizes), index[at:], strict=True)
        shape = [len(along) for along, i in positions if not isinstance(i, int)]
        out = np.empty((*np.shape(numbers), *shape), self._dtype)
        if out.size:
            within = tuple(0 if isinstance(i, int) else slice(None, None, i.step) for i in index[at:])
            for place in np.ndindex(np.shape(numbers)):
                out[place] = self._read_page(int(numbers[place]), box)[within]
        return out

    def _read_page(self, number: int, box: Box) -> np.ndarray:
        """Return the voxels of a page's `box`, with the axes that the series has of it."""
        layout, page = self._layout, self._pages[number]
        long = iter(length for length, n in zip(box.shape, layout.page, strict=True) if n > 1)
        shape = [next(long) if n > 1 else 1 for n in layout.shape[layout.num_outer :]]
        if page.decoder.plain and page.is_one_run:
            run = FlatArray(self._open(page.file), page.offsets[0], page.decoder.stored, layout.page)
            data = run.read(box.slices).reshape(shape)
        else:
            data = self._read_segments(number, box).reshape(shape)
        return inverted(data, page.decoder.white)

    def _read_segments(self, page: int, box: Box) -> np.ndarray:
        """Return the voxels of a page's `box`, (samples, depth, length, width, samples); omitted segments are 0."""
        segment = self._pages[page].decoder.segment
        out = np.zeros(box.shape, self._dtype)
        counts = Grid(self._layout.page, segment).counts
        for index in cells(box, segment):
            data = self._segment(page, ravel(index[:4], counts[:4]))
            if data is not None:
                _paste(out, box, data, [i * s for i, s in zip(index, segment, strict=True)])
        return out


class InvertedArray:
    """An array of which `white` is read as 0, and 0 as `white`."""

    def __init__(self, array: FlatArray, white: int) -> None:
        self._array = array
        self._white = white

    def read(self, index: Index) -> np.ndarray:
        return inverted(self._array.read(index), self._white)


def inverted(data: np.ndarray, white: int | None) -> np.ndarray:
    """Return `data`, integers from 0 to `white`, with black and white the other way round; as it is for None."""
    return data if white is None else data.dtype.type(white) - data


def _decode(
    pages: list[Page], open_file: Callable[[Path], RawFile], page_number: int, number: int
) -> np.ndarray | None:
    """Return one strip or tile (1, depth, length, width, samples), None where the file leaves it out."""
    page = pages[page_number]
    decoder, size = page.decoder, math.prod(page.decoder.segment)
    if not page.counts[number]:
        return None
    text = open_file(page.file).read(page.offsets[number], page.counts[number])
    values = decoded_size.count_values(text)
    if values is not None and values > MOST_GROWTH * size:
        raise VolumeError(
            f"{page.file}: the strip or tile at byte {page.offsets[number]} unpacks to {values} values and has "
            f"{size}: it is damaged"
        )
    try:
        data, _, _ = decoder.decode(text, number, jpegtables=page.jpegtables, jpegheader=decoder.jpegheader)
    except VolumeError:
        raise
    except Exception as error:  # each codec has errors of its own
        raise VolumeError(f"{page.file}: the strip or tile at byte {page.offsets[number]}: {error}") from error
    return None if data is None else _checked(np.asarray(data), page, number)[np.newaxis]


def _checked(data: np.ndarray, page: Page, number: int) -> np.ndarray:
    """Return `data`, a strip or tile; raise where a picture in it has other voxels than the page says."""
    stored = page.decoder.stored.newbyteorder("=")
    is_bilevel = stored.kind == "b" and (data.dtype.kind == "b" or not (data > 1).any())
    if data.dtype != stored and not is_bilevel:
        raise VolumeError(
            f"{page.file}: the strip or tile at byte {page.offsets[number]} holds {data.dtype} instead of {stored}"
        )
    return data


def _paste(out: np.ndarray, box: Box, data: np.ndarray, corner: list[int]) -> None:
    """Copy the part of `data`, at `corner` of the page, inside `box` to `out`, the array of that box."""
    into, part = [], []
    for start, stop, n, a in zip(box.start, box.stop, data.shape, corner, strict=True):
        low, high = max(start, a), min(stop, a + n)
        into.append(slice(low - start, high - start))
        part.append(slice(low - a, high - a))
    out[tuple(into)] = data[tuple(part)]
