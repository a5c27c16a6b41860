"""Fragments of one block of affinities or of a map: connected components, and basins of a watershed.

Not here: supervoxels, which are fragments joined across block faces, and objects (agglomerate); what other methods give
(method). A fragment depends on its block and a small halo alone, and any blocks give the same supervoxels::

    block 0     | block 1          each voxel points to the higher neighbour with the strongest affinity; voxels that
    a > a > a > | b > b   c        lead to one place are a fragment (a, b, c), and the pointer that leaves the block
                                   joins a to b
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Shape, Triple
from volpipe.recipes.segmentation import NEAREST, ObjectRules, SegmentRecipe
from volpipe.segmentation.boundary_maps import (
    FULL,
    WHOLE,
    Readable,
    at,
    heights,
    nearest_affinities,
    pair,
    read_probabilities,
    smooth,
)
from volpipe.segmentation.method import FragmentMethod, Fragments, strides_of, tabulate
from volpipe.volumes.values import Sample, check_probabilities
from volpipe.volumes.volume import Volume

# Neighbours in C order; the voxel itself comes between the third and the fourth.
STEPS = ((0, -1), (1, -1), (2, -1), (2, 1), (1, 1), (0, 1))
ITSELF = 3
CODE_BITS = 3  # of an index in STEPS, counting ITSELF


@dataclass(frozen=True)
class BlockContext:
    """A block with one voxel of context on each side, padded beyond the volume.

    Attributes:
        core: the block.
        shape: of the volume (z, y, x).
        near: (3, z, y, x), uint8: affinities to the preceding voxels; 0 outside the volume.
        inside: (z, y, x), bool: the foreground; False outside the volume.
        height: (z, y, x), int32: smoothed mean affinity, -1 in the background; None without a watershed.
    """

    core: Box
    shape: tuple[int, int, int]
    near: np.ndarray
    inside: np.ndarray
    height: np.ndarray | None

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides (z, y, x) of voxel numbers in the volume."""
        return strides_of(self.shape)

    def numbers(self, plane: Box) -> np.ndarray:
        """Return the numbers (z, y, x), int64, in the whole volume of the voxels of `plane`, a box in the block."""
        places = plane.shift(self.core.start)
        ranges = zip(places.start, places.stop, self.strides, strict=True)
        z, y, x = (np.arange(a, b, dtype=np.int64) * stride for a, b, stride in ranges)
        return z[:, None, None] + y[:, None] + x


def find_components(recipe: SegmentRecipe, shape: Triple, reader: Readable, core: Box) -> Fragments:
    """Return the fragments of the block `core`, which are connected components; arguments as of `FragmentMethod`."""
    context = load_context(recipe, shape, reader, core)
    ids, joins = components(context, to_byte(recipe.objects.threshold))
    return Fragments(ids, joins, tabulate(ids, core, shape))


def find_basins(recipe: SegmentRecipe, shape: Triple, reader: Readable, core: Box) -> Fragments:
    """Return the fragments of the block `core`, which are basins of a watershed; arguments as of `FragmentMethod`."""
    ids, joins = basins(load_context(recipe, shape, reader, core))
    return Fragments(ids, joins, tabulate(ids, core, shape))


def to_byte(share: float) -> int:
    """Return the least byte that is at least `share`, 0 to 1, of 255."""
    return math.ceil(share * FULL - 1e-9)


def load_context(recipe: SegmentRecipe, shape: Triple, reader: Readable, core: Box) -> BlockContext:
    """Return the block `core` of the input with its context."""
    objects, whole = recipe.objects, Box.from_shape(shape)
    passes = objects.smooth if objects.is_watershed else (0, 0, 0)
    outer = core.grown((1, 1, 1)) & whole
    wide = outer.grown(tuple(n + 1 for n in passes)) & whole
    probabilities = read_probabilities(recipe.input, reader, wide)
    near = nearest_affinities(recipe.input, probabilities, wide)
    height = heights(near, wide, shape)
    inner = outer.relative_to(wide.start).slices
    inside = height[inner] >= math.ceil(objects.background * FULL * WHOLE)
    if not (recipe.input.is_affinities or objects.is_watershed):
        inside &= probabilities[0][inner] >= to_byte(objects.threshold)
    peaks = smooth(height, passes)[inner] if objects.is_watershed else None
    if peaks is not None:
        peaks[~inside] = -1
    return BlockContext(
        core,
        shape,
        np.stack([_framed(affinity[inner], outer, core, 0) for affinity in near]),
        _framed(inside, outer, core, False),
        None if peaks is None else _framed(peaks, outer, core, -1),
    )


