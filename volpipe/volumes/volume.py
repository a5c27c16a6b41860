"""Volumes: the array at a location, a reference to it that travels as a value, and the reader of its voxels.

Not here: what the formats write (formats), or what is written (writer). tensorstore is imported with the first voxel.

A volume keeps its axes as stored; what a `Reader` reads is always (c, z, y, x)::

    stored (z, y, x)  ->  (1, z, y, x)        stored (y, x)           ->  (1, 1, y, x)
    stored (c, z, y, x) as it is              stored (t=1, x, y, z, c) -> (c, z, y, x)
"""

from __future__ import annotations

import html
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import RemoteError, SeveralVolumesError, VolumeError
from volpipe.geometry.grid import Box, mirrored, mirrored_runs
from volpipe.geometry.indexing import bounds, plain_index
from volpipe.resolve import homes_known, nearest
from volpipe.units import listed
from volpipe.volumes import webknossos
from volpipe.volumes.completeness import Incomplete, check_written, find_incomplete
from volpipe.volumes.formats import ome, tiff_folder
from volpipe.volumes.formats.container import (
    absolute,
    create_array,
    create_multiscale,
    exists_in_file,
    inside,
    locate,
    once,
    open_array,
    probe_file,
    read_attributes,
    read_datasets,
    read_header,
    read_levels,
    read_place,
    walk,
    why_several,
)
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.formats.ome import ListedLevel, level_keys
from volpipe.volumes.noted_files import NotedFiles
from volpipe.volumes.resampling import Resampling, coarsened
from volpipe.volumes.storage import damage, object_store, paths, tensorstore
from volpipe.volumes.storage.chunk_files import as_fill, describe_names
from volpipe.volumes.storage.damage import naming
from volpipe.volumes.storage.fetched_array import FetchedArray, LocalArray
from volpipe.volumes.storage.metadata import (
    GUESSED_SIZE,
    UNKNOWN_SIZE,
    ArraySpec,
    Header,
    Lengths,
    Level,
    Multiscale,
    shown,
    usual_axes,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.writer import Writer, open_writer

if TYPE_CHECKING:
    from dask.array import Array

    from volpipe import Explorer

__all__ = [
    "ArraySpec", "Level", "Multiscale", "Reader", "View", "Volume", "Writer", "absolute", "create_array",
    "create_multiscale", "list_arrays", "open_volume", "open_writer", "typed", "with_view",
]  # fmt: skip

log = logging.getLogger(__name__)

MAX_NAMED = 20
MAX_LOOKED_AT = 10_000  # files of a folder without a volume


@dataclass(frozen=True)
class View:
    """The part of an array that is read, and its place, as given by the user; None: all, and as the array says.

    Attributes:
        channel: the only one that is read, from 0; a name until the array is open.
        time: the point in time that is read, from 0.
        voxel_size_nm, origin_nm: (z, y, x).
        incomplete: whether voxels that are not written yet are read, as zeros.
    """

    channel: int | str | None = None
    time: int | None = None
    voxel_size_nm: Lengths | None = None
    origin_nm: Lengths | None = None
    incomplete: bool = False


AS_STORED = View()


@dataclass(frozen=True)
class Volume:
    """A reference to one array: cheap, picklable by value, opened where it is used; it slices as numpy's arrays do.

    Attributes:
        path: the container, a file or a folder, absolute; in S3 its location with endpoint and region, where set.
        key: the array in it, "" where the path itself is the array.
        format: its name, such as "n5"; that of its slices for a folder of slices.
        shape: as stored, C order (that of N5 is reversed).
        dtype: what is read, in native byte order; bool is read as uint8, 0 or 1, interpolated voxels as float32.
        chunks: what is read and decoded at once, in stored axes.
        shards: what is written at once where that is more than a chunk, None otherwise.
        axes: of t, c, z, y, x, one per stored axis; other names as they are.
        voxel_size_nm: (z, y, x), None where it or its unit is unknown; an axis that the array lacks has 1.
        origin_nm: centre of the first voxel, (z, y, x).
        has_origin: whether metadata or the view say that; else it counts as 0.
        codec: for people, such as "gzip 5".
        levels: keys of all levels of the multiscale group that the array is one of, finest first; () if of none.
        view: what is read of it, where that is given.
        slices: of a folder of slices a hash of their names in order; "" of others.
        channel_names: of all its channels, () where they have none.
        notes: what a user should know of it, a phrase each: a guess, or why a size is unknown.
        value_notes: those of `notes` on its values and slices, as its file has them.
        metadata: which version of what names its axes, size and origin, for people; "" where its format does.
        incomplete: what of it is written, where work of ours on it had not ended when it was opened; None where it had.
        resampling: the grid to which voxels are interpolated as they are read, None where they are read as stored.
        is_planned: whether planned work makes it: what lies there until then does not count.
        axcodes: to where x, y and z run, such as "RAS" (right, anterior, superior); "" where nothing says it.
    """

    path: str
    key: str
    format: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    axes: tuple[str, ...]
    voxel_size_nm: Lengths | None
    origin_nm: Lengths
    codec: str
    levels: tuple[str, ...]
    view: View = View()
    slices: str = ""
    channel_names: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    value_notes: tuple[str, ...] = field(default=(), compare=False)
    metadata: str = field(default="", compare=False)
    incomplete: Incomplete | None = field(default=None, compare=False)
    resampling: Resampling | None = None
    has_origin: bool = field(default=True, compare=False)
    is_planned: bool = field(default=False, compare=False)
    axcodes: str = field(default="", compare=False)

    def __str__(self) -> str:
        if "://" in self.path:
            return str(self.folder)
        return f"{self.path}:{self.key}" if self.key else self.path

    def __repr__(self) -> str:
        return f"<Volume {paths.shown(self)}{self.state}: {self.shape} {self.dtype}, {self._size_text}>"

    def _repr_html_(self) -> str:
        stored, num_bytes = self._file_bytes, math.prod(self.shape) * self.dtype.itemsize
        rows = {
            "shape": f"{self.shape} ({', '.join(self.axes)})",
            "type": self.dtype,
            "voxel size": self._size_text,
            "chunks": self.chunks,
            "shards": self.shards or "none",
            "codec": self.codec,
            "levels": ", ".join(self.levels) or "none",
            "uncompressed" if stored is None else "on disk": f"{num_bytes if stored is None else stored:,} bytes",
        }
        lines = [f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items()]
        return f"<table><caption>{html.escape(paths.shown(self) + self.state)}</caption>{''.join(lines)}</table>"

    @property
    def state(self) -> str:
        """What follows its name for people: that it is incomplete, "" where it is not."""
        return "" if self.incomplete is None else self.incomplete.state

    @property
    def as_it_is(self) -> Volume:
        """The same volume for who watches it: what is not written yet reads as zeros."""
        return replace(self, incomplete=None)

    def check_written(self, box: Box | None = None) -> None:
        """Refuse to read a `box` (z, y, x), or all, where work of ours has not written it, unless the view reads that.

        Files that were written, and are gone since, are looked for, as far as a sample tells; the rest as it is read.

        Raises:
            IncompleteError: with the command that completes it.
            VolumeError: a file is gone.
        """
        box = box or Box.from_shape(self.spatial_shape)
        if self.view.incomplete or self.is_planned:
            return
        header = read_header(self.folder)
        if header is not None:
            NotedFiles(header).look()
        if self.incomplete is None or self.incomplete.has(box):
            return
        now = self.incomplete if header is None else find_incomplete(header, self.key)
        if now is not None:  # else it was completed since
            check_written(str(self), now, box)

    @property
    def _size_text(self) -> str:
        """The voxel size (z, y, x), for people."""
        return UNKNOWN_SIZE if self.voxel_size_nm is None else f"{shown(self.voxel_size_nm)} nm"

    @property
    def _file_bytes(self) -> int | None:
        """Size of the file that holds this array alone; None of folders, whose listing may take long."""
        file = absolute(self.path)
        return file.stat().st_size if isinstance(file, Path) and not self.key and file.is_file() else None

    def __getitem__(self, index: object) -> np.ndarray:
        """Return the voxels at `index`, as with numpy but without lists and negative steps, in stored axes.

        Raises:
            VolumeError: the view has one channel or point in time, which stored axes do not leave out.
        """
        self._check_as_stored()
        if self.view.channel is not None or self.view.time is not None:
            raise VolumeError(
                f"{self}: slices are of all stored axes ({', '.join(self.axes)}), but one channel or point in time was "
                "chosen; use crop(box) or dask(), or open it without the choice"
            )
        return self.open()[index]

    def _check_as_stored(self) -> None:
        """Refuse to slice what is stored of a volume that is interpolated as it is read."""
        if self.resampling is not None:
            raise VolumeError(f"{self} is read on another grid than it is stored; use crop(box)")

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self} is on disk, so that an array of it is a copy; leave out copy=False")
        return np.array(self[...], dtype)

    def dask(self) -> Array:
        """Return the volume as a dask array, axes (c,) z, y, x, one dask chunk per stored chunk; no voxel is read.

        The axis c is there if the array has one and the view chooses no channel.

        Raises:
            VolumeError: an axis other than c, z, y and x has several entries, or voxels are interpolated.
        """
        import dask.array

        self._check_as_stored()
        index = self.open().stored_index(Box.from_shape(self.spatial_shape))
        axes = [axis for axis in self.axes if axis in "czyx"]
        meta = np.empty((0,) * self.ndim, self.dtype)
        stored = dask.array.from_array(self.open(), self.chunks, name=False, fancy=False, meta=meta)[index]
        ordered: Array = stored.transpose([axes.index(axis) for axis in "czyx" if axis in axes])
        return ordered if self.view.channel is None or "c" not in axes else ordered[0]

    def crop(self, box: Box) -> np.ndarray:
        """Return the voxels of `box` (z, y, x) as (c, z, y, x), with c of length 1 where there is one channel.

        Raises:
            VolumeError: the box is empty or leaves the volume, or a chunk is damaged.
        """
        return self.open().read(box)

    def show(self, output: str | Path | Volume | None = None, labels: str | Path | Volume | None = None) -> Explorer:
        """Return a view of the volume that a notebook shows; see `volpipe.explore`."""
        import volpipe  # by its public name: this package knows none of those above it

        return volpipe.explore(self, output, labels)

    def level(self, number: int) -> Volume:
        """Return a level of the multiscale group that the array is in, with the same view; 0 is the finest.

        Raises:
            VolumeError: there is no such level, or the view gives a voxel size or origin, which are this level's.
        """
        if not 0 <= number < len(self.levels):
            known = f"0 to {len(self.levels) - 1}" if self.levels else "none: it is an array by itself"
            raise VolumeError(f"{self} has no level {number}; its levels are {known}")
        if self.view.voxel_size_nm is not None or self.view.origin_nm is not None:
            raise VolumeError(f"{self} was given a voxel size or origin of its own; open level {number} with its own")
        other, _ = _resolve(absolute(self.path), self.levels[number], 0)
        other = other.as_it_is if self.incomplete is None else other
        if other.view == self.view:
            return other
        if any(self.length(axis) != other.length(axis) for axis in "ct"):
            raise VolumeError(f"{self} and {other} have other channels or points in time; open level {number} itself")
        notes = [note for note in self.notes if note not in other.notes and note.startswith(("channel", "point in"))]
        return replace(other, view=self.view, notes=(*other.notes, *notes))

    @property
    def folder(self) -> Location:
        """Where the array lies."""
        return absolute(self.path) / self.key

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def spatial_shape(self) -> tuple[int, int, int]:
        """Voxels (z, y, x) of the grid on which it is read; an axis that the array lacks has one."""
        return self.spatial(self.shape) if self.resampling is None else self.resampling.shape

    @property
    def spatial_chunks(self) -> tuple[int, int, int]:
        """Voxels (z, y, x) of a chunk, about so many where they are interpolated; 1 of an axis that the array lacks."""
        chunks, grid = self.spatial(self.chunks), self.resampling
        return chunks if grid is None else coarsened(chunks, grid.steps)

    @property
    def stored_dtype(self) -> np.dtype:
        """The type of the array, in native byte order; `dtype` unless voxels are interpolated."""
        return self.dtype if self.resampling is None else np.dtype(self.resampling.dtype)

    def stored_box(self, box: Box) -> Box:
        """Return the stored voxels (z, y, x) from which those of `box` come."""
        return box if self.resampling is None else self.resampling.seen(box)

    def length(self, axis: str) -> int:
        """Return the entries along `axis`, 1 of one that the array lacks."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    def spatial(self, lengths: tuple[int, ...]) -> tuple[int, int, int]:
        """Return those of `lengths`, one for each stored axis, that are of z, y and x; 1 for an axis that is not."""
        by_axis = dict(zip(self.axes, lengths, strict=True))
        return by_axis.get("z", 1), by_axis.get("y", 1), by_axis.get("x", 1)

    @property
    def num_channels(self) -> int:
        """How many channels are read: one where it is chosen, else all that are stored."""
        return self.num_stored_channels if self.view.channel is None else 1

    @property
    def num_stored_channels(self) -> int:
        return self.length("c")

    @property
    def channels(self) -> str:
        """The stored channels, for people: "3 channels, 0 DAPI, 1 GFP, 2 RFP"."""
        if self.num_stored_channels == 1:
            return "1 channel"
        names = [f"{i} {name}" for i, name in enumerate(self.channel_names[:MAX_NAMED])]
        names += ["…"] if len(self.channel_names) > MAX_NAMED else []
        return f"{self.num_stored_channels} channels, {', '.join(names) or f'0 to {self.num_stored_channels - 1}'}"

    @property
    def parts(self) -> tuple[Volume, ...]:
        """The volumes of one grid that are read as one, each with its channels; this one where it is not of several."""
        return (self,)

    @property
    def attributes(self) -> dict[str, object]:
        """The array's own attributes, as they are stored now."""
        return read_attributes(self.folder)

    def as_it_was(self, shape: Sequence[int], dtype: np.dtype, slices: str) -> Volume:
        """Return the reference to what it was before it grew: of `shape` (z, y, x), and these of its slices."""
        sizes = dict(zip("zyx", shape, strict=True))
        stored = tuple(sizes.get(axis, n) for axis, n in zip(self.axes, self.shape, strict=True))
        return replace(self, shape=stored, dtype=dtype, slices=slices)

    def open(self, *, cache_bytes: int = 0, session: str = "", live: bool = False) -> Reader:
        """Return this process's reader of the volume; the same one each time.

        Args:
            cache_bytes: decoded chunks kept in memory, shared by the readers of this process with the same number.
                Only for arrays that nobody writes to.
            session: of whoever reads; another one's first look compares chunks in memory with their files once more.
            live: whether each look does.

        Raises:
            VolumeError: the array is gone or has changed since the reference was made.
        """
        # Readers of single files and of slices notice themselves what is written.
        purpose: tuple[object, ...] = (self, self.incomplete, cache_bytes)
        purpose += () if format_named(self.format).files is not None else (session, live)
        return once(self.folder, purpose, lambda: Reader(self, cache_bytes, live=live), has_slices=bool(self.slices))


