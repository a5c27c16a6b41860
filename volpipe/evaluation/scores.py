"""The list of all scores, in the order of the JSON and of the tables.

Not here: what a score is (score), or the scores themselves, each in a file that says all about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from volpipe.evaluation.class_scores import ACCURACY, CONFUSION, EACH_CLASS, MEAN_OVERLAP, ClassTotal
from volpipe.evaluation.label_scores import (
    FOREGROUND_IOU,
    NUM_IGNORED,
    NUM_OBJECTS,
    NUM_RESERVED,
    OBJECT_IOU,
    PRECISION,
    RAND_ERROR,
    VOI,
    LabelTotal,
    Overlaps,
)
from volpipe.evaluation.psnr import PSNR
from volpipe.evaluation.run_lengths import RUN_LENGTH, Nodes, SkeletonTotal
from volpipe.evaluation.score import CLASSES, LABELS, SKELETONS, Score, Scores
from volpipe.evaluation.shell_correlation import FSC
from volpipe.evaluation.ssim import SSIM

# Any: the total of what each is for
SCORES: tuple[Score[Any], ...] = (
    PSNR,
    SSIM,
    FSC,
    VOI,
    RAND_ERROR,
    FOREGROUND_IOU,
    OBJECT_IOU,
    PRECISION,
    NUM_OBJECTS,
    MEAN_OVERLAP,
    ACCURACY,
    NUM_IGNORED,
    NUM_RESERVED,
    EACH_CLASS,
    CONFUSION,
    RUN_LENGTH,
)


def scores_for(kind: str) -> tuple[Score[Any], ...]:  # Any: the total of that kind
    """Return the scores for images, labels, classes or skeletons."""
    return tuple(score for score in SCORES if kind in score.kinds)


def label_scores(
    table: Overlaps, ignored: Sequence[int] = (), no_objects: Sequence[int] = (), reserved: Sequence[int] = ()
) -> Scores:
    """Return the scores of labels that need no more than `table`; the rest is as of `LabelTotal.from_table`."""
    return Scores.from_total(_of_tables(LABELS), LabelTotal.from_table(table, ignored, no_objects, reserved))


def class_scores(table: Overlaps, names: Sequence[str] = (), ignored: Sequence[int] = ()) -> Scores:
    """Return the scores of classes that need no more than `table`; the rest is as of `ClassTotal.from_table`."""
    return Scores.from_total(_of_tables(CLASSES), ClassTotal.from_table(table, names, ignored))


def skeleton_scores(nodes: Nodes, labels: np.ndarray) -> Scores:
    """Return the scores of `labels` (nodes,), uint64, at the nodes of skeletons; 0 is background."""
    return Scores.from_total(scores_for(SKELETONS), SkeletonTotal({}, nodes, labels))


def _of_tables(kind: str) -> list[Score[Any]]:  # Any: the total of that kind
    return [score for score in scores_for(kind) if score.sums is None]
