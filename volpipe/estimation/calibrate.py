"""Calibration: a few blocks run in a folder of their own, which is deleted, to measure the cost of a unit of work.

Not here: the estimate of the whole plan (estimate). Every worker of the site takes part, so that times include their
competition. It takes no more than 20 s, whatever the volume and the net: where whole blocks would take longer, smaller
ones are tried, and smaller windows where one of the plan's own would; times are scaled.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.phase import Progress, Show
from volpipe.blockwise.task import work_once
from volpipe.blockwise.usage import peak_bytes
from volpipe.blockwise.work import Steps, each
from volpipe.errors import ChunkError, RunError, RunStopped
from volpipe.estimation.estimate import UnitCosts, upper_bounds
from volpipe.estimation.memory import array_bytes, net_bytes
from volpipe.geometry.block_shape import SLAB_VOXELS
from volpipe.geometry.grid import Box, Grid, triple
from volpipe.inference.infer import block_sums
from volpipe.inference.intensity import Affine
from volpipe.inference.output import create_output, finish, read_voxels, write_voxels
from volpipe.inference.plan import Plan, make_plan
from volpipe.inference.runner import load_runner, smaller_windows
from volpipe.inference.scratch import ScratchTensors, factor
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.runs import worker
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Job
from volpipe.volumes.storage.paths import delete, locate
from volpipe.volumes.storage.tensorstore import downsample, transferred
from volpipe.volumes.volume import Volume

MOST_WORKERS = 8
BLOCKS_EACH = 3  # the first of them warms the worker up
# Of more blocks on a GPU, which reads and writes others while it computes one: of two of 0.05 s each, which were tried
# before, half of the time was begin and end (H100, 2026-11-27).
GPU_SECONDS, MOST_ON_GPU = 1.0, 16
MANY_BLOCKS = 5  # along an axis: those at its faces do not matter
MOST_SECONDS = 20.0  # of all of it, from when the first worker begins
PROBE_SECONDS, BUDGET_SECONDS = 0.5, 4.0  # of the first window, and of all windows after it: other steps take time too
LONG_SECONDS = 4.0  # a first block that takes as long is sample enough
NUM_PASSES = 4  # of windows through the net: a first block, two that are timed, and one whose output is written
FACTOR_SECONDS = 3e-7  # to store a voxel of a window (gzip, one core, 2026-11)
MOST_FACTOR_SECONDS = 1.0  # to store the windows of a block that does not store them
SAMPLED_CHUNKS, REMOTE_CHUNKS, LEAST_CHUNKS, SAMPLE_SECONDS = 64, 12, 8, 0.5
READERS, VOXELS_AT_ONCE = 4, 2**24  # of the sample, with the decoded chunks that may lie in memory
KEPT_VOXELS = 2**16  # of each of its chunks
# Whose writing is timed: a shard takes milliseconds whatever is in it, and blocks of slow nets are small (2026-11-28).
WRITTEN_VOXELS = 2**21
SEED = 0
BEGUN = "begun"  # a file in a worker's folder


@dataclass(frozen=True)
class VolumeSample:
    """Some chunks of a volume: stored bytes per voxel, all channels, and a normalisation good enough for timing."""

    voxel_bytes: float
    normalise: Affine


def sample(plan: Plan, volume: Volume) -> VolumeSample:
    """Read chunks of `volume` here and there, for half a second at most where those are enough; few from far away."""
    samples = [_sample_chunks(part) for part in volume.parts]
    chunks = [chunks for _, chunks in samples if chunks is not None]
    mapped = plan.grey_rule.sampled_affine(chunks) if len(chunks) == len(samples) else Affine()
    return VolumeSample(sum(voxel_bytes for voxel_bytes, _ in samples), mapped)


def _sample_chunks(volume: Volume) -> tuple[float, np.ndarray | None]:
    """Return the stored bytes of a voxel, all channels, and voxels (c, n) of some chunks; None if none can be read."""
    reader, chunk = volume.open(), volume.spatial_chunks
    grid = Grid(volume.spatial_shape, chunk)
    most = SAMPLED_CHUNKS if isinstance(volume.folder, Path) else REMOTE_CHUNKS
    boxes = [grid.box(n) for n in Random(SEED).sample(range(len(grid)), min(most, len(grid)))]
    at_once = max(1, VOXELS_AT_ONCE // math.prod(chunk))
    stop, before = time.perf_counter() + SAMPLE_SECONDS, transferred().read

    def read(number: int) -> tuple[int, np.ndarray] | None:
        """Return the number of voxels of a chunk, and some of them; None where time is up or it is damaged."""
        if number >= min(LEAST_CHUNKS, at_once) and time.perf_counter() > stop:
            return None
        with suppress(ChunkError):  # the run names it
            voxels = reader.read(boxes[number]).reshape(volume.num_channels, -1)
            return boxes[number].num_voxels, voxels[:, : KEPT_VOXELS // len(voxels)].copy()
        return None

    with ThreadPoolExecutor(min(READERS, at_once), "volpipe-sample") as pool:
        chunks = [result for result in pool.map(read, range(len(boxes))) if result is not None]
    if not chunks:
        return float(volume.dtype.itemsize * volume.num_channels), None
    voxel_bytes = (transferred().read - before) / sum(num_voxels for num_voxels, _ in chunks)
    return voxel_bytes, np.concatenate([values for _, values in chunks], axis=1)


OnTry = Callable[[float, float], None]
R = TypeVar("R")


class TooSlowError(RunError):
    """No window could be tried in time."""


def calibrate(
    plan: Plan, normalise: Affine, num_workers: int, folder: Path, on_try: OnTry = lambda seconds, most: None
) -> Steps[tuple[UnitCosts, float]]:
    """Return the rates of `plan`, from a few blocks computed by every worker in `folder`, which is deleted.

    Beside them, return when the first worker began, in seconds since 1970.

    Args:
        normalise: a normalisation good enough for timing.
        num_workers: that run nets.
        folder: need not exist.
        on_try: called now and then with the seconds that workers have tried blocks, and the most that they may.

    Raises:
        RunStopped: a block fails; the whole run would.
        TooSlowError: no worker is done in time.
    """
    rng, num = np.random.default_rng(SEED), min(num_workers, MOST_WORKERS)
    try:
        jobs = [_job(plan, normalise, folder / str(n)) for n in range(num)]
        blocks = [[_inner_block(plan, rng) for _ in range(BLOCKS_EACH)] for _ in range(num)]
        watch = _time_limit([folder / str(n) / BEGUN for n in range(num)], on_try)
        records = yield from each(
            "calibrate", "calibrate", lambda n: (jobs[n], blocks[n]), num, label="gpu", show=watch
        )
    finally:
        delete(folder)
    rates = [_result_of(r) for r in records]
    mean = dataclasses.replace(
        UnitCosts(*np.mean([dataclasses.astuple(r) for r in rates], axis=0).tolist()),
        num_blocks=sum(r.num_blocks for r in rates),
        peak_bytes=max(r.peak_bytes for r in rates),
        has_bytes=all(r.has_bytes for r in rates),
    )
    return mean, min(r.usage.started for r in records)


def calibration_bytes(plan: Plan, num_workers: int) -> float:
    """Return the bytes on the disk while `num_workers` try blocks, if nothing compresses."""
    bound, windows, voxels = upper_bounds(plan), plan.lattice.windows_per_block, math.prod(plan.sum_shape)
    block = windows * bound.window_bytes + voxels * (bound.sum_bytes + 2 * bound.output_bytes)
    return min(num_workers, MOST_WORKERS) * (BLOCKS_EACH * block + 2 * WRITTEN_VOXELS * bound.output_bytes)


def _time_limit(begun: Sequence[Path], on_try: OnTry) -> Show:
    """Return a listener that ends a calibration which takes more than MOST_SECONDS, once a worker has begun."""
    started: float | None = None

    def watch(progress: Progress) -> None:
        nonlocal started
        if started is None and any(path.exists() for path in begun):
            started = time.monotonic()
        if started is None:
            return
        on_try(time.monotonic() - started, MOST_SECONDS)
        if time.monotonic() - started > MOST_SECONDS:
            raise TooSlowError(
                f"no worker could try a window within {MOST_SECONDS:.0f} s; a smaller windows.shape would tell how "
                "fast the net is"
            )

    return watch


def _inner_block(plan: Plan, rng: np.random.Generator) -> int:
    """Return a random block of the region, away from its faces, where voxels are mirrored, if there are others.

    It is the block of the whole volume there.
    """
    along = []
    for axis in range(3):
        active = [i for i, (start, stop) in enumerate(plan.reaches[axis]) if start < stop]
        along.append(int(rng.choice(active[1:-1] if len(active) >= MANY_BLOCKS else active[:-1] or active)))
    start = plan.lattice.core_box(plan.blocks.number(tuple(along))).start
    whole = Grid(plan.lattice.shape, plan.blocks.cell)
    return whole.number(tuple(a // n for a, n in zip(start, whole.cell, strict=True)))


def _job(plan: Plan, normalise: Affine, path: Path) -> Job:
    own = _without_region(plan).changed(out=str(path / "out"))
    path.mkdir(parents=True)
    RunFolder(path).store(own)
    create_output(own, {})
    ScratchTensors(own, path).create()
    ScratchTensors(_storing_windows(own), path).create()
    return Job(str(path), own.identity).of(normalise)


def _without_region(plan: Plan) -> Plan:
    """Return the plan without its region, so that every block is whole, and with one array of all channels."""
    everything = plan.recipe.input.model_copy(update={"roi": None, "mask": None, "empty": None})
    recipe = plan.recipe.model_copy(update={"input": everything})
    net = plan.net.model_copy(update={"arrays": ()})
    return plan.changed(recipe=recipe, net=net, roi=((0, 0, 0), plan.source.shape), corner=(0, 0, 0), mask=None)


def try_blocks(job: Job, units: Sequence[int]) -> Record[UnitCosts]:
    """Run blocks `units` in the job's folder; the record speaks of the first for all."""
    reporter = Reporter(Path(job.folder).parents[1])  # the run's folder, in which `calibrate` makes that of the job
    return work_once("calibrate", units[0], lambda: _measure_units(job, units), reporter)


