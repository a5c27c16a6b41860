"""What a batch costs over its tasks: of few datasets and of many, of several recipes; and its driver's memory.

Seconds of tasks are those that workers noted, per worker that did any: a batch takes at least these.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import inputs
from benchmarks.engine.driver import MIB
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import environment
from volpipe.blockwise.journal import read_records
from volpipe.errors import VolpipeError
from volpipe.runs.worker import RESULTS as RUN_RESULTS
from volpipe.segmentation.tasks import RESULTS as SEGMENT_RESULTS
from volpipe.volumes.storage.paths import delete

TINY = ("net.name=identity", "windows.shape=[16,16,16]", "output.levels=0")
SIZES = (1, 11, 40)
SEVERAL = (
    ("default", ""),
    ("superres_z2", ""),
    ("affinities", ""),
    ("segment", ""),
    ("superres_z4", ""),
    ("default", 'windows.blend = "hann"'),
    ("segment", "affinities.windows.shape = [64, 64, 64]"),
    ("default", 'net.name = "identity"'),
    ("superres_z2", 'windows.blend = "gaussian"'),
    ("default", 'output.format = "n5"'),
    ("default", 'output.dtype = "float32"'),
)


@dataclass(frozen=True)
class Cost:
    """Seconds of a batch: of the command, and of its tasks, per worker that did any."""

    wall: float
    tasks: float

    @property
    def over(self) -> float:
        return self.wall - self.tasks


def batch(folder: Path, arguments: Sequence[str]) -> Cost:
    """Return what `volpipe batch` costs, given as a command, whose outputs are thrown away.

    Raises:
        VolpipeError: it ended with another code than 0.
    """
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "volpipe", "batch", *arguments],
        capture_output=True, text=True, env=environment(), cwd=folder, check=False,
    )  # fmt: skip
    wall = time.perf_counter() - began
    if ended.returncode:
        raise VolpipeError(f"volpipe batch ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    tasks = _seconds_per_worker(folder / "out")
    for name in ("out", "out.batch"):
        delete(folder / name)
    return Cost(wall, tasks)


def _seconds_per_worker(folder: Path) -> float:
    kinds = (*RUN_RESULTS, *SEGMENT_RESULTS)
    usages = [record.usage for path in folder.rglob("journal.jsonl") for record in read_records(path, kinds)]
    return sum(usage.seconds for usage in usages) / len({usage.pid for usage in usages})


def of_one_recipe(setting: Setting, shape: tuple[int, int, int], num: int, *settings: str) -> Cost:
    """Return what a batch of `num` equal volumes costs, the default recipe with `settings`."""
    places = inputs.volumes(setting, shape, num)
    (setting.scratch / "volumes.txt").write_text("\n".join(places) + "\n", encoding="utf-8")
    given = [part for each in settings for part in ("--set", each)]
    return batch(setting.scratch, ["volumes.txt", "-o", "out", *given])


def measure_small(setting: Setting, repeats: int) -> Iterator[Outcome]:
    cost = partial(of_one_recipe, setting, setting.cube(128))
    for turn in range(repeats):
        costs = {num: cost(num) for num in ((1, 20) if turn % 2 else (20, 1))}
        yield _against_tasks(costs[20], costs[1])


def _against_tasks(many: Cost, one: Cost) -> Outcome:
    sides = {"s": many.wall, "s of tasks per worker": many.tasks, "s of start": one.over}
    return Outcome(many.wall / (many.tasks + one.over), sides)


def measure_overhead(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for turn in range(repeats):
        over = {num: of_one_recipe(setting, (16, 16, 16), num, *TINY).over for num in SIZES[:: -1 if turn % 2 else 1]}
        slope, constant = np.polyfit(SIZES, [over[num] for num in SIZES], 1)
        yield Outcome(float(slope), {"constant s": float(constant), **{f"{num}: s": over[num] for num in SIZES}})


def measure_several(setting: Setting, repeats: int) -> Iterator[Outcome]:
    shape = setting.cube(128)
    places = inputs.volumes(setting, shape, len(SEVERAL))
    tables = (
        f'[[dataset]]\nvolume = "{place}"\nrecipe = "{recipe}"\n{settings}\n'
        for place, (recipe, settings) in zip(places, SEVERAL, strict=True)
    )
    (setting.scratch / "several.toml").write_text('out = "out/{stem}"\n' + "\n".join(tables), encoding="utf-8")
    for _ in range(repeats):
        one = of_one_recipe(setting, shape, 1)
        yield _against_tasks(batch(setting.scratch, ["several.toml"]), one)


def measure_memory(setting: Setting, repeats: int) -> Iterator[Outcome]:
    few, many = (50, 100) if setting.short else (500, 1000)  # before that, caches fill
    for turn in range(repeats):
        peaks = {num: _driver_peak(setting, num) for num in ((few, many) if turn % 2 else (many, few))}
        slope = (peaks[many] - peaks[few]) / (many - few)
        sides = {f"{num:,} datasets: MiB": peaks[num] / MIB for num in (few, many)}
        yield Outcome((peaks[many] + (10_000 - many) * slope) / MIB, sides | {"KiB per dataset": slope / 1024})


def _driver_peak(setting: Setting, num: int) -> float:
    """Return the highest resident memory, in bytes, of a driver of `num` tiny datasets, in a process of its own."""
    places = inputs.volumes(setting, (16, 16, 16), num)
    with tempfile.TemporaryDirectory(dir=setting.scratch) as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.batches", folder],
            input=json.dumps(places), capture_output=True, text=True, env=environment(), check=False,
        )  # fmt: skip
    if ended.returncode:
        raise VolpipeError(ended.stderr)
    return float(ended.stdout.splitlines()[-1])


def drive(folder: Path, places: Sequence[str]) -> int:
    """Return the highest resident memory of this process, in bytes, after it drove a batch over `places`."""
    import volpipe
    from volpipe.blockwise.usage import peak_bytes

    report = volpipe.batch(places, out=folder / "out", site="local", settings=TINY)
    assert report.is_complete, [row.reason for row in report.rows]
    return peak_bytes()


WHY = "volpipe batch as a command on the site local; seconds that tasks noted, by the number of workers that did any; "
ROWS = [
    Row(
        "batch",
        "20 small volumes / their tasks and the start",
        1.1,
        1.0,
        measure_small,
        why=WHY + "128³ uint8, default recipe; the start is what one of them alone takes over its tasks",
    ),
    Row(
        "batch-overhead",
        "batch over its tasks, per dataset",
        0.1,
        0.05,
        measure_overhead,
        unit="s",
        why=WHY + "1, 11 and 40 volumes of 16³, identity, tasks of milliseconds: the slope of a line through the three",
    ),
    Row(
        "batch-several",
        "11 datasets of different recipes / their tasks and the start",
        1.25,
        1.1,
        measure_several,
        why=WHY + "128³ uint8; six recipes of one net and their variants, two segmentations in two stages",
    ),
    Row(
        "batch-memory",
        "driver of a batch, 10,000 datasets",
        286.0,
        200.0,
        measure_memory,
        unit="MiB",
        why="peak of the driver of 500 and of 1,000 volumes of 16³, identity, site local; extended to 10,000 by a line",
    ),
]

if __name__ == "__main__":
    print(drive(Path(sys.argv[1]), json.load(sys.stdin)))
