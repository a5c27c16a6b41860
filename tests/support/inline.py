"""Workers for tests: tasks run in the calling thread, at once or in a shuffled order; no Parsl, no process."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from volpipe.apps.app import APPS
from volpipe.apps.app import perform as run_app
from volpipe.blockwise.journal import Record
from volpipe.blockwise.loop import perform as perform_work
from volpipe.blockwise.pool import Capacity, WorkerPool
from volpipe.blockwise.work import Steps, Work

R = TypeVar("R")


def perform(app: str, *arguments: Any) -> Record[Any]:
    """Do what a worker does of an app."""
    return run_app(APPS[app].function, *arguments, parsl_resource_specification={})


def take_steps(steps: Steps[R], pool: WorkerPool) -> R:
    """Return the result of work that is one generator of steps, on a pool that is started."""
    return perform_work(Work("errand", lambda: steps), lambda: nullcontext(pool))


class Stopped(BaseException):
    """What a test interrupts a run with; no code of ours may catch it."""


class Inline:
    """Executors whose threads take waiting tasks at random, or in the order of the sites.

    Attributes:
        shared, is_here, address, worker_bytes, worker_threads, on_gpu, node_directory, capacity: as every
            site says them.

    Args:
        seed: of the order.
        slots: threads; twice as many tasks wait.
        most_tasks: after as many, the driver is interrupted, and what waits is never done.
        in_turn: take tasks by the priority of their app, the earliest first, as executors of sites do.
    """

    shared = True
    is_here = True
    address = "127.0.0.1"
    worker_bytes: int | None = None
    worker_threads: int | None = None
    on_gpu: bool = False
    node_directory: str | None = None
    capacity: Capacity | None = None

    def __init__(self, seed: int = 0, slots: int = 1, most_tasks: int | None = None, *, in_turn: bool = False) -> None:
        self.slots = {"cpu": slots, "gpu": slots}
        self.num_tasks = 0
        self._most_tasks = most_tasks
        self._in_turn = in_turn
        self._random = random.Random(seed)
        self._waiting: list[tuple[Future[Record[Any]], str, tuple[Any, ...]]] = []
        self._changed = threading.Condition()
        self._started = self._stopped = False

    def num_connected(self) -> int:
        return self.slots["cpu"]

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        """Do what the app does: in its turn in a thread, at once where none was started."""
        if self._most_tasks is not None and self.num_tasks >= self._most_tasks:
            raise Stopped
        self.num_tasks += 1
        future: Future[Record[Any]] = Future()
        if not self._started:
            future.set_result(perform(app, *arguments))
            return future
        with self._changed:
            self._waiting.append((future, app, arguments))
            self._changed.notify()
        return future

    @contextmanager
    def start(self, folder: Path) -> Iterator[Inline]:
        self._started = True
        threads = [threading.Thread(target=self._work) for _ in range(self.slots["cpu"])]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                future, app, arguments = self._waiting.pop(self._next())
            future.set_result(perform(app, *arguments))

    def _next(self) -> int:
        if not self._in_turn:
            return self._random.randrange(len(self._waiting))
        priorities = [APPS[app].priority for _, app, _ in self._waiting]
        return priorities.index(min(priorities))
