"""Slices of stored volumes for a report: which voxels, read with few chunks, and which of them are missing.

Not here: their greys and colours (shades), or pictures (frames, comparison). Boxes are in voxels (z, y, x). Of each
volume three slices are read that meet in one voxel; a box that would touch too many chunks loses the outermost ones::

    chunks    |----|----|----|----|----|
    wanted        |----------x----------|          five chunks along this axis, x the middle
    read           |---------x------|              four
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Box, Grid, Index, Shape, Triple, triple
from volpipe.units import size
from volpipe.volumes.volume import Reader, Volume

PLANES = {"xy": 0, "xz": 1, "yz": 2}  # and the axis that each cuts; of the other two the first goes down
MOST_BYTES = 20 * 2**20  # of decoded chunks that the three slices of a volume touch
REMOTE_CHUNKS = 27  # that they touch of a volume in a bucket or on a web server, where each is a request
MOST_CHANNELS = 3  # that are read, to be shown as red, green and blue

IsMissing = Callable[[Box], np.ndarray | None]  # of each voxel of a box whether it is not written, None where all are


@dataclass(frozen=True)
class Patch:
    """Voxels of a box.

    Attributes:
        data: (c, z, y, x), at most MOST_CHANNELS channels; zeros where they are not known.
        is_known: (z, y, x), False where a voxel is not written yet or cannot be read.
        problem: why the first of those that cannot be read cannot, "" where all can.
    """

    box: Box
    data: np.ndarray
    is_known: np.ndarray
    problem: str = ""

    def crop(self, box: Box) -> Patch:
        """Return the part in `box`, which lies in the patch."""
        inner = box.relative_to(self.box.start).slices
        return Patch(box, self.data[:, *inner], self.is_known[inner], self.problem)

    def values(self, channel: int | None = None) -> np.ndarray:
        """Return the values that are known and finite, (n,), of a channel, or of all that were read."""
        known = (self.data if channel is None else self.data[channel : channel + 1])[:, self.is_known]
        finite: np.ndarray = known[np.isfinite(known)] if np.issubdtype(known.dtype, np.floating) else known.ravel()
        return finite


IsGone = Callable[[Patch], np.ndarray | None]  # of each voxel of a patch, None where none is
GONE = "files that the run wrote are gone; `volpipe verify` names them all"


@dataclass
class Sight:
    """A volume as a report sees it: within MOST_BYTES of its chunks, and REMOTE_CHUNKS of one that is far away.

    Attributes:
        most_bytes: of chunks that three slices may touch, decoded.
        is_missing: tells which voxels are not written; None where all are.
        is_gone: tells which of those that were read as zeros were written otherwise, and are gone.
    """

    volume: Volume
    is_missing: IsMissing | None = None
    is_gone: IsGone | None = None
    most_bytes: int = MOST_BYTES
    _held: Patch | None = field(default=None, init=False, repr=False)
    _problem: str = field(default="", init=False, repr=False)  # a volume that cannot be opened is not read again

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, decoded, as often as it is read for the channels that are shown."""
        volume = self.volume
        return math.prod(volume.chunks) * volume.dtype.itemsize * min(volume.num_channels, MOST_CHANNELS)

    @property
    def most_chunks(self) -> int:
        """How many chunks the three slices may touch."""
        most = self.most_bytes // self.chunk_bytes
        return most if isinstance(self.volume.folder, Path) else min(most, REMOTE_CHUNKS)

    def within_reach(self, whole: Box, at: Index) -> Box:
        """Return the part of `whole` around the voxel `at` whose slices may be read: of huge chunks a single one.

        Raises:
            VolumeError: a chunk alone is too large.
        """
        if 3 * self.chunk_bytes <= self.most_bytes:
            return whole
        if self.chunk_bytes > self.most_bytes:
            raise VolumeError(
                f"{self.volume} has chunks of {size(self.chunk_bytes)}, of which a report reads none: it reads up to "
                f"{size(self.most_bytes)} of a volume"
            )
        grid = Grid(self.volume.spatial_shape, self.volume.spatial_chunks)
        return grid.box(next(grid.touching(voxel_at(at)))) & whole

    def affordable(self, box: Box, axis: int, at: Index) -> Box:
        """Return the part around the voxel `at` of a slice across `axis` whose chunks may be read."""
        return fewer_chunks(box, self.volume.spatial_chunks, self.most_chunks // 3, axis, at)

    def hold(self, whole: Box) -> None:
        """Read `whole`, which a single huge chunk holds, at once: a chunk is read for each slice otherwise."""
        if 3 * self.chunk_bytes > self.most_bytes:
            self._held = self.read(whole)

    def read(self, box: Box) -> Patch:
        """Return the voxels of `box`; what is damaged or not written is not known."""
        if self._held is not None:
            return self._held.crop(box)
        try:
            patch = self._unread(box) if self._problem else read_known(self.volume, box)
        except VolumeError as error:
            self._problem = str(error)
            patch = self._unread(box)
        gone = None if self.is_gone is None else self.is_gone(patch)
        if gone is not None:
            patch = replace(patch, is_known=patch.is_known & ~gone, problem=patch.problem or GONE)
        missing = None if self.is_missing is None else self.is_missing(box)
        return patch if missing is None else replace(patch, is_known=patch.is_known & ~missing)

    def _unread(self, box: Box) -> Patch:
        shape = (min(self.volume.num_channels, MOST_CHANNELS), *box.shape)
        return Patch(box, np.zeros(shape, self.volume.dtype), np.zeros(box.shape, bool), self._problem)


def read_known(volume: Volume, box: Box) -> Patch:
    """Return the voxels of `box`, chunk by chunk where not all can be read; those that cannot be read are not known.

    Raises:
        VolumeError: it cannot be opened, or its server does not answer.
    """
    channels = [channel.open() for channel in _shown_channels(volume)]
    try:
        return Patch(box, _read_channels(channels, box), np.ones(box.shape, bool))
    except RemoteError:
        raise
    except VolumeError as error:
        data, is_known = np.zeros((len(channels), *box.shape), volume.dtype), np.zeros(box.shape, bool)
        grid = Grid(volume.spatial_shape, volume.spatial_chunks)
        for part in (grid.box(number) & box for number in grid.touching(box)):
            inner = part.relative_to(box.start).slices
            try:
                data[:, *inner] = _read_channels(channels, part)
            except RemoteError:
                raise
            except VolumeError:
                continue
            is_known[inner] = True
        return Patch(box, data, is_known, str(error))


def _read_channels(channels: list[Reader], box: Box) -> np.ndarray:
    return np.concatenate([channel.read(box) for channel in channels])


def _shown_channels(volume: Volume) -> Iterator[Volume]:
    """Yield the channels that are shown, each as a volume; of a single one the volume itself."""
    if volume.num_channels == 1:
        yield volume
        return
    for number in range(min(volume.num_channels, MOST_CHANNELS)):
        yield replace(volume, view=replace(volume.view, channel=number))


def voxel_at(at: Index) -> Box:
    """Return the box of one voxel."""
    return Box(at, tuple(a + 1 for a in at))


def slice_at(box: Box, axis: int, at: Index) -> Box:
    """Return the slice of `box` across `axis` that the voxel `at` is in."""
    return box.along(axis, at[axis], at[axis] + 1)


def part_around(whole: Box, at: Index, sizes: Shape) -> Box:
    """Return the part of `whole` of `sizes`, as far as it has as many voxels, with the voxel `at` in its middle.

    It is moved where it would leave `whole`.
    """
    shape = [min(n, m) for n, m in zip(whole.shape, sizes, strict=True)]
    start = tuple(min(max(a, c - n // 2), b - n) for a, b, c, n in zip(whole.start, whole.stop, at, shape, strict=True))
    return Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def middle_of(box: Box) -> Index:
    """Return the voxel in the middle of `box`."""
    return tuple((a + b) // 2 for a, b in zip(box.start, box.stop, strict=True))


def num_chunks(box: Box, chunks: Triple) -> int:
    """Return how many chunks `box` touches."""
    return math.prod((b - 1) // c - a // c + 1 for a, b, c in zip(box.start, box.stop, chunks, strict=True))


def fewer_chunks(box: Box, chunks: Triple, most: int, axis: int, at: Index) -> Box:
    """Return the part around the voxel `at` of `box`, a slice across `axis`, that touches at most `most` chunks.

    It is as thick as it was, whatever that takes.
    """
    start, stop = list(box.start), list(box.stop)
    while True:
        counts = [(b - 1) // c - a // c + 1 for a, b, c in zip(start, stop, chunks, strict=True)]
        i = max((i for i in range(3) if i != axis), key=lambda i: counts[i])
        if math.prod(counts) <= max(1, most) or counts[i] == 1:
            return Box(tuple(start), tuple(stop))
        own, first, last = at[i] // chunks[i], start[i] // chunks[i], (stop[i] - 1) // chunks[i]
        if own == last or (own > first and at[i] - start[i] > stop[i] - at[i]):
            start[i] = (first + 1) * chunks[i]
        else:
            stop[i] = last * chunks[i]


def middle_of_done(grid: Grid, done: np.ndarray) -> Index:
    """Return the voxel in the middle of the cells of `grid` that are done, a flag for each, or of the nearest of these.

    It is the middle of the grid where none is, or all are.
    """
    flags = done.reshape(grid.counts)
    if not flags.any():
        flags = np.ones_like(flags)
    sides = [np.flatnonzero(flags.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    box = Box(tuple(int(s[0]) for s in sides), tuple(int(s[-1]) + 1 for s in sides)).scaled(grid.cell)
    middle = middle_of(box & Box.from_shape(grid.shape))
    cell = tuple(m // c for m, c in zip(middle, grid.cell, strict=True))
    if flags[cell]:
        return middle
    places = np.argwhere(flags)
    nearest = places[np.square(places - cell).sum(axis=1).argmin()]
    return middle_of(grid.box(grid.number(tuple(nearest.tolist()))))


def flat(data: np.ndarray, axis: int) -> np.ndarray:
    """Return a slab `data` (…, z, y, x) across `axis` as its middle slice (…, down, across)."""
    along = data.ndim - 3 + axis
    image: np.ndarray = data.take(data.shape[along] // 2, along)
    return image


def averaged(data: np.ndarray, factor: Triple) -> np.ndarray:
    """Return the means, float64, of boxes of `factor` voxels of `data` (z, y, x), whose shape is a multiple of it."""
    (a, b, c), (z, y, x) = factor, data.shape
    means: np.ndarray = data.reshape(z // a, a, y // b, b, x // c, c).mean(axis=(1, 3, 5), dtype=np.float64)
    return means


def inside(box: Box, factor: Triple) -> Box:
    """Return the coarser voxels, `factor` finer ones each, that lie whole in `box`; at least the first that it meets.

    In the direction of no axis more than `box` has are left out.
    """
    start = triple(-(-a // f) for a, f in zip(box.start, factor, strict=True))
    stop = triple(b // f for b, f in zip(box.stop, factor, strict=True))
    pairs = [
        (a, b) if a < b else (s // f, s // f + 1) for a, b, s, f in zip(start, stop, box.start, factor, strict=True)
    ]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def missing_in(shards: Grid, is_missing: Callable[[int], bool]) -> IsMissing:
    """Return a function: which voxels of a box are in a shard that is missing."""

    def mask(box: Box) -> np.ndarray | None:
        boxes = [shards.box(number) & box for number in shards.touching(box) if is_missing(number)]
        flags = np.zeros(box.shape, bool) if boxes else None
        for part in boxes:
            assert flags is not None
            flags[part.relative_to(box.start).slices] = True
        return flags

    return mask


def gone_in(shards: Grid, is_gone: Callable[[int], bool]) -> IsGone:
    """Return a function: which voxels of a patch are in a shard whose files are gone, so that they read as zeros.

    Only of shards whose voxels are all zero is asked.
    """

    def mask(patch: Patch) -> np.ndarray | None:
        def is_zero(number: int) -> bool:
            inner = (shards.box(number) & patch.box).relative_to(patch.box.start).slices
            return not patch.data[:, *inner].any() and is_gone(number)

        return missing_in(shards, is_zero)(patch.box)

    return mask
