"""A volume copied from one format to another, box by box, in parallel, with its voxel size; whole, or not at all.

Not here: how a format is read or written (formats), or pyramids (a run makes them). On a disk a copy is written in the
folder `OUT.partial` and renamed when it is whole. A bucket cannot rename: there chunks are written in place, and the
metadata, without which they are no array, follow the last chunk; `OUT.partial` holds the tally meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import volpipe
from volpipe.errors import NOTICE, VolpipeError, VolumeError
from volpipe.geometry.grid import Box, Grid, Triple, align_up
from volpipe.process import starting_processes
from volpipe.volumes.formats.container import (
    RECORD,
    absolute,
    count_image_levels,
    create_groups,
    inside,
    labels_format,
    read_attributes,
)
from volpipe.volumes.formats.flat import Part, num_bytes
from volpipe.volumes.formats.format import Writing
from volpipe.volumes.formats.known import FORMATS, format_named
from volpipe.volumes.formats.ome_zarr import label_place, list_labels
from volpipe.volumes.identity import Identity, changes, identify
from volpipe.volumes.places import warn_of_image
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.lock import LOCK_FILE, held
from volpipe.volumes.storage.metadata import Place, Tree, plain
from volpipe.volumes.storage.object_store import Remote, check_writable
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.quota import find_quotas
from volpipe.volumes.storage.tensorstore import downsample
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    Volume,
    create_array,
    create_multiscale,
    open_volume,
    open_writer,
)
from volpipe.volumes.writer import Writer

log = logging.getLogger(__name__)

WRITTEN = {each.name: each.writing for each in FORMATS if each.writing is not None}
CODECS = {name: writing.codecs for name, writing in WRITTEN.items()}  # the first is the default, but of some labels
SUFFIXES = {suffix: each.name for each in FORMATS if each.writing is not None for suffix in each.suffixes}
CHUNK, SHARD = 64, 256
MIN_BOX_BYTES = 2**24  # smaller boxes would cost more to hand out than to copy
MAX_BOX_BYTES = 2**27  # a worker holds two to four boxes, measured 2026-11

UNBINNED: Triple = (1, 1, 1)

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Choice:
    """How a copy is to be stored.

    Attributes:
        format: one that WRITTEN has; "auto" goes by the suffix.
        chunk: voxels (z, y, x); None for 64 each.
        shard: voxels (z, y, x), of Zarr v3 and precomputed; None for 256 each.
        codec: "zstd", "gzip", "raw" or "compressed_segmentation"; "auto" takes what the format's readers all have.
        bin: voxels (z, y, x) of the volume whose mean is a voxel of the copy.
    """

    format: str = "auto"
    chunk: Triple | None = None
    shard: Triple | None = None
    codec: str = "auto"
    bin: Triple = UNBINNED


def convert(
    volume: Volume,
    out: str | os.PathLike[str],
    choice: Choice | None = None,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
    properties: Callable[[], Tree] | None = None,
) -> Volume:
    """Return the copy of `volume` at `out`; it appears once it is whole.

    N5 and Zarr are written by processes, each whole chunks or shards; a single file is written in order by this
    process, while threads read ahead. Memory is a few boxes of MAX_BOX_BYTES for each worker, whatever the volume;
    where a shard, or a plane of a single file, is larger, that is the box. Where a copy to N5 or Zarr was stopped, the
    same call goes on with it; a single file is begun anew.

    Args:
        volume: what to copy; its channels are stored before z, in TIFF within z.
        out: a file, a container, or a path into one (`cells.n5/raw`); it must not exist.
        choice: how to store it.
        workers: how many read at once.
        on_progress: called with the number of boxes copied and the number of boxes, after each.
        properties: returns what is known of each object of labels, for a format that keeps it; None for nothing.

    Raises:
        VolumeError: `out` exists, the format cannot hold such a volume, there is no room for it, or a part of another
            copy is in the way.
    """
    choice = choice or Choice()
    target = with_record(plan_copy(volume, out, choice), volume, choice)
    write_properties = format_named(target.format).write_properties if properties is not None else None
    coarse, read = coarser(volume, choice.bin), partial(_read_binned, volume, choice.bin)
    boxes = Grid(coarse.spatial_shape, _copied_box_shape(target, coarse))
    tell = on_progress or (lambda done, total: None)
    with atomic_copy(target, _copy_identity(target, volume, boxes) | {"bin": choice.bin}) as tally:
        if target.is_folder:
            copy_box = partial(_copy_box, target, read, boxes)
            for number in in_processes(copy_box, tally.left(len(boxes)), workers, target.path):
                tally.add(number)
                tell(len(tally), len(boxes))
            if write_properties is not None and properties is not None and isinstance(target.draft, Path):
                write_properties(target.draft, properties())
        else:
            with contextlib.closing(_read_in_order(target, read, boxes, workers, tell)) as parts:
                _write_file(target, parts)
                next(parts, None)  # to report the last box
    if write_properties is not None and properties is not None and not isinstance(target.path, Path):
        write_properties(target.path, properties())
    return open_volume(str(target.path), target.array_key)


def plan_copy(volume: Volume, out: str | os.PathLike[str], choice: Choice) -> Target:
    """Return the planned copy of `volume` at `out`.

    Raises:
        VolumeError: `choice` or the volume does not fit the format, or `out` is no place for it.
    """
    path, key, format = _copy_place(absolute(out), choice.format)
    place = label_place(absolute(out))
    if place is not None and (volume.dtype.kind not in "iu" or volume.num_channels > 1):
        raise VolumeError(
            f"{out} would be labels of {place.image}, and {volume} has {volume.num_channels} × {volume.dtype}: labels "
            "are whole numbers of one channel; choose another place"
        )
    if place is not None and (num := count_image_levels(absolute(out))) > 1:
        log.warning(
            "%s has %d levels and the copy has one: by OME-Zarr, labels have as many", place.image, num, extra=NOTICE
        )
    if format not in WRITTEN:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(WRITTEN)}")
    chosen, writing = format_named(format), WRITTEN[format]
    if isinstance(path, Remote):
        check_writable(path)
        if chosen.arrays is None:
            folders = (each.name for each in FORMATS if each.writing is not None and each.arrays is not None)
            raise VolumeError(f"{path}: {format} is written to a disk; what goes to S3 is {', '.join(folders)}")
    if chosen.arrays is not None:
        paths.check_letters(path / key)
    if key and not writing.has_keys:
        what, other = ("file", "array"), ""
        if chosen.arrays is not None:
            what, other = ("folder", "volume"), ", or name another folder"
        raise VolumeError(f"{path} would be a {what[0]} of one {what[1]}; leave out {key!r}{other}")
    key = key or writing.default_key
    if volume.length("t") > 1 and volume.view.time is None:
        raise VolumeError(f"{volume} has several points in time; volpipe copies one: save it on its own")
    volume.check_written()
    coarse = coarser(volume, choice.bin)
    where = Place(coarse.voxel_size_nm, coarse.origin_nm)
    warn_of_image(absolute(out), coarse.spatial_shape, coarse.voxel_size_nm, coarse.origin_nm)
    target = Target(path, key, format, _spec(coarse, format, path, choice), where)
    writing.check_spec(target.spec)
    writing.check_place(target.levels)
    _check_free(target, volume)
    return target


def with_record(target: Target, volume: Volume, choice: Choice) -> Target:
    """Return `target` with what its array says of the volume that it is copied from, and of how that one was made.

    Some formats have no place for it.
    """
    if not target.writing.has_record:
        return target
    made = read_record(volume)
    record = {
        "version": volpipe.__version__,
        "copied_from": {
            "path": str(volume.path),
            "key": volume.key,
            "view": dataclasses.asdict(volume.view),
            "bin": choice.bin,
        },
        **({"made": made} if made else {}),
    }
    attributes = {**target.spec.attributes, RECORD: target.writing.record(plain(record))}
    return dataclasses.replace(target, spec=dataclasses.replace(target.spec, attributes=attributes))


def read_record(volume: Volume) -> dict[str, Any]:  # Any: JSON
    """Return what the innermost group around `volume` says of how it was made; {} where none does."""
    place, container = volume.folder, absolute(volume.path)
    while True:
        record: object = None
        with contextlib.suppress(VolumeError, ValueError):  # of a group that is no more than around it
            record = read_attributes(place).get(RECORD)
            record = json.loads(record) if isinstance(record, str) else record
        if isinstance(record, dict):
            return record
        if place == container or place.parent == place:
            return {}
        place = place.parent


def coarser(volume: Volume, bin: Triple) -> Volume:
    """Return what a copy of `volume` would be whose voxels are means of `bin` (z, y, x) voxels; it cannot be read.

    Raises:
        VolumeError: `bin` does not fit the volume, or its numbers are labels.
    """
    if bin == UNBINNED:
        return volume
    for axis, b, n in zip("zyx", bin, volume.spatial_shape, strict=True):
        if b < 1 or n % b:
            raise VolumeError(
                f"bin {bin}: axis {axis} of {volume} has {n} voxels, which {b} does not divide; give a number that "
                "does, or cut the volume to a whole number of bins first"
            )
    if volume.dtype.kind in "iu" and volume.dtype.itemsize >= 4:
        raise VolumeError(
            f"{volume} holds {volume.dtype}, which volpipe takes for labels, and these have no mean; leave out bin "
            f"{bin}, or copy images of 8 or 16 bits or floats"
        )
    size, factors = volume.voxel_size_nm or (0.0, 0.0, 0.0), dict(zip("zyx", bin, strict=True))
    by_axis = [factors.get(axis, 1) for axis in volume.axes]
    z, y, x = (o + (b - 1) / 2 * v for o, b, v in zip(volume.origin_nm, bin, size, strict=True))
    return dataclasses.replace(
        volume,
        shape=tuple(n // b for n, b in zip(volume.shape, by_axis, strict=True)),
        chunks=tuple(max(1, n // b) for n, b in zip(volume.chunks, by_axis, strict=True)),
        voxel_size_nm=volume.voxel_size_nm and (size[0] * bin[0], size[1] * bin[1], size[2] * bin[2]),
        origin_nm=(z, y, x),
    )


def container_of(out: str | os.PathLike[str] | Remote) -> Location:
    """Return the file or the container that a copy at `out` would be, or lie in."""
    place = absolute(out)
    places: tuple[Location, ...] = (place, *place.parents)
    return next((path for path in places if path.suffix.lower() in SUFFIXES), place)


def _copy_place(out: Location, format: str) -> tuple[Location, str, str]:
    """Return container, key and format that `out` means: the nearest part of it that ends like a format."""
    path, of_image = container_of(out), labels_format(out)
    if of_image is not None and format not in ("auto", of_image.name):
        raise VolumeError(f"{out}: its image is {of_image.name}, not {format}; leave out the format, or the image")
    format = format if of_image is None else of_image.name
    if format == "auto":
        format = SUFFIXES.get(path.suffix.lower(), format)
    if format == "auto":
        raise VolumeError(f"{out}: no format is known by that name; add one of {', '.join(SUFFIXES)}, or give --format")
    return path, "/".join(inside(out, path)), format


def _spec(volume: Volume, format: str, path: Location, choice: Choice) -> ArraySpec:
    """Return the array of the copy in `format`; its voxel size is in its attributes, if the format keeps it there."""
    chosen, writing, codec = format_named(format), WRITTEN[format], choice.codec
    is_sharded = chosen.arrays is not None and chosen.arrays.is_sharded
    if codec == "auto":
        codec = writing.default_codec(volume.dtype, is_labels=volume.num_channels == 1)
    if codec not in writing.codecs:
        raise VolumeError(f"{format} is not written with codec {codec!r}; use {', '.join(writing.codecs)}")
    if choice.chunk and not writing.has_chunks:
        raise VolumeError(f"{format} has no chunks; leave out chunk {choice.chunk}")
    if choice.shard and not is_sharded:
        raise VolumeError(
            f"{format} has no shards; leave out shard {choice.shard}, or write ome-zarr-0.5, zarr3 or precomputed"
        )
    shape = volume.spatial_shape
    channels = (volume.num_channels,) if volume.num_channels > 1 else ()
    stored = (*channels, *shape)
    chunk = tuple(min(c, n) for c, n in zip(choice.chunk or (CHUNK,) * 3, shape, strict=True))
    shard = tuple(align_up(min(SHARD, n), c) for n, c in zip(shape, chunk, strict=True))
    channel_chunk = (1,) * len(channels) if chosen.arrays is None else chosen.arrays.channel_chunk(channels)
    return ArraySpec(
        shape=stored,
        dtype=writing.stored_dtype(volume.dtype, stored, Path(str(path))) if writing.stored_dtype else volume.dtype,
        chunks=(*channel_chunk, *chunk),
        shards=(*channels, *(choice.shard or shard)) if is_sharded else None,
        axes=("c", "z", "y", "x") if channels else ("z", "y", "x"),
        codec=codec,
        attributes=writing.place_attributes(Place(volume.voxel_size_nm, volume.origin_nm)),
    )


def _check_free(target: Target, volume: Volume) -> None:
    """Raise if the output exists, or the disk is too small for the uncompressed copy."""
    place, source = target.place, volume.folder
    if isinstance(place, Path) and place.exists():  # in a bucket a copy that goes on has left chunks there
        raise VolumeError(f"{place} exists already; remove it, or write to another place")
    if source == place or source in place.parents:
        raise VolumeError(f"{place} would lie inside the volume {source}; choose another place")
    if target.is_folder or target.spec.codec != "raw":
        return
    assert isinstance(target.path, Path)
    folder = next(parent for parent in target.path.parents if parent.is_dir())
    needed, free = num_bytes(target.spec.shape, target.spec.dtype), shutil.disk_usage(folder).free
    if needed > free:
        raise VolumeError(f"{target.path} needs {needed} bytes and {folder} has {free}; make room, or write elsewhere")
    for quota in find_quotas(folder):
        if quota.bytes_left is not None and needed > quota.bytes_left:
            raise VolumeError(
                f"{target.path} needs {needed} bytes and the quota of {quota.name} leaves {quota.bytes_left}; "
                "make room, or write elsewhere"
            )


def _copy_identity(target: Target, volume: Volume, boxes: Grid) -> dict[str, object]:
    """Return the values that a stopped copy must share to go on, or its boxes would differ."""
    spec = target.spec
    return {
        "volume": str(volume),
        "shape": volume.shape,
        "view": dataclasses.astuple(volume.view),
        "source": identify(volume).model_dump(mode="json"),
        "key": target.key,
        "format": target.format,
        "dtype": str(spec.dtype),
        "chunk": spec.chunks,
        "shard": spec.shards,
        "codec": spec.codec,
        "box": boxes.cell,
    }


def _copied_box_shape(target: Target, volume: Volume) -> tuple[int, ...]:
    """Return the box (z, y, x) that is copied at once: whole write units, and whole chunks of the source.

    If memory allows: where it does not, chunks of the source, above all whole planes, are decoded more than once.
    """
    shape, unit = volume.spatial_shape, target.unit
    # Rows of a flat file cost their own bytes; of slices, each opening of a file.
    writing = format_named(volume.format).writing
    is_flat = writing is not None and not writing.has_chunks and volume.codec == "raw" and Path(volume.path).is_file()
    chunk = (1, 1, 1) if is_flat else volume.spatial_chunks
    cell = [align_up(max(u, min(c, n)), u) for c, u, n in zip(chunk, unit, shape, strict=True)]
    voxel = target.spec.dtype.itemsize * volume.num_channels
    for i in (1, 2, 0):
        if math.prod(cell) * voxel > MAX_BOX_BYTES:
            others = math.prod(cell) // cell[i] * voxel
            cell[i] = max(1, MAX_BOX_BYTES // others // unit[i]) * unit[i]
    for i in (2, 1, 0):
        while cell[i] < shape[i] and 2 * math.prod(cell) * voxel <= MIN_BOX_BYTES:
            cell[i] *= 2
    return tuple(cell)


def in_processes(write: Callable[[int], None], numbers: Iterable[int], workers: int, place: Location) -> Iterator[int]:
    """Write the boxes of these `numbers` to `place`, yielding each when whole; at most two boxes a worker wait."""
    if workers == 1:
        for number in numbers:
            write(number)
            yield number
        return
    context = multiprocessing.get_context("spawn")
    with (
        starting_processes(),
        ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool,
    ):
        try:
            yield from _written_by(pool, write, iter(numbers), 2 * workers)
        except BrokenProcessPool as error:
            raise VolumeError(
                f"a process that wrote {place} was killed, maybe for want of memory; try fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _written_by(
    pool: ProcessPoolExecutor, write: Callable[[int], None], numbers: Iterator[int], most: int
) -> Iterator[int]:
    waiting: dict[Future[None], int] = {}
    while True:
        for number in itertools.islice(numbers, most - len(waiting)):
            waiting[pool.submit(write, number)] = number
        if not waiting:
            return
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            number = waiting.pop(future)
            future.result()
            yield number


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, and not before: it would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _read_binned(volume: Volume, bin: Triple, box: Box) -> np.ndarray:
    """Return the voxels (c, z, y, x) of `box` of the copy, read part by part where each is the mean of several."""
    if bin == UNBINNED:
        return volume.open().read(box)
    out = np.empty((volume.num_channels, *box.shape), volume.dtype)
    cell = list(box.shape)
    for i in range(3):
        num_bytes = math.prod(cell) // cell[i] * math.prod(bin) * volume.dtype.itemsize * volume.num_channels
        cell[i] = max(1, min(cell[i], MAX_BOX_BYTES // num_bytes))
    parts = Grid(box.shape, tuple(cell))
    for part in map(parts.box, range(len(parts))):
        data = volume.open().read(part.shift(box.start).scaled(bin))
        out[:, *part.slices] = downsample(data, (1, *bin), "mean")
    return out


def _copy_box(target: Target, read: Callable[[Box], np.ndarray], boxes: Grid, number: int) -> None:
    box = boxes.box(number)
    data = read(box)
    writer = target.open()
    if len(target.spec.shape) == 4:
        writer.write(Box((0, *box.start), (len(data), *box.stop)), data)
    else:
        writer.write(box, data[0])


def _read_in_order(
    target: Target, read_box: Callable[[Box], np.ndarray], boxes: Grid, workers: int, tell: OnProgress
) -> Generator[Part]:
    """Yield every box and its voxels in order, while `workers` threads read the next ones."""

    def read(box: Box) -> np.ndarray:
        return read_box(box).astype(target.spec.dtype, copy=False)

    with ThreadPoolExecutor(workers) as pool:
        try:
            waiting = deque((box, pool.submit(read, box)) for box in map(boxes.box, range(min(workers, len(boxes)))))
            for number in range(len(boxes)):
                box, future = waiting.popleft()
                data = future.result()
                del future
                if number + workers < len(boxes):
                    following = boxes.box(number + workers)
                    waiting.append((following, pool.submit(read, following)))
                yield box, data
                tell(number + 1, len(boxes))
        finally:
            pool.shutdown(cancel_futures=True)


def _write_file(target: Target, parts: Iterable[Part]) -> None:
    path, spec = Path(str(target.draft)), target.spec
    assert target.writing.write_file is not None
    try:
        target.writing.write_file(path, target.key, spec, target.where, parts)
    except (RuntimeError, ValueError) as error:  # HDF5's
        raise VolumeError(f"{target.path} cannot be written: {error}") from error


TALLY_FILE = "copied.json"
MAX_TALLY_BYTES = 2**24


@dataclass(frozen=True)
class Target:
    """A copy that is to be made: where, and of what shape and type.

    Attributes:
        path: the container, a file or a folder.
        key: the array, or the group of an OME-Zarr, in it; "" of precomputed.
        format: one that `convert.WRITTEN` has.
        spec: the array, (z, y, x) or (c, z, y, x).
        where: its voxel size and origin.
    """

    path: Location
    key: str
    format: str
    spec: ArraySpec
    where: Place

    @property
    def writing(self) -> Writing:
        """How arrays are written in its format."""
        return WRITTEN[self.format]

    @property
    def is_folder(self) -> bool:
        return self.writing.write_file is None

    @property
    def is_group(self) -> bool:
        """Whether the copy is a group with one level, not an array alone."""
        return self.is_folder and not self.writing.default_key

    @property
    def array_format(self) -> str:
        """The format of the array in a folder."""
        arrays = format_named(self.format).arrays
        assert arrays is not None
        return arrays.name

    @property
    def place(self) -> Location:
        """The place of the finished copy, which must be free."""
        return self.path / self.key if self.is_folder else self.path

    @property
    def work(self) -> Location:
        """The folder of the unfinished copy."""
        return self.path.parent / f"{self.path.name}.partial"

    @property
    def draft(self) -> Location:
        """The container, or in a bucket its metadata, before it is whole."""
        return self.work / self.path.name

    @property
    def array_key(self) -> str:
        return f"{self.key}/s0".lstrip("/") if self.is_group else self.key

    @property
    def unit(self) -> tuple[int, ...]:
        """Voxels (z, y, x) that are written at once: a shard, a chunk, or a plane."""
        if self.writing.has_chunks:
            return (self.spec.shards or self.spec.chunks)[-3:]
        return (1, *self.spec.shape[-2:])

    @property
    def levels(self) -> Multiscale:
        """The group of an OME-Zarr or precomputed, of one level."""
        where, name = self.where, re.sub(r"\.zarr$", "", self.path.name)
        is_labels = label_place(self.place) is not None
        return Multiscale((Level("s0"),), self.spec.axes, where.voxel_size_nm, where.origin_nm, name, (), is_labels)

    def open(self) -> Writer:
        """Return this process's writer of the array, while it grows."""
        into = None if isinstance(self.path, Path) else self.path / self.array_key
        return open_writer(self.draft, self.array_key, into)


