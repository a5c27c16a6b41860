"""Pyramid: a shard of a coarser level is computed from the finer level's voxels under it and written once.

Not here: which levels there are (levels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from volpipe.geometry.grid import Box, Grid
from volpipe.inference.output import read_voxels, write_voxels
from volpipe.inference.output_plan import OutputPlan
from volpipe.inference.plan import Plan
from volpipe.volumes.storage.tensorstore import downsample


def finer_box(plan: OutputPlan, level: int, box: Box) -> Box:
    """Return the voxels of the level before `level` under `box` of `level`."""
    return box.scaled(plan.step(level)) & Box.from_shape(plan.level_shape(level - 1))


def coarsen(plan: Plan, level: int, shard: int) -> str:
    """Write `shard` of `level`, and return its checksums.

    A voxel is the mean of those below for images, the most frequent value for labels.
    """
    method = "mode" if plan.recipe.output.kind == "labels" else "mean"
    box = plan.shards(level).box(shard)
    coarse = np.empty((plan.net.out_channels, *box.shape), plan.dtype)
    for part, data in coarsened(plan, level, box, lambda fine: read_voxels(plan, level - 1, fine), method):
        coarse[:, *part.relative_to(box.start).slices] = data
    return write_voxels(plan, level, box, coarse)


def coarsened(
    plan: OutputPlan, level: int, box: Box, read: Callable[[Box], np.ndarray], method: str
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield parts of `box` of `level`, and their voxels (…, z, y, x), from those of the level before.

    Where the finer level ends within a voxel, the voxels that exist count. Means of integers round half to even; the
    mode is the smallest of the most frequent values.

    Args:
        plan: whose level.
        level: of the parts, 1 or more.
        box: voxels of that level.
        read: gives voxels (…, z, y, x) of the level before it.
        method: "mean" or "mode".
    """
    for part in parts(plan, level, box):
        fine = read(finer_box(plan, level, part))
        factors = (*(1 for _ in fine.shape[:-3]), *plan.step(level))
        yield part, downsample(fine, factors, method)


def parts(plan: OutputPlan, level: int, box: Box) -> Iterator[Box]:
    """Yield `box` of `level` in parts that cover few finer chunks each, to bound the memory."""
    steps = zip(plan.shard, plan.chunk, plan.step(level), strict=True)
    shard, chunk, step = next(steps)
    thickness = max(1, chunk // step) if shard % step == 0 else shard
    sizes = [s // f if s % f == 0 else s for s, _, f in steps]
    grid = Grid(box.shape, (thickness, *sizes))
    yield from (grid.box(number).shift(box.start) for number in range(len(grid)))
