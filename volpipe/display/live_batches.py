"""A batch under way: how far each dataset is, as a table below a notebook's cell, or a line for each end.

Not here: the batch, or the tables of its plan and its end (batches).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.batches import cut, table_of, tally
from volpipe.display.cell import Cell
from volpipe.display.console import Bars, bars, err
from volpipe.display.progress import bar_counts
from volpipe.units import duration

if TYPE_CHECKING:
    from volpipe.blockwise.phase import Progress
    from volpipe.workflow.batch_table import DatasetRow

MOST_LIVE = 30  # lines of the table of a batch under way
URGENCY = ("running", "failed", "incomplete", "interrupted", "done", "waiting", "unchanged")  # of which to show first


def live_table(rows: Sequence[DatasetRow], now: Mapping[int, Now], most: int = MOST_LIVE) -> Table:
    """Return a line for each dataset of a batch under way, of many those at work first; `now` has these by number."""
    table = table_of("dataset", "state", "ended", "elapsed", "blocks", "how far, or why not")
    shown = sorted(range(len(rows)), key=lambda number: URGENCY.index(rows[number].ended))[:most]
    for number in sorted(shown):
        row, work = rows[number], now.get(number)
        seconds = row.wall_seconds if work is None else time.monotonic() - work.began
        table.add_row(
            row.volume, row.state, row.ended, "" if seconds is None else duration(seconds),
            f"{row.num_blocks:,}", row.reason if work is None else work.text,
        )  # fmt: skip
    cut(table, rows, most)
    table.caption = tally([row.ended for row in rows])
    return table


@dataclass
class Now:
    """How far a dataset is: when it began, and in words; of stages each by its name."""

    began: float = field(default_factory=time.monotonic)
    stages: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return ", ".join(self.stages.values())

    def move(self, stage: str, progress: Progress) -> None:
        """Take note of `progress`, of the work as a whole or of the stage that is named."""
        parts = [(name, done / whole) for name, done, whole, _ in bar_counts(progress) if whole]
        name, share = next((part for part in parts if part[1] < 1), ("done", 1.0))
        self.stages[stage] = f"{stage}: " * bool(stage) + (name if share >= 1 else f"{name} {share:.0%}")


@dataclass
class RowsShown:
    """The datasets of a batch, as they are shown while it goes on: a table in a cell, else a line for each end."""

    bars: Bars
    cell: Cell | None
    rows: list[DatasetRow] = field(default_factory=list)
    now: dict[int, Now] = field(default_factory=dict)
    num_left: int = 0

    def plan(self, number: int, whole: int) -> None:
        """Show how many datasets are planned."""
        self.bars.show("planned", number, whole, "dataset")

    def begin(self, rows: Sequence[DatasetRow]) -> None:
        """Show all datasets, as they are before anything runs."""
        self.rows, self.num_left = list(rows), sum(not row.is_complete for row in rows)
        self._draw()

    def start(self, number: int, row: DatasetRow) -> None:
        """Show that a dataset is at work."""
        self.rows[number], self.now[number] = row, Now()
        self._draw()

    def move(self, number: int, stage: str, progress: Progress) -> None:
        """Show how far a dataset is; `stage` names that of several which tells."""
        self.now[number].move(stage, progress)
        self._draw()

    def end(self, number: int, row: DatasetRow) -> None:
        """Show how a dataset ended; one that was interrupted is left."""
        self.rows[number] = row
        self.num_left -= row.ended != "interrupted"
        self.now.pop(number, None)
        self._draw()
        if self.cell is None:
            took = "" if row.wall_seconds is None else f" after {duration(row.wall_seconds)}"
            reason = f": {row.reason}" if row.reason else ""
            err.print(f"{row.volume}: {row.ended}{took}{reason}; {self.num_left:,} left")

    def _draw(self) -> None:
        if self.cell is not None:
            self.cell.draw(lambda: live_table(self.rows, self.now))


@contextmanager
def showing_rows(cell: Cell | None = None) -> Iterator[RowsShown]:
    """Give what shows the datasets of a batch: in `cell`, or on standard error."""
    with bars(cell) as shown:
        yield RowsShown(shown, cell)
