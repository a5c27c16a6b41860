"""The command line as tests give it: in this process, or in one of its own that can be killed; and what it leaves."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from warm import Begun, Request, read_at_start, warm

from volpipe.apps.htex.processes import WORKERS
from volpipe.cli import app, evaluate
from volpipe.display import console, progress

IDENTITY = ("--set", "net.name=identity")
THREADS = ("--config", "threads")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it printed."""

    code: int
    out: str
    err: str


Give = Callable[..., Ended]
Process = subprocess.Popen[str] | Begun


def set_each(*settings: str) -> list[str]:
    """Return `settings` of a recipe as options."""
    return [part for setting in settings for part in ("--set", setting)]


def named_by_verify(give: Give, output: str) -> set[str]:
    """Return what `volpipe verify` says of the files of `output` that are not as they were written; there are some."""
    ended = give("verify", output)
    assert ended.code == 1
    return set(ended.out.splitlines()[:-1])


def omit_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print no lines that appear on a slow machine alone."""
    for module in (console, evaluate, progress):
        monkeypatch.setattr(module, "PLAIN_LINE_SECONDS", math.inf)


def giver(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in this process, as if in a shell in `folder`; a slow machine adds no lines."""
    omit_lines_of_progress(monkeypatch)

    def give(*arguments: str | Path) -> Ended:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["volpipe", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        capsys.readouterr()
        try:
            app.main()
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            logging.getLogger("volpipe").handlers.clear()
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return give


def begin(folder: Path, *arguments: str, **environment: str) -> Process:
    """Start a command in a process group of its own; `err.txt` and `out.txt` in `folder` get what it prints.

    It is forked from a process that has imported much; one with variables that only a start reads is started anew.
    """
    request = Request([*arguments], str(folder), os.environ | {"PYTHONPATH": str(ROOT)} | environment)
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        if "PYTHONPATH" not in environment and read_at_start(request.environment) == warm().environment:
            return warm().begin(request, out, err)
        return subprocess.Popen(
            [sys.executable, "-m", "volpipe", *arguments],
            cwd=folder,
            env=request.environment,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )


def finish(folder: Path, process: Process, seconds: float = 120) -> Ended:
    """Wait for a command that was begun in `folder`, and kill one that does not end."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return Ended(code, (folder / "out.txt").read_text(), (folder / "err.txt").read_text())


def sentences(ended: Ended) -> list[str]:
    """Return what a check of a site named, below its table."""
    return [line for line in ended.out.splitlines() if re.match("(here|note|cpu|gpu|gpu_.*): ", line)]


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; "" of one that ends just now."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def is_pool(process: psutil.Process) -> bool:
    """Return whether this is the process that passes tasks to the workers of a block; what they are forks of is not."""
    try:
        return WORKERS in " ".join(process.cmdline()[:2])
    except psutil.NoSuchProcess:
        return False


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in `folder` or name it: a driver, its interchange, its pool and its workers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and (
                process.cwd() == str(folder) or str(folder) in " ".join(process.cmdline())
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.pid != os.getpid()]


def wait_until(fact: Callable[[], object], seconds: float) -> float:
    """Return how long it took until `fact` gave something true; fail after `seconds`.

    A fact that costs much, such as a look at all processes, is asked for less often: what is awaited needs the cores.
    """
    started = time.monotonic()
    while True:
        began = time.monotonic()
        if fact():
            return began - started
        now = time.monotonic()
        assert now - started < seconds, f"still not so after {seconds} s"
        time.sleep(min(max(0.02, 3 * (now - began)), 0.5))
