"""Work that makes an output: claimed, begun, resumed, closed and inspected alike, whatever makes its voxels.

Not here: what it does between (workflow.driver, segmentation.driver, evaluation.driver). Its folder beside the output
holds plan, journal, log and lock.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.feed import Feed
from volpipe.blockwise.heartbeat import listening
from volpipe.blockwise.journal import Attempt, Journal, JournalReader, Kinds, Record, Totals, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.phase import TOLERATED_SHARE, Phase, Progress
from volpipe.blockwise.pool import Submit, WorkerPool
from volpipe.blockwise.stage import Schedule, Unit
from volpipe.blockwise.work import POOL, RELEASED, Steps
from volpipe.errors import RunError
from volpipe.geometry.grid import Box, Grid
from volpipe.inference.output import remove_leftovers
from volpipe.inference.output_plan import OutputPlan
from volpipe.reporting.block_map import BlockMap, slowest_maps
from volpipe.reporting.comparison import Subject, slices_of
from volpipe.reporting.overview import main_picture, overview_of, small_picture
from volpipe.reporting.page import REPORT, Draft, Item, Note, Page, Picture, reason_of
from volpipe.reporting.render import write_page
from volpipe.reporting.tally import Tally
from volpipe.runs.pages import (
    Parts,
    Taken,
    is_current,
    output_line,
    page_of,
    planned_sheet,
    provenance_facts,
    recipe_facts,
    volume_line,
)
from volpipe.runs.planned import Planned
from volpipe.runs.presence import Presence, StageNote, present
from volpipe.runs.provenance import begin_session, recognise
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.updates import Updated
from volpipe.runs.verify import (
    Recomputed,
    Shard,
    Verdict,
    check_files,
    check_present,
    has_lost_files,
    metadata_of,
    written,
)
from volpipe.runs.worker import Written
from volpipe.volumes.identity import Identity, store_identities
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

P = TypeVar("P", bound=OutputPlan)
R = TypeVar("R")
QUICK_BYTES = 32 << 20  # of a journal that is read within seconds


@dataclass(frozen=True)
class Options:
    """Options of a command that makes an output.

    Attributes:
        fresh: delete the output and the run that made it, and start over.
        keep_tensors: keep window tensors and block tensors.
        site: name of the site, for the output's attributes.
        only: box of the output (z, y, x); what other shards need is left for another session.
        tolerated: share of units that may fail; see `Phase`.
        same_input: go on with an input whose files have other times or sizes, if the voxels that are compared agree.
        is_outside: whether others may change the volume: not that which earlier work of ours writes.
        update: compute again what rests on voxels of the input that have changed; None where the command has no update.
        measure_again: with `update`, measure the volume again, and compute everything.
        adopt: with `update`, blocks to be computed and compared before an output is taken as made of the input as it
            is now, where an earlier version did not note what blocks read; 0: it is computed again.
    """

    fresh: bool = False
    keep_tensors: bool = False
    site: str = ""
    only: Box | None = None
    tolerated: float = TOLERATED_SHARE
    same_input: bool = False
    is_outside: bool = True
    update: bool | None = None
    measure_again: bool = False
    adopt: int = 0


@dataclass(frozen=True)
class Listener:
    """Callbacks: the plan, its forecast where one is asked for, before anything runs, and progress."""

    on_plan: Callable[[Any, RunFolder], None] = lambda plan, folder: None  # Any: a plan of the work's kind
    on_estimate: Callable[[Any], None] | None = None
    on_progress: Callable[[Progress], None] = lambda progress: None


SILENT, PLAIN = Listener(), Options()


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
            if isinstance(record.result, Updated):
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
        """Take what the journal has, in which an update took units back, until nothing more has come meanwhile."""
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

        Who interrupts does not wait for pictures, nor for a journal that takes more than a moment to read.
        """
        was_current, before = is_current(self.folder.path, self.witnesses()), list(map(paths.size, self.witnesses()))
        try:
            yield
        except Exception:
            self._write_report()
            raise
        except BaseException:  # interrupted
            if (paths.size(self.folder.journal) or 0) <= QUICK_BYTES:
                self._write_report(with_pictures=False)
            raise
        if not (was_current and before == list(map(paths.size, self.witnesses()))):
            self._write_report()

    def _write_report(self, *, with_pictures: bool = True) -> None:
        try:
            write_page(self.page(with_pictures=with_pictures), self.folder.path / REPORT)
        except Exception as error:
            log.warning("no report was written to %s: %s", self.folder.path / REPORT, reason_of(error))

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
            with log_file, reports, present(path, name) as presence, listening(path):
                return (yield from self.held_steps(name, presence))


