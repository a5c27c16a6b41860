"""The graph of a segmentation, solved box by box: time by pieces, and the memory of its largest task.

Graphs are made up where they are read, a block at a time: pieces are the cells of a lattice, with an edge to each
neighbour along z, y and x. Objects are bars of pieces along x of random length, none longer than LONGEST. A graph of
any size alone, here 10⁸ pieces on one worker, below a folder that has room for 100 bytes a piece::

    PYTHONPATH=.:scripts python -m benchmarks.engine.solve 25 25 20 --folder FOLDER
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.row import Outcome, Row, Setting
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import RunError
from volpipe.geometry.grid import Shape
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation import graph, tasks
from volpipe.segmentation.plan import SegmentPlan, fit
from volpipe.segmentation.solve import GraphPart
from volpipe.segmentation.tasks import SegmentJob, load_one
from volpipe.volumes.storage.lock import held
from volpipe.volumes.volume import ArraySpec, create_array, open_volume

BLOCK, CELLS = 256, 20  # voxels and pieces along an edge of a block
CELL = 13  # voxels along a piece; those of a block that are left over belong to none
LONGEST = 40  # pieces of an object
GRAPH_GIB = 64  # what is planned is above what is measured, and refuses nothing here
HELD = "the bench"
KEPT = ("target", "splits", "objects", "counts")  # of a solved box, once the box around it is solved
MIB = 2**20


@dataclass(frozen=True)
class Took:
    """What the graph took.

    Attributes:
        busy: seconds of a processor in all tasks.
        shared: those of the busier of two workers, by the seconds of each task, one stage after the other.
        elapsed: seconds from the first task to the last.
        peak: highest bytes of a process.
        num_objects: rows of the table.
    """

    busy: float
    shared: float
    elapsed: float
    peak: int
    num_objects: int


def planned(folder: Path, blocks: Shape) -> SegmentPlan:
    """Return the plan of segmenting a volume of so many blocks (z, y, x) that has no voxels yet."""
    shape = tuple(n * BLOCK for n in blocks)
    create_array(
        folder / "a.zarr", "", ArraySpec((3, *shape), np.dtype("uint8"), (3, 64, 64, 64), axes=tuple("czyx")), "zarr3"
    )
    recipe = SegmentRecipe.model_validate(
        {
            "input": {"offsets": [(-1, 0, 0), (0, -1, 0), (0, 0, -1)]},
            "objects": {"threshold": 0.5},
            "output": {"block": (BLOCK,) * 3, "chunk": (64,) * 3, "levels": 0, "graph_gib": GRAPH_GIB},
        }
    )
    return fit(open_volume(folder / "a.zarr"), recipe, folder / "out", folder)


def made_up(plan: SegmentPlan, block: int) -> GraphPart:
    """Return the graph of `block`."""
    place, counts = plan.blocks.index(block), [CELLS * n for n in plan.blocks.counts]
    local = np.stack(np.meshgrid(*[np.arange(CELLS)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = local + np.array(place) * CELLS
    corner = local * CELL + np.array(place) * BLOCK
    strides = plan.shape[1] * plan.shape[2], plan.shape[2], 1
    centre = corner * CELL**3 + CELL**3 * (CELL - 1) // 2
    last = np.where(local == CELLS - 1, (np.array(place)[None] + 1) * BLOCK, corner + CELL)
    table = np.concatenate(
        [np.full((len(cells), 1), CELL**3), (corner @ strides)[:, None], corner, last, centre], axis=1
    )
    return GraphPart.from_block(block, table, np.zeros((0, 2), np.int64), *_edges(plan, cells, counts))


def _edges(plan: SegmentPlan, cells: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pairs, sums and first pairs of voxels: of each piece to the one before it on each axis."""
    parts = []
    for axis in range(3):
        here = cells[cells[:, axis] > 0]
        before = here - np.eye(3, dtype=np.int64)[axis]
        number = np.ravel_multi_index(tuple(here.T), counts)
        chance = _random(number * 3 + axis)
        is_one = (axis == 2) & ((number + _random(number // counts[2] * 3 + 1) % LONGEST) % LONGEST != 0)
        mean = np.where(is_one, 140 + chance % 110, chance % 110)
        size = 60 + chance // 128 % 100
        pairs = np.stack([_ids(plan, before), _ids(plan, here)], axis=1)
        parts.append((pairs, np.stack([mean * size + chance % 60, size], axis=1), (number * 3 + axis)[:, None]))
    pairs, sums, first = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return pairs, sums, first


def _ids(plan: SegmentPlan, cells: np.ndarray) -> np.ndarray:
    block = np.ravel_multi_index(tuple((cells // CELLS).T), plan.blocks.counts)
    return np.asarray((block << 32) + 1 + np.ravel_multi_index(tuple((cells % CELLS).T), (CELLS,) * 3))


def _random(number: np.ndarray) -> np.ndarray:
    """Return a number below 2**40 for each, by the finaliser of SplitMix64 (Steele et al. 2014)."""
    mixed = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(24)).astype(np.int64)


def _begin(job: SegmentJob) -> None:
    """Let this process make up the graphs of blocks that it would read."""

    def load(path: Path, name: str) -> np.ndarray:
        return np.array("") if path.parent.name == tasks.FRAGMENTS else load_one(path, name)

    setattr(graph, "load_one", load)  # noqa: B010
    setattr(graph, "load_block", lambda job, block: made_up(job.plan, block))  # noqa: B010


def _do(call: tuple[str, SegmentJob, int]) -> tuple[float, int]:
    """Return the seconds of a processor, and the highest bytes so far, of a task."""
    name, job, unit = call
    began = time.process_time()
    record = getattr(graph, name)(job, [unit])
    if record.failed:
        raise RunError(record.failed[0][1])
    return time.process_time() - began, peak_bytes()


def solved(folder: Path, blocks: Shape, num_workers: int = 1, *, on_stage: Callable[[str], object] = str) -> Took:
    """Return what the graph of so many blocks (z, y, x) takes in so many processes."""
    folder.mkdir()
    plan = planned(folder, blocks)
    RunFolder(folder).store(plan)
    job, boxes = SegmentJob(str(folder), plan.identity, HELD), plan.boxes
    for name in (tasks.SOLVED, tasks.NUMBERS, tasks.NAMES):
        (folder / name).mkdir()
    levels = [[u for u in range(len(boxes)) if boxes.level(u) == level] for level in range(len(boxes.levels))]
    stages = [("solve_boxes", units) for units in levels] + [("number_objects", list(range(boxes.num_slabs)))]
    stages += [("name_fragments", units) for units in reversed(levels)] + [("finish_graph", [0])]
    busy, shared, peak, began = 0.0, 0.0, 0, time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with held(folder, HELD, RunError), context.Pool(num_workers, _begin, (job,)) as pool:
        for name, units in stages:
            workers = [0.0, 0.0]
            results = pool.imap(_do, [(name, job, unit) for unit in units])
            for unit, (seconds, high) in zip(units, results, strict=True):
                workers[workers.index(min(workers))] += seconds
                peak = max(peak, high)
                if name == "solve_boxes" and boxes.level(unit):
                    _trim([job.file(tasks.SOLVED, child) for child in boxes.children(unit)])
            busy, shared = busy + sum(workers), shared + max(workers)
            on_stage(f"{name}, {len(units)} tasks: {sum(workers):.1f} s, at most {peak / MIB:.0f} MiB so far")
    lines = sum(chunk.count(b"\n") for chunk in _chunks(folder / tasks.TABLE))
    return Took(busy, shared, time.perf_counter() - began, peak, lines - 1)


def _trim(paths: Sequence[Path]) -> None:
    """Delete what boxes handed up, which only an update would read again: at 10⁸ pieces it takes 60 GB."""
    for path in paths:
        tasks.save(path, is_kept=False, **tasks.load(path, KEPT))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    small, large = (2, 4) if setting.short else (3, 9)
    for repeat in range(repeats):
        took = [solved(setting.scratch / f"{repeat}-{blocks}", (blocks,) * 3) for blocks in (small, large)]
        per_piece = [each.busy / (blocks * CELLS) ** 3 for each, blocks in zip(took, (small, large), strict=True)]
        sides = {
            "µs a piece": per_piece[1] * 1e6, "pieces": (large * CELLS) ** 3, "MiB": took[1].peak / MIB,
            "one worker / two": took[1].busy / took[1].shared,
        }  # fmt: skip
        yield Outcome(per_piece[1] / per_piece[0], sides)


ROWS = [
    Row(
        "solve",
        "graph's time per piece, 5.8·10⁶ / 2.2·10⁵ pieces",
        1.5,
        1.2,
        measure,
        why="seconds of processors in all tasks of a made-up graph, solved in boxes of a block, by mean",
    )
]


def main() -> None:
    """Print what the graph of a volume of so many blocks takes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("blocks", nargs=3, type=int, metavar="N", help=f"blocks of {CELLS}³ pieces along z, y, x")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for scratch")
    choice = parser.parse_args()
    pieces = math.prod(choice.blocks) * CELLS**3
    with tempfile.TemporaryDirectory(prefix="volpipe-solve-", dir=choice.folder) as folder:
        took = solved(Path(folder) / "run", tuple(choice.blocks), choice.workers, on_stage=partial(print, flush=True))
    print(
        f"{pieces:,} pieces, {took.num_objects:,} objects: {took.busy / pieces * 1e6:.1f} µs a piece in all tasks; one "
        f"worker / two {took.busy / took.shared:.2f}; {took.elapsed:.0f} s elapsed, at most {took.peak / MIB:.0f} MiB"
    )


if __name__ == "__main__":
    main()
