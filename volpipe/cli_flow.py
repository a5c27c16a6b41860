"""`volpipe run`, `plan` and `status` of a recipe of several stages: what is printed of all of them.

Not here: the stages (flow, flow_plan, flow_run), or what is printed of one run (show).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe import cli_label
from volpipe.scoreboard import label_table, score_table
from volpipe.show import appraisal_table, duration, missing_table, plan_table, size, status_table
from volpipe.terminal import err, measuring_shown, out

if TYPE_CHECKING:
    from volpipe.driver import Listener, Report
    from volpipe.flow import Flow
    from volpipe.flow_cost import FlowCost, Need, StageCost
    from volpipe.flow_plan import FlowPlan, StagePlan
    from volpipe.flow_run import FlowReport, StageReport
    from volpipe.plan import Plan
    from volpipe.run import Progress

    Shown = Callable[[Plan], AbstractContextManager[Callable[[Progress], None]]]


def plan_of(flow: Flow, volume: str, out_path: str | None) -> FlowPlan:
    """Return the plan of `flow` for `volume`; without `out_path`, its folder here is named after both."""
    from volpipe.flow_plan import plan_flow
    from volpipe.formats.container import locate
    from volpipe.nets import cautions
    from volpipe.plan import Plan

    container, key = locate(volume)
    parts = [container.stem, *filter(None, key.split("/")), Path(flow.source).stem]
    with measuring_shown():
        plan = plan_flow(flow, volume, out_path or "_".join(parts), Path.cwd())
    for stage in plan.stages:
        if isinstance(stage.work, Plan):
            for caution in cautions(stage.work.recipe.net, stage.work.net):
                err.print(f"warning: stage {stage.name}: {caution}", markup=False)
    return plan


def run(
    plan: FlowPlan,
    config: str,
    *,
    fresh: bool,
    keep_tensors: bool,
    tolerated: float,
    shown: Shown,
    tell: Callable[[Report, float], None],
) -> bool:
    """Run the stages and print how each and all ended; return whether all are complete."""
    from volpipe.apps.start import on_site
    from volpipe.driver import Listener
    from volpipe.flow_cost import appraise_flow
    from volpipe.flow_run import FlowListener, FlowOptions, Site, execute_flow

    @contextmanager
    def of_run(plan: Plan) -> Iterator[Listener]:
        with shown(plan) as on_progress:
            yield Listener(
                lambda plan, folder: out.print(plan_table(plan, config)),
                lambda found: out.print(appraisal_table(found, config)),
                on_progress,
            )

    start, cost = on_site(config), appraise_flow(plan)
    if not fresh:
        cost.check()

    def on_workers(workers: Site) -> None:
        nonlocal cost
        cost = appraise_flow(plan, workers)
        cost.check()

    listener = FlowListener(
        on_stage=lambda stage: _begin(plan, stage),
        on_end=lambda report: _tell_stage(report, cost.of(report.stage), tell),
        on_workers=on_workers,
        of_run=of_run,
        of_labels=cli_label.shown,
    )
    report = execute_flow(
        plan, start, fresh=fresh, listener=listener,
        options=FlowOptions(keep_tensors=keep_tensors, site=config, tolerated=tolerated),
    )  # fmt: skip
    if report.was_complete:
        out.print(f"{plan.out} is complete already; nothing to do (--fresh starts over)")
        return True
    out.print(report_table(report, cost))
    if not report.is_complete:
        held = ", ".join(stage.name for stage in plan.stages[len(report.stages) :])
        err.print(
            f"stage {report.stages[-1].stage.name} is not complete" + (f", so {held} did not begin" if held else "")
        )
        return False
    out.print(f"wrote {plan.result.out}")
    return True


def _begin(plan: FlowPlan, stage: StagePlan) -> None:
    """Print what begins, as far as nobody else will."""
    out.print(_heading(plan, stage))
    _show_labels(stage)


def _show_labels(stage: StagePlan) -> None:
    """Print the plan of a labelling, of which there is no table."""
    from volpipe.label_plan import LabelPlan

    if isinstance(stage.work, LabelPlan):
        out.print(cli_label.planned(stage.work))


def _heading(plan: FlowPlan, stage: StagePlan) -> str:
    number = 1 + plan.stages.index(stage)
    return f"\nstage {number} of {len(plan.stages)}: {stage.name}, {stage.kind} of {stage.reads}"


def _tell_stage(report: StageReport, cost: StageCost, tell: Callable[[Report, float], None]) -> None:
    from volpipe.label_cost import LabelTimes

    if report.was_complete:
        out.print(f"{report.stage.out} is complete already")
    elif report.run is not None:
        tell(report.run, time.time() - report.seconds)
    elif report.labels is not None:
        times = cost.times if report.is_new and isinstance(cost.times, LabelTimes) else None
        out.print(cli_label.told(report.labels, times))
    elif isinstance(report.scores, dict):
        out.print(score_table(report.scores, report.stage.given))
    elif report.scores is not None:
        out.print(label_table(report.scores))


def report_table(report: FlowReport, cost: FlowCost) -> Table:
    """Return how each stage ended and what all took, with what was planned behind it in brackets."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "kind", "time", "read", "written", "missing", "output"):
        table.add_column(name, justify="right" if name in ("time", "read", "written", "missing") else "left")
    for each in report.stages:
        table.add_row(
            each.stage.name,
            each.stage.kind,
            "complete before" if each.was_complete else _took(each, cost.of(each.stage)),
            *_beside(each, cost.of(each.stage).need),
            str(len(each.run.missing)) if each.run is not None else "",
            str(each.stage.out),
        )
    read, written = (sum(getattr(each, name) for each in report.stages) for name in ("read_bytes", "written_bytes"))
    table.caption = f"all stages: {duration(report.seconds)}, read {size(read)}, wrote {size(written)}"
    table.caption_justify = "left"
    return table


