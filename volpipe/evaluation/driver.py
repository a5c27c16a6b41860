"""An evaluation or a comparison as work: blocks looked at on workers, what they gave kept in a folder, and added up.

Not here: what a block gives (subject), how it ended (results), or many pairs of outputs (workflow.compare).
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

from volpipe.blockwise.feed import FedSchedule, Feed, fed
from volpipe.blockwise.journal import Kinds, Record, read_results
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.work import POOL, Steps, each
from volpipe.errors import RunError
from volpipe.estimation.calibrate import MOST_WORKERS
from volpipe.estimation.estimate import StageTime, StageTimes
from volpipe.evaluation.compare import Comparison
from volpipe.evaluation.evaluate import FINGERPRINT, Evaluation
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.lines import summary
from volpipe.evaluation.pictures import evaluation_items
from volpipe.evaluation.results import ComparisonResult, EvaluationResult, evaluation_parts
from volpipe.evaluation.subject import RESULTS, BlockSums, Subject
from volpipe.geometry.grid import Box, Grid
from volpipe.reporting.page import Draft, Item, Note
from volpipe.runs.options import RunOptions
from volpipe.runs.pages import Parts, Taken
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import PLAIN, SILENT, FolderWork, Listener, WorkSession, check_kind
from volpipe.volumes.identity import Identity, changes, identify, read_identities, store_identities
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.paths import Location, delete, delete_file, exists

R = TypeVar("R", bound=WorkReport)
S = TypeVar("S", bound=Subject)


class BlockSchedule(FedSchedule):
    """One stage, whose units are blocks; `feed` is what other work still writes."""

    def __init__(self, subject: Subject, feed: Feed | None = None) -> None:
        self.subject = subject
        stage = Stage(subject.stage, len(subject.blocks), doing="comparing voxels")
        super().__init__(fed(stage, feed, subject.read_box), feed=feed)

    def box(self, stage: Stage, unit: int) -> Box:
        return self.subject.own_box(unit)


class BlockWork(FolderWork[R], Generic[R, S]):
    """Work on the blocks of a `subject`; what they gave is kept in the folder, so that the same work again goes on."""

    kinds: ClassVar[Kinds] = RESULTS

    def __init__(
        self, subject: S, folder: RunFolder, options: RunOptions = PLAIN, listener: Listener = SILENT,
        feed: Feed | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, options, listener, feed)
        self.subject = subject

    @property
    def is_begun(self) -> bool:
        return self.folder.journal.is_file()

    @property
    def is_complete(self) -> bool:
        """Whether every block was looked at."""
        return self.is_begun and self.ledger().schedule.is_complete

    @abstractmethod
    def report(self, **facts: Any) -> R:
        """Return how it ended, with what blocks gave; `facts` are those of a `WorkReport`."""

    def results(self) -> Iterator[BlockSums]:
        """Yield the sums of all blocks that were looked at."""
        return read_results(self.folder.journal, self.kinds, BlockSums)

    def grids(self) -> dict[str, Grid]:
        return {self.subject.stage: self.subject.blocks}

    def sent(self) -> Subject:
        """Return what travels to workers with each task: what they need of the subject."""
        return replace(self.subject, notes=())

    def schedule(self) -> BlockSchedule:
        return BlockSchedule(self.subject, self.feed)

    @property
    def _given(self) -> dict[str, object]:
        """What the folder is known by, as it is read back from its file: without what changes by itself."""
        described: dict[str, object] = json.loads(json.dumps(self.subject.describe()))
        return {key: value for key, value in described.items() if key != FINGERPRINT}

    def claim(self) -> None:
        """Forget what was found in other volumes, or otherwise: it costs little, and is made again."""
        self.check_free()
        inputs = self.subject.inputs()
        # what earlier work of ours writes stays as it is: of all but the reference
        read = inputs if self.options.is_outside else {"reference": inputs["reference"]}
        mark, states = self.folder.path / self.subject.mark, {name: identify(each) for name, each in read.items()}
        before: Mapping[str, Identity] = {}
        with suppress(RunError):  # damaged
            before = read_identities(self.folder.inputs) or {}
        # but for parts that could not be read
        is_same = before.keys() == states.keys() and not any(changes(before[name], states[name]) for name in states)
        if self.options.fresh or read_json(mark) != self._given or not is_same:
            self.clear()
            write_json(mark, self._given)
        store_identities(self.folder.inputs, states)

    def remove(self) -> None:
        """Delete the folder, when the workers have stopped, unless another command has taken it meanwhile."""
        self.folder.remove(self.subject.mark, self._given)

    def check_free(self) -> None:
        check_kind(self.folder, self.subject.mark)

    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Nothing else makes what is looked at."""

    def clear(self) -> None:
        self.folder.clear()

    def session_steps(self, session: WorkSession) -> Steps[R]:
        if self.is_complete:
            return self.report(was_complete=True)
        pool: WorkerPool = yield POOL
        began, schedule, sent = time.perf_counter(), self.resumed(), self.sent()
        self.listener.on_plan(self.subject, self.folder)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            return pool.submit("reduce", sent, list(units), session.name, str(self.folder.path))

        phase = yield from session.finish(self.phase(session, schedule, submit))
        return self.report(
            missing=schedule.missing(phase.reasons), totals=session.totals,
            seconds=time.perf_counter() - began, first_task=session.first_task,
        )  # fmt: skip


