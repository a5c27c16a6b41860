"""`volpipe status`, once and with --watch: work is followed from another process to its end, by its journal alone."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command import THREADS, Give, begin, finish, giver, set_each, wait_until
from conftest import ROOT
from rich.console import Console
from volumes import noise, windowed, write_volume

from volpipe.blockwise.journal import JournalReader, Line, Record
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.notes import DRIVER, Note, StageNote, write_note
from volpipe.blockwise.usage import Totals, Usage
from volpipe.display.plain import plain_console
from volpipe.display.watching import follow, plain_line, view
from volpipe.errors import RunError
from volpipe.evaluation.evaluation import Evaluation
from volpipe.runs.presence import Driver, Presence, find_driver, present
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Inferred
from volpipe.stages.status import Status
from volpipe.training.logs import TrainingPace, read_pace
from volpipe.volumes.storage.lock import held
from volpipe.workflow.batch_table import DatasetRow, Table
from volpipe.workflow.kinds import find_work
from volpipe.workflow.status import StatusReader, find_status

NET = """
import pathlib, time, torch
class Net(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))
    def forward(self, x):
        time.sleep(float(pathlib.Path(__file__).with_name("seconds").read_text()) if x.any() else 0)
        return x
def build():
    return Net()
"""
RUN = (
    "run", *THREADS, "-o", "out.zarr", "in.n5",
    *set_each("net.name=net.py:build", *windowed((4, 4, 4), (0, 0, 0), (1, 2, 4), "crop")),
)  # fmt: skip


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise((16, 24, 16)))
    take(tmp_path, 0.0)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is complete."""
    folder = tmp_path_factory.mktemp("finished")
    write_volume(folder / "in.n5", noise((16, 24, 16)))
    take(folder, 0.0)
    assert finish(folder, begin(folder, *RUN)).code == 0
    return folder


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    plan = tmp_path / "out.zarr.run" / "plan.json"
    plan.write_text(plan.read_text().replace(str(finished), str(tmp_path)))
    return tmp_path