class Reader:
    """An open array; it may be used by several threads, and pickles as the volume that it reads.

    One that has grown since is read as the volume was.
    """

    def __init__(self, volume: Volume, cache_bytes: int = 0, *, live: bool = False) -> None:
        folder = volume.folder
        header = read_header(folder)
        if header is None:
            silent = ", or its server does not answer" if isinstance(folder, object_store.Remote) else ""
            raise VolumeError(f"no array at {folder} any more{silent}")
        if volume.slices:
            header = tiff_folder.as_it_was(header, volume.shape[0], volume.slices)
        if header.dtype != volume.stored_dtype or not _holds(volume.shape, header):
            raise VolumeError(
                f"{folder} was {volume.stored_dtype} {volume.shape} and is now {header.dtype} {header.shape}; open it "
                "again"
            )
        self.volume = volume
        self.shape, self.dtype, self.ndim = volume.shape, volume.dtype, volume.ndim
        self._cache_bytes, self._live = cache_bytes, live
        damage.check_chunk(header)
        self.header = header
        check = as_fill if volume.view.incomplete else NotedFiles(header).check
        self._array = open_array(header, cache_bytes, live=live, check_missing=check)
        self._through: tensorstore.StoredArray | None = None
        self._lock = threading.Lock()

    def read_through(self, wrap: Callable[[Header, tensorstore.StoredArray], tensorstore.StoredArray]) -> None:
        """Read voxels through the array that `wrap` returns; only the first call counts."""
        with self._lock:
            self._through = self._through or wrap(self.header, self._array)

    @property
    def is_fetched(self) -> bool:
        """Whether boxes are read by requests of ours, which note the stamps of files; see `fetched_array`."""
        is_remote = isinstance(self.header.folder, object_store.Remote)
        return is_remote and self._through is None and isinstance(self._array, FetchedArray)

    def __reduce__(self) -> tuple[Callable[[], Reader], tuple[()]]:
        return partial(self.volume.open, cache_bytes=self._cache_bytes, live=self._live), ()

    def read(self, box: Box, *, num_channels: int | None = None) -> np.ndarray:
        """Return the voxels of `box` (z, y, x), which lies in the volume, as (c, z, y, x).

        Args:
            num_channels: read only so many, the first ones; None: all.

        Raises:
            VolumeError: the box is empty or leaves the volume, a chunk is damaged, or the array has a time axis.
        """
        data = self._canonical(self._read(self.stored_index(box, num_channels)))
        grid = self.volume.resampling
        return data if grid is None else grid.interpolate(data, box)

    def read_own(self, box: Box) -> np.ndarray:
        """Return the voxels of `box` (z, y, x) as (c, z, y, x), of which statistics are taken: none is interpolated.

        Of a volume on another grid these are the stored ones that lie in the box; there may be none.
        """
        if (grid := self.volume.resampling) is None:
            return self.read(box)
        if (own := grid.own(box)).is_empty:
            return np.empty((self.volume.num_channels, *own.shape), self.volume.stored_dtype)
        return self._canonical(self._read(self._index(own, None)))

    def is_stored(self, box: Box) -> bool:
        """Return whether some chunk that `read_mirrored` needs for `box` (z, y, x) is stored; none is read.

        True also for an array of which only a read can tell.
        """
        array = self._array
        if not isinstance(array, FetchedArray | LocalArray | tensorstore.TensorStoreArray):
            return True
        index = self.stored_index(mirrored(box, self.volume.spatial_shape))
        with naming(self.volume, box, self.header.folder):
            return array.is_stored(index)

    def stored_index(self, box: Box, num_channels: int | None = None) -> tensorstore.Index:
        """Return where `box` (z, y, x) is stored, of all channels or the first `num_channels`, in the stored axes."""
        volume, shape = self.volume, self.volume.spatial_shape
        if len(box.start) != 3 or box.is_empty or not Box.from_shape(shape).contains(box):
            raise VolumeError(f"{volume}: box {box} is empty or leaves the volume {shape} (z, y, x)")
        return self._index(volume.stored_box(box), num_channels)

    def _index(self, box: Box, num_channels: int | None) -> tensorstore.Index:
        volume = self.volume
        index: list[slice | int] = []
        for axis, n in zip(volume.axes, volume.shape, strict=True):
            if axis in "zyx":
                i = "zyx".index(axis)
                index.append(slice(box.start[i], box.stop[i]))
            elif axis == "c":
                most = n if num_channels is None else num_channels
                first, last = (0, most - 1) if volume.view.channel is None else (int(volume.view.channel),) * 2
                index.append(slice(first, last + 1))
            elif axis == "t" and volume.view.time is not None:
                index.append(volume.view.time)
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

    def read_mirrored(self, box: Box, *, num_channels: int | None = None) -> np.ndarray:
        """Return the voxels of `box` (z, y, x) as (c, z, y, x), mirrored at the volume's faces outside of it.

        Each voxel that is needed is read once, however often it is seen. `num_channels` is as of `read`.
        """
        if box.is_empty:
            raise VolumeError(f"{self.volume}: box {box} is empty")
        shape = self.volume.spatial_shape
        around = mirrored(box, shape)
        data = self.read(around, num_channels=num_channels)
        if around == box:
            return data
        result = np.empty((len(data), *box.shape), data.dtype)
        for runs in itertools.product(*map(mirrored_runs, box.start, box.stop, shape)):
            places, shown = zip(*runs, strict=True)
            result[:, *places] = data[:, *shown]
        return result

    def read_raw(self, index: object) -> np.ndarray:
        """Return the voxels at `index`, as with numpy but without lists and negative steps, in stored axes."""
        return self._read(plain_index(index, self.shape))

    def __getitem__(self, index: object) -> np.ndarray:
        return self.read_raw(index)

    def _read(self, index: tensorstore.Index) -> np.ndarray:
        incomplete = self.volume.incomplete
        if incomplete is not None:
            box, spatial = bounds(index, self.shape), self.volume.spatial
            stop, lengths = spatial(box.stop), spatial(box.shape)
            box = Box(tuple(b - n for b, n in zip(stop, lengths, strict=True)), stop)
            if not incomplete.has(box):
                self.volume.check_written(box)
        array = self._through or self._array
        data = damage.read(self.volume, self.header, array, index, is_checked=self.is_fetched)
        return data.view(np.uint8) if data.dtype == np.bool_ else data


