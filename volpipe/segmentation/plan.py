"""The plan of a segmentation: a recipe checked against a volume, with its blocks, levels and output.

Not here: the tasks (tasks). Blocks are computed from their number, never listed.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Grid, Shape, Triple, align_up
from volpipe.geometry.levels import level_factors, level_shape, level_step
from volpipe.recipes.segmentation import NEAREST, SegmentRecipe
from volpipe.recipes.toml import differences
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.precomputed import even_chunk
from volpipe.volumes.volume import View, Volume, open_volume, with_view

BLOCK, LARGE_BLOCK, CHUNK = 128, 256, 64
MANY = 1 << 30  # voxels of a volume with large blocks
# Per voxel of a block, beside its input: indices, ids, keys of pairs. 39 - 18, 55 - 18 and 127 - 18 were measured on
# noisy affinities, 192³ voxels, 2026-11.
WORK_BYTES = {"components": 32, "mean": 72, "mutex": 128}
Lengths = tuple[float, float, float]


class SegmentPlan(BaseModel):
    """A segmentation whose recipe fits its volume.

    Attributes:
        recipe: input, objects and output.
        path, key: of the input array.
        view: channels and time point of the input array.
        shape: of the volume, voxels (z, y, x).
        source_dtype, num_channels: of the input array.
        voxel_size_nm, origin_nm: (z, y, x), the size None where it is not known.
        out: the labels.
        search_path: folder that the recipe's relative names start from.
        block, chunk: voxels (z, y, x).
        factors: of each level against level 0 (z, y, x).
    """

    model_config = ConfigDict(frozen=True)
    FILE: ClassVar[str] = "label.json"  # in a run's folder

    recipe: SegmentRecipe
    path: str
    key: str
    shape: Triple
    source_dtype: str
    num_channels: int
    voxel_size_nm: Lengths | None
    origin_nm: Lengths
    out: str
    search_path: str
    block: Triple
    chunk: Triple
    factors: tuple[Triple, ...]
    view: View = View()

    def source(self) -> Volume:
        """Return the input volume, opened now."""
        return open_volume(self.path, self.key, view=self.view)

    @cached_property
    def blocks(self) -> Grid:
        return self.shards()

    @property
    def shard(self) -> Triple:
        """Shape of a shard (z, y, x) at every level: that of a block."""
        return self.block

    def level_shape(self, level: int) -> Triple:
        """Return the shape of `level` in voxels (z, y, x)."""
        return level_shape(self.shape, self.factors[level])

    def shards(self, level: int = 0) -> Grid:
        """Return the shards of `level`; one task writes one shard."""
        return Grid(self.level_shape(level), self.shard)

    def step(self, level: int) -> Triple:
        """Return the factor (z, y, x) of `level` against the level before it."""
        return level_step(self.factors, level)

    @property
    def box(self) -> Box:
        return Box.from_shape(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Type of the labels: wide enough for as many labels as voxels."""
        return np.dtype(np.uint32 if math.prod(self.shape) < 2**32 else np.uint64)

    @cached_property
    def identity(self) -> str:
        """A short hash of everything that the labels depend on."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def reach(self) -> Shape:
        """Halo of a block in voxels (z, y, x): the context that its tasks read."""
        objects = self.recipe.objects
        near = tuple(n + 2 for n in objects.smooth) if objects.method == "watershed" else (1, 1, 1)
        if objects.method == "components" or self.recipe.input.kind != "affinities":
            return near
        far = (max(abs(o[axis]) for o in self.recipe.input.offsets) for axis in range(3))
        return tuple(map(max, near, far))

    @property
    def task_bytes(self) -> int:
        """Upper bound of a task's memory, beside its process."""
        num_voxels = math.prod(min(b + 2 * r, n) for b, r, n in zip(self.block, self.reach, self.shape, strict=True))
        read = self.num_channels * (np.dtype(self.source_dtype).itemsize + 1)
        objects = self.recipe.objects
        work = WORK_BYTES[objects.agglomerate if objects.method == "watershed" else objects.method]
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

    def changes(self, new: SegmentPlan) -> list[str]:
        """Return one line per difference from `new`."""
        changed = differences(self.recipe, new.recipe)
        for name in SegmentPlan.model_fields:
            before, after = getattr(self, name), getattr(new, name)
            if name != "recipe" and before != after:
                changed.append(f"{name}: {before} -> {after}")
        return changed


