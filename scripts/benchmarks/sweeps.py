"""Sweeps: of small trainings on two workers, against the same on one; and of 24 that wait, as for a GPU, on as many.

A worker of the first has one core, to which it is bound: a training with one thread reads ahead in another, which would
otherwise take a part of the second core where one worker is alone. Those of the second are threads of this process,
with the driver and the loop of every training: their nets wait half a second in each step, and compute next to nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from parsl.config import Config
from parsl.executors import ThreadPoolExecutor

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting, compared
from volpipe.apps.pool import ParslPool, start_pool
from volpipe.configs.local import executor, with_executors
from volpipe.errors import VolpipeError
from volpipe.training.search.grid import Sweep
from volpipe.training.search.trials import run_search

RECIPE = """
net = { name = "superres", options = { factor = 2, features = 8, num_blocks = 2 } }
data = [{ path = "PATH" }]
normalise = { low = 0, high = 255 }
degrade = { kind = "bin" }
samples = { shape = [8, 32, 32] }
train = { steps = STEPS, batch = 2, threads = 1 }
[sweep]
"train.seed" = SEEDS
"train.learning_rate" = [1e-3, 3e-4]
"""
WAITING = """
net = { name = "waiting.py:net" }
data = [{ path = "PATH" }]
normalise = { low = 0, high = 255 }
degrade = { noise = 4 }
samples = { shape = [16, 32, 32] }
train = { steps = STEPS, batch = 2, threads = 1 }
[sweep]
"train.seed" = SEEDS
"""
NET = """
import time
from torch import nn

class Waiting(nn.Conv3d):
    def forward(self, windows):
        if self.training:
            time.sleep(0.5)
        return super().forward(windows)

def net():
    return Waiting(1, 1, 3, padding=1)
"""
MANY, FEW = 24, 3  # trainings side by side, and one after another, of which each takes the same time
Start = Callable[[Path], AbstractContextManager[ParslPool]]


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    steps = 10 if setting.short else 1000
    recipe = _recipe(setting, RECIPE, STEPS=steps, SEEDS=list(range(MANY // 2)))

    def seconds(workers: int) -> float:
        return _sweep(setting, recipe, partial(_with_a_core_each, workers))

    yield from compared(repeats, lambda: seconds(2), lambda: seconds(1), "one worker")


def measure_many(setting: Setting, repeats: int) -> Iterator[Outcome]:
    (setting.scratch / "waiting.py").write_text(NET, encoding="utf-8")
    steps = 2 if setting.short else 40

    def seconds(trainings: int, workers: int) -> float:
        recipe = _recipe(setting, WAITING, STEPS=steps, SEEDS=list(range(trainings)))
        return _sweep(setting, recipe, partial(_as_threads, workers))

    seconds(1, 1)  # so that neither side imports torch
    yield from compared(repeats, lambda: seconds(MANY, MANY), lambda: seconds(FEW, 1) * MANY / FEW, "one after another")


def _recipe(setting: Setting, text: str, **numbers: object) -> Path:
    recipe = setting.scratch / "recipe.toml"
    for name, value in {"PATH": inputs.volume(setting, (128, 128, 128)), **numbers}.items():
        text = text.replace(name, str(value))
    recipe.write_text(text, encoding="utf-8")
    return recipe


def _sweep(setting: Setting, recipe: Path, start: Start) -> float:
    """Return the seconds of all trainings, from before the workers start until they are gone."""
    began = time.perf_counter()
    rows = run_search(Sweep.load(recipe), setting.scratch / "sweep", start, search_path=setting.scratch, fresh=True)
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


def _as_threads(workers: int, folder: Path) -> AbstractContextManager[ParslPool]:
    """Start the site `threads` with so many `workers`."""
    threads = ThreadPoolExecutor(label="threads", max_threads=workers)
    return start_pool(
        Config(executors=[threads], run_dir=str(folder), strategy="none", initialize_logging=False, usage_tracking=0)
    )


ROWS = [
    Row(
        "sweep",
        "sweep on two workers ÷ on one",
        1 / 1.8,
        0.52,
        measure,
        why="24 trainings of 1,000 steps, a thread and a core each, with the start of Parsl and torch on both sides",
    ),
    Row(
        "sweep-24",
        "24 trainings that wait, on 24 workers ÷ one after another",
        1 / 20,
        1 / 22,
        measure_many,
        why="40 steps of half a second each; one after another is 8 times 3 of them on one worker",
    ),
]
