"""Volumes: references to stored arrays that travel as values, and are opened where voxels are read or written.

Not here: what the formats write (formats). Importing this costs numpy; tensorstore comes with the first voxel.

A volume keeps its axes as stored; what a `Reader` reads is always (c, z, y, x)::

    stored (z, y, x)  ->  (1, z, y, x)        stored (y, x)           ->  (1, 1, y, x)
    stored (c, z, y, x) as it is              stored (t=1, x, y, z, c) -> (c, z, y, x)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from volpipe.errors import RemoteError, VolumeError
from volpipe.formats import damage, files, ome, remote, single, store, zarr
from volpipe.formats.container import (
    absolute,
    check_files,
    create_array,
    create_multiscale,
    inside,
    locate,
    read_attributes,
    read_datasets,
    read_header,
    read_place,
    walk,
)
from volpipe.formats.files import Location
from volpipe.formats.metadata import ArraySpec, Header, Level, Multiscale, Triple, check_aligned, usual_axes
from volpipe.formats.ome import Dataset
from volpipe.grid import Box, mirror
from volpipe.indexing import plain_index

__all__ = [
    "ArraySpec",
    "Level",
    "Multiscale",
    "Reader",
    "Volume",
    "Writer",
    "absolute",
    "create_array",
    "create_multiscale",
    "list_arrays",
    "open_volume",
    "open_writer",
]

log = logging.getLogger(__name__)

METADATA_FILES = {"n5": "attributes.json", "zarr2": ".zarray", "zarr3": "zarr.json"}
MAX_NAMED = 20


@dataclass(frozen=True)
class Volume:
    """A reference to one array: cheap, picklable by value, opened where it is used.

    Attributes:
        path: the container, a file or a folder, absolute; in S3 its location with endpoint and region, where set.
        key: the array in it, "" where the path itself is the array.
        format: "n5", "zarr2", "zarr3", "hdf5", "tiff" (a file, or a folder of slices), "mrc" or "npy".
        shape: as stored, C order (that of N5 is reversed).
        dtype: what is read, in native byte order; bool is read as uint8, 0 or 1.
        chunks: what is read and decoded at once, in stored axes.
        shards: what is written at once where that is more than a chunk, None otherwise.
        axes: of t, c, z, y, x, one per stored axis; other names as they are.
        voxel_size_nm: (z, y, x), None where it or its unit is unknown; an axis that the array lacks has 1.
        origin_nm: centre of the first voxel, (z, y, x).
        codec: for people, such as "gzip 5".
        levels: keys of all levels of the multiscale group that the array is one of, finest first; () if of none.
    """

    path: str
    key: str
    format: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    axes: tuple[str, ...]
    voxel_size_nm: Triple | None
    origin_nm: Triple
    codec: str
    levels: tuple[str, ...]

    def __str__(self) -> str:
        if "://" in self.path:
            return str(self.folder)
        return f"{self.path}:{self.key}" if self.key else self.path

    @property
    def folder(self) -> Location:
        """Where the array lies."""
        return absolute(self.path) / self.key

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def spatial_shape(self) -> tuple[int, int, int]:
        """Voxels (z, y, x); an axis that the array lacks has one."""
        length = dict(zip(self.axes, self.shape, strict=True))
        return length.get("z", 1), length.get("y", 1), length.get("x", 1)

    @property
    def num_channels(self) -> int:
        return dict(zip(self.axes, self.shape, strict=True)).get("c", 1)

    @property
    def attributes(self) -> dict[str, object]:
        """The array's own attributes, as they are stored now."""
        return read_attributes(self.folder)

    def open(self, *, cache_bytes: int = 0) -> Reader:
        """Return this process's reader of the volume; the same one each time.

        Args:
            cache_bytes: decoded chunks kept in memory, shared by the readers of this process with the same number.
                Only for arrays that nobody writes to.

        Raises:
            VolumeError: the array is gone or has changed since the reference was made.
        """
        folder = self.folder
        return _once(folder, (self, cache_bytes), lambda: Reader(self, cache_bytes))


