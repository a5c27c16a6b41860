"""The box of a volume that a notebook looks at: around a voxel, of a size, inside of the volume.

Not here: what is done with its voxels.
"""

from __future__ import annotations

from collections.abc import Sequence

from volpipe.errors import PlanError
from volpipe.geometry.grid import Triple, triple

AXES = "zyx"
MOST_VOXELS = 1 << 28  # of a box: a quarter of a GiB of bytes, and more as float32; larger ones are for a run
Sizes = Sequence[int] | int


def checked_at(at: Sequence[int] | None, shape: Triple) -> Triple:
    """Return the voxel `at` (z, y, x) of a volume of `shape`; its middle where none is given.

    Raises:
        PlanError: it is no voxel of the volume.
    """
    if at is None:
        return triple(n // 2 for n in shape)
    place = _three(at, "at", "a voxel (z, y, x), such as (24, 512, 512)")
    for axis, voxel, n in zip(AXES, place, shape, strict=True):
        if not 0 <= voxel < n:
            raise PlanError(f"at {place}: axis {axis} of the volume has voxels 0 to {n - 1}, not {voxel}")
    return place


def checked_size(size: Sizes, shape: Triple) -> Triple:
    """Return `size` (z, y, x), also given as one number for all axes, of a box in a volume of `shape`.

    Raises:
        PlanError: it is no size, or more than the volume has, or than a notebook should hold.
    """
    sizes = _three((size,) * 3 if isinstance(size, int) else size, "size", "voxels (z, y, x), such as (32, 256, 256)")
    for axis, length, n in zip(AXES, sizes, shape, strict=True):
        if not 1 <= length <= n:
            raise PlanError(f"size {sizes}: axis {axis} of the volume has {n} voxels, not {length}; give 1 to {n}")
    if sizes[0] * sizes[1] * sizes[2] > MOST_VOXELS:
        raise PlanError(
            f"size {sizes} is more than {MOST_VOXELS:,} voxels, which a notebook should not hold; give a smaller "
            "size, or use vp.run"
        )
    return sizes


def _three(values: Sequence[int], name: str, example: str) -> Triple:
    try:
        numbers = [int(value) for value in values]
        is_whole = all(number == value for number, value in zip(numbers, values, strict=True))
    except (TypeError, ValueError):
        is_whole, numbers = False, []
    if not is_whole or len(numbers) != 3:
        raise PlanError(f"{name} {values!r}: give {example}, in whole numbers")
    return triple(numbers)
