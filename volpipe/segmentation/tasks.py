"""The tasks of a segmentation's blocks: fragments, edges and labels; coarser levels.

Not here: the graph of all blocks (graph), or the order of stages (driver). Tasks hand over files in the run's folder,
each written atomically::

    ids.zarr                 fragments of every block, uint32, a shard each
    pieces/<block>.npz       their table, and their joins to neighbouring blocks
    edges/<block>.npz        pairs of fragments, of neighbouring blocks too
    painted.npy              digests of the labels of every block, as they were painted last

The first three stay where the labels are updated.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from volpipe.blockwise.journal import Record, TakesBack
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.task import Making, work_behind, work_each
from volpipe.geometry.affinities import Offset
from volpipe.geometry.grid import Box
from volpipe.inference.output import shards_behind, write_voxels
from volpipe.inference.pyramid import coarse_voxels
from volpipe.recipes.segmentation import NEAREST
from volpipe.runs.update_records import (
    SEEN,
    SHARDS,
    Entries,
    Remainder,
    UnitEntries,
    UnitResult,
    Updated,
    remainder,
)
from volpipe.runs.worker import Seen, Written
from volpipe.segmentation.boundary_maps import Readable, VoxelBox, nearest_affinities, read_probabilities
from volpipe.segmentation.edges import NO_PAIR, Edges, grouped
from volpipe.segmentation.method import COLUMNS, Fragments
from volpipe.segmentation.plan import SegmentPlan, load_segment_plan
from volpipe.syntax import one_thread
from volpipe.volumes.file_states import hash_voxels, read_known
from volpipe.volumes.formats.container import grow_array
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.storage.paths import atomic_write, whole_file
from volpipe.volumes.volume import ArraySpec, create_array, open_writer

IDS, FRAGMENTS, EDGES, PAINTED = "ids.zarr", "pieces", "edges", "painted.npy"
SOLVED, NUMBERS, NAMES, TABLE = "solved", "numbers", "names", "objects.csv"
DIGEST = np.dtype("S16")
APPS = {
    "pieces": "find_fragments", "edges": "find_edges", "solve": "solve_boxes", "number": "number_objects",
    "name": "name_fragments", "graph": "finish_graph", "paint": "paint", "pyramid": "coarsen_labels",
    "reread": "look_fragments",
}  # fmt: skip
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

    def reporter(self, box: Callable[[int], Box]) -> Reporter:
        """Return the reporter of a task, to whose units `box` gives the box (z, y, x) that it works on."""
        return Reporter(self.path, self.session, box)

    def read(self, block: int) -> tuple[VoxelBox, str]:
        """Return the voxels of the volume that the tasks of `block` read, and their fingerprint."""
        box, reader = self.plan.input_box(block), self.plan.source.as_planned().open(session=self.session)
        voxels, fingerprint = read_known(reader, box, num_channels=self.plan.num_channels_read)
        return VoxelBox(box, voxels), fingerprint

    def file(self, stage: str, block: int) -> Path:
        """Return the file that `stage` writes for `block`."""
        return self.path / stage / f"{block}.npz"


@dataclass(frozen=True)
class Counts(UnitResult):
    """Numbers of things in blocks.

    Attributes:
        blocks: the numbers of each block: its own, and those of the things.
        seen: block and fingerprint of the input that each read.
    """

    blocks: tuple[tuple[int, ...], ...] = ()
    seen: tuple[tuple[int, str], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return all `parts` as one."""
        blocks = tuple(row for part in parts for row in part.blocks)
        return cls(blocks, tuple(entry for part in parts for entry in part.seen))


@dataclass(frozen=True)
class FragmentCounts(Counts):
    """Number of fragments of blocks, and of their joins; of an anchored method, of voxels that are lost as well."""

    ENTRIES: ClassVar[Entries] = {
        "blocks": UnitEntries("pieces"), "seen": UnitEntries(SEEN),
    }  # fmt: skip


@dataclass(frozen=True)
class EdgeCounts(Counts):
    """Number of joins and of edges of blocks' fragments."""

    ENTRIES: ClassVar[Entries] = {
        "blocks": UnitEntries("edges"), "seen": UnitEntries(SEEN),
    }  # fmt: skip


