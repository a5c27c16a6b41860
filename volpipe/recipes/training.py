"""The recipe of a training: which net, from which volumes, by which steps; as the user writes it in TOML, typed.

Not here: what a step does (training.loop), or the recipe of a run (inference), whose net and normalisation it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from volpipe.errors import RecipeError
from volpipe.geometry.affinities import OFFSETS, Offset
from volpipe.geometry.labels import Ignore
from volpipe.recipes.inference import Auto, NetChoice, Normalise, Output
from volpipe.recipes.toml import Section, Sizes, UserPath, differences, load_tree, typed
from volpipe.units import count

CHECKPOINTS, LOSSES, EVENTS = "checkpoints", "losses.jsonl", "events"  # in a training's folder
WEIGHTS, RUN_RECIPE = "weights.safetensors", "run.toml"
MOST_CLASSES = 127  # as a target of 8 bits has them
TENSORS, TRUTH_KEY = "tensors.n5", "tensors/truth"  # predictions of held-out windows, and what they should be
STOP = "stop"  # a file that asks a training to end at the next step where it validates or writes a checkpoint
VARIED = ("sweep", "tune")  # tables of a recipe that say what to vary; one training has no use for them
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean
LabelSet = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, int) else value),
    Field(min_length=1),
]
Margin = tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
NEUTRAL = (  # may change on the way
    "steps", "decay", "keep", "checkpoint_every", "validate_every", "predict_every", "continue_steps",
)  # fmt: skip


class Data(Section):
    """A volume to learn from; each begins as `[[data]]`."""

    path: UserPath
    """The volume, or the window tensors that a run left behind where stored is true."""
    key: str | None = None
    """The array or group that is read, where the container has several."""
    level: int = Field(0, ge=0)
    """Level of a multiscale group; 0 is the finest."""
    held_out: str | None = None
    """A box `z0:z1,y0:y1,x0:x1` that no training window touches, in voxels, as lengths or as shares (`:,:,75%:` is the
    last quarter along x); of stored windows in voxels. Beside labels of a part, it is a box of the labels. Give a
    volume twice to hold out two boxes: windows of both entries keep out of both."""
    test: str | None = None
    """A box, as `held_out`, by which nothing is chosen: no window touches it, and it shares no voxel with a box that is
    held out. The net that a training, a sweep or a search ends with is scored there once, at the end."""
    box: str | None = None
    """The box that windows come from, as `held_out`; without it, all of the volume, or where its labels are."""
    stored: bool = False
    """path leads to window tensors. They are normalised, so noise is in those units, and nothing is rounded."""
    labels: UserPath | None = None
    """A volume of whole numbers, one for each object; the net learns affinities from them. Of another shape than the
    volume, they are paired with a part of it by voxel sizes and origins."""
    labels_key: str | None = None
    """The array in labels, where the container has several."""
    any_place: bool = False
    """Pair labels and volume, of one shape, voxel by voxel although their places say that they lie elsewhere."""
    annotated: tuple[str, ...] = ()
    """Names of the classes that these labels annotate, where they leave others out: these give no loss and no score
    there. A voxel of label 0 may then be of any class that is left out. Without the key, all of `classes.names`."""
    weight: float = Field(1.0, gt=0)
    """So many times as many windows come from this volume as its size would give."""
    incomplete: bool = False
    """Learn from outputs of volpipe, labels as well, that are not complete: what is not written yet is zeros."""

    @model_validator(mode="after")
    def _consistent(self) -> Data:
        if self.stored and self.labels is not None:
            raise ValueError("labels need voxels, not stored windows; set stored to false, and path to the volume")
        if self.stored and self.test is not None:
            raise ValueError("test needs voxels, not stored windows; give the volume in a [[data]] of its own")
        if self.stored and self.box is not None:
            raise ValueError("box needs voxels, not stored windows; store those of that box, or leave it out")
        if self.labels is None and self.labels_key is not None:
            raise ValueError("labels_key names an array in labels, which is missing; give labels")
        if self.labels is None and self.annotated:
            raise ValueError("annotated names classes of labels, which are missing; give labels")
        return self


class Degrade(Section):
    """How the net's input is made from the truth. The scale of the net is the factor."""

    kind: Literal["none", "bin", "subsample", "gaussian"] = "none"
    """bin: the mean of the voxels. subsample: one of them. gaussian: blurred along each axis that is made coarser, by a
    full width at half maximum of the factor, then one of them. none: as they are."""
    noise: float = Field(0.0, ge=0)
    """The largest standard deviation of white noise, in grey levels of the volume; drawn anew for each window."""
    blur: float = Field(0.0, ge=0)
    """The largest standard deviation of a Gaussian before the noise, in voxels of the input; drawn anew for each
    window."""
    uneven: float = Field(0.0, ge=0, lt=1)
    """The contrast of each slice of the input is multiplied by a number that differs from 1 by up to so much."""
    missing: float = Field(0.0, ge=0, lt=1)
    """The chance of each slice of the input to be 0 throughout, as one that was lost."""
    defocused: float = Field(0.0, ge=0, lt=1)
    """The chance of each slice of the input to be blurred along y and x, by a Gaussian of 0.5 to 2 voxels."""
    cut_out: int = Field(0, ge=0)
    """So many boxes of the input, up to a third as long as the window, show its mean alone."""
    whole: bool = True
    """Round the input as an integer volume would."""


