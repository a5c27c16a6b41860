"""Slices of boxes of voxels as panels: the middle xy slice, and the middle xz slice of boxes that are deep enough.

Not here: drawing them (pictures).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Shape
from volpipe.notebook.pictures import Panel
from volpipe.reporting.shades import diverge, grey
from volpipe.volumes.storage.metadata import Lengths

SHALLOW = 8  # slices, below which a box has no xz slice worth seeing


@dataclass(frozen=True)
class Slice:
    """A slice of a box: its name, its place in an array (z, y, x), and the axes of its rows and columns."""

    name: str
    index: tuple[int | slice, ...]
    axes: tuple[int, int]

    def nm(self, voxel_size_nm: Lengths | None) -> tuple[float, float] | None:
        """Return the lengths of a voxel along rows and columns, where they are known."""
        return None if voxel_size_nm is None else (voxel_size_nm[self.axes[0]], voxel_size_nm[self.axes[1]])


def slices_of(shape: Shape, start: Shape) -> Iterator[Slice]:
    """Yield the slices to show of a box of `shape` (z, y, x), which begins at voxel `start`."""
    z, y = shape[0] // 2, shape[1] // 2
    yield Slice(f"xy at z {start[0] + z}", (z, slice(None), slice(None)), (1, 2))
    if shape[0] >= SHALLOW:
        yield Slice(f"xz at y {start[1] + y}", (slice(None), y, slice(None)), (0, 2))


def grey_panel(caption: str, image: np.ndarray, limits: tuple[float, float], nm: tuple[float, float] | None) -> Panel:
    """Return `image` (y, x) in greys; what is not finite is red."""
    finite = np.isfinite(image)
    pixels = grey(np.where(finite, image, limits[0]), limits)
    if not finite.all():
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
        pixels[~finite] = (255, 0, 0)
    return Panel(caption, pixels, nm)


def error_panel(caption: str, change: np.ndarray, largest: float, nm: tuple[float, float] | None) -> Panel:
    """Return differences (y, x) from blue, -largest, over white, 0, to red; what is not finite is black."""
    finite = np.isfinite(change)
    pixels = diverge(np.where(finite, change, 0.0), largest)
    pixels[~finite] = 0
    return Panel(caption, pixels, nm)


def first_channel(data: np.ndarray) -> np.ndarray:
    """Return channel 0 of `data` (c, z, y, x), or `data` (z, y, x) itself."""
    return data[0] if data.ndim == 4 else data


def channel_note(data: np.ndarray) -> str:
    """Return which channel of `data` is shown, "" where it has one."""
    return f", channel 0 of {len(data)}" if data.ndim == 4 else ""
