"""Time of a segmentation, forecast from a small one of the same voxels that each worker makes and deletes.

Not here: bytes and files (workflow.cost), or the segmentation (driver). Blocks of up to EDGE voxels per axis are tried,
larger ones where that is quick. The time of each stage is scaled by its units: voxels, or blocks.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.task import work_once
from volpipe.blockwise.work import Steps, each
from volpipe.errors import RunError, RunStopped
from volpipe.estimation.calibrate import MOST_WORKERS, stopwatch
from volpipe.estimation.estimate import StageTime, StageTimes
from volpipe.geometry.grid import Box
from volpipe.inference.output_plan import SourceVolume, level_key
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation import graph
from volpipe.segmentation import tasks as label_tasks
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import SegmentJob
from volpipe.volumes.placeholder import synthetic_affinities, write
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.lock import held
from volpipe.volumes.storage.paths import delete
from volpipe.volumes.volume import ArraySpec, Volume, create_array

log = logging.getLogger(__name__)

WORTH_TRYING = 8  # blocks per worker: a trial takes about as long as one
WARM_EDGE, EDGE = 16, 64  # voxels
MOST_SECONDS = 1.5  # of a larger block
NUM_PLACES, PROBE = 4, 32  # candidate places besides the middle; voxels per axis read of each
SEED = 0
SINGLE = (1, 1, 1)  # voxel
HELD = "a segmentation that is tried"


@dataclass(frozen=True)
class SegmentCosts:
    """Unit costs of a segmentation, in seconds of one of several busy workers.

    Attributes:
        num_voxels: of the tried blocks.
        start_seconds: of a worker, before its first block.
        read_seconds: per voxel, to read and decode the channels that tasks read.
        stage_seconds: of each stage, per unit of `_stages`; coarser levels as the first of them.
    """

    num_voxels: int
    start_seconds: float
    read_seconds: float
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True)
class SegmentTrial:
    """The arguments of a trial: the whole plan, its input and whether that exists, and a folder to be deleted."""

    plan: SegmentPlan
    volume: Volume
    is_there: bool
    folder: str


def calibrate_segmentation(trial: SegmentTrial, workers: WorkerPool) -> Steps[StageTimes]:
    """Return the forecast of `trial`'s segmentation, from blocks that all workers try at the same time.

    Raises:
        RunStopped: a block cannot be tried.
    """
    num_workers, folder = max(1, workers.slots["cpu"]), Path(trial.folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        num = min(num_workers, MOST_WORKERS)
        records = yield from each("trial", "try_segmentation", lambda number: (trial, number), num)
        costs = [record.result for record in records if record.result is not None]
    finally:
        delete(folder)
    mean = SegmentCosts(
        sum(each.num_voxels for each in costs),
        fmean(each.start_seconds for each in costs),
        fmean(each.read_seconds for each in costs),
        {name: fmean(each.stage_seconds[name] for each in costs) for name in costs[0].stage_seconds},
    )
    return segment_times(trial, mean, num_workers)


def forecast_labels(plan: SegmentPlan, workers: WorkerPool) -> Steps[list[StageTimes]]:
    """Return the forecast of `plan`; [] where trying blocks would cost much of the whole, or fails."""
    if len(plan.blocks) < WORTH_TRYING * workers.slots["cpu"]:
        return []
    folder = RunFolder.from_output(paths.locate(plan.out)).calibration
    trial = SegmentTrial(plan, plan.source.volume(), True, str(folder))
    try:
        return [(yield from calibrate_segmentation(trial, workers))]
    except RunStopped as error:  # the segmentation names the blocks that fail
        log.warning("no block could be tried: %s", error)
        return []


def segment_times(trial: SegmentTrial, costs: SegmentCosts, num_workers: int) -> StageTimes:
    """Return the forecast of `trial`'s segmentation on `num_workers` at `costs`."""
    plan, rates = trial.plan, costs.stage_seconds
    reading = costs.read_seconds * _touched(plan, plan.near, trial.volume.spatial_chunks)
    readers = ("pieces", "edges") if plan.recipe.objects.is_watershed else ("pieces",)
    stages = tuple(
        StageTime(
            name,
            num_tasks,
            units * rates["pyramid 1" if name.startswith("pyramid") else name] + (reading if name in readers else 0.0),
        )
        for name, (num_tasks, units) in _stages(plan).items()
    )
    return StageTimes(stages, costs.start_seconds, costs.num_voxels, not trial.is_there, num_workers)


