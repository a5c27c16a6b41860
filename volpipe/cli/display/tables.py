"""What the command line shows, as tables and lines: plan, progress, report, status, info.

Not here: printing. Every function returns something that Rich can print.
"""

from __future__ import annotations

import io
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from volpipe.cli.display.console import PLAIN_WIDTH

if TYPE_CHECKING:  # the command line answers to Tab, which nobody waits a second for
    from volpipe.blockwise.failures import Missing
    from volpipe.blockwise.journal import Totals
    from volpipe.blockwise.loop import Progress
    from volpipe.estimation.alternatives import Alternative
    from volpipe.estimation.estimate import Estimate, Slots
    from volpipe.estimation.forecast import Forecast
    from volpipe.inference.intensity import Affine
    from volpipe.inference.plan import Plan
    from volpipe.runs.presence import Driver, Note, StageNote
    from volpipe.runs.seams import Score
    from volpipe.sites.findings import Checked
    from volpipe.sites.node_facts import Facts
    from volpipe.volumes.survey import Footprint, Intensities, Trials
    from volpipe.volumes.volume import Volume
    from volpipe.workflow.driver import Report

MOST_ROWS = 20
WORTH_TELLING = 1e-3  # of the output, clipped: rounding takes less
LONGEST_HOURS, DAYS_OF_YEAR = 72, 365.25
LABEL_WIDTH = 8  # of the first column of a plan, whose parts are printed one after the other
UNITS = {"infer": "block", "factor": "block", "scan": "block", "measure": "block", "histogram": "block"}


