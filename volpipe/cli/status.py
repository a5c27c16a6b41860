"""`volpipe status`: how far work is and who is at it, in tables and a sentence.

Not here: finding that out (status), or the exit code (cli).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from volpipe.cli.display.console import out
from volpipe.cli.display.reports import driver_line, missing_table, standing_table

if TYPE_CHECKING:
    from volpipe.workflow.status import Status


def show(status: Status, most: int | None) -> None:
    """Print `status`, with no more than `most` of the boxes that failed; None prints all."""
    for number, part in enumerate(status.parts, 1):
        out.print(f"{'stage' if status.kind == 'stages' else 'trial'} {number} of {len(status.parts)}")
        show(part, most)
    if status.missing:
        out.print(missing_table(status.missing, most))
    if status.stages:
        out.print(standing_table(status.totals, status.stages, ""))
    out.print(line(status))


def line(status: Status) -> str:
    """Return a sentence or two: how far the work is, whether somebody is at it, and which command goes on."""
    if status.state == "not begun":
        return f"{status.output}: not begun"
    if status.state == "complete":
        return f"{status.output}: complete" + (f", {status.remark}" if status.remark else "")
    if status.remark and status.state != "running":
        return f"{status.output}: not complete; {status.remark}"
    return driver_line(status.output, status.driver, status.is_complete, len(status.missing))
