"""TIFF: stacks, BigTIFF, ImageJ hyperstacks, OME-TIFF with levels, tiles, of either byte order, read where they lie.

Not here: folders of slices (tiff_folder), axes and voxel sizes (tiff_tags), strips and tiles (tiff_pages). tifffile
finds the pages and undoes their compression; which bytes are read is decided here and in `pages`.

A series of pages is an array whose last axes are the page's, where those of length one may be left out::

    series (t, z, c, y, x)  =  pages (t, z, c) of (samples, depth, length, width, samples), here (1, 1, y, x, 1)
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.formats import tiff_tags
from volpipe.volumes.formats.flat import FlatArray, Part, RawFile, check_end, num_bytes
from volpipe.volumes.formats.ome import Dataset
from volpipe.volumes.formats.tiff_pages import Layout, Page, PagedArray
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.memory import check_memory
from volpipe.volumes.storage.metadata import ArraySpec, Facts, Header, Place, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_beside

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PLACES = (273, 279, 324, 325)  # StripOffsets, StripByteCounts, TileOffsets, TileByteCounts
PROBED_BYTES = 512  # most pages' tags are in them
TYPE_BYTES = {3: 2, 4: 4, 13: 4, 16: 8}  # SHORT, LONG, IFD, LONG8
MAX_PAGES = 10_000_000
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
    with _opened(file) as tif:
        number, level = _find(tif, key)
        if number is None or (level is None and len(tif.series[number].levels) > 1):
            return None
        return _header(file, key, tif, number, level or 0)


def read_datasets(file: Path, key: str) -> tuple[Dataset, ...] | None:
    """Return the levels of the series `key`, finest first; None where it has no coarser ones."""
    with _opened(file) as tif:
        number, level = _find(tif, key)
        if number is None or level is not None or len(tif.series[number].levels) < 2:
            return None
        series = tif.series[number]
        axes = tiff_tags.axes(series, file)
        where = tiff_tags.read_place(tif, number, axes)
        return tuple(
            Dataset(f"s{i}", axes, tiff_tags.coarser(where, axes, series, i)) for i in range(len(series.levels))
        )


def walk(file: Path, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys of all series, or of all their levels."""
    with _opened(file) as tif:
        levels = [len(series.levels) for series in tif.series]
    for number, count in enumerate(levels):
        key = str(number) if len(levels) > 1 else ""
        yield from (f"{key}/s{i}".strip("/") for i in range(count)) if enter_groups and count > 1 else (key,)


def exists(file: Path, key: str) -> bool:
    with _opened(file) as tif:
        return not key or _find(tif, key)[0] is not None


def open_array(header: Header, cache_bytes: int = 0) -> FlatArray | PagedArray:
    """Return the array of `header`; `cache_bytes` of decoded strips and tiles are kept in memory."""
    file, number, level = header.known["file"], header.known["series"], header.known["level"]
    with _opened(file, checked=True) as tif:
        series = tif.series[number].levels[level]
        stored = series.dtype.newbyteorder(tif.byteorder)
        if series.dataoffset is not None and _is_flat(series, file):
            return FlatArray(RawFile(file), series.dataoffset, stored, header.shape)
        return PagedArray(_pages(series, file), _layout(series, stored), cache_bytes)


def is_alone(header: Header) -> bool:
    """Return whether all voxels of `header` lie in its own file."""
    file = header.known["file"]
    with _opened(file, checked=True) as tif:
        series = tif.series[header.known["series"]].levels[header.known["level"]]
        return _is_flat(series, file) or {page.file for page in _pages(series, file)} == {file.resolve()}