def size(num_bytes: float) -> str:
    """Return bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if num_bytes < 1024 or unit == "PiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Return a time for people: 57 years, 12 days, 1 h 05 min, 3 min 20 s, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= LONGEST_HOURS:
        days = hours / 24
        return f"{days:.0f} days" if days < 2 * DAYS_OF_YEAR else f"{days / DAYS_OF_YEAR:,.0f} years"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 task, 1,200 tasks."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shape(values: tuple[int, ...]) -> str:
    return " × ".join(map(str, values))


def plan_summary(plan: Plan) -> Table:
    """Return what goes in and what comes out."""
    table, source = _pairs(), plan.source
    voxel = source.voxel_size_nm
    if voxel is not None:
        z, y, x = (v / s for v, s in zip(voxel, plan.net.scale, strict=True))
        voxel = (z, y, x)
    table.add_row("input", f"{source.path} {source.key}".strip())
    table.add_row("", f"{shape(source.shape)} voxels, {source.dtype}, {_voxel(source.voxel_size_nm)}")
    if plan.notes:
        table.add_row("", escape("; ".join(plan.notes)))
    if not plan.is_whole:
        table.add_row("roi", f"{plan.roi_box} (z, y, x)")
    if plan.mask is not None:
        table.add_row("mask", f"{plan.mask.path} {plan.mask.key}".strip() + f", {shape(plan.mask.shape)} voxels")
        if not all(map(_is_whole, plan.mask.step, plan.mask.shape)):
            steps = " × ".join(f"{step:.3g}" for step in plan.mask.step)
            table.add_row(
                "", f"stretched over the volume: its voxels are {steps} of the volume's; is it of a part only?"
            )
    table.add_row("net", f"{plan.net.label}, {count(plan.net.num_parameters, 'parameter')}")
    if plan.net.normalise is not None and plan.net.normalise.method != "none":
        table.add_row("", f"asks for {plan.net.normalise.method}: statistics of the whole volume, not of each window")
    table.add_row("grey", grey_line(plan))
    table.add_row("output", f"{plan.out}")
    channels = f"{count(plan.net.out_channels, 'channel')} of " if plan.net.out_channels > 1 else ""
    table.add_row(
        "",
        f"{channels}{shape(plan.out_shape)} voxels, {plan.out_dtype}, {_voxel(voxel)}, {plan.recipe.output.format}, "
        f"{count(len(plan.factors), 'level')}",
    )
    return table


def _is_whole(step: float, length: int) -> bool:
    """Return whether `length` voxels of `step` finer ones are a level of a pyramid, however its end is rounded."""
    factor, num_coarse = (step, length) if step >= 1 else (1 / step, length * step)
    return abs(round(factor) * num_coarse - factor * num_coarse) < round(factor)


def grey_line(plan: Plan) -> str:
    """Return which grey levels the net sees as which numbers, and which it was trained with, where that is known."""
    import numpy as np

    from volpipe.inference.statistics import resolve_method

    dtype = np.dtype(plan.source.dtype)
    choice, trained = resolve_method(plan.recipe.normalise, dtype), plan.recipe.net.trained_range
    if choice.method == "none":
        said = f"{dtype} as they are"
    elif choice.method == "zscore":
        said = (
            f"mean {choice.mean:g}, deviation {choice.std:g}"
            if choice.mean is not None
            else "mean, deviation, measured"
        )
        said += f" of {dtype} → 0, 1"
    elif choice.low is not None:
        said = f"{choice.low:g} … {choice.high:g} of {dtype}, given → -1 … 1"
    elif choice.method == "range":
        ends = f"{np.iinfo(dtype).min} … {np.iinfo(dtype).max}" if dtype.kind in "iu" else "least … greatest, measured,"
        said = f"{ends} of {dtype} → -1 … 1"
    else:
        low, high = choice.percentiles
        said = f"percentiles {low:g} … {high:g} of {dtype}, measured → -1 … 1"
    return said + (f"; the net was trained with {trained[0]:g} … {trained[1]:g}" if trained else "")


def measured_line(plan: Plan, normalise: Affine, about: str = "") -> str:
    """Return what was measured of grey levels, "" where nothing had to be."""
    import numpy as np

    from volpipe.inference.statistics import needs_measuring, resolve_method

    dtype = np.dtype(plan.source.dtype)
    if not needs_measuring(plan.recipe.normalise, dtype):
        return ""
    shift, scale = normalise.shift, normalise.scale
    if resolve_method(plan.recipe.normalise, dtype).method == "zscore":
        return f"grey levels: mean {about}{shift:.6g}, deviation {about}{scale:.6g}"
    return f"grey levels: {about}{shift - scale:.6g} … {shift + scale:.6g} of the volume → -1 … 1"


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


def plan_table(plan: Plan) -> Table:
    """Return how the work is divided."""
    from volpipe.inference.selection import Selection

    lattice, table, selection = plan.lattice, _pairs(), Selection(plan)
    table.add_row(
        "windows",
        f"{_part(selection.num_windows, lattice.num_windows)} of {shape(plan.window)} voxels, overlap "
        f"{shape(plan.overlap)}, blend {plan.recipe.windows.blend}, {plan.mode}",
    )
    table.add_row("", f"halo of the net {shape(plan.net.halo)}; {_mirrored(plan)}")
    table.add_row("blocks", f"{_part(plan.num_active, len(plan.blocks))} of {shape(plan.block)} windows")
    table.add_row("files", f"shards of {shape(plan.shard)} voxels in chunks of {shape(plan.chunk)}")
    return table


def _mirrored(plan: Plan) -> str:
    """Return what windows see beyond the volume, which surprises where they are larger than that."""
    if any(w > n for w, n in zip(plan.window, plan.source.shape, strict=True)):
        return "windows are larger than the volume, which is mirrored at its faces to fill them"
    return "beyond its faces the volume is mirrored"


def rendered(*parts: RenderableType) -> str:
    """Return tables as plain text, for the log."""
    console = Console(width=PLAIN_WIDTH, file=io.StringIO(), soft_wrap=True)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def forecast_summary(forecast: Forecast, site: str) -> Table:
    """Return how long it takes, and how much memory and disk: what a person asks first."""
    found, table = forecast.estimate, _pairs()
    if grey := measured_line(forecast.plan, forecast.sample.normalise, "about "):
        table.add_row("", f"{grey} (by a sample)")
    table.add_row("time", _time_line(forecast, site))
    threads, used = forecast.worker_threads or 1, forecast.plan.recipe.infer.threads
    if threads > used:
        table.add_row(
            "",
            f"a worker has {count(threads, 'core')}, the net computes on {used}: infer.threads={threads} would use "
            "them, and change last bits",
        )
    table.add_row("memory", _memory_line(found, forecast.slots, forecast.num_workers))
    table.add_row("disk", f"output {_bound(found, found.output_bytes)} in {count(found.output_files, 'file')}")
    if found.scratch_files or found.scratch_bytes:
        table.add_row(
            "",
            f"scratch {_bound(found, found.scratch_bytes)} in {count(found.scratch_files, 'file')} at its highest; "
            "deleted at the end",
        )
    if forecast.node_directory:
        table.add_row("", placement(forecast))
    return table


def _time_line(forecast: Forecast, site: str) -> str:
    found, number = forecast.estimate, forecast.num_workers
    workers = "" if number is None else f" with {count(number, 'worker')}"
    if found.rates is None or found.seconds is None:
        return f"not known{f': {why}' if (why := forecast.untimed) else ' yet; `volpipe plan` measures it'}"
    tried = count(found.rates.num_blocks, "block") if found.rates.num_blocks else "single windows"
    return f"about {duration(found.seconds)} on {site}{workers}, by {tried} tried there"


def _memory_line(found: Estimate, slots: Slots, num_workers: int | None) -> str:
    each = "each worker" if num_workers is None else f"each of {count(num_workers, 'worker')}"
    if num_workers == 1:
        each = "the worker"
    if slots.on_gpu:
        return f"up to {size(found.memory_bytes)} for {each}, beside the memory of its GPU"
    if found.has_net:
        return f"up to {size(found.memory_bytes)} for {each}, the net included"
    return f"{size(found.memory_bytes)} for {each} and what the net takes, which `volpipe plan` measures"


def placement(forecast: Forecast) -> str:
    """Return which of the run's data are kept on nodes, and why."""
    from volpipe.volumes.node_cache import obstacle

    place, why_not = forecast.node_directory, obstacle(forecast.volume)
    if why_not:
        return f"input is read where it lies, not by way of {place} of each node: {why_not}"
    return (
        f"input by way of {place} of each node: a chunk is fetched once there, instead of "
        f"{_times(forecast.estimate.amplification)} by all workers; sums stay with the run, for other nodes add them"
    )


