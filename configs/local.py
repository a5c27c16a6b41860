"""This machine: one worker process per core. VOLPIPE_WORKERS sets another number."""

from __future__ import annotations

import os
from collections.abc import Sequence

from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from volpipe.apps import ResilientExecutor


def executor(label: str, workers: int, threads: int, accelerators: Sequence[str] = ()) -> ResilientExecutor:
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
        node_directory=os.environ.get("VOLPIPE_NODE_DIRECTORY"),  # keeps chunks of an input that is slow to fetch
        provider=LocalProvider(
            init_blocks=1,
            min_blocks=1,
            max_blocks=1,
            launcher=SimpleLauncher(),
            # Threads of all workers together make the cores; more make each other wait.
            worker_init=f"export OMP_NUM_THREADS={threads} VOLPIPE_THREADS={threads}",
        ),
    )


def with_executors(run_dir: str, executors: list[ResilientExecutor]) -> Config:
    return Config(executors=executors, run_dir=run_dir, strategy_period=1, initialize_logging=False, usage_tracking=0)


def config(run_dir: str) -> Config:
    cores = len(os.sched_getaffinity(0))
    workers = int(os.environ.get("VOLPIPE_WORKERS", cores))
    return with_executors(run_dir, [executor("local", workers, max(1, cores // workers))])
