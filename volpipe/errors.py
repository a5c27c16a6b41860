"""The errors that volpipe raises on purpose; not for bugs, which stay what Python makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_MISTAKES: Final = 10  # of a batch, named in one sentence
NOTICE: Final = {"notice": True}  # extra of what is logged and also told to the user, who can do something about it


class VolpipeError(Exception):
    """Anything a user can put right: the message says what is wrong and what to do."""


class RecipeError(VolpipeError, ValueError):
    """The recipe cannot be understood."""


class PlanError(VolpipeError, ValueError):
    """The recipe and the volume do not fit each other."""


class VolumeError(VolpipeError, OSError):
    """A volume cannot be opened, read or written."""


class SeveralVolumesError(VolumeError):
    """Where one volume was asked for there are several.

    Attributes:
        keys: of these, counted from what was named.
    """

    def __init__(self, sentence: str, keys: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.keys = list(keys)

    def __reduce__(self) -> tuple[type[SeveralVolumesError], tuple[str, list[str]]]:
        """An exception travels between processes by its arguments."""
        return type(self), (str(self), self.keys)


class IncompleteError(VolumeError):
    """Work of ours on a volume has not ended: what of it is not written yet would read as zeros."""


class RemoteError(VolumeError):
    """A bucket or a web server denies access, or does not answer: what it holds is not known."""


class FullDiskError(VolumeError):
    """A file cannot be written: its disk or a quota is full, or it would be larger than a limit of files."""


class ChangedError(VolumeError):
    """A file was written anew between two requests for parts of it."""


class ChunkError(VolumeError):
    """A stored chunk is damaged, cut short or of a wrong length; the rest of the volume may be whole.

    Attributes:
        may_mend: whether reading it once more may help: the system failed, not what it read.
    """

    def __init__(self, sentence: str, *, may_mend: bool = False) -> None:
        super().__init__(sentence)
        self.may_mend = may_mend


class NonfiniteError(VolpipeError, ArithmeticError):
    """A net gave NaN or infinity."""


class NetError(VolpipeError, RuntimeError):
    """The net that a worker loaded is not the one that the plan was made for."""


class SiteError(VolpipeError, ValueError):
    """A site cannot be found or used."""


class SettingsError(SiteError):
    """A setting of a site is misspelt, of the wrong type, or makes no sense: the site is wrong wherever it is used."""


class RunError(VolpipeError, RuntimeError):
    """A run cannot start, go on or be resumed."""


class RunStopped(RunError):
    """A run stopped under way: part of its output is missing.

    Attributes:
        detail: what a worker said at length, its traceback; "" where there is none.
        others_go_on: whether it is this run's alone, so that others beside it can go on.
    """

    def __init__(self, sentence: str, detail: str = "", *, others_go_on: bool = False) -> None:
        super().__init__(sentence)
        self.detail, self.others_go_on = detail, others_go_on


class BatchError(VolpipeError, ValueError):
    """A batch cannot begin.

    Attributes:
        sentence: on all of it.
        mistakes: of each the dataset, or the file that lists it, and a sentence on what is wrong.
    """

    def __init__(self, sentence: str, mistakes: Sequence[tuple[str, str]] = ()) -> None:
        more = f"; and {len(mistakes) - MOST_MISTAKES:,} more" if len(mistakes) > MOST_MISTAKES else ""
        listed = "; ".join(f"{what}: {problem}" for what, problem in mistakes[:MOST_MISTAKES])
        super().__init__(f"{sentence}: {listed}{more}" if mistakes else sentence)
        self.sentence, self.mistakes = sentence, tuple(mistakes)

    def __reduce__(self) -> tuple[type[BatchError], tuple[str, tuple[tuple[str, str], ...]]]:
        """An exception travels between processes by its arguments."""
        return type(self), (self.sentence, self.mistakes)


class LockLost(RunError):
    """Another driver holds the folder that the work is done in: what this one began may write nothing more."""


class TaskLost(VolpipeError, RuntimeError):
    """A task never answered; not because of what it computed, as far as anybody knows."""


class ManagerLost(TaskLost):
    """The task's whole node or job is gone: cancelled, out of time, broken."""


class WorkerLost(TaskLost):
    """The task's worker alone is gone: killed from outside, or by what the task did."""
