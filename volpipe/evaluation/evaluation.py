"""An evaluation: an output, its reference, and what of them is scored; what all kinds of evaluation share.

Not here: how one is planned (evaluate), the kinds (image_evaluation, label_evaluation, skeleton_evaluation), or the
scores (scores lists them).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation.score import Score, ScoredBlock, Scores, Sums, Values
from volpipe.evaluation.scores import scores_for
from volpipe.evaluation.subject import FINGERPRINT, Results, Subject, read_block, refuse_image
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.geometry.labels import Ignore
from volpipe.reporting.page import Sheet
from volpipe.reporting.panels import Panel
from volpipe.reporting.shades import coloured
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.volume import Volume

SUMS = "sums"  # the key of the scores that take sums of blocks
OUTPUT = "output"  # the name of the output among what is scored


@dataclass(frozen=True, kw_only=True)
class Evaluation(Subject):
    """An output B that is scored against a reference A; A is B itself where skeletons in files are the reference.

    Attributes:
        given: the input of the output, a coarser volume, or None.
        takes_channels: whether the output may have several channels.
        interpolates: whether interpolations of the input are scored beside the output.
        about_pictures: what a report says above pictures of slices; "" where they need no word.
    """

    given: Volume | None = None
    stage = "evaluate"
    mark = "evaluation.json"
    checks_labels = True
    takes_channels: ClassVar[bool] = False
    interpolates: ClassVar[bool] = False
    about_pictures: ClassVar[str] = ""

    @property
    def output(self) -> Volume:
        return self.b

    @property
    def reference(self) -> Volume:
        return self.a

    @property
    def truth(self) -> str:
        """The path of the reference, or of the skeletons in its stead."""
        return str(self.reference)

    @property
    def outside(self) -> tuple[str, ...]:
        return ("reference",)

    @property
    def scored_by(self) -> tuple[Score[Any], ...]:  # Any: the total of this kind
        """The scores for this kind of evaluation."""
        return scores_for(self.kind)

    @property
    def factors(self) -> Triple:
        """Voxels of the output per voxel of its input; ones without an input."""
        coarse = self.output.spatial_shape if self.given is None else self.given.spatial_shape
        return triple(n // m for n, m in zip(self.output.spatial_shape, coarse, strict=True))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the volumes that are scored: the output, and of images also interpolations of its input."""
        return (OUTPUT,)

    def read_box(self, block: int) -> Box:
        reach = max(score.reach for score in self.scored_by)
        return self.own_box(block).grown((reach,) * 3) & self.box

    def inputs(self) -> dict[str, Volume]:
        named = {"output": self.output, "reference": self.reference, "given": self.given}
        return {name: volume for name, volume in named.items() if volume is not None}

    def describe(self) -> dict[str, object]:
        """Return everything that the scores depend on, as JSON values: against another reference they are stale."""
        return {"given": None, **super().describe(), **self.describe_choices(), **self.describe_reference()}

    def describe_choices(self) -> dict[str, object]:
        """Return the choices on which only scores of this kind depend, as JSON values."""
        return {}

    def describe_reference(self) -> dict[str, object]:
        """Return the fingerprint of the reference."""
        return {FINGERPRINT: fingerprint(self.reference)}

    def describe_sums(self) -> dict[str, object]:
        """Return the names of the scores that take sums of blocks: older sums, which lack one, are not used."""
        names = [score.name for score in self.scored_by if score.sums is not None]
        return {SUMS: names} if names else {}

    @classmethod
    def choices_of(cls, output: Volume, ignore: Ignore, skeletons: str) -> dict[str, Any]:  # Any: of each field
        """Return the fields that only this kind of evaluation has, from what the user chose and the output says."""
        return {}

    @classmethod
    def range_of(cls, output: Volume, truth: Volume, data_range: float | None) -> float:
        """Return the range of grey levels, from the least possible to the greatest; 1 of labels.

        Raises:
            PlanError: their voxels are not of this kind, or nothing says the range.
        """
        for volume in (output, truth):
            if not np.issubdtype(volume.dtype, np.integer) and volume.num_channels == 1:
                raise PlanError(f"{volume} has {volume.dtype} voxels, labels are whole numbers; leave --{cls.kind} out")
        return checked_range(data_range) or 1.0

    def annotating(self, names: Sequence[str]) -> Self:
        """Return this evaluation by a reference that annotates the classes `names` and leaves others out.

        Raises:
            PlanError: it is of no classes, or nobody knows which these are.
        """
        raise PlanError(f"annotated names classes ({', '.join(names)}), and {self.kind} are scored; give --classes")

    def leaving_out(self, classes: tuple[int, ...], first: int) -> Self:
        """Return this evaluation by a reference that leaves `classes` out, which count as the class `first`; as it is.

        It matters to classes alone.
        """
        return self

    @abstractmethod
    def with_notes(self, exchanged: Sequence[str]) -> tuple[Self, list[str]]:
        """Check samples of the voxels; return the evaluation with what they tell, and notes for the user.

        Args:
            exchanged: the sentence, if any, that the output and the reference seem to be exchanged.

        Raises:
            PlanError: they are not of this kind.
        """

    def voxels(self, name: str, box: Box, session: str = "") -> np.ndarray:
        """Return the voxels (z, y, x) of the output in `box`, or of another candidate."""
        return np.asarray(read_block(self.output, box, session)[0])

    def own_sums(self, block: ScoredBlock) -> dict[str, list[float]]:
        """Return the sums that each score takes of a block, by the name of the score."""
        sums = {score.name: (score.sums, score.reach) for score in self.scored_by}
        return {name: of(block.with_margin(reach)).tolist() for name, (of, reach) in sums.items() if of is not None}

    def added_sums(self, results: Results) -> dict[str, dict[str, Sums]]:
        """Return the sums of all blocks, by candidate and score; floats are added in the order of blocks."""
        whole: dict[str, dict[str, Sums]] = {name: {} for name in self.candidates}
        if self.describe_sums():
            blocks = {block: sums for part in results() for block, sums in part.scores.items()}
            for _, candidates in sorted(blocks.items()):
                for name, sums in candidates.items():
                    for score, values in sums.items():
                        whole[name][score] = whole[name].get(score, 0.0) + np.array(values, np.float64)
        return whole

    @abstractmethod
    def scores(self, results: Results) -> dict[str, Scores]:
        """Return the scores of each candidate by its name, from the sums of all blocks."""

    def result(self, scores: Mapping[str, Scores]) -> Scores | dict[str, Scores]:
        """Return the scores as a user gets them: those of the output alone, where nothing else is scored beside it."""
        return scores[OUTPUT]

    def describe_scores(self, scores: Mapping[str, Scores]) -> dict[str, object]:
        """Return `scores` and what they are of, as JSON values; infinity and NaN are None."""
        values = {name: entry.to_json() for name, entry in scores.items()}
        return self.describe() | {"notes": [*self.notes, *self.label_notes(scores)], "scores": values}

    def label_notes(self, scores: Mapping[str, Scores]) -> list[str]:
        """Return notes on labels that were not counted, and on labels that perhaps should not have been."""
        return []

    def check_labels(self) -> None:
        """Refuse images where labels are to be scored; probabilities, with a channel for each class, pass."""
        own = self.box.relative_to(self.a_start)
        for volume, box in ((self.output, self.box), (self.reference, own)) if self.checks_labels else ():
            if volume.num_channels == 1:
                refuse_image(volume, box)

    def with_nodes(self, path: Path) -> Self:
        """Return the evaluation with the path for the nodes of its skeletons, if it has skeletons."""
        return self

    def store_nodes(self) -> None:
        """Write the nodes of skeletons to their file, for workers, unless it is there or there are no skeletons."""

    # ---- how scores are shown

    def sheets(self, scores: Mapping[str, Scores]) -> list[Sheet]:
        """Return the scores as tables, for a terminal: a line for each, and a table of each list of parts."""
        return [self.score_lines(scores[OUTPUT].values), *self.part_tables(scores[OUTPUT].to_json())]

    def numbers(self, scores: Mapping[str, Scores]) -> dict[str, int | float]:
        """Return the scores that are single numbers, by name; none where a table for a notebook has them already."""
        return {name: n for name, n in scores[OUTPUT].values.items() if isinstance(n, int | float)}

    def notebook_sheets(self, scores: Mapping[str, Scores]) -> list[Sheet]:
        """Return the tables for a notebook, above the numbers."""
        return self.sheets(scores)

    @classmethod
    def score_lines(cls, values: Values) -> Sheet:
        """Return a line for each score, from its values."""
        rows = [line for score in scores_for(cls.kind) for line in score.texts(values).items()]
        return Sheet("Scores", ("", ""), rows)

    @classmethod
    def part_tables(cls, values: Values) -> list[Sheet]:
        """Return a table of each list of parts that scores have, from their values in the JSON."""
        of_parts = [score.tables for score in scores_for(cls.kind) if score.tables is not None]
        return [table for tables in of_parts for table in tables(values)]

    @classmethod
    def stored_sheets(cls, scores: Mapping[str, Values]) -> list[Sheet]:
        """Return the tables of stored scores for a page: a row for each candidate, a column for each number."""

        def cell(value: object) -> str:
            return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

        first = next(iter(scores.values()))
        names = [key for key, value in first.items() if not isinstance(value, list | tuple | dict)]
        rows = [(name, *(cell(entry.get(key)) for key in names)) for name, entry in scores.items()]
        sheet = Sheet("Scores", ("", *(name.replace("_", " ") for name in names)), rows)
        return [sheet, *(part for entry in scores.values() for part in cls.part_tables(entry))]

    def panels(self, slices: dict[str, np.ndarray], title: str) -> tuple[list[Panel], list[Panel]]:
        """Return panels of slices (y, x) of labels, one colour for each object, and no panels of errors."""
        return [Panel(f"{title} {name}", coloured(labels)) for name, labels in slices.items()], []


def checked_finite(volume: Volume, data: np.ndarray, box: Box) -> np.ndarray:
    """Return `data`, the voxels of `volume` in `box`; refuse NaN and infinity."""
    if not np.isfinite(data).all():
        raise PlanError(f"{volume} has NaN or infinite voxels in {box}, which no score takes; leave them out by --roi")
    return data


def checked_range(data_range: float | None) -> float | None:
    """Return the range of grey levels that a user gave, if any; refuse what is none."""
    if data_range is not None and not 0 < data_range < math.inf:
        raise PlanError(f"data_range {data_range:g} is no difference of two values; give a number above 0")
    return data_range
