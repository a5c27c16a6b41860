"""Plans for tests, made without a disk or a net, and their geometry as a table of voxels says it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from volpipe.geometry.blend import FAMILIES
from volpipe.geometry.grid import Shape, Triple, unravel
from volpipe.inference.plan import Plan, make_plan
from volpipe.inference.selection import Selection
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import Volume


def volume(
    shape: Triple = (40, 40, 40),
    dtype: str = "uint8",
    voxel_size_nm: tuple[float, float, float] | None = None,
    num_channels: int = 1,
) -> Volume:
    """Return a reference to an array that need not exist."""
    stored = shape if num_channels == 1 else (num_channels, *shape)
    axes = ("z", "y", "x") if num_channels == 1 else ("c", "z", "y", "x")
    chunks = (16,) * len(stored)
    origin = (0.0, 0.0, 0.0)
    return Volume(
        "/data/in.n5", "raw", "n5", stored, np.dtype(dtype), chunks, None, axes, voxel_size_nm, origin, "gzip", ()
    )


def facts(**given: object) -> NetFacts:
    """Return the facts of a net that gives back its input, but for those that are given."""
    plain: dict[str, object] = {
        "label": "net", "in_channels": 1, "out_channels": 1, "scale": (1, 1, 1), "stride": (1, 1, 1),
        "halo": (0, 0, 0), "window": (64, 64, 64), "intensity": "same", "tile_invariant": True,
        "num_parameters": 0, "weights_sha256": "0",
    }  # fmt: skip
    return NetFacts.model_validate(plain | given)


def planned(*settings: str, of: Volume | None = None, net: NetFacts | None = None) -> Plan:
    return make_plan(load_recipe(None, settings), of or volume(), net or facts(), out=Path("/data/out.zarr"))


@st.composite
def spans(draw: st.DrawFn, size: int) -> tuple[int, int]:
    """A part of an axis of `size` voxels, that is not empty."""
    start = draw(st.integers(0, size - 1))
    return start, draw(st.integers(start + 1, size))


@st.composite
def plans(draw: st.DrawFn, longest: int = 20, modes: tuple[str, ...] = ("stored", "streamed")) -> Plan:
    """Small plans of every kind: any region, at whose corner blocks may begin, stride, overlap, blend, scale, block,
    shard and number of levels.
    """

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(3)]

    z, y, x = each(1, longest)
    voxel = draw(st.none() | st.tuples(*[st.sampled_from([4.0, 5.0, 8.0, 30.0])] * 3))
    stride, scale, block = each(1, 3), each(1, 3), each(1, 3)
    overlap = [2 * s * draw(st.integers(0, 2)) + draw(st.integers(0, int(s == 1))) for s in stride]
    window = [o + s * draw(st.integers(1, 4)) for o, s in zip(overlap, stride, strict=True)]
    core = [b * (w - o) * f for b, w, o, f in zip(block, window, overlap, scale, strict=True)]
    shard = [draw(st.sampled_from([d for d in range(1, c + 1) if c % d == 0 and 3 * d >= c])) for c in core]
    chunk = [draw(st.sampled_from([d for d in range(1, s + 1) if s % d == 0])) for s in shard]
    roi = ",".join(f"{a}:{b}" for a, b in (draw(spans(n)) for n in (z, y, x))) if draw(st.booleans()) else ":,:,:"
    plan = planned(
        f"input.roi={roi}", f"windows.shape={window}", f"windows.overlap={overlap}", f"windows.block={block}",
        f"windows.blend={draw(st.sampled_from(FAMILIES))}", f"output.shard={shard}", f"output.chunk={chunk}",
        f"output.levels={draw(st.integers(0, 3))}", f"tensors.mode={draw(st.sampled_from(modes))}",
        of=volume((z, y, x), voxel_size_nm=voxel),
        net=facts(scale=scale, stride=stride, halo=[o // 2 // s * s for o, s in zip(overlap, stride, strict=True)]),
    )  # fmt: skip
    return plan.changed(corner=plan.roi[0]) if draw(st.booleans()) else plan


@st.composite
def choices(draw: st.DrawFn, longest: int = 20) -> Selection:
    """Small plans of every kind, with all or a part of their cells wanted, some of them in the region."""
    plan = draw(plans(longest))
    if draw(st.booleans()):
        return Selection(plan)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    cells = rng.random(plan.lattice.counts) < draw(st.sampled_from([0.0, 0.05, 0.3]))
    at = [draw(st.integers(a, b - 1)) // s for a, b, s in zip(*plan.roi, plan.lattice.stride, strict=True)]
    cells[tuple(at)] = True
    return Selection(plan, np.packbits(cells, axis=-1))


def selected_voxels(selection: Selection) -> np.ndarray:
    """Return for each voxel of the output whether it is wanted, found voxel by voxel (z, y, x)."""
    plan = selection.plan
    if selection.cells is None:
        return np.ones(plan.out_shape, bool)
    cells = np.unpackbits(selection.cells, axis=-1).astype(bool)
    strides = [w - o for w, o in zip(plan.window, plan.overlap, strict=True)]
    for axis, (a, b, stride, scale) in enumerate(zip(*plan.roi, strides, plan.net.scale, strict=True)):
        cells = cells.repeat(stride, axis).take(range(a, b), axis).repeat(scale, axis)
    return cells


def voxels_of_blocks(plan: Plan, axis: int) -> list[set[int]]:
    """Return the output voxels along `axis` that any window of each block adds to, found window by window.

    They count from the region of interest, and others there are none. A window is of the last block whose core begins
    no later than the voxels that it adds to; that which adds to the corner of a block is of this block or a later one.
    """
    size, window, overlap = plan.source.shape[axis], plan.window[axis], plan.overlap[axis]
    stride, per_block, scale = window - overlap, plan.block[axis], plan.net.scale[axis]
    corner, cell = plan.corner[axis], stride * per_block
    starts = [a for a in range(corner % cell - cell, size, cell) if a + cell > 0]  # of cores
    found: list[set[int]] = [set() for _ in starts]
    for index in range(-(-size // stride)):
        first = index * stride - overlap // 2
        seen = range(first, first + window)
        if plan.recipe.windows.blend == "crop":
            seen = range(index * stride, (index + 1) * stride)
        block = max([0, *(k for k, a in enumerate(starts) if a <= seen.start)])
        if seen.stop > corner:
            block = max(block, starts.index(corner))
        inside = (voxel - plan.roi[0][axis] for voxel in seen if plan.roi[0][axis] <= voxel < plan.roi[1][axis])
        found[block] |= {voxel * scale + i for voxel in inside for i in range(scale)}
    return found


def voxels_of_shards(size: int, shard: int) -> list[set[int]]:
    """Return the voxels along one axis of `size` voxels that each shard holds."""
    return [set(range(start, min(start + shard, size))) for start in range(0, size, shard)]


def some_selected(selection: Selection, along: list[list[set[int]]]) -> set[int]:
    """Return the numbers of those boxes that hold a wanted voxel; `along` has the voxels of all on each axis."""
    voxels, found = selected_voxels(selection), set()
    counts = tuple(map(len, along))
    for number in range(math.prod(counts)):
        box = [sorted(sides[i]) for sides, i in zip(along, unravel(number, counts), strict=True)]
        if voxels[np.ix_(*box)].any():
            found.add(number)
    return found


def blocks_by_shard(plan: Plan) -> list[list[int]]:
    """Return for each shard of level 0 the blocks that add to any voxel of it, found voxel by voxel."""
    along = []
    for axis in range(3):
        blocks = voxels_of_blocks(plan, axis)
        shards = voxels_of_shards(plan.out_shape[axis], plan.shard[axis])
        along.append([[b for b, voxels in enumerate(blocks) if voxels & shard] for shard in shards])
    counts = tuple(len(voxels_of_blocks(plan, axis)) for axis in range(3))
    return [[ravelled(index, counts) for index in itertools.product(*choice)] for choice in itertools.product(*along)]


def finer_by_shard(plan: Plan, level: int) -> list[list[int]]:
    """Return for each shard of `level` the shards of the level before with a voxel under it, found voxel by voxel."""
    along = []
    for axis in range(3):
        fine, coarse = plan.level_shape(level - 1)[axis], plan.level_shape(level)[axis]
        step = plan.factors[level][axis] // plan.factors[level - 1][axis]
        below = voxels_of_shards(fine, plan.shard[axis])
        above = voxels_of_shards(coarse, plan.shard[axis])
        along.append([[i for i, f in enumerate(below) if {voxel // step for voxel in f} & c] for c in above])
    counts = tuple(len(voxels_of_shards(n, s)) for n, s in zip(plan.level_shape(level - 1), plan.shard, strict=True))
    return [[ravelled(index, counts) for index in itertools.product(*choice)] for choice in itertools.product(*along)]


def ravelled(index: Shape, counts: Shape) -> int:
    return int(np.ravel_multi_index(index, counts))
