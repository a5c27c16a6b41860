"""Windows of blocks, slab by slab: float32 arrays from stored window tensors, or the voxels of the volume that they are
cut from on the net's device; the same values either way.

Not here: torch (runner), or where windows lie (geometry.grid).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.storage.requests import InTurn
from volpipe.volumes.volume import Reader, Volume

T = TypeVar("T")
END: Any = object()  # past the last item of any type

# Decoded chunks that neighbouring blocks share. At 512³, windows of 64³ with half overlap, chunks of 64³, two workers
# fetched a chunk 5.4 times without, 2.5 times with 32 MiB, 1.8 with 64 and 1.7 with 256 (measured 2026-11-21).
CACHE_BYTES = 64 * 2**20

Place = tuple[int | slice, ...]
SlabsOf = Callable[[int], Sequence[Slab]]  # of a block


@dataclass(frozen=True)
class Voxels:
    """Voxels as they are stored, from which windows are cut: those of a slab (c, z, y, x), or windows (n, c, z, y, x).

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

    def part(self, part: slice) -> Voxels:
        """Return the same voxels with some of the windows."""
        return replace(self, places=self.places[part], inside=self.inside[part])

    def windows(self) -> np.ndarray:
        """Return the windows (n, c, z, y, x), float32, normalised."""
        parts = [self.data[place] for place in self.places]
        windows = np.empty((len(parts), *parts[0].shape), np.float32)
        for window, part in zip(windows, parts, strict=True):
            if self.normalise is None:
                window[...] = part
            else:
                self.normalise.apply(part, out=window)
        for window, inside in zip(windows, self.inside, strict=False):
            kept = window[inside].copy()
            window[...] = np.reshape(self.padding or 0, (-1, 1, 1, 1))
            window[inside] = kept
        return windows


def open_reader(volume: Volume, lattice: Lattice, session: str = "") -> Reader:
    """Return a reader of `volume`, with chunks in memory where windows overlap."""
    cache_bytes = CACHE_BYTES if any(lattice.overlap) else 0
    # In a bucket a look at a chunk in memory is a request, which costs what the memory saves.
    return volume.open(cache_bytes=cache_bytes, session=session, live=not isinstance(volume.folder, Remote))


def read_fingerprint(reader: Reader, slabs: Sequence[Slab]) -> str:
    """Return the fingerprint of the voxels that the `slabs` of a block see."""
    rolling = RollingBox(reader, [slab.seen for slab in slabs], mapped)
    for index in range(len(slabs)):
        rolling.read(index)
    return rolling.fingerprint()


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


class WindowSource(ABC):
    """Source of windows, stored or cut from the volume; `has_slabs`: the voxels of a slab are in memory as a whole."""

    lattice: Lattice
    has_slabs: ClassVar[bool] = False

    def begin(self, blocks: Sequence[int], slabs_of: SlabsOf) -> None:
        """Prepare for the slabs of `blocks`, which are asked for in their order: they may be read ahead."""
        return

    @abstractmethod
    def voxels(self, block: int, index: int, numbers: Sequence[int]) -> Voxels:
        """Return the voxels from which the windows of these numbers, in slab `index` of `block`, are cut."""

    def close(self) -> None:
        """Read nothing ahead any more."""
        return

    def fingerprint(self, block: int) -> str:
        """Return the fingerprint of the voxels of the volume that `block` was cut from; "" where none were read."""
        return ""


