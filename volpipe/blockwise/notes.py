"""Notes: each process of a run writes one small file of what it does now; its driver and whoever watches read them.

Not here: what is made of them: the time left (pace), and who is at work (runs.presence, workflow.roster). A note is a
hint: it is whole or not there, and says nothing that a resume rests on. One file for each process, on whichever
machine, its own to write::

    OUT.run/progress.json      the driver's; it stays, with how the driver left
    OUT.run/beats/HOST-PID     a worker's; the folder is there while the driver is, and without it no worker writes
    OUT.run/beats/over         the driver was asked to stop: tasks start no other unit
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from volpipe.volumes.storage.paths import partial_of, whole_file

DRIVER, WORKERS, OVER = "progress.json", "beats", "over"  # in a run's folder, and in that of its workers
SECONDS = 0.5  # between two notes of a worker on the driver's machine
AWAY_SECONDS = 5.0  # of others: the folder is on a shared file system then, which has few of such requests to spare
IDLE_SECONDS = 30.0  # of a worker that has no task
REMOVALS = 3  # attempts: NFS keeps a file that a worker has open until it is closed
LEAST_SAMPLE = 0.2  # seconds, below which a share of a processor says nothing


@dataclass(frozen=True)
class TaskNote:
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
class StageNote:
    """How far a stage is: units done and in all, tasks in flight, units that failed for good."""

    done: int
    all: int
    in_flight: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Note:
    """What a process of a run says of itself; a driver has stages, a worker has tasks.

    Attributes:
        session: the driver, as the lock names it; of a worker, that whose task was its latest, "" where unknown.
        at: when this was written, seconds since 1970 by the clock of the process.
        command: that the driver was started by, and the folder it was given in.
        stages: by name, in their order.
        part: the share of the longest stage that is done, 0 to 1, tasks under way included; None where unknown.
        seconds_left: None while that is not known.
        ended: how the driver left: "ended", "stopped" or "interrupted"; "" while it works.
        waits: until when it waits for its input to change, seconds since 1970; 0 while it does not.
        every: seconds until a worker's next note.
        cpu_percent: of one processor, since the note before, by all threads; above 100 where several are busy.
        memory_bytes: resident memory now.
        device_percent, device_used_bytes: of its GPU now, by all processes; None where NVML does not say.
        tasks: none where it waits for one; several where tasks share a process.
    """

    session: str
    host: str = ""
    pid: int = 0
    at: float = 0.0
    command: str = ""
    folder: str = ""
    stages: Mapping[str, StageNote] = field(default_factory=dict)
    part: float | None = None
    seconds_left: float | None = None
    ended: str = ""
    waits: float = 0.0
    every: float = 0.0
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    device_percent: float | None = None
    device_used_bytes: int | None = None
    tasks: tuple[TaskNote, ...] = ()

    def again(self, *options: str) -> str:
        """Return the driver's command with more `options`, for a shell in this folder; "" where none is known."""
        if not self.command:
            return ""
        words = shlex.split(self.command)
        place = "" if self.folder == str(Path.cwd()) else f"cd {shlex.quote(self.folder)} && "
        return place + shlex.join([*words[:2], *options, *words[2:]])


def write_note(path: Path, note: Note) -> bool:
    """Write `note` in place of the one before, and return whether there is a folder for it.

    A full disk or a lost mount is no fault of the work, which will have more to say about that.
    """
    try:
        with whole_file(path, lasting=False) as partial:
            partial.write_bytes(json.dumps(asdict(note)).encode())
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def read_note(path: Path) -> Note | None:
    """Return the note in the file at `path`; None where there is none, or another version's."""
    import msgspec

    try:
        return msgspec.convert(json.loads(path.read_bytes()), Note)
    except (OSError, ValueError):
        return None


