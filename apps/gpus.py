"""The GPUs of this machine, as NVIDIA's driver and the installed torch tell of them without loading CUDA.

Not here: which of them workers get (configs), or the GPU of a process (blockwise.gpu).
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import version

SMI_SECONDS = 20  # a driver that hangs is no GPU


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
