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
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Index
from volpipe.text import looks
from volpipe.volumes.dialects import bigdataviewer
from volpipe.volumes.formats import ome, tiff_folder, zarr
from volpipe.volumes.formats.format import PACKED, ArrayFolders, FileReader, FolderReader, Format, listed_place
from volpipe.volumes.formats.known import FORMATS, format_named
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.formats.ome_zarr import image_version, label_place
from volpipe.volumes.storage import object_store, paths, tensorstore, zipped
from volpipe.volumes.storage.chunk_files import as_fill
from volpipe.volumes.storage.fetched_array import INDEX_BYTES, FetchedArray, LocalArray, can_fetch
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    Header,
    Multiscale,
    Place,
    Tree,
    merge_json,
    plain,
    read_json,
    write_json,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import StoredArray

log = logging.getLogger(__name__)

READERS = tuple(dict.fromkeys(each.folders for each in FORMATS if each.folders is not None))
ARRAYS = tuple(dict.fromkeys(each.arrays for each in FORMATS if each.arrays is not None))
METADATA_NAMES = tuple(name for each in ARRAYS for name in each.metadata_names)  # of files, of all formats
USUAL_NAMES = tuple(each.usual_file for each in READERS if each.usual_file)  # of those that are asked for first
BESIDE_CHUNKS = tuple(each.metadata_file for each in ARRAYS if each.metadata_file)  # of an array
GROUP_NAMES = tuple(name for each in ARRAYS for name in each.marks or each.metadata_names)  # by which a folder is one's
SUFFIXES = tuple(suffix for each in FORMATS if each.arrays is not None for suffix in each.suffixes)  # of containers
LEAST_SUFFIX, NEARLY = 3, 0.75  # letters and likeness (difflib) of what is a slip of the keyboard
RECORD, INCOMPLETE = "volpipe", "incomplete"  # the attribute of what we write, and its key while that is unfinished
RUN_KEY = "run"  # of the group that says what of an output changes from run to run
MAX_DEPTH = 12
MAX_FOLDERS = 10_000
START_BYTES = 1024  # of a file, by which it is recognised: the longest header is MRC's
MOST_OPENED = 256  # arrays that a process keeps, 30 KiB each (2026-11-23); the oldest is opened anew where it is needed
_lock = threading.Lock()


class OpenArray(Protocol):
    """What is open of an array, whose `header` says in which files that lies."""

    @property
    def header(self) -> Header: ...


T = TypeVar("T", bound=OpenArray)
_opened: dict[tuple[int, Location, object], tuple[object, object, OpenArray]] = {}  # and the states of its files


def locate(location: str | os.PathLike[str], key: str | None = None) -> tuple[Location, str]:
    """Return the container that `location` is, or lies in, and the key of what is meant in it.

    A container is the nearest file, or folder named .n5, .zarr or .precomputed, or else the topmost of the folders
    that say they are groups. BigDataViewer's XML stands for the container that it describes.

    Raises:
        VolumeError: `location` is a URL that volpipe does not read, or `key` leaves the container.
    """
    path = absolute(location)
    _refuse_remote_zip(path)
    parts = PurePosixPath((key or "").strip("/")).parts
    if ".." in parts:
        raise VolumeError(f"key {key!r} leaves the container {path}")
    container = _root(path)
    described = bigdataviewer.read_container(container) if isinstance(container, Path) else None
    return described or container, str(PurePosixPath(*inside(path, container), *parts)).removeprefix(".")


def _refuse_remote_zip(path: Location) -> None:
    """Refuse a zip in a remote place, which only looks like a folder by its name if there is no such file."""
    places = (path, *path.parents) if isinstance(path, object_store.Remote) else ()
    for place in places:
        if place.suffix.lower() in zipped.SUFFIXES and paths.size(place) is not None:
            raise VolumeError(
                f"{place} is a zip, which volpipe reads on a disk alone; copy it to one, or unpack it there"
            )


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
    """Return whether `folder` says that it is a group; on the web, where each file costs a request, by its marks."""
    return any(each.owns(folder) for each in ARRAYS if each.marks or isinstance(folder, Path))


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


def files_of(file: Path) -> FileReader:
    """Return the reader of a file, by its bytes and not by its name; see `find_format`."""
    files = find_format(file).files
    assert files is not None
    return files


