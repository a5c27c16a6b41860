"""The tasks of a segmentation: fragments, edges and labels of a block, the graph of all blocks, coarser levels.

Not here: the order of stages (driver). Tasks hand over files in the run's folder, each written atomically::

    ids.zarr                 fragments of every block, uint32, a shard each
    pieces/<block>.npz       their table, and their joins to neighbouring blocks
    edges/<block>.npz        pairs of fragments, of neighbouring blocks too
    names.npz, objects.csv   the label of every fragment, and the table of objects
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from volpipe.blockwise.heartbeat import Beater
from volpipe.blockwise.journal import Record
from volpipe.blockwise.task import work_each, work_once
from volpipe.geometry.affinities import Offset
from volpipe.geometry.grid import Box
from volpipe.inference.output import write_voxels
from volpipe.inference.pyramid import coarse_voxels
from volpipe.recipes.segmentation import NEAREST
from volpipe.runs.worker import Written
from volpipe.segmentation.agglomerate import Edges, solve
from volpipe.segmentation.boundary_maps import nearest_affinities, read_probabilities
from volpipe.segmentation.fragments import COLUMNS, find_fragments
from volpipe.segmentation.plan import SegmentPlan, load_segment_plan
from volpipe.volumes import checksums
from volpipe.volumes.reader import Reader
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.storage.paths import atomic_write
from volpipe.volumes.volume import ArraySpec, create_array, open_writer

IDS, FRAGMENTS, EDGES, NAMES, TABLE = "ids.zarr", "pieces", "edges", "names.npz", "objects.csv"
HEADINGS = ("label", *COLUMNS[:1], *COLUMNS[2:], "z_nm", "y_nm", "x_nm")


@dataclass(frozen=True)
class SegmentJob:
    """The arguments of every task: the run's folder, its plan's identity, its driver's session, the level to write."""

    folder: str
    identity: str
    session: str
    level: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def plan(self) -> SegmentPlan:
        return load_segment_plan(self.folder, self.identity)

    def check_session(self) -> None:
        """Refuse to write for a driver that another has replaced."""
        check_holder(self.path, self.session)

    def beater(self, box: Callable[[int], Box]) -> Beater:
        """Return what tells of a task, whose units have such a box (z, y, x), in the sign of its worker."""
        return Beater(self.path, self.session, box)

    def reader(self) -> Reader:
        """Return a reader of the input volume."""
        return self.plan.source.volume().open()

    def file(self, stage: str, block: int) -> Path:
        """Return the file that `stage` writes for `block`."""
        return self.path / stage / f"{block}.npz"


@dataclass(frozen=True)
class Counts:
    """Numbers of things in blocks, which add up."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the sums of `parts`."""
        names = [entry.name for entry in dataclasses.fields(cls)]
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in names})


@dataclass(frozen=True)
class FragmentCounts(Counts):
    """Number of fragments of blocks, and of their joins to neighbouring blocks."""

    num_fragments: int
    num_joins: int


@dataclass(frozen=True)
class EdgeCounts(Counts):
    """Number of joins and of edges of blocks' fragments."""

    num_joins: int
    num_edges: int


@dataclass(frozen=True)
class Objects:
    """Number of objects, and the checksum of their table."""

    num_objects: int
    table_checksum: int


RESULTS = (FragmentCounts, EdgeCounts, Objects, Written)


def prepare(job: SegmentJob) -> None:
    """Create the folders and the array that tasks write to, unless they exist."""
    plan = job.plan
    for stage in (FRAGMENTS, EDGES):
        (job.path / stage).mkdir(exist_ok=True)
    spec = ArraySpec(shape=plan.shape, dtype=np.dtype(np.uint32), chunks=plan.chunk, shards=plan.block)
    create_array(job.path / IDS, "", spec, "zarr3")


def fragments(job: SegmentJob, units: Sequence[int]) -> Record[FragmentCounts]:
    """Write the fragments of blocks `units`."""

    def one(block: int) -> FragmentCounts:
        plan = job.plan
        result = find_fragments(plan, job.reader(), block)
        job.check_session()
        open_writer(job.path / IDS, "").write(plan.blocks.box(block), result.ids)
        save(job.file(FRAGMENTS, block), joins=result.joins, table=result.table)
        return FragmentCounts(len(result.table), len(result.joins))

    beater = job.beater(lambda block: job.plan.blocks.box(block))
    return work_each("pieces", units, one, FragmentCounts.joined, job.check_session, beater)


