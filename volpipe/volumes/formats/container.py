"""The contents of a folder or a file: arrays, multiscale groups and plates, listed, opened and created in any format.

Not here: references to volumes (volumes.volume), or the formats themselves. A key names an array inside a container.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Index
from volpipe.text import looks
from volpipe.volumes.dialects import bigdataviewer
from volpipe.volumes.dialects.attributes import read_place as read_listed_place
from volpipe.volumes.formats import (
    flat,
    hdf5,
    hdf5_probe,
    mrc,
    n5,
    npy,
    ome,
    picture,
    precomputed,
    tiff,
    tiff_folder,
    zarr,
)
from volpipe.volumes.formats.ome import Dataset
from volpipe.volumes.storage import object_store, paths, tensorstore
from volpipe.volumes.storage.chunk_files import as_fill
from volpipe.volumes.storage.fetched_array import INDEX_BYTES, FetchedArray, LocalArray, can_fetch
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Header,
    Multiscale,
    Place,
    Tree,
    check_same,
    merge_json,
    plain,
    read_json,
    usual_axes,
    write_json,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import StoredArray

log = logging.getLogger(__name__)
T = TypeVar("T")

MARKS = {
    "n5": ("attributes.json",),
    "zarr2": (".zarray", ".zgroup"),
    "zarr3": ("zarr.json",),
    "precomputed": (),  # its `info` is a name that other files may have
}
METADATA_NAMES = ("zarr.json", ".zarray", ".zattrs", ".zgroup", "attributes.json", "info")  # of files, of all formats
USUAL_NAMES = ("attributes.json", "zarr.json")  # of those that are asked for first
GROUP_NAMES = (*itertools.chain.from_iterable(MARKS.values()), precomputed.FILE)  # by which a folder is of a format
SUFFIXES = precomputed.CONTAINERS
LEAST_SUFFIX, NEARLY = 3, 0.75  # letters and likeness (difflib) of what is a slip of the keyboard
ARRAY_FORMATS = {  # of the arrays in a folder, by its format
    **{name: name for name in ("n5", "zarr2", "zarr3", "precomputed")},
    "ome-zarr-0.4": "zarr2",
    "ome-zarr-0.5": "zarr3",
}
SHARDED = ("zarr3", "precomputed")  # of these array formats
ATTRIBUTE_FILES = {"zarr3": "zarr.json", "zarr2": ".zattrs", "n5": "attributes.json", "precomputed": precomputed.FILE}
RECORD, INCOMPLETE = "volpipe", "incomplete"  # the attribute of what we write, and its key while that is unfinished
RUN_KEY = "run"  # of the group that says what of an output changes from run to run
METADATA_FILES = {"n5": "attributes.json", "zarr2": ".zarray", "zarr3": "zarr.json"}  # beside the chunks
MAX_DEPTH = 12
MAX_FOLDERS = 10_000
MRC_MAP = 208  # where "MAP " stands
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
MOST_OPENED = 256  # arrays that a process keeps, 30 KiB each (2026-11-23); the oldest is opened anew where it is needed
_opened: dict[tuple[int, Location, object], tuple[object, object]] = {}
_lock = threading.Lock()


class FileFormat(Protocol):
    """A format of single files; modules of formats are of this kind."""

    def read_header(self, file: Path, key: str) -> Header | None:
        """Return the header of the array `key` in `file`, None where that is none, but may hold some."""

    def read_attributes(self, file: Path, key: str) -> Tree:
        """Return the attributes of the group or array `key`, {} where there is none."""

    def read_datasets(self, file: Path, key: str) -> tuple[Dataset, ...] | None:
        """Return the levels at `key` that the file itself names, in that order; None where it names none."""

    def exists(self, file: Path, key: str) -> bool:
        """Return whether there is an array, or a group of them, at `key`."""

    def walk(self, file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
        """Yield the keys, counted from `key`, of all arrays there; groups of levels count as one unless entered."""

    def open_array(self, header: Header, cache_bytes: int) -> StoredArray:
        """Return the array of `header`; where voxels must be decoded, `cache_bytes` of them are kept in memory."""


@dataclass(frozen=True)
class OneArray:
    """A format whose files hold one array each."""

    read: Callable[[Path], Header]
    open_array: Callable[[Header, int], StoredArray] = flat.open_array

    def read_header(self, file: Path, key: str) -> Header | None:
        return None if key else self.read(file)

    def read_attributes(self, file: Path, key: str) -> Tree:
        return {} if key else dict(self.read(file).attributes)

    def read_datasets(self, file: Path, key: str) -> tuple[Dataset, ...] | None:
        return None

    def exists(self, file: Path, key: str) -> bool:
        return not key

    def walk(self, file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
        yield ""


FILES: dict[str, FileFormat] = {
    "hdf5": hdf5,
    "tiff": tiff,
    "mrc": OneArray(mrc.read_header),
    "npy": OneArray(npy.read_header),
    "picture": OneArray(picture.read_as_grey, picture.open_array),
}


def chunk_channels(array_format: str, channels: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of `channels`, () of an array without that axis, lie in a chunk: precomputed has all in each."""
    return channels if array_format == "precomputed" else (1,) * len(channels)


