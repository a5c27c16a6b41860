"""Checkpoints: the full state of a training in one file each, whole or absent.

Not here: their content (loop): tensors, numbers and text, which load with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from volpipe.errors import RunError
from volpipe.volumes.storage.paths import atomic_write, whole_file

SUFFIX = ".pt"


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any], keep: int) -> Path:  # Any: tensors and numbers
    """Write `state` after `step` steps into `folder`, delete all but the newest `keep`, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_at(folder, step)
    with whole_file(path) as partial:
        torch.save(dict(state), partial)
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:  # Any: tensors and numbers
    """Return the state in the checkpoint at `path`.

    Raises:
        RunError: the file is damaged, or holds other objects than tensors, numbers and text.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise RunError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); "
            "delete it to continue from the one before"
        ) from error
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first; each is named by the number of steps before it."""
    return sorted(folder.glob(f"[0-9]*{SUFFIX}"))


def checkpoint_at(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps in `folder`; it need not exist."""
    return folder / f"{step:09}{SUFFIX}"


def save_weights(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to `path` as safetensors, whole or not at all."""
    atomic_write(path, save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
