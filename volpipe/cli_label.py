"""`volpipe label`: objects from a volume of affinities, block by block on a site's workers.

Not here: the labelling. Exit codes as in cli.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from volpipe.interrupts import INTERRUPTED
from volpipe.show import duration, size
from volpipe.terminal import check_target, err, out

if TYPE_CHECKING:
    from rich.table import Table

    from volpipe.label_audit import LabelStanding
    from volpipe.label_cost import LabelTimes
    from volpipe.labelling import Labelled, LabelPlan
    from volpipe.tasks import Workers

INCOMPLETE = 1


def label(
    affinities: Annotated[str, typer.Argument(help="Affinities, a channel per offset; or a map of one kind of voxel.")],
    out_path: Annotated[
        str | None, typer.Option("--out", "-o", help="The labels, also s3://; by default NAME_labels.zarr here.")
    ] = None,
    config: Annotated[str, typer.Option(help="Site: a shipped name (see `volpipe sites`) or a Python file.")] = "local",
    recipe: Annotated[Path | None, typer.Option(help="How, as TOML; without one, the defaults.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value on top of the recipe.")] = None,
    fresh: Annotated[bool, typer.Option(help="Delete these labels and what made them, and start over.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write how it ended to this file.")] = None,
) -> None:
    """Make objects of AFFINITIES, the same whatever the blocks; the same command again goes on where it stopped."""
    from volpipe.apps.start import on_site
    from volpipe.label_cost import foreseen
    from volpipe.labelling import label as make
    from volpipe.labelling import load_labelling, plan_labels
    from volpipe.resolve import shipped_recipe

    check_target("--json", json_out)
    chosen = load_labelling(None if recipe is None else shipped_recipe(recipe), settings or [])
    start = on_site(config)
    plan = plan_labels(affinities, chosen, out_path or _default_output(affinities), Path.cwd())
    out.print(planned(plan))
    times: list[LabelTimes] = []

    def on_begin(workers: Workers) -> None:
        times.extend(foreseen(plan, workers))
        for each in times:
            out.print(time_table(each, config))

    try:
        with shown() as on_progress:
            made = make(plan, start, fresh=fresh, on_progress=on_progress, on_begin=on_begin, site=config)
    except KeyboardInterrupt:
        err.print("volpipe: interrupted; the same command again goes on from here")
        raise typer.Exit(INTERRUPTED) from None
    if json_out is not None:
        ended = {"out": made.out, "table": str(made.table), "objects": made.num_objects, "seconds": made.stage_seconds}
        json_out.write_text(json.dumps(ended, indent=1) + "\n", encoding="utf-8")
    if made.was_complete:
        out.print(f"{made.out} is complete already; nothing to do (--fresh starts over)")
        return
    out.print(told(made, *times))


def told(made: Labelled, planned: LabelTimes | None = None) -> str:
    """Return how a labelling ended, on two lines; what was planned is in brackets."""
    guess = "≈ " if planned is not None and planned.is_guess else ""
    stages = () if planned is None else planned.stages
    known = {stage.name: f" ({guess}{duration(stage.seconds)})" for stage in stages}
    took = ", ".join(f"{name} {duration(seconds)}{known.get(name, '')}" for name, seconds in made.stage_seconds.items())
    whole = "" if planned is None else f" (planned {guess}{duration(planned.seconds)})"
    return (
        f"wrote {made.num_objects:,} objects to {made.out} in {duration(made.seconds)}{whole}; tasks: {took}\n"
        f"what each is, is in {made.table}"
    )


def planned(plan: LabelPlan) -> str:
    """Return the room that the labelling will take, on a line."""
    from volpipe.flow_cost import Need

    shape, need = " × ".join(map(str, plan.shape)), Need.of_labels(plan, 0.0)
    return (
        f"{shape} voxels in {len(plan.blocks):,} blocks of {' × '.join(map(str, plan.block))}: writes up to "
        f"{size(need.output_bytes)} in {need.output_files:,} files, takes up to {size(plan.task_bytes)} of memory per "
        f"task, {size(plan.scratch_bytes)} of scratch, and {plan.recipe.output.graph_gib:g} GiB for the graph of all "
        f"fragments; levels {len(plan.factors)}"
    )


def time_table(times: LabelTimes, site: str) -> Table:
    """Return how long each stage takes, and all of them."""
    from rich.table import Table

    guess = "≈ " if times.is_guess else ""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "tasks", "time of a worker"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in times.stages:
        table.add_row(stage.name, f"{stage.num_tasks:,}", f"{guess}{duration(stage.seconds)}")
    what = "made-up voxels tried there, for its input is not there yet" if times.is_guess else "voxels tried there"
    table.caption = f"{guess}{duration(times.seconds)} on {site}, by {times.num_voxels:,} {what}"
    table.caption_justify = "left"
    return table


def _default_output(volume: str) -> str:
    """Return a name in this folder: of the container, and of the key in it where it was given."""
    from volpipe.formats.container import locate

    container, key = locate(volume)
    return f"{'_'.join([container.stem, *filter(None, key.split('/')), 'labels'])}.zarr"


def show_status(output: str, most: int | None) -> bool | None:
    """Print how far the labelling is that writes `output`; None where there is none, else whether it is whole."""
    from volpipe.label_audit import inspect_labels
    from volpipe.show import missing_table, standing_table

    found = inspect_labels(output)
    if found is None:
        return None
    if found.missing:
        out.print(missing_table(found.missing, most))
    out.print(standing_table(found.totals, found.units, f"{found.plan.out}: {_state(found)}"))
    return found.is_complete


def _state(found: LabelStanding) -> str:
    if found.is_gone:
        return "not complete, its output is gone; `volpipe label --fresh` makes it again"
    if not found.is_complete:
        return "not complete; the same `volpipe label` command goes on with it"
    return f"complete, {found.num_objects:,} objects; what each is, is in {found.table}"


@contextmanager
def shown() -> Iterator[Callable[[str, int, int], None]]:
    """Give a listener that shows a bar for each stage on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total)
            progress.update(bars[stage], completed=done)

        yield on_progress