def locate(location: str | os.PathLike[str], key: str | None = None) -> tuple[Location, str]:
    """Return the container that `location` is, or lies in, and the key of what is meant in it.

    A container is the nearest file, or folder named .n5, .zarr or .precomputed, or else the topmost of the folders
    that say they are groups. BigDataViewer's XML stands for the container that it describes.

    Raises:
        VolumeError: `location` is a URL that volpipe does not read, or `key` leaves the container.
    """
    path = absolute(location)
    parts = PurePosixPath((key or "").strip("/")).parts
    if ".." in parts:
        raise VolumeError(f"key {key!r} leaves the container {path}")
    container = _root(path)
    described = bigdataviewer.read_container(container) if isinstance(container, Path) else None
    return described or container, str(PurePosixPath(*inside(path, container), *parts)).removeprefix(".")


def check_suffix(what: str, name: str) -> None:
    """Refuse an output, which `what` names, whose suffix is nearly that of a format: a slip of the keyboard.

    Raises:
        VolumeError: with the name that it may mean.
    """
    suffix = PurePosixPath(name).suffix
    if suffix.lower() in SUFFIXES or len(suffix) < LEAST_SUFFIX or suffix[1:].isdecimal():
        return
    if close := difflib.get_close_matches(suffix.lower(), SUFFIXES, n=1, cutoff=NEARLY):
        raise VolumeError(f"{what}: {suffix} is no format; do you mean {name.removesuffix(suffix)}{close[0]}?")


def absolute(path: str | os.PathLike[str] | object_store.Remote) -> Location:
    """Return `path` from the root, without "..", links as they are: what they lead to may differ between machines."""
    return paths.locate(path)


def inside(folder: Location, container: Location) -> tuple[str, ...]:
    """Return the parts of the key of `folder` in `container`."""
    if isinstance(folder, object_store.Remote) and isinstance(container, object_store.Remote):
        return folder.parts[len(container.parts) :]
    return Path(str(folder)).relative_to(Path(str(container))).parts


def _root(path: Location) -> Location:
    folders: tuple[Location, ...] = (path, *path.parents)
    for folder in folders:
        if folder.suffix.lower() in SUFFIXES or (isinstance(folder, Path) and folder.is_file()):
            return folder
    root = path
    while root != root.parent and _is_group(root.parent):
        root = root.parent
    return root


def _is_group(folder: Location) -> bool:
    """Return whether `folder` says that it is a group; on the web, where each file costs a request, of N5 or Zarr."""
    return any(_is_of(name, folder) for name in MARKS if name != "precomputed" or isinstance(folder, Path))


def split(folder: Location) -> tuple[Path, str] | None:
    """Return the file that `folder` is, or leads on inside of, and the key there; None where no file is on its way."""
    if not isinstance(folder, Path):
        return None
    for file in (folder, *folder.parents):
        if file.is_dir():
            return None
        if file.is_file():
            return file, "/".join(folder.relative_to(file).parts)
    return None


