"""What a plan says, and what it is going to take, as tables and lines.

Not here: printing. Every function returns something that Rich can print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns
from volpipe.units import bounded, count, duration, in_nm, listed, shape, size

if TYPE_CHECKING:  # the command line answers to Tab, which nobody waits a second for
    from volpipe.estimation.estimate import Estimate, Slots, StageTimes
    from volpipe.estimation.forecast import Alternative, Forecast
    from volpipe.inference.intensity import Affine
    from volpipe.inference.plan import Plan
    from volpipe.recipes.inference import Normalise

LABEL_WIDTH = 8  # of the first column of a plan, whose parts are printed one after the other


MOST_NETS = 8  # of an ensemble, that are named


def plan_summary(plan: Plan) -> Table:
    """Return a table of the input, the net and the output of `plan`."""
    from volpipe.geometry.grid import Box

    table, source = _pairs(), plan.source
    table.add_row("input", f"{source.path} {source.key}".strip())
    table.add_row("", f"{shape(source.shape)} voxels, {source.given[0][1]}, {in_nm(source.voxel_size_nm)}")
    for number, each in enumerate(plan.source.also, 2):
        table.add_row(f"input {number}", f"{each.path} {each.key}".strip())
        table.add_row("", f"{count(each.num_channels, 'channel')}, {each.dtype}, {in_nm(each.voxel_size_nm)}")
    if plan.notes.volume:
        table.add_row("", "; ".join(plan.notes.volume))
    roi, whole = (plan.roi_box, source.shape) if plan.grid is None else (Box(*plan.grid.roi), plan.grid.shape)
    if roi != Box.from_shape(whole):
        table.add_row("roi", f"{roi} (z, y, x)")
    if plan.mask is not None:
        table.add_row("mask", f"{plan.mask.path} {plan.mask.key}".strip() + f", {shape(plan.mask.shape)} voxels")
        if plan.mask.note:
            table.add_row("", plan.mask.note)
    table.add_row("net", f"{plan.net.label}, {count(plan.net.num_parameters, 'parameter')}")
    if plan.net.members:
        names = [" ".join(filter(None, (each.name, each.weights))) for each in plan.recipe.net.members]
        table.add_row("", f"{plan.net.combine} of {len(names)} nets: {listed(names, MOST_NETS)}")
    if plan.notes.net:
        table.add_row("", plan.notes.net)
    if plan.net.normalise is not None and plan.net.normalise.method != "none":
        table.add_row("", f"asks for {plan.net.normalise.method}: statistics of the whole volume, not of each window")
    if plan.notes.windows:
        table.add_row("windows", f"{shape(plan.window)} voxels: {plan.notes.windows}")
    if plan.notes.precision:
        table.add_row("infer", plan.notes.precision)
    table.add_row("grey", grey_line(plan))
    table.add_row("output", f"{plan.out}")
    for array in plan.arrays:
        channels = f"{count(array.num_channels, 'channel')} of " if array.num_channels > 1 else ""
        voxel, name = array.multiscale.voxel_size_nm, array.folder and f"{array.folder}: "
        table.add_row(
            "",
            f"{name}{channels}{shape(array.shown_shape)} voxels, {array.out_dtype}, {in_nm(voxel)}, {plan.format}, "
            f"{count(len(array.multiscale.levels), 'level')}",
        )
    return table


def grey_line(plan: Plan) -> str:
    """Return which grey levels the net sees as which numbers, and which it was trained with, where that is known."""
    trained, choice = plan.recipe.net.trained_range, plan.recipe.normalise
    (num, dtype), *others = plan.source.given
    said = _mapped_words(choice, dtype, num)
    for number, (also, (num, dtype)) in enumerate(zip(plan.recipe.input.also or (), others, strict=True), 2):
        said += f"; input {number}: {_mapped_words(also.normalise or choice, dtype, num)}"
    if trained:
        return f"{said}; the net was trained with {trained[0]:g} … {trained[1]:g}"
    is_given = choice.method != "auto" or choice.low is not None or choice.mean is not None
    if is_given or not plan.net.num_parameters:
        return said
    return f"{said}, by default; set normalise if the net was trained otherwise"


def _mapped_words(choice: Normalise, type_name: str, num_channels: int) -> str:
    """Return which grey levels of a volume the net sees as which numbers."""
    import numpy as np

    from volpipe.inference.statistics import resolve_method

    dtype = np.dtype(type_name)
    choice = resolve_method(choice, dtype)
    if choice.method == "none":
        said = f"{dtype} as they are"
    elif choice.method == "zscore":
        given = choice.mean is not None
        said = f"mean {choice.mean:g}, deviation {choice.std:g}" if given else "mean, deviation, measured"
        said += f" of {dtype} → 0, 1"
    elif choice.low is not None:
        said = f"{choice.low:g} … {choice.high:g} of {dtype}, given → -1 … 1"
    elif choice.method == "bytes":
        ends = "0 … 255" if choice.low is None else f"{choice.low:g} … {choice.high:g}"
        said = f"{ends} of {dtype}, as of 8 bits, if all voxels lie there, else percentiles → -1 … 1"
    elif choice.method == "range":
        ends = "least … greatest, measured,"
        if np.issubdtype(dtype, np.integer):
            ends = f"{np.iinfo(dtype).min} … {np.iinfo(dtype).max}"
        said = f"{ends} of {dtype} → -1 … 1"
    else:
        low, high = choice.percentiles
        said = f"percentiles {low:g} … {high:g} of {dtype}, measured → -1 … 1"
    if choice.per_channel and num_channels > 1:
        said += ", each channel for itself"
    return said


def measured_line(plan: Plan, normalise: Affine, about: str = "") -> str:
    """Return what was measured of grey levels, "" where nothing had to be."""

    from volpipe.inference.statistics import needs_measuring, resolve_method

    rule = plan.grey_rule
    if not rule.needs_measuring:
        return ""
    rows = list(zip(*normalise.rows[:2], strict=True))
    choices = [choice for choice, num in rule.choices for _ in range(num)][: len(rows)]
    maps = [
        f"mean {about}{shift:.6g}, deviation {about}{scale:.6g}"
        if resolve_method(choice, rule.dtype).method == "zscore"
        else f"{about}{shift - scale:.6g} … {shift + scale:.6g} of the volume → -1 … 1"
        for choice, (shift, scale) in zip(choices, rows, strict=True)
    ]
    if len(maps) == 1:
        return f"grey levels: {maps[0]}"
    are_measured = [needs_measuring(choice, rule.dtype) for choice in choices]
    texts = (f"channel {number} {text}" for number, text in enumerate(maps) if are_measured[number])
    return "grey levels: " + "; ".join(texts)


def plan_table(plan: Plan) -> Table:
    """Return a table of the windows, blocks and files of `plan`."""
    from volpipe.inference.selection import Selection

    lattice, table, selection = plan.lattice, _pairs(), Selection(plan)
    table.add_row(
        "windows",
        f"{_part_of_all(selection.num_windows, lattice.num_windows)} of {shape(plan.window)} voxels, overlap "
        f"{shape(plan.overlap)}, blend {plan.recipe.windows.blend}, {plan.mode}",
    )
    table.add_row("", f"halo of the net {shape(plan.net.halo)}; {_beyond_the_volume(plan)}")
    table.add_row("blocks", f"{_part_of_all(plan.num_active, len(plan.blocks))} of {shape(plan.block)} windows")
    table.add_row("files", f"shards of {shape(plan.shard)} voxels in chunks of {shape(plan.chunk)}")
    return table


def _beyond_the_volume(plan: Plan) -> str:
    """Return a sentence on what windows see beyond the faces of the volume."""
    is_mirrored = plan.lattice.placement == "lattice"
    if any(w > n for w, n in zip(plan.window, plan.source.shape, strict=True)):
        how = "mirrored at its faces" if is_mirrored else "padded with zeros on both sides"
        return f"windows are larger than the volume, which is {how} to fill them"
    if is_mirrored:
        return "beyond its faces the volume is mirrored"
    return "windows begin and end with the volume, and see nothing beyond its faces"


def forecast_summary(forecast: Forecast, site: str) -> Table:
    """Return how long it takes, and how much memory and disk: what a person asks first."""
    found, table = forecast.estimate, _pairs()
    if grey := measured_line(forecast.plan, forecast.sample.normalise, "about "):
        table.add_row("", f"{grey} (by a sample)")
    table.add_row("time", _time_line(forecast, site))
    slots = forecast.slots
    if slots.on_gpu and not slots.shared:
        table.add_row("", f"{count(slots.gpu, 'worker')} for nets, a GPU each; {slots.cpu} without one for the rest")
    threads, used = forecast.worker_threads or 1, forecast.plan.recipe.infer.threads
    if threads > used:
        table.add_row(
            "",
            f"a worker has {count(threads, 'core')}, the net computes on {used}: infer.threads={threads} would use "
            "them, and change last bits",
        )
    table.add_row("memory", _memory_line(found, forecast.slots, forecast.num_workers))
    output, scratch = (bounded(num, found.is_measured) for num in (found.output_bytes, found.scratch_bytes))
    table.add_row("disk", f"output {output} in {count(found.output_files, 'file')}")
    if found.scratch_files or found.scratch_bytes:
        inodes = f"{count(found.scratch_files, 'file')} and {count(found.scratch_folders, 'folder')}"
        table.add_row("", f"scratch {scratch} in {inodes} at its highest; deleted at the end")
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
    elif slots.in_process:
        each = f"the process of all {count(slots.gpu, 'worker')}"
    if slots.on_gpu:
        return f"up to {size(found.memory_bytes)} for {each}, beside the memory of its GPU"
    if found.has_net:
        return f"up to {size(found.memory_bytes)} for {each}, the net included"
    return f"at least {size(found.memory_bytes)} for {each}; `volpipe plan` measures what the net takes beside that"


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
    names = ["stage", "units", *(["tasks"] if found.rates else []), "read", "written", "files"]
    table = columns(*names, *(["time"] if found.rates else []))
    reader, once = "factor" if "factor" in found.by_name() else "infer", found.amplification == 1
    is_known = {"measure": True, "histogram": True, reader: once}  # what a stage reads
    for stage in found.stages:
        table.add_row(
            stage.name,
            f"{stage.units:,}",
            *([f"{stage.num_tasks:,}"] if found.rates else []),
            bounded(stage.read_bytes, is_known.get(stage.name, found.is_measured)),
            bounded(stage.written_bytes, found.is_measured),
            f"{stage.files:,}",
            *([duration(found.stage_seconds[stage.name])] if found.rates else []),
        )
    table.caption = f"the net's windows read a chunk of the volume {_times(found.amplification)} on average"
    if found.rates:
        table.caption += "; stages share the workers, and work side by side where they can"
    return table


def _times(number: float) -> str:
    return "once" if number == 1 else f"up to {number:.2f} times"


def alternatives_table(rows: Sequence[Alternative]) -> Table:
    """Return the plan beside those that were turned down."""
    names = ("", "windows", "block", "read", "written", "scratch", "files", "memory", "time", "why")
    table = columns(*names, left=("", "windows", "why"), fold=True)
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


def _pairs() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=LABEL_WIDTH)
    table.add_column(overflow="fold")
    return table


def _part_of_all(num: int, whole: int) -> str:
    return f"{num:,}" if num == whole else f"{num:,} (of {whole:,})"


def time_table(times: StageTimes, site: str) -> Table:
    """Return a table of the time of each stage and of all stages on `site`."""
    guess = "≈ " if times.is_guess else ""
    table = columns("stage", "tasks", "time")
    for stage in times.stages:
        table.add_row(stage.name, f"{stage.num_tasks:,}", f"{guess}{duration(times.elapsed(stage))}")
    basis = "synthetic voxels tried there, for its input does not exist yet" if times.is_guess else "voxels tried there"
    table.caption = f"{guess}{duration(times.seconds)} on {site}, by {times.num_voxels:,} {basis}"
    return table