@dataclass(frozen=True)
class Objects(TakesBack):
    """Number of objects, and the checksum of their table.

    Attributes:
        painted: shards that are to be written, as ranges by level ("s0"); others have their labels already.
    """

    num_objects: int
    table_checksum: int
    painted: dict[str, str] = field(default_factory=dict)

    def remainder(self) -> Remainder:
        """Return the remainder of the labels that are to be written; see `TakesBack`."""
        return remainder(self.painted)

    def noted(self) -> Self:
        """Return the result without `painted`, as a journal notes it."""
        return dataclasses.replace(self, painted={})


@dataclass(frozen=True)
class Painted(Written):
    """Result of painting labels.

    Attributes:
        labels: block and digest of what was painted.
    """

    ENTRIES: ClassVar[Entries] = {
        **Written.ENTRIES, "labels": UnitEntries(SHARDS),
    }  # fmt: skip

    labels: tuple[tuple[int, str], ...] = ()


RESULTS = (FragmentCounts, EdgeCounts, Objects, Written, Painted, Seen, Updated)


def submitter(pool: WorkerPool, job: SegmentJob, stage: str, units: Sequence[int]) -> Future[Record[Any]]:
    """Submit a task of `stage`, which says in its name of which level or what for."""
    name, _, argument = stage.partition(" ")
    if argument.isdigit():
        return pool.submit(APPS[name], dataclasses.replace(job, level=int(argument)), list(units))
    return pool.submit(APPS[name], job, list(units), *filter(None, [argument]))


def prepare(job: SegmentJob) -> None:
    """Create the folders and the array that tasks write to, unless they exist; the array grows with its volume."""
    plan = job.plan
    for stage in (FRAGMENTS, EDGES, SOLVED, NUMBERS, NAMES):
        (job.path / stage).mkdir(exist_ok=True)
    spec = ArraySpec(shape=plan.shape, dtype=np.dtype(np.uint32), chunks=plan.chunk, shards=plan.block)
    grow_array(job.path / IDS, "", spec, "zarr3")
    create_array(job.path / IDS, "", spec, "zarr3")


def find_fragments(plan: SegmentPlan, reader: Readable, block: int) -> Fragments:
    """Return the fragments of `block`, from its `SegmentPlan.input_box` in `reader`."""
    return plan.method.find(plan.recipe, plan.shape, reader, plan.blocks.box(block))


def fragments(job: SegmentJob, units: Sequence[int]) -> Record[FragmentCounts]:
    """Write the fragments of blocks `units`."""

    def one(block: int) -> FragmentCounts:
        plan = job.plan
        voxels, seen = job.read(block)
        result = find_fragments(plan, voxels, block)
        job.check_session()
        open_writer(job.path / IDS, "").write(plan.blocks.box(block), result.ids)
        ids = np.array(hash_voxels(result.ids))
        save(job.file(FRAGMENTS, block), joins=result.joins, table=result.table, ids=ids)
        lost = (result.num_lost,) if plan.method.is_anchored else ()
        return FragmentCounts(((block, len(result.table), len(result.joins), *lost),), ((block, seen),))

    reporter = job.reporter(lambda block: job.plan.blocks.box(block))
    return work_each("pieces", units, one, FragmentCounts.joined, job.check_session, reporter)


def edges(job: SegmentJob, units: Sequence[int]) -> Record[EdgeCounts]:
    """Write the joins and the edges of the fragments of blocks `units`."""

    def one(block: int) -> EdgeCounts:
        plan, result, pairs, seen = job.plan, _NO_EDGES, _NO_EDGES.pairs, tuple[tuple[int, str], ...]()
        if plan.method.is_anchored:
            joins = joins_by_anchor(job, block)
            if plan.recipe.objects.stitch:
                near = Neighbourhood.load(job, block, plan.blocks.box(block).grown((1, 0, 0)) & plan.box)
                result = near.overlaps()
                pairs = near.global_ids(result.pairs)
        else:
            near = Neighbourhood.load(job, block, plan.around(block))
            joins = near.joined_ids(load_one(job.file(FRAGMENTS, block), "joins"))
            if plan.recipe.objects.is_watershed:
                voxels, fingerprint = job.read(block)
                result, seen = near.edges(voxels), ((block, fingerprint),)
            pairs = near.global_ids(result.pairs)
        job.check_session()
        save(job.file(EDGES, block), joins=joins, pairs=pairs, sums=result.sums, first=result.first)
        return EdgeCounts(((block, len(joins), len(result.pairs)),), seen)

    reporter = job.reporter(lambda block: job.plan.blocks.box(block))
    return work_each("edges", units, one, EdgeCounts.joined, job.check_session, reporter)


