"""Signs of life: what a worker writes of its tasks, where somebody listens, and what is read of it."""

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
from hypothesis import given
from hypothesis import strategies as st

from volpipe.blockwise import heartbeat
from volpipe.blockwise.gpu import GpuSample
from volpipe.blockwise.heartbeat import (
    FOLDER,
    Beat,
    Beater,
    Sign,
    TaskSign,
    dismiss,
    listening,
    read_beats,
    read_signs,
)
from volpipe.blockwise.task import Making, work_behind, work_each

HERE = f"process 1 on {socket.gethostname()} since 2026-11-23 10:00:00 (1)"
TASK = TaskSign("infer", 7, 2, 8, "0:4,0:4,4:8", 1.25, 12.5)
SIGN = Sign("node1", 12, HERE, 1e9, 0.5, 98.5, 1 << 30, 87.0, 1 << 33, (TASK,))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Threads of other tests' runs, which may notice half a minute later that these ended; the test has its own."""
    monkeypatch.setattr(heartbeat, "_worker", heartbeat._Worker())
    return speaking()


def speaking() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "volpipe-signs"}


def signs(run: Path) -> list[Sign]:
    return [sign for sign, _ in read_signs(run)]


@pytest.mark.parametrize("tasks", [(), (TASK,), (TASK,) * 64])
def test_a_sign_comes_back_as_it_was(tasks: tuple[TaskSign, ...]) -> None:
    sign = Sign("node1", 12, HERE, 1e9, 0.5, 98.5, 1 << 30, tasks=tasks)
    assert Sign.from_line(sign.to_line()) == sign
    assert len(sign.to_line()) % heartbeat.PADDED == 0


@given(cut=st.integers(0, 511), with_old=st.booleans())
def test_a_sign_that_is_half_written_is_none(cut: int, with_old: bool) -> None:
    new, old = SIGN.to_line(), Sign("node1", 12, "", 2e9, 0.5, 1.0, 1).to_line()
    torn = new[:cut] + (old[cut:] if with_old else b"")
    assert Sign.from_line(torn) in (None, SIGN, Sign.from_line(old))
    assert Sign.from_line(b"") is None
    assert Sign.from_line(b"3 1.5 6.000 106.000\n") is None  # as another version wrote


def test_a_task_says_what_it_does_where_somebody_listens_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: set[threading.Thread]
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "sample_gpu", lambda: GpuSample(87.0, 5))
    seen: list[Sign] = []

    def one(unit: int) -> None:
        wait_until(lambda: any(task.unit == unit for sign in signs(tmp_path) for task in sign.tasks), 20)
        seen.extend(signs(tmp_path))

    beater = Beater(tmp_path, HERE, lambda unit: f"box {unit}")
    with listening(tmp_path):
        record = work_each("measure", [3, 5], one, beater=beater)
        wait_until(lambda: any(not sign.tasks for sign in signs(tmp_path)), 20)  # it waits for a task
    assert (record.done, record.failed) == ((3, 5), ())
    assert not (tmp_path / FOLDER).exists()
    wait_until(lambda: speaking() <= others, 20)
    first, last = seen[0].tasks[0], seen[-1].tasks[0]
    assert (first.stage, first.first, first.num_units, first.unit, first.box) == ("measure", 3, 2, 3, "box 3")
    assert (last.unit, last.box, last.done) == (5, "box 5", 1.0)
    assert (seen[-1].host, seen[-1].pid, seen[-1].session) == (socket.gethostname(), os.getpid(), HERE)
    assert (seen[-1].device_percent, seen[-1].device_used_bytes) == (87.0, 5)
    assert 10 << 20 < seen[-1].memory_bytes < 100 << 30


def test_nothing_is_written_and_no_thread_begun_where_nobody_listens(
    tmp_path: Path, others: set[threading.Thread]
) -> None:
    def never() -> int:
        raise AssertionError("windows are counted where nobody listens")

    beater = Beater(tmp_path, HERE, num_windows=never)
    with beater.beating("infer", [1]):
        beater.add(1)
        assert speaking() <= others
    assert list(tmp_path.iterdir()) == []


def test_a_task_that_is_shorter_than_the_time_between_two_signs_writes_nothing(tmp_path: Path) -> None:
    with listening(tmp_path):
        for unit in range(50):
            work_each("discard", [unit], lambda unit: None, beater=Beater(tmp_path, HERE))
        assert list((tmp_path / FOLDER).iterdir()) == []


def test_windows_tell_how_far_a_task_of_the_net_is(tmp_path: Path) -> None:
    beater = Beater(tmp_path, HERE, num_windows=lambda: 16)
    with listening(tmp_path), beater.beating("infer", [7, 8]):
        beater.add(4)
        beater.add(4)
        assert beater.sign().done == 1.0
        wait_until(lambda: read_beats(tmp_path), 20)
        beats = read_beats(tmp_path)
    assert list(beats) == [("infer", 7)] and beats["infer", 7].done == 1.0


