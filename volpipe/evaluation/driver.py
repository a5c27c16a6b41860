"""The evaluation of an output: its blocks scored on workers, what they gave kept, and added up.

Not here: what is compared, or how a block is scored (evaluate).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.feed import FedSchedule, Feed, fed
from volpipe.blockwise.journal import Journal, Kinds, Record
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.work import POOL, Steps
from volpipe.evaluation.evaluate import (
    RESULTS,
    BlockScores,
    Evaluation,
    ImageScores,
    Scores,
    around,
    check_labels,
    describe_evaluation,
    describe_scores,
)
from volpipe.evaluation.image_scores import ImageSums
from volpipe.evaluation.label_scores import Overlaps, label_scores
from volpipe.evaluation.panels import draw
from volpipe.geometry.grid import Box
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import PLAIN, SILENT, FolderWork, Listener, Options, Session, WorkReport
from volpipe.volumes.identity import identify
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.paths import Location, delete

EVALUATION_FILE = "evaluation.json"  # in the folder of an evaluation: what is compared


@dataclass
class EvaluationResult(WorkReport):
    """How an evaluation ended.

    Attributes:
        plan: the evaluation: volumes and box that were compared.
        scores: of labels; or of an image and of interpolations of its input, by name. None where blocks are missing.
    """

    scores: Scores | None = None

    def to_json(self) -> dict[str, object]:
        """Return the scores and their volumes as JSON values; infinite numbers are None."""
        assert self.scores is not None
        return describe_scores(self.plan, self.scores)

    def draw(self, path: str | Path) -> None:
        """Write slices and errors of images to the PNG at `path`."""
        draw(Path(path), self.plan)


class EvaluationWork(FolderWork[EvaluationResult]):
    """An evaluation, block by block; what its blocks gave is kept in its folder.

    Args:
        evaluation: from `plan_evaluation`.
        folder, options, listener: as of `FolderWork`.
        feed: the output, where other work is still writing it.
        to: file of the scores, None where nobody wants one.
    """

    kinds: ClassVar[Kinds] = RESULTS

    def __init__(
        self,
        evaluation: Evaluation,
        folder: RunFolder,
        options: Options = PLAIN,
        listener: Listener = SILENT,
        feed: Feed | None = None,
        to: Location | None = None,
    ) -> None:
        super().__init__(folder, options, listener, feed)
        self.evaluation, self.to = evaluation, to

    @property
    def name(self) -> str:
        return str(self.to or self.evaluation.output)

    @property
    def is_complete(self) -> bool:
        """Whether the scores are there, and are those of this evaluation."""
        scores = None if self.to is None else read_json(self.to)
        expected = self._described()
        return scores is not None and {key: scores.get(key) for key in expected} == expected

    def _described(self) -> dict[str, object]:
        described: dict[str, object] = json.loads(json.dumps(describe_evaluation(self.evaluation)))
        return described

    def schedule(self) -> FedSchedule:
        """Return the one stage of the evaluation."""
        stage = Stage("evaluate", len(self.evaluation.blocks))
        return FedSchedule(fed(stage, self.feed, self._around), feed=self.feed)

    def _around(self, block: int) -> Box:
        return around(self.evaluation, block)

    def claim(self) -> None:
        """Forget what other evaluations left: scores cost little, and are made again."""
        mark, given = self.folder.path / EVALUATION_FILE, self._described()
        if self.options.is_outside:  # what other work of ours writes has another state now, and the same voxels
            given["output_state"] = identify(self.evaluation.output).model_dump(mode="json")
        if self.options.fresh or read_json(mark) != given:
            self.folder.clear()
            write_json(mark, given)

    def session_steps(self, session: Session) -> Steps[EvaluationResult]:
        """Score the blocks that are left, and add up what all gave."""
        if self.is_complete:
            return EvaluationResult(self.evaluation, self.folder.path, was_complete=True)
        if self.evaluation.kind == "labels":
            for volume in (self.evaluation.output, self.evaluation.reference):
                check_labels(volume, self.evaluation.box)
        pool: WorkerPool = yield POOL
        began, schedule = time.perf_counter(), self.resumed()[0]
        self.listener.on_plan(self.evaluation, self.folder)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            return pool.submit("score", self.evaluation, list(units))

        phase = yield from session.finish(self.phase(session, schedule, submit))
        report = EvaluationResult(
            self.evaluation, self.folder.path, schedule.missing(phase.reasons), session.totals,
            time.perf_counter() - began, first_task=session.first_task,
        )  # fmt: skip
        if report.is_whole:
            report.scores = self._scores(session.journal)
            if self.to is not None:
                write_json(self.to, describe_scores(self.evaluation, report.scores))
        return report

    def _scores(self, journal: Journal) -> Scores:
        """Return the scores from those of all blocks, in order: floats add up to another sum in another."""
        parts, evaluation = BlockScores.joined(list(journal.results(BlockScores))), self.evaluation
        if evaluation.kind == "labels":
            tables = [Overlaps.from_list(table) for _, table in sorted(parts.tables.items())]
            return label_scores(Overlaps.total(tables))
        totals = {name: ImageSums() for name in evaluation.candidates}
        for _, sums in sorted(parts.sums.items()):
            totals = {name: total + ImageSums.from_list(sums[name]) for name, total in totals.items()}
        return {name: ImageScores.from_sums(total, evaluation.data_range) for name, total in totals.items()}


def evaluate(
    evaluation: Evaluation, start: Start, folder: RunFolder, *, listener: Listener = SILENT, **options: Any
) -> EvaluationResult:
    """Score all blocks, and return how that ended; `folder`, which holds what is done, goes when all is.

    Args:
        evaluation: from `plan_evaluation`.
        start: starts the workers in a folder for their files, and stops them on every way out.
        folder: need not exist.
        listener: whom to tell.
        options: those of `Options`.

    Raises:
        PlanError: the labels look like an image.
        RunStopped: too many blocks cannot be scored.
    """
    report = perform(EvaluationWork(evaluation, folder, Options(**options), listener), partial(start, folder.parsl))
    if report.is_whole:
        delete(folder.path)
    return report
