"""A training as a stage of a flow: its recipe with volumes of other stages, its work, and the net that a run gets.

Not here: the training itself (training), or its outcome in words (outcome). Of several trainings with other values
the best goes on: that of the highest held-out score, of equal ones the first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from volpipe.blockwise.journal import read_records
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.usage import Totals
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError, RecipeError, RunError, VolumeError
from volpipe.estimation.estimate import StageTime, StageTimes
from volpipe.estimation.memory import NET_SAFETY
from volpipe.inference.statistics import affine, in_numbers
from volpipe.nets.load import describe
from volpipe.recipes.inference import Recipe
from volpipe.recipes.training import LOSSES, VARIED, WEIGHTS, Data, TrainRecipe
from volpipe.recipes.workflow import VOLUME, FlowStage, Link, Tree
from volpipe.reporting.page import Draft, Page
from volpipe.runs.held_work import HeldWork
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.presence import Presence
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.runs.standing import Standing, WorkState
from volpipe.stages.entry import Entry
from volpipe.stages.kind import Planning, StageCost, StagePlan, Truth
from volpipe.stages.status import Looker, Status
from volpipe.training.data.volumes import cached_bytes, check_net, identities, open_inputs, resolve_address
from volpipe.training.driver import (
    check_continued,
    check_recipes,
    check_trainable,
    is_complete,
    others_in,
    trained,
    training_work,
)
from volpipe.training.logs import last_step, read_log, read_pace
from volpipe.training.pages import curves, training_page
from volpipe.training.progress import TrainingProgress
from volpipe.training.search.grid import Sweep
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.pages import trial_items, trials_page
from volpipe.training.search.trials import Search, TrialResult, Trials, best_trial, has_trials, is_ended
from volpipe.training.task import STAGE, TRAINING_FILE, RankResult, Training, newest_step
from volpipe.volumes.identity import input_changes
from volpipe.volumes.storage.paths import delete
from volpipe.volumes.volume import Volume, absolute, open_volume
from volpipe.workflow.outcome import draw_curve, outcome_lines, run_command

MEASURED_STEPS = 3  # that a plan takes to know the time of one


@dataclass(frozen=True)
class TrainPlan:
    """What a stage trains.

    Attributes:
        recipe: of the training, or what is varied in it.
        search: what is varied; None for one training.
        search_path: folder that relative names of the recipe count from.
        volume, labels: of the first entry of its data, as they are or will be.
        made: what other stages make of the data, such as "labels 1".
        pending: whether they have yet to make a part of that.
    """

    recipe: TrainRecipe
    search: Search | None
    search_path: Path
    volume: Volume
    labels: Volume | None
    made: frozenset[str]
    pending: bool

    @property
    def identity(self) -> str:
        """What tells it from the plan of other trainings."""
        varied = [self.recipe, *self.recipes]
        text = json.dumps([each.model_dump(mode="json") for each in varied], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def recipes(self) -> Sequence[TrainRecipe]:
        """The recipes of a sweep, those with the ends of the ranges of a search, or the only one."""
        return (self.recipe,) if self.search is None else self.search.recipes

    @property
    def varies(self) -> str:
        """The kind of its search; "" for one training."""
        return "" if self.search is None else self.search.kind

    @property
    def num_trainings(self) -> int:
        return 1 if self.search is None else self.search.num

    def warnings(self) -> list[str]:
        return []

    def check(self, *, made: bool = False) -> None:
        """Refuse what `volpipe train` refuses, as far as the data are there: whether other stages have `made` theirs.

        Raises:
            VolpipeError: with what it is.
        """
        if made or not self.pending:
            check_recipes(self.recipes, self.search_path)
            return
        for recipe in self.recipes:
            check_trainable(recipe.net)
            check_net(recipe, describe(recipe.net, str(self.search_path)))


class Learning(TrainRecipe):
    """What a stage of kind "train" learns: a training's recipe, and perhaps what is varied in it."""

    sweep: dict[str, Any] = Field(default_factory=dict)  # Any: TOML values
    """Lists of values by key, as in a recipe of `volpipe sweep`: the training of the best held-out score goes on."""
    tune: dict[str, Any] = Field(default_factory=dict)  # Any: TOML values
    """Ranges by key, as in a recipe of `volpipe tune`: the best training goes on."""

    @model_validator(mode="after")
    def _varied_once(self) -> Learning:
        if self.sweep and self.tune:
            raise ValueError("sweep and tune exclude each other; leave one out")
        if (self.sweep or self.tune) and self.train.continue_steps:
            raise ValueError(
                "over corrected labels another training of a search may be the best, so all are made anew; leave out "
                "train.continue_steps, or give the best values in place of the search"
            )
        return self

    @property
    def training(self) -> TrainRecipe:
        """The recipe, without what is varied."""
        return TrainRecipe.model_validate(self.sections)

    @property
    def sections(self) -> Tree:
        """The sections of a training's recipe, without what is varied."""
        return self.model_dump(mode="json", exclude=set(VARIED))


