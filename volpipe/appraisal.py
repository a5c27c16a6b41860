"""The appraisal: what a plan will take on the workers that there are, and whether there is as much.

Not here: the arithmetic (estimate), trying blocks (rehearsal), the limits (limits).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from volpipe.alternatives import Alternative, alternatives
from volpipe.errors import RunStopped
from volpipe.estimate import Estimate, UnitCosts, Slots, estimate
from volpipe.folder import RunFolder
from volpipe.formats.files import locate
from volpipe.limits import Limits, check_limits, disk_limits
from volpipe.ops import Affine
from volpipe.plan import Plan
from volpipe.pool import WorkerPool
from volpipe.rehearsal import OnTry, Sample, TooSlowError, load_rates, calibrate, sample, store_rates, unheard
from volpipe.volume import Volume
from volpipe.wanted import Selection

log = logging.getLogger(__name__)

WORTH_REHEARSING = 100  # blocks per worker: three of them cost 3 % of the time
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
    pool: WorkerPool | None = None,
    share: float = 1.0,
    *,
    ahead: PendingInput | None = None,
) -> Forecast:
    """Return what `plan` takes by what the run's `folder` knows of its rates.

    Args:
        share: of the region's blocks that are wanted, where a mask leaves some out.
        ahead: what the plan reads, where that does not exist yet.
    """
    slots, worker_bytes = UNKNOWN_SLOTS, None
    if pool is not None:
        slots = Slots(pool.slots["cpu"], pool.slots["gpu"], pool.shared, pool.on_gpu)
        worker_bytes = pool.worker_bytes
    volume = plan.source.volume() if ahead is None else ahead.volume
    seen = sample(plan, volume) if ahead is None else Sample(ahead.voxel_bytes, Affine())
    limits = disk_limits(locate(plan.out), worker_bytes)
    rates = load_rates(folder, plan) or (ahead.rates if ahead is not None else None)
    found = estimate(plan, volume, seen.voxel_bytes, slots, rates, share)
    kept_in = None if pool is None else pool.node_directory
    threads = None if pool is None else pool.worker_threads
    num_workers = None if pool is None else slots.gpu
    return Forecast(plan, volume, seen, slots, limits, share, found, kept_in, threads, num_workers)


def forecast_calibrated(
    plan: Plan, folder: RunFolder, pool: WorkerPool, share: float = 1.0, on_try: OnTry = unheard
) -> Forecast:
    """Return what `plan` will take, after a rehearsal if there was none before; without times where that is too slow.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    found = forecast(plan, folder, pool, share)
    if found.estimate.rates is not None:
        return found
    found.check(share_left=0.0)  # of disk, so that memory alone counts
    try:
        tried = calibrate(plan, found.sample.normalise, pool, found.slots.gpu, folder.rehearsal, on_try)
    except TooSlowError as error:
        log.warning("%s", error)
        return replace(found, untimed=str(error))
    store_rates(folder, plan, tried.rates)
    return replace(forecast(plan, folder, pool, share), first_task=tried.first_task)


def forecast_run(wanted: Selection, folder: RunFolder, pool: WorkerPool, share_left: float) -> Forecast:
    """Return what is `wanted` will take; rehearsed only where that costs little of a whole run, and cannot stop it."""
    share = wanted.num_blocks / wanted.plan.num_active
    if share_left < 1 or wanted.num_blocks < WORTH_REHEARSING * pool.slots["gpu"]:
        return forecast(wanted.plan, folder, pool, share)
    try:
        return forecast_calibrated(wanted.plan, folder, pool, share)
    except RunStopped as error:  # blocks that fail are the run's to retry and to name
        log.warning("the rehearsal failed: %s", error)
        return forecast(wanted.plan, folder, pool, share)
