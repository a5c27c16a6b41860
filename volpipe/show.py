"""What the command line shows, as tables and lines: plan, progress, report, status, info.

Not here: printing. Every function returns something that Rich can print.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # the command line answers to Tab, which nobody waits a second for
    from volpipe.alternatives import Alternative
    from volpipe.appraisal import Appraisal
    from volpipe.checkup import Facts
    from volpipe.driver import Missing, Report, Standing
    from volpipe.estimate import Estimate
    from volpipe.findings import Checked
    from volpipe.ops import Affine
    from volpipe.plan import Plan
    from volpipe.run import Progress, Totals
    from volpipe.seams import Score
    from volpipe.survey import Footprint, Intensities, Trials
    from volpipe.volume import Volume

MOST_ROWS = 20
WORTH_TELLING = 1e-3  # of the output, clipped: rounding takes less


def size(num_bytes: float) -> str:
    """Return bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if num_bytes < 1024 or unit == "PiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Return a time for people: 1 h 05 min, 3 min 20 s, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def shape(values: tuple[int, ...]) -> str:
    return " × ".join(map(str, values))


def plan_table(plan: Plan, site: str) -> Table:
    """Return what is about to run."""
    from volpipe.wanted import Wanted

    lattice, table, wanted = plan.lattice, _pairs(), Wanted(plan)
    source = plan.source
    table.add_row("volume", f"{source.path} {source.key}".strip())
    table.add_row("", f"{shape(source.shape)} voxels, {source.dtype}, {_voxel(source.voxel_size_nm)}")
    if plan.notes:
        table.add_row("", escape("; ".join(plan.notes)))
    if not plan.is_whole:
        table.add_row("roi", f"{plan.roi_box} (z, y, x)")
    if plan.mask is not None:
        table.add_row("mask", f"{plan.mask.path} {plan.mask.key}".strip() + f", {shape(plan.mask.shape)} voxels")
    table.add_row("net", f"{plan.net.label}, {plan.net.num_parameters:,} parameters, halo {shape(plan.net.halo)}")
    if plan.net.normalise is not None and plan.net.normalise.method != "none":
        table.add_row("", f"asks for {plan.net.normalise.method}: statistics of the whole volume, not of each window")
    table.add_row("grey", grey_line(plan))
    table.add_row(
        "windows",
        f"{_part(wanted.num_windows, lattice.num_windows)} of {shape(plan.window)}, overlap {shape(plan.overlap)}, "
        f"blend {plan.recipe.windows.blend}, {plan.mode}",
    )
    table.add_row("blocks", f"{_part(plan.num_active, len(plan.blocks))} of {shape(plan.block)} windows")
    table.add_row("output", f"{plan.out}")
    table.add_row(
        "",
        f"{shape(plan.out_shape)} voxels, {plan.out_dtype}, {plan.recipe.output.format}, "
        f"levels {len(plan.factors)}, shards {shape(plan.shard)}, chunks {shape(plan.chunk)}",
    )
    table.add_row("site", site)
    return table


def grey_line(plan: Plan) -> str:
    """Return which grey levels the net sees as which numbers, and which it was trained with, where that is known."""
    import numpy as np

    from volpipe.measure import chosen

    dtype = np.dtype(plan.source.dtype)
    choice, trained = chosen(plan.recipe.normalise, dtype), plan.recipe.net.trained_range
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

    from volpipe.measure import chosen, needs_measuring

    dtype = np.dtype(plan.source.dtype)
    if not needs_measuring(plan.recipe.normalise, dtype):
        return ""
    shift, scale = normalise.shift, normalise.scale
    if chosen(plan.recipe.normalise, dtype).method == "zscore":
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


