"""A sweep of small trainings on two workers, against the same on one worker, one after another.

A worker has one core, to which it is bound: a training with one thread reads ahead in another, which would otherwise
take a part of the second core where one worker is alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting, compared
from volpipe.apps.pool import ParslPool, start_pool
from volpipe.configs.local import executor, with_executors
from volpipe.errors import VolpipeError
from volpipe.training.search.grid import load_sweep, run_sweep

RECIPE = """
net = { name = "superres", options = { factor = 2, features = 8, num_blocks = 2 } }
data = [{ path = "PATH" }]
normalise = { low = 0, high = 255 }
degrade = { kind = "bin" }
samples = { shape = [8, 32, 32] }
train = { steps = STEPS, batch = 2, threads = 1 }
[sweep]
"train.seed" = [0, 1, 2, 3]
"train.learning_rate" = [1e-3, 3e-4]
"""


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    recipe = setting.scratch / "recipe.toml"
    steps = 10 if setting.short else 1000
    place = inputs.volume(setting, (128, 128, 128))
    recipe.write_text(RECIPE.replace("PATH", place).replace("STEPS", str(steps)), encoding="utf-8")
    yield from compared(repeats, lambda: _sweep(setting, recipe, 2), lambda: _sweep(setting, recipe, 1), "one worker")


def _sweep(setting: Setting, recipe: Path, workers: int) -> float:
    """Return the seconds of all trainings, from before the workers start until they are gone."""
    place = setting.scratch / "sweep"
    began = time.perf_counter()
    rows = run_sweep(
        load_sweep(recipe), place, partial(_with_a_core_each, workers), search_path=setting.scratch, fresh=True
    )
    seconds = time.perf_counter() - began
    if any(row.state != "done" for row in rows):
        raise VolpipeError(next(row.reason for row in rows if row.state != "done"))
    return seconds


def _with_a_core_each(workers: int, folder: Path) -> AbstractContextManager[ParslPool]:
    """Start the site `local`, each of its `workers` bound to a core."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    bound = executor("local", workers, 1)
    bound.cpu_affinity = "list:" + ":".join(map(str, cores))
    return start_pool(with_executors(str(folder), [bound]))


ROWS = [
    Row(
        "sweep",
        "sweep on two workers ÷ on one",
        1 / 1.8,
        0.52,
        measure,
        why="8 trainings of 1,000 steps, a thread and a core each, with the start of Parsl and torch on both sides",
    )
]