def _measure_units(job: Job, units: Sequence[int]) -> UnitCosts:
    whole, folder = job.plan, Path(job.folder)
    with stopwatch() as probing:
        probe = _probe(job)
    if probing.seconds - probe.start_seconds > LONG_SECONDS:
        return _by_probe(whole, probe)
    sized = _sized(whole, worker.open_source(job), probe.seconds_per_voxel)
    rng = np.random.default_rng(units[0])
    if sized is None:
        tried, blocks = job, list(units)
    else:
        delete(folder / "small")  # of an attempt that failed, whose reason this one would hide
        tried = _job(sized, job.normalise, folder / "small")
        blocks = [_inner_block(tried.plan, rng) for _ in units]
    rates, data = _try_whole(tried, [*blocks, *_more_on_gpu(tried.plan, blocks, rng, probe)])
    rates = _scaled(rates, whole, tried.plan, probe)  # with the memory until here
    write_seconds, coarsen_seconds = _time_output(job, data)
    return dataclasses.replace(rates, write_seconds=write_seconds, coarsen_seconds=coarsen_seconds)


@dataclass(frozen=True)
class _Probe:
    """Seconds to load the net, seconds per voxel of the first windows, memory before them, and whether on a GPU."""

    start_seconds: float
    seconds_per_voxel: float
    idle_bytes: int
    on_gpu: bool = False


