"""The kinds of stages of a flow: what each reads and makes, by which work, and what it takes.

Not here: several of them (plan, execute, cost). A further kind is a class, a line in plan.STAGES, and its keys in
recipes.workflow.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError
from volpipe.estimation.calibrate import TooSlowError, calibrate
from volpipe.estimation.estimate import StageTimes, estimate, timed_alone
from volpipe.estimation.forecast import (
    UNKNOWN_SLOTS,
    Forecast,
    PendingInput,
    forecast,
    forecast_calibrated,
    load_rates,
)
from volpipe.estimation.limits import check_access, check_window
from volpipe.estimation.memory import WORKER_BYTES
from volpipe.evaluation.compare import Comparison as OutputDifference
from volpipe.evaluation.compare import plan_comparison
from volpipe.evaluation.driver import (
    BlockWork,
    calibrate_evaluation,
    comparison_work,
    evaluation_work,
    measurement_work,
)
from volpipe.evaluation.evaluate import check_part, plan_evaluation
from volpipe.evaluation.lines import stored_sheets
from volpipe.evaluation.measurements import Measurement, plan_measurement
from volpipe.geometry.labels import Ignore
from volpipe.inference.output import check_output, planned_volume, suffix_of
from volpipe.inference.plan import Plan
from volpipe.inference.statistics import needs_measuring
from volpipe.nets.files import FUNCTION
from volpipe.recipes.inference import ArrayInput, NetChoice, Normalise, Output, Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.toml import Section
from volpipe.recipes.training import TrainRecipe
from volpipe.recipes.workflow import (
    VOLUME,
    BlockFunction,
    Comparison,
    Conversion,
    FlowStage,
    Measuring,
    OutputComparison,
    named,
)
from volpipe.reporting.page import Item
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.output_work import OutputWork
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.segmentation.driver import SegmentWork, check_memory, plan_segmentation
from volpipe.segmentation.estimate import SegmentTrial, calibrate_segmentation
from volpipe.segmentation.plan import SegmentPlan, check_offsets, fit
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json
from volpipe.volumes.storage.paths import Location, delete
from volpipe.volumes.volume import Volume, open_volume, with_view
from volpipe.workflow.driver import RunWork
from volpipe.workflow.entries import Entry, find_work
from volpipe.workflow.needs import ResourceNeeds
from volpipe.workflow.prepare import Sizing, longest_first, prepare, prepare_for

log = logging.getLogger(__name__)

INTENSITIES = {"same": "grey levels of its input", "raw": "numbers of its own"}  # of a net that is no sigmoid


@dataclass(frozen=True)
class Planning:
    """What a stage is planned among.

    Attributes:
        location: of the volume.
        folder: of the outputs.
        search_path: folder that relative names of recipes count from.
        sizing: of the stages that run nets; `fresh` is of all.
        earlier: the stages before it, by name.
    """

    location: str
    folder: Location
    search_path: Path
    sizing: Sizing
    earlier: Mapping[str, StagePlan]

    def feed(self, stage: FlowStage) -> StagePlan | None:
        """Return the stage that `stage` reads; None where that is the volume."""
        return self.earlier.get(stage.reads)

    def volume(self, name: str) -> tuple[Volume, bool]:
        """Return the volume of that name, and whether no stage makes it: of an earlier stage, the command's, a path."""
        first, _, array = name.partition("/")
        if first in self.earlier:
            return self.earlier[first].volume(0, array), False
        return open_volume(self.location, array or None) if first == VOLUME else open_volume(name), True


