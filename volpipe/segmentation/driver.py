"""Segmentation: objects from a volume of affinities, block by block on a site's workers, the same for any blocks.

Not here: tasks (tasks), or how objects are found (fragments, agglomerate). The same call resumes a stopped
segmentation from its journal::

    fragments of each block ─► edges of each block ─► graph of all, once ─► labels of each block ─► coarser levels
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from volpipe.blockwise.journal import Journal, Record, Totals, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.task_pool import finished
from volpipe.blockwise.usage import Usage
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.estimation.limits import check_access, check_apart
from volpipe.geometry.grid import Box
from volpipe.inference.output import level_key, remove_leftovers
from volpipe.recipes.segmentation import SegmentRecipe, load_segmentation
from volpipe.runs.presence import Presence, StageNote, present
from volpipe.runs.provenance import ATTRIBUTE_FILES, METADATA_NAMES, RUN_KEY, recognise, stored_offsets
from volpipe.runs.run_folder import Metadata, RunFolder
from volpipe.runs.verify import Shard, check_present, metadata_sums
from volpipe.runs.worker import Written
from volpipe.segmentation import tasks
from volpipe.segmentation.agglomerate import bytes_needed
from volpipe.segmentation.output import create_output
from volpipe.segmentation.plan import LABEL_FILE, SegmentPlan, check_offsets, fit
from volpipe.segmentation.tasks import (
    EDGES,
    FRAGMENTS,
    IDS,
    NAMES,
    TABLE,
    EdgeCounts,
    FragmentCounts,
    Objects,
    SegmentJob,
)
from volpipe.volumes.formats.container import create_groups
from volpipe.volumes.identity import store_identities
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import merge_json, plain
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.storage.paths import Location, delete
from volpipe.volumes.volume import open_volume

__all__ = ["SegmentPlan", "SegmentRecipe", "SegmentationResult", "load_segmentation", "plan_segmentation", "segment"]

log = logging.getLogger(__name__)

GIB = 1 << 30
OnProgress = Callable[[str, int, int], None]
R = TypeVar("R")


@dataclass(frozen=True)
class SegmentStage:
    """A pass over the volume: `app` for each shard of `level`, or once; `verb` is for messages."""

    name: str
    app: str
    verb: str
    once: bool = False
    level: int = 0

    def num_units(self, plan: SegmentPlan) -> int:
        """Return the number of its tasks in `plan`."""
        return 1 if self.once else len(plan.shards(self.level))

    def box(self, plan: SegmentPlan, unit: int) -> Box:
        """Return the box of the task `unit`, in voxels of its level."""
        return plan.box if self.once else plan.shards(self.level).box(unit)


PASSES = (
    SegmentStage("pieces", "find_fragments", "cut into fragments"),
    SegmentStage("edges", "find_edges", "compared with its neighbours"),
    SegmentStage("graph", "agglomerate", "agglomerated", once=True),
    SegmentStage("paint", "paint", "labelled"),
)


def stages_of(plan: SegmentPlan) -> tuple[SegmentStage, ...]:
    """Return the stages of `plan`; each depends on those before it."""
    levels = range(1, len(plan.factors))
    return (
        *PASSES,
        *(SegmentStage(f"pyramid {n}", "coarsen_labels", f"written at level {n}", level=n) for n in levels),
    )


@dataclass(frozen=True)
class SegmentationResult:
    """The result of a segmentation.

    Attributes:
        out: the labels.
        table: the CSV file of objects.
        num_objects: rows of the table.
        seconds: of this call.
        stage_seconds: of workers, by stage, over all sessions.
        was_complete: whether this call had nothing to do.
    """

    out: str
    table: Path
    num_objects: int
    seconds: float
    stage_seconds: dict[str, float] = field(default_factory=dict)
    was_complete: bool = False


def plan_segmentation(location: str, recipe: SegmentRecipe, out: str | Location, search_path: Path) -> SegmentPlan:
    """Return the plan of segmenting the volume at `location`, with every refusal that needs no worker.

    Args:
        location: of affinities, or of a map of foreground or membrane.
        recipe: input, objects and output.
        out: the labels.
        search_path: folder that relative names start from.

    Raises:
        VolumeError: no volume there.
        PlanError: the volume does not fit the recipe or may not be read, or the output may not be written.
    """
    volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
    target = paths.locate(out)
    check_offsets(volume, recipe, stored_offsets(volume.path))
    plan = fit(volume, recipe, str(target), str(search_path))
    check_apart(target, volume, "volume")
    check_access(paths.locate(volume.path), target)
    return plan


def segment(
    plan: SegmentPlan,
    start: Start,
    *,
    fresh: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    on_begin: Callable[[WorkerPool], None] = lambda workers: None,
    site: str = "",
    same_input: bool = False,
    is_outside: bool = True,
) -> SegmentationResult:
    """Do the tasks of `plan` that are not done yet, and return the result.

    Args:
        plan: from `plan_segmentation`.
        start: starts the workers in a folder for their files, and stops them on every way out.
        fresh: delete the output and its run's folder, and start over.
        on_progress: called with a stage, the number of its finished tasks, and the number of its tasks.
        on_begin: called with the workers before the first task of a new segmentation.
        site: name of the site, for the output's attributes.
        same_input, is_outside: as of `workflow.driver.execute`.

    Raises:
        RunError: another run's folder or output is in the way.
        PlanError: a task needs more memory than a worker has.
        RunStopped: a block fails, or the graph needs more memory than the recipe gives it.
    """
    began = time.perf_counter()
    folder = RunFolder.from_output(paths.locate(plan.out))
    with folder.locked() as session:
        _claim(folder, plan, fresh)
        inputs = recognise(folder, {"volume": plan.source()}, plan.out, same_input=same_input, is_outside=is_outside)
        with (
            logging_to(folder.log),
            present(folder.path, session) as presence,
            Journal(folder.journal, tasks.RESULTS) as journal,
        ):
            done = LabelProgress.from_journal(folder.journal)
            was_complete = done.is_complete(plan)
            if was_complete:
                check_present(plan.out, done.shards(plan))
            else:
                plan.store(folder.path)
                store_identities(folder.inputs, inputs)
                job = SegmentJob(str(folder.path), plan.identity, session)
                tasks.prepare(job)
                with start(folder.parsl) as workers:
                    check_memory(plan, getattr(workers, "worker_bytes", None))
                    if not any(done.results.values()):
                        on_begin(workers)
                    for stage in stages_of(plan):
                        listener = _listener(on_progress, presence)
                        _do(stage, dataclasses.replace(job, level=stage.level), workers, journal, listener)
            progress = LabelProgress.from_journal(folder.journal)
            if not progress.metadata:
                _close(folder, plan, journal, site)
            seconds = time.perf_counter() - began
            by_stage = {name: totals.seconds for name, totals in progress.totals.items()}
            table = folder.path / TABLE
            assert progress.objects is not None, "its graph is done"
            num_objects = progress.objects.num_objects
            return SegmentationResult(plan.out, table, num_objects, seconds, by_stage, was_complete)


def _listener(on_progress: OnProgress, presence: Presence) -> OnProgress:
    """Return a listener that calls `on_progress` at once, and updates the run's folder now and then."""

    def report(stage: str, done: int, total: int) -> None:
        on_progress(stage, done, total)
        presence.tell({stage: StageNote(done, total)})

    return report


