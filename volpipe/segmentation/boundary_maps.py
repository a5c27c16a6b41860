"""Boundary maps: affinities of a block as bytes, from any stored type, and the heights of a watershed.

Not here: objects (fragments). All arithmetic is local and of integers: blocks agree on the voxels they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.recipes.segmentation import NEAREST, SegmentInput

FULL = 255
WHOLE = 60  # a multiple of every possible number of neighbours
FINE = 1 << 8  # steps of a height per step of an affinity, so that smoothing loses little


class Readable(Protocol):
    """What voxels are read from: the reader of a volume, or a box of it in memory."""

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box` (c, z, y, x)."""


@dataclass(frozen=True, eq=False)
class VoxelBox:
    """The voxels (c, z, y, x) of a box of a volume, in memory."""

    box: Box
    voxels: np.ndarray

    def read(self, box: Box) -> np.ndarray:
        """Return the voxels of `box`, which lies in this one."""
        return self.voxels[:, *box.relative_to(self.box.start).slices]


def as_bytes(data: np.ndarray, ends: tuple[float, float] | None = None) -> np.ndarray:
    """Return probabilities as uint8.

    `ends` are the values that mean 0 and 1; None: 0 and 1 of floats, 0 and the type's maximum of integers.
    """
    if ends is not None:
        data = (data.astype(np.float32) - np.float32(ends[0])) / np.float32(ends[1] - ends[0])
    if data.dtype == np.uint8:
        return data
    if np.issubdtype(data.dtype, np.floating):
        data = np.rint(np.clip(np.nan_to_num(data), 0, 1) * FULL)
    else:
        data = data >> data.dtype.type(8 * (data.dtype.itemsize - 1))
    return np.asarray(data, np.uint8)


def read_probabilities(choice: SegmentInput, reader: Readable, box: Box) -> np.ndarray:
    """Return the voxels of `box`, uint8 (c, z, y, x): all affinities, or the foreground as one channel."""
    data = reader.read(box)
    if choice.is_affinities:
        return as_bytes(data, choice.range)
    values = as_bytes(data[0], choice.range)
    return (FULL - values if choice.is_inverted else values)[np.newaxis]


def nearest_affinities(choice: SegmentInput, probabilities: np.ndarray, box: Box) -> np.ndarray:
    """Return the affinities (3, z, y, x), uint8, of each voxel of `box` to its predecessor on each axis.

    From one channel: the minimum of the two probabilities, unknown at the low faces of `box`. At the low faces of the
    volume they are 0.
    """
    if choice.is_affinities:
        near = probabilities[: len(NEAREST)].copy()
    else:
        near = np.zeros((3, *box.shape), np.uint8)
        for axis in range(3):
            here, before = pair(axis)
            near[axis][here] = np.minimum(probabilities[0][here], probabilities[0][before])
    for axis in range(3):
        if box.start[axis] == 0:
            near[axis][at(axis, 0)] = 0
    return near


def heights(near: np.ndarray, box: Box, shape: Sequence[int]) -> np.ndarray:
    """Return WHOLE times each voxel's mean affinity to its neighbours in a volume of `shape`, (z, y, x), int32.

    `near` (3, z, y, x) covers `box`; heights at its high faces are valid only where the volume ends.
    """
    total = near.sum(axis=0, dtype=np.int32)
    counts = []
    for axis in range(3):
        here, before = pair(axis)
        total[before] += near[axis][here]
        places = np.arange(box.start[axis], box.stop[axis])
        count = (places > 0).astype(np.int8) + (places < shape[axis] - 1)
        counts.append(count.reshape([-1 if a == axis else 1 for a in range(3)]))
    shares = np.array([WHOLE // max(1, num) for num in range(7)], np.int32)  # by number of neighbours: no rest
    total *= shares.take(counts[0] + counts[1] + counts[2])
    return np.asarray(total)


def smooth(height: np.ndarray, passes: Sequence[int]) -> np.ndarray:
    """Return `height` (z, y, x), int32, times FINE, after `passes` per axis (z, y, x) of the filter 1 2 1.

    Faces are padded by repetition, which affects the voxels within `passes` of them.
    """
    fine = height * np.int32(FINE)
    for axis, num in enumerate(passes):
        here, before = pair(axis)
        for _ in range(num):
            total = fine << 1
            total[here] += fine[before]
            total[before] += fine[here]
            for end in (0, -1):
                total[at(axis, end)] += fine[at(axis, end)]
            total >>= 2
            fine = total
    return fine


def pair(axis: int) -> tuple[tuple[slice | int, ...], tuple[slice | int, ...]]:
    """Return the index of the voxels with a predecessor on `axis`, and that of these predecessors."""
    return at(axis, slice(1, None)), at(axis, slice(None, -1))


def at(axis: int, place: slice | int) -> tuple[slice | int, ...]:
    """Return the index (z, y, x) of all voxels at `place` on `axis`."""
    return tuple(place if a == axis else slice(None) for a in range(3))
