"""The estimate: the bytes, files, memory and time of a plan, before it runs.

Not here: timing anything (calibrate), or the machine's limits (limits). Everything is a sum over the blocks or shards
of a regular grid, and so a product of sums along the axes: a plan of 10^9 blocks costs as much as one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from volpipe.blockwise.stage import bundle_size
from volpipe.estimation.memory import memory_bytes, net_bytes
from volpipe.geometry.grid import Shape, mirror
from volpipe.inference.plan import Plan
from volpipe.inference.scratch import FOLDERS
from volpipe.inference.windows import CACHE_BYTES, seen_along, windows_along
from volpipe.volumes.volume import Volume

LEAST_LAYERS, MOST_SWEPT = 3, 1 << 18  # of blocks, to find the moment of most scratch: 50 ms
CHUNK_BYTES = 64  # beside the voxels of a chunk, at most: 16 in the index of its file, headers, a checksum
BLOCKS_WAITING = 64  # with windows in scratch at most, as in the schedule


@dataclass(frozen=True)
class UnitCosts:
    """Cost of a unit of work, averaged over a few blocks; seconds are those of one worker while all work.

    Attributes:
        num_blocks: tried.
        start_seconds: until a worker has loaded its net and computed a first window.
        measure_seconds: per voxel of the volume.
        factor_seconds, infer_seconds: per window.
        sum_seconds: to read back one voxel of a block tensor.
        write_seconds: to round, compress and write one voxel of the output.
        coarsen_seconds: per voxel of the finer level.
        window_bytes: stored, of one window tensor.
        sum_bytes: stored, per voxel of a block tensor.
        output_bytes, coarse_bytes: stored, per voxel of level 0 and of coarser levels, all channels.
        peak_bytes: highest resident memory of a worker.
        has_bytes: whether bytes were measured; else they are upper bounds, where blocks were tried on no real voxels.
    """

    num_blocks: int
    start_seconds: float
    measure_seconds: float
    factor_seconds: float
    infer_seconds: float
    sum_seconds: float
    write_seconds: float
    coarsen_seconds: float
    window_bytes: float
    sum_bytes: float
    output_bytes: float
    coarse_bytes: float
    peak_bytes: int
    has_bytes: bool = True


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of one stage; bytes as stored, `seconds` of all workers together, 0 where nothing was timed."""

    name: str
    units: int
    read_bytes: float
    written_bytes: float
    files: int
    seconds: float
    label: str = "cpu"

    def part(self, share: float) -> StageEstimate:
        """Return the estimate of a `share` of the units; statistics are always measured over all."""
        if share == 1.0 or self.name in ("measure", "histogram"):
            return self
        return replace(
            self,
            units=round(share * self.units),
            read_bytes=share * self.read_bytes,
            written_bytes=share * self.written_bytes,
            files=round(share * self.files),
            seconds=share * self.seconds,
        )

    @property
    def num_tasks(self) -> int:
        """The approximate number of tasks."""
        return math.ceil(self.units / bundle_size(self.seconds / self.units)) if self.seconds else self.units


@dataclass(frozen=True)
class Estimate:
    """Estimate of a plan.

    Attributes:
        stages: in the order of a voxel's life.
        rates: measured on a few blocks; without them, bytes are upper bounds (nothing compresses) and times unknown.
        amplification: fetches of a chunk of the volume on the way to the net at most, on average: fewer where a worker
            still has it from the block before.
        output_bytes, output_files, output_folders: of all levels.
        scratch_bytes, scratch_files, scratch_folders: at their highest; folders of blocks, not of their arrays.
        memory_bytes: highest resident memory of a worker; of threads, that of the process that they are all in.
        has_net: whether `memory_bytes` holds the net's own; on a GPU none of it is the worker's.
        seconds: from the first task to the last, None without rates.
        stage_seconds: of each stage by itself, on these workers; stages work side by side.
    """

    stages: tuple[StageEstimate, ...]
    rates: UnitCosts | None
    amplification: float
    output_bytes: float
    output_files: int
    output_folders: int
    scratch_bytes: float
    scratch_files: int
    scratch_folders: int
    memory_bytes: float
    seconds: float | None
    stage_seconds: Mapping[str, float]
    has_net: bool = True

    @property
    def is_measured(self) -> bool:
        """Whether bytes were measured; else they are upper bounds."""
        return self.rates is not None and self.rates.has_bytes

    @property
    def inodes(self) -> int:
        """Files and folders of output and scratch, which a disk and its quotas count alike."""
        return self.output_files + self.output_folders + self.scratch_files + self.scratch_folders

    @property
    def read_bytes(self) -> float:
        return sum(stage.read_bytes for stage in self.stages)

    @property
    def written_bytes(self) -> float:
        return sum(stage.written_bytes for stage in self.stages)

    def by_name(self) -> Mapping[str, StageEstimate]:
        return {stage.name: stage for stage in self.stages}

    @property
    def seconds_per_unit(self) -> Mapping[str, float]:
        """Seconds of a worker for a unit of each stage; none where nothing was timed."""
        return {stage.name: stage.seconds / stage.units for stage in self.stages if stage.seconds}


