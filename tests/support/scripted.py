"""Workers and works that exist in a test alone: a task is finished whenever somebody is shown progress."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from volpipe.blockwise.journal import Journal, Record
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.usage import Usage
from volpipe.blockwise.work import POOL, RELEASED, Ended, Steps, Together, Work
from volpipe.errors import TaskLost
from volpipe.runs.presence import present

log = logging.getLogger("volpipe.test_works")


def succeed(stage: str, units: Sequence[int]) -> Record[Any]:
    return Record(stage, tuple(units), usage=Usage(seconds=0.001 * len(units)))


@dataclass
class Workers:
    """Tasks that are in flight until one of them is finished, at random.

    Attributes:
        work: what a task gives, or raises.
        tasks: stage and units of each, as they came.
        most_in_flight: by stage, and of all as "".
    """

    work: Callable[[str, Sequence[int]], Record[Any]] = succeed
    random: random.Random = field(default_factory=lambda: random.Random(0))
    tasks: list[tuple[str, list[int]]] = field(default_factory=list)
    in_flight: list[tuple[Future[Record[Any]], str, list[int]]] = field(default_factory=list)
    most_in_flight: Counter[str] = field(default_factory=Counter)
    num_shows: int = 0

    def submit(self, stage: str, units: Sequence[int]) -> Future[Record[Any]]:
        future: Future[Record[Any]] = Future()
        self.tasks.append((stage, list(units)))
        self.in_flight.append((future, stage, list(units)))
        for name, number in (("", len(self.in_flight)), (stage, sum(s == stage for _, s, _ in self.in_flight))):
            self.most_in_flight[name] = max(self.most_in_flight[name], number)
        return future

    def finish_one(self) -> None:
        if self.in_flight:
            future, stage, units = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
            try:
                future.set_result(self.work(stage, units))
            except (RuntimeError, TaskLost) as error:
                future.set_exception(error)

    def show(self, progress: Progress) -> None:
        """Finish a task of a phase that is alone."""
        self.num_shows += 1
        assert +progress.running == Counter(stage for _, stage, _ in self.in_flight)
        self.finish_one()


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


class Pool(Workers):
    """Workers of any number of works, whose names their tasks have in place of a stage's.

    Attributes:
        bad: works whose units all fail.
        shared: whether "cpu" and "gpu" are the same workers.
        num_starts: how often it was started; `is_open` from then until it is stopped.
    """

    shared = True

    def __init__(self, num_slots: int = 2, bad: Sequence[str] = (), refusal: Exception | None = None) -> None:
        super().__init__(self._part)
        self.slots, self.bad, self.refusal = {"cpu": num_slots, "gpu": num_slots}, bad, refusal
        self.num_starts, self.is_open = 0, False

    @contextmanager
    def start(self) -> Iterator[Any]:
        self.num_starts += 1
        if self.refusal is not None:
            raise self.refusal
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    def submit(self, work: str, units: Sequence[int]) -> Future[Record[Any]]:
        assert self.is_open
        return super().submit(work, units)

    def _part(self, work: str, units: Sequence[int]) -> Record[Any]:
        failed = tuple((unit, "Traceback\nValueError: no good") for unit in units) if work in self.bad else ()
        return Record("part", () if failed else tuple(units), failed, usage=Usage(seconds=0.001))

    def show(self, progress: Progress | None) -> None:
        self.finish_one()


@dataclass
class Part:
    """A work of `num` units, of which everything is noted.

    Attributes:
        folder: with log, journal and presence of its own, if any.
        before, after: called before it asks for workers, and after it has released them.
        marked: units that came back.
        seen: the error by which it was left; None where it came to its end.
        events: of all works, "+name" and "-name".
    """

    name: str
    pool: Pool
    num: int = 8
    folder: Path | None = None
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    marked: list[int] = field(default_factory=list)
    seen: BaseException | None = None
    events: list[str] = field(default_factory=list)

    def steps(self) -> Steps[int]:
        self.events.append(f"+{self.name}")
        try:
            if self.folder is None:
                return (yield from self._steps(None))
            self.folder.mkdir()
            with (
                logging_to(self.folder / "log"),
                present(self.folder, self.name),
                Journal(self.folder / "journal", ()) as journal,
            ):
                return (yield from self._steps(journal))
        except BaseException as error:
            self.seen = error
            raise
        finally:
            self.events.append(f"-{self.name}")

    def _steps(self, journal: Journal | None) -> Steps[int]:
        self.before()
        yield POOL
        log.info("%s begins", self.name)
        stage = Stage("part", self.num, most=1)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            return self.pool.submit(self.name, units)

        def keep(units: Sequence[int], record: Record[Any]) -> None:
            self.marked += record.done

        yield Phase(Schedule(stage), submit, journal, self.pool.show, on_record=keep)
        yield RELEASED
        self.after()
        log.info("%s ends", self.name)
        return self.num


def perform_all(pool: Pool, works: Iterable[Work[Any] | Part], **options: Any) -> dict[str, Ended[Any]]:
    """Do `works` together, and return how each ended by its name, in the order in which they did."""
    ended: dict[str, Ended[Any]] = {}

    def on_end(one: Ended[Any]) -> None:
        ended[one.work.name] = one

    def steps() -> Steps[None]:
        yield Together((Work(work.name, work.steps) for work in works), on_end, **options)

    perform(Work("all", steps), pool.start)
    return ended
