"""Progress as the command line shows it: lines, bars, sizes and times; and commands that are interrupted."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import IDENTITY, THREADS, Ended, Give, giver, set_each
from conftest import ROOT
from rich.progress import Progress as Bar
from volumes import noise, windowed, write_volume

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.usage import Totals
from volpipe.display import progress as display
from volpipe.display.console import Bars, columns
from volpipe.display.progress import progress_line
from volpipe.display.watching import follow
from volpipe.runs.presence import Driver
from volpipe.stages.status import Status
from volpipe.units import count, duration, size
from volpipe.volumes.volume import open_volume

SHAPE = (16, 24, 16)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return giver(tmp_path, monkeypatch, capsys)


def test_progress_goes_to_a_file_as_plain_lines(tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "PLAIN_LINE_SECONDS", 0.0)
    small = set_each("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    ended = give("run", *THREADS, *small, "-o", "out.zarr", "in.n5")
    assert ended.code == 0
    lines = ended.err.splitlines()
    counts = [int(found[1]) for line in lines if (found := re.search(r": infer (\d+)/12[,;] ", line))]
    assert len(counts) == len(lines) > 1
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert "\x1b" not in ended.err + ended.out


SLOW_NET = """
import time, torch
class Net(torch.nn.Module):
    def forward(self, x):
        time.sleep({seconds} if x.any() else 0)
        return x
def build():
    return Net()
