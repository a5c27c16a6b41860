"""Work that may be a stage of a flow, which asks it how far it is before and while others read what it makes.

Not here: how a folder is held meanwhile (held_work), or how what is there stands to its plan (standing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import Start
from volpipe.blockwise.stage import Feed
from volpipe.blockwise.work import Steps
from volpipe.errors import RunError
from volpipe.reporting.page import Page
from volpipe.runs.held_work import HeldWork
from volpipe.runs.options import RunOptions
from volpipe.runs.presence import Presence
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.standing import Asked, Standing

R = TypeVar("R")


@dataclass(frozen=True)
class Listener:
    """Callbacks: the plan, its forecast where one is asked for, before anything runs, progress, and looks.

    `on_look` is called after each look at a volume that is followed, with what came of it (workflow.follow.Look).
    """

    on_plan: Callable[[Any, RunFolder], None] = lambda plan, folder: None  # Any: a plan of the work's kind
    on_estimate: Callable[[Any], None] | None = None
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_look: Callable[[Any], None] = lambda look: None


SILENT = Listener()


class StageWork(ABC, Generic[R]):
    """Work that may be a stage of a flow, which asks it how far it is before and while others read what it makes.

    It is done as its `held`, which holds the folder and writes the report.

    Attributes:
        name: the output, or the folder where there is none.
        feed: the input, where other work is still writing it.
        readers: of the levels of the output that other work reads while this one writes them.
        was_begun: whether this session goes on with what another one made.
        before_change: called before an update takes anything back, for other work that reads the output.
    """

    was_begun = False
    feed: Feed | None = None

    def __init__(self, folder: RunFolder, options: RunOptions, listener: Listener, name: str = "") -> None:
        self.folder, self.name, self.options, self.listener = folder, name or str(folder.path), options, listener
        self.readers = list[Feed]()
        self.before_change: Callable[[], None] = lambda: None

    @cached_property
    def held(self) -> HeldWork[R]:
        """The work as it is performed: it holds the folder, and writes the report."""
        return HeldWork(
            "", self.folder, claim=self.claim, held_steps=self.held_steps, page=self.page, name=self.name,
            check=self.check, witnesses=self.witnesses,
        )  # fmt: skip

    def run(self, start: Start) -> R:
        """Do it on workers, and return how it ended; `start` is as of `HeldWork.run`."""
        return self.held.run(start)

    def steps(self) -> Steps[R]:
        """Do what is missing, and return how that ended; see `HeldWork.steps`."""
        return self.held.steps()

    def check(self) -> None:
        """Refuse what the work reads, before its folder is held: in a flow it is there by now.

        Raises:
            VolpipeError: saying why.
        """

    @abstractmethod
    def claim(self) -> None:
        """Make sure that folder and output are its to write, as the table of standings says.

        Raises:
            RunError: they are not.
        """

    @abstractmethod
    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        """Do what is not done yet as the session of that name, which holds the folder, and return how that ended."""

    @abstractmethod
    def page(self, *, with_pictures: bool = True) -> Page:
        """Return the report, as the work stands in its folder."""

    def witnesses(self) -> Sequence[Path]:
        """Return the files that grow when something is done."""
        return ()

    @property
    def needs_all(self) -> bool:
        """Whether it must wait for all of what it reads, where other work is still writing that."""
        return False

    @property
    def is_compared(self) -> bool:
        """Whether it was begun, and is compared with what it reads, which must be there and stay for that."""
        return False

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether something of it was made."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as far as the journal says."""

    @property
    @abstractmethod
    def share_left(self) -> float:
        """Share of its units that is still to be done."""

    @property
    def asked(self) -> Asked:
        """What is asked for, where something may be there."""
        return Asked.of(self.options)

    @abstractmethod
    def foreign(self) -> RunError | None:
        """Return the refusal of a folder or an output that other work made, or None."""

    @abstractmethod
    def standing(self) -> Standing:
        """Return how what is there stands to the plan."""

    def check_update(self) -> None:
        """Refuse an update that cannot be told from its options; `RunError` says why."""

    def grown(self) -> Any | None:  # Any: a plan of its kind
        """Return its plan with the sizes of one that was begun before its input grew; None where nothing grew.

        Raises:
            RunError: the input has shrunk, or the output cannot grow.
        """
        return None

    @abstractmethod
    def check_source(self, source: StageWork[Any], called: str) -> None:
        """Refuse to keep what was made of an output of `source` that is gone, or make it anew.

        Raises:
            RunError: naming both; this work is `called` so.
        """

    def await_change(self) -> None:
        """Note in the folder, which is held, that what it reads is about to change; what is cheap is deleted."""
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Delete what was made, and what the folder, which is held, has of that."""
