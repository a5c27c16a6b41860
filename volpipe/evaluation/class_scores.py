"""Scores of classes against a reference, from the number of voxels that each pair of classes shares.

Not here: the table of pairs (label_scores), or which of the classes is called what (evaluate). The numbers of classes
mean the same in both: of a class, with the voxels that only one of both, or both, say have it::

    Dice  2 both / (2 both + reference only + output only)        IoU  both / (both + reference only + output only)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation.label_scores import Overlaps
from volpipe.recipes.training import MOST_CLASSES

TOO_MANY = "{} has {} labels or more, as objects have, and classes are up to {}; score objects with --labels"


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class; None where it is in neither.

    Attributes:
        num_truth, num_found: voxels of it in the reference and in the output.
    """

    name: str
    dice: float | None
    iou: float | None
    num_truth: int
    num_found: int


@dataclass(frozen=True)
class ClassScores:
    """Scores of classes.

    Attributes:
        mean_dice, mean_iou: over classes that are in the reference or in the output; NaN without any.
        accuracy: share of voxels that have their class; NaN without any.
        num_ignored: voxels that were left out, of which the reference says that nothing is known.
        classes: each, by its number.
        confusion: voxels of each class of the reference (rows) that have each class in the output (columns).
    """

    mean_dice: float
    mean_iou: float
    accuracy: float
    num_ignored: int
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]


def class_scores(table: Overlaps, names: Sequence[str] = (), ignored: Sequence[int] = ()) -> ClassScores:
    """Return the scores of `table`.

    Args:
        names: of the classes 0, 1, …; of others, and without any, the numbers are the names.
        ignored: labels of the reference whose voxels do not count.

    Raises:
        PlanError: there are more classes than MOST_CLASSES.
    """
    is_known = ~np.isin(table[0], np.array(ignored, np.uint64))
    num_ignored, table = int(table[2, ~is_known].sum()), table[:, is_known]
    numbers = np.unique(np.concatenate([table[0], table[1], np.arange(len(names), dtype=np.uint64)]))
    if len(numbers) > MOST_CLASSES:
        raise PlanError(TOO_MANY.format("one of both", f"{len(numbers):,}", MOST_CLASSES))
    confusion = np.zeros((len(numbers),) * 2, np.int64)
    np.add.at(confusion, tuple(np.searchsorted(numbers, side) for side in table[:2]), table[2].astype(np.int64))
    both, truth, found = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    classes = tuple(
        ClassScore(
            names[number] if number < len(names) else str(number),
            2 * int(both[i]) / int(truth[i] + found[i]) if truth[i] + found[i] else None,
            int(both[i]) / int(truth[i] + found[i] - both[i]) if truth[i] + found[i] else None,
            int(truth[i]),
            int(found[i]),
        )
        for i, number in enumerate(numbers.tolist())
    )
    num, rows = int(confusion.sum()), tuple(map(tuple, confusion.tolist()))
    means = (_mean([each.dice for each in classes]), _mean([each.iou for each in classes]))
    return ClassScores(*means, int(both.sum()) / num if num else math.nan, num_ignored, classes, rows)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan
