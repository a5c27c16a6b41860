"""A task on a worker: goes through its units, and returns what became of each as one record.

Not here: the work on a unit (worker, segmentation).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from functools import lru_cache

from volpipe.blockwise.journal import Record
from volpipe.blockwise.malloc import share_heap
from volpipe.blockwise.usage import is_alone, measured
from volpipe.errors import ChunkError, NetError
from volpipe.volumes.node_cache import take_warnings

Outcomes = Iterator[tuple[int, Exception | None]]


def work(stage: str, units: Sequence[int], outcomes: Outcomes) -> Record:
    """Return the record of a task that goes through the `outcomes` of its `units`, with what it took."""
    if is_alone():
        _settle()
    done: list[int] = []
    failed: dict[int, str] = {}
    hopeless: list[int] = []
    fatal = False
    with measured(stage) as usage:
        try:
            for unit, error in outcomes:
                if error is None:
                    done.append(unit)
                    continue
                failed[unit] = _reason(error)
                if isinstance(error, ChunkError) and not error.may_mend:
                    hopeless.append(unit)
        except Exception as error:  # a net that does not load, say: every unit that is left fails alike
            failed |= {unit: _reason(error) for unit in units if unit not in done and unit not in failed}
            fatal = isinstance(error, NetError)
    return Record(
        stage,
        tuple(sorted(done)),
        tuple(sorted(failed.items())),
        hopeless=tuple(sorted(hopeless)),
        told=take_warnings(),
        fatal=fatal,
        **usage,
    )


@lru_cache(maxsize=1)
def _settle() -> None:
    share_heap()


def _reason(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).strip()
