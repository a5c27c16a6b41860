"""Scaling by simulation: whole runs of 1 to 64 workers and more, in which only the workers are stand-ins.

In two ways. On workers of a clock of its own a task takes no time of this machine: what is lost is lost by the loop's
own choices (bundles, what is sent ahead, the tail), exactly and at any load. On real managers and workers of Parsl
tasks sleep, so that one machine holds as many as a small cluster: queues and the driver's time count as well. Not here:
what workers do to each other when they compute, read and write, which a machine with as many cores alone can tell.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.recorded import shares
from benchmarks.engine.whole_runs import StandIns, planned
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import in_process
from volpipe.blockwise.journal import Record, read_records
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import LoopObserver, Place, Works, observing
from volpipe.inference.plan import Plan
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.volumes.storage.paths import locate
from volpipe.workflow.work_plan import execute

TASKS_EACH = 40  # of a worker; with 20 the tail of uneven times is most of what is lost
DRIVER_SECONDS = 0.002  # that the driver takes for a task, twice what `engine` measures


class Tasks(StandIns):
    """Stand-ins whose tasks take `seconds` for each block in the mean, and the same times whenever they are made anew.

    Times are recorded ones (recorded), drawn at random and scaled to that mean.
    """

    def __init__(self, plan: Plan, num_workers: int, seconds: float) -> None:
        super().__init__(plan, num_workers)
        self._seconds, self._rng = seconds, np.random.default_rng(0)

    def task(self, app: str, units: Sequence[int], *others: Any) -> tuple[Record[Any], float]:
        """Return the record of a task, and the seconds that it takes; those for each of its units differ."""
        seconds = 0.0
        if app in shares():  # others are tried blocks, which these runs have no time for
            seconds = self._seconds * float(self._rng.choice(shares()[app], len(units)).sum())
        return self._record(app, tuple(units), *others), seconds


class Clocked(Tasks, LoopObserver):
    """Workers on a clock of their own, which take tasks in the order in which these are sent.

    The driver takes `DRIVER_SECONDS` of that clock for each task that comes back; those that it sends then can be taken
    from then on. As an observer it lets the next task come back whenever the driver has nothing left to do.
    """

    def __init__(self, plan: Plan, num_workers: int, seconds: float) -> None:
        super().__init__(plan, num_workers, seconds)
        self._driver = time.time()
        self._free = [(self._driver, worker) for worker in range(num_workers)]  # from when on
        self._ends: list[tuple[float, int, Future[Record[Any]], Record[Any]]] = []

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        """Return the record that comes when the clock is at the task's end."""
        _, *given = arguments
        record, seconds = self.task(app, *given)
        free, worker = heapq.heappop(self._free)
        start, future = max(free, self._driver), Future[Record[Any]]()
        heapq.heappush(self._free, (start + seconds, worker))
        usage = dataclasses.replace(record.usage, started=start, seconds=seconds, pid=worker)
        self.num_tasks += 1
        heapq.heappush(self._ends, (start + seconds, self.num_tasks, future, dataclasses.replace(record, usage=usage)))
        return future

    def move(self, place: Place, works: Works, progress: Progress) -> None:
        """Let the next task come back."""
        if self._ends:
            end, _, future, record = heapq.heappop(self._ends)
            self._driver = max(self._driver, end) + DRIVER_SECONDS
            future.set_result(record)


def nap(record: Record[Any], seconds: float) -> Record[Any]:
    """Sleep, and say that `record` took as long; sent to workers."""
    started = time.time()
    time.sleep(seconds)
    usage = dataclasses.replace(record.usage, started=started, seconds=time.time() - started, pid=os.getpid())
    return dataclasses.replace(record, usage=usage)


