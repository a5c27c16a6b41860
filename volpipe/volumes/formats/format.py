"""What volpipe must know of a format, in one object: its name, how it is recognised, and who reads and writes it.

Each module of a format has its object, and `known` lists them. Not here: choosing one for a place (container).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from volpipe.geometry.grid import Triple
from volpipe.volumes.dialects.attributes import read_place as read_listed_place
from volpipe.volumes.formats import flat
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    ChunkScheme,
    Header,
    Multiscale,
    Place,
    Tree,
    check_same,
    read_json,
    usual_axes,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import StoredArray

DEFAULT_KEY = "raw"  # of an array in a container of several, where nobody names one
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


class Walk(Protocol):
    """Yields the keys, counted from `key`, of all arrays there; groups of levels count as one unless entered."""

    def __call__(self, file: Path, key: str, *, enter_groups: bool) -> Iterator[str]: ...


@dataclass(frozen=True)
class FileReader:
    """Reads the arrays in single files of a format; an array, or a group of them, has a key in its file.

    Attributes:
        read_header: of the array at a key, None where that is none, but may hold some.
        open_array: the array of a header; where voxels must be decoded, so many bytes of them are kept in memory.
        read_attributes: of the group or array at a key, {} where there is none.
        read_datasets: the levels at a key that the file itself names, in that order; None where it names none.
        exists: whether there is anything at a key.
        walk: yields keys.
        probe: raises where the metadata of a file would crash or hang the library that reads them.
        why_several: says why a file holds several arrays where a stack may be meant, "" where it does not say.
    """

    read_header: Callable[[Path, str], Header | None]
    open_array: Callable[[Header, int], StoredArray]
    read_attributes: Callable[[Path, str], Tree]
    read_datasets: Callable[[Path, str], tuple[ListedLevel, ...] | None]
    exists: Callable[[Path, str], bool]
    walk: Walk
    probe: Callable[[Path], None] = lambda file: None
    why_several: Callable[[Path], str] = lambda file: ""


def one_array(
    read: Callable[[Path], Header], open_array: Callable[[Header, int], StoredArray] = flat.open_array
) -> FileReader:
    """Return the reader of files that hold one array each, whose voxels lie flat unless it has an `open_array`."""

    def walk(file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
        yield ""

    return FileReader(
        read_header=lambda file, key: None if key else read(file),
        open_array=open_array,
        read_attributes=lambda file, key: {} if key else dict(read(file).attributes),
        read_datasets=lambda file, key: None,
        exists=lambda file, key: not key,
        walk=walk,
    )


@dataclass(frozen=True)
class FolderReader:
    """Reads the arrays and groups in folders of a format, also in remote places.

    Attributes:
        read_header: of the array at a folder, None where there is none.
        read_attributes: of the group or array there, {} where it has none.
        read_datasets: the levels that the group there names, None where it names none.
        usual_file: that is asked for first, "" where that is none of the usual ones.
        files_above: returns the files in folders above that may name the array; None where its metadata lie beside it.
    """

    read_header: Callable[[Location], Header | None]
    read_attributes: Callable[[Location], Tree] = lambda folder: {}
    read_datasets: Callable[[Location], tuple[ListedLevel, ...] | None] = lambda folder: None
    usual_file: str = ""
    files_above: Callable[[Location], Sequence[Location]] | None = None


class ArrayFolders:
    """Keeps new arrays in folders; a format replaces what is different with it.

    Attributes:
        name: of the arrays' format.
        scheme: of their chunk files.
        marks: files by which a folder, also on the web, is of the format.
        metadata_file: of an array, beside its chunks; "" where that lies elsewhere.
        attributes_file: of an array or a group.
        run_file: of the group that says what changes from run to run.
        metadata_names: of all these.
        is_sharded: whether chunks may lie in shards.
        is_streamed: whether shards may be written layer by layer.
        is_one_volume: whether a container is one array, with its levels.
        properties_folder: in which it says what is known of each object of labels; "" where there is no place for it.
        num_files: of metadata, of each array and each group.
    """

    name: ClassVar[str]
    scheme: ClassVar[ChunkScheme]
    marks: ClassVar[tuple[str, ...]]
    metadata_file: ClassVar[str]
    attributes_file: ClassVar[str]
    run_file: ClassVar[str]
    metadata_names: ClassVar[tuple[str, ...]]
    is_sharded: ClassVar[bool] = False
    is_streamed: ClassVar[bool] = False
    is_one_volume: ClassVar[bool] = False
    properties_folder: ClassVar[str] = ""
    num_files: ClassVar[int] = 1

    def owns(self, folder: Location) -> bool:
        """Return whether `folder` says that it is an array or a group of the format."""
        return any(paths.is_file(folder / mark) for mark in self.marks)

    def documents(self, spec: ArraySpec) -> dict[str, Tree]:
        """Return the metadata of a new array, by file name.

        Raises:
            VolumeError: the format has no such array.
        """
        raise NotImplementedError

    def group_documents(self, *, is_root: bool) -> dict[str, Tree]:
        """Return the metadata of a new group, by file name."""
        return {}

    def is_array(self, tree: Tree) -> bool:
        """Return whether `tree`, of a file of an array's metadata, may be an array's."""
        return True

    def new_files(self, container: Location, key: str, spec: ArraySpec) -> dict[Location, Tree]:
        """Return what is to be added to which files, in this order, for the array `key` of a container to be there.

        Raises:
            VolumeError: the format has no such array, or another is there.
        """
        new: dict[Location, Tree] = {}
        for name, tree in self.documents(spec).items():
            file = container / key / name
            old = read_json(file)
            if old is None or not self.is_array(old):
                new[file] = tree
                continue
            pairs = [(each, old.get(each), value) for each, value in tree.items() if each != "attributes"]
            added = old.get("attributes")
            pairs += [(each, (added or {}).get(each), value) for each, value in tree.get("attributes", {}).items()]
            for each, was, value in pairs:
                check_same(file, each, was, value)
        return dict(reversed(new.items()))  # that by which the array is there comes last

    def channel_chunk(self, channels: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many of `channels`, () of an array without that axis, lie in a chunk."""
        return (1,) * len(channels)

    def usual_chunk(self, shard: Triple) -> Triple | None:
        """Return the chunk of a `shard` (z, y, x) for which nobody names one; None where any will do."""
        return None

    def as_read(self, spec: ArraySpec) -> tuple[tuple[int, ...] | None, str]:
        """Return the shards and the codec of a new array as its header will have them."""
        return spec.shards, spec.codec if spec.codec == "raw" else f"{spec.codec} {spec.codec_level}"

    def attributes_of(self, tree: Tree) -> Tree:
        """Return the attributes in `tree`, the content of their file."""
        return tree

    def with_attributes(self, tree: Tree, attributes: Tree) -> Tree:
        """Return `tree`, the content of their file, with `attributes` in place of the old ones."""
        return attributes

    def read_place(self, header: Header, container: Location) -> Place:
        """Return where the array of `header`, or what is around it in its container, says that it lies."""
        return listed_place(header)

    def metadata_at(self, folder: Location, header: Header | None) -> Location:
        """Return the file with the metadata of the array in `folder`, of this `header` unless it is gone."""
        return folder / self.metadata_file

    def group_around(self, header: Header) -> Location:
        """Return the folder of the group that the array of `header` is in."""
        return header.folder.parent

    def open_otherwise(self, header: Header) -> StoredArray | None:
        """Return an array that tensorstore does not know; None where nobody else reads it."""
        return None