def test_the_latest_beat_of_a_task_counts(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for pid, at, done in ((1, 90.0, 3.5), (2, 106.0, 1.5)):
        task = TaskSign("infer", 3, 4, 3, "", done, 6.0)
        (tmp_path / FOLDER / f"node-{pid}").write_bytes(Sign("node", pid, "", at, 0.5, 1, 1, tasks=(task,)).to_line())
    (tmp_path / FOLDER / "torn").write_bytes(b"3 2")
    assert read_beats(tmp_path) == {("infer", 3): Beat(1.5, 6.0, 106.0)}


def test_tasks_of_threads_of_one_process_share_a_sign(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def work(unit: int) -> None:
        def one(unit: int) -> None:
            together.wait(20)
            wait_until(lambda: any(len(sign.tasks) == 2 for sign in signs(tmp_path)), 20)
            together.wait(20)

        work_each("edges", [unit], one, beater=Beater(tmp_path, HERE))

    with listening(tmp_path):
        workers = [threading.Thread(target=work, args=(unit,)) for unit in range(2)]
        for worker in workers:
            worker.start()
        together.wait(20)
        wait_until(lambda: any(len(sign.tasks) == 2 for sign in signs(tmp_path)), 20)
        (sign,) = signs(tmp_path)
        together.wait(20)
        for worker in workers:
            worker.join()
    assert sorted(task.unit for task in sign.tasks) == [0, 1]


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_task_whose_driver_was_asked_to_stop_begins_no_other_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.02)
    beater, begun = Beater(tmp_path, HERE), []

    def make(unit: int) -> Callable[[], int]:
        begun.append(unit)
        if unit == 5:
            dismiss(tmp_path)
            wait_until(lambda: beater.is_dismissed, 20)
        return lambda: unit if unit != 4 else int("four")

    with listening(tmp_path):
        record = work_behind("pyramid 1", [3, 4, 5, 6, 7], Making(make, at_once), sum, beater=beater)
        late = work_each("pyramid 1", [8, 9], lambda unit: None, beater=Beater(tmp_path, HERE))
        assert [sign.host for sign in signs(tmp_path)] == [socket.gethostname()]
    assert begun == [3, 4, 5]
    assert (record.done, [unit for unit, _ in record.failed], record.result) == ((3, 5), [4], 8)
    assert (late.done, late.failed) == ((), ())


def test_of_a_driver_that_has_ended_nobody_stops_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.02)
    with listening(tmp_path):
        work_each("measure", [1], lambda unit: wait_until(lambda: signs(tmp_path), 20), beater=Beater(tmp_path, HERE))
        dismiss(tmp_path)
    record = work_each("measure", [1, 2], lambda unit: time.sleep(0.1), beater=Beater(tmp_path, HERE))
    assert record.done == (1, 2)
    dismiss(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Sign]]:
    """Return what becomes the signs for the run in `tmp_path`, with their times."""
    signs: list[tuple[float, Sign]] = []
    write = heartbeat._write

    def note(path: Path, sign: Sign) -> bool:
        if path.parent == tmp_path / FOLDER:
            signs.append((time.monotonic(), sign))
        return write(path, sign)

    monkeypatch.setattr(heartbeat, "_write", note)
    return signs


def test_a_worker_on_another_machine_writes_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[float, Sign]]
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "AWAY_SECONDS", 0.4)
    beater = Beater(tmp_path, "process 1 on elsewhere since 2026-11-23 10:00:00 (1)")
    with listening(tmp_path), beater.beating("infer", [1]):
        wait_until(lambda: len(written) == 4, 20)
    assert all(sign.every == 0.4 for _, sign in written)
    assert min(later - earlier for (earlier, _), (later, _) in itertools.pairwise(written)) > 0.35


def test_a_worker_without_a_task_writes_ever_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[tuple[float, Sign]]
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.02)
    with listening(tmp_path):
        with Beater(tmp_path, HERE).beating("infer", [1]):
            wait_until(lambda: written, 20)
        wait_until(lambda: written[-1][1].every > 0.3, 20)
        idle = [sign.every for _, sign in written if not sign.tasks]
        assert idle == sorted(idle) and len(idle) < 8
        heartbeat._worker._runs[tmp_path].due += heartbeat.IDLE_SECONDS  # as if it had waited for long
        with Beater(tmp_path, HERE).beating("infer", [2]):  # seen at once, not after the pause
            wait_until(lambda: any(sign.tasks for sign in signs(tmp_path)), 20)


def test_a_folder_that_cannot_be_written_costs_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    tried: list[Path] = []

    def full(path: Path, *options: object) -> int:
        if Path(path).parent.name == FOLDER:
            tried.append(Path(path))
            raise OSError(28, "No space left on device")
        return opened(path, *options)  # type: ignore[arg-type]

    opened = os.open
    with listening(tmp_path):
        monkeypatch.setattr(os, "open", full)
        record = work_each(
            "edges", [0], lambda unit: wait_until(lambda: len(tried) > 2, 20), beater=Beater(tmp_path, HERE)
        )
        monkeypatch.setattr(os, "open", opened)
    assert record.failed == ()


def test_a_process_that_was_forked_speaks_for_itself(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from volpipe.blockwise.heartbeat import Beater
run = Path(sys.argv[1])
with Beater(run, sys.argv[2]).beating("edges", [1]):
    pid = os.fork()
    if pid == 0:
        with Beater(run, sys.argv[2]).beating("edges", [2]):
            time.sleep(1)
        os._exit(0)
    time.sleep(1)
    os.waitpid(pid, 0)
"""
    with listening(tmp_path):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), HERE], env=environment)
        wait_until(lambda: {task.unit for sign in signs(tmp_path) for task in sign.tasks} == {1, 2}, 30)
        assert len({sign.pid for sign in signs(tmp_path)}) == 2
        assert process.wait(30) == 0
