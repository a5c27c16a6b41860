"""The sums of blocks in scratch: their voxels and files, in all and at a time.

Not here: the bytes that a voxel takes (calibrate), or the reading and writing (scratch). A block finishes the shards
that no later block adds to, if what the earlier ones add is there; it *misses* those whose earlier blocks are still at
work on another worker, and leaves its own part to scratch too, for `reassemble`. Everything is a sum over a regular
grid, and so a product of sums along the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from volpipe.inference.plan import Plan

MOST_SIMULATED = 20_000  # blocks, for the share that miss


@dataclass(frozen=True)
class Along:
    """Sums along one axis of a plan, in output voxels and blocks.

    Attributes:
        reached: voxels that sums reach, of all blocks.
        finished: of these, voxels in shards that no later block adds to.
        direct: of these, voxels in shards that no other block adds to.
        blocks: that are computed.
        senders: blocks that reach shards which later blocks add to.
        pairs: (block, shard) where the block's sum reaches the shard.
    """

    reached: int
    finished: int
    direct: int
    blocks: int
    senders: int
    pairs: int

    @classmethod
    def from_plan(cls, plan: Plan, axis: int) -> Along:
        scale, size, first = plan.net.scale[axis], plan.shard[axis], plan.region.start[axis]
        reach = [((a - first) * scale, (b - first) * scale) for a, b in plan.reach_along(axis)]
        finished = [0] * len(reach)
        direct = pairs = 0
        for i in range(plan.shards().counts[axis]):
            blocks = plan.blocks_along(axis, i)
            low, high = reach[blocks[-1]]
            voxels = min((i + 1) * size, high) - max(i * size, low)
            finished[blocks[-1]] += voxels
            direct += voxels if len(blocks) == 1 else 0
            pairs += len(blocks)
        lengths = [high - low for low, high in reach]
        senders = sum(n > done for n, done in zip(lengths, finished, strict=True))
        return cls(sum(lengths), sum(finished), direct, sum(map(bool, lengths)), senders, pairs)


@dataclass(frozen=True)
class Sums:
    """The sums of a plan's blocks, where `num_workers` run the net and a task has a `bundle` of blocks."""

    plan: Plan
    num_workers: int
    bundle: int

    @cached_property
    def axes(self) -> tuple[Along, Along, Along]:
        return Along.from_plan(self.plan, 0), Along.from_plan(self.plan, 1), Along.from_plan(self.plan, 2)

    @cached_property
    def missed(self) -> float:
        """Share of blocks, 0 to 1, that cannot finish their shards."""
        z, y, x = (axis.blocks for axis in self.axes)
        counts, lead = (z, y, x), int(self.plan.has_slabs)
        return missed_share(counts, self.num_workers, self.bundle, lead) if self.plan.num_sums else 0.0

    @property
    def direct_voxels(self) -> int:
        """Voxels in shards that one block writes alone."""
        return math.prod(axis.direct for axis in self.axes)

    @property
    def sent_voxels(self) -> int:
        """Voxels that blocks leave to later ones."""
        return math.prod(axis.reached for axis in self.axes) - math.prod(axis.finished for axis in self.axes)

    @property
    def own_voxels(self) -> int:
        """Voxels that blocks keep to themselves where they finish their shards, and store where they miss."""
        return math.prod(axis.finished for axis in self.axes) - self.direct_voxels

    @property
    def stored_voxels(self) -> float:
        return self.sent_voxels + self.missed * self.own_voxels

    @property
    def num_reads(self) -> float:
        """How often parts of sums are read: for each shard that one reaches and that its block does not finish."""
        pairs = math.prod(axis.pairs for axis in self.axes)
        return pairs - (len(self.plan.shards()) - self.missed * self.plan.num_sums)

    @property
    def num_files(self) -> int:
        return round(sum(count for count, _ in self._parts))

    def highest(self) -> tuple[float, int]:
        """Return the most voxels and files in scratch at a time: one layer of the first part, a row of the second."""
        _, ny, nx = (axis.blocks for axis in self.axes)
        # Twice as many tasks are sent as there are workers; while sums are discarded, each brings back another.
        running = 3 * self.num_workers * self.bundle
        late = [running, ny * nx + nx + 1 + running, nx + 1 + running, 1 + running]  # to the diagonal neighbour
        if not self._is_aligned:
            late[0] = late[1]
        alive = [min(count, most) for (count, _), most in zip(self._parts, late, strict=True)]
        voxels = sum(voxels * n / count for (count, voxels), n in zip(self._parts, alive, strict=True) if count)
        return voxels, math.ceil(sum(alive))

    @property
    def _is_aligned(self) -> bool:
        """Whether shards lie within cores, so that no core goes to scratch."""
        places = zip(self.plan.region.start, self.plan.lattice.corner, self.plan.blocks.cell, strict=True)
        return not any((a - c) % n for a, c, n in places)

    @cached_property
    def _parts(self) -> list[tuple[float, float]]:
        """Files and voxels of each part of the block tensors, in the order of `Plan.sum_parts`."""
        z, y, x = self.axes
        blocks = z.blocks * y.blocks * x.blocks
        if not self._is_aligned:
            return [(blocks if self.plan.num_sums else 0, self.stored_voxels), (0, 0), (0, 0), (0, 0)]
        return [
            (self.missed * blocks, self.missed * self.own_voxels),
            (z.senders * y.blocks * x.blocks, (z.reached - z.finished) * y.reached * x.reached),
            (z.blocks * y.senders * x.blocks, z.finished * (y.reached - y.finished) * x.reached),
            (z.blocks * y.blocks * x.senders, z.finished * y.finished * (x.reached - x.finished)),
        ]


def missed_share(counts: Sequence[int], num_workers: int, bundle: int, lead: int = 0) -> float:
    """Return the share of blocks, 0 to 1, whose earlier neighbours are not done when they are, or `lead` blocks before.

    Workers take bundles of blocks in turn, in ascending order, and all blocks take as long; of two that are done at the
    same moment either may be first.
    """
    _, ny, nx = counts
    num_simulated = min(math.prod(counts), MOST_SIMULATED)

    def done(number: int) -> tuple[int, int]:
        turn, place = divmod(number, bundle)
        return turn % num_workers, turn // num_workers * bundle + place

    missed = 0.0
    for number in range(num_simulated):
        x, y, z = number % nx, number // nx % ny, number // (nx * ny)
        worker, end = done(number)
        share = 0.0
        for dz, dy, dx in itertools.product((0, 1), repeat=3):
            if (dz or dy or dx) and z >= dz and y >= dy and x >= dx:
                other, other_end = done(number - (dz * ny + dy) * nx - dx)
                if other != worker:
                    share = max(share, 1.0 if other_end > end - lead else 0.5 * (other_end == end - lead))
        missed += share
    return missed / num_simulated
