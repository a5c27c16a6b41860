"""This process: two threads, for debugging and notebooks. VOLPIPE_WORKERS sets another number."""

from __future__ import annotations

import os

from parsl.config import Config
from parsl.executors import ThreadPoolExecutor


def config(run_dir: str) -> Config:
    workers = int(os.environ.get("VOLPIPE_WORKERS", 2))
    return Config(
        executors=[ThreadPoolExecutor(label="threads", max_threads=workers)],
        run_dir=run_dir,
        strategy="none",
        initialize_logging=False,
        usage_tracking=0,
    )
