"""The flow: a recipe of several stages, each reading what an earlier one makes, and what stages of some kinds say.

Not here: reading the file (workflow.recipe), whether the stages fit their volumes (plan), or running them (execute).

    [[stage]]                      [[stage]]
    name = "restore"               name = "scores"
    recipe = "superres_z4"         kind = "evaluate"
                                   reference = "truth.n5/raw"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from volpipe.errors import RecipeError, VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.geometry.labels import Ignore
from volpipe.recipes.inference import ArrayInput, Input, Output, Windows
from volpipe.recipes.toml import Section, Sizes, UserPath, load_tree
from volpipe.recipes.training import VARIED, TrainRecipe
from volpipe.resolve import nearest

VOLUME = "volume"  # what a stage reads that reads the command's argument
OF_LABELS = "labels"  # in place of a path of skeletons: they are made of the reference
Tree = dict[str, Any]  # Any: TOML values, checked by `typed`


class Comparison(Section):
    """What a stage of kind "evaluate" compares its input with; as the options of `volpipe evaluate`."""

    reference: UserPath | None = None
    """The volume that is compared with; left out where skeletons in files stand in for it. Or a stage of kind "train":
    the labels that it learns from, in the box that it holds out."""
    given: UserPath | None = None
    """The input of the net, from which interpolations are scored beside it."""
    labels: bool = False
    """Compare labels, not grey levels."""
    classes: bool = False
    """Compare classes, whose numbers mean the same in both."""
    skeletons: UserPath = ""
    """Score labels by the skeletons at this path, or "labels" by those of the labels of the reference."""
    roi: str | None = None
    """The box that is compared, `z0:z1,y0:y1,x0:x1` of the reference."""
    margin: Triple = (0, 0, 0)
    """Voxels at each face that are left out (z, y, x)."""
    data_range: float | None = None
    """The distance of the largest grey level from the smallest, for PSNR and SSIM."""
    ignore: Ignore = None
    """Labels of which nothing is known, a number or a list: voxels that have them in the reference are left out.
    Without the key, the numbers by which data sets mean "unknown", as `affinities.ignore` of a training; [] leaves none
    out."""
    any_place: bool = False
    """Compare voxel by voxel although voxel sizes or origins say that the two lie elsewhere."""

    @model_validator(mode="after")
    def _fits(self) -> Comparison:
        assert self.kind
        return self

    @property
    def kind(self) -> str:
        """What is scored: "image", "labels", "classes" or "skeletons"."""
        return kind_of(self.reference, labels=self.labels, classes=self.classes, skeletons=self.skeletons)


def kind_of(reference: str | None, *, labels: bool, classes: bool, skeletons: str) -> str:
    """Return what is scored against a reference, by the keys or options that say so.

    Raises:
        RecipeError: several do, or there is no reference, or one too many.
    """
    chosen = {"labels": labels, "classes": classes, "skeletons": bool(skeletons)}
    kinds = [kind for kind, is_chosen in chosen.items() if is_chosen] or ["image"]
    if len(kinds) > 1:
        raise RecipeError(f"{' and '.join(kinds)} are of different scores; give one of them")
    is_in_files = bool(skeletons) and skeletons != OF_LABELS
    if is_in_files and reference is not None:
        raise RecipeError(
            f"skeletons at {skeletons} stand in for a reference; leave {reference} out, or give the path {OF_LABELS}, "
            "by which skeletons are made of it"
        )
    if reference is None and not is_in_files:
        raise RecipeError("reference is missing; give a text, or skeletons in files")
    return kinds[0]


class OutputComparison(Section):
    """What a stage of kind "compare" holds its input against; as the options of `volpipe compare`."""

    other: UserPath
    """The volume that is compared with: that of another stage, by its name, or a path."""
    labels: bool = False
    """Compare labels as objects, whose numbers mean nothing. Whole numbers of more than 16 bits are labels anyway,
    unless `data_range` is given."""
    roi: str | None = None
    """The box that is compared, `z0:z1,y0:y1,x0:x1`."""
    data_range: float | None = None
    """The distance of the largest grey level from the smallest, for PSNR."""
    any_place: bool = False
    """Compare voxel by voxel although voxel sizes or origins say that the two lie elsewhere."""


class Conversion(Section):
    """What a stage of kind "convert" makes of its input: another level, box, channel, type or format, or larger voxels.

    Its sections are those of a run. Integers stay what they are, labels of 64 bits too; floats become
    float32.
    """

    bin: Sizes = (1, 1, 1)
    """Voxels (z, y, x) of the input whose mean is one of the output, for grey levels. Where it does not divide an axis,
    the last voxels are means over the mirrored end."""
    input: Input = Input()
    """Which array, level, channel and box (`roi`) is read, as of a run."""
    windows: Windows = Windows()
    """How large blocks are, as of a run; the result does not depend on it."""
    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the input; others are rounded and clipped."""