@lru_cache(maxsize=4)
def load_segment_plan(folder: str, identity: str) -> SegmentPlan:
    """Return the plan in `folder`, refusing one of another `identity`."""
    plan = RunFolder(Path(folder)).load(SegmentPlan)
    if plan is None or plan.identity != identity:
        raise PlanError(f"{folder} does not hold segmentation {identity} any more: another took its place")
    return plan


def fit(volume: Volume, recipe: SegmentRecipe, out: str, search_path: str) -> SegmentPlan:
    """Return the plan of segmenting `volume`, which need not exist yet.

    Raises:
        PlanError: the recipe does not fit the volume.
    """
    volume = with_view(volume, recipe.input.view)
    _check_channels(volume, recipe)
    shape, output = volume.spatial_shape, recipe.output
    edge = LARGE_BLOCK if math.prod(shape) >= MANY else BLOCK
    wish = output.chunk if output.chunk != "auto" else (CHUNK,) * 3
    block = output.block if output.block != "auto" else tuple(align_up(edge, c) for c in wish)
    chunk = wish if output.chunk != "auto" else tuple(math.gcd(b, CHUNK) for b in block)
    if output.chunk == "auto" and output.format == "precomputed":
        chunk = even_chunk((block[0], block[1], block[2]))
    for axis, b, c in zip("zyx", block, chunk, strict=True):
        if b % c:
            raise PlanError(
                f"output.block has {b} voxels on axis {axis}, no multiple of the chunk's {c}; use {b - b % c or c}"
            )
    if math.prod(block) >= 2**31:
        raise PlanError(f"output.block {block} has more voxels than a task can number; use {(LARGE_BLOCK,) * 3}")
    z, y, x = block
    return SegmentPlan(
        recipe=recipe,
        path=volume.path,
        key=volume.key,
        shape=shape,
        source_dtype=str(volume.dtype),
        num_channels=volume.num_channels,
        voxel_size_nm=volume.voxel_size_nm,
        origin_nm=volume.origin_nm,
        out=out,
        search_path=search_path,
        block=(z, y, x),
        chunk=(chunk[0], chunk[1], chunk[2]),
        factors=level_factors(output.levels, shape, volume.voxel_size_nm or (1.0, 1.0, 1.0)),
        view=volume.view,
    )


def check_offsets(volume: Volume, recipe: SegmentRecipe, stored: object) -> None:
    """Refuse affinities whose `stored` offsets, of their own attributes, are not those of `recipe`.

    Raises:
        PlanError: naming both.
    """
    if recipe.input.kind != "affinities" or not isinstance(stored, list | tuple):
        return
    expected, actual = [list(offset) for offset in recipe.input.offsets], [list(offset) for offset in stored]
    if expected != actual:
        raise PlanError(
            f"{volume} holds affinities of the offsets {actual}, as its maker noted, and input.offsets are {expected}: "
            "give --set input.offsets as noted, or name other affinities"
        )


def _check_channels(volume: Volume, recipe: SegmentRecipe) -> None:
    """Refuse another number of channels than of offsets, and types that hold no probabilities."""
    choice, num_channels = recipe.input, volume.num_channels
    if choice.kind == "affinities" and num_channels != len(choice.offsets):
        hint = (
            "; name as many as the net was trained to"
            if num_channels >= len(NEAREST)
            else "; for a map of one channel say input.kind=foreground or input.kind=membrane"
        )
        raise PlanError(
            f"{volume} has {num_channels} channel{'s' * (num_channels > 1)}, input.offsets {len(choice.offsets)}{hint}"
        )
    if volume.dtype.kind not in "uf":
        raise PlanError(
            f"{volume} has {volume.dtype} voxels; probabilities are floats from 0 to 1, or unsigned integers: run the "
            "net with output.dtype=uint8"
        )
