"""TIFF: stacks, BigTIFF, ImageJ hyperstacks, OME-TIFF with levels, tiles, of either byte order, read where they lie.

Not here: folders of slices (tiff_folder), axes and voxel sizes (tiff_tags), strips and tiles (tiff_pages). tifffile
finds the pages and undoes their compression; which bytes are read is decided here and in `pages`.

A series of pages is an array whose last axes are the page's, where those of length one may be left out::

    series (t, z, c, y, x)  =  pages (t, z, c) of (samples, depth, length, width, samples), here (1, 1, y, x, 1)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.formats import tiff_tags
from volpipe.volumes.formats.flat import FlatArray, Part, RawFile, check_end, num_bytes
from volpipe.volumes.formats.ome import Dataset
from volpipe.volumes.formats.tiff_pages import Coding, Decoder, Directories, InvertedArray, Layout, Page, PagedArray
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.memory import check_memory
from volpipe.volumes.storage.metadata import ArraySpec, Facts, Header, Place, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_beside

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFrame, TiffPage, TiffPageSeries

MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_SERIES = 10_000_000
STACKED = {"generic", "shaped", "uniform"}  # kinds of series that may be parts of one stack
CLASSIC_BYTES = 2**32 - 2**26  # beyond it offsets of 32 bits do not reach the pages' tags
IMAGEJ_DTYPES = ("uint8", "uint16", "float32")
OME_DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64")
COMPRESSION = {"raw": None, "gzip": "zlib", "zstd": "zstd"}
FACTS = Facts(
    "TIFF, BigTIFF, OME-TIFF with levels",
    "stacks, ImageJ hyperstacks, strips and tiles, compressed or not",
    "ImageJ (also `yunit`, `zunit`), OME",
    "keeps no origin",
)


def read_header(file: Path, key: str) -> Header | None:
    """Return the header of the series, or the level of one, that `key` names; None where it names several.

    A file with one series has it at "", one with more at "0", "1" …; the levels of a series are s0, s1 … in it.

    Raises:
        VolumeError: the file is damaged or cut short, or holds what volpipe cannot read.
    """
    with _opened(file) as stack:
        image = stack.find(key)
        if image is None or (image.level is None and len(image.series.levels) > 1):
            return None
        return _header(key, stack, image)


def read_datasets(file: Path, key: str) -> tuple[Dataset, ...] | None:
    """Return the levels of the series `key`, finest first; None where it has no coarser ones."""
    with _opened(file) as stack:
        image = stack.find(key)
        if image is None or image.level is not None or len(image.series.levels) < 2:
            return None
        axes = tiff_tags.axes(image.series, file)
        where = tiff_tags.read_place(stack.tif, image.series, image.number, axes)
        return tuple(
            Dataset(f"s{i}", axes, tiff_tags.coarser(where, axes, image.series, i))
            for i in range(len(image.series.levels))
        )


def walk(file: Path, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys of all series, or of all their levels."""
    with _opened(file) as stack:
        levels = [1] if stack.joined else [len(series.levels) for series in stack.tif.series]
    for number, count in enumerate(levels):
        key = str(number) if len(levels) > 1 else ""
        yield from (f"{key}/s{i}".strip("/") for i in range(count)) if enter_groups and count > 1 else (key,)


def why_several(file: Path) -> str:
    """Return which page is why the pages of `file` are no single stack, "" where it was written as several images."""
    with _opened(file) as stack:
        series = stack.tif.series
        if {one.kind for one in series} - STACKED:
            return ""
        keyframe = series[0].keyframe
        other = next((one.keyframe for one in series if _kind(one.keyframe) != _kind(keyframe)), keyframe)
        return "" if other is keyframe else _unlike(other.index, other, keyframe)


def exists(file: Path, key: str) -> bool:
    with _opened(file) as stack:
        return not key or stack.find(key) is not None


