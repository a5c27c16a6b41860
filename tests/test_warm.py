"""What is forked from a warm process sees what one that is started anew sees, and ends as it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from command import Process, begin, finish, processes_in, set_each, wait_until
from conftest import ROOT
from volumes import noise, windowed, write_volume

from volpipe.apps.htex.processes import WORKER, WORKERS

# A net that notes what its process is like, and waits to be killed.
NET = """
import json, os, signal, sys, threading
from volpipe.display.console import out
facts = {
    "arguments": sys.argv[1:], "folder": os.getcwd(), "first": sys.path[0], "leads": os.getsid(0) == os.getpid(),
    "mark": os.environ["MARK"], "width": out.width, "main": sys.modules["__main__"].__spec__.name,
    "names": sorted(os.environ), "chld": signal.getsignal(signal.SIGCHLD), "fds": len(os.listdir("/proc/self/fd")),
}
with open("facts.0", "w") as file:
    json.dump(facts, file)
os.replace("facts.0", "facts.json")
threading.Event().wait()
"""

# A net that notes what its worker is like, and waits to be told to go on.
WORKER_NET = """
import json, multiprocessing, os, pathlib, signal, sys, threading, time, torch
def build():
    parent = multiprocessing.parent_process()
    if parent is None:
        return torch.nn.Identity()
    facts = {
        "parent": parent.name, "own": multiprocessing.current_process().name,
        "name": pathlib.Path("/proc/self/comm").read_text().strip(),
        "folder": os.getcwd(), "first": sys.path[0], "own path": os.environ["PYTHONPATH"], "path": sys.path,
        "arguments": sys.argv[:3], "main": sys.modules["__main__"].__name__, "thread": threading.current_thread().name,
        "names": sorted(os.environ.keys() - {"VOLPIPE_WARM"}), "threads": torch.get_num_threads(),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
    }
    with open("facts.0", "w") as file:
        json.dump(facts, file)
    os.replace("facts.0", "facts.json")
    while not os.path.exists("go"):
        time.sleep(0.02)
    return torch.nn.Identity()
"""


@pytest.fixture
def _told_by_readline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a process that is started now be told the width of a terminal by C alone, as readline does."""
    monkeypatch.delenv(warm.FOR_ALL, raising=False)
    warm.warm.cache_clear()
    os.putenv("COLUMNS", "40")
    yield
    os.unsetenv("COLUMNS")
    warm.warm.cache_clear()


def facts_of(folder: Path, **environment: str) -> tuple[Process, dict[str, Any]]:
    """Return a command, killed, and what its process was like."""
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    process = begin(folder, "net", "net.py:build", MARK="here", **environment)
    wait_until((folder / "facts.json").exists, 120)
    process.kill()
    assert finish(folder, process).code == process.poll() == -signal.SIGKILL
    facts = json.loads((folder / "facts.json").read_text())
    assert (facts["folder"], facts["mark"], facts["width"]) == (str(folder), "here", 160)
    return process, {name: fact for name, fact in facts.items() if fact != str(folder)}


@pytest.mark.usefixtures("_told_by_readline", "_no_process_outlives_a_test")
def test_a_forked_command_sees_what_one_that_is_started_anew_sees(tmp_path: Path) -> None:
    forked, facts = facts_of(tmp_path / "forked")
    anew, expected = facts_of(tmp_path / "anew", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert (type(forked), type(anew)) == (warm.Begun, subprocess.Popen)
    assert facts == expected


def test_a_forked_command_prints_and_ends_as_one_that_is_started_anew(tmp_path: Path) -> None:
    command = ("info", "nothing.n5")
    forked = finish(tmp_path, begin(tmp_path, *command))
    assert forked == finish(tmp_path, begin(tmp_path, *command, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}"))
    assert forked.code == 2 and "nothing.n5" in forked.err


def test_a_command_whose_threads_are_given_is_started_anew(tmp_path: Path) -> None:
    process = begin(tmp_path, "--version", OMP_NUM_THREADS="3")
    assert isinstance(process, subprocess.Popen)
    assert finish(tmp_path, process).code == 0


def begin_run(folder: Path) -> Process:
    """Return a run of one worker that has loaded its net, and waits in it."""
    folder.mkdir()
    write_volume(folder / "in.n5", noise((8, 8, 8)))
    (folder / "net.py").write_text(WORKER_NET)
    recipe = set_each("net.name=net.py:build", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
    files = ("-o", str(folder / "out.zarr"), str(folder / "in.n5"))  # by which its processes are known
    process = begin(folder, "run", *recipe, *files, VOLPIPE_WORKERS="1")
    wait_until(lambda: (folder / "facts.json").exists() or process.poll() is not None, 120)
    assert process.poll() is None, (folder / "err.txt").read_text()
    return process


def facts_of_worker(folder: Path) -> dict[str, Any]:
    process = begin_run(folder)
    (folder / "go").touch()
    assert finish(folder, process).code == 0
    return json.loads((folder / "facts.json").read_text().replace(str(folder), "HERE"))


@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_worker_of_a_forked_pool_sees_what_one_that_is_started_anew_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = facts_of_worker(tmp_path / "forked")
    monkeypatch.delenv(warm.ADDRESS)
    assert forked == facts_of_worker(tmp_path / "anew")
    assert (forked["parent"], forked["name"]) == ("MainProcess", WORKER)


def pools(folder: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the scripts that stand for pools, and their forks."""
    named = [p for p in processes_in(folder) if WORKERS in " ".join(p.cmdline()[:4])]
    scripts = [p for p in named if "pool_scripts" in " ".join(p.cmdline())]
    return scripts, [p for p in named if p not in scripts and p.name() != "bash"]


@pytest.mark.parametrize("which", [0, 1], ids=["script", "fork"])
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_forked_pool_ends_with_its_script_and_its_script_with_it(tmp_path: Path, which: int) -> None:
    process = begin_run(tmp_path / "run")
    (script,), (fork,) = both = pools(tmp_path)
    workers = [p for p in processes_in(tmp_path / "run") if os.getsid(p.pid) == fork.pid]
    assert len(workers) == 5  # the pool, a manager, a worker, what forks them, and a tracker of what they share
    (killed,) = both[which]
    killed.kill()
    wait_until(lambda: not any(p.is_running() for p in [script, *workers]), 10)
    process.kill()
    assert finish(tmp_path / "run", process).code == -signal.SIGKILL


def test_a_pool_that_is_to_find_other_packages_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def can_fork(folder: Path = Path(sys.executable).parent, **environment: str) -> bool:
        return warm.can_fork(warm.Request([], "/", os.environ | environment, str(folder / WORKERS)))

    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert can_fork(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="3")
    assert not can_fork(PYTHONPATH=str(tmp_path))
    assert not can_fork(tmp_path)
    assert not can_fork(MKL_NUM_THREADS="3")
    own = warm.confines(os.getpid())
    with subprocess.Popen(["bash", "-c", "ulimit -v 9000000; echo; read"], stdin=-1, stdout=-1) as limited:
        assert limited.stdout is not None and limited.stdout.readline() == b"\n"
        assert warm.confines(limited.pid) != own == warm.confines(os.getppid())
        limited.communicate()
