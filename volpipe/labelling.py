"""A labelling: objects from a volume of affinities, block by block on the workers of a site, as if in one piece.

Not here: what a worker does (label_tasks), or how objects are made (label_pieces, label_graph). A labelling that was
stopped goes on with the same call, from its journal::

    pieces of each block ─► edges of each block ─► graph of all, once ─► labels of each block ─► coarser levels
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from volpipe import label_tasks
from volpipe.driver import logging_to, recognise
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.folder import RunFolder
from volpipe.formats import files
from volpipe.formats.container import create_groups
from volpipe.formats.files import Location
from volpipe.formats.metadata import merge_json, plain
from volpipe.formats.remote import Remote, try_writing
from volpipe.grid import Box
from volpipe.identity import store_identities
from volpipe.journal import Journal, Record, read_records
from volpipe.label_graph import bytes_needed
from volpipe.label_output import create_output
from volpipe.label_plan import LABEL_FILE, LabelPlan, check_offsets, fit
from volpipe.label_recipe import LabelRecipe, load_labelling
from volpipe.label_tasks import EDGES, IDS, NAMES, PIECES, TABLE, LabelJob, partials
from volpipe.limits import check_access, check_apart
from volpipe.output import level_key, sweep
from volpipe.presence import Presence, StageNote, present
from volpipe.provenance import ATTRIBUTE_FILES, METADATA_NAMES, RUN_KEY, stored_offsets
from volpipe.run import Totals
from volpipe.tasks import Start, Workers, finished
from volpipe.tensors import delete
from volpipe.verify import METADATA_STAGE, Shard, check_present, metadata_sums
from volpipe.volume import open_volume

__all__ = ["LabelPlan", "LabelRecipe", "Labelled", "Stage", "label", "load_labelling", "plan_labels"]

log = logging.getLogger(__name__)

GIB = 1 << 30
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Stage:
    """One pass: what a task does, whether for each block or once for all, and what becomes of a block, for messages.

    `level` is that of the output whose shards are its blocks.
    """

    name: str
    function: Callable[[LabelJob, int], Record]
    wish: str
    once: bool = False
    level: int = 0

    def num_units(self, plan: LabelPlan) -> int:
        """Return how many tasks of it `plan` has."""
        return 1 if self.once else len(plan.shards(self.level))

    def box(self, plan: LabelPlan, unit: int) -> Box:
        """Return the voxels of its level that the task of `unit` is about."""
        return plan.box if self.once else plan.shards(self.level).box(unit)


PASSES = (
    Stage("pieces", label_tasks.pieces, "cut into pieces"),
    Stage("edges", label_tasks.edges, "compared with its neighbours"),
    Stage("graph", label_tasks.graph, "agglomerated", once=True),
    Stage("paint", label_tasks.paint, "labelled"),
)


def stages_of(plan: LabelPlan) -> tuple[Stage, ...]:
    """Return the stages of `plan`, each of which rests on those before it."""
    levels = range(1, len(plan.factors))
    return (
        *PASSES,
        *(Stage(f"pyramid {n}", label_tasks.coarsen, f"written at level {n}", level=n) for n in levels),
    )


@dataclass(frozen=True)
class Labelled:
    """How a labelling ended.

    Attributes:
        out: the labels.
        table: the CSV file of objects.
        num_objects: how many there are.
        seconds: that this call took.
        stage_seconds: of workers, by stage, over all sessions.
        was_complete: whether nothing was left to do.
    """

    out: str
    table: Path
    num_objects: int
    seconds: float
    stage_seconds: dict[str, float] = field(default_factory=dict)
    was_complete: bool = False


def plan_labels(location: str, recipe: LabelRecipe, out: str | Location, search_path: Path) -> LabelPlan:
    """Return the plan for labelling the volume at `location`; what can be refused before the start is refused here.

    Args:
        location: of the affinities, or of a map of foreground or membrane.
        recipe: how.
        out: where labels go.
        search_path: folder that relative names count from.

    Raises:
        VolumeError: no volume there.
        PlanError: it does not fit the recipe, may not be read, or the output may not be written.
    """
    volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
    target = files.locate(out)
    check_offsets(volume, recipe, stored_offsets(volume.path))
    plan = fit(volume, recipe, str(target), str(search_path))
    check_apart(target, volume, "volume")
    check_access(files.locate(volume.path), target)
    return plan


def label(
    plan: LabelPlan,
    start: Start,
    *,
    fresh: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    on_begin: Callable[[Workers], None] = lambda workers: None,
    site: str = "",
    same_input: bool = False,
    is_outside: bool = True,
) -> Labelled:
    """Label by `plan` until its output is whole, and return how that ended; what is done already stays.

    Args:
        plan: as `plan_labels` made it.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        fresh: delete the output and the labelling that made it, and start over.
        on_progress: told of a stage, how many of its tasks are done, and how many there are.
        on_begin: told of the workers before their first task, where nothing was done before.
        site: of the workers, as the output will name it.
        same_input, is_outside: as of `driver.execute`.

    Raises:
        RunError: another run's folder or output is in the way.
        PlanError: a task would take more memory than a worker has, or than the recipe gives the graph.
        RunStopped: a block cannot be done.
    """
    began = time.perf_counter()
    folder = RunFolder.of_output(files.locate(plan.out))
    with folder.locked() as session:
        _claim(folder, plan, fresh)
        inputs = recognise(folder, {"volume": plan.source()}, plan.out, same_input=same_input, is_outside=is_outside)
        with logging_to(folder.log), present(folder.path, session) as presence, Journal(folder.journal) as journal:
            done = Noted.of(folder.journal)
            was_complete = done.is_complete(plan)
            if was_complete:
                check_present(plan.out, done.shards(plan))
            else:
                plan.store(folder.path)
                store_identities(folder.inputs, inputs)
                job = LabelJob(str(folder.path), plan.identity, session)
                label_tasks.prepare(job)
                with start(folder.parsl) as workers:
                    check_memory(plan, getattr(workers, "worker_bytes", None))
                    if not any(done.results.values()):
                        on_begin(workers)
                    for stage in stages_of(plan):
                        hear = _heard(on_progress, presence)
                        _do(stage, dataclasses.replace(job, level=stage.level), workers, journal, hear)
            found = Noted.of(folder.journal)
            if not found.metadata:
                _close(folder, plan, journal, site)
            took = time.perf_counter() - began
            seconds = {name: totals.seconds for name, totals in found.totals.items()}
            return Labelled(plan.out, folder.path / TABLE, found.num_objects, took, seconds, was_complete)


def _heard(on_progress: OnProgress, presence: Presence) -> OnProgress:
    """Return what reports progress: to `on_progress` at once, to the run's folder now and then."""

    def hear(stage: str, done: int, total: int) -> None:
        on_progress(stage, done, total)
        presence.tell({stage: StageNote(done, total)})

    return hear


