"""Works of every kind, of which reports are made, and what their journals and pages hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from volumes import windowed

from volpipe.reporting.page import Item, Page, ReportLink, Sheet
from volpipe.units import brief, size

SHAPE = (8, 16, 32)
EVIL = "<script>alert(1)</script>"
# A net that fails once over a bright block, and always over a grey one.
NET = """
import torch
from pathlib import Path
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="raw"
    )
    def forward(self, x):
        if (x == 255).all() and not Path("tried").exists():
            Path("tried").touch()
            raise ValueError("the bright block fails once")
        if (x == 7).all():
            raise ValueError("the grey block always fails <b>")
        return x
def build():
    return Net()
"""
# A net that never comes back from a bright block.
WAITING = (
    NET.partition("        if (x == 255)")[0].replace("import torch", "import time, torch")
    + """
        while (x == 255).all():
            time.sleep(0.02)
        return x
def build():
    return Net()
"""
)
FAILING = ["net.name=net.py:build", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"), "normalise.method=none"]
IDENTITY = ["net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop")]
SMALL = ["output.shard=[8,8,8]", "output.chunk=[8,8,8]"]
FLOW = """
[[stage]]
name = "first"
net = { name = "identity" }
windows = { shape = [8, 8, 8], overlap = [0, 0, 0], block = [1, 1, 1] }

[[stage]]
name = "objects"
kind = "label"
input = { stage = "first", kind = "foreground" }
objects = { method = "components", threshold = 0.5 }

[[stage]]
name = "scores"
kind = "evaluate"
input = "first"
reference = "in.n5"
"""


def lines_of(*journals: Path) -> list[dict[str, Any]]:
    """Return the lines of journals."""
    return [json.loads(line) for journal in journals for line in journal.read_text().splitlines()]


def items(page: Page) -> list[Item]:
    return [item for section in page.sections for item in section.items]


def sheet(page: Page, title: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a table by their first cell, each by its columns."""
    found = next(item for item in items(page) if isinstance(item, Sheet) and item.title == title)
    return {
        row[0].text if isinstance(row[0], ReportLink) else str(row[0]): dict(zip(found.names, row, strict=True))
        for row in found.rows
    }


def check_sums(rows: dict[str, dict[str, Any]], lines: list[dict[str, Any]], stage: str) -> None:
    """Compare the line of `stage` in the table of stages with those of a journal."""
    own = [line for line in lines if line["stage"] == stage or stage == "all"]
    done, failed = [e for e in own if e["done"]], [e for e in own if e.get("result") == "Attempt"]
    row = {name: value for name, value in rows[stage].items() if value != ""}
    assert row.pop("tasks") == len(done)
    assert row.pop("task time") == brief(sum(e["seconds"] for e in done))
    assert row.pop("read", "0 B") == size(sum(e.get("read_bytes", 0) for e in done))
    assert row.pop("written", "0 B") == size(sum(e.get("written_bytes", 0) for e in done))
    assert row.pop("peak memory") == size(max(e["peak_bytes"] for e in done))
    cpu, wall = sum(e.get("cpu_seconds", 0.0) for e in done), sum(e["seconds"] for e in done)
    assert row.pop("CPU") == f"{100 * cpu / wall:.0f} %"
    assert row.pop("failed attempts", 0) == len(failed)
    queued = sum(e.get("queued_seconds", 0.0) for e in done)
    assert row.pop("queued", brief(0)) == brief(queued / len(done))
