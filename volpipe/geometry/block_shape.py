"""The shape of blocks, in windows: from the recipe, or by the volume.

Not here: windows, shards and chunks (tiling). Sizes alone decide, so that the same inputs make the same plan. A
block that can be computed slab by slab takes little memory however large it is, so that its shard, one file, may be
large, and few chunks of the volume are needed by two blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Triple, align_up, triple

BLOCK_TARGET, LARGEST_TARGET = 128, 256  # output voxels per axis of a block, near which sizes are chosen
CHUNK_TARGET = 64
ENOUGH_BLOCKS = 8  # for the workers of one machine; smaller volumes get smaller blocks
MOST_BLOCKS = 1 << 15  # a file each; larger volumes get larger blocks
LARGEST_READ = 1.5  # voxels that a block reads by those of its core; larger overlaps get larger blocks

SLAB_VOXELS = 1 << 23  # output voxels of a part of a block that is computed at a time, where blocks have several
WHOLE_SUM = 1 << 24  # output voxels of a block of sums that is computed at once, at most
SUM_CHUNK_TARGET = 32
BLOCKS_PER_WORKER = 4  # fewer leave workers idle at the end
SPARSE_FACTOR = 8  # as many more blocks where nobody knows yet how few are left of them
SUMS_FACTOR = 2  # as many more where each worker may have the sum of its whole block in scratch
USUAL_WORKERS = 16  # where nobody says how many there are
LARGEST_VOXELS = 1 << 30  # of a block that is computed slab by slab, 4 s to 4 min of a GPU with a shipped net
LARGEST_SLABS = 400 << 20  # bytes of a worker's slabs, two of the input and two of the output
# Output voxels whose blocks stay small where shards go to a bucket, 1,290³: of 1024³, over 20 ms and 200 MB/s, 512
# small ones took 9.2 to 10.1 s, 64 large ones 10.0 to 10.9 (2026-11-27).
SMALL_IN_BUCKET = 1 << 31
MOST_PARTS, LONGEST = 12, 4096  # of a volume along an axis; output voxels of a block


@dataclass(frozen=True)
class Sizes:
    """Sizes that decide the shape of blocks, along z, y and x.

    Attributes:
        shape: voxels of the volume.
        region: of these, those at whose corner blocks begin; None for all.
        overlap, stride: of windows, in voxels of the volume.
        scale: output voxels per voxel.
        input_chunk: voxels of a chunk of the volume.
        input_bytes, output_bytes: of a voxel, all channels.
        sum_bytes: of the sum of an output voxel, all channels.
        is_blended: whether windows are blended.
        chunk: output voxels along z of a chunk of the output.
        num_workers: that run the net; None where nobody says.
        is_sparse: whether a mask or empty space may leave few of the windows.
        most_voxels: of the output in a block that is computed slab by slab.
        small_voxels: of the output at most, where blocks stay small.
    """

    shape: Triple
    overlap: Triple
    stride: Triple
    scale: Triple
    input_chunk: Triple = (64, 64, 64)
    input_bytes: int = 1
    output_bytes: int = 1
    sum_bytes: int = 4
    is_blended: bool = False
    chunk: int = CHUNK_TARGET
    num_workers: int | None = None
    is_sparse: bool = False
    most_voxels: int = LARGEST_VOXELS
    small_voxels: int = 0
    region: Box | None = None

    @cached_property
    def counts(self) -> Triple:
        """Number of windows whose cores are as long as the region."""
        return triple(-(-n // s) for n, s in zip(self._region_box.shape, self.stride, strict=True))

    @cached_property
    def _region_box(self) -> Box:
        return self.region or Box.from_shape(self.shape)

    @property
    def num_voxels(self) -> int:
        """Output voxels."""
        return self._region_box.num_voxels * math.prod(self.scale)

    @cached_property
    def is_summed(self) -> bool:
        """Whether voxels of some shards come from several blocks: of blended windows, or of those at their faces."""
        return self.is_blended or any(a % s for a, s in zip(self._region_box.start, self.stride, strict=True))

    def num_blocks(self, block: Triple) -> int:
        """Return the number of blocks of `block` windows."""
        return math.prod(-(-n // b) for n, b in zip(self.counts, block, strict=True))

    def bounds(self, axis: int, block: int) -> list[int]:
        """Return the first window along `axis` of each block of `block` windows, and the end of the last block."""
        size, stride = self.shape[axis], self.stride[axis]
        start, stop = self._region_box.start[axis], self._region_box.stop[axis]
        before = self.overlap[axis] // 2 if self.is_blended else 0
        after = self.overlap[axis] - before if self.is_blended else 0
        end = min(-(-size // stride), -(-(stop + before) // stride))
        later = -(-(start + before) // stride) + block
        return [max(0, (start - after) // stride), *range(later, end, block), end]

    def num_filled(self, block: Triple) -> int:
        """Return the number of blocks of `block` windows that are not empty."""
        return math.prod(map(self.num_along, range(3), block))

    def num_along(self, axis: int, block: int) -> int:
        """Return the number of blocks of `block` windows along `axis` that are not empty."""
        return len(self.bounds(axis, block)) - 1

    def core(self, block: Triple) -> Triple:
        """Return the output voxels of a block."""
        return triple(b * s * f for b, s, f in zip(block, self.stride, self.scale, strict=True))

    def slab_layers(self, block: Triple) -> int:
        """Return the layers of windows of a slab of a block."""
        return slab_layers(block, self.stride, self.scale, None if self.is_summed else self.chunk)

    def slab_bytes(self, block: Triple) -> int:
        """Return the bytes of a worker's slabs: the input of two, a layer of chunks being read, and the output of two.

        Of sums, two bands of all layers that a slab reaches, and a layer of chunks that waits for the rest of them: of
        sums on their way to scratch, or of the output, while the next is added to it.
        """
        layers = self.slab_layers(block)
        depth, height, width = self.core((layers, *block[1:]))
        seen_sides = zip(block[1:], self.stride[1:], self.overlap[1:], strict=True)
        seen_height, seen_width = (b * s + o for b, s, o in seen_sides)
        read = self.input_chunk[0]
        seen = 2 * (layers * self.stride[0] + self.overlap[0] + read) + read
        seen_bytes = seen * seen_height * seen_width * self.input_bytes
        if not self.is_summed:
            return seen_bytes + 2 * depth * height * width * self.output_bytes
        reached = (depth + self.overlap[0] * self.scale[0]) * math.prod(self.scale[1:]) * seen_height * seen_width
        waiting = height * width * 2 * max(SUM_CHUNK_TARGET * self.sum_bytes, self.chunk * self.output_bytes)
        return seen_bytes + 2 * reached * self.sum_bytes + waiting

    def is_fit(self, block: Triple) -> bool:
        """Return whether a block has several slabs, of few bytes, and not so many voxels that a task takes too long."""
        if self.slab_layers(block) == block[0] or math.prod(self.core(block)) > self.most_voxels:
            return False
        return self.slab_bytes(block) <= LARGEST_SLABS

    def fetches(self, axis: int, block: int) -> float:
        """Return how many blocks of `block` windows need a chunk along `axis`, on average."""
        size, chunk, stride = self.shape[axis], self.input_chunk[axis], self.stride[axis]
        before, bounds = self.overlap[axis] // 2, self.bounds(axis, block)
        after = self.overlap[axis] - before

        def needed(first: int, last: int) -> int:
            return -(-min(last * stride + after, size) // chunk) - max(0, first * stride - before) // chunk

        return sum(itertools.starmap(needed, itertools.pairwise(bounds))) / needed(bounds[0], bounds[-1])


def slab_layers(block: Triple, stride: Triple, scale: Triple, chunk: int | None) -> int:
    """Return the layers of windows, along z, of a slab of a block: those of a `chunk` of the output at least.

    Without a chunk, of a block of sums. As long as it has few voxels it is computed as a whole, so that at its end the
    sums of more of its neighbours are there.
    """
    step, *sides = (c * s for c, s in zip(stride, scale, strict=True))
    layer = step * math.prod(n * side for n, side in zip(block[1:], sides, strict=True))
    if chunk is None and block[0] * layer <= WHOLE_SUM:
        return block[0]
    return min(block[0], max(1, -(-(chunk or 0) // step), SLAB_VOXELS // layer))


def choose_block(choice: Triple | str, sizes: Sizes, *, in_slabs: bool) -> Triple:
    """Return windows per block: the recipe's `choice`, or by the volume; larger ones where they are made in slabs.

    Raises:
        PlanError: the recipe's is below one.
    """
    if not isinstance(choice, str):
        if min(choice) < 1:
            raise PlanError(f"windows.block {choice} must be at least 1 on every axis")
        return choice
    block = _small_block(sizes)
    return _large_block(sizes, block) if in_slabs else block


def _small_block(sizes: Sizes) -> Triple:
    """Return the windows of a block near BLOCK_TARGET output voxels, whole chunks where possible."""

    def fitted(target: list[int]) -> Triple:
        axes = zip(sizes.counts, sizes.stride, sizes.scale, target, strict=True)
        return triple(_axis_block(*lengths) for lengths in axes)

    def count(target: list[int]) -> int:
        return sizes.num_blocks(fitted(target))

    def reads(target: list[int]) -> float:
        axes = zip(sizes.overlap, fitted(target), sizes.stride, strict=True)
        return math.prod(1 + o / (b * s) for o, b, s in axes)

    target = [BLOCK_TARGET] * 3
    while count(target) < ENOUGH_BLOCKS and max(target) > CHUNK_TARGET:
        target = _scaled_target(target, target.index(max(target)), 0.5)
    while min(target) < LARGEST_TARGET:
        larger = _scaled_target(target, max(axis for axis in range(3) if target[axis] == min(target)), 2)
        wasteful = reads(target) > LARGEST_READ and count(larger) >= ENOUGH_BLOCKS
        if not wasteful and count(target) <= MOST_BLOCKS:
            break
        target = larger
    return fitted(target)


def _scaled_target(target: list[int], axis: int, factor: float) -> list[int]:
    return [int(t * factor) if i == axis else t for i, t in enumerate(target)]


def _axis_block(count: int, stride: int, scale: int, target: int) -> int:
    most = max(1, min(count, 3 * target // (2 * stride * scale)))

    def cost(block: int) -> tuple[bool, int]:
        core = block * stride * scale
        return core % CHUNK_TARGET != 0, abs(core - target)

    return min(range(1, most + 1), key=cost)


def _large_block(sizes: Sizes, small: Triple) -> Triple:
    """Return the windows of blocks so large that few of them read a chunk, and small enough that workers have enough.

    Where there are no more than enough of the `small` ones, these.
    """
    workers = USUAL_WORKERS if sizes.num_workers is None else sizes.num_workers
    enough = max(ENOUGH_BLOCKS, BLOCKS_PER_WORKER * workers)
    enough *= (SPARSE_FACTOR if sizes.is_sparse else 1) * (SUMS_FACTOR if sizes.is_summed else 1)
    if sizes.num_filled(small) <= enough or sizes.num_voxels <= sizes.small_voxels:
        return small
    along = [
        [(b, sizes.fetches(axis, b), sizes.num_along(axis, b)) for b in _lengths(sizes, axis, small[axis])]
        for axis in range(3)
    ]

    best, least = small, (math.inf, 0)
    for (k, share_z, num_z), (j, share_y, num_y), (i, share_x, num_x) in itertools.product(*along):
        fetches = round(share_z * share_y * share_x, 9)  # alike whatever the order of axes
        if fetches > least[0]:
            continue
        block, num_blocks = (k, j, i), num_z * num_y * num_x
        if (fetches, num_blocks) < least and num_blocks >= enough and sizes.is_fit(block):
            best, least = block, (fetches, num_blocks)
    return best


def _lengths(sizes: Sizes, axis: int, small: int) -> list[int]:
    """Return how many windows a large block may have along `axis`: whole chunks if `small` is, or even parts."""
    step, count = sizes.stride[axis] * sizes.scale[axis], sizes.counts[axis]
    unit = CHUNK_TARGET // math.gcd(CHUNK_TARGET, step)
    unit = unit if small % unit == 0 else 1

    def parts() -> Iterator[int]:
        yield from (align_up(-(-count // num), unit) for num in range(1, MOST_PARTS + 1))
        yield from (length // (unit * step) * unit for length in range(LARGEST_TARGET, LONGEST, LARGEST_TARGET // 2))

    longest = max(small, LONGEST // step)
    return sorted({small, *(length for length in parts() if small <= length <= min(longest, align_up(count, unit)))})
