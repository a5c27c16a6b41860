"""What runs remotely: a task takes a run's folder and the numbers of its units, works them off, and reports.

Not here: what each stage does to voxels (statistics, scratch, infer, reassemble, pyramid). What arrives is names and
integers, what goes back is a small plain record; nothing is raised, since an exception that cannot be unpickled would
stop the driver's result thread. Marks are the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.malloc import keep_freed_memory
from volpipe.blockwise.notes import Reporter, no_box
from volpipe.blockwise.pool import Submit, WorkerPool
from volpipe.blockwise.task import Making, Outcomes, work, work_behind, work_each
from volpipe.errors import PlanError
from volpipe.geometry.block_shape import SLAB_VOXELS
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import Affine, ClippedVoxels
from volpipe.inference.output import shards_behind
from volpipe.inference.output_plan import SourceVolume
from volpipe.inference.plan import Plan, load_plan
from volpipe.inference.scratch import PARTS, ScratchTensors
from volpipe.inference.selection import SELECTION_FILE, Selection, load_selection, load_unwritten, scanned_boxes
from volpipe.inference.selection import scan as scan_block
from volpipe.inference.statistics import Statistics, is_finite, join, measure_each
from volpipe.inference.statistics import measure as measure_voxels
from volpipe.inference.windows import StoredWindows, StreamedWindows, WindowSource, read_fingerprint
from volpipe.runs.update_records import SEEN, SHARDS, Entries, ShardEntries, UnitEntries, UnitResult, Updated
from volpipe.units import count
from volpipe.volumes.file_states import FileStates, read_still, states_of
from volpipe.volumes.node_cache import through_cache
from volpipe.volumes.stack import stack
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.volume import Volume, open_volume

READ_LAYERS = 64  # voxels along z that a measuring task reads at least
DUE_FILE = "due.npy"


@dataclass(frozen=True)
class Job:
    """What the driver sends with every task.

    Attributes:
        identity: of the plan in it.
        shift, scale, ends: the normalisation (`Affine`), once it is known.
        bins: ends of the histogram, or of each channel's, of a second measuring pass; none of the first.
        cells: fingerprint of the wanted cells in the folder, once they are known; "" where all are wanted.
        due: fingerprint of the flags in the folder of the shards that are still to be written; "" where all are.
        session: what the folder's lock says while the driver that sends this holds it; "" asks for no such lock.
    """

    folder: str
    identity: str
    shift: float | tuple[float, ...] = 0.0
    scale: float | tuple[float, ...] = 1.0
    ends: tuple[tuple[float, float], ...] = ()
    bins: tuple[tuple[float, float], ...] = ()
    session: str = ""
    cells: str = ""
    due: str = ""

    @property
    def plan(self) -> Plan:
        return load_plan(str(Path(self.folder) / Plan.FILE), self.identity)

    @property
    def selection(self) -> Selection:
        folder = Path(self.folder)
        selection = load_selection(str(folder / Plan.FILE), self.identity, str(folder / SELECTION_FILE), self.cells)
        return replace(selection, unwritten=load_unwritten(str(folder / DUE_FILE), self.due)) if self.due else selection

    @property
    def normalise(self) -> Affine:
        return Affine(self.shift, self.scale, self.ends)

    def of(self, normalise: Affine) -> Job:
        """Return this job, with its normalisation."""
        return replace(self, shift=normalise.shift, scale=normalise.scale, ends=normalise.ends)

    @property
    def tensors(self) -> ScratchTensors:
        return ScratchTensors(self.plan, Path(self.folder))

    def reporter(
        self, box: Callable[[int], Box] | None = None, num_windows: Callable[[], int] | None = None
    ) -> Reporter:
        """Return what tells of a task, whose units have such a box (z, y, x), in the sign of its worker."""
        return Reporter(Path(self.folder), self.session, box or no_box, num_windows)

    def check_session(self) -> None:
        """Refuse to write for a driver whose place another has taken: workers outlive a killed driver for a while.

        Raises:
            RunError: the folder's lock names another session.
        """
        if self.session:
            check_holder(Path(self.folder), self.session)


@dataclass(frozen=True)
class Cells:
    """Result of a scan: number of each block, and its selected cells as `selection.scan` gives them.

    Attributes:
        states: of the files that decided, of the volume and of the mask: "VOLUME:MASK".
    """

    cells: tuple[tuple[int, str], ...]
    states: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Seen(UnitResult):
    """Result of a task that reads the input of blocks: the number of each, and the fingerprint of what was read."""

    ENTRIES: ClassVar[Entries] = {"seen": UnitEntries(SEEN)}

    seen: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Written(UnitResult):
    """Result of a task that writes shards of an output.

    Attributes:
        checksums: level, number and checksums (`checksums.take`) of each shard.
        clipped_shards: voxels that were clipped to the type of the output, by shard of level 0; shards of which there
            are none are left out.
    """

    ENTRIES: ClassVar[Entries] = {"checksums": ShardEntries(), "clipped_shards": UnitEntries(SHARDS)}

    checksums: tuple[tuple[int, int, str], ...] = ()
    clipped_shards: tuple[tuple[int, int], ...] = ()

    @property
    def clipped(self) -> int:
        """Voxels that were clipped."""
        return sum(count for _, count in self.clipped_shards)

    @classmethod
    def joined(cls, parts: Sequence[Written]) -> Written:
        """Return all `parts` as one."""
        return cls(
            tuple(entry for part in parts for entry in part.checksums),
            tuple(entry for part in parts for entry in part.clipped_shards),
        )


@dataclass(frozen=True)
class Inferred(Written):
    """Result of running the net.

    Attributes:
        shared: those of the shards that other blocks add to as well.
        nonfinite: block, number of NaN and number of infinite voxels of each block where the net gave some, and they
            were kept.
        seen: block and fingerprint of what it read, where it read the volume.
        clipped_blocks: clipped voxels of blocks that finish all of their shards.
    """

    FINISHED: ClassVar[Mapping[str, str]] = {"shared": "reassemble"}  # these shards need no reassembly, being written
    ENTRIES: ClassVar[Entries] = {
        **Written.ENTRIES, "shared": UnitEntries(SHARDS), "nonfinite": UnitEntries("infer"),
        "seen": UnitEntries(SEEN), "clipped_blocks": UnitEntries("infer"),
    }  # fmt: skip

    shared: tuple[int, ...] = ()
    nonfinite: tuple[tuple[int, int, int], ...] = ()
    seen: tuple[tuple[int, str], ...] = ()
    clipped_blocks: tuple[tuple[int, int], ...] = ()

    @property
    def clipped(self) -> int:
        """Voxels that were clipped."""
        return super().clipped + sum(count for _, count in self.clipped_blocks)


RESULTS = (Cells, Statistics, Written, Inferred, Seen, Updated)


def measure(job: Job, units: Sequence[int]) -> Record[Statistics]:
    """Return the joined statistics of the given blocks' own voxels."""

    def one(block: int) -> Statistics:
        return join(part(box) for box in job.plan.lattice.core_box(block).layers(SLAB_VOXELS, READ_LAYERS))

    def part(box: Box) -> Statistics:
        reader = open_source(job).open()
        data = reader.read_own(box)
        if job.plan.grey_rule.is_apart:
            return measure_each(data, job.bins)
        is_whole = is_finite(data) or reader.volume.resampling is not None  # a spline spreads NaN over all around
        data = data if is_whole else _finite_voxels(job.selection, box, data)
        return measure_voxels(data, job.bins[0] if job.bins else None)

    stage, reporter = (
        "histogram" if job.bins else "measure",
        job.reporter(lambda block: job.plan.lattice.core_box(block)),
    )
    return work_each(stage, units, one, join, job.check_session, reporter)


