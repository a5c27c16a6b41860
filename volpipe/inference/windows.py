"""Windows, read from stored window tensors, or cut from the volume: as float32 arrays, the same values either way; or
as the voxels that they are cut from, for a net that has a device to cut them on.

Not here: torch (runner, dataset), or where windows lie (geometry.grid).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from volpipe.blockwise.malloc import mapped
from volpipe.errors import VolumeError
from volpipe.geometry.blend import windows_over
from volpipe.geometry.grid import Box, Lattice, Slab
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.volumes.file_states import is_same, read_known
from volpipe.volumes.rolling_box import RollingBox
from volpipe.volumes.storage.object_store import Remote, latency
from volpipe.volumes.storage.requests import InTurn, num_at_once
from volpipe.volumes.volume import Reader, Volume

T = TypeVar("T")
END: Any = object()  # past the last item of any type

# Reads are too few while what one takes of the line's time is less than so many latencies: at 20 ms and 200 MB/s two
# workers take 40 ms for a block of 128³, at 12.5 MB/s 168 to 336 (measured 2026-11-25).
LATENCIES, MOST_AHEAD = 4, 4
# Decoded chunks that neighbouring blocks share. At 512³, windows of 64³ with half overlap, chunks of 64³, two workers
# fetched a chunk 5.4 times without, 2.5 times with 32 MiB, 1.8 with 64 and 1.7 with 256 (measured 2026-11-21).
CACHE_BYTES = 64 * 2**20

Place = tuple[int | slice, ...]


@dataclass(frozen=True)
class Voxels:
    """Voxels as they are stored, from which windows are cut: those of a block (c, z, y, x), or windows (n, c, z, y, x).

    Attributes:
        places: of each window in `data`.
        normalise: what is left to do to them, None where they are normalised.
        inside: of each window the part that lies in the volume, where the rest is `padding`; nothing where it shows the
            volume mirrored.
        padding: of each channel, normalised; nothing for zeros.
    """

    data: np.ndarray
    places: tuple[Place, ...]
    normalise: Affine | None = None
    inside: tuple[Place, ...] = ()
    padding: tuple[float, ...] = ()


def read_fingerprint(reader: Reader, slabs: Sequence[Slab], box: Box) -> str:
    """Return the fingerprint of the voxels in `box`, those of a block that is computed in `slabs`, if in any."""
    if not slabs:
        return read_known(reader, box)[1]
    rolling = RollingBox(reader, [slab.seen for slab in slabs], mapped)
    for index in range(len(slabs)):
        rolling.read(index)
    return rolling.fingerprint()


def blocks_ahead(plan: Plan) -> int:
    """Return how many blocks a worker reads at a time, at most: several from a bucket or the web, if they are small."""
    if "://" not in plan.source.path or plan.mode != "streamed" or plan.has_slabs:
        return 1
    voxel_bytes = plan.source.num_channels * np.dtype(plan.source.dtype).itemsize
    return min(MOST_AHEAD, num_at_once(largest_input(plan) * voxel_bytes, fewest=1))


def windows_along(plan: Plan, axis: int) -> range:
    """Return the computed windows along `axis`: those that add to a voxel of the region."""
    return windows_over(plan.blend, plan.lattice, axis, plan.region.start[axis], plan.region.stop[axis])


def largest_input(plan: Plan) -> int:
    """Return the voxels under the computed windows of a block, for the largest of them."""
    return math.prod(max(b - a for a, b in seen_along(plan, axis)) for axis in range(3))


def seen_along(plan: Plan, axis: int) -> list[tuple[int, int]]:
    """Return the voxels under the computed windows along `axis` of each block that has some; they may lie outside."""
    lattice, computed = plan.lattice, windows_along(plan, axis)
    sides = []
    for block in range(plan.blocks.counts[axis]):
        windows = lattice.windows_along(axis, block)
        own = range(max(windows.start, computed.start), min(windows.stop, computed.stop))
        if own:
            start, last = (lattice.start_along(axis, own[i]) for i in (0, -1))
            sides.append(lattice.seen_along(axis, start, last + lattice.window[axis]))
    return sides


def reads_at_once(seconds: float, latency: float, most: int) -> int:
    """Return how many reads are to go on at a time, up to `most`, where one takes `seconds` of the line's time.

    Where its bytes take most of that, not the `latency` (in seconds) of the store, others only make it late: one.
    """
    return min(most, 1 + int(LATENCIES * latency / seconds))


class WindowSource(ABC):
    """Source of windows, stored or cut from the volume; `has_blocks`: its blocks are in memory as a whole."""

    lattice: Lattice
    has_blocks: ClassVar[bool] = False

    @abstractmethod
    def voxels(self, numbers: Sequence[int]) -> Voxels:
        """Return what the windows of these numbers, all of one block, are cut from; the same array while it is so."""

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the windows of these numbers, (n, c, z, y, x), float32, normalised."""

    @abstractmethod
    def expect(self, blocks: Sequence[int]) -> None:
        """Read the voxels of `blocks` ahead, in their order, if they can be."""

    @abstractmethod
    def forget(self, block: int) -> None:
        """Free the voxels of `block`, if they are kept."""

    @abstractmethod
    def close(self) -> None:
        """Read no slab ahead any more."""

    def slabs(self, block: int) -> Sequence[Slab]:
        """Return the slabs in which `block` is computed; none where it is computed as a whole."""
        return ()

    def fingerprint(self, block: int) -> str:
        """Return the fingerprint of the voxels of the volume that `block` was cut from; "" where none were read."""
        return ""


