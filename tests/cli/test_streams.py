"""Commands whose standard streams are closed, full, unread or of few letters: the work is done, and told truly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from command import IDENTITY, THREADS
from conftest import ROOT
from volumes import noise

from volpipe.volumes.volume import open_volume

VOXELS = noise((16, 24, 16), np.uint8)
NAME = "Größe – 1"  # of a folder
WORDS = b"words of a library"
# A net whose library prints by itself, as those of C do: to the numbers of standard output and error.
NET = f"""
import os
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        for number in (1, 2):
            os.write(number, {WORDS!r})
        return x
def build():
    return Net()
"""

FULL, CLOSED = "/dev/full", "&-"
NO_ROOM, NOTHING = "No space left on device", "it is closed"


@dataclass(frozen=True)
class Printed:
    """How a command ended: its exit code, and the bytes that it printed."""

    code: int
    out: bytes
    err: bytes


def give(folder: Path, arguments: Sequence[str], redirected: str = "", **environment: str) -> Printed:
    """Give a command to a shell in `folder`, with redirections; no line of a traceback is printed, nor as it ends."""
    set_each = " ".join(f"{name}={value}" for name, value in environment.items())
    line = f'set -o pipefail; PYTHONPATH={ROOT} {set_each} "$@" {redirected}'
    command = ["bash", "-c", line, "bash", sys.executable, "-P", "-m", "volpipe", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=False)
    for words in (b"Traceback", b"Exception ignored"):
        assert words not in ended.stdout + ended.stderr, ended.stderr
    return Printed(ended.returncode, ended.stdout, ended.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a volume, and an output of it."""
    place = tmp_path_factory.mktemp("streams")
    np.save(place / "a.npy", VOXELS)
    assert give(place, ["run", *THREADS, *IDENTITY, "a.npy", "-o", "made.zarr"]).code == 0
    return place


ANSWERS = {
    "help": ["run", "--help"],
    "version": ["--version"],
    "a volume": ["info", "a.npy"],
    "a list": ["nets"],
    "JSON": ["status", "made.zarr", "--json"],
    "a command": ["reproduce", "made.zarr"],
    "a plan": ["plan", "--quick", *THREADS, *IDENTITY, "a.npy", "-o", "other.zarr"],
    "scores": ["evaluate", *THREADS, "made.zarr", "a.npy"],
}


@pytest.mark.parametrize(("target", "why"), [(FULL, NO_ROOM), (CLOSED, NOTHING)])
@pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_cannot_be_printed_is_an_error(
    folder: Path, arguments: Sequence[str], target: str, why: str
) -> None:
    ended = give(folder, arguments, f">{target}")
    assert (ended.code, ended.out) == (1, b"")
    assert f"volpipe: standard output cannot be written: {why}\n" in ended.err.decode()
    assert give(folder, arguments, f">{target} 2>{target} <&-") == Printed(1, b"", b"")


@pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_nobody_reads_to_its_end_is_none(folder: Path, arguments: Sequence[str]) -> None:
    ended = give(folder, arguments, "| head -c 1")
    assert (ended.code, len(ended.out)) == (0, 1)
    assert give(folder, arguments, "2>&1 | true").code == 0


@pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_printed_in_the_letters_that_there_are(folder: Path, arguments: Sequence[str]) -> None:
    ended = give(folder, arguments, PYTHONIOENCODING="ascii")
    assert ended.code == 0
    assert ended.out.isascii()
    assert "×".encode() not in ended.out
    assert b"\\x" not in ended.out and b"\\u" not in ended.out  # all letters of ours have others that stand for them
    assert len(ended.out) > 4


HOWS = {
    "closed output": f">{CLOSED}",
    "closed errors": f"2>{CLOSED}",
    "closed input": f"<{CLOSED}",
    "all closed": f">{CLOSED} 2>{CLOSED} <{CLOSED}",
    "no room": f">{FULL} 2>{FULL}",
    "unread": "2>&1 | true",
}


@pytest.mark.parametrize("redirected", HOWS.values(), ids=HOWS)
def test_a_result_in_files_is_whole_whatever_its_words_go_to(tmp_path: Path, redirected: str) -> None:
    np.save(tmp_path / "a.npy", VOXELS)
    (tmp_path / "net.py").write_text(NET)
    run = ["run", *THREADS, "--set", "net.name=net.py:build", "a.npy", "-o", "b.zarr"]
    assert give(tmp_path, run, redirected).code == 0
    assert give(tmp_path, ["convert", "b.zarr/s0", "c.npy"], redirected).code == 0
    np.testing.assert_array_equal(open_volume(tmp_path / "b.zarr").open()[...], VOXELS)
    np.testing.assert_array_equal(np.squeeze(np.load(tmp_path / "c.npy")), VOXELS)
    assert [file for file in tmp_path.rglob("*") if is_spoiled(file)] == []


@pytest.mark.long
def test_workers_of_a_driver_without_streams_write_no_words_into_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VOXELS)
    (tmp_path / "net.py").write_text(NET)
    run = ["run", "--config", "local", "--set", "net.name=net.py:build", "a.npy", "-o", "b.zarr"]
    assert give(tmp_path, run, HOWS["all closed"], VOLPIPE_WORKERS="1").code == 0
    np.testing.assert_array_equal(open_volume(tmp_path / "b.zarr").open()[...], VOXELS)
    spoiled = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if is_spoiled(file)]
    assert [file for file in spoiled if "submit_scripts" not in file.parts] == []  # where Parsl keeps what blocks print


def is_spoiled(file: Path) -> bool:
    """Return whether `file` has got words of the net's library; the net's own code has them too."""
    return file.is_file() and file.suffix != ".py" and WORDS in file.read_bytes()


def test_a_refusal_has_its_exit_code_whatever_its_words_go_to(folder: Path) -> None:
    for redirected in ("", *HOWS.values()):
        assert give(folder, ["info", "nothing.npy"], redirected).code == 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_a_shell_will_read_has_names_as_the_disk_has_them(tmp_path: Path, encoding: str) -> None:
    place = tmp_path / NAME
    place.mkdir()
    np.save(place / "a.npy", VOXELS)
    run = give(place, ["run", *THREADS, *IDENTITY, "a.npy", "-o", "b.zarr"], PYTHONIOENCODING=encoding)
    assert run.code == 0
    ended = give(place, ["reproduce", "b.zarr"], PYTHONIOENCODING=encoding)
    assert ended.code == 0
    assert f"cd '{place}' && volpipe run".encode() in ended.out
