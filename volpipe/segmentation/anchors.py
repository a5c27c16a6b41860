"""Voxels that lead to their object: what methods of centres and of flows share.

Each voxel of an object leads to one voxel of the volume, its anchor: a centre, or where flows end. The recipe says how
far from it the voxels of an object lie at most, so that a block with a halo knows the anchors of its voxels. Fragments
of one anchor are one object, in whichever blocks they lie::

    block 0     | block 1      a and b lead to the voxel at *, in block 1; they are one object, though they do not touch
    a a         |    * b b
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Shape, Triple
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.segmentation.boundary_maps import Readable, at
from volpipe.segmentation.method import Fragments, strides_of, tabulate
from volpipe.volumes.values import Sample
from volpipe.volumes.volume import Volume

NO_ANCHOR = -1


def read_floats(recipe: SegmentRecipe, reader: Readable, box: Box) -> np.ndarray:
    """Return the channels (c, z, y, x), float32, of `box` in the order of `input.kind`; 0 where there is no number."""
    data = reader.read(box)
    if recipe.input.channels is not None:
        data = data[list(recipe.input.channels)]
    return np.nan_to_num(data.astype(np.float32, copy=False), nan=0.0)


def anchored_fragments(anchors: np.ndarray, core: Box, shape: Triple, num_lost: int) -> Fragments:
    """Return the fragments of the block `core`: voxels with one anchor are a fragment.

    Args:
        anchors: (z, y, x), int64: number of the anchor in the volume of `shape`, NO_ANCHOR of none.
        num_lost: as in Fragments.
    """
    import fastremap

    ids, numbers = fastremap.renumber(anchors - NO_ANCHOR)  # in C order of first voxels; 0 stays
    numbers.pop(0, None)
    joins = np.array([(number, anchor + NO_ANCHOR) for anchor, number in numbers.items()], np.int64).reshape(-1, 2)
    ids = np.asarray(ids, np.uint32)
    return Fragments(ids, joins[np.argsort(joins[:, 0])], tabulate(ids, core, shape), num_lost)


def numbers_of(places: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the numbers (n,), int64, of voxels at `places` (n, 3) in a volume of `shape`."""
    return np.asarray(places.astype(np.int64) @ np.array(strides_of(shape), np.int64))


def highest_around(values: np.ndarray, window: Shape) -> np.ndarray:
    """Return the highest of `values` (…, z, y, x) in a box of `window` voxels around each, clipped at the faces."""
    highest = values
    for axis, size in enumerate(window):
        result = highest.copy()
        for step in range(1, min(size // 2, values.shape[axis - 3] - 1) + 1):
            low, high = (..., *at(axis, slice(None, -step))), (..., *at(axis, slice(step, None)))
            np.maximum(result[low], highest[high], out=result[low])
            np.maximum(result[high], highest[low], out=result[high])
        highest = result
    return highest


def check_channels(meaning: str, others: int) -> Callable[[SegmentRecipe, Volume], None]:
    """Return what refuses volumes that do not hold `others` channels beside displacements along z, y, x, or y, x.

    Args:
        meaning: of the channels, for people.
    """

    def check(recipe: SegmentRecipe, volume: Volume) -> None:
        kind, chosen = recipe.input.kind, recipe.input.channels
        num = volume.num_channels if chosen is None else len(chosen)
        if num - others not in (2, 3):
            have = f"{volume} has {num}" if chosen is None else f"input.channels names {num}"
            raise PlanError(
                f"{kind} are {others + 3} channels, {meaning}, or {others + 2} without z, and {have}; name them in "
                "this order by input.channels"
            )
        if chosen is not None and max(chosen) >= volume.num_channels:
            raise PlanError(
                f"input.channels {list(chosen)}: {volume} has {volume.num_channels} channels, numbered from 0"
            )
        depth = getattr(recipe, kind).reach[0]
        if (num - others == 2) != (depth == 0):
            has = "no displacement along z, so that objects are of single slices" if depth else "a displacement along z"
            raise PlanError(
                f"{kind}.reach is {depth} along z, and {volume} has {has}; set it to "
                f"{'0' if depth else 'the largest radius of an object'}"
            )
        if volume.dtype.kind == "u":
            raise PlanError(
                f"{volume} has {volume.dtype} voxels, and {kind} go either way: run the net with output.dtype=float32"
            )

    return check


def doubts_of_foreground(recipe: SegmentRecipe, sample: Sample, channel: int) -> tuple[np.ndarray, list[str]]:
    """Return the foreground of a sample, (c, n) in the order of `input.kind`, and what looks wrong with it.

    Args:
        channel: of the foreground.
    """
    kind, chosen = recipe.input.kind, recipe.input.channels
    values = np.concatenate([box.reshape(len(box), -1).astype(np.float32) for box in sample.boxes], axis=1)
    values, notes = values if chosen is None else values[list(chosen)], []
    if sample.num_nonfinite:
        notes.append(
            f"{sample.volume} has NaN or infinite voxels in {len(sample.boxes)} sampled boxes: NaN counts as 0"
        )
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    least = getattr(recipe, kind).foreground
    inside = values[channel] > least
    if inside.all() or not inside.any():
        low, high = (float(end(values[channel])) for end in (np.min, np.max))
        share, place = "all" if inside.all() else "none", range(len(values))[channel]
        notes.append(
            f"the foreground of {sample.volume}, channel {place if chosen is None else chosen[place]}, is {low:g} "
            f"to {high:g} in {len(sample.boxes)} sampled boxes, and {share} of it above {kind}.foreground={least:g}: "
            "is it the right channel, and are its values logits or probabilities?"
        )
    return values[:, inside], notes