def listed_place(header: Header) -> Place:
    """Return where the attributes of an array say that it lies, as many programs list it."""
    return read_listed_place(header.attributes, header.axes or usual_axes(header.shape))


def stated_place(where: Place) -> Tree:
    """Return the attributes of an array that say its place, (z, y, x); {} where its voxel size is unknown."""
    if where.voxel_size_nm is None:
        return {}
    return {"resolution": list(where.voxel_size_nm), "offset": list(where.origin_nm), "units": ["nm"] * 3}


FileWriter = Callable[[Path, str, ArraySpec, Place, Iterable[flat.Part]], None]
GroupWriter = Callable[[Location, Multiscale, Tree, bool], None]


@dataclass(frozen=True)
class Writing:
    """What `convert` must know to write an array in a format.

    Attributes:
        codecs: that it may have, the default first.
        limits: what a copy cannot keep, or needs, for docs/formats.md; "" for nothing.
        write_file: writes a single file (its path, the key, the array, its place, its parts); None of folders.
        has_keys: whether an array has a key in its container.
        default_key: of an array for which nobody names one.
        has_chunks: whether voxels are written by chunks; else by whole planes.
        has_record: whether attributes can say where it came from; else nothing does.
        record: returns those attributes as the format keeps them.
        place_attributes: returns the attributes that say a place.
        stored_dtype: returns the type as which voxels of a type and a shape are held, or raises; None for the same.
        label_codecs: the default of labels of some types.
        check_spec: raises where the format has no such array.
        check_place: raises where it cannot say where levels lie.
    """

    codecs: tuple[str, ...]
    limits: str = ""
    write_file: FileWriter | None = None
    has_keys: bool = True
    default_key: str = ""
    has_chunks: bool = True
    has_record: bool = True
    record: Callable[[Mapping[str, Any]], object] = dict  # Any: JSON
    place_attributes: Callable[[Place], Tree] = lambda place: {}
    stored_dtype: Callable[[np.dtype, tuple[int, ...], Path], np.dtype] | None = None
    label_codecs: Mapping[str, str] = field(default_factory=dict)
    check_spec: Callable[[ArraySpec], None] = lambda spec: None
    check_place: Callable[[Multiscale], None] = lambda multiscale: None

    def default_codec(self, dtype: np.dtype, *, is_labels: bool) -> str:
        """Return the codec of an array for which nobody names one."""
        return self.label_codecs.get(dtype.name, self.codecs[0]) if is_labels else self.codecs[0]


