"""What a result shows in a notebook: a picture above a table; and which slices of a box of voxels stand on it.

Not here: drawing (reporting.panels).
"""

from __future__ import annotations

import base64
import html
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Shape
from volpipe.reporting.panels import Panel, panels_png
from volpipe.volumes.storage.metadata import Lengths

SHALLOW = 8  # slices, below which a box has no xz slice worth seeing


class Drawn(ABC):
    """A result that a notebook shows as a picture, rows of panels, above a table."""

    @abstractmethod
    def panels(self) -> Iterator[list[Panel]]:
        """Yield the rows of the picture."""

    @abstractmethod
    def _html_table(self) -> str:
        """Return the table, as HTML."""

    def png(self) -> bytes:
        """Return the picture, as the bytes of a PNG."""
        return panels_png([*self.panels()])

    @property
    def has_picture(self) -> bool:
        """Whether there is something to draw."""
        return True

    def _ipython_display_(self) -> None:
        """Show the picture and, below it, the table: each once, so that a notebook's file holds no picture twice."""
        from IPython.display import display

        if self.has_picture:
            display({"image/png": self.png(), "text/plain": repr(self)}, raw=True)
        display({"text/html": self._html_table(), "text/plain": "" if self.has_picture else repr(self)}, raw=True)

    def _repr_html_(self) -> str:
        """Return both as HTML, for what shows it by this alone."""
        if not self.has_picture:
            return self._html_table()
        title, data = html.escape(repr(self).partition("\n")[0]), base64.b64encode(self.png()).decode()
        return f'<img alt="{title}" src="data:image/png;base64,{data}">{self._html_table()}'


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


def first_channel(data: np.ndarray) -> np.ndarray:
    """Return channel 0 of `data` (c, z, y, x), or `data` (z, y, x) itself."""
    return data[0] if data.ndim == 4 else data


def channel_note(data: np.ndarray) -> str:
    """Return which channel of `data` is shown, "" where it has one."""
    return f", channel 0 of {len(data)}" if data.ndim == 4 else ""
