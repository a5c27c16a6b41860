"""`volpipe status`, `report`, `verify`, `reproduce`: how far an output is, whether it is as written, how to repeat it.

Not here: the comparing, or what outputs say of themselves (api.outputs). Exit codes as in app.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe as vp
from volpipe.cli.options import Parents, whole
from volpipe.display.batches import MOST_DATASETS, result_table
from volpipe.display.console import check_target, out
from volpipe.display.reports import driver_line, missing_table, standing_table
from volpipe.errors import RunError

if TYPE_CHECKING:
    from volpipe.runs.verify import Recomputed, Verdict
    from volpipe.workflow.status import Status

OutputArgument = Annotated[
    str, typer.Argument(metavar="OUTPUT", help="An output of `volpipe run`, or labels of `volpipe segment`.")
]
MOST_NAMED = 100


def verify(
    output: OutputArgument,
    recompute: Annotated[
        int,
        typer.Option(parser=whole, metavar="K", help="Random blocks to compute again, by the net or as fragments."),
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", parser=whole, help="Decides which blocks.")] = 0,
) -> None:
    """Read OUTPUT back, and name each file that is not as its task wrote it; exit code 1 if there are any."""
    result = vp.verify(output, recompute=recompute, seed=seed, on_files=_print_files, on_block=_print_block)
    for sentence in result.reasons:
        typer.echo(f"why: {sentence}")
    if not result.is_whole:
        raise typer.Exit(1)


def _print_block(block: Recomputed) -> None:
    """Print how a recomputed block compares with what is stored."""
    alike = f"{block.num_differ:,} voxels differ" if block.num_differ else "the same"
    if block.num_differ and block.largest is not None:
        alike += f", by up to {block.largest:g}"
    typer.echo(f"block {block.block} (s0 {block.box}){block.device and f' on {block.device}'}: {alike}")


def _print_files(verdict: Verdict) -> None:
    """Print the files that are not as they were written."""
    for difference in verdict.differences[:MOST_NAMED]:
        typer.echo(f"{difference.file} {difference.what}{difference.box and f' ({difference.box})'}")
    if len(verdict.differences) > MOST_NAMED:
        typer.echo(f"… and {len(verdict.differences) - MOST_NAMED} more")
    typer.echo(f"{verdict.num_files:,} files read, {len(verdict.differences):,} not as they were written")
    if verdict.num_unwritten:
        typer.echo(f"{verdict.num_unwritten:,} shards have no checksum: not written yet, or by an earlier version")


def reproduce(
    output: OutputArgument,
    recipe_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recipe to this file, and name it.")
    ] = None,
    parents: Parents = False,
) -> None:
    """Print the command that makes OUTPUT again, from what its attributes say."""
    again = vp.reproduce(output)
    if recipe_out is None:
        typer.echo(again.command)
        return
    if recipe_out.exists():
        raise RunError(f"{recipe_out} exists; choose another --recipe-out")
    check_target("--recipe-out", recipe_out, parents=parents)
    recipe_out.write_text(again.recipe, encoding="utf-8")
    typer.echo(again.command_with(recipe_out))


def report(
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT", help="An output, its run's folder, the folder of a training, or a batch's file or folder."
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="HTML file; by default report.html in the run's folder."),
    ] = None,
    parents: Parents = False,
) -> None:
    """Write the report of OUTPUT, one HTML file that opens offline; also while it is made, or after a kill."""
    check_target("--out", file, parents=parents)
    typer.echo(f"wrote {vp.report(output, file)}")


def show_status(status: Status, most: int | None) -> None:
    """Print `status`, with no more than `most` of the boxes that failed; None prints all."""
    if status.datasets:
        out.print(result_table(status.datasets, None if most is None else MOST_DATASETS))
    for number, part in enumerate(status.parts, 1):
        out.print(f"{'stage' if status.kind == 'stages' else 'trial'} {number} of {len(status.parts)}")
        show_status(part, most)
    if status.missing:
        out.print(missing_table(status.missing, most))
    if status.stages:
        out.print(standing_table(status.totals, status.stages, ""))
    out.print(status_line(status))


def status_line(status: Status) -> str:
    """Return a sentence or two: how far the work is, whether somebody is at it, and which command goes on."""
    if status.state == "not begun":
        return f"{status.output}: not begun"
    if status.state == "complete":
        return f"{status.output}: complete" + (f", {status.remark}" if status.remark else "")
    if status.remark and status.state != "running":
        return f"{status.output}: not complete; {status.remark}"
    return driver_line(status.output, status.driver, status.is_complete, len(status.missing))
