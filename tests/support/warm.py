"""Commands without the seconds that imports take: a process that has imported what they do forks one for each.

Each is a process like one that was started anew: in a session, a folder and an environment of its own, with files of
its own for what it prints. What reads the environment as it starts (Python itself, threads of arrays) cannot be told
another; such a command is to be started anew.

Interchanges and pools of workers are forked as well, where ADDRESS is in their environment: first in its PATH are
scripts of their names (the folder pool_scripts), each of which asks for a fork and stands for it. Signals that
reach such a script reach the group of its fork, which ends with it, and it ends as its fork does. The system shows the
environment of a fork as that of the process it is a fork of; a file that HELD names in its own is held open by a fork,
and by the forks of that, so that others know them by it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import cache, partial
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from volpipe.apps.htex.processes import WORKER, be_known_as
from volpipe.process import SAFE_PATH

ADDRESS = "VOLPIPE_WARM"  # variable that names the socket of the process that forks
SCRIPTS = Path(__file__).with_name("pool_scripts")
PACKAGES = (
    "volpipe.apps.pool", "volpipe.cli.app", "torch", "tensorstore", "zarr", "setproctitle", "volpipe.runs.worker",
    "parsl.executors.high_throughput.interchange", "parsl.executors.high_throughput.process_worker_pool",
    # What a run imports as it goes.
    "volpipe.api.runs", "volpipe.workflow.work_plan", "volpipe.nets.agreement", "volpipe.nets.receptive_field",
    "volpipe.estimation.window_search", "volpipe.inference.infer", "volpipe.runs.output_pictures", "volpipe.runs.seams",
    "volpipe.reporting.render", "PIL.Image", "jinja2", "msgspec", "tblib", "parsl.app.python",
)  # fmt: skip
AT_START = ("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_")  # variables that are read only then
THREADS = "OMP_NUM_THREADS"  # which torch alone can be told later
FOR_ALL = "VOLPIPE_WARM_FOR_ALL"  # variable that names the same, of one for all processes of pytest
HELD = "VOLPIPE_HELD"  # variable that names a file
LENGTH_BYTES = 8
NO_LIMITS = "Max resident set", "Max core file"  # Linux heeds the first nowhere, the second as a process dies


class Request(NamedTuple):
    """A command of volpipe, or of its pools: its arguments, folder and environment."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    script: str = ""


class Begun:
    """A command that was begun, as `subprocess.Popen` has it: `returncode` is None until its end was seen."""

    def __init__(self, request: Request, answers: socket.socket) -> None:
        self.args = ["volpipe", *request.arguments]
        self.returncode: int | None = None
        with answers:
            self._answers = answers.makefile("r")
        started = self._answers.readline()
        assert started, "the process that forks commands has ended"
        self.pid = int(started)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not connection.wait([self._answers], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._answers:
                self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process that forks commands, and ends with the one that started it.

    Attributes:
        address: of its socket.
        environment: what it read as it started.
    """

    def __init__(self, address: str | None = None) -> None:
        """Start a process, unless there is one at `address`."""
        self.environment = read_at_start(os.environ)
        self.address = address or str(Path(tempfile.mkdtemp(prefix="warm")) / "s")
        if not address:
            self._start()

    def _start(self) -> None:
        alive, self._alive = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), str(alive)], cwd="/",
                pass_fds=[listener.fileno(), alive],
                # Else with what readline told C alone: COLUMNS. The folder of this script is first in its path.
                env={name: value for name, value in os.environ.items() if name != SAFE_PATH},
                start_new_session=True,
            )  # fmt: skip
        os.close(alive)
        atexit.register(self._end)

    def begin(self, request: Request, out: TextIO, err: TextIO) -> Begun:
        answers = socket.socket(socket.AF_UNIX)
        answers.connect(self.address)
        text = json.dumps(request).encode()
        socket.send_fds(answers, [len(text).to_bytes(LENGTH_BYTES, "big")], [0, out.fileno(), err.fileno()])
        answers.sendall(text)
        return Begun(request, answers)

    def _end(self) -> None:
        os.close(self._alive)
        self._server.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)  # it may have lain in a folder of tests


@cache
def warm() -> Warm:
    """Return the process that forks the commands of this one."""
    return Warm(os.environ.get(FOR_ALL))


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that Python and its packages read as they start; commands get a path of their own."""
    own = ("PYTHONPATH", SAFE_PATH)  # a fork has no path of the folder in which it was begun
    return {name: value for name, value in environment.items() if name.startswith(AT_START) and name not in own}


def can_fork(request: Request) -> bool:
    """Return whether the command of a pool would be no other if it were started anew: of its threads, torch is told.

    Modules of tests have names of their own, so that a folder of theirs hides nothing.
    """
    theirs, ours = read_at_start(request.environment), read_at_start(os.environ)
    threads = theirs.pop(THREADS, ours.pop(THREADS, "1"))
    tests, root = Path(__file__).parents[1:3]
    others = [each for each in map(Path, python_path(request)) if each != root and not each.is_relative_to(tests)]
    is_ours = Path(request.script).parent == Path(sys.executable).parent
    return is_ours and theirs == ours and threads.isdigit() and not others


def confines(process: int) -> tuple[object, ...]:
    """Return what else tells a process from another: its user, limits and processors, and which files it sees."""
    place = Path("/proc") / str(process)
    limits = [line for line in (place / "limits").read_text().splitlines() if not line.startswith(NO_LIMITS)]
    names = {name.readlink() for name in (place / "ns").iterdir()}
    return place.stat().st_uid, limits, os.sched_getaffinity(process), names


def python_path(request: Request) -> list[str]:
    return list(filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep)))


