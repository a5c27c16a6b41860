"""Targets: what a net that learns affinities is to give, from labels; and how well what it gives tells them apart.

Not here: which offsets there are (affinities), or the loss (losses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from volpipe.affinities import Offset, affinities

UNKNOWN, APART, NEAR = -1, 0, 1
LEVELS = 256  # of a net's output, as a run stores it
HALF = LEVELS // 2


def targets(labels: np.ndarray, offsets: Sequence[Offset], ignore: int | None = None) -> np.ndarray:
    """Return the affinities of `labels` (z, y, x) as (offset, z, y, x), int8: NEAR, APART or UNKNOWN.

    UNKNOWN is a pair that leaves the array, or of which a voxel has the label `ignore`.
    """
    near, known = affinities(labels, offsets)
    if ignore is not None:
        told = labels != ignore
        # both voxels of a pair are told of where "told" is near in itself
        known &= affinities(told.astype(np.uint8), offsets)[0]
    return np.where(known, near, np.int8(UNKNOWN)).astype(np.int8)


def counts(made: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return how many voxels have each level, (offset, 2, LEVELS), int64: those APART, then those NEAR.

    Args:
        made: affinities (offset, z, y, x), uint8.
        truth: targets (offset, z, y, x); what is UNKNOWN does not count.
    """
    found = [
        [np.bincount(levels[wanted == side], minlength=LEVELS) for side in (APART, NEAR)]
        for levels, wanted in zip(made, truth, strict=True)
    ]
    return np.array(found, np.int64)


def area(found: np.ndarray) -> float:
    """Return the area under the curve of hits by false alarms: 1 tells all pairs apart, 0.5 none.

    It is the chance that a NEAR voxel has a higher level than one APART, where equal levels count half; of `counts`
    (offset, 2, LEVELS) the mean over the offsets that have both.
    """
    return _mean(found, lambda apart, near: (near * (np.cumsum(apart) - apart / 2)).sum() / (near.sum() * apart.sum()))


def accuracy(found: np.ndarray) -> float:
    """Return the mean of the shares of NEAR and of APART that HALF the levels tell right; over offsets as in `area`."""
    return _mean(found, lambda apart, near: (apart[:HALF].sum() / apart.sum() + near[HALF:].sum() / near.sum()) / 2)


def _mean(found: np.ndarray, score: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Return the mean of the score of each offset with voxels of both kinds; NaN where none has."""
    each = [score(apart.astype(float), near.astype(float)) for apart, near in found if apart.any() and near.any()]
    return float(np.mean(each)) if each else float("nan")
