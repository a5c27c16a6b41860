"""Workers that exist in a test alone and finish a task whenever the loop would wait."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from volpipe.blockwise.journal import Record
from volpipe.blockwise.loop import perform
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.usage import Usage
from volpipe.blockwise.work import POOL, Steps, Work
from volpipe.errors import TaskLost


def succeed(stage: str, units: Sequence[int]) -> Record[Any]:
    return Record(stage, tuple(units), usage=Usage(seconds=0.001 * len(units)))


@dataclass
class Workers:
    """Tasks that are in flight until `show` finishes one of them at random."""

    work: Callable[[str, Sequence[int]], Record[Any]] = succeed
    random: random.Random = field(default_factory=lambda: random.Random(0))
    tasks: list[tuple[str, list[int]]] = field(default_factory=list)
    in_flight: list[tuple[Future[Record[Any]], str, list[int]]] = field(default_factory=list)
    most_in_flight: Counter[str] = field(default_factory=Counter)
    most: int = 0
    num_shows: int = 0

    def submit(self, stage: str, units: Sequence[int]) -> Future[Record[Any]]:
        future: Future[Record[Any]] = Future()
        self.tasks.append((stage, list(units)))
        self.in_flight.append((future, stage, list(units)))
        self.most_in_flight[stage] = max(self.most_in_flight[stage], sum(s == stage for _, s, _ in self.in_flight))
        self.most = max(self.most, len(self.in_flight))
        return future

    def show(self, progress: Progress) -> None:
        self.num_shows += 1
        assert +progress.running == Counter(stage for _, stage, _ in self.in_flight)
        self.finish_one()

    def finish_one(self) -> None:
        if self.in_flight:
            future, stage, units = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
            try:
                future.set_result(self.work(stage, units))
            except (RuntimeError, TaskLost) as error:
                future.set_exception(error)


@dataclass
class Looped:
    """A phase, and the loop over it."""

    phase: Phase
    slots: dict[str, int]

    @property
    def reasons(self) -> dict[tuple[str, int], str]:
        return self.phase.reasons

    def run(self) -> None:
        def steps() -> Steps[None]:
            yield POOL
            yield self.phase

        perform(Work("test", steps), lambda: nullcontext(SimpleNamespace(slots=self.slots)))  # type: ignore[arg-type]