@dataclass(frozen=True)
class StagePlan(ABC):
    """One stage, planned.

    Attributes:
        name, reads, beside: as the flow says them.
        given: what the stage reads, as it is or as it will be.
        out: where its output goes.
        plan: of its work.
        array: of what it reads, where that has several.
    """

    kind: ClassVar[str]
    maker: ClassVar[type[OutputWork[Any, Any]]]  # of an output
    makes_volume: ClassVar[bool] = True
    makes_weights: ClassVar[bool] = False
    shown: ClassVar[Literal["run", "labels", "evaluation", "training"]]  # the kind of its status

    name: str
    reads: str
    given: Volume
    out: Location
    plan: Any  # of its kind
    array: str = ""
    beside: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def planned(cls, stage: FlowStage, among: Planning) -> StagePlan:
        """Return the plan of `stage`, which is of this kind.

        Raises:
            PlanError: what it reads does not fit.
            VolumeError: there is no such volume.
        """

    @classmethod
    def is_done(cls, entry: Entry) -> bool:
        """Return whether the stage that is remembered as `entry` is complete."""
        work = find_work(entry.run)
        return work is not None and work.is_complete

    @classmethod
    def scores(cls, entry: Entry) -> list[Item]:
        """Return the scores that the stage remembered as `entry` has made, as tables; none of most kinds."""
        return []

    @property
    def needed(self) -> frozenset[str]:
        """What it needs: earlier stages, by name, and the volume."""
        return frozenset((self.reads, *self.beside))

    @property
    def read_from(self) -> str:
        """The stage whose output it reads first, or the volume, for people."""
        return self.reads

    def view_of(self, feed: StagePlan) -> Volume:
        """Return what it reads of the stage `feed`."""
        return fed(feed, self.array, self.plan.recipe.input)

    @property
    def folder(self) -> RunFolder:
        """The folder of the work that writes the output; of a run alone that by which it is known without a flow."""
        return RunFolder.for_stage(self.out) if self.name else RunFolder.from_output(self.out)

    @property
    def level(self) -> int:
        """Which level it reads of what an earlier stage makes."""
        level: int = self.plan.recipe.input.level
        return level

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks that it computes."""

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> StageWork[Any]:
        """Return its work; arguments as of `StageWork`."""
        return self.maker(self.plan, options, listener, self.folder)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as far as its journal says."""
        return self.work().is_complete

    @property
    def share_left(self) -> float:
        """Share of its units that is still to be done."""
        return self.work().share_left

    def volume(self, level: int = 0, array: str = "") -> Volume:
        """Return `level` of the volume that it makes, of an array of it where that has several."""
        return planned_volume(self.plan.array(array), level)

    def reading(self, given: Volume) -> StagePlan:
        """Return the stage with what it reads now, which may have grown."""
        return replace(self, given=given, plan=self.work().grown() or self.plan)

    @property
    def is_measured(self) -> bool:
        """Whether it measures what it reads."""
        return False

    def offsets(self, array: str) -> tuple[tuple[int, int, int], ...] | None:
        """Return to which voxels (z, y, x) the channels of an array of it lead, where they are affinities."""
        return None

    def intensity(self, array: str) -> str | None:
        """Return what the values of an array of it are, as `net.intensity`; None for what no net makes."""
        return None

    def learned(self, recipe_for: Callable[[TrainRecipe], Recipe], *, fresh: bool) -> list[Recipe]:
        """Return the recipes of a run with the nets that this stage may make, without weights until they are there."""
        raise PlanError(f"stage {self.name} trains no net")

    def truth(self) -> Truth:
        """Return the labels that it learns from."""
        raise PlanError(f"stage {self.name} learns from no labels")

    @property
    def interpolated(self) -> Volume | None:
        """What it reads, where interpolating that would give as many voxels as it makes."""
        return None

    def others(self) -> Iterator[tuple[Volume, str]]:
        """Yield what it reads beside `given`, with what that is."""
        yield from ()

    def outside(self) -> Iterator[tuple[Volume, str]]:
        """Yield what it reads that no stage makes, with what that is."""
        if self.reads == VOLUME:
            yield self.given, "volume"
        yield from self.others()

    def warnings(self) -> list[str]:
        """Return what a user should know before it runs, in sentences."""
        warnings: list[str] = self.plan.warnings()
        return warnings

    def needs(self) -> tuple[ResourceNeeds, float | None] | None:
        """Return what it needs, and the seconds of one worker where blocks were tried; no voxel is read for it.

        None where that is next to nothing.
        """
        return None

    @abstractmethod
    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return what it takes; complete stages are tried too, where their input exists.

        Args:
            earlier: costs of the stages before it.
            pool: the workers, if they are known.
            trials: folder in which blocks are tried on them, if they are.

        Raises:
            PlanError: a worker cannot hold a block.
            RunStopped: a block cannot be computed.
        """

    def pending_input(self, earlier: Sequence[StageCost]) -> PendingInput | None:
        """Return its input where that is not complete yet, of the size that its own stage's estimate gives."""
        if self.reads == VOLUME:
            return None
        source = next(cost for cost in earlier if cost.stage.name == self.reads)
        if source.stage.is_complete:
            return None
        rates = source.forecast.estimate.rates if source.forecast is not None and not self.array else None
        return PendingInput(self.given, rates.output_bytes if rates is not None else _voxel_bytes(self.given))


