"""What a flow takes: each of its stages, appraised before its input exists, and all of them together.

Not here: the arithmetic of one stage (estimate), the limits of disks (limits), or what is kept of times (flow_times).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from volpipe.appraisal import Forecast, PendingInput, forecast, forecast_calibrated
from volpipe.driver import logging_to
from volpipe.errors import PlanError
from volpipe.estimate import Estimate, timed_alone
from volpipe.evaluate import Evaluation
from volpipe.flow import VOLUME, named
from volpipe.flow_plan import FlowPlan, StagePlan
from volpipe.flow_run import Site, Start, is_complete
from volpipe.flow_times import known_times, store_times
from volpipe.label_cost import LabelTimes, Trial, calibrate_labels
from volpipe.label_plan import LabelPlan
from volpipe.labelling import check_memory
from volpipe.limits import GIB, disk_limits, of_quota
from volpipe.plan import Plan
from volpipe.rehearsal import TooSlowError, calibrate
from volpipe.score_cost import ScoreTime, calibrate_scores
from volpipe.stand_in import nothing
from volpipe.tensors import delete
from volpipe.volume import Volume

log = logging.getLogger(__name__)

METADATA_FILES = 2  # of labels, beside that of each level: their group, and the group of what changes from run to run


@dataclass(frozen=True)
class ResourceNeeds:
    """The room that one stage takes: bytes and files, scratch at its highest.

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
    def of_run(cls, found: Estimate) -> ResourceNeeds:
        return cls(
            found.read_bytes,
            found.written_bytes,
            found.output_bytes,
            found.output_files,
            found.scratch_bytes,
            found.scratch_files,
            found.is_measured,
        )

    @classmethod
    def from_labels(cls, plan: LabelPlan, voxel_bytes: float) -> ResourceNeeds:
        """Return what a labelling takes of a volume of `voxel_bytes` per voxel: two of its passes read it."""
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
    """What one stage takes.

    Attributes:
        stage: the stage.
        need: None of an evaluation, which reads and writes next to nothing.
        found: its run, appraised; None of what is no run.
        share_left: of the work that is still to be done.
        times: of a labelling or an evaluation of which blocks were tried.
    """

    stage: StagePlan
    need: ResourceNeeds | None = None
    found: Forecast | None = None
    share_left: float = 1.0
    times: LabelTimes | ScoreTime | None = None

    @classmethod
    def of_run(cls, stage: StagePlan, found: Forecast, share_left: float = 1.0) -> StageCost:
        return cls(stage, ResourceNeeds.of_run(found.estimate), found, share_left)

    @property
    def seconds(self) -> float | None:
        """How long all of it takes, from the first task to the last; None where no block was tried."""
        if self.found is not None:
            return self.found.estimate.seconds
        return self.times.seconds if self.times is not None else None

    @property
    def is_guess(self) -> bool:
        """Whether that is from voxels that were made up."""
        return self.times is not None and self.times.is_guess


