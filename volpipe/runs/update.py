"""An update: what of an output rests on voxels of its input that have changed, and is to be computed again.

Not here: what the journal then says (updates), or the computing, which is that of any run that is not complete.

A block has changed if it would read other voxels. All shards that it adds to are written again, and so every block that
adds to one of these is computed again, for its sums are scratch and gone; what such a block adds to other shards is not
needed::

    blocks            |  0  |  1  | *2* |  3  |  4  |      2 has changed
    shards            | a | b | c | d | e | f | g | h |
    written again             |   c   d   e   f  |         those that 2 adds to
    computed again    |     | *1* | *2* | *3* |     |
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from volpipe.blockwise.failures import last_line
from volpipe.blockwise.journal import Record
from volpipe.blockwise.phase import Phase
from volpipe.blockwise.pool import Submit, WorkerPool
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.work import POOL, Steps
from volpipe.errors import RunError, RunStopped
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, store_due
from volpipe.inference.statistics import needs_measuring
from volpipe.runs.prepasses import Work, known_normalisation
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import RunSchedule
from volpipe.runs.updates import SEEN, STAGE, Updated, is_due, to_ranges, updates_in
from volpipe.runs.verify import recompute, written
from volpipe.runs.work import WorkSession
from volpipe.runs.worker import DUE_FILE, RESULTS, Job, Seen, submitter
from volpipe.units import count
from volpipe.volumes.file_states import KnownStates, is_same
from volpipe.volumes.identity import changes as differences
from volpipe.volumes.identity import read_identities
from volpipe.volumes.reader import Volume

log = logging.getLogger(__name__)

MEASURED_AGAIN = "the volume is measured again"
LOOK, ADOPT = "look changed", "look adopt"  # stages that read blocks without computing them
NO_FINGERPRINT = b""
FINGERPRINT = np.dtype("S33")  # two hashes of 16 digits


@dataclass(frozen=True, eq=False)
class Known:
    """What the journal knows of what blocks read; blocks are counted.

    Attributes:
        fingerprints: of each block, FINGERPRINT; NO_FINGERPRINT where none was noted, or where it was taken back.
        mixed: a flag for each block that was computed again for its neighbours, and then read other voxels than when it
            wrote the shards that were kept.
    """

    fingerprints: np.ndarray
    mixed: np.ndarray

    def of(self, block: int) -> str:
        """Return the fingerprint of `block`, "" where there is none."""
        text: str = self.fingerprints[block].decode()
        return text


def find_known(records: Iterable[Record[Any]], num_blocks: int) -> Known:  # Any: of any kind
    """Return what the `records` of a journal know of what the blocks of its work read."""
    known = Known(np.zeros(num_blocks, FINGERPRINT), np.zeros(num_blocks, bool))
    for record in records:
        for block, fingerprint in getattr(record.result, "seen", ()):
            before = known.of(block)
            is_other = bool(before) and not is_same(before, fingerprint)
            if record.stage == LOOK and (is_other or not before):
                continue  # an update that was interrupted before it could take the block back
            known.mixed[block] |= is_other
            known.fingerprints[block] = fingerprint.encode()
    return known


@dataclass(frozen=True, eq=False)
class Comparison:
    """Blocks of a run whose input is not as it was when they read it; an array of flags, (blocks,), for each answer.

    Attributes:
        changed: which are known to have changed.
        moved: whose files are in another state, or tell none: only their voxels can say whether they changed.
        unknown: of which the journal has no fingerprint.
    """

    changed: np.ndarray
    moved: np.ndarray
    unknown: np.ndarray

    @property
    def num_open(self) -> int:
        """Number of blocks that an update may find changed."""
        return int(np.count_nonzero(self.changed | self.moved | self.unknown))


def compare(work: Work, selection: Selection) -> Comparison:
    """Return how the input compares with what the blocks of `work` read, as far as the states of its files tell."""
    schedule, _, _ = work.resumed()
    assert isinstance(schedule, RunSchedule)
    known = find_known(work.records(), len(work.plan.blocks))
    return compare_known(known, work.plan.source.volume(), selection.input_box, schedule.infer.done)


def compare_known(known: Known, volume: Volume, box: Callable[[int], Box], done: np.ndarray) -> Comparison:
    """Return how `volume` compares with what is `known` of blocks that read such a `box` of it and are `done`."""
    has_read = known.fingerprints != NO_FINGERPRINT
    moved, states = np.zeros(len(has_read), bool), KnownStates(volume)
    for block in np.flatnonzero(has_read & ~known.mixed).tolist():
        now = states.hash(box(block))
        moved[block] = not now or now != known.of(block).partition(":")[0]
    return Comparison(known.mixed, moved, done & ~has_read)


@dataclass(frozen=True)
class Again:
    """What is to be done again because some blocks of a run have changed.

    Attributes:
        changed: these, ascending.
        blocks: to be computed, ascending.
        shards: to be written, by level, ascending.
    """

    changed: Sequence[int]
    blocks: Sequence[int]
    shards: Sequence[Sequence[int]]

    def taken(self, plan: Plan) -> dict[str, str]:
        """Return it as an update takes it back."""
        blocks = to_ranges(self.blocks)
        factored = {"factor": blocks} if plan.mode == "stored" else {}
        stages = {SEEN: to_ranges(self.changed), "infer": blocks} | factored
        return stages | {f"s{level}": to_ranges(shards) for level, shards in enumerate(self.shards)}


def rests_on(changed: Sequence[int], schedule: RunSchedule, selection: Selection, lost: Iterable[int] = ()) -> Again:
    """Return what rests on the blocks that have `changed`, and on shards of level 0 that are `lost` in another way."""
    plan, blocks = schedule.plan, set(changed)
    shards = set(lost) | {shard for block in blocks for shard in plan.shards_of_block(block) if selection.is_due(shard)}
    for shard in shards:
        blocks.update(filter(selection.has_block, plan.blocks_of_shard(shard)))
    levels = [shards]
    for level in range(1, len(plan.factors)):
        levels.append({coarser for shard in levels[-1] for coarser in schedule.coarser(level, shard)})
    return Again(changed, sorted(blocks), [sorted(each) for each in levels])


class Update:
    """The beginning of a session that updates the output of `work`."""

    def __init__(self, work: Work, selection: Selection, session: WorkSession) -> None:
        self.work, self.selection, self.session = work, selection, session
        self.plan = work.plan

    def steps(self) -> Steps[Updated | None]:
        """Find what has changed, and take it back in the journal; None where nothing has.

        Raises:
            RunError: an output of an earlier version was to be adopted, and is not of this input.
            RunStopped: the input cannot be read.
        """
        if self.work.options.measure_again and not self._is_measuring_again:
            every = filter(self.selection.has_block, range(len(self.plan.blocks)))
            return self._take_back(list(every), MEASURED_AGAIN)
        log.info("looking for what has changed in %s", self.plan.source.path)
        found = compare(self.work, self.selection)
        changed, why = found.changed.copy(), ""
        if found.unknown.any():
            if self.work.options.adopt:
                yield from self._adopt(found.unknown)
            else:
                changed |= found.unknown
                why = (
                    f"{count(int(found.unknown.sum()), 'block')} of an earlier version, which did not note what blocks "
                    "read, are computed again; --adopt would take them as they are after comparing some"
                )
                log.warning("%s", why)
        if found.moved.any():
            changed |= yield from self._changed(found.moved)
        return self._take_back(np.flatnonzero(changed).tolist(), why)

    @property
    def _is_measuring_again(self) -> bool:
        """Whether an earlier session began to measure again, and did not come to its end."""
        updates = updates_in(self.work.folder.journal, RESULTS, self.plan.identity)
        return bool(updates) and updates[-1][1].why == MEASURED_AGAIN and not self._schedule.is_complete

    @cached_property
    def _schedule(self) -> RunSchedule:
        schedule, _, _ = self.work.resumed()
        assert isinstance(schedule, RunSchedule)
        return schedule

    @property
    def _is_other_input(self) -> bool:
        before = read_identities(self.work.folder.inputs) or {}
        return any(what not in before or differences(before[what], now) for what, now in self.work.inputs.items())

    def _changed(self, moved: np.ndarray) -> Steps[np.ndarray]:
        """Return which of the `moved` blocks have other voxels than they read; the states of the rest are noted."""
        known = find_known(self.work.records(), len(self.plan.blocks))
        return changed_blocks(known, (yield from self._looked(LOOK, moved)))

    def _adopt(self, unknown: np.ndarray) -> Steps[None]:
        """Note what the `unknown` blocks would read now as what they read, after computing some of them again."""
        normalise = known_normalisation(self.work)
        if normalise is None:
            raise RunError("--adopt: the volume of this run was not measured to its end; give the command without it")
        for block in recompute(self.selection, normalise, self.work.options.adopt):
            if block.num_differ:
                raise RunError(
                    f"--adopt: {self.plan.out} is not what the net makes of {self.plan.source.path} now: "
                    f"{block.num_differ:,} voxels of its box {block.box} differ; leave out --adopt, and all is "
                    "computed again"
                )
        yield from self._looked(ADOPT, unknown)

    def _looked(self, stage: str, blocks: np.ndarray) -> Steps[list[Record[Seen]]]:
        """Let workers read `blocks`, and return what they saw; it is in the journal as well.

        Raises:
            RunStopped: some cannot be read.
        """
        pool: WorkerPool = yield POOL
        work, session = self.work, self.session
        job = Job(str(work.folder.path), self.plan.identity, session=session.name, cells=self.selection.fingerprint)
        return (yield from looked(session, submitter(pool, job), stage, blocks))

    def _take_back(self, changed: Sequence[int], why: str) -> Updated | None:
        """Note in the journal what is to be done again because these blocks have `changed`, if anything is."""
        plan, options = self.plan, self.work.options
        again = rests_on(changed, self._schedule, self.selection)
        normalise = None if options.measure_again else known_normalisation(self.work)
        is_measured = needs_measuring(plan.recipe.normalise, np.dtype(plan.source.dtype))
        taken = again.taken(plan)
        if is_measured and normalise is None and (changed or self._is_other_input):
            every = to_ranges(range(len(plan.blocks)))
            taken |= {"measure": every, "histogram": every}
        elif not changed and not is_due(self.work.folder.journal, RESULTS, plan.identity):
            return None
        update = Updated(
            time.time(), len(changed), len(again.blocks), self.selection.num_blocks, taken,
            (normalise.shift, normalise.scale) if is_measured and normalise is not None else (), why,
            plan.identity, plan.identity,
        )  # fmt: skip
        if any(taken.values()):
            self.work.before_change()
        self.session.journal.append(Record(STAGE, (), result=update))
        log.info("%s", update)
        return update if any(taken.values()) else None


def looked(session: WorkSession, submit: Submit, stage: str, blocks: np.ndarray) -> Steps[list[Record[Seen]]]:
    """Let workers read `blocks`, a flag for each, and return what they saw; it is in the journal as well.

    Raises:
        RunStopped: some cannot be read.
    """
    look, records = Stage(stage, len(blocks), active=blocks), list[Record[Seen]]()
    phase = Phase(
        Schedule(look), submit, session.journal, session.show, on_record=lambda units, record: records.append(record)
    )
    yield from session.finish(phase)
    if look.failed:
        reason = phase.reasons[stage, min(look.failed)]
        raise RunStopped(
            f"block {min(look.failed)} of the input cannot be read, so that nobody can tell what has changed; mend "
            f"the volume: {last_line(reason)}",
            reason,
        )
    return records


def changed_blocks(known: Known, records: Iterable[Record[Seen]]) -> np.ndarray:
    """Return a flag for each block, whether it was seen with other voxels than are `known`."""
    changed = np.zeros(len(known.mixed), bool)
    for record in records:
        for block, fingerprint in record.result.seen if record.result is not None else ():
            changed[block] = not is_same(known.of(block), fingerprint)
    return changed


def with_due(selection: Selection, work: Work, folder: RunFolder) -> tuple[Selection, str]:
    """Return `selection` with the shards that are still to be written, and the fingerprint of the file that says them.

    Without an update these are all that the open blocks add to, and nothing needs to be said.
    """
    if not updates_in(folder.journal, RESULTS, work.plan.identity):
        return selection, ""
    due = np.ones(len(work.plan.shards()), bool)
    due[[shard for level, shard in written(work.records()) if level == 0]] = False
    return dataclasses.replace(selection, due=due), store_due(folder.path / DUE_FILE, due)
