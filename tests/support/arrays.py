"""Arrays for tests: made up, with some chunks of zeros alone, and written in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from volumes import noise

from volpipe.geometry.grid import Grid
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

AXES = ("t", "c", "z", "y", "x")


def invented(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return noise with a corner of zeros, so that some chunks hold nothing else."""
    data = noise(shape, dtype, seed)
    data[tuple(slice(0, n // 2) for n in shape)] = 0
    return data


def write_all(path: Path, key: str, data: np.ndarray) -> None:
    """Write `data` into an array that exists, one unit of write after the other."""
    writer = open_writer(path, key)
    cells = Grid(data.shape, writer.header.write_unit)
    for box in map(cells.box, range(len(cells))):
        writer.write(box, data[box.slices])


def make(path: Path, data: np.ndarray, format: str = "zarr3", **choices: Any) -> Volume:  # Any: a field of ArraySpec
    """Return the volume of `data`, written at `path`, in chunks of 4 and the last of t, c, z, y, x unless told."""
    spec = {"chunks": tuple(min(4, n) for n in data.shape), "axes": AXES[-data.ndim :]} | choices
    create_array(path, "", ArraySpec(shape=data.shape, dtype=data.dtype, **spec), format)
    write_all(path, "", data)
    return open_volume(path)


def in_greys(data: np.ndarray, *measured: np.ndarray) -> np.ndarray:
    """Return `data` from 0 to 255 between percentiles 0.5 and 99.5 of all that is `measured`, or of itself."""
    low, high = np.percentile(np.concatenate([each.ravel() for each in measured or (data,)]), [0.5, 99.5])
    shown: np.ndarray = np.clip((data - low) / (high - low), 0, 1) * 255
    return shown


def renumbered(labels: np.ndarray) -> np.ndarray:
    """Return the same objects, numbered from 1 in the order of their first voxels; 0 stays."""
    values, first = np.unique(labels, return_index=True)
    order = values[np.argsort(first)]
    number = {value: i for i, value in enumerate(order[order != 0].tolist(), 1)} | {0: 0}
    return np.vectorize(number.get)(labels)