@dataclass(frozen=True)
class RunStage(StagePlan):
    """A run of a net; that of a plan without a flow has no name.

    `rivals` are the plans with other nets, while an earlier stage has still to find the best.
    """

    kind = "run"
    shown = "run"
    maker = RunWork
    plan: Plan
    rivals: tuple[Plan, ...] = ()

    @classmethod
    def recipe(cls, choice: Section, read: Callable[[], Volume]) -> Recipe:
        """Return the recipe of the run that does what `choice` says to the volume that `read` returns."""
        assert isinstance(choice, Recipe)
        return choice

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> RunStage:
        feed, choice = among.feed(stage), stage.input
        assert choice is not None

        def read() -> Volume:
            if feed is not None:
                return fed(feed, stage.array, choice)
            return open_volume(among.location, choice.key, choice.level, view=choice.view)

        recipes = [cls.recipe(stage.choice, read)]
        if stage.for_net is not None:
            (maker,), choose = stage.beside, stage.for_net
            recipes = among.earlier[maker].learned(lambda net: cls.recipe(choose(net), read), fresh=among.sizing.fresh)
        out = among.folder / f"{stage.name}{suffix_of(recipes[0].output.format)}"

        def plan_of(recipe: Recipe) -> Plan:
            if feed is None:
                plan = prepare(among.location, recipe, out, among.search_path, among.sizing)
            else:
                given = fed(feed, stage.array, recipe.input)
                plan = prepare_for(given, recipe, out, among.search_path, among.sizing)
                check_access(None, out)
            check_window(plan)
            return plan

        plans = list[Plan]()
        for recipe in recipes:
            with named(f"{stage.beside[0]}, net.options {recipe.net.options}") if len(recipes) > 1 else nullcontext():
                plans.append(plan_of(recipe))
        plan, *rivals = longest_first(plans, *stage.beside)
        given = plan.source.volume() if feed is None else fed(feed, stage.array, choice)
        return cls(stage.name, stage.reads, given, out, plan, stage.array, stage.beside, tuple(rivals))

    def warnings(self) -> list[str]:
        """Return what a user should know of the net before it runs, not that it has no weights yet."""
        recipe = self.plan.recipe
        if not (self.beside and recipe.net.untrained):
            return super().warnings()
        net = recipe.net.model_copy(update={"untrained": False})
        return self.plan.changed(recipe=recipe.model_copy(update={"net": net})).warnings()

    @classmethod
    def alone(cls, plan: Plan) -> RunStage:
        """Return the only stage of `plan`."""
        return cls("", VOLUME, plan.source.volume(), paths.locate(plan.out), plan)

    @property
    def num_blocks(self) -> int:
        return self.plan.num_active

    @property
    def is_measured(self) -> bool:
        """Whether it measures what it reads."""
        return needs_measuring(self.plan.recipe.normalise, np.dtype(self.plan.source.dtype))

    def offsets(self, array: str) -> tuple[tuple[int, int, int], ...] | None:
        return self.plan.array(array).recipe.net.offsets

    def intensity(self, array: str) -> str | None:
        return self.plan.array(array).intensity

    @property
    def interpolated(self) -> Volume | None:
        return self.given if self.plan.is_whole and self.given.num_channels == 1 else None

    def others(self) -> Iterator[tuple[Volume, str]]:
        """Yield the mask."""
        if (mask := self.plan.mask) is not None:
            yield open_volume(mask.path, mask.key), "mask"

    def needs(self) -> tuple[ResourceNeeds, float | None]:
        """Return what the run needs, and its seconds on a worker like those that tried blocks."""
        rates = load_rates(self.folder, self.plan, None)
        result = estimate(self.plan, self.given, _voxel_bytes(self.given), UNKNOWN_SLOTS, rates)
        return ResourceNeeds.from_estimate(result), result.seconds

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return what it takes, with the net of several that takes longest."""
        costs = list[StageCost]()
        for plan in (self.plan, *self.rivals):
            costs.append((yield from replace(self, plan=plan)._cost_steps(earlier, pool, trials)))
        are_timed = all(cost.seconds is not None for cost in costs)
        longest = max(costs, key=lambda cost: cost.seconds or 0.0) if are_timed else costs[0]
        others = (cost.forecast for cost in costs if cost is not longest)
        return replace(longest, others=tuple(filter(None, others)))

    def _cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        pending, share_left = self.pending_input(earlier), 0.0 if self.is_complete else 1.0
        if pool is None or trials is None or not share_left:
            return StageCost.from_forecast(self, forecast(self.plan, self.folder, pool, pending=pending), share_left)
        with self.folder.locked():
            steps = (
                forecast_calibrated(self.plan, self.folder, pool)
                if pending is None
                else self._forecast_pending(pending, pool)
            )
            return StageCost.from_forecast(self, (yield from steps))

    def _forecast_pending(self, pending: PendingInput, pool: WorkerPool) -> Steps[Forecast]:
        """Return the forecast after blocks were tried over an array of zeros, which is deleted.

        It gives times and memory. Bytes stay upper bounds, for zeros do not compress as real voxels do.
        """
        plan, place = self.plan, self.folder.path / "stand_in"
        result = forecast(plan, self.folder, pool, pending=pending)
        if result.estimate.rates is not None:
            return result
        result.check(share_left=0.0)  # of disk, so that memory alone counts
        zeros_like(self.given, place)
        try:
            stand_in = plan.changed(source=plan.source.model_copy(update={"path": str(place)}))
            rates, _ = yield from calibrate(stand_in, result.sample.normalise, result.slots.gpu, self.folder.rehearsal)
        except TooSlowError as error:
            log.warning("%s", error)
            return result
        finally:
            delete(place)
        return forecast(plan, self.folder, pool, pending=replace(pending, rates=timed_alone(rates, plan)))


class ConvertStage(RunStage):
    """A conversion: a run of a net that gives its input, or means of it."""

    kind = "convert"

    @classmethod
    def recipe(cls, choice: Section, read: Callable[[], Volume]) -> Recipe:
        assert isinstance(choice, Conversion)
        volume, bin = read(), choice.bin
        are_labels = volume.dtype.kind in "iu" and volume.dtype.itemsize >= 4
        if are_labels and max(bin) > 1:
            raise PlanError(
                f"bin {list(bin)}: {volume} holds {volume.dtype}, which volpipe takes for labels, and these have no "
                "mean; leave bin out, or read a coarser level of the stage that makes them"
            )
        options: dict[str, object] = {"channels": volume.num_channels}
        net = NetChoice(name="identity", options=options)
        if max(bin) > 1:
            net = NetChoice(name="mean", options=options | {"bin": list(bin)})
        return Recipe(
            input=choice.input, net=net, normalise=Normalise(method="none"), windows=choice.windows,
            output=_of_labels(choice.output) if are_labels else choice.output,
        )  # fmt: skip

    def intensity(self, array: str) -> None:
        """Return nothing: what its values are is not known."""

    @property
    def interpolated(self) -> None:
        """Nothing: its voxels are no finer than those that it reads."""


class FunctionStage(ConvertStage):
    """A function of the user's over blocks with a halo: a run of it in the place of a net."""

    kind = "function"

    @classmethod
    def recipe(cls, choice: Section, read: Callable[[], Volume]) -> Recipe:
        assert isinstance(choice, BlockFunction)
        net = NetChoice(name=f"{FUNCTION}{choice.function}", halo=choice.halo, options=choice.options)
        return Recipe(
            input=choice.input,
            net=net,
            normalise=Normalise(method="none"),
            windows=choice.windows,
            output=choice.output,
        )


