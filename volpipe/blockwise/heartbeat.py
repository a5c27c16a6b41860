"""Beats: small files in which workers note how far their tasks are, for the driver to read.

Not here: what becomes of them (pace). A driver that wants beats makes the folder; where there is none, as where workers
are on other machines, nothing is written. One file for each worker, overwritten in place and deleted at the end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "beats"  # in a run's folder
SECONDS = 0.5  # between two beats, at least
WIDTH = 96  # bytes of a beat: each overwrites the one before


@dataclass(frozen=True)
class Beat:
    """A task's sign of life.

    Attributes:
        unit: the first of its units.
        done: units that are done, parts of one included.
        seconds: since it began.
        at: when it was written, seconds since 1970.
    """

    unit: int
    done: float
    seconds: float
    at: float

    def to_line(self) -> bytes:
        return f"{self.unit} {self.done:.6f} {self.seconds:.3f} {self.at:.3f}".ljust(WIDTH - 1).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Beat | None:
        """Return the beat in `line`, None where it is not whole."""
        parts = line.split()
        if len(line) != WIDTH or len(parts) != 4:
            return None
        return cls(int(parts[0]), *map(float, parts[1:]))


@dataclass
class Beater:
    """A task's counter of windows; it writes a beat now and then where somebody listens.

    Attributes:
        unit: the first of the task's units.
        count: returns how many windows all of them have; called once, where somebody listens.
    """

    unit: int
    num_units: int
    count: Callable[[], int]
    _file: int | None = None
    _done: int = 0
    _all: int = 0
    _began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def add(self, num_windows: int) -> None:
        """Count windows that were computed."""
        self._done += num_windows
        now = time.monotonic()
        if self._file is None or now - self._last < SECONDS:
            return
        self._last = now
        self._all = self._all or max(1, self.count())
        done = self.num_units * self._done / self._all
        with suppress(OSError):  # a full disk: the run has more to say about that than its bar
            os.pwrite(self._file, Beat(self.unit, done, now - self._began, time.time()).to_line(), 0)


@contextmanager
def beating(run: Path, units: Sequence[int], count: Callable[[], int]) -> Iterator[Beater]:
    """Give the counter of windows for a task of `units` of the run in the folder `run`; its driver need not listen."""
    name = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    try:
        file: int | None = os.open(run / FOLDER / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError:  # nobody listens
        file = None
    try:
        yield Beater(units[0], len(units), count, file)
    finally:
        if file is not None:
            os.close(file)


@contextmanager
def listening(run: Path, *, wanted: bool) -> Iterator[Path | None]:
    """Give the folder for the beats of workers, None where they are not `wanted`."""
    folder = run / FOLDER
    _remove(folder)  # of a driver that was killed
    if not wanted:
        yield None
        return
    folder.mkdir()
    try:
        yield folder
    finally:
        _remove(folder)


def read_beats(folder: Path) -> dict[int, Beat]:
    """Return the latest beat of each task whose worker wrote one, by the first of its units."""
    latest: dict[int, Beat] = {}
    for path in folder.iterdir():
        with suppress(OSError):
            beat = Beat.from_line(path.read_bytes())
            if beat is not None and (beat.unit not in latest or latest[beat.unit].at < beat.at):
                latest[beat.unit] = beat
    return latest


def _remove(folder: Path) -> None:
    """Delete the folder, to which a worker that outlived its driver may still write."""
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
