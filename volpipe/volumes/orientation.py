"""Whether labels lie on what they are labels of, or would lie there better with axes exchanged or mirrored.

Not here: places by voxel sizes and origins (places), or what the numbers of labels mean (label_values). A box in the
middle of both is looked at: whatever is done to the axes of the labels, it stays the same box::

    labels as they are   correlation of their boundaries with edges of the image    0.02
    axes y, x exchanged                                                             0.31    said
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

EDGE, MOST_VOXELS = 512, 1 << 22  # of the box: along each axis, and in all, at most
MOST_BYTES = 1 << 28  # of the chunks that are decoded for it, about
FEWEST = 1000  # voxels on either side of boundaries that tell anything
# Of eleven real volumes 0.20 to 0.64 as they are, of other orders the best 0.05 to 0.28, their median 0.02 to 0.10; of
# a box of 48 voxels, once, 0.09 and 0.19 (2026-11).
CLEAR = 0.2  # what another order reaches at least
OVER_GIVEN, OVER_OTHERS = 2.0, 1.5  # times as much as the given order reaches, and as any third one
Order = tuple[tuple[int, ...], tuple[int, ...]]  # axes as of numpy.transpose, and those that are mirrored then
AS_THEY_ARE: Order = ((0, 1, 2), ())


def orientation_notes(labels: Volume, target: Volume, start: tuple[int, ...] = (0, 0, 0)) -> list[str]:
    """Return a sentence if `labels` lie on `target`, an image or other labels, clearly better in another orientation.

    Args:
        start: voxel of the target at which the first of the labels lies.
    """
    box = middle_box(labels, target)
    if box is None:
        return []
    try:
        own = labels.open(live=True).read(box, num_channels=1)[0]
        other = target.open(live=True).read(box.shift(start), num_channels=1)[0]
    except (VolpipeError, OSError) as error:  # workers name what they cannot read
        log.info("%s and %s are not laid over each other: %s", labels, target, error)
        return []
    scores = agreements(own, other, labels.spatial_shape, is_image=not _is_of_objects(other))
    if not scores:
        return []
    (best, score), given = max(scores.items(), key=lambda entry: entry[1]), scores[AS_THEY_ARE]
    third = max((score for order, score in scores.items() if order not in (best, AS_THEY_ARE)), default=0.0)
    if score < CLEAR or score < OVER_GIVEN * given or score < OVER_OTHERS * third:
        return []
    what, how = _order_words(best)
    return [
        f"{labels} does not seem to lie on {target}: boundaries of the labels agree with its edges by {given:.2f} as "
        f"they are (correlation, by a box in the middle), and by {score:.2f} with {what}. Look at both in a viewer, "
        f"and write the labels anew if so, in numpy {how}"
    ]


def middle_box(labels: Volume, target: Volume, within: Box | None = None) -> Box | None:
    """Return the box of voxels in the middle of `labels` that is looked at; None where it would say nothing.

    Axes of one length have as many of its voxels, and as many lie before it as behind it.
    """
    whole, edge = within or Box.from_shape(labels.spatial_shape), EDGE
    shape = whole.shape
    while edge > 1:
        # as many voxels before it as behind it, so that it is mirrored into itself
        sizes = [n if n <= edge else edge - (n - edge) % 2 for n in shape]
        starts = [(n - size) // 2 for n, size in zip(shape, sizes, strict=True)]
        box = Box(tuple(starts), tuple(a + size for a, size in zip(starts, sizes, strict=True))).shift(whole.start)
        num_bytes = max(_decoded_bytes(volume, box) for volume in (labels, target))
        if box.num_voxels <= MOST_VOXELS and num_bytes <= MOST_BYTES:
            return box if box.num_voxels >= FEWEST else None
        edge //= 2
    return None


def _decoded_bytes(volume: Volume, box: Box) -> int:
    """Return about how many bytes of chunks are decoded for `box`."""
    chunks = volume.spatial_chunks
    touched = (-(-n // c) * c + c * (n > 1) for n, c in zip(box.shape, chunks, strict=True))
    return math.prod(touched) * volume.dtype.itemsize


def agreements(labels: np.ndarray, target: np.ndarray, shape: tuple[int, ...], *, is_image: bool) -> dict[Order, float]:
    """Return how well boundaries of `labels` agree with edges of `target`, both (z, y, x), for each order of axes.

    Args:
        shape: of the whole volume: axes of one length alone can have been exchanged.
        is_image: whether the target is an image, whose grey levels and steps tell; else it is labels.

    Returns:
        Correlations, 0 to 1; none where there are too few boundaries.
    """
    edges = boundaries(labels)
    num = int(edges.sum())
    if min(num, edges.size - num) < FEWEST:
        return {}
    features = [row for row in _features(target, is_image=is_image) if row is not None]
    if not features:
        return {}
    share = num / edges.size
    unit = math.sqrt(share / (1 - share))
    return {
        (axes, mirrored): max(abs(float(row[turned(edges, (axes, mirrored))].mean())) for row in features) * unit
        for axes, mirrored in orders(shape)
    }


def orders(shape: tuple[int, ...]) -> Iterator[Order]:
    """Yield all orders of axes in which labels of `shape` have that shape still, as they are first."""
    for axes in itertools.permutations(range(3)):
        if all(shape[axis] == n for axis, n in zip(axes, shape, strict=True)):
            for num in range(4):
                yield from ((axes, mirrored) for mirrored in itertools.combinations(range(3), num))


def turned(data: np.ndarray, order: Order) -> np.ndarray:
    """Return `data` (z, y, x) with its axes exchanged, and mirrored then."""
    axes, mirrored = order
    return np.flip(data.transpose(axes), mirrored)


def boundaries(labels: np.ndarray) -> np.ndarray:
    """Return which voxels of `labels` (z, y, x) differ from a neighbour along some axis."""
    result = np.zeros(labels.shape, bool)
    for axis in range(3):
        before, after = (np.moveaxis(part, axis, 0) for part in (labels, result))
        steps = before[1:] != before[:-1]
        after[1:] |= steps
        after[:-1] |= steps
    return result


def _features(target: np.ndarray, *, is_image: bool) -> Iterator[np.ndarray | None]:
    """Yield what boundaries may lie on, of deviation 1 about 0; None where that is one value alone."""
    if not is_image:
        yield _standard(_smoothed(boundaries(target).astype(np.float32)))
        return
    smooth = _smoothed(np.nan_to_num(target.astype(np.float32)))
    yield _standard(smooth)
    steps = [np.gradient(smooth, axis=axis) for axis in range(3) if smooth.shape[axis] > 1]
    yield _standard(np.sqrt(sum(np.square(step) for step in steps)))


def _standard(data: np.ndarray) -> np.ndarray | None:
    deviation = float(data.std())
    return (data - data.mean()) / deviation if deviation > 0 else None


def _smoothed(data: np.ndarray) -> np.ndarray:
    """Return the means of 3 voxels along each axis; of 2 at faces."""
    for axis in range(3):
        rows = np.moveaxis(data, axis, 0)
        padded = np.concatenate([rows[:1], rows, rows[-1:]])
        data = np.moveaxis((padded[:-2] + padded[1:-1] + padded[2:]) / 3, 0, axis)
    return data


def _is_of_objects(data: np.ndarray) -> bool:
    """Return whether voxels are mostly like their neighbours, as those of labels are."""
    return bool(data.dtype.kind in "iub" and (data[..., 1:] == data[..., :-1]).mean() > 0.5)


def _order_words(order: Order) -> tuple[str, str]:
    """Return an order of axes in words, and as numpy makes it."""
    axes, mirrored = order
    words = [] if axes == (0, 1, 2) else [f"the axes in the order {', '.join('zyx'[axis] for axis in axes)}"]
    words += [f"{' and '.join('zyx'[axis] for axis in mirrored)} mirrored"] if mirrored else []
    code = "labels" if axes == (0, 1, 2) else f"labels.transpose({axes})"
    code = f"np.flip({code}, {mirrored})" if mirrored else code
    return ", ".join(words), code