def file_format(file: Path) -> FileFormat:
    """Return the format of a file, by its bytes and not by its name; see `_find_format`."""
    return FILES[_find_format(file)]


def _find_format(file: Path) -> str:
    """Return "hdf5", "tiff", "mrc", "npy" or "picture", by the bytes of the file and not by its name.

    Raises:
        VolumeError: it is none of these, or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(mrc.SIZE)
    except OSError as error:
        paths.check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    if start[:4] in tiff.MAGICS:
        return "tiff"
    if start.startswith(npy.MAGIC):
        return "npy"
    if start.startswith(picture.MAGICS):
        return "picture"
    if start[MRC_MAP:].startswith(mrc.MARK):
        return "mrc"
    if _is_hdf5(file):
        return "hdf5"
    packer = next((name for mark, name in PACKED.items() if start.startswith(mark)), "")
    if packer:
        raise VolumeError(f"{file} is packed by {packer}, so that no box of it can be read; unpack it first")
    if mrc.is_unmarked(file, start):
        return "mrc"
    raise VolumeError(
        f"{file} is a file of {file.stat().st_size} bytes in no format that volpipe knows{looks(start)}: it reads "
        "HDF5, TIFF, MRC and .npy files, PNG and JPEG, and N5 and Zarr folders"
    )


def _is_hdf5(file: Path) -> bool:
    """Tell whether the signature stands at byte 0, 512, 1024 and so on, as HDF5 allows (MATLAB puts it at 512)."""
    size, offset = file.stat().st_size, 0
    with file.open("rb") as stream:
        while offset + 8 <= size:
            stream.seek(offset)
            if stream.read(8) == hdf5.MAGIC:
                return True
            offset = max(512, 2 * offset)
    return False


def probe_file(folder: Location) -> None:
    """Raise where `folder` is, or leads into, a file whose metadata crash or hang the library that reads them."""
    within = split(folder)
    if within is not None and _find_format(within[0]) == "hdf5":
        hdf5_probe.check(within[0])


def why_several(folder: Location) -> str:
    """Return why a file at `folder` holds several arrays where a stack may be meant, "" where it does not say."""
    within = split(folder)
    return tiff.why_several(within[0]) if within is not None and _find_format(within[0]) == "tiff" else ""


def read_header(folder: Location) -> Header | None:
    """Return the header of the array at `folder`, None where there is none; VolumeError where it is broken."""
    within = split(folder)
    if within is not None:
        return file_format(within[0]).read_header(*within)
    with _reading([folder], USUAL_NAMES):
        header = n5.read_header(folder) or zarr.read_header(folder) or precomputed.read_header(folder)
    if header is not None:
        paths.check_letters(folder)
    return header or (tiff_folder.read_header(folder) if isinstance(folder, Path) else None)


def read_attributes(folder: Location) -> Tree:
    """Return the attributes of the group at `folder`, {} where it has none."""
    within = split(folder)
    if within is not None:
        return file_format(within[0]).read_attributes(*within)
    with _reading([folder], USUAL_NAMES):
        return n5.read_attributes(folder) or zarr.read_attributes(folder) or precomputed.read_attributes(folder)


def _reading(folders: Iterable[Location], names: Sequence[str]) -> AbstractContextManager[None]:
    return paths.reading_once(folder / name for folder in folders for name in names)


def read_datasets(folder: Location) -> tuple[Dataset, ...] | None:
    """Return the levels of the multiscale group at `folder`, finest first; None where it is none.

    They are those that its `multiscales` names, or else the arrays s0, s1, … in it.

    Raises:
        VolumeError: its metadata are wrong.
    """
    within = split(folder)
    if within is None:
        named = ome.read_datasets(read_attributes(folder), folder)
    else:
        named = file_format(within[0]).read_datasets(*within)
    named = named or precomputed.read_datasets(folder)
    if named is not None:
        is_n5 = within is None and bool(n5.read_attributes(folder))
        named = tuple(replace(each, axes=n5.in_c_order(each.axes)) if is_n5 and each.axes else each for each in named)
        return _finest_first(folder, named)
    count = 0
    while _holds(read_header, folder / f"s{count}"):
        count += 1
    return tuple(Dataset(f"s{i}") for i in range(count)) or None


def _finest_first(folder: Location, datasets: tuple[Dataset, ...]) -> tuple[Dataset, ...]:
    """Return the levels `datasets` from the finest on, by their scales, or else their shapes.

    Specifications list them so. Where a program listed them otherwise, they have a note.
    """
    coarseness = [dataset.coarseness for dataset in datasets]
    if len(datasets) > 1 and (min(coarseness) <= 0 or len({*coarseness}) == 1):
        try:
            headers = [read_header(folder / dataset.path) for dataset in datasets]
        except RemoteError:
            raise
        except VolumeError:  # a level that is damaged is named where it is opened
            return datasets
        coarseness = [0.0 if header is None else 1 / math.prod(header.shape) for header in headers]
    order = sorted(range(len(datasets)), key=coarseness.__getitem__)
    if order == [*range(len(datasets))]:
        return datasets
    note = f"its levels are not listed finest first: level 0 is {datasets[order[0]].path}, the finest"
    return tuple(replace(datasets[i], notes=(note,)) for i in order)


def read_levels(folder: Location, datasets: tuple[Dataset, ...]) -> list[Header]:
    """Return the headers of all levels of a group; raise unless they exist and have the same axes."""
    headers = []
    for dataset in datasets:
        header = read_header(folder / dataset.path)
        if header is None:
            raise VolumeError(
                f"{folder} names the array {dataset.path!r}, which does not exist; the copy is "
                "incomplete or the metadata are wrong"
            )
        headers.append(header)
        ranks = {"level 0": len(headers[0].shape), "the group's axes": len(dataset.axes or header.shape)}
        for what, rank in ranks.items():
            if len(header.shape) != rank:
                raise VolumeError(f"{folder}: array {dataset.path!r} has {len(header.shape)} axes, {what} {rank}")
    if len({header.dtype for header in headers}) > 1:
        log.warning("%s: its levels have different types: %s", folder, ", ".join(str(h.dtype) for h in headers))
    return headers


def _holds(read: Callable[[Location], object], folder: Location) -> bool:
    """Return whether there is an array, or a group of levels, that `read` gives the metadata of."""
    try:
        return read(folder) is not None
    except RemoteError:
        raise
    except VolumeError:
        return True  # a broken one: opening it gives the error


def read_place(header: Header, container: Location) -> Place:
    """Return where the array of `header` says that it lies, or the groups around it if it is in N5."""
    if header.place is not None:
        return header.place
    if header.format != "n5":
        return read_listed_place(header.attributes, header.axes or usual_axes(header.shape))
    parts = inside(header.folder, container)
    parents = [n5.read_attributes(container.joinpath(*parts[:n])) for n in range(len(parts))]
    place = n5.read_place(header, parents)
    if place.voxel_size_nm is not None or not isinstance(container, Path):
        return place
    factors = n5.read_factors(header, parents)
    return (factors and bigdataviewer.read_n5_place(container, "/".join(parts), factors)) or place


def walk(root: Location, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys of all arrays under `root`, sorted; multiscale groups count as one unless they are entered.

    Raises:
        VolumeError: there are too many folders to look into.
    """
    within = split(root)
    if within is not None:
        yield from file_format(within[0]).walk(*within, enter_groups=enter_groups)
        return
    if isinstance(root, object_store.Remote) and not root.is_s3:
        yield from _named_arrays(root, enter_groups=enter_groups)
        return
    stack, num_folders = [""], 0
    while stack:
        key = stack.pop()
        num_folders += 1
        if num_folders > MAX_FOLDERS:
            raise VolumeError(f"{root} has more than {MAX_FOLDERS} folders; name the array by its key")
        if _holds(read_header, root / key) or (not enter_groups and _holds(read_datasets, root / key)):
            yield key
        elif key.count("/") < MAX_DEPTH:
            stack += [f"{key}/{name}".lstrip("/") for name in reversed(paths.list_folders(root / key))]


