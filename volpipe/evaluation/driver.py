"""An evaluation or a comparison as work: blocks looked at on workers, what they gave kept in a folder, and added up.

Not here: what a block gives (subject), how it ended (results), or many pairs of outputs (workflow.compare).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, TypeVar

from volpipe.blockwise.journal import Kinds, Record, read_results
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import Schedule, Stage, fed
from volpipe.blockwise.work import POOL, Steps, each
from volpipe.errors import RunError
from volpipe.estimation.calibrate import MOST_WORKERS
from volpipe.estimation.estimate import StageTime, StageTimes
from volpipe.evaluation.compare import ComparisonPlan
from volpipe.evaluation.evaluation import Evaluation
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.lines import summary
from volpipe.evaluation.measurements import Measurement
from volpipe.evaluation.pictures import evaluation_items
from volpipe.evaluation.results import (
    ComparisonResult,
    EvaluationResult,
    MeasurementResult,
    evaluation_parts,
    table_item,
)
from volpipe.evaluation.subject import RESULTS, BlockSums, Subject
from volpipe.reporting.page import Draft, Item, Page, Sentence
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.pages import Parts, Taken
from volpipe.runs.presence import Presence
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.runs.standing import Act, Asked, Standing, WorkState
from volpipe.runs.unit_records import UnitRecords, WorkSession
from volpipe.volumes.identity import Identity, changes, identify, read_identities, store_identities
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.paths import Location, delete, delete_file, exists

R = TypeVar("R", bound=WorkReport)
NODES = "nodes.npz"


class BlockWork(StageWork[R]):
    """Work on the blocks of a `subject`; what they gave is kept in the folder, so that the same work again goes on.

    Args:
        name: as of `StageWork`.
        sent: what travels to workers of the subject with each task: what they need.
        close: returns how it ended, from the facts of a `WorkReport`.
        parts_of: returns what its page says, from what its journal has, and whether it is complete.
        check: refuses volumes that do not suit, before anything is written; None where the plan has done so.
        prepare: writes into the folder what workers read beside the volumes.
        slices: returns the pictures of its page; None where it has none.
        to: a file for the scores, by which the work is known where it is one of several; None without.
        table: a file that `to` tells of; None without.
    """

    kinds: ClassVar[Kinds] = RESULTS

    def __init__(
        self, subject: Subject, folder: RunFolder, options: RunOptions, listener: Listener, *,
        name: str, sent: Subject, close: Callable[..., R], parts_of: Callable[[Taken, bool], Parts],
        check: Callable[[], None] | None = None, prepare: Callable[[], None] = lambda: None,
        slices: Callable[[], Iterable[Item]] | None = None,
        to: Location | None = None, table: Location | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, options, listener, name)
        self.records = UnitRecords(folder, self.kinds, self.schedule)
        self.subject, self.to, self.table, self.slices = subject, to, table, slices
        self.sent, self.close, self.parts_of, self.prepare = sent, close, parts_of, prepare
        self.check_volumes = check

    @property
    def needs_all(self) -> bool:
        return self.subject.needs_whole_inputs

    @property
    def is_begun(self) -> bool:
        return self.folder.journal.is_file() or (self.to is not None and exists(self.to))

    @property
    def is_complete(self) -> bool:
        """Whether the file of scores is there and belongs to this subject; without one, whether all blocks are done."""
        if self.to is None:
            return self.is_begun and self.records.ledger().schedule.is_complete
        scores, expected = read_json(self.to), json.loads(json.dumps(self.subject.describe()))
        is_same = scores is not None and {key: scores.get(key) for key in expected} == expected
        return is_same and (self.table is None or paths.size(self.table) == (scores or {}).get("bytes"))

    @property
    def share_left(self) -> float:
        return 0.0 if self.is_complete else self.records.share_left

    def schedule(self) -> Schedule:
        """Return the stage whose units are the blocks."""
        subject = self.subject
        stage = Stage(subject.stage, len(subject.blocks), doing=subject.doing, box=subject.own_box)
        return Schedule(fed(stage, self.feed, subject.read_box))

    def claim(self) -> None:
        """Delete the sums in the folder if they are of other volumes or choices: they cost little to make again."""
        standing, inputs = self.standing(), self.subject.inputs()
        if standing.act(self.asked) is Act.REFUSE:
            raise standing.refusal_of(self.asked)
        # what earlier work of ours writes stays as it is
        is_read, outside = self.options.is_outside, self.subject.outside
        read = {name: volume for name, volume in inputs.items() if is_read or name in outside}
        mark, states = self.folder.path / self.subject.mark, {name: identify(each) for name, each in read.items()}
        before: Mapping[str, Identity] = {}
        with suppress(RunError):  # damaged
            before = read_identities(self.folder.inputs) or {}
        # but for parts that could not be read
        is_same = before.keys() == states.keys() and not any(changes(before[name], states[name]) for name in states)
        if not is_same:
            standing = Standing(WorkState.CHANGED)
        if standing.act(self.asked) is Act.CLEAR:
            self.clear()
            write_json(mark, self.subject.describe_work())
        store_identities(self.folder.inputs, states)

    @property
    def asked(self) -> Asked:
        return Asked.FRESH if self.options.fresh else Asked.REMAKE

    def foreign(self) -> RunError | None:
        return self.folder.other_work(self.subject.mark)

    def standing(self) -> Standing:
        if foreign := self.foreign():
            return Standing(WorkState.FOREIGN, foreign)
        described = read_json(self.folder.path / self.subject.mark)
        if described is None:
            return Standing(WorkState.FRESH)
        return Standing(WorkState.BEGUN if described == self.subject.describe_work() else WorkState.OUTDATED)

    def check_source(self, source: StageWork[Any], called: str) -> None:
        """Delete the file of scores if the scored output is not complete, and all sums if it is not even begun."""
        if not source.is_complete:
            self._delete_files()
        if not source.is_begun and self.folder.path.is_dir():
            self.folder.clear()

    def clear(self) -> None:
        self._delete_files()
        self.folder.clear()

    def _delete_files(self) -> None:
        for file in (self.to, self.table):
            if file is not None:
                delete_file(file)

    def witnesses(self) -> Sequence[Path]:
        return [*self.records.witnesses, *([self.to] if isinstance(self.to, Path) else [])]

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        """Return slices of both volumes; `schedule` has what is done and what is missing."""
        if self.slices is None:
            return []
        items: Iterable[Item] = [Sentence("Slices are compared once all blocks are scored.")]
        if schedule.is_complete or self.is_complete:
            items = self.slices()
        return [Draft("Comparison", lambda: list(items), "Comparison")]

    def page(self, *, with_pictures: bool = True) -> Page:
        grids, pictures_of = {self.subject.stage: self.subject.blocks}, self.voxel_pictures if with_pictures else None
        return self.records.page(grids, self.parts_of, pictures_of, is_settled=True)

    def check(self) -> None:
        if self.check_volumes is not None:
            self.check_volumes()

    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        self.was_begun = self.is_begun
        with self.records.session(name, presence, self.listener.on_progress, self.options.tolerated) as session:
            return (yield from self._session_steps(session))

    def _session_steps(self, session: WorkSession) -> Steps[R]:
        if self.is_complete:
            return self.close(was_complete=True)
        self.prepare()
        pool: WorkerPool = yield POOL
        began, schedule = time.perf_counter(), self.records.resumed()
        self.listener.on_plan(self.subject, self.folder)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            return pool.submit("reduce", self.sent, list(units), session.name, str(self.folder.path))

        phase = yield from session.finish(schedule, submit)
        return self.close(
            missing=schedule.missing(phase.reasons), totals=session.totals,
            seconds=time.perf_counter() - began, first_task=session.first_task,
        )  # fmt: skip


def evaluation_work(
    evaluation: Evaluation, folder: RunFolder, options: RunOptions = PLAIN, listener: Listener = SILENT, *,
    to: Location | None = None,
) -> BlockWork[EvaluationResult]:  # fmt: skip
    """Return the work of `evaluation`; its scores are written to the file `to`, if there is one."""
    results = partial(read_results, folder.journal, RESULTS, BlockSums)
    evaluation = evaluation.with_nodes(folder.path / NODES)

    def close(**facts: Any) -> EvaluationResult:  # Any: of a `WorkReport`
        result = EvaluationResult(evaluation, folder.path, **facts)
        # of an evaluation that was complete, the scores may stand in their file alone
        if result.is_complete and not (result.was_complete and to is not None):
            result.by_candidate = evaluation.scores(results)
            if to is not None:
                write_json(to, evaluation.describe_scores(result.by_candidate))
        return result

    def parts_of(taken: Taken, is_complete: bool) -> Parts:
        tree = read_json(to) if to is not None else None
        if tree is None and is_complete:
            tree = evaluation.describe_scores(evaluation.scores(results))
        return evaluation_parts(evaluation.describe_work(), tree)

    return BlockWork(
        evaluation, folder, options, listener, name=str(to or evaluation.output), to=to,
        sent=replace(evaluation, notes=()), close=close, parts_of=parts_of, check=evaluation.check_labels,
        slices=partial(evaluation_items, evaluation), prepare=evaluation.store_nodes,
    )  # fmt: skip


def comparison_work(
    comparison: ComparisonPlan, folder: RunFolder, options: RunOptions = PLAIN, listener: Listener = SILENT, *,
    limits: Sequence[Limit] = (), to: Location | None = None,
) -> BlockWork[ComparisonResult]:  # fmt: skip
    """Return the work of `comparison`, which is written to the file `to`, if there is one.

    A limit of what both do not have is refused.
    """
    name, results = f"{comparison.a} and {comparison.b}", partial(read_results, folder.journal, RESULTS, BlockSums)
    for limit in limits:
        comparison.check_limit(limit)

    def close(**facts: Any) -> ComparisonResult:  # Any: of a `WorkReport`
        differences = comparison.differences(results)
        result = ComparisonResult(comparison, folder.path, **facts, differences=differences, limits=tuple(limits))
        if to is not None and result.is_complete and not result.was_complete:
            write_json(to, result.to_json())
        return result

    def parts_of(taken: Taken, is_complete: bool) -> Parts:
        facts = {key: str(value) for key, value in comparison.describe_work().items() if value is not None}
        items = [Sentence(line) for line in summary(comparison, comparison.differences(results), len(taken.missing))]
        return Parts(f"Comparison of {name}", "The comparison of two outputs.", facts, items)

    sent = replace(comparison, made_a=(), made_b=(), notes=())  # how both were made may be long
    return BlockWork(
        comparison, folder, options, listener, name=str(to or name), to=to, sent=sent, close=close,
        parts_of=parts_of, check=None if to is None else comparison.check_labels,
    )  # fmt: skip


def measurement_work(
    measurement: Measurement, folder: RunFolder, options: RunOptions, listener: Listener, *, to: Location
) -> BlockWork[MeasurementResult]:  # fmt: skip
    """Return the work of `measurement`, which writes its table to the file `to` and a description beside it."""
    table, to = to, to.parent / f"{to.stem}.json"

    def close(**facts: Any) -> MeasurementResult:  # Any: of a `WorkReport`
        result = MeasurementResult(measurement, folder.path, **facts)
        if result.is_complete:
            if not result.was_complete:
                measurement.store(partial(read_results, folder.journal, RESULTS, BlockSums), table, to)
            result.described = read_json(to) or {}
        return result

    def parts_of(taken: Taken, is_complete: bool) -> Parts:
        facts = {key: str(value) for key, value in measurement.describe().items() if value is not None}
        return Parts(table.name, "A table of measurements.", facts, [table_item(read_json(to))])

    return BlockWork(
        measurement, folder, options, listener, name=str(table), to=to, table=table,
        sent=replace(measurement, notes=()), close=close, parts_of=parts_of,
    )  # fmt: skip


def finish(work: BlockWork[R], start: Start, on_end: Callable[[R], object] = lambda result: None) -> R:
    """Run `work` to its end and return the result; its folder is deleted once every block is done.

    `on_end` is called with the result before that: what it raises leaves the folder there.

    Raises:
        PlanError: labels look like an image.
        RunStopped: too many blocks cannot be looked at.
    """
    result = work.run(start)
    on_end(result)
    if result.is_complete:
        work.folder.remove(work.subject.mark, work.subject.describe_work())
    return result


# ---- forecast


def calibrate_evaluation(
    subject: Subject, missing: Collection[str], workers: WorkerPool, folder: Path
) -> Steps[StageTimes]:
    """Return the forecast of an evaluation or a comparison, from one block that all `workers` try at the same time.

    Zeros in `folder`, which is deleted, stand in for volumes whose paths are `missing`; for labels, the other ones.

    Raises:
        RunStopped: the block cannot be scored.
    """
    volumes, num_workers = {"a": subject.a, "b": subject.b}, max(1, workers.slots["cpu"])
    if isinstance(subject, Evaluation) and subject.given is not None:
        volumes["given"] = subject.given
    absent = {name: volume for name, volume in volumes.items() if volume.path in missing}
    is_guess = bool(absent)
    try:
        others = [volumes[name] for name in "ab" if name not in absent and subject.other_stands_in]
        stand_ins: dict[str, Any] = {  # Any: fields of the subject
            name: others[0] if others else zeros_like(volume, folder / name) for name, volume in absent.items()
        }
        trial = replace(subject, **stand_ins)
        if others and "b" in absent:  # which A stands in for has another shape, perhaps
            trial = replace(trial, box=subject.box.relative_to(subject.a_start), a_start=(0, 0, 0))
        middle = tuple(max(0, n // b - 1) // 2 for n, b in zip(trial.box.shape, trial.block, strict=True))
        block = trial.blocks.number(middle)  # a whole one if any
        num = min(num_workers, MOST_WORKERS)
        records = yield from each("trial", "reduce", lambda number: (trial, [block]), num)
    finally:
        delete(folder)
    seconds, num_voxels = fmean(record.usage.seconds for record in records), trial.blocks.box(block).num_voxels
    whole = seconds / num_voxels * subject.box.num_voxels
    stage = StageTime(subject.stage, len(subject.blocks), whole)
    return StageTimes((stage,), 0.0, num * num_voxels, is_guess, num_workers)
