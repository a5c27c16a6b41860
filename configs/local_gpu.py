"""This machine's GPUs: one worker process for each, and workers without one for the stages that need none."""

from __future__ import annotations

import os
import shutil
import subprocess

from parsl.config import Config

from volpipe.configs.local import executor, with_executors


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES or the driver names them."""
    if shutil.which("nvidia-smi") is None:
        raise RuntimeError("no nvidia-smi on the PATH, so no GPU; use --config local")
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True)
    gpus = asked.stdout.split() if asked.returncode == 0 else []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = gpus if chosen is None else [name.strip() for name in chosen.split(",") if name.strip()]
    if not gpus or not usable:
        raise RuntimeError(
            f"nvidia-smi lists {len(gpus)} GPUs and CUDA_VISIBLE_DEVICES is {chosen!r}, so none is to be used; "
            "use --config local"
        )
    return usable


def config(run_dir: str) -> Config:
    devices, cores = gpus(), len(os.sched_getaffinity(0))
    # Workers of GPUs read, unpack and write, for which they get half of the cores.
    others = max(1, cores // 2)
    gpu = executor("gpu", len(devices), max(1, (cores - others) // len(devices)), devices)
    return with_executors(run_dir, [gpu, executor("cpu", others, 1)])
