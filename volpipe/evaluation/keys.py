"""What stages say in recipes that score a volume, compare two, or measure one.

Not here: what is done by these keys (evaluate, compare, measurements), or the stages (kinds).
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import Field, model_validator

from volpipe.errors import RecipeError
from volpipe.geometry.grid import Triple
from volpipe.geometry.labels import Ignore
from volpipe.recipes.toml import Section, Sizes, UserPath
from volpipe.recipes.workflow import Name, UserFunction
from volpipe.resolve import nearest

OF_LABELS = "labels"  # in place of a path of skeletons: they are made of the reference


class Scoring(Section):
    """What a stage of kind "evaluate" compares its input with; as the options of `volpipe evaluate`."""

    reference: UserPath | None = None
    """The volume that is compared with; left out where skeletons in files stand in for it. Or a stage of kind "train":
    the labels that it learns from, in its test box, or without one in the box that it holds out."""
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
    annotated: tuple[str, ...] = ()
    """Names of the classes that the reference annotates, where it leaves others out: found in the output, these count
    as the first class. Of labels of a training, as `data.annotated` there."""
    any_place: bool = False
    """Compare voxel by voxel although voxel sizes or origins say that the two lie elsewhere."""

    @model_validator(mode="after")
    def _has_one_kind(self) -> Scoring:
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
