"""Scaling by simulation: whole runs on real managers and workers of Parsl, whose tasks sleep as long as a task takes.

Sleeping takes no core, so that one machine holds as many workers as a small cluster. What is measured is what comes
between tasks: queues, the driver's loop, journal and schedule. Not here: what workers do to each other when they
compute, read and write, which a machine with as many cores alone can tell.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.whole_runs import StandIns, planned
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import in_process
from volpipe.blockwise.journal import Record, read_usages
from volpipe.blockwise.pool import WorkerPool
from volpipe.inference.plan import Plan
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.volumes.storage.paths import locate
from volpipe.workflow.driver import execute

TASKS_EACH = 20  # of a worker
SPREAD = 0.1  # of the times of tasks about their mean, as their logarithms have it
OTHERS = 0.05  # seconds of tasks of stages without a net, by those of a block


def nap(record: Record[Any], seconds: float) -> Record[Any]:
    """Sleep, and say that `record` took as long; sent to workers."""
    started = time.time()
    time.sleep(seconds)
    usage = dataclasses.replace(record.usage, started=started, seconds=time.time() - started, pid=os.getpid())
    return dataclasses.replace(record, usage=usage)


class Sleepers(StandIns):
    """The workers of `pool`, who sleep for about `seconds` in place of each block."""

    def __init__(self, plan: Plan, pool: WorkerPool, seconds: float) -> None:
        from parsl import python_app

        super().__init__(plan, pool.slots["cpu"])
        self._app, self._seconds, self._rng = python_app(nap), seconds, np.random.default_rng(0)

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        """Return the record that a worker gives after its nap."""
        _, units, *others = arguments
        mean = self._seconds * len(units) * (1.0 if app == "infer" else OTHERS)
        seconds = 0.0 if app in ("rehearse", "discard") else float(mean * self._rng.lognormal(0.0, SPREAD))
        future: Future[Record[Any]] = self._app(self._record(app, tuple(units), *others), seconds)
        return future


def run(folder: Path, num_workers: int, seconds: float) -> dict[str, float]:
    """Return how much of their time workers slept, from the first task's start to the last one's end.

    Lost are `between`, the share before a worker's next task, and `end`, the share after its last one.
    """
    from volpipe.apps.pool import on_site

    os.environ |= {"VOLPIPE_WORKERS": str(num_workers), "PARSL_CORES": str(num_workers)}  # Parsl starts one per core
    plan = planned(folder, TASKS_EACH * num_workers)
    asked = time.time()
    with on_site("local")(folder / "parsl") as pool:
        while pool.num_connected() < num_workers:
            time.sleep(0.1)
        ready = time.time()
        report = execute(plan, lambda folder: nullcontext(Sleepers(plan, pool, seconds)))
    assert not report.missing
    usages = list(read_usages(RunFolder.from_output(locate(plan.out)).journal, RESULTS))
    first, last = min(u.started for u in usages), max(u.started + u.seconds for u in usages)
    ends: dict[int, float] = {}
    for usage in usages:
        ends[usage.pid] = max(ends.get(usage.pid, 0.0), usage.started + usage.seconds)
    time_of_all, slept = num_workers * (last - first), sum(u.seconds for u in usages)
    end = sum(last - at for at in ends.values()) / time_of_all
    return {"efficiency": slept / time_of_all, "between": 1 - slept / time_of_all - end, "end": end,
            "seconds": last - first, "tasks": len(usages), "start": ready - asked}  # fmt: skip


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Share of time that workers lose."""
    num_workers = 4 if setting.short else 64
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=setting.cache) as scratch:
            found = in_process(__name__, scratch, num_workers, 0.5 if setting.short else 5.0)
        yield Outcome(1 - found["efficiency"], found)


ROWS = [
    Row(
        "scaling", "share of time that 64 workers lose between tasks of 5 s", 0.05, 0.02, measure,
        why="64 processes of Parsl on this machine, which sleep for 5 s ± 10 %, 20 blocks each; start and end left out",
    )
]  # fmt: skip

if __name__ == "__main__":
    from benchmarks.engine import scaling  # by the name that workers know

    print(json.dumps(scaling.run(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
