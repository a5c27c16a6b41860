"""Panels: captioned images beside each other in one PNG, for notebooks and for files that commands write.

Not here: what the images show, or the single pictures of a report (frames). A pixel of an image is a voxel, or a whole
number of pixels are. A row, with its fixed distances in pixels::

    +--------------------------------- MARGIN ---+
    | caption, two lines   |MARGIN| caption      |  CAPTION high
    | image                |      | image        |
    | === 100 nm           |      |              |  STRIP high, where the size of a voxel is known
    +--------------------------------------------+
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.reporting.frames import FONT, STRIP, Scale, bar_strip
from volpipe.reporting.shades import Image2D, in_colour

MARGIN, CAPTION = 8, 32  # pixels
MIN_WIDTH, MOST = 240, 1024  # pixels of an image: smaller ones are enlarged, of larger ones every k-th is drawn
CURVE_HEIGHT, CURVE_WIDTH, LINE = 240, 640, 2
FEW_POINTS = 60  # marked one by one
FRAME, RED = (200, 200, 200), (214, 39, 40)


@dataclass(frozen=True)
class Panel:
    """An image and its caption; `voxel_nm` (y, x) where the size of its voxels is known."""

    caption: str
    pixels: Image2D
    voxel_nm: tuple[float, float] | None = None


def panels_png(rows: Sequence[Sequence[Panel]], notes: Sequence[str] = (), *, most: int = MOST) -> bytes:
    """Return a PNG of `rows` of panels, with a line for each of `notes` below them.

    All are enlarged by one whole factor where the widest is narrower than MIN_WIDTH, or thinned out where one has more
    than `most` pixels along an axis.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = _at_one_scale(rows, most)
    width = max(MIN_WIDTH, *(panel.pixels.shape[1] for row in rows for panel in row)) + MARGIN
    has_bars = any(panel.voxel_nm is not None for row in rows for panel in row)
    below = MARGIN + (STRIP if has_bars else 0)
    heights = [CAPTION + max(panel.pixels.shape[0] for panel in row) + below for row in rows]
    size = (MARGIN + max(map(len, rows)) * width, MARGIN + sum(heights) + CAPTION // 2 * len(notes))
    canvas = Image.new("RGB", size, "white")
    draw, font, top = ImageDraw.Draw(canvas), ImageFont.load_default(FONT), MARGIN
    for row, height in zip(rows, heights, strict=True):
        for left, panel in zip(range(MARGIN, size[0], width), row, strict=False):
            y, (down, across) = top + CAPTION, panel.pixels.shape[:2]
            draw.text((left, top), panel.caption, "black", font, spacing=2)
            draw.rectangle((left - 1, y - 1, left + across, y + down), outline=FRAME)
            canvas.paste(Image.fromarray(in_colour(panel.pixels)), (left, y))
            if panel.voxel_nm is not None:
                bar = 255 - bar_strip(width - MARGIN, Scale(panel.voxel_nm[1]))
                canvas.paste(Image.fromarray(bar), (left, y + down + 1))
        top += height
    for number, note in enumerate(notes):
        draw.text((MARGIN, top + CAPTION // 2 * number), note, "black", font)
    file = io.BytesIO()
    canvas.save(file, format="PNG")
    return file.getvalue()


def _at_one_scale(rows: Sequence[Sequence[Panel]], most: int) -> list[list[Panel]]:
    """Return panels whose voxels all have one scale, which is that of the picture's pixels.

    Voxels are picked by their numbers: an image that is stretched first could be larger than memory.
    """
    panels = [panel for row in rows for panel in row]
    shortest = min((min(panel.voxel_nm) for panel in panels if panel.voxel_nm is not None), default=1.0)

    def repeats(panel: Panel) -> tuple[int, int]:
        y, x = panel.voxel_nm or (shortest, shortest)
        return max(1, round(y / shortest)), max(1, round(x / shortest))

    tallest, widest = (max(panel.pixels.shape[axis] * repeats(panel)[axis] for panel in panels) for axis in (0, 1))
    step = -(-max(tallest, widest) // most)
    zoom = max(1, min(-(-MIN_WIDTH // widest), most // tallest))

    def fitted(panel: Panel) -> Panel:
        y, x = (
            np.arange(-(-n * times // step) * zoom) // zoom * step // times
            for n, times in zip(panel.pixels.shape[:2], repeats(panel), strict=True)
        )
        nm = panel.voxel_nm and tuple(v * step / zoom / n for v, n in zip(panel.voxel_nm, repeats(panel), strict=True))
        return Panel(panel.caption, panel.pixels[np.ix_(y, x)], nm)

    return [list(map(fitted, row)) for row in rows]


def curve(points: Sequence[tuple[float, float]], *, low: float | None = None, marked: float | None = None) -> Image2D:
    """Return a line through `points` (x, y) with y upwards, of a fixed size.

    Args:
        low: value at the bottom; without it the smallest of the points. The largest is at the top.
        marked: an x that has a vertical line.
    """
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (CURVE_WIDTH, CURVE_HEIGHT), "white")
    draw, (xs, ys) = ImageDraw.Draw(canvas), np.array(points, np.float64).T
    bottom = ys.min() if low is None else low
    spread = np.ptp(xs) or 1.0, ys.max() - bottom or 1.0
    down = LINE + (ys.max() - ys) / spread[1] * (CURVE_HEIGHT - 1 - 2 * LINE)

    def place(x: np.ndarray | float) -> np.ndarray:
        shown: np.ndarray = LINE + (x - xs.min()) / spread[0] * (CURVE_WIDTH - 1 - 2 * LINE)
        return shown

    places = list(zip(place(xs).tolist(), down.tolist(), strict=True))
    if marked is not None:
        draw.line([(float(place(marked)), y) for y in (0, CURVE_HEIGHT)], fill=RED)
    draw.line(places, fill="black", width=LINE)
    for x, y in places if len(places) <= FEW_POINTS else ():
        draw.ellipse((x - LINE, y - LINE, x + LINE, y + LINE), fill="black")
    image: Image2D = np.asarray(canvas)
    return image
