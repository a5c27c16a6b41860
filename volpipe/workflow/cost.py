"""Forecast of a flow: each of its stages, before its input exists, and all of them together.

Not here: the arithmetic of one stage (estimation.estimate), the limits of disks (limits), or stored times (timings).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.work import POOL, Errand, Steps
from volpipe.errors import PlanError
from volpipe.estimation.calibrate import TooSlowError, calibrate
from volpipe.estimation.estimate import Estimate, timed_alone
from volpipe.estimation.forecast import Forecast, PendingInput, forecast, forecast_calibrated
from volpipe.estimation.limits import GIB, disk_limits, of_quota
from volpipe.evaluation.estimate import ScoreTime, calibrate_evaluation
from volpipe.evaluation.evaluate import Evaluation
from volpipe.inference.plan import Plan
from volpipe.recipes.workflow import VOLUME, named
from volpipe.segmentation.driver import check_memory
from volpipe.segmentation.estimate import SegmentTimes, SegmentTrial, calibrate_segmentation
from volpipe.segmentation.plan import SegmentPlan
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.storage.paths import delete
from volpipe.volumes.volume import Volume
from volpipe.workflow.execute import is_complete
from volpipe.workflow.plan import FlowPlan, StagePlan
from volpipe.workflow.timings import known_times, store_times

log = logging.getLogger(__name__)

METADATA_FILES = 2  # of labels, beside that of each level: their group, and the group of what changes from run to run


@dataclass(frozen=True)
class ResourceNeeds:
    """Bytes and files of one stage, scratch at its highest.

    Bytes that were not measured are upper bounds.
    """

    read_bytes: float
    written_bytes: float
    output_bytes: float
    output_files: int
    scratch_bytes: float
    scratch_files: int
    is_measured: bool

    @classmethod
    def from_estimate(cls, result: Estimate) -> ResourceNeeds:
        return cls(
            result.read_bytes,
            result.written_bytes,
            result.output_bytes,
            result.output_files,
            result.scratch_bytes,
            result.scratch_files,
            result.is_measured,
        )

    @classmethod
    def from_labels(cls, plan: SegmentPlan, voxel_bytes: float) -> ResourceNeeds:
        """Return the needs of a labelling; two of its passes read the volume, of `voxel_bytes` per voxel."""
        seen = math.prod(b + 2 * r for b, r in zip(plan.block, plan.reach, strict=True)) / math.prod(plan.block)
        num_levels = len(plan.factors)
        levels = [float(math.prod(plan.level_shape(i)) * plan.dtype.itemsize) for i in range(num_levels)]
        return cls(
            2 * seen * voxel_bytes * math.prod(plan.shape) + plan.scratch_bytes + sum(levels[:-1]),
            sum(levels) + plan.scratch_bytes,
            sum(levels),
            sum(len(plan.shards(i)) for i in range(num_levels)) + num_levels + METADATA_FILES,
            plan.scratch_bytes,
            3 * len(plan.blocks),
            is_measured=False,
        )


@dataclass(frozen=True)
class StageCost:
    """Forecast of one stage.

    Attributes:
        stage: the stage.
        need: None of an evaluation, which reads and writes next to nothing.
        forecast: of its run; None of a labelling or an evaluation.
        share_left: of the work that is still to be done.
        times: of a labelling or an evaluation of which blocks were tried.
    """

    stage: StagePlan
    need: ResourceNeeds | None = None
    forecast: Forecast | None = None
    share_left: float = 1.0
    times: SegmentTimes | ScoreTime | None = None

    @classmethod
    def from_forecast(cls, stage: StagePlan, forecast: Forecast, share_left: float = 1.0) -> StageCost:
        return cls(stage, ResourceNeeds.from_estimate(forecast.estimate), forecast, share_left)

    @property
    def seconds(self) -> float | None:
        """Seconds from the first task to the last; None where no block was tried."""
        if self.forecast is not None:
            return self.forecast.estimate.seconds
        return self.times.seconds if self.times is not None else None

    @property
    def is_guess(self) -> bool:
        """Whether `seconds` rest on synthetic voxels."""
        return self.times is not None and self.times.is_guess


@dataclass(frozen=True)
class FlowCost:
    """Forecast of the stages, in order, and of all together.

    Outputs of all stages stay; the scratch of a stage is deleted when the stage ends, and stages run side by side.
    """

    plan: FlowPlan
    stages: tuple[StageCost, ...]

    def of(self, stage: StagePlan) -> StageCost:
        """Return the forecast of `stage`."""
        return next(cost for cost in self.stages if cost.stage.name == stage.name)

    @cached_property
    def _known(self) -> list[tuple[ResourceNeeds, float]]:
        return [(cost.need, cost.share_left) for cost in self.stages if cost.need is not None]

    def _sum(self, value: Callable[[ResourceNeeds], float]) -> float:
        return sum(value(needs) for needs, _ in self._known)

    @property
    def read_bytes(self) -> float:
        return self._sum(lambda needs: needs.read_bytes)

    @property
    def written_bytes(self) -> float:
        return self._sum(lambda needs: needs.written_bytes)

    @property
    def output_bytes(self) -> float:
        return self._sum(lambda needs: needs.output_bytes)

    @property
    def output_files(self) -> int:
        return round(self._sum(lambda needs: needs.output_files))

    @property
    def scratch_bytes(self) -> float:
        """Scratch at its highest, of all stages at a time."""
        return self._sum(lambda needs: needs.scratch_bytes)

    @property
    def most_bytes(self) -> float:
        """Bytes on the disk at their highest."""
        return self.output_bytes + self.scratch_bytes

    @property
    def most_files(self) -> int:
        return round(self._sum(lambda needs: needs.output_files + needs.scratch_files))

    @property
    def is_measured(self) -> bool:
        """Whether blocks of every run were tried; else bytes are upper bounds."""
        return all(needs.is_measured for needs, _ in self._known)

    @property
    def seconds(self) -> float | None:
        """Seconds of all stages, one after the other; None where those of one are not known."""
        times = [cost.seconds for cost in self.stages]
        return None if None in times else sum(seconds for seconds in times if seconds is not None)

    @property
    def is_guess(self) -> bool:
        """Whether a part of `seconds` is a guess."""
        return any(cost.is_guess for cost in self.stages)

    def check(self) -> None:
        """Refuse stages that take, one or all together, more than there is.

        Bytes count only of runs whose blocks were tried: the compression of others is not known.

        Raises:
            PlanError: with what is needed, what there is, and what would fit; it names the stage where it is about one.
        """
        for cost in self.stages:
            if cost.forecast is not None:
                with named(cost.stage.name):
                    cost.forecast.check(cost.share_left)
        limits = disk_limits(self.plan.out)
        files = sum(s * (needs.output_files + needs.scratch_files) for needs, s in self._known)
        if limits.free_files is not None and files > limits.free_files:
            raise PlanError(
                f"outputs and scratch of all stages need {files:,.0f} files and {self.plan.out} may have "
                f"{limits.free_files:,}{of_quota(limits.files_by)}; use larger output.shard or output.chunk, or "
                "another --out"
            )
        measured = [(needs, share) for needs, share in self._known if needs.is_measured]
        needed = sum(s * (needs.output_bytes + needs.scratch_bytes) for needs, s in measured)
        if limits.free_bytes is not None and needed > limits.free_bytes:
            raise PlanError(
                f"outputs and scratch of all stages need {needed / GIB:.1f} GiB and {self.plan.out} has "
                f"{limits.free_bytes / GIB:.1f} free{of_quota(limits.bytes_by)}; free some, choose another --out, or "
                "store less (output.dtype, output.codec_level)"
            )


def forecast_flow(plan: FlowPlan, pool: WorkerPool | None = None) -> FlowCost:
    """Return the forecast of the stages of `plan`, by what is known of times; arguments as of `forecast_stages`."""
    steps = forecast_stages(plan, pool, tries=False)
    try:
        next(steps)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("without trials nothing is waited for")


def forecast_stages(plan: FlowPlan, pool: WorkerPool | None, *, tries: bool) -> Steps[FlowCost]:
    """Return the forecast of the stages of `plan`.

    Args:
        plan: made by `plan_flow`.
        pool: the workers; without them neither their memory nor any time is known.
        tries: whether blocks of each stage are tried on them; else times stored for as many workers count.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    costs: list[StageCost] = []
    for stage in plan.stages:
        with named(stage.name):
            cost = yield from _forecast_stage(stage, costs, pool, plan.folder.rehearsal if tries else None)
            costs.append(cost)
    known = {} if pool is None or tries else known_times(plan, pool.slots["cpu"])
    return FlowCost(plan, tuple(replace(cost, times=known.get(cost.stage.name, cost.times)) for cost in costs))