def joins_by_anchor(job: SegmentJob, block: int) -> np.ndarray:
    """Return the pairs (n, 2) of fragments of `block` and of later ones with the same anchor, as global ids."""
    own = load_one(job.file(FRAGMENTS, block), "joins")
    parts = [np.zeros((0, 2), np.int64)]
    for other in job.plan.blocks.touching(job.plan.around(block)):
        if other > block:  # an earlier one names the pair itself
            theirs = load_one(job.file(FRAGMENTS, other), "joins")
            _, here, there = np.intersect1d(own[:, 1], theirs[:, 1], assume_unique=True, return_indices=True)
            parts.append(np.stack([block << 32 | own[here, 0], other << 32 | theirs[there, 0]], axis=1))
    return np.concatenate(parts)


_NO_EDGES = Edges(*(np.zeros((0, columns), np.int64) for columns in (2, 2, 1)))


def note_painted(folder: Path, digests: np.ndarray) -> None:
    """Write the digests of the painted labels of each block, b"" of none, for the task of the graph."""
    data = io.BytesIO()
    np.save(data, digests)
    atomic_write(folder / PAINTED, data.getvalue())


def paint(job: SegmentJob, units: Sequence[int]) -> Record[Written]:
    """Write the labels of blocks `units` to the output."""

    def make(block: int) -> Callable[[], Painted]:
        plan, boxes = job.plan, job.plan.boxes
        unit = next(boxes.around(block))
        names, place = load(job.file(NAMES, unit), (str(block), "ids", "digests")), boxes.children(unit).index(block)
        label = np.concatenate([np.zeros(1, plan.dtype), names[str(block)]])
        ids = open_writer(job.path / IDS, "").read(plan.blocks.box(block))
        if hash_voxels(ids) != str(names["ids"][place]):
            raise ValueError(f"the fragments of {plan.blocks.box(block)} in {job.path / IDS} are damaged; use --fresh")
        labels, digest = np.asarray(label[ids])[np.newaxis], names["digests"][place].decode()
        return lambda: Painted(_write_shard(job, block, labels).checksums, labels=((block, digest),))

    def joined(parts: Sequence[Painted]) -> Painted:
        both = Written.joined(parts)
        return Painted(both.checksums, labels=tuple(entry for part in parts for entry in part.labels))

    making = Making(make, shards_behind(job.plan))
    return work_behind("paint", units, making, joined, job.check_session, _shard_reporter(job))


def coarsen(job: SegmentJob, units: Sequence[int]) -> Record[Written]:
    """Write shards `units` of the job's level from the level before it."""

    def make(shard: int) -> Callable[[], Written]:
        return partial(
            _write_shard, job, shard, coarse_voxels(job.plan, job.level, job.plan.shards(job.level).box(shard))
        )

    making = Making(make, shards_behind(job.plan))
    return work_behind(f"pyramid {job.level}", units, making, Written.joined, job.check_session, _shard_reporter(job))


def _write_shard(job: SegmentJob, shard: int, labels: np.ndarray) -> Written:
    """Write `labels` (1, z, y, x) to `shard` of the job's level."""
    sums = write_voxels(job.plan, job.level, job.plan.shards(job.level).box(shard), labels)
    return Written(((job.level, shard, sums),))


def _shard_reporter(job: SegmentJob) -> Reporter:
    return job.reporter(lambda shard: job.plan.shards(job.level).box(shard))


def look(job: SegmentJob, units: Sequence[int], what: str) -> Record[Seen]:
    """Return the fingerprints of what the tasks of the given blocks would read now; the driver knows what for."""

    def one(block: int) -> tuple[int, str]:
        return block, job.read(block)[1]

    reporter = job.reporter(job.plan.input_box)
    return work_each(f"reread {what}", units, one, lambda seen: Seen(tuple(seen)), job.check_session, reporter)