def open_array(header: Header, cache_bytes: int = 0) -> FlatArray | InvertedArray | PagedArray:
    """Return the array of `header`; `cache_bytes` of decoded strips and tiles are kept in memory."""
    with _opened(header.known["file"], is_alike=header.known["is_alike"]) as stack:
        series = stack.series(header.known["key"])
        layout = _layout(series, stack.file)
        if header.known["is_uniform"] and _is_flat(series, stack.file) and series.dataoffset is not None:
            array = FlatArray(RawFile(stack.file), series.dataoffset, layout.decoder.stored, header.shape)
            return array if layout.decoder.white is None else InvertedArray(array, layout.decoder.white)
        return PagedArray(_pages(stack, series, header.known["is_uniform"]), layout, cache_bytes)


def is_alone(header: Header) -> bool:
    """Return whether all voxels of `header` lie in its own file."""
    with _opened(header.known["file"], is_alike=header.known["is_alike"]) as stack:
        return _files(stack.series(header.known["key"])) == {str(stack.file.resolve())}


@dataclass(frozen=True)
class _Image:
    """A series of a file, its number there, and the level of it that is meant, if one is."""

    series: TiffPageSeries
    number: int
    level: int | None = None


@dataclass(frozen=True)
class _Stack:
    """An open file.

    Attributes:
        file: where it is.
        tif: tifffile's object.
        is_alike: whether the bytes of all pages in its chain become voxels alike.
        directories: of its pages, and of those in other files of its set; paths are without links.
        joined: one series of all pages, where the file has them as single images alike; None of other files.
    """

    file: Path
    tif: TiffFile
    is_alike: bool
    directories: dict[TiffFile, Directories]
    joined: TiffPageSeries | None

    def find(self, key: str) -> _Image | None:
        """Return the series that `key` names, None where it names none or several."""
        if self.joined is not None and not key:
            return _Image(self.joined, 0)
        if len(self.tif.series) > 1:
            match = re.fullmatch(r"(\d{1,6})(?:/s(\d{1,3}))?", key)
            number, level = (int(match[1]), match[2]) if match else (MAX_SERIES, None)
        else:
            match = re.fullmatch(r"(?:s(\d{1,3}))?", key)
            number, level = (0, match[1]) if match else (MAX_SERIES, None)
        if number >= len(self.tif.series):
            return None
        count = len(self.tif.series[number].levels)
        if level is not None and (count < 2 or int(level) >= count):
            return None
        return _Image(self.tif.series[number], number, None if level is None else int(level))

    def series(self, key: str) -> TiffPageSeries:
        """Return the series, or the level of one, at `key`."""
        image = self.find(key)
        if image is None:
            raise VolumeError(f"{self.file} has no image {key!r} any more; open it again")
        return image.series.levels[image.level or 0]

    def directories_of(self, page: TiffPage | TiffFrame) -> Directories:
        """Return the directories of the file in which `page` is."""
        if page.parent not in self.directories:
            self.directories[page.parent] = Directories(Path(page.parent.filehandle.path))
        return self.directories[page.parent]

    def coding(self, page: TiffPage | TiffFrame) -> Coding:
        """Return what decides how the bytes of `page` become voxels."""
        return self.directories_of(page).coding(page.offset)


@contextmanager
def _opened(file: Path, *, is_alike: bool | None = None) -> Iterator[_Stack]:
    """Open a file; `is_alike` is what its `_Stack` said when its chain of pages was checked, None before."""
    from tifffile import TiffFile

    try:
        directories = Directories(file.resolve())
        if is_alike is None:
            directories.check_chain()
            is_alike = len(set(directories.codings.values())) < 2
        with TiffFile(file) as tif:
            if not is_alike:
                tif.is_uniform = False  # it looks at four pages alone
            yield _Stack(file, tif, is_alike, {tif: directories}, _join(tif))
    except VolumeError:
        raise
    except OSError as error:
        raise VolumeError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # tifffile lets through whatever damaged tags make Python raise
        raise VolumeError(f"{file} is damaged: {error}") from error


