"""An update: what of an output rests on voxels of its input that have changed, and is to be computed again.

Not here: what the journal then says (update_records), or the computing, which is that of any run that is not complete.

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
from functools import cached_property, partial

import numpy as np

from volpipe.blockwise.failures import last_line
from volpipe.blockwise.journal import Record
from volpipe.blockwise.phase import TOLERATED_SHARE
from volpipe.blockwise.pool import Submit, WorkerPool
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.work import POOL, Steps
from volpipe.errors import RunStopped
from volpipe.inference.output import stored_box
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, read_selection, store_selection, store_unwritten
from volpipe.runs.input_comparison import LOOK, InputComparison
from volpipe.runs.prepasses import Work, known_normalisation
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import RunSchedule
from volpipe.runs.unit_records import WorkSession
from volpipe.runs.update_records import SEEN, STAGE, Updated, from_ranges, to_ranges, updates_in
from volpipe.runs.verify import remove, written
from volpipe.runs.worker import DUE_FILE, RESULTS, Job, Seen, submitter
from volpipe.volumes.file_states import is_same
from volpipe.volumes.identity import changes as differences
from volpipe.volumes.identity import read_identities
from volpipe.volumes.storage import paths

log = logging.getLogger(__name__)

MEASURED_AGAIN = "the volume is measured again"


def changed_blocks(
    session: WorkSession, compared: InputComparison, submit: Callable[[WorkerPool], Submit]
) -> Steps[np.ndarray]:
    """Return a flag for each block, whether it has changed.

    Workers read those that have moved; what they see is in the journal as well.

    Args:
        submit: returns what submits units to a pool.

    Raises:
        RunStopped: some cannot be read.
    """
    changed = compared.changed.copy()
    if compared.moved.any():
        pool: WorkerPool = yield POOL
        for record in (yield from looked(session, submit(pool), LOOK, compared.moved)):
            for block, fingerprint in record.result.seen if record.result is not None else ():
                changed[block] = not is_same(compared.known.of(block), fingerprint)
    return changed


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


def rests_on(
    changed: Sequence[int],
    schedule: RunSchedule,
    selection: Selection,
    lost: Iterable[int] = (),
    coarser: Callable[[int], Iterable[int]] = lambda level: (),
) -> Again:
    """Return what rests on the blocks that have `changed`, and on shards that are lost in another way.

    Args:
        lost: those of level 0; ones where nothing is selected bring no blocks, but the coarser ones above them.
        coarser: returns those of a coarser level.
    """
    plan, blocks, lost = schedule.plan, set(changed), set(lost)
    gone = {shard for shard in lost if not selection.is_unwritten(shard)}
    shards = lost - gone
    shards |= {shard for block in blocks for shard in plan.shards_of_block(block) if selection.is_unwritten(shard)}
    for shard in shards:
        blocks.update(filter(selection.has_block, plan.blocks_of_shard(shard)))
    levels = [shards | gone]
    for level in range(1, len(plan.factors)):
        above = {each for shard in levels[-1] for each in schedule.coarser(level, shard)}
        levels.append(above.union(coarser(level)))
    return Again(changed, sorted(blocks), [sorted(each) for each in levels])


class Update:
    """The beginning of a session that updates the output of `work`.

    Args:
        selection: what was selected until now, by which blocks read.
        chosen: what is selected from now on, where that is not the same.
    """

    def __init__(self, work: Work, selection: Selection, session: WorkSession, chosen: Selection | None = None) -> None:
        self.work, self.selection, self.session, self.chosen = work, selection, session, chosen or selection
        self.plan = work.plan

    @cached_property
    def _others(self) -> Selection | None:
        """The cells that are selected now and were not, or the other way round; None where there are none."""
        if self.selection.cells is None or self.chosen.cells is None:
            return None
        cells = self.selection.cells ^ self.chosen.cells
        return Selection(self.plan, cells) if cells.any() else None

    def _moved_windows(self) -> list[int]:
        """Return the blocks that read another box than before, for other windows of them are computed."""
        if self._others is None:
            return []
        both = (self._others, self.selection, self.chosen)
        blocks = (n for n in range(len(self.plan.blocks)) if all(each.has_block(n) for each in both))
        return [block for block in blocks if self.selection.input_box(block) != self.chosen.input_box(block)]

    def steps(self) -> Steps[Updated | None]:
        """Find what has changed, and take it back in the journal; None where nothing has.

        Raises:
            RunStopped: the input cannot be read.
        """
        if self.work.options.measure_again and not self._is_measuring_again:
            every = filter(self.selection.has_block, range(len(self.plan.blocks)))
            return self._take_back(list(every), MEASURED_AGAIN)
        log.info("looking for what has changed in %s", self.plan.source.path)
        work, selection = self.work, self.selection
        compared = work.compared()
        job = Job(str(work.folder.path), self.plan.identity, session=self.session.name, cells=selection.fingerprint)
        changed = yield from changed_blocks(self.session, compared, partial(submitter, job=job))
        changed[self._moved_windows()] = True
        return self._take_back(np.flatnonzero(changed).tolist(), "")

    @property
    def _is_measuring_again(self) -> bool:
        """Whether an earlier session began to measure again, and did not come to its end."""
        updates = updates_in(self.work.folder.journal, RESULTS)
        return bool(updates) and updates[-1].why == MEASURED_AGAIN and not self._schedule.is_complete

    @cached_property
    def _schedule(self) -> RunSchedule:
        schedule = self.work.records.ledger().schedule
        assert isinstance(schedule, RunSchedule)
        return schedule

    @property
    def _is_other_input(self) -> bool:
        before = read_identities(self.work.folder.inputs) or {}
        return any(what not in before or differences(before[what], now) for what, now in self.work.inputs.items())

    def _take_back(self, changed: Sequence[int], why: str) -> Updated | None:
        """Note in the journal what is to be done again because these blocks have `changed`, if anything is."""
        plan, options, chosen, others = self.plan, self.work.options, self.chosen, self._others
        flags = None if others is None else others.shards(0)
        lost = [] if flags is None else np.flatnonzero(flags).tolist()
        schedule = self._schedule if others is None else RunSchedule(plan, chosen)
        again = rests_on([block for block in changed if chosen.has_block(block)], schedule, chosen, lost)
        normalise = None if options.measure_again else known_normalisation(self.work)
        is_measured = plan.grey_rule.needs_measuring
        taken = again.taken(plan)
        if others is not None:
            taken = self._with_dropped(taken)
            why = why or "the mask or the empty space selects other parts of the volume"
        if is_measured and normalise is None and (changed or self._is_other_input):
            every = to_ranges(range(len(plan.blocks)))
            taken |= {"measure": every, "histogram": every}
        if others is None and not any(taken.values()):
            return None
        update = Updated(
            time.time(), len(changed), len(again.blocks), chosen.num_blocks,
            normalise.rows if is_measured and normalise is not None else (), why,
            cells=chosen.fingerprint, taken=taken,
        )  # fmt: skip
        self.work.before_change()
        if others is not None:
            store_selection(self.work.folder.next_selection, chosen)
        self.session.journal.append(Record(STAGE, (), result=update))
        take_selection(self.work)
        log.info("%s", update)
        return update

    def _with_dropped(self, taken: dict[str, str]) -> dict[str, str]:
        """Return `taken` with the blocks that are not computed any more."""
        before, now = self.selection.has_block, self.chosen.has_block
        dropped = {block for block in range(len(self.plan.blocks)) if before(block) and not now(block)}
        of_blocks = [key for key in taken if key in (SEEN, "infer", "factor")]
        parts = {key: {unit for part in from_ranges(taken[key]) for unit in part} | dropped for key in of_blocks}
        return taken | {key: to_ranges(sorted(units)) for key, units in parts.items()}


def take_selection(work: Work) -> None:
    """Let what the last update of `work` selects count, and delete the shards in which nothing is selected any more.

    A kill before the update was noted leaves the selection that was there; one after it is made good here.
    """
    plan, folder = work.plan, work.folder
    if not folder.next_selection.is_file():
        return
    updates, chosen = updates_in(folder.journal, RESULTS), read_selection(folder.next_selection, plan)
    if not updates or updates[-1].cells != chosen.fingerprint:
        folder.next_selection.unlink()
        return
    if paths.exists(paths.locate(plan.out)):
        _delete_dropped(plan, read_selection(folder.selection_file, plan), chosen)
    folder.next_selection.replace(folder.selection_file)


def _delete_dropped(plan: Plan, before: Selection, chosen: Selection) -> None:
    """Delete the shards of the output in which something was selected `before`, and nothing is now."""
    for level in range(len(plan.factors)):
        was, now = before.shards(level), chosen.shards(level)
        assert now is not None  # not all is selected
        dropped = ~now if was is None else was & ~now
        for shard in np.flatnonzero(dropped).tolist():
            for array in plan.arrays:
                remove(array, level, stored_box(array, array.shards(level).box(shard)))


def looked(session: WorkSession, submit: Submit, stage: str, blocks: np.ndarray) -> Steps[list[Record[Seen]]]:
    """Let workers read `blocks`, a flag for each, and return what they saw; it is in the journal as well.

    Raises:
        RunStopped: some cannot be read.
    """
    look, records = Stage(stage, len(blocks), active=blocks, doing="looking for changed chunks"), list[Record[Seen]]()
    phase = yield from session.finish(
        Schedule(look), submit, tolerated=TOLERATED_SHARE, on_record=lambda units, record: records.append(record)
    )
    if look.failed:
        reason = phase.reasons[stage, min(look.failed)]
        raise RunStopped(
            f"block {min(look.failed)} of the input cannot be read, so that nobody can tell what has changed; mend "
            f"the volume: {last_line(reason)}",
            reason,
        )
    return records


def with_due(selection: Selection, work: Work, folder: RunFolder) -> tuple[Selection, str]:
    """Return `selection` with the shards that are still to be written, and the fingerprint of the file that says them.

    Without an update these are all that the open blocks add to, and nothing needs to be said.
    """
    if not updates_in(folder.journal, RESULTS):
        return selection, ""
    due = np.ones(len(work.plan.shards()), bool)
    due[[shard for level, shard in written(work.records) if level == 0]] = False
    return dataclasses.replace(selection, unwritten=due), store_unwritten(folder.path / DUE_FILE, due)