def _holds(shape: tuple[int, ...], header: Header) -> bool:
    """Return whether an array of `shape` is there: no more than it, or with more behind, where chunks keep places."""
    if not header.has_regular_names:
        return header.shape == shape
    return len(header.shape) == len(shape) and all(now >= n for now, n in zip(header.shape, shape, strict=True))


def _volume_of(container: Location, key: str, header: Header) -> Volume:
    """Return the volume of the one array `key` with this `header`, with what the groups around it say of it."""
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
                return _make_volume(container, header, dataset, level_keys(group, datasets))
    is_zarr = header.format in ("zarr2", "zarr3") and isinstance(header.folder, Path)
    around = webknossos.read_dataset(Path(str(header.folder))) if is_zarr else None
    return _make_volume(container, header, around or ListedLevel(key), ())


def _make_volume(container: Location, header: Header, dataset: ListedLevel, levels: tuple[str, ...]) -> Volume:
    rank = len(header.shape)
    axes = dataset.axes if dataset.axes and len(dataset.axes) == rank else header.axes or usual_axes(header.shape)
    is_guessed = header.is_guessed or (axes is not dataset.axes and header.axes is None)
    odd = f"; the array names them {header.odd_axes}, which is not understood" if header.odd_axes else ""
    where = dataset.place or read_place(header, container)
    names = dataset.channel_names or header.channel_names
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
        slices=tiff_folder.hash_names(header),
        channel_names=names if len(names) == dict(zip(axes, header.shape, strict=True)).get("c", 1) else (),
        notes=(
            *([f"axes guessed: {', '.join(axes)}{odd}"] if is_guessed else []),
            *dataset.notes,
            *header.notes,
            *where.notes,
        ),
        value_notes=header.notes,
        metadata=dataset.metadata,
        incomplete=find_incomplete(header, key),
        has_origin=where.has_origin,
        axcodes=where.axcodes,
    )