def appraisal_table(appraisal: Appraisal, site: str) -> Table:
    """Return what each stage will take, and whether chunks of the input are kept on nodes."""
    table = estimate_table(appraisal.estimate, site)
    if grey := measured_line(appraisal.plan, appraisal.sample.normalise, "about "):
        table.caption = f"{table.caption}\n{grey} (by a sample)"
    threads, used = appraisal.worker_threads or 1, appraisal.plan.recipe.infer.threads
    if threads > used:
        table.caption = (
            f"{table.caption}\na worker has {threads} cores, the net computes on {used}: infer.threads={threads} "
            "would use them, and change last bits"
        )
    if appraisal.node_directory:
        table.caption = f"{table.caption}\n{placement(appraisal)}"
    return table


def placement(appraisal: Appraisal) -> str:
    """Return which of the run's data are kept on nodes, and why."""
    from volpipe.staging import obstacle

    place, why_not = appraisal.node_directory, obstacle(appraisal.volume)
    if why_not:
        return f"input is read where it lies, not by way of {place} of each node: {why_not}"
    return (
        f"input by way of {place} of each node: a chunk is fetched once there, instead of "
        f"{appraisal.estimate.amplification:.2f} times by all workers; sums stay with the run, for other nodes add them"
    )


def estimate_table(found: Estimate, site: str) -> Table:
    """Return what each stage will take; bytes are upper bounds until blocks were tried."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "units", "tasks", "read", "written", "files", "time of a worker"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    reading = ("measure", "histogram", "factor" if "factor" in found.by_name() else "infer")
    for stage in found.stages:
        table.add_row(
            stage.name,
            f"{stage.units:,}",
            f"{stage.num_tasks:,}" if found.rates else "",
            size(stage.read_bytes) if stage.name in reading else _bound(found, stage.read_bytes),
            _bound(found, stage.written_bytes),
            f"{stage.files:,}",
            duration(stage.seconds) if found.rates else "",
        )
    table.caption = "\n".join(_estimate_lines(found, site))
    table.caption_justify = "left"
    return table


def _estimate_lines(found: Estimate, site: str) -> Iterator[str]:
    yield (
        f"reads every chunk of the volume {found.amplification:.2f} times; output {_bound(found, found.output_bytes)} "
        f"in {found.output_files:,} files; scratch at its highest {_bound(found, found.scratch_bytes)} in "
        f"{found.scratch_files:,} files"
    )
    if found.rates is None or found.seconds is None:
        yield f"memory of a worker {size(found.memory_bytes)} and what the net takes; no block was tried, so no time"
    else:
        yield (
            f"memory of a worker {size(found.memory_bytes)}; {duration(found.seconds)} on {site}, "
            f"by {found.rates.num_blocks} blocks tried there"
        )


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


def progress_table(progress: Progress, rate: Rate) -> Table:
    """Return the live table: per stage what is done, in flight and failed; voxels per second and time left."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "done", "in flight", "failed"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in progress.stages:
        table.add_row(
            stage.name,
            f"{stage.num_done:,} / {stage.num_units:,}",
            str(progress.running[stage.name]),
            str(len(stage.failed)),
        )
    table.caption = f"{duration(progress.seconds)}{_speed(progress, rate)}"
    table.caption_justify = "left"
    return table


def progress_line(progress: Progress, rate: Rate) -> str:
    """Return the same as one plain line."""
    parts = [
        f"{stage.name} {stage.num_done}/{stage.num_units}" + (f" ({len(stage.failed)} failed)" if stage.failed else "")
        for stage in progress.stages
        if stage.num_done or progress.running[stage.name] or stage.failed
    ]
    running = sum(progress.running.values())
    return (
        f"{duration(progress.seconds)}: {', '.join(parts) or 'starting'}; "
        f"{running} tasks in flight{_speed(progress, rate)}"
    )


