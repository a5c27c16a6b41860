"""A command that is forked from a warm process sees what one that is started anew sees, and ends as it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from command import Process, begin, finish, wait_until
from conftest import ROOT

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


@pytest.fixture
def _told_by_readline() -> Iterator[None]:
    """Let a process that is started now be told the width of a terminal by C alone, as readline does."""
    warm.warm.cache_clear()
    os.putenv("COLUMNS", "40")
    yield
    os.unsetenv("COLUMNS")


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
