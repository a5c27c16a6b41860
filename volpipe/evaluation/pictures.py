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
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
            actual = f"{image.dtype} of shape {image.shape}"
            raise VolumeError(f"image {caption!r} is {actual}; give uint8 of shape (y, x) or (y, x, 3)")
    tallest, widest = (max(image.shape[axis] for _, image in images) for axis in (0, 1))
    zoom = max(1, min(-(-MIN_WIDTH // widest), MAX_HEIGHT // tallest))
    tops = [MARGIN]
    for i in range(0, len(images), columns):
        tops.append(tops[-1] + CAPTION + MARGIN + zoom * max(image.shape[0] for _, image in images[i : i + columns]))
    width = MARGIN + max(MIN_WIDTH, zoom * widest)
    canvas = Image.new("RGB", (MARGIN + min(columns, len(images)) * width, tops[-1]), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(FONT_SIZE)
    for i, (caption, image) in enumerate(images):
        left, top = MARGIN + i % columns * width, tops[i // columns]
        draw.text((left, top), caption, fill="black", font=font)
        enlarged = image.repeat(zoom, axis=0).repeat(zoom, axis=1)
        canvas.paste(Image.fromarray(enlarged).convert("RGB"), (left, top + CAPTION))
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
    path: str | Path, before: Volume | np.ndarray, after: Volume | np.ndarray, *,
    titles: tuple[str, str] = ("input", "output"),
) -> None:  # fmt: skip
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
    after, before = np.asarray(after), np.asarray(before)
    if not np.isfinite(after).all():
        raise VolumeError(f"{titles[1]} holds values that are not finite, which have no grey; mend them first")
    if before.ndim not in (2, 3) or before.ndim != after.ndim:
        raise VolumeError(f"cannot compare {before.shape} with {after.shape}; give both (z, y, x) or both (y, x)")
    for dim, (axis, small, large) in enumerate(zip("zyx"[-after.ndim :], before.shape, after.shape, strict=True)):
        if large % small:
            raise VolumeError(f"output {large} is not a multiple of input {small} on axis {axis}; crop one")
        before = before.repeat(large // small, axis=dim)
    is_bytes = before.dtype == after.dtype == np.uint8
    limits = (
        (0.0, 255.0) if is_bytes else (float(min(before.min(), after.min())), float(max(before.max(), after.max())))
    )
    z, y, all_of = after.shape[0] // 2, after.shape[1] // 2, slice(None)
    places = {f"xy at z {z}": (z, all_of, all_of), f"xz at y {y}": (all_of, y, all_of)}
    images: list[tuple[str, Image2D]] = []
    for place, index in places.items() if after.ndim == 3 else [("xy", (all_of, all_of))]:
        old, new = before[index], after[index]
        change = new.astype(np.float64) - old
        largest = float(np.abs(change).max())
        scale = f"blue -{largest:.3g}, red +{largest:.3g}" if largest > 0 else "none"
        images.append((f"{titles[0]}, {place}, {limits[0]:g} to {limits[1]:g}", grey(old, limits)))
        images.append((f"{titles[1]}, {place}, same greys", grey(new, limits)))
        images.append((f"difference: {scale}", diverge(change, largest)))
    panel(Path(path), images)
