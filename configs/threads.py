"""This process: two threads, for debugging and notebooks. VOLPIPE_WORKERS sets another number."""

from __future__ import annotations

from parsl.config import Config
from parsl.executors import ThreadPoolExecutor

from volpipe.apps import read_workers


def config(run_dir: str) -> Config:
    workers = read_workers(2)
    return Config(
        executors=[ThreadPoolExecutor(label="threads", max_threads=workers)],
        run_dir=run_dir,
        strategy="none",
        initialize_logging=False,
        usage_tracking=0,
    )
