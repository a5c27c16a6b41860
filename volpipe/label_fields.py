"""What a block's voxels say of belonging together: affinities as bytes, whatever was stored, and heights made of them.

Not here: objects (label_pieces). All of it is whole numbers and local, so that it is the same in any block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from volpipe.access import Reader
from volpipe.grid import Box
from volpipe.label_plan import LabelPlan
from volpipe.label_recipe import NEAREST

FULL = 255
WHOLE = 60  # a multiple of each number of neighbours that a voxel can have
FINE = 1 << 8  # heights are finer than affinities by this, so that smoothing loses little


def as_bytes(data: np.ndarray) -> np.ndarray:
    """Return chances, floats from 0 to 1 or whole numbers up to their type's greatest, as uint8 from 0 to 255."""
    if data.dtype == np.uint8:
        return data
    if data.dtype.kind == "f":
        found = np.rint(np.clip(np.nan_to_num(data), 0, 1) * FULL)
    else:
        found = data >> data.dtype.type(8 * (data.dtype.itemsize - 1))
    return np.asarray(found, np.uint8)


def read_chances(plan: LabelPlan, reader: Reader, box: Box) -> np.ndarray:
    """Return what is stored in `box`, as uint8 (c, z, y, x): all affinities, or how much a voxel is inside."""
    data = reader.read(box)
    wanted = plan.recipe.input
    if wanted.kind == "affinities":
        return as_bytes(data)
    inside = as_bytes(data[0])
    return (FULL - inside if wanted.kind == "membrane" else inside)[np.newaxis]


def nearest(plan: LabelPlan, chances: np.ndarray, box: Box) -> np.ndarray:
    """Return the affinities (3, z, y, x), uint8, of each voxel to the one before it on each axis.

    Those of one channel are the lower of the two voxels' chances. At the low faces of `box`, which `chances` fill, they
    are right only where they are stored; at those of the volume they are 0.
    """
    if plan.recipe.input.kind == "affinities":
        near = chances[: len(NEAREST)].copy()
    else:
        near = np.zeros((3, *box.shape), np.uint8)
        for axis in range(3):
            here, before = _pair(axis, -1)
            near[axis][here] = np.minimum(chances[0][here], chances[0][before])
    for axis in range(3):
        if box.start[axis] == 0:
            near[axis][_plane(axis, 0)] = 0
    return near


def heights(near: np.ndarray, box: Box, shape: Sequence[int]) -> np.ndarray:
    """Return WHOLE times the mean of the affinities of each voxel to its neighbours in a volume of `shape`, int32.

    Right for voxels of `box` behind whose high faces `near` (3, z, y, x) has one more, or the volume ends.
    """
    total = np.zeros(near.shape[1:], np.int32)
    num = np.zeros(near.shape[1:], np.int32)
    for axis in range(3):
        total += near[axis]
        here, before = _pair(axis, -1)
        total[before] += near[axis][here]
        places = np.arange(box.start[axis], box.stop[axis])
        count = (places > 0).astype(np.int32) + (places < shape[axis] - 1)
        num += count.reshape([-1 if a == axis else 1 for a in range(3)])
    return total * WHOLE // np.maximum(num, 1)


def smoothed(height: np.ndarray, passes: Sequence[int]) -> np.ndarray:
    """Return `height`, int32, after `passes` per axis of the filter 1 2 1, at FINE times the scale.

    At the faces of the array the last voxel is repeated; a voxel as many passes away from it knows nothing of that.
    """
    fine = height * np.int32(FINE)
    for axis, num in enumerate(passes):
        for _ in range(num):
            padded = np.pad(fine, [(1, 1) if a == axis else (0, 0) for a in range(3)], mode="edge")
            first, middle, last = (_shifted(padded, axis, i, fine.shape[axis]) for i in range(3))
            fine = (first + 2 * middle + last) >> 2
    return fine


def _shifted(data: np.ndarray, axis: int, start: int, length: int) -> np.ndarray:
    return data[tuple(slice(start, start + length) if a == axis else slice(None) for a in range(3))]


def _pair(axis: int, step: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the voxels that have one `step` (-1 or 1) away on `axis`, and those."""
    low, high = slice(None, -1), slice(1, None)
    here, there = (high, low) if step < 0 else (low, high)
    every = [slice(None)] * 3
    return (*every[:axis], here, *every[axis + 1 :]), (*every[:axis], there, *every[axis + 1 :])


def _plane(axis: int, place: int) -> tuple[slice | int, ...]:
    return tuple(place if a == axis else slice(None) for a in range(3))
