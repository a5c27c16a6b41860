"""Pyramid: a shard of a coarser level is made from the finer level's voxels under it, and is written once.

Not here: which levels there are (plan).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from volpipe.formats.store import downsample
from volpipe.grid import Box, Grid
from volpipe.output import read_voxels, write_voxels
from volpipe.plan import Plan


def finer_box(plan: Plan, level: int, box: Box) -> Box:
    """Return the voxels of the level before `level` that `box` of `level` is made from."""
    return box.scaled(plan.step(level)) & Box.of(plan.level_shape(level - 1))


def coarsen(plan: Plan, level: int, shard: int) -> str:
    """Write `shard` of `level`, and return its checksums.

    A voxel is the mean of those below for images, the most frequent value for labels.

    Where the finer level ends within a voxel, the voxels that exist count. Means of integers round half to even.
    """
    method = "mode" if plan.recipe.output.kind == "labels" else "mean"
    box = plan.shards(level).box(shard)
    coarse = np.empty((plan.net.out_channels, *box.shape), plan.dtype)
    for part in parts(plan, level, box):
        fine = read_voxels(plan, level - 1, finer_box(plan, level, part))
        place = part.relative_to(box.start)
        coarse[:, *place.slices] = downsample(fine, (1, *plan.step(level)), method)
    return write_voxels(plan, level, box, coarse)


def parts(plan: Plan, level: int, box: Box) -> Iterator[Box]:
    """Yield `box` of `level` in parts that are made of few finer chunks, so that all are never in memory at once."""
    steps = zip(plan.shard, plan.chunk, plan.step(level), strict=True)
    shard, chunk, step = next(steps)
    thickness = max(1, chunk // step) if shard % step == 0 else shard
    sizes = [s // f if s % f == 0 else s for s, _, f in steps]
    grid = Grid(box.shape, (thickness, *sizes))
    yield from (grid.box(number).shift(box.start) for number in range(len(grid)))
