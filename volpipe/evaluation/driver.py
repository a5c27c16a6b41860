"""The evaluation of an output as work: its blocks scored on workers, what they gave kept, and added up.

Not here: what is compared, or how a block is scored (evaluate).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.feed import Feed
from volpipe.blockwise.journal import Kinds
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start
from volpipe.blockwise.stage import Schedule
from volpipe.blockwise.work import Steps
from volpipe.evaluation.block_work import BlockSchedule, BlockWork
from volpipe.evaluation.evaluate import (
    FINGERPRINT,
    RESULTS,
    SCORE_CAPTION,
    SCORE_COLUMNS,
    BlockScores,
    Evaluation,
    ImageScores,
    Scores,
    check_labels,
    label_notes,
    sum_scores,
)
from volpipe.evaluation.panels import comparison_items, draw
from volpipe.reporting.page import REPORT, Draft, Item, Note, Sheet
from volpipe.runs.pages import Parts, Taken
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import PLAIN, SILENT, FolderWork, Listener, Options, WorkSession
from volpipe.tables import html_table
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.paths import Location, delete_file, exists, shown
from volpipe.volumes.volume import Volume

EVALUATION_FILE = "evaluation.json"  # in the folder of an evaluation: what is compared


@dataclass(repr=False)
class EvaluationResult(WorkReport):
    """How an evaluation ended.

    Attributes:
        plan: the evaluation: volumes and box that were compared.
        scores: of labels; or of an image and of interpolations of its input, by name. None where blocks are missing.
    """

    scores: Scores | None = None

    @property
    def notes(self) -> list[str]:
        """What a user should know of the volumes and their labels, in sentences."""
        found = [] if self.scores is None else label_notes(self.plan, self.scores)
        return [*self.plan.notes, *found]

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        compared = {"output": shown(self.plan.output), "reference": shown(self.plan.reference)}
        return {**compared, **self._label_scores(), **super().facts()}

    def _label_scores(self) -> dict[str, object]:
        if self.scores is None or isinstance(self.scores, dict):
            return {}
        return {
            field.name.replace("_", " "): f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
            for field in dataclasses.fields(self.scores)
            if isinstance(value := getattr(self.scores, field.name), int | float)
        }

    def _repr_html_(self) -> str:
        """Return a table of images, the best PSNR first, above how it ended; cuts are in cycles per voxel."""
        if not isinstance(self.scores, dict):
            return super()._repr_html_()
        best_first = sorted(self.scores.items(), key=lambda item: -item[1].psnr)
        rows = ((name, f"{each.psnr:.2f}", f"{each.ssim:.4f}", *_cuts(each)) for name, each in best_first)
        return html_table(("", *SCORE_COLUMNS), rows, caption=SCORE_CAPTION) + super()._repr_html_()

    def to_json(self) -> dict[str, object]:
        """Return the scores and their volumes as JSON values; infinite numbers are None."""
        assert self.scores is not None
        scores: dict[str, object] = self.plan.describe_scores(self.scores)
        return scores

    def draw(self, path: str | Path) -> None:
        """Write slices and errors of images to the PNG at `path`."""
        draw(Path(path), self.plan)


def _cuts(scores: ImageScores) -> list[str]:
    """Return the frequencies at which the correlation with the reference ends, as far as there are any."""
    if not scores.curve:
        return ["too small"] * 4
    cuts = (scores.half, scores.seventh, scores.half_z, scores.seventh_z)
    return ["never" if cut is None else f"{cut:.3f}" for cut in cuts]


class EvaluationWork(BlockWork[EvaluationResult]):
    """An evaluation, block by block; what its blocks gave is kept in its folder.

    Args:
        evaluation: from `plan_evaluation`.
        folder, options, listener: as of `FolderWork`.
        feed: the output, where other work is still writing it.
        to: file of the scores, None where nobody wants one.
    """

    kinds: ClassVar[Kinds] = RESULTS
    mark, stage, app = EVALUATION_FILE, "evaluate", "score"
    passing: ClassVar[tuple[str, ...]] = (FINGERPRINT,)

    def __init__(
        self,
        evaluation: Evaluation,
        folder: RunFolder,
        options: Options = PLAIN,
        listener: Listener = SILENT,
        feed: Feed | None = None,
        to: Location | None = None,
    ) -> None:
        super().__init__(evaluation, folder, options, listener, feed)
        self.evaluation, self.to = evaluation, to
        self.scores: Scores | None = None

    @property
    def name(self) -> str:
        return str(self.to or self.evaluation.output)

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        """Return slices of both volumes, once all is compared; see `FolderWork`."""

        def compared() -> Sequence[Item]:
            if not (schedule.is_complete or self.is_complete):
                return [Note("Slices are compared once all blocks are scored.")]
            return [*comparison_items(self.evaluation)]

        return [Draft("Comparison", compared, "Comparison")]

    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        """Return what is compared, and the scores once they are there; see `FolderWork`."""
        tree = read_json(self.to) if self.to is not None else None
        if tree is None and self.scores is not None:
            tree = self.evaluation.describe_scores(self.scores)
        return evaluation_parts(self.described(), tree)

    def witnesses(self) -> Sequence[Path]:
        """Return the journal, and the file of the scores; see `HeldWork`."""
        return [*super().witnesses(), *([self.to] if isinstance(self.to, Path) else [])]

    @property
    def needs_all(self) -> bool:
        """Whether it must wait for all of what it reads: labels are looked at first, interpolations need the input."""
        return self.evaluation.kind == "labels" or len(self.evaluation.candidates) > 1

    @property
    def is_begun(self) -> bool:
        return super().is_begun or (self.to is not None and exists(self.to))

    @property
    def is_complete(self) -> bool:
        """Whether the scores are there, and are those of this evaluation."""
        scores = None if self.to is None else read_json(self.to)
        expected = self.described()
        return scores is not None and {key: scores.get(key) for key in expected} == expected

    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Forget the scores of an output that is made anew, and of one that is not complete the whole."""
        if self.to is not None and not source.is_complete:
            delete_file(self.to)
        if not source.is_begun and self.folder.path.is_dir():
            self.folder.clear()

    def clear(self) -> None:
        """Delete the scores; see `FolderWork`."""
        if self.to is not None:
            delete_file(self.to)
        super().clear()

    def volumes(self) -> dict[str, Volume | None]:
        """Return what it reads, but for what other work of ours writes, whose voxels stay."""
        evaluation = self.evaluation
        outside = {"output": evaluation.output, "given": evaluation.given} if self.options.is_outside else {}
        return {"reference": evaluation.reference, **outside}

    def steps(self) -> Steps[EvaluationResult]:
        """Score what is not scored yet, and return how that ended; see `FolderWork`.

        Raises:
            PlanError: the labels look like an image.
        """
        check_labels(self.evaluation)  # before anything is written; a flow has all of them by now
        return (yield from super().steps())

    def report(self, schedule: BlockSchedule | None, session: WorkSession, **facts: Any) -> EvaluationResult:
        """Return how it ended, with the scores where no block is missing."""
        report = EvaluationResult(self.evaluation, self.folder.path, **facts)
        if schedule is not None and report.is_complete:
            parts = BlockScores.joined(session.journal.results(BlockScores))
            report.scores = self.scores = sum_scores(self.evaluation, parts)
            if self.to is not None:
                write_json(self.to, self.evaluation.describe_scores(report.scores))
        return report


