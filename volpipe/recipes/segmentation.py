"""The recipe of a segmentation: the meaning of its input's voxels, and how they become objects; TOML, typed.

Not here: whether it fits a volume (segmentation.plan), or the recipe of a run (inference).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from volpipe.geometry.affinities import OFFSETS, Offset
from volpipe.recipes.inference import ArrayInput, Auto, Channel
from volpipe.recipes.toml import Section, Sizes, load_tree, typed
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.volume import View

NEAREST: tuple[Offset, ...] = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))
Share = Annotated[float, Field(ge=0, le=1)]
Passes = tuple[Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)]]


class SegmentInput(ArrayInput):
    """The input: probabilities, which are stored as numbers from 0 to 1 or others."""

    kind: Literal["affinities", "foreground", "membrane"] = "affinities"
    """"affinities": one channel per offset. Or one channel that is high inside objects, "foreground", or between them,
    "membrane"."""
    channel: Channel = 0
    """The channel of a foreground or a membrane: its number from 0, or its name in OME."""
    offsets: tuple[Offset, ...] = OFFSETS
    """For affinities: the voxel (z, y, x) that each channel leads to, the three nearest first."""

    range: tuple[float, float] | None = None
    """The stored values that mean 0 and 1, such as [0, 255]; what is beyond counts as 0 or 1. Without it 0 and 1 of
    floats, 0 and the greatest number of unsigned types; values that a sample shows to mean something else are then
    refused."""

    @property
    def is_affinities(self) -> bool:
        """Whether there is a channel per offset; else the one `channel` is a map of probabilities."""
        return self.kind == "affinities"

    @property
    def is_inverted(self) -> bool:
        """Whether the channel is high between objects, not inside."""
        return self.kind == "membrane"

    @property
    def view(self) -> View:
        """The view of the input array: all channels of affinities, else `channel`."""
        return replace(super().view, channel=None if self.is_affinities else self.channel)

    def ends(self, dtype: np.dtype) -> tuple[float, float]:
        """Return the values of `dtype` that mean 0 and 1."""
        if self.range is not None:
            return self.range
        return 0.0, 1.0 if np.issubdtype(dtype, np.floating) else float(np.iinfo(dtype).max)

    @model_validator(mode="after")
    def _check_range(self) -> SegmentInput:
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise ValueError(f"range {list(self.range)} must ascend: the value that means 0, then that of 1")
        return self

    @model_validator(mode="after")
    def _check_offsets(self) -> SegmentInput:
        if self.is_affinities and self.offsets[:3] != NEAREST:
            raise ValueError(f"offsets must begin with those to the nearest voxels, {NEAREST}")
        if self.is_affinities and not all(any(offset) for offset in self.offsets):
            raise ValueError("offset (0, 0, 0) leads nowhere; leave it out")
        return self


class ObjectRules(Section):
    """How voxels become objects."""

    method: Literal["components", "watershed"] = "watershed"
    """components: joins neighbours whose affinity reaches the threshold. watershed: steepest ascent on the mean nearest
    affinity gives supervoxels, which are agglomerated."""
    threshold: Share = 0.3
    """Affinity from which two are joined, 0 to 1. For a membrane with components, neighbours join where both fall to 1
    - threshold."""
    background: Share = 0.0
    """Voxels with a lower mean nearest affinity get no label."""
    min_voxels: int = Field(0, ge=0)
    """Smaller objects get no label."""
    smooth: Passes = (1, 1, 1)
    """For the watershed: passes of a binomial filter along z, y, x."""
    agglomerate: Literal["mean", "mutex"] = "mean"
    """For the watershed, the strongest edge first. mean: while the mean affinity of two is at least threshold. mutex:
    affinities above threshold join, affinities at farther offsets below far_threshold forbid."""
    far_threshold: Share = 0.2
    """For mutex: affinities at farther offsets below it forbid that two join."""
    small_voxels: int = Field(0, ge=0)
    """For mean: an object of fewer voxels joins a neighbour still while their mean affinity is at least
    small_threshold."""
    small_threshold: Share = 0.1
    """For mean: mean affinity, at most threshold, from which objects of fewer than small_voxels join."""

    @property
    def is_watershed(self) -> bool:
        """Whether a watershed gives supervoxels, which are agglomerated."""
        return self.method == "watershed"

    @property
    def is_mutex(self) -> bool:
        """Whether supervoxels are agglomerated by joining and forbidding edges, which takes farther affinities."""
        return self.is_watershed and self.agglomerate == "mutex"

    @model_validator(mode="after")
    def _check_small(self) -> ObjectRules:
        if not self.small_voxels:
            return self
        if not self.is_watershed or self.is_mutex:
            raise ValueError("small_voxels is for method watershed with agglomerate mean; leave it out, or set it to 0")
        if self.small_threshold > self.threshold:
            raise ValueError(
                f"small_threshold {self.small_threshold:g} is above threshold {self.threshold:g}, from which all join; "
                "lower it"
            )
        return self


class SegmentOutput(Section):
    """The output: sizes in voxels (z, y, x)."""

    format: Literal["ome-zarr-0.5", "ome-zarr-0.6", "precomputed"] = "ome-zarr-0.5"
    """The format of the labels. precomputed is Neuroglancer's, with the codec compressed_segmentation."""
    block: Sizes | Auto = "auto"
    """Voxels of a block (z, y, x): the work of one task, and one shard."""
    chunk: Sizes | Auto = "auto"
    """Voxels of a chunk (z, y, x)."""
    codec: Literal["zstd", "gzip", "raw"] = "zstd"
    """Compression of OME-Zarr."""
    codec_level: int = Field(1, ge=0, le=22)
    """Level of the compression; gzip has 0 to 9."""
    levels: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Number of coarser levels beside level 0."""
    graph_gib: float = Field(4.0, gt=0)
    """Memory, in GiB, of a task that solves the graph of a box of blocks."""

    @model_validator(mode="after")
    def _check_codec(self) -> SegmentOutput:
        writing = format_named(self.format).writing
        if writing is not None and writing.label_codecs and self.codec != "zstd":
            raise ValueError(f"codec {self.codec} is for OME-Zarr; {self.format} labels have one codec: leave it out")
        return self


class SegmentRecipe(Section):
    """A segmentation's input, objects and output."""

    input: SegmentInput = SegmentInput()
    objects: ObjectRules = ObjectRules()
    output: SegmentOutput = SegmentOutput()

    @model_validator(mode="after")
    def _check_far_offsets(self) -> SegmentRecipe:
        is_far = self.input.is_affinities and len(self.input.offsets) > len(NEAREST)
        if self.objects.is_mutex and not is_far:
            raise ValueError("agglomerate mutex needs affinities to farther voxels; use mean")
        return self


def load_segmentation(path: Path | None, settings: Sequence[str] = ()) -> SegmentRecipe:
    """Return the recipe in the TOML file at `path` with ``key=value`` settings on top; without a path, the defaults.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or an invalid value; the message names it.
    """
    return typed(SegmentRecipe, load_tree(path, settings), path, settings)
