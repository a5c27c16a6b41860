"""From the command to its first task, on this machine's own site."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import command


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    location = inputs.volume(setting, (128, 128, 128))
    for _ in range(repeats):
        printed = command(location, setting.scratch / "out.zarr", ["net.name=identity"])
        found = re.search(r"([\d.]+) s in all, first task after ([\d.]+) s", printed)
        assert found, printed
        yield Outcome(float(found[2]), {"first task": float(found[2]), "loop": float(found[1])})


ROWS = [
    Row("start", "command to first task", 5.0, 4.0, measure, unit="s", why="volpipe run on the site local, 128³ uint8")
]
