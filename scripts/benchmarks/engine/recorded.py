"""Times of real tasks, by stage, from which the simulation of scaling (scaling) draws: recorded.json beside this file.

    PYTHONPATH=.:scripts python -m benchmarks.engine.recorded FOLDER    # makes it anew; some minutes, FOLDER for inputs

Two runs of the default recipe over an invented volume give them, in small blocks, on this machine's workers: one as it
comes, whose windows are cropped, and one of blended windows, which has tasks that add blocks up and delete scratch.
Times count from a task's start to its end on its worker. Not here: how long a task waits for a worker.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import inputs, report
from benchmarks.row import Setting
from benchmarks.session import command, run_folder
from volpipe.blockwise.journal import read_records
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS

FILE = Path(__file__).with_suffix(".json")
SHAPE = (256, 512, 512)
RUNS = {
    "cropped": ("windows.shape=[84,84,84]", "windows.block=[1,2,2]"),
    "blended": (
        "input.roi=0:192,0:256,0:256",
        "windows.blend=hann",
        "windows.shape=[48,64,64]",
        "windows.block=[2,2,2]",
    ),
}  # fmt: skip
STAGES = ("infer", "reassemble", "pyramid", "discard")


@cache
def shares() -> dict[str, np.ndarray]:
    """Return the recorded times of units, by stage, as shares of the mean time of a block in the net's stage."""
    pooled = defaultdict[str, list[float]](list)
    for stages in json.loads(FILE.read_text())["seconds"].values():
        mean = float(np.mean(stages["infer"]))
        for stage, seconds in stages.items():
            pooled[stage] += [each / mean for each in seconds]
    return {stage: np.array(each) for stage, each in pooled.items()}


def record(cache_folder: Path) -> dict[str, object]:
    """Return the times of both runs, and how they were taken."""
    seconds, cpu_seconds, loads = {}, {}, [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=cache_folder) as scratch:
        location = inputs.volume(Setting(cache_folder, Path(scratch), False), SHAPE)
        for name, settings in RUNS.items():
            out = Path(scratch) / f"{name}.zarr"
            command(location, out, settings)
            journal = RunFolder(run_folder(out)).journal
            seconds[name], cpu_seconds[name] = by_stage(journal, "seconds"), by_stage(journal, "cpu_seconds")
            loads.append(os.getloadavg()[0])
    return {
        "volume": f"invented, {SHAPE} voxels (z, y, x)",
        "runs": {name: " ".join(("volpipe run", *settings)) for name, settings in RUNS.items()},
        "machine": {name: report.machine()[name] for name in ("cores", "memory_gib", "gpu", "time")},
        "load": [round(load, 1) for load in loads],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def by_stage(journal: Path, what: str) -> dict[str, list[float]]:
    """Return the time of each unit that is done, by stage; units of one task have a part of its time each.

    `what` is "seconds" or "cpu_seconds", as of `Usage`.
    """
    seconds = defaultdict[str, list[float]](list)
    for entry in read_records(journal, RESULTS):
        stage = entry.stage.split()[0]
        if stage in STAGES and entry.done:
            seconds[stage] += [round(getattr(entry.usage, what) / len(entry.done), 6)] * len(entry.done)
    return dict(seconds)


def facts() -> Iterator[str]:
    """Yield a line for each stage: units, and their times as shares of the mean of the net's stage."""
    for stage, each in shares().items():
        low, middle, high = np.percentile(each, [5, 50, 95])
        yield f"{stage}: {len(each)} units, {low:.4f} {middle:.4f} {high:.4f} (5, 50, 95 %), at most {each.max():.4f}"


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
    print(*facts(), sep="\n")
