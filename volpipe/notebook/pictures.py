"""Pictures for notebooks: captioned slices with scale bars, and curves, as PNG; drawn by matplotlib without pyplot.

Not here: which voxels are shown (slices), or pictures that commands write (evaluation.pictures).

A pixel of a panel is a voxel, or a whole number of pixels are; no panel has more than MAX_HEIGHT by MAX_WIDTH::

    +--------------------------------- MARGIN ---+
    | caption (two lines)  |MARGIN| caption      |  CAPTION high
    | image                |      | image        |
    | bar 100 nm           |      |              |  BAR high
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.reporting.shades import bar_nm, length_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = np.ndarray[Any, Any]  # (y, x) grey or (y, x, 3) red, green, blue; uint8
Lengths2D = tuple[float, float]  # (y, x), nm

MARGIN, CAPTION, BAR = 8, 32, 18  # pixels
FRAME = 200  # grey of the line around an image
FONT = 7.5  # points
DPI = 100
MIN_WIDTH = 240  # of an image: all are enlarged by one whole factor where they are narrower
MAX_WIDTH, MAX_HEIGHT = 512, 1024  # of an image: of larger ones every k-th pixel is drawn, along both axes
BAR_SHARE = 0.3  # of an image's width, at most
NO_MATPLOTLIB = "pictures need matplotlib, which is not installed; pip install 'volpipe[notebook]'"


@dataclass(frozen=True)
class Panel:
    """An image and its caption; `voxel_nm` (y, x) where the size of its voxels is known."""

    caption: str
    pixels: Pixels
    voxel_nm: Lengths2D | None = None


@dataclass(frozen=True)
class Curve:
    """A line through values at whole numbers, and a caption; a vertical line marks 0."""

    caption: str
    at: Sequence[float]
    values: Sequence[float]
    across: str


def panels_png(rows: Sequence[Sequence[Panel]]) -> bytes:
    """Return a PNG of `rows` of panels.

    Raises:
        VolpipeError: matplotlib is not installed.
    """
    panels = [panel for row in rows for panel in row]
    shortest = min((min(panel.voxel_nm) for panel in panels if panel.voxel_nm is not None), default=1.0)
    tallest, widest = (
        max(panel.pixels.shape[axis] * _repeats(panel, shortest)[axis] for panel in panels) for axis in (0, 1)
    )
    step = max(1, -(-widest // MAX_WIDTH), -(-tallest // MAX_HEIGHT))
    zoom = max(1, min(-(-MIN_WIDTH // widest), MAX_HEIGHT // tallest))
    rows = [[_fitted(panel, shortest, step, zoom) for panel in row] for row in rows]
    heights = [max(panel.pixels.shape[0] for panel in row) for row in rows]
    width = max(MIN_WIDTH, *(panel.pixels.shape[1] for row in rows for panel in row))
    total = (
        MARGIN + sum(CAPTION + height + BAR + MARGIN for height in heights),
        MARGIN + max(map(len, rows)) * (width + MARGIN),
    )
    with _figure(*total) as figure:
        top = MARGIN
        for row, height in zip(rows, heights, strict=True):
            for column, panel in enumerate(row):
                _draw(figure, panel, total, top, MARGIN + column * (width + MARGIN))
            top += CAPTION + height + BAR + MARGIN
        return _png(figure)


def curves_png(curves: Sequence[Curve]) -> bytes:
    """Return a PNG of `curves` side by side, from 0 upwards.

    Raises:
        VolpipeError: matplotlib is not installed.
    """
    with _figure(280, 320 * len(curves)) as figure:
        for i, curve in enumerate(curves):
            axes = figure.add_subplot(1, len(curves), i + 1)
            axes.plot(curve.at, curve.values, color="black", marker=".", linewidth=1)
            axes.axvline(0.0, color="tab:red", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.set_title(curve.caption, fontsize=FONT)
            axes.set_xlabel(curve.across, fontsize=FONT)
            axes.tick_params(labelsize=FONT)
        figure.tight_layout()
        return _png(figure)


class Drawn(ABC):
    """A result that a notebook shows as a picture above a table; as the table alone where matplotlib is missing."""

    @abstractmethod
    def png(self) -> bytes:
        """Return the picture, as the bytes of a PNG.

        Raises:
            VolpipeError: matplotlib is not installed.
        """

    @abstractmethod
    def _table(self) -> str:
        """Return the table, as HTML."""

    def _ipython_display_(self) -> None:
        """Show the picture and, below it, the table: each once, so that a notebook's file holds no picture twice."""
        from IPython.display import display

        picture = self._repr_png_()
        if picture is not None:
            display({"image/png": picture, "text/plain": repr(self)}, raw=True)
        display({"text/html": self._repr_html_() if picture is None else self._table(), "text/plain": ""}, raw=True)

    def _repr_png_(self) -> bytes | None:
        with contextlib.suppress(MissingMatplotlibError):
            return self.png()
        return None

    def _repr_html_(self) -> str:
        title = html.escape(repr(self).partition("\n")[0])
        try:
            data = base64.b64encode(self.png()).decode()
            picture = f'<img alt="{title}" src="data:image/png;base64,{data}">'
        except MissingMatplotlibError as error:
            picture = f"<p>{html.escape(str(error))}</p>"
        return picture + self._table()


