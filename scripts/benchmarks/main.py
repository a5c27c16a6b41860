"""The command line of the bench: which rows, how often, how large; prints one table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from benchmarks import (
    batches,
    bus,
    fetches,
    fingerprints,
    history,
    large,
    memory,
    nodes,
    precision,
    report,
    scratch,
    sweeps,
    trainings,
)
from benchmarks.comparisons import bare, dask, default, floor, monai, ts2
from benchmarks.engine import driver, scaling, solve, whole_runs
from benchmarks.row import OVER, Measured, Row, Setting, take
from benchmarks.session import environment
from benchmarks.stores import bucket

FAMILIES = (
    bare,
    floor,
    bus,
    driver,
    whole_runs,
    scaling,
    fetches,
    fingerprints,
    nodes,
    bucket,
    scratch,
    memory,
    large,
    monai,
    dask,
    default,
    sweeps,
    trainings,
    batches,
    solve,
    ts2,
)
RESULTS = history.ROOT / "build" / "bench"
WIDTH = 220  # of what goes to a file or a pipe


def rows() -> dict[str, Row]:
    """Return every row that this machine can measure, by name; those of a GPU only where there is one."""
    found = [row for family in FAMILIES for row in family.ROWS]
    on_gpu = [*bare.ON_GPU, *monai.ON_GPU, *precision.ROWS, *trainings.ON_GPU] if report.gpu() else []
    return {row.name: row for row in [*found, *on_gpu]}


def main() -> None:
    """Measure rows, or show what earlier runs gave; exit code 1 where a row is over its limit."""
    known = rows()
    parser = _arguments(known)
    choice = parser.parse_args()
    if unknown := ", ".join(name for name in choice.rows if name not in known):
        parser.error(f"no row {unknown}; there are {', '.join(known)}")
    choice.repeats = choice.repeats or (1 if choice.short else 3)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if choice.history:
        _show(choice, console)
        return
    os.environ.update(environment())  # for workers
    choice.cache.mkdir(parents=True, exist_ok=True)
    names = choice.rows or [name for name, row in known.items() if row.is_quick or not choice.short]
    measured = [_take(known[name], choice) for name in names]
    console.print(report.table(measured))
    console.print(f"{report.machine_line()}; {choice.repeats} repeats{', short sizes' if choice.short else ''}")
    if choice.json:
        report.write_json(choice.json, measured, repeats=choice.repeats, short=choice.short)
    history.store(choice.results, measured, repeats=choice.repeats, short=choice.short)
    over = [each.row.name for each in measured if each.verdict == OVER]
    if over:
        raise SystemExit(f"over their limits: {', '.join(over)}")


def _arguments(known: Mapping[str, Row]) -> argparse.ArgumentParser:
    """Return the options of the bench, for rows of those names."""
    quick = [name for name, row in known.items() if row.is_quick]
    parser = argparse.ArgumentParser(
        description="Measure ratios that a change must not make worse; exit code 1 where a row is over its limit."
    )
    parser.add_argument("rows", nargs="*", metavar="row", help=f"all: {', '.join(known)}")
    parser.add_argument(
        "--repeats", type=_repeats, help="measurements of each row, whose median counts: 3, or 1 if short"
    )
    parser.add_argument(
        "--short", action="store_true", help=f"small sizes; of rows, if none is named: {', '.join(quick)}"
    )
    parser.add_argument("--history", action="store_true", help="only show what earlier runs gave, by commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there as well")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="keeps what every run gave")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "volpipe-bench", help="for inputs")
    return parser


def _repeats(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("is below 1")
    return int(text)


def _show(choice: argparse.Namespace, console: Console) -> None:
    """Print what earlier runs gave for the rows of `choice`, or for all."""
    points = [p for p in history.points(choice.results, short=choice.short) if not choice.rows or p.row in choice.rows]
    if not points:
        raise SystemExit(f"{choice.results} has no results of such rows and sizes of a machine like this one")
    console.print(history.table(points))


def _take(row: Row, choice: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="volpipe-bench-", dir=choice.cache) as folder:
        measured = take(row, Setting(choice.cache, Path(folder), choice.short), choice.repeats)
    print(f"{row.name}: {measured.median:.3g} in {measured.seconds:.0f} s", file=sys.stderr, flush=True)
    return measured
