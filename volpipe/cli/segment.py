"""`volpipe segment`: objects from a volume of affinities, block by block on a site's workers.

Not here: the segmentation (api.labels, segmentation). Exit codes as in app.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe
from volpipe.cli.options import (
    Incomplete,
    LabelSettings,
    Parents,
    SameInput,
    Site,
    Strict,
    Tolerate,
    Update,
    complete_recipe,
    monitored,
    of_incomplete,
)
from volpipe.display.console import (
    INCOMPLETE,
    check_folder,
    check_target,
    columns,
    complete_already,
    err,
    interruptible,
    out,
    tell_report,
)
from volpipe.display.progress import showing
from volpipe.display.reports import print_missing
from volpipe.units import count, duration, size

if TYPE_CHECKING:
    from rich.table import Table

    from volpipe.estimation.estimate import StageTimes
    from volpipe.segmentation.driver import SegmentationResult
    from volpipe.segmentation.plan import SegmentPlan

SegmentRecipeFile = Annotated[
    Path | None,
    typer.Option(
        metavar="RECIPE", help="How, as a TOML file; without one, the defaults.", autocompletion=complete_recipe
    ),
]


@monitored("segment")
def segment(
    affinities: Annotated[
        str,
        typer.Argument(
            metavar="AFFINITIES", help="Affinities, a channel per offset; or one map, of foreground or membranes."
        ),
    ],
    out_path: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="OUT",
            help="The labels, .zarr or .precomputed, also s3://; by default NAME_labels.zarr here.",
        ),
    ] = None,
    config: Site = "local",
    recipe: SegmentRecipeFile = None,
    settings: LabelSettings = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete these labels and what made them, and start over.")
    ] = False,
    tolerate: Tolerate = 0.1,
    strict: Strict = False,
    same_input: SameInput = False,
    update: Update = False,
    incomplete: Incomplete = False,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a summary here.")] = None,
    parents: Parents = False,
) -> None:  # fmt: skip
    """Make objects of AFFINITIES, the same whatever the blocks; run the same command again to continue."""
    check_target("--json", json_out, parents=parents)
    if out_path is not None:
        from volpipe.volumes.formats.container import locate

        check_folder(f"--out {out_path}", locate(out_path)[0], parents=parents)
    times: list[StageTimes] = []

    def on_estimate(forecast: StageTimes) -> None:
        times.append(forecast)
        out.print(time_table(forecast, config))

    def on_plan(plan: SegmentPlan) -> None:
        for warning in plan.warnings():
            err.print(f"warning: {warning}")
        out.print(describe_plan(plan))

    with interruptible(), showing() as show:
        result = volpipe.segment(
            affinities, recipe, out=out_path, site=config, settings=[*(settings or []), *of_incomplete(incomplete)],
            fresh=fresh, same_input=same_input, update=update, tolerate=0 if strict else tolerate,
            on_plan=on_plan, on_estimate=on_estimate, on_progress=show(),
        )  # fmt: skip
    if result.missing:
        print_missing(result)
        tell_report(result.folder)
        raise typer.Exit(INCOMPLETE)
    if json_out is not None:
        facts = {"out": result.out, "table": str(result.table), "objects": result.num_objects}
        facts["seconds"] = result.stage_seconds
        json_out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for changed in result.updates:
        out.print(str(changed))
    if result.was_complete:
        out.print(f"{result.out} is complete, and nothing has changed" if update else complete_already(result.out))
        return
    out.print(summary(result, *times))
    tell_report(result.folder)


def summary(result: SegmentationResult, planned: StageTimes | None = None) -> str:
    """Return the result in two lines, planned times in brackets."""
    guess = "≈ " if planned is not None and planned.is_guess else ""
    stages = () if planned is None else planned.stages
    plans = {stage.name: f" ({guess}{duration(stage.seconds)})" for stage in stages}
    tasks = ", ".join(f"{stage} {duration(time)}{plans.get(stage, '')}" for stage, time in result.stage_seconds.items())
    whole = "" if planned is None else f" (planned {guess}{duration(planned.seconds)})"
    return (
        f"wrote {result.num_objects:,} objects to {result.out} in {duration(result.seconds)}{whole}; tasks: {tasks}\n"
        f"table of objects: {result.table}"
    )


def describe_plan(plan: SegmentPlan) -> str:
    """Return the output, memory and scratch of `plan` in one line."""
    from volpipe.workflow.stages import ResourceNeeds

    shape, need = " × ".join(map(str, plan.shape)), ResourceNeeds.from_labels(plan, 0.0)
    return (
        f"{shape} voxels in {count(len(plan.blocks), 'block')} of {' × '.join(map(str, plan.block))}: writes up to "
        f"{size(need.output_bytes)} in {count(need.output_files, 'file')}, takes up to {size(plan.task_bytes)} of "
        f"memory per task, {size(plan.scratch_bytes)} of scratch, and {plan.recipe.output.graph_gib:g} GiB for the "
        f"graph of a box of them; {count(len(plan.factors), 'level')}"
    )


def time_table(times: StageTimes, site: str) -> Table:
    """Return a table of the time of each stage and of all stages on `site`."""
    guess = "≈ " if times.is_guess else ""
    table = columns("stage", "tasks", "time")
    for stage in times.stages:
        table.add_row(stage.name, f"{stage.num_tasks:,}", f"{guess}{duration(times.elapsed(stage))}")
    basis = "synthetic voxels tried there, for its input does not exist yet" if times.is_guess else "voxels tried there"
    table.caption = f"{guess}{duration(times.seconds)} on {site}, by {times.num_voxels:,} {basis}"
    return table
