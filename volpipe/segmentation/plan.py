"""The plan of a segmentation: a recipe checked against a volume, with its blocks, levels and output.

Not here: the tasks (tasks). Blocks are computed from their number, never listed.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Grid, Shape, Triple, align_up, triple
from volpipe.geometry.levels import FINEST
from volpipe.inference.output_plan import OutputPlan, SourceVolume, levels_of
from volpipe.recipes.segmentation import NEAREST, SegmentRecipe
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation import boxes
from volpipe.segmentation.boxes import Boxes
from volpipe.segmentation.method import FragmentMethod
from volpipe.segmentation.methods import method_named
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.values import take_sample
from volpipe.volumes.volume import ArraySpec, Multiscale, Volume, absolute, with_view

BLOCK, LARGE_BLOCK, CHUNK = 128, 256, 64
MANY = 1 << 30  # voxels of a volume with large blocks


class SegmentPlan(OutputPlan):
    """A segmentation whose recipe fits its volume; a block is a shard. `value_notes` are printed, and not stored."""

    FILE: ClassVar[str] = "label.json"  # in a run's folder

    recipe: SegmentRecipe
    value_notes: tuple[str, ...] = Field((), exclude=True, repr=False)

    def warnings(self) -> list[str]:
        """Return what a user should know of the values that it reads before it runs, in sentences."""
        return list(self.value_notes)

    @cached_property
    def blocks(self) -> Grid:
        return self.shards()

    @property
    def shape(self) -> Triple:
        """Shape of the volume, and of the labels."""
        return self.source.shape

    @property
    def out_shape(self) -> Triple:
        return self.shape

    @property
    def box(self) -> Box:
        return Box.from_shape(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the labels: wide enough for as many labels as voxels."""
        return np.dtype(np.uint32 if math.prod(self.shape) < 2**32 else np.uint64)

    @property
    def is_labels(self) -> bool:
        return True

    @property
    def multiscale(self) -> Multiscale:
        """The places of the labels' levels."""
        levels, name = levels_of(self.factors), absolute(self.out).stem
        size, origin = self.source.voxel_size_nm, self.source.origin_nm
        return Multiscale(levels, voxel_size_nm=size, origin_nm=origin, name=name, is_labels=True)

    def spec(self, level: int) -> ArraySpec:
        """Return the array of `level`."""
        choice, writing = self.recipe.output, format_named(self.format).writing
        assert writing is not None
        return ArraySpec(
            shape=self.level_shape(level),
            dtype=self.dtype,
            chunks=self.chunk,
            shards=self.shard,
            codec=writing.label_codecs.get(self.dtype.name, choice.codec),
            codec_level=choice.codec_level if choice.codec != "raw" else 0,
        )

    def around(self, block: int) -> Box:
        """Return the box that the tasks of `block` read, which is clipped to the volume."""
        return self.blocks.box(block).grown(self.reach) & self.box

    def input_box(self, block: int) -> Box:
        """Return the box of the volume that the fragments and edges of `block` rest on."""
        return self.blocks.box(block).grown(self.method.halo(self.recipe)) & self.box

    @property
    def method(self) -> FragmentMethod:
        """How blocks are cut into fragments."""
        return method_named(self.recipe.objects.method)

    @property
    def reach(self) -> Shape:
        """Halo of a block in voxels (z, y, x): the context that its tasks read."""
        if not self.recipe.objects.is_mutex:
            return self.near
        far = (max(abs(o[axis]) for o in self.recipe.input.offsets) for axis in range(3))
        return tuple(map(max, self.near, far))

    @property
    def near(self) -> Shape:
        """Halo of a block's fragments in voxels (z, y, x)."""
        return self.method.near(self.recipe)

    @property
    def num_channels_read(self) -> int:
        """Channels of the volume that tasks read: of affinities the nearest ones, unless a mutex needs all."""
        is_nearest = self.recipe.input.is_affinities and not self.recipe.objects.is_mutex
        return len(NEAREST) if is_nearest else self.source.num_channels

    @property
    def kinds(self) -> int:
        """Kinds of affinities that an edge sums: the nearest, and with a mutex the farther ones."""
        return 2 if self.recipe.objects.is_mutex else 1

    @property
    def contact(self) -> Shape:
        """How far apart in voxels (z, y, x) two neighbouring fragments may have a voxel."""
        if self.method.is_anchored:
            return self.near
        offsets = self.recipe.input.offsets if self.recipe.objects.is_mutex else NEAREST
        return tuple(max(abs(offset[axis]) for offset in offsets) for axis in range(3))

    @cached_property
    def boxes(self) -> Boxes:
        """The boxes of blocks in which the graph is solved."""
        return Boxes(self.blocks, boxes.EDGE, boxes.SLAB)

    @property
    def task_bytes(self) -> int:
        """Upper bound of a task's memory, beside its process."""
        num_voxels = math.prod(min(b + 2 * r, n) for b, r, n in zip(self.block, self.reach, self.shape, strict=True))
        read = self.num_channels_read * (np.dtype(self.source.dtype).itemsize + 1)
        work = self.method.work_bytes(self.recipe.objects)
        return max(num_voxels * (read + work), self._coarse_bytes)

    @property
    def _coarse_bytes(self) -> int:
        """Memory of the task of a coarser shard.

        Below a shard with odd edges all finer voxels are read at once. Measured in 2026-11, uint32: 53 bytes per voxel
        of 125³, 14 of 256³.
        """
        if len(self.factors) == 1:
            return 0
        shard = [min(b, n) for b, n in zip(self.shard, self.level_shape(1), strict=True)]
        below = math.prod(n * (1 + b % 2) for n, b in zip(shard, self.shard, strict=True))
        return 5 * self.dtype.itemsize * (3 * math.prod(shard) + below) // 4

    @property
    def scratch_bytes(self) -> int:
        """Upper bound of the scratch: uncompressed ids of every voxel."""
        return 4 * math.prod(self.shape)

    @property
    def most_bytes(self) -> int:
        """Upper bound of labels and scratch: uncompressed."""
        levels = (math.prod(self.level_shape(level)) for level in range(len(self.factors)))
        return self.scratch_bytes + self.dtype.itemsize * sum(levels)