def estimate_table(found: Estimate) -> Table:
    """Return what each stage will take; bytes are upper bounds until blocks were tried."""
    table = Table(box=None, pad_edge=False)
    names = ["stage", "units", *(["tasks"] if found.rates else []), "read", "written", "files"]
    for name in (*names, *(["time of a worker"] if found.rates else [])):
        table.add_column(name, justify="left" if name == "stage" else "right")
    reading = ("measure", "histogram", "factor" if "factor" in found.by_name() else "infer")
    for stage in found.stages:
        table.add_row(
            stage.name,
            f"{stage.units:,}",
            *([f"{stage.num_tasks:,}"] if found.rates else []),
            size(stage.read_bytes) if stage.name in reading else _bound(found, stage.read_bytes),
            _bound(found, stage.written_bytes),
            f"{stage.files:,}",
            *([duration(stage.seconds)] if found.rates else []),
        )
    table.caption = f"the net's windows read a chunk of the volume {_times(found.amplification)} on average"
    table.caption_justify = "left"
    return table


def _times(number: float) -> str:
    return "once" if number == 1 else f"{number:.2f} times"


def _bound(found: Estimate, num_bytes: float) -> str:
    return size(num_bytes) if found.is_measured else f"≤ {size(num_bytes)}"


def alternatives_table(rows: Sequence[Alternative]) -> Table:
    """Return the plan beside those that were turned down."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "windows", "block", "read", "written", "scratch", "files", "memory", "time", "why"):
        table.add_column(name, justify="left" if name in ("", "windows", "why") else "right", overflow="fold")
    for row in rows:
        found = row.estimate
        table.add_row(
            "✓" if row.is_chosen else "",
            row.plan.mode,
            shape(row.plan.block),
            size(found.read_bytes),
            size(found.written_bytes),
            size(found.scratch_bytes),
            f"{found.output_files + found.scratch_files:,}",
            size(found.memory_bytes),
            duration(found.seconds) if found.seconds is not None else "",
            row.why,
        )
    return table


def progress_line(progress: Progress, rate: Rate) -> str:
    """Return how far a run is as one plain line."""
    parts = [
        f"{stage.name} {stage.num_done}/{stage.num_units}" + (f" ({len(stage.failed)} failed)" if stage.failed else "")
        for stage in progress.stages
        if stage.num_done or progress.running[stage.name] or stage.failed
    ]
    running = count(sum(progress.running.values()), "task")
    part = "" if progress.part is None or not progress.parts else f", {progress.part:.0%} of the windows"
    done = f"{', '.join(parts) or 'starting'}{part}"
    return f"{duration(progress.seconds)}: {done}; {running} in flight{_speed(progress, rate)}"


@dataclass
class Rate:
    """How fast the net goes in this session.

    Attributes:
        voxels_per_block: output voxels of the average block, to speak of voxels per second; 0 where unknown.
    """

    voxels_per_block: float = 0.0
    _first: dict[str, int] = field(default_factory=dict)

    def look(self, progress: Progress) -> None:
        """Take note of where the stages were at first."""
        for stage in progress.stages:
            self._first.setdefault(stage.name, stage.num_done)

    def voxels_per_second(self, progress: Progress) -> float:
        """Return the output voxels that went through the net, per second since the first task began."""
        blocks = sum(
            s.num_done - self._first.get(s.name, 0) + progress.parts.get(s.name, 0.0)
            for s in progress.stages
            if s.name == "infer"
        )
        return blocks * self.voxels_per_block / _working(progress) if progress.first_task else 0.0


def bar_counts(progress: Progress) -> Iterator[tuple[str, float, float, str]]:
    """Yield of each stage its name, how much is done and how much there is, and of what; the net's in windows."""
    for stage in progress.stages:
        done, whole = stage.num_done + progress.parts.get(stage.name, 0.0), float(stage.num_units)
        if stage.name == "infer" and progress.num_windows and whole:
            scale = progress.num_windows / whole
            yield stage.name, done * scale, whole * scale, "window"
        else:
            yield stage.name, done, whole, UNITS.get(stage.name, "shard")


