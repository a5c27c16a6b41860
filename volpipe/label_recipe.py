"""The recipe of a labelling: what the voxels that are read say, and how objects are made of them; TOML, typed.

Not here: whether it fits a volume (label_plan), or the recipe of a run (recipe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from volpipe.access import View
from volpipe.affinities import OFFSETS, Offset
from volpipe.recipe import ArrayInput, Auto, Channel, Section, load_tree, typed

NEAREST: tuple[Offset, ...] = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))
Share = Annotated[float, Field(ge=0, le=1)]
Sizes = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
Passes = tuple[Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)]]


class LabelInput(ArrayInput):
    """What is read: chances that voxels belong together, 0 to 1, or whole numbers from 0 to their type's greatest.

    kind: "affinities", of each voxel to the one at an offset, a channel each, in the order of `offsets`. Or one
    `channel` that is high inside objects, "foreground", or between them, "membrane".
    """

    kind: Literal["affinities", "foreground", "membrane"] = "affinities"
    channel: Channel = 0
    offsets: tuple[Offset, ...] = OFFSETS

    @property
    def view(self) -> View:
        """The view of the array that is read: of affinities all channels."""
        return replace(super().view, channel=None if self.kind == "affinities" else self.channel)

    @model_validator(mode="after")
    def _nearest(self) -> LabelInput:
        if self.kind == "affinities" and self.offsets[:3] != NEAREST:
            raise ValueError(f"offsets must begin with those to the nearest voxels, {NEAREST}")
        if self.kind == "affinities" and not all(any(offset) for offset in self.offsets):
            raise ValueError("offset (0, 0, 0) leads nowhere; leave it out")
        return self


class Objects(Section):
    """How objects are made.

    components: voxels whose nearest affinity reaches `threshold` are joined; of one channel, neighbours that both reach
    it (fall to 1 - threshold, of a membrane).
    watershed: a voxel goes with the neighbour to which its affinity is strongest, of those whose mean nearest affinity
    is higher, after `smooth` passes of a binomial filter per axis (z, y, x). Where these walks meet is a fragment;
    fragments are joined, the surest first. "mean": while the mean affinity between two reaches `threshold`.
    "mutex": affinities above `threshold` join, farther ones below `far_threshold` forbid it.
    background: voxels whose mean nearest affinity is below it get no label.
    min_voxels: smaller objects get none.
    """

    method: Literal["components", "watershed"] = "watershed"
    threshold: Share = 0.3
    background: Share = 0.0
    min_voxels: int = Field(0, ge=0)
    smooth: Passes = (1, 1, 1)
    agglomerate: Literal["mean", "mutex"] = "mean"
    far_threshold: Share = 0.2


class LabelOutput(Section):
    """What is written: sizes in voxels (z, y, x). A block is done by one task and is one shard of the output.

    levels: how many coarser ones there are beside level 0, as of a run.
    graph_gib: memory that the table of all fragments and of what lies between them may take, in one task.
    """

    block: Sizes | Auto = "auto"
    chunk: Sizes | Auto = "auto"
    codec: Literal["zstd", "gzip", "raw"] = "zstd"
    codec_level: int = Field(1, ge=0, le=22)
    levels: Annotated[int, Field(ge=0)] | Auto = "auto"
    graph_gib: float = Field(4.0, gt=0, allow_inf_nan=False)


class LabelRecipe(Section):
    """All that decides which voxel gets which label, beside the volume; and how labels are stored."""

    input: LabelInput = LabelInput()
    objects: Objects = Objects()
    output: LabelOutput = LabelOutput()

    @model_validator(mode="after")
    def _far(self) -> LabelRecipe:
        is_far = self.input.kind == "affinities" and len(self.input.offsets) > len(NEAREST)
        if self.objects.method == "watershed" and self.objects.agglomerate == "mutex" and not is_far:
            raise ValueError("agglomerate mutex needs affinities to farther voxels; use mean")
        return self


def load_labelling(path: Path | None, settings: Sequence[str] = ()) -> LabelRecipe:
    """Return the recipe in the TOML file at `path` with ``key=value`` settings on top; without a path, the defaults.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or a value that does not fit; the message names it.
    """
    return typed(LabelRecipe, load_tree(path, settings), path, settings)
