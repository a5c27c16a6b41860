"""The picture of an evaluation: slices of each candidate beside the reference, and their errors below.

Not here: drawing (pictures), or scores. Only the slices on the picture are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.evaluation.evaluate import Evaluation, voxels
from volpipe.evaluation.pictures import panel
from volpipe.geometry.grid import Box
from volpipe.reporting import frames
from volpipe.reporting.comparison import coloured, sides_of
from volpipe.reporting.page import Item, Note, Picture
from volpipe.reporting.shades import Image2D, display_range, diverge, grey

EDGE = 256  # voxels of a slice to show at most, from the middle
PLANES = {"xz": 1, "xy": 0}  # and the axis that each is across
MOST_CHUNK = 8 * 2**20  # bytes of a chunk, decoded, of which a report reads some
SHOWN = ("nearest", "cubic", "output")
REFERENCE = "reference"


@dataclass(frozen=True)
class Plane:
    """One slice of all candidates and the reference, and their errors, as images with their captions.

    Attributes:
        axis: that it is across.
    """

    name: str
    axis: int
    box: Box
    images: list[tuple[str, Image2D]]
    errors: list[tuple[str, Image2D]]


def draw(path: Path, evaluation: Evaluation) -> None:
    """Write a PNG of the middle xz and xy slices of all candidates, and of their differences from the reference.

    Red is too bright and blue too dark, by up to the largest error that one voxel in a hundred exceeds.
    """
    images = []
    for plane in _planes(evaluation):
        images += [*plane.images, *plane.errors, ("", np.full_like(plane.images[0][1], 255))]
    panel(path, images, columns=len(plane.images))


def comparison_items(evaluation: Evaluation) -> Iterator[Item]:
    """Yield the same slices for a report, each as a picture; of labels those of both, an object in one colour.

    Nothing of volumes whose chunks are too much to be read for it.
    """
    huge = [v for v in (evaluation.output, evaluation.reference) if math.prod(v.chunks) * v.dtype.itemsize > MOST_CHUNK]
    if huge:
        yield Note(f"No pictures: a chunk of {huge[0]} is more than is read for a report.")
        return
    is_image = evaluation.kind == "image"
    if is_image:
        yield Note("Errors are those against the reference: red is too bright, blue too dark.")
    size = evaluation.reference.voxel_size_nm
    voxel = size or (1.0, 1.0, 1.0)
    for plane in _planes(evaluation) if is_image else _label_planes(evaluation):
        lengths = [n * v for n, v in zip(plane.box.shape, voxel, strict=True)]
        for title, image in [*plane.images, *plane.errors]:
            file = frames.drawn(image, sides_of(lengths, plane.axis), min(voxel), is_known=size is not None)
            yield Picture(title, str(plane.box), *file)


def _planes(evaluation: Evaluation) -> Iterator[Plane]:
    """Yield the middle slices of an image and of what it is compared with."""
    names = [name for name in SHOWN if name in evaluation.candidates]
    for title, axis in PLANES.items():
        box = _slice(evaluation.box, axis)
        truth = evaluation.reference.open().read(box)[0].squeeze(axis).astype(np.float64)
        candidates = {name: voxels(evaluation, name, box).astype(np.float64).reshape(truth.shape) for name in names}
        limits = display_range(truth)
        images = [(f"{title} {name}", grey(data, limits)) for name, data in [*candidates.items(), (REFERENCE, truth)]]
        errors = {name: data - truth for name, data in candidates.items()}
        largest = max(float(np.percentile(np.abs(error), 99)) for error in errors.values()) or 1.0
        shown = [(f"error, {largest:.3g} is full", diverge(error, largest)) for error in errors.values()]
        yield Plane(title, axis, box, images, shown)


def _label_planes(evaluation: Evaluation) -> Iterator[Plane]:
    """Yield the middle slices of labels and of those that they are compared with."""
    volumes = {"output": evaluation.output, REFERENCE: evaluation.reference}
    for title, axis in PLANES.items():
        box = _slice(evaluation.box, axis)
        slices = {name: volume.open().read(box)[0].squeeze(axis) for name, volume in volumes.items()}
        images = [(f"{title} {name}", coloured(labels)) for name, labels in slices.items()]
        yield Plane(title, axis, box, images, [])


def _slice(box: Box, across: int) -> Box:
    """Return the middle slice of `box` across an axis, of up to EDGE voxels along the others."""
    start, stop = [], []
    for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        length = 1 if axis == across else min(EDGE, b - a)
        first = a + (b - a - length) // 2
        start.append(first)
        stop.append(first + length)
    return Box(tuple(start), tuple(stop))
