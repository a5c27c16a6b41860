"""The tasks of a labelling: pieces of a block, edges of a block, the graph of all, the labels of a block, coarser ones.

Not here: the order of stages (labelling). What tasks leave for each other is files in the run's folder, each there
whole or not at all::

    ids.zarr                 pieces of every block, uint32, a shard each
    pieces/<block>.npz       their table, and what they are joined to outside
    edges/<block>.npz        pairs of pieces, of neighbouring blocks too
    names.npz, objects.csv   the label of every piece, and what is known of each object
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from volpipe import checksums
from volpipe.access import Reader
from volpipe.affinities import Offset
from volpipe.formats.files import atomic_write
from volpipe.grid import Box
from volpipe.journal import Record
from volpipe.label_fields import nearest, read_chances
from volpipe.label_graph import Edges, solve
from volpipe.label_output import coarser, write_labels
from volpipe.label_pieces import COLUMNS, find_pieces
from volpipe.label_plan import LabelPlan, load_label_plan
from volpipe.label_recipe import NEAREST
from volpipe.lock import check_holder
from volpipe.task import Outcomes, work
from volpipe.volume import ArraySpec, create_array, open_writer

IDS, PIECES, EDGES, NAMES, TABLE = "ids.zarr", "pieces", "edges", "names.npz", "objects.csv"
HEADINGS = ("label", *COLUMNS[:1], *COLUMNS[2:], "z_nm", "y_nm", "x_nm")


@dataclass(frozen=True)
class LabelJob:
    """What every task is told: the run's folder, the plan in it, the session that holds it, and the level to write."""

    folder: str
    identity: str
    session: str
    level: int = 0

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def plan(self) -> LabelPlan:
        return load_label_plan(self.folder, self.identity)

    def reader(self) -> Reader:
        """Return what reads the volume."""
        return self.plan.source().open()

    def file(self, stage: str, block: int) -> Path:
        """Return the file that `stage` leaves for `block`."""
        return self.path / stage / f"{block}.npz"


def prepare(job: LabelJob) -> None:
    """Make the folders and the array that tasks write to; what is there stays."""
    plan = job.plan
    for stage in (PIECES, EDGES):
        (job.path / stage).mkdir(exist_ok=True)
    spec = ArraySpec(shape=plan.shape, dtype=np.dtype(np.uint32), chunks=plan.chunk, shards=plan.block)
    create_array(job.path / IDS, "", spec, "zarr3")


def pieces(job: LabelJob, block: int) -> Record:
    """Write the pieces of `block`; their number and that of their joins come back."""

    def do() -> tuple[int, ...]:
        plan = job.plan
        found = find_pieces(plan, job.reader(), block)
        job_is_ours(job)
        open_writer(job.path / IDS, "").write(plan.blocks.box(block), found.ids)
        save(job.file(PIECES, block), joins=found.joins, table=found.table)
        return len(found.table), len(found.joins)

    return _task("pieces", job, block, do)


def edges(job: LabelJob, block: int) -> Record:
    """Write which pieces the pieces of `block` are joined to, and what lies between pairs; how many come back."""

    def do() -> tuple[int, ...]:
        near = View.of(job, block)
        joins = near.resolved(_load(job.file(PIECES, block))["joins"])
        found = near.edges() if job.plan.recipe.objects.method == "watershed" else Edges(*_NOTHING)
        job_is_ours(job)
        save(job.file(EDGES, block), joins=joins, pairs=near.named(found.pairs), sums=found.sums)
        return len(joins), len(found.pairs)

    return _task("edges", job, block, do)


_NOTHING = (np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64))


@dataclass(frozen=True)
class LabelGraph:
    """What tasks left of all pieces, in the order of their blocks.

    Attributes:
        table: as in Pieces.
        bases: of each block, the place of its first piece in `table`; of none, how many there are.
        joins, pairs, sums: as `solve` takes them.
    """

    table: np.ndarray
    bases: np.ndarray
    joins: np.ndarray
    pairs: np.ndarray
    sums: np.ndarray

    @classmethod
    def read(cls, job: LabelJob) -> LabelGraph:
        blocks = range(len(job.plan.blocks))
        tables = [_load(job.file(PIECES, block))["table"] for block in blocks]
        bases = np.cumsum([0, *map(len, tables)])
        between = [_load(job.file(EDGES, block)) for block in blocks]
        joins, pairs, sums = (np.concatenate([each[name] for each in between]) for name in ("joins", "pairs", "sums"))
        return cls(np.concatenate(tables), bases, _places(joins, bases), _places(pairs, bases), sums)


