"""`volpipe status --workers`: workers by what they write of themselves, alive or not, whatever their clocks say."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from command import Give, begin, finish, giver, processes_in, set_each, wait_until
from volumes import noise, windowed, write_volume

from volpipe.blockwise.notes import DRIVER, WORKERS, Note, StageNote, TaskNote, write_note
from volpipe.display.plain import plain_console
from volpipe.display.workers import roster_view
from volpipe.runs.presence import Driver
from volpipe.stages.status import Status
from volpipe.workflow.roster import Roster, Worker

NET = """
import pathlib, time, torch
class Net(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))
    def forward(self, x):
        end = time.time() + (float(pathlib.Path(__file__).with_name("seconds").read_text()) if x.any() else 0)
        while time.time() < end:
            pass
        return x
def build():
    return Net()
"""
SESSION = "process 9 on login since 2026-11-23 10:00:00 (1)"
AT_WORK = Driver("running", "9", "login", session=SESSION)
TASK = TaskNote("infer", 6, 4, 7, "1024:1280,2048:2304,4096:4352", 1.0, 61.0)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise((16, 24, 16)))
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "seconds").write_text("0.2")
    return giver(tmp_path, monkeypatch, capsys)


def test_workers_of_other_processes_are_shown_with_what_they_take(tmp_path: Path, give: Give) -> None:
    run = ("run", "-o", "out.zarr", "in.n5", *set_each("net.name=net.py:build"))
    driver = begin(tmp_path, *run, *set_each(*windowed((4, 4, 4), (0, 0, 0), (2, 3, 4), "crop")))

    def look() -> list[dict[str, object]]:
        ended = give("status", "--workers", "--json", "out.zarr")
        return json.loads(ended.out)["workers"] if ended.code == 3 else []

    def busy() -> list[dict[str, object]]:
        return [each for each in look() if any(task["stage"] == "infer" and task["share"] for task in each["tasks"])]

    def computing() -> list[dict[str, object]]:  # all the time, beside whatever else the machine does
        return [each for each in busy() if 5 < each["cpu_percent"] < 210]

    wait_until(lambda: len(computing()) == 2, 90)
    for worker in busy():
        process = psutil.Process(worker["pid"])
        assert worker["pid"] in [each.pid for each in processes_in(tmp_path)]
        assert worker["memory_bytes"] == pytest.approx(process.memory_info().rss, rel=0.3)
        (task,) = worker["tasks"]
        assert (task["num_units"], task["work"]) == (1, None) and 0 < task["seconds"] < 90
        assert task["box"] == f"{8 * (task['unit'] // 2)}:{8 * (task['unit'] // 2) + 8}," + (
            "0:12,0:16" if task["unit"] % 2 == 0 else "12:24,0:16"
        )
    shown = give("status", "--workers", "out.zarr")
    assert "2 workers; 2 tasks" in shown.out and "infer" in shown.out
    watching = begin(tmp_path, "status", "--watch", "1", "--workers", "out.zarr")
    killed = busy()[0]["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: any(each["pid"] == killed and not each["alive"] for each in look()), 30)
    assert f"process {killed} for " in give("status", "--workers", "out.zarr").out
    (tmp_path / "seconds").write_text("0")
    assert finish(tmp_path, driver).code == 0
    watched = finish(tmp_path, watching)
    assert watched.code == 0 and watched.out.endswith("out.zarr: complete\n")
    assert f"process {killed} for " in watched.out
    assert not (tmp_path / "out.zarr.run" / WORKERS).exists()
    ended = give("status", "--workers", "out.zarr")
    assert ended.code == 0 and ended.out.endswith(f"{tmp_path}/out.zarr: complete\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / WORKERS).mkdir()
    (tmp_path / DRIVER).touch()
    return tmp_path


def note(host: str = "n1", pid: int = 1, **changes: object) -> Note:
    of_worker = Note(SESSION, host, pid, time.time(), every=0.5, cpu_percent=90.0, memory_bytes=1 << 30, tasks=(TASK,))
    return replace(of_worker, **changes)


def write(folder: Path, note: Note, ago: float = 0.0) -> None:
    """Leave a note whose file is so old."""
    path = folder / WORKERS / f"{note.host}-{note.pid}"
    assert write_note(path, note)
    os.utime(path, (time.time() - ago,) * 2)


def status_of(folder: Path, driver: Driver = AT_WORK, **changes: object) -> Status:
    return replace(Status("run", "out.zarr", False, driver, {"infer": StageNote(1, 9, 2)}, folder=folder), **changes)


def alive(workers: list[Worker]) -> list[str]:
    return [worker.note.host for worker in workers if worker.is_alive]


def test_a_worker_that_fell_silent_does_not_count(folder: Path) -> None:
    write(folder, note("n1"))
    write(folder, note("n2"), ago=60)
    write(folder, note("n3", every=30.0), ago=60)  # it waits for a task, and shows itself seldom
    write(folder, note("n4", session="process 8 on login since 2026-11-23 09:00:00 (1)"))
    workers = Roster().look(status_of(folder))
    assert alive(workers) == ["n1", "n3"]
    assert [worker.note.host for worker in workers if worker.is_left] == ["n4"]
    assert workers[1].silent_seconds == pytest.approx(60, abs=2)


def test_all_workers_are_silent_when_nobody_shows_what_time_it_is(folder: Path) -> None:
    os.utime(folder / DRIVER, (time.time() - 300,) * 2)
    write(folder, note("n1"), ago=300)
    assert alive(Roster().look(status_of(folder, replace(AT_WORK, state="interrupted")))) == []


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_a_worker_whose_clock_is_wrong_counts_and_its_clock_is_named(folder: Path, skew: float) -> None:
    write(folder, note("n1", at=time.time() + skew))
    workers = Roster().look(status_of(folder))
    assert alive(workers) == ["n1"]
    way = "behind" if skew < 0 else "ahead of"
    assert f"the clock of n1 is 2 h 00 min {way} that of the file system" in drawn(workers, folder)


def test_a_note_that_changes_is_a_sign_of_life_whatever_the_time_of_its_file(folder: Path) -> None:
    roster = Roster()
    write(folder, note("n1", cpu_percent=1.0), ago=3600)  # by a file system that takes the clock of the writer
    assert alive(roster.look(status_of(folder))) == []
    write(folder, note("n1", cpu_percent=2.0), ago=3600)
    assert alive(roster.look(status_of(folder))) == ["n1"]


def test_a_worker_of_several_works_is_one(tmp_path: Path) -> None:
    parts = []
    for name, stage in (("denoise", "infer"), ("objects", "edges")):
        part = tmp_path / name
        (part / WORKERS).mkdir(parents=True)
        (part / DRIVER).touch()
        write(part, note("n1", tasks=(replace(TASK, stage=stage),)))
        parts.append(replace(status_of(part), name=name))
    (worker,) = Roster().look(status_of(tmp_path, kind="stages", parts=tuple(parts)))
    assert [(task.work, task.note.stage) for task in worker.tasks] == [("denoise", "infer"), ("objects", "edges")]


def test_a_training_is_as_far_as_its_steps(folder: Path) -> None:
    write(folder, note(tasks=(TaskNote("train", 0, 1, 0, "", 0.0, 60.0),)))
    (worker,) = Roster().look(status_of(folder, kind="training", stages={"train": StageNote(30, 120)}))
    assert worker.tasks[0].share == 0.25


def test_notes_that_are_damaged_or_foreign_are_passed_over(folder: Path) -> None:
    write(folder, note())
    whole = (folder / WORKERS / "n1-1").read_bytes()
    (folder / WORKERS / "n1-1").write_bytes(whole[:100])
    (folder / WORKERS / "n1-2").write_bytes(b"\xff\x00 no note\n")
    (folder / WORKERS / ".nfs0001").touch()
    assert Roster().look(status_of(folder)) == []
    assert Roster().look(status_of(folder / "nowhere")) == []


def drawn(workers: list[Worker], folder: Path, width: int = 80, height: int | None = None) -> str:
    console = plain_console(file=io.StringIO(), width=width)
    console.print(roster_view(status_of(folder), workers, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_shown_fits_a_terminal(folder: Path) -> None:
    gpu = {"device_percent": 87.0, "device_used_bytes": 12 << 30}
    for pid in range(40):
        write(folder, note("gpu-node-17", 100000 + pid, **gpu))
    write(folder, note("[red]", 1, tasks=()))
    text = drawn(Roster().look(status_of(folder)), folder)
    assert max(map(len, text.splitlines())) <= 80
    words = ("gpu-node-17\n", "[red]\n", " 100000", "infer 7", "1:01  25%", "87 % 12.0 GiB", "1024:1280", "waits")
    assert [word for word in words if word not in text] == []
    assert "41 workers on 2 nodes, 1 without a task; 40 tasks; CPU 3,690 %, memory 41.0 GiB" in " ".join(text.split())
    short = drawn(Roster().look(status_of(folder)), folder, width=120, height=24)
    assert len(short.splitlines()) <= 24 and "more" in short
