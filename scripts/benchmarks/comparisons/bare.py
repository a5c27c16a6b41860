"""The net alone: `run` against a loop that calls the same net on windows that are on its device already.

On a GPU both have the sizes that a user gets, over a volume that is worth one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import inputs, report
from benchmarks.comparisons import kinds
from benchmarks.comparisons.peer import Take, peers
from benchmarks.row import Outcome, Row, Setting, compared
from benchmarks.session import DEFAULT_RECIPE, Session, session
from volpipe.blockwise.usage import Usage
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.workflow.prepare import prepare

EDGE, EDGE_ON_GPU = 256, 2048
WINDOWS_IN_MEMORY = 8


def loop(plan_json: str, num_threads: int) -> Callable[[Take], None]:
    """Return a loop that runs a plan's net on its device, batch by batch, and does nothing else."""
    import torch

    from volpipe.inference.runner import Runner

    torch.set_num_threads(num_threads)
    plan = Plan.model_validate_json(plan_json)
    runner = Runner.load(plan)
    rng = np.random.default_rng(0)
    shape = (WINDOWS_IN_MEMORY, runner.batch, plan.source.num_channels, *plan.window)
    windows = [runner.bus.up(window) for window in rng.uniform(-1, 1, shape).astype(np.float32)]
    num_batches = -(-plan.lattice.num_windows // runner.batch)

    def work(take: Take) -> None:
        out = windows[0]
        while (number := take()) < num_batches:
            out = runner.run(windows[number % WINDOWS_IN_MEMORY])
        runner.bus.down(lambda: out.flatten()[:1], runner.bus.mark())  # a GPU may be behind

    work(iter((0, num_batches)).__next__)
    return work


def measure_net(
    setting: Setting,
    repeats: int,
    *,
    settings: Sequence[str] = (),
    recipe: Path | None = DEFAULT_RECIPE,
    is_whole: bool = True,
) -> Iterator[Outcome]:
    """As many processes, threads each and windows per call as the run has; on a GPU, with the share that it waits.

    Of a run that is not taken as a whole, and of the loop, processor time counts, of the tasks that run the net; on a
    GPU the time that it computes.
    """
    location, on_gpu = inputs.volume(setting, setting.cube(_edge())), report.gpu() is not None
    clock = None if is_whole else time.perf_counter if on_gpu else time.process_time
    with session(setting) as running:
        workers, sizing = running.executors.slots["gpu"], running.sizing
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        plan = prepare(location, load_recipe(recipe, settings), setting.scratch / "out.zarr", Path.cwd(), sizing)
        with peers(workers, loop, plan.model_dump_json(), threads, clock=clock) as go:

            def run() -> float:
                seconds = running.run(location, *settings, sizing=sizing, recipe=recipe)
                if is_whole:
                    return seconds
                return sum(usage.device_seconds if on_gpu else usage.cpu_seconds for usage in _usages(running))

            for outcome in compared(repeats, run, go, "bare loop"):
                waits = {"share idle": idle_share(running).value} if on_gpu else {}
                yield replace(outcome, sides=outcome.sides | waits)


def measure_busy(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """The seconds that the net computed, by those of the tasks that ran it: how little the GPU waits."""
    location = inputs.volume(setting, setting.cube(_edge()))
    with session(setting) as running:
        for _ in range(repeats):
            running.run(location, sizing=running.sizing)
            yield idle_share(running)


def _edge() -> int:
    return EDGE_ON_GPU if report.gpu() else EDGE


def _usages(running: Session) -> list[Usage]:
    """Return what the tasks of the last run used that ran the net."""
    assert running.report is not None
    from volpipe.blockwise.journal import read_records
    from volpipe.runs.worker import RESULTS

    records = read_records(running.report.folder / "journal.jsonl", RESULTS)
    return [record.usage for record in records if record.stage == "infer"]


def idle_share(running: Session) -> Outcome:
    """Return the share of the last run's inference in which its net did not compute."""
    usages = _usages(running)
    span = max(u.started + u.seconds for u in usages) - min(u.started for u in usages)
    computing = sum(u.device_seconds for u in usages)
    workers = len({(u.host, u.pid) for u in usages})
    return Outcome(1 - computing / (span * workers), {"infer": span, "computing": computing / workers})


WHY = (
    "default recipe (unet3d) over 256³ uint8, on a GPU 2048³; workers up on both sides; the bare loop has as many "
    "processes, threads and windows per call, allocates memory as the workers do, and its windows stay there"
)


WINDOWS = f"{WHY}; processor time of both, that of the run in tasks that read, run the net and write"
OWN = ("net.untrained=true", "net.intensity=same")
KINDS = {
    "valid": ("convolutions without padding", (f"net.name={kinds.__file__}:valid", *OWN), None),
    "2d": ("slices", (f"net.name={kinds.__file__}:slices", *OWN), None),
    "edge": ("gaussian windows at the edge", ("windows.placement=edge", "windows.blend=gaussian"), DEFAULT_RECIPE),
}
ROWS = [
    Row("net", "run / bare loop of the same net", 1.15, 1.05, measure_net, why=WHY),
    *(
        Row(
            name,
            f"tasks of the net / bare loop of the same net, {what}",
            1.15,
            1.05,
            partial(measure_net, settings=settings, recipe=recipe, is_whole=False),
            why=WINDOWS,
        )
        for name, (what, settings, recipe) in KINDS.items()
    ),
]
ON_GPU = [
    *(
        Row(
            f"net-{precision}",
            f"run / bare loop of the same net, {precision}",
            1.15,
            1.05,
            partial(measure_net, settings=(f"infer.precision={precision}",)),
            why=WHY,
        )
        for precision in ("tf32", "bfloat16")
    ),
    Row(
        "idle",
        "share of infer in which the GPU does not compute",
        0.10,
        0.03,
        measure_busy,
        why="default recipe over 2048³; seconds of the net by seconds between the first and the last task, by worker",
    ),
]