def _framed(data: np.ndarray, outer: Box, core: Box, beyond: int) -> np.ndarray:
    """Return `data` of `outer` padded with `beyond` to one voxel around `core`."""
    frame = core.grown((1, 1, 1))
    ends = zip(frame.start, frame.stop, outer.start, outer.stop, strict=True)
    return np.pad(data, [(c - a, b - d) for a, b, c, d in ends], constant_values=beyond)


def components(context: BlockContext, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and joins, as in Fragments, of the connected components of affinities of at least `least`."""
    import cc3d
    import fastremap

    inside = _without_frame(context.inside)
    graph = np.zeros(inside.shape, np.uint8)
    for axis in range(3):
        joined = (_without_frame(context.near[axis]) >= least) & inside & _neighbours(context.inside, axis, -1)
        joined[at(axis, 0)] = False
        graph |= joined.astype(np.uint8) << np.uint8(2 * axis + 1)  # cc3d: towards lower, then higher indices
        here, before = pair(axis)
        graph[before] |= joined[here].astype(np.uint8) << np.uint8(2 * axis)
    labels = np.ascontiguousarray(cc3d.color_connectivity_graph(graph, connectivity=6))
    labels[~inside] = 0
    ids = fastremap.renumber(labels, in_place=True)[0].astype(np.uint32)
    pairs = []
    for axis, stride in enumerate(context.strides):
        face = _face(ids.shape, axis, -1)
        near, is_inside = _without_frame(context.near[axis]), _neighbours(context.inside, axis, -1)
        joined = (near >= least)[face.slices] & is_inside[face.slices]
        joined &= ids[face.slices] > 0
        pairs.append((ids[face.slices][joined], context.numbers(face)[joined] - stride))
    return ids, _pairs_of(pairs)


def basins(context: BlockContext) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and joins, as in Fragments, of the basins of a watershed by steepest ascent."""
    inside = _without_frame(context.inside)
    codes = _steepest(context)
    shape = inside.shape
    strides = (shape[1] * shape[2], shape[2], 1)
    moves = [step * strides[axis] for axis, step in STEPS]
    moves.insert(ITSELF, 0)
    own = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    target = own + np.array(moves, np.int32).take(codes)
    leaving = []  # of each face its box, a mask of the voxels that lead out of the block, and the step of their number
    for index, (axis, step) in enumerate(STEPS):
        face = _face(codes.shape, axis, step)
        leaves = codes[face.slices] == index + (index >= ITSELF)
        leaving.append((face, leaves, step * context.strides[axis]))
        target[face.slices][leaves] = own[face.slices][leaves]
    root = _ends_of_paths(target.ravel())
    is_root = (root == own.ravel()) & inside.ravel()
    number = np.cumsum(is_root, dtype=np.uint32)
    ids = number.take(root).reshape(shape)
    ids *= inside
    exits = ((ids[f.slices][leaves], context.numbers(f)[leaves] + move) for f, leaves, move in leaving)
    return ids, _pairs_of(exits)


def _steepest(context: BlockContext) -> np.ndarray:
    """Return for each inner voxel the index in STEPS, counting ITSELF, of its strongest step up, (z, y, x), uint8.

    Up is to a higher voxel, or to an equal one later in C order. Of equally strong steps the highest target wins, then
    the last. An affinity below half of the voxel's strongest is no step: thin objects would leak through their surface.
    The background takes no step.
    """
    assert context.height is not None
    height, near = context.height, context.near
    own, affinities = (
        _neighbours_flat(height),
        [_neighbours_flat(near[axis], axis, max(0, step)) for axis, step in STEPS],
    )
    inside, least = own >= 0, _highest(affinities) >> 1
    ups, strengths = [], []
    for (axis, step), affinity in zip(STEPS, affinities, strict=True):
        there = _neighbours_flat(height, axis, step)
        is_up = there > own if step < 0 else there >= own
        is_up &= inside
        is_up &= affinity >= least
        ups.append(is_up)
        strengths.append(affinity * is_up)
    strongest = _highest(strengths)
    ranks, best = (height + 1) << CODE_BITS, np.full(own.shape, ITSELF, np.int32)
    for number, (axis, step) in enumerate(STEPS):
        rank = _neighbours_flat(ranks, axis, step) | np.int32(number + (number >= ITSELF))
        rank *= ups[number] & (affinities[number] == strongest)
        np.maximum(best, rank, out=best)
    best &= (1 << CODE_BITS) - 1
    codes = np.empty(height.shape, np.uint8)
    _neighbours_flat(codes)[:] = best
    return np.ascontiguousarray(_without_frame(codes))


def _neighbours_flat(framed: np.ndarray, axis: int = 0, step: int = 0) -> np.ndarray:
    """Return the values (voxels,) at one `step` on `axis` from the inner voxels of `framed`, and from those between.

    One range takes in all rows of inner voxels, so that numpy goes through them as fast as it can.
    """
    strides = framed.shape[1] * framed.shape[2], framed.shape[2], 1
    start = strides[0] + step * strides[axis]
    return framed.reshape(-1)[start : start + framed.size - 2 * strides[0]]


def _highest(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the maximum of several arrays at each place."""
    highest = values[0].copy()
    for other in values[1:]:
        np.maximum(highest, other, out=highest)
    return highest


def _ends_of_paths(target: np.ndarray) -> np.ndarray:
    """Return the root of each voxel by following `target`, int32; roots lead to themselves."""
    while True:
        farther = target.take(target)
        if np.array_equal(farther, target):
            return target
        target = farther


def _pairs_of(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    pairs = [np.stack([ids.astype(np.int64), targets], axis=1) for ids, targets in parts]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def _face(shape: tuple[int, ...], axis: int, step: int) -> Box:
    """Return the low (-1) or high (1) face on `axis` of a block of `shape`."""
    start = tuple(n - 1 if a == axis and step > 0 else 0 for a, n in enumerate(shape))
    return Box(start, tuple(s + 1 if a == axis else n for a, (s, n) in enumerate(zip(start, shape, strict=True))))


def _without_frame(framed: np.ndarray) -> np.ndarray:
    return framed[1:-1, 1:-1, 1:-1]


def _neighbours(framed: np.ndarray, axis: int, step: int) -> np.ndarray:
    """Return the values of `framed` at one `step` on `axis` from each inner voxel."""
    return framed[tuple(slice(1 + step * (a == axis), n - 1 + step * (a == axis)) for a, n in enumerate(framed.shape))]


def check_channels(recipe: SegmentRecipe, volume: Volume) -> None:
    """Refuse another number of channels than of offsets, and types that hold no probabilities."""
    choice, num_channels = recipe.input, volume.num_channels
    if choice.is_affinities and num_channels != len(choice.offsets):
        hint = (
            "; name as many as the net was trained to"
            if num_channels >= len(NEAREST)
            else "; for a map of one channel say input.kind=foreground or input.kind=membrane"
        )
        raise PlanError(
            f"{volume} has {num_channels} channel{'s' * (num_channels > 1)}, input.offsets {len(choice.offsets)}{hint}"
        )
    if volume.dtype.kind not in "uf" and choice.range is None:
        raise PlanError(
            f"{volume} has {volume.dtype} voxels; probabilities are floats from 0 to 1, or unsigned integers: run the "
            "net with output.dtype=uint8, or set input.range to the values that mean 0 and 1"
        )


def doubts(recipe: SegmentRecipe, volume: Volume, sample: Sample) -> list[str]:
    """Return what is wrong with probabilities, in sentences; PlanError if they mean something else."""
    choice = recipe.input
    return check_probabilities(
        sample, choice.kind, choice.ends(volume.dtype), "input.range" if choice.range is None else ""
    )


def watershed_halo(recipe: SegmentRecipe) -> Shape:
    """Return the voxels (z, y, x) around a block that decide which neighbour each of its voxels joins."""
    return tuple(n + 2 for n in recipe.objects.smooth)


def watershed_bytes(objects: ObjectRules) -> int:
    """Return the memory of a watershed per voxel: 55 - 18 and 127 - 18 were measured, as below."""
    return 128 if objects.is_mutex else 72


# Bytes per voxel of a block, beside its input: indices, ids, keys of pairs. 39 - 18 were measured on noisy affinities,
# 192³ voxels, 2026-11.
COMPONENTS = FragmentMethod(
    name="components",
    find=find_components,
    halo=lambda recipe: (2, 2, 2),
    near=lambda recipe: (1, 1, 1),
    check=check_channels,
    doubts=doubts,
    work_bytes=lambda objects: 32,
)
WATERSHED = FragmentMethod(
    name="watershed",
    find=find_basins,
    halo=watershed_halo,
    near=watershed_halo,
    check=check_channels,
    doubts=doubts,
    work_bytes=watershed_bytes,
)
