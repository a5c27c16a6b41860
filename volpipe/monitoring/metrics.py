"""Metrics: how far a work and all that belongs to it are and what they take, as Prometheus' client collects it.

Not here: how they get out (exposition). Their number does not grow with that of datasets or trainings: works that have
the same labels are added up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import psutil

import volpipe
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import Place, Works
from volpipe.monitoring.ending import Witness
from volpipe.runs.report import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

STATES: tuple[State, ...] = (
    "running", "waiting", "complete", "incomplete", "stopped", "interrupted", "refused", "failed",
)  # fmt: skip
MOST_FLOW_STAGES = 64  # labels of stages of flows: a batch may have a recipe for each of its datasets
OTHER = "other"  # that of all beyond
Values = Mapping[str, float]  # by state
Sources = dict[tuple[str, ...], object]  # what has the values of metrics, by their labels

# Name, kind and text of each metric, and the attribute that has its value, or those by state; None or {} has none.
OF_WORK = (
    ("state", "gauge", "1 for the state that the work is in, 0 for all others.", "states"),
    ("elapsed_seconds", "gauge", "Seconds since the command began.", "seconds"),
    ("workers", "gauge", "Workers: the most that the site asks for, and those connected now.", "workers"),
    ("driver_memory_bytes", "gauge", "Resident memory of the driver.", "memory_bytes"),
    ("driver_cpu_seconds", "counter", "Processor time of the driver.", "cpu_seconds"),
    ("datasets", "gauge", "Datasets of a batch by state.", "datasets"),
    ("trials", "gauge", "Trainings of a sweep or a search by state.", "trials"),
    ("training_steps", "gauge", "Steps of a training by state, all sessions.", "training_steps"),
)
OF_STAGE = (
    ("units", "gauge", "Blocks, shards or other units of a stage by state, all sessions.", "units"),
    ("progress_ratio", "gauge", "Share of a stage that is done, 0 to 1, tasks under way included.", "share"),
    ("tasks_in_flight", "gauge", "Tasks sent that are not back yet.", "tasks_in_flight"),
    ("retries", "counter", "Failures of a unit after which it was tried again.", "retries"),
    ("tasks", "counter", "Tasks that ended, failed ones too.", "totals.tasks"),
    ("task_seconds", "counter", "Wall time of workers in tasks.", "totals.seconds"),
    ("queue_seconds", "counter", "Time that tasks waited for a worker after they were sent.", "totals.queued_seconds"),
    ("cpu_seconds", "counter", "Processor time of tasks.", "totals.cpu_seconds"),
    ("read_bytes", "counter", "Bytes read by tasks, as they are stored.", "totals.read_bytes"),
    ("written_bytes", "counter", "Bytes written by tasks, as they are stored.", "totals.written_bytes"),
    ("gpu_seconds", "counter", "Seconds in which the net computed on a GPU.", "totals.device_seconds"),
    (
        "gpu_busy_seconds", "counter", "Seconds in which GPUs were busy while tasks ran, by NVML.",
        "totals.device_busy_seconds",
    ),
    ("worker_memory_peak_bytes", "gauge", "Highest resident memory of any worker.", "totals.peak_bytes"),
    ("gpu_memory_peak_bytes", "gauge", "Highest GPU memory of any worker, by PyTorch.", "totals.device_peak_bytes"),
    (
        "gpu_memory_used_peak_bytes", "gauge", "Most GPU memory in use by all processes, by NVML.",
        "totals.device_used_bytes",
    ),
)  # fmt: skip
OF_FLOW_STAGE = (
    ("voxels", "gauge", "Output voxels of a net by state, all sessions.", "voxels_by_state"),
    ("scratch_bytes", "gauge", "Growth of scratch in this session.", "scratch_bytes"),
    ("remaining_seconds", "gauge", "Time left, once it is known; not of single datasets or trainings.", "seconds_left"),
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
    def units(self) -> Values:
        return {"done": self.done, "in_flight": self.in_flight, "failed": self.failed, "left": self.left}

    @property
    def share(self) -> float:
        num_units = sum(self.units.values())
        return min(1.0, (self.done + self.part) / num_units) if num_units else 1.0


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

    @property
    def voxels_by_state(self) -> Values:
        done, whole = self.voxels
        return {"done": done, "left": whole - done} if whole else {}

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
                if len(works) == 1 or (len(works) == 2 and works[1].kind == "flow_stage" and flow_stage != OTHER):
                    self._own.add(place)
            self._open[place].follow(progress)

    def _flow_stage(self, works: Works) -> str:
        """Return the name of the stage of a flow that is the last of `works`, "" where it is none."""
        name = next((work.name for work in works if work.kind == "flow_stage"), "")
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
                families = list(self._families())
            return [family for family in families if family.samples]
        except Exception:
            log.warning("the metrics cannot be collected", exc_info=True)
            return ()

    def _families(self) -> Iterator[Metric]:
        from prometheus_client.core import InfoMetricFamily

        info = {"version": volpipe.__version__, "command": self.command, "recipe": self.recipe, "output": self.output}
        yield InfoMetricFamily("volpipe", "The work: version, command, recipe and output.", value=info)
        works, stages, flow_stages = Sources(), Sources(), Sources()
        works[self.output,] = self
        for name, sums in self._sums().items():
            flow_stages[self.output, name] = sums
            stages.update({(self.output, name, stage): row for stage, row in sums.rows.items()})
        yield from _metrics_of(OF_WORK, works, ["output"])
        yield from _metrics_of(OF_STAGE, stages, ["output", "flow_stage", "stage"])
        yield from _metrics_of(OF_FLOW_STAGE, flow_stages, ["output", "flow_stage"])

    def _sums(self) -> dict[str, _Account]:
        """Return the numbers of all works, ended or not, by stage of a flow."""
        sums: dict[str, _Account] = {}
        for account in (*self._ended.values(), *self._open.values()):
            sums.setdefault(account.flow_stage, _Account(account.flow_stage)).add(account)
        for place in self._own & self._open.keys():
            sums[self._open[place].flow_stage].seconds_left = self._open[place].seconds_left
        return sums

    @property
    def states(self) -> Values:
        is_waiting = self.state == "running" and self.work is not None and self.work.waits
        now = "waiting" if is_waiting else self.state
        return {state: float(state == now) for state in STATES}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def memory_bytes(self) -> float:
        return float(psutil.Process().memory_info().rss)

    @property
    def cpu_seconds(self) -> float:
        return time.process_time()

    @property
    def workers(self) -> Values:
        if self.pool is None:
            return {}
        connected = {} if self.num_connected is None else {"connected": self.num_connected}
        return {"wanted": self._most_workers} | connected

    @property
    def datasets(self) -> Values:
        return self._parts_by_state("datasets")

    @property
    def trials(self) -> Values:
        return self._parts_by_state("trials")

    @property
    def training_steps(self) -> Values:
        return self._parts_by_state("training_steps")

    def _parts_by_state(self, parts: str) -> Values:
        """Return how many `parts` of the work there are, by state; {} where it has none of them."""
        counts = None if self.work is None else self.work.counts
        return {} if counts is None else counts().get(parts, {})


def _metrics_of(
    table: Sequence[tuple[str, str, str, str]], sources: Sources, labels: Sequence[str]
) -> Iterator[Metric]:
    """Yield the metrics of a table with their values of all `sources`, which are given by their `labels`."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    for metric, kind, text, attribute in table:
        value_of = attrgetter(attribute)
        values = [(names, value) for names, source in sources.items() if (value := value_of(source)) is not None]
        by_state = any(isinstance(value, Mapping) for _, value in values)
        family = families[kind](f"volpipe_{metric}", text, labels=[*labels, "state"] if by_state else labels)
        for names, value in values:
            if isinstance(value, Mapping):
                for state, number in value.items():
                    family.add_metric([*names, state], number)
            else:
                family.add_metric(names, value)
        yield family