@dataclass(frozen=True)
class Neighbourhood:
    """The fragments of a block and of its neighbours, numbered for this task alone.

    Attributes:
        block, own: its number and its box.
        box: the block with its halo, clipped to the volume.
        ids: (z, y, x), uint32, of `box`; 0 is background.
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
    def load(cls, job: SegmentJob, block: int, box: Box) -> Neighbourhood:
        """Return those of `block` and around it in `box`."""
        plan = job.plan
        own = plan.blocks.box(block)
        ids = open_writer(job.path / IDS, "").read(box)
        blocks, bases, base = list(plan.blocks.touching(box)), [], 0
        for number in blocks:
            part = ids[(plan.blocks.box(number) & box).relative_to(box.start).slices]
            bases.append(base)
            num = int(part.max(initial=0))
            if base:
                part += (part > 0) * np.uint32(base)
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

    def edges(self, voxels: VoxelBox) -> Edges:
        """Return the edges of local fragments, from the block's voxels to those at the offsets."""
        plan, objects = self.job.plan, self.job.plan.recipe.objects
        wide = Box(tuple(max(0, a - 1) for a in self.own.start), self.own.stop)
        probabilities = read_probabilities(plan.recipe.input, voxels, wide)
        inner = self.own.relative_to(wide.start).slices
        near = nearest_affinities(plan.recipe.input, probabilities, wide)[:, *inner]
        parts = [self._between(k, offset, near[k], 0) for k, offset in enumerate(NEAREST)]
        if objects.is_mutex:
            far = enumerate(plan.recipe.input.offsets[len(NEAREST) :], len(NEAREST))
            parts += [self._between(k, offset, probabilities[k][inner], 1) for k, offset in far]
        columns = zip(*((part.pairs, part.sums, part.first) for part in parts), strict=True)
        return Edges.total(*map(np.concatenate, columns))

    def overlaps(self) -> Edges:
        """Return the edges of local fragments to those of the slice before, from the block's voxels."""
        edges = self._between(0, NEAREST[0], np.full(self.own.shape, 1, np.uint8), 0)
        return Edges.total(edges.pairs, edges.sums, edges.first)

    def _between(self, channel: int, offset: Offset, probabilities: np.ndarray, kind: int) -> Edges:
        """Return the edges of the block's voxels to those at `offset`, as of `edge_sums`."""
        here = self.own & self.job.plan.box.shift(tuple(-o for o in offset))
        data = probabilities[here.relative_to(self.own.start).slices].reshape(-1)
        first = self.ids[here.relative_to(self.box.start).slices].reshape(-1)
        second = self.ids[here.shift(offset).relative_to(self.box.start).slices].reshape(-1)
        is_pair = first != second
        is_pair &= first > 0
        is_pair &= second > 0
        pairs = np.flatnonzero(is_pair)
        edges, places = edge_sums(first.take(pairs), second.take(pairs), data.take(pairs), self.job.plan.kinds, kind)
        at = np.unravel_index(pairs[places], here.shape)
        voxel = np.ravel_multi_index([p + a for p, a in zip(at, here.start, strict=True)], self.job.plan.shape)
        edges.first[:, kind] = voxel * max(len(NEAREST), len(self.job.plan.recipe.input.offsets)) + channel
        return edges


def edge_sums(
    first: np.ndarray, second: np.ndarray, probabilities: np.ndarray, kinds: int, kind: int
) -> tuple[Edges, np.ndarray]:
    """Return the edges of pairs of voxels (n,), and the first pair of each; `probabilities` are of one `kind`."""
    order, pairs, starts = grouped(first, second)
    sums, none = np.zeros((len(pairs), 2 * kinds), np.int64), np.full((len(pairs), kinds), NO_PAIR)
    if len(pairs):
        sums[:, 2 * kind] = np.add.reduceat(probabilities.take(order), starts, dtype=np.int64)
        sums[:, 2 * kind + 1] = np.diff(starts, append=len(order))
    return Edges(pairs, sums, none), order[starts]


def save(path: Path, *, is_kept: bool = True, **arrays: np.ndarray) -> None:
    """Write `arrays` to the file at `path` atomically; compressed where it is kept, for updates."""
    method = zipfile.ZIP_DEFLATED if is_kept else zipfile.ZIP_STORED
    with whole_file(path) as partial, zipfile.ZipFile(partial, "w", method, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def load(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of the file at `path` that have one of `names`; others are not read."""
    with one_thread, np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in names if name in archive.files}


def load_one(path: Path, name: str) -> np.ndarray:
    """Return the array `name` of the file at `path`."""
    return load(path, (name,))[name]
