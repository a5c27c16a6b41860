"""Notes of workers: what one writes of its tasks where notes are kept, and what is read of it."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import wait_until
from conftest import ROOT

from volpipe.blockwise.notes import (
    OVER,
    WORKERS,
    Note,
    Reporter,
    StageNote,
    TaskNote,
    WorkerNotes,
    dismiss,
    keeping_notes,
    read_note,
    read_tasks,
    read_workers,
    write_note,
)
from volpipe.blockwise.task import Making, work_behind, work_each
from volpipe.blockwise.usage import GpuSample

HERE = f"process 1 on {socket.gethostname()} since 2026-11-23 10:00:00 (1)"
AWAY = "process 1 on elsewhere since 2026-11-23 10:00:00 (1)"
TASK = TaskNote("infer", 7, 2, 8, "0:4,0:4,4:8", 1.25, 12.5)
OF_WORKER = Note(HERE, "node1", 12, 1e9, every=0.5, cpu_percent=98.5, memory_bytes=1 << 30, tasks=(TASK,) * 64)
OF_DRIVER = Note(HERE, command="volpipe run \udcff", stages={"infer": StageNote(1, 9, 2)}, part=0.25)


def writing() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "volpipe-notes"}


def notes(run: Path) -> list[Note]:
    return [note for note, _ in read_workers(run)]


def reporter(run: Path, session: str = HERE, seconds: float = 0.02, **how: object) -> Reporter:
    """Return what tells of a task to notes of its own: those of other tests' runs may end half a minute later."""
    return Reporter(run, session, notes=WorkerNotes(seconds, 0.4, 0.5), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("note", [OF_WORKER, OF_DRIVER], ids=["worker", "driver"])
def test_a_note_comes_back_as_it_was(note: Note, tmp_path: Path) -> None:
    assert write_note(tmp_path / "n", note)
    assert read_note(tmp_path / "n") == note


@pytest.mark.parametrize("content", [b"", b'{"session": "proc', b'{"tasks": 3}', b"{}", b"[]", b"\xff\x00"])
def test_what_is_no_note_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "n").write_bytes(content)
    assert read_note(tmp_path / "n") is None
    assert read_note(tmp_path / "nowhere") is None


def test_a_task_says_what_it_does_where_notes_are_kept_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volpipe.blockwise.usage.sample_gpu", lambda: GpuSample(87.0, 5))
    before, seen = writing(), list[Note]()

    def one(unit: int) -> None:
        wait_until(lambda: any(task.unit == unit for note in notes(tmp_path) for task in note.tasks), 20)
        seen.extend(notes(tmp_path))

    with keeping_notes(tmp_path):
        record = work_each("measure", [3, 5], one, reporter=reporter(tmp_path, box=lambda unit: f"box {unit}"))
        wait_until(lambda: any(not note.tasks for note in notes(tmp_path)), 20)  # it waits for a task
    assert (record.done, record.failed) == ((3, 5), ())
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: writing() <= before, 20)
    first, last = seen[0].tasks[0], seen[-1].tasks[0]
    assert (first.stage, first.first, first.num_units, first.unit, first.box) == ("measure", 3, 2, 3, "box 3")
    assert (last.unit, last.box, last.done) == (5, "box 5", 1.0)
    assert (seen[-1].host, seen[-1].pid, seen[-1].session) == (socket.gethostname(), os.getpid(), HERE)
    assert (seen[-1].device_percent, seen[-1].device_used_bytes) == (87.0, 5)
    assert 10 << 20 < seen[-1].memory_bytes < 100 << 30


def test_nothing_is_written_and_no_thread_started_where_no_notes_are_kept(tmp_path: Path) -> None:
    def never() -> int:
        raise AssertionError("windows are counted where no notes are kept")

    before, task = writing(), reporter(tmp_path, num_windows=never)
    with task.reporting("infer", [1]):
        task.add(1)
        assert writing() <= before
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_is_shorter_than_the_time_between_two_notes_writes_nothing(tmp_path: Path) -> None:
    own = WorkerNotes()
    with keeping_notes(tmp_path):
        for unit in range(50):
            work_each("discard", [unit], lambda unit: None, reporter=Reporter(tmp_path, HERE, notes=own))
        assert list((tmp_path / WORKERS).iterdir()) == []


def test_windows_tell_how_far_a_task_of_the_net_is(tmp_path: Path) -> None:
    task = reporter(tmp_path, num_windows=lambda: 16)
    with keeping_notes(tmp_path), task.reporting("infer", [7, 8]):
        task.add(4)
        task.add(4)
        wait_until(lambda: read_tasks(tmp_path), 20)
        ((key, (note, at)),) = read_tasks(tmp_path).items()
    assert (key, note.done) == (("infer", 7), 1.0) and at == pytest.approx(time.time(), abs=20)


def test_the_latest_note_of_a_task_counts(tmp_path: Path) -> None:
    (tmp_path / WORKERS).mkdir()
    for pid, at, done in ((1, 90.0, 3.5), (2, 106.0, 1.5)):
        task = TaskNote("infer", 3, 4, 3, "", done, 6.0)
        write_note(tmp_path / WORKERS / f"node-{pid}", Note(HERE, "node", pid, at, tasks=(task,)))
    (tmp_path / WORKERS / "torn-3").write_bytes(b"3 2")
    assert read_tasks(tmp_path) == {("infer", 3): (TaskNote("infer", 3, 4, 3, "", 1.5, 6.0), 106.0)}