@dataclass(frozen=True)
class Slots:
    """Workers of "cpu" and "gpu" stages.

    They are the same ones where `shared`, threads of the driver where `in_process`; `on_gpu` where nets are on GPUs.
    """

    cpu: int
    gpu: int
    shared: bool
    on_gpu: bool = False
    in_process: bool = False

    @property
    def num_threads(self) -> int:
        """Workers in one process that run nets."""
        return self.gpu if self.in_process else 1

    def seconds(self, stages: Sequence[StageEstimate]) -> float:
        """Return the seconds of the stages, side by side: no less than those of the longest."""
        spent = {"cpu": 0.0, "gpu": 0.0}
        for stage in stages:
            spent[stage.label] += stage.seconds
        apart = max(spent["cpu"] / self.cpu, spent["gpu"] / self.gpu)
        busy = sum(spent.values()) / self.gpu if self.shared else apart
        return max([busy, *map(self.elapsed, stages)])

    def elapsed(self, stage: StageEstimate) -> float:
        """Return the seconds of a stage by itself: it keeps no more workers busy than it has units."""
        num_workers = self.gpu if self.shared or stage.label == "gpu" else self.cpu
        return stage.seconds / max(1, min(num_workers, stage.units))


@dataclass(frozen=True)
class StageTime:
    """Time of one stage: the number of its tasks, and their seconds, summed over workers."""

    name: str
    num_tasks: int
    seconds: float


