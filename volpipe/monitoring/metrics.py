"""Metrics: how far a work and all that belongs to it are and what they take, as Prometheus' client collects it.

Not here: how they get out (exposition). Their number does not grow with that of datasets or trainings: works that have
the same labels are added up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

import volpipe
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import Place, Works
from volpipe.monitoring.ending import State, Witness
from volpipe.training.driver import TrainingWork
from volpipe.training.logs import last_step
from volpipe.training.search.grid import SweepWork
from volpipe.training.search.optuna import TuneWork
from volpipe.workflow.batch import BatchWork
from volpipe.workflow.execute import StageWork
from volpipe.workflow.follow import FollowWork

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

STATES: tuple[State, ...] = (
    "running",
    "waiting",
    "complete",
    "incomplete",
    "stopped",
    "interrupted",
    "refused",
    "failed",
)
MOST_FLOW_STAGES = 64  # labels of stages of flows: a batch may have a recipe for each of its datasets
OTHER = "other"  # that of all beyond
OF_STAGE = ("output", "flow_stage", "stage")

# Of the tasks of a stage that came back: metric, field of their totals, and what it is. The first are counters.
COUNTERS = (
    ("tasks", "tasks", "Tasks that ended, failed ones too."),
    ("task_seconds", "seconds", "Wall time of workers in tasks."),
    ("queue_seconds", "queued_seconds", "Time that tasks waited for a worker after they were sent."),
    ("cpu_seconds", "cpu_seconds", "Processor time of tasks."),
    ("read_bytes", "read_bytes", "Bytes read by tasks, as they are stored."),
    ("written_bytes", "written_bytes", "Bytes written by tasks, as they are stored."),
    ("gpu_seconds", "device_seconds", "Seconds in which the net computed on a GPU."),
    ("gpu_busy_seconds", "device_busy_seconds", "Seconds in which GPUs were busy while tasks ran, by NVML."),
)
PEAKS = (
    ("worker_memory_peak_bytes", "peak_bytes", "Highest resident memory of any worker."),
    ("gpu_memory_peak_bytes", "device_peak_bytes", "Highest GPU memory of any worker, by PyTorch."),
    ("gpu_memory_used_peak_bytes", "device_used_bytes", "Most GPU memory in use by all processes, by NVML."),
)


@dataclass
class _Row:
    """What is known of a stage, of one work or of several added up; `part` is of units in tasks under way."""

    done: int = 0
    in_flight: int = 0
    failed: int = 0
    left: int = 0
    part: float = 0.0
    tasks_in_flight: int = 0
    retries: int = 0
    totals: Totals = field(default_factory=Totals)

    def add(self, other: _Row) -> None:
        for name in ("done", "in_flight", "failed", "left", "part", "tasks_in_flight", "retries"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.totals.join(other.totals)

    @property
    def num_units(self) -> int:
        return self.done + self.in_flight + self.failed + self.left


@dataclass
class _Account:
    """A work whose phases are under way, or, with `flow_stage`, many that have ended, added up.

    Attributes:
        rows: by stage, as they were when the phase told of them last.
        earlier: of phases before this one, in which its numbers begin anew.
        voxels: of the output that the net made, and all.
        seconds_left: None while that is not known.
    """

    flow_stage: str
    rows: dict[str, _Row] = field(default_factory=dict)
    earlier: dict[str, _Row] = field(default_factory=dict)
    progress: Progress | None = None
    voxels: tuple[float, float] = (0.0, 0.0)
    scratch_bytes: int = 0
    seconds_left: float | None = None

    def follow(self, progress: Progress) -> None:
        """Take note of how far the phase is that `progress` is about."""
        if progress is not self.progress:
            self._keep()
            self.progress = progress
        for stage in progress.stages:
            num_running, before = progress.units_running[stage.name], self.earlier.get(stage.name, _Row())
            row = self.rows[stage.name] = _Row(
                stage.num_done, num_running, len(stage.failed), max(0, stage.num_left - num_running),
                progress.parts.get(stage.name, 0.0), progress.running[stage.name],
                before.retries + progress.retries[stage.name],
            )  # fmt: skip
            for totals in (before.totals, progress.totals[stage.name]):
                row.totals.join(totals)
        if progress.num_voxels and progress.part is not None:
            self.voxels = progress.part * progress.num_voxels, float(progress.num_voxels)
        self.scratch_bytes, self.seconds_left = progress.scratch_bytes, progress.seconds_left

    def _keep(self) -> None:
        """Keep what the phase so far has counted."""
        for name, row in self.rows.items():
            self.earlier[name] = _Row(retries=row.retries, totals=row.totals)

    def close(self) -> None:
        """Take note of the end: nothing is under way any more."""
        if self.progress is not None:
            self.follow(self.progress)
        for row in self.rows.values():
            row.left, row.in_flight, row.part, row.tasks_in_flight = row.left + row.in_flight, 0, 0.0, 0
        self.progress, self.scratch_bytes, self.seconds_left = None, 0, None

    def add(self, other: _Account) -> None:
        """Add the numbers of another account."""
        for name, row in other.rows.items():
            self.rows.setdefault(name, _Row()).add(row)
        self.voxels = self.voxels[0] + other.voxels[0], self.voxels[1] + other.voxels[1]
        self.scratch_bytes += other.scratch_bytes


class Metrics(Witness):
    """What is known of the work that this thread performs, for a registry of Prometheus' client.

    Args:
        command: in a word, such as "run".
        recipe: its name, "" where it has none.

    Attributes:
        state: of the work.
        num_connected: workers that are ready, as whoever asks the pool now and then says; None where nobody does.
    """

    def __init__(self, command: str, recipe: str = "") -> None:
        super().__init__()
        self.command, self.recipe = command, recipe
        self.state: State = "running"
        self.num_connected: int | None = None
        self.pool: WorkerPool | None = None
        self._most_workers, self._began = 0, time.monotonic()
        self._lock = threading.Lock()
        self._open: dict[Place, _Account] = {}
        self._ended: dict[str, _Account] = {}
        self._own: set[Place] = set()  # of works whose time left is that of a series
        self._flow_stages: set[str] = set()

    def use(self, pool: WorkerPool | None) -> None:
        """Take note of the pool."""
        self.pool, self.num_connected = pool, None
        if pool is not None:
            self._most_workers = max(pool.slots.values()) if pool.shared else sum(pool.slots.values())

    def move(self, place: Place, works: Works, progress: Progress) -> None:
        """Take note of how far a work is."""
        with self._lock:
            if place not in self._open:
                flow_stage = self._flow_stage(works)
                self._open[place] = _Account(flow_stage)
                if len(works) == 1 or (len(works) == 2 and isinstance(works[1], StageWork) and flow_stage != OTHER):
                    self._own.add(place)
            self._open[place].follow(progress)

    def _flow_stage(self, works: Works) -> str:
        """Return the name of the stage of a flow that is the last of `works`, "" where it is none."""
        name = next((work.name for work in works if isinstance(work, StageWork)), "")
        if name in self._flow_stages or not name:
            return name
        if len(self._flow_stages) >= MOST_FLOW_STAGES:
            return OTHER
        self._flow_stages.add(name)
        return name

    def end(self, place: Place, works: Works, result: object, error: BaseException | None) -> None:
        """Add what a work took to that of others, and take note of how the outermost ended."""
        super().end(place, works, result, error)
        with self._lock:
            account = self._open.pop(place, None)
            if account is not None:
                account.close()
                self._ended.setdefault(account.flow_stage, _Account(account.flow_stage)).add(account)
            if self.ending is not None:
                self.state = self.ending.state

    @property
    def output(self) -> str:
        """The output as a label, also where its name is no text, as names of files need not be."""
        return super().output.encode("utf-8", "backslashreplace").decode()

    def describe(self) -> Sequence[Metric]:
        """Return nothing: a registry asks for names, and ours are no other's."""
        return ()

    def collect(self) -> Sequence[Metric]:
        """Return all metrics as they are now; nothing before a work has begun, or where they cannot be had."""
        if self.work is None:
            return ()
        try:
            with self._lock:
                families = (*self._of_work(), *self._of_stages(), *self._of_parts())
            return [family for family in families if family.samples]
        except Exception:
            log.warning("the metrics cannot be collected", exc_info=True)
            return ()

    def _gauge(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        if value is not None:
            family = GaugeMetricFamily(f"volpipe_{name}", text, labels=["output"])
            family.add_metric([self.output], value)
            yield family

    def _by_state(self, name: str, text: str, counts: dict[str, float]) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"volpipe_{name}", text, labels=["output", "state"])
        for state, count in counts.items():
            family.add_metric([self.output, state], count)
        yield family

    def _of_work(self) -> Iterator[Metric]:
        """Yield what is known of all: state, time, workers and the driver."""
        from prometheus_client.core import CounterMetricFamily, InfoMetricFamily

        info = {"version": volpipe.__version__, "command": self.command, "recipe": self.recipe, "output": self.output}
        yield InfoMetricFamily("volpipe", "The work: version, command, recipe and output.", value=info)
        is_waiting = self.state == "running" and isinstance(self.work, FollowWork) and self.work.waits
        now = "waiting" if is_waiting else self.state
        states: dict[str, float] = {state: state == now for state in STATES}
        yield from self._by_state("state", "1 for the state that the work is in, 0 for all others.", states)
        seconds = time.monotonic() - self._began
        yield from self._gauge("elapsed_seconds", "Seconds since the command began.", seconds)
        workers: dict[str, float] = {"wanted": self._most_workers} if self.pool is not None else {}
        if self.pool is not None and self.num_connected is not None:
            workers["connected"] = self.num_connected
        text = "Workers: the most that the site asks for, and those connected now."
        yield from self._by_state("workers", text, workers)
        memory = psutil.Process().memory_info().rss
        yield from self._gauge("driver_memory_bytes", "Resident memory of the driver.", memory)
        cpu = CounterMetricFamily("volpipe_driver_cpu_seconds", "Processor time of the driver.", labels=["output"])
        cpu.add_metric([self.output], time.process_time())
        yield cpu

    def _of_stages(self) -> Iterator[Metric]:
        """Yield what is known of stages, those of works with the same labels added up."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        accounts = self._sums()
        rows = [(label, name, row) for label, sums in accounts.items() for name, row in sums.rows.items()]
        units = GaugeMetricFamily(
            "volpipe_units", "Blocks, shards or other units of a stage by state, all sessions.",
            labels=[*OF_STAGE, "state"],
        )  # fmt: skip
        share = GaugeMetricFamily(
            "volpipe_progress_ratio",
            "Share of a stage that is done, 0 to 1, tasks under way included.",
            labels=OF_STAGE,
        )
        flying = GaugeMetricFamily("volpipe_tasks_in_flight", "Tasks sent that are not back yet.", labels=OF_STAGE)
        retries = CounterMetricFamily(
            "volpipe_retries", "Failures of a unit after which it was tried again.", labels=OF_STAGE
        )
        for label, name, row in rows:
            labels = [self.output, label, name]
            for state in ("done", "in_flight", "failed", "left"):
                units.add_metric([*labels, state], getattr(row, state))
            share.add_metric(labels, min(1.0, (row.done + row.part) / row.num_units) if row.num_units else 1.0)
            flying.add_metric(labels, row.tasks_in_flight)
            retries.add_metric(labels, row.retries)
        yield from (units, share, flying, retries)
        for family, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, PEAKS)):
            for metric, name, text in table:
                yield self._filled(family(f"volpipe_{metric}", text, labels=OF_STAGE), rows, name)
        yield from self._of_flow_stages(accounts)

    def _filled(self, family: Metric, rows: Sequence[tuple[str, str, _Row]], name: str) -> Metric:
        """Return `family` with the values of all stages of the field `name` of their totals."""
        for label, stage, row in rows:
            family.add_metric([self.output, label, stage], getattr(row.totals, name))  # type: ignore[attr-defined]
        return family

    def _of_flow_stages(self, accounts: dict[str, _Account]) -> Iterator[Metric]:
        """Yield voxels, scratch and time left, which are of all stages of a work together."""
        from prometheus_client.core import GaugeMetricFamily

        of_work = ("output", "flow_stage")
        voxels = GaugeMetricFamily(
            "volpipe_voxels", "Output voxels of a net by state, all sessions.", labels=[*of_work, "state"]
        )
        scratch = GaugeMetricFamily("volpipe_scratch_bytes", "Growth of scratch in this session.", labels=of_work)
        for label, account in accounts.items():
            done, whole = account.voxels
            for state, value in (("done", done), ("left", whole - done)) if whole else ():
                voxels.add_metric([self.output, label, state], value)
            scratch.add_metric([self.output, label], account.scratch_bytes)
        left = GaugeMetricFamily(
            "volpipe_remaining_seconds",
            "Time left, once it is known; not of single datasets or trainings.",
            labels=of_work,
        )  # fmt: skip
        for place, account in self._open.items():
            if place in self._own and account.seconds_left is not None:
                left.add_metric([self.output, account.flow_stage], account.seconds_left)
        yield from (voxels, scratch, left)

    def _sums(self) -> dict[str, _Account]:
        """Return the numbers of all works, ended or not, by stage of a flow."""
        sums: dict[str, _Account] = {}
        for account in (*self._ended.values(), *self._open.values()):
            sums.setdefault(account.flow_stage, _Account(account.flow_stage)).add(account)
        return sums

    def _of_parts(self) -> Iterator[Metric]:
        """Yield how many datasets, trainings or steps there are, by state."""
        work = self.work
        if isinstance(work, BatchWork) and (table := getattr(work, "table", None)) is not None:
            counts: Counter[str] = Counter(row.ended for row in list(table.rows))
            yield from self._by_state("datasets", "Datasets of a batch by state.", dict(counts))
        if isinstance(work, SweepWork | TuneWork):
            yield from self._by_state("trials", "Trainings of a sweep or a search by state.", _trials(work))
        if isinstance(work, TrainingWork):
            done = last_step(work.folder.path)
            steps: dict[str, float] = {"done": done, "left": max(0, work.training.recipe.train.steps - done)}
            yield from self._by_state("training_steps", "Steps of a training by state, all sessions.", steps)


def _trials(work: SweepWork | TuneWork) -> dict[str, float]:
    """Return how many trials are in which state; of a search, those that ended in this session."""
    running = len(work.running)
    if isinstance(work, TuneWork):
        return {**Counter(list(work.states)), "running": running}
    states = Counter(result.state for result in list(work.results.values()))
    return {**states, "waiting": max(0, states["waiting"] - running), "running": running}
