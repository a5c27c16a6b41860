"""What the viewer may read of a volume: an OME-Zarr that our reader makes while it is read, or a precomputed folder.

Not here: HTTP (pages), or how a layer looks (layers). Metadata are what our reader knows of a volume, so that voxel
sizes and places are right whatever the format says. Nothing else can be asked for: a name is an array's metadata, or
a chunk by its numbers.

Neuroglancer counts from the corner of a voxel, OME-Zarr and volpipe from its centre::

    origin_nm 0, voxel size 8 nm    voxel 0 from -4 to 4 nm    voxel 1 from 4 to 12 nm
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Grid, Triple, triple
from volpipe.volumes.formats.container import read_attributes
from volpipe.volumes.places import Raster, levels_of, rasters_of
from volpipe.volumes.storage import object_store
from volpipe.volumes.storage.object_store import find_credentials
from volpipe.volumes.volume import Reader, View, Volume, absolute

EDGE = 64  # voxels of a chunk that is made here
MOST_BYTES = 2**23  # of such a chunk with all its channels
LARGE = 512  # voxels along an axis, from which coarser levels are made
STEPS = (1, 2, 4)  # of levels that are made: a chunk of the coarsest reads 64 times its voxels
CACHE_BYTES = 2**28
NOTHING = np.float32(2.0**126)  # a difference that there is not

NATIVE = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32")  # that Neuroglancer shows
LEVEL = re.compile(r"s(\d{1,3})/(.+)", re.DOTALL)

Tree = dict[str, Any]  # Any: JSON
Written = Callable[[Box], np.ndarray]  # which voxels of a box are written, (z, y, x), bool


@dataclass(frozen=True)
class Chunks:
    """An OME-Zarr 0.5 that exists only in answers: its chunks are read from a volume when a browser asks.

    Attributes:
        rasters: its levels, finest first.
        dtype: one of Neuroglancer's.
        num_channels: the axis c is there where there are several.
        read: returns the voxels of a box of a level as (c, z, y, x); None where nothing is stored.
        is_live: whether they change.
        look: raises VolumeError where the volume is gone.
        fill: the value where nothing is stored.
        scheme: Neuroglancer's name of the format.
    """

    rasters: tuple[Raster, ...]
    dtype: np.dtype
    num_channels: int
    read: Callable[[int, Box], np.ndarray | None]
    is_live: bool = False
    look: Callable[[], object] = lambda: None
    fill: float = 0
    scheme: str = "zarr3"

    @property
    def chunk(self) -> Triple:
        """Voxels (z, y, x) of a chunk: fewer where there are many channels."""
        edge = EDGE
        while edge > 8 and self.num_channels * edge**3 * self.dtype.itemsize > MOST_BYTES:
            edge //= 2
        return edge, edge, edge

    def check(self) -> None:
        """Raise VolumeError, with a sentence, if what is shown is gone."""
        self.look()

    def answer(self, name: str) -> bytes | None:
        """Return the bytes called `name`; None where there is no such thing."""
        if name == "zarr.json":
            return _json(_group(self._axis_letters, self.rasters))
        level, rest = _level(name, len(self.rasters))
        if level is None:
            return None
        return _json(self._array(level)) if rest == "zarr.json" else self._chunk(level, rest)

    @property
    def _axis_letters(self) -> str:
        return "czyx" if self.num_channels > 1 else "zyx"

    def _array(self, level: int) -> Tree:
        channels = (self.num_channels,) if self.num_channels > 1 else ()
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [*channels, *self.rasters[level].shape],
            "data_type": str(self.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*channels, *self.chunk]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.fill,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "gzip", "configuration": {"level": 1}},
            ],
            "attributes": {},
        }

    def _chunk(self, level: int, name: str) -> bytes | None:
        parts = name.split("/")
        if (
            parts[0] != "c"
            or len(parts) != 1 + len(self._axis_letters)
            or not all(re.fullmatch(r"\d+", n) for n in parts[1:])
        ):
            return None
        *channel, z, y, x = map(int, parts[1:])
        cells = Grid(self.rasters[level].shape, self.chunk)
        if any(channel) or any(i >= n for i, n in zip((z, y, x), cells.counts, strict=True)):
            return None
        box = cells.box(cells.number((z, y, x)))
        data = self.read(level, box)
        if data is None:
            return None
        whole = np.full((self.num_channels, *self.chunk), self.fill, self.dtype.newbyteorder("<"))
        whole[(slice(None), *(slice(0, n) for n in box.shape))] = data
        return gzip.compress(whole.tobytes(), 1, mtime=0)


def decoded(volume: Volume, *, as_labels: bool, written: Written | None = None) -> Chunks:
    """Return the source that reads `volume` by our reader.

    While a run makes it, `written` tells which voxels are; of floats the others are NOTHING, as 0 may be any grey.

    Its own levels are read where they are whole; of a volume without, and of one that is being written, coarser levels
    take one voxel in 2³ and 4³.
    """
    is_live = written is not None
    levels = (volume,) if is_live else levels_of(volume)
    steps = [(1, 1, 1)] * len(levels)
    if len(levels) == 1:
        steps = [_step(volume.spatial_shape, step) for step in STEPS if step == 1 or max(volume.spatial_shape) > LARGE]
        levels *= len(steps)
    dtype = shown_dtype(volume.dtype, as_labels=as_labels)
    fill = float(NOTHING) if is_live and dtype.kind == "f" else 0.0

    def read(level: int, box: Box) -> np.ndarray | None:
        step, source = steps[level], levels[level]
        fine = box.scaled(step) & Box.from_shape(source.spatial_shape)
        reader = _reader(source, is_live=is_live)
        if is_live and not reader.is_stored(fine):
            return None
        index = (
            slice(None),
            *(slice(min((s - 1) // 2, n - 1), None, s) for s, n in zip(step, fine.shape, strict=True)),
        )
        data = reader.read(fine)[index].astype(dtype)
        if written is not None and fill:
            data[:, ~written(fine)[index[1:]]] = fill
        return _padded(data, box.shape)

    rasters = tuple(raster.every(step) for raster, step in zip(rasters_of(levels), steps, strict=True))
    return Chunks(rasters, dtype, volume.num_channels, read, is_live, volume.open, fill)


def _reader(volume: Volume, *, is_live: bool = False) -> Reader:
    """Return the reader of `volume`; chunks in memory are compared with files and objects, which a run may replace."""
    return volume.open(cache_bytes=0 if is_live else CACHE_BYTES, live=not is_live)


def _step(shape: Triple, step: int) -> Triple:
    """Return `step` along the axes of `shape` that are long, 1 along the others."""
    return triple(step if n > EDGE else 1 for n in shape)


def _padded(data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return `data` (c, z, y, x) with its last voxels repeated up to `shape` (z, y, x): a step may end short of it."""
    missing = [n - m for n, m in zip(shape, data.shape[1:], strict=True)]
    return np.pad(data, ((0, 0), *((0, n) for n in missing)), mode="edge") if any(missing) else data


