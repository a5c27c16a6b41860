"""The states of a volume's files, which change when one is written, and fingerprints of boxes that were read.

Not here: the identity of a whole volume (identity), or what follows from a change (runs.update). States are compared
for equality alone, since clocks may jump. A fingerprint is two hashes: of the states of the files that hold a box, ""
where their store tells none, and of the voxels that were read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Index, Shape, cells, mirrored
from volpipe.volumes.formats import container
from volpipe.volumes.formats.container import read_header, split
from volpipe.volumes.node_cache import warn
from volpipe.volumes.storage import object_store
from volpipe.volumes.storage.chunk_files import ChunkFiles, is_named, list_names
from volpipe.volumes.storage.fetched_array import noting_stamps
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Remote, Stamp
from volpipe.volumes.storage.paths import ABSENT, UNTOLD, Location, State, file_state, stamp_state
from volpipe.volumes.volume import Reader, Volume

NOT_ASKED = -3
OLD_SECONDS, MOST_REMEMBERED = 60.0, 1 << 16  # of files in a bucket, whose states a process remembers
Held = Location | str | tuple[Location, ...]  # the file, or the files, with the voxels at a place
T = TypeVar("T")
ASKED_AT_ONCE, SLOW_SECONDS, LOOKS = 16, 100e-6, 16  # files of a store that never answered faster in so many looks
MOST_REREADS = 3
SHAPES = ("shape", "dimensions", "scale_metadata")  # metadata that change as an array grows


class FileStates:
    """The states of the files of `volume`, by the boxes of voxels that they hold; each is looked at each time."""

    def __init__(self, volume: Volume) -> None:
        header = read_header(volume.folder)
        if header is None:
            raise VolumeError(f"no array at {volume.folder} any more")
        self._volume, self.header = volume, header
        self._layout = _layout_of(header)
        self._description = _description(header)
        self._others: bool | None = None
        self._lately: deque[float] = deque(maxlen=LOOKS)  # seconds that a file took
        self._named: tuple[Box, list[Held | None]] | None = None  # those of one look after the other
        self._memory: OrderedDict[Held | None, tuple[State, float]] = OrderedDict()  # and when it was so

    @property
    def is_remote(self) -> bool:
        """Whether each look at a file is a request."""
        return isinstance(self.header.folder, Remote)

    def hash(self, box: Box, *, may_be_old: bool = False) -> str:
        """Return a hash of the states of the files that hold `box` (z, y, x), mirrored at the volume's faces.

        "" where the store does not tell enough.

        Args:
            may_be_old: take what this process saw a moment ago of files in a bucket.
        """
        return self._hash_box(box, lambda files: self._states(files, may_be_old=may_be_old))

    def hash_stamps(self, box: Box, stamps: Mapping[Remote, Stamp | None]) -> str:
        """Return the same from the `stamps` that came with the voxels of `box`; files without one are looked at."""
        layout = self._layout
        if layout is None:
            return ""

        def states(files: Box) -> np.ndarray:
            remotes = [layout.file(place) for place in cells(files, (1,) * len(files.start))]
            other = [file for file in remotes if file not in stamps]
            known = dict(zip(other, self._look_at(other), strict=True))
            known |= {file: ABSENT if stamp is None else stamp_state(stamp) for file, stamp in stamps.items()}
            entries = [known[file] for file in remotes]
            return np.array(entries, np.int64).reshape(*files.shape, 4)

        return self._hash_box(box, states)

    def _hash_box(self, box: Box, states_of: Callable[[Box], np.ndarray]) -> str:
        if self._layout is None:
            return ""
        shown = mirrored(box, self._volume.spatial_shape)
        states = states_of(self._files_of_box(self._volume.stored_box(shown), self._layout.cell))
        if (states == UNTOLD).all(axis=-1).any():
            return ""
        if (states == ABSENT).all(axis=-1).any() and self._has_others():
            return ""
        folder = self.header.folder
        if (states == ABSENT).all(axis=-1).any() and not container.state(folder, has_slices=self.header.has_slices):
            raise VolumeError(f"no array at {folder} any more")  # and no chunk of it, which would be read as zeros
        place = np.array([box.start, box.stop, shown.start, shown.stop], np.int64)
        return _digest(self._description, place.tobytes(), states.tobytes()).hex()

    def _has_others(self) -> bool:
        """Return whether files of the array have other names than its metadata give, which are not looked at."""
        if self._others is None:
            self._others = is_named(self.header) and bool(list_names(self.header).others)
        return self._others

    def _files_of_box(self, box: Box, cell: Shape) -> Box:
        """Return the files of `cell` voxels that hold `box` (z, y, x), by their places along the stored axes."""
        volume, ranges = self._volume, []
        for axis, n, size in zip(volume.axes, volume.shape, cell, strict=True):
            start, stop = 0, n
            if axis in "zyx":
                start, stop = box.start["zyx".index(axis)], box.stop["zyx".index(axis)]
            elif axis == "c" and volume.view.channel is not None:
                start, stop = int(volume.view.channel), int(volume.view.channel) + 1
            elif axis == "t" and volume.view.time is not None:
                start, stop = volume.view.time, volume.view.time + 1
            ranges.append((start // size, -(-stop // size)))
        return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))

    def _states(self, files: Box, *, may_be_old: bool = False) -> np.ndarray:
        """Return the states of `files`, (…, 4), int64."""
        named = self._named
        if named is None or named[0] != files:
            named = self._named = files, self._files_at(cells(files, (1,) * len(files.start)))
        states = self._look_at(named[1], may_be_old=may_be_old)
        return np.array(states, np.int64).reshape(*files.shape, 4)

    def _files_at(self, places: Iterable[Index]) -> list[Held | None]:
        assert self._layout is not None
        return list(map(self._layout.file, places))

    def _look_at(self, files: Sequence[Held | None], *, may_be_old: bool = False) -> list[State]:
        """Return the states of `files`; from where answers take long, many at a time."""
        if self.is_remote:
            return self._ask_store(files, may_be_old=may_be_old)
        if len(self._lately) == LOOKS and min(self._lately) > SLOW_SECONDS:
            return list(_pool().map(_state_of, files))
        started = time.perf_counter()
        states = list(map(_state_of, files))
        self._lately.append((time.perf_counter() - started) / len(files))
        return states

    def _ask_store(self, files: Sequence[Held | None], *, may_be_old: bool) -> list[State]:
        """Return the states of `files` in a bucket, and remember them."""
        now, known = time.monotonic(), dict[Held | None, State]()
        for file in files if may_be_old else ():
            state, at = self._memory.get(file, (UNTOLD, -OLD_SECONDS))
            if now - at < OLD_SECONDS:
                known[file] = state
        asked = [file for file in files if file not in known]
        known |= zip(asked, _pool().map(_state_of, asked), strict=True)
        for file in asked:
            self._memory[file] = known[file], now
        while len(self._memory) > MOST_REMEMBERED:
            self._memory.popitem(last=False)
        return [known[file] for file in files]


class KnownStates(FileStates):
    """The states of all files of a volume, for boxes in the order of blocks: each file is looked at once.

    Those of a bucket are listed. 32 bytes are kept of each file: of all that were listed, or of axes in another order
    than z first; else of a slab of blocks.
    """

    def __init__(self, volume: Volume) -> None:
        super().__init__(volume)
        self._rows: dict[int, np.ndarray] = {}  # by their places along the first stored axis
        folder = self.header.folder
        self._is_listed = isinstance(folder, Remote) and folder.is_s3 and self.header.has_regular_names
        if self._is_listed:
            self._list_bucket()

    def _states(self, files: Box, *, may_be_old: bool = False) -> np.ndarray:
        """Return the states of `files`, (…, 4), int64; see `FileStates`."""
        rows = range(files.start[0], files.stop[0])
        inner = Box(files.start[1:], files.stop[1:])
        for row in rows:
            unknown = np.argwhere(self._states_row(row)[inner.slices][..., 0] == NOT_ASKED)
            if len(unknown):
                places = [(row, *map(int, place)) for place in unknown + inner.start]
                for place, state in zip(places, self._look_at(self._files_at(places)), strict=True):
                    self._rows[row][place[1:]] = state
        if self._volume.axes[0] == "z" and not self._is_listed:
            for row in [row for row in self._rows if row < rows.start]:
                del self._rows[row]
        return np.stack([self._rows[row][inner.slices] for row in rows])

    def _states_row(self, row: int) -> np.ndarray:
        if row not in self._rows:
            assert self._layout is not None
            sizes = zip(self.header.shape[1:], self._layout.cell[1:], strict=True)
            state = ABSENT if self._is_listed else (NOT_ASKED,) * 4
            self._rows[row] = np.full((*(-(-n // c) for n, c in sizes), 4), state, np.int64)
        return self._rows[row]

    def _list_bucket(self) -> None:
        folder, files = self.header.folder, ChunkFiles(self.header)
        assert isinstance(folder, Remote)
        for name, stamp in object_store.list_stamps(folder):
            place = files.index(name)
            if place is not None:
                self._states_row(place[0])[place[1:]] = stamp_state(stamp)


@dataclass(frozen=True)
class _Layout:
    """Voxels of a file along the stored axes, and the file at a place; None where it is not known which that is."""

    cell: Shape
    file: Callable[[Index], Held | None]


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(ASKED_AT_ONCE, "volpipe-states")


def _state_of(file: Held | None) -> State:
    """Return the state of a file, or of several: one that is not there, or tells nothing, counts for all."""
    if not isinstance(file, tuple):
        return UNTOLD if file is None else file_state(file)
    states = list(map(file_state, file))
    odd = next((state for state in (ABSENT, UNTOLD) if state in states), None)
    if odd is not None:
        return odd
    digest = hashlib.blake2b(np.array(states, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True), 0, 0, sum(state[-1] for state in states)


def _layout_of(header: Header) -> _Layout | None:
    """Return where the files of the array of `header` lie; None where its voxels may come from any files."""
    if header.has_slices:
        outer = len(header.known["counts"])
        return _Layout((1,) * outer + header.shape[outer:], lambda place: header.folder / header.slice_name(place))
    if header.scheme is not None:
        files = ChunkFiles(header)

        def file(place: Index) -> Held | None:
            name, folder = files.name(place), header.folder
            if not name:
                return None
            return folder / name if isinstance(folder, Remote) else f"{folder}/{name}"

        return _Layout(header.write_unit, file)
    within = split(header.folder)
    if within is None or header.data_files is None:
        return None
    whole = (within[0], *header.data_files) if header.data_files else within[0]
    return _Layout(header.shape, lambda place: whole)


def _description(header: Header) -> bytes:
    """Return a hash of what decides how files become voxels, the same for an array that has grown."""
    known = {name: value for name, value in header.known.items() if name not in SHAPES}
    tree: list[object] = [header.format, str(header.dtype), header.chunks, header.shards, header.codec]
    tree.append(known if header.has_regular_names else {})
    return _digest(json.dumps(tree, sort_keys=True, default=str).encode())


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.digest()


class StackedStates(FileStates):
    """The states of the files of several volumes that are read as one."""

    def __init__(self, states: Sequence[FileStates]) -> None:
        self._each = states

    @property
    def is_remote(self) -> bool:
        return any(states.is_remote for states in self._each)

    def hash(self, box: Box, *, may_be_old: bool = False) -> str:
        return _joined_hash([states.hash(box, may_be_old=may_be_old) for states in self._each])

    def hash_stamps(self, box: Box, stamps: Mapping[Remote, Stamp | None]) -> str:
        return _joined_hash([states.hash_stamps(box, stamps) for states in self._each])


def _joined_hash(hashes: Sequence[str]) -> str:
    """Return a hash of several; "" where one of them is."""
    return _digest(" ".join(hashes).encode()).hex() if all(hashes) else ""


def states_of(volume: Volume, make: Callable[[Volume], FileStates] = FileStates) -> FileStates:
    """Return the states of the files of `volume`, as `make` makes them for each that is read as a part of it."""
    each = [make(part) for part in volume.parts]
    return each[0] if len(each) == 1 else StackedStates(each)


def hash_voxels(voxels: np.ndarray) -> str:
    """Return a hash of `voxels`, which lie in C order: 16 digits.

    Half of it is CRC-32C, the rest a sum of words: together 2 ms for 13 MB, where blake2b takes 10 (2026-11-23).
    """
    import google_crc32c

    data = np.ascontiguousarray(voxels).reshape(-1).view(np.uint8)
    words = data[: data.size // 8 * 8].view(np.uint64)
    total = int(np.add.reduce(words, dtype=np.uint64)) + int(np.add.reduce(data[words.nbytes :], dtype=np.uint64))
    kind = f"{voxels.dtype.str} {voxels.shape}".encode()
    crc = google_crc32c.extend(google_crc32c.value(kind), data)
    return f"{crc:08x}{(total ^ total >> 32) & 0xFFFFFFFF:08x}"


def known_files(volume: Volume) -> FileStates:
    """Return this process's states of the files of `volume`."""
    return states_of(volume, lambda part: container.once(part.folder, ("files", part), lambda: FileStates(part)))


