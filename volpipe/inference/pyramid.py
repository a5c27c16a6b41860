"""Pyramid: a shard of a coarser level is computed from the finer level's voxels under it and written once.

Not here: which levels there are (levels).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from volpipe.geometry.block_shape import SLAB_VOXELS
from volpipe.geometry.grid import Box, Grid, triple
from volpipe.inference.intensity import to_dtype
from volpipe.inference.output import join_arrays, read_voxels, writing_shard
from volpipe.inference.output_plan import OutputPlan
from volpipe.volumes.storage.fetched_array import LARGEST_BYTES
from volpipe.volumes.storage.requests import in_turn
from volpipe.volumes.storage.tensorstore import downsample, num_threads

PARTS_BYTES = 64 << 20  # of finer voxels from which coarser ones are made at a time, about


def coarsen(plan: OutputPlan, level: int, shard: int) -> Callable[[], str]:
    """Return a function that writes `shard` of `level`, and returns its checksums.

    Where it is not written layer by layer, its voxels are in memory by now.
    """
    writes = []
    for array in plan.arrays:
        box = array.shards(level).box(shard)
        layers = box.layers(SLAB_VOXELS, array.chunk[0]) if array.is_layered else [box]
        voxels = ((layer, coarse_voxels(array, level, layer)) for layer in layers)
        writes.append(writing_shard(array, shard, voxels, level))
    return lambda: join_arrays(write() for write in writes)


def coarse_voxels(plan: OutputPlan, level: int, box: Box) -> np.ndarray:
    """Return `box` of `level`, (c, z, y, x), from the level before.

    A voxel is the mean of those below for images, half to even for integers; for labels the most frequent, the smallest
    of several, and 0 counts like any other. Where the finer level ends within a voxel, the voxels that exist count.
    """
    if level == plan.finest:
        return regridded(plan, box)
    coarse = np.empty((plan.num_channels, *box.shape), plan.dtype)
    method, factors = "mode" if plan.is_labels else "mean", (1, *plan.step(level))

    def fill(part: Box) -> None:
        fine = read_voxels(plan, level - 1, plan.finer_box(level, part))
        coarse[:, *part.relative_to(box.start).slices] = downsample(fine, factors, method)

    # One for each thread of this process, if they are small. Parts from a bucket have several requests each.
    most = plan.finer_box(level, next(parts(plan, level, box)))
    part_bytes = most.num_voxels * plan.num_channels * plan.dtype.itemsize
    parts_at_once = 1 if plan.is_in_bucket else max(1, min(num_threads(), PARTS_BYTES // part_bytes))
    in_turn((partial(fill, part) for part in parts(plan, level, box)), parts_at_once)
    return coarse


def regridded(plan: OutputPlan, box: Box) -> np.ndarray:
    """Return `box` of the finest level on the volume's grid, (c, z, y, x), from level 0, which lies on the net's.

    Labels have the nearest voxel; other voxels are interpolated, then rounded half to even.
    """
    grid, result = plan.back, np.empty((plan.num_channels, *box.shape), plan.dtype)
    assert grid is not None
    cell, voxel_bytes = list(plan.chunk), plan.num_channels * plan.dtype.itemsize * math.prod(grid.steps)
    while math.prod(cell) * voxel_bytes > PARTS_BYTES and max(cell) > 1:
        longest = cell.index(max(cell))
        cell[longest] = -(-cell[longest] // 2)
    cells = Grid(box.shape, triple(cell))
    for part in (cells.box(number).shift(box.start) for number in range(len(cells))):
        voxels, own = read_voxels(plan, 0, plan.finer_box(1, part)), part.shift(plan.shown_region.start)
        values = grid.pick(voxels, own) if plan.is_labels else to_dtype(grid.interpolate(voxels, own), plan.dtype)
        result[:, *part.relative_to(box.start).slices] = values
    return result


def parts(plan: OutputPlan, level: int, box: Box) -> Iterator[Box]:
    """Yield `box` of `level` in parts that cover few finer chunks each, to bound the memory.

    They cover small shards of a bucket whole, which come by one request then.
    """
    steps = zip(plan.shard, plan.chunk, plan.step(level), strict=True)
    shard, chunk, step = next(steps)
    is_whole = plan.is_in_bucket and math.prod(plan.shard) * plan.dtype.itemsize <= LARGEST_BYTES
    thickness = max(1, (shard if is_whole else chunk) // step) if shard % step == 0 else shard
    sizes = [s // f if s % f == 0 else s for s, _, f in steps]
    grid = Grid(box.shape, (thickness, *sizes))
    yield from (grid.box(number).shift(box.start) for number in range(len(grid)))
