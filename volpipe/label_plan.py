"""The plan of a labelling: a recipe that fits a volume, with the blocks that tasks do, and where all of it goes.

Not here: what tasks do (label_tasks). Blocks are computed from their number, never listed.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from volpipe.errors import PlanError, RunError
from volpipe.grid import Box, Grid, Shape, align_up
from volpipe.label_recipe import NEAREST, LabelRecipe
from volpipe.levels import Triple, level_factors, level_shape, level_step
from volpipe.volume import View, Volume, open_volume, viewed

LABEL_FILE = "label.json"
BLOCK, LARGE_BLOCK, CHUNK = 128, 256, 64
MANY = 1 << 30  # voxels from which on blocks are large
# Of a voxel of a block while its task is at work, beside what is read: indices, ids, keys of pairs. 39 - 18, 55 - 18
# and 127 - 18 were measured on noisy affinities, 192³ voxels, 2026-11.
WORK_BYTES = {"components": 32, "mean": 72, "mutex": 128}
Lengths = tuple[float, float, float]


class LabelPlan(BaseModel):
    """A labelling that can be done.

    Attributes:
        recipe: what to do.
        path, key: of the array that is read.
        view: what is read of it.
        shape: of the volume, voxels (z, y, x).
        source_dtype, num_channels: what is read.
        voxel_size_nm, origin_nm: (z, y, x), the size None where it is not known.
        out: where labels go.
        search_path: folder that the recipe's relative names count from.
        block, chunk: voxels (z, y, x).
        factors: of each level against level 0 (z, y, x).
    """

    model_config = ConfigDict(frozen=True)

    recipe: LabelRecipe
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
        """Return the volume, as it is now."""
        return open_volume(self.path, self.key, view=self.view)

    @cached_property
    def blocks(self) -> Grid:
        return self.shards()

    @property
    def shard(self) -> Triple:
        """Voxels of a shard, of every level: a block of level 0."""
        return self.block

    def level_shape(self, level: int) -> Triple:
        """Return the shape of `level` (z, y, x); level 0 is the labels themselves."""
        return level_shape(self.shape, self.factors[level])

    def shards(self, level: int = 0) -> Grid:
        """Return the shards of `level`: what one task writes at once."""
        return Grid(self.level_shape(level), self.shard)

    def step(self, level: int) -> Triple:
        """Return by how much `level` is coarser than the level before it, per axis."""
        return level_step(self.factors, level)

    @property
    def box(self) -> Box:
        return Box.of(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the labels: wide enough for one at every voxel."""
        return np.dtype(np.uint32 if math.prod(self.shape) < 2**32 else np.uint64)

    @cached_property
    def identity(self) -> str:
        """A short hash of all that the labels depend on."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def reach(self) -> Shape:
        """Voxels (z, y, x) around a block that its tasks read."""
        objects = self.recipe.objects
        near = tuple(n + 2 for n in objects.smooth) if objects.method == "watershed" else (1, 1, 1)
        if objects.method == "components" or self.recipe.input.kind != "affinities":
            return near
        far = (max(abs(o[axis]) for o in self.recipe.input.offsets) for axis in range(3))
        return tuple(map(max, near, far))

    @property
    def task_bytes(self) -> int:
        """Memory that the task of one block takes, beside its process; an upper bound."""
        around = math.prod(min(b + 2 * r, n) for b, r, n in zip(self.block, self.reach, self.shape, strict=True))
        read = self.num_channels * (np.dtype(self.source_dtype).itemsize + 1)
        objects = self.recipe.objects
        work = WORK_BYTES[objects.agglomerate if objects.method == "watershed" else objects.method]
        return max(around * (read + work), self._coarse_bytes)

    @property
    def _coarse_bytes(self) -> int:
        """Memory that the task of a shard of a coarser level takes.

        Where a shard's edges are odd, all voxels below it are read at once. 53 bytes per voxel of 125³ were measured,
        uint32, and 14 of 256³, 2026-11.
        """
        if len(self.factors) == 1:
            return 0
        shard = [min(b, n) for b, n in zip(self.shard, self.level_shape(1), strict=True)]
        below = math.prod(n * (1 + b % 2) for n, b in zip(shard, self.shard, strict=True))
        return 5 * self.dtype.itemsize * (3 * math.prod(shard) + below) // 4

    @property
    def scratch_bytes(self) -> int:
        """Scratch that the labelling takes, where nothing can be compressed and no voxel is left out."""
        return 4 * math.prod(self.shape)

    def changes(self, new: LabelPlan) -> list[str]:
        """Return one line for each thing in which `new` differs."""
        from volpipe.recipe import differences

        changed = differences(self.recipe, new.recipe)
        for name in LabelPlan.model_fields:
            before, after = getattr(self, name), getattr(new, name)
            if name != "recipe" and before != after:
                changed.append(f"{name}: {before} -> {after}")
        return changed

    def store(self, folder: Path) -> None:
        """Write this into `folder`, whole or not at all."""
        partial = folder / f".{LABEL_FILE}"
        partial.write_text(self.model_dump_json(indent=1), encoding="utf-8")
        partial.replace(folder / LABEL_FILE)

    @classmethod
    def load(cls, folder: Path) -> LabelPlan | None:
        """Return what `folder` says, None where it says nothing.

        Raises:
            RunError: it is damaged, or of another version.
        """
        path = folder / LABEL_FILE
        if not path.is_file():
            return None
        try:
            told = json.loads(path.read_bytes())
            told["recipe"]["output"].setdefault("levels", 0)  # earlier versions wrote level 0 alone
            return cls.model_validate({"factors": [(1, 1, 1)]} | told)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RunError(
                f"{path} cannot be understood (written by another version?); run with --fresh to start over"
            ) from error


@lru_cache(maxsize=4)
def load_label_plan(folder: str, identity: str) -> LabelPlan:
    """Return the plan in `folder`; `identity` guards against one that has taken its place meanwhile."""
    plan = LabelPlan.load(Path(folder))
    if plan is None or plan.identity != identity:
        raise PlanError(f"{folder} does not hold labelling {identity} any more: another took its place")
    return plan


def fit(volume: Volume, recipe: LabelRecipe, out: str, search_path: str) -> LabelPlan:
    """Return the plan of labelling `volume`, which need not exist yet.

    Raises:
        PlanError: the two do not fit.
    """
    volume = viewed(volume, recipe.input.view)
    _check_channels(volume, recipe)
    shape, output = volume.spatial_shape, recipe.output
    edge = LARGE_BLOCK if math.prod(shape) >= MANY else BLOCK
    wished = output.chunk if output.chunk != "auto" else (CHUNK,) * 3
    block = output.block if output.block != "auto" else tuple(align_up(edge, c) for c in wished)
    chunk = wished if output.chunk != "auto" else tuple(math.gcd(b, CHUNK) for b in block)
    for axis, b, c in zip("zyx", block, chunk, strict=True):
        if b % c:
            raise PlanError(
                f"output.block has {b} voxels on axis {axis}, no multiple of the chunk's {c}; use {b - b % c or c}"
            )
    if math.prod(block) >= 2**31:
        raise PlanError(f"output.block {block} has more voxels than a task can number; use {(LARGE_BLOCK,) * 3}")
    z, y, x = block
    return LabelPlan(
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


def check_offsets(volume: Volume, recipe: LabelRecipe, noted: object) -> None:
    """Refuse affinities of other pairs of voxels than `recipe` takes them for; `noted` is what their maker said.

    Raises:
        PlanError: with both.
    """
    if recipe.input.kind != "affinities" or not isinstance(noted, list | tuple):
        return
    own, theirs = [list(offset) for offset in recipe.input.offsets], [list(offset) for offset in noted]
    if own != theirs:
        raise PlanError(
            f"{volume} holds affinities of the offsets {theirs}, as its maker noted, and input.offsets are {own}: "
            "give --set input.offsets as noted, or name other affinities"
        )


def _check_channels(volume: Volume, recipe: LabelRecipe) -> None:
    """Refuse what does not hold what the recipe says, or not as numbers from 0 to 1."""
    wanted, found = recipe.input, volume.num_channels
    if wanted.kind == "affinities" and found != len(wanted.offsets):
        hint = (
            "; name as many as the net was trained to"
            if found >= len(NEAREST)
            else "; for a map of one channel say input.kind=foreground or input.kind=membrane"
        )
        raise PlanError(
            f"{volume} has {found} channel{'s' if found > 1 else ''}, input.offsets {len(wanted.offsets)}{hint}"
        )
    if volume.dtype.kind not in "uf":
        raise PlanError(
            f"{volume} has {volume.dtype} voxels; chances are floats from 0 to 1, or unsigned whole numbers: run the "
            "net with output.dtype=uint8"
        )