def _join(tif: TiffFile) -> TiffPageSeries | None:
    """Return one series of all pages of a file that has several of them, alike; None where they are not.

    tifffile makes a series of each page that was written with a description of its own, and of pages that are stored
    in one way.
    """
    from tifffile import TiffPageSeries

    series = tif.series
    if len(series) < 2 or {one.kind for one in series} - STACKED:
        return None
    pages = [page for one in series for page in one if page is not None and len(page.treeindex) == 1]
    if len(pages) < sum(map(len, series)) or any(one.keyframe.is_reduced for one in series):
        return None
    if any(len(one.levels) > 1 or (one.kind == "shaped" and len(one) > 1) for one in series):
        return None
    keyframe = series[0].keyframe
    if keyframe.axes not in ("YX", "YXS", "SYX") or any(_kind(one.keyframe) != _kind(keyframe) for one in series):
        return None
    pages.sort(key=lambda page: page.index)
    return TiffPageSeries(pages, (len(pages), *keyframe.shape), keyframe.dtype, f"I{keyframe.axes}", kind="joined")


def _header(key: str, stack: _Stack, image: _Image) -> Header:
    file, series = stack.file, image.series.levels[image.level or 0]
    shape = voxels(tuple(map(int, series.shape)), "shape", file)
    dtype = voxel_dtype(np.dtype(series.dtype), file)
    axes = tiff_tags.axes(series, file)
    is_uniform = _is_uniform(stack, series)
    pages = _check(stack, series, is_uniform)
    place = tiff_tags.read_place(stack.tif, image.series, image.number, axes)
    return Header(
        folder=file / key,
        format="tiff",
        shape=shape,
        dtype=dtype,
        chunks=_chunks(_layout(series, file)),
        codec=_codec(series.keyframe, file),
        axes=axes,
        is_guessed=any(letter in tiff_tags.UNNAMED for letter in series.axes),
        channel_names=tiff_tags.channel_names(stack.tif, image.series, image.number),
        known={
            "file": file,
            "key": key,
            "is_alike": stack.is_alike,
            "is_uniform": is_uniform,
            "colours": tiff_tags.colours(series.keyframe),
        },
        notes=_notes(stack, series, pages),
        unsupported="a TIFF file",
        place=tiff_tags.coarser(place, axes, image.series, image.level or 0),
    )


def _codec(page: TiffPage, file: Path) -> str:
    """Return the pages' compression; raise if this machine cannot undo it."""
    from tifffile import COMPRESSION as NAMES
    from tifffile import TIFF

    if page.compression == 1:
        return "raw"
    name = NAMES(page.compression).name.lower() if page.compression in set(NAMES) else str(page.compression)
    if name.startswith(decoded_size.UNSIZED):
        raise VolumeError(
            f"{file} is compressed with {name}, which takes memory that nothing bounds; use deflate or zstd"
        )
    try:
        TIFF.DECOMPRESSORS[page.compression]
    except KeyError as error:
        raise VolumeError(
            f"{file} is compressed with {name}, which cannot be undone here ({error.args[0]}); "
            "write it without compression, or with deflate, LZW or zstd"
        ) from error
    return name.removeprefix("adobe_")


def _notes(stack: _Stack, series: TiffPageSeries, pages: list[Page]) -> tuple[str, ...]:
    """Return what a user should know of the pages."""
    numbers = [page.index for page in series if page is not None]
    notes = []
    if series is stack.joined and stack.tif.series[0].kind == "shaped":
        notes.append(f"{len(numbers)} images of one page each are taken for the slices of one stack")
    elif series.kind == "generic" and (others := sorted({*range(numbers[0], numbers[-1])} - {*numbers})):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(f"page {others[0]}{more} of the file, counted from 0, is of another kind and left out")
    num_odd = sum(page.decoder.white != pages[0].decoder.white for page in pages)
    if num_odd:
        notes.append(
            f"{num_odd} pages differ from the first in what is white (MINISWHITE): those whose white is 0 are inverted"
        )
    return (*notes, *tiff_tags.colour_notes(series.keyframe))


def _is_uniform(stack: _Stack, series: TiffPageSeries) -> bool:
    """Return whether the bytes of all pages become voxels as those of the keyframe do."""
    expected = stack.coding(series.keyframe)
    return all(stack.coding(page) == expected for page in series if page is not None and page.offset)


