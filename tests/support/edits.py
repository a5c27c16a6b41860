"""Volumes that others edit, and that grow: other voxels in some chunks, whose files change, and no other files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from volumes import noise, write_volume

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_volume, open_writer


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
