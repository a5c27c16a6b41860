"""Output whose reader goes away, as of `volpipe … | head -n 1`, in real pipes: the command ends with its own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import IDENTITY, THREADS
from conftest import ROOT
from volumes import noise, write_volume

from volpipe.display.watching import follow
from volpipe.runs.presence import Driver
from volpipe.volumes.volume import open_volume
from volpipe.workflow.status import Status


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


@pytest.mark.parametrize(("arguments", "lines"), [(("nets",), 1), (("nets",), 0), (("run", "-h"), 0)])
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
