"""The chunk and shard files of an array, by their place: their names, their content, and the chunks in a shard.

Copies by other programs have the other separator, or ``.gz`` behind each name; they would be read as fill values. So
what a missing chunk could be called otherwise is looked for: in a list of the files where there can be one, else by
asking. Not here: decoding (tensorstore), or sampling (survey).
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Grid, Index
from volpipe.volumes.storage import decoded_size, paths
from volpipe.volumes.storage.metadata import ChunkScheme, Header, IndexPlace, Style
from volpipe.volumes.storage.object_store import Fetched, Remote
from volpipe.volumes.storage.paths import Location

log = logging.getLogger(__name__)

ABSENT = np.uint64(2**64 - 1)  # offset and length of a chunk that a shard lacks
OFFSET_BYTES, CHECKSUM_BYTES = 16, 4
EXTENSION = re.compile(r"\.[A-Za-z]\w*$")


@dataclass(frozen=True)
class ChunkFiles:
    """The files of the array of `header`, one for each chunk, or for each shard where it has any."""

    header: Header

    @cached_property
    def grid(self) -> Grid:
        """The chunks or shards, in stored axes: one is one file."""
        return Grid(self.header.shape, self.header.write_unit)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return self.grid.counts

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole array, in shards or not."""
        return math.prod(Grid(self.header.shape, self.header.chunks).counts)

    @property
    def scheme(self) -> ChunkScheme:
        """How the format names and begins chunk files."""
        assert self.header.scheme is not None
        return self.header.scheme

    def name(self, index: tuple[int, ...], style: Style | None = None) -> str:
        """Return the name of the file at `index` of the grid, counted from the array's folder, in another `style` too.

        It is "" where a shard is no box of the grid: its chunks are anywhere.
        """
        style, words = style or self.style, self.scheme.words(self.header, index)
        return style.prefix + style.separator.join(words) + style.suffix if words else ""

    def index(self, name: str) -> tuple[int, ...] | None:
        """Return where in the grid the file `name` belongs, None where it is no chunk's or shard's."""
        return self._index(name, self.style)

    def parse(self, name: str) -> tuple[tuple[int, ...], Style] | None:
        """Return where in the grid the file `name` belongs, and its style; None where no style gives such a name."""
        index = self.index(name)
        if index is not None:
            return index, self.style
        match = EXTENSION.search(name)
        for extension in ("", match[0]) if match else ("",):
            for style in (*self.styles, *self.scheme.rare_styles):
                index = self._index(name.removesuffix(extension), style)
                if index is not None:
                    return index, replace(style, suffix=style.suffix + extension)
        return None

    def is_of_another_grid(self, name: str) -> bool:
        """Return whether the file `name` is named as a chunk or shard, of an array of other lengths."""
        return self._stated_index(name, self.style) is not None and self.index(name) is None

    def _stated_index(self, name: str, style: Style) -> tuple[int, ...] | None:
        """Return the place, in the grid or not, that a name of `style` says; None where it says none."""
        inner = name.removeprefix(style.prefix).removesuffix(style.suffix)
        words = inner.split(style.separator) if style.separator else [inner]
        index = self.scheme.index(self.header, words)
        return None if index is None or len(index) != len(self.header.shape) else tuple(index)

    def _index(self, name: str, style: Style) -> tuple[int, ...] | None:
        index = self._stated_index(name, style)
        if index is None:
            return None
        inside = all(0 <= i < n for i, n in zip(index, self._counts, strict=True))
        return index if inside and self.name(index, style) == name else None

    @cached_property
    def style(self) -> Style:
        """How the metadata say that chunk files are named."""
        return self.scheme.style(self.header)

    @cached_property
    def styles(self) -> tuple[Style, ...]:
        """How chunk files of the format are named, that of the metadata first, something that packs them apart."""
        return tuple(dict.fromkeys((self.style, *self.scheme.styles(self.header))))

    def count_in_shard(self, index: tuple[int, ...], style: Style | None = None) -> int | None:
        """Return how many chunks of the array lie in the shard at `index`, which exists, by a name of `style`.

        None where it is unknown: nested or transposed shards, an index with its own encoding, a damaged file.
        """
        if self.index_place is None:
            try:
                return self.scheme.count_in_shard(self.header, index) if self.style == (style or self.style) else None
            except ValueError:
                return None
        places = self.places_in_shard(index, style)
        if places is None:
            return None
        is_stored = (places != ABSENT).any(axis=-1)
        total = zip(Grid(self.header.shape, self.header.chunks).counts, index, is_stored.shape, strict=True)
        inside = tuple(slice(0, n - i * per) for n, i, per in total)  # the array may end within the shard
        return int(is_stored[inside].sum())

    @cached_property
    def index_place(self) -> IndexPlace | None:
        """Where the index of a shard stands; None where there are no shards, or none of the usual kind."""
        return self.scheme.index_place(self.header)

    def places_in_shard(self, index: tuple[int, ...], style: Style | None = None) -> np.ndarray | None:
        """Return offset and length of each chunk of the shard at `index`, (…, 2), uint64; None as above."""
        if self.index_place is None:
            return None
        file, (num_bytes, at_end) = self.header.folder / self.name(index, style), self.index_bytes()
        part = paths.fetch(file, (-num_bytes, 0) if at_end else (0, num_bytes), denied_ok=True)
        return self._places(part.data) if part is not None and len(part.data) >= num_bytes else None

    def index_bytes(self) -> tuple[int, bool]:
        """Return the bytes of the index of a shard, with its checksum, and whether they are the last of its file."""
        place = self.index_place or IndexPlace(at_end=True, has_checksum=False)
        tail = CHECKSUM_BYTES if place.has_checksum else 0
        return OFFSET_BYTES * math.prod(self._chunks_per_shard) + tail, place.at_end

    def parse_index(self, data: bytes, file_bytes: int) -> np.ndarray:
        """Return offset and length of each chunk, (…, 2), uint64, from a shard, or its part with the index.

        Raises:
            ValueError: it is damaged: cut short, its checksum is wrong, or a chunk would lie outside the file.
        """
        import google_crc32c

        num_bytes, at_end = self.index_bytes()
        index = data[-num_bytes:] if at_end else data[:num_bytes]
        if len(index) < num_bytes:
            raise ValueError(f"DATA_LOSS: a shard of {file_bytes} bytes is too short for its index of {num_bytes}")
        entries, tail = index[: num_bytes - CHECKSUM_BYTES], index[num_bytes - CHECKSUM_BYTES :]
        if (
            self.index_place
            and self.index_place.has_checksum
            and google_crc32c.value(entries) != int.from_bytes(tail, "little")
        ):
            raise ValueError("DATA_LOSS: the checksum of the shard's index is wrong")
        places = self._places(index)
        stored = places[places[..., 0] != ABSENT]
        if (stored > file_bytes).any() or (stored.sum(axis=-1) > file_bytes).any():
            raise ValueError(f"DATA_LOSS: the shard's index names bytes beyond the {file_bytes} of its file")
        return places

    def _places(self, index: bytes) -> np.ndarray:
        counts = self._chunks_per_shard
        return np.frombuffer(index, "<u8", 2 * math.prod(counts)).reshape(*counts, 2)

    @property
    def _chunks_per_shard(self) -> tuple[int, ...]:
        return tuple(s // c for s, c in zip(self.header.write_unit, self.header.chunks, strict=True))


FEW_LISTED = 40  # of a bucket, as an array is opened: one request, whatever its server sends together
MOST_LISTED = 1000  # names: some milliseconds on a disk, one request to a bucket
MOST_ASKED = 8  # missing chunks that are asked for under other names, where others have their own and none is listed
SPARE_BYTES = 64 << 10  # of a chunk beside its voxels
# Of tensorstore, where it met an N5 block of another mode, or the end of the first of several members.
OTHER_FORMS = re.compile(r"varlength chunks|N5 chunk mode|Not enough data|remaining length")
UNFINISHED = (".__lock", ".lock", ".partial", ".part", ".tmp", ".temp", "~", ".crdownload", ".filepart")
# Of files that people put beside chunks.
DOCUMENTS = (".md", ".txt", ".rst", ".json", ".xml", ".html", ".csv", ".tsv", ".log", ".yml", ".yaml", ".toml", ".ini",
             ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".py", ".sh", ".db", ".md5", ".sha256")  # fmt: skip
DOCUMENT_NAMES = ("license", "readme", "makefile", "thumbs.db", "changelog", "info", "provenance")


@dataclass(frozen=True)
class Names:
    """The names of the files of an array, as far as they were listed.

    Attributes:
        num_usual: chunk files that are named as the metadata say.
        others: a file of each other style in which chunks are stored that are not stored as usual, and the name that
            it should have, the most frequent style first.
        stray: a file that is no chunk's, "" where there is none.
        is_outside: whether `stray` has the name of a chunk of another grid, as metadata that were changed leave it.
        is_complete: whether all files were listed.
    """

    num_usual: int = 0
    others: tuple[tuple[Style, str, str], ...] = ()
    stray: str = ""
    is_outside: bool = False
    is_complete: bool = False


def is_named(header: Header) -> bool:
    """Return whether each chunk, or shard, of the array of `header` is a file whose name is known."""
    return header.scheme is not None and bool(ChunkFiles(header).name((0,) * len(header.shape)))


def list_names(header: Header, most: int = MOST_LISTED) -> Names:
    """Return the names of the first `most` files of the array of `header`; none where they may not be listed.

    Raises:
        RemoteError: no answer.
    """
    files, folder = ChunkFiles(header), header.folder
    usual, otherwise, stray, num_seen = set[Index](), dict[Style, dict[Index, str]](), "", 0
    try:
        for name in islice(paths.walk_names(folder, most), most):
            num_seen += 1
            entry = None if name.lower().endswith(UNFINISHED) else files.parse(name)
            if entry is not None and entry[1] == files.style:
                usual.add(entry[0])
            elif entry is not None:
                otherwise.setdefault(entry[1], {})[entry[0]] = name
            elif not stray and _is_stray(name):
                stray = name
    except VolumeError as error:
        if isinstance(error, RemoteError) and "access denied" not in str(error):
            raise
        # A web server, or a bucket that may not be listed.
        log.info("%s", error)
        return Names()
    others = []
    for style, stored in sorted(otherwise.items(), key=lambda item: -len(item[1])):
        missing = ((name, files.name(index)) for index, name in stored.items() if index not in usual)
        name, usual_name = next(missing, ("", ""))
        if name and (num_seen < most or paths.size(folder / usual_name) is None):
            others.append((style, name, usual_name))
    return Names(len(usual), tuple(others), stray, files.is_of_another_grid(stray), is_complete=num_seen < most)


def _is_stray(name: str) -> bool:
    """Return whether the file `name` of an array's folder may be meant as a chunk, though no style gives that name."""
    path = PurePosixPath(name.lower())
    if path.name in DOCUMENT_NAMES or path.name.endswith((*UNFINISHED, *DOCUMENTS)):
        return False
    first = path.parts[0]
    return len(path.parts) == 1 or first == "c" or first[0].isdecimal()  # in other folders there are other arrays


def describe_names(header: Header) -> str:
    """Return a sentence on chunk files whose names are not those that the metadata give, "" where all are.

    Raises:
        VolumeError: there are files, and none of them can be read as a chunk.
    """
    if not is_named(header):
        return ""
    few = FEW_LISTED if isinstance(header.folder, Remote) else MOST_LISTED
    is_web = isinstance(header.folder, Remote) and not header.folder.is_s3
    names = _asked_names(header) if is_web else list_names(header, few)
    why = _refusal(header, names)
    if why and not names.is_outside:
        raise VolumeError(f"{header.folder}: {why}")
    if why:
        return why
    for style, file, usual in names.others:
        if not can_unpack(header, style):
            raise VolumeError(f"{header.folder}: {_unreadable(file, usual)}")
    if not names.others:
        is_odd = any(map(str.isdecimal, names.stray)) and not names.is_outside
        return f"{names.stray} in it is no chunk by any name known, and is not read" if is_odd else ""
    _, file, usual = names.others[0]
    some = "some chunk files" if names.num_usual else "chunk files"
    return f"{some} are named {file}, not {usual} as the metadata say; they are read by that name"


def _unreadable(file: str, usual: str) -> str:
    return (
        f"a chunk is stored as {file}, and its metadata name it {usual}; volpipe cannot read it by that name: unpack "
        "or rename its files"
    )


def _refusal(header: Header, names: Names) -> str:
    """Return why files with these `names` cannot be the chunks of the array, "" where some are, or there are none."""
    if names.num_usual or any(can_unpack(header, style) for style, _, _ in names.others):
        return ""
    if not names.others and not names.stray:
        return ""
    file = names.others[0][1] if names.others else names.stray
    if isinstance(header.folder, Path):
        paths.check_links(header.folder / file)
    usual = names.others[0][2] if names.others else ChunkFiles(header).name((0,) * len(header.shape))
    return (
        f"no file in it has the name of a chunk: it holds {file}, and its metadata name a chunk {usual}; it would be "
        "read as fill values alone: rename its files or mend its metadata, or remove them if it is to be empty"
    )


def _asked_names(header: Header) -> Names:
    """Return what a web server tells of the names of two chunks: the first, and one in the middle."""
    files = ChunkFiles(header)
    middle = tuple(n // 2 for n in files.grid.counts)
    try:
        for index in dict.fromkeys((middle, (0,) * len(middle))):
            if paths.size(header.folder / files.name(index)) is not None:
                return Names(1)
            for style in likely_styles(header):
                name = files.name(index, style)
                if paths.size(header.folder / name) is not None:
                    return Names(0, ((style, name, files.name(index)),))
    except RemoteError as error:
        log.info("%s", error)
    return Names()


def likely_styles(header: Header) -> list[Style]:
    """Return how chunk files are named otherwise, as far as they can be read: those to be asked for."""
    files = ChunkFiles(header)
    plain = [style for style in files.styles if style != files.style]
    packed = [replace(style, suffix=style.suffix + ".gz") for style in files.styles]
    packed.append(replace(files.style, suffix=files.style.suffix + ".br"))
    return [style for style in (*plain, *packed) if can_unpack(header, style)]


def can_unpack(header: Header, style: Style) -> bool:
    """Return whether files of `style` can be read: packed ones, unless they are shards, which are read in parts."""
    extension = _extension(header, style)
    return not extension or (header.shards is None and extension in decoded_size.SUFFIXES)


def _extension(header: Header, style: Style) -> str:
    return style.suffix.removeprefix(ChunkFiles(header).style.suffix)


def as_fill(unit: Index) -> None:
    """Take what is missing at `unit` for fill values, as arrays of others mean it."""


class ChunkSource:
    """The chunk files, or shards, of the array of `header`, read by their place; for use by several threads.

    `check_missing` raises where the file at a place, which is not there by any name, should be.
    """

    def __init__(self, header: Header, check_missing: Callable[[Index], None] = as_fill) -> None:
        self._header, self._files, self._is_named = header, ChunkFiles(header), is_named(header)
        self._check_missing = check_missing
        self._styles: dict[Index, Style] = {}  # of files that are named otherwise
        self._names: Names | None = None
        self._num_asked = self._num_usual = 0
        self._lock = threading.Lock()
        self._most = 2 * _num_bytes(header.write_unit, header) + SPARE_BYTES
        self._own = "gzip" if file_codec(header) == "gzip" else ""

    def fetch(self, unit: Index, span: tuple[int, int] | None = None, tag: str = "") -> Fetched | None:
        """Return the file at `unit` of the grid, or a span of it, as `object_store.fetch`; None where there is none.

        Raises:
            VolumeError: it has a name by which it cannot be read.
            OSError: it cannot be read.
            ValueError: it cannot be unpacked.
        """
        style = self._styles.get(unit, self._files.style)
        part = self._read(unit, style, span, tag)
        if part is not None:
            self._num_usual += style == self._files.style
            return part
        for other in self._others():
            part = self._read(unit, other, span, tag)
            if part is not None:
                self._note(unit, other)
                return part
        self._check_missing(unit)
        return None

    def is_elsewhere(self, unit: Index) -> bool:
        """Return whether the file at `unit`, which is not there, is there by another name; see `is_usual`."""
        for style in self._others():
            if self._is_there(unit, style):
                self._note(unit, style)
                return True
        self._check_missing(unit)
        return False

    def file(self, unit: Index) -> Location:
        """Return the file at `unit`, by the name that it was seen to have, or else that the metadata give."""
        return self._header.folder / self._files.name(unit, self._styles.get(unit))

    def is_usual(self, unit: Index) -> bool:
        """Return whether a file is at `unit` by the name that the metadata give.

        Raises:
            VolumeError: that name leads nowhere, so that what is stored there is not known.
        """
        if not self._is_named and isinstance(self._header.folder, Path):  # chunks are in any of its shards
            paths.check_files_in(self._header.folder)
            return True
        return self._is_there(unit, self._files.style)

    def _is_there(self, unit: Index, style: Style) -> bool:
        file = self._header.folder / self._files.name(unit, style)
        return paths.find_file(file) if isinstance(file, Path) else paths.size(file) is not None

    def _others(self) -> Iterable[Style]:
        """Return the styles that a missing chunk may have.

        Raises:
            VolumeError: no file can be read as a chunk.
        """
        if not self._is_named:
            return ()
        with self._lock:
            names = self._names
            if names is None or (names == Names(is_complete=True) and isinstance(self._header.folder, Path)):
                names = self._names = list_names(self._header)  # what was empty may have been filled
            if not self._num_usual and (why := _refusal(self._header, names)):
                raise VolumeError(f"{self._header.folder}: {why}")
            known = [style for style, _, _ in names.others]
            if names.is_complete:
                return known
            has_usual = self._num_usual + names.num_usual > 0
            if isinstance(self._header.folder, Remote) and has_usual and self._num_asked >= MOST_ASKED:
                return known
            self._num_asked += 1
        return [*known, *(style for style in likely_styles(self._header) if style not in known)]

    def _note(self, unit: Index, style: Style) -> None:
        with self._lock:
            self._styles[unit] = style
            names = self._names or Names()
            if all(style != other for other, _, _ in names.others):
                file = self._files.name(unit, style)
                entry = style, file, self._files.name(unit)
                self._names = replace(names, others=(*names.others, entry))
                log.warning("%s: chunk files are named %s, not %s as the metadata say", self._header.folder, *entry[1:])

    def _read(self, unit: Index, style: Style, span: tuple[int, int] | None, tag: str) -> Fetched | None:
        file = self._header.folder / self._files.name(unit, style)
        if not can_unpack(self._header, style):
            if not self._is_there(unit, style):
                return None
            name = self._files.name(unit, style)
            raise VolumeError(f"{self._header.folder}: {_unreadable(name, self._files.name(unit))}")
        part = paths.fetch(file, span, tag, most=self._most, own=self._own)
        extension = _extension(self._header, style)
        if part is None or not extension:
            return part
        data = decoded_size.undo(part.data, (decoded_size.SUFFIXES[extension],), self._most, self._own)
        return Fetched(data, part.stamp, len(data))


def _num_bytes(shape: tuple[int, ...], header: Header) -> int:
    num = header.dtype.itemsize
    for n in shape:
        num *= n
    return num


def file_codec(header: Header) -> str:
    """Return the codec that the whole of a chunk file is in, "" for none."""
    scheme = ChunkFiles(header).scheme
    codec = scheme.codec(header)
    return codec.name if header.shards is None and codec.is_last and not scheme.head_bytes(len(header.shape)) else ""


def is_other_form(error: Exception) -> bool:
    """Return whether what tensorstore says of a chunk may mean that it is in a form which others read."""
    return OTHER_FORMS.search(str(error)) is not None


def in_one_member(header: Header, content: bytes) -> bytes | None:
    """Return the `content` of a chunk file with the members of its gzip, bzip2 or zstd joined; None for other codecs.

    Tools that compress by several threads, and Java's streams, write several. Other decoders join them.

    Raises:
        ValueError: it is damaged.
    """
    names = {"gzip": "gzip", "bzip2": "bzip2", "bz2": "bzip2", "zstd": "zstd"}
    scheme = ChunkFiles(header).scheme
    start, codec = scheme.head_bytes(len(header.shape)), scheme.codec(header)
    encoding = names.get(codec.name, "") if codec.is_last and header.shards is None else ""
    if not encoding or not content.startswith(decoded_size.MAGIC[encoding], start):
        return None
    most = _num_bytes(header.chunks, header)
    return content[:start] + decoded_size.pack(decoded_size.unpack(content[start:], encoding, most), encoding)