def _more_on_gpu(plan: Plan, blocks: Sequence[int], rng: np.random.Generator, probe: _Probe) -> list[int]:
    """Return further blocks to try where the net is on a GPU, so many that it computes for a second.

    Where windows are stored, to store these would take far longer.
    """
    seconds = probe.seconds_per_voxel * math.prod(plan.window) * plan.lattice.windows_per_block
    is_quick = probe.on_gpu and plan.mode == "streamed"
    num = min(MOST_ON_GPU, int(GPU_SECONDS / max(1e-9, seconds))) if is_quick else 0
    drawn = dict.fromkeys(_inner_block(plan, rng) for _ in range(num - len(blocks)))
    return [block for block in drawn if block not in blocks]


def _probe(job: Job) -> _Probe:
    """Load the net, and run it over windows, from small to large, until a call takes measurable time."""
    plan = job.plan
    with stopwatch() as loading:
        runner = load_runner(plan)
    (Path(job.folder) / BEGUN).touch()
    idle_bytes, seconds_per_voxel = peak_bytes(), 0.0
    for window in reversed([plan.window, *smaller_windows(plan)] if not any(plan.net.fixed) else [plan.window]):
        num_voxels = math.prod(window)
        if seconds_per_voxel * num_voxels > PROBE_SECONDS:
            break
        zeros = np.zeros((runner.batch, plan.source.num_channels, *window), np.float32)
        for _ in range(2):  # the first call of a shape prepares
            with stopwatch() as clock:
                runner.try_window(zeros)
            seconds_per_voxel = clock.seconds / (num_voxels * runner.batch)
            if clock.seconds > PROBE_SECONDS:
                break
    return _Probe(loading.seconds, seconds_per_voxel, idle_bytes, runner.bus.is_gpu)