class Reader:
    """An open array; it may be used by several threads, and pickles as the volume that it reads."""

    def __init__(self, volume: Volume, cache_bytes: int = 0) -> None:
        folder = volume.folder
        header = read_header(folder)
        if header is None:
            raise VolumeError(f"no array at {folder} any more")
        if header.shape != volume.shape or header.dtype != volume.dtype:
            raise VolumeError(
                f"{folder} was {volume.dtype} {volume.shape} and is now {header.dtype} {header.shape}; open it again"
            )
        self.volume = volume
        self._folder = folder
        self._cache_bytes = cache_bytes
        damage.check_chunk(header)
        self._header = header
        self._array = _open_for_reading(header, cache_bytes)
        self._through: store.StoredArray | None = None

    def read_through(self, wrap: Callable[[Header, store.StoredArray], store.StoredArray]) -> None:
        """Let voxels come through what `wrap` makes of the array, the first time that this is asked."""
        with _lock:
            self._through = self._through or wrap(self._header, self._array)

    def __reduce__(self) -> tuple[Callable[[Volume, int], Reader], tuple[Volume, int]]:
        return _reopen, (self.volume, self._cache_bytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.volume.shape

    @property
    def dtype(self) -> np.dtype:
        return self.volume.dtype

    @property
    def ndim(self) -> int:
        return self.volume.ndim

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box` (z, y, x), which lies in the volume, as (c, z, y, x).

        Raises:
            VolumeError: the box is empty or leaves the volume, a chunk is damaged, or the array has a time axis.
        """
        return self._canonical(self._read(self._stored_index(box)))

    def is_stored(self, box: Box) -> bool:
        """Return whether some chunk that `read_mirrored` needs for `box` (z, y, x) is stored; none is read.

        True also for an array of which only a read can tell.
        """
        if not isinstance(self._array, store.TensorStoreArray):
            return True
        seen = [mirror(a, b, n) for a, b, n in zip(box.start, box.stop, self.volume.spatial_shape, strict=True)]
        index = self._stored_index(Box(tuple(int(p.min()) for p in seen), tuple(int(p.max()) + 1 for p in seen)))
        with _naming(self.volume, box, self._folder):
            return self._array.is_stored(index)

    def _stored_index(self, box: Box) -> store.Index:
        """Return `box` (z, y, x) as an index of the stored axes."""
        volume, shape = self.volume, self.volume.spatial_shape
        if len(box.start) != 3 or box.is_empty or not Box.of(shape).contains(box):
            raise VolumeError(f"{volume}: box {box} is empty or leaves the volume {shape} (z, y, x)")
        index: list[slice | int] = []
        for axis, n in zip(volume.axes, volume.shape, strict=True):
            if axis in "zyx":
                i = "zyx".index(axis)
                index.append(slice(box.start[i], box.stop[i]))
            elif axis == "c":
                index.append(slice(0, n))
            elif n == 1:
                index.append(0)
            else:
                raise VolumeError(
                    f"{volume}: axis {axis} has {n} entries; volpipe reads (c, z, y, x), so save one "
                    "entry as an array of its own"
                )
        return tuple(index)

    def _canonical(self, data: np.ndarray) -> np.ndarray:
        """Return `data`, in stored order and without the axes that are neither c nor space, as (c, z, y, x)."""
        axes = [axis for axis in self.volume.axes if axis in "czyx"]
        data = data.transpose([axes.index(axis) for axis in "czyx" if axis in axes])
        missing = tuple(i for i, axis in enumerate("czyx") if axis not in axes)
        return np.ascontiguousarray(np.expand_dims(data, missing))

    def read_mirrored(self, box: Box) -> np.ndarray:
        """Return the voxels of `box` (z, y, x) as (c, z, y, x), mirrored at the volume's faces outside of it.

        Each voxel that is needed is read once, however often it is seen.
        """
        if box.is_empty:
            raise VolumeError(f"{self.volume}: box {box} is empty")
        shape = self.volume.spatial_shape
        seen = [mirror(a, b, n) for a, b, n in zip(box.start, box.stop, shape, strict=True)]
        low = tuple(int(positions.min()) for positions in seen)
        data = self.read(Box(low, tuple(int(positions.max()) + 1 for positions in seen)))
        for i, (positions, start, a, b, n) in enumerate(zip(seen, low, box.start, box.stop, shape, strict=True)):
            if a < 0 or b > n:
                data = data.take(positions - start, axis=i + 1)
        return data

    def read_raw(self, index: object) -> np.ndarray:
        """Return the voxels at `index`, as with numpy but without lists and negative steps, in stored axes."""
        return self._read(plain_index(index, self.shape))

    def __getitem__(self, index: object) -> np.ndarray:
        return self.read_raw(index)

    def _read(self, index: store.Index) -> np.ndarray:
        data = damage.read(self.volume, self._header, self._through or self._array, index)
        return data.view(np.uint8) if data.dtype == np.bool_ else data


class Writer:
    """An open array to be written by whole chunks or shards, which appear whole or not at all."""

    def __init__(self, folder: Location) -> None:
        if isinstance(folder, remote.Remote):
            remote.check_writable(folder)
        header = read_header(folder)
        if header is None:
            raise VolumeError(f"no array at {folder}; create it before writing to it")
        if header.unsupported:
            raise VolumeError(f"{folder}: {header.unsupported} cannot be written")
        self.header = header
        self.shape = header.shape
        self.dtype = header.dtype
        try:
            self._array = store.open_array(header, write=True)
        except ValueError as error:
            raise VolumeError(f"{folder}: cannot be written to: {error}") from error

    def write(self, box: Box, data: np.ndarray) -> None:
        """Write `data` to `box`, both in stored axes.

        Raises:
            VolumeError: another dtype or shape, a box that is not made of whole chunks (shards, where there are any) or
                that leaves the array, or a disk that is full.
        """
        folder = self.header.folder
        if data.dtype != self.dtype:
            raise VolumeError(f"{folder} holds {self.dtype}, the data is {data.dtype}; cast it first")
        if data.shape != box.shape:
            raise VolumeError(f"{folder}: data of shape {data.shape} does not fill the box {box} of shape {box.shape}")
        check_aligned(self.header, box.start, box.shape)
        with _naming(folder, box, folder):
            self._array.write(box.slices, data)

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box`, in stored axes, as they are on disk now."""
        if box.is_empty or not Box.of(self.shape).contains(box):
            raise VolumeError(f"{self.header.folder}: box {box} is empty or leaves the array {self.shape}")
        return damage.read(self.header.folder, self.header, self._array, box.slices)


def open_volume(location: str | Path, key: str | None = None, level: int = 0) -> Volume:
    """Return the volume at `location`: an array, a level of a multiscale group, or the only one of these inside.

    Args:
        location: an N5 or Zarr container, an HDF5, TIFF, MRC or .npy file, a folder of TIFF slices, or a path into one;
            on a disk, or for N5 and Zarr also s3://bucket/… or https://host/… .
        key: the array or group in it; needed where there are several.
        level: of the multiscale group, 0 for the finest.

    Raises:
        VolumeError: nothing there, several to choose from, or metadata that are broken, wrong or not supported.
    """
    container, key = locate(location, key)
    if not isinstance(container, remote.Remote):  # there it is asked last: not all that may be read may be listed
        single.probe_file(container)
        _check_exists(container, key)
    volume = _resolve(container, key, level)
    if volume.format == "tiff" and files.is_folder(container / volume.key):
        check_files(container / volume.key)
    length = dict(zip(volume.axes, volume.shape, strict=True))
    if length.get("t", 1) > 1:
        raise VolumeError(f"{volume} has {length['t']} points in time; volpipe reads one: save it on its own")
    return volume


def list_arrays(location: str | Path) -> list[Volume]:
    """Return every array under `location`, sorted by key; those that cannot be read are left out, with a warning."""
    container, key = locate(location)
    single.probe_file(container)
    _check_exists(container, key)
    volumes = []
    for name in sorted(f"{key}/{inner}".strip("/") for inner in walk(container / key, enter_groups=True)):
        try:
            volumes.append(_describe(container, name))
        except RemoteError:
            raise
        except VolumeError as error:
            log.warning("%s", error)
    return volumes


def open_writer(path: str | Path, key: str) -> Writer:
    """Return this process's writer of an array that `create_array` made; the same one each time."""
    folder = absolute(path) / key.strip("/")
    return _once(folder, "write", lambda: Writer(folder))


T = TypeVar("T", Reader, Writer)
_opened: dict[tuple[int, Location, object], tuple[object, Reader | Writer]] = {}
_lock = threading.Lock()


def _once(folder: Location, purpose: object, make: Callable[[], T]) -> T:
    """Return what was made for this folder and purpose in this process, anew if the metadata have changed since."""
    place = (os.getpid(), folder, purpose)
    state = _state(folder)
    known = _opened.get(place)
    if known is None or known[0] != state:
        with _lock:
            known = _opened.get(place)
            if known is None or known[0] != state:
                known = _opened[place] = (state, make())
    return known[1]  # type: ignore[return-value]  # the purpose decides which


def _state(folder: Location) -> tuple[object, ...]:
    """Return what changes when an array's metadata do; a folder of slices has none but its names."""
    within = single.split(folder)
    if within is not None:
        return files.state(within[0].parent, [within[0].name])
    found = files.state(folder, METADATA_FILES.values())
    return found if found or not isinstance(folder, Path) else files.state(folder.parent, [folder.name])


def _reopen(volume: Volume, cache_bytes: int) -> Reader:
    return volume.open(cache_bytes=cache_bytes)


def _open_for_reading(header: Header, cache_bytes: int) -> store.StoredArray:
    """Return the array through its format, or through tensorstore, or zarr-python what tensorstore does not know."""
    if header.format in single.FORMATS:
        return single.open_array(header, cache_bytes)
    try:
        if not header.unsupported:
            return store.open_array(header, cache_bytes=cache_bytes)
    except ValueError as error:
        if header.format == "n5":
            raise VolumeError(f"{header.folder}: {error}") from error
        log.info("%s: %s; zarr-python is tried", header.folder, error)
    return zarr.ZarrArray(header)


@contextmanager
def _naming(what: object, where: object, folder: Location) -> Iterator[None]:
    """Turn what goes wrong with a chunk into an error that names the array and the place."""
    try:
        yield
    except VolumeError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        reason = remote.explain(folder, error) if isinstance(folder, remote.Remote) else error
        raise VolumeError(f"{what}, voxels {where}: {reason}") from error


def _check_exists(container: Location, key: str) -> None:
    """Raise, with what there is instead, unless there is a folder, or something in a file."""
    folder = container / key
    if isinstance(folder, remote.Remote) and not folder.is_s3:
        return  # a web server knows of files alone
    if files.is_folder(folder) or (
        isinstance(container, Path) and container.is_file() and single.exists(container, key)
    ):
        return
    if not files.exists(container):
        raise VolumeError(f"no volume at {folder}")
    names = list(walk(container, enter_groups=False))
    raise VolumeError(f"no volume at {folder}; {container} holds {_listed(names) or 'no arrays'}")


def _listed(names: list[str]) -> str:
    text = ", ".join(name or "an array at its root" for name in names[:MAX_NAMED])
    return text + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _resolve(container: Location, key: str, level: int) -> Volume:
    folder = container / key
    if read_header(folder) is not None:
        if level:
            raise VolumeError(f"{folder} is one array, which has no level {level}; name the group that it is in")
        return _describe(container, key)
    datasets = read_datasets(folder)
    if datasets is None:
        return _resolve(container, _only_key(container, key), level)
    headers = _check_group(folder, datasets)
    if not 0 <= level < len(datasets):
        raise VolumeError(f"{folder} has no level {level}; its levels are 0 to {len(datasets) - 1}")
    return _volume(container, headers[level], datasets[level], _keys(key, datasets))


def _only_key(container: Location, key: str) -> str:
    """Return the key of the only array or group of levels under `key`, or raise with what there is."""
    folder = container / key
    images = ome.plate_images(read_attributes(folder), folder, read_attributes)
    if images is not None:
        raise VolumeError(f"{folder} is a plate of images; choose one by its key: {_listed(images) or 'it names none'}")
    _check_exists(container, key)
    names = list(walk(folder, enter_groups=False))
    if not names:
        raise VolumeError(
            f"no volume in {folder}: looked there and below for N5 (attributes.json with dimensions), "
            "Zarr v2 (.zarray), Zarr v3 (zarr.json of an array), OME-Zarr (multiscales) and TIFF slices"
        )
    if len(names) > 1:
        raise VolumeError(f"{folder} holds {len(names)} volumes; choose one by its key: {_listed(names)}")
    return f"{key}/{names[0]}".strip("/")


def _check_group(folder: Location, datasets: tuple[Dataset, ...]) -> list[Header]:
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


def _describe(container: Location, key: str) -> Volume:
    """Return the volume of the one array `key`, with what the groups around it say of it."""
    header = read_header(container / key)
    if header is None:
        raise VolumeError(f"no array at {container / key}")
    parts = Path(key).parts
    for depth in reversed(range(len(parts))):
        group, inner = "/".join(parts[:depth]), "/".join(parts[depth:])
        try:
            datasets = read_datasets(container / group) or ()
        except RemoteError:
            raise
        except VolumeError as error:
            log.info("%s", error)
            continue
        for dataset in datasets:
            if dataset.path.strip("/") == inner:
                return _volume(container, header, dataset, _keys(group, datasets))
    return _volume(container, header, Dataset(key), ())


def _keys(group: str, datasets: tuple[Dataset, ...]) -> tuple[str, ...]:
    return tuple(f"{group}/{dataset.path}".strip("/") for dataset in datasets)


def _volume(container: Location, header: Header, dataset: Dataset, levels: tuple[str, ...]) -> Volume:
    rank = len(header.shape)
    axes = dataset.axes if dataset.axes and len(dataset.axes) == rank else header.axes or usual_axes(rank)
    where = dataset.place or read_place(header, container)
    key = "/".join(inside(header.folder, container))
    return Volume(
        path=str(container),
        key=key,
        format=header.format,
        shape=header.shape,
        dtype=header.dtype,
        chunks=header.chunks,
        shards=header.shards,
        axes=axes,
        voxel_size_nm=where.voxel_size_nm,
        origin_nm=where.origin_nm,
        codec=header.codec,
        levels=levels,
    )
