"""Files of results while their command works: those of an earlier command are deleted as its work begins.

Not here: what may be replaced, or how a file is written (volumes.storage.result_file).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import LoopObserver, observing
from volpipe.volumes.storage.result_file import ResultFile


class _Clearing(LoopObserver):
    """Deletes what earlier commands wrote once a pool is there: all checks have passed, and blocks are next."""

    def __init__(self, files: Sequence[ResultFile]) -> None:
        self.files = files

    def use(self, pool: WorkerPool | None) -> None:
        if pool is not None:
            for file in self.files:
                file.clear()


@contextmanager
def results_of(*files: ResultFile | None) -> Iterator[None]:
    """Clear `files` as soon as the work that this thread performs meanwhile begins, so that none outlasts a failure.

    Work that finds everything done already begins no block, and its caller writes the files all the same.

    Raises:
        VolpipeError: one of them cannot be written.
    """
    named = [file for file in files if file is not None]
    for file in named:
        file.check()
    with observing(_Clearing(named)):
        yield