def evaluation_parts(described: Mapping[str, object], tree: Mapping[str, Any] | None) -> Parts:  # Any: JSON
    """Return what the report says of an evaluation: what was compared, and the `tree` of its scores if it is there."""
    facts = {key: str(value) for key, value in described.items() if value is not None and key != FINGERPRINT}
    scores, notes = ((tree or {}).get(key) for key in ("scores", "notes"))
    items: list[Item] = [Note("There are no scores yet: they need all blocks.")]
    if isinstance(scores, Mapping) and scores:
        names = [
            key for key, value in next(iter(scores.values())).items() if not isinstance(value, list | tuple | dict)
        ]
        rows = [(name, *(_score(entry.get(key)) for key in names)) for name, entry in scores.items()]
        items = [Sheet("Scores", ("", *(name.replace("_", " ") for name in names)), rows)]
    items += [Note(note, "warning") for note in notes or ()]
    title = f"Scores of {Path(str(described.get('output', ''))).name}"
    return Parts(title, f"The evaluation against {described.get('reference')}.", facts, items)


def _score(value: object) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def evaluate(
    evaluation: Evaluation,
    start: Start,
    folder: RunFolder,
    *,
    listener: Listener = SILENT,
    report_file: Path | None = None,
    **options: Any,
) -> EvaluationResult:
    """Score all blocks, and return how that ended; `folder`, which holds what is done, goes when all is.

    Args:
        evaluation: from `plan_evaluation`.
        start: starts the workers in a folder for their files, and stops them on every way out.
        folder, listener, options: as of `FolderWork`.
        report_file: where the report is kept, which lies in `folder`; None where nobody wants it.

    Raises:
        PlanError: the labels look like an image.
        RunStopped: too many blocks cannot be scored.
    """
    work = EvaluationWork(evaluation, folder, Options(**options), listener)
    report = perform(work, partial(start, folder.parsl))
    if report_file is not None and (folder.path / REPORT).is_file():
        shutil.copyfile(folder.path / REPORT, report_file)
    if report.is_complete:
        work.remove()
    return report
