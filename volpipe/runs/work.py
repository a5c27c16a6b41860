"""Work with a folder of its own: claimed, resumed, reported and inspected alike, whatever it makes.

Not here: work that makes a volume (output_work), or what is done between (workflow.driver, evaluation.driver). The
folder holds journal, log and lock.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from volpipe.blockwise.journal import Journal, Kinds, Record, read_records
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.pool import Start, Submit, WorkerPool
from volpipe.blockwise.stage import Feed, Schedule
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import POOL, Steps, Work
from volpipe.errors import NOTICE, RunError
from volpipe.geometry.grid import Grid
from volpipe.reporting.block_map import BlockMap, slowest_maps
from volpipe.reporting.page import REPORT, Draft, Page, reason_of
from volpipe.reporting.render import write_page
from volpipe.reporting.tally import JournalTally
from volpipe.runs.options import RunOptions
from volpipe.runs.pages import Parts, Taken, is_current, page_of
from volpipe.runs.presence import Presence, present
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.standing import Asked, Standing
from volpipe.volumes.storage import paths

log = logging.getLogger(__name__)

R = TypeVar("R")
QUICK_BYTES = 32 << 20  # of a journal that is read within seconds


@dataclass(frozen=True)
class Listener:
    """Callbacks: the plan, its forecast where one is asked for, before anything runs, progress, and looks.

    `on_look` is called after each look at a volume that is followed, with what came of it (workflow.follow.Look).
    """

    on_plan: Callable[[Any, RunFolder], None] = lambda plan, folder: None  # Any: a plan of the work's kind
    on_estimate: Callable[[Any], None] | None = None
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_look: Callable[[Any], None] = lambda look: None


SILENT, PLAIN = Listener(), RunOptions()


def file_mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


Counts = Mapping[str, Mapping[str, float]]  # how many parts there are by state, by what they are


class HeldWork(Work[R]):
    """Work with a folder of its own, that holds its log and lock; each kind of it gives its functions.

    Args:
        claim: makes sure that folder and output are its to write, emptied for a fresh start; else it raises `RunError`.
        held_steps: does what is not done yet as the session of that name, which holds the folder.
        page: returns the report, as the work stands in its folder, `with_pictures` or without.
        name: the output; the folder where it is not given.
        witnesses: files that grow when something is done; none where the report is always made anew.
        counts: returns how many parts there are.

    Attributes:
        waits: whether nothing is done until what it reads changes.
    """

    counts: Callable[[], Counts] | None = None
    waits = False

    def __init__(
        self, kind: str, folder: RunFolder, *, claim: Callable[[], None],
        held_steps: Callable[[str, Presence], Steps[R]], page: Callable[..., Page], name: str = "",
        witnesses: Sequence[Path] = (), counts: Callable[[], Counts] | None = None,
    ) -> None:  # fmt: skip
        self.kind, self.folder, self.name = kind, folder, name or str(folder.path)
        self.claim, self.held_steps, self.page, self.counts = claim, held_steps, page, counts
        self.witnesses: Callable[[], Sequence[Path]] = lambda: witnesses

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


class StageWork(HeldWork[R], ABC):
    """Work that may be a stage of a flow, which asks it how far it is before and while others read what it makes.

    Attributes:
        feed: the input, where other work is still writing it.
        readers: of the levels of the output that other work reads while this one writes them.
        was_begun: whether this session goes on with what another one made.
        before_change: called before an update takes anything back, for other work that reads the output.
    """

    was_begun = False
    feed: Feed | None = None

    def __init__(self, folder: RunFolder, options: RunOptions, listener: Listener) -> None:
        self.folder, self.name, self.options, self.listener = folder, str(folder.path), options, listener
        self.readers = list[Feed]()
        self.before_change: Callable[[], None] = lambda: None

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


class JournalWork(StageWork[R], ABC):
    """Work on units, such as blocks, whose folder holds a journal of them; arguments as of `StageWork`.

    Attributes:
        kinds: of results, in the journal.
    """

    kinds: ClassVar[Kinds]
    _ledger: tuple[Sequence[object], Ledger] | None = None  # and what it follows from

    def grids(self) -> Mapping[str, Grid]:
        """Return the stages whose units are the cells of a grid, for the map of blocks."""
        return {}

    def voxel_pictures(self, schedule: Schedule) -> Sequence[Draft]:
        """Return the pictures of voxels; `schedule` has what is done and what is missing."""
        return ()

    @abstractmethod
    def schedule(self) -> Schedule:
        """Return the stages that the journal speaks of, nothing of them done."""

    @abstractmethod
    def session_steps(self, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""

    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        self.was_begun = self.is_begun
        with Journal(self.folder.journal, self.kinds) as journal:
            return (yield from self.session_steps(WorkSession(self, name, presence, journal)))

    def records(self) -> Iterator[Record[Any]]:  # Any: one of its kinds
        """Yield what the journal has, oldest first."""
        return read_records(self.folder.journal, self.kinds)

    def ledger(self) -> Ledger:
        """Return how far the work is now, whoever does it; it is read on at each call, and nobody may change it.

        Raises:
            RunError: the journal is damaged, or of another version.
        """
        marks = self.marks
        if self._ledger is None or self._ledger[0] != marks:
            self._ledger = marks, Ledger(self.folder.journal, self.kinds, self.schedule)
        return self._ledger[1].look()

    @property
    def marks(self) -> Sequence[object]:
        """What the schedule follows from, beside the journal, and may change."""
        return ()

    @property
    def is_settled(self) -> bool:
        """Whether the schedule has all that there is to do for the input as it is."""
        return True

    @property
    def share_left(self) -> float:
        if self.is_complete:
            return 0.0
        longest = max(self.ledger().schedule.shown, key=lambda stage: stage.num_units)
        return 1.0 - longest.num_done / max(1, longest.num_units)

    def resumed(self) -> Schedule:
        """Return the schedule of this session, less what the journal has."""
        ledger, self._ledger = self.ledger(), None  # its schedule changes from here on
        return ledger.resumed()

    def witnesses(self) -> Sequence[Path]:
        return [self.folder.journal, self.folder.sessions]

    @abstractmethod
    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        """Return what this work says of itself in its report."""

    def taken(
        self, tally: JournalTally | None = None, prefix: str = "", maps: Mapping[str, BlockMap] | None = None
    ) -> Taken:
        """Return what the journals say for a report; arguments as of `Taken.read`."""
        return Taken.read(self.folder, self.schedule, self.kinds, tally, prefix, maps)

    def page(self, *, with_pictures: bool = True) -> Page:
        maps = {stage: BlockMap(stage, grid) for stage, grid in self.grids().items()}
        taken = self.taken(maps=maps)
        is_complete = self.is_settled and taken.schedule.is_complete
        parts = self.parts(taken, is_complete=is_complete)
        blocks = Draft("Map of blocks", lambda: [*slowest_maps(maps, taken.schedule)], "Blocks")
        pictures = [*self.voxel_pictures(taken.schedule), blocks] if with_pictures else ()
        return page_of(self.folder, taken, replace(parts, pictures=pictures), is_complete=is_complete)


@dataclass
class WorkSession:
    """One driver's time on an output.

    Attributes:
        name: as the folder's lock has it.
        totals: what tasks took in it, by stage.
        first_task: when the first of them began, seconds since 1970; 0 before one is back.
        reasons: of failures, by stage and unit.
    """

    work: JournalWork[Any]
    name: str
    presence: Presence
    journal: Journal
    totals: dict[str, Totals] = field(default_factory=dict)
    first_task: float = 0.0
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)

    def show(self, progress: Progress) -> None:
        """Tell of progress: the listener at once, the run's folder now and then."""
        self.work.listener.on_progress(progress)
        notes = {
            stage.name: StageNote(stage.num_done, stage.num_units, progress.running[stage.name], len(stage.failed))
            for stage in progress.stages
        }
        self.presence.tell(notes, progress.part, progress.seconds_left)

    def finish(self, schedule: Schedule, submit: Submit, **options: Any) -> Steps[Phase]:  # Any: of `Phase`
        """Let a phase of `schedule` be done in the work's journal, add what its tasks took, and return it."""
        phase = Phase(
            schedule, submit, self.journal, self.show, **({"tolerated": self.work.options.tolerated} | options)
        )
        yield phase
        self.totals |= {name: took for name, took in phase.progress.totals.items() if took.tasks}
        self.first_task = self.first_task or phase.progress.first_task
        self.reasons |= phase.reasons
        return phase


MARKS = {
    "plan.json": "the run of a net",
    "label.json": "a segmentation",
    "evaluation.json": "an evaluation",
    "comparison.json": "a comparison",
    "comparisons.json": "comparisons of many outputs",
    "measurement.json": "a measurement",
}


def other_kind(folder: RunFolder, mark: str) -> RunError | None:
    """Return the refusal of a folder of work of another kind than that which is known by the file `mark`, or None."""
    others = [name for name in MARKS if name != mark and (folder.path / name).is_file()]
    return RunError(f"{folder.path} holds {MARKS[others[0]]}; choose another --out") if others else None