@dataclass
class StoredWindows(WindowSource):
    """Windows that factor wrote: one window, one chunk read."""

    tensors: Volume
    lattice: Lattice

    def voxels(self, numbers: Sequence[int]) -> Voxels:
        return Voxels(self.read(numbers), tuple((i,) for i in range(len(numbers))))

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        reader = self.tensors.open()
        return np.stack([reader.read_raw((slice(n, n + 1),))[0] for n in numbers])

    def expect(self, blocks: Sequence[int]) -> None:
        """Do nothing: windows are read as they are needed."""

    def forget(self, block: int) -> None:
        """Do nothing: no voxel is kept."""

    def close(self) -> None:
        """Do nothing: no slab is read ahead."""


@dataclass
class StreamedWindows(WindowSource):
    """Windows cut from the volume: a block's voxels are read once, mirrored at the volume's faces, and kept a while.

    Where not all windows of a block are selected, `input_box` returns the box that the selected ones see together.
    Chunks in memory, also those of another `session`, are compared with their files.
    Of a block that is computed in several slabs, which `slabs_of` returns, no more than two are in memory, and of a
    remote volume as many pieces of the next one as are read at a time, also of the next block's first. Of other blocks
    the one being cut is, and those being read: one, or up to `most_ahead` where latency takes most of their time.
    """

    has_blocks = True
    volume: Volume
    lattice: Lattice
    normalise: Affine
    input_box: Callable[[int], Box] | None = None
    session: str = ""
    slabs_of: Callable[[int], Sequence[Slab]] | None = None
    most_ahead: int = 1
    padding: tuple[float, ...] = ()  # of windows at the edge, by channel and normalised
    _rolling: dict[int, RollingBox] = field(default_factory=dict, repr=False)  # by block
    _next_slab: tuple[int, int] | None = field(default=None, repr=False)  # its block, and its number there
    _pieces: InTurn[str] | None = field(default=None, repr=False)  # of remote slabs, in order
    _in_slabs: deque[int] = field(default_factory=deque, repr=False)  # expected blocks after the one being cut
    _blocks: OrderedDict[int, Future[tuple[Box, np.ndarray]]] = field(default_factory=OrderedDict, repr=False)
    _fingerprints: dict[int, str] = field(default_factory=dict, repr=False)
    _expected: deque[int] = field(default_factory=deque, repr=False)
    _num_reading: int = field(default=0, repr=False)
    _at_once: int = field(default=1, repr=False)
    _reader: ThreadPoolExecutor | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def voxels(self, numbers: Sequence[int]) -> Voxels:
        block = numbers[0] // self.lattice.windows_per_block
        slabs = self.slabs(block)
        box, data = self._slab(block, slabs, numbers[0]) if slabs else self._voxels(block)
        inside = tuple(self._inside(numbers))
        return Voxels(data, tuple(self._places(numbers, box)), self.normalise, inside, self.padding)

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        windows = np.empty((len(numbers), self.volume.num_channels, *self.lattice.seen), np.float32)
        for window, number in zip(windows, numbers, strict=True):
            box, data = self._voxels(number // self.lattice.windows_per_block)
            self.normalise.apply(data[next(self._places([number], box))], out=window)
        for window, inside in zip(windows, self._inside(numbers), strict=False):
            kept = window[inside].copy()
            window[...] = np.reshape(self.padding or 0, (-1, 1, 1, 1))
            window[inside] = kept
        return windows

    def slabs(self, block: int) -> Sequence[Slab]:
        return self.slabs_of(block) if self.slabs_of is not None else ()

    def expect(self, blocks: Sequence[int]) -> None:
        with self._lock:
            for block in blocks:
                (self._in_slabs if self.slabs(block) else self._expected).append(block)
            self._next_slab = None
            self._read_ahead()

    def forget(self, block: int) -> None:
        with self._lock:
            self._blocks.pop(block, None)
            self._read_ahead()

    def fingerprint(self, block: int) -> str:
        return self._fingerprints[block]

    def close(self) -> None:
        self._rolling.clear()
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = self._next_slab = None

    def _slab(self, block: int, slabs: Sequence[Slab], number: int) -> tuple[Box, np.ndarray]:
        """Return the voxels (c, z, y, x) under the slab that begins with window `number`, and their box."""
        index = [slab.numbers[0] for slab in slabs].index(number)
        if self._next_slab != (block, index):
            self._begin_slabs(block, may_read_ahead=index == 0)
        self._next_slab = None  # where it cannot be read, the next attempt begins anew
        rolling = self._rolling_box(block)
        data = rolling.read(index, self._pieces)
        self._next_slab = block, index + 1
        if index == len(slabs) - 1:
            self._note(block, rolling.fingerprint(), rolling.whole)
            del self._rolling[block]
            self._next_slab = (self._in_slabs.popleft(), 0) if self._in_slabs else None
        return slabs[index].seen, data

    def _begin_slabs(self, block: int, *, may_read_ahead: bool) -> None:
        """Read slabs of `block`, then of those that are expected after it; other blocks' voxels would be there, too."""
        self.close()
        while self._in_slabs and self._in_slabs.popleft() != block:
            pass
        rolling, blocks = self._rolling_box(block), (block, *self._in_slabs)
        works = itertools.chain.from_iterable(self._rolling_box(number).works() for number in blocks)
        if may_read_ahead and rolling.is_fetched:
            self._pieces = InTurn(works, rolling.at_once)

    def _rolling_box(self, block: int) -> RollingBox:
        if block not in self._rolling:
            self._rolling[block] = RollingBox(self._open(), [slab.seen for slab in self.slabs(block)], mapped)
        return self._rolling[block]

    def _open(self) -> Reader:
        cache_bytes = CACHE_BYTES if any(self.lattice.overlap) else 0
        # In a bucket a look at a chunk in memory is a request, which costs what the memory saves.
        is_near = not isinstance(self.volume.folder, Remote)
        return self.volume.open(cache_bytes=cache_bytes, session=self.session, live=is_near)

    def _note(self, block: int, fingerprint: str, box: Box) -> None:
        """Note the `fingerprint` of the voxels of `block`, in `box`.

        Raises:
            VolumeError: they were others before.
        """
        if not is_same(self._fingerprints.setdefault(block, fingerprint), fingerprint):
            raise VolumeError(f"{self.volume} changed while the windows of block {block}, voxels {box}, were cut")

    def _places(self, numbers: Sequence[int], box: Box) -> Iterator[Place]:
        """Yield where the windows of these numbers, all of one block, are in the voxels (c, z, y, x) of `box`."""
        for number in numbers:
            yield (slice(None), *self.lattice.window_box(number).relative_to(box.start).slices)

    def _inside(self, numbers: Sequence[int]) -> Iterator[Place]:
        """Yield which part of the windows of these numbers lies in the volume, where the rest of them is padding."""
        if not self.lattice.is_padded or all(w <= n for w, n in zip(self.lattice.seen, self._shape, strict=True)):
            return
        for number in numbers:
            box = self.lattice.window_box(number)
            yield (slice(None), *(box & Box.from_shape(self._shape)).relative_to(box.start).slices)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.volume.spatial_shape

    def _voxels(self, block: int) -> tuple[Box, np.ndarray]:
        """Return the block's input box and its voxels (c, z, y, x), from memory if they were read lately."""
        try:
            return self._reading(block).result()
        except Exception:
            with self._lock:
                self._blocks.pop(block, None)  # the next attempt reads again
            raise

    def _reading(self, block: int) -> Future[tuple[Box, np.ndarray]]:
        with self._lock:
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                while len(self._blocks) > self.most_ahead:
                    self._blocks.popitem(last=False)
                self._begin(block)
            return self._blocks[block]

    def _read_ahead(self) -> None:
        """Begin to read expected blocks: as many as are read at once, beside one that is cut."""
        while self._expected and self._num_reading < self._at_once and len(self._blocks) <= self._at_once:
            self._begin(self._expected[0])

    def _begin(self, block: int) -> None:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(self.most_ahead, "volpipe-read")
        if block in self._expected:
            self._expected.remove(block)
        self._num_reading += 1
        self._blocks[block] = self._reader.submit(self._read_block, block)

    def _read_block(self, block: int) -> tuple[Box, np.ndarray]:
        started, num_before = time.perf_counter(), self._num_reading
        try:
            box = (self.input_box or self.lattice.input_box)(block)
            voxels, fingerprint = read_known(self._open(), box)
            self._note(block, fingerprint, box)
            seconds = time.perf_counter() - started
            self._at_once = reads_at_once(
                2 * seconds / (num_before + self._num_reading), self._latency, self.most_ahead
            )
        finally:
            with self._lock:
                self._num_reading -= 1
                self._read_ahead()
        return box, voxels

    @property
    def _latency(self) -> float:
        folder = self.volume.folder
        return latency(folder) if isinstance(folder, Remote) else 0.0

    def __getstate__(self) -> dict[str, object]:
        names = ("volume", "lattice", "normalise", "input_box", "session", "slabs_of", "most_ahead", "padding")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # voxels, threads and locks stay in their process


@dataclass(frozen=True)
class Batch:
    """Windows of one block: their numbers, and what they are cut from, or the error of reading that."""

    block: int
    numbers: tuple[int, ...]
    voxels: Voxels | None
    is_last: bool  # of its block
    error: Exception | None = None
    slab: Slab | None = None

    def parts(self, size: int) -> Iterator[Batch]:
        """Yield it in parts of `size` windows at most, which were read."""
        assert self.voxels is not None
        for start in range(0, len(self.numbers), size):
            part = slice(start, start + size)
            voxels = replace(self.voxels, places=self.voxels.places[part], inside=self.voxels.inside[part])
            yield replace(self, numbers=self.numbers[part], voxels=voxels)


def batches(
    source: WindowSource, blocks: Sequence[int], size: int, windows_of: Callable[[int], Sequence[int]] | None = None
) -> Iterator[Batch]:
    """Yield the windows of `blocks` in turn, `size` at a time, or all of a block or slab where that costs no more.

    The composition of batches depends on the block alone, so that a net sees the same input however blocks are
    spread over workers. A block that cannot be read yields one batch with the error, and the next block follows.
    `windows_of` returns the selected windows of a block, where not all are.
    """
    for block in blocks:
        numbers = (windows_of or source.lattice.windows_of)(block)
        num = len(numbers) if source.has_blocks else size
        slabs = source.slabs(block)
        groups = [slab.numbers for slab in slabs] or [tuple(numbers[i : i + num]) for i in range(0, len(numbers), num)]
        for some, slab, place in zip(groups, slabs or itertools.repeat(None), itertools.count(1), strict=False):
            try:
                voxels = source.voxels(some)
            except Exception as error:
                yield Batch(block, some, None, True, error)
                break
            yield Batch(block, some, voxels, place == len(groups), slab=slab)


def ahead(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield `items` as they come, produced by a thread of their own that runs up to `depth` items ahead."""
    iterator = iter(items)
    with ThreadPoolExecutor(1, "volpipe-ahead") as producer:
        waiting = deque(producer.submit(next, iterator, END) for _ in range(depth + 1))
        try:
            while (item := waiting.popleft().result()) is not END:
                waiting.append(producer.submit(next, iterator, END))
                yield item
        finally:
            producer.shutdown(cancel_futures=True)
