"""Runs in processes of their own, killed in every way: the same command goes on, to the bytes of one go."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from command import begin, finish, giver, processes_in, wait_until
from disturbance import NUM_BLOCKS, ONE_WORKER, Slow, blocks_by_window, in_threads, made_in_one_go
from volumes import fingerprint

from volpipe.blockwise.interrupts import GRACE_SECONDS, INTERRUPTED, SAME_SECONDS
from volpipe.inference.plan import Plan
from volpipe.runs import worker
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Job
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import delete

SIGNALS = (signal.SIGINT, True), (signal.SIGTERM, False)  # and whether the driver's whole group gets it
ALL_BLOCKS = set(blocks_by_window().values())  # others have no window

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str) -> str:
    return made_in_one_go(tmp_path / "undisturbed", mode, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, *(pytest.param(times, marks=pytest.mark.long) for times in (2, 4))])
@pytest.mark.parametrize("mode", ["stored"])
def test_killed_at_any_moment_a_run_goes_on_with_what_is_not_marked(
    tmp_path: Path, undisturbed: str, mode: str, times: int
) -> None:
    slow = Slow(tmp_path / "killed", mode=mode)
    dice = random.Random(7)
    marked_before: list[set[int]] = []
    orphans: list[tuple[float, list[psutil.Process]]] = []
    for _ in range(times):
        marked_before.append(slow.marked())
        assert len(marked_before[-1]) < NUM_BLOCKS
        slow.begin()
        slow.wait_for_calls(dice.randint(5, 60))
        family = processes_in(slow.folder)
        slow.interrupt(signal.SIGKILL)
        assert slow.finish().code == -signal.SIGKILL
        orphans.append((time.monotonic(), family))
    marked_before.append(slow.marked())
    assert len(marked_before[-1]) > 0
    slow.begin()
    ended = slow.finish()
    assert ended.code == 0, ended.err
    for session, marked in enumerate(marked_before, 1):
        assert not marked & slow.computed(session).keys()
    assert slow.marked() == ALL_BLOCKS
    assert slow.num_sessions == times + 1
    for killed, family in orphans:
        while alive(family):
            assert time.monotonic() < killed + 15
            time.sleep(0.1)
    assert processes_in(slow.folder) == []
    assert fingerprint(slow.out) == undisturbed
    assert not list(slow.run.glob("tensors.*"))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [SIGNALS, pytest.param((*SIGNALS, (signal.SIGHUP, True)), marks=pytest.mark.long)], ids=len
)
@pytest.mark.parametrize("mode", ["streamed"])
def test_interrupted_by_a_signal_a_run_says_so_and_leaves_no_process(
    tmp_path: Path, undisturbed: str, mode: str, signals: tuple[tuple[signal.Signals, bool], ...]
) -> None:
    """A terminal's Ctrl-C reaches the whole group, a scheduler's TERM the group or the driver alone."""
    slow = Slow(tmp_path / "interrupted", mode=mode)
    for number, group in signals:
        before = slow.marked()
        slow.begin()
        slow.wait_for_calls(16)
        slow.interrupt(number, group=group)
        began = time.monotonic()
        ended = slow.finish()
        assert time.monotonic() - began < 20
        assert ended.code == INTERRUPTED
        assert ended.err.splitlines()[-1] == "volpipe: interrupted; run the same command again to continue"
        assert "Traceback" not in ended.err
        wait_until(lambda: not processes_in(slow.folder), 3)
        assert slow.computed(slow.num_sessions).total() >= 16
        assert not before & slow.computed(slow.num_sessions).keys()
        assert "stopping: what runs may finish within 20 s" in ended.err
        assert slow.marked() - before == slow.computed(slow.num_sessions).keys()  # what was begun was finished
        assert len(slow.marked()) < NUM_BLOCKS
    slow.begin()
    slow.wait_for_calls(1)
    worker_killed = max(slow.workers(), key=lambda process: sum(process.cpu_times()[:2]))
    worker_killed.kill()
    second = refused_driver(slow)
    ended = slow.finish()
    assert ended.code == 0, ended.err
    assert second.startswith(f"volpipe: {slow.run} is in use by process {slow.process.pid if slow.process else 0} on ")
    assert fingerprint(slow.out) == undisturbed
    assert "WorkerLost" in (slow.run / "volpipe.log").read_text()
    assert processes_in(slow.folder) == []


@pytest.mark.slow
def test_after_a_second_signal_no_task_is_waited_for(tmp_path: Path) -> None:
    """The first as a terminal gives it that is closed."""
    endless = Slow(tmp_path / "twice", seconds=100, mode="streamed", environment=ONE_WORKER)
    endless.begin()
    endless.wait_for_calls(1)
    endless.interrupt(signal.SIGHUP, group=True)
    wait_until(lambda: "stopping: " in (endless.folder / "err.txt").read_text(), 5)
    time.sleep(2 * SAME_SECONDS)
    endless.interrupt(signal.SIGTERM)
    began = time.monotonic()
    ended = endless.finish()
    assert time.monotonic() - began < GRACE_SECONDS - 5
    assert ended.err.splitlines()[-1] == "volpipe: interrupted; run the same command again to continue"
    wait_until(lambda: not processes_in(endless.folder), 5)
    assert endless.marked() == set()


def refused_driver(slow: Slow) -> str:
    """Return the one sentence that a second driver says."""
    (slow.folder / "second").mkdir()
    command = [str(slow.out) if part == "out.zarr" else part for part in slow.command]
    command = [part.replace("net.py", str(slow.folder / "net.py")) for part in command]
    ended = finish(slow.folder / "second", begin(slow.folder / "second", *command))
    assert (ended.code, ended.out) == (2, "")
    (sentence,) = ended.err.splitlines()
    return sentence


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stored"])
def test_a_run_whose_interchange_dies_ends_in_a_sentence_and_can_go_on(
    tmp_path: Path, undisturbed: str, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Slow(tmp_path / "cut", seconds=0.01, mode=mode, environment=ONE_WORKER)
    slow.begin()
    slow.wait_for_calls(8)
    (interchange,) = [p for p in processes_in(slow.folder) if p.is_running() and "interchange" in p.name()]
    interchange.kill()
    ended = slow.finish()
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("volpipe: the interchange of executor local ended or hangs")
    wait_until(lambda: not processes_in(slow.folder), 15)
    ended = giver(slow.folder, monkeypatch, capsys)(*in_threads(slow.command))
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed


def test_a_worker_writes_nothing_for_a_driver_whose_place_another_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Slow(tmp_path / "taken", seconds=0)
    command = in_threads(slow.command)
    give = giver(slow.folder, monkeypatch, capsys)
    assert give(*command, "--keep-tensors").code == 0
    plan = RunFolder(slow.run).load(Plan)
    assert plan is not None
    before = fingerprint(slow.folder)
    session = (slow.run / "lock").read_text().strip()
    of_another = Job(str(slow.run), plan.identity, session="process 1 on elsewhere since yesterday")
    tasks = [
        lambda job: worker.factor(job, [0, 5]),
        lambda job: worker.infer(job, [0, 5]),
        lambda job: worker.reassemble(job, [0, 5]),
        lambda job: worker.discard(job, [0, 5], "windows"),
        lambda job: worker.discard(job, [0, 5], "sum"),
    ]
    for task in tasks:
        record = task(of_another)
        assert record.done == ()
        assert [unit for unit, _ in record.failed] == [0, 5]
        assert all("is no longer held by process 1 on elsewhere" in reason for _, reason in record.failed)
        assert all(session in reason for _, reason in record.failed)
        assert record.fatal
    assert fingerprint(slow.folder) == before
    of_this = Job(str(slow.run), plan.identity, session=session)
    assert [task(of_this).done for task in tasks] == [(0, 5)] * 5
    assert fingerprint(slow.folder) != before


def test_scratch_is_deleted_while_somebody_still_writes_there(tmp_path: Path) -> None:
    folder = tmp_path / "tensors.zarr"
    stop = time.monotonic() + 0.5

    def write() -> None:
        number = 0
        while time.monotonic() < stop:
            number += 1
            place = folder / f"c/{number % 7}/0"
            place.mkdir(parents=True, exist_ok=True)
            (place / str(number)).touch()

    def patiently() -> None:
        while True:
            try:
                write()
            except (
                FileNotFoundError,
                FileExistsError,
            ):  # a folder that is there when it is made, and gone when looked at
                continue
            return

    thread = threading.Thread(target=patiently)
    thread.start()
    wait_until(folder.exists, 5)
    try:
        delete(folder)
    finally:
        thread.join()
    delete(folder)
    assert not folder.exists()
    delete(folder)  # what is gone already is no error


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "DELETE_PAUSE_SECONDS", 0.0)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        delete(tmp_path / "file")