def take(folder: Path, seconds: float) -> None:
    """Let the net take so long over a window, also while it runs."""
    (folder / "net.py").write_text(NET)
    (folder / "seconds").write_text(str(seconds))


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Path]:
    """Give a folder for a command that watches, apart from that of the run."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


def is_at_work(folder: Path) -> bool:
    note = folder / "out.zarr.run" / DRIVER
    return note.is_file() and json.loads(note.read_text())["stages"].get("infer", {}).get("in_flight", 0) > 0


def counts_in(watcher: Path) -> list[int]:
    """Return the blocks that were done at each line that was printed."""
    return [int(number) for number in re.findall(r"infer (\d+)/12", (watcher / "out.txt").read_text())]


@pytest.mark.long
def test_a_run_that_is_alive_says_so_and_one_that_was_stopped_how_it_goes_on(tmp_path: Path, give: Give) -> None:
    missing = give("status", "out.zarr")
    assert (missing.code, "no run of out.zarr was started" in missing.err) == (2, True)
    take(tmp_path, 1.0)
    process = begin(tmp_path, *RUN)
    wait_until(lambda: is_at_work(tmp_path), 60)
    alive = give("status", "out.zarr")
    assert alive.code == 3
    assert f"out.zarr: process {process.pid} on {socket.gethostname()} since 20" in alive.out
    assert "is at work" in alive.out
    said = json.loads(give("status", "--json", "out.zarr").out)
    assert (said["state"], said["process"], said["host"]) == ("running", process.pid, socket.gethostname())
    assert said["stages"]["infer"] == {"done": 0, "all": 12, "in_flight": 4, "failed": 0}
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

    take(tmp_path, 0.0)
    process = begin(tmp_path, *RUN, "--fresh")
    assert finish(tmp_path, process).code == 0
    ended = give("status", "out.zarr")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, f"{tmp_path}/out.zarr: complete")
    assert json.loads(give("status", "--json", "out.zarr").out)["state"] == "complete"


@pytest.mark.long
def test_a_run_is_followed_from_other_processes_to_its_end(tmp_path: Path, give: Give, watcher: Path) -> None:
    take(tmp_path, 0.25)
    driver = begin(tmp_path, *RUN)
    wait_until(lambda: is_at_work(tmp_path), 60)
    terminal, other = pty.openpty()
    drawn = begin_at(other, tmp_path, "status", "out.zarr", "--watch", "0.2")
    (watcher / "left").mkdir()
    left = begin(watcher / "left", "status", str(tmp_path / "out.zarr"), "--watch")  # without its value
    lines = begin(watcher, "status", "--watch", "0.2", str(tmp_path / "out.zarr"))
    wait_until(lambda: "infer" in (watcher / "left" / "out.txt").read_text(), 60)
    wait_until(lambda: len(set(counts_in(watcher))) > 1 and select.select([terminal], [], [], 0)[0], 90)
    left.send_signal(signal.SIGINT)
    ended = finish(watcher / "left", left)
    assert (ended.code, ended.err) == (4, "volpipe: stopped watching; the work continues\n")
    (tmp_path / "seconds").write_text("0")
    screen = b"".join(iter(lambda: read_terminal(terminal), b"")).decode()
    os.close(terminal)
    assert drawn.wait() == 0
    assert "━" in screen and "in flight" in screen and "at work" in screen
    assert screen.rstrip().endswith("out.zarr: complete")
    assert finish(tmp_path, driver).code == 0
    ended = finish(watcher, lines)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == f"{tmp_path}/out.zarr: complete"
    assert counts_in(watcher) == sorted(counts_in(watcher))
    assert sorted(path.name for path in watcher.iterdir()) == ["err.txt", "left", "out.txt"]  # nothing was written


@pytest.mark.long
def test_a_driver_that_is_killed_ends_the_watching_with_the_code_of_status(
    tmp_path: Path, give: Give, watcher: Path
) -> None:
    take(tmp_path, 0.25)
    driver = begin(tmp_path, *RUN)
    wait_until(lambda: is_at_work(tmp_path), 60)
    watching = begin(watcher, "status", "--watch", "0.2", "--json", str(tmp_path / "out.zarr"))
    wait_until(lambda: (watcher / "out.txt").read_text().count("\n") > 1, 60)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    ended = finish(watcher, watching)
    assert ended.code == 1
    states = [json.loads(line)["state"] for line in ended.out.splitlines()]
    assert states[0] == "running" and states[-1] == "interrupted"
    killed = give("status", "out.zarr")
    assert (killed.code, "interrupted; nobody works on it" in killed.out) == (1, True)


def begin_at(terminal: int, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command in `folder` at a terminal, whose end here is closed."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "volpipe", *arguments], cwd=folder, stdout=terminal, stdin=terminal,
        env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    return process


def read_terminal(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # its other end is closed
        return b""


def append(path: Path, *records: Record[Inferred]) -> None:
    with path.open("a") as file:
        file.writelines(record.to_line() for record in records)


def record(number: int) -> Record[Inferred]:
    return Record("infer", (number,), result=Inferred(((0, number, "ab"),)), usage=Usage(seconds=1.0, read_bytes=7))


def test_a_journal_is_read_on_from_where_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, anew = tmp_path / "journal", []
    reader = JournalReader(path, (Inferred,), lambda: anew.append(True))
    assert list(reader.lines()) == []
    append(path, record(0), record(1))
    assert [each.fields.done for each in reader.lines()] == [(0,), (1,)]
    parsed = []
    checked = Line.of
    monkeypatch.setattr(Line, "of", lambda text, kinds: parsed.append(text) or checked(text, kinds))
    with path.open("a") as file:
        file.write(record(2).to_line() + record(3).to_line()[:20])  # the last one is being written
    assert [each.fields.done for each in reader.lines()] == [(2,)]
    assert list(reader.lines()) == []
    with path.open("a") as file:
        file.write(record(3).to_line()[20:])
    assert [each.fields.done for each in reader.lines()] == [(3,)]
    assert (len(parsed), anew) == (2, [])


@pytest.mark.parametrize("how", ["replaced", "shortened", "deleted", "rewritten in place"])
def test_a_journal_that_is_another_one_is_read_anew(tmp_path: Path, how: str) -> None:
    path, anew = tmp_path / "journal", []
    reader = JournalReader(path, (Inferred,), lambda: anew.append(True))
    append(path, record(0), record(1))
    assert len(list(reader.lines())) == 2
    if how == "replaced":
        append(tmp_path / "new", record(5), record(6), record(7))
        (tmp_path / "new").replace(path)
    elif how == "deleted":
        path.unlink()
        assert list(reader.lines()) == []
        append(path, record(5), record(6), record(7))
    else:
        path.write_text("".join(record(n).to_line() for n in ((5,) if how == "shortened" else (5, 6, 7))))
    expected = [5] if how == "shortened" else [5, 6, 7]
    assert [each.fields.done[0] for each in reader.lines()] == expected
    assert anew == [True]


def test_a_damaged_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = JournalReader(path, (Inferred,), lambda: None)
    append(path, record(0), record(1))
    assert len(list(reader.lines())) == 2
    with path.open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(RunError, match=f"line 3 of {path} is damaged"):
        list(reader.lines())


def test_looks_at_a_journal_that_grows_give_what_one_look_at_the_whole_gives(done: Path) -> None:
    folder = RunFolder(done / "out.zarr.run")
    lines = folder.journal.read_text().splitlines(keepends=True)
    failed = Record("infer", (), failed=((1, "OSError: no"),)).to_line()
    folder.journal.write_text("")
    work = find_work(folder)
    assert work is not None and len(lines) > 3
    growing = Ledger(folder.journal, work.kinds, work.schedule)
    for line in [failed, *lines]:
        with folder.journal.open("a") as file:
            file.write(line)
        seen, whole = growing.look(), Ledger(folder.journal, work.kinds, work.schedule).look()
        assert (seen.reasons, seen.totals, seen.results) == (whole.reasons, whole.totals, whole.results)
        for one, other in zip(seen.schedule.stages, whole.schedule.stages, strict=True):
            assert (one.num_done, one.failed, one.done.tolist()) == (other.num_done, other.failed, other.done.tolist())
    assert seen.schedule.is_complete and not seen.reasons and seen.results == {Inferred}


@pytest.mark.parametrize("skew", [-7200.0, 7200.0])
def test_a_driver_whose_clock_is_wrong_is_known_by_new_signs(
    done: Path, monkeypatch: pytest.MonkeyPatch, skew: float
) -> None:
    folder = done / "out.zarr.run"
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text("".join(lines[:2]))
    os.utime(folder / "journal.jsonl", (0, 0))
    session = "process 12 on node7 since 2026-11-22 10:00:00 (1)"
    with held(folder, session, RunError):
        pass  # nobody holds it as seen from here
    monkeypatch.setattr("volpipe.display.watching.SIGN_SECONDS", 0.5)
    monkeypatch.setattr("volpipe.runs.presence.FRESH_SECONDS", 0.4)
    states, first = [], time.monotonic()

    def look() -> Status:
        if time.monotonic() - first < 0.8:  # it lives so long
            note = Note(session, at=time.time() + skew, stages={"infer": StageNote(2, 12, 1)})
            write_note(folder / DRIVER, note)
        status = observer.look()
        states.append((time.monotonic() - first, status.state))
        return status

    observer = StatusReader(str(done / "out.zarr"))
    assert follow(look, Console(file=io.StringIO()), 0.1).state == "unseen"
    assert all(state == "running" for at, state in states if 0.2 < at < 0.7)
    assert states[-1][0] > 1.0


def test_what_was_not_begun_is_said_in_a_sentence(give: Give) -> None:
    nothing = give("status", "--watch", "out.zarr")
    assert nothing.code == 2
    assert nothing.err == "volpipe: no run of out.zarr was started: out.zarr.run holds no plan\n"
    few = give("status", "--watch", "0.001", "out.zarr")
    assert few.code == 2 and "0.001 is less than 0.1 s" in few.err
    unbegun = give("status", "--watch", "many.toml")
    assert unbegun.code == 2 and "no batch of many.toml was begun" in unbegun.err
    assert give("status", "--workers", "out.zarr").err == nothing.err


def test_what_is_damaged_is_said_in_a_sentence(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give, folder = giver(done, monkeypatch, capsys), done / "out.zarr.run"
    (folder / DRIVER).write_text('{"session": "proc')  # half written
    assert give("status", "--watch", "out.zarr").code == 0
    journal = (folder / "journal.jsonl").read_text()
    for wrong in ("no JSON\n", '{"stage":"infer","done":[0],"result":"Other"}\n', '{"volume": "foreign"}\n'):
        (folder / "journal.jsonl").write_text(journal + wrong)
        for command in (("status", "--watch"), ("status", "--workers")):
            damaged = give(*command, "out.zarr")
            assert damaged.code == 2 and "journal.jsonl is damaged, or another version wrote it" in damaged.err
    (folder / "journal.jsonl").write_text(journal)
    (done / "out.zarr").rename(done / "moved.zarr")
    gone = give("status", "--watch", "out.zarr")
    assert gone.code == 1 and "its output is gone" in gone.out


def test_a_folder_without_rights_is_named(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = Path.open, done / "out.zarr.run" / "journal.jsonl"

    def refuse(path: Path, *options: object, **named: object) -> object:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *options, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(RunError, match=f"{closed} may not be read: Permission denied; ask its owner for the right"):
        find_status(str(done / "out.zarr"))


def drawn(status: Status) -> str:
    console = plain_console(file=io.StringIO(), width=80)
    console.print(view(status, 24))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) <= 24
    return " ".join(text.split())


def test_a_batch_shows_its_datasets_with_those_that_are_at_work(done: Path) -> None:
    lines = (done / "out.zarr.run" / "journal.jsonl").read_text().splitlines(keepends=True)
    (done / "out.zarr.run" / "journal.jsonl").write_text("".join(lines[:3]))
    rows = [DatasetRow(f"{n}.n5", str(done / "out.zarr"), "", "new", ended="waiting", num_blocks=12) for n in range(40)]
    rows[7] = replace(rows[7], ended="running")
    batch = done / "many.batch"
    batch.mkdir()
    Table(batch, rows).store()
    began = time.time_ns() - 90 * 10**9
    session = f"process {os.getpid()} on {socket.gethostname()} since 2026-11-22 10:00:00 ({began})"
    observer = StatusReader(str(done / "many.toml"))
    with held(batch, session, RunError), held(done / "out.zarr.run", session, RunError):
        status = observer.look()
        assert (status.kind, status.state, list(status.at_work)) == ("batch", "running", [7])
        assert status.at_work[7].stages["infer"] == StageNote(3, 12)
        text = drawn(status)
        assert "0 of 40 datasets done" in text and "7.n5 new running 1 min 30 s 12 infer 25%" in text
        assert "40 datasets: 39 waiting, 1 running" in text
        assert plain_line(status).endswith("many.toml: datasets 0/40 (1 in flight)")
        Table(batch, [replace(row, ended="done") for row in rows]).store()
        assert observer.look().at_work == {}
    assert observer.look().state == "complete"


def test_stages_of_a_flow_and_trials_have_a_line_each() -> None:
    driver = Driver("running", "7", "node1", "2026-11-23 10:00:00")
    restore = Status(
        "run", "out/restore.zarr", False, driver, {"infer": StageNote(41, 96, 8, 1)},
        {"infer": Totals(41, 41, 1871.0, 900.0, 2 << 30, 12 << 30, 9 << 30)}, name="restore",
    )  # fmt: skip
    scores = Status("evaluation", "out/scores.json", False, Driver("ended"), name="scores [bold]")
    flow = Status("stages", "out", False, driver, parts=(restore, scores))
    text = drawn(flow)
    assert "restore infer" in text and "41 / 96 8 1" in text and "scores [bold] not begun" in text
    assert "41 tasks in 31 min 11 s of workers; read 12.0 GiB, wrote 9.0 GiB, peak memory 2.0 GiB" in text
    assert plain_line(flow) == "out: restore infer 41/96 (8 in flight, 1 failed)"

    def trial(number: int, done: int, state: Driver) -> Status:
        pace = TrainingPace(done, 0.0123, 2.5)
        stages = {"train": StageNote(done, 1000)}
        name = f"{number:03}"
        return Status("training", f"sw/{name}", done == 1000, state, stages, name=name, pace=pace, view="steps")

    trials = tuple(trial(n, 500 if n == 37 else 1000, driver if n == 37 else Driver("ended")) for n in range(40))
    text = drawn(Status("trials", "sw", False, driver, parts=trials, view="steps"))
    assert "037" in text and "500 / 1,000 0.0123 2.5 steps/s 3 min 20 s running" in text and "more" in text
    assert plain_line(trials[37]) == "sw/037: train 500/1,000, loss 0.0123, 2.5 steps/s; about 3 min 20 s left"


def test_the_folder_of_an_evaluation_goes_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "volpipe_a_b_scores.run"
    folder.mkdir()
    (folder / Evaluation.mark).touch()
    observer = StatusReader(str(folder))
    with held(folder, "process 1 on here since 2026-11-22 10:00:00 (1)", RunError):
        assert (observer.look().kind, observer.look().state) == ("evaluation", "running")
    shutil.rmtree(folder)
    assert observer.look().state == "complete"
    with pytest.raises(RunError, match="no run of"):
        find_status(str(folder))


def test_the_pace_of_a_training_is_that_of_its_latest_steps(tmp_path: Path) -> None:
    assert read_pace(tmp_path) is None
    entries = [{"step": n, "loss": 1 / n, "seconds": 0.5, "time": 1000.0 + n} for n in range(1, 5)]
    entries += [{"step": n, "loss": 1 / n, "seconds": 0.5, "time": 9000.0 + n / 2} for n in range(5, 9)]  # resumed
    (tmp_path / "losses.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 9')
    pace = read_pace(tmp_path)
    assert pace is not None
    assert (pace.step, pace.loss, pace.speed) == (8, 1 / 8, 2.0)
    (tmp_path / "losses.jsonl").write_text(json.dumps(entries[0]) + "\n")
    first = read_pace(tmp_path)
    assert first is not None and first.speed == 2.0


# ---- drivers, by their locks and notes


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
