"""The driver alone: its memory and its time per window, over tasks that do nothing, and how soon it sends the first."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import IDENTITY, command, in_process, run_folder

MIB = 2**20


def nothing(stage: str, units: Sequence[int]) -> object:
    """Say that `units` are done; sent to workers."""
    from volpipe.blockwise.journal import Record
    from volpipe.blockwise.usage import Usage

    return Record(stage, tuple(units), usage=Usage(seconds=1e-6 * len(units)))


def drive(folder: Path, side: int) -> dict[str, float]:
    """Return what a run over side³ windows of one block each, inferred by nobody, takes the driver."""
    from parsl import python_app

    from volpipe.apps.pool import on_site
    from volpipe.blockwise.journal import Journal, Record
    from volpipe.blockwise.loop import perform
    from volpipe.blockwise.phase import Phase
    from volpipe.blockwise.usage import peak_bytes
    from volpipe.blockwise.work import POOL, Steps, Work
    from volpipe.recipes.inference import load_recipe
    from volpipe.runs.schedule import RunSchedule
    from volpipe.volumes.volume import ArraySpec, create_array
    from volpipe.workflow.prepare import prepare

    window = 64
    shape = (side * window,) * 3
    create_array(folder / "in.zarr", "raw", ArraySpec(shape, np.dtype(np.uint8), (window,) * 3), "zarr2")
    recipe = load_recipe(
        None,
        [*IDENTITY, f"windows.shape={[window] * 3}", "windows.block=[1,1,1]", "tensors.mode=streamed"],
    )
    plan = prepare(f"{folder}/in.zarr/raw", recipe, folder / "out.zarr", folder)
    with on_site("local")(folder / "parsl") as executors, Journal(folder / "journal", ()) as journal:
        app = python_app(nothing)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            future: Future[Record[Any]] = app(stage, list(units))
            return future

        schedule = RunSchedule(plan)
        phase = Phase(schedule, submit, journal)

        def steps() -> Steps[None]:
            yield POOL
            yield phase

        submit("infer", [0]).result()
        started, cpu = time.perf_counter(), time.process_time()
        perform(Work("bench", steps), lambda: nullcontext(executors))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        assert schedule.is_complete
    tasks = sum(totals.tasks for totals in phase.progress.totals.values())
    return {"seconds": seconds, "cpu": cpu, "peak": peak_bytes(), "tasks": tasks, "windows": side**3}


@cache
def driven(folder: Path, turn: int, short: bool) -> tuple[dict[str, float], ...]:
    """Return `drive` over 10³, 10⁴ and 10⁶ windows, each in a process of its own; both rows are made from one `turn`.

    The order changes from turn to turn; `short` leaves 10⁶ at 125,000.
    """
    sides = (10, 22, 50 if short else 100)
    found = {side: _driven(folder, side) for side in sides[:: -1 if turn % 2 else 1]}
    return tuple(found[side] for side in sides)


def _driven(folder: Path, side: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return in_process(__name__, scratch, side)


def measure_memory(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for i in range(repeats):
        few, _, many = driven(setting.cache, i, setting.short)
        value = (many["peak"] - few["peak"]) / MIB
        yield Outcome(value, {"10⁶ windows": many["peak"] / MIB, "10³ windows": few["peak"] / MIB})


def measure_time(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for i in range(repeats):
        _, few, many = driven(setting.cache, i, setting.short)
        sides = {
            f"{name}: {what} µs per window": found[what] / found["windows"] * 1e6
            for name, found in (("10⁶", many), ("10⁴", few))
            for what in ("cpu", "seconds")
        }
        cpu = [found["cpu"] / found["windows"] for found in (many, few)]
        yield Outcome(cpu[0] / cpu[1], sides)


def measure_start(setting: Setting, repeats: int) -> Iterator[Outcome]:
    from volpipe.blockwise.journal import read_records
    from volpipe.runs.run_folder import RunFolder
    from volpipe.runs.worker import RESULTS

    location, out = inputs.volume(setting, (128, 128, 128)), setting.scratch / "out.zarr"
    for _ in range(repeats):
        began = time.time()
        command(location, out, ["net.name=identity"])
        ended = time.time()
        usages = [record.usage for record in read_records(RunFolder(run_folder(out)).journal, RESULTS)]
        first = min((usage for usage in usages if usage.pid), key=lambda usage: usage.started + usage.seconds)
        begins = first.started - began
        yield Outcome(begins + first.seconds, {"first task begins": begins, "command": ended - began})


START = (
    "volpipe run of the identity on the site local, 128³ uint8; what a worker's first task takes is its imports, "
    "where it was not a fork of a process that had made them"
)
WHY = (
    "streamed windows, one per block, so that each is a unit; site local, tasks that do nothing, in bundles of up to 64"
)
ROWS = [
    Row("memory", "driver, 10⁶ windows - 10³ windows", 100.0, 20.0, measure_memory, unit="MiB", why=WHY),
    Row("driver", "driver's time per window, 10⁶ / 10⁴ windows", 1.2, 1.0, measure_time, why=WHY),
    Row("start", "command to the end of the first task", 5.0, 3.0, measure_start, unit="s", why=START),
]

if __name__ == "__main__":
    print(json.dumps(drive(Path(sys.argv[1]), int(sys.argv[2]))))
