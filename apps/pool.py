"""The pool of a site's workers: Parsl, started and stopped around a run, with an app for each kind of task.

Not here: sites (configs), or the apps.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import parsl
import psutil
from parsl import python_app
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor
from parsl.providers import LocalProvider

import volpipe
from volpipe.apps.app import APPS, perform
from volpipe.apps.capacity import (
    capacity_of,
    count_workers,
    executors_for_nets,
    has_gpu,
    is_local,
    labels_for,
    memory_of_worker,
    threads_of_worker,
)
from volpipe.apps.htex.executor import ResilientExecutor, translate_error
from volpipe.apps.htex.watch import ExecutorWatch, cancel_blocks
from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import Capacity, Site, Start, WorkerPool, followed
from volpipe.errors import SiteError
from volpipe.sites.find import find_site, name_user, try_site
from volpipe.volumes.node_cache import VARIABLE
from volpipe.volumes.storage.paths import delete

log = logging.getLogger(__name__)

LABELS = ("cpu", "gpu")
LOOPBACK = "127.0.0.1"
BLOCK_SECONDS = 5.0  # for which blocks of this machine are waited for; their shells take 2 s at most
THREADS_SECONDS = 1.0  # for which threads that compute are waited for, of who asked to stop
SPECIAL = re.compile(r"[^\w@%+=:,./-]")  # to a shell, or to the formats of Parsl's commands
CLEANUP_SECONDS = 60.0  # Parsl's takes 1 s here and 30 s for pods that ignore TERM; with a dead interchange it hangs


class ParslPool:
    """A running Parsl, as a `pool.WorkerPool`: executors for "cpu" and "gpu" apps, and the facts of their workers.

    Args:
        watch: over the executors; what it notices ends a run that nothing can come back to.
    """

    def __init__(self, watch: ExecutorWatch) -> None:
        executors = watch.executors
        self.watch, self.labels = watch, {kind: labels_for(executors, kind) for kind in LABELS}
        self.shared = self.labels["cpu"] == self.labels["gpu"]
        self.slots: Mapping[str, int] = {
            kind: sum(count_workers(e) for e in executors if e.label in chosen) for kind, chosen in self.labels.items()
        }
        self.prioritised = {e.label for e in executors if isinstance(e, HighThroughputExecutor)}
        self.worker_bytes = min(filter(None, map(memory_of_worker, executors)), default=None)
        named = [e.node_directory for e in executors if isinstance(e, ResilientExecutor)]
        self.node_directory = next(filter(None, named or [os.environ.get(VARIABLE)]), None)
        self.address = _address(executors)
        self.is_here = self.address == LOOPBACK
        for_nets = executors_for_nets(executors)
        self.worker_threads, self.on_gpu = threads_of_worker(for_nets), all(map(has_gpu, for_nets))
        self.capacity: Capacity | None = capacity_of(executors)
        self._apps = {kind: python_app(perform, executors=chosen) for kind, chosen in self.labels.items()}

    def num_connected(self) -> int:
        """Return how many workers are ready now; threads always are."""
        executors = self.watch.executors
        connected = [e.num_connected() for e in executors if isinstance(e, ResilientExecutor)]
        return sum(connected) + sum(count_workers(e) for e in executors if isinstance(e, ThreadPoolExecutor))

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:  # Any: the app's own
        """Return the future record of the app of that name; its errors are translated for the user.

        Raises:
            RunStopped, SiteError: what the watch has noticed.
        """
        self.watch.check()
        chosen, translate = APPS[app], partial(translate_error, executors=self.watch.executors)
        labels = self.labels[chosen.label]
        resources = {"priority": chosen.priority} if set(labels) <= self.prioritised else {}
        task = self._apps[chosen.label](chosen.function, *arguments, parsl_resource_specification=resources)
        future = followed(task, translate=translate)
        future.add_done_callback(lambda done: None if done.exception() else self.watch.proven.update(labels))
        return future


def on_site(name: str, folder: Path | None = None) -> Start:
    """Return the function that starts the site `name`, for a run.

    Args:
        folder: that the run will keep the site's files in; with it, a site that cannot be used is refused now.

    Raises:
        SiteError: no such site; with `folder`, or when it is started: one that cannot be used here.
    """
    if folder is not None:
        try_site(name, folder)
    configure = find_site(name)

    def start(folder: Path) -> AbstractContextManager[ParslPool]:
        log.info("starts the site %s", name)
        return start_pool(configure(folder))

    return start


@contextmanager
def starting(name: str, folder: Path, *, fresh: bool = False) -> Iterator[Site]:
    """Begin to start the workers of the site `name` before a run on it is planned, where they are on this machine.

    If nobody takes them they are stopped in the end, and leave nothing. Jobs of a cluster are asked for once a plan is
    accepted; and where the run's folder is there already, the run may be complete.

    Args:
        folder: for the site's files, in that of the run.
        fresh: the run will clear its folder: nothing may work in it by then.

    Raises:
        SiteError: no such site, or one that cannot be used here.
    """
    start, config = on_site(name), try_site(name, folder)
    executors = getattr(config, "executors", ())
    site = Site(name, start, capacity_of(executors))
    is_near = bool(executors) and all(isinstance(e, ResilientExecutor) and is_local(e) for e in executors)
    if fresh or not is_near or folder.parent.exists() or not _made(folder):
        yield site
        return
    with ExitStack() as stack:
        stack.callback(_remove_unused, folder)
        begun = [stack.enter_context(start_pool(config))]

        def take(folder: Path) -> AbstractContextManager[WorkerPool]:
            """Return the pool that was begun, which then ends with its work; another one after that."""
            if not begun:
                return start(folder)
            log.info("takes the workers of the site %s, which are starting", name)
            return _closing(stack.pop_all(), begun.pop())

        yield dataclasses.replace(site, start=take)


def _made(folder: Path) -> bool:
    """Return whether `folder` could be made, and that of the run around it; the run says why not."""
    try:
        folder.parent.mkdir(mode=0o750)
        folder.mkdir(mode=0o750)
    except OSError:
        return False
    return True


@contextmanager
def _closing(stack: ExitStack, pool: ParslPool) -> Iterator[ParslPool]:
    with stack:
        yield pool


def _remove_unused(folder: Path) -> None:
    """Delete `folder` of a site's files, and that of the run around it, in which nothing else has come."""
    if [*folder.parent.iterdir()] == [folder]:
        delete(folder.parent)


