"""The forecast: what a plan will take on the workers of a site, and whether they and the disk have it.

Not here: the arithmetic (estimate), trying blocks (calibrate), the limits (limits). The rates of blocks that were tried
are kept in the run's folder, for workers like those that tried them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError, RunStopped
from volpipe.estimation.calibrate import OnTry, TooSlowError, VolumeSample, calibrate, calibration_bytes, sample
from volpipe.estimation.estimate import Estimate, Slots, UnitCosts, estimate, upper_bounds
from volpipe.estimation.limits import Limits, check_limits, disk_limits, warn_of_room
from volpipe.estimation.measure import processor
from volpipe.estimation.memory import array_bytes
from volpipe.geometry.block_shape import BLOCKS_PER_WORKER, ENOUGH_BLOCKS, SLAB_VOXELS
from volpipe.geometry.grid import triple
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan, make_plan
from volpipe.inference.selection import Selection
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

WORTH_CALIBRATING = 100  # blocks per worker: three of them cost 3 % of the time
UNKNOWN_SLOTS = Slots(1, 1, shared=True)
NOTABLE = 1.05  # times as much: less says nothing against an alternative


@dataclass(frozen=True)
class Workers:
    """Workers of a site that rates hold for: seconds go with their number and processor, memory with where nets are.

    Attributes:
        slots: how many there are.
        threads: cores of each, None where the site does not say.
        processor: the name of the GPU that each has, or of this machine's processor; "" where nobody knows.
    """

    slots: Slots
    threads: int | None
    processor: str

    @classmethod
    def of(cls, pool: WorkerPool) -> Workers:
        """Return the workers of `pool`."""
        in_process = pool.capacity is not None and pool.capacity.in_process
        slots = Slots(pool.slots["cpu"], pool.slots["gpu"], pool.shared, pool.on_gpu, in_process)
        gpu = None if pool.capacity is None else pool.capacity.gpu
        own = processor() if pool.is_here and not pool.on_gpu else ""
        return cls(slots, pool.worker_threads, own if gpu is None else gpu.name)


def process_bytes(pool: WorkerPool) -> int | None:
    """Return the memory of a process of `pool` that runs nets, of all workers in it; None where nobody knows."""
    return None if pool.worker_bytes is None else Workers.of(pool).slots.num_threads * pool.worker_bytes


def load_rates(folder: RunFolder, plan: Plan, workers: Workers | None) -> UnitCosts | None:
    """Return the rates of `plan` that `workers` gave earlier, or any where it is None; None where there are none."""
    try:
        stored = json.loads(folder.rates_file.read_text(encoding="utf-8"))
        if stored["identity"] != plan.identity:
            return None
        is_same = workers is None or stored["workers"] == asdict(workers)
        return UnitCosts(**stored["rates"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's: it is made again
        return None


@dataclass(frozen=True)
class Forecast:
    """The estimate of a plan, and its basis: the volume, a sample of its chunks, the workers, and the limits.

    `share` of the region's blocks is selected. Workers keep chunks of the input in the `node_directory` of their node,
    if the site names one, and have `worker_threads` each. `num_workers` run nets; None without a site. `first_task` is
    when the first of them began to try blocks, seconds since 1970, 0 if none did; `untimed` is why there are no times.
    """

    plan: Plan
    volume: Volume
    sample: VolumeSample
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
        """Refuse a plan that takes more than there is, with `share_left` of its work to be done.

        Raises:
            PlanError: with what is needed, what there is, and what would fit.
        """
        check_limits(self.plan, self.estimate, self.limits, share_left)

    def most_bytes(self, share_left: float = 1.0) -> float:
        """Return the bytes on the disk if nothing compresses; 0 where they were measured, so that `check` counts."""
        most = 0.0 if self.estimate.is_measured else self.estimate.output_bytes + self.estimate.scratch_bytes
        return share_left * most

    def warn_of_room(self, share_left: float = 1.0) -> None:
        """Tell the user if the disk may be too small, of a plan that `check` does not refuse."""
        warn_of_room("output and scratch", self.most_bytes(share_left), self.plan.out, self.limits)

    def alternatives(self) -> list[Alternative]:
        """Return the plan first, then the other way to the net, and larger and smaller blocks, each with its reason."""
        others = [
            (plan, estimate(plan, self.volume, self.sample.voxel_bytes, self.slots, self._rates_of(plan), self.share))
            for plan in _other_plans(self.plan, self.volume)
        ]
        why = _reason_for(self.plan, self.estimate, [result for _, result in others])
        rows = [Alternative(plan, result, self._reason_against(plan, result)) for plan, result in others]
        return [Alternative(self.plan, self.estimate, why, is_chosen=True), *rows]

    def _rates_of(self, other: Plan) -> UnitCosts | None:
        """Return the rates of the estimate, as they would be with the blocks of the plan `other`."""
        rates = self.estimate.rates
        if rates is None:
            return None
        peak_bytes = rates.peak_bytes + array_bytes(other) - array_bytes(self.plan)
        return replace(rates, sum_bytes=rates.sum_bytes or upper_bounds(other).sum_bytes, peak_bytes=peak_bytes)

    def _reason_against(self, other: Plan, result: Estimate) -> str:
        if other.num_active < max(ENOUGH_BLOCKS, BLOCKS_PER_WORKER * self.slots.gpu):
            return f"too few blocks ({other.num_active}) for its workers ({self.slots.gpu})"
        least = _measures(self.estimate)
        more = {name: value for name, value in _measures(result).items() if value > NOTABLE * least[name]}
        worse = {name: value / least[name] if least[name] else math.inf for name, value in more.items()}
        if not worse:
            return "nothing much; it may be set in the recipe"
        ranked = sorted(worse, key=lambda name: -worse[name])[:2]
        return ", ".join(
            f"{worse[name]:.3g} × {name}" if math.isfinite(worse[name]) else f"needs {name[4:]}" for name in ranked
        )


@dataclass(frozen=True)
class Alternative:
    """A plan, its estimate, and the reason for the chosen one or against this one."""

    plan: Plan
    estimate: Estimate
    why: str
    is_chosen: bool = False


def _other_plans(plan: Plan, volume: Volume) -> Iterator[Plan]:
    larger = triple(min(2 * n, most) for n, most in zip(plan.block, plan.lattice.counts, strict=True))
    other_mode = "stored" if plan.mode == "streamed" else "streamed"
    choices = [(plan.mode, triple(max(1, n // 2) for n in plan.block)), (plan.mode, larger), (other_mode, plan.block)]
    for mode, block in dict.fromkeys(choices):
        if (mode, block) == (plan.mode, plan.block):
            continue
        tensors = plan.recipe.tensors.model_copy(update={"mode": mode})
        windows = plan.recipe.windows.model_copy(update={"block": block})
        recipe = plan.recipe.model_copy(update={"tensors": tensors, "windows": windows})
        try:
            out, folder = locate(plan.out), plan.search_path
            yield make_plan(recipe, volume, plan.net, out=out, search_path=folder, sizes=plan.sizes)
        except PlanError:  # a shard that the recipe gives does not fit this block
            continue


def _measures(result: Estimate) -> dict[str, float]:
    return {
        "the time": result.seconds or 0.0,
        "the bytes read and written": result.read_bytes + result.written_bytes,
        "the scratch": result.scratch_bytes,
        "the files": result.output_files + result.scratch_files,
        "the memory": result.memory_bytes,
    }


def _reason_for(plan: Plan, chosen: Estimate, others: list[Estimate]) -> str:
    if plan.recipe.tensors.mode != "auto" or plan.recipe.windows.block != "auto":
        return "set in the recipe"
    own = _measures(chosen)
    best = [name for name, value in own.items() if value and all(value <= NOTABLE * _measures(o)[name] for o in others)]
    if best:
        return f"least of {', '.join(name[4:] for name in best)}"
    return "few files and fetches, and blocks enough" if plan.has_slabs else "blocks near 256 voxels an axis"


@dataclass(frozen=True)
class PendingInput:
    """A volume that does not exist yet.

    Attributes:
        volume: as it will be.
        voxel_bytes: stored, per voxel, all channels.
        rates: of blocks that were tried over a stand-in, if any were.
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
    pending: PendingInput | None = None,
) -> Forecast:
    """Return the forecast of `plan` by the rates in the run's `folder`.

    Args:
        pool: the workers, whose own rates alone count; without them there are none.
        share: of the region's blocks that are selected.
        pending: the input, where it does not exist yet.
    """
    slots, worker_bytes, rates = UNKNOWN_SLOTS, None, None
    if pool is not None:
        workers, worker_bytes = Workers.of(pool), process_bytes(pool)
        slots, rates = workers.slots, load_rates(folder, plan, workers)
    volume = plan.source.as_planned() if pending is None else pending.volume
    chunks = sample(plan, volume) if pending is None else VolumeSample(pending.voxel_bytes, Affine())
    limits = disk_limits(locate(plan.out), worker_bytes)
    rates = rates or (pending.rates if pending is not None else None)
    result = estimate(plan, volume, chunks.voxel_bytes, slots, rates, share)
    node_directory = None if pool is None else pool.node_directory
    threads = None if pool is None else pool.worker_threads
    num_workers = None if pool is None else slots.gpu
    return Forecast(plan, volume, chunks, slots, limits, share, result, node_directory, threads, num_workers)


