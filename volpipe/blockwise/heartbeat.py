"""Signs of life: small files in a run's folder in which workers note what they do now, for its driver and for watchers.

Not here: what becomes of them (pace, workflow.roster). The driver makes the folder for its session and deletes it at
the end; where there is none, nothing is written. One file for each process, on whichever machine, its own to write::

    OUT.run/beats/HOST-PID      crc32 {"host": …, "cpu_percent": …, "tasks": [{"stage": "infer", "unit": 3, …}]}
    OUT.run/beats/over          the driver was asked to stop: tasks are to begin no other unit
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from volpipe.blockwise.gpu import sample_gpu

FOLDER, OVER = "beats", "over"  # in a run's folder, and in that
SECONDS = 0.5  # between two signs of a worker on the driver's machine
AWAY_SECONDS = 5.0  # of others: the folder is on a shared file system then, and a sign is an open, a write and a close
IDLE_SECONDS = 30.0  # of a worker that has no task
LEAST_SAMPLE = 0.2  # seconds, below which a share of a processor says nothing
PADDED = 512  # the size of a sign is a multiple of it, so that its file seldom grows


@dataclass(frozen=True)
class TaskSign:
    """A task under way.

    Attributes:
        first, num_units: the first of its units, and how many it has; `unit` is the one it is at.
        box: of that, in voxels of the level that the stage writes; "" where it has none.
        done: units that are done, parts of one included.
        seconds: since it began.
    """

    stage: str
    first: int
    num_units: int
    unit: int
    box: str
    done: float
    seconds: float


@dataclass(frozen=True)
class Sign:
    """What a worker says of itself.

    Attributes:
        session: of the driver whose task was its latest, "" where it does not know.
        at: when it was written, seconds since 1970 by the worker's clock.
        every: seconds until the next one.
        cpu_percent: of one processor, since the sign before, by all threads; above 100 where several are busy.
        memory_bytes: resident memory now.
        device_percent, device_used_bytes: of its GPU now, by all processes; None where NVML does not say.
        tasks: none where it waits for one; several where tasks share a process.
    """

    host: str
    pid: int
    session: str
    at: float
    every: float
    cpu_percent: float
    memory_bytes: int
    device_percent: float | None = None
    device_used_bytes: int | None = None
    tasks: tuple[TaskSign, ...] = ()

    def to_line(self) -> bytes:
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        line = b"%08x %s" % (zlib.crc32(text), text)
        return line.ljust(-(-(len(line) + 1) // PADDED) * PADDED - 1) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Sign | None:
        """Return the sign in `line`, None where it is not whole, or another version's."""
        crc, _, text = line.rstrip().partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            return None
        try:
            fields = json.loads(text)
            return cls(**fields | {"tasks": tuple(TaskSign(**task) for task in fields["tasks"])})
        except (ValueError, TypeError, KeyError):
            return None


def no_box(unit: int) -> object:
    """Return the box of a unit that stands for none."""
    return ""