def find_format(file: Path) -> Format:
    """Return the format of a file, by its bytes and not by its name.

    Raises:
        VolumeError: none is known, or it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(START_BYTES)
    except OSError as error:
        paths.check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    marks = sorted(((at, magic, each) for each in FORMATS for at, magic in each.magics), key=lambda mark: mark[0])
    marked = (each for at, magic, each in marks if start.startswith(magic, at))
    recognised = (each for each in FORMATS if each.recognises is not None and each.recognises(file, start))
    if (format := next(itertools.chain(marked, recognised), None)) is not None:
        return format
    packer = next((name for mark, name in PACKED.items() if start.startswith(mark)), "")
    if packer:
        raise VolumeError(f"{file} is packed by {packer}, so that no box of it can be read; unpack it first")
    known = [each.title for each in FORMATS if each.title]
    raise VolumeError(
        f"{file} is a file of {file.stat().st_size} bytes in no format that volpipe knows{looks(start)}: it reads "
        f"{', '.join(known)} and folders of slices"
    )


def _reader_at(folder: Location) -> tuple[FileReader, Path, str] | None:
    """Return the reader of the file that `folder` is, or leads on inside of, the file, and the key there.

    None where no file is on its way; the folders in a zip are read as those on a disk.
    """
    within = split(folder)
    return None if within is None or zipped.find(within[0]) is not None else (files_of(within[0]), *within)


def exists_in_file(folder: Location) -> bool:
    """Return whether `folder` leads to something in a file."""
    at = _reader_at(folder)
    return at is not None and at[0].exists(*at[1:])


def probe_file(folder: Location) -> None:
    """Raise where `folder` is, or leads into, a file whose metadata crash or hang the library that reads them."""
    at = _reader_at(folder)
    if at is not None:
        at[0].probe(at[1])


def why_several(folder: Location) -> str:
    """Return why a file at `folder` holds several arrays where a stack may be meant, "" where it does not say."""
    at = _reader_at(folder)
    return at[0].why_several(at[1]) if at is not None else ""


def read_header(folder: Location) -> Header | None:
    """Return the header of the array at `folder`, None where there is none; VolumeError where it is broken."""
    at = _reader_at(folder)
    if at is not None:
        return at[0].read_header(*at[1:])
    with _reading([folder], USUAL_NAMES):
        header = next(filter(None, (each.read_header(folder) for each in _readers(folder))), None)
    if header is not None and not header.has_slices:
        paths.check_letters(folder)
    return header


def _readers(folder: Location) -> Iterator[FolderReader]:
    """Yield who may read the array at `folder`; one named as a container is no level of what lies around it."""
    is_container = folder.suffix.lower() in SUFFIXES
    return (each for each in READERS if each.files_above is None or not is_container)


def read_attributes(folder: Location) -> Tree:
    """Return the attributes of the group at `folder`, {} where it has none."""
    at = _reader_at(folder)
    if at is not None:
        return at[0].read_attributes(*at[1:])
    with _reading([folder], USUAL_NAMES):
        return next(filter(None, (each.read_attributes(folder) for each in READERS)), {})


def _reading(folders: Iterable[Location], names: Sequence[str]) -> AbstractContextManager[None]:
    return paths.reading_once(folder / name for folder in folders for name in names)


def read_datasets(folder: Location) -> tuple[ListedLevel, ...] | None:
    """Return the levels of the multiscale group at `folder`, finest first; None where it is none.

    They are those that its `multiscales` names, or else the arrays s0, s1, … in it.

    Raises:
        VolumeError: its metadata are wrong.
    """
    at = _reader_at(folder)
    if at is not None:
        named = at[0].read_datasets(*at[1:])
    else:
        with _reading([folder], USUAL_NAMES):
            reader = next((each for each in READERS if each.read_attributes(folder)), None)
            named = None if reader is None else reader.read_datasets(folder)
    if named is not None:
        return _finest_first(folder, named)
    count = 0
    while _holds(read_header, folder / f"s{count}"):
        count += 1
    return tuple(ListedLevel(f"s{i}") for i in range(count)) or None


def _finest_first(folder: Location, datasets: tuple[ListedLevel, ...]) -> tuple[ListedLevel, ...]:
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


def read_levels(folder: Location, datasets: tuple[ListedLevel, ...]) -> list[Header]:
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
    """Return where the array of `header`, or what is around it, says that it lies."""
    if header.place is not None:
        return header.place
    arrays = format_named(header.format).arrays
    return listed_place(header) if arrays is None else arrays.read_place(header, container)


def walk(root: Location, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys of all arrays under `root`, sorted; multiscale groups count as one unless they are entered.

    Raises:
        VolumeError: there are too many folders to look into.
    """
    at = _reader_at(root)
    if at is not None:
        yield from at[0].walk(*at[1:], enter_groups=enter_groups)
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
    """Return this process's object for the folder and purpose, made anew if its metadata or data files have changed."""
    place = (os.getpid(), folder, purpose)
    now = state(folder, has_slices=has_slices)
    known = _opened.get(place)
    if known is None or known[:2] != (now, _data_state(known[2])):
        with _lock:
            known = _opened.get(place)
            if known is None or known[:2] != (now, _data_state(known[2])):
                while len(_opened) >= MOST_OPENED:  # a batch opens those of thousands of datasets
                    del _opened[next(iter(_opened))]
                made = make()
                known = _opened[place] = (now, _data_state(made), made)
    return known[2]  # type: ignore[return-value]  # the purpose decides which