def _stages(plan: SegmentPlan) -> dict[str, tuple[int, int]]:
    """Return the number of tasks of each stage, and its units: voxels that it reads or writes, or blocks of files."""
    num_blocks, num_boxes, num_voxels = len(plan.blocks), len(plan.boxes), math.prod(plan.shape)
    return {
        "pieces": (num_blocks, _touched(plan, plan.near, SINGLE)),
        "edges": (num_blocks, _touched(plan, plan.reach, SINGLE)),
        "solve": (num_boxes, num_voxels),
        "number": (plan.boxes.num_slabs, num_voxels),
        "name": (num_boxes, num_blocks),
        "graph": (1, num_blocks),
        "paint": (num_blocks, num_voxels),
        **{
            f"pyramid {n}": (len(plan.shards(n)), math.prod(plan.level_shape(n - 1)))
            for n in range(1, len(plan.factors))
        },
    }


def _touched(plan: SegmentPlan, reach: Sequence[int], cell: Sequence[int]) -> int:
    """Return the voxels of the cells that each block with its halo touches, summed over blocks."""
    return math.prod(
        sum(cell_voxels(a - r, a + b + r, c, n) for a in range(0, n, b))
        for n, b, r, c in zip(plan.shape, plan.block, reach, cell, strict=True)
    )


def cell_voxels(start: int, stop: int, cell: int, size: int) -> int:
    """Return the voxels of the cells that start..stop touches, along an axis of `size`."""
    low, high = max(0, start), min(size, stop)
    return min(size, -(-high // cell) * cell) - low // cell * cell


def try_blocks(trial: SegmentTrial, number: int) -> Record[SegmentCosts]:
    """Segment some blocks in a folder of the worker's own."""
    return work_once(
        "calibrate", number, lambda: _try_larger_blocks(trial, number), Reporter(Path(trial.folder).parent)
    )


def _try_larger_blocks(trial: SegmentTrial, number: int) -> SegmentCosts:
    folder = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=trial.folder))  # a worker that ended may have left one
    with stopwatch() as warm:
        _try_edge(trial, number, folder, WARM_EDGE)
    edge = EDGE
    while True:
        with stopwatch() as watch:
            costs = _try_edge(trial, number, folder, edge)
        if edge >= max(trial.plan.block) or 8 * watch.seconds > MOST_SECONDS:
            return dataclasses.replace(costs, start_seconds=warm.seconds)
        edge *= 2


