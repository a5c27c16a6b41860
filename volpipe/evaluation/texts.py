"""Numbers of scores and differences as people read them.

Not here: the numbers themselves, or tables of differences (lines).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from volpipe.reporting.page import Sheet

MOST_PARTS = 20  # neurons or classes in a table


def number(value: float | None) -> str:
    """Return a number for people; "not known" where there is none."""
    if value is None or math.isnan(value):
        return "not known"
    return "infinite" if math.isinf(value) else f"{value:,.4g}"


def share_line(num: int, num_all: int) -> str:
    """Return a number of voxels and their share of all: "12 (0.003 %)"."""
    if not num:
        return "0"
    share = num / num_all
    percent = f"{100 * share:.3g}" if share < 0.99995 or num == num_all else f"{100 * share:.6g}"
    return f"{num:,} ({percent} %)"


def part_sheet(title: str, parts: Sequence[Mapping[str, Any]]) -> list[Sheet]:  # Any: JSON
    """Return a table with a row for each neuron or class that is scored, in a list; an empty list without any."""

    def cell(value: object) -> str:
        return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)

    if not parts:
        return []
    rows = [tuple(map(cell, part.values())) for part in parts[:MOST_PARTS]]
    rest = f"{len(parts) - MOST_PARTS:,} more are in the JSON" if len(parts) > MOST_PARTS else ""
    return [Sheet(title, [name.replace("_", " ") for name in parts[0]], rows, rest)]
