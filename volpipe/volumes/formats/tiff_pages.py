"""Pages: the strips and tiles that a box touches, read, decoded and put in their place.

Not here: which pages make up an array and how they are decoded (tiff, picture). Pages that are not compressed are read
row by row (flat).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Grid, cells, ravel
from volpipe.geometry.indexing import bounds, ranges
from volpipe.volumes.formats.flat import FlatArray, RawFile
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.metadata import voxel_dtype
from volpipe.volumes.storage.tensorstore import Index

MOST_GROWTH = 4  # a picture may have colours, or fill a tile up, that are then cut off
OPEN_FILES = 16  # of one array; an OME-TIFF may be spread over many


@dataclass(frozen=True)
class Decoder:
    """How the bytes of a page become voxels.

    Attributes:
        segment: shape of a strip or tile (samples, depth, length, width, samples).
        stored: type of the voxels, in the file's byte order.
        plain: whether a page whose strips lie one after another can be read without decoding.
        decode: tifffile's, of a strip or tile.
        jpegheader: for `decode`.
    """

    segment: tuple[int, ...]
    stored: np.dtype
    plain: bool
    decode: Callable[..., Any]  # Any: tifffile's signature differs by codec
    jpegheader: bytes | None = None


@dataclass(frozen=True)
class StoredPage:
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

    def __init__(self, pages: list[StoredPage], layout: Layout, cache_bytes: int) -> None:
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
            return run.read(box.slices).reshape(shape)
        return self._read_segments(number, box).reshape(shape)

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


def _decode(
    pages: list[StoredPage], open_file: Callable[[Path], RawFile], page_number: int, number: int
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


def _checked(data: np.ndarray, page: StoredPage, number: int) -> np.ndarray:
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