def _named_arrays(root: object_store.Remote, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys in the consolidated metadata of `root`, where folders cannot be listed."""
    names = zarr.consolidated_arrays(root)
    if names is None:
        raise VolumeError(
            f"{root}: no array, no multiscales and no consolidated metadata, and a web server cannot be asked what it "
            "holds; check the address, and name the array: …/volume.zarr/key"
        )
    groups: set[str] = set()
    for name in names:
        parents = [name[:i] for i, letter in enumerate(name) if letter == "/"]
        around = (key for key in parents if key in groups or (not enter_groups and _holds(read_datasets, root / key)))
        group = next(around, None)
        if group not in groups:
            yield name if group is None else group
        groups |= {group} if group is not None else set()


def once(folder: Location, purpose: object, make: Callable[[], T], *, has_slices: bool = False) -> T:
    """Return this process's object for the folder and purpose, made anew if the metadata have changed."""
    place = (os.getpid(), folder, purpose)
    now = state(folder, has_slices=has_slices)
    known = _opened.get(place)
    if known is None or known[0] != now:
        with _lock:
            known = _opened.get(place)
            if known is None or known[0] != now:
                while len(_opened) >= MOST_OPENED:  # a batch opens those of thousands of datasets
                    del _opened[next(iter(_opened))]
                known = _opened[place] = (now, make())
    return known[1]  # type: ignore[return-value]  # the purpose decides which


def state(folder: Location, *, has_slices: bool = False) -> tuple[object, ...]:
    """Return a value that changes when an array's metadata do; those of slices are their names."""
    states = () if has_slices else paths.state(folder, METADATA_FILES.values())
    if states or not (has_slices or isinstance(folder, Path)):
        return states
    within = split(folder)
    if within is not None:
        return paths.state(within[0].parent, [within[0].name])
    if has_slices or not isinstance(folder, Path):
        return paths.state(folder.parent, [folder.name])
    return tuple(entry for root in precomputed.roots(folder) for entry in paths.state(root, [precomputed.FILE]))


def open_array(
    header: Header, cache_bytes: int, *, live: bool, check_missing: Callable[[Index], None] = as_fill
) -> StoredArray:
    """Return the array through its format, or by its chunk files; what tensorstore does not know, by zarr-python.

    `check_missing` raises where the file at a place of the grid, which is not there, should be.
    """
    if "names" in header.known:
        return tiff_folder.SliceArray(header, cache_bytes)
    if header.format in FILES:
        return FILES[header.format].open_array(header, cache_bytes)
    try:
        if not header.unsupported:
            if isinstance(header.folder, Path):
                array = tensorstore.open_array(header, cache_bytes=cache_bytes, live=live)
                return LocalArray(header, array, check_missing)
            array = tensorstore.open_array(header, cache_bytes=max(cache_bytes, INDEX_BYTES), live=live)
            return FetchedArray(header, cache_bytes, check_missing, live=live) if can_fetch(header) else array
    except ValueError as error:
        if header.format == "n5":
            raise VolumeError(f"{header.folder}: {error}") from error
        log.info("%s: %s; zarr-python is tried", header.folder, error)
    return zarr.ZarrArray(header)


def create_array(
    path: str | os.PathLike[str] | object_store.Remote, key: str, spec: ArraySpec, format: str = "zarr3"
) -> None:
    """Make the array `key` in the container at `path`: its metadata and those of the groups around it, no voxels.

    Each file is written whole or not at all. An array that is there already, made alike, stays as it is.

    Args:
        path: the container; made if need be.
        key: the array in it, "" for the container itself.
        spec: the array.
        format: "n5", "zarr2", "zarr3", or "precomputed", where the array is a level.

    Raises:
        VolumeError: the format has no such array, or something else is there.
    """
    if format not in MARKS:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(MARKS)}")
    container, key = absolute(path), key.strip("/")
    within = split(container)
    if within is not None:
        raise VolumeError(f"{within[0]} is a file; {format} needs a folder: choose another place")
    if format == "precomputed":
        create_groups(container, key, format)
        precomputed.create_array(container, key, spec)
        return
    if spec.codec == precomputed.SEGMENTATION:
        raise VolumeError(
            f"codec {spec.codec} is precomputed's alone; choose gzip or zstd for {format}, or write to a name that "
            "ends in .precomputed"
        )
    documents = n5.documents(spec) if format == "n5" else zarr.documents(spec, int(format[-1]))
    folder = container / key
    for name, tree in documents.items():
        old = read_json(folder / name)
        if old is not None and (format != "n5" or "dimensions" in old):
            _check_same(old, tree, folder / name)
    create_groups(container, key, format)
    for name, tree in reversed(documents.items()):  # .zattrs first: with .zarray the array is there
        if name != "zarr.json" or not paths.is_file(folder / name):
            merge_json(folder / name, tree)


