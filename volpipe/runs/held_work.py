"""Work that holds a folder: claimed, logged, reported and performed alike, whatever it makes.

Not here: work that may be a stage of a flow (stage_work), or what is done while the folder is held (workflow.driver,
evaluation.driver, training.driver). The folder holds log and lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.work import POOL, Steps, Work
from volpipe.errors import NOTICE
from volpipe.reporting.page import REPORT, Page, reason_of
from volpipe.reporting.render import write_page
from volpipe.runs.pages import is_current
from volpipe.runs.presence import Presence, present
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage import paths

log = logging.getLogger(__name__)

R = TypeVar("R")
QUICK_BYTES = 32 << 20  # of a journal that is read within seconds
Counts = Mapping[str, Mapping[str, float]]  # how many parts there are by state, by what they are


class HeldWork(Work[R]):
    """Work with a folder of its own, that holds its log and lock; whoever has such a work gives its functions.

    Args:
        claim: makes sure that folder and output are its to write, emptied for a fresh start; else it raises `RunError`.
        held_steps: does what is not done yet as the session of that name, which holds the folder.
        page: returns the report, as the work stands in its folder, `with_pictures` or without.
        name: the output; the folder where it is not given.
        check: refuses what it reads, before the folder is held; else it raises `VolpipeError`.
        witnesses: returns the files that grow when something is done; none where the report is always made anew.
        counts: returns how many parts there are.

    Attributes:
        waits: whether nothing is done until what it reads changes.
    """

    waits = False

    def __init__(
        self, kind: str, folder: RunFolder, *, claim: Callable[[], None],
        held_steps: Callable[[str, Presence], Steps[R]], page: Callable[..., Page], name: str = "",
        check: Callable[[], None] = lambda: None, witnesses: Callable[[], Sequence[Path]] = lambda: (),
        counts: Callable[[], Counts] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.folder, self.name = kind, folder, name or str(folder.path)
        self.claim, self.held_steps, self.page, self.counts = claim, held_steps, page, counts
        self.check, self.witnesses = check, witnesses

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Write the report when what is done meanwhile ends, however it ends; it is never a reason to fail.

        Who interrupts does not wait for pictures, nor for a journal that takes more than a moment to read. An error has
        a note of where the report is.
        """
        was_current, before = is_current(self.folder.path, self.witnesses()), list(map(paths.size, self.witnesses()))
        try:
            yield
        except Exception as error:
            if self._write_report(reason=reason_of(error)):
                error.add_note(f"report: {self.folder.path / REPORT}")
            raise
        except BaseException:  # interrupted; during a wait there is a report, with pictures
            if not self.waits and (paths.size(self.folder.journal) or 0) <= QUICK_BYTES:
                self._write_report(with_pictures=False)
            raise
        if not (was_current and before == list(map(paths.size, self.witnesses()))):
            self._write_report()

    def _write_report(self, *, with_pictures: bool = True, reason: str = "") -> bool:
        """Write the report, and return whether it could be written; the user knows of the `reason` why work stops."""
        try:
            with paths.reading_once():
                write_page(self.page(with_pictures=with_pictures), self.folder.path / REPORT)
        except Exception as error:
            why = reason_of(error)
            extra = None if why == reason else NOTICE
            log.warning("no report was written to %s: %s", self.folder.path / REPORT, why, extra=extra)
            return False
        return True

    def run(self, start: Start) -> R:
        """Do it on workers, and return how it ended.

        Args:
            start: starts them when they are needed, and stops them on every way out; it is given a folder for files.
        """
        return perform(self, partial(start, self.folder.parsl))

    def steps(self) -> Steps[R]:
        """Do what is missing, and return how that ended.

        Raises:
            RunError: another run's folder or output is in the way, or the input has changed.
            RunStopped: too much fails.
        """
        self.check()
        with self.folder.locked() as name:
            self.claim()
            path = self.folder.path
            log_file, reports = logging_to(self.folder.log), self.reporting()
            with log_file, reports, present(path, name) as presence:
                return (yield from self.held_steps(name, presence))


def try_blocks(folder: RunFolder, start: Start, steps_of: Callable[[WorkerPool], Steps[R]]) -> R:
    """Return what comes of steps that try blocks on the workers that `start` starts, while the `folder` is held."""

    def steps() -> Steps[R]:
        with folder.locked(), logging_to(folder.log):
            return (yield from steps_of((yield POOL)))

    return perform(Work("plan", steps), partial(start, folder.parsl))
