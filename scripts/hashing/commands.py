"""Commands of volpipe: what one writes, and how it is given in a folder.

Not here: which ones there are (steps).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hashing.recipes import AFFINITIES, FLOW, SUPERRES

ROOT = Path(__file__).resolve().parents[2]
MARK = "HASHES_FOLDER"  # in the environment of commands, and so of their workers: the folder that they are given in


@dataclass(frozen=True)
class Step:
    """A command, and the files and folders that it writes, which are hashed."""

    command: tuple[str, ...]
    outputs: tuple[str, ...]


def python() -> list[str]:
    return [sys.executable, "-m", "volpipe"]


def environment(folder: Path | None = None) -> dict[str, str]:
    """Return the environment of a command: this checkout's code, two workers, and nothing of the user's settings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("VOLPIPE_")}
    homes = {name: str(folder / ".home") for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME") if folder is not None}
    return own | homes | {MARK: str(folder)} | {"PYTHONPATH": str(ROOT), "VOLPIPE_WORKERS": "2", "COLUMNS": "110"}


def give(folder: Path, step: Step) -> None:
    """Give the command of `step` in `folder`, and end where it fails."""
    ended = subprocess.run(
        [*python(), *step.command], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    if ended.returncode != 0:
        sys.exit(f"volpipe {' '.join(step.command)} in {folder} ended with {ended.returncode}:\n{ended.stderr}")


def prepare(folder: Path) -> None:
    """Write the recipes and the mask that steps need."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("superres", SUPERRES), ("affinities", AFFINITIES), ("flow", FLOW)):
        (folder / f"{name}.toml").write_text(text)
    if not (folder / "mask.npy").exists():
        np.save(folder / "mask.npy", np.arange(24 * 16 * 16, dtype=np.uint8).reshape(24, 16, 16) // 64 % 2)
