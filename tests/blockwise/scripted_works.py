"""Works and workers that exist in a test alone, as do their tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripted_workers import Workers

from volpipe.blockwise.journal import Journal, Record
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.usage import Usage
from volpipe.blockwise.work import (
    POOL,
    RELEASED,
    Ended,
    Steps,
    Together,
    Work,
)
from volpipe.runs.presence import present

log = logging.getLogger("volpipe.test_works")


@dataclass
class Pool(Workers):
    """Workers of all works, which are started and stopped; units of works in `bad` all fail.

    Attributes:
        num_slots: tasks at a time.
        shared: whether "cpu" and "gpu" are the same workers.
        num_starts: how often it was started; `is_open` from then until it is stopped.
    """

    num_slots: int = 2
    bad: tuple[str, ...] = ()
    shared: bool = True
    refusal: Exception | None = None
    num_starts: int = 0
    is_open: bool = False

    def __post_init__(self) -> None:
        self.work = self._done

    def _done(self, work: str, units: Sequence[int]) -> Record[Any]:
        failed = tuple((unit, "Traceback\nValueError: no good") for unit in units) if work in self.bad else ()
        return Record("part", () if failed else tuple(units), failed, usage=Usage(seconds=0.001))

    @property
    def slots(self) -> dict[str, int]:
        return {"cpu": self.num_slots, "gpu": self.num_slots}

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

    def submit(self, stage: str, units: Sequence[int]) -> Future[Record[Any]]:
        assert self.is_open
        return super().submit(stage, units)

    def show(self, progress: Progress) -> None:
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