@dataclass
class LabelProgress:
    """Progress of a segmentation, from its journal.

    Attributes:
        results: results of finished units, by stage and unit.
        totals: time and memory of tasks, by stage.
        failed: reasons of the latest failures, by stage and unit, of units that are not done.
        sums: `checksums.take` of each written shard, by level and shard.
        metadata: checksum of each file of metadata in the output; empty before it is closed.
    """

    results: defaultdict[str, dict[int, object]] = field(default_factory=lambda: defaultdict(dict))
    totals: dict[str, Totals] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    sums: dict[tuple[int, int], str] = field(default_factory=dict)
    metadata: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_journal(cls, path: Path) -> LabelProgress:
        """Return the progress in the journal at `path`; none where there is no journal."""
        progress = cls()
        for record in read_records(path, tasks.RESULTS):
            if isinstance(record.result, Metadata):
                progress.metadata = record.result.checksums
            else:
                progress._add(record)
        return progress

    def _add(self, record: Record[object]) -> None:
        self.results[record.stage] |= dict.fromkeys(record.done, record.result)
        self.failed |= {(record.stage, unit): reason for unit, reason in record.failed}
        for unit in record.done:
            self.failed.pop((record.stage, unit), None)
        if isinstance(record.result, Written):
            self.sums |= {(level, shard): sums for level, shard, sums in record.result.checksums}
        if record.done:
            self.totals.setdefault(record.stage, Totals()).add(record)

    def of(self, kind: type[R]) -> list[R]:
        """Return the results of `kind`."""
        return [result for units in self.results.values() for result in units.values() if isinstance(result, kind)]

    @property
    def objects(self) -> Objects | None:
        """The objects, from the finished graph; None before."""
        return next(iter(self.of(Objects)), None)

    def shards(self, plan: SegmentPlan) -> list[Shard]:
        """Return each written shard with its checksums."""
        boxes = ((level, plan.shards(level).box(shard), sums) for (level, shard), sums in self.sums.items())
        return [Shard(level, box, box, sums) for level, box, sums in boxes]

    def is_complete(self, plan: SegmentPlan) -> bool:
        """Return whether every level of `plan` is written."""
        return all(len(self.results[stage.name]) == stage.num_units(plan) for stage in stages_of(plan))


