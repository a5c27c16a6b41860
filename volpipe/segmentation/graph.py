"""The tasks of a segmentation's graph: boxes solved, objects numbered, fragments named.

Not here: how a box is solved (solve), or tasks of blocks (tasks). Boxes are solved from the finest up, named from the
whole volume down::

    solved/<box>.npz      what the box hands up, its final objects, and what became of the nodes of its parts
    numbers/<slab>.npz    labels of the final objects of each box that begin in the slab; <slab>.csv: their table
    names/<box>.npz       labels of the nodes of each part: of the finest boxes, of the fragments of each block
    objects.csv           the table of objects

No task holds more than what crosses the faces of the boxes in its own, or the objects that begin in a slab. The first
stays where the labels are updated.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.task import work_each, work_once
from volpipe.errors import PlanError
from volpipe.runs.update_records import SHARDS, to_ranges
from volpipe.segmentation.agglomerate import BATCH, ONE_BY_ONE_BYTES
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.solve import FIRST, NO_OBJECT, Frame, GraphPart, bytes_needed, solve
from volpipe.segmentation.tasks import (
    DIGEST,
    EDGES,
    FRAGMENTS,
    HEADINGS,
    NAMES,
    NUMBERS,
    PAINTED,
    SOLVED,
    TABLE,
    Objects,
    SegmentJob,
    load,
    load_one,
    save,
)
from volpipe.syntax import one_thread
from volpipe.volumes import checksums
from volpipe.volumes.storage.paths import atomic_write, whole_file

PART = ("table", "ids", "nodes", "bounds", "joins", "pairs", "sums", "first")
GIB = 1 << 30
ROWS = 1 << 14  # of a table that are text at once: as Python's numbers a row takes 20 times as much


def solve_boxes(job: SegmentJob, units: Sequence[int]) -> Record[None]:
    """Write what boxes hand up, and their final objects."""

    def one(unit: int) -> None:
        plan, boxes = job.plan, job.plan.boxes
        parts = [
            GraphPart(**load(job.file(SOLVED, child), PART)) if boxes.level(unit) else load_block(job, child)
            for child in boxes.children(unit)
        ]
        splits = np.cumsum([len(part.table) for part in parts])
        sizes = [sum(len(getattr(part, name)) for part in parts) for name in ("table", "joins", "pairs")]
        most_edges = check_size(plan, unit, *sizes)
        part = (parts.pop(0) for _ in range(len(parts)))  # so that nobody else holds them
        frame = Frame(boxes.box(unit), plan.shape, plan.contact, lambda blocks: boxes.has_blocks(unit, blocks))
        solved = solve(GraphPart.joined(part), frame, plan.recipe.objects, most_edges=most_edges)
        job.check_session()
        rest = {name: getattr(solved.rest, name) for name in PART}
        counts = np.bincount(solved.objects[:, FIRST] // boxes.slab, minlength=boxes.num_slabs)
        if boxes.level(unit):
            counts += sum(load_one(job.file(SOLVED, child), "counts") for child in boxes.children(unit))
        save(
            job.file(SOLVED, unit), is_kept=False, **rest, target=solved.target, splits=splits, objects=solved.objects,
            counts=counts,
        )  # fmt: skip

    return work_each("solve", units, one, check=job.check_session, reporter=job.reporter(job.plan.boxes.box))


def check_size(plan: SegmentPlan, unit: int, num_nodes: int, num_joins: int, num_edges: int) -> int:
    """Refuse a graph that needs more memory than the recipe gives it; return `most_edges` of `solve`.

    Raises:
        PlanError: naming both.
    """
    needed = bytes_needed(num_nodes, num_joins, num_edges, plan.recipe.objects)
    left = plan.recipe.output.graph_gib * GIB - needed
    if left < 0:
        raise PlanError(
            f"the graph of {num_nodes:,} fragments and {num_edges:,} edges takes up to {needed / GIB:.1f} GiB in "
            f"the box {plan.boxes.box(unit)}, output.graph_gib gives it {plan.recipe.output.graph_gib:g}; segment with "
            "--fresh and more of either, a larger objects.background, or more objects.smooth"
        )
    return BATCH + int(left // ONE_BY_ONE_BYTES)


def load_block(job: SegmentJob, block: int) -> GraphPart:
    """Return the graph of `block`."""
    table = load_one(job.file(FRAGMENTS, block), "table")
    return GraphPart.from_block(block, table, **load(job.file(EDGES, block), PART[4:]))


def number_objects(job: SegmentJob, units: Sequence[int]) -> Record[None]:
    """Write the labels of the objects that begin in slabs `units`, and their rows of the table."""

    def one(slab: int) -> None:
        plan, boxes = job.plan, job.plan.boxes
        base = int(load_one(job.file(SOLVED, len(boxes) - 1), "counts")[:slab].sum())
        parts = [(unit, _begun_in(job, unit, slab)) for unit in boxes.units_in(slab)]
        parts = [(unit, rows) for unit, rows in parts if len(rows)]
        rows = np.concatenate([np.zeros((0, 11), np.int64), *(rows for _, rows in parts)])
        order = np.argsort(rows[:, FIRST])
        labels = np.empty(len(rows), np.int64)
        labels[order] = np.arange(base + 1, base + 1 + len(rows))
        job.check_session()
        starts = range(0, len(rows), ROWS)
        text = b"".join(rows_csv(rows[order[a : a + ROWS]], plan, base + 1 + a).encode() for a in starts)
        atomic_write(job.file(NUMBERS, slab).with_suffix(".csv"), text)
        splits = np.split(labels, np.cumsum([len(rows) for _, rows in parts])[:-1])
        save(
            job.file(NUMBERS, slab),
            is_kept=False,
            **{str(unit): own for (unit, _), own in zip(parts, splits, strict=False)},
        )

    return work_each("number", units, one, check=job.check_session, reporter=job.reporter(job.plan.boxes.slab_box))


def _begun_in(job: SegmentJob, unit: int, slab: int) -> np.ndarray:
    """Return the rows of the final objects of `unit` that begin in `slab`."""
    rows, length = load_one(job.file(SOLVED, unit), "objects"), job.plan.boxes.slab
    first, last = np.searchsorted(rows[:, FIRST], [slab * length, (slab + 1) * length])
    return rows[first:last]


def name_fragments(job: SegmentJob, units: Sequence[int]) -> Record[None]:
    """Write the labels of the nodes of the parts of boxes `units`."""

    def one(unit: int) -> None:
        plan, boxes = job.plan, job.plan.boxes
        solved = load(job.file(SOLVED, unit), ("target", "splits"))
        labels = _labels_of_nodes(job, unit, solved["target"]).astype(plan.dtype)
        names = {
            str(c): part for c, part in zip(boxes.children(unit), np.split(labels, solved["splits"][:-1]), strict=True)
        }
        if not boxes.level(unit):
            ids = [str(load_one(job.file(FRAGMENTS, child), "ids")) for child in boxes.children(unit)]
            texts = (name.encode() + part.tobytes() for name, part in zip(ids, names.values(), strict=True))
            digests = [hashlib.blake2b(text, digest_size=8).hexdigest() for text in texts]
            names |= {"ids": np.array(ids), "digests": np.array(digests, DIGEST)}
        job.check_session()
        save(job.file(NAMES, unit), is_kept=False, **names)

    return work_each("name", units, one, check=job.check_session, reporter=job.reporter(job.plan.boxes.box))


def _labels_of_nodes(job: SegmentJob, unit: int, target: np.ndarray) -> np.ndarray:
    """Return the label of each node that became `target`, as in Solved."""
    boxes, nothing = job.plan.boxes, np.zeros(0, np.int64)
    parts = (load(job.file(NUMBERS, slab), (str(unit),)) for slab in boxes.slabs(unit))
    final = np.concatenate([nothing, *(part[str(unit)] for part in parts if part)])
    parent = boxes.parent(unit)
    rest = nothing if parent is None else load_one(job.file(NAMES, parent), str(unit))
    labels = np.concatenate([[0], final, rest])
    return np.asarray(labels[np.where(target == NO_OBJECT, 0, np.where(target < 0, -target, target + 1 + len(final)))])


def finish_graph(job: SegmentJob, units: Sequence[int]) -> Record[Objects]:
    """Write the table of objects, and return which labels are to be painted; there is one unit."""

    def do() -> Objects:
        job.check_session()
        plan, boxes, painted = job.plan, job.plan.boxes, _painted(job)
        changed = []
        for unit in range(len(boxes.levels[0])):
            digests = load_one(job.file(NAMES, unit), "digests")
            changed += [c for c, digest in zip(boxes.children(unit), digests, strict=True) if digest != painted[c]]
        with whole_file(job.path / TABLE) as partial, partial.open("wb") as file:
            headings = HEADINGS if plan.source.voxel_size_nm is not None else HEADINGS[:-3]
            file.write(f"{','.join(headings)}\n".encode())
            for slab in range(boxes.num_slabs):
                file.write(job.file(NUMBERS, slab).with_suffix(".csv").read_bytes())
        num = int(load_one(job.file(SOLVED, len(boxes) - 1), "counts").sum())
        levels, shards = {SHARDS: to_ranges(sorted(changed))}, set(changed)
        for level in range(1, len(plan.factors)):
            finer, coarser = plan.shards(level - 1), plan.shards(level)
            starts = (zip(finer.box(shard).start, plan.step(level), plan.shard, strict=True) for shard in shards)
            shards = {coarser.number(tuple(a // step // n for a, step, n in each)) for each in starts}
            levels[f"s{level}"] = to_ranges(sorted(shards))
        return Objects(num, checksums.checksum(job.path / TABLE), levels)

    return work_once("graph", units[0], do, job.reporter(lambda unit: job.plan.box))


def _painted(job: SegmentJob) -> np.ndarray:
    """Return the digests of the labels that are painted; those of blocks that are only tried are not."""
    path = job.path / PAINTED
    if not path.is_file():
        return np.zeros(len(job.plan.blocks), DIGEST)
    with one_thread:
        return np.asarray(np.load(path))


def rows_csv(objects: np.ndarray, plan: SegmentPlan, label: int) -> str:
    """Return the rows of `objects`, from `label` on: label, voxels, bounding box, centre in voxels and in nm."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(objects.tolist(), label):
        voxels, _, *bounds = row[:8]
        centre = [total / voxels for total in row[8:]]
        cells = [f"{c:.3f}" for c in centre]
        if plan.source.voxel_size_nm is not None:
            places = zip(centre, plan.source.voxel_size_nm, plan.source.origin_nm, strict=True)
            cells += [f"{o + c * v:.3f}" for c, v, o in places]
        lines.writerow([number, voxels, *bounds, *cells])
    return text.getvalue()
