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
    num: int,
    prepare: Prepare,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    clock: Callable[[], float] | None = None,
) -> Iterator[Callable[[], float]]:
    """Start `num` processes in which ``prepare(*arguments)`` gives what is to be timed.

    Yields a function that lets all of them do it once, together, and returns the seconds until the last is done, or
    the sum of what each of them takes by `clock`. They share their work by taking numbers, so that none waits for
    another at the end.
    """
    spawn = multiprocessing.get_context("spawn")
    counter = spawn.Value("q", 0)
    with _environment(env or {}):
        ends = [spawn.Pipe() for _ in range(num)]
        processes = [
            spawn.Process(
                target=_serve, args=(theirs, counter, clock or time.perf_counter, prepare, arguments), daemon=True
            )
            for _, theirs in ends
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
            each = _gather(connections)
            return time.perf_counter() - started if clock is None else sum(each)

        yield go
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(
    connection: Connection,
    counter: Synchronized[int],
    clock: Callable[[], float],
    prepare: Prepare,
    arguments: tuple[Any, ...],
) -> None:
    def take() -> int:
        with counter.get_lock():
            counter.value += 1
            return counter.value - 1

    try:
        work = prepare(*arguments)
        connection.send(0.0)
        while True:
            connection.recv()
            started = clock()
            work(take)
            connection.send(clock() - started)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def _gather(connections: list[Connection]) -> list[float]:
    """Return the seconds that each of them took."""
    answers = []
    for connection in connections:
        if not connection.poll(LONGEST_SECONDS):
            raise TimeoutError(f"the other side did not answer within {LONGEST_SECONDS:.0f} s")
        answers.append(connection.recv())
        if isinstance(answers[-1], str):
            raise RuntimeError(f"the other side failed: {answers[-1]}")
    return answers


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