def serve(listener: socket.socket, alive: int) -> Request:
    """Take requests until nobody can ask any more; return each in a process of its own."""
    if alive in connection.wait([listener, alive]):
        os._exit(0)
    for package in PACKAGES:  # once somebody asks
        importlib.import_module(package)
    sys.modules["setproctitle"].getproctitle()  # which finds its place by the environment that this process began with
    gc.collect()
    gc.freeze()  # what is shared stays so
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for a command are nobody's concern
    while alive not in connection.wait([listener, alive]):
        answers = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            os.close(alive)
            return attend(answers)
        answers.close()
    os._exit(0)


def attend(answers: socket.socket) -> Request:
    """Return what is asked for in the process that does it; this one waits for that, and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, files = socket.recv_fds(answers, LENGTH_BYTES, 3)[:2]
    text = b""
    while len(text) < int.from_bytes(header, "big"):
        text += answers.recv(1 << 20)
    request = Request(*json.loads(text))
    asker = struct.unpack("3i", answers.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    try:
        is_alike = not request.script or (can_fork(request) and confines(asker) == confines(os.getpid()))
    except (FileNotFoundError, ProcessLookupError):  # the script has been killed meanwhile
        os._exit(0)
    if not is_alike:
        answers.sendall(b"anew\n")
        os._exit(0)
    leads, write_end = os.pipe()
    child = os.fork()
    os.close(write_end if child else leads)
    if not child:
        answers.close()
        os.setsid()
        os.close(write_end)
        return become(request, files)
    for file in files:
        os.close(file)
    os.read(leads, 1)
    with contextlib.suppress(OSError):  # of a script that has been killed meanwhile, whose fork is ended below
        answers.sendall(f"{child}\n".encode())
    if request.script:
        pass_on_signals(answers, child)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(OSError):  # of one who does not wait any more
        answers.sendall(f"{status}\n".encode())
    os._exit(0)


def pass_on_signals(answers: socket.socket, leader: int) -> None:
    """Give a group the signals that reach the script that stands for it, until its leader ends; end it with them."""
    end = os.pidfd_open(leader)
    while end not in connection.wait([answers, end]):
        try:
            number = answers.recv(1)
        except ConnectionResetError:  # the script was killed before it had read what is its fork
            number = b""
        os.killpg(leader, number[0] if number else signal.SIGKILL)
        if not number:
            break
    with contextlib.suppress(ProcessLookupError):  # nobody but the leader, who has ended
        os.killpg(leader, signal.SIGKILL)


def become(request: Request, files: list[int]) -> Request:
    """Return `request` in its process, with its files, folder and environment."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request.folder)
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [folder for folder in sys.path if folder not in ours]
    os.environ.clear()
    os.environ.update(request.environment)
    if HELD in os.environ:
        os.open(os.environ[HELD], os.O_RDONLY)
    tempfile.tempdir = None  # which is chosen once
    return request


def fork_server() -> None:
    """Let `multiprocessing` have a copy of this process as the server of its forks, instead of one that is started."""
    from setproctitle import setproctitle

    server = forkserver._forkserver
    server._forkserver_address = connection.arbitrary_address("AF_UNIX")
    alive, server._forkserver_alive_fd = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(server._forkserver_address)
        listener.listen()
        server._forkserver_pid = os.fork()
        if not server._forkserver_pid:
            os.close(server._forkserver_alive_fd)
            setproctitle(f"{sys.executable} -c forkserver")
            os.register_at_fork(after_in_child=partial(be_known_as, WORKER, signal.SIGKILL))
            try:
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)


def run_script(request: Request) -> None:
    """Be an interchange or a pool."""
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, request.script, *request.arguments]))
    Path("/proc/self/comm").write_text(Path(request.script).name)
    folder = [] if SAFE_PATH in request.environment else [str(Path(request.script).parent)]
    sys.path[:1] = [*folder, *python_path(request)]
    sys.argv = [request.script, *request.arguments]
    if THREADS in request.environment:
        sys.modules["torch"].set_num_threads(int(request.environment[THREADS]))
    if "interchange" not in request.script:  # which starts no process
        fork_server()
    runpy.run_path(request.script, run_name="__main__")


def run_command(request: Request) -> None:
    """Do a command as `python -m volpipe` does."""
    from setproctitle import setproctitle

    setproctitle(" ".join([sys.executable, "-m", "volpipe", *request.arguments]))
    sys.path[:1] = request.environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["volpipe", *request.arguments]
    runpy.run_module("volpipe", run_name="__main__", alter_sys=True)


def end_without_cleaning(code: int) -> NoReturn:
    """End as Python does, but leave objects to the system: to delete those it was forked with takes 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    """Serve; in the process of a request, do that."""
    request = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    try:
        (run_script if request.script else run_command)(request)
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            raise
        end_without_cleaning(exit.code or 0)
    end_without_cleaning(0)


if __name__ == "__main__":
    main()
