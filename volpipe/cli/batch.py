"""`volpipe batch`: many datasets, planned and checked together, run on one pool, told as a table.

Not here: the batch (api.batch, workflow.batch), or its tables (display.batches). Exit codes as in app.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

import volpipe
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Parents
from volpipe.display.batches import mistake_table, plan_table, result_table, showing_rows, tally, why_table
from volpipe.display.console import (
    INCOMPLETE,
    REFUSED,
    err,
    interruptible,
    measuring_shown,
    out,
    print_as_stored,
    result_is_in_files,
    tell_report,
)
from volpipe.errors import BatchError
from volpipe.units import duration

if TYPE_CHECKING:
    from volpipe.workflow.batch import BatchListener, BatchPlan
    from volpipe.workflow.batch_table import BatchReport


@command(Group.MOST_USED, "batch", place=5)
def batch(
    dry_run: bool,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:
    """Run a recipe over many volumes on one pool of workers; repeat it to continue: unchanged ones are skipped."""
    if not dry_run and not as_json:
        result_is_in_files()
    try:
        with interruptible(), measuring_shown(), _printing_listener(dry_run=dry_run, as_json=as_json) as listener:
            report = volpipe.batch(**options, dry_run=dry_run, parents=parents, listener=listener)
    except BatchError as error:
        err.print(mistake_table(error.mistakes))
        err.print(f"volpipe: {error.sentence}")
        raise typer.Exit(REFUSED) from None
    if as_json:
        print_as_stored(json.dumps(report.to_json(), indent=1) + "\n")
    elif not dry_run:
        _print_end_of_batch(report)
    if not dry_run and not report.is_complete:
        raise typer.Exit(INCOMPLETE)


@contextmanager
def _printing_listener(*, dry_run: bool, as_json: bool) -> Iterator[BatchListener]:
    """Give a listener that prints the plan, a line as each dataset ends, and on a terminal a bar."""
    from volpipe.workflow.batch import BatchListener

    with showing_rows() as shown:

        def on_plan(plan: BatchPlan) -> None:
            shown.begin(plan.rows)
            if not as_json:
                most = {} if not dry_run else {"most": None}
                out.print(plan_table(plan.rows, **most))
                if (why := why_table(plan.rows, **most)) is not None:
                    out.print(why)
                for note in plan.notes:
                    err.print(f"warning: {note}")
                for warning in dict.fromkeys(warning for row in plan.rows for warning in row.warnings):
                    err.print(f"warning: {warning}")

        yield BatchListener(shown.plan, on_plan, on_end=shown.end)


def _print_end_of_batch(report: BatchReport) -> None:
    """Print how the datasets ended."""
    states = [row.ended for row in report.rows]
    if set(states) == {"unchanged"}:
        looked = any(row.changes for row in report.rows)
        out.print(f"{tally(states)}; {'nothing has changed' if looked else 'nothing to do (--fresh starts over)'}")
        return
    out.print(result_table(report.rows))
    out.print(f"{duration(report.seconds)} in all; the table is {report.folder}/batch.csv and batch.json")
    out.print(f"to see it again: volpipe status {shlex.quote(str(report.folder))}")
    tell_report(report.folder)
    if not report.is_complete:
        err.print("run the same command again to continue with what is not done")