@dataclass
class Noted:
    """What a journal says of a labelling.

    Attributes:
        results: units that are done by stage, with what they gave.
        totals: what tasks took, by stage, of those that have begun.
        failed: why units could not be done when they were last tried, by stage and unit; none of them is done.
        sums: of each level and shard of the output that is written, `checksums.take`.
        metadata: name and checksum of each file of metadata in the output; none before it is closed.
    """

    results: defaultdict[str, dict[int, tuple[int, ...]]] = field(default_factory=lambda: defaultdict(dict))
    totals: dict[str, Totals] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    sums: dict[tuple[int, int], str] = field(default_factory=dict)
    metadata: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Noted:
        """Return what the journal at `path` says; nothing where there is none."""
        found = cls()
        for record in read_records(path):
            if record.stage == METADATA_STAGE:
                found.metadata = {name: int(crc, 16) for name, crc in record.result}
            else:
                found._add(record)
        return found

    def _add(self, record: Record) -> None:
        self.results[record.stage].update(dict.fromkeys(record.done, record.result))
        self.failed |= {(record.stage, unit): reason for unit, reason in record.failed}
        for unit in record.done:
            self.failed.pop((record.stage, unit), None)
        self.sums |= {(level, shard): taken for level, shard, taken in record.sums}
        if record.done:
            self.totals.setdefault(record.stage, Totals()).add(record)

    @property
    def num_objects(self) -> int:
        """How many objects the graph has; it must be done."""
        return self.results["graph"][0][0]

    @property
    def table_sum(self) -> int | None:
        """The checksum of the table of objects; None where the graph is not done, or by an earlier version."""
        return next(iter(self.results["graph"].get(0, ())[1:]), None)

    def shards(self, plan: LabelPlan) -> list[Shard]:
        """Return what was noted of each shard that is written."""
        boxes = ((level, plan.shards(level).box(shard), sums) for (level, shard), sums in self.sums.items())
        return [Shard(level, box, box, sums) for level, box, sums in boxes]

    def is_complete(self, plan: LabelPlan) -> bool:
        """Return whether all labels of `plan` are written, of every level."""
        return all(len(self.results[stage.name]) == stage.num_units(plan) for stage in stages_of(plan))


def _claim(folder: RunFolder, plan: LabelPlan, fresh: bool) -> None:
    """Make sure that folder and output are this labelling's to write, emptied if the user asked for a fresh one."""
    out = files.locate(plan.out)
    if isinstance(out, Remote):
        try_writing(out)
    is_ours = (folder.path / LABEL_FILE).is_file()
    if folder.plan_file.is_file():
        raise RunError(f"{folder.path} holds a run of a net; choose another --out")
    if files.exists(out) and not is_ours:
        raise RunError(f"{out} exists and no labelling in {folder.path} made it; choose another --out")
    if fresh:
        delete(out)  # first: without its folder, nobody would know any more whose it is
        folder.clear()
        return
    check_same(folder, plan)
    if not files.exists(out) and Noted.of(folder.journal).results["paint"]:
        raise RunError(f"the journal in {folder.path} speaks of an output that is gone; use --fresh to start over")


