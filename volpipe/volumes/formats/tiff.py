"""TIFF: stacks, BigTIFF, ImageJ hyperstacks, OME-TIFF with levels, tiles, of either byte order, read where they lie.

Not here: folders of slices (tiff_folder), strips and tiles (tiff_pages). tifffile finds the pages and undoes their
compression; which bytes are read is decided here and in `pages`. Axes and voxel sizes are those of OME-XML, of ImageJ's
and tifffile's descriptions, and of the resolution tags.

A series of pages is an array whose last axes are the page's, where those of length one may be left out::

    series (t, z, c, y, x)  =  pages (t, z, c) of (samples, depth, length, width, samples), here (1, 1, y, x, 1)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import COLOUR_CHANNELS, INVERTING_TABLE, PALETTE, palette_notes
from volpipe.volumes.formats.flat import FlatArray, Part, RawFile, check_end, num_bytes
from volpipe.volumes.formats.format import FileReader, Format, ReadRow, Writing
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.formats.tiff_pages import Decoder, Layout, PagedArray, StoredPage
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.memory import check_memory
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Header,
    Lengths,
    Place,
    Tree,
    level_factor,
    nanometres,
    place,
    usual_axes,
    voxel_dtype,
    voxels,
)
from volpipe.volumes.storage.paths import State, check_beside, check_links, file_state

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffFrame, TiffPage, TiffPageSeries

MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_SERIES = 10_000_000
MAX_PAGES, KNOWN_FILES = 10_000_000, 128
OTHER_CODING = (292, 293, 530)  # T4Options, T6Options, YCbCrSubSampling: a page's hash, by tifffile, has all other tags
Coding = tuple[object, ...]  # what decides how the bytes of a page become voxels
STACKED = {"generic", "shaped", "uniform"}  # kinds of series that may be parts of one stack
CLASSIC_BYTES = 2**32 - 2**26  # beyond it offsets of 32 bits do not reach the pages' tags
IMAGEJ_DTYPES = ("uint8", "uint16", "float32")
OME_DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float32", "float64")
COMPRESSION = {"raw": None, "gzip": "zlib", "zstd": "zstd"}


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


def read_datasets(file: Path, key: str) -> tuple[ListedLevel, ...] | None:
    """Return the levels of the series `key`; None where it has no coarser ones."""
    with _opened(file) as stack:
        image = stack.find(key)
        if image is None or image.level is not None or len(image.series.levels) < 2:
            return None
        axes = read_axes(image.series, file)
        where = read_place(stack.tif, image.series, image.number, axes)
        return tuple(
            ListedLevel(f"s{i}", axes, coarser(where, axes, image.series, i), coarseness=1 / math.prod(level.shape))
            for i, level in enumerate(image.series.levels)
        )


def walk(file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys, counted from `key`, of all series there, or of all their levels."""
    with _opened(file) as stack:
        image = stack.find(key)
        if image is None and not key:
            levels = {str(number): len(series.levels) for number, series in enumerate(stack.tif.series)}
        else:
            levels = {"": 1 if image is None or image.level is not None else len(image.series.levels)}
    for name, count in levels.items():
        yield from (f"{name}/s{i}".strip("/") for i in range(count)) if enter_groups and count > 1 else (name,)


def read_attributes(file: Path, key: str) -> Tree:
    """Return the attributes of a TIFF file: it has none."""
    return {}


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


