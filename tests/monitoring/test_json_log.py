"""The log as JSON lines: in a file beside what is printed, or in place of all on standard error."""

from __future__ import annotations

import json
import re
import signal
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import THREADS, Ended, Give, begin, finish, giver, set_each, wait_until
from conftest import ROOT
from scrapes import samples, state
from test_notify import NET, SETTINGS
from volumes import noise, write_volume
from webhook import webhook
from works import FLOW

from volpipe.cli import app

RUN = ["run", *THREADS, *set_each("net.name=net.py:build", *SETTINGS), "-o", "out.zarr", "in.n5"]
ALWAYS = {"time", "level", "logger", "message", "host", "process"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_volume(tmp_path / "in.n5", noise((8, 8, 32)), 8)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


def documented() -> set[str]:
    """Return the keys that the table in the documentation has."""
    text = (ROOT / "docs" / "reference" / "machines.md").read_text().partition("--log-json")[2].partition("## ")[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def entries(text: str) -> list[dict[str, Any]]:
    """Return the lines as what they say; each is an object with keys that are documented, in the order of time."""
    found = [json.loads(line) for line in text.splitlines()]
    now = datetime.now(UTC)
    for entry in found:
        assert ALWAYS <= entry.keys() <= documented()
        assert entry["time"].endswith("+00:00")
        assert timedelta(0) <= now - datetime.fromisoformat(entry["time"]) < timedelta(minutes=5)
        assert entry["level"] in ("INFO", "WARNING", "ERROR") and entry["host"] == socket.gethostname()
    assert [entry["time"] for entry in found] == sorted(entry["time"] for entry in found)
    return found


def last(found: list[dict[str, Any]]) -> tuple[str, int, str]:
    entry = found[-1]
    return entry["state"], entry["exit_code"], entry["level"]


def test_a_file_gets_the_log_beside_what_is_printed(folder: Path, give: Give) -> None:
    silent = give(*RUN)
    assert give(*RUN, "--log-json", "log.jsonl").code == 0
    earlier = (folder / "log.jsonl").read_text()
    ended = give(*RUN, "--fresh", "--log-json", "log.jsonl")
    assert (ended.code, ended.err) == (0, silent.err)
    text = (folder / "log.jsonl").read_text()
    assert earlier and text.startswith(earlier)  # it is appended to
    text = text.removeprefix(earlier)
    found = entries(text)
    assert last(found) == ("complete", 0, "INFO") and 0 < found[-1]["seconds"] < 100
    assert {entry["output"] for entry in found if "output" in entry} == {str(folder / "out.zarr")}
    plain = (folder / "out.zarr.run" / "volpipe.log").read_text()
    of_run = [f"{each['level']} {each['logger']} {each['message']}" for each in found if "output" in each][:-1]
    assert len(of_run) > 1 and [line for line in of_run if line not in plain] == []


def test_a_traceback_is_a_field_and_a_failed_block_names_its_stage(folder: Path, give: Give) -> None:
    (folder / "fail").touch()
    ended = give(*RUN, "--log-json", "log.jsonl")
    assert ended.code == 1 and "this net does not want to" in ended.err
    found = entries((folder / "log.jsonl").read_text())
    (entry,) = [entry for entry in found if "traceback" in entry]
    assert entry["message"] == "the work stopped" and entry["level"] == "ERROR"
    assert "RunStopped: running the net (infer) failed" in entry["traceback"]
    failures = [entry for entry in found if "(attempt 1)" in entry["message"]]
    assert failures and all(entry["stage"] == "infer" and entry["level"] == "WARNING" for entry in failures)
    assert last(found) == ("stopped", 1, "WARNING")


def test_standard_error_has_json_alone(folder: Path, give: Give) -> None:
    ended = give(*RUN, "--log-json", "-")
    assert ended.code == 0 and "wrote " in ended.out
    assert last(entries(ended.err)) == ("complete", 0, "INFO")
    refused = give(*RUN[:-1], "none.n5", "--log-json", "-")
    found = entries(refused.err)
    assert refused.code == 2 and [entry["level"] for entry in found] == ["ERROR", "WARNING"]
    assert found[0]["message"].startswith("volpipe: no volume at") and found[0]["logger"] == "volpipe.terminal"
    assert last(found) == ("refused", 2, "WARNING")
    assert give(*RUN).err == ""  # the next command prints as ever


def test_a_fault_that_nobody_foresaw_is_json_too(folder: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(app, "_plan", fail)
    ended = give(*RUN, "--log-json", "-")
    (entry,) = entries(ended.err)
    assert ended.code == 1 and entry["state"] == "failed" and "RuntimeError: a fault of ours" in entry["traceback"]
    with pytest.raises(RuntimeError):
        give(*RUN)


def test_an_interrupted_run_tells_whoever_watches_the_same(folder: Path) -> None:
    (folder / "wait").touch()
    write_volume(folder / "nine.n5", np.full((8, 8, 32), 9, np.uint8), 8)
    watched = ("--log-json", "-", "--metrics", "m.prom", "--notify")
    with webhook() as hook:
        process = begin(folder, *RUN[:-1], "nine.n5", *watched, hook.url)
        note = folder / "out.zarr.run" / "progress.json"
        wait_until(lambda: note.exists() and '"in_flight": 4' in note.read_text(), 60)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping: what runs may finish" in (folder / "err.txt").read_text(), 20)
        (folder / "wait").unlink()
        ended = finish(folder, process)
    found = entries(ended.err)
    assert ended.code == 4 and last(found) == ("interrupted", 4, "WARNING")
    assert any(entry["message"].startswith("stopping: what runs may finish within 20 s") for entry in found)
    (post,) = hook.posts
    assert (post["state"], post["exit_code"], post["output"]) == ("interrupted", 4, str(folder / "out.zarr"))
    assert post["message"] == "interrupted; run the same command again to continue"
    assert state(samples(folder / "m.prom")) == "interrupted"


def test_lines_name_the_dataset_and_the_stage_that_they_are_about(folder: Path, give: Give) -> None:
    (folder / "flow.toml").write_text(FLOW)
    for number in range(2):
        write_volume(folder / "raw" / f"{number}.n5", noise((8, 8, 16), seed=number), 8)
    (folder / "raw" / "1.n5" / "raw" / "0" / "0" / "0").write_bytes(b"damage")
    command = ["batch", *THREADS, "--recipe", "flow.toml", "-o", "done", "raw/*.n5/raw"]
    ended = give(*command, "--log-json", "log.jsonl")
    assert ended.code == 1
    found = entries((folder / "log.jsonl").read_text())
    (failure,) = [entry for entry in found if "(attempt 1)" in entry["message"]]
    assert failure["dataset"].endswith("raw/1.n5/raw")
    assert (failure["flow_stage"], failure["stage"]) == ("first", "infer")
    assert failure["output"] == str(folder / "done.batch") or failure["output"].endswith(".batch")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("none/log.jsonl", "there is no folder none; make it first"),
        ("raw", "it is a folder; name a file in it"),
        ("/proc/log.jsonl", "it cannot be written"),
    ],
)
def test_a_file_that_cannot_be_is_refused(target: str, sentence: str, folder: Path, give: Give) -> None:
    (folder / "raw").mkdir()
    ended = give(*RUN, "--log-json", target)
    assert ended.code == 2 and sentence in " ".join(ended.err.split())
    assert not (folder / "out.zarr.run").exists()


def test_a_log_that_cannot_be_written_fails_no_run(folder: Path, give: Give) -> None:
    ended: Ended = give(*RUN, "--log-json", "/dev/full")
    assert (ended.code, ended.err) == (0, "")