@dataclass
class Rate:
    """How fast stages go in this session.

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
        blocks = sum(s.num_done - self._first.get(s.name, 0) for s in progress.stages if s.name == "infer")
        return blocks * self.voxels_per_block / _working(progress) if progress.first_task else 0.0

    def seconds_left(self, progress: Progress) -> float | None:
        """Return the time that stages which have begun still take, or None before any task is back.

        What a unit took so far, for each that is left, on as many workers as were busy so far. Stages are taken
        together: one that had to wait for another says nothing by its own speed.
        """
        begun = [(stage, took) for stage in progress.stages if (took := progress.totals[stage.name]).units]
        spent = sum(took.seconds for _, took in begun)
        due = sum(stage.num_left * took.seconds / took.units for stage, took in begun)
        return due * _working(progress) / spent if spent > 0 else None


def report_table(report: Report, started: float) -> Table:
    """Return what each stage took. `started` is when the command was given, in seconds since 1970."""
    table = _totals_table(report.totals, planned=report.estimate)
    first = f", first task after {report.first_task - started:.1f} s" if report.first_task else ""
    table.caption = (
        f"{duration(time.time() - started)} in all{first}; peak memory: driver {size(report.driver_peak_bytes)}, "
        f"workers {size(max((t.peak_bytes for t in report.totals.values()), default=0))}"
    )
    if report.estimate is not None:
        table.caption += f"\n{_planned_line(report, report.estimate)}"
    table.caption_justify = "left"
    return table


def _planned_line(report: Report, planned: Estimate) -> str:
    """Return what was planned for the whole, beside what it took."""
    at_most = "" if planned.rates else "at most "
    took = (
        f"; time {duration(planned.seconds)}, took {duration(time.time() - report.first_task)}"
        if planned.seconds
        else ""
    )
    memory = f"memory {size(planned.memory_bytes)}{'' if planned.rates else ' and the net'}"
    return (
        f"planned: scratch {at_most}{size(planned.scratch_bytes)}, was {size(report.most_scratch_bytes)}; "
        f"{memory}{took}"
    )


def seam_line(scores: Sequence[Score]) -> str:
    """Return the seam scores of an output as one line."""
    said = ", ".join(f"{score.axis} {score.value:.2f}" for score in scores)
    return f"seams: differences across the faces of windows by those inside {said} (1 is none)"


def seam_warning(scores: Sequence[Score]) -> str:
    """Return what to do about scores that are above the threshold, "" where none is."""
    from volpipe.seams import THRESHOLD

    seen = [score.axis for score in scores if score.is_seam]
    if not seen:
        return ""
    return (
        f"warning: the faces of windows may be seen along {', '.join(seen)} (above {THRESHOLD:g}): check the "
        "net's halo, or blend windows with a larger windows.overlap and windows.blend=hann"
    )


def status_table(found: Standing) -> Table:
    """Return how far a run is."""
    state = "complete" if found.is_complete else "not complete; the same `volpipe run` command goes on with it"
    num_units = {stage.name: stage.num_units for stage in found.stages}
    return standing_table(found.totals, num_units, f"{found.plan.out}: {state}")


def standing_table(totals: dict[str, Totals], num_units: dict[str, int], state: str) -> Table:
    """Return how far each stage is, of how many units, and what it took; below it, how far the whole is."""
    table = _totals_table(totals, num_units)
    table.caption = state
    table.caption_justify = "left"
    return table


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
    from volpipe.findings import PACKAGES, differs

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
    guess = "" if found.is_counted else f" (from {found.num_seen:,} places where a file may be)"
    yield (
        f"on disk     {_about(found.is_counted)}{size(found.num_bytes)} in {found.num_files:,} files, "
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


def _totals_table(
    totals: dict[str, Totals], num_units: dict[str, int] | None = None, planned: Estimate | None = None
) -> Table:
    """Return what stages took; where something was planned, that stands behind it in brackets."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "units", "tasks", "wall", "cpu", "read", "written", "peak memory"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    due = planned.by_name() if planned is not None and planned.rates is not None else {}
    for name, t in totals.items():
        units = f"{t.units:,}" + (f" / {num_units[name]:,}" if num_units and name in num_units else "")
        table.add_row(
            name,
            units,
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
    table.add_column(style="bold")
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
    speed, left = rate.voxels_per_second(progress), rate.seconds_left(progress)
    unit, name = (1e6, "Mvoxel/s") if speed >= 1e5 else (1e3, "kvoxel/s")
    said = f", {speed / unit:.2f} {name}" if speed > 0 else ""
    return said + (f", {duration(left)} left" if left else "")
