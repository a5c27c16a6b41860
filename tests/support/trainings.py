"""Small trainings for tests: a recipe, its volume, and workers that are threads of the test's own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from inline import perform

from volpipe.errors import WorkerLost
from volpipe.recipes.training import LOSSES
from volpipe.training.data.augment import PairMaker
from volpipe.training.data.samples import Sampler

LEANING = """
[net]
name = "superres"
options = { factor = 2, features = 4, num_blocks = 1 }

[[data]]
path = "v.tif"
held_out = "0:8,:,:"

[degrade]
kind = "bin"

[samples]
shape = [4, 16, 16]
margin = [1, 2, 2]
"""
SHORT = """
[train]
steps = 6
batch = 1
warm_up = 2
learning_rate = 2e-3
checkpoint_every = 2
threads = 1
schedule = "constant"
"""


def make_folder(folder: Path, more: str = "", *, train: str = SHORT) -> Path:
    """Write a volume of planes that lean, and a recipe to learn from it that ends in `train` and `more`."""
    z, y, x = np.mgrid[:40, :32, :32]
    tifffile.imwrite(folder / "v.tif", (127 + 100 * np.sin((z + y / 2 + x / 3) * 0.9)).astype(np.uint8))
    (folder / "recipe.toml").write_text(LEANING + train + more)
    return folder


@dataclass(frozen=True)
class Sample:
    """One window as a net learns from it, (c, z, y, x)."""

    inputs: np.ndarray
    truth: np.ndarray


def write_cells(folder: Path) -> None:
    """Write a volume of grey cells with bright nuclei, and the class of each voxel, 0, 1 or 2."""
    z, y, x = np.mgrid[:32, :32, :32]
    cells = ((z % 16 - 8) ** 2 + (y % 16 - 8) ** 2 + (x % 16 - 8) ** 2) ** 0.5
    classes = (cells < 7).astype(np.uint16) + (cells < 3)
    noise = np.random.default_rng(1).normal(0, 8, classes.shape)
    tifffile.imwrite(folder / "v.tif", np.clip(60 + 70 * classes + noise, 0, 255).astype(np.uint8))
    tifffile.imwrite(folder / "l.tif", classes)


def made(sampler: Sampler, number: int) -> Sample:
    """Return window `number` of `sampler`, made on the CPU."""
    maker = PairMaker(sampler)
    inputs, truth = maker.pair([maker.load(sampler.window(number))])
    return Sample(inputs[0].numpy(), truth[0].numpy())


def losses_in(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / LOSSES).read_text().splitlines()]


class Threads:
    """Workers that are threads; the first `lose` tasks whose folder ends in `victim` are lost before they begin.

    Attributes:
        most: tasks that had been sent and had not ended, at most.
        sent: the folder of each task, in order.
    """

    address = "127.0.0.1"
    shared = True

    def __init__(self, slots: int, victim: str = "", lose: int = 0) -> None:
        self.slots = {"cpu": slots, "gpu": slots}
        self.sent: list[str] = []
        self.most = 0
        self._victim, self._lose = victim, lose
        self._running, self._lock = 0, threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def start(self, folder: Path) -> Iterator[Threads]:
        with ThreadPoolExecutor(self.slots["gpu"]) as self._pool:
            yield self

    def num_connected(self) -> int:
        return self.slots["gpu"]

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        folder = Path(arguments[0]).name
        self.sent.append(folder)
        if folder == self._victim and self._lose:
            self._lose -= 1
            future: Future[Any] = Future()
            future.set_exception(WorkerLost("the worker was killed"))
            return future
        assert self._pool is not None
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        return self._pool.submit(self._run, app, *arguments)

    def _run(self, app: str, *arguments: Any) -> Any:
        try:
            return perform(app, *arguments)
        finally:
            with self._lock:
                self._running -= 1
