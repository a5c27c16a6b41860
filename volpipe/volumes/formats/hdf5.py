"""HDF5: any dataset of numbers, chunked, contiguous, external or virtual, by its key; voxel sizes in common dialects.

Not here: paths and groups of levels (container). The only file that imports h5py, and only where a file is opened.
The library reads one thing at a time, so threads take turns.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.indexing import ranges
from volpipe.volumes.dialects import bigdataviewer, imaris
from volpipe.volumes.dialects.attributes import is_unsigned, read_axes, value_notes
from volpipe.volumes.dialects.programs import Hdf5Dataset, Meaning, unsigned
from volpipe.volumes.formats import hdf5_probe
from volpipe.volumes.formats.flat import Part
from volpipe.volumes.formats.format import DEFAULT_KEY, FileReader, Format, ReadRow, Writing, stated_place
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Header,
    Place,
    Tree,
    flat_chunk,
    plain,
    voxel_dtype,
    voxels,
)
from volpipe.volumes.storage.paths import check_beside, find_file
from volpipe.volumes.storage.tensorstore import Index

if TYPE_CHECKING:
    import h5py
    from _typeshed import ReadableBuffer, WriteableBuffer

MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_DEPTH = 12
CHECKSUM_BYTES = 4
MAX_OBJECTS = 10_000
MAX_TABLE = 10_000  # numbers of a small dataset
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf",
           32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd", 32026: "blosc2"}  # fmt: skip
CODECS = ("gzip", "lzf", "szip", "blosc", "blosc2", "lz4", "bitshuffle", "zstd")  # the rest only prepare or check
PROGRAMS = (bigdataviewer, imaris)
_lock = threading.RLock()
_arrays: WeakSet[Hdf5Array] = WeakSet()  # that are open in this process, which has each file open once
log = logging.getLogger(__name__)


def read_header(file: Path, key: str) -> Header | None:
    """Return the header of the dataset `key` in `file`, None where it is a group or nothing.

    Raises:
        VolumeError: the file is damaged or cut short, or the dataset holds what volpipe cannot read.
    """
    with _opened(file) as opened:
        node = _get(opened, key)
        return None if node is None or not _is_dataset(node) else _header(file, key, node, opened)


def read_attributes(file: Path, key: str) -> Tree:
    """Return the attributes of the group or dataset `key` in `file`, {} where there is none."""
    with _opened(file) as opened:
        node = _get(opened, key)
        return {} if node is None else _attributes(node)


def exists(file: Path, key: str) -> bool:
    with _opened(file) as opened:
        return _get(opened, key) is not None


def walk(file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys, counted from the group `key`, of all volumes in it, sorted; levels as one unless entered.

    Those are the datasets of numbers with three axes or more, or, where there are none, those with two: what has
    fewer is a table, as most small things in such files are.

    Raises:
        VolumeError: there are too many objects to look at.
    """
    with _opened(file) as opened:
        group = _get(opened, key)
        ranks = {} if group is None or _is_dataset(group) else _ranks(group, file)
    least = 3 if any(rank >= 3 for rank in ranks.values()) else 2
    names = sorted(name for name, rank in ranks.items() if rank >= least)
    groups = {} if enter_groups else _groups_of_levels(key, names)
    yield from names if enter_groups else sorted({groups.get(name) or _group(name, names) for name in names})


def _group(name: str, names: Sequence[str]) -> str:
    """Return the group of levels s0, s1 … that the array `name` is one of, or `name`."""
    parent, _, last = name.rpartition("/")
    is_level = re.fullmatch(r"s\d+", last) and f"{parent}/s0".lstrip("/") in names
    return parent if is_level else name


def _ranks(group: h5py.Group, file: Path) -> dict[str, int]:
    """Return the number of axes of each dataset of numbers below `group`, by its key there."""
    ranks: dict[str, int] = {}
    stack, num_objects = [""], 0
    while stack:
        key = stack.pop()
        num_objects += 1
        try:
            node = _get(group, key)
        except VolumeError as error:  # a link to another folder; the others are still listed
            log.warning("%s", error)
            continue
        if num_objects > MAX_OBJECTS:
            raise VolumeError(f"{file} has more than {MAX_OBJECTS} groups and datasets; name the dataset by its key")
        if node is None:
            continue
        if not _is_dataset(node):
            # A stored type has no members; a name of dots would lead out of the file.
            members = [name for name in node if name not in (".", "..")] if hasattr(node, "keys") else []
            stack += [f"{key}/{name}".lstrip("/") for name in members] if key.count("/") < MAX_DEPTH else []
        elif node.shape and node.dtype.kind in "iufb" and 0 not in node.shape:
            ranks[key] = len(node.shape)
    return ranks


