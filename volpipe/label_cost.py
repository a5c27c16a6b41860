"""How long a labelling takes, from a small one on the same voxels, which each worker makes and throws away.

Not here: bytes and files (flow_cost), or the labelling (labelling). Blocks of up to EDGE voxels per axis are tried, or
larger ones where that is quick; what their tasks took counts by voxels. The graph is one task, which grows with pieces
and edges: copies of the one that was found are solved together, so that what does not grow counts little.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe import label_tasks
from volpipe.errors import RunError, RunStopped
from volpipe.folder import RunFolder
from volpipe.formats import files
from volpipe.grid import Box
from volpipe.journal import Record
from volpipe.label_graph import FIRST, solve
from volpipe.label_plan import LabelPlan
from volpipe.label_tasks import LabelGraph, LabelJob, objects_csv
from volpipe.lock import held
from volpipe.output import level_key
from volpipe.rehearsal import MOST_WORKERS, stopwatch
from volpipe.stand_in import made_up, write
from volpipe.tasks import Workers, gather
from volpipe.tensors import delete
from volpipe.volume import ArraySpec, View, Volume, create_array
from volpipe.worker import Outcomes, work

log = logging.getLogger(__name__)

WORTH_TRYING = 8  # blocks per worker: what is tried takes about as long as one
WARM_EDGE, EDGE = 16, 64  # voxels
MOST_SECONDS = 1.5  # that a larger block may take
NUM_PLACES, PROBE = 4, 32  # beside the middle, where there is something to find; voxels per axis that are looked at
MANY = 20_000  # pieces and edges that the copies of a graph have at least
SEED = 0
SINGLE = (1, 1, 1)  # voxel
HELD = "a labelling that is tried"


@dataclass(frozen=True)
class LabelRates:
    """What a labelling takes, in seconds of one worker among all.

    Attributes:
        num_voxels: of the blocks that were tried.
        start_seconds: until a worker can label anything.
        read_seconds: to read and decode a voxel, all channels.
        pieces_seconds: per voxel that is seen, those around a block too.
        edges_seconds: the same, and per logarithm of a block's voxels: pairs of them are sorted.
        paint_seconds: per voxel.
        coarse_seconds: per voxel of the level before.
        graph_parts: pieces and edges per voxel.
        graph_seconds: per piece or edge, and logarithm of how many there are: they are sorted.
        load_seconds: per block, for the graph.
    """

    num_voxels: int
    start_seconds: float
    read_seconds: float
    pieces_seconds: float
    edges_seconds: float
    paint_seconds: float
    coarse_seconds: float
    graph_parts: float
    graph_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class StageTime:
    """How long one stage takes: its tasks, and their time, of all workers together."""

    name: str
    num_tasks: int
    seconds: float


@dataclass(frozen=True)
class LabelTimes:
    """How long a labelling takes.

    Attributes:
        stages: in order; each begins when the one before it has ended.
        seconds: from the first task to the last.
        num_voxels: of the blocks that were tried.
        is_guess: whether they were made up, because what is to be read does not exist yet.
    """

    stages: tuple[StageTime, ...]
    seconds: float
    num_voxels: int
    is_guess: bool


@dataclass(frozen=True)
class Trial:
    """What a worker tries: the plan of all, what is read and whether it is there, and a folder that is deleted."""

    plan: LabelPlan
    volume: Volume
    is_there: bool
    folder: str


def calibrate_labels(trial: Trial, workers: Workers) -> LabelTimes:
    """Return how long the labelling of `trial` takes, from blocks that every worker tries at the same time.

    Raises:
        RunStopped: a block cannot be tried.
    """
    num_workers, folder = max(1, workers.slots["cpu"]), Path(trial.folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tried = gather(workers, try_blocks, trial, range(min(num_workers, MOST_WORKERS)), "tried")
        found = [LabelRates(*each) for each in tried]
    finally:
        delete(folder)
    return label_times(trial, _mean(found), num_workers)


def foreseen(plan: LabelPlan, workers: Workers) -> list[LabelTimes]:
    """Return how long a labelling that begins takes; nothing where trying blocks costs much of it, or fails."""
    if len(plan.blocks) < WORTH_TRYING * workers.slots["cpu"]:
        return []
    folder = RunFolder.of_output(files.locate(plan.out)).rehearsal
    try:
        return [calibrate_labels(Trial(plan, plan.source(), True, str(folder)), workers)]
    except RunStopped as error:  # blocks that fail are the labelling's to name
        log.warning("no block could be tried: %s", error)
        return []


def _mean(rates: Sequence[LabelRates]) -> LabelRates:
    values = np.array([dataclasses.astuple(each) for each in rates])
    return dataclasses.replace(LabelRates(*values.mean(axis=0).tolist()), num_voxels=int(values[:, 0].sum()))


def label_times(trial: Trial, rates: LabelRates, num_workers: int) -> LabelTimes:
    """Return how long the labelling of `trial` takes on `num_workers` by `rates`."""
    plan, near = trial.plan, _near(trial.plan)
    num_blocks, num_voxels = len(plan.blocks), math.prod(plan.shape)
    reading = rates.read_seconds * _touched(plan, near, _chunk(trial.volume))
    parts = rates.graph_parts * num_voxels
    again = reading if plan.recipe.objects.method == "watershed" else 0.0
    stages = (
        StageTime("pieces", num_blocks, reading + rates.pieces_seconds * _touched(plan, near, SINGLE)),
        StageTime("edges", num_blocks, again + rates.edges_seconds * _pairs(plan)),
        StageTime("graph", 1, rates.graph_seconds * sorting(parts) + rates.load_seconds * num_blocks),
        StageTime("paint", num_blocks, rates.paint_seconds * num_voxels),
        *(_pyramid(plan, level, rates) for level in range(1, len(plan.factors))),
    )
    took = sum(elapsed(stage.seconds, stage.num_tasks, num_workers) for stage in stages)
    return LabelTimes(stages, rates.start_seconds + took, rates.num_voxels, not trial.is_there)


def _pyramid(plan: LabelPlan, level: int, rates: LabelRates) -> StageTime:
    num_voxels = math.prod(plan.level_shape(level - 1))
    return StageTime(f"pyramid {level}", len(plan.shards(level)), rates.coarse_seconds * num_voxels)


def elapsed(seconds: float, num_tasks: int, num_workers: int) -> float:
    """Return how long equal tasks take that need `seconds` one after the other: the last round may not fill workers."""
    return seconds * math.ceil(num_tasks / num_workers) / num_tasks


def _near(plan: LabelPlan) -> tuple[int, ...]:
    """Return how far around a block its pieces are looked for."""
    objects = plan.recipe.objects
    return tuple(n + 2 for n in objects.smooth) if objects.method == "watershed" else SINGLE


def _touched(plan: LabelPlan, reach: Sequence[int], cell: Sequence[int]) -> int:
    """Return the voxels of the cells that each block touches with its surroundings, added up over the blocks."""
    return math.prod(
        sum(cell_voxels(a - r, a + b + r, c, n) for a in range(0, n, b))
        for n, b, r, c in zip(plan.shape, plan.block, reach, cell, strict=True)
    )


def _pairs(plan: LabelPlan) -> float:
    """Return to what the time of finding edges is proportional."""
    of_block = math.prod(min(b, n) for b, n in zip(plan.block, plan.shape, strict=True))
    return _touched(plan, plan.reach, SINGLE) * math.log(max(2, of_block))


def cell_voxels(start: int, stop: int, cell: int, size: int) -> int:
    """Return how many voxels the cells that start..stop touches have along an axis of `size`."""
    low, high = max(0, start), min(size, stop)
    return min(size, -(-high // cell) * cell) - low // cell * cell


def _chunk(volume: Volume) -> tuple[int, ...]:
    known = dict(zip(volume.axes, volume.chunks, strict=True))
    return tuple(known.get(axis, 1) for axis in "zyx")


def try_blocks(trial: Trial, number: int) -> Record:
    """Label some blocks in a folder of the worker's own; the record's result are the values of their `LabelRates`."""
    result: list[float] = []

    def outcomes() -> Outcomes:
        result.extend(dataclasses.astuple(_try(trial, number)))
        yield number, None

    return dataclasses.replace(work("rehearse", [number], outcomes()), result=tuple(result))


def _try(trial: Trial, number: int) -> LabelRates:
    folder = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=trial.folder))  # a lost worker's is there already
    with stopwatch() as warm:
        _try_edge(trial, number, folder, WARM_EDGE)
    edge = EDGE
    while True:
        with stopwatch() as took:
            found = _try_edge(trial, number, folder, edge)
        if edge >= max(trial.plan.block) or 8 * took.seconds > MOST_SECONDS:
            return dataclasses.replace(found, start_seconds=warm.seconds)
        edge *= 2


def _try_edge(trial: Trial, number: int, folder: Path, edge: int) -> LabelRates:
    """Return what it takes to label two blocks of up to `edge` voxels per axis that lie side by side."""
    place, whole = folder / str(edge), trial.plan.shape
    place.mkdir()
    block = tuple(min(edge, b, n) for b, n in zip(trial.plan.block, whole, strict=True))
    counts = [n / b for b, n in zip(block, whole, strict=True)]
    longest = counts.index(max(counts))
    shape = tuple(min(n, 2 * b) if a == longest else b for a, (b, n) in enumerate(zip(block, whole, strict=True)))
    volume, box = _source(trial, number, shape, place)
    copy, read_seconds = _copied(volume, box, block, place / "in")
    plan = _small(trial.plan, copy, block, place / "out")
    with held(place, HELD, RunError):
        return dataclasses.replace(_try_stages(plan, place), read_seconds=read_seconds)


def _copied(volume: Volume, box: Box, chunk: tuple[int, ...], place: Path) -> tuple[Volume, float]:
    """Return a copy at `place` of what lies in `box`, and what it took to read and decode one voxel."""
    with stopwatch() as reading:
        data = volume.open().read(box)
    bounds = zip(box.start, box.stop, _chunk(volume), volume.spatial_shape, strict=True)
    return write(place, data, (len(data), *chunk), "raw"), reading.seconds / math.prod(cell_voxels(*b) for b in bounds)


def _source(trial: Trial, number: int, shape: tuple[int, ...], folder: Path) -> tuple[Volume, Box]:
    """Return what is read for a trial, and the box of `shape` in it."""
    if not trial.is_there:
        return made_up(trial.volume, shape, folder / "made_up"), Box.of(shape)
    reader, size = trial.volume.open(), trial.volume.spatial_shape
    rest = [n - s for n, s in zip(size, shape, strict=True)]
    dice = np.random.default_rng([SEED, number])
    starts = [[n // 2 for n in rest], *([int(dice.integers(n + 1)) for n in rest] for _ in range(NUM_PLACES))]
    aligned = [tuple(a // c * c for a, c in zip(start, _chunk(trial.volume), strict=True)) for start in starts]

    def variance(start: tuple[int, ...]) -> float:
        probe = tuple(a + (n - min(n, PROBE)) // 2 for a, n in zip(start, shape, strict=True))
        seen = Box(probe, tuple(a + min(n, PROBE) for a, n in zip(probe, shape, strict=True)))
        return float(np.nan_to_num(reader.read(seen).astype(np.float32)).var())

    start = max(dict.fromkeys(aligned), key=variance)
    return trial.volume, Box.of(shape).shift(start)


def _small(plan: LabelPlan, volume: Volume, block: tuple[int, ...], out: Path) -> LabelPlan:
    """Return the plan of labelling a small `volume` as `plan` does the whole, each block in as many chunks."""
    numbers = [max(1, b // c) for b, c in zip(plan.block, plan.chunk, strict=True)]
    chunk = tuple(b // n if b % n == 0 else b for b, n in zip(block, numbers, strict=True))
    same = {name: getattr(plan, name) for name in LabelPlan.model_fields}
    place = {"path": volume.path, "key": volume.key, "shape": volume.spatial_shape, "out": str(out), "view": View()}
    return LabelPlan(**same | place | {"block": block, "chunk": chunk, "factors": plan.factors[:2]})


def _try_stages(plan: LabelPlan, folder: Path) -> LabelRates:
    """Return what it takes to label all of `plan` in `folder`; `read_seconds` and `start_seconds` are nothing."""
    plan.store(folder)
    job = LabelJob(str(folder), plan.identity, HELD)
    label_tasks.prepare(job)
    for level in range(len(plan.factors)):
        spec = ArraySpec(shape=plan.level_shape(level), dtype=plan.dtype, chunks=plan.chunk, shards=plan.shard)
        create_array(Path(plan.out), level_key(level), spec, "zarr3")
    blocks, num_voxels = range(len(plan.blocks)), math.prod(plan.shape)
    pieces, edges = (_seconds(function(job, n) for n in blocks) for function in (label_tasks.pieces, label_tasks.edges))
    with stopwatch() as loading:
        graph = LabelGraph.read(job)
    _seconds([label_tasks.graph(job, 0)])
    paint = _seconds(label_tasks.paint(job, n) for n in blocks)
    coarser = dataclasses.replace(job, level=1)
    coarse = range(len(plan.shards(1))) if len(plan.factors) > 1 else ()
    return LabelRates(
        num_voxels=num_voxels,
        start_seconds=0.0,
        read_seconds=0.0,
        pieces_seconds=pieces / _touched(plan, _near(plan), SINGLE),
        edges_seconds=edges / _pairs(plan),
        paint_seconds=paint / num_voxels,
        coarse_seconds=_seconds(label_tasks.coarsen(coarser, n) for n in coarse) / num_voxels,
        graph_parts=(len(graph.table) + len(graph.pairs)) / num_voxels,
        graph_seconds=_graph_seconds(graph, plan),
        load_seconds=loading.seconds / len(blocks),
    )


def _seconds(records: Iterable[Record]) -> float:
    """Return what tasks took together.

    Raises:
        RunStopped: one failed.
    """
    total = 0.0
    for record in records:
        for _, reason in record.failed:
            raise RunStopped(reason)
        total += record.seconds
    return total


def _graph_seconds(graph: LabelGraph, plan: LabelPlan) -> float:
    """Return what many copies of `graph`, which know nothing of each other, take for each of their `sorting`."""
    parts = max(1, len(graph.table) + len(graph.pairs))
    copies = math.ceil(MANY / parts)
    many = repeated(graph, copies, math.prod(plan.shape))
    with stopwatch() as took:
        found = solve(many.table, many.joins, many.pairs, many.sums, plan.recipe.objects)
        objects_csv(found.objects, plan)
    return took.seconds / sorting(copies * parts)


def sorting(parts: float) -> float:
    """Return to what the time of sorting so many is proportional."""
    return parts * math.log(max(2.0, parts))


def repeated(graph: LabelGraph, copies: int, num_voxels: int) -> LabelGraph:
    """Return `copies` of `graph` side by side, each of a volume of `num_voxels`."""
    number = np.arange(copies)
    table = np.tile(graph.table, (copies, 1))
    table[:, FIRST] += np.repeat(number * num_voxels, len(graph.table))
    joins, pairs = (
        np.tile(each, (copies, 1)) + np.repeat(number * len(graph.table), len(each))[:, None]
        for each in (graph.joins, graph.pairs)
    )
    return LabelGraph(table, graph.bases, joins, pairs, np.tile(graph.sums, (copies, 1)))