@dataclass
class CopyTally:
    """The finished boxes of a copy, stored in a file after each box; it never lists an unfinished one.

    Attributes:
        file: where it is kept.
        identity: the source, and how the copy is stored; boxes of another copy differ.
        below: boxes with a lower number are whole.
        beyond: others that are.
    """

    file: Location
    identity: Mapping[str, object]
    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def add(self, number: int) -> None:
        """Note that box `number` is whole."""
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        self.store()

    def left(self, num_boxes: int) -> Iterator[int]:
        """Yield the boxes that are not whole now, in order."""
        known = frozenset(self.beyond)
        return (number for number in range(self.below, num_boxes) if number not in known)

    def store(self) -> None:
        tree = {"copy": self.identity, "below": self.below, "beyond": sorted(self.beyond)}
        paths.write(self.file, json.dumps(tree).encode())

    def load(self) -> bool:
        """Take over what the file says, and return whether there is one.

        Raises:
            VolumeError: it is of another copy, or no tally.
        """
        text = paths.read(self.file, MAX_TALLY_BYTES)
        if text is None:
            return False
        try:
            tree = json.loads(text)
            stored, self.below, self.beyond = tree["copy"], int(tree["below"]), set(map(int, tree["beyond"]))
            own = {key: value for key, value in self.identity.items() if key != "source"}
            changed = [f"{key} {stored.get(key)} -> {value}" for key, value in own.items() if stored.get(key) != value]
            sources = [Identity.model_validate(copy["source"]) for copy in (stored, self.identity) if "source" in copy]
            changed += changes(*sources) if len(sources) == 2 and not changed else []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VolumeError(f"{self.file} is damaged; remove {self.file.parent} to start over") from error
        if changed:
            raise VolumeError(
                f"{self.file.parent} holds a part of another copy ({'; '.join(changed)}); "
                "give its command again, or remove it to start over"
            )
        return True


