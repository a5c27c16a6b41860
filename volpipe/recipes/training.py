"""The recipe of a training: which net, from which volumes, by which steps; as the user writes it in TOML, typed.

Not here: what a step does (training.loop), or the recipe of a run (inference), whose net and normalisation it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from volpipe.errors import RecipeError
from volpipe.geometry.affinities import OFFSETS, Offset
from volpipe.recipes.inference import NetChoice, Normalise
from volpipe.recipes.toml import Section, Sizes, differences, load_tree, typed

CHECKPOINTS, LOSSES, EVENTS = "checkpoints", "losses.jsonl", "events"  # in a training's folder
WEIGHTS = "weights.safetensors"
TENSORS, TRUTH_KEY = "tensors.n5", "tensors/truth"  # predictions of held-out windows, and what they should be
STOP = "stop"  # a file that asks a training to end at the next step where it validates or writes a checkpoint
VARIED = ("sweep", "tune")  # tables of a recipe that say what to vary; one training has no use for them
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
Margin = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
NEUTRAL = ("steps", "decay", "keep", "checkpoint_every", "validate_every", "predict_every")  # may change on the way


class Data(Section):
    """A volume to learn from; `held_out` is a box z0:z1,y0:y1,x0:x1 that no training window touches.

    stored: `path` leads to the window tensors that a run left behind. They are normalised, so that noise is in those
    units, and nothing is rounded; a box that is held out is in voxels.
    labels, labels_key: whole numbers of the same shape, one for each object; the net learns affinities from them.
    weight: so many times as many windows come from it as its size would give.
    """

    path: str
    key: str | None = None
    level: int = Field(0, ge=0)
    held_out: str | None = None
    stored: bool = False
    labels: str | None = None
    labels_key: str | None = None
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _consistent(self) -> Data:
        if self.stored and self.labels is not None:
            raise ValueError("labels need voxels, not stored windows; set stored to false, and path to the volume")
        if self.labels is None and self.labels_key is not None:
            raise ValueError("labels_key names an array in labels, which is missing; give labels")
        return self


class Degrade(Section):
    """How the net's input is made from the truth: what the net is to undo; the net's scale is the factor.

    bin: the mean of the voxels. subsample: one of them. gaussian: blurred along each axis that is made coarser, by a
    full width at half maximum of the factor, then one of them. none: as they are.
    `noise` is the largest standard deviation of white noise, in units of the volume, and `blur` that of a Gaussian
    before it, in voxels of the input; both are drawn anew for each window.
    `uneven`: the contrast of each slice of the input is multiplied by a number, which is 1 by up to so much either way.
    `missing` is the chance of each slice to be 0 throughout, as one that was lost.
    `whole` rounds the input as an integer volume would.
    """

    kind: Literal["none", "bin", "subsample", "gaussian"] = "none"
    noise: float = Field(0.0, ge=0, allow_inf_nan=False)
    blur: float = Field(0.0, ge=0, allow_inf_nan=False)
    uneven: float = Field(0.0, ge=0, lt=1)
    missing: float = Field(0.0, ge=0, lt=1)
    whole: bool = True


class Samples(Section):
    """The windows that a step learns from: `shape` in voxels of the net's input, all axes (z, y, x).

    margin: voxels of the input at each face that the loss leaves out, where the net sees the window's end.
    flips: axes that are reversed for every other window, at random; swap: y and x are exchanged likewise.
    gain, offset: contrast is multiplied by a number between gain[0] and gain[1], and brightness raised by up to
    `offset` either way, in normalised units.
    stay: so many windows come from the same neighbourhood, of twice the window along each axis.
    """

    shape: Sizes = (32, 64, 64)
    margin: Margin = (0, 0, 0)
    flips: tuple[Literal["z", "y", "x"], ...] = ("z", "y", "x")
    swap: bool = True
    gain: tuple[float, float] = (1.0, 1.0)
    offset: float = Field(0.0, ge=0)
    stay: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Samples:
        for axis, size, margin in zip("zyx", self.shape, self.margin, strict=True):
            if 2 * margin >= size:
                raise ValueError(f"margin {margin} leaves nothing of shape {size} on axis {axis}; give less")
        if self.swap and self.shape[1] != self.shape[2]:
            raise ValueError(f"swap needs as many voxels on y as on x, not {self.shape[1:]}; set swap to false")
        if not 0 < self.gain[0] <= self.gain[1]:
            raise ValueError(f"gain {self.gain} must ascend and be above 0")
        return self


class Loss(Section):
    """What is made small: each a weight of a mean over the window; 0 leaves it out.

    l1, l2: absolute and squared error. charbonnier: the root of the squared error plus 1e-6.
    gradient: absolute error of the differences between neighbours, along each axis.
    consistency: absolute error of the output, degraded again, against the input; without noise.
    """

    l1: float = Field(1.0, ge=0)
    l2: float = Field(0.0, ge=0)
    charbonnier: float = Field(0.0, ge=0)
    gradient: float = Field(0.0, ge=0)
    consistency: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _some(self) -> Loss:
        if not any(self.model_dump().values()):
            raise ValueError("every weight is 0; give one above 0")
        return self


class Affinities(Section):
    """What the net gives where volumes have labels: the chance of each offset that both voxels are of one object.

    offsets: from a voxel to the other (z, y, x), one for each channel; see volpipe/geometry/affinities.py.
    ignore: the label of voxels of which nothing is known. 0 is known: it is of no object.
    bce: weight of the cross-entropy, in which of each channel all that is near counts as much as all that is apart.
    dice: weight of 1 less the Dice coefficient of what is apart, the mean over channels.
    """

    offsets: tuple[Offset, ...] = Field(OFFSETS, min_length=1)
    ignore: int | None = None
    bce: float = Field(1.0, ge=0)
    dice: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _some(self) -> Affinities:
        if not self.bce and not self.dice:
            raise ValueError("bce and dice are 0; give one above 0")
        if (0, 0, 0) in self.offsets:
            raise ValueError("offset (0, 0, 0) leads to the voxel itself; leave it out")
        return self


class Steps(Section):
    """How many steps of which size, and how fast.

    batch: windows per pass; accumulate: passes per step, whose gradients are averaged.
    ranks: tasks that take each step together, each with its own `batch` windows; their gradients are averaged.
    schedule: after `warm_up` steps the rate is constant, or falls to 0 as a cosine, or ("trapezoid") stays and then
    falls in a line over the last `decay` steps, so that `steps` may be changed until then.
    clip: the largest norm of the gradient, 0 for any. ema: the decay of the averaged weights, which are what is saved.
    precision: of convolutions; weights stay float32.
    checkpoint_every, keep: steps between checkpoints, and how many of them stay.
    validate_every: steps between runs over what is held out, whose PSNR is logged (of affinities, how well they tell
    objects apart); 0 for none.
    predict_every: steps between predictions of some held-out windows, kept as tensors; 0 for none.
    """

    steps: int = Field(10_000, ge=1)
    batch: int = Field(1, ge=1)
    accumulate: int = Field(1, ge=1)
    ranks: int = Field(1, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    schedule: Literal["constant", "cosine", "trapezoid"] = "cosine"
    warm_up: int = Field(100, ge=0)
    decay: int = Field(0, ge=0)
    clip: float = Field(0.5, ge=0)
    ema: float = Field(0.999, ge=0, lt=1)
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    channels_last: bool = False
    threads: int = Field(0, ge=0)  # 0: as many as torch takes
    seed: int = Field(0, ge=0)
    checkpoint_every: int = Field(200, ge=1)
    validate_every: int = Field(0, ge=0)
    predict_every: int = Field(0, ge=0)
    keep: int = Field(2, ge=1)

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`, counted from 0."""
        import math

        warm = min(1.0, (step + 1) / max(1, self.warm_up))
        if self.schedule == "cosine":
            warm *= 0.5 * (1 + math.cos(math.pi * step / self.steps))
        elif self.schedule == "trapezoid" and self.decay:
            warm *= min(1.0, (self.steps - step) / self.decay)
        return self.learning_rate * warm