def _claim(folder: RunFolder, plan: SegmentPlan, fresh: bool) -> None:
    """Refuse a folder or output of another run; delete both for a fresh start."""
    out = paths.locate(plan.out)
    if isinstance(out, Remote):
        try_writing(out)
    is_ours = (folder.path / LABEL_FILE).is_file()
    if folder.plan_file.is_file():
        raise RunError(f"{folder.path} holds a run of a net; choose another --out")
    if paths.exists(out) and not is_ours:
        raise RunError(f"{out} exists and no segmentation in {folder.path} made it; choose another --out")
    if fresh:
        delete(out)  # first: only its folder knows whose it is
        folder.clear()
        return
    check_same(folder, plan)
    if not paths.exists(out) and LabelProgress.from_journal(folder.journal).results["paint"]:
        raise RunError(f"the journal in {folder.path} speaks of an output that is gone; use --fresh to start over")


def check_same(folder: RunFolder, plan: SegmentPlan) -> None:
    """Refuse to resume a segmentation other than `plan`.

    Raises:
        RunError: naming the differences.
    """
    old = SegmentPlan.load(folder.path)
    if old is not None and old.identity != plan.identity:
        raise RunError(
            f"{folder.path} holds a segmentation with another recipe or input ({'; '.join(old.changes(plan))}); "
            "restore it to go on, choose another --out, or use --fresh to start over"
        )


