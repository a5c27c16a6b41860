"""How a command's work ended: as its result says, or by an error.

Not here: the exit code (cli), which follows from the same.
"""

from __future__ import annotations

from volpipe.blockwise.work import LoopObserver, Place, Works
from volpipe.errors import RunStopped, VolpipeError
from volpipe.reporting.page import REPORT
from volpipe.runs.held_work import HeldWork
from volpipe.runs.report import Ending


def ending_by(error: BaseException) -> Ending:
    """Return how the work ended that raised `error`."""
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", None, "interrupted; run the same command again to continue")
    if isinstance(error, RunStopped):
        return Ending("stopped", None, str(error))
    if isinstance(error, VolpipeError | OSError):
        return Ending("refused", None, str(error))
    return Ending("failed", None, f"{type(error).__name__}: {error}")


class Witness(LoopObserver):
    """Sees the outermost work begin and end.

    Attributes:
        work: None before it begins.
        ending: None before it ends.
    """

    def __init__(self) -> None:
        self.work: HeldWork[object] | None = None
        self.ending: Ending | None = None

    def begin(self, place: Place, works: Works) -> None:
        """Take note of the outermost work."""
        if not place:
            self.work = works[0] if isinstance(works[0], HeldWork) else None

    def end(self, place: Place, works: Works, result: object, error: BaseException | None) -> None:
        """Take note of how the outermost work ended."""
        if not place:
            self.ending = getattr(result, "ending", Ending("complete")) if error is None else ending_by(error)

    @property
    def output(self) -> str:
        """The output or the folder of the work, "" before it begins."""
        return "" if self.work is None else self.work.name

    @property
    def report(self) -> str | None:
        """The page about the work, None where there is none."""
        if self.work is None:
            return None
        path = self.work.folder.path / REPORT
        return str(path) if path.is_file() else None
