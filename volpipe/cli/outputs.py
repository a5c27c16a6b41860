"""`volpipe status`, `report`, `verify`, `reproduce`: how far an output is, whether it is as written, how to repeat it.

Not here: the comparing, or what outputs say of themselves (api.outputs). Exit codes as in app.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

import volpipe as vp
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.notes import AWAY_SECONDS, SECONDS
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Parents
from volpipe.display.batches import MOST_DATASETS, result_table
from volpipe.display.console import (
    AT_WORK,
    DONE,
    INCOMPLETE,
    PLAIN_LINE_SECONDS,
    err,
    out,
    print_as_stored,
    result_file,
    result_is_in_files,
)
from volpipe.display.reports import driver_line, missing_table, standing_table
from volpipe.display.watching import drawing, follow
from volpipe.display.workers import roster_view
from volpipe.units import count
from volpipe.volumes.storage.result_file import Kind, ResultFile

if TYPE_CHECKING:
    from rich.console import RenderableType
    from typer._click import Context  # typer's own copy of click, which has no other name

    from volpipe.runs.verify import Recomputed, Verdict
    from volpipe.stages.status import Status
    from volpipe.workflow.roster import Worker

MOST_NAMED = 100
RECIPE = Kind("volpipe reproduce --recipe-out", None)


@command(Group.OUTPUTS, "verify", place=2)
def verify(fast: bool, **options: Any) -> None:  # Any: values of options
    """Read OUTPUT back, and name each file that is not as its task wrote it; exit code 1 if there are any."""
    result = vp.verify(fast=fast, on_files=partial(_print_files, is_fast=fast), on_block=_print_block, **options)
    for sentence in result.reasons:
        out.print(f"why: {sentence}")
    if not result.is_whole:
        raise typer.Exit(1)


def _print_block(block: Recomputed) -> None:
    """Print how a recomputed block compares with what is stored."""
    alike = f"{block.num_differ:,} voxels differ" if block.num_differ else "the same"
    if block.num_differ and block.largest is not None:
        alike += f", by up to {block.largest:g}"
    place = f"{block.array}/{block.key} {block.box}".lstrip("/")
    out.print(f"block {block.block} ({place}){block.device and f' on {block.device}'}: {alike}")


def _print_files(verdict: Verdict, *, is_fast: bool) -> None:
    """Print the files that are not as they were written."""
    for difference in verdict.differences[:MOST_NAMED]:
        out.print(f"{difference.file} {difference.what}{difference.box and f' ({difference.box})'}")
    if len(verdict.differences) > MOST_NAMED:
        out.print(f"… and {len(verdict.differences) - MOST_NAMED} more")
    if is_fast:
        out.print(
            f"{count(verdict.num_files, 'file')} looked for, {len(verdict.differences):,} not as they were written; "
            "voxels were not read"
        )
    else:
        out.print(f"{count(verdict.num_files, 'file')} read, {len(verdict.differences):,} not as they were written")
    if verdict.num_unwritten:
        out.print(f"{verdict.num_unwritten:,} shards have no checksum: not written yet, or by an earlier version")


@command(Group.OUTPUTS, "reproduce", place=4)
def reproduce(
    output: str,
    *,
    recipe_out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the recipe to this file, and name it.")
    ] = None,
    parents: Parents = False,
) -> None:
    """Print the command that makes OUTPUT again, from what its attributes say."""
    again = vp.reproduce(output)
    if recipe_out is None:
        print_as_stored(again.command + "\n")
        return
    file = result_file("--recipe-out", recipe_out, RECIPE, parents=parents)
    assert file is not None
    file.write(again.recipe.encode())
    print_as_stored(again.command_with(file.path) + "\n")


@command(Group.OUTPUTS, "report", place=1)
def report(output: str, file: str | None, *, parents: Parents = False) -> None:
    """Write the report of OUTPUT, one HTML file that opens offline; also while it is made, or after a kill."""
    from volpipe.api.outputs import REPORT_PAGE

    result_is_in_files()
    result_file("--out", file, REPORT_PAGE, parents=parents)
    out.print(f"wrote {vp.report(output, file)}")


class Watchable(TyperCommand):
    """A command whose option --watch may stand without its value."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Give --watch the value 0 where what follows it is no number."""
        for place in reversed([n for n, argument in enumerate(args) if argument == "--watch"]):
            following = args[place + 1] if place + 1 < len(args) else ""
            if not re.fullmatch(r"-?[\d.]+(e-?\d+)?|-?inf|nan", following):
                args = [*args[: place + 1], "0", *args[place + 1 :]]
        return super().parse_args(ctx, args)


def watched(output: str, pause: float | None, *, as_json: bool, with_workers: bool) -> Status:
    """Show the work on `output`, or its workers, until it ends, and return its status then."""
    from volpipe.workflow.roster import Roster
    from volpipe.workflow.status import StatusReader

    observer, roster = StatusReader(output), Roster()

    def print_line(status: Status) -> None:
        workers = roster.look(status) if with_workers else None
        print_as_stored(json.dumps(status_json(status, workers)) + "\n")

    def show_workers(draw: Callable[[RenderableType], None], status: Status) -> None:
        draw(roster_view(status, roster.look(status), out.width, out.height if out.is_terminal else None))

    try:
        if as_json or not with_workers:
            return follow(observer.look, out, pause, print_line if as_json else None)
        if not out.is_terminal:
            return follow(observer.look, out, pause or PLAIN_LINE_SECONDS, partial(show_workers, out.print))
        with drawing(out) as draw:
            return follow(observer.look, out, pause, partial(show_workers, draw))
    except KeyboardInterrupt:
        err.print("volpipe: stopped watching; the work continues")
        raise typer.Exit(INTERRUPTED) from None


def present_workers(status: Status) -> list[Worker]:
    """Return the workers of a work with this `status`; one that seems silent gets the time for another note."""
    from volpipe.workflow.roster import Roster

    roster = Roster()
    workers = roster.look(status)
    silent = [worker.note.every for worker in workers if not worker.is_alive and not worker.is_left]
    if silent and status.state == "running":
        time.sleep(min(max(silent), AWAY_SECONDS) + SECONDS)
        workers = roster.look(status)
    return workers


def status_json(status: Status, workers: Sequence[Worker] | None) -> dict[str, Any]:  # Any: plain values
    """Return a status as JSON has it, with its `workers` where these are asked for."""
    found = status.to_json()
    return found if workers is None else found | {"workers": [worker.to_json() for worker in workers]}


def code_of(status: Status) -> int:
    """Return the exit code for `status`."""
    return {"complete": DONE, "running": AT_WORK}.get(status.state, INCOMPLETE)


def stages_kind() -> Kind:
    """Return the kind of tables of stages: their first line names the columns."""
    from volpipe.workflow.stage_table import to_csv

    return Kind("volpipe status --csv", re.compile(re.escape(to_csv(()).encode())))


def write_stages(named: Sequence[str], table: ResultFile) -> None:
    """Write a row for each stage of the outputs that are `named` to `table`, as CSV; one that has none leaves none."""
    from volpipe.workflow.stage_table import stage_rows, to_csv

    table.clear()
    table.write(to_csv(row for output in named for row in stage_rows(output)).encode())


def show_status(status: Status, most: int | None) -> None:
    """Print `status`, with no more than `most` of the boxes that failed; None prints all."""
    if status.datasets:
        out.print(result_table(status.datasets, None if most is None else MOST_DATASETS))
    for number, part in enumerate(status.parts, 1):
        out.print(f"{'trial' if status.view == 'steps' else 'stage'} {number} of {len(status.parts)}")
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
