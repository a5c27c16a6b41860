"""Fragments by centres: peaks of a heat map, and the voxels whose offsets point to them.

Panoptic-DeepLab (Cheng et al. 2020), as MitoNet has it: a centre is the highest voxel around it, and a voxel of the
foreground belongs to the centre that is nearest to where its offset points. Here the centre must lie within
`centres.reach` of the voxel. Not here: how objects become whole over blocks (anchors).
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from volpipe.geometry.grid import Box, Shape, Triple
from volpipe.recipes.segmentation import CentreRules, SegmentRecipe
from volpipe.segmentation.anchors import (
    NO_ANCHOR,
    anchored_fragments,
    check_channels,
    doubts_of_foreground,
    highest_around,
    numbers_of,
    read_floats,
)
from volpipe.segmentation.boundary_maps import Readable
from volpipe.segmentation.method import FragmentMethod, Fragments
from volpipe.volumes.values import Sample
from volpipe.volumes.volume import Volume

FOREGROUND, HEAT, OFFSETS = 0, 1, 2  # channels; offsets are the rest
FINE = 1 << 8  # steps of a voxel to which offsets are rounded, so that distances are exact, and the same in any block
FARTHEST = 1 << 12  # voxels; longer offsets count as that


def find_by_centres(recipe: SegmentRecipe, shape: Triple, reader: Readable, core: Box) -> Fragments:
    """Return the fragments of the block `core`; arguments as of `FragmentMethod`."""
    rules, whole = recipe.centres, Box.from_shape(shape)
    wide = core.grown(centre_halo(recipe)) & whole
    values = read_floats(recipe, reader, wide)
    within = core.grown(rules.reach) & whole
    centres = peaks(values[HEAT], rules) + wide.start
    centres = centres[((centres >= within.start) & (centres < within.stop)).all(axis=1)]
    values = values[:, *core.relative_to(wide.start).slices]
    inside = values[FOREGROUND] > rules.foreground
    anchors = nearest_centres(np.where(inside, values[OFFSETS:], 0), centres - core.start, rules.reach)
    anchors[~inside] = NO_ANCHOR
    is_led = anchors != NO_ANCHOR
    anchors[is_led] = numbers_of(centres, shape)[anchors[is_led]]
    return anchored_fragments(anchors, core, shape, int(inside.sum() - is_led.sum()))


def centre_halo(recipe: SegmentRecipe) -> Shape:
    """Return the voxels (z, y, x) around a block that decide which voxels are centres of its objects."""
    rules = recipe.centres
    return tuple(r + n // 2 for r, n in zip(rules.reach, window_of(rules), strict=True))


def near_centres(recipe: SegmentRecipe) -> Shape:
    """Return how far apart (z, y, x) two voxels of an object may lie, and at least the next slice and the halo."""
    apart = (max(1, 2 * r) for r in recipe.centres.reach)
    return tuple(map(max, apart, centre_halo(recipe)))


def window_of(rules: CentreRules) -> Shape:
    """Return the box (z, y, x) in which a centre is the highest voxel."""
    return (rules.window[0] if rules.reach[0] else 1, *rules.window[1:])


def peaks(heat: np.ndarray, rules: CentreRules) -> np.ndarray:
    """Return the centres (n, 3) of the heat map (z, y, x), in C order; right but for half a window from its faces."""
    window = window_of(rules)
    high = (heat == highest_around(heat, window)) & (heat > rules.peak)
    places = np.argwhere(high)
    margin = [n // 2 for n in window]
    framed = np.pad(np.where(high, heat, -np.inf), [(m, m) for m in margin], constant_values=-np.inf)
    own, is_first = heat[high], np.ones(len(places), bool)
    for step in itertools.islice(itertools.product(*(range(-m, m + 1) for m in margin)), math.prod(window) // 2):
        before = tuple((places + margin + step).T)  # in C order
        is_first &= framed[before] != own
    return places[is_first]


def nearest_centres(offsets: np.ndarray, centres: np.ndarray, reach: Shape) -> np.ndarray:
    """Return the place in `centres` of that nearest to where each voxel points, (z, y, x), int64; NO_ANCHOR of none.

    Only centres within `reach` of a voxel count, and of equally near ones the first.

    Args:
        offsets: (z, y, x or y, x; z, y, x), float32, of a block.
        centres: (n, 3), counted from the block.
    """
    shape = offsets.shape[1:]
    fine = np.rint(np.clip(offsets, -FARTHEST, FARTHEST).astype(np.float64) * FINE)
    points = [np.zeros(shape)] * (3 - len(fine)) + list(fine)
    for axis, n in enumerate(shape):
        points[axis] = points[axis] + FINE * np.arange(n).reshape([-1 if a == axis else 1 for a in range(3)])
    best, anchors = np.full(shape, np.inf), np.full(shape, NO_ANCHOR, np.int64)
    for number, centre in enumerate(centres.tolist()):
        near = tuple(slice(max(0, c - r), max(0, c + r + 1)) for c, r in zip(centre, reach, strict=True))
        distance = sum((p[near] - FINE * c) ** 2 for p, c in zip(points, centre, strict=True))  # whole: exact
        is_nearer = distance < best[near]
        best[near][is_nearer] = distance[is_nearer]
        anchors[near][is_nearer] = number
    return anchors


def doubts_of_centres(recipe: SegmentRecipe, volume: Volume, sample: Sample) -> list[str]:
    """Return what a sample shows to be wrong with centres and offsets, in sentences."""
    inside, notes = doubts_of_foreground(recipe, sample, FOREGROUND)
    longest = np.abs(inside[OFFSETS:]).max(axis=1, initial=0)
    longest = [0.0] * (3 - len(longest)) + longest.tolist()
    beyond = [f"{n:.0f} along {a}" for a, n, r in zip("zyx", longest, recipe.centres.reach, strict=True) if n > r + 0.5]
    if beyond:
        notes.append(
            f"offsets of {volume} are up to {', '.join(beyond)} in a sample, and centres.reach is "
            f"{list(recipe.centres.reach)}: voxels farther from their centre have no label"
        )
    return notes


CENTRES = FragmentMethod(
    name="centres",
    find=find_by_centres,
    halo=centre_halo,
    near=near_centres,
    check=check_channels("a foreground, a heat map of centres, the offsets along z, y and x", 2),
    doubts=doubts_of_centres,
    work_bytes=lambda objects: 128,  # as measured of a heat map of one value, 2026-11; of noise 61
    is_anchored=True,
)
