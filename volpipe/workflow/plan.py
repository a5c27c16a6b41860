"""The plan of a flow: a plan for each stage, those after the first for volumes that earlier ones have yet to make.

Not here: the recipe (recipes.workflow), what it all takes (cost), or running it (execute).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from volpipe.errors import PlanError
from volpipe.estimation.limits import check_access, check_apart, check_window
from volpipe.evaluation.evaluate import check_part, plan_evaluation
from volpipe.inference.output import check_output, suffix_of
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import Input
from volpipe.recipes.segmentation import SegmentInput, SegmentRecipe
from volpipe.recipes.workflow import VOLUME, Comparison, Flow, FlowStage, named
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.driver import plan_segmentation
from volpipe.segmentation.plan import check_offsets, fit
from volpipe.volumes.storage.object_store import Remote, check_writable
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.volume import Volume, absolute, open_volume, with_view
from volpipe.workflow.prepare import UNSIZED, Sizing, prepare, prepare_for
from volpipe.workflow.stages import LabelStage, RunStage, ScoreStage, StagePlan

INTENSITIES = {"same": "grey levels of its input", "raw": "numbers of its own"}  # of a net that is no sigmoid


@dataclass(frozen=True)
class FlowPlan:
    """All stages, each after the one that it reads; their outputs lie in the folder `out`."""

    source: str
    volume: str
    out: Location
    stages: tuple[StagePlan, ...]

    @property
    def folder(self) -> RunFolder:
        return RunFolder.for_stages(self.out)

    def after(self, name: str) -> Iterator[StagePlan]:
        """Yield the stages that need what the stage `name` makes, by way of others too."""
        needed = {name}
        for stage in self.stages:
            if stage.reads in needed:
                needed.add(stage.name)
                yield stage

    def warnings(self) -> list[str]:
        """Return what a user should know of the nets before they run, in sentences."""
        return [f"stage {stage.name}: {warning}" for stage in self.stages for warning in stage.warnings()]

    @property
    def result(self) -> StagePlan:
        """The last stage, of those that make a volume if there are any."""
        made = [stage for stage in self.stages if stage.makes_volume]
        return (made or self.stages)[-1]


def stages_of(plan: Plan | FlowPlan) -> tuple[StagePlan, ...]:
    """Return the stages of `plan`, of one net the only one."""
    return plan.stages if isinstance(plan, FlowPlan) else (RunStage.alone(plan),)


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
    make, stages = _Making(search_path, sizing), dict[str, StagePlan]()
    for stage in flow.stages:
        with named(stage.name):
            stages[stage.name] = _plan_stage(stage, stages, location, folder, make)
    _check_apart(list(stages.values()))
    return FlowPlan(flow.source, location, folder, tuple(stages.values()))


def grown_flow(plan: FlowPlan) -> FlowPlan:
    """Return `plan` with the sizes of stages that were begun before the volume grew, as far as they were.

    Raises:
        RunError: the volume has shrunk, or an output cannot grow; the message names the stage.
    """
    stages: dict[str, StagePlan] = {}
    for stage in plan.stages:
        with named(stage.name):
            given = stage.given
            if (feed := stages.get(stage.reads)) is not None:
                made = stage.makes_volume
                given = _fed(feed, stage.array, stage.plan.recipe.input) if made else feed.volume(0, stage.array)
            stages[stage.name] = replace(stage, given=given, plan=stage.grown or stage.plan)
    return replace(plan, stages=tuple(stages.values()))


def _check_apart(stages: Sequence[StagePlan]) -> None:
    """Refuse outputs that would change the volume, or what stages are compared with; `prepare` knows of one stage."""
    kept = [(stage.given, "volume") for stage in stages if stage.reads == VOLUME]
    kept += [other for stage in stages for other in stage.others()]
    for stage in stages:
        with named(stage.name):
            for volume, what in kept:
                check_apart(stage.out, volume, what)


@dataclass(frozen=True)
class _Making:
    """How the stages of runs are planned; see `prepare`."""

    search_path: Path
    sizing: Sizing


def _plan_stage(
    stage: FlowStage, earlier: dict[str, StagePlan], location: str, folder: Location, make: _Making
) -> StagePlan:
    feed = earlier.get(stage.reads)
    if isinstance(stage.choice, Comparison):
        scores = _plan_comparison(stage, stage.choice, feed, location, folder / f"{stage.name}.json")
        while feed is not None:  # no output need exist yet that says of what part it is
            if isinstance(feed, RunStage):
                check_part(scores.plan.output, feed.plan.roi_box, scores.plan.reference)
            feed = earlier.get(feed.reads)
        return scores
    if isinstance(stage.choice, SegmentRecipe):
        ending = suffix_of(stage.choice.output.format)
        return _plan_labels(stage, stage.choice, feed, location, folder / f"{stage.name}{ending}", make)
    recipe, out = stage.choice, folder / f"{stage.name}{suffix_of(stage.choice.output.format)}"
    if feed is None:
        plan = prepare(location, recipe, out, make.search_path, make.sizing)
        given = plan.source.volume()
    else:
        given = _fed(feed, stage.array, recipe.input)
        plan = prepare_for(given, recipe, out, make.search_path, make.sizing)
        check_access(None, out)
    check_window(plan)
    return RunStage(stage.name, stage.reads, given, out, plan, stage.array)


def _plan_labels(
    stage: FlowStage, recipe: SegmentRecipe, feed: StagePlan | None, location: str, out: Location, make: _Making
) -> LabelStage:
    if feed is None:
        plan = plan_segmentation(location, recipe, out, make.search_path, fresh=make.sizing.fresh)
        return LabelStage(stage.name, stage.reads, plan.source.volume(), out, plan)
    given = _fed(feed, stage.array, recipe.input)
    check_offsets(given, recipe, feed.offsets(stage.array))
    plan = fit(given, recipe, out, make.search_path, fresh=make.sizing.fresh)
    check_output(plan)
    check_access(None, out)
    if (
        isinstance(feed, RunStage)
        and (intensity := feed.plan.array(stage.array).intensity) != "unit"
        and recipe.input.range is None
    ):
        note = (
            f"the net of stage {feed.name} gives {INTENSITIES[intensity]}, and {recipe.input.kind} are "
            "probabilities: set net.intensity=unit there if it gives 0 to 1, or input.range here to the values that "
            "mean 0 and 1"
        )
        plan = plan.changed(value_notes=(note,))
    return LabelStage(stage.name, stage.reads, given, out, plan, stage.array)


def _fed(feed: StagePlan, array: str, choice: Input | SegmentInput) -> Volume:
    """Return what a stage that says `choice` reads of an `array` of the stage `feed`."""
    if choice.key is not None:
        raise PlanError(
            f"input.key {choice.key} is for the volume; an array of a stage is named {feed.name}/{choice.key}"
        )
    return with_view(feed.volume(choice.level, array), choice.view)


def _plan_comparison(
    stage: FlowStage, choice: Comparison, feed: StagePlan | None, location: str, out: Location
) -> ScoreStage:
    made = open_volume(location) if feed is None else feed.volume(0, stage.array)
    given: Volume | None = None
    if choice.given is not None:
        given = open_volume(choice.given)
    elif feed is not None and not choice.labels:
        given = feed.interpolated
    evaluation = plan_evaluation(
        made, open_volume(choice.reference), given, roi=choice.roi, margin=choice.margin,
        kind="labels" if choice.labels else "image", data_range=choice.data_range, ignore=choice.ignore,
        any_place=choice.any_place,
    )  # fmt: skip
    return ScoreStage(stage.name, stage.reads, made, out, evaluation, stage.array)
