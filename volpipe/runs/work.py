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
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.feed import Feed
from volpipe.blockwise.journal import Attempt, Journal, JournalReader, Kinds, Record, Totals, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.pool import Submit
from volpipe.blockwise.stage import Schedule, Unit
from volpipe.blockwise.work import Steps
from volpipe.errors import NOTICE, RunError
from volpipe.geometry.grid import Grid
from volpipe.reporting.block_map import BlockMap, slowest_maps
from volpipe.reporting.page import REPORT, Draft, Page, reason_of
from volpipe.reporting.render import write_page
from volpipe.reporting.tally import Tally
from volpipe.runs.options import RunOptions
from volpipe.runs.pages import (
    Parts,
    Taken,
    is_current,
    page_of,
)
from volpipe.runs.presence import Presence, present
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.updates import TakesBack
from volpipe.runs.worker import Written
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


@dataclass(frozen=True)
class JournalProgress:
    """How far the work on an output is, from its journal.

    Attributes:
        schedule: with the units that are done, and those that failed when they were last tried.
        reasons: of these, by stage and unit.
        totals: what tasks took over all sessions, by stage.
        is_complete: whether nothing is left to do, as far as the journal says.
        has_output: whether something of the output was written.
    """

    schedule: Schedule
    reasons: Mapping[tuple[str, int], str]
    totals: dict[str, Totals]
    is_complete: bool
    has_output: bool

    @property
    def missing(self) -> list[Missing]:
        return self.schedule.missing(self.reasons)


class JournalAccount:
    """How far `work` is, whoever does it; at each look its journal is read on from where it was read last."""

    def __init__(self, work: FolderWork[Any]) -> None:  # Any: its report
        self.work = work
        self._reader = JournalReader(work.journal, work.kinds, self._begin)
        self._begin()

    def _begin(self) -> None:
        self._schedule, self._totals = self.work.schedule(), dict[str, Totals]()
        self._reasons, self._has_output = dict[Unit, str](), False

    def look(self) -> JournalProgress:
        """Return how far it is now.

        Raises:
            RunError: its journal is damaged, or of another version.
        """
        for record in self._reader.records():
            if isinstance(record.result, TakesBack):
                self._take_anew()
                break
            self._add(record)
        schedule = self._schedule
        for stage in schedule.stages:
            stage.failed.clear()
        latest = {unit: reason for unit, reason in self._reasons.items() if unit[0] in schedule.by_name}
        for name, number in latest:
            schedule.by_name[name].failed.add(number)
        is_complete = self.work.journal == self.work.folder.journal and schedule.is_complete
        return JournalProgress(schedule, latest, self._totals, is_complete, self._has_output)

    def _take_anew(self) -> None:
        """Take what the journal has, in which units were taken back, until nothing more has come meanwhile."""
        num_new = 1
        while num_new:
            self._begin()
            for record in self.work.records():
                self._add(record)
            num_new = sum(1 for _ in self._reader.records())

    def _add(self, record: Record[Any]) -> None:  # Any: one of the journal's kinds
        self._has_output = self._has_output or isinstance(record.result, Written)
        if is_counted(record):
            self._totals.setdefault(record.stage, Totals()).add(record)
        self._reasons |= {(record.stage, number): reason for number, reason in record.failed}
        for name, number in record.units:
            self._reasons.pop((name, number), None)
            if name in self._schedule.by_name:
                self._schedule.by_name[name].mark(number)


def file_mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_counted(record: Record[Any]) -> bool:  # Any: one of its journal's kinds
    """Return whether its usage is of units that were done, those included that an update took back since."""
    return bool(record.done or record.usage.seconds) and not isinstance(record.result, Attempt)


class HeldWork(ABC, Generic[R]):
    """Work with a folder of its own, that holds its log and lock."""

    folder: RunFolder

    @property
    def name(self) -> str:
        """The folder, or the output."""
        return str(self.folder.path)

    @abstractmethod
    def claim(self) -> None:
        """Make sure that folder and output are this work's to write, emptied if the user asked for a fresh start.

        Raises:
            RunError: they are not.
        """

    @abstractmethod
    def page(self, *, with_pictures: bool = True) -> Page:
        """Return the report of the work, as it stands in its folder."""

    def witnesses(self) -> Sequence[Path]:
        """Return the files that grow when something is done; none where the report is always made anew."""
        return ()

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
        except BaseException:  # interrupted
            if (paths.size(self.folder.journal) or 0) <= QUICK_BYTES:
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

    @abstractmethod
    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        """Do what is not done yet as the session `name`, which holds the folder, and return how that ended."""

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


