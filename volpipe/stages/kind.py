"""A kind of work that may be a stage of a flow: one class, which says all about itself, and whose objects are stages.

Not here: the kinds (segmentation.kind, evaluation.kinds, workflow), or their list (workflow.kinds), which is all that
knows of several. What makes a volume inherits most; docs/design/extend.md has a kind from its keys to its output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError
from volpipe.estimation.estimate import StageTimes
from volpipe.estimation.forecast import Forecast, PendingInput
from volpipe.geometry.grid import Box
from volpipe.geometry.labels import Ignore
from volpipe.inference.output import planned_volume
from volpipe.inference.output_plan import OutputPlan
from volpipe.recipes.inference import ArrayInput, Input, Recipe
from volpipe.recipes.toml import Section
from volpipe.recipes.training import TrainRecipe
from volpipe.recipes.workflow import VOLUME, FlowStage, Link, Makes, Tree
from volpipe.reporting.page import Draft, Item, Page
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.output_work import OutputWork
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.stages.entry import Entry
from volpipe.stages.needs import ResourceNeeds
from volpipe.stages.sizing import Sizing
from volpipe.stages.status import Looker, Status, output_status
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.volume import Volume, open_volume, with_view

OUTPUTS = "Outputs"  # the section of a flow's page with their pictures


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

    def given(self, stage: FlowStage) -> Volume:
        """Return the volume that `stage` reads, as it is or as it will be."""
        feed = self.feed(stage)
        return open_volume(self.location) if feed is None else feed.volume(0, stage.array)

    def volume(self, name: str) -> tuple[Volume, bool]:
        """Return the volume of that name, and whether no stage makes it: of an earlier stage, the command's, a path."""
        first, _, array = name.partition("/")
        if first in self.earlier:
            return self.earlier[first].volume(0, array), False
        return open_volume(self.location, array or None) if first == VOLUME else open_volume(name), True


