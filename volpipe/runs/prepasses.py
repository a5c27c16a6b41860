"""The passes over a volume before the net sees it: the scan for what is wanted, and the measuring of its statistics.

Not here: what a task of them does (worker, selection, statistics).
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

import numpy as np

from volpipe.blockwise.failures import message_of
from volpipe.blockwise.journal import read_results
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.phase import TOLERATED_SHARE
from volpipe.blockwise.pool import Submit, WorkerPool
from volpipe.blockwise.stage import Feed, Schedule, Stage, fed
from volpipe.blockwise.work import POOL, Steps
from volpipe.errors import NOTICE, PlanError, RunError, RunStopped
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, gather, scanned_box, store_selection
from volpipe.inference.statistics import Statistics, join
from volpipe.runs.output_work import OutputWork
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.unit_records import WorkSession
from volpipe.runs.update_records import updates_in
from volpipe.runs.worker import RESULTS, Cells, Job, ScanStates, submitter
from volpipe.volumes.file_states import KnownStates, states_of
from volpipe.volumes.volume import open_volume

Work = OutputWork[Plan, Any]  # Any: the report of a run
log = logging.getLogger(__name__)

STATISTICS = (
    "and every block needs the statistics of all; mend the volume, or give normalise.low and high (or mean and std)"
)
NEEDED = {
    "scan": "so no window can be selected; mend the volume or the mask, or leave out input.empty and mask",
    "measure": STATISTICS,
    "histogram": STATISTICS,
}
MEASURING = "measuring the intensities of the volume"
SCANNING = "looking for empty space and the mask"


def _finish(session: WorkSession, stage: Stage, submit: Submit, *, resumes: bool = True) -> Steps[None]:
    """Do all of `stage`, less what the journal has if it `resumes`.

    Raises:
        RunStopped: some of it cannot be done, without which nothing else can.
    """
    schedule = Schedule(stage)
    if resumes:
        schedule = Ledger(session.journal.path, RESULTS, lambda: Schedule(stage)).resumed()
    phase = yield from session.finish(schedule, submit, tolerated=TOLERATED_SHARE)
    if stage.failed:
        unit = min(stage.failed)
        reason = phase.reasons[stage.name, unit]
        raise RunStopped(f"{stage.called(unit)} failed, {NEEDED[stage.name]}: {message_of(reason)}", reason)
    if not schedule.is_complete:
        raise RunStopped(
            f"{stage.num_left:,} of {stage.num_units:,} blocks cannot be read, because parts of the stage before are "
            f"missing, so {stage.called()} cannot end; run the same command again to compute them"
        )


def _kept_normalisation(work: Work) -> Affine | None:
    """Return the normalisation that an update kept; None where there was none, or the last one had it measured anew."""
    updates = updates_in(work.folder.journal, work.kinds)
    return Affine.from_rows(updates[-1].normalise) if updates and updates[-1].normalise else None


def known_normalisation(work: Work) -> Affine | None:
    """Return the normalisation of a run that was begun; None where its volume was not measured to the end."""
    rule = work.plan.grey_rule
    if not rule.needs_measuring:
        return rule.affine(None)
    if kept := _kept_normalisation(work):
        return kept
    records = [record for record in work.records if record.stage in ("measure", "histogram")]
    for stage in ("measure", "histogram"):
        own = [record for record in records if record.stage == stage]
        if sum(len(record.done) for record in own) < len(work.plan.blocks):
            return None
        statistics = join(record.result for record in own if record.result is not None)
        if not rule.needs_histogram(statistics):
            break
    return rule.affine(statistics, interpolated=work.plan.source.resampling is not None)


def scan_stage(plan: Plan, feed: Feed | None = None) -> Stage:
    """Return the stage that looks at mask and voxels: of the blocks whose own voxels are in the region."""
    stage = Stage("scan", len(plan.blocks), active=Selection(plan).owners, doing=SCANNING)
    return fed(stage, feed, partial(scanned_box, plan))


def scanned(work: Work, session: WorkSession, pool: WorkerPool, job: Job) -> Steps[Selection]:
    """Return the selection that tasks make, stored for workers and for later sessions.

    Raises:
        PlanError: nothing is; the folder is as if nobody had begun.
    """
    plan, folder = work.plan, work.folder
    yield from _finish(session, scan_stage(plan, work.feed), submitter(pool, job))
    selection = _gathered(work)
    if not selection.num_cells:
        session.journal.clear()
        folder.inputs.unlink(missing_ok=True)
        folder.plan_file.unlink()
        raise PlanError(_nothing_selected(plan))
    store_selection(folder.selection_file, selection)
    num_windows = plan.lattice.num_windows
    log.info("selected %d of %d windows, in %d blocks", selection.num_cells, num_windows, selection.num_blocks)
    return selection


def _gathered(work: Work) -> Selection:
    """Return what the scans of the journal select, of each block the last."""
    results = read_results(work.folder.journal, RESULTS, Cells)
    return gather(work.plan, (entry for result in results for entry in result.cells))


def rescanned(work: Work, session: WorkSession) -> Steps[Selection]:
    """Return the selection as mask and volume are now; tasks look at blocks whose files are not as they were.

    Raises:
        RunError: nothing is selected any more.
    """
    plan, folder = work.plan, work.folder
    moved = _moved_blocks(plan, folder)
    if moved.any():
        pool: WorkerPool = yield POOL
        job = Job(str(folder.path), plan.identity, session=session.name)
        stage = Stage("scan", len(plan.blocks), active=moved, doing=SCANNING)
        yield from _finish(session, stage, submitter(pool, job), resumes=False)
    selection = _gathered(work)
    if not selection.num_cells:
        raise RunError(f"{_nothing_selected(plan)}; --update would leave an output without voxels, use --fresh")
    return selection


def _moved_blocks(plan: Plan, folder: RunFolder) -> np.ndarray:
    """Return a flag for each block of the region: whether files that decide what of it is selected are not as then."""
    mask = None if plan.mask is None else KnownStates(open_volume(plan.mask.path, plan.mask.key).as_it_is)
    states, before = ScanStates(plan, states_of(plan.source.as_planned(), KnownStates), mask), dict[int, str]()
    for result in read_results(folder.journal, RESULTS, Cells):
        before |= result.states
    owners = Selection(plan).owners
    moved = np.ones(len(plan.blocks), bool) if owners is None else owners.copy()
    for block in np.flatnonzero(moved).tolist():
        known = before.get(block, "")
        moved[block] = not known or states.of(block) != known
    return moved


def _nothing_selected(plan: Plan) -> str:
    choice, where = plan.recipe.input, "the volume" if plan.is_whole else f"the roi {plan.roi_box}"
    if plan.mask is not None and choice.empty is None:
        return f"mask {choice.mask} is zero all over {where}, so nothing is selected; use another mask"
    masked = "" if plan.mask is None else f" and under mask {choice.mask}"
    return f"every window in {where}{masked} is empty (input.empty={choice.empty}); nothing is selected"


def measured(work: Work, session: WorkSession, pool: WorkerPool, job: Job) -> Steps[Affine]:
    """Return the volume's normalisation, measured by tasks where it is neither given nor known from the type.

    All of the volume counts, so that a part of it comes out as in a run over everything; but for voxels that are NaN or
    infinite where nothing is selected.
    """
    plan = work.plan
    rule = plan.grey_rule

    def statistics_of(name: str, job: Job) -> Steps[Statistics]:
        stage = fed(Stage(name, len(plan.blocks), doing=MEASURING), work.feed, plan.lattice.core_box)
        yield from _finish(session, stage, submitter(pool, job))
        return join(r.result for r in work.records if r.stage == name and isinstance(r.result, Statistics))

    if not rule.needs_measuring:
        return rule.affine(None)
    if kept := _kept_normalisation(work):
        return kept
    statistics = yield from statistics_of("measure", job)
    if rule.needs_histogram(statistics):
        if plan.recipe.normalise.method == "bytes":
            reach = f"{statistics.low:g} to {statistics.high:g}"
            sentence = "%s has %s voxels from %s, which are no grey levels of 8 bits: percentiles are taken"
            log.warning(sentence, plan.source.path, rule.dtype, reach, extra=NOTICE)
        job = dataclasses.replace(job, bins=statistics.ends)
        statistics = yield from statistics_of("histogram", job)
    return rule.affine(statistics, interpolated=plan.source.resampling is not None)