def _forecast_stage(
    stage: StagePlan, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
) -> Steps[StageCost]:
    """Return the forecast of `stage`; blocks are tried in the folder `trials`, if it is given.

    Complete stages are tried too, where their input exists.
    """
    if isinstance(stage.work, Evaluation):
        return StageCost(stage, times=(yield from _try_scores(stage.work, earlier, pool, trials)))
    pending, share_left = _pending_input(stage, earlier), 0.0 if is_complete(stage) else 1.0
    if isinstance(stage.work, SegmentPlan):
        _check_label_memory(stage.work, pool)
        voxel_bytes = pending.voxel_bytes if pending is not None else _whole_voxel(stage.given)
        times = None
        if pool is not None and trials is not None:
            trial = SegmentTrial(stage.work, stage.given, pending is None, str(trials))
            times = yield from calibrate_segmentation(trial, pool)
        return StageCost(stage, ResourceNeeds.from_labels(stage.work, voxel_bytes), None, share_left, times)
    if pool is None or trials is None or not share_left:
        return StageCost.from_forecast(stage, forecast(stage.work, stage.folder, pool, pending=pending), share_left)
    with stage.folder.locked():
        if pending is None:
            return StageCost.from_forecast(stage, (yield from forecast_calibrated(stage.work, stage.folder, pool)))
        return StageCost.from_forecast(stage, (yield from _forecast_pending(stage, stage.work, pending, pool)))


