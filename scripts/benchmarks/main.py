"""The command line of the bench: which rows, how often, how large; prints one table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import (
    batches,
    bus,
    driver,
    fetches,
    fingerprints,
    large,
    memory,
    nodes,
    precision,
    report,
    scratch,
    sweeps,
)
from benchmarks.comparisons import bare, dask, floor, monai
from benchmarks.row import Measured, Row, Setting, take
from benchmarks.session import environment
from benchmarks.stores import bucket

FAMILIES = (
    bare,
    floor,
    bus,
    driver,
    fetches,
    fingerprints,
    nodes,
    bucket,
    scratch,
    memory,
    large,
    monai,
    dask,
    sweeps,
    batches,
)
WIDTH = 220  # of what goes to a file or a pipe


def rows() -> dict[str, Row]:
    """Return every row that this machine can measure, by name; those of a GPU only where there is one."""
    found = [row for family in FAMILIES for row in family.ROWS]
    on_gpu = [bare.BUSY, *precision.ROWS] if report.gpu() else []
    return {row.name: row for row in [*found, *on_gpu]}


def main() -> None:
    known = rows()
    parser = argparse.ArgumentParser(description="Measure ratios that a change must not make worse.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"all by default: {', '.join(known)}")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each row; their median counts")
    parser.add_argument(
        "--short", action="store_true", help="small sizes, to see that it works; no measure of anything"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there as well")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "volpipe-bench", help="for inputs")
    choice = parser.parse_args()
    unknown = [name for name in choice.rows if name not in known]
    if unknown or choice.repeats < 1:
        parser.error(
            f"no row {', '.join(unknown)}; there are {', '.join(known)}" if unknown else "--repeats is below 1"
        )
    os.environ.update(environment())  # for workers
    choice.cache.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    measured = [_take(known[name], choice) for name in choice.rows or known]
    console.print(report.table(measured))
    console.print(f"{report.machine_line()}; {choice.repeats} repeats{', short sizes' if choice.short else ''}")
    if choice.json:
        report.write_json(choice.json, measured, repeats=choice.repeats, short=choice.short)


def _take(row: Row, choice: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(prefix="volpipe-bench-", dir=choice.cache) as folder:
        measured = take(row, Setting(choice.cache, Path(folder), choice.short), choice.repeats)
    print(f"{row.name}: {measured.median:.3g} in {measured.seconds:.0f} s", file=sys.stderr, flush=True)
    return measured