def difference(
    first: Volume, second: Volume, first_written: Written | None = None, second_written: Written | None = None
) -> Chunks | str:
    """Return the source of `second` minus `first` on the voxels of `second`; or why there is none.

    Voxels that `first` lacks, or that are not written yet, are NOTHING. Both have one channel and voxels of one size,
    and the first voxels lie a whole number of voxels apart.

    Args:
        first: the input.
        second: the output.
        first_written, second_written: tell which voxels of each are written; None where all are.
    """
    shift = _voxels_apart(first, second)
    if shift is None or first.num_channels != 1 or second.num_channels != 1:
        return "have other voxels"
    shared = Box.from_shape(first.spatial_shape).relative_to(shift) & Box.from_shape(second.spatial_shape)
    if shared.is_empty:
        return "share no voxel"

    def read(level: int, box: Box) -> np.ndarray | None:
        part, data = box & shared, np.full((1, *box.shape), NOTHING, np.float32)
        mask = np.ones(part.shape, bool)
        for written, place in ((first_written, part.shift(shift)), (second_written, part)):
            mask &= True if written is None else written(place)
        if not mask.any():
            return None
        after = _reader(second, is_live=second_written is not None).read(part).astype(np.float64)
        change = after - _reader(first, is_live=first_written is not None).read(part.shift(shift))
        data[(slice(None), *part.relative_to(box.start).slices)] = np.where(mask, change, NOTHING)
        return data

    def look() -> None:
        first.open()
        second.open()

    raster = Raster.from_volume(second)
    is_live = first_written is not None or second_written is not None
    return Chunks((raster,), np.dtype(np.float32), 1, read, is_live, look, float(NOTHING))


def _voxels_apart(first: Volume, second: Volume) -> Triple | None:
    """Return the voxel of `first` (z, y, x) at which voxel 0 of `second` lies; None if their voxels do not coincide."""
    size, other = (np.array(Raster.from_volume(volume).voxel_size_nm) for volume in (first, second))
    if not np.allclose(size, other, rtol=1e-6):
        return None
    exact = (np.array(second.origin_nm) - first.origin_nm) / size
    z, y, x = (round(n) for n in exact.tolist())
    return (z, y, x) if np.allclose(exact, (z, y, x), atol=1e-3) else None


