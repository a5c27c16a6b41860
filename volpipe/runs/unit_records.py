"""Records of units: what the journal in the folder of a work says of its units, and the session that adds to it.

Not here: the lines (blockwise.journal), or what they mean to a kind of work. Work on units *has* such records: an
output, an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from volpipe.blockwise.journal import Journal, Kinds, Record, read_records
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.pool import Submit
from volpipe.blockwise.stage import Schedule
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import Steps
from volpipe.geometry.grid import Grid
from volpipe.reporting.block_map import BlockMap, slowest_maps
from volpipe.reporting.page import Draft, Page
from volpipe.reporting.tally import JournalTally
from volpipe.runs.pages import Parts, Taken, page_of
from volpipe.runs.presence import Presence
from volpipe.runs.run_folder import RunFolder


def file_mark(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None where there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class WorkSession:
    """One driver's time on a work whose folder has a journal.

    Attributes:
        name: as the folder's lock has it.
        tolerated: as of `RunOptions`.
        totals: what tasks took in it, by stage.
        first_task: when the first of them began, seconds since 1970; 0 before one is back.
        reasons: of failures, by stage and unit.
    """

    name: str
    presence: Presence
    journal: Journal
    on_progress: Callable[[Progress], None]
    tolerated: float
    totals: dict[str, Totals] = field(default_factory=dict)
    first_task: float = 0.0
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)

    def show(self, progress: Progress) -> None:
        """Tell of progress: the listener at once, the run's folder now and then."""
        self.on_progress(progress)
        notes = {
            stage.name: StageNote(stage.num_done, stage.num_units, progress.running[stage.name], len(stage.failed))
            for stage in progress.stages
        }
        self.presence.tell(notes, progress.part, progress.seconds_left)

    def finish(self, schedule: Schedule, submit: Submit, **options: Any) -> Steps[Phase]:  # Any: of `Phase`
        """Let a phase of `schedule` be done in the work's journal, add what its tasks took, and return it."""
        phase = Phase(schedule, submit, self.journal, self.show, **({"tolerated": self.tolerated} | options))
        yield phase
        self.totals |= {name: took for name, took in phase.progress.totals.items() if took.tasks}
        self.first_task = self.first_task or phase.progress.first_task
        self.reasons |= phase.reasons
        return phase


@dataclass
class UnitRecords:
    """What the journal of a work says of its units.

    Attributes:
        kinds: of results, in the journal.
        schedule: returns the stages that the journal speaks of, nothing of them done.
        marks: returns what the schedule follows from, beside the journal, and may change.
    """

    folder: RunFolder
    kinds: Kinds
    schedule: Callable[[], Schedule]
    marks: Callable[[], Sequence[object]] = lambda: ()
    _ledger: tuple[Sequence[object], Ledger] | None = field(default=None, repr=False)  # and what it follows from

    def __iter__(self) -> Iterator[Record[Any]]:  # Any: one of its kinds
        """Yield what the journal has, oldest first."""
        return read_records(self.folder.journal, self.kinds)

    def ledger(self) -> Ledger:
        """Return how far the work is now, whoever does it; it is read on at each call, and nobody may change it.

        Raises:
            RunError: the journal is damaged, or of another version.
        """
        marks = self.marks()
        if self._ledger is None or self._ledger[0] != marks:
            self._ledger = marks, Ledger(self.folder.journal, self.kinds, self.schedule)
        return self._ledger[1].look()

    def resumed(self) -> Schedule:
        """Return the schedule of this session, less what the journal has."""
        ledger, self._ledger = self.ledger(), None  # its schedule changes from here on
        return ledger.resumed()

    @property
    def share_left(self) -> float:
        """Share of the units that is still to be done."""
        longest = max(self.ledger().schedule.shown, key=lambda stage: stage.num_units)
        return 1.0 - longest.num_done / max(1, longest.num_units)

    @property
    def witnesses(self) -> Sequence[Path]:
        """The files that grow when something is done."""
        return [self.folder.journal, self.folder.sessions]

    def taken(
        self, tally: JournalTally | None = None, prefix: str = "", maps: Mapping[str, BlockMap] | None = None
    ) -> Taken:
        """Return what the journals say for a report; arguments as of `Taken.read`."""
        return Taken.read(self.folder, self.schedule, self.kinds, tally, prefix, maps)

    @contextmanager
    def session(
        self, name: str, presence: Presence, on_progress: Callable[[Progress], None], tolerated: float
    ) -> Iterator[WorkSession]:
        """Open the journal for the session that holds the folder as `name`; arguments as of `WorkSession`."""
        with Journal(self.folder.journal, self.kinds) as journal:
            yield WorkSession(name, presence, journal, on_progress, tolerated)

    def page(
        self, grids: Mapping[str, Grid], parts_of: Callable[[Taken, bool], Parts],
        pictures_of: Callable[[Schedule], Sequence[Draft]] | None, *, is_settled: bool,
    ) -> Page:  # fmt: skip
        """Return the report.

        Args:
            grids: the stages whose units are the cells of a grid, for the map of blocks.
            parts_of: returns what the work says of itself, from what the journals say and whether it is complete.
            pictures_of: returns the pictures of voxels; the schedule has what is done and what is missing. None for a
                report without pictures.
            is_settled: whether the schedule has all that there is to do for the input as it is.
        """
        maps = {stage: BlockMap(stage, grid) for stage, grid in grids.items()}
        taken = self.taken(maps=maps)
        is_complete = is_settled and taken.schedule.is_complete
        parts = parts_of(taken, is_complete)
        if pictures_of is not None:
            blocks = Draft("Map of blocks", lambda: [*slowest_maps(maps, taken.schedule)], "Blocks")
            parts = replace(parts, pictures=[*pictures_of(taken.schedule), blocks])
        return page_of(self.folder, taken, parts, is_complete=is_complete)