def open_volume(
    location: str | Path, key: str | None = None, level: int = 0, *, view: View = AS_STORED, is_planned: bool = False
) -> Volume:
    """Return the volume at `location`; arguments as of `volpipe.open`.

    The slices of a folder are compared, unless a plan has them already (`is_planned`): others may have come since.
    """
    container, key = locate(location, key)
    probe_file(container)
    with paths.reading_once():
        volume, header = _resolve(container, key, level)
        note = _note_on_names(volume, header)
    if volume.slices and not is_planned and isinstance(volume.folder, Path):
        tiff_folder.check(volume.folder)
    volume = with_view(replace(volume, notes=(*volume.notes, note)) if note else volume, view)
    count = volume.length("t")
    if count > 1 and view.time is None:
        raise VolumeError(
            f"{volume} has {count} points in time; choose one, 0 to {count - 1}, by input.time in a recipe, --time, or "
            "view=vp.View(time=0)"
        )
    return volume


def _note_on_names(volume: Volume, header: Header) -> str:
    """Return a sentence on chunk files with other names than the metadata give; of outputs of ours no bucket is asked.

    Raises:
        VolumeError: none of the files there is a chunk.
    """
    folder = header.folder
    is_own = volume.levels and isinstance(folder, object_store.Remote) and "volpipe" in read_attributes(folder.parent)
    return "" if is_own else describe_names(header)


