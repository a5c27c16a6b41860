"""Fragments by flows: each voxel follows the flow, and voxels that end at one place are a fragment.

The method of Cellpose (Stringer et al. 2021; `cellpose.dynamics.compute_masks` of 4.2, without its checks of flows and
sizes): Euler steps, a histogram of where voxels end, seeds at its peaks, which grow over the places around them. Here a
voxel takes part only if its way lies within `flows.reach` of its end. Not here: how objects become whole over blocks
(anchors). What a block reads, along an axis::

    | 1 |   reach   |  10  |   reach   |    block    |   reach   |  10  |   reach   | 1 |
                │       │         └ voxels of the block end here
                │       └ seeds, and the places that they grow over, 5 voxels each
                └ voxels of elsewhere that end there; a way that leaves this box is too long, whatever it does outside
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box, Shape, Triple
from volpipe.recipes.segmentation import FlowRules, SegmentRecipe
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
from volpipe.segmentation.method import FragmentMethod, Fragments, strides_of
from volpipe.volumes.values import Sample
from volpipe.volumes.volume import Volume

FOREGROUND = -1  # channel; flows are the others
# As in get_masks_torch: a seed is highest within PEAK voxels, more than SEED voxels end there, and it grows GROWTH
# times over neighbours where more than PLACE voxels end.
PEAK, SEED, GROWTH, PLACE = 2, 10, 5, 2
BITS = 11  # of a voxel's fraction: whole numbers, so that a way is the same in any block
ONE = 1 << BITS
STRETCH = 8  # steps of all ways, before those that have met are followed as one
MOST_POINTS = 1 << 15  # that are followed at a time, so that they stay in the cache
MOST_SEEDS = 1 << 11  # that grow at a time
FASTEST = 1 << 10  # voxels per step, along an axis
SHORT, LONG = 0.1, 3.0  # steps in voxels, beyond which flows.scale is in doubt


def find_by_flows(recipe: SegmentRecipe, shape: Triple, reader: Readable, core: Box) -> Fragments:
    """Return the fragments of the block `core`; arguments as of `FragmentMethod`."""
    rules, whole = recipe.flows, Box.from_shape(shape)
    grown = growth(rules)
    wide = core.grown(flow_halo(recipe)) & whole
    values = read_floats(recipe, reader, wide)
    inside = values[FOREGROUND] > rules.foreground
    starts = np.argwhere(inside).astype(np.int32)
    values = np.where(inside, np.clip(values[:FOREGROUND] / np.float32(rules.scale), -FASTEST, FASTEST), 0)
    framed = np.zeros((*(n + 2 for n in wide.shape), 3), np.float32)  # beyond the box, and the volume, nothing flows
    for axis, flow in enumerate(values, 3 - len(values)):
        framed[1:-1, 1:-1, 1:-1, axis] = flow
    sizes = (1, *shape[1:]) if len(values) < 3 else shape  # each slice is a volume of its own
    del values, flow
    ways = follow(framed, starts, wide, sizes, rules.steps)
    is_short = ways.within(rules.reach)
    starts, ends = starts[is_short], ways.ends[is_short]
    counts = np.zeros(wide.shape, np.int32)
    np.add.at(counts, tuple(ends.T), 1)
    seeds = find_seeds(counts, grown)
    reached = core.grown(tuple(r + g for r, g in zip(rules.reach, grown, strict=True))).relative_to(wide.start)
    seeds = seeds[((seeds >= reached.start) & (seeds < reached.stop)).all(axis=1)]
    owner = grow(counts, seeds, grown)
    own = core.relative_to(wide.start)
    is_own = ((starts >= own.start) & (starts < own.stop)).all(axis=1)
    seed = owner[tuple(ends[is_own].T)]
    anchors = np.full(core.shape, NO_ANCHOR, np.int64)
    anchors[tuple((starts[is_own] - own.start).T)] = np.append(numbers_of(seeds + wide.start, shape), NO_ANCHOR)[seed]
    return anchored_fragments(anchors, core, shape, int(inside[own.slices].sum() - is_own.sum()))


def growth(rules: FlowRules) -> Shape:
    """Return how far a seed grows (z, y, x); 0 along z where objects are of single slices."""
    return (GROWTH if rules.reach[0] else 0, GROWTH, GROWTH)


def flow_halo(recipe: SegmentRecipe) -> Shape:
    """Return the voxels (z, y, x) around a block whose flows decide where its voxels end, and what they become."""
    rules = recipe.flows
    return tuple(2 * (r + g) + 1 if g else 0 for r, g in zip(rules.reach, growth(rules), strict=True))


@dataclass(frozen=True)
class Ways:
    """The ways of points through a flow, in voxels times ONE, counted from the box of the flow.

    Attributes:
        stops: (3, n), int32: where each ended.
        low, high: (3, n), int32: the least and the greatest coordinates of each way.
    """

    stops: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        """The voxels (n, 3) in which they ended."""
        return self.stops.T >> BITS

    def within(self, reach: Shape) -> np.ndarray:
        """Return for each way (n,) whether all of it lies within `reach` voxels (z, y, x) of its end."""
        most = np.array(reach, np.int32)[:, None] << BITS
        near = (self.high - self.stops <= most) & (self.stops - self.low <= most)
        return np.asarray(near.all(axis=0))


def follow(framed: np.ndarray, starts: np.ndarray, box: Box, shape: Shape, steps: int) -> Ways:
    """Return the ways of the voxels `starts` (n, 3), counted from `box`, through a flow in voxels per step.

    Args:
        framed: (z, y, x, 3), float32, of the box with a voxel around it.
        shape: of the volume; 1 along an axis on which nothing flows.
        steps: of each.
    """
    path = np.ascontiguousarray(starts.T) << BITS
    ways = Ways(path, path.copy(), path.copy())
    merged: list[tuple[Ways, np.ndarray]] = []
    for done in range(0, steps, STRETCH):
        for first in range(0, ways.stops.shape[1], MOST_POINTS):
            advance(ways, slice(first, first + MOST_POINTS), framed, box, shape, min(STRETCH, steps - done))
        keys = np.zeros(ways.stops.shape[1], np.int64)
        for axis, stride in enumerate(strides_of(box.shape)):
            keys += (ways.stops[axis] >> BITS) * np.int64(stride)
        for axis in range(3):
            keys <<= BITS
            keys |= ways.stops[axis] & (ONE - 1)
        _, places, inverse = np.unique(keys, return_index=True, return_inverse=True)
        if 4 * len(places) < 3 * len(keys):
            merged.append((ways, inverse.astype(np.int32)))
            path = np.ascontiguousarray(ways.stops[:, places])
            ways = Ways(path, path.copy(), path.copy())
    for before, inverse in reversed(merged):
        np.minimum(before.low, ways.low[:, inverse], out=before.low)
        np.maximum(before.high, ways.high[:, inverse], out=before.high)
        ways = Ways(ways.stops[:, inverse], before.low, before.high)
    return ways


def advance(ways: Ways, part: slice, framed: np.ndarray, box: Box, shape: Shape, steps: int) -> None:
    """Follow a `part` of `ways` for some more steps, in place; arguments as of `follow`."""
    stops, low, high = (each[:, part] for each in (ways.stops, ways.low, ways.high))
    flat, strides = framed.reshape(-1, 3), strides_of(framed.shape[:3])
    corners = [sum(np.multiply(strides, corner)) for corner in itertools.product((0, 1), repeat=3)]
    for _ in range(steps):
        cells, shares = np.zeros(stops.shape[1], np.int64), []
        for axis, (start, size) in enumerate(zip(box.start, shape, strict=True)):
            place = stops[axis]
            if size > 1:
                # Where torch's grid_sample looks with align_corners=False, to which Cellpose gives coordinates as of
                # aligned corners: up to half a voxel beside, by the place in the whole volume.
                beside = np.rint((place.astype(np.float64) + ONE * start) / (size - 1))
                place = place + (beside - ONE // 2).astype(np.int32)
            cells += ((place >> BITS) + 1) * strides[axis]
            shares.append(((place & (ONE - 1)) / np.float32(ONE)).astype(np.float32)[:, None])
        flows = [flat.take(cells + corner, axis=0) for corner in corners]
        for share in reversed(shares):  # along x, then y, then z
            flows = [a + (b - a) * share for a, b in zip(flows[::2], flows[1::2], strict=True)]
        stops += np.rint(flows[0].T * np.float32(ONE)).astype(np.int32)
        for axis, n in enumerate(box.shape):
            np.clip(stops[axis], 0, ONE * (n - 1), out=stops[axis])
        np.minimum(low, stops, out=low)
        np.maximum(high, stops, out=high)


def find_seeds(counts: np.ndarray, grown: Shape) -> np.ndarray:
    """Return the seeds (n, 3) of a histogram of ends (z, y, x): those of the most ends last, of equals as they lie."""
    highest = highest_around(counts, tuple(2 * PEAK + 1 if g else 1 for g in grown))
    seeds = np.argwhere((counts == highest) & (counts > SEED))
    return seeds[np.argsort(counts[tuple(seeds.T)], kind="stable")]


def grow(counts: np.ndarray, seeds: np.ndarray, grown: Shape) -> np.ndarray:
    """Return the seed (z, y, x), int32, that each voxel of a histogram of ends belongs to; -1 of none.

    A seed grows over neighbours in which more than PLACE voxels end; a later seed takes what it reaches.
    """
    framed = np.pad(counts > PLACE, [(g, g) for g in grown])
    patch = np.stack(np.meshgrid(*(np.arange(2 * g + 1) for g in grown), indexing="ij"))  # (3, z, y, x)
    owner = np.full(framed.shape, -1, np.int32)
    for a in range(0, len(seeds), MOST_SEEDS):
        some = seeds[a : a + MOST_SEEDS]
        places = tuple(some.T[:, :, None, None, None] + patch[:, None])  # the frame moves a seed to the patch's middle
        open_places, taken = framed[places], np.zeros((len(some), *patch.shape[1:]), bool)
        z, y, x = grown
        taken[:, z, y, x] = True
        for _ in range(GROWTH):
            taken = highest_around(taken, tuple(3 if g else 1 for g in grown)) & open_places
        number = np.nonzero(taken)[0]
        owner[tuple(place[taken] for place in places)] = a + number  # the last assignment wins
    return owner[tuple(slice(g, n - g) for g, n in zip(grown, framed.shape, strict=True))]


def doubts_of_flows(recipe: SegmentRecipe, volume: Volume, sample: Sample) -> list[str]:
    """Return what a sample shows to be wrong with flows, in sentences."""
    inside, notes = doubts_of_foreground(recipe, sample, FOREGROUND)
    if not inside.size:
        return notes
    step = float(np.median(np.linalg.norm(inside[:FOREGROUND].astype(np.float64), axis=0))) / recipe.flows.scale
    if not SHORT <= step <= LONG:
        notes.append(
            f"flows of {volume} are steps of {step:.2g} voxels in a sample, in the middle, and about 1 is usual: is "
            f"flows.scale={recipe.flows.scale:g} the length of a flow that means one voxel?"
        )
    return notes


FLOWS = FragmentMethod(
    name="flows",
    find=find_by_flows,
    halo=flow_halo,
    near=lambda recipe: tuple(max(1, n) for n in flow_halo(recipe)),
    check=check_channels("the flows along z, y and x, a foreground", 1),
    doubts=doubts_of_flows,
    work_bytes=lambda objects: 240,  # 238 were measured, all of it foreground, 2026-11
    is_anchored=True,
    sees_shape=True,
)