def _check(stack: _Stack, series: TiffPageSeries, is_uniform: bool) -> list[Page]:
    """Return the pages of a series, [] where its voxels are one run; raise unless its files hold all of it."""
    file = stack.file
    if series.transform is not None:
        raise VolumeError(f"{file}: pages of kind {series.kind!r} are not supported; save a stack of plain pages")
    if is_uniform and series.dataoffset is not None and _is_flat(series, file):
        check_end(file, series.dataoffset + num_bytes(series.shape, series.dtype))
        return []
    pages = _pages(stack, series, is_uniform)
    if len(pages) * math.prod(series.keyframe.shaped) != math.prod(series.shape):
        raise VolumeError(f"{file}: {len(pages)} pages of {series.keyframe.shape} do not make up {series.shape}")
    for decoder in {id(page.decoder): page.decoder for page in pages}.values():
        size = num_bytes(decoder.segment, decoder.stored)
        check_memory(size, f"{file}: a strip or tile of {decoder.segment} voxels")
    ends: dict[Path, int] = {}
    for page in pages:
        segments = math.prod(-(-n // s) for n, s in zip(series.keyframe.shaped, page.decoder.segment, strict=True))
        if len(page.offsets) < segments or len(page.counts) < segments:
            raise VolumeError(f"{file}: a page names {len(page.offsets)} strips or tiles instead of {segments}")
        end = max((o + n for o, n in zip(page.offsets, page.counts, strict=False) if n), default=0)
        ends[page.file] = max(end, ends.get(page.file, 0))
    for path, end in ends.items():
        check_end(path, end)
    return pages


def _is_flat(series: TiffPageSeries, file: Path) -> bool:
    """Return whether the voxels lie one after another in `file`, and not in another of its set."""
    return series.dataoffset is not None and series.dtype.kind != "b" and _files(series) == {str(file.resolve())}


def _files(series: TiffPageSeries) -> set[str]:
    parents = {page.parent for page in series if page is not None}
    return {parent.filehandle.path for parent in parents}


def _pages(stack: _Stack, series: TiffPageSeries, is_uniform: bool) -> list[Page]:
    """Return where the pages of a series lie, and how each is decoded: by its own tags, where they differ."""
    file, pages = stack.file, list(series)
    missing = pages.count(None)
    if missing:
        raise VolumeError(f"{file}: {missing} of {len(pages)} pages are missing; is a file of the set not beside it?")
    resolved = file.resolve()  # tifffile's paths are without links
    for path in _files(series) - {str(resolved)}:
        check_beside(path, resolved)
    keyframe = series.keyframe
    decoders = {stack.coding(keyframe): _decoder(keyframe, file)}
    usual = next(iter(decoders))
    result = []
    for number, page in enumerate(page for page in pages if page is not None):
        directories = stack.directories_of(page)
        coding = usual if is_uniform or not page.offset else directories.coding(page.offset)
        if coding == usual:
            result.append(_page(page, decoders[usual], directories.file))
            continue
        own = _with_own_tags(page)
        if coding not in decoders:
            if _kind(own) != _kind(keyframe):
                raise VolumeError(f"{file}: {_unlike(number, own, keyframe)}; save pages of one kind")
            decoders[coding] = _decoder(own, file)
        result.append(_page(own, decoders[coding], directories.file))
    return result


def _page(page: TiffPage | TiffFrame, decoder: Decoder, file: Path) -> Page:
    places = tuple(page.dataoffsets), tuple(page.databytecounts)
    if not all(isinstance(n, int) for numbers in places for n in numbers):
        raise VolumeError(f"{file}: offsets or lengths of strips or tiles are no whole numbers; it is damaged")
    return Page(file, *places, page.jpegtables, decoder)


def _with_own_tags(page: TiffPage | TiffFrame) -> TiffPage:
    """Return `page` by its own tags, where tifffile takes those of the first."""
    handle = page.parent.filehandle
    is_closed = handle.closed
    if is_closed:
        handle.open()
    try:
        return page.aspage()
    finally:
        if is_closed:
            handle.close()


def _kind(page: TiffPage) -> tuple[object, ...]:
    """Return what pages of one array have in common, however they are stored."""
    return tuple(page.shaped), page.axes, page.dtype, tiff_tags.colours(page)


def _unlike(number: int, page: TiffPage, first: TiffPage) -> str:
    return f"page {number}, counted from 0, is {_described(page)} and the first {_described(first)}"


def _described(page: TiffPage) -> str:
    return f"{page.dtype} {page.shape} ({tiff_tags.colours(page)})"


def _decoder(page: TiffPage, file: Path) -> Decoder:
    """Return how the strips or tiles of `page` are decoded; raise where tifffile cannot."""
    _codec(page, file)
    try:
        page.decode(None, 0)
    except (ValueError, NotImplementedError) as error:
        raise VolumeError(f"{file}: {error}; save it as grey values or RGB of 8, 16 or 32 bits") from error
    stored = np.dtype(page.dtype).newbyteorder(page.parent.byteorder)
    tiled = (1, page.tiledepth, page.tilelength, page.tilewidth, page.shaped[4])
    return Decoder(
        segment=tiled if page.is_tiled else (1, 1, page.rowsperstrip, page.shaped[3], page.shaped[4]),
        stored=stored,
        plain=bool(page.is_final) and not page.is_tiled and stored.kind != "b",
        decode=page.decode,
        jpegheader=page.jpegheader,
        white=tiff_tags.white(page),
    )


def _layout(series: TiffPageSeries, file: Path) -> Layout:
    return Layout(
        shape=tuple(map(int, series.shape)),
        num_outer=_num_outer(series),
        page=tuple(map(int, series.keyframe.shaped)),
        decoder=_decoder(series.keyframe, file),
    )


def _num_outer(series: TiffPageSeries) -> int:
    """Return the number of axes of the series that count pages; raise if the others are not a page's."""
    inner = [n for n in series.keyframe.shaped if n > 1]
    shape = list(series.shape)
    at = len(shape)
    while at and math.prod(shape[at:]) < math.prod(inner):
        at -= 1
    if [n for n in shape[at:] if n > 1] != inner:
        raise VolumeError(f"pages of {series.keyframe.shape} do not make up an array {series.shape}")
    return at


def _chunks(layout: Layout) -> tuple[int, ...]:
    """Return the unit of reading and decoding: a strip or tile, or a plane without compression."""
    segment = (1, 1, *layout.page[2:]) if layout.decoder.plain else layout.decoder.segment
    long = iter(min(s, n) for s, n in zip(segment, layout.page, strict=True) if n > 1)
    return (1,) * layout.num_outer + tuple(next(long) if n > 1 else 1 for n in layout.shape[layout.num_outer :])


def write(path: Path, spec: ArraySpec, where: Place, parts: Iterable[Part], style: str) -> None:
    """Write an array to the file `path` from its parts, whole planes, in order.

    Args:
        path: the file.
        spec: the array, (z, y, x) or (c, z, y, x); the file has its channels within z.
        where: its voxel size, which is stored; TIFF has no place for the origin.
        parts: its voxels.
        style: as `choose_style` returned it.
    """
    from tifffile import TiffWriter

    depth, height, width = spec.shape[-3:]
    channels = spec.shape[:-3]
    big = num_bytes(spec.shape, spec.dtype) > CLASSIC_BYTES
    with TiffWriter(path, bigtiff=big, byteorder="<", imagej=style == "imagej", ome=style == "ome") as tif:
        tif.write(
            (plane for _, data in parts for planes in data.swapaxes(0, 1) for plane in planes),
            shape=(depth, *channels, height, width),
            dtype=spec.dtype,
            photometric="minisblack",
            compression=COMPRESSION[spec.codec],
            **tiff_tags.write_arguments(style, "ZCYX" if channels else "ZYX", where.voxel_size_nm),
        )


def choose_style(name: str, spec: ArraySpec) -> str:
    """Return the dialect of the file's metadata: "ome", "imagej", or "plain" where OME has no such type.

    Fiji reads all three; ImageJ's is left where it cannot be: other types, beyond 4 GiB, compressed, and images one
    voxel wide, which tifffile 2026.3 turns.
    """
    is_named_ome = bool(re.search(r"\.ome\.tiff?$", name.lower()))
    small = num_bytes(spec.shape, spec.dtype) <= CLASSIC_BYTES and spec.shape[-1] > 1
    if spec.dtype.name in IMAGEJ_DTYPES and small and spec.codec == "raw" and not is_named_ome:
        return "imagej"
    return "ome" if spec.dtype.name in OME_DTYPES else "plain"