def with_view(volume: Volume, view: View) -> Volume:
    """Return `volume` with `view` applied, its channel by number; values that replace the file's are in its notes.

    Raises:
        VolumeError: there is no such channel or point in time.
    """
    channel, time = _channel(volume, view.channel), _time(volume, view.time)
    notes = list(volume.notes)
    if view.incomplete and volume.incomplete is not None:
        notes.append("read as it is: what is not written yet is zeros")
    if channel is not None:
        names = volume.channel_names
        notes.append(f"channel {channel}{f', {names[channel]},' if names else ''} of {volume.num_stored_channels}")
    if time is not None:
        notes.append(f"point in time {time} of {volume.length('t')}")
    if view.voxel_size_nm is not None:
        notes = [note for note in notes if not note.startswith((UNKNOWN_SIZE, GUESSED_SIZE))]
        notes.append(_given_words("voxel size", view.voxel_size_nm, volume.voxel_size_nm))
        if view.origin_nm is None and any(volume.origin_nm) and view.voxel_size_nm != volume.voxel_size_nm:
            notes.append(f"origin {shown(volume.origin_nm)} nm as the file says; input.origin_nm gives another")
    if view.origin_nm is not None:
        notes.append(_given_words("origin", view.origin_nm, volume.origin_nm))
    return replace(
        volume,
        view=View(channel, time, view.voxel_size_nm, view.origin_nm, view.incomplete),
        voxel_size_nm=view.voxel_size_nm or volume.voxel_size_nm,
        origin_nm=view.origin_nm or volume.origin_nm,
        has_origin=volume.has_origin or view.origin_nm is not None,
        notes=tuple(notes),
    )


