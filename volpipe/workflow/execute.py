"""A flow, run: its stages side by side on one site, each as far as what it reads is written; resumed stage by stage.

Not here: how one stage runs (driver, segmentation, evaluation), or what all of them take (cost). Each stage keeps a run
of its own beside its output, and is resumed by that; the flow's folder holds the names of the stages, a log and the
lock.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Feed
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import POOL, Ended, Steps, Together, Until, Work
from volpipe.errors import NOTICE, RunError
from volpipe.recipes.workflow import VOLUME, named
from volpipe.runs.held_work import HeldWork
from volpipe.runs.options import PLAIN, RunOptions, written
from volpipe.runs.presence import Presence
from volpipe.runs.report import Ending, WorkReport
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.runs.standing import Act, Asked, WorkState
from volpipe.stages.entry import Entry
from volpipe.stages.kind import StagePlan
from volpipe.tables import html_table
from volpipe.units import duration, size
from volpipe.volumes.storage.metadata import write_json
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.storage.paths import shown
from volpipe.volumes.volume import open_volume
from volpipe.workflow.entries import FLOW_FILE, find_entries
from volpipe.workflow.pages import flow_page
from volpipe.workflow.plan import FlowPlan, settled_flow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageReport:
    """How one stage ended.

    Attributes:
        seconds: that it took in this session.
        is_new: whether all of it was done in this session.
    """

    stage: StagePlan
    report: WorkReport
    seconds: float
    is_new: bool = True

    @property
    def totals(self) -> Totals:
        """What the tasks of this session took."""
        totals = Totals()
        for each in self.report.totals.values():
            totals.join(each)
        return totals


@dataclass(repr=False)
class FlowReport:
    """How a flow ended: its stages in order, those that were not begun left out."""

    plan: FlowPlan
    stages: list[StageReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all stages are complete."""
        return len(self.stages) == len(self.plan.stages) and all(stage.report.is_complete for stage in self.stages)

    @property
    def was_complete(self) -> bool:
        return self.is_complete and all(stage.report.was_complete for stage in self.stages)

    @property
    def open_reason(self) -> str:
        """Why it is not complete; "" if it is."""
        if self.is_complete:
            return ""
        first = next((each for each in self.stages if not each.report.is_complete), None)
        return "a stage was not begun" if first is None else f"stage {first.stage.name}: {first.report.open_reason}"

    @property
    def reports(self) -> list[WorkReport]:
        """How its stages ended."""
        return [each.report for each in self.stages]

    @property
    def ending(self) -> Ending:
        """How it ended."""
        missing = sum(len(each.report.missing) for each in self.stages)
        return Ending.of(missing, self.open_reason, is_complete=self.is_complete)

    def __repr__(self) -> str:
        done = sum(each.report.is_complete for each in self.stages)
        return f"<FlowReport: {done} of {len(self.plan.stages)} stages complete, {duration(self.seconds)}>"

    def _repr_html_(self) -> str:
        rows = (
            (each.stage.name, each.stage.kind, duration(each.seconds), size(each.totals.read_bytes),
             size(each.totals.written_bytes), len(each.report.missing), shown(each.stage.out))
            for each in self.stages
        )  # fmt: skip
        caption = f"{len(self.stages)} of {len(self.plan.stages)} stages, {duration(self.seconds)}"
        return html_table(("stage", "kind", "time", "read", "written", "missing", "output"), rows, caption=caption)


@dataclass(frozen=True)
class FlowListener:
    """Callbacks: the workers when they are started, a stage that begins, and how it ended.

    `of_stage` returns the listener of a stage's own work. What they raise ends the stage.
    """

    on_stage: Callable[[StagePlan], None] = lambda stage: None
    on_end: Callable[[StageReport], None] = lambda report: None
    on_workers: Callable[[WorkerPool], None] = lambda workers: None
    of_stage: Callable[[StagePlan], Listener] = lambda stage: SILENT


QUIET = FlowListener()