def read_workers(run: Path) -> Iterator[tuple[Note, float]]:
    """Yield the note of each worker of the run in the folder `run`, with the time of its file."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted((run / WORKERS).glob("[!.]*-*")):
            note = read_note(path)
            with suppress(FileNotFoundError):
                if note is not None:
                    yield note, path.stat().st_mtime


def read_tasks(run: Path) -> dict[tuple[str, int], tuple[TaskNote, float]]:
    """Return the tasks under way by stage and first unit, and when that was written; of two notes of one the later."""
    latest: dict[tuple[str, int], tuple[TaskNote, float]] = {}
    for note, _ in read_workers(run):
        for task in note.tasks:
            key = task.stage, task.first
            if key not in latest or latest[key][1] < note.at:
                latest[key] = task, note.at
    return latest


@contextmanager
def keeping_notes(run: Path) -> Iterator[None]:
    """Keep the folder for notes of workers in the run's folder meanwhile; a full disk is no reason to fail."""
    folder = run / WORKERS
    _remove(folder)  # of a driver that was killed
    with suppress(OSError):
        folder.mkdir()
    try:
        yield
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Delete the folder at once, to which workers may still write."""
    with suppress(OSError):
        removed = folder.rename(partial_of(folder))
        for _ in range(REMOVALS):
            shutil.rmtree(removed, ignore_errors=True)
            if not removed.exists():
                return
            time.sleep(0.1)


def dismiss(run: Path) -> None:
    """Let tasks of the run in the folder `run` start no other unit, where its notes are kept."""
    with suppress(OSError):
        (run / WORKERS / OVER).touch()


def no_box(unit: int) -> object:
    """Return the box of a unit that stands for none."""
    return ""


@dataclass
class _Run:
    """A run that this process works for: its tasks under way, and when its next note is due, by the monotonic clock."""

    folder: Path
    session: str
    every: float  # seconds between two notes while there are tasks
    due: float
    tasks: list[Reporter] = field(default_factory=list)
    latest: float = 0.0  # note

    def look(self) -> None:
        """Dismiss the tasks if the driver was asked to stop."""
        if (self.folder / OVER).exists():
            for task in self.tasks:
                task.is_dismissed = True


class WorkerNotes:
    """The notes of a process, written by a thread while there are runs whose drivers keep notes.

    Args:
        seconds, away_seconds: between two notes, on the driver's machine and elsewhere.
        idle_seconds: the same while there is no task.
    """

    def __init__(
        self, seconds: float = SECONDS, away_seconds: float = AWAY_SECONDS, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.seconds, self.away_seconds, self.idle_seconds = seconds, away_seconds, idle_seconds
        self._changed = threading.Condition()
        self._runs: dict[Path, _Run] = {}
        self._thread: threading.Thread | None = None
        self._sampled, self._cpu, self._percent = 0.0, 0.0, 0.0

    def start(self, run: Path, task: Reporter) -> bool:
        """Tell of `task`, which is of `run`, from now on; return whether notes are kept."""
        with self._changed:
            of_run, now = self._runs.get(run), time.monotonic()
            if of_run is None:
                if not (run / WORKERS).is_dir():
                    return False
                is_here = f" on {socket.gethostname()} since " in task.session
                every = self.seconds if is_here else self.away_seconds
                of_run = self._runs[run] = _Run(run / WORKERS, task.session, every, now + self.seconds)
            of_run.session = task.session
            of_run.tasks.append(task)
            of_run.look()
            if of_run.latest:
                of_run.due = min(of_run.due, max(now, of_run.latest + of_run.every))
            if self._thread is None:
                self._sampled, self._cpu = now, time.process_time()
                self._thread = threading.Thread(target=self._write_all, name="volpipe-notes", daemon=True)
                self._thread.start()
            self._changed.notify()
        return True

    def end(self, run: Path, task: Reporter) -> None:
        """Tell no more of `task`; the file stays until the driver deletes it."""
        with self._changed:
            if run in self._runs and task in self._runs[run].tasks:
                self._runs[run].tasks.remove(task)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._runs:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [run for run in self._runs.values() if run.due <= now]
                for run in due:
                    run.latest, run.due = now, now + self._pause(run)
                if not due:
                    self._changed.wait(min(run.due for run in self._runs.values()) - now)
            for run in due:
                note = self._note_of_run(run)
                is_gone = not write_note(run.folder / f"{note.host}-{note.pid}", note)
                with self._changed:
                    run.look()
                    if is_gone and not run.folder.is_dir():  # a new driver may have made it again
                        del self._runs[run.folder.parent]

    def _pause(self, run: _Run) -> float:
        return run.every if run.tasks else self.idle_seconds

    def _note_of_run(self, run: _Run) -> Note:
        import psutil

        from volpipe.blockwise.usage import sample_gpu  # numpy, which the command line does without

        gpu = sample_gpu()
        return Note(
            run.session, socket.gethostname(), os.getpid(), time.time(), every=self._pause(run),
            cpu_percent=self._cpu_percent(), memory_bytes=int(psutil.Process().memory_info().rss),
            device_percent=None if gpu is None else gpu.percent,
            device_used_bytes=None if gpu is None else gpu.used_bytes,
            tasks=tuple(task.note() for task in tuple(run.tasks)),
        )  # fmt: skip

    def _cpu_percent(self) -> float:
        """Return the share of a processor that was used since the last sample, in percent; several runs share it."""
        now, cpu = time.monotonic(), time.process_time()
        if now - self._sampled >= LEAST_SAMPLE:
            self._percent = 100 * (cpu - self._cpu) / (now - self._sampled)
            self._sampled, self._cpu = now, cpu
        return round(self._percent, 1)


_of_process = WorkerNotes()


def _forget() -> None:
    """Begin anew in a process that was forked: it has not the thread."""
    global _of_process
    _of_process = WorkerNotes()


os.register_at_fork(after_in_child=_forget)


@dataclass(eq=False)
class Reporter:
    """A task's part of its worker's note.

    Args:
        run: folder of the run; None where no note is written.
        session: of the driver that sent the task.
        box: returns that of a unit.
        num_windows: returns how many windows all units have, of a task that counts them; called where notes are kept.
        notes: those of the worker; by default, of this process.

    Attributes:
        is_dismissed: whether the task is to start no other unit, since its driver was asked to stop.
    """

    run: Path | None = None
    session: str = ""
    box: Callable[[int], object] = no_box
    num_windows: Callable[[], int] | None = None
    notes: WorkerNotes | None = None
    stage: str = field(default="", init=False)
    is_dismissed: bool = field(default=False, init=False)
    _units: Sequence[int] = field(default=(), init=False)
    _is_kept: bool = field(default=False, init=False)
    _num_over: int = field(default=0, init=False)  # units
    _windows: int = field(default=0, init=False)
    _all_windows: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)

    @contextmanager
    def reporting(self, stage: str, units: Sequence[int]) -> Iterator[None]:
        """Let the worker's note tell of the task meanwhile."""
        self.stage, self._units, self._began = stage, units, time.monotonic()
        notes = self.notes or _of_process
        if self.run is None or not notes.start(self.run, self):
            yield
            return
        self._is_kept = True
        try:
            yield
        finally:
            notes.end(self.run, self)

    def add(self, num_windows: int) -> None:
        """Count windows that were computed."""
        self._windows += num_windows
        if self._is_kept and self.num_windows is not None and not self._all_windows:
            self._all_windows = max(1, self.num_windows())

    def finish(self) -> None:
        """Count a unit that is over, whether it is done or failed."""
        self._num_over += 1

    def note(self) -> TaskNote:
        """Return how far the task is; asked by another thread."""
        units, done = self._units, float(self._num_over)
        if self.num_windows is not None:
            done = len(units) * self._windows / self._all_windows if self._all_windows else 0.0
        seconds = time.monotonic() - self._began
        unit = units[min(self._num_over, len(units) - 1)]
        return TaskNote(
            self.stage, units[0], len(units), unit, self._box_of_unit(unit), round(done, 6), round(seconds, 3)
        )

    def _box_of_unit(self, unit: int) -> str:
        try:
            return str(self.box(unit))
        except Exception:  # a plan that cannot be read, say: the task itself fails by that, and says so
            return ""
