"""The passes over a volume before the net sees it: the scan for what is wanted, and the measuring of its statistics.

Not here: what a task of them does (worker, selection, statistics).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from volpipe.blockwise.failures import last_line
from volpipe.blockwise.journal import Journal, Totals
from volpipe.blockwise.loop import Loop, Show
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import SingleStage, Stage
from volpipe.errors import PlanError, RunStopped
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, gather, store_selection
from volpipe.inference.statistics import Statistics, affine, join, needs_histogram, needs_measuring
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS, Cells, Job, submitter

log = logging.getLogger(__name__)

STATISTICS = "and all blocks need the statistics of all; mend the volume, or give normalise.low and high (mean and std)"
NEEDED = {
    "scan": "without which nobody knows what is wanted; mend the volume or the mask, or leave out input.empty and mask",
    "measure": STATISTICS,
    "histogram": STATISTICS,
}


@dataclass
class Passes:
    """Stages that stand alone, on the workers of a run.

    Attributes:
        totals: what the tasks of each took in this session.
        reported: kinds of failures and warnings that are in the log already; see `Loop`.
        first_task: when the first task of all began, seconds since 1970; 0 before one is back.
    """

    pool: WorkerPool
    job: Job
    show: Show
    totals: dict[str, Totals] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    first_task: float = 0.0

    def finish(self, stage: Stage, journal: Journal, job: Job | None = None) -> None:
        """Do all of `stage`, less what the journal has.

        Raises:
            RunStopped: some of it cannot be done, without which nothing else can.
        """
        schedule = SingleStage(stage)
        schedule.resume(done_in(journal))
        submit = submitter(self.pool, job or self.job)
        loop = Loop(schedule, submit, self.pool.slots, journal, self.show, reported=self.reported)
        loop.run()
        self.first_task = self.first_task or loop.progress.first_task
        self.totals[stage.name] = loop.progress.totals[stage.name]
        if stage.failed:
            unit = min(stage.failed)
            reason = loop.reasons[stage.name, unit]
            raise RunStopped(f"{stage.name} of block {unit} failed, {NEEDED[stage.name]}: {last_line(reason)}", reason)


def done_in(journal: Journal) -> Iterator[tuple[str, int]]:
    """Yield stage and unit of all that the journal has as done."""
    return (unit for record in journal.records() for unit in record.units)


def scan_stage(plan: Plan) -> Stage:
    """Return the stage that looks at mask and voxels: of the blocks whose own voxels are in the region."""
    return Stage("scan", len(plan.blocks), active=Selection(plan).owners)


def scanned(passes: Passes, folder: RunFolder) -> Selection:
    """Return the selection that tasks make, stored for workers and for later sessions.

    Raises:
        PlanError: nothing is; the folder is as if nobody had begun.
    """
    plan = passes.job.plan
    with Journal(folder.scan, RESULTS) as journal:
        passes.finish(scan_stage(plan), journal)
        selection = gather(plan, (entry for result in journal.results(Cells) for entry in result.cells))
    if not selection.num_cells:
        folder.plan_file.unlink()
        folder.inputs.unlink(missing_ok=True)
        folder.scan.unlink()
        raise PlanError(_nothing_selected(plan))
    store_selection(folder.selection_file, selection)
    folder.scan.unlink()
    log.info(
        "%d of %d windows are wanted, in %d blocks", selection.num_cells, plan.lattice.num_windows, selection.num_blocks
    )
    return selection


def _nothing_selected(plan: Plan) -> str:
    choice, where = plan.recipe.input, "the volume" if plan.is_whole else f"the roi {plan.roi_box}"
    if plan.mask is not None and choice.empty is None:
        return f"mask {choice.mask} is zero all over {where}, so nothing is wanted; use a mask with some other voxels"
    masked = "" if plan.mask is None else f" and under mask {choice.mask}"
    return f"every window in {where}{masked} is empty (input.empty={choice.empty}); nothing is wanted"


def normalisation(passes: Passes, journal: Journal, selection: Selection) -> Affine:
    """Return the volume's normalisation, measured by tasks where it is neither given nor known from the type.

    All of the volume counts, so that a part of it comes out as in a run over everything; but for voxels that are NaN or
    infinite where nothing is `selection`.
    """
    plan, job = selection.plan, dataclasses.replace(passes.job, cells=selection.fingerprint)
    choice, dtype = plan.recipe.normalise, np.dtype(plan.source.dtype)

    def measured(name: str, job: Job) -> Statistics:
        passes.finish(Stage(name, len(plan.blocks)), journal, job)
        return join(r.result for r in journal.records() if r.stage == name and r.result is not None)

    if not needs_measuring(choice, dtype):
        return affine(choice, dtype, None)
    statistics = measured("measure", job)
    if needs_histogram(choice, dtype):
        statistics = measured("histogram", dataclasses.replace(job, bins=(statistics.low, statistics.high)))
    return affine(choice, dtype, statistics)
