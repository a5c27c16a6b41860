"""Indexing as in numpy: brackets become one slice or integer for each axis, and these positions, in chunks and files.

Not here: reading (volume).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box

Index = tuple[slice | int, ...]


def plain_index(index: object, shape: tuple[int, ...]) -> Index:
    """Return a numpy index as one slice (not negative, step above zero) or integer for each axis."""
    entries: list[object] = list(index) if isinstance(index, tuple) else [index]
    if entries.count(Ellipsis) > 1 or len(entries) - entries.count(Ellipsis) > len(shape):
        raise IndexError(f"index {index} has too many axes for shape {shape}")
    missing = len(shape) - len(entries) + entries.count(Ellipsis)
    at = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    full = entries[:at] + [slice(None)] * missing + entries[at + 1 :]
    return tuple(_plain_axis(entry, n) for entry, n in zip(full, shape, strict=True))


def ranges(index: Index, shape: tuple[int, ...]) -> list[range]:
    """Return the positions along each axis of an array of `shape` that a plain `index` means."""
    return [range(i, i + 1) if isinstance(i, int) else range(*i.indices(n)) for i, n in zip(index, shape, strict=True)]


def bounds(index: Index, shape: tuple[int, ...]) -> Box:
    """Return the box around the positions that a plain `index` of an array of `shape` means."""
    positions = [along or range(0) for along in ranges(index, shape)]
    return Box(tuple(along.start for along in positions), tuple(along[-1] + 1 if along else 0 for along in positions))


def pieces(along: range, length: int) -> dict[int, tuple[slice, slice]]:
    """Return the chunks of `length` that the positions `along` an axis touch, by their numbers.

    Each has two slices of what it shares with the positions: one of the positions, and one of the axis.
    """
    places, at = {}, 0
    while at < len(along):
        number = along[at] // length
        stop = at + len(range(along[at], min((number + 1) * length, along.stop), along.step))
        places[number] = slice(at, stop), slice(along[at], along[stop - 1] + 1, along.step)
        at = stop
    return places


@dataclass(frozen=True)
class ChunkedIndex:
    """An index of an array, cut by chunks: along each stored axis, the chunks that it touches, as `pieces` has them."""

    axes: tuple[dict[int, tuple[slice, slice]], ...]
    num_per_file: tuple[int, ...]  # chunks along each axis

    @classmethod
    def of(cls, index: Index, shape: tuple[int, ...], chunks: tuple[int, ...], units: tuple[int, ...]) -> ChunkedIndex:
        """Return a plain `index` of an array of `shape`, cut by its chunks; `units` are the voxels of its files."""
        along = zip(ranges(index, shape), chunks, strict=True)
        num_per_file = tuple(unit // chunk for unit, chunk in zip(units, chunks, strict=True))
        return cls(tuple(pieces(positions, chunk) for positions, chunk in along), num_per_file)

    def units(self) -> list[tuple[int, ...]]:
        """Return the files that the index touches, by their places in the grid of files."""
        axes = zip(self.axes, self.num_per_file, strict=True)
        return list(itertools.product(*(dict.fromkeys(i // n for i in axis) for axis, n in axes)))

    def chunks_in(self, unit: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the chunks that the index touches in the file at `unit`."""
        axes = zip(self.axes, unit, self.num_per_file, strict=True)
        return list(itertools.product(*([i for i in axis if i // n == u] for axis, u, n in axes)))

    def places(self, chunk: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return two slices of what is read of `chunk`: of the result, and of the array."""
        both = [axis[i] for axis, i in zip(self.axes, chunk, strict=True)]
        return tuple(place for place, _ in both), tuple(place for _, place in both)


def _plain_axis(entry: object, n: int) -> slice | int:
    if isinstance(entry, slice):
        start, stop, step = entry.indices(n)
        if step < 1:
            raise IndexError(f"step {step} is not supported; reverse what was read")
        return slice(start, max(start, stop), step)
    if isinstance(entry, int | np.integer) and not isinstance(entry, bool):
        if not -n <= entry < n:
            raise IndexError(f"index {entry} is outside an axis of {n}")
        return int(entry) % n
    raise IndexError(f"{entry!r} is not supported; use slices and integers")
