"""Small disks for tests, mounted in memory: only root can make them, so that others skip."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# A shell line that lets a block go on in mounts of its own, after others; `$0` is its script.
OWN_MOUNTS = """
if [ -z "$INSIDE" ]; then
  cp "$0" {copy}; export INSIDE=1
  exec unshare --mount --propagation private bash -c '{mount} && exec bash {copy}'
fi
"""


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """Mount a disk in memory at the folder `place`, with `options` such as size=1m or nr_inodes=50."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def needs_mounts() -> None:
    """Skip where a process may have no mounts of its own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("mounts need root, and its rights")
