"""Segmentation: objects from a volume of affinities, block by block on a site's workers, the same for any blocks.

Not here: tasks (tasks), or how objects are found (fragments, agglomerate). The same call resumes a stopped
segmentation from its journal::

    fragments of each block ─► edges of each block ─► graph, box by box ─► labels of each block ─► coarser levels
"""

from __future__ import annotations

import csv
import dataclasses
import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.journal import Journal, Kinds, Record, read_results
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.stage import Feed, Schedule, Stage, fed
from volpipe.blockwise.work import Steps
from volpipe.errors import PlanError, RunStopped
from volpipe.estimation.estimate import StageTimes
from volpipe.estimation.limits import check_access, check_apart, check_worker, disk_limits, warn_of_room
from volpipe.estimation.memory import WORKER_BYTES
from volpipe.geometry.grid import Box, Grid
from volpipe.inference.output import check_output, remove_leftovers
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.reporting.comparison import ShownOutput
from volpipe.reporting.histogram import read_sizes, sizes_chart
from volpipe.reporting.page import Draft, Item, Sentence
from volpipe.reporting.slices import middle_of_done
from volpipe.runs.growth import grown_from
from volpipe.runs.input_comparison import InputComparison, compare
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.output_work import OutputWork
from volpipe.runs.planned import Planned
from volpipe.runs.provenance import is_sealed, seal, stored_offsets
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import OutputSchedule
from volpipe.runs.stage_work import SILENT, Listener
from volpipe.runs.unit_records import WorkSession
from volpipe.runs.update_records import Updated
from volpipe.runs.verify import Recomputed, Verdict, judge, written
from volpipe.segmentation import tasks
from volpipe.segmentation.estimate import forecast_labels
from volpipe.segmentation.graph import check_size
from volpipe.segmentation.output import origin
from volpipe.segmentation.plan import SegmentPlan, check_offsets, checked_values, fit
from volpipe.segmentation.properties import segment_properties
from volpipe.segmentation.tasks import (
    EDGES,
    FRAGMENTS,
    IDS,
    NAMES,
    NUMBERS,
    PAINTED,
    SOLVED,
    TABLE,
    Counts,
    FragmentCounts,
    Objects,
    Painted,
    SegmentJob,
    note_painted,
    submitter,
)
from volpipe.segmentation.update import follow, update_steps
from volpipe.segmentation.verify import recompute_labels
from volpipe.tables import html_table
from volpipe.units import count, duration, shape
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location, delete
from volpipe.volumes.volume import open_volume

log = logging.getLogger(__name__)


