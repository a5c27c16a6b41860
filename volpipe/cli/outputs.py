"""`volpipe status`, `report`, `verify`, `reproduce`: how far an output is, whether it is as written, how to repeat it.

Not here: the comparing, or what outputs say of themselves (api.outputs). Exit codes as in app.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

import volpipe as vp
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.notes import AWAY_SECONDS, SECONDS
from volpipe.cli.generate import command_of
from volpipe.cli.options import Parents, seconds
from volpipe.display.batches import MOST_DATASETS, result_table
from volpipe.display.console import AT_WORK, DONE, INCOMPLETE, check_target, err, out
from volpipe.display.reports import driver_line, missing_table, standing_table
from volpipe.display.watching import drawing, follow
from volpipe.display.workers import roster_view
from volpipe.errors import RunError
from volpipe.units import count

if TYPE_CHECKING:
    from typer._click import Context  # typer's own copy of click, which has no other name

    from volpipe.runs.verify import Recomputed, Verdict
    from volpipe.workflow.roster import Roster
    from volpipe.workflow.status import Observer, Status

MOST_NAMED = 100


@command_of("verify")
def verify(fast: bool, **options: Any) -> None:  # Any: values of options
    """Read OUTPUT back, and name each file that is not as its task wrote it; exit code 1 if there are any."""
    result = vp.verify(fast=fast, on_files=partial(_print_files, is_fast=fast), on_block=_print_block, **options)
    for sentence in result.reasons:
        typer.echo(f"why: {sentence}")
    if not result.is_whole:
        raise typer.Exit(1)


def _print_block(block: Recomputed) -> None:
    """Print how a recomputed block compares with what is stored."""
    alike = f"{block.num_differ:,} voxels differ" if block.num_differ else "the same"
    if block.num_differ and block.largest is not None:
        alike += f", by up to {block.largest:g}"
    place = f"{block.array}/s0 {block.box}".lstrip("/")
    typer.echo(f"block {block.block} ({place}){block.device and f' on {block.device}'}: {alike}")


def _print_files(verdict: Verdict, *, is_fast: bool) -> None:
    """Print the files that are not as they were written."""
    for difference in verdict.differences[:MOST_NAMED]:
        typer.echo(f"{difference.file} {difference.what}{difference.box and f' ({difference.box})'}")
    if len(verdict.differences) > MOST_NAMED:
        typer.echo(f"… and {len(verdict.differences) - MOST_NAMED} more")
    if is_fast:
        typer.echo(
            f"{count(verdict.num_files, 'file')} looked for, {len(verdict.differences):,} not as they were written; "
            "voxels were not read"
        )
    else:
        typer.echo(f"{count(verdict.num_files, 'file')} read, {len(verdict.differences):,} not as they were written")
    if verdict.num_unwritten:
        typer.echo(f"{verdict.num_unwritten:,} shards have no checksum: not written yet, or by an earlier version")


@command_of("reproduce")
def reproduce(
    output: str,
    *,
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


@command_of("report")
def report(output: str, file: str | None, *, parents: Parents = False) -> None:
    """Write the report of OUTPUT, one HTML file that opens offline; also while it is made, or after a kill."""
    check_target("--out", file, parents=parents)
    typer.echo(f"wrote {vp.report(output, file)}")


class Watchable(TyperCommand):
    """A command whose option --watch may stand without its value."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Give --watch the value 0 where what follows it is no number."""
        for place in reversed([n for n, argument in enumerate(args) if argument == "--watch"]):
            following = args[place + 1] if place + 1 < len(args) else ""
            if not re.fullmatch(r"-?[\d.]+(e-?\d+)?|-?inf|nan", following):
                args = [*args[: place + 1], "0", *args[place + 1 :]]
        return super().parse_args(ctx, args)


def watched(output: str, pause: float | None, *, as_json: bool) -> Status:
    """Show the work on `output` until it ends, and return its status then."""
    from volpipe.workflow.status import Observer

    def print_line(status: Status) -> None:
        typer.echo(json.dumps(status.to_json()))

    try:
        return follow(Observer(output).look, out, pause, print_line if as_json else None)
    except KeyboardInterrupt:
        err.print("volpipe: stopped watching; the work continues")
        raise typer.Exit(INTERRUPTED) from None


@command_of("status", without=("changes",))
def top(
    output: str,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print all workers once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and end.")] = False,
    every: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", parser=seconds, help="Look every so many seconds, where not each 2 s."),
    ] = None,
) -> None:
    """Show the workers of a run: the CPU, memory and GPU that each takes now, and the task that it does."""
    from volpipe.workflow.roster import Roster
    from volpipe.workflow.status import Observer

    observer, roster = Observer(output), Roster()
    try:
        if as_json or once or not out.is_terminal:
            found = _print_workers(observer, roster, as_json=as_json)
        else:
            with drawing(out) as draw:
                found = follow(
                    observer.look, out, every or None,
                    lambda status: draw(roster_view(status, roster.look(status), out.width, out.height)),
                )  # fmt: skip
            out.print(status_line(found))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(code_of(found))


def _print_workers(observer: Observer, roster: Roster, *, as_json: bool) -> Status:
    """Print the workers that there are now; one that seems silent gets the time for another note."""
    status = observer.look()
    workers = roster.look(status)
    silent = [worker.note.every for worker in workers if not worker.is_alive and not worker.is_left]
    if silent and status.state == "running":
        time.sleep(min(max(silent), AWAY_SECONDS) + SECONDS)
        status = observer.look()
        workers = roster.look(status)
    if as_json:
        typer.echo(json.dumps({"output": status.output, "state": status.state} | {
            "workers": [worker.to_json() for worker in workers]
        }, indent=1))  # fmt: skip
    elif status.state == "running":
        out.print(roster_view(status, workers, out.width))
    else:
        out.print(status_line(status))
    return status


def code_of(status: Status) -> int:
    """Return the exit code for `status`."""
    return {"complete": DONE, "running": AT_WORK}.get(status.state, INCOMPLETE)


def write_stages(named: Sequence[str], table: Path) -> None:
    """Write a row for each stage of the outputs that are `named` to the file `table`, as CSV."""
    from volpipe.workflow.stage_table import stage_rows, to_csv

    table.write_text(to_csv(row for output in named for row in stage_rows(output)), encoding="utf-8")


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
    if status.remark and status.changes is None and status.state != "running":
        return f"{status.output}: incomplete; {status.remark}"
    line = driver_line(
        status.output, status.driver, status.is_complete, len(status.missing), seconds_left=status.seconds_left
    )
    return line if status.changes is None else f"{line}; {status.remark}"
