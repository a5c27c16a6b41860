"""A flow, run: its stages one after the other on one site, which is started once; interrupted, it goes on where it was.

Not here: how one stage runs (driver, evaluation.evaluate), or what all of them take (cost). Each stage keeps a run of
its own beside its output, and is resumed by that; the flow's folder holds the names of the stages, a log and the lock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.blockwise.journal import Totals, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import TOLERATED_SHARE
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.errors import RunError
from volpipe.evaluation.evaluate import Evaluation, Scores, describe_evaluation, describe_scores, evaluate
from volpipe.inference.plan import Plan
from volpipe.recipes.workflow import VOLUME, named
from volpipe.runs.presence import present
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import PLAN_FILE
from volpipe.segmentation import driver
from volpipe.segmentation.driver import OnProgress, SegmentationResult, is_segmented, segment
from volpipe.segmentation.plan import LABEL_FILE, SegmentPlan
from volpipe.segmentation.tasks import RESULTS
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import SILENT, Listener, Report, delete_output, execute, inspect_run
from volpipe.workflow.plan import FlowPlan, StagePlan

FLOW_FILE = "flow.json"


@dataclass(frozen=True)
class FlowOptions:
    """What holds for every stage that is a run; as the arguments of `execute`."""

    keep_tensors: bool = False
    site: str = ""
    tolerated: float = TOLERATED_SHARE
    same_input: bool = False


@dataclass(frozen=True)
class StageReport:
    """How one stage ended.

    Attributes:
        is_whole: whether later stages may read what it made.
        was_complete: whether there was nothing left to do.
        seconds: that it took in this session.
        run: how its run ended, of one that ran.
        labels: how a labelling ended.
        scores: of an evaluation that was done now.
        totals: what tasks took in this session, by what they did; of an evaluation nobody knows.
        is_new: whether all of it was done in this session.
    """

    stage: StagePlan
    is_whole: bool
    was_complete: bool
    seconds: float
    run: Report | None = None
    labels: SegmentationResult | None = None
    scores: Scores | None = None
    totals: Mapping[str, Totals] = field(default_factory=dict)
    is_new: bool = True

    @property
    def read_bytes(self) -> int:
        return sum(each.read_bytes for each in self.totals.values())

    @property
    def written_bytes(self) -> int:
        return sum(each.written_bytes for each in self.totals.values())


@dataclass
class FlowReport:
    """How a flow ended: its stages in order, those that were not begun left out."""

    plan: FlowPlan
    stages: list[StageReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.stages) == len(self.plan.stages) and all(stage.is_whole for stage in self.stages)

    @property
    def was_complete(self) -> bool:
        return self.is_complete and all(stage.was_complete for stage in self.stages)


@dataclass(frozen=True)
class FlowListener:
    """Whom the driver tells: of the workers when they are started, of the stage that begins, and of how it ended.

    `of_run` listens to a run, `of_labels` to a labelling. What they raise ends the flow.
    """

    on_stage: Callable[[StagePlan], None] = lambda stage: None
    on_end: Callable[[StageReport], None] = lambda report: None
    on_workers: Callable[[WorkerPool], None] = lambda workers: None
    of_run: Callable[[Plan], AbstractContextManager[Listener]] = lambda plan: nullcontext(SILENT)
    of_labels: Callable[[], AbstractContextManager[OnProgress]] = lambda: nullcontext(lambda name, done, total: None)


QUIET, PLAIN = FlowListener(), FlowOptions()


class Entry(BaseModel):
    """A stage, as the flow's folder remembers it."""

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    out: str
    folder: str

    @property
    def run(self) -> RunFolder:
        """The folder of the run that writes the output."""
        return RunFolder(Path(self.folder))


