"""The memory of every process of a run over a large volume, watched from outside, against what its plan said."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import environment, remove, run_folder
from volpipe.inference.plan import Plan
from volpipe.runs.planned import Planned
from volpipe.runs.run_folder import RunFolder

SETTINGS = ("net.name=identity", "windows.blend=hann")
LOOK_SECONDS = 0.5
MIB = 2**20


@dataclass
class Peaks:
    """Highest resident bytes: of the driver, of the largest other process, and of all together at one moment."""

    driver: int = 0
    worker: int = 0
    together: int = 0

    def look(self, driver: psutil.Process, folder: Path) -> None:
        """Take into account what is there now."""
        own = resident(driver)
        others = [resident(process) for process in others_of(driver, folder)]
        self.driver = max(self.driver, own)
        self.worker = max(self.worker, *others, 0)
        self.together = max(self.together, own + sum(others))


def others_of(driver: psutil.Process, folder: Path) -> set[psutil.Process]:
    """Return the processes of the run in `folder` beside its driver; worker pools are no children of it."""
    pools = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    found = set(pools) - {driver}
    for process in (driver, *pools):
        with suppress(psutil.NoSuchProcess):
            found.update(process.children(recursive=True))
    return found - {driver}


def resident(process: psutil.Process) -> int:
    """Return the resident bytes of `process`, 0 where it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def watched(location: str, out: Path) -> Peaks:
    """Return the peaks of `volpipe run` over `location`, looked at twice a second."""
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "volpipe", "run", "--out", str(out), *options, location]
    peaks = Peaks()
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        driver = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peaks.look(driver, run_folder(out))
            except psutil.NoSuchProcess:
                break
            time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise RuntimeError(f"volpipe run ended with {process.returncode}; see {run_folder(out)}/volpipe.log")
    return peaks


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Yield one outcome, however many `repeats`: so long a run has thousands of blocks to differ by."""
    location, out = inputs.volume(setting, setting.cube(1500)), setting.scratch / "out.zarr"
    remove(out)
    started = time.perf_counter()
    peaks = watched(location, out)
    seconds = time.perf_counter() - started
    folder = RunFolder(run_folder(out))
    plan = folder.load(Plan)
    assert plan is not None
    planned = Planned.load(folder.path, plan.identity)
    assert planned is not None and planned.memory_bytes is not None
    sides = {
        "planned worker MiB": planned.memory_bytes / MIB,
        "worker MiB": peaks.worker / MIB,
        "driver MiB": peaks.driver / MIB,
        "all MiB": peaks.together / MIB,
        "seconds": seconds,
    }
    yield Outcome(peaks.worker / planned.memory_bytes, sides)


ROWS = [
    Row(
        "large",
        "peak memory of a worker, 1500³ / planned",
        1.0,
        1.0,
        measure,
        why="1500³ uint8, identity with hann overlap and pyramid, one run, every process watched from outside; "
        "750³ where sizes are short",
    )
]