def _begin_copy(target: Target, tally: CopyTally) -> None:
    """Make the empty array, or take over what a copy that was stopped has left."""
    if not tally.load():
        _check_work(target)
    if isinstance(target.draft, Path) and not (len(tally) and target.is_folder):
        _delete_place(target.draft)
    tally.store()
    if target.is_folder:
        create_draft(target, target.draft)


def _check_work(target: Target) -> None:
    """Refuse to take a folder that somebody else made for something else, or to write among others' files."""
    work = target.work
    if isinstance(work, Remote) and paths.exists(target.place):
        raise VolumeError(f"{target.place} exists already; remove it, or write to another place")
    if isinstance(work, Path) and any(entry.name != LOCK_FILE for entry in work.iterdir()):
        raise _foreign(work)


def _publish(target: Target) -> None:
    """Give the whole copy its name, and remove what was kept beside it.

    Raises:
        VolumeError: somebody else took the name meanwhile.
    """
    if not isinstance(target.path, Path):
        create_draft(target, target.path)
    elif not _rename(target, target.path):
        _discard(target)
        raise VolumeError(f"{target.path} was made by somebody else meanwhile; remove it, or write to another place")
    _delete_place(target.work)


def _discard(target: Target) -> None:
    chunks = target.path / target.array_key
    if isinstance(chunks, Remote):
        _delete_place(chunks)
    _delete_place(target.work)