def heard_by(listener: FlowListener | Listener) -> FlowListener:
    """Return the listener of stages that tells `listener` of each, where that is one of a single work."""
    return FlowListener(of_stage=lambda stage: listener) if isinstance(listener, Listener) else listener


def flow_work(plan: FlowPlan, options: RunOptions = PLAIN, listener: FlowListener = QUIET) -> HeldWork[FlowReport]:
    """Return the work of the stages of `plan` that are not complete, side by side.

    Of the options, which are for every stage, `fresh` deletes the outputs of all and the runs that made them.
    """
    out, plan = str(plan.out), grown_flow(plan, options) if options.update else plan
    return HeldWork(
        "flow", plan.folder, claim=partial(_claim_flow, plan, options),
        held_steps=partial(_flow_steps, plan, options, listener), page=partial(flow_page, plan.folder, out), name=out,
    )  # fmt: skip


def _flow_steps(
    plan: FlowPlan, options: RunOptions, listener: FlowListener, name: str, presence: Presence
) -> Steps[FlowReport]:
    """Do what is not done yet, and return how that ended; see `HeldWork`."""
    began, ended = time.monotonic(), dict[str, Ended[StageReport | None]]()

    def on_end(of_stage: Ended[Any]) -> None:  # Any: how a stage ended, None where it was not begun
        ended[of_stage.work.name] = of_stage
        if of_stage.result is not None:
            listener.on_end(of_stage.result)

    if not all(stage.is_complete for stage in plan.stages):
        listener.on_workers((yield POOL))
    course = _Course(plan)
    works = _stage_works(course, options, listener)
    yield Together(works, on_end, at_once=len(works), latest_first=True)
    errors = [ended[stage.name].error for stage in plan.stages]
    for error in filter(None, errors):
        raise error
    results = [ended[stage.name].result for stage in plan.stages]
    return FlowReport(course.plan, [each for each in results if each is not None], time.monotonic() - began)


@dataclass
class _Course:
    """A flow under way.

    Attributes:
        plan: as it is now.
        closed: stages that ended.
        is_settled: whether it is planned with the nets that are trained by now, as far as it is not begun.
    """

    plan: FlowPlan
    closed: set[str] = field(default_factory=set)
    is_settled: bool = False

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.plan.stages if stage.name == name)

    def settled(self, name: str) -> StagePlan:
        """Return the stage of that name, planned with the nets that are trained by now."""
        if not self.is_settled:
            self.plan, self.is_settled = settled_flow(self.plan), True
        return self.stage(name)


def _stage_works(course: _Course, options: RunOptions, listener: FlowListener) -> list[Work[StageReport | None]]:
    """Return the work of each stage, which feeds those that read its output."""
    stages = course.plan.stages
    feeds = {stage.name: Feed(stage.level, stage.array) for stage in stages if stage.reads != VOLUME}
    works = []
    for stage in stages:
        readers = [feeds[reader.name] for reader in stages if reader.reads == stage.name]
        steps = partial(_stage_steps, stage, course, options, listener, feeds.get(stage.name), readers)
        works.append(Work(stage.name, steps, "flow_stage"))
    return works


def _stage_steps(
    stage: StagePlan, course: _Course, options: RunOptions, listener: FlowListener, source: Feed | None,
    readers: list[Feed],
) -> Steps[StageReport | None]:  # fmt: skip
    """Do the work of a stage, begun when what it reads, which is the `source`, has begun to be written.

    What it needs beside that, and nets that it rests on, are complete by then. Return how it ended; None where what it
    needs was not begun, or is not complete.
    """
    nets = course.plan.nets_of(stage.name)
    try:
        if needed := nets.union(stage.beside):
            yield Until(lambda: course.closed.issuperset(needed))
            if not all(course.stage(name).is_complete for name in needed):
                return None
        stage = course.settled(stage.name) if nets else stage
        with named(stage.name):
            work = stage.work(dataclasses.replace(_of_stage(options, stage), fresh=False), listener.of_stage(stage))
            work.feed, work.readers = source, readers
            work.before_change = partial(_await_change, course, options, stage.name)
            if source is not None:
                needs_all, is_compared = work.needs_all, work.is_compared
                yield Until(lambda: source.is_closed or (source.is_open and not needs_all and not is_compared))
                if not source.is_open or (is_compared and not course.stage(stage.reads).is_complete):
                    return None
                _check_given(stage)
            listener.on_stage(stage)
            began = time.monotonic()
            report = yield from work.steps()
        course.is_settled &= not stage.makes_weights or report.was_complete
        return StageReport(stage, report, time.monotonic() - began, not work.was_begun)
    finally:
        course.closed.add(stage.name)
        for reader in readers:
            reader.is_closed = True


