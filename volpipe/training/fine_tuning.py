"""The recipe of a fine-tuning: a training that begins with weights that are there, and goes on with another volume.

Not here: the training (driver), to which it is one like any other, whose `net.weights` are given. What the user leaves
open is chosen here, and said: held-out box, steps, learning rate, grey levels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import NOTICE, PlanError, RecipeError
from volpipe.geometry.grid import Box
from volpipe.inference.statistics import affine, as_trained, in_numbers, is_counted, needs_measuring, sampled_affine
from volpipe.nets.load import describe
from volpipe.recipes.inference import Normalise, Recipe, load_recipe
from volpipe.recipes.toml import set_values, typed
from volpipe.recipes.training import RUN_RECIPE, WEIGHTS, Data, TrainRecipe, load_training
from volpipe.resolve import nearest, shipped_starts
from volpipe.training.data.degrade import context
from volpipe.training.data.labelled import LabelledVoxels, are_sparse
from volpipe.training.data.volumes import TrainingData, check_holds, differs, open_data, resolve_address
from volpipe.training.task import Training
from volpipe.volumes.values import grey_notes, take_sample
from volpipe.volumes.volume import View, Volume, open_volume

log = logging.getLogger(__name__)

SHARE = 5  # of the longest axis, a part of so many is held out, at least a window
FEWER, LEAST_STEPS = 10, 200  # so many times fewer steps than the weights took
SLOWER = 0.2  # of the learning rate of the weights
WARM_UP = 20  # steps: the optimiser knows no gradient yet
SCORED = 4  # times, beside before the first step
OPEN = "open"  # the held-out box of a recipe, until the volume is


@dataclass(frozen=True)
class StartingWeights:
    """Weights to begin with: `run` is the recipe that runs them, `training` the one that they were trained by."""

    name: str
    run: Recipe
    training: TrainRecipe

    @classmethod
    def find(cls, name: str) -> StartingWeights:
        """Return the weights of the shipped recipe `name`, or of the training in a folder.

        Raises:
            RecipeError: there are none, or they cannot be trained on.
        """
        folder, known = Path(name), shipped_starts()
        old = Training.load(folder)
        if old is not None:
            if missing := [file for file in (WEIGHTS, RUN_RECIPE) if not (folder / file).is_file()]:
                raise RecipeError(f"the training in {folder} has no {missing[0]} yet; end it by its own command first")
            run, training = load_recipe(folder / RUN_RECIPE), old.recipe
            weights = {"weights": str((folder / WEIGHTS).absolute())}  # the folder may have moved
            run = run.model_copy(update={"net": run.net.model_copy(update=weights)})
        elif name in known:
            run, training = load_recipe(Path(name)), load_training(Path(f"train_{name}"))
        else:
            raise RecipeError(
                f"there is no training of {name} to begin with{nearest(name, known)}; give the folder of a training, "
                f"or a shipped recipe whose training is known: {', '.join(known)}"
            )
        if training.adversary.weight:
            raise RecipeError(
                f"{name} was trained against a discriminator, which is not kept; begin with weights that were trained "
                "without [adversary], such as superres_z4"
            )
        return cls(name, run, training)


def fine_tuning(
    start: StartingWeights, path: str, labels: str | None, settings: Sequence[str], search_path: str,
    old: TrainRecipe | None = None,
) -> TrainRecipe:  # fmt: skip
    """Return the recipe of a training that begins with the weights of `start`.

    Args:
        path: of the volume to learn from; `labels` of its labels, where affinities or classes are learnt.
        settings: ``key=value``, on top.
        search_path: folder that relative names count from.
        old: recipe of the training to continue. What was chosen for it stays, whatever became of its volume.

    Raises:
        VolpipeError: labels are missing or of no use; the volume is missing, too small, or has no grey levels.
    """
    if start.training.learns_labels and labels is None:
        raise RecipeError(f"{start.name} learns from labels; give those of {path}: --labels VOLUME (labels=)")
    if labels is not None and not start.training.learns_labels:
        raise RecipeError(f"{start.name} learns from the volume alone; leave out --labels {labels}")
    data = Data(path=path, labels=labels, held_out=OPEN)
    before = start.training.train.steps
    steps = before if start.training.net.weights else max(LEAST_STEPS, before // FEWER)
    recipe = _typed(start, data, settings, steps)
    if recipe.train.steps != steps:
        recipe = _typed(start, data, settings, recipe.train.steps)
    if old is not None and old.data[0].path == recipe.data[0].path:
        return _with_values_of(recipe, start, old)
    return _with_values_of(recipe, start, _with_choices(recipe, start, search_path))


def _typed(start: StartingWeights, data: Data, settings: Sequence[str], steps: int) -> TrainRecipe:
    """Return the recipe for so many `steps`; keys that depend on the volume are still open."""
    old = start.training
    tree: dict[str, Any] = old.model_dump(mode="json")  # Any: TOML values
    tree |= {"data": [data.model_dump()], **start.run.model_dump(mode="json", include={"net", "normalise"})}
    every, rate = max(1, steps // SCORED), old.train.learning_rate * (1.0 if old.net.weights else SLOWER)
    tree["train"] |= {"steps": steps, "schedule": "trapezoid", "decay": steps // 2, "warm_up": WARM_UP, "threads": 0}
    tree["train"] |= {"learning_rate": rate, "checkpoint_every": every, "validate_every": every, "predict_every": steps}
    set_values(tree, settings)
    return typed(TrainRecipe, tree, f"the fine-tuning of {start.name}", settings)


def _with_values_of(recipe: TrainRecipe, start: StartingWeights, known: TrainRecipe) -> TrainRecipe:
    """Return `recipe` with what `known` has, where no setting says otherwise."""
    first, changes = recipe.data[0], dict[str, object]()
    if first.held_out == OPEN:
        changes["data"] = (first.model_copy(update={"held_out": known.data[0].held_out}), *recipe.data[1:])
    if recipe.normalise == start.run.normalise:
        net = recipe.net.model_copy(update={"trained_range": known.net.trained_range})
        changes |= {"normalise": known.normalise, "net": net}
    if recipe.degrade.noise == start.training.degrade.noise:
        changes["degrade"] = recipe.degrade.model_copy(update={"noise": known.degrade.noise})
    return recipe.model_copy(update=changes)


def _with_choices(recipe: TrainRecipe, start: StartingWeights, search_path: str) -> TrainRecipe:
    """Return `recipe` with a held-out box, grey levels and noise for its volume; the first two are said.

    Raises:
        VolpipeError: as of `fine_tuning`.
    """
    first = recipe.data[0]
    view = View(incomplete=first.incomplete)
    volume = open_volume(resolve_address(first.path, search_path), first.key, level=first.level, view=view)
    trained = start.run.net.trained_range or (start.run.normalise.low, start.run.normalise.high)
    recipe = _with_grey_levels(recipe, start, volume)
    low, high, (below, above) = recipe.normalise.low, recipe.normalise.high, trained
    if low is not None and high is not None and below is not None and above is not None:
        noise = recipe.degrade.noise * (high - low) / (above - below)  # as the net sees it, it stays what it was
        recipe = recipe.model_copy(update={"degrade": recipe.degrade.model_copy(update={"noise": noise})})
    if first.held_out == OPEN:
        opened = open_data(first.model_copy(update={"held_out": None}), recipe.normalise, search_path)
        first = first.model_copy(update={"held_out": str(_held_out(recipe, opened, search_path))})
    log.warning(
        "%s steps at a learning rate of %g (train.steps, train.learning_rate); box %s is scored, and not learnt from "
        "(data.0.held_out)", f"{recipe.train.steps:,}", recipe.train.learning_rate, first.held_out, extra=NOTICE,
    )  # fmt: skip
    return recipe.model_copy(update={"data": (first, *recipe.data[1:])})


def _with_grey_levels(recipe: TrainRecipe, start: StartingWeights, volume: Volume) -> TrainRecipe:
    """Return `recipe` with the grey levels of `volume`, by a sample, that a run would map to -1 and 1.

    Those that the volumes of `start` had stay where the net would see such numbers of this one, too.
    """
    choice, sample = recipe.normalise, take_sample(volume)
    if sample is None or sample.is_constant:  # the training refuses, and says which keys to give
        return recipe
    info = np.iinfo(volume.dtype) if is_counted(volume.dtype) else None
    if not needs_measuring(choice, volume.dtype):
        (shift,), (scale,) = affine(choice, volume.dtype, None).rows
        is_of_wider = info is not None and shift + scale > info.max
        if choice != start.run.normalise or not (is_of_wider or grey_notes(sample, shift, scale, "")):
            return recipe
        choice = Normalise(method="auto" if choice.mean is None else "zscore")
    if info is not None and choice.method == "auto":
        numbers = Normalise(low=info.min, high=info.max)
    else:
        choice = as_trained(Recipe(net=recipe.net, normalise=choice), sample).normalise
        voxels = np.concatenate([box.reshape(volume.num_channels, -1) for box in sample.boxes], axis=1)
        numbers = in_numbers(choice, sampled_affine(choice, voxels))
        log.warning(
            "%s, of which %g … %g become -1 … 1: as in a run, but by this sample; normalise.low and high give others",
            sample.seen, numbers.low, numbers.high, extra=NOTICE,
        )  # fmt: skip
    net = recipe.net.model_copy(update={"trained_range": (numbers.low, numbers.high)})
    return recipe.model_copy(update={"normalise": numbers, "net": net})


def _held_out(recipe: TrainRecipe, data: TrainingData, search_path: str) -> Box:
    """Return the box to hold out: an end of the labels, or the volume, along its longest axis, if a window is left.

    Raises:
        PlanError: none leaves room, or none has two values by which a net could be scored.
    """
    facts = describe(recipe.net, search_path)
    window = [n * s for n, s in zip(recipe.samples.shape, facts.scale, strict=True)]
    scored = data.labels or data.volume  # in whose voxels the box counts
    check_holds(scored, window)
    shape, around = scored.spatial_shape, context(recipe.degrade.kind, facts.scale)
    boxes = []
    for axis in sorted(range(3), key=lambda axis: -shape[axis]):
        num = max(window[axis], shape[axis] // SHARE)
        if shape[axis] - num >= window[axis] + around[axis]:
            whole = Box.from_shape(shape)
            boxes += [whole.along(axis, shape[axis] - num, shape[axis]), whole.along(axis, 0, num)]
    if not boxes:
        smaller = [-(-n // 2 // s) * s for n, s in zip(recipe.samples.shape, facts.stride, strict=True)]
        raise PlanError(
            f"{scored} has {shape} voxels (z, y, x): no axis has room for a window of {tuple(window)} and as much "
            f"beside it to hold out; give a larger volume, or smaller windows, such as samples.shape={smaller}"
        )
    reader, ignore = scored.open(), recipe.ignore if data.labels else ()

    def read(part: Box) -> np.ndarray:
        return np.asarray(reader.read(part)[0])

    is_sparse = data.labels is not None and are_sparse(scored, Box.from_shape(shape), read, ignore)
    for box in boxes:
        if differs(scored, box, ignore) or (is_sparse and LabelledVoxels.count(box, (), read, ignore).num):
            return box
    raise PlanError(
        f"{scored} has one value alone in {' and '.join(map(str, boxes))}, by which no net can be "
        "scored; give data.0.held_out, a box where there is more"
    )
