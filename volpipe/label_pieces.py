"""Pieces: what of a fragment or component lies in one block, what it is joined to outside, and its size and place.

Not here: which pieces are one (label_graph). A piece depends on voxels of its block and a few around it alone, and
whatever the blocks are, pieces that are joined across their faces make the same fragments::

    block 0     | block 1          each voxel points to the higher neighbour to which its affinity is strongest; a
    a > a > a > | b > b   c        piece is what comes together within a block (a, b, c), and the pointer that leaves
                                   the block joins a to b
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.access import Reader
from volpipe.grid import Box
from volpipe.label_fields import FINE, FULL, WHOLE, heights, nearest, read_chances, smoothed
from volpipe.label_plan import LabelPlan

COLUMNS = ("voxels", "first", "z0", "y0", "x0", "z1", "y1", "x1", "z", "y", "x")
# Neighbours in ascending order of their number; the voxel itself is between the third and the fourth.
STEPS = ((0, -1), (1, -1), (2, -1), (2, 1), (1, 1), (0, 1))
ITSELF = 3
HEIGHT_BITS = (FULL * WHOLE * FINE).bit_length()


@dataclass(frozen=True)
class Pieces:
    """The pieces of a block.

    Attributes:
        ids: (z, y, x), uint32: pieces count from 1 in C order of where they begin to be seen; 0 is none.
        joins: (joins, 2), int64: a piece, and the number in C order in the whole volume of a voxel outside the block
            that is of the same fragment.
        table: (pieces, len(COLUMNS)), int64: voxels, number of the first, bounding box, and sums of coordinates.
    """

    ids: np.ndarray
    joins: np.ndarray
    table: np.ndarray


@dataclass(frozen=True)
class Surroundings:
    """A block with a voxel more on each side, also where the volume has none.

    Attributes:
        own: the block.
        shape: of the volume.
        near: (3, z, y, x), uint8: affinities to the voxels before; 0 outside the volume.
        inside: (z, y, x), bool: which voxels may have a label; none outside the volume.
        height: (z, y, x), int32: smoothed, -1 where not inside; of a watershed alone.
    """

    own: Box
    shape: tuple[int, int, int]
    near: np.ndarray
    inside: np.ndarray
    height: np.ndarray | None

    @property
    def strides(self) -> tuple[int, int, int]:
        """By how much numbers of voxels grow along each axis of the volume."""
        return self.shape[1] * self.shape[2], self.shape[2], 1

    def numbers(self, plane: Box) -> np.ndarray:
        """Return the numbers in the whole volume, int64, of the voxels of `plane`, a box in the block's coordinates."""
        places = plane.shift(self.own.start)
        ranges = zip(places.start, places.stop, self.strides, strict=True)
        z, y, x = (np.arange(a, b, dtype=np.int64) * stride for a, b, stride in ranges)
        return z[:, None, None] + y[:, None] + x


def find_pieces(plan: LabelPlan, reader: Reader, block: int) -> Pieces:
    """Return the pieces of `block` of the volume that `reader` reads."""
    around = look(plan, reader, plan.blocks.box(block))
    if plan.recipe.objects.method == "components":
        ids, joins = components(around, level(plan.recipe.objects.threshold))
    else:
        ids, joins = basins(around)
    return Pieces(ids, joins, tabulate(ids, around))


def level(share: float) -> int:
    """Return the least byte that is at least `share` of the highest."""
    return math.ceil(share * FULL - 1e-9)


def look(plan: LabelPlan, reader: Reader, own: Box) -> Surroundings:
    """Return what there is to say of the block `own` and of the voxels around it."""
    objects = plan.recipe.objects
    is_watershed = objects.method == "watershed"
    passes = objects.smooth if is_watershed else (0, 0, 0)
    outer = _grown(own, (1, 1, 1)) & plan.box
    wide = _grown(outer, tuple(n + 1 for n in passes)) & plan.box
    chances = read_chances(plan, reader, wide)
    near = nearest(plan, chances, wide)
    height = heights(near, wide, plan.shape)
    inner = outer.relative_to(wide.start).slices
    inside = height[inner] >= objects.background * FULL * WHOLE
    if plan.recipe.input.kind != "affinities" and not is_watershed:
        inside &= chances[0][inner] >= level(objects.threshold)
    peaks = np.where(inside, smoothed(height, passes)[inner], -1) if is_watershed else None
    return Surroundings(
        own,
        plan.shape,
        np.stack([_framed(each[inner], outer, own, 0) for each in near]),
        _framed(inside, outer, own, False),
        None if peaks is None else _framed(peaks, outer, own, -1),
    )


