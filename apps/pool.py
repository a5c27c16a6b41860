"""The pool of a site's workers: Parsl, started and stopped around a run, with an app for each kind of task.

Not here: sites (configs), or the apps.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# isort: off
import volpipe.apps.htex.lean_driver  # before Parsl
# isort: on

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
from volpipe.apps.gpus import ask_nvidia, is_torch_for_gpus
from volpipe.apps.htex.executor import ResilientExecutor, translate_error
from volpipe.apps.htex.watch import Watch, cancel_blocks
from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import Capacity, Gpu, Site, Start, WorkerPool, followed
from volpipe.sites.find import find_site, name_user, try_site
from volpipe.sites.gpus import remembered_gpu
from volpipe.volumes.node_cache import VARIABLE
from volpipe.volumes.storage.metadata import memory_bytes
from volpipe.volumes.storage.paths import delete

log = logging.getLogger(__name__)

LABELS = ("cpu", "gpu")
LOOPBACK = "127.0.0.1"
# By what schedulers are told which GPU is wanted, of Slurm and of Kubernetes.
ASKED = (
    "partition", "qos", "constraint", "gpus_per_node", "scheduler_options",
    "kubeconfig", "context", "namespace", "gpu_resource", "node_selector", "affinity",
)  # fmt: skip
LOCAL_SHARE = 0.5  # of this machine's memory, by which windows are chosen: it has other work too
UNKNOWN_SLOTS = 8  # workers assumed of an executor that does not say
CLEANUP_SECONDS = 60.0  # Parsl's takes 1 s here and 30 s for pods that ignore TERM; with a dead interchange it hangs


class ParslPool:
    """A running Parsl, as a `pool.WorkerPool`: executors for "cpu" and "gpu" apps, and the facts of their workers.

    Args:
        watch: over the executors; what it notices ends a run that nothing can come back to.
    """

    def __init__(self, watch: Watch) -> None:
        executors = watch.executors
        self.watch, self.labels = watch, {kind: _with_label(executors, kind) for kind in LABELS}
        self.shared = self.labels["cpu"] == self.labels["gpu"]
        self.slots: Mapping[str, int] = {
            kind: sum(_num_workers(e) for e in executors if e.label in chosen) for kind, chosen in self.labels.items()
        }
        self.prioritised = {e.label for e in executors if isinstance(e, HighThroughputExecutor)}
        self.worker_bytes = min(filter(None, map(_worker_bytes, executors)), default=None)
        named = [e.node_directory for e in executors if isinstance(e, ResilientExecutor)]
        self.node_directory = next(filter(None, named or [os.environ.get(VARIABLE)]), None)
        self.address = _address(executors)
        self.is_here = self.address == LOOPBACK
        for_nets = [e for e in executors if e.label in self.labels["gpu"]]
        self.worker_threads, self.on_gpu = _worker_threads(for_nets), all(map(_has_gpu, for_nets))
        self.capacity: Capacity | None = capacity_of(executors)
        self._apps = {kind: python_app(perform, executors=chosen) for kind, chosen in self.labels.items()}

    def num_connected(self) -> int:
        """Return how many workers are ready now; threads always are."""
        executors = self.watch.executors
        connected = [e.num_connected() for e in executors if isinstance(e, ResilientExecutor)]
        return sum(connected) + sum(_num_workers(e) for e in executors if isinstance(e, ThreadPoolExecutor))

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


def capacity_at(name: str, folder: Path) -> Capacity:
    """Return what the site `name`, with its files in `folder`, gives workers; nothing of it is started.

    Raises:
        SiteError: no such site, or one that cannot be used here.
    """
    return capacity_of(getattr(try_site(name, folder), "executors", ()))  # a ready one may be of any type


def capacity_of(executors: Sequence[ParslExecutor]) -> Capacity:
    """Return what `executors` give workers: of this machine's memory a share, of a cluster's what is asked for."""
    for_nets = executors_for_nets(executors)
    here = sum(map(_num_workers, filter(is_local, executors)))

    def worker_bytes(executor: ParslExecutor) -> int | None:
        return int(LOCAL_SHARE * memory_bytes() / here) if is_local(executor) else _worker_bytes(executor)

    known = [worker_bytes(executor) for executor in for_nets]
    num_workers = sum(map(_num_workers, for_nets))
    least = None if None in known else min(filter(None, known), default=None)
    on_gpu, is_here = bool(for_nets) and all(map(_has_gpu, for_nets)), all(map(is_local, for_nets))
    return Capacity(least, num_workers, on_gpu, _gpu_of(for_nets) if is_here else _gpu_away(for_nets), is_here)


def executors_for_nets(executors: Sequence[ParslExecutor]) -> list[ParslExecutor]:
    """Return those of `executors` that run nets."""
    labels = _with_label(executors, "gpu")
    return [executor for executor in executors if executor.label in labels]


def is_local(executor: ParslExecutor) -> bool:
    """Return whether its workers are processes or threads of this machine."""
    return isinstance(executor, ThreadPoolExecutor) or (
        isinstance(executor, HighThroughputExecutor) and isinstance(executor.provider, LocalProvider)
    )


@contextmanager
def start_pool(config: Config) -> Iterator[ParslPool]:
    """Start the executors of `config`, watched; on every way out stop them and cancel what they started."""
    watch = Watch(config.executors)
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
    kernel = parsl.load(config)
    try:
        yield kernel
    finally:
        with INTERRUPTS.closing():
            _clean_up(kernel)
            for executor in config.executors:
                cancel_blocks(executor)


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
    """Stop executors and cancel their blocks, in bounded time: Parsl asks an interchange, which may be gone."""
    cleaning = threading.Thread(target=kernel.cleanup, name="volpipe-clean-up", daemon=True)
    cleaning.start()
    cleaning.join(CLEANUP_SECONDS)
    if cleaning.is_alive():
        log.error("Parsl did not stop within %.0f s; look for jobs that it left", CLEANUP_SECONDS)
    parsl.clear()


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


def _with_label(executors: Sequence[ParslExecutor], label: str) -> list[str]:
    """Return the executors named `label` or `label_...`; where there are none, all of them."""
    named = [e.label for e in executors if e.label == label or e.label.startswith(f"{label}_")]
    return named or [e.label for e in executors]


def _worker_threads(executors: Sequence[ParslExecutor]) -> int | None:
    """Return the fewest threads that the site sets for workers, None where it does not say, or they have GPUs."""
    local = [e for e in executors if isinstance(e, HighThroughputExecutor) and not e.available_accelerators]
    matches = [re.search(r"OMP_NUM_THREADS=(\d+)", getattr(e.provider, "worker_init", "")) for e in local]
    return min((int(match[1]) for match in matches if match), default=None)


def _has_gpu(executor: ParslExecutor) -> bool:
    """Return whether nets of its workers are on a GPU: each has one by the site, or all are here and torch sees one."""
    return bool(getattr(executor, "available_accelerators", None)) or (is_local(executor) and _sees_gpu())


def _gpu_of(executors: Sequence[ParslExecutor]) -> Gpu | None:
    """Return the kind of GPU that each worker has to itself, on this machine; None for several kinds, or none."""
    given = [getattr(e, "available_accelerators", None) for e in executors]
    names = [name for each in given for name in each or ()]
    if not names or not all(given):
        return None
    try:
        (kind,) = set(ask_nvidia("mig.mode.current,memory.total,name", f"--id={','.join(names)}"))
        parts, mebibytes, name = kind.split(", ", 2)
        return None if parts == "Enabled" else Gpu(name, int(mebibytes) << 20)  # of a part, nothing is said
    except ValueError:  # no answer, several kinds, or a driver of other words
        return None


def _gpu_away(executors: Sequence[ParslExecutor]) -> Gpu | None:
    """Return the kind of GPU that was found where all of these workers ask for theirs; None where nobody looked."""
    found = {remembered_gpu(asked) if (asked := asked_of(executor)) else None for executor in executors}
    return found.pop() if len(found) == 1 else None


def asked_of(executor: ParslExecutor) -> str:
    """Return what a scheduler is asked for, for a worker of `executor` with a GPU; "" where it is to have none."""
    provider = getattr(executor, "provider", None)
    if provider is None or not getattr(executor, "available_accelerators", None):
        return ""
    places = (provider, getattr(provider, "shape", None))
    asked = {name: getattr(place, name) for place in places for name in ASKED if hasattr(place, name)}
    return json.dumps({"provider": type(provider).__name__, **asked}, sort_keys=True, default=str)


def _sees_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether torch will find a GPU here, as far as can be told without loading it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return not hidden and any(devices.glob("nvidia[0-9]*")) and is_torch_for_gpus()


def _address(executors: Sequence[ParslExecutor]) -> str:
    """Return where workers find the driver: loopback where all are on this machine, "" where nobody knows."""
    away = [e for e in executors if isinstance(e, HighThroughputExecutor) and not isinstance(e.provider, LocalProvider)]
    return str(away[0].address or "") if away else LOOPBACK


def _worker_bytes(executor: ParslExecutor) -> int | None:
    """Return the memory for each worker; those on this machine, and threads of this process, share what is free."""
    here = int(psutil.virtual_memory().available)
    if isinstance(executor, ThreadPoolExecutor):
        return here // _num_workers(executor)
    if not isinstance(executor, HighThroughputExecutor) or executor.provider is None:
        return None
    if isinstance(executor.provider, LocalProvider):
        return here // _num_workers(executor)
    of_node = getattr(executor.provider, "mem_per_node", None)  # GB
    return int(of_node * 1e9 / executor.max_workers_per_node) if of_node else None


def _num_workers(executor: ParslExecutor) -> int:
    if isinstance(executor, ThreadPoolExecutor):
        return int(executor.max_threads or UNKNOWN_SLOTS)
    if isinstance(executor, HighThroughputExecutor) and executor.provider is not None:
        per_node = executor.max_workers_per_node
        if per_node == float("inf"):
            return UNKNOWN_SLOTS
        return int(per_node) * int(executor.provider.max_blocks) * int(executor.provider.nodes_per_block)
    return UNKNOWN_SLOTS