@dataclass(frozen=True)
class FlowCost:
    """What the stages take, in order, and together.

    Outputs of all stages stay. Scratch goes when its stage ends, so that of all stages never lies there at once.
    """

    plan: FlowPlan
    stages: tuple[StageCost, ...]

    def of(self, stage: StagePlan) -> StageCost:
        """Return what `stage` takes."""
        return next(each for each in self.stages if each.stage.name == stage.name)

    @cached_property
    def _known(self) -> list[tuple[ResourceNeeds, float]]:
        return [(cost.need, cost.share_left) for cost in self.stages if cost.need is not None]

    def _sum(self, value: Callable[[ResourceNeeds], float]) -> float:
        return sum(value(each) for each, _ in self._known)

    @property
    def read_bytes(self) -> float:
        return self._sum(lambda each: each.read_bytes)

    @property
    def written_bytes(self) -> float:
        return self._sum(lambda each: each.written_bytes)

    @property
    def output_bytes(self) -> float:
        return self._sum(lambda each: each.output_bytes)

    @property
    def output_files(self) -> int:
        return round(self._sum(lambda each: each.output_files))

    @property
    def scratch_bytes(self) -> float:
        """The scratch that there is at the highest, of one stage at a time."""
        return max((each.scratch_bytes for each, _ in self._known), default=0.0)

    @property
    def most_bytes(self) -> float:
        """The disk that is taken at the highest."""
        return _highest((each.output_bytes, each.scratch_bytes) for each, _ in self._known)

    @property
    def most_files(self) -> int:
        return round(_highest((each.output_files, each.scratch_files) for each, _ in self._known))

    @property
    def is_measured(self) -> bool:
        """Whether blocks of every run were tried; else bytes are upper bounds."""
        return all(each.is_measured for each, _ in self._known)

    @property
    def seconds(self) -> float | None:
        """Time of all stages, one after the other; None where that of one is not known."""
        taken = [each.seconds for each in self.stages]
        return None if None in taken else sum(seconds for seconds in taken if seconds is not None)

    @property
    def is_guess(self) -> bool:
        """Whether a part of `seconds` is a guess."""
        return any(each.is_guess for each in self.stages)

    def check(self) -> None:
        """Refuse stages of which one, or which together, take more than there is.

        Bytes count only of runs whose blocks were tried: of others nobody knows how they compress.

        Raises:
            PlanError: with what is needed, what there is, and what would fit; it names the stage where it is about one.
        """
        for cost in self.stages:
            if cost.found is not None:
                with named(cost.stage.name):
                    cost.found.check(cost.share_left)
        limits = disk_limits(self.plan.out)
        files = _highest((s * each.output_files, s * each.scratch_files) for each, s in self._known)
        if limits.free_files is not None and files > limits.free_files:
            raise PlanError(
                f"outputs and scratch of all stages need {files:,.0f} files and {self.plan.out} may have "
                f"{limits.free_files:,}{of_quota(limits.files_by)}; use larger output.shard or output.chunk, or "
                "another --out"
            )
        measured = [(each, share) for each, share in self._known if each.is_measured]
        needed = _highest((s * each.output_bytes, s * each.scratch_bytes) for each, s in measured)
        if limits.free_bytes is not None and needed > limits.free_bytes:
            raise PlanError(
                f"outputs and scratch of all stages need {needed / GIB:.1f} GiB and {self.plan.out} has "
                f"{limits.free_bytes / GIB:.1f} free{of_quota(limits.bytes_by)}; free some, choose another --out, or "
                "store less (output.dtype, output.codec_level)"
            )


def _highest(stages: Iterable[tuple[float, float]]) -> float:
    """Return what lies there at the most, of what each stage leaves behind and what it takes meanwhile, in order."""
    kept = most = 0.0
    for left_behind, meanwhile in stages:
        kept += left_behind
        most = max(most, kept + meanwhile)
    return most