def check_memory(plan: SegmentPlan, worker_bytes: int | None) -> None:
    """Refuse blocks too large for a worker of `worker_bytes`; None where the site does not say.

    Raises:
        PlanError: naming both, and a block that fits.
    """
    if worker_bytes is not None and plan.task_bytes > worker_bytes:
        half = tuple(max(c, b // 2 // c * c) for b, c in zip(plan.block, plan.chunk, strict=True))
        raise PlanError(
            f"a task takes up to {plan.task_bytes / GIB:.1f} GiB for a block of {plan.block} voxels, a worker has "
            f"{worker_bytes / GIB:.1f} GiB; use fewer workers, or --set output.block={list(half)}"
        )


def _do(stage: SegmentStage, job: SegmentJob, workers: WorkerPool, journal: Journal, on_progress: OnProgress) -> None:
    """Do the unfinished tasks of `stage`."""
    plan, done = job.plan, LabelProgress.from_journal(journal.path)
    total = stage.num_units(plan)

    def note(unit: int, reason: str) -> None:
        journal.append(Record(stage.name, (), ((unit, reason),), usage=Usage(started=time.time())))

    if stage.name == "graph" and not done.results["graph"]:
        _check_graph(plan, done, note)
    if stage.name == "paint":
        create_output(plan)
    num_done = len(done.results[stage.name])
    on_progress(stage.name, num_done, total)
    units = [unit for unit in range(total) if unit not in done.results[stage.name]]
    for _, record in finished(workers, stage.app, job, units, stage.verb, on_failure=note):
        journal.append(record)
        num_done += 1
        on_progress(stage.name, num_done, total)


def _check_graph(plan: SegmentPlan, done: LabelProgress, note: Callable[[int, str], None]) -> None:
    """Refuse a graph that needs more memory than the recipe gives it, and `note` the reason.

    Raises:
        RunStopped: naming both.
    """
    num_fragments = sum(counts.num_fragments for counts in done.of(FragmentCounts))
    num_joins = sum(counts.num_joins for counts in done.of(EdgeCounts))
    num_edges = sum(counts.num_edges for counts in done.of(EdgeCounts))
    needed = bytes_needed(num_fragments, num_joins, num_edges, plan.recipe.objects)
    if needed > plan.recipe.output.graph_gib * GIB:
        reason = (
            f"the graph of {num_fragments:,} fragments and {num_edges:,} edges takes up to {needed / GIB:.1f} GiB, "
            f"output.graph_gib gives it {plan.recipe.output.graph_gib:g}; segment with --fresh and more of either, "
            "a larger objects.background, or more objects.smooth"
        )
        note(0, reason)
        raise RunStopped(reason)


def is_segmented(plan: SegmentPlan, folder: RunFolder) -> bool:
    """Return whether the labels of `plan` are complete, by the journal in `folder`."""
    if SegmentPlan.load(folder.path) != plan:
        return False
    return LabelProgress.from_journal(folder.journal).is_complete(plan)


def _close(folder: RunFolder, plan: SegmentPlan, journal: Journal, site: str) -> None:
    """Delete scratch and leftovers of killed writers, write the run's attributes, and note the metadata's checksums."""
    out = paths.locate(plan.out)
    for path in remove_leftovers(out):
        log.info("deleted %s, which a killed writer left", path)
    for name in (IDS, FRAGMENTS, EDGES):
        if (folder.path / name).exists():
            delete(folder.path / name)
    (folder.path / NAMES).unlink(missing_ok=True)
    for path in paths.partial_files(folder.path):
        path.unlink(missing_ok=True)
    usages = [record.usage for record in journal.records() if record.done]
    time_format = "%Y-%m-%dT%H:%M:%SZ"
    attributes = {
        "site": site,
        "started": time.strftime(time_format, time.gmtime(min(usage.started for usage in usages))),
        "ended": time.strftime(time_format, time.gmtime(max(usage.started + usage.seconds for usage in usages))),
        "hosts": sorted({usage.host for usage in usages}),
        "output": plan.out,
        "folder": plan.search_path,
    }
    create_groups(out, f"{RUN_KEY}/attributes", "zarr3")
    merge_json(out / RUN_KEY / ATTRIBUTE_FILES["zarr3"], {"attributes": plain({"volpipe": attributes})})
    keys = (level_key(level) for level in range(len(plan.factors)))
    sums = metadata_sums(out, ["", *keys, RUN_KEY], METADATA_NAMES)
    journal.append(Record("metadata", (), result=sums))