def _of_labels(output: Output) -> Output:
    """Return the section of an output of labels, unless it says what it is of."""
    return output if "kind" in output.model_fields_set else output.model_copy(update={"kind": "labels"})


class LabelStage(StagePlan):
    """A segmentation."""

    kind = "label"
    shown = "labels"
    maker = SegmentWork
    plan: SegmentPlan

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> LabelStage:
        recipe, feed = stage.choice, among.feed(stage)
        assert isinstance(recipe, SegmentRecipe)
        out, fresh = among.folder / f"{stage.name}{suffix_of(recipe.output.format)}", among.sizing.fresh
        if feed is None:
            plan = plan_segmentation(among.location, recipe, out, among.search_path, fresh=fresh)
            return cls(stage.name, stage.reads, plan.source.volume(), out, plan, beside=stage.beside)
        given = fed(feed, stage.array, recipe.input)
        check_offsets(given, recipe, feed.offsets(stage.array))
        plan = fit(given, recipe, out, among.search_path, fresh=fresh)
        check_output(plan)
        check_access(None, out)
        if (intensity := feed.intensity(stage.array)) in INTENSITIES and recipe.input.range is None:
            note = (
                f"the net of stage {feed.name} gives {INTENSITIES[intensity]}, and {recipe.input.kind} are "
                "probabilities: set net.intensity=unit there if it gives 0 to 1, or input.range here to the values "
                "that mean 0 and 1"
            )
            plan = plan.changed(value_notes=(note,))
        return cls(stage.name, stage.reads, given, out, plan, stage.array, stage.beside)

    @property
    def num_blocks(self) -> int:
        return len(self.plan.blocks)

    def needs(self) -> tuple[ResourceNeeds, float | None]:
        return ResourceNeeds.from_labels(self.plan, _voxel_bytes(self.given)), None

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return the needs of the segmentation, and its times where blocks are tried."""
        pending, times = self.pending_input(earlier), None
        if pool is not None:
            check_memory(self.plan, pool.worker_bytes)  # before the stages that come first
        if pool is not None and trials is not None:
            trial = SegmentTrial(self.plan, self.given, pending is None, str(trials))
            times = yield from calibrate_segmentation(trial, pool)
            times = replace(times, memory_bytes=WORKER_BYTES + self.plan.task_bytes)
        voxel_bytes = _voxel_bytes(self.given) if pending is None else pending.voxel_bytes
        needs = ResourceNeeds.from_labels(self.plan, voxel_bytes)
        return StageCost(self, needs, None, 0.0 if self.is_complete else 1.0, times)


class ScoreStage(StagePlan):
    """An evaluation, which is cheap: made anew rather than refused."""

    kind = "evaluate"
    shown = "evaluation"
    makes_volume = False
    level = 0
    num_blocks = 0
    suffix: ClassVar[str] = ".json"  # of its output
    make: ClassVar[Callable[..., BlockWork[Any]]] = staticmethod(evaluation_work)
    plan: Any  # an Evaluation, a comparison or a Measurement

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> ScoreStage:
        feed = among.feed(stage)
        made = open_volume(among.location) if feed is None else feed.volume(0, stage.array)
        plan, out = cls.plan_of(stage, among, made), among.folder / f"{stage.name}{cls.suffix}"
        return cls(stage.name, stage.reads, made, out, plan, stage.array, stage.beside)

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> Any:
        """Return the plan of `stage`, which reads the volume `made`."""
        choice, feed, given = stage.choice, among.feed(stage), None
        assert isinstance(choice, Comparison)
        if choice.given is not None:
            given = open_volume(choice.given)
        elif feed is not None and choice.kind == "image":
            given = feed.interpolated
        truth = _truth(stage, choice, among)
        evaluation = plan_evaluation(
            made, truth.labels, given, roi=truth.held_out, margin=choice.margin, kind=choice.kind,
            data_range=choice.data_range, ignore=truth.ignore, skeletons=choice.skeletons, any_place=choice.any_place,
        )  # fmt: skip
        while feed is not None:  # no output need exist yet that says of what part it is
            if isinstance(feed, RunStage):
                check_part(evaluation.output, feed.plan.roi_box, evaluation.reference)
            feed = among.earlier.get(feed.reads)
        return evaluation

    @classmethod
    def is_done(cls, entry: Entry) -> bool:
        return paths.is_file(paths.locate(entry.out))

    @classmethod
    def scores(cls, entry: Entry) -> list[Item]:
        tree = read_json(paths.locate(entry.out)) if cls.suffix == ".json" else None
        scores = (tree or {}).get("scores")
        return stored_sheets(scores) if scores else []

    def view_of(self, feed: StagePlan) -> Volume:
        return feed.volume(0, self.array)

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> BlockWork[Any]:
        return self.make(self.plan, self.folder, options, listener, to=self.out)

    def warnings(self) -> list[str]:
        """Return what a user should know of the volumes."""
        return list(self.plan.notes)

    def volume(self, level: int = 0, array: str = "") -> Volume:
        """Refuse: there is none."""
        raise PlanError(f"stage {self.name} makes scores, no volume that another could read")

    def others(self) -> Iterator[tuple[Volume, str]]:
        """Yield what the volume is compared with."""
        inputs = self.plan.inputs()
        yield from ((inputs[name], name) for name in self.plan.outside if name in inputs)

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return the time of the evaluation, where blocks are tried."""
        if pool is None or trials is None:
            return StageCost(self)
        missing = {str(cost.stage.out) for cost in earlier if not cost.stage.is_complete}
        return StageCost(self, times=(yield from calibrate_evaluation(self.plan, missing, pool, trials)))


