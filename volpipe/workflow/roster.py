"""The workers of work that is watched: which are alive, what each takes of its machine, and the task that it does.

Not here: the notes by which they are known (blockwise.notes), or printing (display.workers). Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from volpipe.blockwise.notes import DRIVER, Note, TaskNote, read_workers
from volpipe.runs.presence import Sightings
from volpipe.stages.status import Status
from volpipe.training.task import STAGE as TRAIN

MISSED_NOTES, MORE_SECONDS = 3, 2.0  # after which a worker counts as silent: killed, frozen, or cut off
MOST_DIFFERENCE = 10.0  # seconds between a worker's clock and that of the file system, above which it is named


@dataclass(frozen=True)
class WorkerTask:
    """A task under way: of which of several works, "" of one alone; how much of it is done, 0 to 1; and its note."""

    work: str
    share: float
    note: TaskNote


@dataclass(frozen=True)
class Worker:
    """A worker by its latest note.

    Attributes:
        silent_seconds: since then.
        is_alive: whether it counts: one that is silent does not, nor one that a driver before this one left.
        is_left: whether it is such a one.
        clock_seconds: by which its clock is ahead of the file system's.
    """

    note: Note
    tasks: tuple[WorkerTask, ...]
    silent_seconds: float
    is_alive: bool
    is_left: bool = False
    clock_seconds: float = 0.0

    @property
    def place(self) -> tuple[str, int]:
        return self.note.host, self.note.pid

    def to_json(self) -> dict[str, Any]:  # Any: plain values
        """Return the same in plain values; the keys are those of docs/reference/machines.md."""
        names = ("host", "pid", "cpu_percent", "memory_bytes", "device_percent", "device_used_bytes")
        tasks = [{"work": task.work or None, "share": task.share} | asdict(task.note) for task in self.tasks]
        return {name: getattr(self.note, name) for name in names} | {
            "silent_seconds": round(self.silent_seconds, 3), "alive": self.is_alive, "tasks": tasks,
        }  # fmt: skip


@dataclass
class Roster:
    """Looks at the workers of work as often as it is asked."""

    _sightings: Sightings = field(default_factory=Sightings)

    def look(self, status: Status) -> list[Worker]:
        """Return the workers of the work that has this `status`, by host and process."""
        workers: dict[tuple[str, int], Worker] = {}
        for name, part in _works(status):
            for worker in self._of_work(name, part):
                other = workers.get(worker.place)
                workers[worker.place] = worker if other is None else _joined(worker, other)
        return [workers[place] for place in sorted(workers)]

    def _of_work(self, name: str, status: Status) -> Iterator[Worker]:
        assert status.folder is not None
        notes = list(read_workers(status.folder))
        newest = max([_changed(status.folder / DRIVER), *(changed for _, changed in notes)])
        for note, changed in notes:
            # The clock of the file system counts, and shows the time while the driver does; else it is our own.
            age = (newest if status.driver.is_at_work else max(newest, time.time())) - changed
            age = self._sightings.silence((status.folder, note.host, note.pid), note, age)
            is_left = bool(note.session) and note.session != status.driver.session
            is_alive = not is_left and age <= MISSED_NOTES * note.every + MORE_SECONDS
            tasks = tuple(WorkerTask(name, _share(task, status), task) for task in note.tasks)
            yield Worker(note, tasks, age, is_alive, is_left, note.at - changed)


def _works(status: Status) -> Iterator[tuple[str, Status]]:
    """Yield the works that have workers, each with its name among several."""
    if status.folder is not None:
        yield status.name, status
    for part in status.parts:
        yield from _works(part)
    for number, part in status.at_work.items():
        volume = Path(status.datasets[number].volume).name
        yield from ((f"{volume} {name}".rstrip(), work) for name, work in _works(part))


def _share(task: TaskNote, status: Status) -> float:
    """Return how much of a task is done; a training is one task, whose steps are in its log."""
    if task.stage == TRAIN and TRAIN in status.stages:
        stage = status.stages[TRAIN]
        return stage.done / max(1, stage.all)
    return min(1.0, task.done / task.num_units)


def _joined(one: Worker, other: Worker) -> Worker:
    """Return a worker that does tasks of two works, as its later note has it."""
    later = max(one, other, key=lambda worker: (worker.is_alive, worker.note.at))
    tasks = [task for worker in (other, one) if worker.is_alive for task in worker.tasks]
    return replace(later, tasks=tuple(tasks) if later.is_alive else later.tasks)


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def wrong_clocks(workers: Sequence[Worker]) -> dict[str, float]:
    """Return the hosts whose clocks differ from that of the file system, with the seconds by which they are ahead."""
    ahead = {worker.note.host: worker.clock_seconds for worker in workers}
    return {host: seconds for host, seconds in ahead.items() if abs(seconds) > MOST_DIFFERENCE}
