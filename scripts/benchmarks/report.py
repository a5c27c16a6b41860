"""The bench as a table and as JSON, with the machine that it ran on.

Not here: printing, or measuring.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from benchmarks.row import Measured

PACKAGES = ("volpipe", "numpy", "torch", "tensorstore", "parsl", "z5py", "zarr", "dask")


def number(value: float, unit: str) -> str:
    """Return a value for people, three digits of it or two after the point."""
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return f"{text} {unit}".strip()


def table(rows: Sequence[Measured]) -> Table:
    """Return one line for each row."""
    found = Table(box=None, pad_edge=False)
    for name in ("row", "", "median", "min..max", "at most", "aim", "", "sides (medians)", "load"):
        found.add_column(name, justify="right" if name in ("median", "min..max", "at most", "aim") else "left")
    for measured in rows:
        row, (low, high) = measured.row, measured.spread
        found.add_row(
            row.name,
            row.what,
            number(measured.median, row.unit),
            f"{number(low, '')}..{number(high, '')}",
            number(row.most, row.unit),
            number(row.aim, row.unit),
            measured.verdict,
            ", ".join(f"{name} {number(value, '')}" for name, value in sides(measured).items()),
            f"{measured.loads[0]:.1f}, {measured.loads[1]:.1f}",
        )
    return found


def sides(measured: Measured) -> dict[str, float]:
    """Return the median of each side."""
    names = measured.outcomes[0].sides
    middle = len(measured.outcomes) // 2
    return {name: sorted(outcome.sides[name] for outcome in measured.outcomes)[middle] for name in names}


def machine() -> dict[str, object]:
    """Return what this was measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": gpu(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def machine_line() -> str:
    """Return the machine in words."""
    found = machine()
    return (
        f"{found['cores']} cores, {found['memory_gib']} GiB, {found['gpu'] or 'no GPU'}, load {os.getloadavg()[0]:.1f}"
    )


def gpu() -> str | None:
    """Return the name of the GPU, None where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def write_json(path: Path, rows: Sequence[Measured], *, repeats: int, short: bool) -> None:
    """Write every number that was measured."""
    path.write_text(json.dumps(tree(rows, repeats=repeats, short=short), indent=2) + "\n", encoding="utf-8")


def tree(rows: Sequence[Measured], *, repeats: int, short: bool) -> dict[str, Any]:  # Any: JSON
    """Return every number that was measured, the machine that it was measured on and when."""
    return {
        "machine": machine(),
        "repeats": repeats,
        "short": short,
        "rows": [
            {
                "name": m.row.name,
                "what": m.row.what,
                "why": m.row.why,
                "unit": m.row.unit,
                "at_most": m.row.most,
                "aim": m.row.aim,
                "median": m.median,
                "min": m.spread[0],
                "max": m.spread[1],
                "outcomes": [{"value": o.value, "sides": o.sides} for o in m.outcomes],
                "load": m.loads,
                "seconds": m.seconds,
            }
            for m in rows
        ],
    }


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
