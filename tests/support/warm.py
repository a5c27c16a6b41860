"""Commands without the seconds that imports take: a process that has imported what they do forks one for each.

Each is a process like one that was started anew: in a session, a folder and an environment of its own, with files of
its own for what it prints. What reads the environment as it starts (Python itself, threads of arrays) cannot be told
another; such a command is to be started anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, TextIO

PACKAGES = ("volpipe.apps.pool", "volpipe.cli.app", "torch", "tensorstore", "zarr", "setproctitle")
AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_")  # variables that are read only then
LENGTH_BYTES = 8


class Request(NamedTuple):
    """A command: its arguments, folder and environment."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


class Begun:
    """A command that was begun, as `subprocess.Popen` has it: `returncode` is None until its end was seen."""

    def __init__(self, request: Request, end: int) -> None:
        self.args = ["volpipe", *request.arguments]
        self.returncode: int | None = None
        self._end = os.fdopen(end)
        started = self._end.readline()
        assert started, "the process that forks commands has ended"
        self.pid = int(started)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._end:
                self.returncode = os.waitstatus_to_exitcode(int(self._end.readline()))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process that forks commands, and ends with this one."""

    def __init__(self) -> None:
        self.environment = read_at_start(os.environ)
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair()
        with other:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())], cwd="/", pass_fds=[other.fileno()],
                env=dict(os.environ),  # else with what readline told C alone: COLUMNS
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self._end)

    def begin(self, request: Request, out: TextIO, err: TextIO) -> Begun:
        end, write_end = os.pipe()
        try:
            text = json.dumps(request).encode()
            header = len(text).to_bytes(LENGTH_BYTES, "big")
            with self._lock:
                socket.send_fds(self._socket, [header], [out.fileno(), err.fileno(), write_end])
                self._socket.sendall(text)
        finally:
            os.close(write_end)
        return Begun(request, end)

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._server.wait()


@cache
def warm() -> Warm:
    """Return the process that forks the commands of this one."""
    return Warm()


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that Python and its packages read as they start; commands get a path of their own."""
    return {name: value for name, value in environment.items() if name.startswith(AT_START) and name != "PYTHONPATH"}


def serve(server: socket.socket) -> Request:
    """Take requests until nobody can ask any more; return each in a process of its own."""
    for package in PACKAGES:
        importlib.import_module(package)
    gc.collect()
    gc.freeze()  # what is shared stays so
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for a command are nobody's concern
    while header := socket.recv_fds(server, LENGTH_BYTES, 3):
        length, files = header[:2]
        if not length:
            os._exit(0)
        text = b""
        while len(text) < int.from_bytes(length, "big"):
            text += server.recv(1 << 20)
        if os.fork() == 0:
            server.close()
            return become(Request(*json.loads(text)), files)
        for file in files:
            os.close(file)
    raise AssertionError


def become(request: Request, files: list[int]) -> Request:
    """Return `request` in the process that does it; another waits for that, and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, err, end = files
    if child := os.fork():
        os.write(end, f"{child}\n".encode())
        os.write(end, f"{os.waitpid(child, 0)[1]}\n".encode())
        os._exit(0)
    os.close(end)
    for target, file in enumerate((out, err), 1):
        os.dup2(file, target)
        os.close(file)
    os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    return request


def main() -> None:
    """Serve; in the process of a command, do it as `python -m volpipe` does."""
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, "-m", "volpipe", *request.arguments]))
    sys.path[0] = request.folder
    sys.path[1:1] = request.environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["volpipe", *request.arguments]
    runpy.run_module("volpipe", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