def graph(job: LabelJob, unit: int) -> Record:
    """Write the label of every piece, and the table of objects; how many there are comes back, and its checksum."""

    def do() -> tuple[int, ...]:
        plan, told = job.plan, LabelGraph.read(job)
        found = solve(told.table, told.joins, told.pairs, told.sums, plan.recipe.objects)
        job_is_ours(job)
        atomic_write(job.path / TABLE, objects_csv(found.objects, plan).encode())
        save(job.path / NAMES, labels=found.labels.astype(plan.dtype), bases=told.bases)
        return len(found.objects), checksums.checksum(job.path / TABLE)

    return _task("graph", job, unit, do)


def paint(job: LabelJob, block: int) -> Record:
    """Write the labels of `block` to the output; the checksums of its files come back."""

    def labels() -> np.ndarray:
        plan, names = job.plan, _load(job.path / NAMES)
        found = np.zeros(int(names["bases"][block + 1] - names["bases"][block]) + 1, plan.dtype)
        found[1:] = names["labels"][names["bases"][block] : names["bases"][block + 1]]
        ids = open_writer(job.path / IDS, "").read(plan.blocks.box(block))
        return np.asarray(found[ids])

    return _write("paint", job, block, labels)


def coarsen(job: LabelJob, shard: int) -> Record:
    """Write `shard` of the job's level, from the level before it; the checksums of its files come back."""

    def labels() -> np.ndarray:
        return coarser(job.plan, job.level, job.plan.shards(job.level).box(shard))

    return _write(f"pyramid {job.level}", job, shard, labels)


def _write(stage: str, job: LabelJob, shard: int, labels: Callable[[], np.ndarray]) -> Record:
    """Write what `labels` gives (z, y, x) to `shard` of the job's level."""
    taken: list[tuple[int, int, str]] = []

    def do() -> tuple[int, ...]:
        data = labels()
        job_is_ours(job)
        taken.append((job.level, shard, write_labels(job.plan, job.level, job.plan.shards(job.level).box(shard), data)))
        return ()

    record = _task(stage, job, shard, do)
    return dataclasses.replace(record, sums=tuple(taken))


def job_is_ours(job: LabelJob) -> None:
    """Refuse to write for a driver whose place another has taken."""
    check_holder(job.path, job.session)


def _task(stage: str, job: LabelJob, unit: int, do: Callable[[], tuple[int, ...]]) -> Record:
    found: list[int] = []

    def outcomes() -> Outcomes:
        job_is_ours(job)
        found.extend(do())
        yield unit, None

    return dataclasses.replace(work(stage, [unit], outcomes()), result=tuple(found))