class EvaluationWork(BlockWork[EvaluationResult, Evaluation]):
    """An evaluation; its scores are written to the file `to`, if there is one."""

    def __init__(self, subject: Evaluation, *rest: Any, to: Location | None = None) -> None:
        super().__init__(subject, *rest)
        self.to = to

    @property
    def name(self) -> str:
        return str(self.to or self.subject.output)

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        items: Iterable[Item] = [Note("Slices are compared once all blocks are scored.")]
        if schedule.is_complete or self.is_complete:
            items = evaluation_items(self.subject)
        return [Draft("Comparison", lambda: list(items), "Comparison")]

    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        tree = read_json(self.to) if self.to is not None else None
        if tree is None and is_complete:
            tree = self.subject.describe_scores(self.subject.scores(self.results))
        return evaluation_parts(self._given, tree)

    def witnesses(self) -> Sequence[Path]:
        return [*super().witnesses(), *([self.to] if isinstance(self.to, Path) else [])]

    @property
    def needs_all(self) -> bool:
        """Whether it must wait for all of what it reads: labels are looked at first, interpolations need the input."""
        return self.subject.kind == "labels" or len(self.subject.candidates) > 1

    @property
    def is_begun(self) -> bool:
        return super().is_begun or (self.to is not None and exists(self.to))

    @property
    def is_complete(self) -> bool:
        """Whether the scores are there, and are those of this evaluation; without a file, whether every block is."""
        if self.to is None:
            return super().is_complete
        scores, expected = read_json(self.to), json.loads(json.dumps(self.subject.describe()))
        return scores is not None and {key: scores.get(key) for key in expected} == expected

    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Forget the scores of an output that is made anew, and of one that is not complete the whole."""
        if self.to is not None and not source.is_complete:
            delete_file(self.to)
        if not source.is_begun and self.folder.path.is_dir():
            self.folder.clear()

    def clear(self) -> None:
        if self.to is not None:
            delete_file(self.to)
        super().clear()

    def steps(self) -> Steps[EvaluationResult]:
        """Score what is not scored yet; images where labels are to be scored are refused before anything is written."""
        self.subject.check_labels()  # a flow has all of them by now
        return (yield from super().steps())

    def report(self, **facts: Any) -> EvaluationResult:
        # of an evaluation that was complete, the scores may stand in their file alone
        result = EvaluationResult(self.subject, self.folder.path, **facts)
        if result.is_complete and not (result.was_complete and self.to is not None):
            result.scores = self.subject.scores(self.results)
            if self.to is not None:
                write_json(self.to, self.subject.describe_scores(result.scores))
        return result


class ComparisonWork(BlockWork[ComparisonResult, Comparison]):
    """A comparison; a limit of what both do not have is refused."""

    def __init__(self, subject: Comparison, *rest: Any, limits: Sequence[Limit] = ()) -> None:
        super().__init__(subject, *rest)
        self.limits = tuple(limits)
        for limit in limits:
            limit.check(subject)

    @property
    def name(self) -> str:
        return f"{self.subject.a} and {self.subject.b}"

    def sent(self) -> Comparison:
        """Return the comparison without what both say of how they were made, which may be long."""
        return replace(self.subject, made_a=(), made_b=(), notes=())

    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        facts = {key: str(value) for key, value in self._given.items() if value is not None}
        differences = self.subject.differences(self.results)
        items = [Note(line) for line in summary(self.subject, differences, len(taken.missing))]
        return Parts(f"Comparison of {self.name}", "The comparison of two outputs.", facts, items)

    def report(self, **facts: Any) -> ComparisonResult:
        differences = self.subject.differences(self.results)
        return ComparisonResult(self.subject, self.folder.path, **facts, differences=differences, limits=self.limits)


def finish(work: BlockWork[R, Any], start: Start, on_end: Callable[[R], object] = lambda result: None) -> R:
    """Look at all blocks, and return how that ended; the folder of `work`, which holds what is done, goes when all is.

    `on_end` is called with the result before that: what it raises leaves the folder there.

    Raises:
        PlanError: labels look like an image.
        RunStopped: too many blocks cannot be looked at.
    """
    result = perform(work, partial(start, work.folder.parsl))
    on_end(result)
    if result.is_complete:
        work.remove()
    return result


# ---- forecast


def calibrate_evaluation(
    evaluation: Evaluation, missing: Collection[str], workers: WorkerPool, folder: Path
) -> Steps[StageTimes]:
    """Return the forecast of `evaluation`, from a block that all `workers` score at the same time.

    Zeros in `folder`, which is deleted, stand in for volumes whose paths are `missing`, and the reference for labels.

    Raises:
        RunStopped: the block cannot be scored.
    """
    output, given, num_workers = evaluation.output, evaluation.given, max(1, workers.slots["cpu"])
    is_guess = any(volume.path in missing for volume in (output, given) if volume is not None)
    try:
        if output.path in missing:
            output = evaluation.reference if evaluation.kind == "labels" else zeros_like(output, folder / "output")
        if given is not None and given.path in missing:
            given = zeros_like(given, folder / "given")
        trial = replace(evaluation, b=output, given=given)
        middle = tuple(max(0, n // b - 1) // 2 for n, b in zip(trial.box.shape, trial.block, strict=True))
        block = trial.blocks.number(middle)  # a whole one if any
        num = min(num_workers, MOST_WORKERS)
        records = yield from each("trial", "reduce", lambda number: (trial, [block]), num)
    finally:
        delete(folder)
    seconds, num_voxels = fmean(record.usage.seconds for record in records), trial.blocks.box(block).num_voxels
    whole = seconds / num_voxels * evaluation.box.num_voxels
    stage = StageTime(evaluation.stage, len(evaluation.blocks), whole)
    return StageTimes((stage,), 0.0, num * num_voxels, is_guess, num_workers)