def _await_change(course: _Course, options: RunOptions, name: str) -> None:
    """Note in stages that rest on the stage `name` that what they read is about to change.

    What rests on weights that are trained anew is deleted.
    """
    anew: set[str] = set()
    for later in course.plan.after(name):
        work = later.work(options)
        if later.makes_weights:
            anew |= {each.name for each in course.plan.after(later.name)}
        with named(later.name):
            if work.is_begun:
                with later.folder.locked():
                    (work.clear if later.name in anew else work.await_change)()


def _claim_flow(plan: FlowPlan, options: RunOptions) -> None:
    """Make sure that what is there is of this flow, and that no stage is older than what it read."""
    _check_out(plan)
    if options.fresh:
        _clear(plan.stages, options)
    _check_measuring(plan, options)
    if options.update:
        _check_place(plan)
        _clear_outdated(plan, options)
    for stage in plan.stages:
        with named(stage.name):
            work = stage.work(_of_stage(options, stage))
            work.check_update()
            _check_standing(stage, work)
    for stage in plan.stages:  # scores that are not of what is there go now
        with named(stage.name):
            for later in plan.after(stage.name):
                later.work().check_source(stage.work(), later.name)
    for stage in plan.stages:
        if isinstance(stage.out, Remote) and stage.makes_volume:
            stage.folder.path.mkdir(mode=0o750, exist_ok=True)  # else `RunFolder.find` would give that of another
    if isinstance(plan.out, Path):
        plan.out.mkdir(parents=True, exist_ok=True)
    entries = [
        Entry(
            name=s.name, kind=s.kind, reads=f"{s.given.path} {s.given.key}".strip(), out=str(s.out),
            folder=str(s.folder.path), needs=tuple(dict.fromkeys((s.read_from, *s.beside))),
        ).model_dump()
        for s in plan.stages
    ]  # fmt: skip
    write_json(plan.folder.path / FLOW_FILE, {"recipe": plan.source, "volume": plan.volume, "stages": entries})


def _of_stage(options: RunOptions, stage: StagePlan) -> RunOptions:
    """Return those of `options`, which are for all stages, that are of use to `stage`."""
    measure_again = options.measure_again and stage.is_measured
    return dataclasses.replace(options, measure_again=measure_again, is_outside=stage.reads == VOLUME)


def _check_measuring(plan: FlowPlan, options: RunOptions) -> None:
    """Refuse to measure again what no stage measured."""
    if options.measure_again and not any(stage.is_measured for stage in plan.stages):
        raise RunError(f"{written('measure_again')}: no stage measures what it reads; leave it out")


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
            if foreign := stage.work().foreign():
                raise foreign


def _check_place(plan: FlowPlan) -> None:
    """Refuse to update what was made of another volume, or has been moved: all of it would be made anew."""
    before = {entry.name: entry for entry in find_entries(plan.folder.path) or ()}
    for stage in plan.stages:
        old, given = before.get(stage.name), stage.given.path
        if old is None:
            continue
        if old.out != str(stage.out) or (stage.reads == VOLUME and not f"{old.reads} ".startswith(f"{given} ")):
            raise RunError(
                f"stage {stage.name}: it was made of {old.reads} in {old.out}, and now would be of {given} "
                f"in {stage.out}; --update is for what changed in its place: choose another --out, or use --fresh"
            )


