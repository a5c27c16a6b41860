"""Small files on a disk, in a zip on it or in a remote place: read, written whole, found, listed, deleted.

Not here: access to remote places (object_store) and to zips (zipped), or the content of the files (metadata).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from pathlib import Path

from volpipe.errors import FullDiskError, VolumeError
from volpipe.resolve import path_of
from volpipe.volumes.storage import object_store, zipped
from volpipe.volumes.storage.object_store import MOST_ENCODED_BYTES, Fetched, Remote, Stamp
from volpipe.volumes.storage.requests import each

log = logging.getLogger(__name__)

Location = Path | Remote

DELETE_ATTEMPTS, DELETE_PAUSE_SECONDS = 20, 0.1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # of a name on whose way something is not there
MOST_NAME = 48  # letters of a name that an unfinished file has in its own: four bytes each, and 34 more, are within 255
PARTIAL = r"\..+\.[0-9a-f]{32}"  # names that `whole_file` gives

State = tuple[int, int, int, int]  # of a file, for equality alone
ABSENT: State = (-1, -1, -1, -1)
UNTOLD: State = (-2, -2, -2, -2)  # its store gives neither a time nor a tag
SMALL_BYTES = 1 << 16  # of a file that is fetched where it is first asked for, and read afterwards
_read: ContextVar[dict[Remote, tuple[int, bytes | None]] | None] = ContextVar("read", default=None)

_num_changes = itertools.count(1)
_last_change = 0  # to files in remote places, by this process


def locate(location: str | os.PathLike[str] | Remote) -> Location:
    """Return the place that `location` names: an absolute path, links unresolved, or a remote place.

    Links stay because their targets may differ between machines.
    """
    if isinstance(location, Remote):
        return location
    text = os.fspath(location).removeprefix("file://")
    return object_store.parse(text) if "://" in text else Path(os.path.abspath(text))  # noqa: PTH100


def shown(place: object) -> str:
    """Return `place`, which begins with a path, as a notebook shows it: without the current folder, if it is there."""
    try:
        here = os.getcwd() + os.sep  # noqa: PTH109  # links unresolved, as `locate` leaves them
    except FileNotFoundError:  # it was deleted
        return str(place)
    return str(place).removeprefix(here)


@contextlib.contextmanager
def reading_once(likely: Iterable[Location] = ()) -> Iterator[None]:
    """Ask for a small file in a remote place once, however often this thread reads it or asks for it meanwhile.

    Those of the `likely` files that are in remote places are asked for first, side by side. Only this thread may write
    there meanwhile.
    """
    known = {} if (before := _read.get()) is None else before
    unknown = [file for file in dict.fromkeys(likely) if isinstance(file, Remote) and file not in known]
    contents = each([partial(object_store.read, file, SMALL_BYTES) for file in unknown])
    known.update((file, (SMALL_BYTES, data)) for file, data in zip(unknown, contents, strict=True))
    token = _read.set(known)
    try:
        yield
    finally:
        _read.reset(token)


def read(file: Location, limit: int) -> bytes | None:
    """Return the first `limit` bytes of `file`, None where there is no such file.

    Raises:
        VolumeError: it is there but cannot be read.
    """
    if isinstance(file, Remote):
        known = _read.get()
        if known is None:
            return object_store.read(file, limit)
        most, data = known.get(file, (0, b""))
        if data is not None and len(data) >= most and most < limit:  # it may be longer
            data = object_store.read(file, limit)
            known[file] = limit, data
        return None if data is None else data[:limit]
    try:
        with open(file, "rb", opener=_without_waiting) as stream:
            return stream.read(limit)
    except ValueError:  # a name that no file can have
        return None
    except NotADirectoryError:
        within = zipped.find(file)
        return None if within is None else within[0].read(within[1], 0, limit)
    except FileNotFoundError:
        check_links(file)
        return None
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error


def check_links(file: Path) -> None:
    """Raise where the name of `file`, which may not be there, or of a folder on its way is a link that leads nowhere.

    To a library such a file is not there, which of a chunk means fill values.

    Raises:
        VolumeError: with the link, and where it leads.
    """
    _find_name(file)


def check_files_in(folder: Path) -> None:
    """Raise where a name in `folder`, the first of them, is a link that leads nowhere, or no file; see `find_file`."""
    if not folder.is_dir():
        find_file(folder / "any")
        return
    with os.scandir(folder) as entries:  # in the order of the disk
        names = sorted(entry.name for entry in entries if not entry.is_file(follow_symlinks=False))
    for name in names:
        find_file(folder / name)


def find_file(file: Path) -> bool:
    """Return whether there is a file at `file`; what has its name, but cannot be opened, is not taken for none.

    It costs a look at the name, and one at its folder where the name is not there. Who waits for a pipe is let go.

    Raises:
        VolumeError: its name, or that of a folder on its way, is a link that leads nowhere, or something else.
    """
    place, mode = _find_name(file)
    if place != file:
        if stat.S_ISREG(mode) and (within := zipped.find(file)) is not None:
            return within[0].size(within[1]) is not None
        if not stat.S_ISDIR(mode):
            raise VolumeError(f"{place} is {_called(mode)}, where the metadata name a folder: put the folder there")
        return False
    if stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):  # nobody waits
            os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    if not stat.S_ISREG(mode):
        raise VolumeError(
            f"{file} is {_called(mode)}, where the metadata name a file: put the file there, or remove it"
        )
    return True


def _find_name(file: Path) -> tuple[Path, int]:
    """Return the nearest of `file` and the folders around it that is there, and its mode."""
    for place in (file, *file.parents):
        try:
            mode = os.lstat(place).st_mode
            if not stat.S_ISLNK(mode):
                return place, mode
        except OSError as error:
            if error.errno in NOWHERE:
                continue
            raise VolumeError(f"{place} cannot be looked at: {error.strerror}") from error
        try:
            return place, os.stat(place).st_mode  # noqa: PTH116  # asked for by each chunk that is missing
        except OSError as error:
            why = "leads nowhere" if error.errno in NOWHERE else f"cannot be followed ({error.strerror})"
            raise VolumeError(
                f"{place} is a link that {why}: it names {os.readlink(place)}; bring there what it names (`datalad "  # noqa: PTH115
                "get` or `git annex get`, or mount its disk), or mend the link"
            ) from error
    return file, stat.S_IFDIR


def _called(mode: int) -> str:
    """Return what a `mode` is of, for people."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _without_waiting(name: str, flags: int) -> int:
    """Open a file; a pipe without a writer does not block."""
    return os.open(name, flags | os.O_NONBLOCK)