def _given_words(what: str, lengths: Lengths, stored: Lengths | None) -> str:
    if stored is None or stored == lengths or (what == "origin" and not any(stored)):
        return f"{what} {shown(lengths)} nm as given"
    return f"{what} {shown(lengths)} nm as given, instead of the file's {shown(stored)} nm"


def _channel(volume: Volume, channel: int | str | None) -> int | None:
    """Return the number of the channel that is meant; None for all, also where an array without channels has its 0."""
    names, count = volume.channel_names, volume.num_stored_channels
    if channel is None or (channel == 0 and "c" not in volume.axes):
        return None
    if isinstance(channel, int) and 0 <= channel < count:
        return channel
    text = str(channel)  # a name may look like a number: 488
    if names.count(text) > 1:
        raise VolumeError(f"{volume} has {names.count(text)} channels named {text}; choose one by number")
    if text in names:
        return names.index(text)
    hint = nearest(text, names) if isinstance(channel, str) else ""
    raise VolumeError(f"{volume} has no channel {channel}{hint}; input.channel is one of its {volume.channels}")


def _time(volume: Volume, time: int | None) -> int | None:
    count = volume.length("t")
    if time is None or (time == 0 and "t" not in volume.axes):
        return None
    if time >= count:
        raise VolumeError(f"{volume} has no point in time {time}; it has {count}, counted from 0")
    return time


