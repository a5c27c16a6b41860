"""What `volpipe compare` shows, as tables.

Not here: printing, or what stands in them (evaluation.compare_lines).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns

if TYPE_CHECKING:
    from volpipe.evaluation.compare_driver import ComparisonResult
    from volpipe.workflow.compare import ComparisonTable

MOST_MADE = 40  # lines of what was done otherwise
MOST_ROWS = 100  # of many comparisons


def _table(names: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1, title: str = "") -> Table:
    table = columns(*names, left=names[:left], fold=True)
    if title:
        table.title, table.title_justify = title, "left"
    for line in lines:
        table.add_row(*line)
    return table


def made_table(result: ComparisonResult) -> Table | None:
    """Return what was done otherwise of both; None where nothing is known that was."""
    rows = result.made_otherwise
    if not rows:
        return None
    table = _table(("", "A", "B"), rows[:MOST_MADE], left=3, title="how they were made, where that differs")
    if len(rows) > MOST_MADE:
        table.caption = f"{len(rows) - MOST_MADE:,} more lines are in the JSON and on the page"
    return table


def channel_table(result: ComparisonResult) -> Table:
    """Return how much differs of each channel and of all, or of labels; there is something that was compared."""
    from volpipe.evaluation.compare_lines import CHANNEL_COLUMNS, channel_lines

    assert result.differences is not None
    return _table(CHANNEL_COLUMNS[result.plan.kind], channel_lines(result.plan, result.differences))


def worst_table(result: ComparisonResult) -> Table | None:
    """Return the boxes that differ most; None where none does."""
    from volpipe.evaluation.compare_lines import WORST_COLUMNS, worst_lines

    if result.differences is None or not result.differences.worst:
        return None
    return _table(WORST_COLUMNS[result.plan.kind], worst_lines(result.differences), title="boxes that differ most")


def row_table(table: ComparisonTable) -> Table:
    """Return a line for each of many comparisons, those that differ most first."""
    from volpipe.evaluation.compare_lines import ROW_COLUMNS

    lines = [row.line for row in table.rows]
    shown = _table(ROW_COLUMNS, lines[:MOST_ROWS], left=2)
    if len(lines) > MOST_ROWS:
        shown.caption = f"{len(lines) - MOST_ROWS:,} more lines are in the JSON and on the page"
    return shown
