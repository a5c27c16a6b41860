"""Placeholders for a volume that does not exist yet, to time work on it: zeros, or synthetic affinities.

Not here: the trials (estimates of runs, segmentations and evaluations). The caller deletes the placeholders.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

SEED = 0
STEP = 12  # voxels between random numbers: cells are about as wide
STEEPNESS = 3.0  # of the rise of affinities from the walls between cells
GRAIN = 24  # of 255, the largest difference of voxels by noise


def zeros_like(volume: Volume, place: Path) -> Volume:
    """Return an array like `volume` at `place`, all zeros, without stored chunks."""
    writing = format_named(volume.format).writing
    codec = "raw" if writing is None else writing.codecs[0]
    spec = ArraySpec(volume.shape, volume.dtype, volume.chunks, volume.shards, volume.axes, codec)
    create_array(place, volume.key, spec, volume.format)
    return open_volume(place, volume.key, view=volume.view)


def synthetic_affinities(volume: Volume, shape: tuple[int, ...], place: Path) -> Volume:
    """Return an array at `place` of synthetic affinities of `shape` (z, y, x), with channels and chunks of `volume`."""
    num_channels = dict(zip(volume.axes, volume.chunks, strict=True)).get("c", 1)
    whole = (volume.num_channels, *shape)
    return write(place, as_type(affinities(whole), volume.dtype), (num_channels, *volume.spatial_chunks))


def write(place: Path, data: np.ndarray, chunk: tuple[int, ...], codec: str = "zstd") -> Volume:
    """Return an array at `place` that holds `data` (c, z, y, x)."""
    chunks = tuple(min(c, n) for c, n in zip(chunk, data.shape, strict=True))
    create_array(place, "", ArraySpec(data.shape, data.dtype, chunks, None, ("c", "z", "y", "x"), codec), "zarr3")
    open_writer(place, "").write(Box.from_shape(data.shape), data)
    return open_volume(place)


def affinities(shape: tuple[int, ...]) -> np.ndarray:
    """Return affinities (c, z, y, x), uint8, that fall towards walls between cells; the same each time."""
    num_channels, *spatial = shape
    rng = np.random.default_rng(SEED)
    field = rng.normal(size=[n // STEP + 2 for n in spatial])
    for axis, n in enumerate(spatial):
        field = _interpolate(field, axis, n)
    inside = (255 * np.clip(STEEPNESS * np.abs(field), 0, 1)).astype(np.uint8)
    grain = rng.integers(0, GRAIN + 1, spatial, np.uint8)
    result = np.empty(shape, np.uint8)
    for channel in range(num_channels):
        axis, step = channel % 3, channel // 3 + 1
        joined = np.minimum(inside, np.roll(inside, step, axis))
        result[channel] = joined - np.minimum(joined, np.roll(grain, step, axis))
    return result


def _interpolate(field: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Return `field` with STEP times the voxels along `axis`, linearly, the first `size` of them."""
    place = np.arange(size) / STEP
    first = place.astype(int)
    share = (place - first).reshape([-1 if a == axis else 1 for a in range(3)])
    return np.asarray(field.take(first, axis) * (1 - share) + field.take(first + 1, axis) * share)


def as_type(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return bytes `data` as `dtype`: 255 becomes 1.0, or the largest integer."""
    if dtype.kind == "f":
        return (data / 255).astype(dtype)
    return np.asarray(data.astype(dtype) * dtype.type(np.iinfo(dtype).max // 255))
