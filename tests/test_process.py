"""Processes of volpipe, whatever lies in the current folder, and whatever Python is told of warnings."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT
from volumes import noise

from volpipe.process import environment, starting_processes
from volpipe.volumes.volume import open_volume

VOXELS = noise((16, 24, 16))
# A script of a user's that must not run: it notes that it did.
SCRIPT = """
import sys
with open({noted!r}, "a") as file:
    file.write(f"{{__name__}} {{sys.orig_argv}}\\n")
raise SystemExit(3)
"""
COPY = """
import volpipe as vp
vp.convert(vp.open("a.h5/raw"), "copy.zarr", workers=2)
"""


def names_of_modules() -> set[str]:
    """Return the names of Python's own modules, and of those that are installed beside volpipe."""
    installed = set(importlib.metadata.packages_distributions()) - {"volpipe"}
    return {name for name in sys.stdlib_module_names | installed if name.isidentifier()}


def names_of_a_start() -> set[str]:
    """Return the modules that Python loads before the first of a package that it runs by `-m`."""
    code = "import runpy, sys; runpy.run_module('this', alter_sys=True); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return {name.partition(".")[0] for name in loaded.split()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script of the name of every module, and a volume."""
    place = tmp_path / "scripts"
    place.mkdir()
    with h5py.File(place / "a.h5", "w") as file:
        file["raw"] = VOXELS
    for name in names_of_modules():
        (place / f"{name}.py").write_text(SCRIPT.format(noted=str(tmp_path / "noted")))
    return place


def give(folder: Path, *command: str, **variables: str) -> None:
    """Run `command` in `folder`, which finds volpipe by its path; it ends well and without a warning."""
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr


def assert_copied(folder: Path, name: str) -> None:
    np.testing.assert_array_equal(np.squeeze(open_volume(folder / name).open()[...]), VOXELS)
    noted = folder.parent / "noted"
    assert not noted.exists(), noted.read_text()


PYTHON = (sys.executable, "-P")  # as a command that pip installed is started
WORK = {
    "a copy by processes": ["convert", "a.h5/raw", "copy.zarr", "--workers", "2"],
    "a run by workers": ["run", "--config", "local", "--set", "net.name=identity", "a.h5/raw", "-o", "copy.zarr"],
}


@pytest.mark.long
@pytest.mark.parametrize("arguments", WORK.values(), ids=WORK)
def test_no_process_of_a_command_takes_a_script_for_a_module(folder: Path, arguments: list[str]) -> None:
    give(folder, *PYTHON, "-m", "volpipe", *arguments, VOLPIPE_WORKERS="1")
    assert_copied(folder, "copy.zarr")


def test_no_process_of_a_module_that_python_runs_takes_a_script_for_a_module(folder: Path) -> None:
    for name in names_of_a_start():
        (folder / f"{name}.py").unlink(missing_ok=True)  # Python takes those before volpipe is begun
    assert (folder / "random.py").exists() and (folder / "queue.py").exists()
    give(folder, sys.executable, "-m", "volpipe", *WORK["a copy by processes"])
    assert_copied(folder, "copy.zarr")


def test_no_process_that_a_program_starts_takes_a_script_for_a_module(folder: Path) -> None:
    (folder.parent / "program.py").write_text(f"if __name__ == '__main__':\n    {COPY.strip().replace(chr(10), '; ')}")
    give(folder, sys.executable, str(folder.parent / "program.py"))
    assert_copied(folder, "copy.zarr")


def test_a_checkout_runs_from_its_own_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "volpipe", "info", str(tmp_path / "a.npy")]
    np.save(tmp_path / "a.npy", VOXELS)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["variable", "option"])
@pytest.mark.parametrize("arguments", WORK.values(), ids=WORK)
@pytest.mark.long
def test_a_warning_that_a_user_wants_as_an_error_ends_no_command(
    tmp_path: Path, arguments: list[str], options: tuple[str, ...]
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = VOXELS
    variables = {} if options else {"PYTHONWARNINGS": "error"}
    give(tmp_path, *PYTHON, *options, "-m", "volpipe", *arguments, VOLPIPE_WORKERS="1", **variables)
    np.testing.assert_array_equal(np.squeeze(open_volume(tmp_path / "copy.zarr").open()[...]), VOXELS)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("error", ""), ("ignore", "ignore"), ("error::DeprecationWarning,default", "default"), ("e", ""), ("", "")],
)
def test_processes_are_told_no_warning_as_an_error(monkeypatch: pytest.MonkeyPatch, given: str, kept: str) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", given)
    assert environment()["PYTHONWARNINGS"] == kept
    with starting_processes():
        assert os.environ["PYTHONWARNINGS"] == kept
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONWARNINGS"] == given


def test_what_a_program_has_in_its_environment_is_as_before_when_processes_have_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    before = dict(os.environ)
    with starting_processes():
        assert os.environ != before
    assert os.environ == before


def test_descriptors_that_are_closed_go_nowhere(tmp_path: Path) -> None:
    code = (
        "import os, sys; sys.path[:0] = [sys.argv[1]]; from volpipe.process import prepare_process; prepare_process(); "
        "file = open('file', 'w'); "
        "assert file.fileno() > 2; "
        "assert all(os.get_inheritable(number) for number in (0, 1, 2)); "
        "os.write(1, b'lost'); os.write(2, b'lost'); assert os.read(0, 1) == b''"
    )
    line = '"$@" <&- >&- 2>&-'
    ended = subprocess.run(["bash", "-c", line, "bash", sys.executable, "-c", code, ROOT], cwd=tmp_path, check=False)
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == ""
