"""Locks of folders, for one process at a time: a lock file in the folder names its holder.

The system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import LockLost, VolpipeError

LOCK_FILE = "lock"
ATTEMPTS, PAUSE_SECONDS = 5, 0.02  # who only looks whether a lock is held holds it for some microseconds


@dataclass(frozen=True)
class Holder:
    """Who holds a folder or held it last, as its lock file says; `is_held` is None where locks do not work."""

    name: str
    is_held: bool | None


def find_holder(folder: Path) -> Holder | None:
    """Return the holder of `folder`, or its last one; None where there was none."""
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return Holder(_holder_name(lock), _is_held(lock))
    finally:
        os.close(lock)


def _is_held(lock: int) -> bool | None:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    return False


def _holder_name(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip()


@contextmanager
def held(folder: Path, holder: str, refusal: type[VolpipeError]) -> Iterator[None]:
    """Hold `folder`, which exists, in the name of `holder`.

    Raises:
        refusal: somebody else holds it, and is named; or there can be no lock.
    """
    try:
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise refusal(f"{folder} cannot be written: {error.strerror}; choose another place") from error
    try:
        try:
            _take_lock(lock)
        except BlockingIOError as error:
            raise refusal(f"{folder} is in use by {_holder_name(lock)}; wait for it or stop it") from error
        if not (folder / LOCK_FILE).exists():
            raise refusal(f"{folder} was deleted by {_holder_name(lock)}, which ended just now; give the command again")
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{holder}\n".encode(), 0)
        except OSError as error:  # no room
            (folder / LOCK_FILE).unlink(missing_ok=True)
            raise refusal(
                f"{folder} cannot be written: {error.strerror}; make room, or choose another place"
            ) from error
        yield
    finally:
        os.close(lock)


def _take_lock(lock: int) -> None:
    for _ in range(ATTEMPTS - 1):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(PAUSE_SECONDS)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_holder(folder: Path, session: str) -> None:
    """Refuse to write to `folder` for a driver whose place another has taken: workers outlive a killed driver a while.

    Raises:
        LockLost: the folder's lock names another session than `session`.
    """
    holder = (folder / LOCK_FILE).read_text(encoding="utf-8").strip()
    if holder != session:
        raise LockLost(f"{folder} is no longer held by {session}, but by {holder or 'another driver'}")
