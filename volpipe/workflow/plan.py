"""The plan of a flow: a plan for each stage, those after the first for volumes that earlier ones have yet to make.

Not here: the recipe (recipes.workflow), what it all takes (cost), or running it (execute).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from volpipe.estimation.limits import check_apart
from volpipe.recipes.workflow import Flow, named
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.kind import Planning, StagePlan
from volpipe.stages.sizing import UNSIZED, Sizing
from volpipe.volumes.storage.object_store import Remote, check_writable
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.volume import absolute
from volpipe.workflow.kinds import KINDS


@dataclass(frozen=True)
class FlowPlan:
    """All stages of a `flow`, each after the one that it reads; their outputs lie in the folder `out`.

    `search_path` and `sizing` are as of `plan_flow`.
    """

    flow: Flow
    volume: str
    out: Location
    search_path: Path
    sizing: Sizing
    stages: tuple[StagePlan, ...] = ()

    @property
    def source(self) -> str:
        return self.flow.source

    @property
    def folder(self) -> RunFolder:
        return RunFolder.for_stages(self.out)

    def after(self, name: str) -> Iterator[StagePlan]:
        """Yield the stages that need what the stage `name` makes, by way of others too."""
        needed = {name}
        for stage in self.stages:
            if not needed.isdisjoint(stage.needed):
                needed.add(stage.name)
                yield stage

    def nets_of(self, name: str) -> set[str]:
        """Return the stages that train nets which the stage `name` rests on, by way of others too."""
        return {net.name for net in self.stages if net.makes_weights and name in {s.name for s in self.after(net.name)}}

    def planned(self, kept: Collection[str] = ()) -> FlowPlan:
        """Return it with all stages planned as they are now, but those that are `kept`."""
        stages: dict[str, StagePlan] = {}
        before = {stage.name: stage for stage in self.stages}
        among = Planning(self.volume, self.out, self.search_path, self.sizing, stages)
        for stage in self.flow.stages:
            with named(stage.name):
                is_kept = stage.name in kept
                stages[stage.name] = before[stage.name] if is_kept else KINDS[stage.kind].planned(stage, among)
        return replace(self, stages=tuple(stages.values()))

    def warnings(self) -> list[str]:
        """Return what a user should know of the nets before they run, in sentences."""
        return [f"stage {stage.name}: {warning}" for stage in self.stages for warning in stage.warnings()]

    @property
    def result(self) -> StagePlan:
        """The last stage, of those that make a volume if there are any."""
        made = [stage for stage in self.stages if stage.makes_volume]
        return (made or self.stages)[-1]


def plan_flow(flow: Flow, location: str, out: str | Path, search_path: Path, sizing: Sizing = UNSIZED) -> FlowPlan:
    """Return the plan of all stages of `flow` for the volume at `location`, before any of them has run.

    Args:
        out: the folder that gets an output of each stage, named after it; also in S3.
        search_path: folder that the recipes' relative names count from.
        sizing: of the stages that run nets; `fresh` is of all.

    Raises:
        PlanError: stage, volume and net do not fit; the message names the stage.
        VolumeError: nothing can be written to `out`, or there is no volume.
    """
    folder = absolute(out)
    if isinstance(folder, Remote):
        check_writable(folder)
    plan = FlowPlan(flow, location, folder, search_path, sizing).planned()
    _check_apart(plan.stages)
    return plan


def settled_flow(plan: FlowPlan) -> FlowPlan:
    """Return `plan` once nets of it are trained: stages that rest on them are planned as the same command would now.

    Those that follow a volume that has grown keep their plans.
    """
    kept = {stage.name for stage in plan.stages if not plan.nets_of(stage.name) or stage.work().grown()}
    return replace(plan, sizing=replace(plan.sizing, fresh=False)).planned(kept)


def _check_apart(stages: Sequence[StagePlan]) -> None:
    """Refuse outputs that would change the volume, or what stages are compared with; `prepare` knows of one stage."""
    kept = [each for stage in stages for each in stage.outside()]
    for stage in stages:
        with named(stage.name):
            for volume, what in kept:
                check_apart(stage.out, volume, what)
