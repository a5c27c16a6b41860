"""How much disk a run needs beside its output, at the worst moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import run_folder, session

SETTINGS = (
    "net.name=identity",
    "windows.shape=[64,64,64]",
    "windows.overlap=32",
    "windows.blend=hann",
    "output.levels=0",
)
LOOK_SECONDS = 0.02
MIB = 2**20


def used(folder: Path) -> int:
    """Return the bytes of all files below `folder`, some of which may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


class Highest:
    """The most that a folder's files took, looked at every 20 ms by a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.bytes = max(self.bytes, used(self._folder))
            except FileNotFoundError:
                continue


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    location = inputs.volume(setting, setting.cube(512))
    out = setting.scratch / "out.zarr"
    with session(setting) as running:
        for _ in range(repeats):
            with Highest(run_folder(out)) as highest:
                running.run(location, *SETTINGS)
            yield Outcome(
                highest.bytes / used(out), {"MiB scratch": highest.bytes / MIB, "MiB output": used(out) / MIB}
            )


ROWS = [
    Row(
        "scratch",
        "scratch at its highest / output",
        2.0,
        1.2,
        measure,
        why="512³ uint8, windows of 64³ with 50 % overlap, hann; bytes of all files in the run's folder by those of "
        "the output, both as compressed on disk",
    )
]