def read_known(reader: Reader, box: Box, *, num_channels: int | None = None) -> tuple[np.ndarray, str]:
    """Return the voxels of `box` as `Reader.read_mirrored` does, and their fingerprint.

    A box whose files change meanwhile is read again. Files that are fetched tell their states themselves.

    Raises:
        VolumeError: they do not stop changing.
    """
    volume, files = reader.volume, known_files(reader.volume)
    if reader.is_fetched:
        with noting_stamps() as stamps:
            voxels = reader.read_mirrored(box, num_channels=num_channels)
        state = files.hash_stamps(box, stamps)
        return voxels, f"{state}:{hash_voxels(voxels)}"
    voxels, state = read_still(
        lambda: reader.read_mirrored(box, num_channels=num_channels), lambda: files.hash(box), f"{volume}",
        f" while its voxels {box} were read",
        earlier=(lambda: files.hash(box, may_be_old=True)) if files.is_remote else None,
    )  # fmt: skip
    return voxels, f"{state}:{hash_voxels(voxels)}"


def read_still(
    read: Callable[[], T],
    look: Callable[[], str],
    what: str,
    meanwhile: str = " while they were read",
    earlier: Callable[[], str] | None = None,
) -> tuple[T, str]:
    """Return what `read` gives, and the states of files that `look` told before and after that, which are the same.

    Those before may be of any time `earlier`: files that are as then were not written since.

    Raises:
        VolumeError: they do not stop changing.
    """
    before = (earlier or look)()
    for _ in range(MOST_REREADS + 1):
        result = read()
        after = look()
        if after == before:
            return result, after
        before = after
        warn(f"{what} changed{meanwhile}; they are read again")
    raise VolumeError(
        f"{what} changed {MOST_REREADS + 1} times{meanwhile}; let whoever writes it come to an end, and give the same "
        "command again"
    )


def is_same(old: str, new: str) -> bool:
    """Return whether two fingerprints are of the same voxels."""
    return old.partition(":")[2] == new.partition(":")[2]