@dataclass(frozen=True)
class VirtualSource:
    """Files with voxels of a virtual dataset.

    Attributes:
        files: one, and those that it is made of itself; or those of all numbers.
        boxes: first and last index that it may fill, (n, 2, axes); None where that is not known.
    """

    files: frozenset[Path]
    boxes: np.ndarray | None = None

    def fills(self, positions: Sequence[range]) -> bool:
        """Return whether voxels at `positions` may be of these files."""
        if self.boxes is None or not all(positions):
            return True
        first, last = ([along[end] for along in positions] for end in (0, -1))
        is_hit = (self.boxes[:, 0] <= last) & (self.boxes[:, 1] >= first)
        return bool(is_hit.all(axis=1).any())


class Hdf5Array:
    """An open dataset, which several threads may read in turn; `cache_bytes` of decoded chunks are kept in memory."""

    def __init__(self, header: Header, cache_bytes: int) -> None:
        settings = {"rdcc_nbytes": cache_bytes} if cache_bytes else {}
        self._file = header.known["file"]
        with _lock, _damage_of(self._file):
            self._status = self._file.stat()
            self._opened = _open(self._file, **settings)
            _arrays.add(self)
            self._dataset = self._opened[header.known["key"]]
            self._dtype = header.dtype
            self._compression = self._dataset.id.get_storage_size() / max(1, self._dataset.nbytes)
            self._short = _short_chunks(self._dataset)
            self._sources = _find_sources(self._dataset)

    def read(self, index: Index) -> np.ndarray:
        with _lock:
            if not self._opened:
                raise VolumeError(f"{self._file} has been written since it was opened; open it again")
            self._check_short(index)
            self._try_sources(index)
            data = np.asarray(self._dataset[index])
            self._try_sources(index)
        tensorstore.count(read=round(data.nbytes * self._compression))  # HDF5 does not tell
        native = np.asarray(data, data.dtype.newbyteorder("="), order="C")
        return native.view(self._dtype) if native.dtype.kind == "i" else native  # which may be meant as unsigned

    def close_unless(self, status: os.stat_result) -> None:
        """Close the file if `status` is of the same file, written since: HDF5 takes it from what it remembers."""
        if os.path.samestat(self._status, status) and _written(self._status) != _written(status):
            self._opened.close()

    def _try_sources(self, index: Index) -> None:
        """Raise where files that `index` needs cannot be opened: HDF5 shows fill in their place."""
        positions = ranges(index, self._dataset.shape) if self._sources else []
        touched = (source.files for source in self._sources if source.fills(positions))
        for file in frozenset().union(*touched) - {self._file}:
            with _opened(file):
                pass

    def _check_short(self, index: Index) -> None:
        positions = ranges(index, self._dataset.shape)
        for corner, size in self._short.items():
            sides = zip(positions, corner, self._dataset.chunks, strict=True)
            if all(r and r[0] < a + c and r[-1] >= a for r, a, c in sides):
                raise VolumeError(f"{self._file}: the chunk at {corner} has {size} bytes, less than its checksum")


def _short_chunks(dataset: h5py.Dataset) -> dict[tuple[int, ...], int]:
    """Return the corners and bytes of chunks too short to hold their checksum, which make HDF5 2.0 crash.

    All are checked: damaged trees hold a chunk twice, and the library may report the one that it does not read.
    """
    short: dict[tuple[int, ...], int] = {}

    def look(stored: Any) -> None:  # Any: h5py's StoreInfo
        if stored.size < CHECKSUM_BYTES:
            short[tuple(map(int, stored.chunk_offset))] = int(stored.size)

    if dataset.fletcher32:
        dataset.id.chunk_iter(look)
    return short