def _sized(plan: Plan, volume: Volume, seconds_per_voxel: float) -> Plan | None:
    """Return a plan of smaller blocks, and smaller windows if need be, to try in time; None if `plan` itself can be."""
    rate = NUM_PASSES * seconds_per_voxel + (FACTOR_SECONDS if plan.mode == "stored" else 0.0)
    windows = [plan.window] if any(plan.net.fixed) else [plan.window, *smaller_windows(plan)]
    window = next((w for w in windows if rate * math.prod(w) <= BUDGET_SECONDS), windows[-1])
    most, block = max(1.0, BUDGET_SECONDS / (rate * math.prod(window))), list(plan.block)
    if plan.has_slabs:
        most = min(most, SLAB_VOXELS / (math.prod(plan.lattice.stride) * math.prod(plan.net.scale)))
    while math.prod(block) > max(1.0, most):
        longest = block.index(max(block))
        block[longest] = -(-block[longest] // 2)
    if (window, tuple(block)) == (plan.window, plan.block):
        return None
    sizes = zip(block, window, plan.overlap, plan.net.shrink, plan.net.scale, strict=True)
    core = [n * (w - o) // u * f for n, w, o, u, f in sizes]
    chunk = "auto" if any(n % c for n, c in zip(core, plan.chunk, strict=True)) else plan.chunk  # it decides the bytes
    choice = {"shape": window, "overlap": plan.overlap, "block": tuple(block)}
    update = {
        "windows": plan.recipe.windows.model_copy(update=choice),
        "output": plan.recipe.output.model_copy(update={"shard": "auto", "chunk": chunk}),
        "tensors": plan.recipe.tensors.model_copy(update={"mode": plan.mode}),
    }
    recipe = plan.recipe.model_copy(update=update)
    return make_plan(recipe, volume, plan.net, out=locate(plan.out), search_path=plan.search_path, sizes=plan.sizes)


def _by_probe(plan: Plan, probe: _Probe) -> UnitCosts:
    """Return the rates of a net so slow that nothing else counts; bytes are upper bounds."""
    num_voxels = math.prod(plan.window)
    return dataclasses.replace(
        upper_bounds(plan),
        start_seconds=probe.start_seconds,
        factor_seconds=FACTOR_SECONDS * num_voxels,
        infer_seconds=probe.seconds_per_voxel * num_voxels,
        peak_bytes=peak_bytes() + array_bytes(plan),
    )


def _scaled(rates: UnitCosts, plan: Plan, tried: Plan, probe: _Probe) -> UnitCosts:
    """Return the `rates` of the plan `tried`, scaled to `plan`: time and memory of the net go with voxels.

    On a GPU the net has none of the worker's memory.
    """
    voxels = math.prod(plan.window) / math.prod(tried.window)
    peak = peak_bytes()
    net = max(0, peak - probe.idle_bytes - array_bytes(tried))
    larger = max(0, array_bytes(plan) - array_bytes(tried))
    known, known_tried = net_bytes(plan), net_bytes(tried)
    if probe.on_gpu:
        growth = 0.0
    elif known is None or known_tried is None:
        growth = (voxels - 1) * net
    else:
        growth = known - known_tried
    return dataclasses.replace(
        rates,
        start_seconds=max(rates.start_seconds, probe.start_seconds),
        factor_seconds=rates.factor_seconds * voxels,
        infer_seconds=rates.infer_seconds * voxels,
        window_bytes=rates.window_bytes * voxels,
        peak_bytes=round(peak + larger + growth),
    )


def _try_whole(job: Job, units: Sequence[int]) -> tuple[UnitCosts, np.ndarray]:
    """Return the rates of blocks that are computed whole, without those of writing, and voxels of their output."""
    plan = job.plan
    num_windows = sum(len(plan.lattice.windows_of(block)) for block in units[1:])
    box = plan.blocks.box(units[0])
    with stopwatch() as measuring:
        if plan.grey_rule.needs_measuring:
            _result_of(worker.measure(job, units[:1]))
    factor_seconds, window_bytes = _try_factor(job, units)
    with stopwatch() as warm:
        closed = _result_of(worker.infer(job, units[:1])).shared
    if warm.seconds > LONG_SECONDS or not num_windows:
        timed, num_windows, units = warm, len(plan.lattice.windows_of(units[0])), units[:1]
    else:
        with stopwatch() as timed:
            closed += _result_of(worker.infer(job, units[1:])).shared
    start = max(0.0, warm.seconds - timed.seconds / len(units[1:] or units))
    sum_seconds, sum_bytes = _try_sum(job, units[-1], closed)
    data, output_bytes, coarse_bytes = _try_output(job, units[-1])
    costs = UnitCosts(
        num_blocks=len(units),
        start_seconds=start,
        measure_seconds=measuring.seconds / box.num_voxels,
        factor_seconds=factor_seconds,
        infer_seconds=timed.seconds / num_windows,
        sum_seconds=sum_seconds,
        write_seconds=0.0,
        coarsen_seconds=0.0,
        window_bytes=window_bytes,
        sum_bytes=sum_bytes,
        output_bytes=output_bytes,
        coarse_bytes=coarse_bytes,
        peak_bytes=0,
    )
    return costs, data


def _try_factor(job: Job, blocks: Sequence[int]) -> tuple[float, float]:
    """Return seconds and stored bytes per window.

    Where the plan stores none, one of `blocks` is tried. Where that would take long, none is, and the bytes are those
    of windows that do not compress.
    """
    stored = _storing_windows(job.plan)
    if job.plan.mode == "streamed":
        blocks, window_seconds = blocks[:1], FACTOR_SECONDS * math.prod(job.plan.window)
        if window_seconds * len(job.plan.lattice.windows_of(blocks[0])) > MOST_FACTOR_SECONDS:
            return window_seconds, upper_bounds(job.plan).window_bytes
    tensors, volume = ScratchTensors(stored, Path(job.folder)), worker.open_source(job)
    with stopwatch() as clock:
        for block in blocks:
            factor(Selection(stored), volume, job.normalise, tensors, block)
    numbers = {number for block in blocks for number in stored.lattice.windows_of(block)}
    return clock.seconds / len(numbers), _bytes_in(tensors.source_path) / len(numbers)


def _try_sum(job: Job, block: int, closed: Collection[int]) -> tuple[float, float]:
    """Return seconds and stored bytes per voxel of a block tensor; zeros where `block` has none."""
    plan, tensors = job.plan, job.tensors
    box, shards = plan.sum_box(block), plan.shards_of_block(block)
    written = [shard for shard in shards if plan.is_direct(shard) or shard in closed]
    num_voxels = box.num_voxels - sum((plan.shards().box(shard) & box).num_voxels for shard in written)
    if not num_voxels:
        return 0.0, 0.0
    with stopwatch() as clock:
        tensors.read_sum(block, box)
    files = [file for part in range(len(plan.sum_parts)) if (file := tensors.sum_file(block, part)).exists()]
    return clock.seconds / num_voxels, sum(file.stat().st_size for file in files) / num_voxels


def _cropped(job: Job) -> Plan:
    """Return the plan of `job` with the blend crop, by which blocks leave no voxel to their neighbours."""
    windows = job.plan.recipe.windows.model_copy(update={"blend": "crop"})
    recipe = job.plan.recipe.model_copy(update={"windows": windows})
    return job.plan.changed(recipe=recipe, out=str(Path(job.folder) / "cropped"), mode="streamed")


def _try_output(job: Job, block: int) -> tuple[np.ndarray, float, float]:
    """Write a shard of the cropped plan that `block` determines.

    Return its voxels (c, z, y, x), and stored bytes per voxel of level 0, and of a coarser level, as `_try_coarser`.
    """
    plan = _cropped(job)
    create_output(plan, {})
    runner = load_runner(job.plan)
    source = StreamedWindows(worker.open_source(job), plan.lattice, job.normalise)
    box, layers = plan.shards().box(next(iter(plan.shards_of_block(block)))), []
    for _, total in block_sums(Selection(plan), job.normalise, runner, source, [block]):
        if isinstance(total, Exception):
            raise total
        layers.append(total.part(total.box & box))
    data, before = np.concatenate(layers, axis=1), _bytes_in(Path(plan.out))  # of metadata
    write_voxels(plan, 0, box, data)
    written = _bytes_in(Path(plan.out)) - before
    return data, written / box.num_voxels, (_try_coarser(plan, box) if len(plan.factors) > 1 else 0.0)


def _try_coarser(plan: Plan, box: Box) -> float:
    """Write the coarser voxels of `box` as a shard that is empty otherwise; return stored bytes per coarser voxel."""
    method = "mode" if plan.is_labels else "mean"
    target, before = plan.shards(1).box(0), _bytes_in(Path(plan.out))
    coarse = downsample(read_voxels(plan, 0, box), (1, *plan.step(1)), method)
    part = tuple(slice(0, min(n, m)) for n, m in zip(coarse.shape[1:], target.shape, strict=True))
    whole = np.zeros((len(coarse), *target.shape), coarse.dtype)
    whole[:, *part] = coarse[:, *part]
    write_voxels(plan, 1, target, whole)
    return (_bytes_in(Path(plan.out)) - before) / max(1, int(whole[0][part].size))


def _time_output(job: Job, data: np.ndarray) -> tuple[float, float]:
    """Write `data` (c, z, y, x), repeated to many voxels, in chunks of the plan of `job`, and a coarser level of it.

    Return seconds per voxel of level 0, and per voxel of the finer level where a coarser one is made of it.
    """
    plan = _cropped(job)
    shard = list(plan.chunk)
    for axis in (2, 1, 0):
        times = min(plan.shard[axis] // shard[axis], max(1, WRITTEN_VOXELS // math.prod(shard)))
        shard[axis] *= max(1, times)
    plan = plan.changed(shard=triple(shard), out=str(Path(job.folder) / "timed"))
    box = plan.shards().box(0)
    many = np.tile(data, (1, *(-(-n // m) for n, m in zip(box.shape, data.shape[1:], strict=True))))
    many = many[:, *(slice(0, n) for n in box.shape)]
    create_output(plan, {})
    with stopwatch() as writing:
        given = np.tile(many, (plan.net.num_stacked, 1, 1, 1))
        finish(plan, job.normalise, given.astype(np.float32))
        write_voxels(plan, 0, box, many)
    with stopwatch() as coarsening:
        if len(plan.factors) > 1:
            _try_coarser(plan, box)
    return writing.seconds / box.num_voxels, coarsening.seconds / box.num_voxels


def _storing_windows(plan: Plan) -> Plan:
    return plan.changed(mode="stored")


def _result_of(record: Record[R]) -> R:
    """Return the record's result, or raise the reason for which it has none."""
    for _, reason in record.failed:
        raise RunStopped(reason)
    assert record.result is not None
    return record.result


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass
class _Elapsed:
    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[_Elapsed]:
    """Time what is done meanwhile: the object that is given has the seconds, once that has ended."""
    elapsed, started = _Elapsed(), time.perf_counter()
    yield elapsed
    elapsed.seconds = time.perf_counter() - started
