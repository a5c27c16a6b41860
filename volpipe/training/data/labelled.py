"""Voxels whose labels are known, where these are few, such as scribbles: counted by cells, and drawn one by one.

Not here: windows about them (samples), or which labels say that nothing is known (geometry.labels). All labels where
windows may come from are read once, cell by cell; of them a number for each cell is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from volpipe.geometry.grid import Box, Grid, Index, Triple, triple
from volpipe.geometry.labels import Ignore, ignored, is_ignored
from volpipe.volumes.values import spread
from volpipe.volumes.volume import Volume

CELL = 64  # voxels of a cell along each axis, at most
NUM_SAMPLED = 16  # boxes that tell whether labels are sparse, always the same ones
SPARSE = 0.05  # share of the labels that are known, below which they are

ReadLabels = Callable[[Box], np.ndarray]  # of a box of the volume, (z, y, x)


@dataclass(frozen=True)
class LabelledVoxels:
    """The voxels of a `box` whose labels are known, outside of `closed` boxes.

    Attributes:
        read: returns the labels in a box of the volume.
        ignore: labels of which nothing is known.
        cells: of the box.
        counts: of the voxels in each cell, (z, y, x), int64.
    """

    box: Box
    closed: Sequence[Box]
    read: ReadLabels
    ignore: Ignore
    cells: Grid
    counts: np.ndarray

    @classmethod
    def count(
        cls, box: Box, closed: Sequence[Box], read: ReadLabels, ignore: Ignore, edges: Triple = (CELL,) * 3
    ) -> LabelledVoxels:
        """Return the voxels, after a look at all labels of the `box`, cell by cell of `edges`."""
        cells = Grid(box.shape, triple(min(edge, n) for edge, n in zip(edges, box.shape, strict=True)))
        empty = cls(box, closed, read, ignore, cells, np.zeros(cells.counts, np.int64))
        numbers = [int(empty._known_in(number).sum()) for number in range(len(cells))]
        return replace(empty, counts=np.array(numbers, np.int64).reshape(cells.counts))

    @property
    def num(self) -> int:
        return int(self.counts.sum())

    def draw(self, rng: np.random.Generator) -> Index:
        """Return one of the voxels, each as often as the others; there is at least one."""
        number, ends = int(rng.integers(self.num)), np.cumsum(self.counts)
        cell = int(np.searchsorted(ends, number, side="right"))
        place = np.argwhere(self._known_in(cell))[number - int(ends[cell] - self.counts.flat[cell])]
        start = self.cells.box(cell).shift(self.box.start).start
        return tuple(int(a + p) for a, p in zip(start, place, strict=True))

    def _known_in(self, cell: int) -> np.ndarray:
        """Return which voxels of a cell are known and lie outside of the closed boxes, bool."""
        box = self.cells.box(cell).shift(self.box.start)
        flags = ~is_ignored(self.read(box), self.ignore)
        for closed in self.closed:
            flags[(closed & box).relative_to(box.start).slices] = False
        return flags


def are_sparse(volume: Volume, own: Box, read: ReadLabels, ignore: Ignore) -> bool:
    """Return whether but a few of the labels are known, by some boxes of `own`, always the same.

    Args:
        own: where windows may come from, in voxels of the labels.
        read: returns the labels in a box of them.
    """
    if not ignored(volume.dtype, ignore):
        return False
    parts = [~is_ignored(read(part), ignore) for part in itertools.islice(spread(volume, own), NUM_SAMPLED)]
    return sum(int(part.sum()) for part in parts) < SPARSE * sum(part.size for part in parts)


def densest(whole: Box, shape: Triple, read: ReadLabels, ignore: Ignore) -> Box:
    """Return a box of `shape` in `whole` with many known labels: the best of those that begin at halves of its edges.

    All labels of `whole` are read once.
    """
    edges = triple(max(1, n // 2) for n in shape)
    labelled = LabelledVoxels.count(whole, (), read, ignore, edges)
    sums = labelled.counts
    for axis in range(3):  # of two cells along each axis, as far as there are two
        following = np.roll(sums, -1, axis)
        following[(slice(None),) * axis + (-1,)] = 0
        sums = sums + following
    first = np.unravel_index(int(sums.argmax()), sums.shape)
    ends = zip(first, edges, whole.start, whole.stop, shape, strict=True)
    return Box.from_shape(shape).shift(tuple(min(a + int(i) * edge, b - n) for i, edge, a, b, n in ends))