def grow_array(path: str | os.PathLike[str] | object_store.Remote, key: str, spec: ArraySpec, format: str) -> None:
    """Give the array `key` in the container at `path`, if there is one, the shape of `spec`; no voxel is touched."""
    documents = n5.documents(spec) if format == "n5" else zarr.documents(spec, int(format[-1]))
    for name, tree in documents.items():
        file = absolute(path) / key / name
        shape: Tree = {what: tree[what] for what in ("shape", "dimensions") if what in tree}
        if shape and paths.is_file(file):
            merge_json(file, shape)


def _check_same(old: Tree, new: Tree, file: Location) -> None:
    """Raise unless the metadata `old` in `file` say all that `new` does; they may say more."""
    pairs = [(key, old.get(key), value) for key, value in new.items() if key != "attributes"]
    added = old.get("attributes")
    pairs += [(key, (added or {}).get(key), value) for key, value in new.get("attributes", {}).items()]
    for key, was, value in pairs:
        check_same(file, key, was, value)


def create_groups(container: Location, key: str, format: str) -> None:
    """Make the groups from the `container` down to the parent of `key`; those that are there stay.

    Raises:
        VolumeError: one of them is an array, or of another format.
    """
    parts = PurePosixPath(key).parts
    folders = [container.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    with _reading(folders, GROUP_NAMES):
        for depth, folder in enumerate(folders):
            for other in MARKS:
                if other != format and _is_of(other, folder):
                    raise VolumeError(f"{folder} is {other}; {format} cannot be written into it: choose another place")
            if depth == len(parts):
                return
            if read_header(folder) is not None:
                raise VolumeError(f"{folder} is an array; {key} cannot be made inside it")
            documents = n5.group_documents(depth == 0) if format == "n5" else {}
            documents |= zarr.group_documents(int(format[-1])) if format in ("zarr2", "zarr3") else {}
            for name, tree in documents.items():
                if not paths.is_file(folder / name):
                    write_json(folder / name, tree)


def _is_of(format: str, folder: Location) -> bool:
    if format == "precomputed":
        return precomputed.read_info(folder) is not None
    return any(paths.is_file(folder / mark) for mark in MARKS[format])


def create_multiscale(
    path: str | os.PathLike[str] | object_store.Remote,
    multiscale: Multiscale,
    *,
    format: str = "ome-zarr-0.5",
    key: str = "",
    attributes: Mapping[str, Any] | None = None,  # Any: JSON
) -> None:
    """Write the metadata that make the group `key` of a container a pyramid of arrays, which must exist.

    Args:
        path: the container.
        multiscale: the levels, and where they lie.
        format: "ome-zarr-0.5", "ome-zarr-0.4", "n5" (n5-viewer's, neuroglancer's and COSEM's dialects), "zarr2"
            (COSEM's) or "precomputed".
        key: the group, "" for the container itself.
        attributes: JSON, kept in the group's attribute "volpipe": where the arrays came from.

    Raises:
        VolumeError: an array is missing, of another format or of other axes.
    """
    formats = {name: array_format for name, array_format in ARRAY_FORMATS.items() if name != "zarr3"}
    if format not in formats:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(formats)}")
    container = absolute(path)
    folder = container / key.strip("/")
    _check_levels(folder, multiscale, formats[format])
    create_groups(container, f"{key}/{multiscale.levels[0].key}".strip("/"), formats[format])
    _write_group(folder, multiscale, format, {"volpipe": dict(attributes)} if attributes else {})


