"""The datasets of a batch: what would be done with each, what is wrong with some, how far they are, and how they ended.

Not here: the batch, or printing but for a line as a dataset ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.cell import Cell
from volpipe.display.console import Bars, bars, columns, err
from volpipe.display.progress import bar_counts
from volpipe.units import bounded, count, duration, listed, shape, size

if TYPE_CHECKING:
    from volpipe.blockwise.phase import Progress
    from volpipe.workflow.batch_table import DatasetRow

MOST_DATASETS = 100  # lines of a table, unless all are asked for
MOST_LIVE = 30  # lines of the table of a batch under way
URGENCY = ("running", "failed", "incomplete", "interrupted", "done", "waiting", "unchanged")  # of which to show first
LEFT = (
    "dataset", "state", "goes to", "ended", "what is wrong", "what differs, or is left", "output, or why not",
    "how far, or why not", "grey levels",
)  # fmt: skip


def plan_table(rows: Sequence[DatasetRow], most: int | None = MOST_DATASETS) -> Table:
    """Return a line for each dataset: how its output stands, and what it takes."""
    table = table_of(
        "dataset", "state", "shape", "grey levels", "blocks", "output", "files", "scratch", "worker time", "goes to"
    )
    for row in rows[:most]:
        table.add_row(
            row.volume, row.state, shape(row.shape), row.grey, f"{row.num_blocks:,}",
            bounded(row.output_bytes, row.is_measured), f"{row.output_files:,}",
            bounded(row.scratch_bytes, row.is_measured),
            duration(row.worker_seconds), row.out,
        )  # fmt: skip
    cut(table, rows, most)
    left = [row for row in rows if row.share_left]
    num_bytes = sum(row.share_left * row.output_bytes for row in left)
    output = bounded(num_bytes, all(row.is_measured for row in left))
    files = round(sum(row.share_left * row.output_files for row in left))
    table.caption = f"{tally([row.state for row in rows])}; still to be written: {output} in {count(files, 'file')}"
    return table


def why_table(rows: Sequence[DatasetRow], most: int | None = MOST_DATASETS) -> Table | None:
    """Return a table of outputs that were begun or made otherwise, and of what differs; None where none was."""
    table, differing = table_of("dataset", "state", "what differs, or is left"), [row for row in rows if row.why]
    for row in differing[:most]:
        table.add_row(row.volume, row.state, row.why)
    cut(table, differing, most)
    return table if differing else None


def mistake_table(mistakes: Sequence[tuple[str, str]], most: int | None = MOST_DATASETS) -> Table:
    """Return what is wrong, with which dataset; what is wrong with several alike, once."""
    table, groups = table_of("dataset", "what is wrong"), dict[str, list[str]]()
    for what, sentence in mistakes:
        groups.setdefault(sentence, []).append(what)
    for sentence, names in list(groups.items())[:most]:
        table.add_row(listed(names, 3), sentence)
    cut(table, list(groups), most)
    return table


def result_table(rows: Sequence[DatasetRow], most: int | None = MOST_DATASETS) -> Table:
    """Return a line for each dataset: how it ended, what it took, and why it failed."""
    names = ("dataset", "ended", "elapsed", "CPU time", "read", "written", "missing", "seams", "output, or why not")
    looked = any(row.changes for row in rows)
    table = table_of(*(*names[:2], "blocks changed", *names[2:]) if looked else names)
    for row in rows[:most]:
        took = row.cpu_seconds > 0
        table.add_row(
            row.volume,
            row.ended,
            *([row.changes] if looked else []),
            duration(row.wall_seconds),
            *((duration(row.cpu_seconds), size(row.read_bytes), size(row.written_bytes)) if took else ("", "", "")),
            f"{row.missing:,}" if row.missing else "",
            ", ".join(f"{axis} {value:.2f}" for axis, value in row.seams.items()),
            row.reason or row.out,
        )
    cut(table, rows, most)
    table.caption = tally([row.ended for row in rows])
    return table


def tally(states: Sequence[str]) -> str:
    """Return how many datasets there are, and of which state: 40 datasets: 38 new, 2 unchanged."""
    return f"{count(len(states), 'dataset')}: {', '.join(f'{n:,} {state}' for state, n in Counter(states).items())}"


def table_of(*names: str) -> Table:
    """Return an empty table of datasets, whose words may break."""
    return columns(*names, left=LEFT, fold=True)


def cut(table: Table, lines: Sequence[object], most: int | None) -> None:
    """Add how many of `lines` are left out of `table`, where there are more than `most`."""
    if most is not None and len(lines) > most:
        table.add_row(f"… and {len(lines) - most:,} more")


def live_table(rows: Sequence[DatasetRow], now: Mapping[int, Now], most: int = MOST_LIVE) -> Table:
    """Return a line for each dataset of a batch under way, of many those at work first; `now` has these by number."""
    table = table_of("dataset", "state", "ended", "elapsed", "blocks", "how far, or why not")
    shown = sorted(range(len(rows)), key=lambda number: URGENCY.index(rows[number].ended))[:most]
    for number in sorted(shown):
        row, work = rows[number], now.get(number)
        seconds = row.wall_seconds if work is None else time.monotonic() - work.began
        table.add_row(
            row.volume, row.state, row.ended, duration(seconds),
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
        """Show how far a dataset is; of several stages, `stage` names the one whose `progress` it is."""
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
