"""Small disks in memory, for tests and for scripts/chaos: only root can mount them, so that others skip."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import pytest

# A shell line that lets a block go on in mounts of its own, after others; `$0` is its script.
OWN_MOUNTS = """
if [ -z "$INSIDE" ]; then
  cp "$0" {copy}; export INSIDE=1
  exec unshare --mount --propagation private bash -c '{mount} && exec bash {copy}'
fi
"""


@lru_cache
def may_mount() -> bool:
    """Return whether this process has the rights to mount, which root in a container need not have."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def needs_mounts() -> None:
    """Skip where a process may have no mounts of its own."""
    if not may_mount():
        pytest.skip("only root, with its rights, may mount")


@contextmanager
def small_disk(place: Path, options: str = "size=50m") -> Iterator[Callable[[str], None]]:
    """Mount a disk at the folder `place`, with `options` such as nr_inodes=50; gives what mounts it with others."""
    needs_mounts()
    place.mkdir(exist_ok=True)

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)

    mount(options)
    try:
        yield lambda options: mount(f"remount,{options}")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