def open_array(header: Header, cache_bytes: int = 0) -> FlatArray | PagedArray:
    """Return the array of `header`; `cache_bytes` of decoded strips and tiles are kept in memory."""
    with _opened(header.known["file"]) as stack:
        series = stack.series(header.known["key"])
        layout = _layout(series, stack.file)
        if header.known["is_uniform"] and _is_flat(series, stack.file) and series.dataoffset is not None:
            return FlatArray(RawFile(stack.file), series.dataoffset, layout.decoder.stored, header.shape)
        return PagedArray(_pages(stack, series, header.known["is_uniform"]), layout, cache_bytes)


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
        common: the coding of all pages in its chain, None where they have several.
        joined: one series of all pages, where the file has them as single images alike; None of other files.
    """

    file: Path
    tif: TiffFile
    common: Coding | None
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

    def coding(self, page: TiffPage | TiffFrame) -> Coding:
        """Return what decides how the bytes of `page` become voxels."""
        if self.common is not None and page.parent is self.tif and len(page.treeindex) == 1:
            return self.common
        return _coding(_with_own_tags(page))


def _coding(page: TiffPage) -> Coding:
    return page.hash, palette_of(page), *(str(page.tags.valueof(code)) for code in OTHER_CODING)


@contextmanager
def _opened(file: Path) -> Iterator[_Stack]:
    from tifffile import TiffFile

    try:
        common = _common_coding(file, file_state(file))
        with TiffFile(file) as tif:
            if common is None:
                tif.is_uniform = False  # it looks at four pages alone
            yield _Stack(file, tif, common, _join(tif))
    except VolumeError:
        raise
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # tifffile lets through whatever damaged tags make Python raise
        raise _damaged(file, error) from error


def _page_at(tif: TiffFile, number: int) -> TiffPage | None:
    """Return the page of a file's chain with this number, by its own tags; None behind the last."""
    try:
        return tif.pages.get(number).aspage()
    except IndexError:
        return None


def _offset_after(tif: TiffFile) -> int:
    """Return where the page behind the last one that tifffile finds is said to be, 0 where that is the last."""
    place, size = tif.pages.next_page_offset or 0, tif.tiff.offsetsize
    check_end(Path(tif.filehandle.path), place + size)
    tif.filehandle.seek(place)
    return int.from_bytes(tif.filehandle.read(size), "little" if tif.byteorder == "<" else "big")


def _damaged(file: Path, error: Exception) -> VolumeError:
    what = f"{file} has {file.stat().st_size} bytes and is damaged or cut short"
    return VolumeError(f"{what}: {error}; copy it again")


@lru_cache(maxsize=KNOWN_FILES)
def _common_coding(file: Path, _state: State) -> Coding | None:
    """Return the coding of all pages in the chain of a file, None where they have several; read once in each state.

    Raises:
        VolumeError: the chain leaves the file or goes in circles; tifffile would take the rest for the whole.
    """
    from tifffile import TiffFile, TiffFileError

    codings, offsets = set[Coding](), set[int]()
    try:
        with TiffFile(file) as tif:
            while page := _page_at(tif, len(offsets)):
                if page.offset in offsets or len(offsets) >= MAX_PAGES:
                    raise VolumeError(f"{file} has more than {MAX_PAGES} pages, or they go in circles; it is damaged")
                offsets.add(page.offset)
                codings.add(_coding(page))
            following = _offset_after(tif)
    except TiffFileError as error:  # of a directory whose end is missing, too
        raise _damaged(file, error) from error
    if following:
        check_end(file, following + 1)
        raise VolumeError(f"{file} is damaged: the page at byte {following} cannot be read")
    return codings.pop() if len(codings) == 1 else None


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
    axes = read_axes(series, file)
    expected = stack.coding(series.keyframe)
    # Whether the bytes of all pages become voxels as those of the keyframe do.
    is_uniform = all(stack.coding(page) == expected for page in series if page is not None and page.offset)
    _check(stack, series, is_uniform)
    place = read_place(stack.tif, image.series, image.number, axes)
    return Header(
        folder=file / key,
        format="tiff",
        shape=shape,
        dtype=dtype,
        chunks=_chunks(_layout(series, file)),
        codec=_codec(series.keyframe, file),
        axes=axes,
        is_guessed=any(letter in UNNAMED for letter in series.axes),
        channel_names=read_channel_names(stack.tif, image.series, image.number),
        known={
            "file": file,
            "key": key,
            "is_uniform": is_uniform,
            "colours": colours_of(series.keyframe),
            "palette": palette_of(series.keyframe),
        },
        notes=_notes(stack, series),
        unsupported="a TIFF file",
        place=coarser(place, axes, image.series, image.level or 0),
        data_files=() if _files(series) == {str(file.resolve())} else None,
    )


