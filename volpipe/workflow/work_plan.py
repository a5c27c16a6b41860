"""What a command does, planned: the run of one net, or the stages of a flow. Both answer the same questions.

Not here: the plans that users hold (inference.plan, workflow.plan), or how stages are run side by side (execute).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, overload

from volpipe.blockwise.pool import Start
from volpipe.errors import PlanError
from volpipe.estimation.calibrate import OnTry
from volpipe.estimation.forecast import Forecast, forecast, forecast_calibrated
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.roi import find_part
from volpipe.recipes.workflow import VOLUME
from volpipe.runs.held_work import HeldWork, try_blocks
from volpipe.runs.options import PLAIN, RunOptions, check_stages
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener
from volpipe.stages.kind import StagePlan
from volpipe.volumes.storage import paths
from volpipe.workflow.cost import FlowCost, forecast_flow, preview_stages
from volpipe.workflow.driver import Report, RunWork
from volpipe.workflow.execute import FlowListener, FlowReport, flow_work, heard_by
from volpipe.workflow.follow import check_seconds, following_work
from volpipe.workflow.output_state import State, flow_state, stage_state
from volpipe.workflow.plan import FlowPlan
from volpipe.workflow.run_stages import RunStage


class HeldPlan(Protocol):
    """A plan as `volpipe.plan` returns it: of one net, or of the stages of a recipe."""

    @property
    def out(self) -> object:
        """Where the output goes, or the folder of the outputs."""

    def warnings(self) -> list[str]:
        """Return what a user should know before it runs, in sentences."""


class WorkPlan(ABC):
    """What a command does, planned; `plan` is the plan that its user holds."""

    plan: Any  # of its kind

    @property
    @abstractmethod
    def stages(self) -> tuple[StagePlan, ...]:
        """Its stages; a run of one net has a single one, without a name."""

    @property
    @abstractmethod
    def folder(self) -> RunFolder:
        """The folder that is held while it is done."""

    @abstractmethod
    def limited(self, options: RunOptions, only: str | Box | None) -> RunOptions:
        """Return `options` with the part of the output that `only` means.

        Raises:
            PlanError: an option is not for such work, or its value makes no sense.
        """

    @abstractmethod
    def work(self, options: RunOptions = PLAIN, listener: FlowListener | Listener = SILENT) -> HeldWork[Any]:
        """Return the work that does what is left of it, or follows its volume where `options` say so."""

    @abstractmethod
    def preview(self, start: Start | None, on_try: OnTry = lambda seconds, most: None) -> Forecast | FlowCost:
        """Return what it will take on the workers that `start` starts; without, no block is tried.

        `on_try` is called now and then with the seconds for which blocks have been tried, and the most there may be.

        Raises:
            PlanError: a worker cannot hold a block.
            RunStopped: a block cannot be computed.
        """

    @abstractmethod
    def state(self, *, same_input: bool) -> tuple[State, str]:
        """Return how its output stands, and what differs.

        Raises:
            RunError: something else is in its place.
        """

    @property
    def out(self) -> str:
        """Where its output goes, or the folder of its outputs."""
        return str(self.plan.out)

    @property
    def identity(self) -> str:
        """What decides the bytes of its outputs."""
        return " ".join(stage.plan.identity for stage in self.stages)

    def warnings(self) -> list[str]:
        """Return what a user should know before it runs, in sentences."""
        warnings: list[str] = self.plan.warnings()
        return warnings

    def check_volume(self) -> None:
        """Refuse a volume that other work of ours has not completed."""
        for stage in self.stages:
            if stage.reads == VOLUME and (work := stage.output_work()) is not None:
                work.check_written(work.volumes())


@dataclass(frozen=True)
class RunPlan(WorkPlan):
    """The run of one net."""

    plan: Plan

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        plan = self.plan
        return (RunStage("", VOLUME, plan.source.volume(), paths.locate(plan.out), plan),)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.from_output(paths.locate(self.plan.out))

    def limited(self, options: RunOptions, only: str | Box | None) -> RunOptions:
        if only is not None and self.plan.finest:
            raise PlanError(
                "--only is a box on the net's grid, and the output lies on the volume's; set output.grid=net"
            )
        part = find_part(only, self.plan.out_shape) if isinstance(only, str) else only
        options = dataclasses.replace(options, only=part)
        check_seconds(options.follow)
        return options

    def work(self, options: RunOptions = PLAIN, listener: FlowListener | Listener = SILENT) -> HeldWork[Report]:
        own = listener if isinstance(listener, Listener) else listener.of_stage(self.stages[0])
        return (
            RunWork(self.plan, options, own).held if options.follow is None else following_work(self.plan, options, own)
        )

    def preview(self, start: Start | None, on_try: OnTry = lambda seconds, most: None) -> Forecast:
        plan, folder = self.plan, self.folder
        if start is None:
            return forecast(plan, folder)
        return try_blocks(folder, start, lambda pool: forecast_calibrated(plan, folder, pool, on_try=on_try))

    def state(self, *, same_input: bool) -> tuple[State, str]:
        return stage_state(self.stages[0], same_input=same_input)


@dataclass(frozen=True)
class StagesPlan(WorkPlan):
    """The stages of a flow."""

    plan: FlowPlan

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return self.plan.stages

    @property
    def folder(self) -> RunFolder:
        return self.plan.folder

    def limited(self, options: RunOptions, only: str | Box | None) -> RunOptions:
        check_stages(only, options.follow)
        return options

    def work(self, options: RunOptions = PLAIN, listener: FlowListener | Listener = SILENT) -> HeldWork[FlowReport]:
        return flow_work(self.plan, options, heard_by(listener))

    def preview(self, start: Start | None, on_try: OnTry = lambda seconds, most: None) -> FlowCost:
        return forecast_flow(self.plan) if start is None else preview_stages(self.plan, start)

    def state(self, *, same_input: bool) -> tuple[State, str]:
        return flow_state(self.stages, same_input=same_input)


WORK_PLANS: Mapping[type, type[RunPlan | StagesPlan]] = {Plan: RunPlan, FlowPlan: StagesPlan}  # by what users hold


def find_work_plan(plan: object) -> WorkPlan | None:
    """Return the `plan` that a user holds as commands ask it; None of anything else, such as a volume."""
    kind = WORK_PLANS.get(type(plan))
    return None if kind is None else kind(plan)  # type: ignore[arg-type]  # the table says so


@overload
def execute(plan: Plan, start: Start, options: RunOptions = ..., listener: Listener = ...) -> Report: ...
@overload
def execute(plan: FlowPlan, start: Start, options: RunOptions = ..., listener: FlowListener = ...) -> FlowReport: ...
@overload
def execute(
    plan: WorkPlan, start: Start, options: RunOptions = ..., listener: FlowListener | Listener = ...
) -> Any: ...
def execute(plan: Any, start: Start, options: RunOptions = PLAIN, listener: Any = SILENT) -> Any:  # Any: as above
    """Do what is left of `plan`, until nothing is or what is left cannot be done; return how that ended.

    Args:
        plan: of one net, or of the stages of a recipe; also as commands ask it.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.

    Raises:
        RunError: another run's folder or output is in the way, or too much fails; of stages the message names one.
        SiteError: the site cannot be used.
        VolumeError: a bucket may not be written to, or does not answer.
    """
    return (find_work_plan(plan) or plan).work(options, listener).run(start)


@overload
def preview(plan: Plan, start: Start | None, on_try: OnTry = ...) -> Forecast: ...
@overload
def preview(plan: FlowPlan, start: Start | None, on_try: OnTry = ...) -> FlowCost: ...
@overload
def preview(plan: WorkPlan, start: Start | None, on_try: OnTry = ...) -> Any: ...
def preview(plan: Any, start: Start | None, on_try: OnTry = lambda seconds, most: None) -> Any:  # Any: as above
    """Return what `plan` will take on the workers that `start` starts; as `WorkPlan.preview`."""
    return (find_work_plan(plan) or plan).preview(start, on_try)
