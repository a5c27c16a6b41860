"""This machine's GPUs: one worker process for each, and workers without one for the stages that need none."""

from __future__ import annotations

import os
import shutil
import subprocess

from parsl.config import Config
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider

from volpipe.apps.executors import HoldingExecutor


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES or the driver names them."""
    if shutil.which("nvidia-smi") is None:
        raise RuntimeError("no nvidia-smi on the PATH, so no GPU; use --config local")
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    found = asked.stdout.split() if asked.returncode == 0 else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = found if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
    if not found or not usable:
        raise RuntimeError(
            f"nvidia-smi lists {len(found)} GPUs and CUDA_VISIBLE_DEVICES is {chosen!r}, so none is to be used; "
            "use --config local"
        )
    return usable


def executor(label: str, workers: int, threads: int, accelerators: list[str]) -> HoldingExecutor:
    return HoldingExecutor(
        label=label,  # "cpu" and "gpu" get the stages of that kind
        address="127.0.0.1",  # without one, Parsl asks an outside service and listens on every interface
        max_workers_per_node=workers,
        available_accelerators=accelerators,  # each worker sees one
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
            worker_init=f"export OMP_NUM_THREADS={threads} VOLPIPE_THREADS={threads}",
        ),
    )


def config(run_dir: str) -> Config:
    devices, cores = gpus(), len(os.sched_getaffinity(0))
    # Workers of GPUs read, unpack and write, for which they get half of the cores.
    others = max(1, cores // 2)
    return Config(
        executors=[
            executor("gpu", len(devices), max(1, (cores - others) // len(devices)), devices),
            executor("cpu", others, 1, []),
        ],
        run_dir=run_dir,
        strategy_period=1,
        initialize_logging=False,
        usage_tracking=0,
    )