@homes_known
def list_arrays(location: str | Path) -> list[Volume]:
    """Return every array under `location`, sorted by key; those that cannot be read are left out, with a warning."""
    container, key = locate(location)
    probe_file(container)
    _check_exists(container, key)
    volumes = []
    for name in sorted(f"{key}/{inner}".strip("/") for inner in walk(container / key, enter_groups=True)):
        try:
            volumes.append(_resolve(container, name, 0)[0])
        except RemoteError:
            raise
        except VolumeError as error:
            log.warning("%s", error)
    return volumes


def _check_exists(container: Location, key: str) -> None:
    """Raise, with what there is instead, unless there is a folder, or something in a file."""
    folder = container / key
    if isinstance(folder, object_store.Remote) and not folder.is_s3:
        return  # a web server knows of files alone
    if paths.is_folder(folder) or exists_in_file(folder):
        return
    if read_header(folder) is not None:  # a precomputed level of zeros alone, which has no folder
        return
    if not paths.exists(container):
        raise VolumeError(f"no volume at {folder}")
    names = list(walk(container, enter_groups=False))
    raise VolumeError(f"no volume at {folder}; {container} holds {_listed_keys(names) or 'no arrays'}")


def _listed_keys(names: list[str]) -> str:
    return listed([name or "an array at its root" for name in names], MAX_NAMED)


