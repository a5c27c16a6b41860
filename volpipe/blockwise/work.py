"""Work: what is done on a pool of workers, written as a generator of the steps that it needs others for.

Not here: who answers the steps (loop), what a phase does with its tasks (phase), or any work of a kind: a run of a net,
a segmentation, an evaluation, a training, a calibration, or many of them together::

    pool = yield POOL             a pool, started for the first work that asks
    yield phase                   the units of its stages are done on workers
    yield Together(works, …)      other works are done side by side
    yield Until(condition)        other work has come as far, or time has passed
    yield RELEASED                workers are needed no more
    return report

Observers hear of all that the loop does, whatever the work: metrics, logs, notifications.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

from volpipe.blockwise.failures import message_of
from volpipe.blockwise.journal import Record
from volpipe.blockwise.phase import Phase, Progress, Show
from volpipe.blockwise.pool import WorkerPool, followed
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.errors import RunStopped, VolpipeError

R = TypeVar("R")


class Need(Enum):
    """A step that is no phase and no other work."""

    POOL = "pool"
    RELEASED = "released"


POOL, RELEASED = Need.POOL, Need.RELEASED


@dataclass(frozen=True)
class Ended(Generic[R]):
    """How one of several works ended: with its result, or with the error that stopped it; it was open for `seconds`."""

    work: Work[R]
    result: R | None = None
    error: VolpipeError | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Together:
    """Works to be done side by side; an error of one stops no other.

    Attributes:
        works: begun in order, as workers get free.
        at_once: how many may be open at a time.
        latest_first: whether tasks of later works go before those of earlier ones.
        on_tick: called now and then meanwhile.
    """

    works: Iterable[Work[Any]]
    on_end: Callable[[Ended[Any]], None]
    at_once: int = 64
    latest_first: bool = False
    on_tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Until:
    """A step that is over when the condition holds.

    Attributes:
        is_pause: whether time brings that about, or somebody outside, and no other work. Workers are stopped meanwhile,
            once what they do has come back; who needs some later asks for a pool again.
    """

    condition: Callable[[], bool]
    is_pause: bool = False


Step = Need | Until | Phase | Together
Steps = Generator[Step, Any, R]


@dataclass(eq=False)
class Work(Generic[R]):
    """Something to be done on a pool.

    Attributes:
        name: in messages, and in tables of several works.
        steps: yields what is needed next, and returns the result; raises `VolpipeError` where it cannot be done.
        kind: what it is, such as "flow_stage", as the log calls it where it is one of several.
        number: that of its row, where it is one of several in a table.
    """

    name: str
    steps: Callable[[], Steps[R]]
    kind: str = ""
    number: int = 0


Place = tuple[int, ...]  # of a work: that of the work that it belongs to, and its number among its siblings
Works = Sequence[Work[Any]]  # a work, the last, and those that it belongs to, the outermost first


class LoopObserver:
    """Hears what the loop does, in its thread, and does nothing; a method that is overridden must be quick.

    Unlike a listener, which belongs to one work, it ends no work by what it raises.
    """

    def begin(self, place: Place, works: Works) -> None:
        """Hear that a work is opened."""

    def use(self, pool: WorkerPool | None) -> None:
        """Hear that the pool was started, or, None, that it is about to be stopped."""

    def move(self, place: Place, works: Works, progress: Progress) -> None:
        """Hear how far the phase is that a work waits for."""

    def end(self, place: Place, works: Works, result: object, error: BaseException | None) -> None:
        """Hear how a work ended: with a result, or by an error."""


_observers: ContextVar[tuple[LoopObserver, ...]] = ContextVar("observers", default=())


def observers() -> tuple[LoopObserver, ...]:
    """Return who observes the work of this thread."""
    return _observers.get()


@contextmanager
def observing(observer: LoopObserver) -> Iterator[None]:
    """Let `observer` hear of all work that this thread performs meanwhile."""
    token = _observers.set((*observers(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def each(
    name: str,
    app: str,
    arguments: Callable[[int], Sequence[Any]],  # Any: the app's own
    num: int,
    *,
    label: str = "cpu",
    show: Show = lambda progress: None,
) -> Steps[list[Record[Any]]]:
    """Do `num` tasks of one app that wait for nothing, and return the record of each.

    Args:
        name: of the stage, for messages.
        arguments: of the task of each number.
        label, show: as of `Stage` and `Phase`.

    Raises:
        RunStopped: a task fails for good; what that stops is the caller's to say.
    """
    records: dict[int, Record[Any]] = {}
    pool: WorkerPool = yield POOL

    def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
        return followed(pool.submit(app, *arguments(units[0])), partial(numbered, stage, units[0]))

    def keep(units: Sequence[int], record: Record[Any]) -> None:
        records[units[0]] = record

    stage = Stage(name, num, label=label, marked=False, most=1)
    phase = Phase(Schedule(stage), submit, show=show, tolerated=0, on_record=keep)
    try:
        yield phase
    except RunStopped as error:
        if not stage.failed:
            raise
        unit = min(stage.failed)
        raise RunStopped(f"{name} {unit} failed: {message_of(phase.reasons[name, unit])}", error.detail) from error
    return [records[unit] for unit in range(num)]


def numbered(stage: str, unit: int, record: Record[Any]) -> Record[Any]:
    """Return the record of a task that has units of its own, as that of the one `unit` of `stage`."""
    failed = tuple((unit, reason) for _, reason in record.failed[:1])
    return dataclasses.replace(record, stage=stage, done=() if failed else (unit,), failed=failed, permanent=())