class TrainStage(StagePlan):
    """A training, or several of which the best goes on; it makes weights."""

    kind = "train"
    about = "the weights of a net, as `volpipe train`."
    keys = Learning
    has_input = False
    makes = "weights"
    shown = "training"
    plan: TrainPlan

    @classmethod
    def links(cls, tree: Tree) -> Iterator[Link]:
        """Yield the volumes that it learns from."""
        data = tree.get("data")
        for number, entry in enumerate(data if isinstance(data, list) else ()):
            for key in ("path", "labels"):
                if isinstance(entry, dict) and isinstance(entry.get(key), str):
                    yield Link(f"data.{number}.{key}", entry[key])

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> TrainStage:
        choice: Learning = stage.choice
        placed = [_Placed.of(data, among) for data in choice.data]
        tree = choice.sections | {"data": [each.data.model_dump(mode="json") for each in placed]}
        recipe, search = TrainRecipe.model_validate(tree), _search_of(choice, tree, stage.name)
        first, where = placed[0], str(among.search_path)
        pending = any(each.pending for each in placed)
        data = first.data
        volume = first.volume or open_volume(resolve_address(data.path, where), data.key, data.level)
        labels = first.labels
        if labels is None and data.labels is not None:
            labels = open_volume(resolve_address(data.labels, where), data.labels_key)
        made = frozenset(f"{what} {number}" for number, each in enumerate(placed, 1) for what in each.made)
        plan = TrainPlan(recipe, search, among.search_path, volume, labels, made, pending)
        out = RunFolder.for_stages(among.folder).path if not isinstance(among.folder, Path) else among.folder
        self = cls(stage.name, stage.reads, volume, out / stage.name, plan, beside=stage.beside)
        if among.sizing.fresh or not self.is_complete:  # what is complete needs no volume
            plan.check()
        return self

    @classmethod
    def home(cls, output: str) -> RunFolder:
        return RunFolder(Path(output))

    @classmethod
    def is_done(cls, entry: Entry) -> bool:
        """Return whether weights are there: of the only training, or of the best of many."""
        path = Path(entry.out)
        training = Training.load(path)
        return best_trial(path) is not None if training is None else is_complete(path, training.recipe)

    @classmethod
    def status(cls, folder: RunFolder, looker: Looker) -> Status | None:
        if (status := training_status(folder.path, looker)) is not None or not has_trials(folder.path):
            return status
        parts = tuple(
            replace(part, name=path.name)
            for path in sorted(folder.path.glob("[0-9]*"))
            if path.is_dir() and (part := training_status(path, looker)) is not None
        )
        driver = looker.driver(folder.path, folder.log)
        return Status(
            "trials", str(folder.path), is_ended(folder.path), driver, parts=parts, folder=folder.path, view="steps"
        )

    @classmethod
    def page(cls, folder: RunFolder) -> Page | None:
        if Training.load(folder.path) is not None:
            return training_page(folder)
        return trials_page(folder) if has_trials(folder.path) else None

    @classmethod
    def pictures(cls, entry: Entry) -> list[Draft]:
        """Return losses and scores of the training, or the scores of many."""
        title, path = f"Losses and scores of stage {entry.name}", entry.run.path
        is_one = (path / TRAINING_FILE).is_file()
        return [Draft(title, lambda: [*curves(path)] if is_one else trial_items(path), title)]

    @property
    def folder(self) -> RunFolder:
        assert isinstance(self.out, Path)
        return RunFolder(self.out)

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> TrainWork:
        return TrainWork(self, options, listener)

    def outside(self) -> Iterator[tuple[Volume, str]]:
        """Yield the volumes that it learns from and no stage makes; before the others are there, those of the first."""
        plan = self.plan
        if self.is_complete:  # they may be gone
            return
        first = {"volume 1": plan.volume} | ({} if plan.labels is None else {"labels 1": plan.labels})
        inputs = first if plan.pending else open_inputs(plan.recipe, str(plan.search_path))
        yield from ((volume, what) for what, volume in inputs.items() if what not in plan.made)

    @property
    def read_from(self) -> str:
        return self.beside[0] if "volume 1" in self.plan.made else VOLUME

    def truth(self) -> Truth:
        labels, recipe = self.plan.labels, self.plan.recipe
        if labels is None:
            raise PlanError(f"stage {self.name} learns from no labels; give {self.name}.data.labels, or name a volume")
        first, classes = recipe.data[0], recipe.classes
        left_out = classes.left_out(first.annotated) if recipe.learns_classes and not classes.regions else ()
        background = classes.label_sets[0][0] if left_out else 0
        if first.test is not None:
            return Truth(labels, first.test, recipe.ignore, left_out=left_out, first=background)
        note = (
            f"box {first.held_out} chooses the net of stage {self.name}, so that scores there flatter it; give "
            f"{self.name}.data.test, a box by which nothing is chosen"
        )
        return Truth(labels, first.held_out, recipe.ignore, note if self.plan.search else "", left_out, background)

    def learned(self, recipe_for: Callable[[TrainRecipe], Recipe], *, fresh: bool) -> list[Recipe]:
        """Return the recipe of a run with its weights, and the map of grey levels as the net learned them.

        Before they are there, with none: shapes and types follow from the net alone. Of trainings of other nets it
        returns one for each, until it is known which is the best.

        Args:
            recipe_for: returns the recipe of the run for the net of a training.
            fresh: whether weights that are there do not count.
        """
        folder = None if fresh else self.work().fitting
        best = None if folder is None else Training.load(folder)
        learned = self.plan.recipes if best is None else [best.recipe]
        net = {"untrained": True} if folder is None else {"weights": str(folder / WEIGHTS)}
        recipes = dict[str, Recipe]()
        for training in learned:
            recipe = recipe_for(training)
            normalise = recipe.normalise
            if normalise == training.normalise and not training.data[0].stored:
                normalise = in_numbers(normalise, affine(normalise, self.plan.volume.dtype, None))
            recipe = recipe.model_copy(update={"normalise": normalise, "net": recipe.net.model_copy(update=net)})
            recipes.setdefault(recipe.model_dump_json(), recipe)
        return [*recipes.values()]

    def cost_steps(
        self, earlier: Sequence[StageCost], pool: WorkerPool | None, trials: Path | None
    ) -> Steps[StageCost]:
        """Return the time of its steps and the memory of a worker, where some are tried with a validation.

        The time is not that of validations and checkpoints. Of several trainings one of the largest is tried.
        """
        share_left = self.share_left
        if pool is None or trials is None or self.plan.pending or not share_left:
            return StageCost(self, share_left=share_left)
        where = str(self.plan.search_path)
        recipe = max(
            self.plan.recipes,
            key=lambda each: (
                describe(each.net, where).num_parameters * each.train.batch * math.prod(each.samples.shape)
            ),
        )
        given = recipe.train
        steps = {
            name: min(MEASURED_STEPS, getattr(given, name)) for name in ("steps", "validate_every", "predict_every")
        }
        short = recipe.model_copy(update={"train": given.model_copy(update=steps)})
        folder = RunFolder(trials / self.name)
        try:
            with folder.locked() as session:
                training = Training.begin(short, self.plan.search_path)
                yield from trained(folder.path, training, session, lambda step: None)
                fastest = min(float(entry["seconds"]) for entry in read_log(folder.path) if entry["step"])
                taken = [record.usage for record in read_records(folder.journal, (RankResult,))]
        finally:
            delete(folder.path)
        num, scale = self.plan.num_trainings, describe(recipe.net, where).scale
        peak = max(usage.peak_bytes for usage in taken)
        later = cached_bytes(recipe, scale, where) - cached_bytes(short, scale, where)
        times = StageTimes(
            (StageTime(STAGE, num, num * recipe.train.steps * fastest),), 0.0, 0, is_guess=True,
            num_workers=max(1, pool.slots["gpu"] // recipe.train.ranks), memory_bytes=NET_SAFETY * peak + later,
            gpu_bytes=max(usage.device_peak_bytes for usage in taken),
        )  # fmt: skip
        return StageCost(self, share_left=share_left, times=times)


def _search_of(choice: Learning, tree: dict[str, Any], name: str) -> Search | None:  # Any: TOML values
    """Return what a stage varies in the sections `tree`."""
    kinds: tuple[type[Search], ...] = (Tuning, Sweep)
    for kind in kinds:
        if table := getattr(choice, kind.kind):
            search = kind.of(tree | {kind.kind: dict(table)}, f"stage {name}")
            if not all(recipe.train.validate_every for recipe in search.recipes):
                raise PlanError("trainings are compared by their scores; give train.validate_every and data.held_out")
            return search
    return None


@dataclass(frozen=True)
class _Placed:
    """An entry of a training's data with the places of what other stages make, and those volumes."""

    data: Data
    volume: Volume | None
    labels: Volume | None
    pending: bool

    @property
    def made(self) -> Iterator[str]:
        """Yield what of it other stages make."""
        yield from (what for what in ("volume", "labels") if getattr(self, what) is not None)

    @classmethod
    def of(cls, data: Data, among: Planning) -> _Placed:
        places: dict[str, Any] = {}  # Any: values of `Data`
        volumes: dict[str, Volume] = {}
        makers = []
        for what, inner, level in (("path", "key", data.level), ("labels", "labels_key", 0)):
            name, _, array = (getattr(data, what) or "").partition("/")
            if name == VOLUME:
                address = str(absolute(among.location)) if "://" not in among.location else among.location
                places |= {what: address, inner: getattr(data, inner) or array or None}
            elif name in among.earlier:
                if getattr(data, inner) is not None:
                    raise PlanError(f"data.{inner} is for files; an array of a stage is named {name}/KEY")
                maker = among.earlier[name]
                volume = volumes[what] = maker.volume(level, array)
                places |= {what: volume.path, inner: volume.key} | ({"level": 0} if what == "path" else {})
                makers.append(maker)
        pending = not all(maker.is_complete for maker in makers)
        return cls(data.model_copy(update=places), volumes.get("path"), volumes.get("labels"), pending)


@dataclass(repr=False)
class TrainReport(WorkReport):
    """How a stage that trains ended: the folder of its weights, and lines of losses and scores."""

    trained: Path | None = None
    lines: tuple[str, ...] = ()

    def closing_lines(self, planned: StageTimes | None = None) -> tuple[str, ...]:
        return self.lines

    @property
    def is_complete(self) -> bool:
        return self.trained is not None

    @property
    def open_reason(self) -> str:
        return (
            ""
            if self.is_complete
            else f"{self.folder}: a training was stopped, failed or got no score; volpipe.log says why"
        )


class TrainWork(StageWork[TrainReport]):
    """The work of a stage that trains; arguments as of `StageWork`."""

    def __init__(self, stage: TrainStage, options: RunOptions, listener: Listener) -> None:
        super().__init__(stage.folder, options, listener)
        self.plan: TrainPlan = stage.plan

    @property
    def file(self) -> str:
        """By which its folder is known."""
        return TRAINING_FILE if self.plan.search is None else self.plan.search.file

    @property
    def trained(self) -> Path | None:
        """The folder of the training whose weights go on; None while there is something left to do."""
        path, search = self.folder.path, self.plan.search
        if search is None:
            return path if is_complete(path, self.plan.recipe) else None
        return search.best(path)

    @property
    def fitting(self) -> Path | None:
        """The folder `trained`, where its weights are of a net that the recipe may choose now."""
        path = self.trained
        best = None if path is None else Training.load(path)
        if best is None:
            return None
        net, is_tuned = best.recipe.net, isinstance(self.plan.search, Tuning)
        nets = [recipe.net for recipe in self.plan.recipes]
        return path if any(net.name == n.name and (is_tuned or net.options == n.options) for n in nets) else None

    @property
    def is_begun(self) -> bool:
        return (self.folder.path / self.file).is_file()

    @property
    def is_complete(self) -> bool:
        return self.trained is not None

    @property
    def share_left(self) -> float:
        if self.is_complete:
            return 0.0
        share = last_step(self.folder.path) / self.plan.recipe.train.steps
        return 1.0 if self.plan.search else max(0.0, 1.0 - share)

    def foreign(self) -> RunError | None:
        return others_in(self.folder.path, self.file) if self.folder.path.is_dir() else None

    def check_recipe(self) -> None:
        """Refuse another recipe, or code of the net, than that of what was begun."""
        path, search, place = self.folder.path, self.plan.search, self.plan.search_path
        if search is None:
            check_continued(path, Training.begin(self.plan.recipe, place))
        else:
            search.check_same(path, place)

    def standing(self) -> Standing:
        """Return how what is there stands to its recipe, and to its volumes as far as they are there."""
        if foreign := self.foreign():
            return Standing(WorkState.FOREIGN, foreign)
        try:
            self.check_recipe()
        except RecipeError as error:
            if not self.continues:
                return Standing(WorkState.OUTDATED, error)
            # an update would continue it, which it cannot by another recipe
            return Standing(WorkState.UNFOLLOWABLE if self.options.update else WorkState.ELSEWHERE, error)
        except RunError as error:
            return Standing(WorkState.DAMAGED, error)
        if not self.is_begun:
            return Standing(WorkState.FRESH)
        if changed := self.input_changes():
            how = "continue" if self.plan.recipe.train.continue_steps else "train anew"
            refusal = RunError(
                f"{self.folder.path}: what it learned from has changed since: {changed}; put it back, use --update to "
                f"{how} and make again what rests on that, or use --fresh to start over"
            )
            return Standing(WorkState.OUTDATED, refusal)
        return Standing(WorkState.COMPLETE if self.is_complete else WorkState.BEGUN)

    def input_changes(self) -> str:
        """Return what differs between its volumes and those that were learned from; "" where they are gone."""
        folders = [self.folder] if self.plan.search is None else [*map(RunFolder, _folders(self.folder.path))]
        try:
            now = identities(self.plan.recipe, str(self.plan.search_path)) if folders else {}
        except VolumeError:  # a volume may go once its training is done
            return ""
        own = {what: identity for what, identity in now.items() if what not in self.plan.made}
        found = [input_changes(folder.inputs, own, accept=self.options.same_input) for folder in folders]
        return "; ".join(dict.fromkeys(f"{what} {line}" for each in found for what in each for line in each[what]))

    @property
    def continues(self) -> bool:
        """Whether it has a checkpoint, and continues from there whatever its volumes are by then."""
        return bool(self.plan.recipe.train.continue_steps and newest_step(self.folder.path))

    def check_source(self, source: StageWork[Any], called: str) -> None:
        if self.is_begun and not source.is_begun and (self.is_complete or not self.continues):
            raise RunError(
                f"it is not complete, but stage {called}, which learned from it, was begun: {source.name} was taken "
                f"away; put it back, delete {self.folder.path} as well, or use --fresh to start all stages over"
            )

    def clear(self) -> None:
        """Delete what was made; of a training that an update continues, the weights alone."""
        if self.options.update and self.continues:
            (self.folder.path / WEIGHTS).unlink(missing_ok=True)
        else:
            self.folder.clear()

    def check(self) -> None:
        if not self.is_complete:
            self.plan.check(made=True)

    def claim(self) -> None:
        self.was_begun = self.is_begun
        if not self.is_complete:
            self.training.claim()

    def held_steps(self, name: str, presence: Presence) -> Steps[TrainReport]:
        """Train, and return how that ended."""
        was_complete, began = self.is_complete, time.time()
        yield from self.training.held_steps(name, presence)
        trained, totals = self.trained, self._totals(began)
        if trained is None:
            return TrainReport(self.plan, self.folder.path, totals=totals)
        training = Training.load(trained)
        assert training is not None
        lines = [*outcome_lines(trained)]
        if trained != self.folder.path:
            lines.insert(0, f"the best of {self.plan.num_trainings} trainings is {trained.name}")
        draw_curve(trained)
        lines.append(f"use the weights: {run_command(training.recipe, trained, str(self.plan.search_path))}")
        return TrainReport(
            self.plan, self.folder.path, totals=totals, was_complete=was_complete, trained=trained, lines=tuple(lines)
        )

    def _totals(self, began: float) -> dict[str, Totals]:
        """Return what tasks took that started since `began`, in seconds since 1970."""
        totals = Totals()
        for folder in (self.folder.path, *_folders(self.folder.path)):
            for record in read_records(RunFolder(folder).journal, (RankResult,)):
                if record.done and record.usage.started >= began:
                    totals.add(len(record.done), record.usage)
        return {STAGE: totals} if totals.tasks else {}

    @cached_property
    def training(self) -> HeldWork[Any]:  # Any: a result, or those of all trials
        """The training, or all trials of a search, which this work does as a stage."""
        search, where, num = self.plan.search, self.plan.search_path, self.plan.num_trainings
        if search is None:
            progress = TrainingProgress(self.folder.path)
            return training_work(
                self.folder, Training.begin(self.plan.recipe, where), same_input=self.options.same_input,
                on_step=lambda step, steps: self.listener.on_progress(progress.at(step, steps)),
            )  # fmt: skip
        began, ended = time.perf_counter(), itertools.count(1)

        def on_end(result: TrialResult) -> None:
            stage = Stage(self.plan.varies, num)
            stage.mark_all(np.arange(min(next(ended), num)))
            self.listener.on_progress(Progress([stage], began))

        return Trials(search, self.folder, where, on_end=on_end).work()

    def witnesses(self) -> Sequence[Path]:
        return self.training.witnesses()

    def page(self, *, with_pictures: bool = True) -> Page:
        return self.training.page(with_pictures=with_pictures)


def _folders(path: Path) -> list[Path]:
    """Return the folders of the trainings in that of many."""
    return sorted(folder for folder in path.glob("[0-9]*") if (folder / TRAINING_FILE).is_file())


def training_status(folder: Path, looker: Looker) -> Status | None:
    """Return how far the training in `folder` is; None where none lies there."""
    training = looker.kept(folder / TRAINING_FILE, lambda: Training.load(folder))
    if training is None:
        return None
    steps, newest = training.recipe.train.steps, newest_step(folder)
    driver, pace = looker.driver(folder, folder / LOSSES), read_pace(folder)
    done = max(newest, 0 if pace is None else pace.step)
    has_weights = (folder / WEIGHTS).is_file()
    remark = "its weights are gone; the same command makes them again" if newest >= steps and not has_weights else ""
    return Status(
        TrainStage.shown, str(folder), newest >= steps and has_weights, driver,
        {STAGE: StageNote(min(done, steps), steps)}, remark=remark, folder=folder, pace=pace,
        view="steps",
    )  # fmt: skip