def forecast_flow(plan: FlowPlan, executors: Site | None = None, *, tries: bool = False) -> FlowCost:
    """Return what the stages of `plan` take.

    Args:
        plan: as `plan_flow` made it.
        executors: the workers that there are; without, nobody knows what theirs have, nor how long a stage takes.
        tries: whether blocks of each stage are tried on them; else what was told of as many before is known.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    costs: list[StageCost] = []
    for stage in plan.stages:
        with named(stage.name):
            costs.append(_appraise(stage, costs, executors, plan.folder.rehearsal if tries else None))
    known = {} if executors is None or tries else known_times(plan, executors.slots["cpu"])
    return FlowCost(plan, tuple(replace(each, times=known.get(each.stage.name, each.times)) for each in costs))


def _appraise(stage: StagePlan, earlier: Sequence[StageCost], executors: Site | None, trials: Path | None) -> StageCost:
    """Return what `stage` takes; `trials` is a folder for what of a labelling or an evaluation is tried, None of none.

    What is complete is tried too, where its input is at hand.
    """
    if isinstance(stage.work, Evaluation):
        return StageCost(stage, times=_try_scores(stage, stage.work, earlier, executors, trials))
    pending, share_left = _ahead(stage, earlier), 0.0 if is_complete(stage) else 1.0
    if isinstance(stage.work, LabelPlan):
        _check_label_memory(stage.work, executors)
        voxel_bytes = pending.voxel_bytes if pending is not None else _whole_voxel(stage.given)
        times = None
        if executors is not None and trials is not None:
            times = calibrate_labels(Trial(stage.work, stage.given, pending is None, str(trials)), executors)
        return StageCost(stage, ResourceNeeds.from_labels(stage.work, voxel_bytes), None, share_left, times)
    if executors is None or trials is None or not share_left:
        return StageCost.of_run(stage, forecast(stage.work, stage.folder, executors, pending=pending), share_left)
    with stage.folder.locked():
        if pending is None:
            return StageCost.of_run(stage, forecast_calibrated(stage.work, stage.folder, executors))
        return StageCost.of_run(stage, _stood_in(stage, stage.work, pending, executors))


def _try_scores(
    stage: StagePlan, found: Evaluation, earlier: Sequence[StageCost], executors: Site | None, trials: Path | None
) -> ScoreTime | None:
    if executors is None or trials is None:
        return None
    missing = {str(cost.stage.out) for cost in earlier if not is_complete(cost.stage)}
    return calibrate_scores(found, missing, executors, trials)


def _check_label_memory(plan: LabelPlan, executors: Site | None) -> None:
    """Refuse blocks that a worker has no room for, before the stages that come first."""
    if executors is not None:
        check_memory(plan, executors.worker_bytes)


def _whole_voxel(volume: Volume) -> float:
    """Return the bytes of a voxel of `volume` that does not compress, all channels."""
    return float(volume.num_channels * volume.dtype.itemsize)


def _ahead(stage: StagePlan, earlier: Sequence[StageCost]) -> PendingInput | None:
    """Return what `stage` reads where that is not whole yet, as large as the estimate of its stage makes it."""
    if stage.reads == VOLUME:
        return None
    feed = next(cost for cost in earlier if cost.stage.name == stage.reads)
    if is_complete(feed.stage):
        return None
    rates = feed.found.estimate.rates if feed.found is not None else None
    return PendingInput(stage.given, rates.output_bytes if rates is not None else _whole_voxel(stage.given))


def _stood_in(stage: StagePlan, plan: Plan, pending: PendingInput, executors: Site) -> Forecast:
    """Return what `plan` takes after blocks of it were tried over an array of nothing, which is deleted.

    That tells times and memory. How real voxels compress it does not: bytes stay upper bounds.
    """
    found = forecast(plan, stage.folder, executors, pending=pending)
    if found.estimate.rates is not None:
        return found
    found.check(share_left=0.0)  # of disk, so that memory alone counts
    place = stage.folder.path / "stand_in"
    nothing(stage.given, place)
    try:
        instead = plan.changed(source=plan.source.model_copy(update={"path": str(place)}))
        rates = calibrate(instead, found.sample.normalise, executors, found.slots.gpu, stage.folder.rehearsal).rates
    except TooSlowError as error:
        log.warning("%s", error)
        return found
    finally:
        delete(place)
    tried = replace(pending, rates=timed_alone(rates, plan))
    return forecast(plan, stage.folder, executors, pending=tried)


def preview_flow(plan: FlowPlan, start: Start) -> FlowCost:
    """Return what the stages of `plan` take on the workers that `start` starts, after trying blocks of each.

    How long labellings and evaluations take is kept for `forecast_flow`, as rates of runs are.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    with plan.folder.locked(), logging_to(plan.folder.log), start(plan.folder.parsl) as executors:
        found = forecast_flow(plan, executors, tries=True)
        told = [(each.stage, each.times) for each in found.stages if each.times is not None]
        store_times(plan, told, executors.slots["cpu"])
        return found
