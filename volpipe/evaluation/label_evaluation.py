"""Evaluations of labels: of objects, whose numbers mean nothing, and of classes, whose numbers do.

Not here: the scores of the table of labels (label_scores, class_scores), or by skeletons (skeleton_evaluation).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import PlanError, VolpipeError
from volpipe.evaluation import subject
from volpipe.evaluation.class_scores import TOO_MANY, ClassTotal
from volpipe.evaluation.evaluation import OUTPUT, Evaluation, checked_finite
from volpipe.evaluation.label_scores import LabelTotal, Overlaps, overlaps, total
from volpipe.evaluation.origins import provenances_of
from volpipe.evaluation.score import CLASSES, LABELS, ScoredBlock, Scores, Values
from volpipe.evaluation.subject import BlockSums, Results, read_block
from volpipe.geometry.grid import Box
from volpipe.geometry.labels import Ignore, ignored, in_64_bits, reserved
from volpipe.recipes.training import MOST_CLASSES
from volpipe.reporting.page import Sheet
from volpipe.training.task import Training
from volpipe.units import count
from volpipe.volumes.label_values import class_notes
from volpipe.volumes.orientation import orientation_notes
from volpipe.volumes.values import take_sample
from volpipe.volumes.volume import Volume

MOST_NAMED = 5  # labels in a sentence


@dataclass(frozen=True, kw_only=True)
class LabelEvaluation(Evaluation):
    """An evaluation of labels of objects.

    Attributes:
        ignore: labels of the reference of which nothing is known, and of the output that are none; None for RESERVED.
    """

    ignore: Ignore = None
    kind = LABELS
    other_stands_in = True

    def describe_choices(self) -> dict[str, object]:
        return {"ignore": self.ignore}

    @classmethod
    def choices_of(cls, output: Volume, ignore: Ignore, skeletons: str) -> dict[str, Any]:  # Any: of each field
        return {"ignore": ignore}

    def with_notes(self, exchanged: Sequence[str]) -> tuple[LabelEvaluation, list[str]]:
        own = self.box.relative_to(self.a_start)  # in voxels of the reference
        of_classes = [*class_notes(self.reference, self.ignore, own), *class_notes(self.output, None, self.box)]
        return self, [*exchanged, *of_classes, *axis_notes(self)]

    def sums(self, block: int, session: str) -> BlockSums:
        return sums_of_labels(self, block, session)

    def scores(self, results: Results) -> dict[str, Scores]:
        dtypes = (self.reference.dtype, self.output.dtype)
        left_out, no_objects = ([in_64_bits(n) for n in ignored(dtype, self.ignore)] for dtype in dtypes)
        suspects = [in_64_bits(n) for dtype in {*dtypes} for n in reserved(dtype)]
        sums = self.added_sums(results)[OUTPUT]
        whole = LabelTotal.from_table(table_of(results), left_out, no_objects, suspects, sums)
        return {OUTPUT: Scores.from_total(self.scored_by, whole)}

    def label_notes(self, scores: Mapping[str, Scores]) -> list[str]:
        entry, truth, labels = scores[OUTPUT], self.reference, self.output
        notes = ignored_notes(truth, self.ignore, entry)
        if entry.num_truth == 1:
            notes.append(
                f"the reference {truth} has one object alone, which nothing can be merged with: VOI and Rand say next "
                "to nothing there; if its label is a class, score with --classes, or give a number to each object"
            )
        if entry.num_reserved:
            numbers = ", ".join(map(str, reserved(truth.dtype) or reserved(labels.dtype)))
            notes.append(
                f"{count(entry.num_reserved, 'object')} of {truth} and {labels} with numbers by which data sets mean "
                f"that nothing is known ({numbers}); name these to --ignore if they are no objects"
            )
        return notes

    def notebook_sheets(self, scores: Mapping[str, Scores]) -> list[Sheet]:
        """Return nothing: the numbers say it all."""
        return []

    @classmethod
    def stored_sheets(cls, scores: Mapping[str, Values]) -> list[Sheet]:
        """Return the same tables as for a terminal, from stored scores; NaN stands for None and for missing scores."""
        known = {name: value for name, value in scores[OUTPUT].items() if value is not None}
        return [cls.score_lines(defaultdict(lambda: math.nan, known)), *cls.part_tables(known)]


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(Evaluation):
    """An evaluation of classes.

    Attributes:
        ignore: labels of the reference of which nothing is known; None for RESERVED.
        names: of classes 0, 1, …; () where nobody knows.
        left_out: classes that the reference does not annotate; in the output they count as the class `first`.
    """

    ignore: Ignore = None
    names: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    first: int = 0
    kind = CLASSES
    takes_channels = True

    def describe_choices(self) -> dict[str, object]:
        named = {"classes": list(self.names)} if self.names else {}
        return {"ignore": self.ignore} | named | ({"left_out": list(self.left_out)} if self.left_out else {})

    @classmethod
    def choices_of(cls, output: Volume, ignore: Ignore, skeletons: str) -> dict[str, Any]:  # Any: of each field
        """Return the labels to ignore and the names of classes.

        Both are those of the training of the net, if that is still there; or names are those of channels of `output`.
        """
        with suppress(VolpipeError, KeyError, IndexError, TypeError):
            weights = provenances_of(output)[0].said["recipe"]["net"]["weights"]
            if (training := Training.load(Path(weights).parent)) is not None and training.recipe.learns_classes:
                classes = training.recipe.classes
                return {
                    "names": classes.names_by_label, "ignore": classes.ignore if ignore is None else ignore,
                    "first": classes.label_sets[0][0],
                }  # fmt: skip
        return {"names": output.channel_names if output.num_channels > 1 else (), "ignore": ignore}

    def with_notes(self, exchanged: Sequence[str]) -> tuple[ClassEvaluation, list[str]]:
        own = self.box.relative_to(self.a_start)  # in voxels of the reference
        for volume, box in ((self.reference, own), (self.output, self.box)):
            sample = take_sample(volume, box) if volume.num_channels == 1 else None
            if sample is not None and (num := len(np.unique(sample.values))) > MOST_CLASSES:
                raise PlanError(TOO_MANY.format(volume, num, MOST_CLASSES))
        num, notes = self.output.num_channels, list[str]()
        if num > 1:
            notes.append(f"channels 0 to {num - 1} of {self.output} are taken for classes: a voxel has the largest")
        return self, [*notes, *exchanged, *(axis_notes(self) if num == 1 else [])]

    def annotating(self, names: Sequence[str]) -> ClassEvaluation:
        if unknown := [name for name in names if name not in self.names]:
            raise PlanError(
                f"annotated names {unknown[0]}, and the classes of {self.output} are called "
                f"{', '.join(self.names) or 'by nothing that is still there'}; name some of these"
            )
        others = [number for number, name in enumerate(self.names) if name not in names and number != self.first]
        return self.leaving_out(tuple(others), self.first)

    def leaving_out(self, classes: tuple[int, ...], first: int) -> ClassEvaluation:
        return replace(self, left_out=classes, first=first)

    def voxels(self, name: str, box: Box, session: str = "") -> np.ndarray:
        """Return the class of each voxel in `box`: where each class has a channel, the one with the largest value."""
        data = read_block(self.output, box, session)
        numbers = np.asarray(data[0] if len(data) == 1 else checked_finite(self.output, data, box).argmax(0))
        if not self.left_out:
            return numbers
        return np.where(np.isin(numbers, self.left_out), numbers.dtype.type(self.first), numbers)

    def sums(self, block: int, session: str) -> BlockSums:
        return sums_of_labels(self, block, session)

    def scores(self, results: Results) -> dict[str, Scores]:
        left_out = [in_64_bits(n) for n in ignored(self.reference.dtype, self.ignore)]
        whole = ClassTotal.from_table(table_of(results), self.names, left_out, self.added_sums(results)[OUTPUT])
        return {OUTPUT: Scores.from_total(self.scored_by, whole)}

    def label_notes(self, scores: Mapping[str, Scores]) -> list[str]:
        notes = ignored_notes(self.reference, self.ignore, scores[OUTPUT])
        if self.names and (more := scores[OUTPUT].classes[len(self.names) :]):
            numbers = ", ".join(each.name for each in more[:MOST_NAMED]) + " …" * (len(more) > MOST_NAMED)
            notes.append(
                f"labels {numbers} are none of the {count(len(self.names), 'class')} of the output, and are scored as "
                "more; name them to --ignore if nothing is known there"
            )
        return notes


# ---- what both share


def axis_notes(evaluation: Evaluation) -> list[str]:
    """Return notes where other axes or mirroring would lay the reference's labels better on the output's."""
    output, truth, start = evaluation.output, evaluation.reference, evaluation.a_start
    is_within = Box.from_shape(output.spatial_shape).contains(Box.from_shape(truth.spatial_shape).shift(start))
    return orientation_notes(truth, output, start) if is_within else []


def sums_of_labels(evaluation: Evaluation, block: int, session: str) -> BlockSums:
    """Return the table of a block's pairs of labels, and the sums that scores take beside it."""
    box = evaluation.read_box(block)
    own = evaluation.own_box(block).relative_to(box.start).slices
    labels, truth = evaluation.voxels(OUTPUT, box, session), evaluation.read_a(box, session)[0]
    sums = evaluation.own_sums(ScoredBlock(labels, truth, own))
    return BlockSums(
        scores={block: {OUTPUT: sums}} if sums else {}, tables={block: overlaps(labels[own], truth[own]).tolist()}
    )


def table_of(results: Results) -> Overlaps:
    """Return the table of labels of all blocks."""
    return total(table for _, table in subject.tables(results))


def ignored_notes(truth: Volume, ignore: Ignore, scores: Scores) -> list[str]:
    """Return a note on the voxels that are left out because their label says "unknown", if there are any."""
    if not scores.num_ignored:
        return []
    return [
        f"{count(scores.num_ignored, 'voxel')} of the reference {truth} left out: their label, one of "
        f"{', '.join(map(str, ignored(truth.dtype, ignore)))}, means that nothing is known of them; "
        "--ignore none (ignore=()) counts them"
    ]
