"""Whether thin lines of an image, such as membranes, are darker or brighter than what they part.

Not here: grey levels as such (values): how they are distributed depends on how much of a volume is resin or cytoplasm,
and of real FIB-SEM it is as often skewed to either side. Second derivatives of slices tell lines from areas.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Triple
from volpipe.volumes.values import FEWEST_BOXES, SECONDS, spread
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

PATCH: Triple = (1, 128, 128)  # voxels of a slice that is looked at, at most; up to 27 of them
LEAST_EDGE = 16  # of a patch
LEAST_VOXELS = 20_000  # of all patches
POWER = 3  # of second derivatives: what stands out counts


def line_contrast(volume: Volume, within: Box | None = None) -> float | None:
    """Return by how much dark lines outweigh bright ones in slices of `volume`, -1 to 1; None where nothing tells.

    It is 0 for noise. Of real EM (FIB-SEM of medulla, two of gala's volumes, ssTEM) it was 0.17 to 0.36, of parts of
    100 voxels of these at least 0.05, of volpipe.synthetic 0.6, and of each inverted the same below 0 (2026-11).
    """
    box, stop = within or Box.from_shape(volume.spatial_shape), time.monotonic() + SECONDS
    most = FEWEST_BOXES if "://" in volume.path else None
    total, num = np.zeros(2), 0
    for number, part in enumerate(spread(volume, box, PATCH)):
        if number == most or (number >= FEWEST_BOXES and time.monotonic() > stop):
            break
        if min(part.shape[1:]) < LEAST_EDGE:
            continue
        try:
            patch = volume.open(live=True).read(part, num_channels=1)[0, 0].astype(np.float64)
        except (VolpipeError, OSError) as error:  # workers name what they cannot read
            log.info("slice %s of %s is not looked at: %s", part, volume, error)
            continue
        if np.isfinite(patch).all() and (deviation := float(patch.std())) > 0:
            total += _lines(patch / deviation)
            num += patch.size
    whole = float(total.sum())
    return None if num < LEAST_VOXELS or not whole else float(total[0] - total[1]) / whole


def _lines(patch: np.ndarray) -> np.ndarray:
    """Return (2,): the strength of dark and of bright lines in `patch` (y, x)."""
    smooth = _smoothed(_smoothed(patch))
    along_y, along_x = np.gradient(smooth)
    (yy, xy), xx = np.gradient(along_y), np.gradient(along_x, axis=1)
    mean, spread = (yy + xx) / 2, np.sqrt(((yy - xx) / 2) ** 2 + xy**2)
    least, greatest = mean - spread, mean + spread  # eigenvalues of the Hessian
    dark, bright = greatest - np.abs(least), -least - np.abs(greatest)
    return np.array([float((np.clip(side, 0, None) ** POWER).sum()) for side in (dark, bright)])


def _smoothed(patch: np.ndarray) -> np.ndarray:
    """Return the means of 3 × 3 voxels that lie in `patch`."""
    rows = patch[:-2] + patch[1:-1] + patch[2:]
    result: np.ndarray = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
    return result