def check_beside(name: str, file: Path) -> Path:
    """Return the file that `name`, found in `file`, means; it may lie beside that, below, or in VOLPIPE_LINKS.

    Else a file from a stranger could show others of the user's as voxels. Links that the user made are followed.

    Raises:
        VolumeError: it lies elsewhere.
    """
    target = Path(os.path.abspath(file.parent / name))  # noqa: PTH100  # links stay as they are
    allowed = [file.parent, *map(path_of, filter(None, os.environ.get("VOLPIPE_LINKS", "").split(os.pathsep)))]
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise VolumeError(
            f"{file} refers to {name}, which does not lie in its folder {file.parent}; put it there, or set "
            f"VOLPIPE_LINKS to the folder {target.parent} if you trust {file.name}"
        )
    return target


def fetch(
    file: Location,
    span: tuple[int, int] | None = None,
    tag: str = "",
    *,
    denied_ok: bool = False,
    most: int = MOST_ENCODED_BYTES,
    own: str = "",
) -> Fetched | None:
    """Return `file`, or a span of it, with its stamp; None where there is no such file.

    Arguments are those of `object_store.fetch`, of which only the span means something on a disk.

    Raises:
        OSError: it cannot be read, or its name leads nowhere; see `find_file`.
    """
    if isinstance(file, Remote):
        return object_store.fetch(file, span, tag, denied_ok=denied_ok, most=most, own=own)
    first, last = span or (0, -1)
    try:
        with open(file, "rb", opener=_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            stream.seek(max(0, status.st_size + first) if first < 0 else first)
            data = stream.read(last - first if span is not None and first >= 0 else -1)
    except NotADirectoryError:
        if not find_file(file):
            return None
        within = zipped.find(file)
        assert within is not None
        num_bytes = within[0].size(within[1]) or 0
        start = max(0, num_bytes + first) if first < 0 else first
        part = within[0].read(within[1], start, last if span is not None and first >= 0 else None)
        known = stamp(file)
        return None if part is None or known is None else Fetched(part, known)
    except OSError:
        if not find_file(file):
            return None
        raise
    return Fetched(data, Stamp(status.st_size, status.st_mtime_ns))


def size(file: Location) -> int | None:
    """Return the bytes of `file`, None where there is no such file."""
    if isinstance(file, Remote):
        known = object_store.stamp(file)
        return None if known is None else known.num_bytes
    try:
        status = file.stat()
    except NotADirectoryError:
        within = zipped.find(file)
        return None if within is None else within[0].size(within[1])
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def stamp(file: Location) -> Stamp | None:
    """Return the stamp of `file` (or of a folder's list); None where it does not exist or may not be read."""
    if isinstance(file, Remote):
        return object_store.stamp(file)
    try:
        status = file.stat()
    except NotADirectoryError:
        within, num_bytes = zipped.find(file), size(file)
        return None if within is None or num_bytes is None else Stamp(num_bytes, within[0].file.stat().st_mtime_ns)
    except OSError:
        return None
    return Stamp(status.st_size, status.st_mtime_ns)


def file_state(file: Location | str) -> State:
    """Return the state of `file`: number, times and bytes on a disk, tag and bytes in a bucket."""
    if isinstance(file, Remote):
        known = object_store.stamp(file)
        return ABSENT if known is None else stamp_state(known)
    try:
        status = os.stat(file)  # noqa: PTH116  # millions are asked for by their names
    except FileNotFoundError:
        return ABSENT
    except NotADirectoryError:
        within = zipped.find(Path(file))
        return ABSENT if within is None or within[0].size(within[1]) is None else file_state(within[0].file)
    except OSError as error:
        raise VolumeError(f"{file} cannot be looked at: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def stamp_state(stamp: Stamp) -> State:
    """Return the state that a server's `stamp` of a file gives; a tag, which says what is in it, counts before time."""
    if stamp.tag:
        tag = hashlib.sha256(stamp.tag.strip('"').encode()).digest()
        return int.from_bytes(tag[:8], "little", signed=True), 0, 0, stamp.num_bytes
    return (0, stamp.time_ns, 0, stamp.num_bytes) if stamp.time_ns else UNTOLD


def is_same(old: Stamp | None, new: Stamp | None) -> bool:
    """Return whether a file is as it was; a tag, which says what is in it, counts before its time."""
    if old is None or new is None or not (old.tag and new.tag):
        return old == new
    return (old.num_bytes, old.tag) == (new.num_bytes, new.tag)


def write(file: Location, data: bytes) -> None:
    """Write `file`, whole or not at all, also through a crash; its folders are made."""
    if isinstance(file, Remote):
        object_store.write(file, data)
        if (known := _read.get()) is not None:
            known[file] = len(data) + 1, data
        _note_change()
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, data)


def atomic_write(path: Path, data: bytes) -> None:
    """Write the file at `path`, in a folder that exists, whole or not at all, also through a crash."""
    with whole_file(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def whole_file(path: Path, *, lasting: bool = True) -> Iterator[Path]:
    """Give a file beside `path` to write, which takes its place once it is whole and on disk.

    One that is not `lasting` is not waited for: a power cut may leave it empty, a crash of the process may not.
    """
    partial = partial_of(path)
    try:
        with naming_full_disk(path):
            yield partial
            if lasting:
                sync(partial)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if lasting:
        sync(path.parent)


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turn the error of a write to `path` for which there is no room, which names no file, into one that does.

    Raises:
        FullDiskError: the disk or a quota is full, or a limit of the size of files is met.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise FullDiskError(
            f"{path} cannot be written: {os.strerror(error.errno)}; make room there, and give the same command again"
        ) from error


def partial_of(path: Path) -> Path:
    """Return a new name beside `path` for a file that will take its place once it is whole; a long name is cut."""
    return path.with_name(f".{path.name[:MOST_NAME]}.{uuid.uuid4().hex}")


def partial_files(folder: Path) -> list[Path]:
    """Return the unfinished files in `folder`, left by killed writers or still being written."""
    return [path for path in folder.glob(".*") if re.fullmatch(PARTIAL, path.name)]


def delete_file(file: Location) -> None:
    """Delete `file`, if it is there."""
    if isinstance(file, Remote):
        object_store.delete_file(file)
        _note_change()
        return
    file.unlink(missing_ok=True)


def delete_emptied(file: Path, depth: int) -> None:
    """Delete the folders above `file`, `depth` of them, as far as nothing is in them; others may do so meanwhile."""
    for folder in file.parents[:depth]:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # file systems say either of what is not empty
                raise
            return


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file(file: Location) -> bool:
    if not isinstance(file, Remote):
        return file.is_file() or size(file) is not None
    return (size(file) if _read.get() is None else read(file, SMALL_BYTES)) is not None


def is_folder(folder: Location) -> bool:
    """Return whether there is such a folder; a remote one, or one in a zip, is there when something lies under it."""
    if isinstance(folder, Remote):
        return any(object_store.list_files(folder))
    within = None if folder.is_dir() else zipped.find(folder)
    return folder.is_dir() if within is None else within[0].is_folder(within[1])


def check_letters(folder: Location) -> None:
    """Refuse a folder of chunks whose name tensorstore reads otherwise: a backslash is a slash to it.

    Raises:
        VolumeError: its name, or that of a folder above, has one, or is no UTF-8.
    """
    if isinstance(folder, Path) and "\\" in str(folder):
        raise VolumeError(
            f"{folder} has a backslash in its name, which tensorstore takes for a slash: its chunks would lie in "
            "another folder; rename it, or name it through a link without one"
        )
    if isinstance(folder, Path) and not str(folder).isascii():
        try:
            str(folder).encode()
        except UnicodeEncodeError as error:
            letter = os.fsencode(str(folder)[error.start])
            raise VolumeError(
                f"{str(folder)!a} has a byte {letter!r} in its name that is no UTF-8, which tensorstore cannot take; "
                "rename it"
            ) from error


def file_above(place: Path) -> Path | None:
    """Return the file that stands where a folder of `place` would have to, None where none does."""
    return next((folder for folder in place.absolute().parents if folder.exists() and not folder.is_dir()), None)


def exists(place: Location) -> bool:
    """Return whether there is such a file or folder."""
    if isinstance(place, Remote):
        return size(place) is not None or is_folder(place)
    return place.exists() or is_file(place) or is_folder(place)


def list_folders(folder: Location) -> list[str]:
    """Return the names of the folders in `folder`, sorted, hidden ones left out.

    Raises:
        VolumeError: a remote place cannot be listed; a folder on a disk that cannot be is logged, and has none.
    """
    if isinstance(folder, Remote):
        return [name for name in object_store.list_folders(folder) if not name.startswith(".")]
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except NotADirectoryError:
        within = zipped.find(folder)
        names = within[0].entries(within[1]) if within is not None else ()
        return [name for name, is_inner in names if is_inner and not name.startswith(".")]
    except OSError as error:
        log.warning("%s cannot be listed: %s", folder, error.strerror)
        return []


def list_names(folder: Location, most: int) -> list[str]:
    """Return the names of `most` files and folders in `folder`, whichever come first."""
    if isinstance(folder, Remote):
        names = (name for name, _ in object_store.list_files(folder)) if folder.is_s3 else ()
        return list(dict.fromkeys(name.partition("/")[0] for name in itertools.islice(names, most)))
    if (within := None if folder.is_dir() else zipped.find(folder)) is not None:
        return [name for name, _ in itertools.islice(within[0].entries(within[1]), most)]
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, most)]


