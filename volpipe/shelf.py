"""A shelf: a folder on a node's own disk where the workers of a run keep files that are slow to fetch.

Not here: what is kept there (staging). Whoever uses a shelf holds a lock on it, which the system takes from a process
that is killed, so that the next one sees what nobody uses any more and deletes it. Every file on it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOCK_FILE = "lock"
PREFIX = "volpipe"
FREE_SHARE = 0.05  # of a node's disk, which others need as well, is left free
PARTIAL = ".partial"


@dataclass(frozen=True)
class Shelf:
    """A folder of this user and this run, which this process holds from `open_shelf` until it ends or closes it."""

    folder: Path
    lock: int

    def get(self, name: str, fetch: Callable[[], bytes | None]) -> bytes | None:
        """Return the file `name`, fetched and kept if it is not here yet; None where there is none to fetch.

        Of the workers of a node, one fetches it, and the others wait for that.

        Raises:
            OSError: it cannot be kept, for the disk is full or gone.
        """
        file = self.folder / name.replace("/", "_")
        with contextlib.suppress(FileNotFoundError):
            return file.read_bytes()
        partial = file.with_name(file.name + PARTIAL)
        with partial.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # somebody was quicker
                return file.read_bytes()
            data = fetch()
            if data is None:
                partial.unlink(missing_ok=True)
                return None
            self._make_room(len(data))
            stream.truncate(0)  # of what was killed while it wrote
            stream.write(data)
            stream.flush()
            partial.rename(file)
        return data

    def forget(self, name: str) -> None:
        """Delete the file `name`, if it is here."""
        (self.folder / name.replace("/", "_")).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the shelf, and delete it if nobody else holds it."""
        os.close(self.lock)
        sweep(self.folder.parent)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest files until there is room: work goes through a volume in order, and does not come back."""
        if self._has_room(num_bytes):
            return
        files = sorted(self._files(), key=_age)
        for file in files[: len(files) // 2 + 1]:
            file.unlink(missing_ok=True)
        if not self._has_room(num_bytes):
            raise OSError(errno.ENOSPC, f"less than {FREE_SHARE:.0%} of the disk is free", str(self.folder))

    def _has_room(self, num_bytes: int) -> bool:
        disk = shutil.disk_usage(self.folder)
        return disk.free - num_bytes >= FREE_SHARE * disk.total

    def _files(self) -> Iterator[Path]:
        return (file for file in self.folder.iterdir() if file.name != LOCK_FILE and file.suffix != PARTIAL)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def open_shelf(base: Path, run: str) -> Shelf:
    """Return the shelf of `run` below `base`; shelves that nobody holds, such as killed workers leave, are deleted.

    Raises:
        OSError: there can be none, or what has its name is somebody else's.
    """
    sweep(base)
    folder = base / f"{PREFIX}-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    base.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "is another user's", str(folder))
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # swept just now
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_at(lock, folder / LOCK_FILE):
            return Shelf(folder, lock)
        os.close(lock)


def sweep(base: Path) -> None:
    """Delete this user's shelves below `base` that nobody holds."""
    for folder in base.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # gone meanwhile, or none of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, folder / LOCK_FILE):
                # Under another name: who opens it meanwhile makes a new one.
                shutil.rmtree(folder.rename(f"{folder}-{uuid.uuid4().hex}"), ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _is_at(descriptor: int, file: Path) -> bool:
    """Return whether `descriptor` is still the file of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False
