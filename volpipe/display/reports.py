"""How far a run is, what it took, and what is missing or remarkable of it, as tables and lines.

Not here: printing, but for how work ended and what is missing. Other functions return what Rich can print.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.comparisons import sheet_table
from volpipe.display.console import columns, err, out
from volpipe.units import count, duration, size

if TYPE_CHECKING:  # the command line answers to Tab, which nobody waits a second for
    from volpipe.blockwise.failures import Missing
    from volpipe.blockwise.notes import Note, StageNote
    from volpipe.blockwise.usage import Totals
    from volpipe.estimation.estimate import Estimate, StageTimes
    from volpipe.runs.presence import Driver
    from volpipe.runs.report import WorkReport
    from volpipe.runs.seams import SeamScore
    from volpipe.workflow.driver import Report

MOST_ROWS = 20
WORTH_TELLING = 1e-3  # of the output, clipped: rounding takes less


def report_table(report: Report, started: float) -> Table:
    """Return what each stage took, what was planned behind it in brackets.

    `started` is when the command was given, in seconds since 1970.
    """
    table = columns("stage", "units", "tasks", "task time", "CPU time", "read", "written", "peak memory")
    planned = report.estimate
    expected = planned.by_name() if planned is not None and planned.rates is not None else {}
    for name, t in report.totals.items():
        table.add_row(
            name,
            f"{t.units:,}",
            f"{t.tasks:,}",
            duration(t.seconds) + (f" ({duration(expected[name].seconds)})" if name in expected else ""),
            duration(t.cpu_seconds),
            size(t.read_bytes) + (f" ({size(expected[name].read_bytes)})" if name in expected else ""),
            size(t.written_bytes) + (f" ({size(expected[name].written_bytes)})" if name in expected else ""),
            size(t.peak_bytes),
        )
    first = ""
    if report.first_task:
        waited = duration(max(0.0, report.first_task - report.asked))
        first = f", first task after {duration(report.first_task - started)} ({waited} of it waiting for workers)"
    table.caption = (
        f"{duration(time.time() - started)} in all{first}; "
        f"peak memory: driver {size(report.driver_peak_bytes)}, "
        f"workers {size(max((t.peak_bytes for t in report.totals.values()), default=0))}"
    )
    if planned is not None:
        table.caption += f"\n{_planned_line(report, planned)}"
    return table


def _planned_line(report: Report, planned: Estimate) -> str:
    """Return what was planned for the whole, beside what it took."""
    at_most = "" if planned.rates else "at most "
    took = ""
    if planned.seconds:
        took = f"; time {duration(planned.seconds)}, took {duration(time.time() - report.first_task)}"
    memory = f"memory {'' if planned.has_net else 'at least '}{size(planned.memory_bytes)}"
    scratch = f"scratch {at_most}{size(planned.scratch_bytes)}, was {size(report.most_scratch_bytes)}; "
    nothing = not planned.scratch_bytes and not report.most_scratch_bytes
    return f"planned: {'' if nothing else scratch}{memory}{took}"


def clipped_line(report: Report) -> str:
    """Return how much of the output was clipped to the ends of its type, "" where that is next to nothing."""
    num, share = report.clipped
    if share <= WORTH_TELLING:
        return ""
    import numpy as np

    info = np.iinfo(report.plan.dtype)
    return (
        f"{share:.2%} of the output ({num:,} voxels) lay beyond {info.min} … {info.max} of {report.plan.dtype} and was "
        "clipped to that; output.dtype=float32 keeps it"
    )


def seam_line(scores: Sequence[SeamScore], blind_spot: str = "") -> str:
    """Return the seam scores of an output as one line, and what they do not see."""
    said = ", ".join(f"{score.axis} {score.value:.2f}" for score in scores)
    line = f"seams: {said} (steps at faces of windows, by those inside; 1: none stands out)"
    by_chance = ", ".join(score.axis for score in scores if score.is_of_tissue)
    line += f"; along {by_chance} as large elsewhere" if by_chance else ""
    return f"{line}\nnote: {blind_spot}" if blind_spot else line


def seam_warning(scores: Sequence[SeamScore]) -> str:
    """Return what to do about scores that are above the threshold, "" where none is."""
    from volpipe.runs.seams import THRESHOLD

    seen = [score.axis for score in scores if score.is_seam]
    if not seen:
        return ""
    return (
        f"warning: the faces of windows may be seen along {', '.join(seen)} (above {THRESHOLD:g}): check the "
        "net's halo, or blend windows with a larger windows.overlap and windows.blend=hann"
    )


def standing_table(totals: dict[str, Totals], stages: Mapping[str, StageNote], state: str) -> Table:
    """Return how far each stage is, of how many units, and what it took; below it, how far the whole is."""
    from volpipe.blockwise.usage import Totals

    table = columns("stage", "done", "in flight", "tasks", "task time", "read", "written", "peak memory", caption=state)
    for name in dict.fromkeys((*stages, *totals)):
        stage, took = stages.get(name), totals.get(name, Totals())
        table.add_row(
            name,
            f"{stage.done:,} / {stage.all:,}" if stage is not None else f"{took.units:,}",
            f"{stage.in_flight:,}" if stage is not None and stage.in_flight else "",
            *([f"{took.tasks:,}", duration(took.seconds)] if took.tasks else ["", ""]),
            *([size(n) for n in (took.read_bytes, took.written_bytes, took.peak_bytes)] if took.tasks else [""] * 3),
        )
    return table


def driver_line(
    output: str, driver: Driver, is_complete: bool, num_missing: int = 0, seconds_left: float | None = None
) -> str:
    """Return how far the work on `output` is, whether somebody works on it, and how it goes on."""
    note = driver.note
    how_far = "" if note is None or note.part is None else f", {note.part:.0%} done"
    left = "" if seconds_left is None else f", about {duration(seconds_left)} left"
    if driver.waits:
        lacks = f", {count(num_missing, 'part')} missing" if num_missing else ""
        return f"{output}: {'complete' if is_complete else f'not complete{lacks}'}; {waiting_line(driver)}"
    if driver.state == "running":
        return f"{output}: {driver.name} is at work{how_far}{left}"
    if is_complete:
        return f"{output}: complete"
    if driver.state == "unseen":
        silent = "" if driver.silent_seconds is None else f" (last sign of it {duration(driver.silent_seconds)} ago)"
        return (
            f"{output}: not complete{how_far}; {driver.name} worked on it, and whether it still does cannot be seen "
            f"from this machine{silent}. {_command(note)}"
        )
    if driver.state == "interrupted":
        return f"{output}: interrupted; nobody works on it. {_command(note)}"
    if driver.state == "stopped":
        return f"{output}: stopped by an error, which its log has; nobody works on it. {_command(note)}"
    lacks = f", {count(num_missing, 'part')} missing" if num_missing else ""
    return f"{output}: not complete{lacks}; nobody works on it. {_command(note)}"


def waiting_line(driver: Driver) -> str:
    """Return that a driver follows a volume, and when it looks at that next."""
    return f"{driver.name} follows the volume, and looks again at {time.strftime('%T', time.localtime(driver.waits))}"


def _command(note: Note | None) -> str:
    """Return how the work goes on."""
    if note is None or not note.command:
        return "Run the same command again to continue."
    return f"To continue: {note.again()}"


def missing_table(missing: Sequence[Missing], most: int | None = MOST_ROWS) -> Table:
    """Return which boxes of the output are missing, and why."""
    names = ("stage", "unit", "box z,y,x", "reason")
    table = columns(*names, left=names, fold=True)
    table.title, table.title_justify = "missing", "left"
    for part in missing[:most]:
        table.add_row(part.stage, str(part.unit), str(part.box), part.reason)
    if most is not None and len(missing) > most:
        table.add_row("…", f"{len(missing) - most} more", "", "`volpipe status --all` lists them")
    return table


def print_ending(report: WorkReport, planned: StageTimes | None = None) -> None:
    """Print how work ended, beside the times that were `planned`: sentences, notes and tables."""
    for line in report.closing_lines(planned):
        out.print(line)
    for note in report.notes:
        err.print(f"note: {note}")
    for sheet in report.closing_sheets:
        out.print(sheet_table(sheet))


def print_missing(report: WorkReport) -> None:
    """Print what is missing, if anything is, and how to get it."""
    if not report.missing:
        return
    err.print(missing_table(report.missing))
    is_one = len(report.missing) == 1
    err.print(
        f"{count(len(report.missing), 'part')} {'is' if is_one else 'are'} missing; "
        f"run the same command again to compute {'it' if is_one else 'them'} "
        f"(log: {report.folder}/volpipe.log)"
    )
