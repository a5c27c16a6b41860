"""Forecast of a flow: each of its stages, before its input exists, and all of them together.

Not here: what one stage takes (stages, estimation.estimate), or the limits of disks (limits). Times of labellings and
evaluations are stored: the plan of a flow measures them, its run need not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.estimation.estimate import StageTimes
from volpipe.estimation.forecast import process_bytes
from volpipe.estimation.limits import check_room, check_worker, disk_limits, warn_of_room
from volpipe.recipes.workflow import named
from volpipe.runs.held_work import try_blocks
from volpipe.stages.kind import StageCost, StagePlan
from volpipe.stages.needs import NOTHING, ResourceNeeds
from volpipe.volumes.storage.metadata import write_json
from volpipe.workflow.plan import FlowPlan

TIMES_FILE = "times.json"


@dataclass(frozen=True)
class StoredTimes:
    """Times of a stage on `num_workers`, by blocks that were tried; `of` identifies its work."""

    of: str
    num_workers: int
    times: StageTimes


_STORED = TypeAdapter(dict[str, StoredTimes])  # by the name of the stage


@dataclass(frozen=True)
class FlowCost:
    """Forecast of the stages, in order, and of all together.

    Outputs of all stages stay; the scratch of a stage is deleted when the stage ends, and stages run side by side.
    `worker_bytes` is the memory that there is for a training, None where nobody knows.
    """

    plan: FlowPlan
    stages: tuple[StageCost, ...]
    worker_bytes: int | None = None

    def of(self, stage: StagePlan) -> StageCost:
        """Return the forecast of `stage`."""
        return next(cost for cost in self.stages if cost.stage.name == stage.name)

    @cached_property
    def _known(self) -> list[tuple[ResourceNeeds, float]]:
        return [(cost.need, cost.share_left) for cost in self.stages if cost.need is not None]

    @cached_property
    def total(self) -> ResourceNeeds:
        """What all stages need at a time."""
        return sum((needs for needs, _ in self._known), start=NOTHING)

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
            for forecast in filter(None, (cost.forecast, *cost.others)):
                with named(cost.stage.name):
                    forecast.check(cost.share_left)
            if cost.stage.makes_weights and cost.share_left:
                with named(cost.stage.name):
                    check_worker(
                        cost.memory_bytes or 0.0, self.worker_bytes, "use a smaller train.batch or samples.shape"
                    )
        inodes = sum(share * needs.most_inodes for needs, share in self._known)
        needed = sum(share * needs.most_bytes for needs, share in self._known if needs.is_measured)
        check_room("outputs and scratch of all stages", inodes, needed, self.plan.out, disk_limits(self.plan.out))

    def warn_of_room(self) -> None:
        """Tell the user if the disk may be too small for all stages, of which not all bytes were measured."""
        most = 0.0 if self.total.is_measured else sum(share * needs.most_bytes for needs, share in self._known)
        warn_of_room("outputs and scratch of all stages", most, self.plan.out, disk_limits(self.plan.out))


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
        pool: the workers; without them neither their memory nor any time is known.
        tries: whether blocks of each stage are tried on them; else times stored for as many workers count.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """
    costs: list[StageCost] = []
    for stage in plan.stages:
        with named(stage.name):
            cost = yield from stage.cost_steps(costs, pool, plan.folder.calibration if tries else None)
            costs.append(cost)
    known = {} if pool is None or tries else known_times(plan, pool.slots["cpu"])
    stages = tuple(replace(cost, times=known.get(cost.stage.name, cost.times)) for cost in costs)
    return FlowCost(plan, stages, None if pool is None else process_bytes(pool))


def preview_stages(plan: FlowPlan, start: Start) -> FlowCost:
    """Return the forecast of `plan` on the workers that `start` starts, after trying blocks of each stage.

    Times of labellings and evaluations are stored for `forecast_flow`, as rates of runs are.

    Raises:
        PlanError: a worker cannot hold a block.
        RunStopped: a block cannot be computed.
    """

    def steps(pool: WorkerPool) -> Steps[FlowCost]:
        result = yield from forecast_stages(plan, pool, tries=True)
        stored = {
            cost.stage.name: StoredTimes(cost.stage.plan.identity, pool.slots["cpu"], cost.times)
            for cost in result.stages
            if cost.times is not None
        }
        write_json(plan.folder.path / TIMES_FILE, _STORED.dump_python(stored, mode="json"))
        return result

    return try_blocks(plan.folder, start, steps)


def known_times(plan: FlowPlan, num_workers: int) -> dict[str, StageTimes]:
    """Return the stored times of stages with the same work on as many workers, by name."""
    try:
        stored = _STORED.validate_json((plan.folder.path / TIMES_FILE).read_bytes())
    except (OSError, ValidationError):  # none, or another version's
        return {}
    works = {stage.name: stage.plan.identity for stage in plan.stages}
    return {
        name: entry.times
        for name, entry in stored.items()
        if entry.num_workers == num_workers and works.get(name) == entry.of
    }
