"""The kinds of stages that run a net over a volume, and what runs as if it were one: conversions and functions.

Not here: the run (driver), or its plan (prepare).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError
from volpipe.estimation.calibrate import TooSlowError, calibrate
from volpipe.estimation.estimate import estimate, timed_alone
from volpipe.estimation.forecast import (
    UNKNOWN_SLOTS,
    Forecast,
    PendingInput,
    forecast,
    forecast_calibrated,
    load_rates,
)
from volpipe.estimation.limits import check_access, check_window
from volpipe.geometry.grid import Box
from volpipe.inference.output import suffix_of
from volpipe.inference.plan import Plan
from volpipe.nets.files import FUNCTION
from volpipe.recipes.inference import AlsoInput, Input, NetChoice, Normalise, Output, Recipe, to_inputs
from volpipe.recipes.toml import Section, Sizes
from volpipe.recipes.workflow import VOLUME, FlowStage, Link, OverBlocks, Tree, UserFunction, named
from volpipe.stages.kind import Planning, StageCost, StagePlan, fed, voxel_bytes
from volpipe.stages.needs import ResourceNeeds
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.stack import stack
from volpipe.volumes.storage.paths import delete
from volpipe.volumes.volume import Volume, open_volume
from volpipe.workflow.driver import RunWork
from volpipe.workflow.prepare import longest_first, open_also, prepare, prepare_for, sample_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStage(StagePlan):
    """A run of a net.

    `rivals` are the plans with other nets, while an earlier stage has still to find the best; `also` are the volumes
    that it reads with what is given, and the stages that make them.
    """

    kind = "run"
    about = "a net; the keys of its recipe follow."
    keys: ClassVar[type[Section]] = Recipe
    runs_net = True
    shown = "run"
    maker = RunWork
    plan_type = Plan
    forecasts = True
    plan: Plan
    rivals: tuple[Plan, ...] = ()
    also: tuple[tuple[Volume, str], ...] = ()

    @classmethod
    def links(cls, tree: Tree) -> Iterator[Link]:
        """Yield the training of the weights that it takes, and what it reads beside its input."""
        net, given = tree.get("net"), tree.get("input")
        if cls.runs_net and isinstance(net, dict) and isinstance(net.get("stage"), str):
            yield Link("net", net["stage"], "weights", is_stage=True)
        also = to_inputs(given.get("also", ())) if isinstance(given, dict) else ()
        for i, entry in enumerate(also if isinstance(also, list | tuple) else ()):
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                yield Link(f"input.also.{i}", entry["path"])

    @classmethod
    def recipe(cls, choice: Any, read: Callable[[], Volume]) -> Recipe:  # Any: its keys
        """Return the recipe of the run that does what `choice` says to the volume that `read` returns."""
        recipe: Recipe = choice
        return recipe

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> RunStage:
        feed, choice = among.feed(stage), stage.input
        assert isinstance(choice, Input)
        also = [cls._read_also(entry, stage, among) for entry in choice.also or ()]

        def read_with(choice: Input) -> Volume:
            if feed is not None:
                first = fed(feed, stage.array, choice)
            else:
                first = open_volume(among.location, choice.key, choice.level, view=choice.view)
            return stack([first, *(volume for volume, _ in also)])

        read = partial(read_with, choice)

        recipes = [cls.recipe(stage.choice, read)]
        if stage.for_net is not None:
            maker, choose = stage.beside[0], stage.for_net
            recipes = among.earlier[maker].learned(lambda net: cls.recipe(choose(net), read), fresh=among.sizing.fresh)
        out = among.folder / f"{stage.name}{suffix_of(recipes[0].output.format)}"

        def plan_of(recipe: Recipe) -> Plan:
            if feed is None and not also:
                plan = prepare(among.location, recipe, out, among.search_path, among.sizing)
            else:
                given = read_with(recipe.input)
                sample = sample_for(recipe, given.parts[0]) if feed is None else None
                plan = prepare_for(given, recipe, out, among.search_path, among.sizing, sample)
                check_access(None, out)
            check_window(plan)
            return plan

        plans = list[Plan]()
        for recipe in recipes:
            with named(f"{stage.beside[0]}, net.options {recipe.net.options}") if len(recipes) > 1 else nullcontext():
                plans.append(plan_of(recipe))
        plan, *rivals = longest_first(plans, *stage.beside[:1])
        first = read().parts[0] if also or feed is not None else plan.source.volume()
        return cls(stage.name, stage.reads, first, out, plan, stage.array, stage.beside, tuple(rivals), tuple(also))

    @classmethod
    def _read_also(cls, entry: AlsoInput, stage: FlowStage, among: Planning) -> tuple[Volume, str]:
        """Return a volume that is read beside the input, and the stage that makes it, "" where none does."""
        name, _, array = entry.path.partition("/")
        if name in stage.beside:
            return fed(among.earlier[name], array, entry), name
        if name == VOLUME:
            return open_volume(among.location, entry.key or array or None, entry.level, view=entry.view), ""
        return open_also(entry, among.search_path), ""

    def warnings(self) -> list[str]:
        """Return what a user should know of the net before it runs, not that it has no weights yet."""
        recipe = self.plan.recipe
        is_trained = bool(set(self.beside) - {maker for _, maker in self.also})
        if not (is_trained and recipe.net.untrained):
            return super().warnings()
        net = recipe.net.model_copy(update={"untrained": False})
        return self.plan.changed(recipe=recipe.model_copy(update={"net": net})).warnings()

    @property
    def roi(self) -> Box:
        return self.plan.roi_box

    @property
    def voxels_per_block(self) -> float:
        return math.prod(self.plan.out_shape) / self.plan.num_active

    @property
    def grey(self) -> str:
        return self.plan.notes.mapping

    @property
    def read(self) -> Volume:
        """What it reads, all volumes as one."""
        return stack([*self.given.parts, *(volume for volume, _ in self.also)])

    def pending_input(self, earlier: Sequence[StageCost]) -> PendingInput | None:
        """Return its input where a part of that is not complete yet."""
        pending = super().pending_input(earlier)
        makers = {maker for _, maker in self.also if maker}
        is_open = any(cost.stage.name in makers and not cost.stage.is_complete for cost in earlier)
        if pending is None and not is_open:
            return None
        return pending if pending is not None and not self.also else PendingInput(self.read, voxel_bytes(self.read))

    @property
    def is_measured(self) -> bool:
        """Whether it measures what it reads."""
        return self.plan.grey_rule.needs_measuring

    def offsets(self, array: str) -> tuple[tuple[int, int, int], ...] | None:
        return self.plan.array(array).recipe.net.offsets

    def intensity(self, array: str) -> str | None:
        return self.plan.array(array).intensity if self.runs_net else None

    @property
    def interpolated(self) -> Volume | None:
        is_alike = self.runs_net and self.plan.is_whole and self.plan.grid is None
        return self.given if is_alike and self.given.num_channels == 1 else None

    def others(self) -> Iterator[tuple[Volume, str]]:
        """Yield the mask, and volumes that it reads beside its input and no stage makes."""
        yield from ((volume, "volume") for volume, maker in self.also if not maker)
        if (mask := self.plan.mask) is not None:
            yield open_volume(mask.path, mask.key), "mask"

    def needs(self) -> tuple[ResourceNeeds, float | None]:
        """Return what the run needs, and its seconds on a worker like those that tried blocks."""
        rates = load_rates(self.folder, self.plan, None)
        result = estimate(self.plan, self.read, voxel_bytes(self.read), UNKNOWN_SLOTS, rates)
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
        source = plan.source.model_copy(update={"path": str(place)})
        zeros_like(self.given, place)
        for i, (volume, _) in enumerate(self.also):
            zeros_like(volume, place.with_name(f"{place.name}_{i}"))
        also = [
            own.model_copy(update={"path": str(place.with_name(f"{place.name}_{i}"))})
            for i, own in enumerate(source.also)
        ]
        try:
            stand_in = plan.changed(source=source.model_copy(update={"also": tuple(also)}))
            rates, _ = yield from calibrate(
                stand_in, result.sample.normalise, result.slots.gpu, self.folder.calibration
            )
        except TooSlowError as error:
            log.warning("%s", error)
            return result
        finally:
            for each in (source, *also):
                delete(Path(each.path))
        return forecast(plan, self.folder, pool, pending=replace(pending, rates=timed_alone(rates, plan)))


class Conversion(OverBlocks):
    """What a stage of kind "convert" makes of its input: another level, box, channel, type or format, or larger voxels.

    Its sections are those of a run. Integers stay what they are, labels of 64 bits too; floats become
    float32.
    """

    bin: Sizes = (1, 1, 1)
    """Voxels (z, y, x) of the input whose mean is one of the output, for grey levels. Where it does not divide an axis,
    the last voxels are means over the mirrored end."""
    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the input; others are rounded and clipped."""


