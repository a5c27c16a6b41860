"""Work that makes the volume of a plan: its output and folder claimed, begun, closed, verified and shown alike.

Not here: any work of a stage (stage_work), its parts (held_work, unit_records, output_files, output_pictures), or what
makes the voxels (workflow.driver, segmentation.driver).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from volpipe.blockwise.journal import Attempt, Kinds
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Schedule
from volpipe.blockwise.work import POOL, RELEASED, Steps
from volpipe.errors import RunError, VolumeError
from volpipe.geometry.grid import Box, Grid
from volpipe.inference.output_plan import OutputPlan
from volpipe.reporting.comparison import ShownOutput
from volpipe.reporting.page import Draft, Item, Page, Sentence
from volpipe.runs.input_comparison import InputComparison
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.output_files import OutputFiles
from volpipe.runs.output_pictures import OutputPictures
from volpipe.runs.pages import (
    Parts,
    Taken,
    output_line,
    planned_sheet,
    provenance_facts,
    recipe_facts,
    update_items,
    volume_line,
)
from volpipe.runs.planned import Planned
from volpipe.runs.presence import Presence
from volpipe.runs.provenance import has_voxels, stored_fingerprint
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import OutputSchedule
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.runs.standing import Act, Standing, WorkState
from volpipe.runs.unit_records import UnitRecords, WorkSession
from volpipe.runs.update_records import Updated, updates_in
from volpipe.runs.verify import Recomputed, Shard, Verdict, check_present
from volpipe.volumes.completeness import check_still_written
from volpipe.volumes.identity import (
    Identity,
    changes,
    check_same_inputs,
    has_moved,
    identify,
    is_alike,
    read_identities,
    store_identities,
)
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

P = TypeVar("P", bound=OutputPlan)
R = TypeVar("R")


def volumes_of(volume: Volume) -> dict[str, Volume]:
    """Return the volumes that are read as `volume`, by what messages call them."""
    first, *others = volume.parts
    return {"volume": first} | {f"volume {number}": other for number, other in enumerate(others, 2)}


class OutputWork(StageWork[R], Generic[P, R]):
    """Work that makes the volume of a plan; arguments as of `StageWork`.

    Attributes:
        what, goes_on: the work and its command, in refusals.
        kinds: of results, in the journal.
        prepasses: its stages in the journal that read the input and write nothing.
        records: what the journal says of its units.
    """

    what: ClassVar[str]
    goes_on: ClassVar[str]
    kinds: ClassVar[Kinds]
    prepasses: ClassVar[Collection[str]] = ()
    updates: tuple[Updated, ...] = ()  # of this session
    _is_comparing = False

    def __init__(
        self, plan: P, options: RunOptions = PLAIN, listener: Listener = SILENT, folder: RunFolder | None = None
    ) -> None:
        folder = folder or RunFolder.from_output(paths.locate(plan.out))
        super().__init__(folder, options, listener, plan.out)
        self.records = UnitRecords(folder, self.kinds, self.schedule, self.marks)
        self.inputs: dict[str, Identity] = {}
        self.adopt(plan)

    def adopt(self, plan: P) -> None:
        """Let `plan` be that of the work: its own, or the one of a volume that has grown."""
        self.plan, self.files = plan, OutputFiles(plan, self.records)
        self.pictures = OutputPictures(plan, self.records, self.subject)

    @abstractmethod
    def schedule(self) -> Schedule:
        """Return the stages that the journal speaks of, nothing of them done."""

    def marks(self) -> Sequence[object]:
        """Return what the schedule follows from, beside the journal, and may change."""
        return ()

    def grids(self) -> Mapping[str, Grid]:
        """Return the stages whose units are the cells of a grid, for the map of blocks."""
        return {}

    def voxel_pictures(self, schedule: Schedule) -> Sequence[Draft]:
        """Return the pictures of voxels; `schedule` has what is done and what is missing."""
        return self.pictures.drafts(schedule)

    def page(self, *, with_pictures: bool = True) -> Page:
        pictures_of = self.voxel_pictures if with_pictures else None
        return self.records.page(self.grids(), self.parts, pictures_of, is_settled=self.is_settled)

    def witnesses(self) -> Sequence[Path]:
        return self.records.witnesses

    def held_steps(self, name: str, presence: Presence) -> Steps[R]:
        self.was_begun = self.is_begun
        with self.records.session(name, presence, self.listener.on_progress, self.options.tolerated) as session:
            return (yield from self.session_steps(session))

    @property
    def has_moved(self) -> bool:
        """Whether the few files that the identity of the volume names are in other states; on a disk alone."""
        try:
            noted = read_identities(self.folder.inputs) or {}
            source = self.plan.source
            if not noted or not any(isinstance(paths.locate(each.path), Path) for each in (source, *source.also)):
                return False
            return any(
                what in noted and isinstance(paths.locate(each.path), Path) and has_moved(noted[what], each)
                for what, each in volumes_of(source.volume()).items()
            )
        except VolumeError:  # it is not there at the moment
            return False

    @property
    def remedy(self) -> str:
        """What to do where the input has changed, in a sentence's second half."""
        return f"`volpipe status --changes` counts the blocks, `{self.goes_on} --update` computes what rests on them"

    def volumes(self) -> dict[str, Volume]:
        """Return what the work reads, by what it is."""
        return volumes_of(self.plan.source.opened())

    @property
    def remark(self) -> str:
        """What else there is to say of it when it is complete."""
        return ""

    def facts(self) -> dict[str, str]:
        """Return what there is to say in the report's summary of how the output is made."""
        return {}

    def parts(self, taken: Taken, is_complete: bool) -> Parts:
        """Return what this work says of itself in its report."""
        plan, remark = self.plan, self.remark if is_complete else ""
        planned = Planned.load(self.folder.path, plan.identity)
        summary: list[Item] = [planned_sheet(planned, taken.tally, plan, is_complete=is_complete)]
        summary += update_items(updates_in(self.folder.journal, self.kinds))
        if is_complete and self.has_moved:
            summary.append(Sentence(f"Files of the input have changed since: {self.remedy}.", "warning"))
        facts = {"input": volume_line(plan.source), "output": output_line(plan), **self.facts()}
        if remark:
            facts["remark"] = remark
        origin = [recipe_facts(plan), *provenance_facts(plan)]
        return Parts(paths.locate(plan.out).name, f"The {self.what} of {plan.source.path}.", facts, summary, (), origin)

    def shards(self) -> list[Shard]:
        """Return the shards that were written, by the journal, with their checksums."""
        return self.files.shards()

    def due(self, level: int) -> np.ndarray | None:
        """Return a flag for each shard of `level`, whether it is written in the end; None where all are."""
        return None

    @abstractmethod
    def subject(self, array: P, schedule: Schedule) -> ShownOutput | None:
        """Return an array of the output and its input for pictures, with what `schedule` says is missing; None before
        it is known.
        """

    @abstractmethod
    def recomputed(self, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
        """Yield random blocks that were computed again, compared with the output as it is stored."""

    def suspects(self) -> tuple[str, ...]:
        """Return what differs from when the output was made and may be why recomputed blocks differ."""
        return ()

    def verify(self, *, is_fast: bool = False) -> Verdict:
        """Read every file of the output, and compare it with what its task noted.

        Args:
            is_fast: whether to look only whether the files of voxels are there.

        Raises:
            RunError: there is no journal, or nothing was written yet.
        """
        self.files.check_journal()
        shards = self.shards()
        if not shards:
            raise RunError(
                f"the {self.what} in {self.folder.path} has not written anything yet; run `{self.goes_on}` to continue"
            )
        return self.files.verify(shards, self.due, is_fast=is_fast)

    @abstractmethod
    def phases(self, pool: WorkerPool, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""

    @abstractmethod
    def closed(self, session: WorkSession, report: R | None) -> R:
        """Return the report of the session, None where all was done before, after the output is closed."""

    def announce(self) -> None:
        """Tell of what begins, and note in the log what a user should know of it."""
        for warning in self.plan.warnings():
            log.warning("%s", warning)
        self.listener.on_plan(self.plan, self.folder)

    @property
    def is_uncompared(self) -> bool:
        """Whether what it reads has been changed by other work of ours, and was not compared since."""
        return self.folder.uncompared.is_file()

    @property
    def is_compared(self) -> bool:
        return self.standing().act(self.asked).compares

    @property
    def is_settled(self) -> bool:
        """Whether the schedule has all that there is to do for the input as it is."""
        return not self.is_uncompared

    @abstractmethod
    def follow(self, old: P) -> Updated:
        """Sentence in the journal that the volume has grown since the plan `old`."""

    def await_change(self) -> None:
        """Sentence that other work is about to change what this work reads: until it is compared it is not complete."""
        paths.atomic_write(self.folder.uncompared, b"")
        self.files.note_session(self.options.site)
        plan = self.folder.load(type(self.plan))  # of a volume that has grown it is another, which follows later
        if plan is not None:
            OutputFiles(plan, self.records).unseal(())

    def know_input(self) -> None:
        """Sentence what the input is, where other work has written it by now."""
        if self.feed is not None:
            self.inputs["volume"] = identify(self.plan.source.volume().parts[0])
            store_identities(self.folder.inputs, self.inputs)

    @abstractmethod
    def compared(self) -> InputComparison:
        """Return how the input compares with what was read, as far as the states of its files tell."""

    @abstractmethod
    def take_back_steps(self, session: WorkSession) -> Steps[Updated | None]:
        """Take back in the journal what rests on voxels of the input that have changed; None where none has.

        Raises:
            RunStopped: the input cannot be read.
        """

    @abstractmethod
    def renew_metadata(self) -> None:
        """Write what the output says of its input anew, as far as that is known."""

    def update_steps(self, session: WorkSession) -> Steps[None]:
        """Take back what rests on an input that has changed, and let the output say so.

        Raises:
            RunError: files of the output are gone.
            RunStopped: the input cannot be read.
        """
        shards = self.shards()
        if shards:
            check_present(self.plan.out, shards, is_thorough=True)
        update = yield from self.take_back_steps(session)
        self.updates += () if update is None else (update,)
        is_other = stored_fingerprint(self.plan.out) not in ("", self.inputs["volume"].fingerprint)
        if self.updates or is_other:
            self.files.note_session(self.options.site)
            if self.files.unseal(self.updates) and not self.updates:
                self.renew_metadata()
        store_identities(self.folder.inputs, self.inputs)

    def session_steps(self, session: WorkSession) -> Steps[R]:
        """Do what is not done yet, and return how that ended."""
        if self._is_comparing:
            yield from self.update_steps(session)
            self.folder.uncompared.unlink(missing_ok=True)
        if self.is_complete:
            check_present(self.plan.out, self.shards())
            schedule = self.records.ledger().schedule
            assert isinstance(schedule, OutputSchedule)
            schedule.open_readers()
            return self.closed(session, None)
        self.announce()
        pool: WorkerPool = yield POOL
        self.folder.store(self.plan)
        store_identities(self.folder.inputs, self.inputs)
        self.files.note_session(self.options.site)
        report = yield from self.phases(pool, session)
        yield RELEASED
        if self._needs_whole:  # it may have been updated meanwhile
            for source in (self.plan.source, *self.plan.source.also):
                check_still_written(paths.locate(source.path), source.key, self.read_box)
        return self.closed(session, report)

    def claim(self) -> None:
        """Make sure that folder, output and input are those of this plan; see `StageWork`."""
        self.check_update()
        standing, asked, folder = self.standing(), self.asked, self.folder
        if standing.act(asked) is Act.FOLLOW:
            old, grown = folder.load(type(self.plan)), self.grown()
            assert old is not None and grown is not None
            self.adopt(grown)
            self.updates = (self.follow(old),)
            standing = self.standing()
        act = standing.act(asked)
        out, volumes = paths.locate(self.plan.out), self.volumes()
        self.check_written(volumes)
        if act is Act.REFUSE:
            raise standing.refusal_of(asked)
        if isinstance(out, Remote):
            try_writing(out)
        if act is Act.CLEAR:
            self.clear()
        elif standing.state is WorkState.UNSTARTED and not folder.journal.is_file():
            for path in (folder.inputs, folder.discards):
                path.unlink(missing_ok=True)
        folder.settle(type(self.plan))
        self.inputs = {what: identify(volume) for what, volume in volumes.items()}
        self._is_comparing = act.compares
        if self.options.update or not folder.journal.is_file():
            return
        if standing.state is WorkState.UNWRITTEN and self.input_changes(self.inputs):
            log.warning("the input is another than when %s was begun, which wrote nothing: it begins again", self.name)
            self.clear()
            return
        self._check_inputs()

    def _check_inputs(self) -> None:
        """Refuse other inputs than those of what was begun.

        Raises:
            RunError: one has changed; the message says what of it.
        """
        options, file, compared = self.options, self.folder.inputs, dict(self.inputs)
        if not options.is_outside:
            del compared["volume"]
        noted = stored_fingerprint(self.plan.out) if options.is_outside and not file.is_file() else ""
        can_update = options.update is not None
        check_same_inputs(file, compared, accept=options.same_input, noted=noted, can_update=can_update)
        if options.same_input or not file.is_file():
            store_identities(file, self.inputs)

    @property
    def read_box(self) -> Box:
        """The part of the volume (z, y, x) that it reads."""
        return Box.from_shape(self.plan.source.shape)

    @property
    def _needs_whole(self) -> bool:
        """Whether its input must be complete: unless that is followed, or the recipe reads it as it is."""
        is_theirs = self.options.is_outside and self.feed is None
        return is_theirs and not (self.options.follow is not None or self.plan.recipe.input.incomplete)

    def check_written(self, volumes: Mapping[str, Volume]) -> None:
        """Refuse `volumes` to be read that other work of ours has not completed."""
        for what, volume in volumes.items() if self._needs_whole else ():
            volume.check_written(self.read_box if what.startswith("volume") else None)

    def foreign(self) -> RunError | None:
        out = paths.locate(self.plan.out)
        if other := self.folder.other_work(self.plan.FILE):
            return other
        if paths.exists(out) and not (self.folder.path / self.plan.FILE).is_file():
            return RunError(f"{out} exists and no {self.what} in {self.folder.path} made it; choose another --out")
        return None

    def standing(self) -> Standing:
        """Return how what is there stands to the plan; the input is compared later, by whoever goes on."""
        folder, plan, out = self.folder, self.plan, paths.locate(self.plan.out)
        if foreign := self.foreign():
            return Standing(WorkState.FOREIGN, foreign)
        if folder.clearing.is_file():
            return Standing(WorkState.CLEARING)
        try:
            old = folder.load(type(plan))
        except RunError as error:
            return Standing(WorkState.DAMAGED, error)
        if old is None:
            return Standing(WorkState.FRESH)
        is_unstarted = self._has_attempts_alone and not has_voxels(out)
        if other := folder.difference(old, plan, self.what):
            return Standing(WorkState.SUPERSEDED) if is_unstarted else self._standing_of_another(old, other)
        is_unwritten = False
        if not paths.exists(out) and not is_unstarted:
            try:
                is_unwritten = all(record.stage in self.prepasses for record in self.records)
                is_lost = not is_unwritten and bool(self.shards())
            except RunError as error:
                return Standing(WorkState.LOST, error)
            if is_lost:
                lost = f"the journal in {folder.path} speaks of an output that is gone; use --fresh to start over"
                return Standing(WorkState.LOST, RunError(lost))
        if self.is_uncompared:
            return Standing(WorkState.UNCOMPARED)
        if is_unstarted:
            return Standing(WorkState.UNSTARTED)
        return Standing(WorkState.UNWRITTEN if is_unwritten else WorkState.BEGUN)

    def _standing_of_another(self, old: P, other: RunError) -> Standing:
        """Return how the output of the plan `old` stands, which is refused by the error `other` as long as it stays."""
        try:
            if self.grown() is not None:
                return Standing(WorkState.GROWN, other)
        except RunError as error:
            return Standing(WorkState.UNFOLLOWABLE, other, error)
        before, now = old.source, self.plan.source
        is_same = (before.path, before.key) == (now.path, now.key) or not self.options.is_outside
        is_there = old.out == self.plan.out and is_same
        return Standing(WorkState.OUTDATED if is_there else WorkState.ELSEWHERE, other)

    @property
    def _has_attempts_alone(self) -> bool:
        """Whether the journal knows of attempts alone, if of anything; one that is damaged may have known more."""
        try:
            return all(not record.done and isinstance(record.result, Attempt | None) for record in self.records)
        except RunError:
            return False

    def input_changes(self, now: Mapping[str, Identity] | None = None) -> str:
        """Return what differs between inputs as they are, or `now`, and as they were when the work began."""
        options, before, lines = self.options, read_identities(self.folder.inputs) or {}, list[str]()
        for what, volume in self.volumes().items():
            if what in before and (options.is_outside or what != "volume"):
                identity = identify(volume) if now is None else now[what]
                if not (options.same_input and is_alike(before[what], identity)):
                    lines += changes(before[what], identity)
        return "; ".join(lines)

    def check_source(self, source: StageWork[Any], called: str) -> None:
        """Refuse an output that was made of one that is gone: it would be of another input."""
        if self.is_begun and not source.is_begun:
            raise RunError(
                f"it is not complete, but stage {called}, which needs it, was begun: {source.name} or its run was "
                f"taken away; put it back, delete {self.plan.out} and {self.folder.path} as well, or use --fresh to "
                "start all stages over"
            )

    def clear(self) -> None:
        self.files.clear()

    @property
    def is_begun(self) -> bool:
        return self.folder.holds(type(self.plan))

    @property
    def is_complete(self) -> bool:
        if not self.is_settled:
            return False
        old = self.folder.load(type(self.plan))
        return old is not None and old.identity == self.plan.identity and self.records.ledger().schedule.is_complete

    @property
    def share_left(self) -> float:
        return 0.0 if self.is_complete else self.records.share_left
