"""Scan: which cells of a block are wanted, as mask and voxels say; a bit for each window.

Not here: what follows from it (wanted), or how a mask lies over a volume (region).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from volpipe.errors import PlanError
from volpipe.grid import Box
from volpipe.plan import Plan
from volpipe.volume import Volume
from volpipe.wanted import Range, any_within, crossed


def scan(plan: Plan, volume: Volume, mask: Volume | None, block: int) -> str:
    """Return the wanted cells of `block`, packed, in hexadecimal digits; "" where there are none.

    A cell is wanted if the region of interest and a voxel of the mask that is not zero touch it, and if its window,
    halo included, is not empty.
    """
    cores = _cores(plan, block)
    cells = crossed([a < b for a, b in along] for along in cores)
    if mask is not None and cells.any():
        cells &= _masked(plan, mask, cores)
    empty = plan.recipe.input.empty
    if empty == "missing" and cells.any():
        cells &= _stored(plan, volume, block, cells)
    elif empty is not None and cells.any():
        cells &= _filled(plan, volume, block, cells, float(empty))
    return np.packbits(cells).tobytes().hex() if cells.any() else ""


def _cores(plan: Plan, block: int) -> list[list[Range]]:
    """Return the voxels of the volume, per axis, that each window of `block` has as its core within the region."""
    lattice, cores = plan.lattice, []
    for axis, (first, last) in enumerate(_sides(plan.blocks.box(block))):
        stride, (low, high) = lattice.stride[axis], (corner[axis] for corner in plan.roi)
        cores.append([(max(a, low), min(a + stride, last, high)) for a in range(first, last, stride)])
    return cores


def _masked(plan: Plan, mask: Volume, cores: Sequence[Sequence[Range]]) -> np.ndarray:
    """Return for each combination of `cores` whether the mask has a voxel over it that is not zero."""
    laid = plan.mask
    assert laid is not None
    over = [[laid.under(axis, a, b) for a, b in along] for axis, along in enumerate(cores)]
    box = Box(tuple(min(a for a, _ in along) for along in over), tuple(max(b for _, b in along) for along in over))
    data = mask.open().read(box)[0]
    if data.dtype.kind == "f" and np.isnan(data).any():
        raise PlanError(f"mask {mask} has NaN in its box {box}, which is neither wanted nor not; make it 0 or 1")
    inner = [[(a - start, b - start) for a, b in along] for along, start in zip(over, box.start, strict=True)]
    return any_within(data != 0, inner)


def _filled(plan: Plan, volume: Volume, block: int, cells: np.ndarray, value: float) -> np.ndarray:
    """Return for each window of `block`, as far as `cells` ask for it, whether it holds anything but `value`."""
    lattice = plan.lattice
    sides = [np.flatnonzero(cells.any(axis=tuple({0, 1, 2} - {axis}))) for axis in range(3)]
    origin = _origin(plan, block)
    reach = [(int(s[0]) * t, int(s[-1]) * t + w) for s, t, w in zip(sides, lattice.stride, lattice.window, strict=True)]
    box = Box(tuple(a for a, _ in reach), tuple(b for _, b in reach)).shift(origin)
    filled = (volume.open().read_mirrored(box) != value).any(axis=0)
    ranges = []
    for n, stride, window, (start, _) in zip(cells.shape, lattice.stride, lattice.window, reach, strict=True):
        ranges.append([(max(0, i * stride - start), max(0, i * stride + window - start)) for i in range(n)])
    return any_within(filled, ranges)


def _stored(plan: Plan, volume: Volume, block: int, cells: np.ndarray) -> np.ndarray:
    """Return for each window of `block`, as far as `cells` ask for it, whether a chunk under it is stored."""
    reader, lattice, origin = volume.open(), plan.lattice, _origin(plan, block)
    stored = np.zeros_like(cells)
    whole = ((n - 1) * s + w for n, s, w in zip(cells.shape, lattice.stride, lattice.window, strict=True))
    if not reader.is_stored(Box.of(tuple(whole)).shift(origin)):
        return stored
    for place in np.argwhere(cells).tolist():
        start = tuple(o + i * s for o, i, s in zip(origin, place, lattice.stride, strict=True))
        box = Box(start, tuple(a + w for a, w in zip(start, lattice.window, strict=True)))
        stored[tuple(place)] = reader.is_stored(box)
    return stored


def _origin(plan: Plan, block: int) -> tuple[int, ...]:
    """Return where the window of the first cell of `block` starts."""
    return tuple(a - m for a, m in zip(plan.blocks.box(block).start, plan.lattice.margin, strict=True))


def _sides(box: Box) -> list[Range]:
    return list(zip(box.start, box.stop, strict=True))