@dataclass(eq=False)
class Beater:
    """A task's part of its worker's sign.

    Args:
        run: folder of the run; None where nobody is told.
        session: of the driver that sent the task.
        box: returns that of a unit.
        num_windows: returns how many windows all units have, of a task that counts them; called where somebody listens.

    Attributes:
        is_dismissed: whether the task is to begin no other unit, since its driver was asked to stop.
    """

    run: Path | None = None
    session: str = ""
    box: Callable[[int], object] = no_box
    num_windows: Callable[[], int] | None = None
    stage: str = field(default="", init=False)
    is_dismissed: bool = field(default=False, init=False)
    _units: Sequence[int] = field(default=(), init=False)
    _is_heard: bool = field(default=False, init=False)
    _num_over: int = field(default=0, init=False)  # units
    _windows: int = field(default=0, init=False)
    _all_windows: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)

    @contextmanager
    def beating(self, stage: str, units: Sequence[int]) -> Iterator[None]:
        """Let the worker's sign speak of the task meanwhile."""
        self.stage, self._units, self._began = stage, units, time.monotonic()
        self._is_heard = self.run is not None and _worker.begin(self)
        try:
            yield
        finally:
            if self._is_heard:
                _worker.end(self)

    def add(self, num_windows: int) -> None:
        """Count windows that were computed."""
        self._windows += num_windows
        if self._is_heard and self.num_windows is not None and not self._all_windows:
            self._all_windows = max(1, self.num_windows())

    def finish(self) -> None:
        """Count a unit that is over, whether it is done or failed."""
        self._num_over += 1

    def sign(self) -> TaskSign:
        """Return how far the task is; asked by another thread."""
        units, done = self._units, float(self._num_over)
        if self.num_windows is not None:
            done = len(units) * self._windows / self._all_windows if self._all_windows else 0.0
        seconds = time.monotonic() - self._began
        unit = units[min(self._num_over, len(units) - 1)]
        return TaskSign(self.stage, units[0], len(units), unit, self._box(unit), round(done, 6), round(seconds, 3))

    def _box(self, unit: int) -> str:
        try:
            return str(self.box(unit))
        except Exception:  # a plan that cannot be read, say: the task itself fails by that, and says so
            return ""


@dataclass
class _Run:
    """A run that this process works for: its tasks under way, and when its next sign is due, by the monotonic clock."""

    folder: Path
    session: str
    due: float
    tasks: list[Beater] = field(default_factory=list)
    latest: float = 0.0  # sign
    pause: float = SECONDS

    @property
    def every(self) -> float:
        """The seconds between two signs while it works."""
        return SECONDS if f" on {socket.gethostname()} since " in self.session else AWAY_SECONDS

    def look(self) -> None:
        """Dismiss the tasks if the driver was asked to stop."""
        if (self.folder / OVER).exists():
            for task in self.tasks:
                task.is_dismissed = True

    def plan_next(self, now: float) -> None:
        """Note that a sign was written: the next is due soon while there are tasks, ever later while there are none."""
        self.latest = now
        self.pause = self.every if self.tasks else min(IDLE_SECONDS, 2 * max(self.pause, self.every))
        self.due = now + self.pause


class _Load:
    """What this process takes of its machine; shared by the signs of several runs."""

    def __init__(self) -> None:
        self._at, self._cpu, self._percent = time.monotonic(), time.process_time(), 0.0

    def cpu_percent(self) -> float:
        """Return the share of a processor that was used since the last sample, in percent."""
        now, cpu = time.monotonic(), time.process_time()
        if now - self._at >= LEAST_SAMPLE:
            self._percent = 100 * (cpu - self._cpu) / (now - self._at)
            self._at, self._cpu = now, cpu
        return round(self._percent, 1)