def forecast_calibrated(
    plan: Plan, folder: RunFolder, pool: WorkerPool, share: float = 1.0, on_try: OnTry = lambda seconds, most: None
) -> Steps[Forecast]:
    """Return the forecast of `plan`, after blocks are tried if none were on such workers.

    It has no times where that is too slow.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    result = forecast(plan, folder, pool, share)
    if result.estimate.rates is not None:
        return result
    result.check(share_left=0.0)  # of disk, so that memory alone counts
    try:
        rates, began = yield from calibrate(plan, result.sample.normalise, result.slots.gpu, folder.calibration, on_try)
    except TooSlowError as error:
        log.warning("%s", error)
        return replace(result, untimed=str(error))
    folder.path.mkdir(mode=0o750, parents=True, exist_ok=True)
    content = {"identity": plan.identity, "workers": asdict(Workers.of(pool)), "rates": asdict(rates)}
    folder.rates_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    timed = estimate(plan, result.volume, result.sample.voxel_bytes, result.slots, rates, share)
    return replace(result, estimate=timed, first_task=began)


def forecast_run(
    selection: Selection, folder: RunFolder, pool: WorkerPool, share_left: float, *, is_pending: bool
) -> Steps[Forecast]:
    """Return the forecast of `selection`; blocks are tried only where that costs little, and cannot stop the run.

    They are tried as well where the disk would be too small if nothing compressed, and has room for what is tried. None
    are where other work is still writing the volume.
    """
    share, plan = selection.num_blocks / selection.plan.num_active, selection.plan
    if is_pending:
        volume = plan.source.volume()
        pending = PendingInput(volume, float(volume.num_channels * volume.dtype.itemsize))
        return forecast(plan, folder, pool, share, pending=pending)
    untried = forecast(plan, folder, pool, share)
    is_small = selection.num_blocks * num_tried(plan) < WORTH_CALIBRATING * pool.slots["gpu"]
    free_bytes = untried.limits.free_bytes
    is_decisive = (
        free_bytes is not None and calibration_bytes(plan, untried.slots.gpu) < free_bytes < untried.most_bytes()
    )
    if share_left < 1 or (is_small and not is_decisive):
        return untried
    untried.check()  # by what is certain
    try:
        return (yield from forecast_calibrated(plan, folder, pool, share))
    except RunStopped as error:  # the run retries and names blocks that fail
        log.warning("no times are known, for a block could not be tried: %s", error)
        return untried


def num_tried(plan: Plan) -> int:
    """Return how many of the largest blocks that are tried have as many voxels as a block of `plan`."""
    return max(1, math.prod(plan.sum_shape) // SLAB_VOXELS) if plan.has_slabs else 1
