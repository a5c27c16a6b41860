"""This machine: a worker process per core; with GPUs, one for each to run nets, and the cores for the rest."""

from __future__ import annotations

import os
from collections.abc import Sequence

from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from volpipe.apps import ResilientExecutor, ask_nvidia, is_torch_for_gpus, read_workers

MOST_UNPACKING = 8  # threads that unpack for a worker without a GPU: one alone takes 11 s for a shard of 256 M voxels


def executor(
    label: str, workers: int, threads: int, accelerators: Sequence[str] = (), *, unpacking: int = 0
) -> ResilientExecutor:
    """Return workers with `threads` each, and others for unpacking and packing where that is given."""
    return ResilientExecutor(
        label=label,  # "cpu" and "gpu" get the stages of that kind; any other, all
        address="127.0.0.1",  # without one, Parsl asks an outside service and listens on every interface
        max_workers_per_node=workers,
        available_accelerators=accelerators,  # each worker sees one
        prefetch_capacity=workers,  # else a worker waits 16 ms for its next task
        # A dead worker pool is replaced, not taken for a broken site.
        block_error_handler=False,
        heartbeat_period=2,
        heartbeat_threshold=10,
        shares_files=True,  # so that they need not wait for it
        node_directory=os.environ.get("VOLPIPE_NODE_DIRECTORY"),  # keeps chunks of an input that is slow to fetch
        provider=LocalProvider(
            init_blocks=1,
            min_blocks=1,
            max_blocks=1,
            launcher=SimpleLauncher(),
            # Threads of all workers together make the cores; more make each other wait.
            worker_init=f"export OMP_NUM_THREADS={threads} VOLPIPE_THREADS={unpacking or threads}",
        ),
    )


def with_executors(run_dir: str, executors: list[ResilientExecutor]) -> Config:
    return Config(executors=executors, run_dir=run_dir, strategy_period=1, initialize_logging=False, usage_tracking=0)


def listed_gpus() -> list[str]:
    """Return the GPUs of this machine as its driver lists them; none without a driver."""
    return [line.strip() for line in ask_nvidia("index")]


def usable_gpus() -> list[str]:
    """Return those that this process may use, as CUDA_VISIBLE_DEVICES or the driver names them."""
    listed, chosen = listed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not listed:
        return listed
    named = [name.strip() for name in chosen.split(",") if name.strip()]
    return [] if named == ["-1"] else named


def with_gpus(run_dir: str, gpus: Sequence[str]) -> Config:
    """Return a site with a worker for each of `gpus`, and others without one for the stages that need none."""
    cores = len(os.sched_getaffinity(0))
    # Workers of GPUs read, unpack and write, for which they get half of the cores, and all while others have no work.
    others = read_workers(max(1, cores // 2))
    threads = max(1, (cores - others) // len(gpus))
    gpu = executor("gpu", len(gpus), threads, gpus, unpacking=max(1, cores // len(gpus)))
    # Beside a GPU few of them have work at a time, until the last of it: large shards of coarser levels.
    unpacking = max(1, min(MOST_UNPACKING, cores // 2))
    return with_executors(run_dir, [gpu, executor("cpu", others, 1, unpacking=unpacking)])


def config(run_dir: str) -> Config:
    gpus = usable_gpus() if is_torch_for_gpus() else []
    if gpus:
        return with_gpus(run_dir, gpus)
    cores = len(os.sched_getaffinity(0))
    workers = read_workers(cores)
    return with_executors(run_dir, [executor("local", workers, max(1, cores // workers))])