def _data_state(opened: OpenArray) -> tuple[object, ...]:
    """Return a value that changes when a data file beside an array's own does."""
    return tuple(entry for file in opened.header.data_files or () for entry in paths.state(file.parent, [file.name]))


def state(folder: Location, *, has_slices: bool = False) -> tuple[object, ...]:
    """Return a value that changes when an array's metadata do; those of slices are their names."""
    states = () if has_slices else paths.state(folder, BESIDE_CHUNKS)
    if states or not (has_slices or isinstance(folder, Path)):
        return states
    within = split(folder)
    if within is not None:
        return paths.state(within[0].parent, [within[0].name])
    if has_slices or not isinstance(folder, Path):
        return paths.state(folder.parent, [folder.name])
    above = (each.files_above(folder) for each in _readers(folder) if each.files_above is not None)
    files = itertools.chain.from_iterable(above)
    return tuple(entry for file in files for entry in paths.state(file.parent, [str(file.name)]))


def open_array(
    header: Header, cache_bytes: int, *, live: bool, check_missing: Callable[[Index], None] = as_fill
) -> StoredArray:
    """Return the array through its format, or by its chunk files; what tensorstore does not know, by another library.

    `check_missing` raises where the file at a place of the grid, which is not there, should be.
    """
    if header.has_slices:
        return tiff_folder.SliceArray(header, cache_bytes)
    format = format_named(header.format)
    if format.files is not None:
        return format.files.open_array(header, cache_bytes)
    assert format.arrays is not None
    failure: ValueError | None = None
    try:
        if not header.unsupported:
            if isinstance(header.folder, Path):
                array = tensorstore.open_array(header, cache_bytes=cache_bytes, live=live)
                return LocalArray(header, array, check_missing)
            array = tensorstore.open_array(header, cache_bytes=max(cache_bytes, INDEX_BYTES), live=live)
            return FetchedArray(header, cache_bytes, check_missing, live=live) if can_fetch(header) else array
    except ValueError as error:
        failure = error
        log.info("%s: %s; another library is tried", header.folder, error)
    other = format.arrays.open_otherwise(header)
    if other is None:
        raise VolumeError(f"{header.folder}: {failure or header.unsupported}") from failure
    return other


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
    arrays, container, key = array_folders(format), absolute(path), key.strip("/")
    within = split(container)
    if within is not None:
        raise VolumeError(f"{within[0]} is a file; {format} needs a folder: choose another place")
    _check_codec(spec.codec, format)
    new = arrays.new_files(container, key, spec)
    create_groups(container, key, format)
    for file, tree in new.items():
        merge_json(file, tree)


def array_folders(format: str) -> ArrayFolders:
    """Return who keeps arrays of this format in folders.

    Raises:
        VolumeError: nobody does, or only in a group of another format's.
    """
    known = {each.name: each for each in ARRAYS}
    if format not in known:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(known)}")
    return known[format]


def folders_of(format: str) -> ArrayFolders:
    """Return who keeps the arrays of this format, or of its groups, in folders."""
    arrays = format_named(format).arrays
    assert arrays is not None, f"{format} has no folders"
    return arrays


def _check_codec(codec: str, format: str) -> None:
    """Refuse a codec that another format alone has.

    Raises:
        VolumeError: with those that would do.
    """
    written = [each for each in FORMATS if each.arrays is not None and each.writing and codec in each.writing.codecs]
    if len(written) == 1 and written[0].name != format:
        raise VolumeError(
            f"codec {codec} is {written[0].name}'s alone; choose gzip or zstd for {format}, or write to a name that "
            f"ends in {written[0].suffixes[0]}"
        )


