"""Pictures of slices: an output beside its reference, two outputs where they differ most, and their errors.

Not here: drawing (pictures), or numbers. Only the slices on a picture are read, and of a box that differs all its
voxels, once, to find the slice that differs most.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.evaluation.compare import Comparison, Differences
from volpipe.evaluation.differences import Pairs, change_of, unmatched
from volpipe.evaluation.evaluate import Evaluation
from volpipe.evaluation.origins import shared_input
from volpipe.evaluation.pictures import panel
from volpipe.evaluation.subject import read_block
from volpipe.geometry.grid import Box
from volpipe.reporting import frames
from volpipe.reporting.comparison import coloured, shaded, sides_of
from volpipe.reporting.page import Draft, Item, Note, Picture
from volpipe.reporting.shades import Image2D, display_change, display_range, diverge, grey

EDGE = 256  # voxels of a slice to show at most, from the middle
PLANES = {"xz": 1, "xy": 0}  # and the axis that each is across
MOST_CHUNK = 8 * 2**20  # bytes of a chunk, decoded, of which a report reads some
SHOWN = ("nearest", "cubic", "output")
RED, WHITE = (200, 30, 30), (255, 255, 255)
NONE = "red: no match"
Captioned = tuple[str, Image2D]


Plane = tuple[int, Box, list[Captioned], list[Captioned]]  # axis that it is across, box, images, and their errors


def draw(path: Path, evaluation: Evaluation) -> None:
    """Write a PNG of the middle xz and xy slices of all candidates, and of their differences from the reference.

    Red is too bright and blue too dark, by up to the largest error that one voxel in a hundred exceeds.
    """
    images = []
    for _, _, shown, errors in _planes(evaluation):
        images += [*shown, *errors, ("", np.full_like(shown[0][1], 255))]
    panel(path, images, columns=len(shown))


def evaluation_items(evaluation: Evaluation) -> Iterator[Item]:
    """Yield the same slices for a report, each as a picture; of labels those of both, an object in one colour.

    Nothing of volumes whose chunks are too much to be read for it.
    """
    huge = [v for v in (evaluation.output, evaluation.reference) if math.prod(v.chunks) * v.dtype.itemsize > MOST_CHUNK]
    if huge:
        yield Note(f"No pictures: a chunk of {huge[0]} is more than is read for a report.")
        return
    if evaluation.kind == "image":
        yield Note("Errors are those against the reference: red is too bright, blue too dark.")
    size = evaluation.reference.voxel_size_nm
    voxel = size or (1.0, 1.0, 1.0)
    for axis, box, images, errors in _planes(evaluation):
        lengths = [n * v for n, v in zip(box.shape, voxel, strict=True)]
        for title, image in [*images, *errors]:
            file = frames.drawn(image, sides_of(lengths, axis), min(voxel), is_known=size is not None)
            yield Picture(title, str(box), *file)


def _planes(evaluation: Evaluation) -> Iterator[Plane]:
    """Yield the middle slices of an output and of what it is compared with."""
    for title, axis in PLANES.items():
        box = _slice(evaluation.box, axis)
        names = [name for name in SHOWN if name in evaluation.candidates]
        slices = {name: evaluation.voxels(name, box).squeeze(axis) for name in names}
        truth = slices["reference"] = read_block(evaluation.reference, box)[0].squeeze(axis)
        if evaluation.kind == "labels":
            images = [(f"{title} {name}", coloured(labels)) for name, labels in slices.items()]
            yield axis, box, images, []
            continue
        limits = display_range(truth)
        errors = [slices[name].astype(np.float64) - truth for name in names]
        largest = max(float(np.percentile(np.abs(error), 99)) for error in errors) or 1.0
        images = [(f"{title} {name}", grey(data, limits)) for name, data in slices.items()]
        yield axis, box, images, [(f"error, {largest:.3g} is full", diverge(error, largest)) for error in errors]


def _slice(box: Box, across: int) -> Box:
    """Return the middle slice of `box` across an axis, of up to EDGE voxels along the others."""
    shape = tuple(1 if axis == across else min(EDGE, n) for axis, n in enumerate(box.shape))
    start = tuple(a + (n - m) // 2 for a, n, m in zip(box.start, box.shape, shape, strict=True))
    return Box(start, tuple(a + m for a, m in zip(start, shape, strict=True)))


# ---- boxes that differ most


def worst_drafts(comparison: Comparison, differences: Differences, most: int, name: str = "") -> Iterator[Draft]:
    """Yield the pictures of up to `most` boxes of outputs that are called `name`, still to be made."""
    for worst in differences.worst[:most]:
        title = f"{name}box {worst.box}"
        make = partial(_worst_items, title, comparison, worst.box, differences.pairs)
        yield Draft(title, make, "Boxes that differ most")


def _worst_items(title: str, comparison: Comparison, box: Box, pairs: Pairs | None) -> list[Item]:
    """Return the picture of the slice of a box that differs most: the input, A, B and their difference."""
    a, b = (read_block(volume, box) for volume in (comparison.a, comparison.b))
    if pairs is None:
        with np.errstate(invalid="ignore"):  # of infinities
            change = change_of(a, b)
            amount = _squares(a, b, change)
    else:
        amount = change = unmatched(a.astype(np.uint64), b.astype(np.uint64), pairs)
    channel, at = divmod(int(amount.sum(axis=(2, 3)).argmax()), amount.shape[1])
    one, other, changed = a[channel, at], b[channel, at], change[channel, at]
    images = _of_images(one, other, changed) if pairs is None else _of_labels(one, other, changed, pairs)
    (z, *start), (_, *stop) = box.start, box.stop
    source, remark = _input(comparison, Box((z + at, *start), (z + at + 1, *stop)), one.shape)
    data = io.BytesIO()
    panel(data, [*source, *images], columns=4)
    of = f", channel {channel}" if comparison.a.num_channels > 1 else ""
    place = f"xy at z {z + at}, y,x {Box(tuple(start), tuple(stop))}{of}"
    caption = f"{place}: the slice of the box that differs most{remark}"
    return [Picture(title, caption, data.getvalue(), is_wide=True)]


def _squares(a: np.ndarray, b: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Return how much each voxel differs; what is NaN or infinite in one alone, more than all the rest."""
    amount, same = np.square(change), (a == b) | ((a != a) & (b != b))  # NaN is not itself
    finite = np.isfinite(amount)
    result: np.ndarray = np.where(finite, amount, np.where(same, 0.0, 1.0 + amount[finite].sum()))
    return result


