"""Scores of labels against a reference, from the number of voxels that each pair of labels shares.

Not here: reading voxels (evaluate). Tables of blocks add, so that no volume is ever in memory; a label means
the same in every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

IOU_THRESHOLDS = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))


PlainOverlaps = tuple[list[int], list[int], list[int]]  # the fields of Overlaps


@dataclass(frozen=True)
class Overlaps:
    """A sparse table: `counts[i]` voxels are labelled `truth[i]` in the reference and `labels[i]` in the output."""

    truth: np.ndarray
    labels: np.ndarray
    counts: np.ndarray

    @classmethod
    def from_labels(cls, labels: np.ndarray, truth: np.ndarray) -> Overlaps:
        """Return the table of a block; both (z, y, x), whole numbers."""
        return _joined(truth.ravel().astype(np.uint64), labels.ravel().astype(np.uint64), None)

    @classmethod
    def total(cls, tables: Iterable[Overlaps]) -> Overlaps:
        """Return the sum of tables."""
        parts = list(tables)
        empty = np.zeros(0, np.uint64)
        return _joined(
            np.concatenate([empty, *(t.truth for t in parts)]),
            np.concatenate([empty, *(t.labels for t in parts)]),
            np.concatenate([empty.astype(np.int64), *(t.counts for t in parts)]),
        )

    def to_list(self) -> PlainOverlaps:
        """Return plain values, to travel as JSON."""
        return self.truth.tolist(), self.labels.tolist(), self.counts.tolist()

    @classmethod
    def from_list(cls, values: PlainOverlaps) -> Overlaps:
        truth, labels, counts = values
        return cls(np.array(truth, np.uint64), np.array(labels, np.uint64), np.array(counts, np.int64))

    def without_background(self) -> Overlaps:
        """Return the table of the voxels that have a label in the reference: others do not count."""
        inside = self.truth != 0
        return Overlaps(self.truth[inside], self.labels[inside], self.counts[inside])


@dataclass(frozen=True)
class LabelScores:
    """Scores of labels against a reference.

    Attributes:
        split, merge: the two halves of the variation of information, in bits: the uncertainty of the label
            given the true one, and the other way round.
        rand_error: adapted Rand error, 1 - F of precision and recall of pairs of voxels.
        foreground_iou: voxels labelled in both, by those labelled in either.
        mean_iou: the mean of each reference object's best IoU.
        precision_50: objects matched with an IoU above 0.5, by all objects of both, matches counted once.
        mean_precision: the mean of that and of the same at an IoU of at least 0.55, 0.60, ... 0.95.
        num_truth, num_found: objects.

    Without a label in the reference split, merge, rand_error and mean_iou are NaN.
    """

    split: float
    merge: float
    rand_error: float
    foreground_iou: float
    mean_iou: float
    precision_50: float
    mean_precision: float
    num_truth: int
    num_found: int


def label_scores(table: Overlaps) -> LabelScores:
    """Return the scores of `table`; the first three over the voxels that have a label in the reference."""
    inside = table.without_background()
    has_truth = len(inside.counts) > 0
    split, merge = variation_of_information(inside) if has_truth else (math.nan, math.nan)
    ious, num_truth, num_found = object_ious(table)
    best = np.zeros(num_truth)
    np.maximum.at(best, ious[0].astype(int), ious[1])
    precisions = [_precision(ious[1], num_truth, num_found, threshold) for threshold in IOU_THRESHOLDS]
    both = (table.truth != 0) & (table.labels != 0)
    neither = (table.truth == 0) & (table.labels == 0)
    either = int(table.counts[~neither].sum())
    return LabelScores(
        split=split,
        merge=merge,
        rand_error=adapted_rand_error(inside) if has_truth else math.nan,
        foreground_iou=int(table.counts[both].sum()) / either if either else 1.0,
        mean_iou=float(best.mean()) if num_truth else math.nan,
        precision_50=precisions[0],
        mean_precision=float(np.mean(precisions)),
        num_truth=num_truth,
        num_found=num_found,
    )


def variation_of_information(table: Overlaps) -> tuple[float, float]:
    """Return split and merge, H(labels | truth) and H(truth | labels), in bits; Meilă 2007."""
    num = table.counts.sum()
    share = table.counts / num
    in_truth, in_labels = (_sums_by(labels, share) for labels in (table.truth, table.labels))
    split = -float((share * np.log2(share / in_truth)).sum())
    merge = -float((share * np.log2(share / in_labels)).sum())
    return abs(split), abs(merge)  # rounding may leave -0.0 or slightly less


def adapted_rand_error(table: Overlaps) -> float:
    """Return 1 - F of the pairs of voxels that share a label (Arganda-Carreras et al. 2015)."""
    num = float(table.counts.sum())
    same = float(np.square(table.counts.astype(float)).sum()) - num
    in_truth, in_labels = (
        float(np.square(np.bincount(np.unique(labels, return_inverse=True)[1], table.counts)).sum()) - num
        for labels in (table.truth, table.labels)
    )
    return 1.0 - 2 * same / (in_truth + in_labels) if in_truth + in_labels else 0.0


def object_ious(table: Overlaps) -> tuple[np.ndarray, int, int]:
    """Return (2, pairs): reference object and its IoU with an object of the labels; and both numbers of objects.

    Label 0 is no object, but its voxels count in the objects of the other.
    """
    truth_sizes, label_sizes = (_sums_by(labels, table.counts) for labels in (table.truth, table.labels))
    pairs = (table.truth != 0) & (table.labels != 0)
    ious = table.counts[pairs] / (truth_sizes[pairs] + label_sizes[pairs] - table.counts[pairs])
    objects = np.unique(table.truth[table.truth != 0])
    number = np.searchsorted(objects, table.truth[pairs])
    return np.stack([number, ious]), len(objects), len(np.unique(table.labels[table.labels != 0]))


def _precision(ious: np.ndarray, num_truth: int, num_found: int, threshold: float) -> float:
    """Return matches by matches and misses of both; above one half an object has one match at most."""
    hits = int((ious >= threshold).sum()) if threshold > 0.5 else int((ious > threshold).sum())
    return hits / (num_truth + num_found - hits) if num_truth + num_found else 1.0


def _sums_by(labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return for each entry the sum of the weights of all entries with its label."""
    number = np.unique(labels, return_inverse=True)[1]
    sums: np.ndarray = np.bincount(number, weights)[number]
    return sums


def _joined(truth: np.ndarray, labels: np.ndarray, counts: np.ndarray | None) -> Overlaps:
    """Return a table with each pair once."""
    pairs = np.stack([truth, labels], axis=1).view([("truth", np.uint64), ("labels", np.uint64)])[:, 0]
    unique, number, num = np.unique(pairs, return_inverse=True, return_counts=True)
    summed = num if counts is None else np.bincount(number.ravel(), counts, len(unique)).astype(np.int64)
    return Overlaps(unique["truth"].copy(), unique["labels"].copy(), summed.astype(np.int64))
