"""This machine: one worker process per core. VOLPIPE_WORKERS sets another number."""

from __future__ import annotations

import os

from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from volpipe.apps.executors import HoldingExecutor


def config(run_dir: str) -> Config:
    cores = len(os.sched_getaffinity(0))
    workers = int(os.environ.get("VOLPIPE_WORKERS", cores))
    threads = max(1, cores // workers)
    executor = HoldingExecutor(
        label="local",
        address="127.0.0.1",  # without one, Parsl asks an outside service and listens on every interface
        max_workers_per_node=workers,
        prefetch_capacity=workers,  # else a worker waits 16 ms for its next task
        # A dead worker pool is replaced, not taken for a broken site.
        block_error_handler=False,
        heartbeat_period=2,
        heartbeat_threshold=10,
        provider=LocalProvider(
            init_blocks=1,
            min_blocks=1,
            max_blocks=1,
            launcher=SimpleLauncher(),
            # Threads of all workers together make the cores; more make each other wait.
            worker_init=f"export OMP_NUM_THREADS={threads} VOLPIPE_THREADS={threads}",
        ),
    )
    return Config(executors=[executor], run_dir=run_dir, strategy_period=1, initialize_logging=False, usage_tracking=0)