def create_draft(target: Target, container: Location) -> None:
    """Make the array in `container`, without voxels, and its group, if any; what is there already stays."""
    create_array(container, target.array_key, target.spec, target.array_format)
    if target.is_group:
        create_multiscale(container, target.levels, format=target.format, key=target.key)


def _rename(target: Target, path: Path) -> bool:
    """Move the draft to its place, and return whether that was free."""
    draft = Path(str(target.draft))
    if target.is_folder and target.key and path.exists():
        create_groups(path, target.key, target.array_format)
        place = path / target.key
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            return False
        # First, so that a copy that is killed here goes on, and nobody's labels are left out of the list.
        if (labels := label_place(place)) is not None:
            list_labels(labels, format_named(target.format).ome_version)
        (draft / target.key).rename(place)
        paths.sync(place.parent)
        return True
    if path.exists():
        return False
    if not target.is_folder:
        paths.sync(draft)
    draft.rename(path)
    paths.sync(path.parent)
    return True


def _delete_place(place: Location) -> None:
    if isinstance(place, Remote):
        paths.delete(place)
    elif place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_copy(target: Target, identity: Mapping[str, object]) -> Iterator[CopyTally]:
    """Give the tally of a new or resumed copy; then move the copy to its place.

    After an error, finished boxes stay for the same command to resume, in N5 and Zarr; a single file is removed.

    Raises:
        VolumeError: it cannot be made there, or another process is making it.
    """
    for place in (target.place, target.work):
        if isinstance(place, Path):
            paths.check_links(place)
    if target.is_folder and paths.exists(target.path) and label_place(target.place) is None:
        create_groups(target.path, target.key, target.array_format)
    with _naming_copy(target), _held(target):
        tally = CopyTally(target.work / TALLY_FILE, json.loads(json.dumps(identity)))
        try:
            _begin_copy(target, tally)
        except VolpipeError:  # a refusal, which leaves what is there
            raise
        except OSError:  # no room for the first files
            if not len(tally):
                _discard(target)
            raise
        try:
            yield tally
        except BaseException as error:
            if not target.is_folder or not len(tally):
                _discard(target)
            elif isinstance(error, VolumeError):
                raise VolumeError(
                    f"{error} ({target.work} keeps what is whole; run the same command again to continue)"
                ) from error
            raise
        _publish(target)