def _codec(page: TiffPage, file: Path) -> str:
    """Return the pages' compression; raise if this machine cannot undo it."""
    from tifffile import COMPRESSION as NAMES
    from tifffile import TIFF as KNOWN

    if page.compression == 1:
        return "raw"
    name = NAMES(page.compression).name.lower() if page.compression in set(NAMES) else str(page.compression)
    if name.startswith(decoded_size.UNSIZED):
        raise VolumeError(
            f"{file} is compressed with {name}, which takes memory that nothing bounds; use deflate or zstd"
        )
    try:
        KNOWN.DECOMPRESSORS[page.compression]
    except KeyError as error:
        raise VolumeError(
            f"{file} is compressed with {name}, which cannot be undone here ({error.args[0]}); "
            "write it without compression, or with deflate, LZW or zstd"
        ) from error
    return name.removeprefix("adobe_")


def _notes(stack: _Stack, series: TiffPageSeries) -> tuple[str, ...]:
    """Return what a user should know of the pages."""
    numbers = [page.index for page in series if page is not None]
    notes = []
    if series is stack.joined and stack.tif.series[0].kind == "shaped":
        notes.append(f"{len(numbers)} images of one page each are taken for the slices of one stack")
    elif series.kind == "generic" and (others := sorted({*range(numbers[0], numbers[-1])} - {*numbers})):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        notes.append(f"page {others[0]}{more} of the file, counted from 0, is of another kind and left out")
    return (*notes, *colour_notes(series.keyframe))


def _check(stack: _Stack, series: TiffPageSeries, is_uniform: bool) -> None:
    """Raise unless the files of a series hold all of it."""
    file = stack.file
    if series.transform is not None:
        raise VolumeError(f"{file}: pages of kind {series.kind!r} are not supported; save a stack of plain pages")
    if is_uniform and series.dataoffset is not None and _is_flat(series, file):
        check_end(file, series.dataoffset + num_bytes(series.shape, series.dtype))
        return
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


def _is_flat(series: TiffPageSeries, file: Path) -> bool:
    """Return whether the voxels lie one after another in `file`, and not in another of its set."""
    return series.dataoffset is not None and series.dtype.kind != "b" and _files(series) == {str(file.resolve())}


def _files(series: TiffPageSeries) -> set[str]:
    return {parent.filehandle.path for parent in _parents(series)}


def _parents(series: TiffPageSeries) -> set[TiffFile]:
    return {page.parent for page in series if page is not None}


def _pages(stack: _Stack, series: TiffPageSeries, is_uniform: bool) -> list[StoredPage]:
    """Return where the pages of a series lie, and how each is decoded: by its own tags, where they differ."""
    file, pages = stack.file, list(series)
    missing = pages.count(None)
    if missing:
        raise VolumeError(f"{file}: {missing} of {len(pages)} pages are missing; is a file of the set not beside it?")
    resolved = file.resolve()  # tifffile's paths are without links
    paths = {parent: Path(parent.filehandle.path) for parent in _parents(series)}
    for path in {*paths.values()} - {resolved}:
        check_beside(str(path), resolved)
    keyframe = series.keyframe
    decoders = {stack.coding(keyframe): _decoder(keyframe, file)}
    usual = next(iter(decoders))
    result = []
    for number, page in enumerate(page for page in pages if page is not None):
        coding, path = usual if is_uniform or not page.offset else stack.coding(page), paths[page.parent]
        if coding == usual:
            result.append(_page(page, decoders[usual], path))
            continue
        own = _with_own_tags(page)
        if coding not in decoders:
            if _kind(own) != _kind(keyframe):
                raise VolumeError(f"{file}: {_unlike(number, own, keyframe)}; save pages of one kind")
            decoders[coding] = _decoder(own, file)
        result.append(_page(own, decoders[coding], path))
    return result


def _page(page: TiffPage | TiffFrame, decoder: Decoder, file: Path) -> StoredPage:
    places = tuple(page.dataoffsets), tuple(page.databytecounts)
    if not all(isinstance(n, int) for numbers in places for n in numbers):
        raise VolumeError(f"{file}: offsets or lengths of strips or tiles are no whole numbers; it is damaged")
    return StoredPage(file, *places, page.jpegtables, decoder)


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
    return tuple(page.shaped), page.axes, page.dtype, colours_of(page), palette_of(page)