def _written(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _open(path: Path, **settings: int) -> h5py.File:
    """Open a file; whoever has had it open since before it was written has to open it again."""
    import h5py

    try:
        with _lock:
            status = path.stat()
            for array in list(_arrays):
                array.close_unless(status)
            return h5py.File(path, "r", locking="best-effort", **settings)
    except Exception as error:  # damaged bytes make h5py raise errors of many kinds
        sizes = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
        raise VolumeError(f"{path}{sizes} cannot be opened as HDF5: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Give the file, open for reading until the `with` ends; errors name it."""
    with _lock, _damage_of(path), _open(path) as file:
        yield file


@contextmanager
def _damage_of(file: Path) -> Iterator[None]:
    """Turn the many kinds of errors that h5py raises of damaged bytes into one that names the file."""
    try:
        yield
    except VolumeError:
        raise
    except FileNotFoundError as error:
        raise VolumeError(f"{file} cannot be opened: {error.strerror}") from error
    except Exception as error:
        raise VolumeError(f"{file} is damaged: {error}") from error


def _get(group: h5py.Group, key: str) -> h5py.Group | h5py.Dataset | None:
    """Return the object `key` below `group`, None where there is none or its link leads nowhere.

    Raises:
        VolumeError: a link leads to a file elsewhere, or to one that is not there.
    """
    node, file = group, Path(group.file.filename)
    try:
        for part in filter(None, key.split("/")):
            link = node.get(part, getlink=True)
            if hasattr(link, "filename"):
                target = check_beside(link.filename, Path(node.file.filename))
                if not find_file(target):
                    raise VolumeError(f"{node.file.filename}: {key} is in {target}, which is not there; put it there")
            node = node[part]
    except VolumeError:
        raise
    except (KeyError, OSError, RuntimeError, AttributeError):  # RuntimeError: links in a circle; a dataset has no parts
        return None
    check_beside(node.file.filename, file)  # a soft link may have led through another
    return node


def _is_dataset(node: h5py.Group | h5py.Dataset) -> bool:
    return hasattr(node, "chunks")


def _header(file: Path, key: str, dataset: h5py.Dataset, opened: h5py.File) -> Header:
    name = f"{file}/{key}"
    if not dataset.shape or 0 in dataset.shape:
        raise VolumeError(f"{name} has shape {dataset.shape}; it holds no voxels")
    _find_sources(dataset)
    shape = voxels(dataset.shape, "shape", Path(name))
    attributes = _attributes(dataset)
    labels = (attributes.get("DIMENSION_LABELS"), _dimensions(dataset))
    axes, odd_axes = read_axes(attributes, len(shape), *labels)
    meaning = _meaning(file, key, dataset, opened)
    is_alone = not dataset.is_virtual and not dataset.external and dataset.file.filename == str(file)
    return Header(
        folder=file / key,
        format="hdf5",
        shape=meaning.shape,
        dtype=meaning.dtype,
        chunks=tuple(map(int, dataset.chunks)) if dataset.chunks else flat_chunk(shape),
        codec=_codec(dataset, name),
        axes=axes or meaning.axes,
        odd_axes=odd_axes,
        attributes=attributes,
        known={"file": file, "key": key},
        unsupported="an HDF5 file",
        place=meaning.place,
        data_files=() if is_alone else None,
        notes=(*meaning.notes, *value_notes(attributes)),
    )


def _meaning(file: Path, key: str, dataset: h5py.Dataset, opened: h5py.File) -> Meaning:
    """Return the shape, type and place that the program which wrote the dataset means."""

    def attributes(other: str) -> Tree:
        node = _get(opened, other)
        return {} if node is None else _attributes(node)

    def table(other: str) -> list[list[float]] | None:
        node = _get(opened, other)
        if node is None or not _is_dataset(node) or node.ndim != 2 or node.size > MAX_TABLE:
            return None
        return node[...].astype(float).tolist() if node.dtype.kind in "iuf" else None

    shape, dtype = tuple(map(int, dataset.shape)), voxel_dtype(dataset.dtype, f"{file}/{key}")
    described = Hdf5Dataset(file, key, shape, dtype, attributes, table)
    meanings = (program.read_meaning(described) for program in PROGRAMS)
    meaning = next(filter(None, meanings), Meaning(shape, dtype))
    if meaning.dtype.kind == "i" and is_unsigned(_attributes(dataset)):
        return replace(meaning, dtype=unsigned(meaning.dtype))
    return meaning


def read_datasets(file: Path, key: str) -> tuple[ListedLevel, ...] | None:
    """Return the levels, finest first, of the group `key` if a program names them in its own way, else None."""
    if not any(program.GROUP.fullmatch(key) for program in PROGRAMS):
        return None
    keys = [f"{key}/{name}" for name in walk(file, key, enter_groups=True)]
    levels = next((levels for program in PROGRAMS for levels in program.find_levels(keys)), None)
    return None if levels is None else tuple(map(ListedLevel, levels.keys))


def _groups_of_levels(key: str, names: Sequence[str]) -> dict[str, str]:
    """Return the group of each of the datasets `names` in the group `key` that a program means as a level of one."""
    prefix = f"{key}/" if key else ""
    volumes = [levels for program in PROGRAMS for levels in program.find_levels([prefix + name for name in names])]
    inner = [each for each in volumes if each.group.startswith(prefix)]
    return {
        f"{each.group}/{name}".removeprefix(prefix): each.group.removeprefix(prefix)
        for each in inner
        for name in each.keys
    }


def open_array(header: Header, cache_bytes: int) -> Hdf5Array:
    return Hdf5Array(header, cache_bytes)


def is_hdf5(file: Path, start: bytes) -> bool:
    """Tell whether the signature stands at byte 0, 512, 1024 and so on, as HDF5 allows (MATLAB puts it at 512)."""
    size, offset = file.stat().st_size, 0
    with file.open("rb") as stream:
        while offset + 8 <= size:
            stream.seek(offset)
            if stream.read(8) == MAGIC:
                return True
            offset = max(512, 2 * offset)
    return False


def _find_sources(dataset: h5py.Dataset, chain: tuple[tuple[str, str], ...] = ()) -> list[VirtualSource]:
    """Return the files that a virtual dataset is made of; of other files none are needed.

    HDF5 shows fill in place of what is missing, and a dataset that is made of itself overflows its stack.

    Raises:
        VolumeError: one is missing or lies elsewhere, or the dataset is made of itself.
    """
    file = Path(dataset.file.filename)
    _check_external(dataset, file)
    here = (str(file), dataset.name)
    if here in chain or len(chain) > MAX_DEPTH:
        raise VolumeError(f"{file}{dataset.name} is a virtual dataset that is made of itself; it is damaged")
    boxes = defaultdict[tuple[str, str], list[Any]](list)  # Any: two tuples of indices
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        is_numbered = "%b" in source.file_name + source.dset_name
        boxes[source.file_name, source.dset_name] += [] if is_numbered else [source.vspace.get_select_bounds()]
    return [
        VirtualSource(_numbered_files(file, name))
        if "%b" in name + key
        else VirtualSource(_files_below(dataset, name, key, (*chain, here)), np.array(found))
        for (name, key), found in sorted(boxes.items())
    ]


def _check_external(dataset: h5py.Dataset, file: Path) -> None:
    for name, _, _ in dataset.external or ():
        check_beside(name, file)
        if not Path(name).is_absolute() and "HDF5_EXTFILE_PREFIX" not in os.environ and Path.cwd() != file.parent:
            raise VolumeError(
                f"{file}{dataset.name} has its voxels in {name}, which HDF5 looks for in the current folder; set "
                "HDF5_EXTFILE_PREFIX to '${ORIGIN}', so that it looks beside the file"
            )


def _files_below(dataset: h5py.Dataset, name: str, key: str, chain: tuple[tuple[str, str], ...]) -> frozenset[Path]:
    """Return the file `name`, whose dataset `key` `dataset` is made of, and the files which that is made of itself."""
    file = Path(dataset.file.filename)
    path = file if name == "." else check_beside(name, file)
    if not path.exists():
        if "HDF5_VDS_PREFIX" in os.environ:  # HDF5 looks for it elsewhere
            return frozenset()
        raise VolumeError(
            f"{file}{dataset.name} is made of several files, of which {name} is missing; put it beside {file}"
        )
    with _opened(path) as opened:
        node = _get(opened, key)
        found = _find_sources(node, chain) if node is not None and _is_dataset(node) else []
    return frozenset({path}.union(*(source.files for source in found)))


def _numbered_files(file: Path, name: str) -> frozenset[Path]:
    """Return the files that `name` stands for, with a number for %b; raise if one holds virtual datasets itself."""
    pattern = check_beside("itself" if name == "." else name, file)
    paths = [file] if name == "." else list(pattern.parent.glob(pattern.name.replace("%b", "*")))
    for path in paths:
        with _opened(path) as opened:
            own = [key for key in _ranks(opened, path) if opened[key].is_virtual]
        if own:
            raise VolumeError(
                f"{file} is made of {path}, whose {own[0]} is virtual; volpipe follows numbered files once"
            )
    return frozenset(paths)


def _codec(dataset: h5py.Dataset, name: str) -> str:
    """Return the codec of the chunks, for people; raise if it is not installed."""
    import h5py

    settings = dataset.id.get_create_plist()
    label = "raw"
    for i in range(settings.get_nfilters()):
        number, _, values, label_bytes = settings.get_filter(i)
        known = FILTERS.get(number, label_bytes.decode(errors="replace") or "unknown")
        if not h5py.h5z.filter_avail(number):
            raise VolumeError(
                f"{name} is compressed with HDF5 filter {number} ({known}), which is not installed here; point "
                "HDF5_PLUGIN_PATH to it (pip install hdf5plugin brings the usual ones) or write gzip with h5repack"
            )
        if known in CODECS:
            label = f"{known} {values[0]}" if known == "gzip" and values else known
    return label


def _dimensions(dataset: h5py.Dataset) -> list[str]:
    """Return the names of netCDF's dimensions of a dataset, [] where it has none.

    Labels are read as an attribute instead: dims[i].label crashes on damaged ones, in HDF5 2.0.
    """
    try:
        return [dataset.file[entry[0]].name.rpartition("/")[2] for entry in dataset.attrs["DIMENSION_LIST"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OSError, RuntimeError):
        return []


def _attributes(node: h5py.Group | h5py.Dataset) -> Tree:
    """Return the attributes as JSON values; others are left out."""
    return {name: value for name in node.attrs if (value := _value(node.attrs, name)) is not None}


def _value(attributes: Mapping[str, Any], name: str) -> object:
    try:
        value = attributes[name]
        value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        return plain({name: _decoded(value)})[name]
    except (VolumeError, OSError, TypeError, ValueError) as error:  # a type that only its own software knows
        if "allocation failed" in str(error):
            raise MemoryError(f"attribute {name} asks for too much memory") from error
        return None


def _decoded(value: object) -> object:
    """Return bytes, also those in lists, as text: UTF-8, or else Latin-1, in which old software writes µ and Å."""
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, bytes | str):
        return value
    text = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1")


def write(path: Path, key: str, spec: ArraySpec, where: Place, parts: Iterable[Part]) -> None:
    """Write an array to the file `path`, at `key`, from its parts, whole chunks, in any order."""
    import h5py

    codec = {"gzip": {"compression": "gzip", "compression_opts": spec.codec_level}}.get(spec.codec, {})
    with _Draft(path) as draft, h5py.File(draft, "w") as file:
        dataset = file.create_dataset(key, spec.shape, spec.dtype, chunks=spec.chunks, **codec)
        for axis, dim in zip(spec.axes, dataset.dims, strict=True):
            dim.label = axis
        for name, value in spec.attributes.items():
            dataset.attrs[name] = value
        for box, data in parts:
            whole = (slice(0, len(data)),) if len(spec.shape) == 4 else ()
            dataset[whole + box.slices] = data if whole else data[0]
            draft.check()
        file.close()  # which writes what HDF5 has kept
        draft.check()


class _Draft(io.FileIO):
    """A file for HDF5 to write, which takes all that it is given: HDF5 2.0 crashes where it cannot write or close.

    What is written after the first error is kept in memory, for HDF5 to read again, until `check` raises that error.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+b")
        self._error: OSError | None = None
        self._kept: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error

    def write(self, data: ReadableBuffer, /) -> int:
        left, place = memoryview(data).cast("B"), self.tell()
        end = place + len(left)
        try:
            while left and self._error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self._error = error
        if left:
            self._kept.append((end - len(left), bytes(left)))
            self.seek(end)
        return end - place

    def readinto(self, into: WriteableBuffer, /) -> int:
        out, place = memoryview(into).cast("B"), self.tell()
        if self._error is None:
            return super().readinto(into)
        out[:] = bytes(len(out))
        super().readinto(out)
        for start, data in self._kept:
            low, high = max(start, place), min(start + len(data), place + len(out))
            if low < high:
                out[low - place : high - place] = data[low - start : high - start]
        self.seek(place + len(out))
        return len(out)

    def truncate(self, size: int | None = None, /) -> int:
        try:
            return super().truncate(size) if self._error is None else self.tell()
        except OSError as error:
            self._error = error
            return self.tell()


def _place_attributes(where: Place) -> Tree:
    size = where.voxel_size_nm
    return stated_place(where) | ({} if size is None else {"element_size_um": [v / 1000 for v in size]})


HDF5 = Format(
    name="hdf5",
    title="HDF5",
    row=ReadRow(
        "HDF5 (`cells.h5/volumes/raw`)",
        "chunked, contiguous, external, virtual; filters that h5py has, or `HDF5_PLUGIN_PATH`",
        "`resolution`, `voxel_size`, `element_size_um`; Imaris (.ims); BigDataViewer's XML",
    ),
    suffixes=(".h5", ".hdf5", ".hdf"),
    recognises=is_hdf5,
    files=FileReader(read_header, open_array, read_attributes, read_datasets, exists, walk, hdf5_probe.check),
    writing=Writing(
        ("gzip", "raw"),
        write_file=write,
        default_key=DEFAULT_KEY,
        record=json.dumps,
        place_attributes=_place_attributes,
    ),
)
