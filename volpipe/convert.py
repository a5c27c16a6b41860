"""A volume copied from one format to another, box by box, in parallel, with its voxel size; whole, or not at all.

Not here: how a format is read or written (formats), pyramids (a run makes them). What is written grows beside its
place, under the name with `.partial` behind it, and is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.formats import hdf5, mrc, npy, tiff
from volpipe.formats.container import absolute, create_groups
from volpipe.formats.flat import Part, num_bytes
from volpipe.formats.metadata import Place
from volpipe.grid import Box, Grid
from volpipe.volume import (
    ArraySpec,
    Level,
    Multiscale,
    Volume,
    create_array,
    create_multiscale,
    open_volume,
    open_writer,
)

FOLDERS = {"n5": "n5", "zarr2": "zarr2", "zarr3": "zarr3", "ome-zarr-0.4": "zarr2", "ome-zarr-0.5": "zarr3"}
CODECS = {
    **dict.fromkeys(FOLDERS, ("zstd", "gzip", "raw")),
    "n5": ("gzip", "zstd", "raw"),
    "hdf5": ("gzip", "raw"),
    "tiff": ("raw", "gzip", "zstd"),
    "mrc": ("raw",),
    "npy": ("raw",),
}  # the first is the default
FORMATS = tuple(CODECS)
SUFFIXES = {
    ".n5": "n5",
    ".zarr": "ome-zarr-0.5",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".hdf": "hdf5",
    ".tif": "tiff",
    ".tiff": "tiff",
    ".mrc": "mrc",
    ".map": "mrc",
    ".rec": "mrc",
    ".npy": "npy",
}
DEFAULT_KEY = "raw"
CHUNK, SHARD = 64, 256
MIN_BOX_BYTES = 2**24  # smaller boxes would cost more to hand out than to copy
MAX_BOX_BYTES = 2**27  # of which each worker holds two to four, measured 2026-11

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Choice:
    """How a copy is to be stored.

    Attributes:
        format: one of FORMATS; "auto" goes by the suffix.
        chunk: voxels (z, y, x); None for 64 each.
        shard: voxels (z, y, x), of Zarr v3; None for 256 each.
        codec: "zstd", "gzip" or "raw"; "auto" takes what the format's readers all have.
    """

    format: str = "auto"
    chunk: tuple[int, int, int] | None = None
    shard: tuple[int, int, int] | None = None
    codec: str = "auto"


@dataclass(frozen=True)
class Target:
    """A copy that is to be made: where, and of what shape and type.

    Attributes:
        path: the container, a file or a folder.
        key: the array, or the group of an OME-Zarr, in it.
        format: one of FORMATS.
        spec: the array, (z, y, x) or (c, z, y, x).
        where: its voxel size and origin.
    """

    path: Path
    key: str
    format: str
    spec: ArraySpec
    where: Place

    @property
    def is_folder(self) -> bool:
        return self.format in FOLDERS

    @property
    def is_group(self) -> bool:
        return self.format.startswith("ome")

    @property
    def partial(self) -> Path:
        """Where the copy grows."""
        return self.path.with_name(f"{self.path.name}.partial")

    @property
    def array_key(self) -> str:
        return f"{self.key}/s0".lstrip("/") if self.is_group else self.key

    @property
    def unit(self) -> tuple[int, ...]:
        """Voxels (z, y, x) that are written at once: a shard, a chunk, or a plane."""
        if self.is_folder or self.format == "hdf5":
            return (self.spec.shards or self.spec.chunks)[-3:]
        return (1, *self.spec.shape[-2:])


def convert(
    volume: Volume,
    out: str | os.PathLike[str],
    choice: Choice | None = None,
    *,
    workers: int = 1,
    on_progress: OnProgress | None = None,
) -> Volume:
    """Return the copy of `volume` at `out`, which is there when it is whole, and not before.

    N5 and Zarr are written by processes, each whole chunks or shards; a single file is written in order by this
    process, while threads read ahead. Memory is a few boxes of MAX_BOX_BYTES for each worker, whatever the volume;
    where a shard, or a plane of a single file, is larger, that is the box.

    Args:
        volume: what to copy; its channels are stored before z, in TIFF within z.
        out: a file, a container, or a path into one (`cells.n5/raw`); it must not exist.
        choice: how to store it.
        workers: how many read at once.
        on_progress: called with the number of boxes copied and the number of boxes, after each.

    Raises:
        VolumeError: `out` exists, the format cannot hold such a volume, or there is no room for it.
    """
    target = plan_copy(volume, out, choice or Choice())
    boxes = Grid(volume.spatial_shape, _cell(target, volume))
    tell = on_progress or (lambda done, total: None)
    with _growing(target):
        if target.is_folder:
            _create(target)
            for done, _ in enumerate(_written(target, volume, boxes, workers), start=1):
                tell(done, len(boxes))
        else:
            with contextlib.closing(_parts(target, volume, boxes, workers, tell)) as parts:
                _write_file(target, parts)
                next(parts, None)  # so that it tells of the last box
    return open_volume(target.path, target.array_key)


def plan_copy(volume: Volume, out: str | os.PathLike[str], choice: Choice) -> Target:
    """Return what a copy of `volume` at `out` will be.

    Raises:
        VolumeError: `choice` or the volume does not fit the format, or `out` is no place for it.
    """
    place = absolute(out)
    if not isinstance(place, Path):
        raise VolumeError(
            f"copies are written to a disk, not to {out}; `volpipe run` writes there, also with net identity"
        )
    path, key, format = _place(place, choice.format)
    if format not in FORMATS:
        raise VolumeError(f"format {format!r} is not known; use {', '.join(FORMATS)}")
    if key and not (format in FOLDERS or format == "hdf5"):
        raise VolumeError(f"{path} would be a file of one array; leave out {key!r}")
    if not key and format in ("n5", "hdf5", "zarr2", "zarr3"):
        key = DEFAULT_KEY
    if "t" in volume.axes and volume.shape[volume.axes.index("t")] > 1:
        raise VolumeError(f"{volume} has several points in time; volpipe copies one: save it on its own")
    where = Place(volume.voxel_size_nm, volume.origin_nm)
    target = Target(path, key, format, _spec(volume, format, path, choice), where)
    _check_free(target, volume)
    return target


def _place(out: Path, format: str) -> tuple[Path, str, str]:
    """Return container, key and format that `out` means: the nearest part of it that ends like a format."""
    for path in (out, *out.parents):
        suffix = path.suffix.lower()
        if suffix in SUFFIXES:
            return path, "/".join(out.relative_to(path).parts), SUFFIXES[suffix] if format == "auto" else format
    if format == "auto":
        raise VolumeError(f"{out}: no format is known by that name; add one of {', '.join(SUFFIXES)}, or give --format")
    return out, "", format


def _spec(volume: Volume, format: str, path: Path, choice: Choice) -> ArraySpec:
    """Return the array that `format` will hold; its voxel size is in its attributes, where those are its place."""
    codec = CODECS[format][0] if choice.codec == "auto" else choice.codec
    if codec not in CODECS[format]:
        raise VolumeError(f"{format} is not written with codec {codec!r}; use {', '.join(CODECS[format])}")
    if choice.chunk and format in ("tiff", "mrc", "npy"):
        raise VolumeError(f"{format} has no chunks; leave out chunk {choice.chunk}")
    if choice.shard and FOLDERS.get(format) != "zarr3":
        raise VolumeError(f"{format} has no shards; leave out shard {choice.shard}, or write ome-zarr-0.5 or zarr3")
    shape = volume.spatial_shape
    channels = (volume.num_channels,) if volume.num_channels > 1 else ()
    chunk = tuple(min(c, n) for c, n in zip(choice.chunk or (CHUNK,) * 3, shape, strict=True))
    shard = tuple(_up(min(SHARD, n), c) for n, c in zip(shape, chunk, strict=True))
    return ArraySpec(
        shape=(*channels, *shape),
        dtype=mrc.stored_dtype(volume.dtype, (*channels, *shape), path) if format == "mrc" else volume.dtype,
        chunks=(*(1 for _ in channels), *chunk),
        shards=(*channels, *(choice.shard or shard)) if FOLDERS.get(format) == "zarr3" else None,
        axes=("c", "z", "y", "x") if channels else ("z", "y", "x"),
        codec=codec,
        attributes=_attributes(volume, format),
    )


def _attributes(volume: Volume, format: str) -> dict[str, object]:
    """Return voxel size and origin as attributes of an array: N5 counts x, y, z; OME-Zarr has them in its group."""
    size = volume.voxel_size_nm
    if size is None or format not in ("n5", "zarr2", "zarr3", "hdf5"):
        return {}
    turn = -1 if format == "n5" else 1
    found = {"resolution": list(size)[::turn], "offset": list(volume.origin_nm)[::turn], "units": ["nm"] * 3}
    return found | ({"element_size_um": [v / 1000 for v in size]} if format == "hdf5" else {})


def _check_free(target: Target, volume: Volume) -> None:
    """Raise where something is in the way, or the disk too small for what is not compressed."""
    place = target.path / target.key if target.is_folder else target.path
    source = Path(volume.path) / volume.key
    if place.exists():
        raise VolumeError(f"{place} exists already; remove it, or write to another place")
    if source == place or source in place.parents:
        raise VolumeError(f"{place} would lie inside the volume {source}; choose another place")
    if target.is_folder or target.spec.codec != "raw":
        return
    folder = next(parent for parent in target.path.parents if parent.is_dir())
    needed, free = num_bytes(target.spec.shape, target.spec.dtype), shutil.disk_usage(folder).free
    if needed > free:
        raise VolumeError(f"{target.path} needs {needed} bytes and {folder} has {free}; make room, or write elsewhere")


@contextlib.contextmanager
def _growing(target: Target) -> Iterator[None]:
    """Make an empty place for the copy to grow at; then put it in its place, or remove it on any other way out."""
    _claim(target)
    try:
        yield
        _publish(target)
    finally:
        if target.is_folder:
            shutil.rmtree(target.partial, ignore_errors=True)
        else:
            target.partial.unlink(missing_ok=True)


def _claim(target: Target) -> None:
    """Make the empty place, which nobody else may have made."""
    partial = target.partial
    if target.is_folder and target.path.exists():
        create_groups(target.path, target.key, FOLDERS[target.format])
    try:
        if not partial.parent.is_dir():
            partial.parent.mkdir(parents=True)
        if target.is_folder:
            partial.mkdir()
        else:
            partial.touch(exist_ok=False)
    except OSError as error:
        if isinstance(error, FileExistsError) and partial.parent.is_dir():
            raise VolumeError(
                f"{partial} exists: another copy is being made, or was killed; remove it if none is at work"
            ) from error
        raise VolumeError(f"{partial} cannot be made: {error.strerror}; choose another place") from error


def _publish(target: Target) -> None:
    if target.is_folder and target.key and target.path.exists():
        create_groups(target.path, target.key, FOLDERS[target.format])
        place = target.path / target.key
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            (target.partial / target.key).rename(place)
            return
    elif not target.path.exists():
        target.partial.rename(target.path)
        return
    raise VolumeError(f"{target.path} was made by somebody else meanwhile; remove it, or write to another place")


def _cell(target: Target, volume: Volume) -> tuple[int, ...]:
    """Return the box (z, y, x) that is copied at once: whole write units, and whole chunks of the source.

    If memory allows: where it does not, chunks of the source, above all whole planes, are decoded more than once.
    """
    shape, unit = volume.spatial_shape, target.unit
    # Any rows of a flat file cost what they are; of slices each time that it is opened.
    is_flat = volume.format in ("tiff", "mrc", "npy") and volume.codec == "raw" and Path(volume.path).is_file()
    stored = {} if is_flat else dict(zip(volume.axes, volume.chunks, strict=True))
    cell = [_up(max(u, min(stored.get(a, 1), n)), u) for a, u, n in zip("zyx", unit, shape, strict=True)]
    voxel = target.spec.dtype.itemsize * volume.num_channels
    for i in (1, 2, 0):
        if math.prod(cell) * voxel > MAX_BOX_BYTES:
            others = math.prod(cell) // cell[i] * voxel
            cell[i] = max(1, MAX_BOX_BYTES // others // unit[i]) * unit[i]
    for i in (2, 1, 0):
        while cell[i] < shape[i] and 2 * math.prod(cell) * voxel <= MIN_BOX_BYTES:
            cell[i] *= 2
    return tuple(cell)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _create(target: Target) -> None:
    create_array(target.partial, target.array_key, target.spec, FOLDERS[target.format])
    if target.is_group:
        where, name = target.where, re.sub(r"\.zarr$", "", target.path.name)
        levels = Multiscale((Level("s0"),), target.spec.axes, where.voxel_size_nm, where.origin_nm, name)
        create_multiscale(target.partial, levels, format=target.format, key=target.key)


def _written(target: Target, volume: Volume, boxes: Grid, workers: int) -> Iterator[None]:
    """Write every box, yielding after each; at most two boxes a worker wait."""
    if workers == 1:
        for number in range(len(boxes)):
            _copy_box(target, volume, boxes.box(number))
            yield
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        try:
            waiting = set()
            for number in range(len(boxes)):
                waiting.add(pool.submit(_copy_box, target, volume, boxes.box(number)))
                while len(waiting) >= 2 * workers or (waiting and number == len(boxes) - 1):
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                        yield
        except BrokenProcessPool as error:
            raise VolumeError(
                f"a process that wrote {target.path} was killed, maybe for want of memory; try fewer workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, and not before: it would wait for work for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _copy_box(target: Target, volume: Volume, box: Box) -> None:
    data = volume.open().read(box)
    writer = open_writer(target.partial, target.array_key)
    if len(target.spec.shape) == 4:
        writer.write(Box((0, *box.start), (len(data), *box.stop)), data)
    else:
        writer.write(box, data[0])


def _parts(target: Target, volume: Volume, boxes: Grid, workers: int, tell: OnProgress) -> Generator[Part]:
    """Yield every box and its voxels in order, while `workers` threads read the next ones."""
    reader = volume.open()

    def read(box: Box) -> np.ndarray:
        return reader.read(box).astype(target.spec.dtype, copy=False)

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
    path, spec = target.partial, target.spec
    try:
        if target.format == "hdf5":
            hdf5.write(path, target.key, spec, parts)
        elif target.format == "tiff":
            tiff.write(path, spec, target.where, parts, tiff.choose_style(target.path.name, spec))
        elif target.format == "mrc":
            mrc.write(path, spec, target.where, parts)
        else:
            npy.write(path, spec, parts)
    except VolumeError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError and ValueError: HDF5's
        raise VolumeError(f"{target.path} cannot be written: {error}") from error


def parse_sizes(text: str, option: str) -> tuple[int, int, int]:
    """Return three numbers z, y, x from text such as "64,128,128", or "64" for all three.

    Raises:
        VolumeError: they are none; `option` is named.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3 or min(sizes) < 1:
        raise VolumeError(f"{option} {text!r}: write one number above 0, or three, z,y,x, such as 64,128,128")
    z, y, x = sizes
    return z, y, x
