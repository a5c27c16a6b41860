"""The processes that Parsl starts beside a driver, as commands of their own: an interchange, a block's workers.

Not here: when they are started (executor), or by which shell (launch).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.managers import DictProxy, SyncManager
from multiprocessing.process import parent_process
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volpipe.process import prepare_process

INTERCHANGE, WORKERS = "volpipe-interchange", "volpipe-workers"  # in pyproject.toml
WITH_NETS = "--with-nets"  # first argument of WORKERS that will run nets
SOCKETS = "VOLPIPE_SOCKETS"  # a variable: the folder for a pool's sockets, which the shell that started it deletes
# What workers are forks of imports PRELOAD first, which puts garbage collection off until all is there.
PRELOAD, PRELOADED = "volpipe.apps.htex.preload", "volpipe.runs.worker"
NETS = ("torch", "tensorstore", "volpipe.nets.load", "volpipe.inference.infer")
# Parsl imports them where they are installed, and takes both for optional (2026.10.26). No worker and no interchange
# uses them: 0.7 of the 1.4 s that an interchange takes to start.
PACKAGES = ("kubernetes", "sqlalchemy")
LESS_OFTEN = 50_000  # objects after which garbage is looked for: what imports make stays
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOST = 1  # exit code of a pool whose workers could get no task any more
WORKER = "volpipe-worker"  # name of their processes; the system takes 15 letters


if TYPE_CHECKING:
    Tasks = DictProxy[int, Any]
else:
    Tasks = DictProxy  # generic from Python 3.13 on


class TasksInHand(Tasks):
    """The task that each worker of a pool has in hand, by which the pool knows what one that has died took with it."""

    def pop(self, *worker: Any) -> Any:  # Any: as of a dictionary
        """Take the task of a worker out and return it; the pool ends where one has died that has none.

        It waited, with the lock of the queue from which all take their tasks, and nobody gets that any more; or it died
        just when it had taken one, of which nobody knows then (Parsl 2026.10.26). The driver sends the tasks of a pool
        that ends to others.
        """
        try:
            return super().pop(*worker)
        except KeyError:
            if parent_process() is None:
                sys.stderr.write(f"worker {worker[0]} died while it waited for a task, so that its pool ends\n")
                sys.stderr.flush()
                os._exit(LOST)
            raise


class PoolManager(SyncManager):
    """A manager of what a pool and its workers share."""


PoolManager.register("dict", dict, TasksInHand)


class Forked(ForkServerContext):
    """What Parsl takes for the context that spawns: its processes are forks of one that has imported what they need."""

    def Manager(self) -> SyncManager:
        """Return a manager as that of the spawned, which is no worker."""
        manager = PoolManager(ctx=self)
        manager.start(be_known_as, ["volpipe-manager"])
        return manager


def import_without(packages: Sequence[str], module: str) -> None:
    """Import `module`, to which those of `packages` that nobody has imported yet seem not to be installed."""
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None says that there is none
    try:
        importlib.import_module(module)
    finally:
        for package in hidden:
            del sys.modules[package]


def are_installed() -> bool:
    """Return whether the commands are there; beside a checkout that is not installed, only Parsl's own are."""
    folders = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    return all(shutil.which(command, path=os.pathsep.join(folders)) for command in (INTERCHANGE, WORKERS))


def interchange() -> None:
    """Be the interchange of an executor."""
    prepare_process()
    gc.set_threshold(LESS_OFTEN)
    import_without(PACKAGES, "parsl")
    runpy.run_module("parsl.executors.high_throughput.interchange", run_name="__main__", alter_sys=True)


def workers() -> None:
    """Be a block's pool of workers, as Parsl's own is but for how they start.

    Sixty-four workers of a node that each import torch take a minute and a half of its processors, and read the same
    thousands of files of a shared file system; here one process does it for all of them, while this one connects.
    """
    prepare_process()
    gc.set_threshold(LESS_OFTEN)
    has_nets = sys.argv[1:2] == [WITH_NETS]
    if has_nets:
        del sys.argv[1]
    leave_no_files()
    if sys.platform == "linux":  # elsewhere, system libraries do not bear to be forked
        context = Forked()
        context.set_forkserver_preload([PRELOAD, *(NETS if has_nets else ()), PRELOADED])
        forkserver.ensure_running()
        import_without(PACKAGES, "parsl.multiprocessing")
        sys.modules["parsl.multiprocessing"].__dict__["SpawnContext"] = context
    probe_apart()
    sys.argv[1:] = map(with_port, sys.argv[1:])
    runpy.run_module("parsl.executors.high_throughput.process_worker_pool", run_name="__main__", alter_sys=True)


def leave_no_files() -> None:
    """Put this pool's sockets where its shell deletes them, and let Python delete its semaphores without a warning.

    A pool is ended by a signal. Of one that ends so, Python (3.11) leaves the sockets, and warns of the semaphores.
    """
    tempfile.tempdir = os.environ.get(SOCKETS) or None
    get_temp_dir()
    tempfile.tempdir = None
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")


def probe_apart() -> None:
    """Let a pool look for its interchange by another name than the one that it then connects by (Parsl 2026.10.26).

    An interchange that does not know yet that the first connection is gone ignores a second one of the same name, and
    the pool waits for its answer without end: seen once, on a machine with much to do (2026-11-25).
    """
    probe = importlib.import_module("parsl.executors.high_throughput.probe")
    find = probe.probe_addresses

    def find_apart(*arguments: object, identity: bytes, **options: object) -> object:
        return find(*arguments, identity=identity + b"-probe", **options)

    probe.__dict__["probe_addresses"] = find_apart


def port_file(folder: Path) -> Path:
    """Return the file in an executor's `folder` that has the port of its workers once the interchange listens there."""
    return folder / f"port.{os.getpid()}"  # of the driver, without which nobody will write it


def with_port(argument: str) -> str:
    """Return `argument` of a pool; one that names the file of the port has that instead, which is waited for.

    Raises:
        ProcessLookupError: the driver is gone.
    """
    name, _, value = argument.partition("=")
    if name != "--port" or value.isdigit():
        return argument
    place = Path(value)
    while not place.is_file():
        os.kill(int(place.suffix[1:]), 0)
        time.sleep(0.01)
    return f"{name}={place.read_text()}"


def be_known_as(name: str, signal_with_parent: int = 0) -> None:
    """Give this process a name by which `ps` and `top` know it.

    Args:
        signal_with_parent: that it gets when its parent dies, which for a fork of a fork is not who waits for it.
    """
    Path("/proc/self/comm").write_text(name)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_with_parent)
