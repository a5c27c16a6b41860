"""Interpolation of a coarser volume, box by box: the baseline of nets that make voxels finer.

Not here: nets. The grids share their corners: finer voxel o of an axis lies at coarse voxel (o + 1/2) / factor - 1/2. A
box has the same voxels as in the whole volume, mirrored at its faces: a cubic B-spline's weights, which reach over the
whole axis, are below a millionth from REACH voxels on and end there.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import Reader

METHODS = ("nearest", "linear", "cubic")
REACH = 12  # coarse voxels: the pole of the cubic B-spline's filter to its power is below 2e-7
POLE = np.sqrt(3.0) - 2.0  # Unser et al. 1993 (doi 10.1109/78.193220)


def interpolated(reader: Reader, box: Box, factors: tuple[int, ...], method: str) -> np.ndarray:
    """Return the voxels of `box` (z, y, x) of the finer grid, float64, from the reader of a volume of one channel.

    `factors` are finer voxels per coarse one; "cubic" is a B-spline that goes through the voxels.
    """
    reach = {"nearest": 0, "linear": 1, "cubic": REACH + 2}[method]
    reaches = [reach if factor > 1 else 0 for factor in factors]
    start = tuple(a // f - n for a, f, n in zip(box.start, factors, reaches, strict=True))
    stop = tuple(-(-b // f) + n for b, f, n in zip(box.stop, factors, reaches, strict=True))
    data: np.ndarray = reader.read_mirrored(Box(start, stop))[0].astype(np.float64)
    for axis, factor in enumerate(factors):
        if factor > 1:
            data = _finer(data, axis, factor, method, reach)
            first = box.start[axis] - (start[axis] + reach) * factor
            data = data.take(range(first, first + box.shape[axis]), axis)
    return np.asarray(data)


def _finer(data: np.ndarray, axis: int, factor: int, method: str, reach: int) -> np.ndarray:
    """Return `data` with `factor` times the voxels along `axis`, less `reach` coarse ones at both ends."""
    lines = np.moveaxis(data, axis, 0)
    count = len(lines) - 2 * reach
    finer = np.empty((count, factor, *lines.shape[1:]))
    for phase in range(factor):
        taps = weights(method, (phase + 0.5) / factor - 0.5, reach)
        finer[:, phase] = sum(taps[i] * lines[i : i + count] for i in np.flatnonzero(taps))
    return np.moveaxis(finer.reshape(count * factor, *lines.shape[1:]), 0, axis)


@lru_cache(maxsize=64)
def weights(method: str, place: float, reach: int) -> np.ndarray:
    """Return the weights of the voxels -reach..reach around one, at `place`, from -1/2 to 1/2, past its centre."""
    voxels = np.arange(-reach, reach + 1)
    if method == "nearest":
        return np.ones(1)
    if method == "linear":
        return np.asarray(np.maximum(0.0, 1 - np.abs(place - voxels)))
    # Of the B-spline that is one at voxel 0 and zero at all others, by its coefficients -6 p / (1 - p²) p^|k|.
    inner = np.arange(-REACH, REACH + 1)
    coefficients = -6 * POLE / (1 - POLE**2) * POLE ** np.abs(inner)
    d = np.abs(place - (voxels[:, None] + inner))
    splines = np.where(d < 1, 2 / 3 - d**2 + d**3 / 2, np.maximum(0.0, 2 - d) ** 3 / 6)
    return np.asarray(splines @ coefficients)