def _finite_voxels(selection: Selection, box: Box, data: np.ndarray) -> np.ndarray:
    """Return the voxels of `data` (c, z, y, x), in `box` of the volume, that are finite; all that are wanted must be.

    Raises:
        PlanError: some are not, with how many, and the box.
    """
    bad = ~np.isfinite(data)
    num_bad = int(np.count_nonzero(bad & selection.input_mask(box)))
    if num_bad:
        raise PlanError(
            f"{count(num_bad, 'voxel')} of the volume in box {box} {'is' if num_bad == 1 else 'are'} NaN or infinite, "
            "so the volume has no mean, range or histogram; mend the volume, exclude these voxels by input.mask, or "
            "give normalise.low and high (or mean and std)"
        )
    return np.asarray(data[~bad])


def scan(job: Job, units: Sequence[int]) -> Record[Cells]:
    """Return the selected cells of the given blocks."""

    plan, laid, source = job.plan, job.plan.mask, open_source(job)
    mask = None if laid is None else _open_mask(job.identity, laid.path, laid.key)
    states = ScanStates(plan, states_of(source), None if mask is None else FileStates(mask))

    def one(block: int) -> tuple[int, str, str]:
        what = f"the files that decide whether block {block} of {source} is selected"
        return block, *read_still(lambda: scan_block(plan, source, mask, block), lambda: states.of(block), what)

    def joined(found: Sequence[tuple[int, str, str]]) -> Cells:
        return Cells(
            tuple((block, cells) for block, cells, _ in found), tuple((block, state) for block, _, state in found)
        )

    reporter = job.reporter(lambda block: job.plan.lattice.core_box(block))
    return work_each("scan", units, one, joined, job.check_session, reporter)


