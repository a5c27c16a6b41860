"""`volpipe run`, `plan` and `status` of a recipe of several stages: what is printed of all of them.

Not here: the stages (stages, workflow.execute), or what is printed of one run (app).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import volpipe
from volpipe.display.console import columns, err, out, tell_report
from volpipe.display.plans import estimate_table, forecast_summary, plan_summary, plan_table, time_table
from volpipe.display.reports import print_ending, print_missing
from volpipe.units import bounded, count, duration, size

if TYPE_CHECKING:
    from rich.table import Table

    from volpipe.blockwise.phase import Show
    from volpipe.blockwise.pool import WorkerPool
    from volpipe.estimation.forecast import Forecast
    from volpipe.inference.plan import Plan
    from volpipe.runs.run_folder import RunFolder
    from volpipe.stages.kind import StageCost, StagePlan
    from volpipe.stages.needs import ResourceNeeds
    from volpipe.workflow.cost import FlowCost
    from volpipe.workflow.driver import Listener, Report
    from volpipe.workflow.execute import FlowReport, StageReport
    from volpipe.workflow.plan import FlowPlan


def run(
    plan: FlowPlan,
    how: Mapping[str, Any],  # Any: arguments of `volpipe.run`
    *,
    listening: Callable[[StagePlan], Listener],
    tell: Callable[[Report, float], None],
    show: Callable[..., Show],
) -> bool:
    """Run the stages and print how each and all ended; return whether all are complete."""
    from volpipe.runs.stage_work import Listener
    from volpipe.workflow.cost import forecast_flow
    from volpipe.workflow.execute import FlowListener

    cost = forecast_flow(plan)
    if not how["fresh"]:
        cost.check()

    def on_workers(workers: WorkerPool) -> None:
        nonlocal cost
        cost = forecast_flow(plan, workers)
        cost.check()
        cost.warn_of_room()

    headings = _Headings(plan)

    def on_stage(stage: StagePlan) -> None:
        headings.print_for(stage)
        if stage.summary:
            out.print(stage.summary)

    def on_end(report: StageReport) -> None:
        headings.print_for(report.stage)
        _tell_stage(report, cost.of(report.stage), tell)

    def of_stage(stage: StagePlan) -> Listener:
        return _below_heading(stage, headings, listening) if stage.forecasts else Listener(on_progress=show(stage.name))

    listener = FlowListener(on_stage=on_stage, on_end=on_end, on_workers=on_workers, of_stage=of_stage)
    report = cast("FlowReport", volpipe.run(**how, listener=listener))
    if report.was_complete:
        news = ", and nothing has changed" if how["update"] else " already; nothing to do (--fresh starts over)"
        out.print(f"{plan.out} is complete{news}")
        return True
    out.print("\nall stages")
    out.print(report_table(report, cost))
    tell_report(plan.folder.path)
    if not report.is_complete:
        begun = {each.stage.name for each in report.stages}
        partial = ", ".join(each.stage.name for each in report.stages if not each.report.is_complete)
        held = ", ".join(stage.name for stage in plan.stages if stage.name not in begun)
        err.print(f"not complete: {partial}" + (f"; not begun: {held}" if held else ""))
        return False
    out.print(f"wrote {plan.result.out}")
    return True


@dataclass
class _Headings:
    """The headings of the stages of `plan`, which run side by side; `last` is the stage whose was printed last."""

    plan: FlowPlan
    last: str = ""

    def print_for(self, stage: StagePlan) -> None:
        """Print the heading of `stage`, unless what was printed last stands below it."""
        if self.last != stage.name:
            out.print(_heading(self.plan, stage))
            self.last = stage.name


def _below_heading(stage: StagePlan, headings: _Headings, listening: Callable[[StagePlan], Listener]) -> Listener:
    """Return the listener of a run's own work, which prints below the heading of its stage."""
    own = listening(stage)

    def on_plan(plan: Plan, folder: RunFolder) -> None:
        headings.print_for(stage)
        own.on_plan(plan, folder)

    def on_estimate(found: Forecast) -> None:
        headings.print_for(stage)
        if own.on_estimate is not None:
            own.on_estimate(found)

    return replace(own, on_plan=on_plan, on_estimate=own.on_estimate and on_estimate)


def _heading(plan: FlowPlan, stage: StagePlan) -> str:
    number = 1 + [each.name for each in plan.stages].index(stage.name)
    return f"\nstage {number} of {len(plan.stages)}: {stage.name}, {stage.kind} of {stage.read_from}"


def _tell_stage(ended: StageReport, cost: StageCost, tell: Callable[[Report, float], None]) -> None:
    report = ended.report
    if report.was_complete:
        out.print(f"{ended.stage.out} is complete already")
    elif ended.stage.forecasts:
        tell(cast("Report", report), time.time() - ended.seconds)
    elif report.missing:
        print_missing(report)
    else:
        print_ending(report, cost.times if ended.is_new else None)


