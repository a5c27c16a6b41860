"""A task on a worker: goes through its units, and returns what became of each as one record.

Not here: the work on a unit (worker, segmentation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Generic, NoReturn, TypeVar

from volpipe.blockwise.journal import Record
from volpipe.blockwise.malloc import share_heap
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.usage import is_alone, measured
from volpipe.errors import ChunkError, LockLost, NetError
from volpipe.syntax import traceback_of
from volpipe.volumes.node_cache import take_warnings
from volpipe.volumes.storage.requests import InTurn, take_notes

FATAL = (LockLost, NetError)  # of a worker that may do nothing more of its work, whatever the unit
Outcomes = Iterator[tuple[int, Exception | None]]
P = TypeVar("P")
R = TypeVar("R")


def work(
    stage: str,
    units: Sequence[int],
    outcomes: Outcomes,
    result: Callable[[], R | None] = lambda: None,
    reporter: Reporter | None = None,
) -> Record[R]:
    """Return the record of a task that goes through the `outcomes` of its `units`; its `result` is asked at the end.

    `reporter` tells of it meanwhile.
    """
    reporter = reporter or Reporter()
    if is_alone():
        share_heap()
    done: list[int] = []
    failed: dict[int, str] = {}
    permanent: list[int] = []
    fatal = False
    with measured(stage) as meter, reporter.reporting(stage, units):
        try:
            for unit, error in outcomes:
                reporter.finish()
                if error is None:
                    done.append(unit)
                    continue
                failed[unit] = traceback_of(error)
                fatal = fatal or isinstance(error, FATAL)
                if isinstance(error, ChunkError) and not error.may_mend:
                    permanent.append(unit)
        except Exception as error:  # a net that does not load, say: every unit that is left fails alike
            failed |= {unit: traceback_of(error) for unit in units if unit not in done and unit not in failed}
            fatal = fatal or isinstance(error, FATAL)
    return Record(
        stage,
        tuple(sorted(done)),
        tuple(sorted(failed.items())),
        result(),
        meter.usage,
        permanent=tuple(sorted(permanent)),
        warnings=(*take_warnings(), *take_notes()),
        fatal=fatal,
    )


def work_each(
    stage: str,
    units: Sequence[int],
    function: Callable[[int], P],
    joined: Callable[[list[P]], R | None] = lambda results: None,
    check: Callable[[], None] = lambda: None,
    reporter: Reporter | None = None,
) -> Record[R]:
    """Return the record of a task that does `function`, which returns what a unit gives, for each of its `units`.

    The rest as of `work_behind`.
    """
    return work_behind(stage, units, Making(lambda unit: partial(function, unit)), joined, check, reporter)


@dataclass(frozen=True)
class Making(Generic[P]):
    """The work on a unit in two parts.

    Attributes:
        make: does the first part, and returns the second, which returns what the unit gives.
        at_once: how many second parts go on at a time, one of which may be of the unit whose first part is next.
    """

    make: Callable[[int], Callable[[], P]]
    at_once: int = 1


def work_behind(
    stage: str,
    units: Sequence[int],
    making: Making[P],
    joined: Callable[[list[P]], R | None] = lambda results: None,
    check: Callable[[], None] = lambda: None,
    reporter: Reporter | None = None,
) -> Record[R]:
    """Return the record of a task that makes each of its `units`, while it still writes those before.

    Args:
        joined: returns the result of the task from those of the units that did not fail.
        check: called before the second part of each unit, which writes; what it raises is that unit's failure.
        reporter: tells of it meanwhile. Once it is dismissed, no other unit begins; those are neither done nor failed.
    """
    results: list[P] = []
    reporter = reporter or Reporter()

    def second_part(unit: int) -> Callable[[], P]:
        try:
            return partial(_after, check, making.make(unit))
        except Exception as error:
            return partial(_raise, error)

    def outcomes() -> Outcomes:
        second_parts = map(second_part, takewhile(lambda unit: not reporter.is_dismissed, units))
        with closing(InTurn(second_parts, making.at_once)) as turns:
            for unit, future in zip(units, turns, strict=False):
                error = future.exception()
                if error is None:
                    results.append(future.result())
                elif not isinstance(error, Exception):
                    raise error
                yield unit, error

    return work(stage, units, outcomes(), lambda: joined(results), reporter)


def work_once(stage: str, unit: int, function: Callable[[], R], reporter: Reporter | None = None) -> Record[R]:
    """Return the record of a task of one unit, which `function` does; its result is what that returns."""

    def first(results: list[R]) -> R | None:
        return results[0] if results else None

    return work_each(stage, [unit], lambda unit: function(), first, reporter=reporter)


def _after(check: Callable[[], None], second: Callable[[], P]) -> P:
    check()
    return second()


def _raise(error: Exception) -> NoReturn:
    raise error
