"""Targets of a net that learns affinities or classes, from labels; and scores of its outputs against them.

Not here: the offsets (affinities), or the loss (losses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from volpipe.geometry.affinities import Offset
from volpipe.geometry.labels import Ignore, ignored

UNKNOWN, APART, NEAR = -1, 0, 1
LEVELS = 256  # of a net's output, as a run stores it
HALF = LEVELS // 2


def targets(labels: np.ndarray, offsets: Sequence[Offset], ignore: Ignore = None) -> np.ndarray:
    """Return the affinities of `labels` (z, y, x) as (offset, z, y, x), int8: NEAR, APART or UNKNOWN.

    UNKNOWN is a pair that leaves the array, or one with a voxel of a label in `ignore`.
    """
    return tensor_targets(signed(labels)[None], offsets, ignored(labels.dtype, ignore))[0].numpy()


def signed(labels: np.ndarray) -> Tensor:
    """Return `labels` as signed integers, which torch compares on every device; different labels stay different."""
    native = np.ascontiguousarray(labels, labels.dtype.newbyteorder("="))
    return torch.from_numpy(native.astype(np.int32) if native.itemsize < 4 else native.view(f"i{native.itemsize}"))


def tensor_targets(labels: Tensor, offsets: Sequence[Offset], unknown: Sequence[int]) -> Tensor:
    """Return `targets` of `signed` labels (n, z, y, x): (n, offset, z, y, x), int8, on their device.

    Args:
        unknown: numbers of labels, as their own type has them, of which nothing is known.
    """
    made = labels.new_full((len(labels), len(offsets), *labels.shape[1:]), UNKNOWN, dtype=torch.int8)
    known = known_in(labels, unknown) if unknown else None
    filled = labels != 0
    for channel, offset in enumerate(offsets):
        here = tuple(slice(max(0, -o), min(n, n - o)) for o, n in zip(offset, labels.shape[1:], strict=True))
        there = tuple(slice(max(0, o), min(n, n + o)) for o, n in zip(offset, labels.shape[1:], strict=True))
        if any(part.start >= part.stop for part in here):
            continue
        near = ((labels[:, *here] == labels[:, *there]) & filled[:, *here]).to(torch.int8)
        if known is not None:
            near.masked_fill_(~(known[:, *here] & known[:, *there]), UNKNOWN)
        made[:, channel][:, *here] = near
    return made


def class_targets(labels: Tensor, num: int, unknown: Sequence[int]) -> Tensor:
    """Return the classes of `signed` labels (n, z, y, x): (n, 1, z, y, x), int8: 0 to num - 1, or UNKNOWN.

    Args:
        unknown: as in `tensor_targets`; all other labels must be classes.
    """
    return labels.where((labels >= 0) & (labels < num) & known_in(labels, unknown), UNKNOWN).to(torch.int8)[:, None]


def known_in(labels: Tensor, unknown: Sequence[int]) -> Tensor:
    """Return where `signed` labels are none of `unknown`, numbers as the labels' own type has them; bool."""
    half = 1 << (8 * labels.element_size() - 1)
    known = torch.ones_like(labels, dtype=torch.bool)
    for number in unknown:
        known &= labels != (number + half) % (2 * half) - half
    return known


def confusion(outputs: np.ndarray, truth: np.ndarray, num: int) -> np.ndarray:
    """Return the number of voxels of each class of the truth (rows) that have each class in `outputs`, int64.

    UNKNOWN voxels of the truth do not count.
    """
    known = truth != UNKNOWN
    pairs = truth[known].astype(np.int64) * num + outputs[known]
    return np.bincount(pairs, minlength=num * num).reshape(num, num)


def dice(table: np.ndarray) -> np.ndarray:
    """Return the Dice coefficient of each class of a `confusion`; NaN of a class that is in neither."""
    together = table.sum(0) + table.sum(1)
    return np.where(together > 0, 2 * np.diag(table) / np.maximum(together, 1), np.nan)


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
    return _mean_score(
        levels, lambda apart, near: (near * (np.cumsum(apart) - apart / 2)).sum() / (near.sum() * apart.sum())
    )


def accuracy(levels: np.ndarray) -> float:
    """Return the balanced accuracy, 0 to 1, of a threshold at HALF the levels; mean over offsets as in `roc_auc`."""
    return _mean_score(
        levels, lambda apart, near: (apart[:HALF].sum() / apart.sum() + near[HALF:].sum() / near.sum()) / 2
    )


def _mean_score(levels: np.ndarray, score: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Return the mean score over the offsets with both NEAR and APART voxels; NaN without any."""
    scores = [score(apart.astype(float), near.astype(float)) for apart, near in levels if apart.any() and near.any()]
    return float(np.mean(scores)) if scores else float("nan")