class DrawnInPanels(Drawn):
    """A result whose picture is rows of panels."""

    @abstractmethod
    def panels(self) -> Iterator[list[Panel]]:
        """Yield the rows of the picture."""

    def png(self) -> bytes:
        """Return the picture; see `Drawn`."""
        return panels_png([*self.panels()])


class MissingMatplotlibError(VolpipeError, ImportError):
    """A picture is asked for, and matplotlib is not installed."""


@contextlib.contextmanager
def _figure(height: int, width: int) -> Iterator[Figure]:
    """Yield a white figure of so many pixels; pyplot does not know it, and the notebook's own style does not count."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlibError(NO_MATPLOTLIB) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})  # type: ignore[no-untyped-call]  # theirs
    return stream.getvalue()


def _draw(figure: Figure, panel: Panel, total: tuple[int, int], top: int, left: int) -> None:
    """Draw `panel` into a figure of `total` pixels (y, x), its caption at `top` and `left`."""
    height, width = panel.pixels.shape[:2]
    colour = panel.pixels if panel.pixels.ndim == 3 else np.repeat(panel.pixels[..., None], 3, axis=-1)
    figure.text(left / total[1], 1 - top / total[0], panel.caption, fontsize=FONT, va="top", ha="left")
    bottom = total[0] - top - CAPTION - height
    figure.figimage(np.full((height + 2, width + 2, 3), FRAME, np.uint8), left - 1, bottom - 1, origin="upper")
    figure.figimage(colour, left, bottom, origin="upper")
    if panel.voxel_nm is None:
        return
    length = bar_nm(BAR_SHARE * width * panel.voxel_nm[1])
    bar = np.zeros((3, max(1, round(length / panel.voxel_nm[1])), 3), np.uint8)
    figure.figimage(bar, left, bottom - 10, origin="upper")
    place = (left + bar.shape[1] + 4) / total[1], (bottom - 8) / total[0]
    figure.text(*place, length_text(length), fontsize=FONT, va="center", ha="left")


def _repeats(panel: Panel, shortest: float) -> tuple[int, int]:
    """Return how many pixels of `shortest` nm a voxel covers, along y and x: whole numbers, and one scale for all."""
    y, x = panel.voxel_nm or (shortest, shortest)
    return max(1, round(y / shortest)), max(1, round(x / shortest))


def _fitted(panel: Panel, shortest: float, step: int, zoom: int) -> Panel:
    """Return `panel` in pixels of `shortest` nm, of which every `step`-th is drawn, `zoom` times as large.

    Voxels are picked by their numbers: an image that is stretched first could be larger than memory.
    """
    repeats = _repeats(panel, shortest)
    y, x = (
        np.arange(-(-n * times // step) * zoom) // zoom * step // times
        for n, times in zip(panel.pixels.shape[:2], repeats, strict=True)
    )
    scale = [step / zoom / times for times in repeats]
    nm = None if panel.voxel_nm is None else (panel.voxel_nm[0] * scale[0], panel.voxel_nm[1] * scale[1])
    return Panel(panel.caption, panel.pixels[np.ix_(y, x)], nm)