def _try_edge(trial: SegmentTrial, number: int, folder: Path, edge: int) -> SegmentCosts:
    """Return the costs of segmenting two neighbouring blocks of up to `edge` voxels per axis."""
    place, whole = folder / str(edge), trial.plan.shape
    place.mkdir()
    block = tuple(min(edge, b, n) for b, n in zip(trial.plan.block, whole, strict=True))
    counts = [n / b for b, n in zip(block, whole, strict=True)]
    longest = counts.index(max(counts))
    shape = tuple(min(n, 2 * b) if a == longest else b for a, (b, n) in enumerate(zip(block, whole, strict=True)))
    volume, box = _tried_box(trial, number, shape, place)
    reader = volume.open()
    with stopwatch() as reading:
        reader.read(box, num_channels=trial.plan.num_channels_read)
    data = reader.read(box)
    bounds = zip(box.start, box.stop, volume.spatial_chunks, volume.spatial_shape, strict=True)
    read_seconds = reading.seconds / math.prod(cell_voxels(*b) for b in bounds)
    # A plan of this copy as `trial.plan` is of the whole, with as many chunks per block.
    copy = write(place / "in", data, (len(data), *block), "raw")
    numbers = [max(1, b // c) for b, c in zip(trial.plan.block, trial.plan.chunk, strict=True)]
    chunk = tuple(b // n if b % n == 0 else b for b, n in zip(block, numbers, strict=True))
    sizes = {"block": block, "shard": block, "chunk": chunk, "factors": trial.plan.factors[:2]}
    plan = trial.plan.changed(source=SourceVolume.from_volume(copy), out=str(place / "out"), **sizes)
    with held(place, HELD, RunError):
        return dataclasses.replace(_try_stages(plan, place), read_seconds=read_seconds)


def _tried_box(trial: SegmentTrial, number: int, shape: tuple[int, ...], folder: Path) -> tuple[Volume, Box]:
    """Return the volume that a trial reads, and a box of `shape` in it: of the most variance, where it exists."""
    if not trial.is_there:
        return synthetic_affinities(trial.volume, shape, folder / "made_up"), Box.from_shape(shape)
    reader, size = trial.volume.open(), trial.volume.spatial_shape
    rest = [n - s for n, s in zip(size, shape, strict=True)]
    rng = np.random.default_rng([SEED, number])
    starts = [[n // 2 for n in rest], *([int(rng.integers(n + 1)) for n in rest] for _ in range(NUM_PLACES))]
    aligned = [tuple(a // c * c for a, c in zip(start, trial.volume.spatial_chunks, strict=True)) for start in starts]

    def variance(start: tuple[int, ...]) -> float:
        probe = tuple(a + (n - min(n, PROBE)) // 2 for a, n in zip(start, shape, strict=True))
        probed = Box.from_shape(tuple(min(n, PROBE) for n in shape)).shift(probe)
        return float(np.nan_to_num(reader.read(probed).astype(np.float32)).var())

    start = max(dict.fromkeys(aligned), key=variance)
    return trial.volume, Box.from_shape(shape).shift(start)


def _try_stages(plan: SegmentPlan, folder: Path) -> SegmentCosts:
    """Return the costs of segmenting all of `plan` in `folder`; `read_seconds` and `start_seconds` are 0."""
    RunFolder(folder).store(plan)
    job = SegmentJob(str(folder), plan.identity, HELD)
    label_tasks.prepare(job)
    for level in range(len(plan.factors)):
        spec = ArraySpec(shape=plan.level_shape(level), dtype=plan.dtype, chunks=plan.chunk, shards=plan.shard)
        create_array(Path(plan.out), level_key(level), spec, "zarr3")
    blocks, boxes = range(len(plan.blocks)), range(len(plan.boxes))
    seconds = {
        "pieces": _seconds_of(label_tasks.fragments(job, blocks)),
        "edges": _seconds_of(label_tasks.edges(job, blocks)),
        "solve": _seconds_of(graph.solve_boxes(job, boxes)),
        "number": _seconds_of(graph.number_objects(job, range(plan.boxes.num_slabs))),
        "name": _seconds_of(graph.name_fragments(job, boxes[::-1])),
        "graph": _seconds_of(graph.finish_graph(job, [0])),
        "paint": _seconds_of(label_tasks.paint(job, blocks)),
    }
    if len(plan.factors) > 1:
        coarser = dataclasses.replace(job, level=1)
        seconds["pyramid 1"] = _seconds_of(label_tasks.coarsen(coarser, range(len(plan.shards(1)))))
    units = {name: num_units for name, (_, num_units) in _stages(plan).items()}
    return SegmentCosts(math.prod(plan.shape), 0.0, 0.0, {name: taken / units[name] for name, taken in seconds.items()})


def _seconds_of(record: Record[object]) -> float:
    """Return the seconds of a task.

    Raises:
        RunStopped: a unit failed.
    """
    for _, reason in record.failed:
        raise RunStopped(reason)
    return record.usage.seconds