@dataclass(frozen=True)
class StagePlan(ABC):
    """A stage of a flow, planned. A subclass is a kind of work, and says of itself what the class attributes are for.

    Attributes:
        name, reads, beside: as the flow says them; a run without a flow has no name.
        given: what the stage reads, as it is or as it will be.
        out: where its output goes.
        plan: of its work.
        array: of what it reads, where that has several.
    """

    kind: ClassVar[str]  # its name, in recipes and tables
    about: ClassVar[str]  # what it does, for users, behind that name
    keys: ClassVar[type[Section]]  # what such a stage says in a recipe, beside what all of them say
    has_recipe: ClassVar[bool] = True  # whether `keys` are those of a recipe, of which a file may be named
    has_input: ClassVar[bool] = True  # whether it reads a stage, or the volume, as `input`
    runs_net: ClassVar[bool] = False  # whether it needs a net, which an earlier stage may train
    makes: ClassVar[Makes] = "volume"  # what later stages may have of it
    shown: ClassVar[str]  # the kind of its status
    maker: ClassVar[type[OutputWork[Any, Any]] | None] = None  # its work, where that makes a volume
    plan_type: ClassVar[type[OutputPlan]]  # of that work, by which it is found again
    forecasts: ClassVar[bool] = False  # whether its work tells of its own forecast as it begins

    name: str
    reads: str
    given: Volume
    out: Location
    plan: Any  # of its kind
    array: str = ""
    beside: tuple[str, ...] = ()

    @classmethod
    def links(cls, tree: Tree) -> Iterable[Link]:
        """Return the keys of a stage, beside `input`, that may name other stages."""
        return ()

    @classmethod
    def takes_part(cls) -> bool:
        """Return whether such a stage may read a box of the volume, or what a mask selects."""
        field = cls.keys.model_fields.get("input")
        return field is not None and field.annotation is Input

    @classmethod
    @abstractmethod
    def planned(cls, stage: FlowStage, among: Planning) -> StagePlan:
        """Return the plan of `stage`, which is of this kind.

        Raises:
            PlanError: what it reads does not fit.
            VolumeError: there is no such volume.
        """

    @classmethod
    def home(cls, output: str) -> RunFolder:
        """Return the folder in which the work of this kind that makes `output` lies, if there is any."""
        return RunFolder.find(output)

    @classmethod
    def stored(cls, folder: RunFolder) -> OutputWork[Any, Any] | None:
        """Return the work of this kind that was begun in `folder`; None where none was, or it makes no volume.

        Raises:
            RunError: what is stored there is damaged.
        """
        plan = None if cls.maker is None else folder.load(cls.plan_type)
        return None if cls.maker is None or plan is None else cls.maker(plan, folder=folder)  # both may have been moved

    @classmethod
    def is_done(cls, entry: Entry) -> bool:
        """Return whether the stage that is remembered as `entry` is complete."""
        if cls.maker is None:
            return paths.is_file(paths.locate(entry.out))
        work = cls.stored(entry.run)
        return work is not None and work.is_complete

    @classmethod
    def status(cls, folder: RunFolder, looker: Looker) -> Status | None:
        """Return how far the work of this kind in `folder` is; None where none lies there."""
        if cls.maker is None:
            return None
        work = looker.kept(folder.path / cls.plan_type.FILE, partial(cls.stored, folder))
        return None if work is None else output_status(work, looker.driver(folder.path, folder.journal), cls.shown)

    @classmethod
    def page(cls, folder: RunFolder) -> Page | None:
        """Return the report of the work of this kind in `folder`; None where none lies there."""
        work = cls.stored(folder)
        return None if work is None else work.page()

    @classmethod
    def scores(cls, entry: Entry) -> list[Item]:
        """Return the scores that the stage remembered as `entry` has made, as tables; none of most kinds."""
        return []

    @classmethod
    def pictures(cls, entry: Entry) -> list[Draft]:
        """Return the pictures of the stage remembered as `entry` for the page of its flow: of a volume the main one."""
        if cls.maker is None:
            return []

        def drawn() -> list[Item]:
            work = cls.stored(entry.run)
            picture = None if work is None else work.pictures.main(entry.name)
            return [] if picture is None else [picture]

        return [Draft(f"Output of stage {entry.name}", drawn, OUTPUTS)]

    @property
    def makes_volume(self) -> bool:
        return self.makes == "volume"

    @property
    def makes_weights(self) -> bool:
        return self.makes == "weights"

    @property
    def roi(self) -> Box | None:
        """The part of what it reads that it computes; None where that is not a part of a volume."""
        return None

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
        return feed.volume(0, self.array) if self.maker is None else fed(feed, self.array, self.plan.recipe.input)

    @property
    def folder(self) -> RunFolder:
        """The folder of the work that writes the output; of a run alone that by which it is known without a flow."""
        return RunFolder.for_stage(self.out) if self.name else RunFolder.from_output(self.out)

    @property
    def level(self) -> int:
        """Which level it reads of what an earlier stage makes."""
        level: int = 0 if self.maker is None else self.plan.recipe.input.level
        return level

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it computes, of a volume."""
        return 0 if self.maker is None else self.plan.num_active

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> StageWork[Any]:
        """Return its work; arguments as of `StageWork`."""
        assert self.maker is not None
        return self.maker(self.plan, options, listener, self.folder)

    def output_work(self, options: RunOptions = PLAIN) -> OutputWork[Any, Any] | None:
        """Return its work, where that makes a volume; else None."""
        return None if self.maker is None else self.maker(self.plan, options, folder=self.folder)

    @property
    def voxels_per_block(self) -> float:
        """The output voxels of its average block, by which speed is told; 0 where that tells nothing."""
        return 0.0

    @property
    def grey(self) -> str | None:
        """By which rule a net sees grey levels of what it reads; None without a net."""
        return None

    @property
    def summary(self) -> str:
        """What it does, in a line that is printed before it begins; "" where its plan is printed as a table."""
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as far as its journal says."""
        return self.work().is_complete

    @property
    def share_left(self) -> float:
        """Share of its units that is still to be done."""
        return self.work().share_left

    def volume(self, level: int = 0, array: str = "") -> Volume:
        """Return `level` of the volume that it makes, of an array of it where that has several.

        Raises:
            PlanError: it makes none.
        """
        if self.maker is None:
            raise PlanError(f"stage {self.name} makes {self.makes}, no volume that another could read")
        plan = self.plan.array(array)
        return planned_volume(plan, level + plan.finest)

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

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return what it takes, next to nothing unless its kind says so; complete stages are tried too.

        Args:
            earlier: costs of the stages before it.
            pool: the workers, if they are known.
            trials: folder in which blocks are tried on them, if they are.

        Raises:
            PlanError: a worker cannot hold a block.
            RunStopped: a block cannot be computed.
        """
        return StageCost(self)
        yield  # which makes these steps

    def pending_input(self, earlier: Sequence[StageCost]) -> PendingInput | None:
        """Return its input where that is not complete yet, of the size that its own stage's estimate gives."""
        if self.reads == VOLUME:
            return None
        source = next(cost for cost in earlier if cost.stage.name == self.reads)
        if source.stage.is_complete:
            return None
        rates = source.forecast.estimate.rates if source.forecast is not None and not self.array else None
        return PendingInput(self.given, rates.output_bytes if rates is not None else voxel_bytes(self.given))


@dataclass(frozen=True)
class Truth:
    """What an evaluation compares with, in which box, and the labels of which nothing is known.

    Attributes:
        labels: None where skeletons stand in.
        note: why scores there flatter the net; "" where they do not.
        left_out: labels of classes that these labels do not annotate; in an output they count as the label `first`.
    """

    labels: Volume | None
    box: str | None
    ignore: Ignore
    note: str = ""
    left_out: tuple[int, ...] = ()
    first: int = 0


def fed(feed: StagePlan, array: str, choice: ArrayInput) -> Volume:
    """Return what a stage that says `choice` reads of an `array` of the stage `feed`."""
    if choice.key is not None:
        raise PlanError(
            f"input.key {choice.key} is for the volume; an array of a stage is named {feed.name}/{choice.key}"
        )
    return with_view(feed.volume(choice.level, array), choice.view)


def voxel_bytes(volume: Volume) -> float:
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