class _Worker:
    """The signs of this process, written by a thread of its own while there are runs that somebody listens to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: dict[Path, _Run] = {}
        self._silent: set[tuple[Path, str]] = set()  # runs and sessions without a folder for signs
        self._thread: threading.Thread | None = None
        self._load = _Load()

    def begin(self, task: Beater) -> bool:
        """Speak of `task` from now on; return whether somebody listens."""
        assert task.run is not None
        with self._changed:
            run = self._runs.get(task.run)
            if run is None and not self._is_heard(task.run, task.session):
                return False
            now = time.monotonic()
            if run is None:
                run = self._runs[task.run] = _Run(task.run / FOLDER, task.session, now + SECONDS)
            run.session = task.session
            run.tasks.append(task)
            run.look()
            run.due = min(run.due, max(now, run.latest + run.every)) if run.latest else run.due
            if self._thread is None:
                self._load = _Load()
                self._thread = threading.Thread(target=self._speak, name="volpipe-signs", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def _is_heard(self, run: Path, session: str) -> bool:
        if (run, session) not in self._silent and not (run / FOLDER).is_dir():
            self._silent.add((run, session))
        return (run, session) not in self._silent

    def end(self, task: Beater) -> None:
        """Speak no more of `task`; the file stays until the driver deletes it."""
        assert task.run is not None
        with self._changed:
            if task.run in self._runs and task in self._runs[task.run].tasks:
                self._runs[task.run].tasks.remove(task)

    def _speak(self) -> None:
        while True:
            with self._changed:
                if not self._runs:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [run for run in self._runs.values() if run.due <= now]
                for run in due:
                    run.plan_next(now)
                if not due:
                    self._changed.wait(min(run.due for run in self._runs.values()) - now)
            for run in due:
                sign = self._sign(run)
                if not _write(run.folder / f"{sign.host}-{sign.pid}", sign):
                    self._leave(run)
                with self._changed:
                    run.look()

    def _sign(self, run: _Run) -> Sign:
        gpu, tasks = sample_gpu(), tuple(task.sign() for task in tuple(run.tasks))
        return Sign(
            socket.gethostname(), os.getpid(), run.session, time.time(), run.pause,
            self._load.cpu_percent(), _memory_bytes(),
            None if gpu is None else gpu.percent, None if gpu is None else gpu.used_bytes, tasks,
        )  # fmt: skip

    def _leave(self, run: _Run) -> None:
        """Speak no more to a run whose driver has deleted the folder, unless a new one has made it again."""
        with self._changed:
            if not run.folder.is_dir():
                del self._runs[run.folder.parent]


_worker = _Worker()


def _forget() -> None:
    """Begin anew in a process that was forked: it has not the thread."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget)


def _memory_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _write(path: Path, sign: Sign) -> bool:
    """Write `sign` over the one before; return whether there is still a folder for it.

    Closed each time: only then do other machines see it on NFS.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except FileNotFoundError:
        return False
    except OSError:  # a full disk, a lost mount: the run has more to say about that than its signs
        return True
    try:
        line = sign.to_line()
        os.pwrite(file, line, 0)
        if os.fstat(file).st_size > len(line):
            os.ftruncate(file, len(line))
    except OSError:
        return True
    finally:
        with suppress(OSError):
            os.close(file)
    return True


@contextmanager
def listening(run: Path) -> Iterator[None]:
    """Keep the folder for signs in the run's folder meanwhile; its disk may be full, which is no reason to fail."""
    folder = run / FOLDER
    _remove(folder)  # of a driver that was killed
    with suppress(OSError):
        folder.mkdir()
    try:
        yield
    finally:
        _remove(folder)


def dismiss(run: Path) -> None:
    """Let tasks of the run in the folder `run`, to whose signs somebody listens, begin no other unit."""
    with suppress(OSError):
        (run / FOLDER / OVER).touch()


def read_signs(run: Path) -> list[tuple[Sign, float]]:
    """Return the sign of each worker of the run in the folder `run`, with the time of its file; [] without any."""
    signs = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted((run / FOLDER).iterdir()):
            with suppress(FileNotFoundError):
                sign = Sign.from_line(path.read_bytes())
                signs += [(sign, path.stat().st_mtime)] if sign is not None else []
    return signs


@dataclass(frozen=True)
class Beat:
    """How far a task is.

    Attributes:
        done: units that are done, parts of one included.
        seconds: since it began.
        at: when that was written, seconds since 1970.
    """

    done: float
    seconds: float
    at: float


def read_beats(run: Path) -> dict[tuple[str, int], Beat]:
    """Return how far tasks under way are, by stage and first unit; of those whose workers say it."""
    latest: dict[tuple[str, int], Beat] = {}
    for sign, _ in read_signs(run):
        for task in sign.tasks:
            key = task.stage, task.first
            if key not in latest or latest[key].at < sign.at:
                latest[key] = Beat(task.done, task.seconds, sign.at)
    return latest


def _remove(folder: Path) -> None:
    """Delete the folder, to which workers may still write."""
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
        folder.rmdir()
