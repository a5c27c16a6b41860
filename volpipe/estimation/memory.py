"""The memory of a worker, from a plan and from measured peaks of a few blocks.

Not here: the memory that there is (limits), or the settings of malloc (malloc).
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from volpipe.estimation.measure import FIXED_BYTES, processor
from volpipe.geometry.block_shape import Sizes
from volpipe.geometry.grid import triple
from volpipe.inference.block_sum import MOST_WEIGHTS
from volpipe.inference.output import shards_behind
from volpipe.inference.plan import Plan
from volpipe.inference.windows import CACHE_BYTES, largest_input, seen_along
from volpipe.nets.cache import known_speeds
from volpipe.nets.facts import NetSpeeds
from volpipe.volumes.rolling_box import PIECE_VOXELS, pieces_at_once
from volpipe.volumes.storage.growing import upload_bytes
from volpipe.volumes.storage.requests import BYTES_AT_ONCE
from volpipe.volumes.writer import shard_bytes

WORKER_BYTES = 350 << 20  # of a worker with torch and tensorstore loaded, before any voxel (measured 2026-11)
DRIVER_BYTES = (
    100 << 20
)  # of a driver, beside a worker that is a thread of it: 40 MiB of code, and reports (2026-11-28)
NET_BYTES, NET_SAFETY = (
    FIXED_BYTES,
    1.15,
)  # of any window; threads and malloc make a net's own vary by a tenth (2026-11)
GPU_BYTES = (
    700 << 20
)  # for CUDA itself, of a worker whose net is on a GPU: workers took 935 and 960 MiB in all (2026-11)
CUDA_BYTES = 280 << 20  # of the libraries of a torch for CUDA, which load without a GPU too (2.13.0+cu130, 2026-11)
GPU_LIBRARIES = "libtorch_cuda.so", "libtorch_hip.so"
CONTEXT_BYTES = 1 << 30  # of a GPU's memory, for CUDA and its libraries, and for what other programs show there
SAFETY = 1.25  # factor by which memory may exceed that of a few blocks: allocators keep freed memory


def memory_bytes(
    plan: Plan,
    peak_bytes: int | None,
    *,
    on_gpu: bool = False,
    speeds: NetSpeeds | None = None,
    num_threads: int = 1,
) -> float:
    """Return the highest resident memory of a worker, in bytes; without the net's own where that is unknown.

    Blocks that are tried have no neighbours whose sums they could add, and slow ones are tried one by one, so that
    blended runs take more: over 1,500³, hann, 616 and 748 MiB became 995 and 949 MiB (measured 2026-11-21).

    Args:
        peak_bytes: highest resident memory of a worker that tried a few blocks, None where none did.
        on_gpu: whether the net computes on a GPU, in whose memory its own values are.
        speeds: what was measured of the net, where that is not among the facts of shipped nets.
        num_threads: workers that share a process, which is then the driver's as well.
    """
    driver = DRIVER_BYTES if num_threads > 1 else 0
    least = WORKER_BYTES + driver + num_threads * SAFETY * array_bytes(plan)
    untried = least + (GPU_BYTES if on_gpu else cuda_bytes() + num_threads * (net_bytes(plan, speeds) or 0.0))
    if peak_bytes is None:
        return untried
    if num_threads > 1:  # not all of them may have been at their highest while blocks were tried
        return max(untried, SAFETY * peak_bytes)
    if not plan.num_sums:
        return SAFETY * peak_bytes
    return max(least, SAFETY * peak_bytes + (0 if plan.has_slabs else _finishing_bytes(plan)))


@cache
def cuda_bytes() -> int:
    """Return what a worker without a GPU takes for the GPU's libraries, if this environment's torch has them."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return 0
    return (
        CUDA_BYTES if any(Path(torch.origin).with_name("lib").joinpath(name).exists() for name in GPU_LIBRARIES) else 0
    )


def net_bytes(plan: Plan, speeds: NetSpeeds | None = None) -> float | None:
    """Return the bytes of the plan's net on a CPU while it computes; None where they were not measured.

    They go with the voxels of a window, by the facts of shipped nets in models/facts.json (`scripts/describe`), or by
    `speeds`, which may be those of a GPU; those of other nets as they were measured on this machine.
    """
    choice = plan.recipe.infer
    measured = speeds or known_speeds(plan.recipe.net, plan.net, plan.search_path, processor())
    known = None if measured is None else measured.of(plan.arithmetic)
    if known is None or choice.exact or choice.compile:
        return None
    batch = choice.batch if choice.batch != "auto" else 1
    # The weights of the other nets of an ensemble are there too, and what each of them gives.
    weights = 4 * (plan.net.num_parameters - min(each.num_parameters for each in plan.net.each))
    given = (
        0 if plan.net.num_stacked == 1 else 4 * plan.net.out_channels * math.prod(plan.net.output_shape(plan.window))
    )
    return NET_BYTES + weights + NET_SAFETY * known.bytes_per_voxel * batch * math.prod(plan.window) + batch * given


def gpu_bytes(plan: Plan, speeds: NetSpeeds) -> float:
    """Return the highest memory of a GPU, in bytes, by the `speeds` of the plan's net on it; a batch is one window.

    The voxels and sums of a block take no more there than in the worker.
    """
    return CONTEXT_BYTES + SAFETY * array_bytes(plan) + (net_bytes(plan, speeds) or 0.0)