class CompareStage(ScoreStage):
    """A comparison of two outputs: made anew rather than refused, as an evaluation."""

    kind = "compare"
    make = staticmethod(comparison_work)
    plan: OutputDifference

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> OutputDifference:
        choice = stage.choice
        assert isinstance(choice, OutputComparison)
        other, is_outside = among.volume(choice.other)
        comparison = plan_comparison(
            made, other, labels=choice.labels, roi=choice.roi, data_range=choice.data_range, any_input=True,
            is_planned=True,
        )  # fmt: skip
        advice, notes = "set any_place = true to compare them voxel by voxel all the same", comparison.notes
        if not choice.any_place:
            notes += tuple(check_same_place(Paired("A", made), Paired("B", other), advice))
        stamp = fingerprint(other) if is_outside else ""
        return replace(comparison, fingerprint=stamp, notes=notes)

    def others(self) -> Iterator[tuple[Volume, str]]:
        if self.plan.fingerprint:
            yield self.plan.b, "other"


class MeasureStage(ScoreStage):
    """A table of measurements: made anew rather than refused, as an evaluation."""

    kind = "measure"
    suffix = ".csv"
    make = staticmethod(measurement_work)
    plan: Measurement

    @classmethod
    def plan_of(cls, stage: FlowStage, among: Planning, made: Volume) -> Measurement:
        choice = stage.choice
        assert isinstance(choice, Measuring)
        other, is_outside = (None, False) if choice.other is None else among.volume(choice.other)
        return plan_measurement(made, other, choice, str(among.search_path.absolute()), is_outside=is_outside)

    def reading(self, given: Volume) -> MeasureStage:
        return replace(self, given=given, plan=self.plan.over(given))


