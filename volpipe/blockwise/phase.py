"""A phase of work: its tasks under way, and what follows from what comes back: marked, tried again, or set aside.

Not here: workers (loop), or how a task reaches one: `submit` is any function (stage name, units) -> Future of a Record.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from volpipe.blockwise.failures import failure_kind, last_line, message_of
from volpipe.blockwise.journal import Attempt, Journal, Record
from volpipe.blockwise.notes import TaskNote, dismiss, read_tasks
from volpipe.blockwise.pace import Pace, Prospect, Reading, credit
from volpipe.blockwise.pool import Submit
from volpipe.blockwise.stage import LARGEST_BUNDLE, Schedule, Stage, bundle_size
from volpipe.blockwise.usage import Totals, Usage
from volpipe.errors import ManagerLost, RunStopped, WorkerLost

log = logging.getLogger(__name__)

R = TypeVar("R")

RETRIES = 2  # what a unit's failures may cost together; one that costs more is the last
FAILURE_COST = 1.0
HOPELESS_COST = RETRIES + 1.0
# A node dies of itself, a worker perhaps of its task.
LOSS_COSTS: dict[type | None, float] = {ManagerLost: 0.5, WorkerLost: 1.5}
FAILURES_TO_STOP = 3  # of a stage of which nothing is done
TOLERATED_SHARE = 0.1  # of the units of a stage that were begun; more failures stop the run
LEAST_FAILURES = 10  # fewer never do, whatever their share
LOOK_SECONDS = 0.5  # between two looks at the notes of workers
LOOK_SHARE = 20  # as many times what a look takes, at least: a thousand notes may lie on a slow file system
# Seconds of a unit from which on a worker that is alone takes whole tasks from the first to the end: nobody waits for
# it, and a GPU computes nothing for half a second between two (H100, 2026-11-27).
LONG_UNIT = 0.5


@dataclass
class Progress:
    """How far a run is; handed to whoever shows it.

    Attributes:
        first_task: when the first task began, seconds since 1970; 0 before one is back.
        parts: units of tasks under way that are done, parts of one included, by stage; as their workers say.
        units_running: units of the tasks under way, by stage.
        retries: failures of a unit after which it was tried again, by stage.
        num_windows, num_voxels: that the net is given in all, and that it makes of the output; 0 where nobody counts.
        seconds_left: None while that is not known.
        words: what is told in place of the tasks under way, such as the loss of a training.
    """

    stages: Sequence[Stage]
    started: float
    running: Counter[str] = field(default_factory=Counter)
    units_running: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    totals: dict[str, Totals] = field(default_factory=dict)
    first_task: float = 0.0
    scratch_bytes: int = 0
    most_scratch_bytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    num_windows: int = 0
    num_voxels: int = 0
    seconds_left: float | None = None
    words: str = ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def part(self) -> float | None:
        """How much of the net's stage is done, 0 to 1, or of the one stage that there is; None where there is none."""
        main = [stage for stage in self.stages if stage.label == "gpu"] or self.stages
        if len(main) != 1 or not main[0].num_units:
            return None
        return min(1.0, (main[0].num_done + self.parts.get(main[0].name, 0.0)) / main[0].num_units)


Show = Callable[[Progress], None]


