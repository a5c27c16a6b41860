"""Pictures for people: captioned panels in one PNG, an output beside its input.

Not a viewer, and not how volumes are stored: only small 2-D slices pass here.

A picture of two columns, with its fixed distances in pixels::

    +--------------------------- MARGIN ---+
    | caption        |MARGIN| caption      |  CAPTION high
    | image          |      | image        |
    | caption  ...                         |  next row, MARGIN lower
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from volpipe.errors import VolumeError
from volpipe.reporting.shades import Image2D, diverge, grey

if TYPE_CHECKING:
    from volpipe.volumes.volume import Volume

MARGIN = 8
CAPTION = 22
FONT_SIZE = 14
CURVE_WIDTH, CURVE_HEIGHT, LINE = 640, 240, 2
FEW_POINTS = 60  # marked one by one
MIN_WIDTH, MAX_HEIGHT = 240, 4096  # smaller images are enlarged by a whole factor, so that their captions fit


def panel(path: Path | BinaryIO, images: Sequence[tuple[str, Image2D]], *, columns: int = 3) -> None:
    """Write a PNG of captioned images, row by row.

    Args:
        path: the file to write, whose folder exists, or one that is open.
        images: captions and images (y, x) or (y, x, 3), uint8. All are enlarged by one whole factor where the
            widest is narrower than MIN_WIDTH, and none becomes higher than MAX_HEIGHT.
        columns: images per row.
    """
    from PIL import Image, ImageDraw, ImageFont

    for caption, image in images:
        _refuse_unpaintable(caption, image)
    tallest, widest = (max(image.shape[axis] for _, image in images) for axis in (0, 1))
    zoom = max(1, min(-(-MIN_WIDTH // widest), MAX_HEIGHT // tallest))
    shown = [image.repeat(zoom, axis=0).repeat(zoom, axis=1) for _, image in images]
    rows = [shown[i : i + columns] for i in range(0, len(shown), columns)]
    heights = [max(image.shape[0] for image in row) for row in rows]
    width = max(MIN_WIDTH, *(image.shape[1] for image in shown))
    total_width = MARGIN + min(columns, len(shown)) * (width + MARGIN)
    total_height = MARGIN + sum(CAPTION + MARGIN + h for h in heights)
    canvas = Image.new("RGB", (total_width, total_height), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(FONT_SIZE)
    for i, image in enumerate(shown):
        row, column = divmod(i, columns)
        left = MARGIN + column * (width + MARGIN)
        top = MARGIN + sum(CAPTION + MARGIN + h for h in heights[:row])
        draw.text((left, top), images[i][0], fill="black", font=font)
        canvas.paste(Image.fromarray(image).convert("RGB"), (left, top + CAPTION))
    canvas.save(path, format="PNG")


def curve(points: Sequence[tuple[float, float]]) -> Image2D:
    """Return a line through `points` (x, y) with y upwards, from the smallest value to the largest, of a fixed size."""
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (CURVE_WIDTH, CURVE_HEIGHT), 255)
    draw, (xs, ys) = ImageDraw.Draw(canvas), np.array(points, np.float64).T
    spread = np.ptp(xs) or 1.0, np.ptp(ys) or 1.0
    across = LINE + (xs - xs.min()) / spread[0] * (CURVE_WIDTH - 1 - 2 * LINE)
    down = LINE + (ys.max() - ys) / spread[1] * (CURVE_HEIGHT - 1 - 2 * LINE)
    places = list(zip(across.tolist(), down.tolist(), strict=True))
    draw.rectangle((0, 0, CURVE_WIDTH - 1, CURVE_HEIGHT - 1), outline=200)
    draw.line(places, fill=0, width=LINE)
    for x, y in places if len(places) <= FEW_POINTS else ():
        draw.ellipse((x - LINE, y - LINE, x + LINE, y + LINE), fill=0)
    return np.asarray(canvas)


def draw_comparison(
    path: str | Path,
    before: Volume | np.ndarray,
    after: Volume | np.ndarray,
    *,
    titles: tuple[str, str] = ("input", "output"),
) -> None:
    """Write a PNG of two volumes and their difference: the middle xy slice, and below it the middle xz slice.

    Args:
        path: the file to write; its folder exists.
        before: the input (z, y, x) or (y, x), any number type.
        after: the output, of the same shape or a whole multiple of it per axis; the input's voxels are then
            repeated to match, and so count as unblurred in the difference.
        titles: captions of the two.

    Raises:
        VolumeError: the shapes do not fit each other, or a value of `after` is not finite.
    """
    after = np.asarray(after)
    if not np.isfinite(after).all():
        raise VolumeError(f"{titles[1]} holds values that are not finite, which have no grey; mend them first")
    before = _repeat_to(np.asarray(before), after.shape)
    limits = _limits(before, after)
    images: list[tuple[str, Image2D]] = []
    for place, index in _middle_slices(after.shape):
        old, new = before[index], after[index]
        change = new.astype(np.float64) - old
        largest = float(np.abs(change).max())
        scale = f"blue -{largest:.3g}, red +{largest:.3g}" if largest > 0 else "none"
        images.append((f"{titles[0]}, {place}, {limits[0]:g} to {limits[1]:g}", grey(old, limits)))
        images.append((f"{titles[1]}, {place}, same greys", grey(new, limits)))
        images.append((f"difference: {scale}", diverge(change, largest)))
    panel(Path(path), images)


def _middle_slices(shape: tuple[int, ...]) -> list[tuple[str, tuple[int | slice, ...]]]:
    """Return the names and indices of the slices to show of an array (y, x) or (z, y, x)."""
    if len(shape) == 2:
        return [("xy", (slice(None), slice(None)))]
    z, y = shape[0] // 2, shape[1] // 2
    return [(f"xy at z {z}", (z, slice(None), slice(None))), (f"xz at y {y}", (slice(None), y, slice(None)))]


def _repeat_to(before: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `before` with its voxels repeated until it has `shape`."""
    if before.ndim not in (2, 3) or before.ndim != len(shape):
        raise VolumeError(f"cannot compare {before.shape} with {shape}; give both (z, y, x) or both (y, x)")
    for dim, (axis, small, large) in enumerate(zip("zyx"[-len(shape) :], before.shape, shape, strict=True)):
        if large % small:
            raise VolumeError(f"output {large} is not a multiple of input {small} on axis {axis}; crop one")
        before = before.repeat(large // small, axis=dim)
    return before


def _limits(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Return the values of black and white: 0 and 255 for bytes, else the extremes of both arrays."""
    if before.dtype == after.dtype == np.uint8:
        return 0.0, 255.0
    return float(min(before.min(), after.min())), float(max(before.max(), after.max()))


def _refuse_unpaintable(caption: str, image: Image2D) -> None:
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
        actual = f"{image.dtype} of shape {image.shape}"
        raise VolumeError(f"image {caption!r} is {actual}; give uint8 of shape (y, x) or (y, x, 3)")