def _of_images(a: np.ndarray, b: np.ndarray, change: np.ndarray) -> list[Captioned]:
    limits, full = display_range(a, b), display_change(change)
    return [
        (f"A, {limits[0]:.4g} to {limits[1]:.4g}", shaded(a[None], limits)),
        ("B, same greys", shaded(b[None], limits)),
        (f"B - A: red +, blue -{full:.3g}", diverge(np.where(np.isfinite(change), change, 0.0), full)),
    ]


def _of_labels(a: np.ndarray, b: np.ndarray, is_other: np.ndarray, pairs: Pairs) -> list[Captioned]:
    """Return labels (y, x) in colours, those of B in the colours of their matches; and where they are none."""
    numbers, place = np.unique(b.astype(np.uint64), return_inverse=True)
    matches = dict(zip(pairs[1].tolist(), pairs[0].tolist(), strict=True))
    # without a match a colour of its own
    colours = np.array(
        [matches.get(number, np.iinfo(np.uint64).max - number) for number in numbers.tolist()], np.uint64
    )
    marked = np.where(is_other[..., None], np.array(RED, np.uint8), np.array(WHITE, np.uint8))
    return [
        ("A", coloured(a)),
        ("B, matches in A's colours", coloured(colours[place.reshape(b.shape)])),
        (NONE, marked),
    ]


def _input(comparison: Comparison, box: Box, shape: tuple[int, ...]) -> tuple[list[Captioned], str]:
    """Return the slice of the input that both outputs have, and "", or none and why."""
    last = shared_input(comparison.made_a, comparison.made_b)
    if last is None:
        return [], "; what both were made of is not known"
    for making in comparison.made_a[: last + 1]:
        box = making.input_box(box)
    try:
        source = comparison.made_a[last].open_input()
        data = read_block(source, box & Box.from_shape(source.spatial_shape))[:1, 0]
    except (VolpipeError, OSError) as error:
        return [], f"; the input cannot be shown: {error}"
    down, across = shape
    return [("input, greys of its own", frames.resized(shaded(data, display_range(data)), (down, across)))], ""