@dataclass(eq=False)
class Phase:
    """Stages whose tasks are under way at the same time.

    Args:
        submit: sends units of a stage to a worker.
        journal: where what was done is marked; None where nothing needs to be.
        show: called with progress at every change and every half second; what it raises ends the work.
        only: names of the stages of `schedule` that this is about; all where it is not given.
        tolerated: share of a stage's units, of those begun, that may fail before the work stops; 0 stops at the first.
        prospect: what is known before the first task, for the time left.
        on_record: called with the units of each task that comes back, and its record.

    Attributes:
        reasons: of the latest failure of each unit that failed, by stage and unit.
    """

    schedule: Schedule
    submit: Submit
    journal: Journal | None = None
    show: Show = lambda progress: None
    _: KW_ONLY
    only: Sequence[str] = ()
    tolerated: float = TOLERATED_SHARE
    prospect: Prospect = field(default_factory=Prospect)
    on_record: Callable[[Sequence[int], Record[Any]], None] = lambda units, record: None

    def __post_init__(self) -> None:
        schedule = self.schedule
        self.stages = [stage for stage in schedule.stages if not self.only or stage.name in self.only]
        self.progress = Progress(
            schedule.shown,
            time.perf_counter(),
            num_windows=self.prospect.num_windows,
            num_voxels=self.prospect.num_voxels,
        )
        self.progress.totals = {stage.name: Totals() for stage in (*schedule.shown, *schedule.stages)}
        self.reasons: dict[tuple[str, int], str] = {}
        self.num_in_flight = 0
        self._attempts: Counter[tuple[str, int]] = Counter()
        self._costs: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._broken: defaultdict[str, Counter[str]] = defaultdict(Counter)  # units set aside, by stage and kind
        self._pace: dict[str, float] = {}  # seconds per unit and stage, the latest tasks above all
        self._forecast = Pace(self.prospect.planned)
        self._look_at = 0.0  # by the monotonic clock
        self._sent: dict[tuple[str, int], float] = {}  # when tasks in flight were, by stage and first unit
        self._notes: dict[tuple[str, int], TaskNote] = {}  # of those

    def begin(self, slots: Mapping[str, int], reported: set[str]) -> None:
        """Prepare for a pool that runs as many tasks of each label at a time.

        Args:
            slots: by label.
            reported: kinds of failures and warnings of nodes that are in the log already; added to.
        """
        self._slots, self._reported = slots, reported

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way and nothing can start any more; to be asked after `take` gave nothing."""
        return not self.num_in_flight and not self.schedule.is_waiting

    def take(self, stage: Stage) -> list[int]:
        """Return units for the next task of `stage`, none where none may start."""
        return self.schedule.take(stage, self._bundle(stage))

    def send(self, stage: Stage, units: list[int]) -> Future[Record[Any]]:
        """Submit a task of `units`."""
        self.num_in_flight += 1
        self.progress.units_running[stage.name] += len(units)
        self.progress.running[stage.name] += 1
        self._sent[stage.name, units[0]] = time.time()
        return self.submit(stage.name, units)

    def come_back(self, stage: Stage, units: list[int], future: Future[Record[Any]]) -> None:
        """Take what a task gave.

        Raises:
            RunStopped: a stage fails everywhere, so that further tasks would only burn time.
        """
        self.num_in_flight -= 1
        self.progress.units_running[stage.name] -= len(units)
        self.progress.running[stage.name] -= 1
        sent = self._sent.pop((stage.name, units[0]))
        self._notes.pop((stage.name, units[0]), None)
        error = future.exception()
        if error is not None:
            failed = tuple((unit, f"{type(error).__name__}: {error}") for unit in units)
            record: Record[Any] = Record(stage.name, (), failed)
        else:
            record = _queued(future.result(), sent)
        self.progress.totals[stage.name].add(len(record.done), record.usage)
        self._learn(record)
        self._log_warnings(record)
        self.progress.first_task = self.progress.first_task or record.usage.started
        self.progress.scratch_bytes += record.usage.scratch_bytes
        self.progress.most_scratch_bytes = max(self.progress.most_scratch_bytes, self.progress.scratch_bytes)
        if self.journal is not None and stage.marked and record.done:
            self.journal.append(dataclasses.replace(record, failed=()))
        if self.journal is not None and stage.marked and record.failed:
            self.journal.append(self._attempt(record, sent))
        for name, unit in record.units:
            self.schedule.finish(self.schedule.by_name[name], unit)
        over = {*record.done, *(unit for unit, _ in record.failed)}
        for unit in reversed([unit for unit in units if unit not in over]):  # of a task that was dismissed
            stage.give_back(unit)
        self.on_record(units, record)
        if record.fatal:
            reason = record.failed[0][1]
            log.error("%s", reason)
            raise RunStopped(f"the work stops: {message_of(reason)}", reason)
        cost = LOSS_COSTS.get(type(error), FAILURE_COST)
        for unit, reason in record.failed:
            self._retry(stage, unit, reason, HOPELESS_COST if unit in record.permanent else cost)

    @property
    def _folder(self) -> Path | None:
        """The run's folder, in which the journal lies, and the notes of workers."""
        return None if self.journal is None else self.journal.path.parent

    def dismiss(self) -> None:
        """Let tasks under way start no other unit."""
        if self._folder is not None:
            dismiss(self._folder)

    def tell(self) -> None:
        """Tell of progress; how far tasks under way are is looked up now and then."""
        began = time.monotonic()
        if began >= self._look_at or not self.num_in_flight:
            self._look()
            self._look_at = began + max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - began))
        parts: dict[str, float] = {}
        for (stage, _), task in self._notes.items():
            parts[stage] = parts.get(stage, 0.0) + min(task.done, float(task.num_units))
        self.progress.parts = parts
        self.show(self.progress)

    def _look(self) -> None:
        """Follow tasks under way, and the time left that comes of it."""
        now, progress = time.time(), self.progress
        noted = {} if self._folder is None else read_tasks(self._folder)
        known = {key: (task, at) for key, (task, at) in noted.items() if self._sent.get(key, math.inf) <= at}
        self._notes = {key: task for key, (task, _) in known.items()}  # none of an earlier attempt
        begun = progress.first_task or min((at - task.seconds for task, at in known.values() if task.done), default=0.0)
        if begun:
            progress.seconds_left = self._forecast.seconds_left(now, begun, self._readings())

    def _readings(self) -> dict[str, Reading]:
        readings = {}
        for stage in self.schedule.shown:
            took = self.progress.totals[stage.name]
            pace = took.seconds / took.units if took.units else 0.0
            credits = [credit(task, pace) for (name, _), task in self._notes.items() if name == stage.name]
            done, seconds = sum(units for units, _ in credits), sum(spent for _, spent in credits)
            left = max(0.0, stage.num_left - done)
            decides = stage.label == "gpu" or len(self.schedule.shown) == 1
            readings[stage.name] = Reading(took.units + done, left, took.seconds + seconds, decides)
        return readings

    def _bundle(self, stage: Stage) -> int:
        """Return how many units make a task of BUNDLE_SECONDS; fewer at the end, so that no worker idles long."""
        planned = self.prospect.planned.get(stage.name, 0.0)
        pace, num_workers = self._pace.get(stage.name, planned), self._slots[stage.label]
        is_long = num_workers == 1 and pace >= LONG_UNIT
        # A unit that failed before goes alone, so that it takes no other with it.
        if (stage.name not in self._pace and not is_long) or (
            stage.ready and self._attempts[stage.name, stage.ready[0]]
        ):
            return 1
        size = min(stage.most, bundle_size(pace, stage.row, num_workers))
        if is_long:
            return size
        num_left = stage.num_left - self.progress.units_running[stage.name]
        share = num_left / (2 * num_workers) if stage.marked else LARGEST_BUNDLE
        return max(1, min(size, math.ceil(share)))

    def _attempt(self, record: Record[Any], sent: float) -> Record[Attempt]:
        """Return the journal's line of a task, sent then, in which units failed; see `Attempt`."""
        unit, reason = record.failed[0]
        number = self._attempts[record.stage, unit] + 1
        usage = record.usage
        if record.done:
            usage = Usage(started=usage.started, host=usage.host, pid=usage.pid)
        elif not usage.started:  # its worker was lost
            usage = Usage(started=sent, seconds=time.time() - sent)
        units = tuple(unit for unit, _ in record.failed)
        return Record(record.stage, (), result=Attempt(units, last_line(reason), number), usage=usage)

    def _learn(self, record: Record[object]) -> None:
        """Follow how long units take, which changes: the first ones load a net, empty ones are quick."""
        if record.done:
            latest = record.usage.seconds / len(record.done)
            self._pace[record.stage] = (self._pace.get(record.stage, latest) + latest) / 2

    def _log_warnings(self, record: Record[object]) -> None:
        """Log a worker's warnings, once for all workers of its node."""
        for word in (f"{record.usage.host}: {word}" for word in record.warnings):
            if word not in self._reported:
                log.warning("%s", word)
            self._reported.add(word)

    def _retry(self, stage: Stage, unit: int, reason: str, cost: float) -> None:
        key, kind = (stage.name, unit), failure_kind(reason)
        if stage.forgives is not None and stage.forgives(unit):
            self._attempts[key], self._costs[key] = 0, 0.0
        self._attempts[key] += 1
        self._costs[key] += cost
        self.reasons[key] = reason
        text = last_line(reason) if kind in self._reported else reason
        self._reported.add(kind)
        extra = {"stage": stage.name}
        log.warning("%s %d failed (attempt %d): %s", stage.name, unit, self._attempts[key], text, extra=extra)
        if self._costs[key] <= RETRIES:
            self.progress.retries[stage.name] += 1
            stage.give_back(unit)
            return
        stage.failed.add(unit)
        if self.journal is not None and stage.marked:
            self.journal.append(Record(stage.name, (), ((unit, last_line(reason)),)))
        only_managers = self._costs[key] == self._attempts[key] * LOSS_COSTS[ManagerLost]
        if not only_managers:
            self._broken[stage.name][kind] += 1
        self._judge(stage, reason, is_damage=cost == HOPELESS_COST)

    def _judge(self, stage: Stage, reason: str, *, is_damage: bool) -> None:
        """Stop where going on would only burn time, a unit of `stage` having failed for good for that `reason`.

        Damaged input is no sign of a broken net or site, so that it counts in the share alone.

        Raises:
            RunStopped: with the reason once, and the worker's traceback.
        """
        broken = self._broken[stage.name]
        num_broken, num_begun = broken.total(), stage.num_done + broken.total()
        detail, stops = reason if "\n" in reason else "", f"so the work stops: {message_of(reason)}"
        if self.tolerated == 0:
            raise RunStopped(f"{stage.called(min(stage.failed))} failed, {stops}", detail)
        num_alike = 0 if is_damage else broken[failure_kind(reason)]
        if stage.num_done == 0 and num_alike >= min(FAILURES_TO_STOP, stage.num_units):
            parts = f" for {num_broken} parts and worked for none" if num_broken > 1 else ""
            raise RunStopped(f"{stage.called()} failed{parts}, {stops}", detail)
        if num_broken >= LEAST_FAILURES and num_broken > self.tolerated * num_begun:
            raise RunStopped(
                f"{stage.called()} failed for good for {num_broken} of the {num_begun} parts that were tried, more "
                f"than {self.tolerated:.0%}, so the work stops (--tolerate sets another share); "
                f"the last reason: {message_of(reason)}",
                detail,
            )


def _queued(record: Record[R], sent: float) -> Record[R]:
    """Return `record` with the time that its task, sent then, waited."""
    usage = record.usage
    waited = max(0.0, usage.started - sent) if usage.started else 0.0
    return dataclasses.replace(record, usage=dataclasses.replace(usage, queued_seconds=waited))
