"""`volpipe segment`: objects from a volume of affinities, block by block on a site's workers.

Not here: the segmentation (labelling). Exit codes as in cli.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.cli.display.console import bars, check_folder, check_target, err, out
from volpipe.cli.display.units import count, duration, size
from volpipe.cli.options import LabelSettings, Parents, SameInput, Site, complete_recipe
from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    from rich.table import Table

    from volpipe.blockwise.pool import WorkerPool
    from volpipe.recipes.segmentation import SegmentRecipe
    from volpipe.segmentation.driver import SegmentationResult, SegmentPlan
    from volpipe.segmentation.estimate import SegmentTimes

INCOMPLETE = 1


SegmentRecipeFile = Annotated[
    Path | None,
    typer.Option(
        metavar="RECIPE", help="How, as a TOML file; without one, the defaults.", autocompletion=complete_recipe
    ),
]


def segment(
    affinities: Annotated[
        str,
        typer.Argument(
            metavar="AFFINITIES", help="Affinities, a channel per offset; or one map, of foreground or membranes."
        ),
    ],
    out_path: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="OUT", help="The labels, also s3://; by default NAME_labels.zarr here."),
    ] = None,
    config: Site = "local",
    recipe: SegmentRecipeFile = None,
    settings: LabelSettings = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete these labels and what made them, and start over.")
    ] = False,
    same_input: SameInput = False,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write a summary here.")] = None,
    parents: Parents = False,
) -> None:
    """Make objects of AFFINITIES, the same whatever the blocks; the same command again goes on where it stopped."""
    from volpipe.recipes.segmentation import load_segmentation

    check_target("--json", json_out, parents=parents)
    target = out_path or _default_output(affinities)
    choice = load_segmentation(recipe, settings or [])
    _check(affinities, choice, target, parents=parents)
    from volpipe.apps.pool import on_site
    from volpipe.runs.run_folder import RunFolder
    from volpipe.segmentation.driver import plan_segmentation
    from volpipe.segmentation.driver import segment as run_segmentation
    from volpipe.segmentation.estimate import forecast_labels
    from volpipe.volumes.storage import paths

    start = on_site(config, RunFolder.of_output(paths.locate(target)).parsl)
    plan = plan_segmentation(affinities, choice, target, Path.cwd())
    out.print(describe_plan(plan))
    times: list[SegmentTimes] = []

    def on_begin(workers: WorkerPool) -> None:
        times.extend(forecast_labels(plan, workers))
        for forecast in times:
            out.print(time_table(forecast, config))

    try:
        with progress_bars() as on_progress:
            result = run_segmentation(
                plan, start, fresh=fresh, on_progress=on_progress, on_begin=on_begin, site=config, same_input=same_input
            )
    except KeyboardInterrupt:
        err.print("volpipe: interrupted; the same command again goes on from here")
        raise typer.Exit(INTERRUPTED) from None
    if json_out is not None:
        facts = {"out": result.out, "table": str(result.table), "objects": result.num_objects}
        facts["seconds"] = result.stage_seconds
        json_out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if result.was_complete:
        out.print(f"{result.out} is complete already; nothing to do (--fresh starts over)")
        return
    out.print(summary(result, *times))


def _check(affinities: str, choice: SegmentRecipe, target: str, *, parents: bool) -> None:
    """Refuse, before a site starts, an --out that cannot hold labels and a volume that cannot be opened."""
    from volpipe.inference.output import check_name
    from volpipe.volumes.formats.container import locate
    from volpipe.volumes.volume import open_volume

    check_name(target)
    container = locate(target)[0]
    if container.suffix.lower() == ".n5":
        raise VolpipeError(f"--out {target}: labels are written as OME-Zarr; give a name that ends in .zarr")
    check_folder(f"--out {target}", container, parents=parents)
    open_volume(affinities, choice.input.key, choice.input.level, view=choice.input.view)


def summary(result: SegmentationResult, planned: SegmentTimes | None = None) -> str:
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
    from volpipe.workflow.cost import ResourceNeeds

    shape, need = " × ".join(map(str, plan.shape)), ResourceNeeds.from_labels(plan, 0.0)
    return (
        f"{shape} voxels in {count(len(plan.blocks), 'block')} of {' × '.join(map(str, plan.block))}: writes up to "
        f"{size(need.output_bytes)} in {count(need.output_files, 'file')}, takes up to {size(plan.task_bytes)} of "
        f"memory per task, {size(plan.scratch_bytes)} of scratch, and {plan.recipe.output.graph_gib:g} GiB for the "
        f"graph of all fragments; {count(len(plan.factors), 'level')}"
    )


def time_table(times: SegmentTimes, site: str) -> Table:
    """Return a table of the time of each stage and of all stages on `site`."""
    from rich.table import Table

    guess = "≈ " if times.is_guess else ""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "tasks", "time of a worker"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in times.stages:
        table.add_row(stage.name, f"{stage.num_tasks:,}", f"{guess}{duration(stage.seconds)}")
    basis = "synthetic voxels tried there, for its input does not exist yet" if times.is_guess else "voxels tried there"
    table.caption = f"{guess}{duration(times.seconds)} on {site}, by {times.num_voxels:,} {basis}"
    table.caption_justify = "left"
    return table


def _default_output(volume: str) -> str:
    """Return CONTAINER_KEY_labels.zarr, in this folder."""
    from volpipe.volumes.formats.container import locate

    container, key = locate(volume)
    return f"{'_'.join([container.stem, *filter(None, key.split('/')), 'labels'])}.zarr"


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Give a listener that shows a bar per stage on a terminal."""
    with bars() as rows:
        yield lambda stage, done, total: rows.show(stage, done, total, "task" if stage == "graph" else "block")