class UserFunction(Section):
    """A Python function over blocks of numpy."""

    function: UserPath
    """`file.py:function` or `module:function`; the code runs with your rights, on the workers."""
    halo: Triple = (0, 0, 0)
    """How far (z, y, x) the function looks; a halo that does not fit it is noticed over random voxels, and refused."""
    options: dict[str, Any] = Field(default_factory=dict)  # Any: whatever the function takes
    """Keyword arguments of the function."""


class BlockFunction(UserFunction):
    """What a stage of kind "function" does: a Python function over blocks of numpy with a halo.

    It gets a block (z, y, x), or (c, z, y, x) of several channels, as it is stored, with the halo around it, and
    returns as many voxels, of as many channels as it likes. The halo is cut off then. Beyond the faces of the volume a
    block shows it mirrored.
    """

    input: Input = Input()
    """Which array, level, channel and box (`roi`) is read, as of a run."""
    windows: Windows = Windows()
    """How large blocks are, as of a run; the result does not depend on it."""
    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the result; another one must hold all of its values."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]  # part of paths, and of CSV


class Measuring(UserFunction):
    """What a stage of kind "measure" does: a Python function gives rows of each block, of which a table is made.

    It gets a block (z, y, x), or (c, z, y, x) of several channels, as it is stored, with the halo around it, that of
    `other` after it, and as `start` the place (z, y, x) of the first voxel within the halo. It returns arrays of one
    length by the names of columns: those of `by` and those of `combine`. Each voxel is in one block. Beyond the faces
    of the volume its outermost voxels are repeated.
    """

    combine: dict[Name, Literal["sum", "min", "max"]]
    """How rows of several blocks become one, by the names of columns: "sum", "min" or "max"."""
    by: tuple[Name, ...] = ("label",)
    """Columns that tell what a row is of, whole numbers: rows that have the same there become one."""
    ratio: dict[Name, tuple[Name, Name]] = Field(default_factory=dict)
    """Further columns, each of two of `combine`, the first divided by the second. Empty where that is 0."""
    other: UserPath | None = None
    """A second volume, of the same place: that of another stage, by its name, "volume", or a path."""
    roi: str | None = None
    """The box that is measured, `z0:z1,y0:y1,x0:x1`."""
    block: Sizes = (128, 128, 128)
    """Voxels (z, y, x) of a block; the table does not depend on it, but for the rounding of floats by the function."""
    any_place: bool = False
    """Pair both volumes voxel by voxel although voxel sizes or origins say that they lie elsewhere."""

    @model_validator(mode="after")
    def _named_once(self) -> Measuring:
        if not self.by:
            raise ValueError("by is empty; name the columns that tell what a row is of")
        for name, times in Counter([*self.by, *self.combine, *self.ratio]).items():
            if times > 1:
                raise ValueError(f"{times} columns are named {name}, in by, combine and ratio; rename one")
        for part in (part for parts in self.ratio.values() for part in parts if part not in self.combine):
            raise ValueError(f"ratio: combine has no column {part}{nearest(part, self.combine)}")
        return self


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


Makes = Literal["volume", "weights", "scores"]


@dataclass(frozen=True)
class Link:
    """A key, beside `input`, whose `value` may be an earlier stage that `makes` what is needed: NAME, or NAME/ARRAY.

    The stage begins when that one is complete. A file of the same name is reached as ./NAME, unless the value
    `is_stage` for sure.
    """

    key: str
    value: str
    makes: Makes = "volume"
    is_stage: bool = False

    @property
    def stage(self) -> str:
        return self.value.partition("/")[0]


@dataclass(frozen=True)
class FlowStage:
    """One stage: `reads` is the name of an earlier one, or "volume"; `choice` is what to do, checked by its kind.

    `array` is what it reads of that stage, where it makes several; `beside` has the other stages that it needs.
    `for_net` returns the choice of a run whose net the first of these trains, by the recipe of a training of it.
    """

    name: str
    kind: str
    reads: str
    choice: Section
    array: str = ""
    beside: tuple[str, ...] = ()
    for_net: Callable[[TrainRecipe], Section] | None = None

    @property
    def input(self) -> ArrayInput | None:
        """The section that says which array is read; None for a kind that has none."""
        return getattr(self.choice, "input", None)


@dataclass(frozen=True)
class Flow:
    """The stages of the file `source`, each after the one that it reads."""

    source: str
    stages: tuple[FlowStage, ...]


def has_stages(path: Path) -> bool:
    """Return whether the TOML file at `path` is a recipe of several stages.

    Raises:
        RecipeError: there is no such file, or it is no TOML.
    """
    return "stage" in load_tree(path)


@contextmanager
def named(stage: str) -> Iterator[None]:
    """Begin what our errors say with the name of the stage that they are about."""
    try:
        yield
    except VolpipeError as error:
        error.args = (f"stage {stage}: {error}",)
        raise
