"""The datasets of a batch as tables: what would be done with each, what is wrong with some, and how they ended.

Not here: the batch, how far it is (live_batches), or printing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns
from volpipe.units import bounded, count, duration, shape, size

if TYPE_CHECKING:
    from volpipe.workflow.batch_table import DatasetRow

MOST_DATASETS = 100  # lines of a table, unless all are asked for
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
            "" if row.worker_seconds is None else duration(row.worker_seconds), row.out,
        )  # fmt: skip
    cut(table, rows, most)
    left = [row for row in rows if row.share_left]
    num_bytes = sum(row.share_left * row.output_bytes for row in left)
    output = bounded(num_bytes, all(row.is_measured for row in left))
    files = round(sum(row.share_left * row.output_files for row in left))
    table.caption = f"{tally([row.state for row in rows])}; still to be written: {output} in {count(files, 'file')}"
    return table


def why_table(rows: Sequence[DatasetRow], most: int | None = MOST_DATASETS) -> Table | None:
    """Return what differs of outputs that were begun or made otherwise; None where nothing does."""
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
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        table.add_row(", ".join(names[:3]) + more, sentence)
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
            "" if row.wall_seconds is None else duration(row.wall_seconds),
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
