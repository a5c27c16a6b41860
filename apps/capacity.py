"""What the executors of a site give their workers, as far as it is known before they start: number, memory, GPUs.

Not here: how a pool of them is started (pool), or what plans make of it (volpipe.estimation.window_choice).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor
from parsl.providers import LocalProvider

from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.sites.find import try_site
from volpipe.sites.gpus import remembered_gpu
from volpipe.volumes.storage.memory import memory_bytes, shared_bytes

# By what schedulers are told which GPU is wanted, of Slurm and of Kubernetes.
ASKED = (
    "partition", "qos", "constraint", "gpus_per_node", "scheduler_options",
    "kubeconfig", "context", "namespace", "gpu_resource", "node_selector", "affinity",
)  # fmt: skip
LOCAL_SHARE = 0.5  # of this machine's memory, by which windows are chosen: it has other work too
SMI_SECONDS = 20  # a driver that hangs is no GPU
UNKNOWN_SLOTS = 8  # workers assumed of an executor that does not say


def capacity_at(name: str, folder: Path) -> Capacity:
    """Return what the site `name`, with its files in `folder`, gives workers; nothing of it is started.

    Raises:
        SiteError: no such site, or one that cannot be used here.
    """
    return capacity_of(getattr(try_site(name, folder), "executors", ()))  # a ready one may be of any type


def capacity_of(executors: Sequence[ParslExecutor]) -> Capacity:
    """Return the capacity of `executors`: a share of this machine's memory, or what a cluster is asked for."""
    for_nets = executors_for_nets(executors)
    here = sum(map(count_workers, filter(is_local, executors)))

    def worker_bytes(executor: ParslExecutor) -> int | None:
        return int(LOCAL_SHARE * memory_bytes() / here) if is_local(executor) else memory_of_worker(executor)

    known = [worker_bytes(executor) for executor in for_nets]
    num_workers = sum(map(count_workers, for_nets))
    least = None if None in known else min(filter(None, known), default=None)
    on_gpu, is_here = bool(for_nets) and all(map(has_gpu, for_nets)), all(map(is_local, for_nets))
    gpu = _gpu_of(for_nets) if is_here else _gpu_away(for_nets)
    in_process = bool(for_nets) and all(isinstance(executor, ThreadPoolExecutor) for executor in for_nets)
    return Capacity(least, num_workers, on_gpu, gpu, is_here, in_process)


def executors_for_nets(executors: Sequence[ParslExecutor]) -> list[ParslExecutor]:
    """Return those of `executors` that run nets."""
    labels = labels_for(executors, "gpu")
    return [executor for executor in executors if executor.label in labels]


def is_local(executor: ParslExecutor) -> bool:
    """Return whether its workers are processes or threads of this machine."""
    return isinstance(executor, ThreadPoolExecutor) or (
        isinstance(executor, HighThroughputExecutor) and isinstance(executor.provider, LocalProvider)
    )


def labels_for(executors: Sequence[ParslExecutor], label: str) -> list[str]:
    """Return the executors named `label` or `label_...`; where there are none, all of them."""
    named = [e.label for e in executors if e.label == label or e.label.startswith(f"{label}_")]
    return named or [e.label for e in executors]


def threads_of_worker(executors: Sequence[ParslExecutor]) -> int | None:
    """Return the fewest threads that the site sets for workers, None where it does not say, or they have GPUs."""
    local = [e for e in executors if isinstance(e, HighThroughputExecutor) and not e.available_accelerators]
    matches = [re.search(r"OMP_NUM_THREADS=(\d+)", getattr(e.provider, "worker_init", "")) for e in local]
    return min((int(match[1]) for match in matches if match), default=None)


def has_gpu(executor: ParslExecutor) -> bool:
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


def ask_nvidia(facts: str, *options: str) -> list[str]:
    """Return a line for each GPU with its `facts`, as nvidia-smi names them; none where no driver answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", *options, f"--query-gpu={facts}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def is_torch_for_gpus() -> bool:
    """Return whether the torch that is installed was built for GPUs."""
    return not version("torch").endswith("+cpu")


def memory_of_worker(executor: ParslExecutor) -> int | None:
    """Return the memory for each worker; those on this machine, and threads of this process, share what is free."""
    here = min(int(psutil.virtual_memory().available), shared_bytes())
    if isinstance(executor, ThreadPoolExecutor):
        return here // count_workers(executor)
    if not isinstance(executor, HighThroughputExecutor) or executor.provider is None:
        return None
    if isinstance(executor.provider, LocalProvider):
        return here // count_workers(executor)
    of_node = getattr(executor.provider, "mem_per_node", None)  # GB
    return int(of_node * 1e9 / executor.max_workers_per_node) if of_node else None


def count_workers(executor: ParslExecutor) -> int:
    if isinstance(executor, ThreadPoolExecutor):
        return int(executor.max_threads or UNKNOWN_SLOTS)
    if isinstance(executor, HighThroughputExecutor) and executor.provider is not None:
        per_node = executor.max_workers_per_node
        if per_node == float("inf"):
            return UNKNOWN_SLOTS
        return int(per_node) * int(executor.provider.max_blocks) * int(executor.provider.nodes_per_block)
    return UNKNOWN_SLOTS