@dataclass(frozen=True)
class View:
    """The pieces of a block and of those around it, numbered for this task alone.

    Attributes:
        block, own: which, and its voxels.
        box: what is seen, voxels of the volume.
        ids: of `box` (z, y, x), int64; 0 is none.
        blocks: ascending; `bases[i]` is what was added to the ids of `blocks[i]`.
    """

    job: LabelJob
    block: int
    own: Box
    box: Box
    ids: np.ndarray
    blocks: np.ndarray
    bases: np.ndarray

    @classmethod
    def of(cls, job: LabelJob, block: int) -> View:
        plan = job.plan
        own = plan.blocks.box(block)
        reach = plan.reach
        box = (
            Box(
                tuple(a - r for a, r in zip(own.start, reach, strict=True)),
                tuple(b + r for b, r in zip(own.stop, reach, strict=True)),
            )
            & plan.box
        )
        ids = open_writer(job.path / IDS, "").read(box).astype(np.int64)
        blocks, bases, base = list(plan.blocks.touching(box)), [], 0
        for number in blocks:
            part = ids[(plan.blocks.box(number) & box).relative_to(box.start).slices]
            bases.append(base)
            num = int(part.max(initial=0))
            part[part > 0] += base
            base += num
        return cls(job, block, own, box, ids, np.array(blocks), np.array(bases))

    def named(self, numbers: np.ndarray) -> np.ndarray:
        """Return `numbers`, above 0, of pieces here as they are known everywhere: block << 32 | id."""
        place = np.searchsorted(self.bases, numbers, side="left") - 1
        # Of blocks that have no piece here the bases are equal; the last of these is the one with pieces.
        return np.asarray((self.blocks[place] << 32) | (numbers - self.bases[place]))

    def resolved(self, joins: np.ndarray) -> np.ndarray:
        """Return each pair of pieces, as they are known everywhere, that `joins` as in Pieces say are joined."""
        shape = self.job.plan.shape
        places = np.unravel_index(joins[:, 1], shape)
        there = self.ids[tuple(p - a for p, a in zip(places, self.box.start, strict=True))]
        here = joins[:, 0] + self.bases[np.searchsorted(self.blocks, self.block)]
        if not there.all():
            raise ValueError(f"a piece of {self.own} is joined to a voxel without one: scratch is damaged")
        return self.named(np.unique(np.stack([here, there], axis=1), axis=0))

    def edges(self) -> Edges:
        """Return what lies between pieces, from the voxels of the block to those at their offsets; numbers as here."""
        plan = self.job.plan
        wanted, objects = plan.recipe.input, plan.recipe.objects
        wide = Box(tuple(max(0, a - 1) for a in self.own.start), self.own.stop)
        chances = read_chances(plan, self.job.reader(), wide)
        inner = self.own.relative_to(wide.start).slices
        near = nearest(plan, chances, wide)[:, *inner]
        parts = [self._between(offset, near[k], 0) for k, offset in enumerate(NEAREST)]
        if objects.agglomerate == "mutex":
            far = enumerate(wanted.offsets[len(NEAREST) :], len(NEAREST))
            parts += [self._between(offset, chances[k][inner], 2) for k, offset in far]
        return Edges.total(
            np.concatenate([part.pairs for part in parts]), np.concatenate([part.sums for part in parts])
        )

    def _between(self, offset: Offset, chances: np.ndarray, column: int) -> Edges:
        """Return the sums of `chances` of the block's voxels to those at `offset`, in `column` and the next."""
        here = self.own & self.job.plan.box.shift(tuple(-o for o in offset))
        data = chances[here.relative_to(self.own.start).slices]
        first = self.ids[here.relative_to(self.box.start).slices]
        second = self.ids[here.shift(offset).relative_to(self.box.start).slices]
        kept = (first != second) & (first > 0) & (second > 0)
        return counted(first[kept], second[kept], data[kept], column)


def counted(first: np.ndarray, second: np.ndarray, chances: np.ndarray, column: int) -> Edges:
    """Return the edges of single pairs of voxels, whose `chances` (uint8) go to `column` and how many to the next."""
    low, high = np.minimum(first, second), np.maximum(first, second)
    span = int(high.max(initial=0)) + 1
    keys, number = np.unique(low * span + high, return_inverse=True)
    sums = np.zeros((len(keys), 4), np.int64)
    sums[:, column] = np.bincount(number, chances, len(keys)).astype(np.int64)
    sums[:, column + 1] = np.bincount(number, minlength=len(keys))
    return Edges(np.stack([keys // span, keys % span], axis=1), sums)


def _places(names: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """Return the place in the table of all pieces of those that are named block << 32 | id."""
    return np.asarray(bases[names >> 32] + (names & 0xFFFFFFFF) - 1)


def objects_csv(objects: np.ndarray, plan: LabelPlan) -> str:
    """Return the table of objects as CSV: label, voxels, bounding box, centre in voxels and in nm."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS if plan.voxel_size_nm is not None else HEADINGS[:-3])
    for label, row in enumerate(objects.tolist(), 1):
        voxels, _, *bounds = row[:8]
        centre = [total / voxels for total in row[8:]]
        told = [f"{c:.3f}" for c in centre]
        if plan.voxel_size_nm is not None:
            places = zip(centre, plan.voxel_size_nm, plan.origin_nm, strict=True)
            told += [f"{o + c * v:.3f}" for c, v, o in places]
        lines.writerow([label, voxels, *bounds, *told])
    return text.getvalue()


def save(path: Path, **arrays: np.ndarray) -> None:
    """Write `arrays` to the file at `path`, whole or not at all."""
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **arrays)
    atomic_write(path, data.getvalue())


def _load(path: Path) -> Any:  # Any: numpy's archive
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}