def _unlike(number: int, page: TiffPage, first: TiffPage) -> str:
    return f"page {number}, counted from 0, is {_described(page)} and the first {_described(first)}"


def _described(page: TiffPage) -> str:
    return f"{page.dtype} {page.shape} ({colours_of(page)})"


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


def write(path: Path, key: str, spec: ArraySpec, where: Place, parts: Iterable[Part]) -> None:
    """Write an array to the file `path` from its parts, whole planes, in order.

    Args:
        path: the file.
        key: of the array, which has none here.
        spec: the array, (z, y, x) or (c, z, y, x); the file has its channels within z.
        where: its voxel size, which is stored; TIFF has no place for the origin.
        parts: its voxels.
    """
    from tifffile import TiffWriter

    style = choose_style(path.name, spec)
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
            **write_arguments(style, "ZCYX" if channels else "ZYX", where.voxel_size_nm),
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


UNNAMED = "IQ"  # tifffile's letters for axes of which the file says nothing
INCH, CENTIMETER = 2, 3  # of the tag ResolutionUnit
WHITE_IS_ZERO, GREY, INDEXED = 0, 1, 3  # of the tag PhotometricInterpretation
RGB_DECODERS = (6, 7, 33007, 34892)  # compressions that are JPEG, from which RGB comes
COLOURS = {  # what values are, and what a user should know of them, by PhotometricInterpretation
    WHITE_IS_ZERO: ("grey whose white is 0", INVERTING_TABLE),
    GREY: ("grey", ""),
    2: ("RGB", COLOUR_CHANNELS),
    INDEXED: ("palette", PALETTE),
    4: ("a mask", ""),
    5: ("CMYK", "the channels are inks (CMYK): more is darker"),
    6: ("YCbCr", "the channels are luma and two differences of colours (YCbCr), not red, green and blue"),
    8: ("CIELAB", "the channels are L*, a* and b* (CIELAB), not red, green and blue"),
    9: ("ICCLAB", "the channels are L*, a* and b* (ICCLAB), not red, green and blue"),
    32803: ("a mosaic", "neighbouring pixels have filters of different colours before them (CFA)"),
    34892: ("raw", ""),
}


def read_axes(series: TiffPageSeries, file: Path) -> tuple[str, ...]:
    """Return the axes of a series as t, c, z, y, x; samples (colours) are channels, others in lower case.

    Axes without a name are taken for z, then c, then t, the fastest first.

    Raises:
        VolumeError: it has channels and samples, or another axis twice.
    """
    names = ["c" if letter == "S" else letter.lower() for letter in series.axes]
    left = iter([name for name in "zct" if name not in names])
    for i in reversed(range(len(names))):
        if series.axes[i] in UNNAMED:
            names[i] = next(left, f"d{i}")
    if set(series.axes) & set(UNNAMED) and "c" not in series.axes.lower() and "S" not in series.axes:
        usual = usual_axes(series.shape)
        names = [*usual] if usual[-1] == "c" else names
    if len(set(names)) < len(names):
        raise VolumeError(
            f"{file} has axes {series.axes} of {tuple(series.shape)}; save channels, colours and times on their own"
        )
    return tuple(names)


def read_place(tif: TiffFile, series: TiffPageSeries, number: int, names: tuple[str, ...]) -> Place:
    """Return the voxel size of `series`, the one with this number, whose axes are `names`; no origin is read.

    OME's, or else the spacing and unit of ImageJ's or tifffile's description with the resolution of the first page.
    Without a unit there only a resolution per centimetre counts: one per inch is about printing. The size is unknown of
    an image of two dimensions that does not say how thick it is, and where tag and description have different units.
    """
    if series.kind == "ome":
        sizes, units = _ome(tif.ome_metadata or "", number)
    else:
        description = _description(tif, number)
        reason = _contradiction(description, series.keyframe, is_imagej=tif.is_imagej)
        if reason:
            return Place(reason=reason)
        sizes, units = _described_sizes(description, series.keyframe, is_stack=series.kind == "imagej" and "z" in names)
    missing = [axis for axis in "zyx" if axis not in sizes]
    if missing and sizes:
        known = ", ".join(f"{axis} {sizes[axis]:g} {units[axis]}" for axis in "zyx" if axis in sizes)
        return Place(reason=f"it says {known}, and nothing of {', '.join(missing)}")
    return place(sizes, {}, units)