@dataclass(frozen=True)
class StageTimes:
    """Forecast time of a segmentation, an evaluation or a training, whose stages never overlap.

    Attributes:
        stages: in order.
        start_seconds: of a worker, before its first block.
        num_voxels: of the tried blocks.
        is_guess: whether their voxels were synthetic, because the input does not exist yet.
        num_workers: of the site.
        memory_bytes, gpu_bytes: highest memory of a worker, and on its GPU; 0 where it was not measured.
    """

    stages: tuple[StageTime, ...]
    start_seconds: float
    num_voxels: int
    is_guess: bool
    num_workers: int = 1
    memory_bytes: float = 0.0
    gpu_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from the first task to the last."""
        return self.start_seconds + sum(map(self.elapsed, self.stages))

    def elapsed(self, stage: StageTime) -> float:
        """Return the seconds from the first task of `stage` to its last, which may leave workers idle."""
        return stage.seconds * math.ceil(stage.num_tasks / self.num_workers) / stage.num_tasks


def estimate(
    plan: Plan, volume: Volume, voxel_bytes: float, slots: Slots, rates: UnitCosts | None = None, share: float = 1.0
) -> Estimate:
    """Return the estimate of `plan`.

    Args:
        volume: its input, for the chunks that it is stored in.
        voxel_bytes: stored, per voxel of `volume`, all channels.
        slots: workers of the site.
        rates: measured on a few blocks, where they are known.
        share: of the blocks in the region that are selected; the rest costs nothing.
    """
    totals = _Totals(plan, volume, voxel_bytes, rates or upper_bounds(plan), slots)
    stages = tuple(stage.part(share) for stage in totals.stages() if stage.units)
    most_waiting = BLOCKS_WAITING + totals.late  # some that the net has done are not discarded yet
    num_waiting = min(totals.product("blocks"), most_waiting) if plan.mode == "stored" else 0
    windows = min(num_waiting * plan.lattice.windows_per_block, totals.product("windows"))
    files, folders = (num_waiting, FOLDERS * num_waiting) if plan.recipe.tensors.is_sharded else (windows, 0)
    voxels, sum_files = totals.highest_scratch()
    return Estimate(
        stages=stages,
        rates=rates,
        amplification=totals.fetched_voxels / totals.product("touched_once"),
        output_bytes=share * totals.output_bytes,
        output_files=math.ceil(share * totals.output_files),
        output_folders=math.ceil(share * plan.num_folders),
        scratch_bytes=windows * totals.rates.window_bytes
        + voxels * totals.rates.sum_bytes
        + files_bytes(plan, sum_files),
        scratch_files=files + sum_files,
        scratch_folders=folders + FOLDERS * sum_files,
        memory_bytes=memory_bytes(
            plan, rates.peak_bytes if rates else None, on_gpu=slots.on_gpu, num_threads=slots.num_threads
        ),
        seconds=slots.seconds(stages) if rates else None,
        stage_seconds={stage.name: slots.elapsed(stage) for stage in stages},
        has_net=rates is not None or slots.on_gpu or net_bytes(plan) is not None,
    )


def files_bytes(plan: Plan, num_files: int) -> float:
    """Return the bytes of files of sums beside their voxels: an entry of the index, and a frame, for each chunk."""
    chunks = max(
        math.prod(-(-n // c) for n, c in zip(part.shape, plan.sum_chunk, strict=True)) for part in plan.sum_parts
    )
    return float(num_files * plan.net.out_channels * chunks * CHUNK_BYTES) if num_files else 0.0


def upper_bounds(plan: Plan) -> UnitCosts:
    """Return the rates of a plan whose voxels do not compress, untimed."""
    channels = plan.net.out_channels
    voxel = float(plan.net.combined_channels * plan.dtype.itemsize)
    window = float(plan.source.num_channels * math.prod(plan.window) * 4)
    sums = float(channels * plan.sum_dtype.itemsize)
    return UnitCosts(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, window, sums, voxel, voxel, 0, has_bytes=False)


def timed_alone(rates: UnitCosts, plan: Plan) -> UnitCosts:
    """Return `rates` with the bytes of a `plan` whose voxels do not compress."""
    bound, names = upper_bounds(plan), ("window_bytes", "sum_bytes", "output_bytes", "coarse_bytes")
    return replace(rates, has_bytes=False, **{name: getattr(bound, name) for name in names})


@dataclass(frozen=True)
class _Axis:
    """Sums along one axis of a plan, in its region; of the sums of blocks, in output voxels.

    Attributes:
        blocks, windows: computed.
        touched: voxels in the chunks of the volume that the windows of each block touch, summed over blocks.
        touched_once: voxels in all of these chunks.
        own: as `touched`, of the chunks that a block's own voxels touch.
        direct: shards that one block reaches.
        reached: voxels that the sums of blocks reach.
        finished: of these, voxels in shards that no later block adds to.
        direct_voxels: of these, voxels in shards that no other block adds to.
        senders: blocks that reach shards which later blocks add to.
    """

    blocks: int
    windows: int
    touched: int
    touched_once: int
    own: int
    direct: int
    reached: int
    finished: int
    direct_voxels: int
    senders: int

    @classmethod
    def from_plan(cls, plan: Plan, axis: int, chunk: int) -> _Axis:
        n, unit, scale, size = plan.source.shape[axis], plan.net.shrink[axis], plan.net.scale[axis], plan.shard[axis]
        cell, first = plan.blocks.cell[axis] * unit, plan.region.start[axis]
        ends = [_mirrored_ends(start, stop - 1, n) for start, stop in seen_along(plan, axis)]
        own = [(max(0, a), min(a + cell, n) - 1) for a in range(-plan.lattice.phase[axis] * unit, n, cell)]
        reach = [((a - first) * scale, (b - first) * scale) for a, b in plan.reaches[axis]]
        finished, direct_voxels = [0] * len(reach), 0
        for i in range(plan.shards().counts[axis]):
            blocks = plan.blocks_along(axis, i)
            low, high = reach[blocks[-1]]
            voxels = min((i + 1) * size, high) - max(i * size, low)
            finished[blocks[-1]] += voxels
            direct_voxels += voxels if len(blocks) == 1 else 0
        lengths = [high - low for low, high in reach]
        lows, highs = zip(*ends, strict=True)
        return cls(
            blocks=sum(map(bool, lengths)),
            windows=len(windows_along(plan, axis)),
            touched=sum(_voxels_touched(low, high, chunk, n) for low, high in ends),
            touched_once=_voxels_touched(min(lows), max(highs), chunk, n),
            own=sum(_voxels_touched(low, high, chunk, n) for low, high in own),
            direct=sum(plan.direct[axis]),
            reached=sum(lengths),
            finished=sum(finished),
            direct_voxels=direct_voxels,
            senders=sum(length > done for length, done in zip(lengths, finished, strict=True)),
        )


@dataclass(frozen=True)
class _Totals:
    """Everything is a sum over a regular grid, and so a product of sums along the axes."""

    plan: Plan
    volume: Volume
    voxel_bytes: float
    rates: UnitCosts
    slots: Slots

    @cached_property
    def axes(self) -> tuple[_Axis, _Axis, _Axis]:
        z, y, x = (_Axis.from_plan(self.plan, axis, chunk) for axis, chunk in enumerate(self.volume.spatial_chunks))
        return z, y, x

    def product(self, name: str) -> int:
        return math.prod(getattr(axis, name) for axis in self.axes)

    @property
    def fetched_voxels(self) -> int:
        """Voxels of the chunks that are fetched for windows, at most: by each block, or once by each worker that keeps
        them all."""
        touched, once, volume = self.product("touched"), self.product("touched_once"), self.volume
        num_bytes = once * volume.num_channels * volume.dtype.itemsize
        if not any(self.plan.overlap) or num_bytes > CACHE_BYTES:
            return touched
        return min(touched, once * (self.slots.cpu if self.plan.mode == "stored" else self.slots.gpu))

    @property
    def volume_bytes(self) -> float:
        """Stored bytes of the chunks that are fetched for windows, at most."""
        return self.fetched_voxels * self.voxel_bytes

    @cached_property
    def bundle(self) -> int:
        """Blocks of a task; the most that there may be where the pace of the net is unknown."""
        if self.plan.has_slabs:
            return 1
        pace = self.product("windows") * self.rates.infer_seconds / self.product("blocks")
        return bundle_size(pace, self.axes[2].blocks, self.slots.gpu)

    @property
    def missed(self) -> float:
        """About which share of blocks leave their own part to scratch too, 0 to 1, for `reassemble`.

        A block finishes the shards that no later block adds to, if what the earlier ones add is there. Of those that
        run side by side, all but the first have an earlier neighbour that is still at work; of the blocks of a task
        only the first has it on another worker. Blocks that take as long are done at the same moment: either may be
        first.
        """
        if not self.plan.num_sums or self.slots.gpu == 1:
            return 0.0
        share = 1 - 1 / min(self.slots.gpu, self.product("blocks"))
        if self.plan.has_slabs:
            return share
        return 0.5 * share if self.bundle in (1, self.axes[2].blocks) else share / self.bundle

    @property
    def sent_voxels(self) -> int:
        """Voxels that blocks leave to later ones."""
        return self.product("reached") - self.product("finished")

    @property
    def kept_voxels(self) -> int:
        """Voxels that blocks keep to themselves where they finish their shards, and store where they miss."""
        return self.product("finished") - self.product("direct_voxels")

    @property
    def stored_voxels(self) -> float:
        return self.sent_voxels + self.missed * self.kept_voxels

    @property
    def late(self) -> int:
        """Blocks that may be begun after the last that a sum waits for, before that sum is gone.

        Twice as many tasks are sent as there are workers; while sums are discarded, each brings back another.
        """
        return 3 * self.slots.gpu * self.bundle

    def highest_scratch(self) -> tuple[float, int]:
        """Return the most voxels and files of sums at a time, as blocks begin in order, whichever ends first.

        A part of a block's sum is there from when the block begins until `late` blocks after the last block whose
        shards need it. With one worker no block leaves its own shards to others; with more, each may.
        """
        if not self.plan.num_sums:
            return 0.0, 0
        counts = self._swept_counts
        steps = np.zeros((2, math.prod(counts) + 1))
        for part in range(len(self.plan.sum_parts)):
            if part == 0 and self._is_aligned and self.slots.gpu == 1:
                continue
            lengths, direct, last = zip(
                *(self._part_along(axis, part, n) for axis, n in enumerate(counts)), strict=True
            )
            voxels = reduce(np.multiply.outer, lengths)
            voxels -= reduce(np.multiply.outer, direct) if part == 0 else 0.0
            numbers = np.ravel_multi_index(np.meshgrid(*last, indexing="ij"), counts)
            ends = np.minimum(numbers.ravel() + 1 + self.late, math.prod(counts))
            for step, sizes in zip(steps, (voxels.ravel(), (voxels > 0).ravel().astype(float)), strict=True):
                step[:-1] += sizes
                step -= np.bincount(ends, sizes, len(step))
        most = steps.cumsum(axis=1).max(axis=1) * (self.plan.blocks.counts[1] / counts[1])
        return float(most[0]), math.ceil(most[1])

    @property
    def _swept_counts(self) -> Shape:
        """Blocks along each axis that the sweep goes through: all, or some layers of a large grid, which are alike.

        Of layers that are large themselves these are some rows, which stand for the others.
        """
        nz, ny, nx = self.plan.blocks.counts
        num_rows = min(ny, max(LEAST_LAYERS, MOST_SWEPT // (LEAST_LAYERS * nx)))
        return min(nz, max(LEAST_LAYERS, MOST_SWEPT // (num_rows * nx))), num_rows, nx

    def _part_along(self, axis: int, part: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return of the first `count` blocks along `axis`: voxels of a part of the sum, of these those in shards that
        no other block adds to, and the last block that adds to a shard of the part.
        """
        plan, size, box = self.plan, self.plan.shard[axis], self.plan.sum_parts[part]
        is_direct = plan.direct[axis]
        lengths, direct, last = np.zeros(count), np.zeros(count), np.arange(count)
        for k in range(count):
            block = plan.blocks.number(tuple(k if other == axis else 0 for other in range(3)))
            reached = box.shift(plan.core_start(block)) & plan.sum_box(block)
            start, stop = reached.start[axis], reached.stop[axis]
            if stop <= start:
                continue
            shards = range(start // size, -(-stop // size))
            lengths[k] = stop - start
            direct[k] = sum(min((i + 1) * size, stop) - max(i * size, start) for i in shards if is_direct[i])
            last[k] = min(max(plan.blocks_along(axis, i)[-1] for i in shards), count - 1)
        return lengths, direct, last

    @property
    def _is_aligned(self) -> bool:
        """Whether shards lie within cores, so that a block that misses nothing leaves no core to scratch."""
        places = zip(self.plan.region.start, self.plan.lattice.corner, self.plan.blocks.cell, strict=True)
        return not any((a - c) % n for a, c, n in places)

    @cached_property
    def _sum_parts(self) -> list[tuple[float, float]]:
        """Files and voxels of each part of the block tensors, in the order of `Plan.sum_parts`."""
        z, y, x = self.axes
        blocks = self.product("blocks")
        if not self._is_aligned:
            return [(blocks if self.plan.num_sums else 0, self.stored_voxels), (0, 0), (0, 0), (0, 0)]
        return [
            (self.missed * blocks, self.missed * self.kept_voxels),
            (z.senders * y.blocks * x.blocks, (z.reached - z.finished) * y.reached * x.reached),
            (z.blocks * y.senders * x.blocks, z.finished * (y.reached - y.finished) * x.reached),
            (z.blocks * y.blocks * x.senders, z.finished * y.finished * (x.reached - x.finished)),
        ]

    @property
    def direct_files(self) -> int:
        return round(self.level_files(0) * self.product("direct") / len(self.plan.shards()))

    def level_files(self, level: int) -> int:
        plan = self.plan
        is_sharded = plan.folders.is_sharded
        unit = plan.shard if is_sharded else plan.chunk
        cells = math.prod(-(-n // c) for n, c in zip(plan.level_shape(level), unit, strict=True))
        return cells * (len(plan.arrays) if is_sharded else plan.net.combined_channels)

    def level_bytes(self, level: int) -> float:
        plan, rates = self.plan, self.rates
        voxels = math.prod(plan.level_shape(level)) * (rates.coarse_bytes if level else rates.output_bytes)
        chunks = math.prod(-(-n // c) for n, c in zip(plan.level_shape(level), plan.chunk, strict=True))
        return voxels + (0 if rates.has_bytes else chunks * plan.net.out_channels * CHUNK_BYTES)

    @property
    def output_bytes(self) -> float:
        return sum(self.level_bytes(level) for level in range(len(self.plan.factors)))

    @property
    def output_files(self) -> int:
        """Files of chunks or shards, and of metadata. The groups are its own and that of its runs; the arrays are its
        levels."""
        levels, arrays = len(self.plan.factors), len(self.plan.arrays)
        groups = 2 + (arrays if arrays > 1 else 0) + self.plan.finest * arrays
        metadata = (groups + arrays * levels) * self.plan.folders.num_files
        return metadata + sum(self.level_files(level) for level in range(levels))

    def stages(self) -> Iterable[StageEstimate]:
        """Yield all stages, also those without units."""
        yield from self._measure()
        yield self._factor()
        yield self._infer()
        yield self._reassemble()
        for level in range(1, len(self.plan.factors)):
            finer = math.prod(self.plan.level_shape(level - 1))
            yield StageEstimate(
                f"pyramid {level}",
                len(self.plan.shards(level)),
                self.level_bytes(level - 1),
                self.level_bytes(level),
                self.level_files(level),
                finer * self.rates.coarsen_seconds,
            )

    def _measure(self) -> Iterator[StageEstimate]:
        rule = self.plan.grey_rule
        read, seconds = self.product("own") * self.voxel_bytes, self.rates.measure_seconds
        for name, is_needed in (("measure", rule.needs_measuring), ("histogram", rule.needs_histogram())):
            if is_needed:
                total = math.prod(self.plan.source.shape) * seconds
                yield StageEstimate(name, len(self.plan.blocks), read, 0.0, 0, total)

    def _factor(self) -> StageEstimate:
        num_blocks, num_windows = self.product("blocks"), self.product("windows")
        return StageEstimate(
            "factor",
            num_blocks if self.plan.mode == "stored" else 0,
            self.volume_bytes,
            num_windows * self.rates.window_bytes,
            num_blocks if self.plan.recipe.tensors.is_sharded else num_windows,
            num_windows * self.rates.factor_seconds,
        )

    def _infer(self) -> StageEstimate:
        num_windows, rates, found = self.product("windows"), self.rates, 1 - self.missed
        direct = self.product("direct_voxels")
        finished = found * (math.prod(self.plan.out_shape) - direct)
        shared_files = found * (self.level_files(0) - self.direct_files)
        windows = num_windows * rates.window_bytes if self.plan.mode == "stored" else self.volume_bytes
        return StageEstimate(
            "infer",
            self.product("blocks"),
            windows + found * self.stored_voxels * rates.sum_bytes,
            (direct + finished) * rates.output_bytes + self.stored_voxels * rates.sum_bytes,
            self.direct_files + round(shared_files + sum(count for count, _ in self._sum_parts)),
            num_windows * rates.infer_seconds
            + self.slots.gpu * rates.start_seconds
            + found * (self.sent_voxels * rates.sum_seconds)
            + finished * rates.write_seconds,
            "gpu",
        )

    def _reassemble(self) -> StageEstimate:
        plan, rates, missed = self.plan, self.rates, self.missed
        rest = missed * (math.prod(plan.out_shape) - self.product("direct_voxels"))
        return StageEstimate(
            "reassemble",
            math.ceil(missed * plan.num_sums),
            missed * self.stored_voxels * rates.sum_bytes,
            rest * rates.output_bytes,
            round(missed * (self.level_files(0) - self.direct_files)),
            missed * (self.sent_voxels + self.kept_voxels) * rates.sum_seconds + rest * rates.write_seconds,
        )


def _mirrored_ends(low: int, high: int, size: int) -> tuple[int, int]:
    """Return the first and last voxel of an axis in low..high, mirrored at the faces."""
    if low >= 0 and high < size:
        return low, high
    voxels = mirror(low, high + 1, size)
    return int(voxels.min()), int(voxels.max())


def _voxels_touched(low: int, high: int, cell: int, size: int) -> int:
    """Return the voxels in the cells that low..high touch, of an axis of `size`."""
    return min(size, (high // cell + 1) * cell) - low // cell * cell
