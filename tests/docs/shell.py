"""A shell for the blocks of a page, whose `volpipe` is this process: nothing is imported anew for a command.

A block is run by bash itself. The program `volpipe` that it finds sends its arguments, folder, environment and open
files to this process, which does the command there and then. With `is_real`, it is the command that is installed.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from command import omit_lines_of_progress
from markdown_page import ROOT

from volpipe.cli import app, viewer
from volpipe.display import console
from volpipe.sites import find

CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
sys.exit(server.recv(1)[0])
"""
REAL = """#!{python}
import math, sys
sys.path.insert(0, {root!r})
from volpipe.display import console
console.PLAIN_LINE_SECONDS = math.inf
from volpipe.__main__ import main
from volpipe.cli import viewer
from volpipe.sites import find
{looked}
viewer.Event = Looked
load = find._module
find._module = lambda name: load({sites!r}.get(name.removesuffix(".py"), name))
if __name__ == "__main__":  # in processes that it spawns, it is not
    main()
"""
STATE = """
trap 'code=$?; set +eu; export -p > {state}/exports; pwd > {state}/folder; exit $code' EXIT
if [ -f {state}/exports ]; then . {state}/exports; cd "$(cat {state}/folder)"; fi
set -a
"""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Looked:
    """Stands for the event on which `volpipe view` waits: who looks is gone at once."""

    def wait(self) -> None:
        raise KeyboardInterrupt


@dataclass
class Shell:
    """A shell in `folder`.

    Attributes:
        folder: in which a page's first block begins.
        tools: the programs of this shell, before those of the machine.
        environment: what its processes see besides this one's.
        sites: sites by the name that a page gives them, with the name of what is used in their place.
        is_real: whether `volpipe` is a process of its own.
    """

    folder: Path
    tools: Path
    environment: dict[str, str] = field(default_factory=dict)
    sites: dict[str, str] = field(default_factory=dict)
    is_real: bool = False

    def __post_init__(self) -> None:
        self.environment["PATH"] = f"{self.tools}{os.pathsep}{os.environ['PATH']}"

    def add_tool(self, name: str, text: str) -> None:
        """Write the program `name`, which blocks find first."""
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, seconds: float = 300) -> tuple[int, str]:
        """Return the exit code of a block of bash, and what a terminal would show."""
        place = self.tools / "socket"
        self._write_volpipe(place)
        text = STATE.format(state=self.tools) + script
        shown = self.tools / "shown"
        with shown.open("w") as output, listening(place) as server:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text], cwd=self.folder, env=os.environ | self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                self._serve(server, process, seconds)
            finally:
                _end(process)
        return process.returncode, shown.read_text()

    def _write_volpipe(self, place: Path) -> None:
        text, looked = REAL if self.is_real else CLIENT, inspect.getsource(Looked)
        names = {"python": sys.executable, "socket": str(place), "root": str(ROOT), "sites": self.sites}
        self.add_tool("volpipe", text.format(**names, looked=looked))

    def _serve(self, server: socket.socket, process: subprocess.Popen[bytes], seconds: float) -> None:
        """Do the commands that the block gives, until it ends."""
        started = time.monotonic()
        while process.poll() is None:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                assert time.monotonic() - started < seconds, f"the block still runs after {seconds:.0f} s"
                continue
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        header, files, _, _ = socket.recv_fds(connection, 8, 3)
        asked = b""
        while len(asked) < int.from_bytes(header, "big"):
            asked += connection.recv(1 << 20)
        arguments, folder, environment = json.loads(asked)
        code = self._give(arguments, Path(folder), environment, files)
        connection.sendall(bytes([code]))

    def _give(self, arguments: list[str], folder: Path, environment: Mapping[str, str], files: list[int]) -> int:
        """Do one command in this process; return its exit code."""
        streams = [os.fdopen(file, mode) for file, mode in zip(files, "rww", strict=True)]
        with pytest.MonkeyPatch.context() as patch, as_elsewhere(folder, environment, self.sites):
            for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
                patch.setattr(sys, name, stream)
            patch.setattr(sys, "argv", ["volpipe", *arguments])
            # They are as wide as when this process began.
            if "COLUMNS" in environment:
                for stream_console in (console.out, console.err):
                    patch.setattr(stream_console, "width", int(environment["COLUMNS"]))
            patch.setattr(viewer, "Event", Looked)
            omit_lines_of_progress(patch)
            try:
                app.main()
                code = 0
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
            finally:
                for stream in streams:
                    stream.close()
                logging.getLogger("volpipe").handlers.clear()
        return code


@contextmanager
def as_elsewhere(folder: Path, environment: Mapping[str, str], sites: Mapping[str, str]) -> Iterator[None]:
    """Work in `folder` with `environment`, and with other sites, as a process of its own would; then as before."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    before, load = dict(os.environ), find._module
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(find, "_module", lambda name: load(sites.get(name.removesuffix(".py"), name)))
        os.environ.clear()
        os.environ.update(environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def listening(place: Path) -> Iterator[socket.socket]:
    """Give a socket at `place` on which commands are taken; its path may be long."""
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        server.settimeout(0.05)
        yield server


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a block left behind, as a terminal that is closed does."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for other in psutil.process_iter(["pid"]):
        try:
            if os.getsid(other.pid) == process.pid:
                other.kill()
        except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            continue
