"""Atomic copies: an unfinished copy, its finished boxes, and its move to its final name.

Not here: the source, or the boxes (convert). On a disk a copy is written in the folder `OUT.partial` and renamed when
it is whole. A bucket cannot rename: there chunks are written in place, and the metadata, without which they are no
array, follow the last chunk; `OUT.partial` holds the tally meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.volumes.formats.container import ARRAY_FORMATS, create_groups
from volpipe.volumes.identity import Identity, changes
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.lock import LOCK_FILE, held
from volpipe.volumes.storage.metadata import Place
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale, open_writer
from volpipe.volumes.writer import Writer

TALLY_FILE = "copied.json"
MAX_TALLY_BYTES = 2**24


@dataclass(frozen=True)
class Target:
    """A copy that is to be made: where, and of what shape and type.

    Attributes:
        path: the container, a file or a folder.
        key: the array, or the group of an OME-Zarr, in it; "" of precomputed.
        format: one of `convert.FORMATS`.
        spec: the array, (z, y, x) or (c, z, y, x).
        where: its voxel size and origin.
    """

    path: Location
    key: str
    format: str
    spec: ArraySpec
    where: Place

    @property
    def is_folder(self) -> bool:
        return self.format in ARRAY_FORMATS

    @property
    def is_group(self) -> bool:
        return self.format.startswith("ome") or self.format == "precomputed"

    @property
    def place(self) -> Location:
        """The place of the finished copy, which must be free."""
        return self.path / self.key if self.is_folder else self.path

    @property
    def work(self) -> Location:
        """The folder of the unfinished copy."""
        return self.path.parent / f"{self.path.name}.partial"

    @property
    def draft(self) -> Location:
        """The container, or in a bucket its metadata, before it is whole."""
        return self.work / self.path.name

    @property
    def array_key(self) -> str:
        return f"{self.key}/s0".lstrip("/") if self.is_group else self.key

    @property
    def unit(self) -> tuple[int, ...]:
        """Voxels (z, y, x) that are written at once: a shard, a chunk, or a plane."""
        if self.is_folder or self.format == "hdf5":
            return (self.spec.shards or self.spec.chunks)[-3:]
        return (1, *self.spec.shape[-2:])

    @property
    def levels(self) -> Multiscale:
        """The group of an OME-Zarr or precomputed, of one level."""
        where, name = self.where, re.sub(r"\.zarr$", "", self.path.name)
        return Multiscale((Level("s0"),), self.spec.axes, where.voxel_size_nm, where.origin_nm, name)

    def open(self) -> Writer:
        """Return this process's writer of the array, while it grows."""
        into = None if isinstance(self.path, Path) else self.path / self.array_key
        return open_writer(self.draft, self.array_key, into)


@dataclass
class Tally:
    """The finished boxes of a copy, stored in a file after each box; it never lists an unfinished one.

    Attributes:
        file: where it is kept.
        identity: the source, and how the copy is stored; boxes of another copy differ.
        below: boxes with a lower number are whole.
        beyond: others that are.
    """

    file: Location
    identity: Mapping[str, object]
    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return self.below + len(self.beyond)

    def add(self, number: int) -> None:
        """Note that box `number` is whole."""
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        self.store()

    def left(self, num_boxes: int) -> Iterator[int]:
        """Yield the boxes that are not whole now, in order."""
        known = frozenset(self.beyond)
        return (number for number in range(self.below, num_boxes) if number not in known)

    def store(self) -> None:
        tree = {"copy": self.identity, "below": self.below, "beyond": sorted(self.beyond)}
        paths.write(self.file, json.dumps(tree).encode())

    def load(self) -> bool:
        """Take over what the file says, and return whether there is one.

        Raises:
            VolumeError: it is of another copy, or no tally.
        """
        text = paths.read(self.file, MAX_TALLY_BYTES)
        if text is None:
            return False
        try:
            tree = json.loads(text)
            stored, self.below, self.beyond = tree["copy"], int(tree["below"]), set(map(int, tree["beyond"]))
            own = {key: value for key, value in self.identity.items() if key != "source"}
            changed = [f"{key} {stored.get(key)} -> {value}" for key, value in own.items() if stored.get(key) != value]
            sources = [Identity.model_validate(copy["source"]) for copy in (stored, self.identity) if "source" in copy]
            changed += changes(*sources) if len(sources) == 2 and not changed else []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VolumeError(f"{self.file} is damaged; remove {self.file.parent} to start over") from error
        if changed:
            raise VolumeError(
                f"{self.file.parent} holds a part of another copy ({'; '.join(changed)}); "
                "give its command again, or remove it to start over"
            )
        return True


