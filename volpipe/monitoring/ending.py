"""How a command's work ended, in a word that machines are told: of a result, or of an error.

Not here: the exit code (cli), which follows from the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from volpipe.blockwise.work import Observer, Place, Work, Works
from volpipe.errors import RunStopped, VolpipeError
from volpipe.reporting.page import REPORT
from volpipe.runs.report import WorkReport
from volpipe.runs.work import HeldWork
from volpipe.training.driver import TrainingResult
from volpipe.training.search.trials import TrialResult
from volpipe.workflow.batch_table import BatchReport
from volpipe.workflow.execute import FlowReport

State = Literal["running", "waiting", "complete", "incomplete", "stopped", "interrupted", "refused", "failed"]
"""waiting: until a volume that is followed is looked at again · complete: nothing is missing of what was asked for ·
incomplete: it came to its end, and parts are missing · stopped: too much failed · interrupted: somebody stopped it ·
refused: nothing began · failed: a fault that nobody foresaw."""


@dataclass(frozen=True)
class Ending:
    """How work ended.

    Attributes:
        missing: how many parts, datasets or trainings are missing, None where nobody counted them.
        message: why it is not complete, a sentence; "" where it is.
    """

    state: State
    missing: int | None = None
    message: str = ""


def ending_of(result: object, work: object = None) -> Ending:
    """Return how `work` ended, which gave `result`."""
    if isinstance(result, FlowReport):
        missing = sum(len(stage.report.missing) for stage in result.stages)
        return _ending(result.is_complete, missing, result.open_reason)
    if isinstance(result, WorkReport):
        return _ending(not result.missing, len(result.missing), result.open_reason)
    if isinstance(result, BatchReport):
        return _of_many([row.reason for row in result.rows if not row.is_complete], len(result.rows), "datasets")
    if isinstance(result, TrainingResult):
        return _ending(not result.was_stopped, None, f'a file "stop" ended it after {result.steps:,} steps')
    if isinstance(result, Sequence) and all(isinstance(entry, TrialResult) for entry in result):
        whole = (
            ("done", "pruned") if isinstance(work, Work) and work.kind == "tune" else ("done",)
        )  # others were asked to stop
        open_ones = [trial.reason for trial in result if trial.state not in whole]
        return _of_many(open_ones, len(result), "trainings")
    return Ending("complete")


def _ending(is_complete: bool, missing: int | None, reason: str) -> Ending:
    return Ending("complete", 0) if is_complete else Ending("incomplete", missing, reason)


def _of_many(reasons: Sequence[str], num_all: int, noun: str) -> Ending:
    """Return the ending of many works, of which those with `reasons` are not complete."""
    first = next(filter(None, reasons), "")
    sentence = f"{len(reasons):,} of {num_all:,} {noun} are not complete" + (f"; the first: {first}" if first else "")
    return _ending(not reasons, len(reasons), sentence)


def ending_by(error: BaseException) -> Ending:
    """Return how the work ended that raised `error`."""
    if isinstance(error, KeyboardInterrupt):
        return Ending("interrupted", None, "interrupted; run the same command again to continue")
    if isinstance(error, RunStopped):
        return Ending("stopped", None, str(error))
    if isinstance(error, VolpipeError | OSError):
        return Ending("refused", None, str(error))
    return Ending("failed", None, f"{type(error).__name__}: {error}")


class Witness(Observer):
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
            self.ending = ending_of(result, self.work) if error is None else ending_by(error)

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