@dataclass(frozen=True)
class ReadRow:
    """The row of a format in docs/formats.md, in Markdown: its name there, what is read, what says a voxel's size."""

    title: str
    reads: str
    voxel_size: str


@dataclass(frozen=True)
class Format:
    """A format: all that volpipe knows of it.

    Attributes:
        name: as volumes and options have it.
        title: for people.
        row: of docs/formats.md; None where another format's row speaks of it.
        suffixes: of names, by which `convert` chooses it and the shell completes names.
        magics: by which its files are known: a byte's number, and what stands there.
        recognises: whether a file, whose first START_BYTES are given, is of it, where no bytes at one place tell.
        files: reads its files; None of folders.
        folders: reads its folders; None of files.
        arrays: keeps new arrays in folders; None of files.
        write_group: writes that a group has levels; None where groups do not say it.
        write_properties: writes what is known of each object beside labels; None where there is no place for it.
        ome_version: of OME-Zarr, whose groups name channels, how viewers show them, and an origin also without a voxel
            size; "" of others.
        writing: what `convert` must know; None where nothing is written in it.
        is_x_first: whether programs of its field count axes x, y, z, where others count z, y, x.
    """

    name: str
    title: str = ""
    row: ReadRow | None = None
    suffixes: tuple[str, ...] = ()
    magics: tuple[tuple[int, bytes], ...] = ()
    recognises: Callable[[Path, bytes], bool] | None = None
    files: FileReader | None = None
    folders: FolderReader | None = None
    arrays: ArrayFolders | None = None
    write_group: GroupWriter | None = None
    write_properties: Callable[[Location, Tree], None] | None = None
    ome_version: str = ""
    writing: Writing | None = None
    is_x_first: bool = False

    @property
    def is_ome(self) -> bool:
        """Whether it is a version of OME-Zarr."""
        return bool(self.ome_version)