def _try_scores(
    evaluation: Evaluation,
    earlier: Sequence[StageCost],
    pool: WorkerPool | None,
    trials: Path | None,
) -> Steps[ScoreTime | None]:
    if pool is None or trials is None:
        return None
    missing = {str(cost.stage.out) for cost in earlier if not is_complete(cost.stage)}
    return (yield from calibrate_evaluation(evaluation, missing, pool, trials))


def _check_label_memory(plan: SegmentPlan, pool: WorkerPool | None) -> None:
    """Refuse blocks that a worker has no room for, before the stages that come first."""
    if pool is not None:
        check_memory(plan, pool.worker_bytes)


def _whole_voxel(volume: Volume) -> float:
    """Return the bytes of a voxel of `volume` that does not compress, all channels."""
    return float(volume.num_channels * volume.dtype.itemsize)


def _pending_input(stage: StagePlan, earlier: Sequence[StageCost]) -> PendingInput | None:
    """Return the input of `stage` where it is not complete yet, of the size that its own stage's estimate gives."""
    if stage.reads == VOLUME:
        return None
    source = next(cost for cost in earlier if cost.stage.name == stage.reads)
    if is_complete(source.stage):
        return None
    rates = source.forecast.estimate.rates if source.forecast is not None else None
    return PendingInput(stage.given, rates.output_bytes if rates is not None else _whole_voxel(stage.given))


def _forecast_pending(stage: StagePlan, plan: Plan, pending: PendingInput, pool: WorkerPool) -> Steps[Forecast]:
    """Return the forecast of `plan` after blocks of it were tried over an array of zeros, which is deleted.

    It gives times and memory. Bytes stay upper bounds, for zeros do not compress as real voxels do.
    """
    result = forecast(plan, stage.folder, pool, pending=pending)
    if result.estimate.rates is not None:
        return result
    result.check(share_left=0.0)  # of disk, so that memory alone counts
    place = stage.folder.path / "stand_in"
    zeros_like(stage.given, place)
    try:
        stand_in = plan.changed(source=plan.source.model_copy(update={"path": str(place)}))
        rates, _ = yield from calibrate(stand_in, result.sample.normalise, result.slots.gpu, stage.folder.rehearsal)
    except TooSlowError as error:
        log.warning("%s", error)
        return result
    finally:
        delete(place)
    return forecast(plan, stage.folder, pool, pending=replace(pending, rates=timed_alone(rates, plan)))


def preview_flow(plan: FlowPlan, start: Start) -> FlowCost:
    """Return the forecast of `plan` on the workers that `start` starts, after trying blocks of each stage.

    Times of labellings and evaluations are stored for `forecast_flow`, as rates of runs are.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """

    def steps() -> Steps[FlowCost]:
        with plan.folder.locked(), logging_to(plan.folder.log):
            pool: WorkerPool = yield POOL
            result = yield from forecast_stages(plan, pool, tries=True)
            times = [(cost.stage, cost.times) for cost in result.stages if cost.times is not None]
            store_times(plan, times, pool.slots["cpu"])
            return result

    return perform(Errand("plan", steps), partial(start, plan.folder.parsl))