def labels_format(out: Location) -> Format | None:
    """Return the format that labels at `out` must have, that of the image in whose labels it lies; None elsewhere.

    Raises:
        VolumeError: there is no image of OME-Zarr, or of a version that is not written.
    """
    place = label_place(out)
    if place is None:
        return None
    if any(part.endswith(SUFFIXES) for part in place.name.split("/")):
        raise VolumeError(f"{out} would be labels of {place.image}, and have a name without the suffix of a container")
    version = image_version(place.image)
    if not version:
        raise VolumeError(f"{out} would be labels of {place.image}, which is no OME-Zarr image; choose another place")
    known = [each for each in FORMATS if each.is_ome]
    format = next((each for each in known if version.startswith(each.ome_version)), None)
    if format is None:
        raise VolumeError(
            f"{out} would be labels of {place.image}, which is OME-Zarr {version}, and volpipe writes "
            f"{', '.join(each.ome_version for each in known)}; write them beside it"
        )
    return format


def output_around(folder: Location, container: str) -> Location:
    """Return the output that the array in `folder` is of: its container, or its group in the labels of an image."""
    return absolute(container) if label_place(folder.parent) is None else folder.parent


def count_image_levels(out: Location) -> int:
    """Return how many levels the image has in whose labels `out` lies: they must have as many."""
    place = label_place(out)
    return 0 if place is None else len(read_datasets(place.image) or ())


def grow_array(path: str | os.PathLike[str] | object_store.Remote, key: str, spec: ArraySpec, format: str) -> None:
    """Give the array `key` in the container at `path`, if there is one, the shape of `spec`; no voxel is touched."""
    for name, tree in array_folders(format).documents(spec).items():
        file = absolute(path) / key / name
        shape: Tree = {what: tree[what] for what in ("shape", "dimensions") if what in tree}
        if shape and paths.is_file(file):
            merge_json(file, shape)


def create_groups(container: Location, key: str, format: str) -> None:
    """Make the groups from the `container` down to the parent of `key`; those that are there stay.

    Raises:
        VolumeError: one of them is an array, or of another format.
    """
    own, parts = array_folders(format), PurePosixPath(key).parts
    folders = [container.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    with _reading(folders, GROUP_NAMES):
        for depth, folder in enumerate(folders):
            for other in ARRAYS:
                if other is not own and other.owns(folder):
                    raise VolumeError(
                        f"{folder} is {other.name}; {format} cannot be written into it: choose another place"
                    )
            if depth == len(parts):
                return
            if read_header(folder) is not None:
                raise VolumeError(f"{folder} is an array; {key} cannot be made inside it")
            for name, tree in own.group_documents(is_root=depth == 0).items():
                if not paths.is_file(folder / name):
                    write_json(folder / name, tree)


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
        format: "ome-zarr-0.4" to "ome-zarr-0.6", "n5" (n5-viewer's, neuroglancer's and COSEM's dialects), "zarr2"
            (COSEM's) or "precomputed".
        key: the group, "" for the container itself.
        attributes: JSON, kept in the group's attribute "volpipe": where the arrays came from.

    Raises:
        VolumeError: an array is missing, of another format or of other axes.
    """
    known = [each.name for each in FORMATS if each.write_group is not None]
    if format not in known:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(known)}")
    chosen, container = format_named(format), absolute(path)
    assert chosen.arrays is not None and chosen.write_group is not None
    folder = container / key.strip("/")
    _check_levels(folder, multiscale, chosen.arrays.name)
    create_groups(container, f"{key}/{multiscale.levels[0].key}".strip("/"), chosen.arrays.name)
    old, own = read_attributes(folder), {RECORD: dict(attributes)} if attributes else {}
    mark = mark_in(old)
    if mark is not None:
        own |= {RECORD: dict(own.get(RECORD) or old[RECORD]) | {INCOMPLETE: mark}}
    chosen.write_group(folder, multiscale, own, mark is not None)


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
    arrays = array_folders(format)
    file = container / key / arrays.attributes_file
    tree = read_json(file)
    if tree is None:
        create_groups(container, key or "s0", format)
        tree = read_json(file) or {}
    old = arrays.attributes_of(tree)
    record = change(old.get(RECORD) or {})
    new = {name: value for name, value in old.items() if name != RECORD} | ({RECORD: record} if record else {})
    new = ome.named(new, is_incomplete=INCOMPLETE in record)
    if new != old:
        write_json(file, arrays.with_attributes(tree, new))


def _check_levels(folder: Location, multiscale: Multiscale, format: str) -> None:
    for level in multiscale.levels:
        header = read_header(folder / level.key)
        if header is None or header.format != format:
            raise VolumeError(f"{folder / level.key} is no {format} array; create it before its group")
        if len(header.shape) != len(multiscale.axes):
            raise VolumeError(f"{folder / level.key} has {len(header.shape)} axes, the group says {multiscale.axes}")