@dataclass(frozen=True)
class Truth:
    """What an evaluation compares with, in which box, and the labels of which nothing is known."""

    labels: Volume | None  # where skeletons stand in
    held_out: str | None
    ignore: Ignore


def _truth(stage: FlowStage, choice: Comparison, among: Planning) -> Truth:
    """Return what an evaluation compares with: a volume, or what a training learned from and held out."""
    if choice.reference is None:
        return Truth(None, choice.roi, choice.ignore)
    if choice.reference not in stage.beside:
        return Truth(open_volume(choice.reference), choice.roi, choice.ignore)
    truth = among.earlier[choice.reference].truth()
    if choice.roi is None and truth.held_out is None:
        raise PlanError(
            f"stage {choice.reference} holds out no part of its labels, and scores of what a net learned from say "
            "nothing; give data.held_out there, or roi here"
        )
    ignore = truth.ignore if choice.ignore is None else choice.ignore
    return Truth(truth.labels, choice.roi or truth.held_out, ignore)


def fed(feed: StagePlan, array: str, choice: ArrayInput) -> Volume:
    """Return what a stage that says `choice` reads of an `array` of the stage `feed`."""
    if choice.key is not None:
        raise PlanError(
            f"input.key {choice.key} is for the volume; an array of a stage is named {feed.name}/{choice.key}"
        )
    return with_view(feed.volume(choice.level, array), choice.view)


def _voxel_bytes(volume: Volume) -> float:
    """Return the bytes of a voxel of `volume` that does not compress, all channels."""
    return float(volume.num_channels * volume.dtype.itemsize)


@dataclass(frozen=True)
class StageCost:
    """Forecast of one stage.

    Attributes:
        need: None of an evaluation, which reads and writes next to nothing.
        forecast: of its run; None of a labelling or an evaluation.
        share_left: of the work that is still to be done.
        others: of its run with other nets that may be the best.
        times: of a labelling or an evaluation of which blocks were tried.
    """

    stage: StagePlan
    need: ResourceNeeds | None = None
    forecast: Forecast | None = None
    share_left: float = 1.0
    times: StageTimes | None = None
    others: tuple[Forecast, ...] = ()

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
    def memory_bytes(self) -> float | None:
        """Highest memory of a worker; None where it is not known, or next to nothing."""
        if self.forecast is not None:
            return self.forecast.estimate.memory_bytes if self.forecast.estimate.has_net else None
        return (self.times.memory_bytes or None) if self.times is not None else None

    @property
    def is_guess(self) -> bool:
        """Whether `seconds` rest on synthetic voxels, or on the first steps of a training."""
        return self.times is not None and self.times.is_guess