def test_tasks_of_threads_of_one_process_share_a_note(tmp_path: Path) -> None:
    together, own = threading.Barrier(3), WorkerNotes(0.02)

    def one(unit: int) -> None:
        together.wait(20)

    def work(unit: int) -> None:
        work_each("edges", [unit], one, reporter=Reporter(tmp_path, HERE, notes=own))

    with keeping_notes(tmp_path):
        workers = [threading.Thread(target=work, args=(unit,)) for unit in range(2)]
        for worker in workers:
            worker.start()
        wait_until(lambda: any(len(note.tasks) == 2 for note in notes(tmp_path)), 20)
        (note,) = notes(tmp_path)
        together.wait(20)
        for worker in workers:
            worker.join()
    assert sorted(task.unit for task in note.tasks) == [0, 1]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_task_whose_driver_was_asked_to_stop_begins_no_other_unit(tmp_path: Path, at_once: int) -> None:
    task, begun = reporter(tmp_path), []

    def make(unit: int) -> Callable[[], int]:
        begun.append(unit)
        if unit == 5:
            dismiss(tmp_path)
            wait_until(lambda: task.is_dismissed, 20)
        return lambda: unit if unit != 4 else int("four")

    with keeping_notes(tmp_path):
        record = work_behind("pyramid 1", [3, 4, 5, 6, 7], Making(make, at_once), sum, reporter=task)
        late = work_each("pyramid 1", [8, 9], lambda unit: None, reporter=reporter(tmp_path))
        assert [note.host for note in notes(tmp_path)] == [socket.gethostname()]
    assert begun == [3, 4, 5]
    assert (record.done, [unit for unit, _ in record.failed], record.result) == ((3, 5), [4], 8)
    assert (late.done, late.failed) == ((), ())


def test_of_a_driver_that_has_ended_nobody_stops_a_task(tmp_path: Path) -> None:
    def wait(unit: int) -> None:
        wait_until(lambda: notes(tmp_path), 20)

    own = WorkerNotes(0.02)
    with keeping_notes(tmp_path):
        work_each("measure", [1], wait, reporter=Reporter(tmp_path, HERE, notes=own))
        dismiss(tmp_path)
        assert (tmp_path / WORKERS / OVER).exists()
    later = Reporter(tmp_path, HERE, notes=own)
    record = work_each("measure", [1, 2], lambda unit: time.sleep(0.1), reporter=later)
    assert record.done == (1, 2)
    dismiss(tmp_path)
    assert list(tmp_path.iterdir()) == []


def written(run: Path, until: Callable[[list[Note]], bool]) -> list[Note]:
    """Return the notes that a worker writes one after the other."""
    seen: list[Note] = []

    def look() -> bool:
        seen.extend(note for note in notes(run) if not seen or note != seen[-1])
        return until(seen)

    wait_until(look, 30)
    return seen


def test_a_worker_on_another_machine_writes_seldom(tmp_path: Path) -> None:
    with keeping_notes(tmp_path), reporter(tmp_path, AWAY).reporting("infer", [1]):
        seen = written(tmp_path, lambda seen: len(seen) == 4)
    assert all(note.every == 0.4 for note in seen)
    assert min(later.at - earlier.at for earlier, later in itertools.pairwise(seen)) > 0.35


def test_a_worker_without_a_task_writes_seldom_and_soon_when_it_has_one(tmp_path: Path) -> None:
    own = WorkerNotes(0.02, idle_seconds=60)
    with keeping_notes(tmp_path):
        with Reporter(tmp_path, HERE, notes=own).reporting("infer", [1]):
            wait_until(lambda: notes(tmp_path), 20)
        wait_until(lambda: not notes(tmp_path)[0].tasks, 20)
        assert notes(tmp_path)[0].every == 60
        began = time.monotonic()
        with Reporter(tmp_path, HERE, notes=own).reporting("infer", [2]):
            wait_until(lambda: any(note.tasks for note in notes(tmp_path)), 20)
        assert time.monotonic() - began < 20


def test_a_folder_that_cannot_be_written_costs_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Path] = []

    def full(path: Path, *options: object) -> int:
        if path.parent.name != WORKERS:
            return write(path, *options)  # type: ignore[arg-type]
        tried.append(path)
        raise OSError(28, "No space left on device")

    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    with keeping_notes(tmp_path):
        record = work_each(
            "edges", [0], lambda unit: wait_until(lambda: len(tried) > 2, 20), reporter=reporter(tmp_path)
        )
    assert record.failed == ()


def test_a_process_that_was_forked_speaks_for_itself(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from volpipe.blockwise.notes import Reporter
run = Path(sys.argv[1])
with Reporter(run, sys.argv[2]).reporting("edges", [1]):
    pid = os.fork()
    if pid == 0:
        with Reporter(run, sys.argv[2]).reporting("edges", [2]):
            sys.stdin.read()
        os._exit(0)
    os.waitpid(pid, 0)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path), HERE]
    with keeping_notes(tmp_path), subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        wait_until(lambda: {task.unit for note in notes(tmp_path) for task in note.tasks} == {1, 2}, 30)
        assert len({note.pid for note in notes(tmp_path)}) == 2
        process.communicate(timeout=30)
    assert process.returncode == 0
