"""Affinities: whether a voxel and its neighbour at a fixed offset are of one object, as segmentation nets predict it.

Not here: training to them (samples, losses), or objects made from them (segmentation.driver).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from volpipe.geometry.grid import Triple

Offset = Triple

# To the neighbour before, then farther: so that a gap of a voxel in a membrane does not join two objects.
OFFSETS: tuple[Offset, ...] = tuple(offset for n in (1, 3, 9) for offset in ((-n, 0, 0), (0, -n, 0), (0, 0, -n)))


def name_of(offset: Offset) -> str:
    """Return the name of the affinities at `offset`: "z-1", or "z-1 x+3" along several axes."""
    return " ".join(f"{axis}{step:+d}" for axis, step in zip("zyx", offset, strict=True) if step)


def affinities(labels: np.ndarray, offsets: Sequence[Offset] = OFFSETS) -> tuple[np.ndarray, np.ndarray]:
    """Return the affinities of `labels` (z, y, x), and where they are known: two arrays (offset, z, y, x) of bool.

    Channel k at a voxel is true where that voxel and the one at `offsets[k]` from it have one label other than 0. It
    is not known where that other voxel lies outside the array.
    """
    near = np.zeros((len(offsets), *labels.shape), bool)
    known = np.zeros_like(near)
    for channel, offset in enumerate(offsets):
        here = tuple(slice(max(0, -o), min(n, n - o)) for o, n in zip(offset, labels.shape, strict=True))
        there = tuple(slice(max(0, o), min(n, n + o)) for o, n in zip(offset, labels.shape, strict=True))
        if any(s.start >= s.stop for s in here):
            continue
        near[channel][here] = (labels[here] == labels[there]) & (labels[here] != 0)
        known[channel][here] = True
    return near, known
