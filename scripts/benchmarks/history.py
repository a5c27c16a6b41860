"""The bench over commits: what every run of it gave, kept by commit, and drawn so that a step shows.

Not here: measuring. There is a file for each run of the bench. Numbers of one machine say little about another's, so
that only runs of the same kind of machine and of the same sizes are drawn together.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.row import Measured
from volpipe.volumes.storage.paths import atomic_write

ROOT = Path(__file__).resolve().parents[2]
BARS = "▁▂▃▄▅▆▇█"
MOST_RUNS = 60  # of a row, the latest
STEP = 1.25  # a median that is so many times the one before is called a step
MACHINE = ("cores", "gpu")  # by which machines are told apart


@dataclass(frozen=True)
class Point:
    """What one run of the bench gave for a row: the median, the limit it had, and at which commit and when."""

    row: str
    unit: str
    most: float
    median: float
    commit: str
    at: str


def store(folder: Path, rows: Sequence[Measured], *, repeats: int, short: bool) -> Path:
    """Keep what was measured in `folder`, and return the file: COMMIT-TIME.json, where changes count as COMMIT+."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{commit()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
    atomic_write(path, json.dumps(report.tree(rows, repeats=repeats, short=short), indent=1).encode())
    return path


def commit() -> str:
    """Return the commit of this checkout, with a + where files differ from it; "unknown" without git."""
    try:
        name = _git("rev-parse", "--short=10", "HEAD").strip()
        return f"{name}{'+' if _git('status', '--porcelain', '--untracked-files=no') else ''}"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def points(folder: Path, *, short: bool) -> Iterator[Point]:
    """Yield what runs of the same sizes gave on a machine like this one, the oldest first.

    Raises:
        ValueError: a file is no result of the bench; it is named.
    """
    here = _machine(report.machine())
    runs = []
    for path in folder.glob("*.json"):
        try:
            tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # Any: JSON
            at, is_alike = tree["machine"]["time"], (_machine(tree["machine"]), tree["short"]) == (here, short)
            found = [Point(r["name"], r["unit"], r["at_most"], r["median"], path.stem.split("-")[0], at)
                     for r in tree["rows"]]  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no result of the bench ({error!r}); delete it, or name another folder"
            ) from error
        runs.append((at, found if is_alike else []))
    for _, found in sorted(runs, key=lambda run: run[0]):
        yield from found


def _machine(facts: dict[str, Any]) -> tuple[object, ...]:
    return tuple(facts[name] for name in MACHINE)


def table(points: Sequence[Point]) -> Table:
    """Return a line for each row, with a bar for each run, and the last step up, if there was one.

    A full bar is the limit that the row has now, or more.
    """
    result = Table(box=None, pad_edge=False)
    for name in ("row", "at most", "first", "last", "runs, the latest right", "commit", "last step up"):
        result.add_column(name, justify="right" if name in ("at most", "first", "last") else "left", no_wrap=True)
    for row in dict.fromkeys(point.row for point in points):
        own = [point for point in points if point.row == row][-MOST_RUNS:]
        first, last = own[0], own[-1]
        bars = "".join(_bar(point.median / last.most) for point in own)
        numbers = (report.number(value, last.unit) for value in (last.most, first.median, last.median))
        over = " OVER" if last.median > last.most else ""
        result.add_row(row, *numbers, f"{bars}{over}", last.commit, _step(own))
    return result


def _bar(share: float) -> str:
    return BARS[max(0, min(len(BARS) - 1, int(share * len(BARS))))]


def _step(points: Sequence[Point]) -> str:
    """Return the latest commit at which a median became so much larger than the one before; "" where none did."""
    pairs = [(a, b) for a, b in itertools.pairwise(points) if a.median > 0 and b.median > STEP * a.median]
    if not pairs:
        return ""
    before, after = pairs[-1]
    return f"{before.median:.3g} → {after.median:.3g} at {after.commit}, {after.at[:10]}"
