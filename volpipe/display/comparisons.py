"""What `volpipe evaluate` and `compare` show, as tables.

Not here: printing, or what stands in them (evaluation.lines).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns

if TYPE_CHECKING:
    from volpipe.evaluation.results import ComparisonResult
    from volpipe.reporting.page import Sheet
    from volpipe.workflow.compare import ComparisonTable

MOST_MADE = 40  # lines of what was done otherwise
MOST_ROWS = 100  # of many comparisons


def sheet_table(sheet: Sheet, *, left: int = 1, title: str = "", most: int | None = None) -> Table:
    """Return the first `most` lines of a table, `left` columns of which are of text."""
    names = sheet.names
    table = columns(*names, left=names[:left], fold=True, caption=sheet.caption or None)
    table.show_header = any(names)
    if title:
        table.title, table.title_justify = title, "left"
    for row in sheet.rows[:most]:
        table.add_row(*map(str, row))
    if most is not None and len(sheet.rows) > most:
        table.caption = f"{len(sheet.rows) - most:,} more lines are in the JSON and on the page"
    return table


def made_table(result: ComparisonResult) -> Table | None:
    """Return a table of how both were made, where that differs; None where nothing is known to differ."""
    sheet = result.made
    title = "how they were made, where that differs"
    return None if sheet is None else sheet_table(sheet, left=3, title=title, most=MOST_MADE)


def difference_tables(result: ComparisonResult) -> list[Table]:
    """Return how much differs, and the boxes that differ most, as far as there are any."""
    titles = ("", "boxes that differ most")
    return [sheet_table(sheet, title=title) for sheet, title in zip(result.sheets, titles, strict=False)]


def row_table(table: ComparisonTable) -> Table:
    """Return a line for each of many comparisons, those that differ most first."""
    return sheet_table(table.sheet, left=2, most=MOST_ROWS)
