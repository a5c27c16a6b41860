"""Indexing as in numpy: brackets become one slice or integer for each axis, and these the positions that they mean.

Not here: reading (volume).
"""

from __future__ import annotations

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.volumes.storage.tensorstore import Index


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