@contextmanager
def start_pool(config: Config) -> Iterator[ParslPool]:
    """Start the executors of `config`, watched; on every way out stop them and cancel what they started."""
    watch = ExecutorWatch(config.executors)
    for executor in config.executors:
        if isinstance(executor, ResilientExecutor):
            executor.siblings = [other for other in config.executors if other is not executor]
    with load_parsl(config) as kernel:
        begin_blocks(kernel)
        watch.start()
        try:
            yield ParslPool(watch)
        finally:
            with INTERRUPTS.closing():
                watch.stop()


@contextmanager
def load_parsl(config: Config) -> Iterator[DataFlowKernel]:
    """Start the executors of `config`; on every way out stop them and cancel their blocks."""
    _find_commands()
    name_user()
    logging.getLogger("parsl").setLevel(logging.ERROR)
    with _plain_folder(config):
        kernel = parsl.load(config)
        try:
            yield kernel
        finally:
            with INTERRUPTS.closing():
                groups = _groups_here(config.executors)
                _clean_up(kernel)
                for executor in config.executors:
                    cancel_blocks(executor)
                _await_ends(groups)


@contextmanager
def _plain_folder(config: Config) -> Iterator[None]:
    """Let Parsl reach its folder by a link without spaces: it quotes no path in a shell's command (2026.10.26).

    Raises:
        SiteError: there are such characters, and other machines, which see no link of this one.
    """
    folder, executors = Path(config.run_dir).absolute(), config.executors
    special = SPECIAL.search(str(folder))
    if special is None or not any(isinstance(each, HighThroughputExecutor) for each in executors):
        yield
        return
    if not all(map(is_local, executors)):
        raise SiteError(
            f"{folder}: Parsl starts no jobs from a folder with {special[0]!r} in its path; choose another --out, in "
            "folders named by letters, digits and . _ - alone"
        )
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vp.") as place:
        link = Path(place, "parsl")
        link.symlink_to(folder)
        config.run_dir = str(link)
        yield


def begin_blocks(kernel: DataFlowKernel) -> None:
    """Start the first blocks now: a poll may be seconds away, and asks the interchange before.

    From then on one thread at a time polls: two would start blocks twice.
    """
    poller, lock = kernel.job_status_poller, threading.Lock()
    poll = poller.poll

    def alone() -> None:
        with lock:
            poll()

    with lock:
        poller.callback = alone
        poller._strategy.strategize(poller._executors)


def _clean_up(kernel: DataFlowKernel) -> None:
    """Stop executors and cancel their blocks, in bounded time: Parsl asks an interchange, which may be gone.

    Who asked to stop does not wait for threads that compute: they end with the process.
    """
    cleaning = threading.Thread(target=kernel.cleanup, name="volpipe-clean-up", daemon=True)
    cleaning.start()
    in_threads = all(isinstance(executor, ThreadPoolExecutor) for executor in kernel.config.executors)
    if in_threads and INTERRUPTS.is_asked:
        cleaning.join(THREADS_SECONDS)
        parsl.clear()
        return
    cleaning.join(CLEANUP_SECONDS)
    if cleaning.is_alive():
        log.error("Parsl did not stop within %.0f s; look for jobs that it left", CLEANUP_SECONDS)
    parsl.clear()


def _groups_here(executors: Sequence[ParslExecutor]) -> list[int]:
    """Return the groups of the processes that start the blocks on this machine, and tidy up after them."""
    groups = []
    for executor in executors:
        if isinstance(provider := getattr(executor, "provider", None), LocalProvider):
            for resource in provider.resources.values():
                with suppress(ProcessLookupError):  # it has ended
                    groups.append(os.getpgid(resource["remote_pid"]))
    return groups


def _await_ends(groups: Iterable[int]) -> None:
    """Wait until no process of `groups` is left, for no longer than BLOCK_SECONDS."""
    until = time.monotonic() + BLOCK_SECONDS
    while any(map(_is_alive, groups)):
        if time.monotonic() > until:
            log.error("processes of a block did not end within %.0f s", BLOCK_SECONDS)
            return
        time.sleep(0.02)


def _is_alive(group: int) -> bool:
    """Return whether a process of `group` runs; one that nobody reaps does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _find_commands() -> None:
    """Let Parsl find its own commands, and workers find a checkout that is not installed."""
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])
    root = str(Path(volpipe.__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (Path(root) / "pyproject.toml").is_file() and root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


def _address(executors: Sequence[ParslExecutor]) -> str:
    """Return where workers find the driver: loopback where all are on this machine, "" where nobody knows."""
    away = [e for e in executors if isinstance(e, HighThroughputExecutor) and not isinstance(e.provider, LocalProvider)]
    return str(away[0].address or "") if away else LOOPBACK