def execute_flow(
    plan: FlowPlan,
    start: Start,
    *,
    fresh: bool = False,
    options: FlowOptions = PLAIN,
    listener: FlowListener = QUIET,
) -> FlowReport:
    """Run the stages of `plan` that are not complete, in order, and return how that ended.

    A stage with parts missing is the last that is begun.

    Args:
        plan: as `plan_flow` made it.
        start: starts the workers once, and stops them on every way out; it is given a folder for their files.
        fresh: delete the outputs of all stages and the runs that made them, and start over.
        options: for every run.
        listener: whom to tell.

    Raises:
        RunError: another run's folder or output is in the way, or too much of a stage fails; the message names it.
        SiteError: the site cannot be used.
        VolumeError: a bucket may not be written to, or does not answer.
    """
    folder, started = plan.folder, time.monotonic()
    report = FlowReport(plan)
    with folder.locked() as session:
        _check_out(plan)
        if fresh:
            _clear(plan)
        _claim(plan)
        with logging_to(folder.log), present(folder.path, session), _kept(plan, start, listener) as kept:
            for stage in plan.stages:
                with named(stage.name):
                    is_new = isinstance(stage.work, Evaluation) or not _is_begun(stage)
                    done = replace(_finish(stage, kept, options, listener), is_new=is_new)
                report.stages.append(done)
                listener.on_end(done)
                if not done.is_whole:
                    break
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def _kept(plan: FlowPlan, start: Start, listener: FlowListener) -> Iterator[Start]:
    """Give what stands for `start` in each stage: the same workers; they are started where something is left to do."""
    if all(map(is_complete, plan.stages)):
        yield start
        return
    with start(plan.folder.parsl) as workers:
        listener.on_workers(workers)
        yield lambda folder: nullcontext(workers)


def _check_out(plan: FlowPlan) -> None:
    """Refuse a place that may not be written, or holds what no flow made, before anything is deleted or begun."""
    if plan.folder.plan_file.is_file():
        raise RunError(f"{plan.folder.path} holds the run of one net; choose another --out for the stages")
    if isinstance(plan.out, Remote):
        try_writing(plan.out)
    elif plan.out.is_file():
        raise RunError(f"{plan.out} is a file; choose another --out")
    for stage in plan.stages:
        with named(stage.name):
            if not isinstance(stage.work, Evaluation) and paths.exists(stage.out) and not _is_begun(stage):
                raise RunError(f"{stage.out} exists and no run in {stage.folder.path} made it; choose another --out")


def _clear(plan: FlowPlan) -> None:
    """Delete what all stages made, the last first: nothing is ever there whose input is gone."""
    for stage in reversed(plan.stages):
        with named(stage.name):
            if isinstance(stage.work, Evaluation):
                paths.delete_file(stage.out)
            else:
                delete_output(stage.out, stage.folder, _mark(stage.work))


def _mark(work: Plan | SegmentPlan) -> str:
    """Return the file by which the folder of a stage's run is known."""
    return PLAN_FILE if isinstance(work, Plan) else LABEL_FILE


def _claim(plan: FlowPlan) -> None:
    """Make sure that what is there is of this flow, and that no stage is older than what it read.

    Scores of what is to be made again are deleted.
    """
    for stage in plan.stages:
        with named(stage.name):
            _check_same(stage)
            _check_later(plan, stage)
    for stage in plan.stages:
        if isinstance(stage.out, Remote) and not isinstance(stage.work, Evaluation):
            stage.folder.path.mkdir(mode=0o750, exist_ok=True)  # so that the run finds it, not that of another
    if isinstance(plan.out, Path):
        plan.out.mkdir(parents=True, exist_ok=True)
    entries = [
        Entry(name=s.name, kind=s.kind, out=str(s.out), folder=str(s.folder.path)).model_dump() for s in plan.stages
    ]
    write_json(plan.folder.path / FLOW_FILE, {"recipe": plan.source, "volume": plan.volume, "stages": entries})


def _check_same(stage: StagePlan) -> None:
    """Refuse to go on with another recipe than that of what is there; an evaluation is done again."""
    try:
        if isinstance(stage.work, Plan):
            stage.folder.check_same(stage.work)
        elif isinstance(stage.work, SegmentPlan):
            driver.check_same(stage.folder, stage.work)
    except RunError as error:
        raise RunError(
            f"{error}, all stages; to keep those before it, delete {stage.out} and {stage.folder.path} yourself, and "
            "the same of stages that need it"
        ) from error


def _check_later(plan: FlowPlan, stage: StagePlan) -> None:
    """Refuse to make again what a later stage has read: it would be of another input."""
    begun = [later for later in plan.after(stage.name) if _is_begun(later)]
    if not begun or is_complete(stage):
        return
    for later in begun:
        if not isinstance(later.work, Evaluation):
            raise RunError(
                f"it is not complete, but stage {later.name}, which needs it, was begun: {stage.out} or its run was "
                f"taken away; put it back, delete {later.out} and {later.folder.path} as well, or use --fresh to "
                "start all stages over"
            )
        paths.delete_file(later.out)


def _is_begun(stage: StagePlan) -> bool:
    if isinstance(stage.work, Evaluation):
        return paths.exists(stage.out)
    return (stage.folder.path / _mark(stage.work)).is_file()