def list_files(folder: Location) -> Iterator[tuple[str, int]]:
    """Yield every file under `folder`: its key there, and its bytes, 0 of a link that leads nowhere.

    Those that go meanwhile are left out.

    Raises:
        VolumeError: it cannot be listed.
    """
    if isinstance(folder, Remote):
        yield from object_store.list_files(folder)
        return
    if (within := None if folder.is_dir() else zipped.find(folder)) is not None:
        yield from within[0].below(within[1])
        return
    for name, entry in _walk(folder):
        try:
            num_bytes = entry.stat().st_size
        except FileNotFoundError:
            if not entry.is_symlink():
                continue
            num_bytes = 0
        yield name, num_bytes


def walk_names(folder: Location, at_once: int) -> Iterator[str]:
    """Yield the key of every file under `folder`, hidden ones and what is in hidden folders left out.

    Those of a bucket are listed `at_once`.

    Raises:
        VolumeError: it cannot be listed.
    """
    if isinstance(folder, Remote):
        names = (name for name, _ in object_store.list_files(folder, at_once))
    elif (within := None if folder.is_dir() else zipped.find(folder)) is not None:
        names = (name for name, _ in within[0].below(within[1]))
    else:
        names = (name for name, _ in _walk(folder))
    return (name for name in names if not name.startswith(".") and "/." not in name)


