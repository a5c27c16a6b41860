"""Reports of flows and batches.

Not here: the page of one run, segmentation or evaluation (runs.pages), or of trainings (training.pages).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from volpipe.blockwise.failures import Missing
from volpipe.errors import RunError, VolpipeError
from volpipe.recipes.workflow import VOLUME
from volpipe.reporting.flow_graph import Node, draw_flow
from volpipe.reporting.page import (
    REPORT,
    Draft,
    Item,
    Page,
    PageSection,
    Picture,
    ReportLink,
    Sentence,
    Sheet,
    filled,
    reason_of,
)
from volpipe.reporting.tally import JournalTally
from volpipe.reporting.tasks import COLUMNS, USAGE_COLUMNS, StageState, colours_of
from volpipe.runs.pages import Parts, Several, Taken, page_of
from volpipe.runs.planned import Planned
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.entry import Entry
from volpipe.stages.kind import OUTPUTS
from volpipe.units import bounded, brief, count, size
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json
from volpipe.workflow.batch_table import DatasetRow, read_table
from volpipe.workflow.entries import FLOW_FILE, entries_of, find_entries
from volpipe.workflow.kinds import KINDS, find_work
from volpipe.workflow.stage_table import num_files

NO_IMAGE = b"", ""
MOST_BYTES = 64 << 20  # of journals of a batch that are read for its report
MOST_THUMBNAILS, THUMBNAIL = 100, 128  # datasets of a batch, pixels
MOST_STAGES = 12  # of a flow


@dataclass(frozen=True)
class _StagePart:
    """A stage of a flow: what its journal says, and what was planned."""

    entry: Entry
    taken: Taken | None
    tally: JournalTally
    is_complete: bool
    planned: Planned | None
    problem: str = ""

    @property
    def stages(self) -> Mapping[str, StageState]:
        """How far the stages of its tasks are."""
        if self.taken is not None:
            return self.taken.stages
        return {name: StageState(sums.units, sums.units) for name, sums in self.tally.stages.items()}


def flow_page(folder: RunFolder, out: str, *, with_pictures: bool = True) -> Page:
    """Return the report of the flow whose folder this is, with a link to that of each stage, and its picture.

    Raises:
        RunError: the folder has no stages, or what it has is damaged.
    """
    entries = find_entries(folder.path)
    if entries is None:
        raise RunError(f"{folder.path} holds no stages")
    tally = JournalTally()
    parts = [_stage_part(entry, tally) for entry in entries]
    missing = [
        Missing(f"{part.entry.name}: {each.stage}", each.unit, each.box, each.reason)
        for part in parts
        if part.taken is not None
        for each in part.taken.missing
    ]
    tree = read_json(folder.path / FLOW_FILE) or {}
    facts = {"input": str(tree.get("volume", "")), "recipe": str(tree.get("recipe", "")), "outputs in": out}
    summary: list[Item] = [_stage_sheet(folder.path, parts)]
    summary += [Sentence(f"Stage {part.entry.name}: {part.problem}", "warning") for part in parts if part.problem]
    summary += [item for entry in entries for item in _score_items(entry)]
    summary += [flow_picture(entries, facts["input"])]
    stages = {f"{part.entry.name}: {name}": state for part in parts for name, state in part.stages.items()}

    def box(stage: str, unit: int) -> object:
        name, _, own = stage.partition(": ")
        taken = next((part.taken for part in parts if part.entry.name == name), None)
        return None if taken is None else taken.box(own, unit)

    pictures = stage_pictures(entries) if with_pictures else ()
    said = Parts(Path(out).name, f"A recipe of {count(len(parts), 'stage')}.", facts, summary, pictures)
    is_complete = all(part.is_complete for part in parts)
    return page_of(
        folder,
        Several(tally, missing, stages, box, works=[entry.name for entry in entries]),
        said,
        is_complete=is_complete,
    )


def _stage_part(entry: Entry, tally: JournalTally) -> _StagePart:
    """Return what the journal of a stage says, which is added to `tally` as well."""
    prefix, own = f"{entry.name}: ", JournalTally()
    try:
        work = find_work(entry.run)
        if work is None:
            for journal in entry.journals:
                own.read(journal)
                tally.read(journal, prefix)
            return _StagePart(entry, None, own, KINDS[entry.kind].is_done(entry), None)
        taken = work.records.taken(tally, prefix)
        own.read(entry.run.journal)
        return _StagePart(
            entry,
            taken,
            own,
            work.is_settled and taken.schedule.is_complete,
            Planned.load(entry.run.path, work.plan.identity),
        )
    except RunError as error:
        return _StagePart(entry, None, own, is_complete=False, planned=None, problem=reason_of(error))


def flow_picture(stages: Sequence[Entry], volume: str) -> Picture:
    """Return the drawing of a flow over `volume`: its stages, in the colours of the timeline, and what each needs."""
    nodes = [Node(stage.name, stage.kind, stage.needs) for stage in stages]
    svg = draw_flow(nodes, colours_of([stage.name for stage in stages]), volume=VOLUME, title=_short(volume))
    caption = "Arrows lead to a stage from what it reads, and from the stage that trains its net."
    return Picture("The flow", caption, svg.encode(), "image/svg+xml", is_wide=True)


def _score_items(entry: Entry) -> list[Item]:
    """Return the scores of a stage that has made some, or why they cannot be read."""
    try:
        items = KINDS[entry.kind].scores(entry)
    except VolpipeError as error:
        return [Sentence(f"Stage {entry.name}: {reason_of(error)}", "warning")]
    return [replace(i, title=f"{i.title} of stage {entry.name}") if isinstance(i, Sheet) else i for i in items]


def _stage_sheet(folder: Path, parts: Sequence[_StagePart]) -> Sheet:
    """Return a line for each stage: how far it is, what it took, and what was planned.

    Outputs are named without their folder, inputs by the stages that make them.
    """
    rows = []
    names_of = {part.entry.out: part.entry.name for part in parts}
    for part in parts:
        total, planned = part.tally.all, part.planned
        span = brief(total.ended - total.began) if total.began else ""
        missing = len(part.taken.missing) if part.taken is not None else 0
        state = "complete" if part.is_complete else f"{missing} missing" if missing else "not complete"
        time = "" if planned is None else brief(planned.seconds)
        room = planned.output_bytes if planned is not None else None
        rows.append(
            (_link(folder, part.entry.run.path, part.entry.name), part.entry.kind, state, span, time, total.tasks,
             *(COLUMNS[name](total) for name in USAGE_COLUMNS), num_files(part.entry.out),
             "" if room is None or planned is None else bounded(room, planned.is_measured),
             total.attempts or "", _input_name(part.entry.reads, names_of), _last(part.entry.out))
        )  # fmt: skip
    names = ("stage", "kind", "state", "elapsed", "planned", "tasks", *USAGE_COLUMNS, "files", "output planned",
             "failed attempts", "input", "output")  # fmt: skip
    caption = (
        "Stages run side by side: each as far as what it reads is written. Elapsed is from the first task of a stage "
        "to its last, over all sessions. Files are those of the output on its disk. A name leads to the stage's own "
        "report."
    )
    return filled(Sheet("Stages", names, rows, caption))


def _input_name(place: str, names_of: Mapping[str, str]) -> str:
    """Return what a stage reads: the name of another, with an array or a coarser level; or a volume without folders."""
    for out, name in names_of.items():
        if place == out or place.startswith(f"{out} "):
            return f"{name} {place[len(out) :].strip().removesuffix('s0').rstrip('/')}".strip()
    return _last(place) if " " in _last(place) else _short(place)


def _link(folder: Path, other: Path, text: str, image: tuple[bytes, str] = NO_IMAGE) -> object:
    """Return a link from the report in `folder` to that in `other`, with an image; a text where there is none."""
    if not (other / REPORT).is_file():
        return text
    return ReportLink(text, os.path.relpath(other / REPORT, folder).replace(os.sep, "/"), *image)


def batch_page(folder: RunFolder, *, with_pictures: bool = True) -> Page:
    """Return the report of the batch whose folder this is, with a link to that of each dataset, and its thumbnail.

    Raises:
        RunError: there is no batch, or its table is damaged.
    """
    rows = read_table(folder.path)
    if rows is None:
        raise RunError(f"{folder.path} holds no batch")
    tally, num_read = _tally_of(rows)
    done = sum(row.is_complete for row in rows)
    facts = {"datasets": f"{len(rows):,}, {done:,} of them complete"}
    facts |= {"recipe": rows[0].recipe} if len({row.recipe for row in rows}) == 1 else {}
    taken = f"read {size(sum(r.read_bytes for r in rows))}, written {size(sum(r.written_bytes for r in rows))}"
    facts |= {"planned": _planned(rows), "taken": taken}
    first = f"Timeline and tables of tasks are of the first {num_read:,} datasets: all are too many."
    summary = [Sentence(first)] if num_read < len(rows) else []
    datasets = PageSection("Datasets", [dataset_sheet(folder.path, rows, thumbnails(rows) if with_pictures else {})])
    what = f"A batch of {count(len(rows), 'dataset')}."
    parts = Parts(folder.path.name, what, facts, summary, sections=[datasets])
    return page_of(folder, Several(tally), parts, is_complete=done == len(rows))


def _planned(rows: Sequence[DatasetRow]) -> str:
    """Return what was planned for all datasets: bytes and files of their outputs, and time where that was known."""
    is_measured = all(row.is_measured for row in rows)
    files = sum(row.output_files for row in rows)
    room = f"outputs of {bounded(sum(row.output_bytes for row in rows), is_measured)} in {count(files, 'file')}"
    times = [row.worker_seconds for row in rows]
    return room if None in times else f"{room}; {brief(sum(filter(None, times)))} of workers"


def _tally_of(rows: Sequence[DatasetRow]) -> tuple[JournalTally, int]:
    """Return the sums of the journals of datasets, and of how many, as far as they are read in a moment."""
    tally, left = JournalTally(), MOST_BYTES
    for number, row in enumerate(rows):
        journals = _journals_of(row)
        left -= sum(journal.stat().st_size for journal in journals)
        if left < 0:
            return tally, number
        for journal in journals:
            tally.read(journal)
    return tally, len(rows)


def _journals_of(row: DatasetRow) -> list[Path]:
    try:
        return [entry.run.journal for entry in entries_of(row.out) if entry.run.journal.is_file()]
    except RunError:  # its own report says so
        return []


def dataset_sheet(folder: Path, rows: Sequence[DatasetRow], images: Mapping[int, tuple[bytes, str]]) -> Sheet:
    """Return a line for each dataset, with a link to its report, and above that its image, where it has one."""
    is_one_recipe = len({row.recipe for row in rows}) == 1  # which the summary has
    lines = [
        (_link(folder, _folder_of(row), _short(row.volume), images.get(number, NO_IMAGE)), row.ended, row.changes,
         brief(row.wall_seconds), row.missing or "", brief(row.cpu_seconds) if row.cpu_seconds else "",
         "×".join(map(str, row.shape)), row.grey, row.num_blocks, bounded(row.output_bytes, row.is_measured),
         size(row.read_bytes), size(row.written_bytes),
         ", ".join(f"{axis} {value:.2f}" for axis, value in row.seams.items()),
         "" if is_one_recipe else row.recipe, row.out)
        for number, row in enumerate(rows)
    ]  # fmt: skip
    names = ("dataset", "ended", "blocks changed", "elapsed", "missing", "CPU time", "voxels z,y,x", "grey levels",
             "blocks", "output planned", "read", "written", "seams", "recipe", "output")  # fmt: skip
    caption = (
        "A name leads to the dataset's own report; its picture is a slice of the whole output. Elapsed is of the "
        "session that ended it, in which others ran beside it; CPU time, read and written are of all its tasks, in all "
        "sessions. Seams are steps at the faces of windows alone: a dataset's own report says what they do not see."
    )
    return filled(Sheet("", names, lines, caption, [row.reason or row.why for row in rows]))


def _folder_of(row: DatasetRow) -> Path:
    """Return the folder of the run, or of the stages, that makes the output of a dataset."""
    stages = RunFolder.for_stages(paths.locate(row.out)).path
    return stages if (stages / FLOW_FILE).is_file() else RunFolder.find(row.out).path


def _last(place: str) -> str:
    """Return the last part of a place."""
    return place.rstrip("/").rsplit("/", 1)[-1]


def _short(volume: str) -> str:
    """Return the last two parts of a place."""
    return "/".join(volume.rstrip("/").split("/")[-2:])


def stage_pictures(entries: Sequence[Entry]) -> list[Draft]:
    """Return the main picture of each stage of a flow that makes a volume, and the curves of one that trains."""
    drafts = [draft for entry in entries for draft in KINDS[entry.kind].pictures(entry)]
    outputs = [draft for draft in drafts if draft.section == OUTPUTS]
    return [draft for draft in drafts if draft.section != OUTPUTS] + outputs[:MOST_STAGES]


def thumbnails(rows: Sequence[DatasetRow]) -> dict[int, tuple[bytes, str]]:
    """Return a small picture, with its media type, of complete datasets by their numbers; of flows the last output.

    They are of the first MOST_THUMBNAILS that have one.
    """
    pictures: dict[int, tuple[bytes, str]] = {}
    for number, row in enumerate(rows):
        if len(pictures) >= MOST_THUMBNAILS:
            break
        if row.is_complete and (picture := _thumbnail(row)) is not None:
            pictures[number] = picture
    return pictures


def _thumbnail(row: DatasetRow) -> tuple[bytes, str] | None:
    try:
        works = [work for entry in entries_of(row.out) if (work := find_work(entry.run)) is not None]
        return works[-1].pictures.thumbnail(THUMBNAIL) if works else None
    except (VolpipeError, OSError, ValueError):  # its own report says so
        return None
