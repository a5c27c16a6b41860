"""The recipe of a segmentation: the meaning of its input's voxels, and how they become objects; TOML, typed.

Not here: whether it fits a volume (segmentation.plan), or the recipe of a run (inference).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from volpipe.geometry.affinities import OFFSETS, Offset
from volpipe.recipes.inference import ArrayInput, Auto, Channel
from volpipe.recipes.toml import Count, Section, Sizes, load_tree, typed
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.volume import View

NEAREST: tuple[Offset, ...] = ((-1, 0, 0), (0, -1, 0), (0, 0, -1))
Share = Annotated[float, Field(ge=0, le=1)]
Voxels = Annotated[int, Field(ge=0)]
Reach = tuple[Voxels, Voxels, Voxels]
Passes = tuple[Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)], Annotated[int, Field(ge=0, le=8)]]


INSTANCES = ("centres", "flows")  # kinds of input by which voxels lead to their object; each has its own method


class SegmentInput(ArrayInput):
    """The input: probabilities, which are stored as numbers from 0 to 1 or others, or places that voxels lead to."""

    kind: Literal["affinities", "foreground", "membrane", "centres", "flows"] = "affinities"
    """"affinities": one channel per offset. Or one channel that is high inside objects, "foreground", or between them,
    "membrane". "centres": a foreground, a heat map of centres, and the offset to the centre along z, y, x. "flows": the
    flow along z, y, x, and a foreground. Both may lack z: objects are then of single slices."""
    channel: Channel = 0
    """The channel of a foreground or a membrane: its number from 0, or its name in OME."""
    channels: tuple[Voxels, ...] | None = None
    """For centres and flows: the numbers from 0 of the channels in the order above. Without it, all as they are."""
    offsets: tuple[Offset, ...] = OFFSETS
    """For affinities: the voxel (z, y, x) that each channel leads to, the three nearest first."""

    range: tuple[float, float] | None = None
    """The stored values that mean 0 and 1, such as [0, 255]; what is beyond counts as 0 or 1. Without it 0 and 1 of
    floats, 0 and the greatest number of unsigned types; values that a sample shows to mean something else are then
    refused."""

    @property
    def is_affinities(self) -> bool:
        """Whether there is a channel per offset."""
        return self.kind == "affinities"

    @property
    def is_map(self) -> bool:
        """Whether the one `channel` is a map of probabilities."""
        return self.kind in ("foreground", "membrane")

    @property
    def is_inverted(self) -> bool:
        """Whether the channel is high between objects, not inside."""
        return self.kind == "membrane"

    @property
    def view(self) -> View:
        """The view of the input array: of a map `channel`, else all channels."""
        return replace(super().view, channel=self.channel if self.is_map else None)

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
    def _check_channels(self) -> SegmentInput:
        if self.kind not in INSTANCES and self.channels is not None:
            raise ValueError(f"channels are for {' and '.join(INSTANCES)}; leave them out for {self.kind}")
        if self.kind in INSTANCES and self.range is not None:
            raise ValueError(f"range is for probabilities; leave it out for {self.kind}")
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

    method: Literal["components", "watershed", "centres", "flows"] = "watershed"
    """components: joins neighbours whose affinity reaches the threshold. watershed: steepest ascent on the mean nearest
    affinity gives supervoxels, which are agglomerated. Centres and flows each have the method of their name."""
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
    stitch: Share = 0.0
    """For centres and flows without z: objects of neighbouring slices are one from this share of their overlap in all
    that either covers (IoU). 0 keeps slices apart; below 0.5 an object may have several in the next slice."""

    @property
    def is_watershed(self) -> bool:
        """Whether a watershed gives supervoxels, which are agglomerated."""
        return self.method == "watershed"

    @property
    def has_edges(self) -> bool:
        """Whether objects are found along edges between supervoxels, or else each supervoxel is one."""
        return self.is_watershed or self.stitch > 0

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


class CentreRules(Section):
    """Objects of centres and offsets, as Panoptic-DeepLab and MitoNet give them: voxels that point to one centre."""

    reach: Reach = (0, 0, 0)
    """How far from its centre a voxel of an object may lie (z, y, x), which must be set: the largest radius of objects,
    0 along z for offsets without z. Voxels farther than that have no label, and are counted."""
    foreground: float = 0.5
    """A voxel gets a label where the foreground is above it: 0.5 for probabilities, 0 for logits."""
    peak: float = 0.1
    """A centre is higher in the heat map."""
    window: Sizes = (7, 7, 7)
    """A centre is the highest voxel in a box of so many voxels around it, of equal ones the first. Odd numbers; along z
    it counts 1 for offsets without z."""

    @model_validator(mode="after")
    def _check_window(self) -> CentreRules:
        if not all(n % 2 for n in self.window):
            raise ValueError(f"window {list(self.window)} has no middle; give odd numbers")
        return self


class FlowRules(Section):
    """Objects of flows, as nets of Cellpose give them: voxels that follow the flow to one place."""

    reach: Reach = (0, 0, 0)
    """How far from its end the way of a voxel may lie (z, y, x), which must be set: the largest radius of objects, 0
    along z for flows without z. Voxels with longer ways have no label, and are counted."""
    foreground: float = 0.0
    """A voxel has a flow and may get a label where the foreground is above it, as `cellprob_threshold` of Cellpose."""
    steps: Count = 200
    """Steps of the way of a voxel, as `niter` of Cellpose."""
    scale: float = Field(5.0, gt=0)
    """A flow of this length is a step of one voxel: 5 as nets of Cellpose give flows."""


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
    centres: CentreRules = CentreRules()
    flows: FlowRules = FlowRules()
    output: SegmentOutput = SegmentOutput()

    @model_validator(mode="before")
    @classmethod
    def _add_method(cls, tree: Any) -> Any:  # Any: as the user wrote it, which pydantic checks
        """Name the method of kinds that have one of their own."""
        if not isinstance(tree, dict) or not all(isinstance(tree.get(name, {}), dict) for name in ("input", "objects")):
            return tree
        kind, objects = tree.get("input", {}).get("kind"), tree.get("objects", {})
        if kind in INSTANCES and "method" not in objects:
            return tree | {"objects": objects | {"method": kind}}
        return tree

    @model_validator(mode="after")
    def _check_method(self) -> SegmentRecipe:
        kind, method = self.input.kind, self.objects.method
        if (kind in INSTANCES or method in INSTANCES) and method != kind:
            raise ValueError(
                f"objects.method {method} is not for input.kind {kind}: centres and flows each have the method of "
                "their name, others components and watershed; leave objects.method out"
            )
        if self.objects.stitch and (kind not in INSTANCES or getattr(self, kind).reach[0]):
            raise ValueError(
                "objects.stitch is for centres and flows of single slices, whose reach is 0 along z; leave it out"
            )
        if kind in INSTANCES and not all(getattr(self, kind).reach[1:]):
            raise ValueError(
                f"{kind}.reach must be set: the largest radius of an object in voxels (z, y, x), such as [20, 20, 20], "
                f"or [0, 20, 20] for {kind} within slices"
            )
        return self

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