def _write_group(folder: Location, multiscale: Multiscale, format: str, own: Tree) -> None:
    """Write what a group, and in some formats its arrays, say of its levels; `own` goes beside it."""
    old = read_attributes(folder)
    mark = mark_in(old)
    if mark is not None:
        own = own | {RECORD: dict(own.get(RECORD) or old[RECORD]) | {INCOMPLETE: mark}}
    if format == "ome-zarr-0.5":
        new = ome.named(ome.group_attributes(multiscale, "0.5", own), is_incomplete=mark is not None)
        merge_json(folder / "zarr.json", {"attributes": old | new})
    elif format == "ome-zarr-0.4":
        new = ome.group_attributes(multiscale, "0.4", own)
        merge_json(folder / ".zattrs", ome.named(new, is_incomplete=mark is not None))
    elif format == "precomputed":
        precomputed.write_group(folder, multiscale, own)
    elif format == "n5":
        for level in multiscale.levels:
            merge_json(folder / level.key / n5.FILE, n5.array_attributes(multiscale, level))
        new = n5.group_attributes(multiscale) | plain(own)
        merge_json(folder / n5.FILE, ome.named(new, is_incomplete=mark is not None))
    else:
        for level in multiscale.levels if multiscale.voxel_size_nm else ():
            merge_json(folder / level.key / ".zattrs", {"transform": n5.cosem_transform(multiscale, level)})
        new = {"multiscales": [n5.cosem_multiscale(multiscale)], **own}
        merge_json(folder / ".zattrs", ome.named(new, is_incomplete=mark is not None))


