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


def class_targets(labels: Tensor, sets: Sequence[Sequence[int]], unknown: Sequence[int]) -> Tensor:
    """Return the classes of `signed` labels (n, z, y, x): (n, 1, z, y, x), int8: 0 to the number of sets - 1, UNKNOWN.

    Args:
        sets: the labels of each class.
        unknown: as in `tensor_targets`; all other labels must be classes.
    """
    if all(list(numbers) == [k] for k, numbers in enumerate(sets)):
        known = (labels >= 0) & (labels < len(sets)) & known_in(labels, unknown)
        return labels.where(known, UNKNOWN).to(torch.int8)[:, None]
    made = labels.new_full(labels.shape, UNKNOWN, dtype=torch.int8)
    for k, numbers in enumerate(sets):
        made.masked_fill_(~known_in(labels, numbers), k)
    return made.masked_fill_(~known_in(labels, unknown), UNKNOWN)[:, None]


def region_targets(
    labels: Tensor, sets: Sequence[Sequence[int]], unknown: Sequence[int], annotated: Sequence[Sequence[bool]]
) -> Tensor:
    """Return whether `signed` labels (n, z, y, x) are in each region: (n, region, z, y, x), int8: 1, 0 or UNKNOWN.

    Args:
        sets, unknown: as in `class_targets`; a label in no set is in no region.
        annotated: for each of n, whether its labels annotate each region.
    """
    made = torch.stack([~known_in(labels, numbers) for numbers in sets], 1).to(torch.int8)
    return made.masked_fill_(~known_in(labels, unknown)[:, None] | _left_out(annotated, made), UNKNOWN)


def partial_targets(classes: Tensor, num: int, annotated: Sequence[Sequence[bool]]) -> Tensor:
    """Return the targets (n, 1, z, y, x) of `class_targets` as (n, num, z, y, x), int8: 1, 0 or UNKNOWN.

    A class that is not annotated is UNKNOWN throughout, so that the first one stands for it and for itself.
    """
    made = (classes == torch.arange(num, device=classes.device).view(1, -1, 1, 1, 1)).to(torch.int8)
    return made.masked_fill_((classes == UNKNOWN) | _left_out(annotated, made), UNKNOWN)


def _left_out(annotated: Sequence[Sequence[bool]], targets: Tensor) -> Tensor:
    """Return which channels of `targets` the labels do not annotate, (n, c, 1, 1, 1)."""
    return ~torch.tensor([*map(list, annotated)], device=targets.device)[..., None, None, None]


def class_numbers(targets: Tensor) -> Tensor:
    """Return `partial_targets` (n, num, z, y, x) as `class_targets` (n, 1, z, y, x); those stay."""
    if targets.shape[1] == 1:
        return targets
    numbers = (targets == 1).to(torch.int8).argmax(1, keepdim=True).to(torch.int8)
    return numbers.masked_fill((targets == UNKNOWN).all(1, keepdim=True), UNKNOWN)


def channels_known(targets: Tensor) -> Tensor:
    """Return which channels of each of `targets` (n, c, z, y, x) have a known voxel, (n, c), bool."""
    return (targets != UNKNOWN).flatten(2).any(2)


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


def region_counts(chances: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return for each region the voxels in output and truth, in the output, and in the truth, (region, 3), int64.

    Args:
        chances: (region, z, y, x); above a half a voxel is in the region.
        truth: targets (region, z, y, x); UNKNOWN voxels do not count.
    """
    known, inside, found = truth != UNKNOWN, truth == 1, chances > 0.5
    axes = (1, 2, 3)
    return np.stack([(found & inside).sum(axes), (found & known).sum(axes), inside.sum(axes)], 1)


def region_dice(counts: np.ndarray) -> np.ndarray:
    """Return the Dice coefficient of each region of `region_counts`; NaN of one that is in neither."""
    together = counts[:, 1] + counts[:, 2]
    return np.where(together > 0, 2 * counts[:, 0] / np.maximum(together, 1), np.nan)


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