def _took(report: StageReport, cost: StageCost) -> str:
    """Return how long a stage took, with what was planned where blocks were tried and all of it was done now."""
    taken, planned = duration(report.seconds), _time(cost)
    if report.run is not None and report.run.estimate is not None:
        found = report.run.estimate.seconds  # by then its input was there
        planned = "" if found is None else duration(found)
    return f"{taken} ({planned})" if report.is_new and planned else taken


def _beside(report: StageReport, planned: Need | None) -> tuple[str, str]:
    """Return what was read and what was written, each with what was planned; nothing where nothing was done."""
    if planned is None or report.was_complete:
        return "", ""
    if report.run is not None and report.run.estimate is not None:
        planned = planned.of_run(report.run.estimate)  # by then its input was there
    bound = "" if planned.is_measured else "≤ "
    return (
        f"{size(report.read_bytes)} ({bound}{size(planned.read_bytes)})",
        f"{size(report.written_bytes)} ({bound}{size(planned.written_bytes)})",
    )


def show_plan(plan: FlowPlan, config: str, *, quick: bool) -> None:
    """Print what each stage would read, write and take, and all of them; what cannot work is then refused."""
    from volpipe.flow_cost import appraise_flow, preview_flow
    from volpipe.label_cost import LabelTimes

    if quick:
        cost = appraise_flow(plan)
    else:
        from volpipe.apps.start import on_site

        cost = preview_flow(plan, on_site(config))
    for each in cost.stages:
        out.print(_heading(plan, each.stage))
        if each.found is not None:
            out.print(plan_table(each.found.plan, config))
            out.print(appraisal_table(each.found, config))
        else:
            _show_labels(each.stage)
            if isinstance(each.times, LabelTimes):
                out.print(cli_label.time_table(each.times, config))
            out.print(f"writes {each.stage.out}")
    out.print()
    out.print(cost_table(cost))
    cost.check()


def cost_table(cost: FlowCost) -> Table:
    """Return what each stage takes, and all of them together."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "kind", "read", "written", "output", "files", "scratch", "time"):
        table.add_column(name, justify="left" if name in ("stage", "kind") else "right")
    for each in cost.stages:
        found, time = each.need, _time(each)
        if found is None:
            table.add_row(each.stage.name, each.stage.kind, "", "", "", "", "", time)
            continue
        bound = "" if found.is_measured else "≤ "
        values = (found.read_bytes, found.written_bytes, found.output_bytes)
        table.add_row(
            each.stage.name,
            each.stage.kind,
            *(f"{bound}{size(value)}" for value in values),
            f"{found.output_files:,}",
            f"{bound}{size(found.scratch_bytes)}",
            time,
        )
    bound = "" if cost.is_measured else "≤ "
    sums = (cost.read_bytes, cost.written_bytes, cost.output_bytes)
    table.add_row(
        "all", "", *(f"{bound}{size(value)}" for value in sums), f"{cost.output_files:,}", "", _time(cost)
    )  # fmt: skip
    table.caption = _room(cost)
    if cost.is_guess:
        table.caption += "\n≈ by made-up voxels, for what is to be read is not there yet"
    table.caption_justify = "left"
    return table


def _room(cost: FlowCost) -> str:
    """Return what the place of the outputs has to hold, and the disk of the scratch where that is another."""
    bound, plan = "" if cost.is_measured else "≤ ", cost.plan
    if isinstance(plan.out, Path):
        return (
            f"on the disk of {plan.out} at the highest {bound}{size(cost.most_bytes)} in {cost.most_files:,} files: "
            "outputs stay, scratch goes with its stage"
        )
    return (
        f"in {plan.out} {bound}{size(cost.output_bytes)} in {cost.output_files:,} files, which stay; on the disk of "
        f"{plan.folder.path} at the highest {bound}{size(cost.scratch_bytes)} of scratch, which goes with its stage"
    )


def _time(cost: StageCost | FlowCost) -> str:
    """Return how long it takes; ≈ where voxels were made up for that, nothing where no block was tried."""
    if cost.seconds is None:
        return ""
    return f"{'≈ ' if cost.is_guess else ''}{duration(cost.seconds)}"


def show_status(output: str, most: int | None) -> bool | None:
    """Print how far each stage is whose output lies in `output`; None where it is that of one run."""
    from volpipe.flow_run import find_entries, is_done, standing_of

    entries = find_entries(output)
    if entries is None:
        return None
    for number, entry in enumerate(entries, 1):
        out.print(f"stage {number} of {len(entries)}: {entry.name}")
        standing = standing_of(entry)
        if standing is not None:
            if standing.missing:
                out.print(missing_table(standing.missing, most))
            out.print(status_table(standing))
        elif entry.kind != "label" or cli_label.show_status(entry.folder, most) is None:
            out.print(f"{entry.out}: {'' if is_done(entry) else 'not '}complete")
    return all(map(is_done, entries))