@dataclass(frozen=True)
class Folder:
    """A folder in Neuroglancer's own format, whose files are served as they are."""

    root: Path
    is_live: bool = False
    scheme: str = "neuroglancer-precomputed"

    def check(self) -> None:
        """Raise VolumeError, with a sentence, if what is shown is gone."""
        if not (self.root / "info").is_file():
            raise VolumeError(f"{self.root} is gone: it has no file info any more")

    def answer(self, name: str) -> bytes | Path | None:
        """Return the file called `name`; None where there is no such thing."""
        return file_inside(self.root, name)


Source = Chunks | Folder  # what one layer reads


def file_inside(root: Path, name: str) -> Path | None:
    """Return the file `name` below `root`, None if there is none.

    Raises:
        VolumeError: it is a link to a file that lies elsewhere, or may not be read.
    """
    if "\0" in name or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        return None
    try:
        file, base = (root / name).resolve(strict=True), root.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # none there, a name that no file can have, or links in a circle
        return None
    if not file.is_relative_to(base):
        raise VolumeError(f"{root / name} is a link to a file outside of {root}, which is not shown; copy it there")
    if not file.is_file():
        return None
    if not os.access(file, os.R_OK):
        raise VolumeError(f"{file} may not be read by you: ask its owner, or give yourself the right")
    return file


def shown_dtype(dtype: np.dtype, *, as_labels: bool) -> np.dtype:
    """Return the type of Neuroglancer's that shows `dtype`: numbers of objects as they are."""
    if str(dtype) in NATIVE:
        return dtype
    return np.dtype(np.uint64 if as_labels else np.float32)


def public_url(volume: Volume) -> str:
    """Return the address by which a browser reads a remote `volume` itself; "" where it cannot.

    A browser has none of this machine's keys: with those, volumes in S3 are read by our reader.
    """
    place = absolute(volume.path)
    if not isinstance(place, object_store.Remote) or volume.format not in ("n5", "zarr2", "zarr3"):
        return ""
    if place.is_s3 and find_credentials().kind != "anonymous":
        return ""
    is_native = str(volume.dtype) in NATIVE and volume.view == View() and set(volume.axes) <= set("czyx")
    is_first = bool(volume.levels) and volume.key == volume.levels[0]
    group = volume.key.split("/")[:-1] if is_first else [volume.key]
    folder = place.joinpath(*filter(None, group))
    if not is_native or not _says_its_place(read_attributes(folder), volume.format):
        return ""
    root = place.root if not place.endpoint else f"{place.endpoint}/{place.bucket}"
    return f"{'/'.join((root, *folder.parts))}/|{volume.format}:"


def _says_its_place(attributes: Mapping[str, Any], format: str) -> bool:  # Any: JSON
    """Return whether Neuroglancer finds axes, voxel size and levels in the attributes of an array or a group."""
    if format == "n5":
        return "dimensions" in attributes or not {"downsamplingFactors", "scales"}.isdisjoint(attributes)
    ome = attributes.get("ome", attributes)
    groups = ome.get("multiscales") if isinstance(ome, dict) else None
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], dict):
        return False
    return (ome.get("version") or groups[0].get("version")) in ("0.4", "0.5")


def _level(name: str, num_levels: int) -> tuple[int | None, str]:
    """Return the level that `name` lies in, None where there is no such one, and the rest of the name."""
    match = LEVEL.fullmatch(name)
    if match is None or int(match[1]) >= num_levels:
        return None, ""
    return int(match[1]), match[2]


def _group(axes: str, rasters: Sequence[Raster]) -> Tree:
    """Return the metadata of an OME-Zarr 0.5 group; an axis called c^ is that of channels to Neuroglancer."""
    multiscale: Tree = {
        "axes": [
            {"name": "c^"} if axis == "c" else {"name": axis, "type": "space", "unit": "nanometer"} for axis in axes
        ],
        "datasets": [
            {
                "path": f"s{number}",
                "coordinateTransformations": [
                    {"type": "scale", "scale": [_along(raster.voxel_size_nm, axis) for axis in axes]},
                    {"type": "translation", "translation": [_along(raster.origin_nm, axis, _FIRST) for axis in axes]},
                ],
            }
            for number, raster in enumerate(rasters)
        ],
    }
    ome = {"version": "0.5", "multiscales": [multiscale]}
    return {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}


_FIRST = 0.5  # the centre of the first channel, so that channels count from the corner at 0


def _along(lengths: Sequence[float], axis: str, other: float = 1.0) -> float:
    """Return the entry of `lengths` (z, y, x) for `axis`, and `other` for the axis of channels."""
    return float(lengths["zyx".index(axis)]) if axis in "zyx" else other


def _json(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree).encode()