def _walk(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every file under `folder`, its key there first."""
    stack = [""]
    while stack:
        key = stack.pop()
        try:
            with os.scandir(folder / key) as entries:
                for entry in entries:
                    inner = f"{key}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(f"{inner}/")
                    else:
                        yield inner, entry
        except FileNotFoundError:
            log.info("%s/%s changed while it was listed", folder, key)
        except OSError as error:
            raise VolumeError(f"{folder / key} cannot be listed: {error.strerror}") from error


def state(folder: Location, names: Iterable[str]) -> tuple[object, ...]:
    """Return a value that changes when one of the files `names` in `folder` does.

    In a remote place only changes by this process count: asking would cost a request for each block.
    """
    if isinstance(folder, Remote):
        return (_last_change,)
    states = []
    for name in names:
        try:
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116  # asked for by each block that is read or written
        except OSError:
            continue
        states.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(states)


def _note_change() -> None:
    global _last_change
    _last_change = next(_num_changes)


def delete(path: Location) -> None:
    """Delete the folder at `path` with all that is in it, even while workers of a killed driver still write there."""
    if isinstance(path, Remote):
        object_store.delete(path)
        if (known := _read.get()) is not None:
            known.clear()
        _note_change()
        return
    for _ in range(DELETE_ATTEMPTS):
        try:
            shutil.rmtree(path)
        except OSError as error:  # what was listed has gone, or what was empty has been written to
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not path.exists():
            return
        time.sleep(DELETE_PAUSE_SECONDS)
    shutil.rmtree(path)