class Adversary(Section):
    """A discriminator that the net learns to fool; none where `weight` is 0.

    weight: of its part in the loss, from step `start` on; before, both nets learn, but the first not from the second.
    features, strides: "patch" judges patches, "literal" the window as one; see models/srgan3d.py.
    conditional: it sees what the net was given as well.
    """

    weight: float = Field(0.0, ge=0)
    start: int = Field(0, ge=0)
    features: int = Field(84, ge=1)
    strides: Literal["patch", "literal"] = "patch"
    conditional: bool = False
    learning_rate: float = Field(1e-4, gt=0)
    betas: tuple[Decay, Decay] = (0.5, 0.99)
    seed: int = Field(0, ge=0)


class TrainRecipe(Section):
    """All that decides the weights, beside the volumes themselves."""

    net: NetChoice
    data: tuple[Data, ...] = Field(min_length=1)
    normalise: Normalise = Normalise()
    degrade: Degrade = Degrade()
    samples: Samples = Samples()
    loss: Loss = Loss()
    affinities: Affinities = Affinities()
    adversary: Adversary = Adversary()
    train: Steps = Steps()

    @property
    def learns_labels(self) -> bool:
        """Whether the truth is labels, not the volumes themselves."""
        return self.data[0].labels is not None

    @property
    def weights(self) -> Loss | Affinities:
        """The weights of the terms of the loss."""
        return self.affinities if self.learns_labels else self.loss

    @model_validator(mode="after")
    def _possible(self) -> TrainRecipe:
        if (self.train.validate_every or self.train.predict_every) and not any(d.held_out for d in self.data):
            raise ValueError("train.validate_every and predict_every need a volume with held_out; give data.held_out")
        if self.adversary.weight and self.train.precision == "float16":
            raise ValueError("adversary needs train.precision float32 or bfloat16, not float16")
        if self.loss.consistency and self.degrade.missing:
            raise ValueError("loss.consistency would teach the slices that degrade.missing takes away; leave one out")
        return self

    @model_validator(mode="after")
    def _of_one_kind(self) -> TrainRecipe:
        bare = [data.path for data in self.data if data.labels is None]
        if 0 < len(bare) < len(self.data):
            raise ValueError(f"data.labels is given for some volumes, not for {bare[0]}; give it for all or for none")
        if bare and self.affinities != Affinities():
            raise ValueError("affinities are learnt from labels; give data.labels")
        if not bare and self.loss != Loss():
            raise ValueError("loss is for images; of labels, affinities.bce and affinities.dice are the weights")
        if not bare and self.adversary.weight:
            raise ValueError("adversary is for images; leave it out, or data.labels")
        return self

    def check_net(self, out_channels: int, scale: Sizes, intensity: str) -> None:
        """Refuse a net that does not give what is learnt from labels: a chance for each offset, on the same grid.

        Raises:
            RecipeError: with what the net gives, and what it should.
        """
        num_offsets = len(self.affinities.offsets)
        if self.learns_labels and out_channels != num_offsets:
            raise RecipeError(
                f"net {self.net.name} gives {out_channels} channels, affinities.offsets are {num_offsets}; set the "
                f"net's out_channels to {num_offsets}, or give other offsets"
            )
        if self.learns_labels and scale != (1, 1, 1):
            raise RecipeError(f"net {self.net.name} has scale {scale}, labels are learnt at scale 1; choose another")
        if self.learns_labels and intensity != "unit":
            raise RecipeError(
                f"net {self.net.name} gives intensity {intensity!r}, affinities are chances from 0 to 1; give it a "
                'sigmoid at its end, such as net.options.output = "sigmoid", or net.intensity = "unit" if it has one'
            )