def edges(job: SegmentJob, units: Sequence[int]) -> Record[EdgeCounts]:
    """Write the joins and the edges of the fragments of blocks `units`."""

    def one(block: int) -> EdgeCounts:
        near = Neighbourhood.load(job, block)
        joins = near.joined_ids(_load(job.file(FRAGMENTS, block))["joins"])
        result = near.edges() if job.plan.recipe.objects.method == "watershed" else Edges(*_NO_EDGES)
        job.check_session()
        save(job.file(EDGES, block), joins=joins, pairs=near.global_ids(result.pairs), sums=result.sums)
        return EdgeCounts(len(joins), len(result.pairs))

    return work_each(
        "edges", units, one, EdgeCounts.joined, job.check_session, job.beater(lambda block: job.plan.blocks.box(block))
    )


_NO_EDGES = (np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64))


@dataclass(frozen=True)
class FragmentGraph:
    """The fragments of all blocks and their edges, in the order of blocks.

    Attributes:
        table: as in Fragments.
        bases: (blocks + 1,), row of each block's first fragment in `table`, and the number of rows.
        joins, pairs, sums: the arguments of `solve`.
    """

    table: np.ndarray
    bases: np.ndarray
    joins: np.ndarray
    pairs: np.ndarray
    sums: np.ndarray

    @classmethod
    def load(cls, job: SegmentJob) -> FragmentGraph:
        blocks = range(len(job.plan.blocks))
        tables = [_load(job.file(FRAGMENTS, block))["table"] for block in blocks]
        bases = np.cumsum([0, *map(len, tables)])
        parts = [_load(job.file(EDGES, block)) for block in blocks]
        joins, pairs, sums = (np.concatenate([part[name] for part in parts]) for name in ("joins", "pairs", "sums"))
        return cls(np.concatenate(tables), bases, _rows(joins, bases), _rows(pairs, bases), sums)


def graph(job: SegmentJob, units: Sequence[int]) -> Record[Objects]:
    """Write the label of every fragment and the table of objects; there is one unit."""

    def do() -> Objects:
        job.check_session()
        plan, whole = job.plan, FragmentGraph.load(job)
        solution = solve(whole.table, whole.joins, whole.pairs, whole.sums, plan.recipe.objects)
        job.check_session()
        atomic_write(job.path / TABLE, objects_csv(solution.objects, plan).encode())
        save(job.path / NAMES, labels=solution.labels.astype(plan.dtype), bases=whole.bases)
        return Objects(len(solution.objects), checksums.checksum(job.path / TABLE))

    return work_once("graph", units[0], do, job.beater(lambda unit: job.plan.box))


def paint(job: SegmentJob, units: Sequence[int]) -> Record[Written]:
    """Write the labels of blocks `units` to the output."""

    def labels(block: int) -> np.ndarray:
        plan, names = job.plan, _load(job.path / NAMES)
        label = np.zeros(int(names["bases"][block + 1] - names["bases"][block]) + 1, plan.dtype)
        label[1:] = names["labels"][names["bases"][block] : names["bases"][block + 1]]
        ids = open_writer(job.path / IDS, "").read(plan.blocks.box(block))
        return np.asarray(label[ids])[np.newaxis]

    return _write("paint", job, units, labels)


def coarsen(job: SegmentJob, units: Sequence[int]) -> Record[Written]:
    """Write shards `units` of the job's level from the level before it."""

    def labels(shard: int) -> np.ndarray:
        return coarse_voxels(job.plan, job.level, job.plan.shards(job.level).box(shard))

    return _write(f"pyramid {job.level}", job, units, labels)


def _write(stage: str, job: SegmentJob, units: Sequence[int], labels: Callable[[int], np.ndarray]) -> Record[Written]:
    """Write the result of `labels` (1, z, y, x) to each shard of the job's level."""

    def one(shard: int) -> Written:
        data = labels(shard)
        job.check_session()
        sums = write_voxels(job.plan, job.level, job.plan.shards(job.level).box(shard), data)
        return Written(((job.level, shard, sums),))

    beater = job.beater(lambda shard: job.plan.shards(job.level).box(shard))
    return work_each(stage, units, one, Written.joined, job.check_session, beater)


