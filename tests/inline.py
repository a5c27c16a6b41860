"""Workers for tests: tasks run in the calling thread, at once or in a shuffled order; no Parsl, no process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apps.stages import APPS
from volpipe import rehearsal, worker
from volpipe.journal import Record
from volpipe.run import Submit
from volpipe.worker import Job


def perform(job: Job, stage: str, units: Sequence[int]) -> Record:
    """Do what the Parsl apps do."""
    name, _, argument = stage.partition(" ")
    if name == "pyramid":
        return worker.coarsen(job, units, int(argument))
    if name == "discard":
        return worker.discard(job, units, argument)
    functions: dict[str, Callable[[Job, Sequence[int]], Record]] = {
        "rehearse": rehearsal.try_blocks,
        "scan": worker.scan,
        "measure": worker.measure,
        "histogram": worker.measure,
        "factor": worker.factor,
        "infer": worker.infer,
        "reassemble": worker.reassemble,
    }
    return functions[name](job, units)


class Stopped(BaseException):
    """What a test interrupts a run with; no code of ours may catch it."""


class Inline:
    """Executors whose threads take waiting tasks at random, or in the order of the sites.

    Attributes:
        shared, is_here, worker_bytes, worker_threads, on_gpu, node_directory: as every site says them.

    Args:
        seed: of the order.
        slots: threads; twice as many tasks wait.
        most_tasks: after as many, the driver is interrupted, and what waits is never done.
        in_turn: take tasks by the priority of their app, the earliest first, as executors of sites do.
    """

    shared = True
    is_here = True
    worker_bytes: int | None = None
    worker_threads: int | None = None
    on_gpu: bool = False
    node_directory: str | None = None

    def __init__(self, seed: int = 0, slots: int = 1, most_tasks: int | None = None, *, in_turn: bool = False) -> None:
        self.slots = {"cpu": slots, "gpu": slots}
        self.num_tasks = 0
        self._most_tasks = most_tasks
        self._in_turn = in_turn
        self._random = random.Random(seed)
        self._waiting: list[tuple[Future[Record], Job, str, list[int]]] = []
        self._changed = threading.Condition()
        self._stopped = False

    def submitter(self, job: Job) -> Submit:
        def submit(stage: str, units: Sequence[int]) -> Future[Record]:
            if self._most_tasks is not None and self.num_tasks >= self._most_tasks:
                raise Stopped
            self.num_tasks += 1
            future: Future[Record] = Future()
            with self._changed:
                self._waiting.append((future, job, stage, list(units)))
                self._changed.notify()
            return future

        return submit

    def send(self, label: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]:  # Any: the function's
        """Do what `function` does in the calling thread."""
        if self._most_tasks is not None and self.num_tasks >= self._most_tasks:
            raise Stopped
        self.num_tasks += 1
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    @contextmanager
    def start(self, folder: Path) -> Iterator[Inline]:
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
                future, job, stage, units = self._waiting.pop(self._next())
            future.set_result(perform(job, stage, units))

    def _next(self) -> int:
        if not self._in_turn:
            return self._random.randrange(len(self._waiting))
        priorities = [APPS[stage.partition(" ")[0]].priority for _, _, stage, _ in self._waiting]
        return priorities.index(min(priorities))