class SegmentSchedule(OutputSchedule[SegmentPlan]):
    """The stages of a segmentation, and which units release which; `feed` is the volume, where other work writes it."""

    def __init__(self, plan: SegmentPlan, feed: Feed | None = None, readers: Sequence[Feed] = ()) -> None:
        num_blocks = len(plan.blocks)
        num_boxes, joining = len(plan.boxes), "joining fragments to objects"
        self.pieces = fed(Stage("pieces", num_blocks, doing="finding fragments"), feed, plan.input_box)
        self.edges = Stage("edges", num_blocks, waits=self._lacks_fragments, doing="comparing neighbouring fragments")
        self.solve = Stage("solve", num_boxes, waits=self._lacks_parts, doing=joining)
        self.number = Stage(
            "number", plan.boxes.num_slabs, waits=lambda slab: not _is_done(self.solve), doing="numbering objects"
        )
        self.name = Stage("name", num_boxes, waits=self._lacks_names, doing="numbering objects")
        self.graph = Stage("graph", 1, waits=lambda unit: not _is_done(self.name), doing=joining)
        self.paint = Stage("paint", num_blocks, waits=lambda block: not self.graph.num_done, doing="writing labels")
        stages = (self.paint, self.graph, self.name, self.number, self.solve, self.edges, self.pieces)
        super().__init__(plan, stages, [None] * len(plan.factors), readers)

    def finish(self, stage: Stage, unit: int) -> None:
        """Mark `unit` done and offer what waited for it."""
        stage.mark(unit)
        if stage is self.pieces:
            for block in self.plan.blocks.touching(self.plan.around(unit)):
                self.edges.offer(block)
        elif stage is self.edges:
            self.solve.offer(next(self.plan.boxes.around(unit)))
        elif stage is self.solve and (parent := self.plan.boxes.parent(unit)) is not None:
            self.solve.offer(parent)
        elif stage is self.name and self.plan.boxes.level(unit):
            for part in self.plan.boxes.children(unit):
                self.name.offer(part)
        elif stage in (self.solve, self.number, self.name, self.graph):
            if _is_done(stage):
                {"solve": self.number, "number": self.name, "name": self.graph, "graph": self.paint}[
                    stage.name
                ].look_again()
        else:
            self._finish_shard([self.paint, *self.pyramid].index(stage), unit)

    def _is_first_written(self, shard: int) -> bool:
        return bool(self.paint.done[shard])

    def box(self, stage: Stage, unit: int) -> Box:
        """Return the box of the task `unit` in voxels (z, y, x) of its level."""
        if stage is self.graph:
            return self.plan.box
        if stage in (self.solve, self.name):
            return self.plan.boxes.box(unit)
        if stage is self.number:
            return self.plan.boxes.slab_box(unit)
        return self.plan.shards(self.pyramid.index(stage) + 1 if stage in self.pyramid else 0).box(unit)

    def kept_back(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units that cannot be done because something that they need was not made."""
        yield from self.starved()
        if not all(map(_is_done, (self.pieces, self.edges, self.solve, self.number, self.name))):
            yield self.graph, 0
        yield from self._coarser_kept_back(self.paint.failed)

    def _lacks_fragments(self, block: int) -> bool:
        return not all(self.pieces.done[near] for near in self.plan.blocks.touching(self.plan.around(block)))

    def _lacks_parts(self, unit: int) -> bool:
        boxes = self.plan.boxes
        return not (self.solve if boxes.level(unit) else self.edges).done[boxes.children(unit)].all()

    def _lacks_names(self, unit: int) -> bool:
        parent = self.plan.boxes.parent(unit)
        return not (_is_done(self.number) if parent is None else self.name.done[parent])


def _is_done(stage: Stage) -> bool:
    return stage.num_done == stage.num_units


CRUMB = 100  # voxels, below which what is left of membranes is, and no body of EM at 10 nm (2026-11)
SHOWN_OBJECTS, MOST_LISTED = 8, 1_000_000  # of a table in a notebook; a longer table takes seconds to read


@dataclass(repr=False)
class SegmentationResult(WorkReport):
    """How a segmentation ended.

    Attributes:
        num_objects: rows of the table, 0 before there is one.
        num_lost: voxels that lie too far from where they lead, and have no label; None of methods that know no such.
        stage_seconds: of workers, by stage, over all sessions.
    """

    makes_volume: ClassVar[bool] = True
    computing: ClassVar[str] = "pieces"
    num_objects: int = 0
    num_lost: int | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def out(self) -> str:
        """The labels."""
        return str(self.plan.out)

    @property
    def table(self) -> Path:
        """The CSV file of objects."""
        return self.folder / TABLE

    @property
    def crumbs(self) -> str:
        """How many objects are too small to be any, in a sentence; "" where none is, or that is not known."""
        return crumb_note(self.table, self.num_objects, self.plan)

    @property
    def lost(self) -> str:
        """How many voxels have no label because they lie too far from where they lead, in a sentence; "" of none."""
        if not self.num_lost:
            return ""
        kind = self.plan.recipe.input.kind
        return (
            f"{self.num_lost:,} voxels of the foreground lead nowhere within {kind}.reach="
            f"{list(getattr(self.plan.recipe, kind).reach)} and have no label; where objects are larger, raise it"
        )

    def largest(self, count: int = SHOWN_OBJECTS) -> list[dict[str, str]]:
        """Return the rows of so many objects in the table, by its headings, those of most voxels first."""
        if not self.num_objects:
            return []
        with self.table.open(encoding="utf-8", newline="") as file:
            return heapq.nlargest(count, csv.DictReader(file), key=lambda row: int(row["voxels"]))

    def _repr_html_(self) -> str:
        """Return how it ended, and below it the largest objects, while their table is there and not too long."""
        page = super()._repr_html_()
        if not 0 < self.num_objects <= MOST_LISTED or not self.table.is_file():
            return page
        rows = self.largest()
        return page + html_table(list(rows[0]), (list(row.values()) for row in rows), caption="the largest objects")

    def closing_lines(self, planned: StageTimes | None = None) -> list[str]:
        """Return what had changed, and the result in a few lines, planned times in brackets."""
        guess = "≈ " if planned is not None and planned.is_guess else ""
        stages = () if planned is None else planned.stages
        plans = {stage.name: f" ({guess}{duration(stage.seconds)})" for stage in stages}
        tasks = (f"{name} {duration(took)}{plans.get(name, '')}" for name, took in self.stage_seconds.items())
        whole = "" if planned is None else f" (planned {guess}{duration(planned.seconds)})"
        wrote = f"wrote {self.num_objects:,} objects to {self.out} in {duration(self.seconds)}{whole}"
        table = f"table of objects: {self.table}"
        notes = filter(None, [self.crumbs, self.lost])
        return [*map(str, self.updates), f"{wrote}; tasks: {', '.join(tasks)}", table, *notes]

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        places = {"labels": paths.shown(self.out), "table": paths.shown(self.table)}
        notes = {name: note for name, note in (("crumbs", self.crumbs), ("lost", self.lost)) if note}
        return {**places, "objects": f"{self.num_objects:,}", **notes, **super().facts()}


def plan_segmentation(
    location: str, recipe: SegmentRecipe, out: str | Location, search_path: Path, *, fresh: bool = False
) -> SegmentPlan:
    """Return the plan of segmenting the volume at `location`, with every refusal that needs no worker.

    Args:
        location: of affinities, or of a map of foreground or membrane.
        out: the labels.
        search_path: folder that relative names start from.
        fresh: it will start over; else labels that were begun keep their sizes.

    Raises:
        VolumeError: no volume there.
        PlanError: the volume does not fit the recipe or may not be read, or the output may not be written.
    """
    volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
    target = paths.locate(out)
    check_offsets(volume, recipe, stored_offsets(volume.path))
    plan = fit(volume, recipe, target, search_path, fresh=fresh)
    check_output(plan)
    check_apart(target, volume, "volume")
    check_access(paths.locate(volume.path), target)
    return checked_values(plan, volume)


class SegmentWork(OutputWork[SegmentPlan, SegmentationResult]):
    """A segmentation of a volume; arguments as of `OutputWork`."""

    what: ClassVar[str] = "segmentation"
    goes_on: ClassVar[str] = "volpipe segment"
    kinds: ClassVar[Kinds] = tasks.RESULTS

    @property
    def remark(self) -> str:
        if (result := objects_of(self.folder)) is None:
            return ""
        return f"{result.num_objects:,} objects; what each is, is in {self.folder.path / TABLE}"

    def grids(self) -> dict[str, Grid]:
        """Return the blocks."""
        return dict.fromkeys(("pieces", "edges", "paint"), self.plan.blocks)

    def voxel_pictures(self, schedule: Schedule) -> list[Draft]:
        """Return the sizes of objects as well; see `OutputWork`."""
        return [*super().voxel_pictures(schedule), Draft("Sizes of objects", self._sizes, "Objects")]

    def subject(self, array: SegmentPlan, schedule: Schedule) -> ShownOutput | None:
        assert isinstance(schedule, SegmentSchedule)
        at = middle_of_done(self.plan.blocks, schedule.paint.done)
        return ShownOutput(self.plan, self.plan.box, at, is_alike=False, is_missing=schedule.is_missing)

    def _sizes(self) -> list[Item]:
        objects = objects_of(self.folder)
        if objects is None:
            return [Sentence("The objects are not known yet.")]
        if not objects.num_objects:
            return [Sentence("There are no objects.", "warning")]
        table = self.folder.path / TABLE
        crumbs = crumb_note(table, objects.num_objects, self.plan)
        return [sizes_chart(table, objects.num_objects), *([Sentence(crumbs)] if crumbs else [])]

    def facts(self) -> dict[str, str]:
        """Return how objects are found, and in which blocks."""
        plan = self.plan
        method = ", ".join(dict.fromkeys([plan.recipe.input.kind, plan.recipe.objects.method]))
        return {"objects by": method, "blocks": f"{len(plan.blocks):,} of {shape(plan.block)} voxels"}

    def schedule(self) -> SegmentSchedule:
        """Return the stages of the segmentation."""
        return SegmentSchedule(self.plan, self.feed, self.readers)

    def verify(self, *, is_fast: bool = False) -> Verdict:
        """Compare every file of the labels, and their table, with what their tasks noted; see `OutputWork`."""
        verdict, objects = super().verify(is_fast=is_fast), objects_of(self.folder)
        if objects is not None:
            verdict.num_files += 1
            judge(verdict.differences, self.folder.path / TABLE, objects.table_checksum, "")
        return verdict

    def recomputed(self, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
        """Yield random blocks, cut into fragments again; see `OutputWork`."""
        blocks = sorted(block for level, block in written(self.records) if level == 0)
        yield from recompute_labels(self.plan, blocks, num_blocks, seed)

    def grown(self) -> SegmentPlan | None:
        return grown_from(self.plan, self.folder)

    def follow(self, old: SegmentPlan) -> Updated:
        return follow(self, old)

    def compared(self) -> InputComparison:
        done = self.records.ledger().schedule.by_name["pieces"].done
        return compare(self.records, self.plan.source.as_planned(), self.plan.input_box, done)

    def take_back_steps(self, session: WorkSession) -> Steps[Updated | None]:
        return (yield from update_steps(self, session, self.compared()))

    def renew_metadata(self) -> None:
        self.know_input()
        self.files.write_metadata(origin(self.plan, self.inputs["volume"].fingerprint))
        write, table = format_named(self.plan.format).write_properties, self.folder.path / TABLE
        if write is not None and table.is_file():
            write(self.files.place, segment_properties(table))

    def _note_painted(self) -> None:
        """Tell the task of the graph which labels are painted, by their digests in the journal."""
        digests = np.zeros(len(self.plan.blocks), tasks.DIGEST)
        for result in read_results(self.folder.journal, self.kinds, Painted):
            for block, digest in result.labels:
                digests[block] = digest.encode()
        note_painted(self.folder.path, digests)

    def phases(self, pool: WorkerPool, session: WorkSession) -> Steps[SegmentationResult]:
        """Do the stages that are not done yet."""
        plan, schedule, began = self.plan, self.records.resumed(), time.perf_counter()
        assert isinstance(schedule, SegmentSchedule)
        check_memory(plan, pool.worker_bytes)
        warn_of_room("labels and scratch", plan.most_bytes, plan.out, disk_limits(paths.locate(plan.out)))
        job = SegmentJob(str(self.folder.path), plan.identity, session.name)
        tasks.prepare(job)
        if not any(stage.num_done for stage in schedule.stages):
            yield from self._estimate(pool)
        submit = partial(submitter, pool, job)
        yield from session.finish(schedule, submit, only=("pieces", "edges"))
        if schedule.edges.num_done == schedule.edges.num_units:
            if not schedule.graph.num_done:
                self._check_graph(session.journal)
                self._note_painted()
            for stage in (schedule.solve, schedule.number, schedule.name, schedule.graph):
                stage.look_again()
            yield from session.finish(schedule, submit, only=("solve", "number", "name", "graph"))
        if schedule.graph.num_done:
            schedule = self.records.resumed()  # the graph is solved, which says what labels have to be painted
            assert isinstance(schedule, SegmentSchedule)
            schedule.paint.look_again()
            self.renew_metadata()
            schedule.open_readers()
            rest = ("paint", *(stage.name for stage in schedule.pyramid))
            yield from session.finish(schedule, submit, only=rest)
        return self._report(session, schedule.missing(session.reasons), time.perf_counter() - began)

    def _estimate(self, pool: WorkerPool) -> Steps[None]:
        planned = Planned(
            self.plan.identity, memory_bytes=WORKER_BYTES + self.plan.task_bytes, scratch_bytes=self.plan.scratch_bytes,
            output_bytes=sum(math.prod(self.plan.level_shape(i)) for i in range(len(self.plan.factors)))
            * self.plan.dtype.itemsize,
        )  # fmt: skip
        planned.store(self.folder.path)
        if self.listener.on_estimate is not None and self.feed is None:
            for times in (yield from forecast_labels(self.plan, pool)):
                self.listener.on_estimate(times)
                dataclasses.replace(planned, seconds=times.seconds).store(self.folder.path)

    def _report(self, session: WorkSession, missing: list[Missing], seconds: float) -> SegmentationResult:
        totals, result = self.records.ledger().totals, objects_of(self.folder)
        return SegmentationResult(
            self.plan,
            self.folder.path,
            missing,
            session.totals,
            seconds,
            first_task=session.first_task,
            num_objects=0 if result is None else result.num_objects,
            num_lost=self._num_lost() if self.plan.method.is_anchored else None,
            stage_seconds={name: took.seconds for name, took in totals.items()},
            updates=self.updates,
        )

    def _num_lost(self) -> int:
        """Return the voxels that lie too far from where they lead, as each block noted them last."""
        results = read_results(self.folder.journal, self.kinds, FragmentCounts)
        return sum({block: counts[-1] for result in results for block, *counts in result.blocks}.values())

    def closed(self, session: WorkSession, report: SegmentationResult | None) -> SegmentationResult:
        """Return the report, after the output was given what it says of how it was made; see `OutputWork`."""
        was_complete = report is None
        report = report or self._report(session, [], 0.0)
        report.was_complete = was_complete
        if report.is_complete:
            self._tidy()
            if not was_complete:
                self.know_input()
            if not (was_complete and is_sealed(self.folder)):
                seal(self.folder, self.plan, tasks.RESULTS, {}, is_complete=True)
        return report

    def _tidy(self) -> None:
        """Delete what no update will need, and what killed writers left."""
        self.files.clean()
        if not self.options.update:
            for name in (FRAGMENTS, EDGES, SOLVED, IDS):  # voxels last: without all files, they are made again
                if (self.folder.path / name).exists():
                    delete(self.folder.path / name)
        remove_leftovers(self.folder.path / IDS)
        (self.folder.path / PAINTED).unlink(missing_ok=True)
        for name in (NUMBERS, NAMES):
            if (self.folder.path / name).exists():
                delete(self.folder.path / name)
        for folder in (self.folder.path, *(self.folder.path / name for name in (FRAGMENTS, EDGES, SOLVED))):
            for path in paths.partial_files(folder):
                path.unlink(missing_ok=True)

    def _check_graph(self, journal: Journal) -> None:
        """Refuse a graph that needs more memory than the recipe gives it, and note the reason.

        Raises:
            RunStopped: naming both.
        """
        plan, sizes = self.plan, np.zeros((len(self.plan.boxes.levels[0]), 3), np.int64)
        for result in read_results(self.folder.journal, self.kinds, Counts):
            columns = [0] if isinstance(result, FragmentCounts) else [1, 2]
            for block, *counts in result.blocks:
                sizes[next(plan.boxes.around(block)), columns] += counts[: len(columns)]
        try:
            for unit, (num_fragments, num_joins, num_edges) in enumerate(sizes.tolist()):
                check_size(plan, unit, num_fragments, num_joins, num_edges)
        except PlanError as error:
            journal.append(Record("solve", (), ((unit, str(error)),)))
            raise RunStopped(str(error)) from error


def objects_of(folder: RunFolder) -> Objects | None:
    """Return the objects of the segmentation in `folder` as its graph gave them last; None before that."""
    last = deque(read_results(folder.journal, tasks.RESULTS, Objects), maxlen=1)
    return last[0] if last else None


def crumb_note(table: Path, num_objects: int, plan: SegmentPlan) -> str:
    """Return how many of the objects in `table` are crumbs, and by which keys fewer are left; "" where none is.

    Args:
        num_objects: rows of the table.
    """
    if not num_objects or not table.is_file():
        return ""
    sizes, is_all = read_sizes(table)
    num = round(float((sizes < CRUMB).mean()) * num_objects)
    if not num:
        return ""
    objects, advice = plan.recipe.objects, []
    if objects.is_watershed and not objects.is_mutex and not objects.small_voxels:
        advice.append("objects.small_voxels=1000 joins small ones to a neighbour")
    if objects.min_voxels < CRUMB:
        advice.append(f"objects.min_voxels={CRUMB} leaves them out")
    about = "" if is_all else "about "
    said = f"{about}{num:,} of {count(num_objects, 'object')} have fewer than {CRUMB} voxels"
    return ": ".join(filter(None, [said, ", ".join(advice)]))


def segment(
    plan: SegmentPlan, start: Start, options: RunOptions = PLAIN, listener: Listener = SILENT
) -> SegmentationResult:
    """Do the tasks of `plan` that are not done yet, and return the result.

    Args:
        plan: from `plan_segmentation`.
        start: starts the workers in a folder for their files, and stops them on every way out.
        listener: gets the progress; one that asks for an estimate gets it before the first task of a new segmentation.

    Raises:
        RunError: another run's folder or output is in the way.
        PlanError: a task needs more memory than a worker has.
        RunStopped: too many blocks fail, or the graph needs more memory than the recipe gives it.
    """
    return SegmentWork(plan, options, listener).run(start)


def check_memory(plan: SegmentPlan, worker_bytes: int | None) -> None:
    """Refuse blocks too large for a worker of `worker_bytes`; None where the site does not say.

    Raises:
        PlanError: naming both, and a block that fits.
    """
    half = [max(c, b // 2 // c * c) for b, c in zip(plan.block, plan.chunk, strict=True)]
    check_worker(plan.task_bytes, worker_bytes, f"--set output.block={half}, below {list(plan.block)}")
