"""The picture of an evaluation: slices of each candidate beside the reference, and their errors below.

Not here: drawing (pictures), or scores. Only the slices on the picture are read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from volpipe.evaluation.evaluate import Evaluation, voxels
from volpipe.evaluation.pictures import panel
from volpipe.geometry.grid import Box
from volpipe.reporting.shades import diverge, grey

EDGE = 256  # voxels of a slice to show at most, from the middle
SHOWN = ("nearest", "cubic", "output")
REFERENCE = "reference"


def draw(path: Path, evaluation: Evaluation) -> None:
    """Write a PNG of the middle xz and xy slices of all candidates, and of their differences from the reference.

    Red is too bright and blue too dark, by up to the largest error that one voxel in a hundred exceeds.
    """
    images = []
    names = [name for name in SHOWN if name in evaluation.candidates]
    for title, box in (("xz", _slice(evaluation.box, 1)), ("xy", _slice(evaluation.box, 0))):
        truth = evaluation.reference.open().read(box)[0].squeeze(1 if title == "xz" else 0).astype(np.float64)
        candidates = {name: voxels(evaluation, name, box).astype(np.float64).reshape(truth.shape) for name in names}
        limits = (float(truth.min()), float(max(truth.max(), truth.min() + 1)))
        images += [(f"{title} {name}", grey(data, limits)) for name, data in [*candidates.items(), (REFERENCE, truth)]]
        errors = {name: data - truth for name, data in candidates.items()}
        largest = max(float(np.percentile(np.abs(error), 99)) for error in errors.values()) or 1.0
        images += [(f"error, {largest:.3g} is full", diverge(error, largest)) for error in errors.values()]
        images.append(("", np.full_like(grey(truth, limits), 255)))
    panel(path, images, columns=len(names) + 1)


def _slice(box: Box, across: int) -> Box:
    """Return the middle slice of `box` across an axis, of up to EDGE voxels along the others."""
    start, stop = [], []
    for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        length = 1 if axis == across else min(EDGE, b - a)
        first = a + (b - a - length) // 2
        start.append(first)
        stop.append(first + length)
    return Box(tuple(start), tuple(stop))
