"""The recipe of a segmentation: the meaning of its input's voxels, and how they become objects; TOML, typed.

Not here: whether it fits a volume (segmentation.plan), or the recipe of a run (inference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from volpipe.geometry.affinities import OFFSETS, Offset
from volpipe.recipes.inference import ArrayInput, Auto, Channel
from volpipe.recipes.toml import Section, Sizes, load_tree, typed
from volpipe.volumes.reader import View

NEAREST: tuple[Offset, ...] = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))
Share = Annotated[float, Field(ge=0, le=1)]
Passes = tuple[Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)]]


class SegmentInput(ArrayInput):
    """The input: probabilities from 0 to 1, or unsigned integers from 0 to their type's maximum.

    kind: "affinities", one channel per offset, in the order of `offsets`. Or one `channel` that is high inside objects,
    "foreground", or between them, "membrane".
    """

    kind: Literal["affinities", "foreground", "membrane"] = "affinities"
    channel: Channel = 0
    offsets: tuple[Offset, ...] = OFFSETS

    @property
    def view(self) -> View:
        """The view of the input array: all channels of affinities, else `channel`."""
        return replace(super().view, channel=None if self.kind == "affinities" else self.channel)

    @model_validator(mode="after")
    def _check_offsets(self) -> SegmentInput:
        if self.kind == "affinities" and self.offsets[:3] != NEAREST:
            raise ValueError(f"offsets must begin with those to the nearest voxels, {NEAREST}")
        if self.kind == "affinities" and not all(any(offset) for offset in self.offsets):
            raise ValueError("offset (0, 0, 0) leads nowhere; leave it out")
        return self


class Objects(Section):
    """How voxels become objects.

    components: joins neighbours whose affinity is at least `threshold`; of one channel, neighbours that both reach it
    (fall to 1 - threshold, of a membrane).
    watershed: steepest ascent on the mean nearest affinity, after `smooth` passes of a binomial filter per axis
    (z, y, x), over the strongest affinity. Voxels of one peak are a supervoxel. Supervoxels are agglomerated, the
    strongest edge first. "mean": while the mean affinity of two is at least `threshold`. "mutex": affinities above
    `threshold` join, affinities at farther offsets below `far_threshold` forbid.
    background: voxels with a lower mean nearest affinity get no label.
    min_voxels: smaller objects get no label.
    """

    method: Literal["components", "watershed"] = "watershed"
    threshold: Share = 0.3
    background: Share = 0.0
    min_voxels: int = Field(0, ge=0)
    smooth: Passes = (1, 1, 1)
    agglomerate: Literal["mean", "mutex"] = "mean"
    far_threshold: Share = 0.2


class SegmentOutput(Section):
    """The output: sizes in voxels (z, y, x). A block is the work of one task, and one shard.

    format: "precomputed" is Neuroglancer's own, whose codec is compressed_segmentation; `codec` is of OME-Zarr.
    levels: number of coarser levels beside level 0, as of a run.
    graph_gib: memory of the one task that holds the graph of all fragments.
    """

    format: Literal["ome-zarr-0.5", "precomputed"] = "ome-zarr-0.5"
    block: Sizes | Auto = "auto"
    chunk: Sizes | Auto = "auto"
    codec: Literal["zstd", "gzip", "raw"] = "zstd"
    codec_level: int = Field(1, ge=0, le=22)
    levels: Annotated[int, Field(ge=0)] | Auto = "auto"
    graph_gib: float = Field(4.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_codec(self) -> SegmentOutput:
        if self.format == "precomputed" and self.codec != "zstd":
            raise ValueError(f"codec {self.codec} is for ome-zarr-0.5; precomputed labels have one codec: leave it out")
        return self


class SegmentRecipe(Section):
    """A segmentation's input, objects and output."""

    input: SegmentInput = SegmentInput()
    objects: Objects = Objects()
    output: SegmentOutput = SegmentOutput()

    @model_validator(mode="after")
    def _check_far_offsets(self) -> SegmentRecipe:
        is_far = self.input.kind == "affinities" and len(self.input.offsets) > len(NEAREST)
        if self.objects.method == "watershed" and self.objects.agglomerate == "mutex" and not is_far:
            raise ValueError("agglomerate mutex needs affinities to farther voxels; use mean")
        return self


def load_segmentation(path: Path | None, settings: Sequence[str] = ()) -> SegmentRecipe:
    """Return the recipe in the TOML file at `path` with ``key=value`` settings on top; without a path, the defaults.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or an invalid value; the message names it.
    """
    return typed(SegmentRecipe, load_tree(path, settings), path, settings)
