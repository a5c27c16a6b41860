"""The other side of a comparison: processes that have loaded what they need and wait, so that only work is timed.

Not here: what they do; each family of rows gives a function of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

Take = Callable[[], int]  # the number of the next piece of work; each goes to one process
Prepare = Callable[..., Callable[[Take], None]]

LONGEST_SECONDS = 3600.0


@contextmanager
def peers(
    num: int, prepare: Prepare, *arguments: object, env: Mapping[str, str] | None = None
) -> Iterator[Callable[[], float]]:
    """Start `num` processes in which ``prepare(*arguments)`` gives what is to be timed.

    Yields a function that lets all of them do it once, together, and returns the seconds until the last is done. They
    share their work by taking numbers, so that none waits for another at the end.
    """
    spawn = multiprocessing.get_context("spawn")
    counter = spawn.Value("q", 0)
    with _environment(env or {}):
        ends = [spawn.Pipe() for _ in range(num)]
        processes = [
            spawn.Process(target=_serve, args=(theirs, counter, prepare, arguments), daemon=True) for _, theirs in ends
        ]
        for process in processes:
            process.start()
    connections = [ours for ours, _ in ends]
    try:
        _gather(connections)

        def go() -> float:
            counter.value = 0
            started = time.perf_counter()
            for connection in connections:
                connection.send("go")
            _gather(connections)
            return time.perf_counter() - started

        yield go
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(connection: Connection, counter: Synchronized[int], prepare: Prepare, arguments: tuple[Any, ...]) -> None:
    def take() -> int:
        with counter.get_lock():
            counter.value += 1
            return counter.value - 1

    try:
        work = prepare(*arguments)
        connection.send("")
        while True:
            connection.recv()
            work(take)
            connection.send("")
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def _gather(connections: list[Connection]) -> None:
    for connection in connections:
        if not connection.poll(LONGEST_SECONDS):
            raise TimeoutError(f"the other side did not answer within {LONGEST_SECONDS:.0f} s")
        error = connection.recv()
        if error:
            raise RuntimeError(f"the other side failed: {error}")


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