def _ome(text: str, number: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return voxel size and unit per axis of image `number` of an OME-XML document; µm where no unit is said."""
    attributes = next((element.attrib for element in _elements(text, number, "Pixels")), {})
    lengths = {axis: _number(attributes.get(f"PhysicalSize{axis.upper()}")) for axis in "zyx"}
    sizes = {axis: length for axis, length in lengths.items() if length}
    return sizes, {axis: attributes.get(f"PhysicalSize{axis.upper()}Unit", "µm") for axis in sizes}


def _elements(text: str, number: int, name: str) -> list[ElementTree.Element]:
    """Return the elements `name` of the Pixels of image `number` in an OME-XML document, itself included."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return []
    pixels = list(root.iterfind(".//{*}Pixels"))
    inner = pixels[number].iter() if number < len(pixels) else ()
    return [element for element in inner if element.tag.rpartition("}")[2] == name]


def _described_sizes(
    description: dict[str, Any], page: TiffPage, *, is_stack: bool
) -> tuple[dict[str, float], dict[str, str]]:  # Any: text or number
    """Return voxel size and unit per axis; an ImageJ stack without a spacing has one of 1, which ImageJ leaves out."""
    unit, *others = (unescaped(str(description.get(name, ""))) for name in ("unit", "yunit", "zunit"))
    sizes = {
        axis: size for axis, name in (("y", "YResolution"), ("x", "XResolution")) if (size := _inverse(page, name))
    }
    if nanometres(unit) is None and _resolution_unit(page) == CENTIMETER:
        return sizes, {"y": "cm", "x": "cm"}
    if not unit.strip():
        return {}, {}
    spacing = _number(description.get("spacing", 1.0 if is_stack else None))
    units = {"x": unit} | {axis: other or unit for axis, other in zip("yz", others, strict=True)}
    return sizes | ({"z": spacing} if spacing else {}), units


def _contradiction(description: dict[str, Any], page: TiffPage, *, is_imagej: bool) -> str:  # Any: text or number
    """Return why the unit of a description does not go with that of the resolution tags, "" where it may.

    ImageJ takes its own unit and writes none into the tag, others count pixels per centimetre beside it (Bio-Formats
    3676: 400 nm became 0.04 nm). An inch beside tifffile's description is what tifffile writes without being asked.
    """
    unit, size = unescaped(str(description.get("unit", ""))), _inverse(page, "XResolution")
    tag = {INCH: ("inch", 25.4e6), CENTIMETER: ("cm", 1e7)}.get(_resolution_unit(page), ("", 0.0))
    factor = nanometres(unit)
    if factor is None or size is None or not tag[0] or tag[1] == factor or (tag[0] == "inch" and not is_imagej):
        return ""
    return f"it says x {size:g} {tag[0]} by its resolution, and the unit {unit[:20]!r} in its description"


def _resolution_unit(page: TiffPage) -> int:
    tag = page.tags.get("ResolutionUnit")
    return int(tag.value) if tag is not None and isinstance(tag.value, int) else 0


def unescaped(text: str) -> str:
    """Return `text` with the letters that ImageJ writes as \\u00B5 and the like."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)


def _description(tif: TiffFile, number: int) -> dict[str, Any]:  # Any: text or number
    """Return the description by ImageJ or tifffile on the first page of a series."""
    if tif.is_imagej:
        return dict(tif.imagej_metadata or {})
    shaped = tif.shaped_metadata or ()
    return dict(shaped[number]) if number < len(shaped) else {}


def _inverse(page: TiffPage, name: str) -> float | None:
    """Return the edge of a pixel, in the unit of the resolution tag `name`, a fraction."""
    tag = page.tags.get(name)
    value = None if tag is None else tag.value
    if not isinstance(value, tuple) or len(value) != 2 or 0 in value:
        return None
    return _number(value[1] / value[0])


def _number(value: object) -> float | None:
    """Return `value` as a length: above zero and finite; None where it is none."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def read_channel_names(tif: TiffFile, series: TiffPageSeries, number: int) -> tuple[str, ...]:
    """Return the names of the channels of `series`, as OME has them; () where not all have one."""
    if series.kind != "ome":
        return ()
    names = tuple(element.get("Name", "") for element in _elements(tif.ome_metadata or "", number, "Channel"))
    return names if all(names) else ()


def colours_of(page: TiffPage) -> str:
    """Return what the values of `page` are: "grey", or the name of another photometric interpretation.

    Raises:
        VolumeError: volpipe does not know that.
    """
    number = GREY if page.photometric is None else int(page.photometric)
    if number not in COLOURS:
        raise VolumeError(
            f"{page.parent.filename} has pages of photometric interpretation {number}, which is not known; "
            "save grey values"
        )
    name, _ = COLOURS[number]
    if number == INDEXED and not palette_notes(palette_of(page)):
        return "grey"
    return "RGB" if name == "YCbCr" and page.compression in RGB_DECODERS else name


def palette_of(page: TiffPage) -> bytes:
    """Return the red, green and blue of each number in the palette of `page`, a byte each; none of other pages."""
    if page.photometric != INDEXED or page.colormap is None:
        return b""
    return (page.colormap.T >> 8).astype(np.uint8).tobytes()


def colour_notes(page: TiffPage) -> tuple[str, ...]:
    """Return what a user should know of the values of `page`, () of grey values."""
    name = colours_of(page)
    return tuple(note for other, note in COLOURS.values() if other == name and note)


def coarser(described: Place, names: tuple[str, ...], series: TiffPageSeries, level: int) -> Place:
    """Return where a level lies: its voxels join as many of those of the first, which is described, as lengths say."""
    if described.voxel_size_nm is None or not level:
        return described
    shapes = [series.shape, *sorted((one.shape for one in series.levels[1:]), key=math.prod, reverse=True)]
    chain = shapes[: 1 + shapes.index(series.levels[level].shape, 1)]
    lengths = {axis: along for axis, *along in zip(names, *chain, strict=True) if axis in "zyx"}
    factors = {axis: level_factor(along) for axis, along in lengths.items()}
    for axis, factor in factors.items():
        if factor is None:
            shown = " to ".join(map(str, lengths[axis]))
            return Place(reason=f"its levels have {shown} voxels along {axis}, and no one factor gives these")
    size = [v * (factors.get(axis) or 1) for axis, v in zip("zyx", described.voxel_size_nm, strict=True)]
    shift = [((factors.get(axis) or 1) - 1) / 2 * v for axis, v in zip("zyx", described.voxel_size_nm, strict=True)]
    return Place((size[0], size[1], size[2]), (shift[0], shift[1], shift[2]))


def write_arguments(
    style: str, letters: str, voxel_size_nm: Lengths | None
) -> dict[str, Any]:  # Any: arguments of tifffile
    """Return the arguments with which tifffile writes axes and voxel size (z, y, x) in a `style` of description."""
    metadata: dict[str, object] = {"axes": letters}
    if voxel_size_nm is None:
        return {"metadata": metadata}
    z, y, x = voxel_size_nm
    if style == "ome":
        for axis, size in zip("ZYX", voxel_size_nm, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "nm"}
        return {"metadata": metadata}
    metadata |= {"spacing": z, "unit": "nm"}
    return {"metadata": metadata, "resolution": (1 / x, 1 / y), "resolutionunit": "none"}


TIFF = Format(
    name="tiff",
    title="TIFF",
    row=ReadRow(
        "TIFF, BigTIFF, OME-TIFF with levels",
        "stacks, ImageJ hyperstacks, strips and tiles, compressed or not",
        "ImageJ (also `yunit`, `zunit`), OME",
    ),
    suffixes=(".tif", ".tiff"),
    magics=tuple((0, magic) for magic in MAGICS),
    files=FileReader(read_header, open_array, read_attributes, read_datasets, exists, walk, why_several=why_several),
    writing=Writing(
        ("raw", "gzip", "zstd"), "keeps no origin", write, has_keys=False, has_chunks=False, has_record=False
    ),
)
