"""Tasks of one app over many units: a bounded number under way, those that are lost sent again.

Not here: runs of a net, whose order has rules of its own (loop, schedule), or how workers are started (apps.pool).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from volpipe.blockwise.failures import message_of
from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RunStopped, TaskLost

ATTEMPTS = 3


def gather(
    pool: WorkerPool, app: str, job: object, units: Sequence[int], verb: str = "scored"
) -> Iterator[Any]:  # Any: the app's own
    """Yield the app's results for `job` and each unit, in the order of units; a bounded number is under way at a time.

    Raises:
        RunStopped: a unit failed, or its workers were lost too often.
    """
    ready: dict[int, Any] = {}
    remaining = iter(units)
    expected = next(remaining, None)
    for unit, record in finished(pool, app, job, units, verb, lambda: len(ready)):
        ready[unit] = record.result
        while expected in ready:
            yield ready.pop(expected)
            expected = next(remaining, None)


def finished(
    pool: WorkerPool,
    app: str,
    job: object,
    units: Sequence[int],
    verb: str,
    num_held: Callable[[], int] = lambda: 0,
    on_failure: Callable[[int, str], None] = lambda unit, reason: None,
) -> Iterator[tuple[int, Record[Any]]]:
    """Yield each unit as it ends, with the record that the app gave.

    Args:
        pool: the workers.
        app: its name.
        job: its argument beside the unit.
        units: numbers.
        verb: participle of the work, for messages: "scored".
        num_held: how many the caller keeps back, which count as under way.
        on_failure: told of a unit that failed, and why, before this ends.

    Raises:
        RunStopped: a unit failed, or its workers were lost too often.
    """
    most = 2 * max(1, pool.slots["cpu"])
    under_way: dict[Future[Record[Any]], int] = {}
    attempts: dict[int, int] = {}
    left = iter(units)
    while True:
        while len(under_way) + num_held() < most and (unit := next(left, None)) is not None:
            under_way[pool.submit(app, job, unit)] = unit
        if not under_way:
            return
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            unit = under_way.pop(future)
            try:
                record = _record(future, unit, attempts, verb)
            except RunStopped as error:
                on_failure(unit, str(error))
                raise
            if record is None:
                under_way[pool.submit(app, job, unit)] = unit
            else:
                yield unit, record


def _record(future: Future[Record[Any]], unit: int, attempts: dict[int, int], verb: str) -> Record[Any] | None:
    """Return the record, None if the unit is worth another try."""
    try:
        record = future.result()
    except TaskLost as error:
        attempts[unit] = attempts.get(unit, 0) + 1
        if attempts[unit] >= ATTEMPTS:
            raise RunStopped(f"block {unit} lost its worker {ATTEMPTS} times: {error}") from error
        return None
    if record.failed:
        reason = record.failed[0][1]
        raise RunStopped(f"block {unit} cannot be {verb}: {message_of(reason)}", reason)
    return record