def check_same(folder: RunFolder, plan: LabelPlan) -> None:
    """Refuse to go on with another labelling than `plan`.

    Raises:
        RunError: with what differs.
    """
    old = LabelPlan.load(folder.path)
    if old is not None and old.identity != plan.identity:
        raise RunError(
            f"{folder.path} holds a labelling with another recipe or input ({'; '.join(old.changes(plan))}); "
            "restore it to go on, choose another --out, or use --fresh to start over"
        )


def check_memory(plan: LabelPlan, there: int | None) -> None:
    """Refuse blocks that a worker of `there` bytes has no room for; None where its site does not say.

    Raises:
        PlanError: with both, and what would fit.
    """
    if there is not None and plan.task_bytes > there:
        half = tuple(max(c, b // 2 // c * c) for b, c in zip(plan.block, plan.chunk, strict=True))
        raise PlanError(
            f"a task takes up to {plan.task_bytes / GIB:.1f} GiB for a block of {plan.block} voxels, a worker has "
            f"{there / GIB:.1f} GiB; use fewer workers, or --set output.block={list(half)}"
        )


def _do(stage: Stage, job: LabelJob, workers: Workers, journal: Journal, on_progress: OnProgress) -> None:
    """Do what is left of `stage`."""
    plan, done = job.plan, Noted.of(journal.path)
    total = stage.num_units(plan)

    def note(unit: int, reason: str) -> None:
        journal.append(Record(stage.name, (), ((unit, reason),), started=time.time()))

    if stage.name == "graph" and not done.results["graph"]:
        _check_graph(plan, done, note)
    if stage.name == "paint":
        create_output(plan)
    num_done = len(done.results[stage.name])
    on_progress(stage.name, num_done, total)
    left = [unit for unit in range(total) if unit not in done.results[stage.name]]
    for _, record in finished(workers, stage.function, job, left, stage.wish, on_failure=note):
        journal.append(record)
        num_done += 1
        on_progress(stage.name, num_done, total)


def _check_graph(plan: LabelPlan, done: Noted, note: Callable[[int, str], None]) -> None:
    """Refuse a graph that would take more memory than the recipe gives it, and `note` it.

    Raises:
        RunStopped: with what it would take.
    """
    num_pieces = sum(pieces for pieces, _ in done.results["pieces"].values())
    num_joins = sum(joins for joins, _ in done.results["edges"].values())
    num_edges = sum(edges for _, edges in done.results["edges"].values())
    needed = bytes_needed(num_pieces, num_joins, num_edges, plan.recipe.objects)
    given = plan.recipe.output.graph_gib * GIB
    if needed > given:
        why = (
            f"the graph of {num_pieces:,} pieces and {num_edges:,} edges takes up to {needed / GIB:.1f} GiB, "
            f"output.graph_gib gives it {plan.recipe.output.graph_gib:g}; label with --fresh and more of either, "
            "a larger objects.background, or more objects.smooth"
        )
        note(0, why)
        raise RunStopped(why)


def is_labelled(plan: LabelPlan, folder: RunFolder) -> bool:
    """Return whether the labels of `plan` are whole, as far as the journal in `folder` says."""
    if LabelPlan.load(folder.path) != plan:
        return False
    return Noted.of(folder.journal).is_complete(plan)


def _close(folder: RunFolder, plan: LabelPlan, journal: Journal, site: str) -> None:
    """Delete scratch and what killed writers left, say in the output when and where it was made, and note that."""
    out = files.locate(plan.out)
    for path in sweep(out):
        log.info("deleted %s, which a killed writer left", path)
    for name in (IDS, PIECES, EDGES):
        if (folder.path / name).exists():
            delete(folder.path / name)
    (folder.path / NAMES).unlink(missing_ok=True)
    for path in partials(folder.path):
        path.unlink(missing_ok=True)
    records = [record for record in journal.records() if record.done]
    moment = "%Y-%m-%dT%H:%M:%SZ"
    said = {
        "site": site,
        "started": time.strftime(moment, time.gmtime(min(record.started for record in records))),
        "ended": time.strftime(moment, time.gmtime(max(record.started + record.seconds for record in records))),
        "hosts": sorted({record.host for record in records}),
        "output": plan.out,
        "folder": plan.search_path,
    }
    create_groups(out, f"{RUN_KEY}/attributes", "zarr3")
    merge_json(out / RUN_KEY / ATTRIBUTE_FILES["zarr3"], {"attributes": plain({"volpipe": said})})
    keys = (level_key(level) for level in range(len(plan.factors)))
    taken = metadata_sums(out, ["", *keys, RUN_KEY], METADATA_NAMES)
    journal.append(Record(METADATA_STAGE, (), result=taken, started=time.time()))