class Samples(Section):
    """The windows that a step learns from, in voxels of the net's input (z, y, x)."""

    shape: Sizes = (32, 64, 64)
    """Voxels of a window (z, y, x)."""
    margin: Margin = (0, 0, 0)
    """Voxels at each face that the loss leaves out (z, y, x), where the net sees the window's end."""
    flips: tuple[Literal["z", "y", "x"], ...] = ("z", "y", "x")
    """Axes that are reversed for every other window, at random."""
    swap: bool = True
    """Exchange y and x for every other window, at random."""
    gain: tuple[float, float] = (1.0, 1.0)
    """Contrast is multiplied by a number between these two."""
    offset: float = Field(0.0, ge=0)
    """Brightness is raised or lowered by up to so much, in normalised units."""
    elastic: float = Field(0.0, ge=0)
    """Standard deviation, in voxels, by which places 16 voxels apart are moved; between them smoothly. Truth and labels
    move as well."""
    misaligned: int = Field(0, ge=0)
    """In every other window a slice, or all slices from one on, is moved along y and x by up to so many voxels. Truth
    and labels move as well."""
    stay: int = Field(1, ge=1)
    """So many windows in turn come from the same neighbourhood, of twice the window along each axis."""
    labelled: Annotated[float, Field(ge=0, le=1)] | Auto = "auto"
    """Share of the windows that are drawn about a voxel whose label is known, each such voxel as often; the others lie
    anywhere. As nnU-Net's oversample_foreground_percent, for labels of a few voxels such as scribbles. auto: 1 where
    fewer than 5 % of the labels in some boxes are known, else 0."""

    @model_validator(mode="after")
    def _check_values(self) -> Samples:
        for axis, size, margin in zip("zyx", self.shape, self.margin, strict=True):
            if 2 * margin >= size:
                raise ValueError(f"margin {margin} leaves nothing of shape {size} on axis {axis}; give less")
        if self.swap and self.shape[1] != self.shape[2]:
            raise ValueError(f"swap needs as many voxels on y as on x, not {self.shape[1:]}; set swap to false")
        if len(set(self.flips)) < len(self.flips):
            raise ValueError(f"flips {list(self.flips)} name an axis twice; name it once")
        if not 0 < self.gain[0] <= self.gain[1]:
            raise ValueError(f"gain {self.gain} must ascend and be above 0")
        return self


class Loss(Section):
    """What is made small, for images: each key is a weight of a mean over the window; 0 leaves it out."""

    l1: float = Field(1.0, ge=0)
    """Weight of the absolute error."""
    l2: float = Field(0.0, ge=0)
    """Weight of the squared error."""
    charbonnier: float = Field(0.0, ge=0)
    """Weight of the root of the squared error plus 1e-6."""
    gradient: float = Field(0.0, ge=0)
    """Weight of the absolute error of the differences between neighbours, along each axis."""
    consistency: float = Field(0.0, ge=0)
    """Weight of the absolute error of the output, degraded again without noise, against the input."""

    @model_validator(mode="after")
    def _some(self) -> Loss:
        if not any(self.model_dump().values()):
            raise ValueError("every weight is 0; give one above 0")
        return self