def factor(job: Job, units: Sequence[int]) -> Record[Seen]:
    """Write the window tensors of the given blocks."""
    from volpipe.inference.scratch import factor as factor_block

    def one(block: int) -> tuple[int, str]:
        return block, factor_block(job.selection, open_source(job), job.normalise, job.tensors, block)

    reporter = job.reporter(lambda block: job.plan.sum_box(block))
    return work_each("factor", units, one, lambda seen: Seen(tuple(seen)), job.check_session, reporter)


def look(job: Job, units: Sequence[int], what: str) -> Record[Seen]:
    """Return the fingerprints of what the given blocks would read now; `what` for, the driver knows."""

    def one(block: int) -> tuple[int, str]:
        reader = open_source(job).open(session=job.session, live=True)
        return block, read_fingerprint(reader, job.selection.slabs(block))

    reporter = job.reporter(job.selection.input_box)
    return work_each(f"reread {what}", units, one, lambda seen: Seen(tuple(seen)), job.check_session, reporter)


@dataclass(frozen=True)
class ScanStates:
    """The states of the files that decide what of a block is selected."""

    plan: Plan
    volume: FileStates
    mask: FileStates | None

    def of(self, block: int) -> str:
        """Return those of the volume and of the mask, "VOLUME:MASK"; "" where a store does not tell enough."""
        pairs = zip((self.volume, self.mask), scanned_boxes(self.plan, block), strict=True)
        states = ["-" if files is None or box is None else files.hash(box) for files, box in pairs]
        return ":".join(states) if all(states) else ""


def infer(job: Job, units: Sequence[int]) -> Record[Inferred]:
    """Run the net over the given blocks and write their shards and tensors."""
    from volpipe.inference.infer import infer as infer_blocks

    shared: list[int] = []
    bad: list[tuple[int, int, int]] = []
    sums: list[tuple[int, int, str]] = []
    seen: list[tuple[int, str]] = []
    clipped: list[tuple[int, int]] = []
    in_blocks: list[tuple[int, int]] = []

    def num_windows() -> int:
        return sum(len(job.selection.windows_of(block)) for block in units)

    reporter = job.reporter(lambda block: job.plan.sum_box(block), num_windows)

    def outcomes() -> Outcomes:
        for block, outcome in infer_blocks(
            job.selection, job.normalise, job.tensors, window_source(job), units, reporter, job.check_session
        ):
            if isinstance(outcome, Exception):
                yield block, outcome
                continue
            shared.extend(outcome.shared)
            sums.extend((0, shard, crcs) for shard, crcs in outcome.checksums.items())
            clipped.extend((shard, count) for shard, count in outcome.clipped.items() if count)
            if outcome.clipped_in_block:
                in_blocks.append((block, outcome.clipped_in_block))
            if outcome.fingerprint:
                seen.append((block, outcome.fingerprint))
            if outcome.bad.total:
                bad.append((block, outcome.bad.nan, outcome.bad.infinite))
            yield block, None

    def result() -> Inferred:
        return Inferred(tuple(sums), tuple(clipped), tuple(sorted(shared)), tuple(bad), tuple(seen), tuple(in_blocks))

    return work("infer", units, outcomes(), result, reporter)


