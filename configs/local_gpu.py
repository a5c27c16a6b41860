"""This machine's GPUs, as `local` takes them; without one it is refused."""

from __future__ import annotations

import os
import shutil

from parsl.config import Config

from volpipe.apps import is_torch_for_gpus
from volpipe.configs.local import listed_gpus, usable_gpus, with_gpus


def config(run_dir: str) -> Config:
    if shutil.which("nvidia-smi") is None:
        raise RuntimeError("no nvidia-smi on the PATH, so no GPU; use --config local")
    usable = usable_gpus()
    if not usable:
        raise RuntimeError(
            f"nvidia-smi lists {len(listed_gpus())} GPUs and CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}, so none is to be used; use --config local"
        )
    if not is_torch_for_gpus():
        raise RuntimeError(
            "the torch that is installed was built without CUDA, so that nets would run on the CPU; install one for "
            "your GPUs (docs/install.md), or use --config local"
        )
    return with_gpus(run_dir, usable)