@dataclass(frozen=True)
class Neighbourhood:
    """The fragments of a block and of its neighbours, numbered for this task alone.

    Attributes:
        block, own: its number and its box.
        box: the block with its halo, clipped to the volume.
        ids: (z, y, x), int64, of `box`; 0 is background.
        blocks: numbers of the blocks in `box`, ascending; `bases[i]` is the offset of the ids of `blocks[i]`.
    """

    job: SegmentJob
    block: int
    own: Box
    box: Box
    ids: np.ndarray
    blocks: np.ndarray
    bases: np.ndarray

    @classmethod
    def load(cls, job: SegmentJob, block: int) -> Neighbourhood:
        plan = job.plan
        own, box = plan.blocks.box(block), plan.around(block)
        ids = open_writer(job.path / IDS, "").read(box).astype(np.int64)
        blocks, bases, base = list(plan.blocks.touching(box)), [], 0
        for number in blocks:
            part = ids[(plan.blocks.box(number) & box).relative_to(box.start).slices]
            bases.append(base)
            num = int(part.max(initial=0))
            part[part > 0] += base
            base += num
        return cls(job, block, own, box, ids, np.array(blocks), np.array(bases))

    def global_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return local `ids`, above 0, as ids in the whole volume: block << 32 | id."""
        place = np.searchsorted(self.bases, ids, side="left") - 1
        # Blocks without fragments have the base of the next; the last of equal bases has the fragments.
        return np.asarray((self.blocks[place] << 32) | (ids - self.bases[place]))

    def joined_ids(self, joins: np.ndarray) -> np.ndarray:
        """Return `joins`, as in Fragments, as unique pairs (n, 2) of global ids."""
        shape = self.job.plan.shape
        places = np.unravel_index(joins[:, 1], shape)
        there = self.ids[tuple(p - a for p, a in zip(places, self.box.start, strict=True))]
        here = joins[:, 0] + self.bases[np.searchsorted(self.blocks, self.block)]
        if not there.all():
            raise ValueError(f"a fragment of {self.own} is joined to a voxel without one: scratch is damaged")
        return self.global_ids(np.unique(np.stack([here, there], axis=1), axis=0))

    def edges(self) -> Edges:
        """Return the edges of local fragments, from the block's voxels to those at the offsets."""
        plan, objects = self.job.plan, self.job.plan.recipe.objects
        wide = Box(tuple(max(0, a - 1) for a in self.own.start), self.own.stop)
        probabilities = read_probabilities(plan, self.job.reader(), wide)
        inner = self.own.relative_to(wide.start).slices
        near = nearest_affinities(plan, probabilities, wide)[:, *inner]
        parts = [self._between(offset, near[k], 0) for k, offset in enumerate(NEAREST)]
        if objects.agglomerate == "mutex":
            far = enumerate(plan.recipe.input.offsets[len(NEAREST) :], len(NEAREST))
            parts += [self._between(offset, probabilities[k][inner], 2) for k, offset in far]
        pairs, sums = zip(*((part.pairs, part.sums) for part in parts), strict=True)
        return Edges.total(np.concatenate(pairs), np.concatenate(sums))

    def _between(self, offset: Offset, probabilities: np.ndarray, column: int) -> Edges:
        """Return the edges of the block's voxels to those at `offset`; the sum in `column`, the number in the next."""
        here = self.own & self.job.plan.box.shift(tuple(-o for o in offset))
        data = probabilities[here.relative_to(self.own.start).slices]
        first = self.ids[here.relative_to(self.box.start).slices]
        second = self.ids[here.shift(offset).relative_to(self.box.start).slices]
        apart = (first != second) & (first > 0) & (second > 0)
        return edge_sums(first[apart], second[apart], data[apart], column)


def edge_sums(first: np.ndarray, second: np.ndarray, probabilities: np.ndarray, column: int) -> Edges:
    """Return the edges of pairs of voxels (n,): sums of `probabilities`, uint8, in `column`, numbers in the next."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    span = int(high.max(initial=0)) + 1
    keys, number = np.unique(low * span + high, return_inverse=True)
    sums = np.zeros((len(keys), 4), np.int64)
    sums[:, column] = np.bincount(number, probabilities, len(keys)).astype(np.int64)
    sums[:, column + 1] = np.bincount(number, minlength=len(keys))
    return Edges(np.stack([keys // span, keys % span], axis=1), sums)


def _rows(ids: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """Return the rows in the table of all fragments of global `ids`, block << 32 | id."""
    return np.asarray(bases[ids >> 32] + (ids & 0xFFFFFFFF) - 1)


def objects_csv(objects: np.ndarray, plan: SegmentPlan) -> str:
    """Return the table of objects as CSV: label, voxels, bounding box, centre in voxels and in nm."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS if plan.source.voxel_size_nm is not None else HEADINGS[:-3])
    for label, row in enumerate(objects.tolist(), 1):
        voxels, _, *bounds = row[:8]
        centre = [total / voxels for total in row[8:]]
        cells = [f"{c:.3f}" for c in centre]
        if plan.source.voxel_size_nm is not None:
            places = zip(centre, plan.source.voxel_size_nm, plan.source.origin_nm, strict=True)
            cells += [f"{o + c * v:.3f}" for c, v, o in places]
        lines.writerow([label, voxels, *bounds, *cells])
    return text.getvalue()


def save(path: Path, **arrays: np.ndarray) -> None:
    """Write `arrays` to the file at `path` atomically."""
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **arrays)
    atomic_write(path, data.getvalue())


def _load(path: Path) -> Any:  # Any: numpy's archive
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
