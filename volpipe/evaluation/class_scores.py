"""Scores of classes against a reference, from the number of voxels that each pair of classes shares.

Not here: the table of pairs (label_scores), or which of the classes is called what (label_evaluation). The numbers of
classes mean the same in both: of a class, with the voxels that only one of both, or both, say have it::

    Dice  2 both / (2 both + reference only + output only)        IoU  both / (both + reference only + output only)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation.label_scores import CountedTotal, Overlaps, without_ignored
from volpipe.evaluation.score import CLASSES, Score, Sums, Values
from volpipe.evaluation.texts import MOST_PARTS, part_sheet
from volpipe.recipes.training import MOST_CLASSES
from volpipe.reporting.page import Sheet

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
class ClassTotal(CountedTotal):
    """What all blocks of classes gave.

    Attributes:
        numbers: of the classes, ascending.
        names: of the classes 0, 1, …; of others, and without any, the numbers are the names.
        confusion: (classes, classes), int64: voxels of each class of the reference that have each class in the output.
    """

    numbers: np.ndarray
    names: Sequence[str]
    confusion: np.ndarray

    @classmethod
    def from_table(
        cls, table: Overlaps, names: Sequence[str] = (), ignored: Sequence[int] = (),
        sums: Mapping[str, Sums] | None = None,
    ) -> ClassTotal:  # fmt: skip
        """Return the total of blocks whose tables add up to `table`.

        Args:
            names: as of the attribute.
            ignored: labels of the reference whose voxels do not count.
            sums: of scores that take more than the table of a block.

        Raises:
            PlanError: there are more classes than MOST_CLASSES.
        """
        table, num_ignored = without_ignored(table, ignored)
        numbers = np.unique(np.concatenate([table[0], table[1], np.arange(len(names), dtype=np.uint64)]))
        if len(numbers) > MOST_CLASSES:
            raise PlanError(TOO_MANY.format("one of both", f"{len(numbers):,}", MOST_CLASSES))
        confusion = np.zeros((len(numbers),) * 2, np.int64)
        np.add.at(confusion, tuple(np.searchsorted(numbers, side) for side in table[:2]), table[2].astype(np.int64))
        return cls(sums or {}, table, num_ignored, numbers, names, confusion)

    @cached_property
    def classes(self) -> tuple[ClassScore, ...]:
        """Each class, by its number."""
        both, truth, found = np.diag(self.confusion), self.confusion.sum(1), self.confusion.sum(0)
        return tuple(
            ClassScore(
                self.names[number] if number < len(self.names) else str(number),
                2 * int(both[i]) / int(truth[i] + found[i]) if truth[i] + found[i] else None,
                int(both[i]) / int(truth[i] + found[i] - both[i]) if truth[i] + found[i] else None,
                int(truth[i]),
                int(found[i]),
            )
            for i, number in enumerate(self.numbers.tolist())
        )


def mean_overlap_of(total: ClassTotal) -> Values:
    """Return the mean Dice and IoU over classes that are in the reference or in the output; NaN without any."""
    means = {}
    for name in ("dice", "iou"):
        known = [value for each in total.classes if (value := getattr(each, name)) is not None]
        means[f"mean_{name}"] = math.fsum(known) / len(known) if known else math.nan
    return means


def mean_overlap_cells(values: Values, volume: object) -> Mapping[str, str]:
    return {"mean Dice": f"{values['mean_dice']:.4f}", "mean IoU": f"{values['mean_iou']:.4f}"}


def accuracy_of(total: ClassTotal) -> Values:
    """Return the share of voxels that have their class; NaN without any."""
    num = int(total.confusion.sum())
    return {"accuracy": int(np.diag(total.confusion).sum()) / num if num else math.nan}


def each_class_of(total: ClassTotal) -> Values:
    return {"classes": total.classes}


def each_class_tables(values: Values) -> list[Sheet]:
    return part_sheet("Classes", values.get("classes") or ())


def confusion_of(total: ClassTotal) -> Values:
    """Return the voxels of each class of the reference (rows) that have each class in the output (columns)."""
    return {"confusion": tuple(map(tuple, total.confusion.tolist()))}


def confusion_tables(values: Values) -> list[Sheet]:
    confusion = values.get("confusion") or ()
    if not 0 < len(confusion) <= MOST_PARTS:
        return []
    names = [part["name"] for part in values["classes"]]
    rows = [(name, *row) for name, row in zip(names, confusion, strict=True)]
    return [Sheet("Confusion", ("", *names), rows, "voxels of each class of the reference (rows), by the output's")]


MEAN_OVERLAP = Score("mean_overlap", (CLASSES,), mean_overlap_of, cells=mean_overlap_cells)
ACCURACY = Score("accuracy", (CLASSES,), accuracy_of, title="accuracy")
EACH_CLASS = Score("classes", (CLASSES,), each_class_of, tables=each_class_tables)
CONFUSION = Score("confusion", (CLASSES,), confusion_of, tables=confusion_tables)
