"""Folders that one process at a time works in: held by a lock file in them, which says who holds it.

The system lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from volpipe.errors import RunError, VolpipeError

LOCK_FILE = "lock"


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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(lock, 200, 0).decode(errors="replace").strip()
            raise refusal(f"{folder} is in use by {other}; wait for it or stop it") from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{holder}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def check_holder(folder: Path, session: str) -> None:
    """Refuse to write to `folder` for a driver whose place another has taken: workers outlive a killed driver a while.

    Raises:
        RunError: the folder's lock names another session than `session`.
    """
    holder = (folder / LOCK_FILE).read_text(encoding="utf-8").strip()
    if holder != session:
        raise RunError(f"{folder} is no longer held by {session}, but by {holder or 'another driver'}")