def load_training(path: Path | None, settings: Sequence[str] = ()) -> TrainRecipe:
    """Return the training recipe in the TOML file at `path` with ``key=value`` settings on top.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or a value that does not fit; the message names it.
    """
    tree = load_tree(path, settings)
    return typed(TrainRecipe, {key: tree[key] for key in tree if key not in VARIED}, path, settings)


def check_same(old: TrainRecipe, new: TrainRecipe, step: int) -> None:
    """Refuse to go on from `step` of a training by `old` with `new`, where they would have made other weights by then.

    Raises:
        RecipeError: with the keys that differ.
    """
    changed = [line for line in differences(old, new) if line.split(":")[0] not in {f"train.{key}" for key in NEUTRAL}]
    if old.train.ranks * old.train.batch == new.train.ranks * new.train.batch:  # the same windows in each step
        changed = [line for line in changed if line.split(":")[0] not in ("train.ranks", "train.batch")]
    ends = [(recipe.train.steps, recipe.train.decay) for recipe in (old, new)]
    if step > new.train.steps:
        changed.append(f"train.steps: {ends[0][0]} -> {ends[1][0]}, and {step} are taken already")
    elif ends[0] != ends[1] and not all(_is_open(recipe.train, step) for recipe in (old, new)):
        changed.append(f"train.steps and decay: {ends[0]} -> {ends[1]}, on which the rate depended already")
    if changed:
        raise RecipeError(
            f"the training at step {step} has another recipe ({'; '.join(changed)}); restore it to go on, choose "
            "another --out, or use --fresh to start over"
        )


def _is_open(steps: Steps, step: int) -> bool:
    """Return whether the rates until `step` would be the same with more steps."""
    if steps.schedule == "cosine":
        return step == 0
    return step <= steps.steps - (steps.decay if steps.schedule == "trapezoid" else 0)