@contextlib.contextmanager
def _naming_copy(target: Target) -> Iterator[None]:
    """Name the copy in errors of the system, such as that there is no room."""
    try:
        yield
    except VolpipeError:
        raise
    except OSError as error:
        is_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # NumPy has no number for it
        advice = "; make room, or write elsewhere" if is_full else ""
        raise VolumeError(f"{target.path} cannot be written: {error.strerror or error}{advice}") from error


def _foreign(work: Path) -> VolumeError:
    return VolumeError(f"{work} exists, and is no copy that was stopped; remove it, or write to another place")


@contextlib.contextmanager
def _held(target: Target) -> Iterator[None]:
    """Hold the folder that the copy grows in; the system lets go when this process ends, however it ends.

    A bucket cannot be held: two processes that make the same copy write the same bytes there.
    """
    work = target.work
    if not isinstance(work, Path):
        yield
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VolumeError(f"{work} cannot be made: {error.strerror}; choose another place") from error
    if any(work.iterdir()) and not (work / LOCK_FILE).exists():
        raise _foreign(work)
    try:
        with held(work, f"process {os.getpid()} on {socket.gethostname()}", VolumeError):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # it is gone
                    if [entry.name for entry in work.iterdir()] == [LOCK_FILE]:  # nothing was begun
                        _delete_place(work)
    finally:
        with contextlib.suppress(OSError):  # somebody else holds it, or it keeps what is whole
            work.rmdir()