def _resolve(container: Location, key: str, level: int) -> tuple[Volume, Header]:
    """Return the volume that `key` means, and the header of its array; nothing is asked for twice.

    Whether there is anything is asked last: of a bucket, not all that may be read may be listed.
    """
    folder = container / key
    header = read_header(folder)
    if header is not None:
        if level:
            raise VolumeError(f"{folder} is one array, which has no level {level}; name the group that it is in")
        return _volume_of(container, key, header), header
    datasets = read_datasets(folder)
    if datasets is None:
        return _resolve(container, _only_key(container, key), level)
    headers = read_levels(folder, datasets)
    if not 0 <= level < len(datasets):
        raise VolumeError(f"{folder} has no level {level}; its levels are 0 to {len(datasets) - 1}")
    return _make_volume(container, headers[level], datasets[level], level_keys(key, datasets)), headers[level]


def _only_key(container: Location, key: str) -> str:
    """Return the key of the only array or group of levels under `key`, or raise with what there is."""
    folder = container / key
    images = ome.plate_images(folder, read_attributes)
    if images is not None:
        raise _several(folder, "is a plate of images", images)
    _check_exists(container, key)
    names = list(walk(folder, enter_groups=False))
    if not names and isinstance(container, Path) and container.is_file():
        raise VolumeError(f"no volume in {folder}: it holds no array of numbers with voxels")
    if not names:
        for name, num_bytes in itertools.islice(paths.list_files(folder), MAX_LOOKED_AT):
            if not num_bytes and isinstance(folder, Path):
                paths.check_links(folder / name)
        raise VolumeError(
            f"no volume in {folder}: looked there and below for N5 (attributes.json with dimensions), "
            "Zarr v2 (.zarray), Zarr v3 (zarr.json of an array), OME-Zarr (multiscales), Neuroglancer precomputed "
            "(info with scales) and TIFF slices. PNG and JPEG are slices where their names have numbers"
        )
    if len(names) > 1:
        reason = why_several(folder)
        raise _several(folder, f"holds {len(names)} volumes", names, f" ({reason})" if reason else "")
    return f"{key}/{names[0]}".strip("/")


def _several(folder: Location, what: str, keys: list[str], reason: str = "") -> SeveralVolumesError:
    sentence = f"{folder} {what}{reason}; choose one by its key: {_listed_keys(keys) or 'it names none'}"
    return SeveralVolumesError(f"{sentence}; write {typed(folder / keys[0])}" if keys else sentence, keys)


def typed(place: Location) -> str:
    """Return `place` as a user would type it: from the current folder, if it is in that."""
    here = Path.cwd()
    return str(place.relative_to(here) if isinstance(place, Path) and place.is_relative_to(here) else place)