class FolderWork(HeldWork[R]):
    """Work whose folder holds its journal as well.

    Args:
        feed: the input, where other work is still writing it.

    Attributes:
        kinds: of results, in the journal.
        readers: of the levels of the output that other work reads while this one writes them.
        was_begun: whether this session goes on with what another one made.
    """

    kinds: ClassVar[Kinds]

    def __init__(self, folder: RunFolder, options: Options, listener: Listener, feed: Feed | None) -> None:
        self.folder, self.options, self.listener, self.feed = folder, options, listener, feed
        self.readers, self.was_begun, self._is_noted = list[Feed](), False, False

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


class OutputWork(FolderWork[R], Generic[P, R]):
    """Work that makes the volume of a plan; arguments as of `FolderWork`.

    Attributes:
        what, goes_on: the work and its command, in refusals.
    """

    what: ClassVar[str]
    goes_on: ClassVar[str]

    def __init__(
        self,
        plan: P,
        options: Options = PLAIN,
        listener: Listener = SILENT,
        feed: Feed | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        super().__init__(folder or RunFolder.from_output(paths.locate(plan.out)), options, listener, feed)
        self.plan = plan
        self.inputs: dict[str, Identity] = {}

    @property
    def name(self) -> str:
        return self.plan.out

    @property
    def can_update(self) -> bool:
        """Whether the command could update what rests on an input that has changed."""
        return False

    def volumes(self) -> dict[str, Volume]:
        """Return what the work reads, by what it is."""
        return {"volume": self.plan.source.volume()}

    @property
    def remark(self) -> str:
        """What else there is to say of it when it is complete."""
        return ""

    def facts(self) -> dict[str, str]:
        """Return what there is to say in the report's summary of how the output is made."""
        return {}

    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        """Return what this work says of itself in its report; see `FolderWork`."""
        plan, remark = self.plan, self.remark if is_complete else ""
        planned = Planned.load(self.folder.path, plan.identity)
        summary: list[Item] = [planned_sheet(planned, taken.tally, plan, is_complete=is_complete)]
        facts = {"input": volume_line(plan.source), "output": output_line(plan), **self.facts()}
        if remark:
            facts["remark"] = remark
        origin = [recipe_facts(plan), *provenance_facts(plan)]
        return Parts(paths.locate(plan.out).name, f"The {self.what} of {plan.source.path}.", facts, summary, (), origin)

    def shards(self) -> list[Shard]:
        """Return the shards that were written, by the journal, with their checksums."""
        sums = written(self.records())
        boxes = {(level, number): self.plan.shards(level).box(number) for level, number in sums}
        return [Shard(key[0], box, self.stored_box(box), sums[key]) for key, box in boxes.items()]

    def stored_box(self, box: Box) -> Box:
        """Return `box` of the output (z, y, x) in the axes of its arrays."""
        return box

    def due(self, level: int) -> np.ndarray | None:
        """Return a flag for each shard of `level`, whether it is written in the end; None where all are."""
        return None

    @abstractmethod
    def subject(self, schedule: Schedule) -> Subject | None:
        """Return output and input for pictures, with what `schedule` says is missing; None before it is known."""

    def main_picture(self, title: str) -> Picture | None:
        """Return a slice of the whole output, as far as it is written; None before there is one."""
        subject = self._checked_subject(self.taken().schedule)
        return None if subject is None else main_picture(subject, title)

    def _checked_subject(self, schedule: Schedule) -> Subject | None:
        """Return the subject, which knows what was written and is gone."""
        subject, files = self.subject(schedule), self.folder.journal
        if subject is None or not files.is_file() or files.stat().st_size > QUICK_BYTES:
            return subject
        sums = cache(self._written)

        def is_lost(level: int, number: int) -> bool:
            return has_lost_files(self.plan.out, self._shard(level, number, sums().get((level, number), "")))

        return replace(subject, is_lost=is_lost)

    def _written(self) -> dict[tuple[int, int], str]:
        """Return the checksums of shards; none where the journal is damaged, which its tally says."""
        try:
            return written(self.records())
        except RunError:
            return {}

    def _shard(self, level: int, number: int, sums: str) -> Shard:
        box = self.plan.shards(level).box(number)
        return Shard(level, box, self.stored_box(box), sums)

    def thumbnail(self, edge: int) -> tuple[bytes, str] | None:
        """Return a small slice of the whole output, which is complete, and its media type; None where there is none."""
        subject = self.subject(self.schedule())
        if subject is None:
            return None
        return small_picture(replace(subject, is_missing=lambda level, shard: False), edge)

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        """Return slices of input and output; see `FolderWork`."""

        def drawn(draw: Callable[[Subject], Sequence[Item]]) -> Sequence[Item]:
            subject = self._checked_subject(schedule)
            return draw(subject) if subject is not None else [Note("Nothing is computed yet.")]

        return [
            Draft("Slices", lambda: drawn(slices_of), "Slices"),
            Draft("Overview", lambda: drawn(overview_of), "Overview"),
        ]

    @abstractmethod
    def recomputed(self, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
        """Yield random blocks that were computed again, compared with the output as it is stored."""

    def suspects(self) -> tuple[str, ...]:
        """Return what differs from when the output was made and may be why recomputed blocks differ."""
        return ()

    def verify(self) -> Verdict:
        """Read every file of the output, and compare it with what its task noted.

        Raises:
            RunError: there is no journal, or nothing was written yet.
        """
        if not self.folder.journal.is_file():
            raise RunError(
                f"{self.folder.path} holds no journal, which alone knows what the output's files should hold; restore "
                "the folder, or give the command with --fresh to make both again"
            )
        shards = self.shards()
        if not shards:
            raise RunError(
                f"the {self.what} in {self.folder.path} has not written anything yet; `{self.goes_on}` goes on"
            )
        verdict = check_files(self.plan.out, shards, metadata_of(self.folder), len(self.plan.factors))
        levels = [(self.due(level), len(self.plan.shards(level))) for level in range(len(self.plan.factors))]
        num_due = sum(num if due is None else int(due.sum()) for due, num in levels)
        verdict.num_unwritten = num_due - len(shards)
        return verdict

    @abstractmethod
    def phases(self, pool: WorkerPool, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""

    @abstractmethod
    def closed(self, session: WorkSession, report: R | None) -> R:
        """Return the report of the session, None where all was done before, after the output is closed."""

    def announce(self) -> None:
        """Tell of what begins."""
        self.listener.on_plan(self.plan, self.folder)

    def open_readers(self) -> None:
        """Let other work read an output that is whole."""
        for reader in self.readers:
            shards = self.plan.shards(reader.level)
            reader.open(shards, range(len(shards)))

    def note_session(self) -> None:
        """Note that this session works on the output, which is not sealed from then on."""
        if not self._is_noted:
            begin_session(self.folder, self.options.site, getattr(self.plan, "code_sha256", ""))
            self._is_noted = True

    def update_steps(self, session: WorkSession) -> Steps[None]:
        """Take back what rests on an input that has changed.

        Raises:
            RunError: it cannot be told what that is.
        """
        raise RunError(f"--update is for runs of a net, not for {self.what}s; use --fresh to make it again")
        yield

    def session_steps(self, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""
        if self.options.update and self.was_begun:
            yield from self.update_steps(session)
        if self.is_complete:
            check_present(self.plan.out, self.shards())
            self.open_readers()
            return self.closed(session, None)
        self.announce()
        pool: WorkerPool = yield POOL
        self.folder.store(self.plan)
        store_identities(self.folder.inputs, self.inputs)
        self.note_session()
        report = yield from self.phases(pool, session)
        yield RELEASED
        return self.closed(session, report)

    def claim(self) -> None:
        """Make sure that folder, output and input are those of this plan; see `FolderWork`."""
        out, options = paths.locate(self.plan.out), self.options
        self.check_free()
        if isinstance(out, Remote):
            try_writing(out)
        if options.fresh:
            self.clear()
        self.check_same()
        if not paths.exists(out) and self.shards():
            raise RunError(
                f"the journal in {self.folder.path} speaks of an output that is gone; use --fresh to start over"
            )
        self.inputs = recognise(
            self.folder,
            self.volumes(),
            self.plan.out,
            same_input=options.same_input,
            is_outside=options.is_outside,
            is_update=bool(options.update),
            can_update=self.can_update,
        )

    def check_free(self) -> None:
        """Refuse a folder or an output that other work made; see `FolderWork`."""
        check_kind(self.folder, self.plan.FILE)
        out = paths.locate(self.plan.out)
        if paths.exists(out) and not self.is_begun:
            raise RunError(f"{out} exists and no {self.what} in {self.folder.path} made it; choose another --out")

    def check_same(self) -> None:
        """Refuse to go on with another recipe or input: two outputs would be mixed."""
        self.folder.check_same(self.plan, self.what)

    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Refuse an output that was made of one that is gone: it would be of another input."""
        if self.is_begun and not source.is_begun:
            raise RunError(
                f"it is not complete, but stage {called}, which needs it, was begun: {source.name} or its run was "
                f"taken away; put it back, delete {self.plan.out} and {self.folder.path} as well, or use --fresh to "
                "start all stages over"
            )

    def clear(self) -> None:
        """Delete the output, and then what the folder has of it: without, nobody would know any more whose it is."""
        paths.delete(paths.locate(self.plan.out))
        self.folder.clear()

    @property
    def is_begun(self) -> bool:
        return (self.folder.path / self.plan.FILE).is_file()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as far as the journal says."""
        old = self.folder.load(type(self.plan))
        return old is not None and old.identity == self.plan.identity and self.resumed()[0].is_complete

    def clean(self) -> None:
        """Delete what killed writers left in the output."""
        for path in remove_leftovers(paths.locate(self.plan.out)):
            log.info("deleted %s, which a killed writer left", path)


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