def reassemble(job: Job, units: Sequence[int]) -> Record[Written]:
    """Write the given shards from block tensors."""
    from volpipe.inference.reassemble import reassemble as reassemble_shard

    def make(shard: int) -> Callable[[], Written]:
        tally = ClippedVoxels()
        write = reassemble_shard(job.selection, job.normalise, job.tensors, shard, tally)

        def written() -> Written:
            sums = write()
            clipped = ((shard, tally.clipped),) if tally.clipped else ()
            return Written(((0, shard, sums),), clipped)

        return written

    reporter, making = job.reporter(lambda shard: job.plan.shards().box(shard)), Making(make, shards_behind(job.plan))
    return work_behind("reassemble", units, making, Written.joined, job.check_session, reporter)


def coarsen(job: Job, units: Sequence[int], level: int) -> Record[Written]:
    """Write the given shards of pyramid `level`."""
    from volpipe.inference.pyramid import coarsen as coarsen_shard

    def make(shard: int) -> Callable[[], Written]:
        write = coarsen_shard(job.plan, level, shard)
        return lambda: Written(((level, shard, write()),))

    keep_freed_memory()  # of one part after the other
    reporter, making = (
        job.reporter(lambda shard: job.plan.shards(level).box(shard)),
        Making(make, shards_behind(job.plan)),
    )
    return work_behind(f"pyramid {level}", units, making, Written.joined, job.check_session, reporter)


def discard(job: Job, units: Sequence[int], what: str) -> Record[None]:
    """Delete tensors: the "windows" of the given blocks, or parts of block tensors, "sum", numbered as in schedule."""

    def one(unit: int) -> None:
        if what == "windows":
            job.tensors.discard_windows(unit)
        else:
            job.tensors.discard_sum(*divmod(unit, len(PARTS)))

    return work_each(f"discard {what}", units, one, check=job.check_session, reporter=job.reporter())


def submitter(pool: WorkerPool, job: Job) -> Submit:
    """Return what submits units of a stage, together with `job`; some stages carry an argument in their name."""

    def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:  # Any: of its stage
        app, _, argument = stage.partition(" ")
        arguments = [int(argument) if argument.isdigit() else argument] if argument else []
        return pool.submit(app, job, list(units), *arguments)

    return submit


def window_source(job: Job) -> WindowSource:
    """Return where the net's windows come from: stored tensors, or the volume."""
    plan = job.plan
    if plan.mode == "stored":
        return StoredWindows(_stored_windows(job.identity, job.folder), plan.lattice)
    return StreamedWindows(open_source(job), plan.lattice, job.normalise, job.session, plan.net.padding)


@lru_cache(maxsize=4)
def _stored_windows(identity: str, folder: str) -> Volume:
    tensors = ScratchTensors(load_plan(str(Path(folder) / Plan.FILE), identity), Path(folder))
    return tensors.source_volume()


def open_source(job: Job) -> Volume:
    """Return the volume that the job's plan was made for."""
    return _open_source(job.identity, job.plan.source)


@lru_cache(maxsize=4)
def _open_source(identity: str, source: SourceVolume) -> Volume:
    return stack([through_cache(part, identity) for part in source.as_planned().parts])


@lru_cache(maxsize=4)
def _open_mask(identity: str, path: str, key: str) -> Volume:
    return through_cache(open_volume(path, key).as_it_is, identity)