def report_table(report: Report, started: float) -> Table:
    """Return what each stage took. `started` is when the command was given, in seconds since 1970."""
    table = _totals_table(report.totals, planned=report.estimate)
    table.caption = (
        f"{duration(time.time() - started)} in all{_first_task(report, started)}; "
        f"peak memory: driver {size(report.driver_peak_bytes)}, "
        f"workers {size(max((t.peak_bytes for t in report.totals.values()), default=0))}"
    )
    if report.estimate is not None:
        table.caption += f"\n{_planned_line(report, report.estimate)}"
    table.caption_justify = "left"
    return table


def _first_task(report: Report, started: float) -> str:
    """Return how long it took until the first task began, and how much of that was waiting for workers."""
    if not report.first_task:
        return ""
    waited = max(0.0, report.first_task - report.asked)
    return f", first task after {duration(report.first_task - started)} ({duration(waited)} of it waiting for workers)"


def _planned_line(report: Report, planned: Estimate) -> str:
    """Return what was planned for the whole, beside what it took."""
    at_most = "" if planned.rates else "at most "
    took = (
        f"; time {duration(planned.seconds)}, took {duration(time.time() - report.first_task)}"
        if planned.seconds
        else ""
    )
    memory = f"memory {size(planned.memory_bytes)}{'' if planned.has_net else ' and the net'}"
    scratch = f"scratch {at_most}{size(planned.scratch_bytes)}, was {size(report.most_scratch_bytes)}; "
    nothing = not planned.scratch_bytes and not report.most_scratch_bytes
    return f"planned: {'' if nothing else scratch}{memory}{took}"


