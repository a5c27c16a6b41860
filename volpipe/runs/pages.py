"""Parts of a report that all work has: how it stands, its command, what was planned, warnings, what is missing.

Not here: which parts a kind of work has, in which order (output_work, evaluation.driver), tables of tasks
(reporting.tasks), or HTML (reporting.render). Everything is read from the folder, so that a report can be made at any
time, while a driver works or after it was killed.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from volpipe.blockwise.failures import Missing, last_line
from volpipe.blockwise.journal import Kinds
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.stage import Schedule
from volpipe.errors import RunError, VolpipeError
from volpipe.inference.output_plan import OutputPlan, SourceVolume
from volpipe.inference.plan import Plan
from volpipe.reporting.block_map import BlockMap
from volpipe.reporting.page import (
    REPORT,
    Draft,
    FactTable,
    Item,
    Page,
    PageSection,
    Sentence,
    Sheet,
    filled,
    sections_of,
)
from volpipe.reporting.tally import JournalTally
from volpipe.reporting.tasks import BoxOf, StageState, damage_note, moment, task_sections
from volpipe.runs.planned import Planned
from volpipe.runs.presence import Driver, find_driver
from volpipe.runs.provenance import read_provenance, sessions_of, settings_of
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.seams import MEANING, blind_spot
from volpipe.runs.update_records import Updated
from volpipe.units import bounded, brief, count, in_nm, listed, shape, size
from volpipe.volumes.formats.container import METADATA_NAMES
from volpipe.volumes.storage import paths

MOST_MISSING = 200  # lines
MOST_WARNINGS = 40
MOST_UPDATES = 20
MOST_NAMES = 20  # of devices, and of hosts
LOG_BYTES = 1 << 20  # that are read of the end of a log
ENTRY_END = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ )", re.MULTILINE)
ENTRY = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (WARNING|ERROR) \S+ ", re.MULTILINE)
ATTEMPT = re.compile(r"^\S.* \d+ failed \(attempt \d+\): ")
COUNT_SECONDS = 0.5  # for counting the files of an output; more are not counted


@dataclass(frozen=True)
class Taken:
    """What the journal of a folder says: sums of tasks, and the schedule with what is done and what failed.

    Attributes:
        sites: site and beginning of each session.
        missing: what failed when it was last tried, and what cannot be done without.
    """

    tally: JournalTally
    schedule: Schedule
    sites: Sequence[tuple[str, float]]
    missing: Sequence[Missing]
    works: ClassVar[Sequence[str]] = ()

    @classmethod
    def read(
        cls, folder: RunFolder, schedule: Callable[[], Schedule], kinds: Kinds, tally: JournalTally | None = None,
        prefix: str = "", maps: Mapping[str, BlockMap] | None = None,
    ) -> Taken:  # fmt: skip
        """Return what the journal says of the stages of a `schedule`; damage is passed by.

        Args:
            kinds: of results.
            tally: which is added to, with `prefix` before the names of stages; a new one where it is not given.
            maps: of blocks, which a new one adds to.
        """
        sites = session_facts(folder)
        tally = JournalTally([began for _, began in sites], maps or {}) if tally is None else tally
        ledger = Ledger(folder.journal, kinds, schedule, partial(tally.add, prefix=prefix), tally.note_damage).look()
        return cls(tally, ledger.schedule, sites, ledger.missing)

    @property
    def stages(self) -> dict[str, StageState]:
        """How far the stages are that the journal speaks of."""
        shown = [stage for stage in self.schedule.shown if stage.marked]
        return {stage.name: StageState(stage.num_done, stage.num_units) for stage in shown}

    def box(self, stage: str, unit: int) -> str | None:
        """Return the box of a unit as a text; None where the stage has none."""
        known = self.schedule.by_name.get(stage)
        return None if known is None or unit >= known.size else str(self.schedule.box(known, unit))


@dataclass(frozen=True)
class Several:
    """What the journals of several works say together; see `Taken`.

    Attributes:
        stages: how far each is, by names that tell whose it is.
        box: returns the box of a unit of a stage as a text; None where it has none.
        works: what the names of stages begin with, before a colon; see `task_sections`.
    """

    tally: JournalTally
    missing: Sequence[Missing] = ()
    stages: Mapping[str, StageState] = field(default_factory=dict)
    box: BoxOf = lambda stage, unit: None
    sites: Sequence[tuple[str, float]] = ()
    works: Sequence[str] = ()


@dataclass(frozen=True)
class Parts:
    """What a kind of work says of itself on its page.

    Attributes:
        title, what: its name, and what it is in a few words.
        facts: for the summary, before those of times and command.
        summary: further items of it.
        sections: that follow the summary.
        pictures: drafts of pictures and charts.
        origin: items of recipe, versions and origin.
    """

    title: str
    what: str
    facts: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    summary: Sequence[Item] = ()
    pictures: Sequence[Draft] = ()
    origin: Sequence[Item] = ()
    sections: Sequence[PageSection] = ()


def page_of(folder: RunFolder, taken: Taken | Several, parts: Parts, *, is_complete: bool) -> Page:
    """Return the page of work in `folder`: how it stands, its command, its `parts`, its tasks, and warnings."""
    tally, driver = taken.tally, find_driver(folder.path, folder.journal if folder.journal.is_file() else folder.log)
    state, is_well, sentence = _standing(driver, is_complete=is_complete, num_missing=len(taken.missing))
    facts = {**parts.facts, **times_facts(tally, len(taken.sites)), **command_facts(folder.path, driver)}
    if taken.sites:
        facts["site"] = ", ".join(dict.fromkeys(site for site, _ in taken.sites))
    damage, warnings = damage_note(tally), log_notes(folder.log)
    summary: list[Item] = [FactTable("", facts), *missing_items(taken.missing, driver)]
    sections = [
        PageSection("Summary", [*summary, *([damage] if damage else []), *parts.summary]),
        *parts.sections,
        *sections_of(parts.pictures),
        *task_sections(tally, taken.stages, taken.box, taken.sites, taken.works),
        *([PageSection("Warnings in the log", warnings)] if warnings else []),
        *([PageSection("Recipe and origin", parts.origin)] if parts.origin else []),
    ]
    return Page(parts.title, state, sections, is_well, " ".join(filter(None, (parts.what, sentence))))


def _standing(driver: Driver, *, is_complete: bool, num_missing: int) -> tuple[str, bool, str]:
    """Return how work stands in a few words, whether that is how it should be, and it in a sentence.

    A driver that has said that it leaves is at work no more.
    """
    note = driver.note
    if driver.waits and is_complete:
        followed = f"{driver.name} follows its volume: this page is of the last look that found something."
        return "complete", True, followed
    if driver.is_at_work and (note is None or not note.ended):
        part = "" if note is None or note.part is None else f", {note.part:.0%} done"
        return f"running{part}", True, f"{driver.name} is at work."
    if is_complete:
        return "complete", True, ""
    again = "Run the same command again to continue."
    if num_missing:
        return f"{count(num_missing, 'part')} missing", False, again
    ended = note.ended if note is not None else driver.state
    words = {
        "interrupted": ("interrupted", "It was interrupted, and nobody works on it."),
        "stopped": ("stopped", "An error stopped it, which its log has; nobody works on it."),
        "unseen": ("not complete", f"{driver.name} worked on it; whether it still does cannot be seen from here."),
        "running": ("interrupted", "It was killed, or lost its machine."),
        "": ("interrupted", "It was killed, or lost its machine."),
    }
    state, sentence = words.get(ended, ("not complete", "Nobody works on it."))
    return state, False, f"{sentence} {again}"


def command_facts(folder: Path, driver: Driver) -> dict[str, str]:
    """Return the command, and where it was given."""
    note = driver.note
    facts = {"command": note.command if note is not None and note.command else "given in Python, not on a command line"}
    if note is not None and note.folder:
        facts["given in"] = note.folder
    return facts | {"folder of the run": str(folder)}


def session_facts(folder: RunFolder) -> list[tuple[str, float]]:
    """Return site and beginning of each session; none where they cannot be read."""
    try:
        return [(session.site, session.began) for session in sessions_of(folder)]
    except RunError:
        return []


def volume_line(source: SourceVolume) -> str:
    """Return what a volume is: place, shape, type, voxel size."""
    channels = f"{count(source.num_channels, 'channel')} of " if source.num_channels > 1 else ""
    place = f"{source.path} {source.key}".strip()
    return f"{place}: {channels}{shape(source.shape)} voxels (z, y, x), {source.dtype}, {in_nm(source.voxel_size_nm)}"


def output_line(plan: OutputPlan) -> str:
    """Return what an output is."""
    if len(plan.arrays) > 1:
        return "; ".join(map(output_line, plan.arrays))
    channels = f"{count(plan.num_channels, 'channel')} of " if plan.num_channels > 1 else ""
    return (
        f"{plan.out}: {channels}{shape(plan.shown_shape)} voxels (z, y, x), {plan.dtype}, "
        f"{in_nm(plan.multiscale.voxel_size_nm)}, {plan.format}, {count(len(plan.multiscale.levels), 'level')}"
    )


def times_facts(tally: JournalTally, num_sessions: int) -> dict[str, str]:
    """Return when the tasks ran, and how long."""
    total = tally.all
    if not total.began:
        return {}
    span = f"{moment(total.began)} to {moment(total.ended)} ({brief(total.ended - total.began)})"
    if num_sessions > 1:
        span += f", in {num_sessions} sessions"
    return {"tasks ran": span, "time of all workers": brief(total.seconds)}


def planned_sheet(planned: Planned | None, tally: JournalTally, plan: OutputPlan, *, is_complete: bool) -> Sheet:
    """Return what was planned beside what it took; what nobody planned is left empty."""
    total, on_disk = tally.all, disk_use(plan.out)
    planned = planned or Planned(plan.identity)

    def bytes_of(value: float | None, is_measured: bool = planned.is_measured) -> str:
        return "" if value is None else bounded(value, is_measured)

    spans = tally.by_session if len(tally.by_session) > 1 else [total]
    taken = sum(sums.ended - sums.began for sums in spans if sums.began)
    files = "" if planned.output_files is None else f"{'' if planned.is_measured else '≤ '}{planned.output_files:,}"
    rows = [
        ("time, first task to last", brief(planned.seconds), brief(taken)),
        ("time of all workers", brief(planned.worker_seconds), brief(total.seconds)),
        *(
            (f"… {name}", brief(seconds), brief(_task_seconds(tally, name)))
            for name, seconds in planned.stage_seconds.items()
        ),
        ("read", bytes_of(planned.read_bytes), size(total.read_bytes)),
        ("written, scratch included", bytes_of(planned.written_bytes), size(total.written_bytes)),
        (
            "output, without metadata",
            bytes_of(planned.output_bytes),
            "not counted" if on_disk is None else size(on_disk[0]),
        ),
        ("files of the output", files, "not counted" if on_disk is None else f"{on_disk[1]:,}"),
        *(
            [("scratch at its highest", bytes_of(planned.scratch_bytes), size(tally.most_scratch_bytes))]
            if planned.scratch_bytes or tally.most_scratch_bytes
            else []
        ),
        ("memory of a worker", bytes_of(planned.memory_bytes, True), size(total.peak_bytes)),
    ]
    so_far = "" if is_complete else " What it took is so far."
    caption = f"≤: an upper bound, as no block was tried before.{so_far}" if not planned.is_measured else so_far.strip()
    return Sheet("Planned and taken", ("", "planned", "taken"), rows, caption)


def _task_seconds(tally: JournalTally, stage: str) -> float:
    sums = tally.stages.get(stage)
    return 0.0 if sums is None else sums.seconds


def disk_use(out: str) -> tuple[int, int] | None:
    """Return bytes of voxels and number of files of an output on this machine's disks.

    None of a remote one, or of one with too many files to look at.
    """
    place = paths.locate(out)
    if not isinstance(place, Path):
        return None
    num_bytes, num_files, end = 0, 0, time.monotonic() + COUNT_SECONDS
    for folder, _, names in os.walk(place):
        for name in names:
            num_files += 1
            if name not in METADATA_NAMES:
                with suppress(OSError):  # it is being replaced
                    num_bytes += (Path(folder) / name).stat().st_size
        if time.monotonic() > end:
            return None
    return num_bytes, num_files


def update_items(updates: Sequence[Updated]) -> list[Item]:
    """Return when the output was updated and what that took back, the latest first; nothing where it never was."""
    if not updates:
        return []
    latest = reversed(updates[-MOST_UPDATES:])
    rows = [(moment(each.at), each.changed, each.computed, each.blocks, each.why) for each in latest]
    older = len(updates) - len(rows)
    caption = "Blocks whose input had changed, and all that were computed again with them; new ones are not counted."
    caption += f" {older:,} earlier updates are left out." if older else ""
    return [filled(Sheet("Updates", ("when", "changed", "computed again", "blocks", "why"), rows, caption))]


def missing_items(missing: Sequence[Missing], driver: Driver) -> list[Item]:
    """Return which boxes are missing and why, and how to get them; nothing where none is."""
    if not missing:
        return []
    note = driver.note
    command = f": cd {shlex.quote(note.folder)} && {note.command}" if note is not None and note.command else ""
    whom = "it" if len(missing) == 1 else "them"
    rows = [(part.stage, part.unit, str(part.box), last_line(part.reason)) for part in missing[:MOST_MISSING]]
    more = len(missing) - len(rows)
    caption = f"{more:,} more are not shown; `volpipe status --all` lists them." if more else ""
    return [
        Sentence(
            f"{count(len(missing), 'part')} of the output {'is' if len(missing) == 1 else 'are'} missing. Mend what "
            f"the reasons name; then run the same command again to compute {whom}{command}.",
            "warning",
        ),
        Sheet("Missing", ("stage", "unit", "box z,y,x", "reason"), rows, caption),
    ]


def log_notes(log: Path) -> list[Item]:
    """Return the warnings and errors at the end of a log, each once, the latest last; of a traceback its last line.

    Attempts that failed are left out: a table has them.
    """
    part = paths.fetch(log, (-LOG_BYTES, 0)) if log.is_file() else None
    texts = ENTRY.split("" if part is None else part.data.decode(errors="replace"))[1:]
    entries = zip(texts[::2], texts[1::2], strict=True)
    lines = dict.fromkeys(f"{level.lower()}: {_shortened(text)}" for level, text in entries if not ATTEMPT.search(text))
    notes: list[Item] = [Sentence(line, "warning") for line in list(lines)[-MOST_WARNINGS:]]
    more = len(lines) - len(notes)
    return [*notes, Sentence(f"{more:,} more are in {log}.")] if more else notes


def _shortened(text: str) -> str:
    """Return the first line of an entry of a log, and the last line of a traceback that follows."""
    rows = ENTRY_END.split(text)[0].strip().splitlines() or [""]
    first = rows[0].removesuffix("Traceback (most recent call last):")
    return f"{first.rstrip(': ')}: {rows[-1]}" if len(rows) > 1 else first


def recipe_facts(plan: OutputPlan) -> FactTable:
    """Return the keys of a recipe that differ from the defaults."""
    settings = (setting.partition("=") for setting in settings_of(plan.recipe))
    entries = {key: value for key, _, value in settings}
    return FactTable("Recipe: what differs from the defaults", entries or {"": "nothing"})


def findings_facts(plan: OutputPlan) -> dict[str, str]:
    """Return what the output says of seams, clipped voxels and those that are not finite; nothing before it is closed.

    `provenance_facts` says where it cannot be asked.
    """
    try:
        run = _as_mapping(read_provenance(plan.out).get("run"))
    except VolpipeError:
        return {}
    facts, seams = dict[str, str](), _as_mapping(run.get("seams"))
    if seams:
        scores = ", ".join(f"{axis} {value:.2f}" for axis, value in seams.items())
        said = f"voxels differ across the faces of windows {scores} times as much as inside ({MEANING})"
        blind = blind_spot(plan) if isinstance(plan, Plan) else ""
        facts["seams"] = f"{said}; {blind}" if blind else said
    clipped, kept = _as_mapping(run.get("clipped")), _as_mapping(run.get("kept"))
    if clipped.get("voxels"):
        facts["clipped to the output's type"] = f"{clipped['voxels']:,} voxels, {clipped['share']:.2%} of the output"
    if any(kept.values()):
        facts["kept, not finite"] = ", ".join(f"{value:,} {name}" for name, value in kept.items() if value)
    return facts


def provenance_facts(plan: OutputPlan) -> list[Item]:
    """Return versions, devices and identities that the output names; a sentence where it cannot be asked."""
    try:
        if not paths.exists(paths.locate(plan.out)):
            return [Sentence("The output is not there (yet), so that there is nothing that it says of its origin.")]
        said = read_provenance(plan.out)
    except VolpipeError as error:
        return [Sentence(f"What the output says of its origin cannot be read: {error}", "warning")]
    net, run, given = (_as_mapping(said.get(key)) for key in ("net", "run", "input"))
    packages = ", ".join(f"{name} {version}" for name, version in _as_mapping(said.get("packages")).items())
    entries: dict[str, str | Sequence[str]] = {
        "volpipe": str(said.get("version", "")),
        "Python": str(said.get("python", "")),
        "packages": packages,
        **{key: listed(names, MOST_NAMES) for key in ("devices", "hosts") if isinstance(names := run.get(key), list)},
        "weights, SHA-256": str(net.get("weights_sha256") or ""),
        **_hashes_of_nets(net),
        "code of the net, SHA-256": str(net.get("code_sha256") or ""),
        "input, fingerprint": str(given.get("fingerprint") or ""),
        "plan": plan.identity,
    }
    return [FactTable("Versions and origin", {name: value for name, value in entries.items() if value})]


def _hashes_of_nets(net: Mapping[str, object]) -> dict[str, str]:
    """Return the hash of the weights of each net of an ensemble; nothing of a single net."""
    members = net.get("members")
    named = [_as_mapping(each) for each in members] if isinstance(members, list) else []
    return {
        f"net {i} of {len(named)}": f"{own['label']}, weights {own['weights_sha256']}" for i, own in enumerate(named, 1)
    }


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def is_current(folder: Path, journals: Iterable[Path]) -> bool:
    """Return whether the report in `folder` is newer than all of `journals` that there are, of which there are some."""
    try:
        made = (folder / REPORT).stat().st_mtime
        times = [journal.stat().st_mtime for journal in journals if journal.is_file()]
    except OSError:
        return False
    return bool(times) and made > max(times)