@lru_cache(maxsize=4)
def load_segment_plan(folder: str, identity: str) -> SegmentPlan:
    """Return the plan in `folder`, refusing one of another `identity`."""
    plan = RunFolder(Path(folder)).load(SegmentPlan)
    if plan is None or plan.identity != identity:
        raise PlanError(f"{folder} does not hold segmentation {identity} any more: another took its place")
    return plan


def fit(volume: Volume, recipe: SegmentRecipe, out: Location, search_path: Path, *, fresh: bool = False) -> SegmentPlan:
    """Return the plan of segmenting `volume`, which need not exist yet.

    Args:
        fresh: it will start over; else labels that were begun keep their sizes.

    Raises:
        PlanError: the recipe does not fit the volume.
    """
    volume = with_view(volume, recipe.input.view)
    method_named(recipe.objects.method).check(recipe, volume)
    shape, output = volume.spatial_shape, recipe.output
    edge = LARGE_BLOCK if math.prod(shape) >= MANY else BLOCK
    wish = output.chunk if output.chunk != "auto" else (CHUNK,) * 3
    block = output.block if output.block != "auto" else tuple(align_up(edge, c) for c in wish)
    chunk = wish if output.chunk != "auto" else tuple(math.gcd(b, CHUNK) for b in block)
    if output.chunk == "auto":
        chunk = folders_of(output.format).usual_chunk(triple(block)) or chunk
    for axis, b, c in zip("zyx", block, chunk, strict=True):
        if b % c:
            raise PlanError(
                f"output.block has {b} voxels on axis {axis}, no multiple of the chunk's {c}; use {b - b % c or c}"
            )
    if math.prod(block) >= 2**31:
        raise PlanError(f"output.block {block} has more voxels than a task can number; use {(LARGE_BLOCK,) * 3}")
    plan = SegmentPlan(
        recipe=recipe,
        source=SourceVolume.from_volume(volume),
        out=str(out),
        search_path=str(search_path),
        block=triple(block),
        shard=triple(block),
        chunk=triple(chunk),
        factors=FINEST,
    ).with_levels()
    return plan if fresh else RunFolder.from_output(out).as_begun(plan)


def checked_values(plan: SegmentPlan, volume: Volume) -> SegmentPlan:
    """Return `plan` with notes on its values, by a sample of `volume`.

    Raises:
        PlanError: they mean something else than its recipe says.
    """
    sample = take_sample(volume, num_channels=plan.num_channels_read)
    if sample is None:
        return plan.changed(value_notes=volume.value_notes)
    notes = plan.method.doubts(plan.recipe, volume, sample)
    return plan.changed(value_notes=(*volume.value_notes, *notes))


def check_offsets(volume: Volume, recipe: SegmentRecipe, stored: object) -> None:
    """Refuse affinities whose `stored` offsets, of their own attributes, are not those of `recipe`.

    Raises:
        PlanError: naming both.
    """
    if not recipe.input.is_affinities or not isinstance(stored, list | tuple):
        return
    expected, actual = [list(offset) for offset in recipe.input.offsets], [list(offset) for offset in stored]
    if expected != actual:
        raise PlanError(
            f"{volume} holds affinities of the offsets {actual}, as its maker noted, and input.offsets are {expected}: "
            "give --set input.offsets as noted, or name other affinities"
        )