class Affinities(Section):
    """What the net gives where volumes have labels: the chance of each offset that both voxels are of one object."""

    offsets: tuple[Offset, ...] = Field(OFFSETS, min_length=1)
    """The voxel (z, y, x) that each channel leads to; see volpipe/geometry/affinities.py."""
    ignore: Ignore = None
    """Labels of voxels of which nothing is known: a number or a list. 0 is known: it is of no object. Without the key,
    the numbers by which data sets mean "unknown": -1 to -3, and of unsigned labels of 32 and 64 bits the last three,
    0xfffffffffffffffd to 0xffffffffffffffff; [] ignores none."""
    bce: float = Field(1.0, ge=0)
    """Weight of the cross-entropy, in which pairs of one object and pairs of two count as much, in each channel."""
    dice: float = Field(0.0, ge=0)
    """Weight of 1 less the Dice coefficient of pairs of two objects, the mean over channels."""

    @model_validator(mode="after")
    def _some(self) -> Affinities:
        if not self.bce and not self.dice:
            raise ValueError("bce and dice are 0; give one above 0")
        if (0, 0, 0) in self.offsets:
            raise ValueError("offset (0, 0, 0) leads to the voxel itself; leave it out")
        return self


class Classes(Section):
    """What the net gives where the labels are classes, such as mitochondrion, and not numbers of objects."""

    names: tuple[str, ...] = ()
    """A name for each class, and the net has a channel for each; the first is what is of no other class."""
    labels: tuple[LabelSet, ...] = ()
    """The label of each class, or a list of several; without it, label k is of class k, the first one of label 0."""
    regions: bool = False
    """Classes may overlap, as nnU-Net's regions: a voxel is in all classes that list its label, label 0 in none, and
    each channel is learnt by itself, by a sigmoid and binary cross-entropy."""
    regions_class_order: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Of regions: the label that a run writes for each, later ones over earlier ones, as in nnU-Net's dataset.json.
    Without it, a run writes the chance of each."""
    ignore: Ignore = None
    """Labels of voxels of which nothing is known: as `affinities.ignore`. 0 where scribbles leave most voxels open."""
    balance: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Weight of the voxels of each class in the cross-entropy; by default all weigh the same. Of regions: of those
    within."""
    cross_entropy: float = Field(1.0, ge=0)
    """Weight of the cross-entropy."""
    dice: float = Field(1.0, ge=0)
    """Weight of 1 less the Dice coefficient, the mean over classes."""

    @model_validator(mode="after")
    def _check_values(self) -> Classes:
        least = 1 if self.regions else 2
        if self.names and not least <= len(set(self.names)) == len(self.names) <= MOST_CLASSES:
            what = "" if self.regions or self.labels else ", the first for label 0"
            raise ValueError(f"names {self.names}: give {least} to {MOST_CLASSES} different ones{what}")
        if self.labels and len(self.labels) != len(self.names):
            raise ValueError(f"labels are of {count(len(self.labels), 'class')}, names are {len(self.names)}")
        listed = [label for labels in self.labels for label in labels]
        if (
            not self.regions
            and (twice := next((label for label in listed if listed.count(label) > 1), None)) is not None
        ):
            raise ValueError(f"labels: {twice} is of two classes; set regions = true if classes overlap")
        ignored = () if self.ignore is None else (self.ignore,) if isinstance(self.ignore, int) else self.ignore
        if both := set(listed) & set(ignored):
            raise ValueError(f"ignore names label {min(both)}, which is in labels too; take it out of one")
        if self.regions and self.names and not self.labels:
            raise ValueError("regions need labels, a list for each of names; give labels")
        if self.regions_class_order and not self.regions:
            raise ValueError("regions_class_order is for classes that overlap; set regions = true")
        if self.regions_class_order and len(self.regions_class_order) != len(self.names):
            raise ValueError(
                f"regions_class_order has {len(self.regions_class_order)} labels for {len(self.names)} names"
            )
        if self.balance and len(self.balance) != len(self.names):
            raise ValueError(f"balance has {len(self.balance)} weights for {count(len(self.names), 'class')}")
        if not self.cross_entropy and not self.dice:
            raise ValueError("cross_entropy and dice are 0; give one above 0")
        return self

    @property
    def label_sets(self) -> tuple[tuple[int, ...], ...]:
        """The labels of each class."""
        return self.labels or tuple((number,) for number in range(len(self.names)))

    @property
    def names_by_label(self) -> tuple[str, ...]:
        """The names of labels 0, 1, … of classes of which a voxel has one; the number of a label that is in none."""
        if self.regions:
            return ()
        names = {label: name for name, labels in zip(self.names, self.label_sets, strict=True) for label in labels}
        return tuple(names.get(label, str(label)) for label in range(1 + max(names, default=-1)))

    def left_out(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the labels of the classes that labels which annotate `names` leave out."""
        pairs = zip(self.label_sets, self.are_annotated(names), strict=True)
        return tuple(label for labels, is_annotated in pairs if not is_annotated for label in labels)

    def are_annotated(self, names: Sequence[str]) -> tuple[bool, ...]:
        """Return whether labels that annotate the classes `names`, all without any, annotate each class.

        Of classes of which a voxel has one, the first is what is left.
        """
        return tuple(
            not names or name in names or (number == 0 and not self.regions) for number, name in enumerate(self.names)
        )


class Steps(Section):
    """How many steps of which size, and how fast."""

    steps: int = Field(10_000, ge=1)
    """Number of steps."""
    batch: int = Field(1, ge=1)
    """Windows of one pass, of each rank."""
    accumulate: int = Field(1, ge=1)
    """Passes of one step, whose gradients are averaged."""
    ranks: int = Field(1, ge=1)
    """Tasks that take each step together, each with windows of its own; their gradients are averaged."""
    learning_rate: float = Field(1e-3, gt=0)
    """The learning rate after warm_up."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decays of Adam's running means."""
    schedule: Literal["constant", "cosine", "trapezoid"] = "cosine"
    """After warm_up the rate is constant, falls to 0 as a cosine, or (trapezoid) stays and falls in a line over the
    last decay steps."""
    warm_up: int = Field(100, ge=0)
    """Steps over which the rate rises from 0."""
    decay: int = Field(0, ge=0)
    """Steps over which a trapezoid falls; steps may be changed until then."""
    clip: float = Field(0.5, ge=0)
    """The largest norm of the gradient; 0 for any."""
    ema: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights, which are those that are saved."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of convolutions; weights stay float32."""
    channels_last: bool = False
    """Lay tensors out with channels last, which some GPUs compute faster."""
    deterministic: bool = False
    """Let a GPU take convolutions that give the same bits each time, so that a resumed training ends as one that nobody
    interrupted, bit for bit; they are slower. A CPU does so always."""
    threads: int = Field(0, ge=0)  # 0: as many as torch takes
    """Threads of a CPU; 0: as many as torch takes."""
    seed: int = Field(0, ge=0)
    """Of the windows, and of the first weights where the net's code does not seed them (of shipped nets:
    `net.options.seed`)."""
    checkpoint_every: int = Field(200, ge=1)
    """Steps between checkpoints."""
    validate_every: int = Field(0, ge=0)
    """Steps between runs over the held-out boxes, whose scores are logged; 0 for none."""
    predict_every: int = Field(0, ge=0)
    """Steps between predictions of some held-out windows, kept as tensors; 0 for none."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints that stay."""
    continue_steps: int = Field(0, ge=0)
    """Further steps from the newest checkpoint, at least so many, where a volume or labels have changed: of a stage
    with --update, of `volpipe train` by the same command. 0: none, so that a stage is trained anew."""

    def rate(self, step: int, begun: int = 0) -> float:
        """Return the learning rate of `step`, counted from 0; `begun`: where a training went on over other volumes."""
        import math

        warm = min(1.0, (step + 1) / max(1, self.warm_up))
        if self.schedule == "cosine":
            warm *= 0.5 * (1 + math.cos(math.pi * (step - begun) / (self.steps - begun)))
        elif self.schedule == "trapezoid" and self.decay:
            warm *= min(1.0, (self.steps - step) / self.decay)
        return self.learning_rate * warm


class Adversary(Section):
    """A discriminator that the net learns to fool; none where weight is 0."""

    weight: float = Field(0.0, ge=0)
    """Weight of its part in the loss."""
    start: int = Field(0, ge=0)
    """The step from which it has that weight. Before, both nets learn, but the net not from the discriminator."""
    features: int = Field(84, ge=1)
    """Channels of its first layer."""
    strides: Literal["patch", "literal"] = "patch"
    """"patch" judges patches, "literal" the window as one; see models/srgan3d.py."""
    conditional: bool = False
    """It sees the input of the net as well."""
    learning_rate: float = Field(1e-4, gt=0)
    """Its learning rate."""
    betas: tuple[Decay, Decay] = (0.5, 0.99)
    """Decays of its Adam's running means."""
    seed: int = Field(0, ge=0)
    """Of its first weights."""


class TrainRecipe(Section):
    """All that decides the weights, beside the volumes themselves."""

    net: NetChoice
    data: tuple[Data, ...] = Field(min_length=1)
    normalise: Normalise = Normalise()
    degrade: Degrade = Degrade()
    samples: Samples = Samples()
    loss: Loss = Loss()
    affinities: Affinities = Affinities()
    classes: Classes = Classes()
    adversary: Adversary = Adversary()
    train: Steps = Steps()

    @property
    def has_test(self) -> bool:
        """Whether there are boxes that are scored at the end alone."""
        return any(data.test for data in self.data)

    @property
    def learns_labels(self) -> bool:
        """Whether the truth is labels, not the volumes themselves."""
        return self.data[0].labels is not None

    @property
    def learns_classes(self) -> bool:
        """Whether the labels are classes; else they are objects, of which affinities are learnt."""
        return bool(self.classes.names)

    @property
    def ignore(self) -> Ignore:
        """The labels of which nothing is known."""
        return (self.classes if self.learns_classes else self.affinities).ignore

    @property
    def weights(self) -> Loss | Affinities | Classes:
        """The weights of the terms of the loss."""
        return self.classes if self.learns_classes else self.affinities if self.learns_labels else self.loss

    @property
    def output(self) -> Output:
        """The output of a run of the trained net: of images grey levels, also where the net declares no intensity."""
        if self.classes.regions:
            order = self.classes.regions_class_order
            return Output(kind="classes", activation="sigmoid", labels=order) if order else self.scored_output
        if self.learns_classes:
            return Output(kind="classes", labels=tuple(labels[0] for labels in self.classes.labels))
        return Output() if self.learns_labels else Output(intensity="same")

    @property
    def scored_output(self) -> Output:
        """The output by which it is scored: of classes their numbers, of regions the chance of each."""
        if self.classes.regions:
            return Output(activation="sigmoid", intensity="raw")
        return Output(kind="classes") if self.learns_classes else self.output

    @property
    def is_partly_annotated(self) -> bool:
        """Whether some of the labels leave classes out."""
        return any(data.annotated for data in self.data)

    @model_validator(mode="after")
    def _possible(self) -> TrainRecipe:
        has_held_out = any(data.held_out and not data.stored for data in self.data)
        if (self.train.validate_every or self.train.predict_every) and not has_held_out:
            raise ValueError(
                "train.validate_every and predict_every need a volume with held_out; give data.held_out, of voxels, "
                "not of stored windows"
            )
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
        if self.learns_classes and (bare or self.affinities != Affinities()):
            raise ValueError(
                "classes are learnt from labels, and without affinities; give data.labels, or leave one out"
            )
        for data in self.data:
            if unknown := [name for name in data.annotated if name not in self.classes.names]:
                raise ValueError(
                    f"data.annotated of {data.path}: {unknown[0]} is no class; name some of classes.names, "
                    f"{', '.join(self.classes.names) or 'which are missing'}"
                )
        if not self.learns_classes and self.classes != Classes():
            raise ValueError("classes have no names; give classes.names, the first for label 0, or leave classes out")
        if not (self.learns_classes or self.net.offsets in (None, self.affinities.offsets)):
            raise ValueError(
                "net.offsets are not affinities.offsets, which are learnt; leave net.offsets out, or give both alike"
            )
        if not bare and self.loss != Loss():
            raise ValueError("loss is for images; of labels, the weights are in affinities or in classes")
        if not bare and self.adversary.weight:
            raise ValueError("adversary is for images; leave it out, or data.labels")
        return self


def run_sections(recipe: TrainRecipe) -> dict[str, dict[str, Any]]:  # Any: TOML values
    """Return the sections of a recipe of `volpipe run` that follow from the `recipe` of a training, but its weights."""
    net = recipe.net
    if recipe.learns_labels and not recipe.learns_classes and net.offsets is None:
        net = net.model_copy(update={"offsets": recipe.affinities.offsets})
    sections = {"net": net, "normalise": recipe.normalise, "output": recipe.output}
    return {
        name: section.model_dump(mode="json", exclude_defaults=True, exclude={"weights", "weights_key", "untrained"})
        for name, section in sections.items()
    }


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
            f"the training at step {step} has another recipe ({'; '.join(changed)}); take that back to continue, "
            "choose another --out, or use --fresh to start over"
        )


def _is_open(steps: Steps, step: int) -> bool:
    """Return whether the rates until `step` would be the same with more steps."""
    if steps.schedule == "cosine":
        return step == 0
    return step <= steps.steps - (steps.decay if steps.schedule == "trapezoid" else 0)
