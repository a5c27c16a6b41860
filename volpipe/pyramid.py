"""Pyramid: a shard of a coarser level is made from the finer level's voxels under it, and is written once.

Not here: which levels there are (plan).
"""

from __future__ import annotations

from volpipe.formats.store import downsample
from volpipe.grid import Box
from volpipe.output import read_voxels, write_voxels
from volpipe.plan import Plan


def finer_box(plan: Plan, level: int, shard: int) -> Box:
    """Return the voxels of the level before `level` that `shard` is made from."""
    box = plan.shards(level).box(shard).scaled(plan.step(level))
    return box & Box.of(plan.level_shape(level - 1))


def coarsen(plan: Plan, level: int, shard: int) -> None:
    """Write `shard` of `level`: the mean of the voxels below for images, the most frequent value for labels.

    Where the finer level ends within a voxel, the voxels that exist count. Means of integers round half to even.
    """
    method = "mode" if plan.recipe.output.kind == "labels" else "mean"
    fine = read_voxels(plan, level - 1, finer_box(plan, level, shard))
    coarse = downsample(fine, (1, *plan.step(level)), method)
    write_voxels(plan, level, plan.shards(level).box(shard), coarse)
