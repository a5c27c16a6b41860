"""Commands whose standard streams are closed, full, unread or of few letters: the work is done, and told truly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from command import IDENTITY, THREADS, giver
from conftest import ROOT
from volumes import noise

from volpipe.volumes.volume import open_volume

VOXELS = noise((16, 24, 16))
SCALED = VOXELS / 127.5 - 1  # as the net gets them
NAME = "Größe – 1"  # of a folder
WORDS = b"words of a library"
# A net whose library prints by itself, as those of C do: to the numbers of standard output and error.
NET = f"""
import contextlib
import os
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.write(number, {WORDS!r})
        return x
def build():
    return Net()
"""

FULL, CLOSED = "/dev/full", "&-"


@dataclass(frozen=True)
class Printed:
    """How a command ended: its exit code, and the bytes that it printed."""

    code: int
    out: bytes
    err: bytes


def full() -> TextIO:
    """Return a stream to a disk without room."""
    return Path(FULL).open("w")


def give_to_shell(folder: Path, arguments: Sequence[str], redirected: str = "", **environment: str) -> Printed:
    """Give a command to a shell in `folder`, with redirections; no line of a traceback is printed, nor as it ends."""
    set_each = " ".join(f"{name}={value}" for name, value in environment.items())
    line = f'set -o pipefail; PYTHONPATH={ROOT} {set_each} "$@" {redirected}'
    command = ["bash", "-c", line, "bash", sys.executable, "-P", "-m", "volpipe", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=False)
    for words in (b"Traceback", b"Exception ignored"):
        assert words not in ended.stdout + ended.stderr, ended.stderr
    return Printed(ended.returncode, ended.stdout, ended.stderr)


GiveTo = Callable[[Sequence[str], TextIO | None, TextIO | None], int]


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> GiveTo:
    """What gives a command in this process with other streams, None for one that is closed, and returns its code."""
    plain = giver(folder, monkeypatch, capsys)

    def give_to(arguments: Sequence[str], stdout: TextIO | None, stderr: TextIO | None) -> int:
        with monkeypatch.context() as context:
            context.setattr(sys, "stdout", stdout)
            context.setattr(sys, "stderr", stderr)
            code = plain(*arguments).code
            for stream in (stdout, stderr):
                if stream is not None:
                    stream.close()  # as Python does at its end
        return code

    return give_to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a volume, and an output of it."""
    place = tmp_path_factory.mktemp("streams")
    np.save(place / "a.npy", VOXELS)
    assert give_to_shell(place, ["run", *THREADS, *IDENTITY, "a.npy", "-o", "made.zarr"]).code == 0
    return place


ANSWERS = {
    "help": ["run", "--help"],
    "a version": ["--version"],
    "a volume": ["info", "a.npy"],
    "a list": ["sites"],
    "JSON": ["status", "made.zarr", "--json"],
    "a command": ["reproduce", "made.zarr"],
    "a plan": ["plan", "--quick", *THREADS, *IDENTITY, "a.npy", "-o", "other.zarr"],
    "scores": ["evaluate", *THREADS, "made.zarr", "a.npy"],
}
each_answer = pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS)


@each_answer
def test_an_answer_that_cannot_be_printed_is_an_error(give: GiveTo, tmp_path: Path, arguments: Sequence[str]) -> None:
    for stdout, why in ((None, "it is closed"), (full(), "No space left on device")):
        with (tmp_path / "err").open("w") as stderr:
            assert give(arguments, stdout, stderr) == 1
        sentence = f"volpipe: standard output cannot be written: {why}\n"
        assert (tmp_path / "err").read_text().endswith(sentence)
    assert give(arguments, full(), full()) == 1
    assert give(arguments, None, None) == 1


@each_answer
def test_an_answer_that_nobody_reads_is_none(give: GiveTo, arguments: Sequence[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert give(arguments, os.fdopen(writer, "w"), None) == 0


@each_answer
def test_an_answer_is_printed_in_the_letters_that_there_are(
    give: GiveTo, tmp_path: Path, arguments: Sequence[str]
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stdout, (tmp_path / "err").open("w") as stderr:
        assert give(arguments, stdout, stderr) == 0
    text = (tmp_path / "out").read_text("ascii")
    assert len(text) > 4
    assert "\\x" not in text  # all letters of ours have others that stand for them
    assert "\\u" not in text


HOWS = {
    "closed output": f">{CLOSED}",
    "closed errors": f"2>{CLOSED}",
    "closed input": f"<{CLOSED}",
    "all closed": f">{CLOSED} 2>{CLOSED} <{CLOSED}",
    "no room": f">{FULL} 2>{FULL}",
    "unread": "2>&1 | true",
}


@pytest.mark.parametrize(
    "redirected",
    [
        pytest.param(HOWS[how], id=how, marks=[pytest.mark.long] * (how not in {"all closed", "no room"}))
        for how in HOWS
    ],
)
def test_a_result_in_files_is_whole_whatever_its_words_go_to(tmp_path: Path, redirected: str) -> None:
    np.save(tmp_path / "a.npy", VOXELS)
    (tmp_path / "net.py").write_text(NET)
    run = ["run", *THREADS, "--set", "net.name=net.py:build", "a.npy", "-o", "b.zarr"]
    assert give_to_shell(tmp_path, run, redirected).code == 0
    assert give_to_shell(tmp_path, ["convert", "b.zarr/s0", "c.npy"], redirected).code == 0
    for place in ("b.zarr", "c.npy"):
        np.testing.assert_allclose(open_volume(tmp_path / place).open()[...], SCALED, atol=1e-6)
    assert [file for file in tmp_path.rglob("*") if is_spoiled(file)] == []


@pytest.mark.long
def test_workers_of_a_driver_without_streams_write_no_words_into_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VOXELS)
    (tmp_path / "net.py").write_text(NET)
    run = ["run", "--config", "local", "--set", "net.name=net.py:build", "a.npy", "-o", "b.zarr"]
    assert give_to_shell(tmp_path, run, HOWS["all closed"], VOLPIPE_WORKERS="1").code == 0
    np.testing.assert_allclose(open_volume(tmp_path / "b.zarr").open()[...], SCALED, atol=1e-6)
    spoiled = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if is_spoiled(file)]
    assert [file for file in spoiled if "submit_scripts" not in file.parts] == []  # where Parsl keeps what blocks print


def is_spoiled(file: Path) -> bool:
    """Return whether `file` has got words of the net's library; the net's own code has them too."""
    return file.is_file() and file.suffix != ".py" and WORDS in file.read_bytes()


def test_a_refusal_has_its_exit_code_whatever_its_words_go_to(give: GiveTo) -> None:
    for stdout, stderr in ((None, None), (full(), full())):
        assert give(["info", "nothing.npy"], stdout, stderr) == 2


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.long)])
def test_what_a_shell_will_read_has_names_as_the_disk_has_them(tmp_path: Path, encoding: str) -> None:
    place = tmp_path / NAME
    place.mkdir()
    np.save(place / "a.npy", VOXELS)
    run = give_to_shell(place, ["run", *THREADS, *IDENTITY, "a.npy", "-o", "b.zarr"], PYTHONIOENCODING=encoding)
    assert run.code == 0
    ended = give_to_shell(place, ["reproduce", "b.zarr"], PYTHONIOENCODING=encoding)
    assert ended.code == 0
    assert f"cd '{place}' && volpipe run".encode() in ended.out
