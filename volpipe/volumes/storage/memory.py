"""The memory that this process may have: of its machine, its control groups and its own limit.

Not here: what a worker needs (estimation.memory), or what it took (blockwise.usage).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from volpipe.errors import VolumeError

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def check_memory(num_bytes: int, what: object) -> None:
    """Raise where `what` takes more memory than this machine has, or this process may have."""
    most = memory_bytes()
    if num_bytes > most:
        raise VolumeError(
            f"{what} takes {num_bytes / 2**30:,.1f} GiB and this process may have {most / 2**30:,.1f}; read smaller "
            "boxes, or if it is a chunk, copy the volume to smaller chunks on a machine with more memory"
        )


@cache
def memory_bytes() -> int:
    """Return the memory of this machine, or of the control group or the limit that this process runs under."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return shared_bytes() if soft == resource.RLIM_INFINITY else min(shared_bytes(), soft)


def shared_bytes() -> int:
    """Return the memory of this machine, or of the control group of this process: other processes may take of it."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yield the limits of the control groups of this process, and of all groups that hold them, in bytes."""
    with contextlib.suppress(FileNotFoundError):  # elsewhere than on Linux
        for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _limits_above(GROUPS, path, "memory.max")
            elif "memory" in controllers.split(","):  # version 1
                yield from _limits_above(GROUPS / "memory", path, "memory.limit_in_bytes")


def _limits_above(root: Path, path: str, name: str) -> Iterator[int]:
    """Yield the limits in the files `name` of the group `path` and of those above it, up to `root`.

    In a container the path may be the host's, of which only the root is seen.
    """
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                yield int((folder / name).read_text(encoding="ascii"))