class Sleepers(Tasks):
    """The workers of `pool`, who sleep as long as a task takes."""

    def __init__(self, plan: Plan, pool: WorkerPool, seconds: float) -> None:
        from parsl import python_app

        super().__init__(plan, pool.slots["cpu"], seconds)
        self._app = python_app(nap)

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        """Return the record that a worker gives after its nap."""
        _, *given = arguments
        future: Future[Record[Any]] = self._app(*self.task(app, *given))
        return future


def simulate(folder: Path, num_workers: int, seconds: float, num_blocks: int) -> dict[str, float]:
    """Return what workers lose on a clock of their own; see `lost`."""
    plan = planned(folder, num_blocks)
    workers = Clocked(plan, num_workers, seconds)
    with observing(workers):
        report = execute(plan, lambda folder: nullcontext(workers))
    assert not report.missing
    return lost(plan, num_workers)


def sleep(folder: Path, num_workers: int, seconds: float, num_blocks: int) -> dict[str, float]:
    """Return what workers of Parsl lose, and the seconds until all were there; see `lost`."""
    from volpipe.apps.pool import on_site

    os.environ |= {"VOLPIPE_WORKERS": str(num_workers), "PARSL_CORES": str(num_workers)}  # Parsl starts one per core
    plan = planned(folder, num_blocks)
    asked = time.time()
    with on_site("local")(folder / "parsl") as pool:
        while pool.num_connected() < num_workers:
            time.sleep(0.1)
        ready = time.time()
        report = execute(plan, lambda folder: nullcontext(Sleepers(plan, pool, seconds)))
    assert not report.missing
    return lost(plan, num_workers) | {"start": ready - asked}


def lost(plan: Plan, num_workers: int) -> dict[str, float]:
    """Return the share of their time in which workers had no task, from the first one's start to the last one's end.

    It is made of `between`, the share before a worker's next task, and `end`, the share after its last one.
    """
    records = read_records(RunFolder.from_output(locate(plan.out)).journal, RESULTS)
    usages = [record.usage for record in records if record.done]
    first, last = min(u.started for u in usages), max(u.started + u.seconds for u in usages)
    ends: dict[int, float] = {}
    for usage in usages:
        ends[usage.pid] = max(ends.get(usage.pid, first), usage.started + usage.seconds)
    time_of_all = num_workers * (last - first)
    end = (num_workers * last - sum(ends.values()) - (num_workers - len(ends)) * first) / time_of_all
    share = 1 - sum(u.seconds for u in usages) / time_of_all
    return {"lost": share, "between": share - end, "end": end, "seconds": last - first, "tasks": len(usages)}


def measure_clocked(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Share of time that is lost on a clock of its own, which is the same each time."""
    for _ in range(repeats):
        yield _taken(setting, "simulate", 16 if setting.short else 64, 5.0)


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Share of time that workers of Parsl lose."""
    for _ in range(repeats):
        yield _taken(setting, "sleep", 4 if setting.short else 64, 0.5 if setting.short else 5.0)


def _taken(setting: Setting, way: str, num_workers: int, seconds: float) -> Outcome:
    with tempfile.TemporaryDirectory(dir=setting.cache) as scratch:
        found = in_process(__name__, way, scratch, num_workers, seconds, TASKS_EACH * num_workers)
    return Outcome(found["lost"], found)


ROWS = [
    Row(
        "scaling-loop", "share of time that the loop's choices lose, 64 workers", 0.05, 0.04, measure_clocked,
        why="recorded times, of 5 s in the mean, on a clock of their own, 40 blocks a worker; start and end left out",
        is_quick=True,
    ),
    Row(
        "scaling", "share of time that 64 workers lose between tasks of 5 s", 0.05, 0.04, measure,
        why="64 processes of Parsl on this machine, which sleep for such times, 40 blocks a worker; ends left out",
    ),
]  # fmt: skip

if __name__ == "__main__":
    from benchmarks.engine import scaling  # by the name that workers know

    does = {"simulate": scaling.simulate, "sleep": scaling.sleep}[sys.argv[1]]
    print(json.dumps(does(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))))