class FolderWork(HeldWork[R]):
    """Work whose folder holds its journal as well.

    Args:
        feed: the input, where other work is still writing it.

    Attributes:
        kinds: of results, in the journal.
        readers: of the levels of the output that other work reads while this one writes them.
        was_begun: whether this session goes on with what another one made.
        before_change: called before an update takes anything back, for other work that reads the output.
    """

    kinds: ClassVar[Kinds]

    def __init__(self, folder: RunFolder, options: RunOptions, listener: Listener, feed: Feed | None) -> None:
        self.folder, self.options, self.listener, self.feed = folder, options, listener, feed
        self.readers, self.was_begun, self._is_noted = list[Feed](), False, False
        self.before_change: Callable[[], None] = lambda: None

    def grids(self) -> Mapping[str, Grid]:
        """Return the stages whose units are the cells of a grid, for the map of blocks."""
        return {}

    def voxel_pictures(self, schedule: Schedule) -> Sequence[Draft]:
        """Return the pictures of voxels; `schedule` has what is done and what is missing."""
        return ()

    @property
    def needs_all(self) -> bool:
        """Whether it must wait for all of what it reads, where other work is still writing that."""
        return False

    @property
    def journal(self) -> Path:
        """The journal of the stages of `schedule`."""
        return self.folder.journal

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether something of it was made."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as far as the journal says."""

    @abstractmethod
    def check_free(self) -> None:
        """Refuse a folder or an output that other work made.

        Raises:
            RunError: naming it.
        """

    def check_same(self) -> None:
        """Refuse to go on with what was begun otherwise, unless that is cheap and made again.

        Raises:
            RunError: with the keys that differ.
        """

    @abstractmethod
    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Refuse to keep what was made of an output of `source` that is gone, or make it anew.

        Raises:
            RunError: naming both; this work is `called` so.
        """

    @abstractmethod
    def clear(self) -> None:
        """Delete what was made, and what the folder, which is held, has of that."""

    @abstractmethod
    def schedule(self) -> Schedule:
        """Return the stages that the journal speaks of, nothing of them done."""

    @abstractmethod
    def session_steps(self, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""

    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        """Do what is not done yet with the journal open; see `HeldWork`."""
        self.was_begun = self.is_begun
        with Journal(self.folder.journal, self.kinds) as journal:
            return (yield from self.session_steps(WorkSession(self, name, presence, journal)))

    def records(self) -> Iterator[Record[Any]]:  # Any: one of its kinds
        """Yield what the journal has, oldest first, less what an update took back."""
        return read_records(self.journal, self.kinds)

    def replayed(self) -> Schedule:
        """Return the schedule less the units that the journal has."""
        schedule = self.schedule()
        schedule.resume(unit for record in self.records() for unit in record.units)
        return schedule

    def resumed(self) -> tuple[Schedule, dict[str, Totals], dict[tuple[str, int], str]]:
        """Return the schedule less what the journal has, the totals of its tasks, and the reasons of failures."""
        schedule, totals, reasons = self.schedule(), dict[str, Totals](), dict[tuple[str, int], str]()

        def units() -> Iterator[Unit]:
            for record in self.records():
                if is_counted(record):
                    totals.setdefault(record.stage, Totals()).add(record)
                for unit, reason in record.failed:
                    reasons[record.stage, unit] = reason
                yield from record.units

        schedule.resume(units())
        return schedule, totals, reasons

    def progress(self) -> JournalProgress:
        """Return how far the work is, and what failed when it was last tried."""
        return JournalAccount(self).look()

    def witnesses(self) -> Sequence[Path]:
        """Return the journals; see `HeldWork`."""
        return [self.folder.journal, self.folder.sessions]

    @property
    def earlier_journals(self) -> Sequence[Path]:
        """Journals of passes before those of `journal`."""
        return ()

    @abstractmethod
    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        """Return what this work says of itself in its report."""

    def is_all(self, taken: Taken) -> bool:
        """Whether all is done, as far as the journal says, which was read already."""
        return taken.schedule.is_complete

    def taken(self, tally: Tally | None = None, prefix: str = "", maps: Mapping[str, BlockMap] | None = None) -> Taken:
        """Return what the journals say for a report; arguments as of `Taken.read`."""
        journals = [*self.earlier_journals, self.journal]
        return Taken.read(self.folder, self.schedule(), journals, tally, prefix, maps, self.standing_units())

    def standing_units(self) -> Iterator[Unit] | None:
        """Return the units that are done where the journal has others besides, which an update took back; else None."""
        return None

    def page(self, *, with_pictures: bool = True) -> Page:
        """Return the report of the work; see `HeldWork`."""
        maps = {stage: BlockMap(stage, grid) for stage, grid in self.grids().items()}
        taken = self.taken(maps=maps)
        is_complete = self.is_all(taken)
        parts = self.parts(taken, is_complete=is_complete)
        blocks = Draft("Map of blocks", lambda: [*slowest_maps(maps, taken.schedule)], "Blocks")
        pictures = [*self.voxel_pictures(taken.schedule), blocks] if with_pictures else ()
        return page_of(self.folder, taken, replace(parts, pictures=pictures), is_complete=is_complete)

    def phase(self, session: WorkSession, schedule: Schedule, submit: Submit, **options: Any) -> Phase:  # Any: of Phase
        """Return a phase of `schedule` in the work's journal, of which listeners are told."""
        return Phase(
            schedule, submit, session.journal, session.show, **({"tolerated": self.options.tolerated} | options)
        )


@dataclass
class WorkSession:
    """One driver's time on an output.

    Attributes:
        name: as the folder's lock has it.
        totals: what tasks took in it, by stage.
        first_task: when the first of them began, seconds since 1970; 0 before one is back.
        reasons: of failures, by stage and unit.
    """

    work: FolderWork[Any]
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

    def finish(self, phase: Phase) -> Steps[Phase]:
        """Let `phase` be done, add what its tasks took, and return it."""
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
}


def check_kind(folder: RunFolder, mark: str) -> None:
    """Refuse a folder of work of another kind than that which is known by the file `mark`.

    Raises:
        RunError: naming the folder.
    """
    others = [name for name in MARKS if name != mark and (folder.path / name).is_file()]
    if others:
        raise RunError(f"{folder.path} holds {MARKS[others[0]]}; choose another --out")