def report_table(report: FlowReport, cost: FlowCost) -> Table:
    """Return how each stage ended and what all took, with what was planned behind it in brackets."""
    from volpipe.reporting.page import Sheet, filled
    from volpipe.reporting.tasks import COLUMNS
    from volpipe.workflow.stage_table import num_files

    used = ("tasks", "CPU", "peak memory", "GPU", "GPU memory")
    rows = []
    for each in report.stages:
        files, missing = num_files(str(each.stage.out)), len(each.report.missing)
        was_complete = each.report.was_complete
        took = [""] * len(used) if was_complete else [COLUMNS[name](each.totals) for name in used]
        rows.append((
            each.stage.name, each.stage.kind,
            "complete before" if was_complete else _took(each, cost.of(each.stage)),
            *_beside(each, cost.of(each.stage).need), *took,
            "" if files is None else f"{files:,}", missing or "", each.stage.read_from,
        ))  # fmt: skip
    names = ("stage", "kind", "elapsed", "read", "written", *used, "files", "missing", "input")
    sheet = filled(Sheet("", names, rows))
    table = columns(*sheet.names, left=("stage", "kind", "input"))
    for row in sheet.rows:
        table.add_row(*map(str, row))
    totals = [each.totals for each in report.stages]
    read, written = sum(took.read_bytes for took in totals), sum(took.written_bytes for took in totals)
    table.caption = (
        f"all stages: {duration(report.seconds)}, read {size(read)}, wrote {size(written)}; "
        f"outputs in {report.plan.out}"
    )
    return table


def _took(ended: StageReport, cost: StageCost) -> str:
    """Return how long a stage took, with what was planned where blocks were tried and all of it was done now."""
    taken, planned, estimate = duration(ended.seconds), _time(cost), ended.report.estimate
    if estimate is not None:
        planned = duration(estimate.seconds)  # by then its input was there
    return f"{taken} ({planned})" if ended.is_new and planned else taken


def _beside(ended: StageReport, planned: ResourceNeeds | None) -> tuple[str, str]:
    """Return what was read and what was written, each with what was planned; nothing where nothing was done."""
    if ended.report.was_complete:
        return "", ""
    if planned is None:
        return size(ended.totals.read_bytes), size(ended.totals.written_bytes)
    estimate = ended.report.estimate
    if estimate is not None:
        planned = planned.from_estimate(estimate)  # by then its input was there
    return (
        f"{size(ended.totals.read_bytes)} ({bounded(planned.read_bytes, planned.is_measured)})",
        f"{size(ended.totals.written_bytes)} ({bounded(planned.written_bytes, planned.is_measured)})",
    )


def show_plan(plan: FlowPlan, site: str | None, config: str) -> None:
    """Print what each stage would read, write and take, and all of them; what cannot work is then refused.

    Without a `site` no block is tried.
    """
    cost = cast("FlowCost", volpipe.estimate(plan, site=site))
    for each in cost.stages:
        out.print(_heading(plan, each.stage))
        if each.forecast is not None:
            out.print(plan_summary(each.forecast.plan))
            out.print(forecast_summary(each.forecast, config))
            out.print()
            out.print(plan_table(each.forecast.plan))
            out.print(estimate_table(each.forecast.estimate))
        else:
            if each.stage.summary:
                out.print(each.stage.summary)
            if each.times is not None and each.stage.makes_volume:
                out.print(time_table(each.times, config))
            out.print(f"writes {each.stage.out}")
    out.print()
    out.print(cost_table(cost))
    cost.check()
    cost.warn_of_room()


def cost_table(cost: FlowCost) -> Table:
    """Return what each stage takes, and all of them together."""
    names = ("stage", "kind", "read", "written", "output", "files", "scratch", "memory", "time")
    table = columns(*names, left=("stage", "kind"))
    for each in cost.stages:
        need = each.need
        cells = [""] * 5 if need is None else [*_amounts(need), bounded(need.scratch_bytes, need.is_measured)]
        memory = "" if each.memory_bytes is None else size(each.memory_bytes)
        if each.times is not None and each.times.gpu_bytes:
            memory += f", GPU {size(each.times.gpu_bytes)}"
        table.add_row(each.stage.name, each.stage.kind, *cells, memory, _time(each))
    table.add_row("all", "", *_amounts(cost.total), "", "", _time(cost))
    table.caption = _room(cost)
    if cost.is_guess:
        trains = any(each.is_guess and each.stage.makes_weights for each in cost.stages)
        basis = "by the first steps of a training, or by" if trains else "by"
        table.caption += f"\n≈ {basis} synthetic voxels, for the input does not exist yet"
    return table


def _amounts(needs: ResourceNeeds) -> list[str]:
    """Return the bytes that are read, written and put out, and the files of the output."""
    sums = (needs.read_bytes, needs.written_bytes, needs.output_bytes)
    return [*(bounded(num_bytes, needs.is_measured) for num_bytes in sums), f"{needs.output_files:,}"]


def _room(cost: FlowCost) -> str:
    """Return what the place of the outputs has to hold, and the disk of the scratch where that is another."""
    plan, total = cost.plan, cost.total
    is_measured = total.is_measured
    if isinstance(plan.out, Path):
        return (
            f"on the disk of {plan.out} at the highest {bounded(total.most_bytes, is_measured)} in "
            f"{total.most_inodes:,} files and folders: outputs stay, scratch goes with its stage"
        )
    outputs = f"{bounded(total.output_bytes, is_measured)} in {count(total.output_files, 'file')}"
    return (
        f"in {plan.out} {outputs}, which stay; on the "
        f"disk of {plan.folder.path} at the highest {bounded(total.scratch_bytes, is_measured)} of scratch, which goes "
        "with its stage"
    )


def _time(cost: StageCost | FlowCost) -> str:
    """Return how long it takes; ≈ where voxels were made up for that, nothing where no block was tried."""
    if cost.seconds is None:
        return ""
    return f"{'≈ ' if cost.is_guess else ''}{duration(cost.seconds)}"