@contextmanager
def _opened(file: Path, *, checked: bool = False) -> Iterator[TiffFile]:
    from tifffile import TiffFile

    try:
        if not checked:
            _check_chain(file)
        with TiffFile(file) as tif:
            yield tif
    except VolumeError:
        raise
    except OSError as error:
        raise VolumeError(f"{file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # tifffile lets through whatever damaged tags make Python raise
        raise VolumeError(f"{file} is damaged: {error}") from error


def _check_chain(file: Path) -> None:
    """Raise if the chain of pages leaves the file; tifffile would take the rest for the whole."""
    size = file.stat().st_size
    raw = RawFile(file)
    start = raw.read(0, min(16, size))
    order = "<" if start[:2] == b"II" else ">"
    big = start[2:4] in (b"+\0", b"\0+")
    if size < (16 if big else 8):
        raise VolumeError(f"{file} has {size} bytes: it is cut short; copy it again")
    number, counter, tag = (struct.Struct(order + form) for form in (("Q", "Q", "HHQQ") if big else ("I", "H", "HHII")))
    (offset,) = number.unpack(start[number.size : 2 * number.size])
    offsets: set[int] = set()
    while offset:
        if offset in offsets or len(offsets) >= MAX_PAGES:
            raise VolumeError(f"{file} has more than {MAX_PAGES} pages, or they go in circles; it is damaged")
        offsets.add(offset)
        check_end(file, offset + counter.size)
        text = raw.read(offset, min(PROBED_BYTES, size - offset))
        (count,) = counter.unpack_from(text)
        end = counter.size + count * tag.size
        if end + number.size > len(text):
            check_end(file, offset + end + number.size)
            text = raw.read(offset, end + number.size)
        check_end(file, _end_of_values(tag.iter_unpack(text[counter.size : end]), number.size))
        (offset,) = number.unpack_from(text, end)


def _end_of_values(tags: Iterable[tuple[int, int, int, int]], width: int) -> int:
    """Return where the numbers of the tags (code, type, number, place) end that say where the voxels are."""
    placed = ((num * TYPE_BYTES.get(kind, 0), at) for code, kind, num, at in tags if code in PLACES)
    return max((at + size for size, at in placed if size > width), default=0)


def _find(tif: TiffFile, key: str) -> tuple[int | None, int | None]:
    """Return the numbers of series and level in `key`, None for each that it lacks."""
    if len(tif.series) > 1:
        match = re.fullmatch(r"(\d{1,6})(?:/s(\d{1,3}))?", key)
        number, level = (int(match[1]), match[2]) if match else (MAX_PAGES, None)
    else:
        match = re.fullmatch(r"(?:s(\d{1,3}))?", key)
        number, level = (0, match[1]) if match else (MAX_PAGES, None)
    if number >= len(tif.series):
        return None, None
    count = len(tif.series[number].levels)
    if level is not None and (count < 2 or int(level) >= count):
        return None, None
    return number, None if level is None else int(level)


def _header(file: Path, key: str, tif: TiffFile, number: int, level: int) -> Header:
    series = tif.series[number].levels[level]
    shape = voxels(tuple(map(int, series.shape)), "shape", file)
    dtype = voxel_dtype(np.dtype(series.dtype), file)
    axes = tiff_tags.axes(series, file)
    _check(series, file)
    return Header(
        folder=file / key,
        format="tiff",
        shape=shape,
        dtype=dtype,
        chunks=_chunks(series),
        codec=_codec(series.keyframe, file),
        axes=axes,
        is_guessed=any(letter in tiff_tags.UNNAMED for letter in series.axes),
        channel_names=tiff_tags.channel_names(tif, number),
        known={"file": file, "series": number, "level": level},
        unsupported="a TIFF file",
        place=tiff_tags.coarser(tiff_tags.read_place(tif, number, axes), axes, tif.series[number], level),
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


def _check(series: TiffPageSeries, file: Path) -> None:
    """Raise unless the file, or files, hold the whole series."""
    if series.transform is not None:
        raise VolumeError(f"{file}: pages of kind {series.kind!r} are not supported; save a stack of plain pages")
    if series.dataoffset is not None and _is_flat(series, file):
        check_end(file, series.dataoffset + num_bytes(series.shape, series.dtype))
        return
    pages = _pages(series, file)
    if len(pages) * math.prod(series.keyframe.shaped) != math.prod(series.shape):
        raise VolumeError(f"{file}: {len(pages)} pages of {series.keyframe.shape} do not make up {series.shape}")
    segment = _layout(series, series.dtype).segment
    check_memory(num_bytes(segment, series.dtype), f"{file}: a strip or tile of {segment} voxels")
    segments = math.prod(series.keyframe.chunked)
    ends: dict[Path, int] = {}
    for page in pages:
        if len(page.offsets) < segments or len(page.counts) < segments:
            raise VolumeError(f"{file}: a page names {len(page.offsets)} strips or tiles instead of {segments}")
        end = max((o + n for o, n in zip(page.offsets, page.counts, strict=False) if n), default=0)
        ends[page.file] = max(end, ends.get(page.file, 0))
    for path, end in ends.items():
        check_end(path, end)


def _is_flat(series: TiffPageSeries, file: Path) -> bool:
    """Return whether the voxels lie one after another in `file`, and not in another of its set."""
    if series.dataoffset is None or series.dtype.kind == "b":
        return False
    return {page.parent.filehandle.path for page in series if page is not None} == {str(file.resolve())}


def _pages(series: TiffPageSeries, file: Path) -> list[Page]:
    pages = list(series)
    missing = pages.count(None)
    if missing:
        raise VolumeError(f"{file}: {missing} of {len(pages)} pages are missing; is a file of the set not beside it?")
    present = [page for page in pages if page is not None]
    paths = {page.parent.filehandle.path for page in present}
    own = file.resolve()  # tifffile's paths are without links
    for path in paths - {str(own)}:
        check_beside(path, own)
    if not all(isinstance(n, int) for page in present for n in (*page.dataoffsets, *page.databytecounts)):
        raise VolumeError(f"{file}: offsets or lengths of strips or tiles are no whole numbers; it is damaged")
    return [
        Page(Path(page.parent.filehandle.path), tuple(page.dataoffsets), tuple(page.databytecounts), page.jpegtables)
        for page in present
    ]


def _layout(series: TiffPageSeries, stored: np.dtype) -> Layout:
    page = series.keyframe
    tiled = (1, page.tiledepth, page.tilelength, page.tilewidth, page.shaped[4])
    return Layout(
        shape=tuple(map(int, series.shape)),
        num_outer=_num_outer(series),
        page=tuple(map(int, page.shaped)),
        segment=tiled if page.is_tiled else (1, 1, page.rowsperstrip, page.shaped[3], page.shaped[4]),
        stored=stored,
        plain=bool(page.is_contiguous) and not page.is_tiled and page.fillorder == 1 and stored.kind != "b",
        decode=page.decode,
        jpegheader=page.jpegheader,
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


def _chunks(series: TiffPageSeries) -> tuple[int, ...]:
    """Return the unit of reading and decoding: a strip or tile, or a plane without compression."""
    layout = _layout(series, series.dtype)
    segment = (1, 1, *layout.page[2:]) if layout.plain else layout.segment
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