"""


@pytest.mark.long
def test_bars_are_drawn_on_a_terminal_and_move_before_the_first_block_is_done(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "net.py").write_text(SLOW_NET.format(seconds=0.25))
    small = set_each("net.name=net.py:build", *windowed((4, 4, 4), (0, 0, 0), (2, 3, 4), "crop"))
    code, drawn = on_terminal(tmp_path, "run", *THREADS, *small, "-o", "out.zarr", "in.n5")
    assert code == 0
    assert "\x1b[" in drawn
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn)
    bars = [(int(p), int(n)) for p, n in re.findall(r"infer\D*? +(\d+) % (\d+) of 96 windows", plain)]
    counts = [windows for _, windows in bars]
    assert counts == sorted(counts)
    assert bars[-1][0] == 100
    assert any(0 < windows < 24 for windows in counts)  # a block has 24, so that none was done
    assert [(p, w) for p, w in bars if p != pytest.approx(100 * w / 96, abs=1.6)] == []
    assert re.search(r"windows/s +\d+ s left", plain)
    assert re.search(rf"wrote {re.escape(str(tmp_path))}\S*/out.zarr", plain.replace("\r\n", ""))
    assert not (tmp_path / "out.zarr.run" / "beats").exists()


def on_terminal(folder: Path, *arguments: str) -> tuple[int, str]:
    """Give a command on a terminal of 100 columns; return its exit code and all that was drawn."""
    master, slave = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "volpipe", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    drawn = b""
    try:
        while part := os.read(master, 65536):
            drawn += part
    except OSError:  # how Linux says that the last writer has gone
        pass
    finally:
        os.close(master)
    return process.wait(60), drawn.decode()


def ten_seconds_in(**stages: tuple[int, Totals]) -> Progress:
    """Return a run of stages with 12 units each, so many of which are done, 10 s after its first task began."""
    shown = []
    for name, (num_done, _) in stages.items():
        shown.append(Stage(name, 12))
        for unit in range(num_done):
            shown[-1].mark(unit)
    totals = {name: took for name, (_, took) in stages.items()}
    return Progress(shown, time.perf_counter() - 15, totals=totals, first_task=time.time() - 10)


def test_a_plain_line_has_stages_speed_and_time_left() -> None:
    progress = ten_seconds_in(infer=(5, Totals(units=4, seconds=16.0)))  # one block is an earlier session's
    assert progress_line(progress, 1e6) == "15.0 s: infer 5/12; 0 tasks in flight, 0.40 Mvoxel/s"
    progress.running["infer"], progress.parts, progress.seconds_left = 1, {"infer": 1.0}, 17.5
    line = progress_line(progress, 1e6)
    assert line == "15.0 s: infer 5/12, 50% of the windows; 1 task in flight, 0.50 Mvoxel/s, 17.5 s left"


def test_bars_of_seconds_and_of_things_are_in_english() -> None:
    shown = Bars(Bar(disable=True))
    shown.show_seconds("trying blocks", 3.2, 20.0)
    shown.show("convert", 1, 2, "box")
    shown.show_seconds("trying blocks", 25.0, 20.0)
    texts = [task.fields["count"] for task in shown.progress.tasks]
    assert texts == ["20 of 20 s", "1 of 2 boxes"]


def test_a_table_without_columns_of_text_has_none() -> None:
    assert [column.justify for column in columns("a", "b", left=()).columns] == ["right", "right"]
    assert [column.justify for column in columns("a", "b").columns] == ["left", "right"]


def test_before_the_first_task_is_back_no_time_left_is_told() -> None:
    progress = Progress([Stage("infer", 12)], time.perf_counter(), totals={"infer": Totals()})
    assert progress_line(progress, 5.0).endswith("starting; 0 tasks in flight")


def test_sizes_and_times_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1.5 * 2**30, 2**60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 PiB",
    ]
    assert [duration(s) for s in (0.04, 59.94, 60, 3599.6, 3725, 86400 * 12, 86400 * 365.25 * 57)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "1 h 00 min",
        "1 h 02 min",
        "12 days",
        "57 years",
    ]
    assert [count(n, "task") for n in (0, 1, 2, 1200)] == ["0 tasks", "1 task", "2 tasks", "1,200 tasks"]


@pytest.mark.parametrize(
    ("command", "function", "sentence"),
    [
        (["run", *THREADS, *IDENTITY, "in.n5"], "volpipe.api.runs.execute", "run the same command again to continue"),
        (["run", *THREADS, *IDENTITY, "in.n5"], "volpipe.apps.pool.on_site", "run the same command again to continue"),
        (
            ["train", "train_affinities.toml"],
            "volpipe.api.training.run_training",
            "run the same command again to continue from the newest checkpoint",
        ),
        (["train", "mine.toml"], "volpipe.api.training.load_training", ""),  # before it could say what the command does
        (["sweep", "mine.toml"], "volpipe.training.search.grid.Sweep.load", ""),
        (["tune", "mine.toml"], "volpipe.training.search.optuna.Tuning.load", ""),
        (["segment", *THREADS, "in.n5"], "volpipe.cli.segment.result_file", ""),
        (["sites", "check", "threads"], "volpipe.check_site", "what was started is stopped"),
        (["evaluate", "in.n5", "in.n5"], "volpipe.cli.evaluate.result_file", ""),
    ],
)
def test_a_command_that_is_interrupted_ends_with_a_code_of_its_own(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, command: list[str], function: str, sentence: str
) -> None:
    """So that a scheduler tells it from one that gave up, and gives it again."""
    (tmp_path / "mine.toml").write_text("")

    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(function, interrupted)
    ended = give(*command)
    assert ended.code == INTERRUPTED == 4
    assert ended.err.splitlines()[-1].startswith("volpipe: interrupted")
    assert sentence in ended.err


def test_a_command_interrupted_before_it_began_has_that_code(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("volpipe.cli.app._commands", lambda: interrupted)
    assert give("run") == Ended(4, "", "volpipe: interrupted\n")


# ---- pipes


def piped(folder: Path, *arguments: str, lines: int) -> tuple[int, bytes, bytes]:
    """Return how a command ends whose reader takes so many lines and goes: its code, these lines, and its errors."""
    with subprocess.Popen(
        [sys.executable, "-m", "volpipe", *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        first = b"".join(process.stdout.readline() for _ in range(lines))
        process.stdout.close()
        errors = process.stderr.read()
        return process.wait(timeout=100), first, errors


@pytest.mark.parametrize(("arguments", "lines"), [(("nets",), 1), (("run", "-h"), 0)])
def test_a_list_whose_reader_goes_away_ends_quietly(tmp_path: Path, arguments: tuple[str, ...], lines: int) -> None:
    code, first, errors = piped(tmp_path, *arguments, lines=lines)
    assert (code, errors) == (0, b"")
    assert bool(first) == bool(lines)


@pytest.mark.long
def test_a_run_whose_reader_goes_away_works_on_to_its_end(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise((16, 16, 16)))
    command = ("run", *THREADS, *IDENTITY, "-o", "out.zarr", "in.n5")
    code, first, errors = piped(tmp_path, *command, lines=1)
    assert (code, b"Traceback" in errors, first[:6]) == (0, False, b"input ")
    assert (open_volume(tmp_path / "out.zarr")[:] == open_volume(tmp_path / "in.n5")[:]).all()
    code, _, errors = piped(tmp_path, *command, "--set", "output.levels=1", lines=0)
    assert code == 2 and b"volpipe: " in errors and b"another recipe" in errors and b"Traceback" not in errors


def test_who_watches_work_ends_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Status] = []
    status = Status("run", "out.zarr", False, Driver("running"), {})
    monkeypatch.setattr(Status, "state", "running")
    monkeypatch.setattr("volpipe.display.watching.is_unread", lambda: len(shown) == 2)
    assert follow(lambda: status, None, 0.01, shown.append) is status  # type: ignore[arg-type]
    assert len(shown) == 2