def array_bytes(plan: Plan) -> int:
    """Return the bytes of arrays in a worker that infers, without the net itself.

    Of a block in slabs, two of these, of the volume and of the output (`Sizes.slab_bytes`), and what is on its way from
    and to a bucket. Else two blocks of voxels (one is read ahead; from a bucket also pieces of those after it) and the
    chunks that neighbours share, two sums (one is written meanwhile; into a bucket several, if they are small) with the
    part that is rounded and those that go to scratch and come from it. And the windows that wait.
    """
    channels, out = plan.source.num_channels, plan.net.out_channels
    itemsize = np.dtype(plan.source.dtype).itemsize
    box, cache = (largest_input(plan), CACHE_BYTES) if plan.mode == "streamed" else (0, 0)
    waiting = _window_bytes(plan)
    if plan.has_slabs:
        return (
            _slab_bytes(plan)
            + CACHE_BYTES
            + 4 * waiting
            + _moving_bytes(plan)
            + _resampling_bytes(plan)
            + _stacking_bytes(plan)
        )
    source = math.prod(plan.source.shape) * channels * itemsize
    stored = 2 * box * channels * itemsize + (min(cache, source) if any(plan.overlap) else 0)
    if "://" in plan.source.path:
        at_once = pieces_at_once(channels * itemsize)
        stored += (at_once - 1) * min(PIECE_VOXELS, box) * channels * itemsize
    stored += _resampling_bytes(plan) + _stacking_bytes(plan)
    sum_bytes = out * max(4, plan.sum_dtype.itemsize)
    parts = 2 * max(p.num_voxels for p in plan.sum_parts) * sum_bytes if plan.num_sums else 0
    sums = 2 * math.prod(plan.sum_shape) * sum_bytes + (plan.blocks_behind - 1) * plan.sum_bytes
    return stored + sums + 4 * waiting + parts + _finishing_bytes(plan)


def _stacking_bytes(plan: Plan) -> int:
    """Return the bytes of pieces of several volumes while they are put together: those of each, and of all."""
    if not plan.source.also:
        return 0
    voxel_bytes = plan.source.num_channels * np.dtype(plan.source.dtype).itemsize
    return 2 * pieces_at_once(voxel_bytes) * min(PIECE_VOXELS, largest_input(plan)) * voxel_bytes


def _resampling_bytes(plan: Plan) -> int:
    """Return the bytes of the stored voxels from which a block is interpolated, and of the layers that come between.

    Of several volumes, those of the one that takes most: they are read one after the other.
    """
    most = 0
    for source, (num_channels, _) in zip((plan.source, *plan.source.also), plan.source.given, strict=True):
        if (grid := source.resampling) is None:
            continue
        sides = [max(b - a for a, b in seen_along(plan, axis)) for axis in range(3)]
        along = zip(sides, grid.steps, grid.stored, grid.widths, strict=True)
        stored = [min(n, math.ceil(a * step) + width) for a, step, n, width in along]
        itemsize, layers = num_channels * np.dtype(grid.dtype).itemsize, grid.widths[0] + 2
        between = 8 * layers * max(sides[1], stored[1]) * max(sides[2], stored[2])
        most = max(most, math.prod(stored) * itemsize + between)
    return most


def _window_bytes(plan: Plan) -> int:
    """Return the bytes of the windows of a batch, and of what the net makes of them."""
    batch = plan.recipe.infer.batch if plan.recipe.infer.batch != "auto" else 1
    window = batch * math.prod(plan.window)
    made = batch * math.prod(plan.net.output_shape(plan.window))
    weights = MOST_WEIGHTS * 4 * made // batch if plan.lattice.placement != "lattice" else 0
    return 4 * plan.source.num_channels * window + 2 * plan.net.out_channels * made + weights // 4


def _moving_bytes(plan: Plan) -> int:
    """Return the bytes of a block's slabs on their way from and to a bucket.

    A block that is the last one along each axis finishes eight shards, if others add to them; else it has one, while
    that of the block before is still on its way. Of the volume, the first pieces of the next slab are there, too.
    """
    shard = shard_bytes(plan.shard, plan.dtype)
    to = upload_bytes(shard, 8 if plan.num_sums else 2) if plan.is_in_bucket else 0
    if "://" not in plan.source.path:
        return to
    voxel_bytes = plan.source.num_channels * np.dtype(plan.source.dtype).itemsize
    return to + BYTES_AT_ONCE + pieces_at_once(voxel_bytes) * PIECE_VOXELS * voxel_bytes


def _slab_bytes(plan: Plan) -> int:
    """Return the bytes of the slabs of a block, of the volume and of the output."""
    unit = plan.net.shrink
    sizes = Sizes(
        triple(plan.lattice.shape),
        triple(-(-o // u) for o, u in zip(plan.overlap, unit, strict=True)),
        triple(plan.lattice.stride),
        plan.net.scale,
        input_bytes=plan.source.num_channels * np.dtype(plan.source.dtype).itemsize * math.prod(unit),
        output_bytes=plan.net.out_channels * plan.dtype.itemsize,
        sum_bytes=plan.net.out_channels * plan.sum_dtype.itemsize,
        is_blended=plan.is_summed,
        chunk=plan.chunk[0],
    )
    return sizes.slab_bytes(plan.block)


def _finishing_bytes(plan: Plan) -> int:
    """Return the bytes of a shard while it is added up, rounded and encoded, and of those that a bucket still takes."""
    shard = math.prod(plan.shard) * plan.net.out_channels
    return shard * (4 + 2 * plan.dtype.itemsize * shards_behind(plan))
