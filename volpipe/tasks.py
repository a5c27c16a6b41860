"""Tasks sent to workers by the name of their function: a bounded number under way, those that are lost sent again.

Not here: runs of a net, whose order has rules of its own (run, schedule), or how workers are started (apps.start).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from volpipe.errors import RunStopped, TaskLost
from volpipe.journal import Record
from volpipe.run import told_in

ATTEMPTS = 3


class Workers(Protocol):
    """Workers that take a function by its name."""

    @property
    def slots(self) -> Any: ...  # Any: a mapping, of a field or of a property

    def send(self, label: str, function: Callable[..., Any], *arguments: Any) -> Future[Any]: ...  # Any: its own


Start = Callable[[Path], AbstractContextManager[Workers]]


def gather(
    workers: Workers, function: Callable[..., Record], job: object, units: Sequence[int], wish: str = "scored"
) -> Iterator[tuple[Any, ...]]:  # Any: plain values
    """Yield what `function(job, unit)` gives for each unit, in their order; a bounded number is under way at a time.

    Raises:
        RunStopped: a unit failed, or its workers were lost too often.
    """
    ready: dict[int, tuple[Any, ...]] = {}
    due = iter(units)
    next_due = next(due, None)
    for unit, record in finished(workers, function, job, units, wish, lambda: len(ready)):
        ready[unit] = record.result
        while next_due in ready:
            yield ready.pop(next_due)
            next_due = next(due, None)


def finished(
    workers: Workers,
    function: Callable[..., Record],
    job: object,
    units: Sequence[int],
    wish: str,
    num_held: Callable[[], int] = lambda: 0,
    on_failure: Callable[[int, str], None] = lambda unit, reason: None,
) -> Iterator[tuple[int, Record]]:
    """Yield each unit as it ends, with the record that `function(job, unit)` gave.

    Args:
        workers: who does it, on executors for "cpu" stages.
        function: at the top of a module.
        job: what it is told beside the unit.
        units: numbers.
        wish: what becomes of a block, for messages: "scored".
        num_held: how many the caller keeps back, which count as under way.
        on_failure: told of a unit that failed, and why, before this ends.

    Raises:
        RunStopped: a unit failed, or its workers were lost too often.
    """
    most = 2 * max(1, workers.slots["cpu"])
    under_way: dict[Future[Record], int] = {}
    attempts: dict[int, int] = {}
    left = iter(units)
    while True:
        while len(under_way) + num_held() < most and (unit := next(left, None)) is not None:
            under_way[workers.send("cpu", function, job, unit)] = unit
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            unit = under_way.pop(future)
            try:
                record = _record(future, unit, attempts, wish)
            except RunStopped as error:
                on_failure(unit, str(error))
                raise
            if record is None:
                under_way[workers.send("cpu", function, job, unit)] = unit
            else:
                yield unit, record


def _record(future: Future[Record], unit: int, attempts: dict[int, int], wish: str) -> Record | None:
    """Return what came back, None if it is worth another try."""
    try:
        record = future.result()
    except TaskLost as error:
        attempts[unit] = attempts.get(unit, 0) + 1
        if attempts[unit] >= ATTEMPTS:
            raise RunStopped(f"block {unit} lost its worker {ATTEMPTS} times: {error}") from error
        return None
    if record.failed:
        reason = record.failed[0][1]
        raise RunStopped(f"block {unit} cannot be {wish}: {told_in(reason)}", reason)
    return record