def _grown(box: Box, by: tuple[int, ...]) -> Box:
    start = tuple(a - n for a, n in zip(box.start, by, strict=True))
    return Box(start, tuple(b + n for b, n in zip(box.stop, by, strict=True)))


def _framed(data: np.ndarray, outer: Box, own: Box, beyond: int) -> np.ndarray:
    """Return `data` of `outer`, with `beyond` for what lies outside the volume, one voxel around `own`."""
    frame = _grown(own, (1, 1, 1))
    ends = zip(frame.start, frame.stop, outer.start, outer.stop, strict=True)
    return np.pad(data, [(c - a, b - d) for a, b, c, d in ends], constant_values=beyond)


def components(around: Surroundings, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and joins, as in Pieces, of voxels whose affinity to a neighbour is at least `least`."""
    import cc3d
    import fastremap

    inside = _inner(around.inside)
    graph = np.zeros(inside.shape, np.uint8)
    for axis in range(3):
        joined = (_inner(around.near[axis]) >= least) & inside & _moved(around.inside, axis, -1)
        joined[tuple(0 if a == axis else slice(None) for a in range(3))] = False
        graph |= joined.astype(np.uint8) << np.uint8(2 * axis + 1)  # cc3d: to the one before, and to the one behind
        graph |= _behind(joined, axis).astype(np.uint8) << np.uint8(2 * axis)
    found = np.ascontiguousarray(cc3d.color_connectivity_graph(graph, connectivity=6))
    found[~inside] = 0
    ids = fastremap.renumber(found, in_place=True)[0].astype(np.uint32)
    return ids, _joined(_low_faces(around, ids, least))


def _behind(joined: np.ndarray, axis: int) -> np.ndarray:
    """Return whether the voxel behind each is joined to it."""
    behind = np.zeros_like(joined)
    every = [slice(None)] * 3
    here, there = (tuple(s if a == axis else e for a, e in enumerate(every)) for s in (slice(None, -1), slice(1, None)))
    behind[here] = joined[there]
    return behind


def _low_faces(around: Surroundings, ids: np.ndarray, least: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for axis, stride in enumerate(around.strides):
        face = _face(ids.shape, axis, -1)
        joined = (_inner(around.near[axis]) >= least)[face.slices] & _moved(around.inside, axis, -1)[face.slices]
        joined &= ids[face.slices] > 0
        yield ids[face.slices][joined], around.numbers(face)[joined] - stride


def basins(around: Surroundings) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and joins, as in Pieces, of the voxels that lead to the same peak by steepest ascent."""
    inside = _inner(around.inside)
    codes = np.where(inside, _steepest(around), np.uint8(ITSELF))
    shape = inside.shape
    strides = (shape[1] * shape[2], shape[2], 1)
    moves = [step * strides[axis] for axis, step in STEPS]
    moves.insert(ITSELF, 0)
    own = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    target = own + np.array(moves, np.int32)[codes]
    leaving = list(_leaving(codes))
    for face, leaves, _ in leaving:
        target[face.slices][leaves] = own[face.slices][leaves]
    root = _roots(target.ravel())
    is_root = (root == own.ravel()) & inside.ravel()
    number = np.cumsum(is_root, dtype=np.uint32)
    ids = (number[root] * inside.ravel()).reshape(shape)
    exits = ((ids[f.slices][leaves], around.numbers(f)[leaves] + move) for f, leaves, move in _far(leaving, around))
    return ids, _joined(exits)


def _steepest(around: Surroundings) -> np.ndarray:
    """Return the place in STEPS, counting ITSELF, of where each inner voxel leads: over the strongest way up.

    Up is to a higher voxel, of two that are as high to the one that comes last in C order. Of ways that are as strong
    it is the one to the highest, of equals the last. A way is none whose affinity is less than half of the voxel's
    strongest: what is thin would else run out through its surface.
    """
    assert around.height is not None
    own = _inner(around.height)
    least = np.max([_affinity(around, *to) for to in STEPS], axis=0) // 2
    best = np.full(own.shape, -1, np.int32)
    codes = np.full(own.shape, ITSELF, np.uint8)
    for number, (axis, step) in enumerate(STEPS):
        height, strength = _moved(around.height, axis, step), _affinity(around, axis, step)
        is_up = (height > own if step < 0 else height >= own) & (strength >= least)
        strength = np.where(is_up, (strength.astype(np.int32) << HEIGHT_BITS) | height, -1)
        better = is_up & (strength >= best)
        codes[better] = number + (number >= ITSELF)
        best[better] = strength[better]
    return codes


def _affinity(around: Surroundings, axis: int, step: int) -> np.ndarray:
    """Return the affinity of each inner voxel to the one a `step` away on `axis`."""
    near = around.near[axis]
    return _inner(near) if step < 0 else _moved(near, axis, step)


def _leaving(codes: np.ndarray) -> Iterator[tuple[Box, np.ndarray, int]]:
    """Yield for each face its box, which of its voxels lead out of the block, and the number of the step in STEPS."""
    for number, (axis, step) in enumerate(STEPS):
        face = _face(codes.shape, axis, step)
        code = number + (number >= ITSELF)
        yield face, codes[face.slices] == code, number


def _far(leaving: list[tuple[Box, np.ndarray, int]], around: Surroundings) -> Iterator[tuple[Box, np.ndarray, int]]:
    for face, leaves, number in leaving:
        axis, step = STEPS[number]
        yield face, leaves, step * around.strides[axis]


def _roots(target: np.ndarray) -> np.ndarray:
    """Return where each voxel ends that follows `target`, int32, in which roots lead to themselves."""
    while True:
        farther = target[target]
        if np.array_equal(farther, target):
            return target
        target = farther


def _joined(parts: Iterator[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    pairs = [np.stack([ids.astype(np.int64), targets], axis=1) for ids, targets in parts]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def _face(shape: tuple[int, ...], axis: int, step: int) -> Box:
    """Return the plane of a block of `shape` at its low (-1) or high (1) end on `axis`."""
    start = tuple(n - 1 if a == axis and step > 0 else 0 for a, n in enumerate(shape))
    return Box(start, tuple(s + 1 if a == axis else n for a, (s, n) in enumerate(zip(start, shape, strict=True))))


def _inner(framed: np.ndarray) -> np.ndarray:
    return framed[1:-1, 1:-1, 1:-1]


def _moved(framed: np.ndarray, axis: int, step: int) -> np.ndarray:
    """Return of `framed`, which has a voxel more on each side, what lies one `step` on `axis` from each inner voxel."""
    return framed[tuple(slice(1 + step * (a == axis), n - 1 + step * (a == axis)) for a, n in enumerate(framed.shape))]


def tabulate(ids: np.ndarray, around: Surroundings) -> np.ndarray:
    """Return the table of Pieces of `ids` (z, y, x) of a block."""
    import cc3d

    num = int(ids.max(initial=0))
    table = np.zeros((num, len(COLUMNS)), np.int64)
    if not num:
        return table
    flat = ids.ravel()
    first = np.zeros(num + 1, np.int64)
    first[flat[::-1]] = np.arange(flat.size - 1, -1, -1)  # of equal ids the last that is assigned stays
    places = np.unravel_index(first[1:], ids.shape)
    starts = around.own.start
    offset = sum(int(a) * stride for a, stride in zip(starts, around.strides, strict=True))
    table[:, 0] = np.bincount(flat, minlength=num + 1)[1:]
    table[:, 1] = offset + sum(p * stride for p, stride in zip(places, around.strides, strict=True))
    bounds = cc3d.statistics(ids, no_slice_conversion=True)["bounding_boxes"][1:].astype(np.int64)
    for axis, start in enumerate(starts):
        table[:, 2 + axis] = start + bounds[:, 2 * axis]
        table[:, 5 + axis] = start + bounds[:, 2 * axis + 1] + 1
        along = np.arange(ids.shape[axis]).reshape([-1 if a == axis else 1 for a in range(3)])
        sums = np.bincount(flat, np.broadcast_to(along, ids.shape).ravel(), num + 1)[1:]
        table[:, 8 + axis] = sums.astype(np.int64) + start * table[:, 0]
    return table