@dataclass
class StoredWindows(WindowSource):
    """Windows that factor wrote: one window, one chunk read, when it is needed."""

    tensors: Volume
    lattice: Lattice

    def voxels(self, block: int, index: int, numbers: Sequence[int]) -> Voxels:
        return Voxels(self.read(numbers), tuple((i,) for i in range(len(numbers))))

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the windows of these numbers, (n, c, z, y, x), float32, normalised."""
        reader = self.tensors.open()
        return np.stack([reader.read_raw((slice(n, n + 1),))[0] for n in numbers])


@dataclass
class StreamedWindows(WindowSource):
    """Windows cut from the volume: a slab's voxels are read once, mirrored at the volume's faces.

    Chunks in memory, also those of another `session`, are compared with their files. No more than two slabs are in
    memory, and of a remote volume the pieces after them that are read at a time, also those of the next blocks.
    """

    has_slabs = True
    volume: Volume
    lattice: Lattice
    normalise: Affine
    session: str = ""
    padding: tuple[float, ...] = ()  # of windows at the edge, by channel and normalised
    _slabs_of: SlabsOf = field(default=lambda block: (), init=False, repr=False)
    _expected: deque[int] = field(default_factory=deque, init=False, repr=False)  # blocks after the one being cut
    _reading: dict[int, tuple[Sequence[Slab], RollingBox]] = field(default_factory=dict, init=False, repr=False)
    _next: tuple[int, int] | None = field(default=None, init=False, repr=False)  # block and slab
    _pieces: InTurn[str] | None = field(default=None, init=False, repr=False)  # of remote slabs, in order
    _fingerprints: dict[int, str] = field(default_factory=dict, init=False, repr=False)

    def begin(self, blocks: Sequence[int], slabs_of: SlabsOf) -> None:
        self.close()
        self._expected, self._slabs_of = deque(blocks), slabs_of

    def voxels(self, block: int, index: int, numbers: Sequence[int]) -> Voxels:
        if self._next != (block, index):
            # Begin anew, with this block and those that are expected after it.
            self.close()
            while self._expected and self._expected.popleft() != block:
                pass
            _, rolling = self._read_of(block)
            if index == 0 and rolling.is_fetched:
                works = (work for number in (block, *self._expected) for work in self._read_of(number)[1].works())
                self._pieces = InTurn(works, rolling.at_once)
        self._next = None  # where it cannot be read, the next attempt begins anew
        slabs, rolling = self._read_of(block)
        data = rolling.read(index, self._pieces)
        self._next = block, index + 1
        if index == len(slabs) - 1:
            self._fingerprints[block] = rolling.fingerprint()
            del self._reading[block]
            self._next = (self._expected.popleft(), 0) if self._expected else None
        places = tuple(self._places_in(numbers, slabs[index].seen))
        return Voxels(data, places, self.normalise, tuple(self._inside(numbers)), self.padding)

    def fingerprint(self, block: int) -> str:
        return self._fingerprints[block]

    def close(self) -> None:
        self._reading.clear()
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = self._next = None

    def _read_of(self, block: int) -> tuple[Sequence[Slab], RollingBox]:
        """Return the slabs of `block`, and the box that reads their voxels one after the other."""
        if block not in self._reading:
            slabs = self._slabs_of(block)
            reader = open_reader(self.volume, self.lattice, self.session)
            self._reading[block] = slabs, RollingBox(reader, [slab.seen for slab in slabs], mapped)
        return self._reading[block]

    def _places_in(self, numbers: Sequence[int], box: Box) -> Iterator[Place]:
        """Yield where the windows of these numbers are in the voxels (c, z, y, x) of `box`."""
        for number in numbers:
            yield (slice(None), *self.lattice.window_box(number).relative_to(box.start).slices)

    def _inside(self, numbers: Sequence[int]) -> Iterator[Place]:
        """Yield the part of each of these windows that lies in the volume; nothing where no window is padded."""
        shape = self.volume.spatial_shape
        if not self.lattice.is_padded or all(w <= n for w, n in zip(self.lattice.seen, shape, strict=True)):
            return
        for number in numbers:
            box = self.lattice.window_box(number)
            yield (slice(None), *(box & Box.from_shape(shape)).relative_to(box.start).slices)


class VolumeWindows:
    """Windows cut from a volume, mirrored at its faces, in any order; the voxels of one block are in memory."""

    def __init__(self, volume: Volume, lattice: Lattice, normalise: Affine) -> None:
        self.volume, self.lattice, self.normalise = volume, lattice, normalise
        self._block, self._box, self._voxels = -1, lattice.input_box(0), np.empty(0)
        self._fingerprints: dict[int, str] = {}

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the windows of these numbers, (n, c, z, y, x), float32, normalised.

        Raises:
            VolumeError: the voxels are others than before.
        """
        windows = np.empty((len(numbers), self.volume.num_channels, *self.lattice.seen), np.float32)
        for window, number in zip(windows, numbers, strict=True):
            self._read_block(number // self.lattice.windows_per_block)
            place = self.lattice.window_box(number).relative_to(self._box.start).slices
            self.normalise.apply(self._voxels[:, *place], out=window)
        return windows

    def _read_block(self, block: int) -> None:
        """Read the voxels of `block`, unless they are in memory."""
        if block == self._block:
            return
        box = self.lattice.input_box(block)
        voxels, fingerprint = read_known(open_reader(self.volume, self.lattice), box)
        if not is_same(self._fingerprints.setdefault(block, fingerprint), fingerprint):
            raise VolumeError(f"{self.volume} changed while the windows of block {block}, voxels {box}, were cut")
        self._block, self._box, self._voxels = block, box, voxels

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as pickle has it
        return type(self), (self.volume, self.lattice, self.normalise)


@dataclass(frozen=True)
class WindowBatch:
    """Windows of one slab: their numbers, and what they are cut from, or the error of reading that."""

    block: int
    slab: Slab
    is_last: bool  # whether the slab is the last one of its block
    numbers: tuple[int, ...]
    voxels: Voxels | None
    error: Exception | None = None

    def parts(self, size: int) -> Iterator[WindowBatch]:
        """Yield it in parts of `size` windows at most, which were read."""
        assert self.voxels is not None
        for start in range(0, len(self.numbers), size):
            part = slice(start, start + size)
            yield replace(self, numbers=self.numbers[part], voxels=self.voxels.part(part))


def batches(source: WindowSource, blocks: Sequence[int], slabs_of: SlabsOf, size: int) -> Iterator[WindowBatch]:
    """Yield the windows of `blocks` in turn, slab by slab: `size` at a time, or all of a slab where that costs no more.

    The composition of batches depends on the block alone, so that a net sees the same input however blocks are
    spread over workers. A block that cannot be read yields one batch with the error, and the next block follows.
    """
    source.begin(blocks, slabs_of)
    for block in blocks:
        slabs = slabs_of(block)
        for index, numbers in _numbers_of_batches(slabs, None if source.has_slabs else size):
            slab, is_last = slabs[index], index == len(slabs) - 1
            try:
                voxels = source.voxels(block, index, numbers)
            except Exception as error:
                yield WindowBatch(block, slab, is_last, numbers, None, error)
                break
            yield WindowBatch(block, slab, is_last, numbers, voxels)


def _numbers_of_batches(slabs: Sequence[Slab], size: int | None) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the windows of each slab, `size` at a time, with the slab's number; all of it where that is None."""
    for index, slab in enumerate(slabs):
        step = size or len(slab.numbers)
        for start in range(0, len(slab.numbers), step):
            yield index, slab.numbers[start : start + step]


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
