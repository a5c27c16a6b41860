"""The appraisal: what a plan will take on the workers that there are, and whether there is as much.

Not here: the arithmetic (estimate), trying blocks (rehearsal), the limits (limits).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from volpipe.alternatives import Alternative, alternatives
from volpipe.errors import RunStopped
from volpipe.estimate import Estimate, Slots, UnitCosts, estimate
from volpipe.folder import RunFolder
from volpipe.formats.files import locate
from volpipe.limits import Limits, check_limits, disk_limits
from volpipe.ops import Affine
from volpipe.plan import Plan
from volpipe.rehearsal import OnTry, Sample, TooSlowError, calibrate, sample, unheard
from volpipe.run import Executors
from volpipe.volume import Volume
from volpipe.wanted import Selection

log = logging.getLogger(__name__)

WORTH_CALIBRATING = 100  # blocks per worker: three of them cost 3 % of the time
UNKNOWN_SLOTS = Slots(1, 1, shared=True)


@dataclass(frozen=True)
class Forecast:
    """What a plan will take, and what that rests on: its volume, some chunks of it, the workers, and the limits.

    `share` of the region's blocks is wanted, where a mask leaves some out. The site says that workers keep chunks of
    the input in the `node_directory` of their node, if it names any, and how many threads it gives a worker.
    `num_workers` run nets; None without a site. `first_task` is when the first of them began to try blocks, if they
    did; `untimed` says why they gave no times.
    """

    plan: Plan
    volume: Volume
    sample: Sample
    slots: Slots
    limits: Limits
    share: float
    estimate: Estimate
    node_directory: str | None = None
    worker_threads: int | None = None
    num_workers: int | None = None
    first_task: float = 0.0
    untimed: str = ""

    def check(self, share_left: float = 1.0) -> None:
        """Refuse a plan of whose work `share_left` is to be done and that takes more than there is.

        Raises:
            PlanError: with what is needed, what there is, and what would fit.
        """
        check_limits(self.plan, self.estimate, self.limits, share_left)

    def alternatives(self) -> list[Alternative]:
        """Return the plan beside those that were turned down."""
        return alternatives(self.plan, self.estimate, self.volume, self.sample.voxel_bytes, self.slots, self.share)


@dataclass(frozen=True)
class PendingInput:
    """A volume that does not exist yet.

    Attributes:
        volume: as it will be.
        voxel_bytes: stored, per voxel, all channels.
        rates: what blocks took over a volume that stood in for it, if any were tried.
    """

    volume: Volume
    voxel_bytes: float
    rates: UnitCosts | None = None


def forecast(
    plan: Plan,
    folder: RunFolder,
    executors: Executors | None = None,
    share: float = 1.0,
    *,
    pending: PendingInput | None = None,
) -> Forecast:
    """Return what `plan` takes by what the run's `folder` knows of its rates.

    Args:
        share: of the region's blocks that are wanted, where a mask leaves some out.
        ahead: what the plan reads, where that does not exist yet.
    """
    slots, worker_bytes = UNKNOWN_SLOTS, None
    if executors is not None:
        slots = Slots(executors.slots["cpu"], executors.slots["gpu"], executors.shared, executors.on_gpu)
        worker_bytes = executors.worker_bytes
    volume = plan.source.volume() if pending is None else pending.volume
    seen = sample(plan, volume) if pending is None else Sample(pending.voxel_bytes, Affine())
    limits = disk_limits(locate(plan.out), worker_bytes)
    rates = folder.load_rates(plan) or (pending.rates if pending is not None else None)
    found = estimate(plan, volume, seen.voxel_bytes, slots, rates, share)
    kept_in = None if executors is None else executors.node_directory
    threads = None if executors is None else executors.worker_threads
    num_workers = None if executors is None else slots.gpu
    return Forecast(plan, volume, seen, slots, limits, share, found, kept_in, threads, num_workers)


def forecast_calibrated(
    plan: Plan, folder: RunFolder, executors: Executors, share: float = 1.0, on_try: OnTry = unheard
) -> Forecast:
    """Return what `plan` will take, after a rehearsal if there was none before; without times where that is too slow.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    found = forecast(plan, folder, executors, share)
    if found.estimate.rates is not None:
        return found
    found.check(share_left=0.0)  # of disk, so that memory alone counts
    try:
        tried = calibrate(plan, found.sample.normalise, executors, found.slots.gpu, folder.rehearsal, on_try)
    except TooSlowError as error:
        log.warning("%s", error)
        return replace(found, untimed=str(error))
    folder.store_rates(plan, tried.rates)
    return replace(forecast(plan, folder, executors, share), first_task=tried.first_task)


def forecast_run(selection: Selection, folder: RunFolder, executors: Executors, share_left: float) -> Forecast:
    """Return what `selection` will take; blocks are tried only where that costs little, and cannot stop the run."""
    share = selection.num_blocks / selection.plan.num_active
    if share_left < 1 or selection.num_blocks < WORTH_CALIBRATING * executors.slots["gpu"]:
        return forecast(selection.plan, folder, executors, share)
    try:
        return forecast_calibrated(selection.plan, folder, executors, share)
    except RunStopped as error:  # blocks that fail are the run's to retry and to name
        log.warning("the rehearsal failed: %s", error)
        return forecast(selection.plan, folder, executors, share)