class ConvertStage(RunStage):
    """A conversion: a run of a net that gives its input, or means of it."""

    kind = "convert"
    about = "a part, a level, a type or a format of the input, or larger voxels."
    keys = Conversion
    has_recipe = False
    runs_net = False

    @classmethod
    def recipe(cls, choice: Conversion, read: Callable[[], Volume]) -> Recipe:
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
        output = choice.output
        if are_labels and "kind" not in output.model_fields_set:
            output = output.model_copy(update={"kind": "labels"})
        return Recipe(
            input=choice.input, net=net, normalise=Normalise(method="none"), windows=choice.windows, output=output
        )  # fmt: skip


class BlockFunction(OverBlocks, UserFunction):
    """What a stage of kind "function" does: a Python function over blocks of numpy with a halo.

    It gets a block (z, y, x), or (c, z, y, x) of several channels, as it is stored, with the halo around it, and
    returns as many voxels, of as many channels as it likes. The halo is cut off then. Beyond the faces of the volume a
    block shows it mirrored. With `input.also` it gets a block of each volume, in that order.
    """

    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the result; another one must hold all of its values."""


class FunctionStage(RunStage):
    """A function of the user's over blocks with a halo: a run of it in the place of a net."""

    kind = "function"
    about = "a Python function over blocks."
    keys = BlockFunction
    has_recipe = False
    runs_net = False

    @classmethod
    def recipe(cls, choice: BlockFunction, read: Callable[[], Volume]) -> Recipe:
        net = NetChoice(name=f"{FUNCTION}{choice.function}", halo=choice.halo, options=choice.options)
        return Recipe(
            input=choice.input,
            net=net,
            normalise=Normalise(method="none"),
            windows=choice.windows,
            output=choice.output,
        )
