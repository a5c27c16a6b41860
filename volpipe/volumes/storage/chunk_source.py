"""The chunk files and shards of an array, by their place: also where their names are not those that its metadata give.

Copies by other programs have the other separator, or ``.gz`` behind each name; they would be read as fill values. So
what a missing chunk could be called otherwise is looked for: in a list of the files where there can be one, else by
asking. Not here: decoding (tensorstore), or the names (chunk_files).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Index
from volpipe.volumes.storage import decoded_size, object_store, paths
from volpipe.volumes.storage.chunk_files import ChunkFiles, Style
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Part, Remote, Stamp
from volpipe.volumes.storage.paths import Location

log = logging.getLogger(__name__)

FEW_LISTED = 40  # of a bucket, as an array is opened: one request, whatever its server sends together
MOST_LISTED = 1000  # names: some milliseconds on a disk, one request to a bucket
MOST_ASKED = 8  # missing chunks that are asked for under other names, where others have their own and none is listed
SPARE_BYTES = 64 << 10  # of a chunk beside its voxels
N5_START, N5_VARLENGTH, N5_OBJECTS = 4, 1, 2  # bytes of a block before its sizes; modes of blocks
# Of tensorstore, where it met an N5 block of another mode, or the end of the first of several members.
OTHER_FORMS = re.compile(r"varlength chunks|N5 chunk mode|Not enough data|remaining length")
METADATA = ("zarr.json", "attributes.json", "info", "provenance")
UNFINISHED = (".__lock", ".lock", ".partial", ".part", ".tmp", ".temp", "~", ".crdownload", ".filepart")
# Of files that people put beside chunks.
DOCUMENTS = (".md", ".txt", ".rst", ".json", ".xml", ".html", ".csv", ".tsv", ".log", ".yml", ".yaml", ".toml", ".ini",
             ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".py", ".sh", ".db", ".md5", ".sha256")  # fmt: skip
DOCUMENT_NAMES = ("license", "readme", "makefile", "thumbs.db", "changelog")


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
    if "names" in header.known or header.format not in ("n5", "zarr2", "zarr3", "precomputed"):
        return False
    return bool(ChunkFiles(header).name((0,) * len(header.shape)))


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
    if path.name in (*METADATA, *DOCUMENT_NAMES) or path.name.endswith((*UNFINISHED, *DOCUMENTS)):
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
    names = _asked_names(header) if _is_web(header.folder) else list_names(header, few)
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
    usual = names.others[0][2] if names.others else ChunkFiles(header).name((0,) * len(header.shape))
    return (
        f"no file in it has the name of a chunk: it holds {file}, and its metadata name a chunk {usual}; it would be "
        "read as fill values alone: rename its files or mend its metadata, or remove them if it is to be empty"
    )


def _is_web(folder: Location) -> bool:
    return isinstance(folder, Remote) and not folder.is_s3


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


class ChunkSource:
    """The chunk files, or shards, of the array of `header`, read by their place; for use by several threads."""

    def __init__(self, header: Header) -> None:
        self._header, self._files = header, ChunkFiles(header)
        self._styles: dict[Index, Style] = {}  # of files that are named otherwise
        self._names: Names | None = None
        self._num_asked = self._num_usual = 0
        self._lock = threading.Lock()
        self._most = 2 * _num_bytes(header.write_unit, header) + SPARE_BYTES
        self._own = "gzip" if _outermost(header) == "gzip" else ""

    def fetch(self, unit: Index, span: tuple[int, int] | None = None, tag: str = "") -> Part | None:
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
        return None

    def is_elsewhere(self, unit: Index) -> bool:
        """Return whether the file at `unit`, which is not there, is there by another name."""
        folder = self._header.folder
        for style in self._others():
            if paths.size(folder / self._files.name(unit, style)) is not None:
                self._note(unit, style)
                return True
        return False

    def file(self, unit: Index) -> Location:
        """Return the file at `unit`, by the name that it was seen to have, or else that the metadata give."""
        return self._header.folder / self._files.name(unit, self._styles.get(unit))

    def is_usual(self, unit: Index) -> bool:
        """Return whether a file is at `unit` by the name that the metadata give."""
        return paths.size(self._header.folder / self._files.name(unit)) is not None

    def _others(self) -> Iterable[Style]:
        """Return the styles that a missing chunk may have.

        Raises:
            VolumeError: no file can be read as a chunk.
        """
        if not is_named(self._header):
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

    def _read(self, unit: Index, style: Style, span: tuple[int, int] | None, tag: str) -> Part | None:
        file = self._header.folder / self._files.name(unit, style)
        if not can_unpack(self._header, style):
            if paths.size(file) is None:
                return None
            name = self._files.name(unit, style)
            raise VolumeError(f"{self._header.folder}: {_unreadable(name, self._files.name(unit))}")
        if isinstance(file, Remote):
            part = object_store.fetch(file, span, tag, most=self._most, own=self._own)
        else:
            part = _read_local(file, span)
        extension = _extension(self._header, style)
        if part is None or not extension:
            return part
        data = decoded_size.undo(part.data, (decoded_size.SUFFIXES[extension],), self._most, self._own)
        return Part(data, part.stamp, len(data))


def _read_local(file: Path, span: tuple[int, int] | None) -> Part | None:
    """Return `file` on a disk, or a span of it; None where there is no such file."""
    first, last = span or (0, -1)
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stream.seek(max(0, status.st_size + first) if first < 0 else first)
            data = stream.read(last - first if span is not None and first >= 0 else -1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            return None
        raise
    return Part(data, Stamp(status.st_size, status.st_mtime_ns))


def _num_bytes(shape: tuple[int, ...], header: Header) -> int:
    num = header.dtype.itemsize
    for n in shape:
        num *= n
    return num


def _outermost(header: Header) -> str:
    """Return the codec that the whole of a chunk file is in, "" for none."""
    if header.format == "zarr2":
        return str((header.known.get("compressor") or {}).get("id", ""))
    if header.format == "zarr3" and header.shards is None:
        return str(header.known["codecs"][-1]["name"])
    return ""


def is_other_form(error: Exception) -> bool:
    """Return whether what tensorstore says of a chunk may mean that it is in a form which others read."""
    return OTHER_FORMS.search(str(error)) is not None


def as_tensorstore_reads(header: Header, content: bytes) -> bytes:
    """Return the `content` of a chunk file in the form that tensorstore knows: N5 of mode 1 as of mode 0.

    Java's writers give such blocks the number of their elements, behind their sizes (N5 specification, block format).

    Raises:
        VolumeError: an N5 block that holds objects.
    """
    mode = int.from_bytes(content[:2], "big") if header.format == "n5" and len(content) >= N5_START else 0
    if mode == N5_OBJECTS:
        raise VolumeError(f"{header.folder}: a block is of N5 mode 2, which holds an object, not voxels")
    if mode != N5_VARLENGTH:
        return content
    start = N5_START + 4 * len(header.shape)
    return b"\0\0" + content[2:start] + content[start + 4 :]


def in_one_member(header: Header, content: bytes) -> bytes | None:
    """Return the `content` of a chunk file with the members of its gzip, bzip2 or zstd joined; None for other codecs.

    Tools that compress by several threads, and Java's streams, write several. Other decoders join them.

    Raises:
        ValueError: it is damaged.
    """
    names = {"gzip": "gzip", "bzip2": "bzip2", "bz2": "bzip2", "zstd": "zstd"}
    start, codec = 0, _outermost(header)
    if header.format == "n5":
        start, codec = N5_START + 4 * len(header.shape), str(header.known["compression"]["type"])
    encoding = names.get(codec, "")
    if not encoding or not content.startswith(decoded_size.MAGIC[encoding], start):
        return None
    most = _num_bytes(header.chunks, header)
    return content[:start] + decoded_size.pack(decoded_size.unpack(content[start:], encoding, most), encoding)
