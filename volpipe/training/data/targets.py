"""Targets of a net that learns affinities, from labels; and scores of its outputs against them.

Not here: the offsets (affinities), or the loss (losses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from volpipe.geometry.affinities import Offset, affinities
from volpipe.geometry.labels import Ignore, is_ignored

UNKNOWN, APART, NEAR = -1, 0, 1
LEVELS = 256  # of a net's output, as a run stores it
HALF = LEVELS // 2


def targets(labels: np.ndarray, offsets: Sequence[Offset], ignore: Ignore = None) -> np.ndarray:
    """Return the affinities of `labels` (z, y, x) as (offset, z, y, x), int8: NEAR, APART or UNKNOWN.

    UNKNOWN is a pair that leaves the array, or one with a voxel of a label in `ignore`.
    """
    near, known = affinities(labels, offsets)
    unknown = is_ignored(labels, ignore)
    if unknown.any():
        known &= affinities((~unknown).astype(np.uint8), offsets)[0]  # 1 where both voxels of a pair are known
    return np.where(known, near, np.int8(UNKNOWN)).astype(np.int8)


def histograms(outputs: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the number of voxels of each level, (offset, 2, LEVELS), int64: APART, then NEAR.

    Args:
        outputs: affinities (offset, z, y, x), uint8.
        truth: targets (offset, z, y, x); UNKNOWN voxels do not count.
    """
    levels = [
        [np.bincount(affinity[target == side], minlength=LEVELS) for side in (APART, NEAR)]
        for affinity, target in zip(outputs, truth, strict=True)
    ]
    return np.array(levels, np.int64)


def roc_auc(levels: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic, from 0.5 (chance) to 1 (all pairs told apart).

    It is the chance that a NEAR voxel has a higher level than one APART; equal levels count half. Of the histograms
    `levels` (offset, 2, LEVELS), the mean over the offsets with both.
    """
    return _mean(levels, lambda apart, near: (near * (np.cumsum(apart) - apart / 2)).sum() / (near.sum() * apart.sum()))


def accuracy(levels: np.ndarray) -> float:
    """Return the balanced accuracy, 0 to 1, of a threshold at HALF the levels; mean over offsets as in `roc_auc`."""
    return _mean(levels, lambda apart, near: (apart[:HALF].sum() / apart.sum() + near[HALF:].sum() / near.sum()) / 2)


def _mean(levels: np.ndarray, score: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Return the mean score over the offsets with both NEAR and APART voxels; NaN without any."""
    scores = [score(apart.astype(float), near.astype(float)) for apart, near in levels if apart.any() and near.any()]
    return float(np.mean(scores)) if scores else float("nan")
