"""A way to cut blocks into fragments, and what it gives for one block. Not here: the ways themselves (methods)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box, Shape, Triple
from volpipe.recipes.segmentation import ObjectRules, SegmentRecipe
from volpipe.segmentation.boundary_maps import Readable
from volpipe.volumes.values import Sample
from volpipe.volumes.volume import Volume

COLUMNS = ("voxels", "first", "z0", "y0", "x0", "z1", "y1", "x1", "z", "y", "x")


@dataclass(frozen=True)
class Fragments:
    """The fragments of a block.

    Attributes:
        ids: (z, y, x), uint32: from 1 in C order of first voxels; 0 is background.
        joins: (joins, 2), int64: a fragment, and a voxel outside the block of the same supervoxel, numbered in C order
            of the whole volume. Of an anchored method: each fragment, and the voxel that it is anchored at.
        table: (fragments, len(COLUMNS)), int64: voxels, number of the first, bounding box, and sums of coordinates.
        num_lost: voxels that have no label because they lie farther from their anchor than the recipe says.
    """

    ids: np.ndarray
    joins: np.ndarray
    table: np.ndarray
    num_lost: int = 0


@dataclass(frozen=True)
class FragmentMethod:
    """A way to cut blocks into fragments.

    Attributes:
        name: as `objects.method` has it.
        find: returns the fragments of a block, by the recipe, the shape of the volume (z, y, x), a reader of it, and
            the box of the block.
        halo: voxels (z, y, x) around a block that `find` reads, by the recipe.
        near: voxels (z, y, x) around a block in which fragments lie that belong to those of the block.
        check: refuses a volume by its channels and type, by the recipe.
        doubts: returns what a sample of the volume shows to be wrong, in sentences, by the recipe.
        work_bytes: memory per voxel of a block and its halo, beside the voxels themselves.
        is_anchored: whether fragments with the same anchor are one object, wherever they lie; else they are joined at
            faces of blocks, and by affinities.
        sees_shape: whether fragments depend on the shape of the volume.
    """

    name: str
    find: Callable[[SegmentRecipe, Triple, Readable, Box], Fragments]
    halo: Callable[[SegmentRecipe], Shape]
    near: Callable[[SegmentRecipe], Shape]
    check: Callable[[SegmentRecipe, Volume], None]
    doubts: Callable[[SegmentRecipe, Volume, Sample], Sequence[str]]
    work_bytes: Callable[[ObjectRules], int]
    is_anchored: bool = False
    sees_shape: bool = False


def strides_of(shape: Sequence[int]) -> Triple:
    """Return the strides (z, y, x) of voxel numbers in a volume of `shape`."""
    return shape[1] * shape[2], shape[2], 1


def tabulate(ids: np.ndarray, core: Box, shape: Sequence[int]) -> np.ndarray:
    """Return the table, as in Fragments, of the fragments `ids` (z, y, x) of block `core` of a volume of `shape`."""
    import cc3d

    num, strides = int(ids.max(initial=0)), strides_of(shape)
    table = np.zeros((num, len(COLUMNS)), np.int64)
    if not num:
        return table
    flat, stats = ids.ravel(), cc3d.statistics(ids, no_slice_conversion=True)
    runs = np.flatnonzero(np.diff(flat, prepend=np.uint32(0)))[::-1]  # where one begins, or the background
    first = np.zeros(num + 1, np.int64)
    first[flat[runs]] = runs  # the last assignment wins: the first voxel
    places = np.unravel_index(first[1:], ids.shape)
    offset = sum(int(a) * stride for a, stride in zip(core.start, strides, strict=True))
    voxels, bounds = (stats[name][1:].astype(np.int64) for name in ("voxel_counts", "bounding_boxes"))
    sums = np.rint(stats["centroids"][1:] * voxels[:, None]).astype(np.int64)  # float64: exact
    table[:, 0] = voxels
    table[:, 1] = offset + sum(p * stride for p, stride in zip(places, strides, strict=True))
    table[:, 2:5], table[:, 5:8] = bounds[:, ::2] + core.start, bounds[:, 1::2] + core.start + 1
    table[:, 8:11] = sums + voxels[:, None] * core.start
    return table
