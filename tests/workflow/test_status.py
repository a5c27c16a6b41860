"""`volpipe status` of a run that goes on, one that was stopped, and one on another machine; as text and as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from command import THREADS, Give, begin, finish, giver, set_each, wait_until
from volumes import noise, windowed, write_volume

from volpipe.blockwise.notes import DRIVER, Note, StageNote
from volpipe.errors import RunError
from volpipe.runs.presence import Presence, find_driver, present
from volpipe.volumes.storage.lock import held

SHAPE = (16, 24, 16)
NET = """
import time, torch
class Net(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.5 if x.any() else 0)
        return x
def build():
    return Net()
"""
RUN = (
    "run", *THREADS, "-o", "out.zarr", "in.n5",
    *set_each("net.name=net.py:build", *windowed((4, 4, 4), (0, 0, 0), (2, 3, 4), "crop")),
)  # fmt: skip


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "net.py").write_text(NET)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.long
def test_a_run_that_is_alive_says_so_and_one_that_was_stopped_how_it_goes_on(tmp_path: Path, give: Give) -> None:
    missing = give("status", "out.zarr")
    assert (missing.code, "no run of out.zarr was started" in missing.err) == (2, True)
    process = begin(tmp_path, *RUN)
    note = tmp_path / "out.zarr.run" / DRIVER

    def at_work() -> bool:
        return note.is_file() and json.loads(note.read_text())["stages"].get("infer", {}).get("in_flight", 0) > 0

    wait_until(at_work, 60)
    alive = give("status", "out.zarr")
    assert alive.code == 3
    assert f"out.zarr: process {process.pid} on {socket.gethostname()} since 20" in alive.out
    assert "is at work" in alive.out
    said = json.loads(give("status", "--json", "out.zarr").out)
    assert (said["state"], said["process"], said["host"]) == ("running", process.pid, socket.gethostname())
    assert said["stages"]["infer"] == {"done": 0, "all": 4, "in_flight": 4, "failed": 0}
    assert give("status", "out.zarr.run").code == 3

    process.send_signal(signal.SIGINT)
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    assert finish(tmp_path, process).code == 4
    stopped = give("status", "out.zarr")
    assert stopped.code == 1
    words = " ".join(stopped.out.split())
    assert "out.zarr: interrupted; nobody works on it. To continue: volpipe run --config threads" in words
    command = json.loads(give("status", "--json", "out.zarr").out)
    assert (command["state"], command["folder"]) == ("interrupted", str(tmp_path))

    (tmp_path / "net.py").write_text(NET.replace("0.5", "0"))
    process = begin(tmp_path, *RUN, "--fresh")
    assert finish(tmp_path, process).code == 0
    ended = give("status", "out.zarr")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, f"{tmp_path}/out.zarr: complete")
    assert json.loads(give("status", "--json", "out.zarr").out)["state"] == "complete"


def test_a_driver_that_was_killed_is_not_alive(tmp_path: Path, give: Give) -> None:
    process = begin(tmp_path, *RUN)
    wait_until((tmp_path / "out.zarr.run" / "plan.json").is_file, 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed = give("status", "out.zarr")
    assert (killed.code, "interrupted; nobody works on it" in killed.out) == (1, True)


def session(host: str, pid: int = 12) -> str:
    return f"process {pid} on {host} since 2026-11-22 10:00:00 (1)"


def test_a_driver_on_another_machine_whose_lock_cannot_be_seen_is_known_by_its_last_sign(tmp_path: Path) -> None:
    with held(tmp_path, session("node7"), RunError):
        pass  # the lock is free as seen from here, as on a file system that keeps locks to itself
    there = Presence(tmp_path / DRIVER, Note(session("node7")))
    there.tell({"infer": StageNote(3, 8, 2)}, 0.4, 60.0)
    driver = find_driver(tmp_path, tmp_path / "journal.jsonl")
    assert (driver.state, driver.host, driver.is_at_work) == ("unseen", "node7", True)
    assert driver.note is not None and driver.note.stages["infer"] == StageNote(3, 8, 2)
    old = json.loads((tmp_path / DRIVER).read_text()) | {"at": time.time() - 3600}
    (tmp_path / DRIVER).write_text(json.dumps(old))
    driver = find_driver(tmp_path, tmp_path / "journal.jsonl")
    assert (driver.state, driver.is_at_work) == ("unseen", False)
    assert driver.silent_seconds == pytest.approx(3600, abs=5)


def test_a_note_of_an_earlier_driver_is_not_taken_for_that_of_the_one_at_work(tmp_path: Path) -> None:
    here = socket.gethostname()
    with held(tmp_path, session(here, 1), RunError), present(tmp_path, session(here, 1)):
        assert find_driver(tmp_path, tmp_path / "j").note is not None
    assert find_driver(tmp_path, tmp_path / "j").state == "ended"
    with held(tmp_path, session(here, 2), RunError):
        driver = find_driver(tmp_path, tmp_path / "j")
        assert (driver.state, driver.process, driver.note) == ("running", "2", None)


def test_who_looks_at_a_lock_keeps_nobody_from_it(tmp_path: Path) -> None:
    for _ in range(50):
        with held(tmp_path, "me", RunError):
            assert find_driver(tmp_path, tmp_path / "j").state == "running"
        assert find_driver(tmp_path, tmp_path / "j").state != "running"