def _begin(target: Target, tally: Tally) -> None:
    """Make the empty array, or take over what a copy that was stopped has left."""
    if not tally.load():
        _check_free(target)
    if isinstance(target.draft, Path) and not (len(tally) and target.is_folder):
        _delete(target.draft)
    tally.store()
    if target.is_folder:
        create_draft(target, target.draft)


def _check_free(target: Target) -> None:
    """Refuse to take a folder that somebody else made for something else, or to write among others' files."""
    work = target.work
    if isinstance(work, Remote) and paths.exists(target.place):
        raise VolumeError(f"{target.place} exists already; remove it, or write to another place")
    if isinstance(work, Path) and any(entry.name != LOCK_FILE for entry in work.iterdir()):
        raise _foreign(work)


def _publish(target: Target) -> None:
    """Give the whole copy its name, and remove what was kept beside it.

    Raises:
        VolumeError: somebody else took the name meanwhile.
    """
    if not isinstance(target.path, Path):
        create_draft(target, target.path)
    elif not _rename(target, target.path):
        _discard(target)
        raise VolumeError(f"{target.path} was made by somebody else meanwhile; remove it, or write to another place")
    _delete(target.work)


def _discard(target: Target) -> None:
    """Remove what there is of the copy."""
    chunks = target.path / target.array_key
    if isinstance(chunks, Remote):
        _delete(chunks)
    _delete(target.work)


def create_draft(target: Target, container: Location) -> None:
    """Make the array in `container`, without voxels, and its group, if any; what is there already stays."""
    create_array(container, target.array_key, target.spec, ARRAY_FORMATS[target.format])
    if target.is_group:
        create_multiscale(container, target.levels, format=target.format, key=target.key)


def _rename(target: Target, path: Path) -> bool:
    """Move the draft to its place, and return whether that was free."""
    draft = Path(str(target.draft))
    if target.is_folder and target.key and path.exists():
        create_groups(path, target.key, ARRAY_FORMATS[target.format])
        place = path / target.key
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            return False
        (draft / target.key).rename(place)
        paths.sync(place.parent)
        return True
    if path.exists():
        return False
    if not target.is_folder:
        paths.sync(draft)
    draft.rename(path)
    paths.sync(path.parent)
    return True


def _delete(place: Location) -> None:
    if isinstance(place, Remote):
        paths.delete(place)
    elif place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_copy(target: Target, identity: Mapping[str, object]) -> Iterator[Tally]:
    """Give the tally of a new or resumed copy; then move the copy to its place.

    After an error, finished boxes stay for the same command to resume, in N5 and Zarr; a single file is removed.

    Raises:
        VolumeError: it cannot be made there, or another process is making it.
    """
    if target.is_folder and paths.exists(target.path):
        create_groups(target.path, target.key, ARRAY_FORMATS[target.format])
    with _held(target):
        tally = Tally(target.work / TALLY_FILE, json.loads(json.dumps(identity)))
        _begin(target, tally)
        try:
            yield tally
        except BaseException as error:
            if not target.is_folder or not len(tally):
                _discard(target)
            elif isinstance(error, VolumeError):
                raise VolumeError(
                    f"{error} ({target.work} keeps what is whole; run the same command again to continue)"
                ) from error
            raise
        _publish(target)


def _foreign(work: Path) -> VolumeError:
    return VolumeError(f"{work} exists, and is no copy that was stopped; remove it, or write to another place")


@contextlib.contextmanager
def _held(target: Target) -> Iterator[None]:
    """Hold the folder that the copy grows in; the system lets go when this process ends, however it ends.

    A bucket cannot be held: two processes that make the same copy write the same bytes there.
    """
    work = target.work
    if not isinstance(work, Path):
        yield
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VolumeError(f"{work} cannot be made: {error.strerror}; choose another place") from error
    if any(work.iterdir()) and not (work / LOCK_FILE).exists():
        raise _foreign(work)
    with held(work, f"process {os.getpid()} on {socket.gethostname()}", VolumeError):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it is gone
                if [entry.name for entry in work.iterdir()] == [LOCK_FILE]:  # nothing was begun
                    _delete(work)