def is_complete(stage: StagePlan) -> bool:
    """Return whether nothing is left to do of `stage`, as far as its journal says."""
    if isinstance(stage.work, Evaluation):
        scores = read_json(stage.out)
        expected: dict[str, object] = json.loads(json.dumps(describe_evaluation(stage.work)))
        return scores is not None and {key: scores.get(key) for key in expected} == expected
    if isinstance(stage.work, SegmentPlan):
        return is_segmented(stage.work, stage.folder)
    begun = stage.folder.load_plan()
    return begun is not None and begun.identity == stage.work.identity and inspect_run(stage.folder.path).is_complete


def _finish(stage: StagePlan, start: Start, options: FlowOptions, listener: FlowListener) -> StageReport:
    """Do what is left of `stage`."""
    began = time.monotonic()
    if stage.reads != VOLUME:
        _check_given(stage)
    listener.on_stage(stage)
    if isinstance(stage.work, Evaluation):
        return _score(stage, stage.work, start, began)
    if isinstance(stage.work, SegmentPlan):
        known = sum(1 for _ in read_records(stage.folder.journal, RESULTS))
        with listener.of_labels() as on_progress:
            result = segment(
                stage.work, start, on_progress=on_progress, site=options.site, same_input=options.same_input,
                is_outside=stage.reads == VOLUME,
            )  # fmt: skip
        took = _totals(stage.folder, known)
        return StageReport(stage, True, result.was_complete, time.monotonic() - began, labels=result, totals=took)
    with listener.of_run(stage.work) as of_run:
        report = execute(
            stage.work, start, keep_tensors=options.keep_tensors, listener=of_run, site=options.site,
            tolerated=options.tolerated, same_input=options.same_input, is_outside=stage.reads == VOLUME,
        )  # fmt: skip
    is_whole = report.was_complete or not report.missing
    return StageReport(stage, is_whole, report.was_complete, time.monotonic() - began, report, totals=report.totals)


def _totals(folder: RunFolder, known: int) -> dict[str, Totals]:
    """Return the totals of the tasks in the journal in `folder`, by stage, without its first `known` records."""
    totals: dict[str, Totals] = {}
    for record in islice(read_records(folder.journal, RESULTS), known, None):
        if record.done:
            totals.setdefault(record.stage, Totals()).add(record)
    return totals


def _check_given(stage: StagePlan) -> None:
    """Refuse an input that is not the planned one."""
    volume = open_volume(stage.given.path, stage.given.key, view=stage.given.view)
    if volume != stage.given:
        raise RunError(
            f"its input {volume} is {volume.dtype} {volume.shape} and was to be {stage.given.dtype} "
            f"{stage.given.shape}; something else wrote it: use --fresh to start over"
        )


def _score(stage: StagePlan, evaluation: Evaluation, start: Start, began: float) -> StageReport:
    if is_complete(stage):
        return StageReport(stage, is_whole=True, was_complete=True, seconds=0.0)
    scores = evaluate(evaluation, start, stage.folder.path)
    write_json(stage.out, describe_scores(evaluation, scores))
    return StageReport(stage, is_whole=True, was_complete=False, seconds=time.monotonic() - began, scores=scores)


def find_entries(output: str | Path) -> list[Entry] | None:
    """Return the stages of the flow whose outputs lie in `output`, or whose folder it is; None where there is none.

    Raises:
        RunError: what is stored there is damaged.
    """
    place = paths.locate(output) if "://" in str(output) else Path(output).absolute()
    is_folder = isinstance(place, Path) and (place / FLOW_FILE).is_file()
    path = place / FLOW_FILE if is_folder else RunFolder.for_stages(place).path / FLOW_FILE
    tree = read_json(path)
    if tree is None:
        return None
    try:
        return [Entry.model_validate(_with_folder(entry)) for entry in tree["stages"]]
    except (ValidationError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be understood (written by another version?)") from error


def _with_folder(entry: dict[str, str]) -> dict[str, str]:
    """Return `entry` with the folder of its run, which earlier versions did not say: all outputs lay on a disk."""
    return {"folder": str(RunFolder.for_stage(paths.locate(entry["out"])).path)} | entry


def is_done(entry: Entry) -> bool:
    """Return whether the stage `entry` is complete."""
    if entry.kind == "evaluate":
        return paths.is_file(paths.locate(entry.out))
    if entry.kind == "label":
        plan = SegmentPlan.load(entry.run.path)
        return plan is not None and is_segmented(plan, entry.run)
    return entry.run.plan_file.is_file() and inspect_run(entry.run.path).is_complete
