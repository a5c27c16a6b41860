"""Volumes that others edit; and that grow while others look at them, as a microscope writes them: never all at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile
import zarr
from bucket import Bucket
from hypothesis import strategies as st
from volumes import noise, write_volume

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_volume, open_writer

CHUNK, SHARD = 8, 16


class GrowingN5:
    """An N5 volume: its metadata first, and then the chunks that are new or fuller, each at once."""

    name = "in.n5"

    def __init__(self, folder: Path) -> None:
        self.path = folder / self.name

    def show(self, data: np.ndarray) -> None:
        """Let the volume be `data` (z, y, x), which begins with what it was."""
        for old, new in self.changes(data):
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)

    def changes(self, data: np.ndarray) -> list[tuple[Path, Path]]:
        """Return the files that are to be others, and where these lie."""
        made = self.path.with_name("new.n5")
        shutil.rmtree(made, ignore_errors=True)
        write_volume(made, data, CHUNK)
        files = sorted(filter(Path.is_file, made.rglob("*")), key=lambda file: (file.suffix != ".json", file))
        pairs = [(self.path / file.relative_to(made), file) for file in files]
        return [(old, new) for old, new in pairs if not old.exists() or old.read_bytes() != new.read_bytes()]


class GrowingShards:
    """A Zarr array of shards, written by zarr-python."""

    name = "in.zarr"

    def __init__(self, folder: Path) -> None:
        self.path = folder / self.name

    def show(self, data: np.ndarray) -> None:
        """Let the volume be `data` (z, y, x), which begins with what it was."""
        if not self.path.exists():
            array = zarr.create_array(
                self.path, shape=data.shape, chunks=(CHUNK,) * 3, shards=(SHARD,) * 3, dtype=data.dtype,
                dimension_names=("z", "y", "x"),
            )  # fmt: skip
            array[:] = data
            return
        array = zarr.open_array(self.path, mode="r+")
        before = array.shape[0]
        array.resize(data.shape)
        array[before:] = data[before:]


class GrowingSlices:
    """A folder of TIFF files, each of which is written into its place, not moved there."""

    name = "slices"

    def __init__(self, folder: Path) -> None:
        self.path = folder / self.name

    def show(self, data: np.ndarray) -> None:
        """Let the volume be `data` (z, y, x), which begins with what it was."""
        self.path.mkdir(exist_ok=True)
        for z, plane in enumerate(data):
            file = self.path / f"{z:04}.tif"
            if not file.exists():
                tifffile.imwrite(file, plane)


class GrowingKeys(GrowingN5):
    """An N5 volume in a bucket."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        super().__init__(folder)
        self._bucket, self._key = bucket, self.name

    @property
    def location(self) -> str:
        return f"s3://{self._bucket.name}/{self._key}/raw"

    def show(self, data: np.ndarray) -> None:
        """Let the volume be `data` (z, y, x), which begins with what it was."""
        for old, new in self.changes(data):
            content, key = new.read_bytes(), f"{self._key}/{old.relative_to(self.path)}"
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)
            with self._bucket.lock:
                self._bucket.files[key] = content


Growing = GrowingN5 | GrowingShards | GrowingSlices
GROWING: dict[str, Callable[[Path], Growing]] = {"n5": GrowingN5, "shards": GrowingShards, "slices": GrowingSlices}


@st.composite
def edits(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, int]]:
    """Boxes of a volume of `shape`, and seeds of other voxels; -1 where they are written as they are."""
    boxes = []
    for seed in range(draw(st.integers(0, 3))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        stop = tuple(draw(st.integers(a + 1, min(n, a + 4))) for a, n in zip(start, shape, strict=True))
        boxes.append((Box(start, stop), draw(st.sampled_from([-1, seed + 1]))))
    return boxes


def edit(volume: Path, box: Box, seed: int = 1) -> None:
    """Give `box` of a volume other voxels; where the seed is -1, write its chunks as they are."""
    array = open_volume(volume)
    unit = array.shards or array.chunks
    start = tuple(a // c * c for a, c in zip(box.start, unit, strict=True))
    stop = tuple(min(-(-b // c) * c, n) for b, c, n in zip(box.stop, unit, array.shape, strict=True))
    voxels = array.crop(Box(start, stop))[0]
    if seed >= 0:
        voxels[box.relative_to(start).slices] = noise(box.shape, seed=seed)
    open_writer(array.path, array.key).write(Box(start, stop), voxels)


def grow(volume: Path, data: np.ndarray, chunk: int) -> None:
    """Make `data`, which begins with the voxels of `volume`, its voxels; chunks that are as they were stay so."""
    new = write_volume(volume.with_name("new.n5"), data, chunk=chunk)
    for file in filter(Path.is_file, new.rglob("*")):
        old = volume / file.relative_to(new)
        if not old.exists() or old.read_bytes() != file.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            file.replace(old)
    shutil.rmtree(new)