def mark_in(attributes: Mapping[str, Any]) -> Tree | None:  # Any: JSON
    """Return what `attributes` say of what is unfinished; None where they say nothing of it."""
    record = attributes.get(RECORD)
    if not isinstance(record, dict) or INCOMPLETE not in record:
        return None
    mark = record[INCOMPLETE]
    return mark if isinstance(mark, dict) else {}


def write_mark(container: Location, key: str, mark: Mapping[str, Any] | None, format: str) -> None:  # Any: JSON
    """Write into the attributes of the group or array `key`, which need not exist yet, that it is unfinished.

    With None, that it is whole. Names of images, which viewers show, say so too. One file is written, at once.
    """
    marks = {} if mark is None else {INCOMPLETE: plain(mark)}
    _change_record(container, key, format, lambda old: {k: v for k, v in old.items() if k != INCOMPLETE} | marks)


def write_record(container: Location, record: Mapping[str, Any], format: str) -> None:  # Any: JSON
    """Write into the attributes of a container, which need not exist yet, where what is in it came from."""
    kept = plain(record)
    _change_record(container, "", format, lambda old: kept | {k: v for k, v in old.items() if k == INCOMPLETE})


def _change_record(container: Location, key: str, format: str, change: Callable[[Tree], Tree]) -> None:
    """Write the record in the attributes of the group or array `key` as `change` returns it for the old one."""
    file = container / key / ATTRIBUTE_FILES[format]
    tree = read_json(file)
    if tree is None:
        create_groups(container, key or "s0", format)
        tree = read_json(file) or {}
    old = (tree.get("attributes") or {}) if format == "zarr3" else tree
    record = change(old.get(RECORD) or {})
    new = {key: value for key, value in old.items() if key != RECORD} | ({RECORD: record} if record else {})
    new = ome.named(new, is_incomplete=INCOMPLETE in record)
    if new != old:
        write_json(file, tree | {"attributes": new} if format == "zarr3" else new)


def _check_levels(folder: Location, multiscale: Multiscale, format: str) -> None:
    for level in multiscale.levels:
        header = read_header(folder / level.key)
        if header is None or header.format != format:
            raise VolumeError(f"{folder / level.key} is no {format} array; create it before its group")
        if len(header.shape) != len(multiscale.axes):
            raise VolumeError(f"{folder / level.key} has {len(header.shape)} axes, the group says {multiscale.axes}")