def seam_line(scores: Sequence[Score]) -> str:
    """Return the seam scores of an output as one line."""
    said = ", ".join(f"{score.axis} {score.value:.2f}" for score in scores)
    return f"seams: voxels differ across the faces of windows {said} times as much as inside (1 is no seam)"


def seam_warning(scores: Sequence[Score]) -> str:
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
    from volpipe.blockwise.journal import Totals

    table = Table(box=None, pad_edge=False)
    for name in ("stage", "done", "in flight", "tasks", "wall", "read", "written", "peak memory"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for name in dict.fromkeys((*stages, *totals)):
        stage, took = stages.get(name), totals.get(name, Totals())
        table.add_row(
            name,
            f"{stage.done:,} / {stage.all:,}" if stage is not None else f"{took.units:,}",
            f"{stage.in_flight:,}" if stage is not None and stage.in_flight else "",
            *([f"{took.tasks:,}", duration(took.seconds)] if took.tasks else ["", ""]),
            *([size(n) for n in (took.read_bytes, took.written_bytes, took.peak_bytes)] if took.tasks else [""] * 3),
        )
    table.caption = state
    table.caption_justify = "left"
    return table


def driver_line(output: str, driver: Driver, is_complete: bool, num_missing: int = 0) -> str:
    """Return how far the work on `output` is, whether somebody works on it, and how it goes on."""
    note = driver.note
    how_far = "" if note is None or note.part is None else f", {note.part:.0%} done"
    left = "" if note is None or note.seconds_left is None else f", about {duration(note.seconds_left)} left"
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


def _command(note: Note | None) -> str:
    """Return how the work goes on."""
    if note is None or not note.command:
        return "The same command again goes on with it."
    place = "" if note.folder == str(Path.cwd()) else f"cd {shlex.quote(note.folder)} && "
    return f"This command goes on with it: {place}{note.command}"


def missing_table(missing: Sequence[Missing], most: int | None = MOST_ROWS) -> Table:
    """Return which boxes of the output are missing, and why."""
    table = Table(box=None, pad_edge=False, title="missing", title_justify="left")
    for name in ("stage", "unit", "box z,y,x", "reason"):
        table.add_column(name, overflow="fold")
    for part in missing[:most]:
        table.add_row(part.stage, str(part.unit), str(part.box), part.reason)
    if most is not None and len(missing) > most:
        table.add_row("…", f"{len(missing) - most} more", "", "`volpipe status --all` lists them")
    return table


def checkup_table(checked: Checked) -> Table:
    """Return what the driver and one worker of each executor found; ≠ marks versions that differ from the driver's."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "here", *(answer.label for answer in checked.answers)):
        table.add_column(name, overflow="fold")
    columns = [dict(_checkup_cells(checked.here, checked))]
    for answer in checked.answers:
        cells = dict(_checkup_cells(answer.facts, checked)) if answer.facts is not None else {"host": "no answer"}
        if answer.facts is not None:
            cells["time to start"] = duration(answer.start_seconds)
        columns.append(cells)
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    table.caption = f"output: {checked.folder}" + (f"\nvolume: {checked.volume}" if checked.volume else "")
    table.caption_justify = "left"
    return table


def _checkup_cells(facts: Facts, checked: Checked) -> Iterator[tuple[str, str]]:
    """Yield name and content of each cell of a column."""
    from volpipe.sites.findings import PACKAGES, differs

    yield "host", facts["host"]
    other = facts["python"].split(".")[:2] != checked.here["python"].split(".")[:2]
    yield "Python", f"{'≠ ' if other else ''}{facts['python']}"
    for name in PACKAGES:
        known = facts["versions"].get(name, "cannot be imported")
        yield name, f"{'≠ ' if differs(name, checked.here, facts) else ''}{known}"
    yield "GPUs", ", ".join(facts["gpus"]) or f"none: {facts['gpu_error']}"
    yield "/dev/shm", "not there" if facts["shm_bytes"] is None else size(facts["shm_bytes"])
    yield "output", "cannot be written" if facts["folder_error"] else "can be written"
    yield "  free", "unknown" if facts["free_bytes"] is None else size(facts["free_bytes"])
    yield "  files", "not counted" if facts["free_files"] is None else f"{facts['free_files']:,}"
    if checked.volume:
        yield "volume", _volume_cell(facts, checked)


def _volume_cell(facts: Facts, checked: Checked) -> str:
    if facts["volume_error"]:
        return "cannot be read"
    if not facts["voxels"]:
        return "not tried"
    if facts is checked.here:
        return "can be read"
    return "the same voxels" if facts["voxels"] == checked.here["voxels"] else "other voxels"


def info_lines(volume: Volume) -> Iterator[str]:
    """Yield what a volume is, one fact a line."""
    yield f"{volume.path} {volume.key}".strip()
    yield f"format      {volume.format}"
    raw = size(math.prod(volume.shape) * volume.dtype.itemsize)
    yield f"shape       {shape(volume.shape)} ({', '.join(volume.axes)}), {volume.dtype.name}, {raw} uncompressed"
    if volume.num_stored_channels > 1:
        yield f"channels    {volume.channels}"
    if volume.voxel_size_nm is None:
        yield "voxel size  unknown; give --set input.voxel_size_nm=[z,y,x] to run and plan, --voxel-size to convert"
    else:
        yield f"voxel size  {_voxel(volume.voxel_size_nm)}, origin {' × '.join(f'{v:g}' for v in volume.origin_nm)} nm"
    yield f"chunks      {shape(volume.chunks)}" + (f" in shards {shape(volume.shards)}" if volume.shards else "")
    yield f"codec       {volume.codec}"
    if volume.levels:
        yield f"levels      {', '.join(volume.levels)}"
    for note in volume.notes:
        yield f"note        {note}"


def arrays_table(rows: Sequence[tuple[str, Volume | str]]) -> Table:
    """Return the volumes of a container: each as it is named on a command line, or why it cannot be read."""
    table = Table(box=None, pad_edge=False)
    for name in ("volume", "shape", "axes", "type", "voxel size", "levels"):
        table.add_column(name, overflow="fold")
    for name, volume in rows:
        if isinstance(volume, str):
            table.add_row(escape(name), escape(volume))
        else:
            levels = str(len(volume.levels)) if volume.levels else ""
            size = _voxel(volume.voxel_size_nm).removeprefix("voxel size ")
            table.add_row(escape(name), shape(volume.shape), ", ".join(volume.axes), volume.dtype.name, size, levels)
    return table


def footprint_lines(volume: Volume, found: Footprint) -> Iterator[str]:
    """Yield what lies on disk of a volume."""
    share = found.num_bytes / (math.prod(volume.shape) * volume.dtype.itemsize)
    guess = "" if found.is_counted else f" (from {count(found.num_seen, 'place')} where a file may be)"
    yield (
        f"on disk     {_about(found.is_counted)}{size(found.num_bytes)} in {count(found.num_files, 'file')}, "
        f"{share:.3f} of uncompressed{guess}"
    )
    if found.num_stored is not None:
        num_empty = found.num_chunks - found.num_stored
        about = _about(found.is_stored_counted)
        yield f"empty       {about}{num_empty:,} of {found.num_chunks:,} chunks ({num_empty / found.num_chunks:.1%})"


def intensity_line(found: Intensities) -> str:
    """Return percentiles of a volume, and what they were taken from."""
    names = {0.0: "min", 50.0: "median", 100.0: "max"}
    values = ", ".join(f"{names.get(percent, f'{percent:g} %')} {value:g}" for percent, value in found.percentiles)
    values = values or "no number that is finite"
    if found.num_nonfinite:
        values += f"; {count(found.num_nonfinite, 'voxel')} NaN or infinite"
    if found.num_cells == found.num_all:
        return f"intensity   {values} (all voxels)"
    return f"intensity   {values} ({found.num_cells:,} of {found.num_all:,} chunks, taken at random)"


def codec_table(volume: Volume, found: Trials, stored_share: float) -> Table:
    """Return what codecs and chunks gave, and what the volume would take, empty chunks left out of its bytes."""
    table = Table(box=None, pad_edge=False)
    for name in ("codec", "chunk", "ratio", "bytes", "encode", "decode", "files", "files in 512³ shards"):
        table.add_column(name, justify="left" if name == "codec" else "right")
    raw = math.prod(volume.shape) * volume.dtype.itemsize * stored_share
    for trial in found.trials:
        speeds = (f"{speed / 1e6:,.0f} MB/s" for speed in (trial.encode_speed, trial.decode_speed))
        files = (f"{trial.num_files:,}", f"{trial.num_shards:,}")
        table.add_row(trial.codec, f"{trial.edge}³", f"{trial.ratio:.3f}", size(raw * trial.ratio), *speeds, *files)
    table.caption = (
        f"measured on {found.num_boxes} of the volume's boxes of {shape(found.box)} voxels, on one core; "
        "bytes and files are those of the whole volume"
    )
    table.caption_justify = "left"
    return table


def _about(is_exact: bool) -> str:
    return "" if is_exact else "about "


def _totals_table(totals: dict[str, Totals], planned: Estimate | None = None) -> Table:
    """Return what stages took; where something was planned, that stands behind it in brackets."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "units", "tasks", "wall", "cpu", "read", "written", "peak memory"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    due = planned.by_name() if planned is not None and planned.rates is not None else {}
    for name, t in totals.items():
        table.add_row(
            name,
            f"{t.units:,}",
            f"{t.tasks:,}",
            duration(t.seconds) + (f" ({duration(due[name].seconds)})" if name in due else ""),
            duration(t.cpu_seconds),
            size(t.read_bytes) + (f" ({size(due[name].read_bytes)})" if name in due else ""),
            size(t.written_bytes) + (f" ({size(due[name].written_bytes)})" if name in due else ""),
            size(t.peak_bytes),
        )
    return table


def _pairs() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    return table


def _part(num: int, whole: int) -> str:
    return f"{num:,}" if num == whole else f"{num:,} (of {whole:,})"


def _voxel(voxel_size_nm: tuple[float, float, float] | None) -> str:
    if voxel_size_nm is None:
        return "voxel size unknown"
    return " × ".join(f"{v:g}" for v in voxel_size_nm) + " nm"


def _working(progress: Progress) -> float:
    """Return the seconds since the first task began."""
    return max(1e-6, time.time() - progress.first_task)


def _speed(progress: Progress, rate: Rate) -> str:
    speed, left = rate.voxels_per_second(progress), progress.seconds_left
    return (f", {voxel_rate(speed)}" if speed > 0 else "") + (f", {duration(left)} left" if left is not None else "")


def voxel_rate(speed: float) -> str:
    """Return voxels per second for people: 0.57 Mvoxel/s."""
    unit, name = (1e6, "Mvoxel/s") if speed >= 1e5 else (1e3, "kvoxel/s")
    return f"{speed / unit:.2f} {name}"