def _clear_outdated(plan: FlowPlan, options: RunOptions) -> None:
    """Delete what an update makes anew as a whole, and what rests on that."""
    anew = outdated(plan, options)
    for name in anew:
        log.warning("stage %s, and what rests on it, is made anew: its recipe or its input changed", name, extra=NOTICE)
    for stage in plan.stages:
        later = list(plan.after(stage.name))
        if stage.name in anew:
            _clear([stage, *later], options)
        elif stage.makes_weights and not stage.is_complete and any(each.work().is_begun for each in later):
            _clear(later, options)


def grown_flow(plan: FlowPlan, options: RunOptions) -> FlowPlan:
    """Return `plan` with the sizes of stages that were begun before the volume grew, as far as they were.

    Raises:
        RunError: the volume has shrunk, or an output cannot grow; the message names the stage.
    """
    stages: dict[str, StagePlan] = {}
    anew = {name for first in outdated(plan, options) for name in (first, *(each.name for each in plan.after(first)))}
    for stage in plan.stages:
        with named(stage.name):
            feed = stages.get(stage.reads)
            given = stage.given if feed is None else stage.view_of(feed)
            is_anew = stage.name in anew
            stages[stage.name] = dataclasses.replace(stage, given=given) if is_anew else stage.reading(given)
    return dataclasses.replace(plan, stages=tuple(stages.values()))


def outdated(plan: FlowPlan, options: RunOptions) -> list[str]:
    """Return the first of the stages that an update makes anew as a whole; others may rest on them."""
    anew, resting = list[str](), set[str]()
    for stage in plan.stages:
        if stage.name in resting:
            continue
        with named(stage.name):
            work = stage.work(_of_stage(options, stage))
            standing, asked = work.standing(), _asked_of(work)
            if standing.state in (WorkState.UNFOLLOWABLE, WorkState.DAMAGED):
                raise standing.refusal_of(Asked.RENEW)
            if standing.state is WorkState.OUTDATED and asked is Asked.RENEW:
                anew.append(stage.name)
                resting |= {each.name for each in plan.after(stage.name)}
    return anew


def _clear(stages: Sequence[StagePlan], options: RunOptions) -> None:
    """Delete what stages made, the last first: nothing is ever there whose input is gone."""
    for stage in reversed(stages):
        work = stage.work(options)
        if work.is_begun or stage.folder.path.is_dir():
            with named(stage.name), stage.folder.locked():
                work.clear()


def _asked_of(work: StageWork[Any]) -> Asked:
    """Return what is asked of a stage's work: an update of a flow makes anew what is outdated."""
    return Asked.RENEW if work.asked is Asked.UPDATE else work.asked


def _check_standing(stage: StagePlan, work: StageWork[Any]) -> None:
    """Refuse to go on with what was made otherwise; a stage tells itself, in its turn, of an output that is gone."""
    standing, asked = work.standing(), _asked_of(work)
    if standing.act(asked) is not Act.REFUSE or standing.state is WorkState.LOST:
        return
    if standing.state in (WorkState.UNFOLLOWABLE, WorkState.DAMAGED):
        raise standing.refusal_of(Asked.RENEW)
    keep = f"delete {stage.out} and {stage.folder.path} yourself, and the same of stages that need it"
    if standing.act(Asked.RENEW) is Act.CLEAR:
        keep = "give --update, which makes this one and those that need it anew"
    error = standing.refusal_of(asked)
    raise RunError(f"{error}, all stages; to keep those before it, {keep}") from error


def _check_given(stage: StagePlan) -> None:
    """Refuse an input that is not the planned one."""
    volume = open_volume(stage.given.path, stage.given.key, view=stage.given.view)
    if volume != stage.given:
        raise RunError(
            f"its input {volume} is {volume.dtype} {volume.shape} and was to be {stage.given.dtype} "
            f"{stage.given.shape}; something else wrote it: use --fresh to start over"
        )
