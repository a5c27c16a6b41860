"""Frames: an image of voxels as a picture of a report, with square pixels, hatched holes and a scale bar below it.

Not here: what the image shows (comparison), or greys (shades). A frame in pixels::

    +--------------------+
    | image              |
    |                    |
    +--------------------+
    | ===== 500 nm       |  STRIP high, so that the bar hides no voxel
    +--------------------+
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Box, Shape
from volpipe.reporting.shades import Image2D, bar_nm, in_colour

EDGE = 368  # pixels of a picture, at most: three are side by side
STRIP, MIN_WIDTH, FONT = 18, 84, 12  # pixels
BAR_SHARE, BAR_HEIGHT = 0.3, 4  # of an image's width, at most; pixels
STRIPE, STRIPES = 6, ((236, 152, 40), (52, 48, 44))  # pixels, colours of what is missing
FRAME = (255, 214, 10)
MOST_BYTES = 40_000  # of a picture; fifteen of them are 0.8 MB in base64
QUALITIES = (92, 85, 75, 60, 40)


@dataclass(frozen=True)
class Scale:
    """What a pixel of an image shows: a length in nm, or of voxels where their size is not known."""

    pixel: float
    is_known: bool = True

    def text(self, length: float) -> str:
        """Return a length for people."""
        if not self.is_known:
            return f"{length:g} voxel{'s' * (length != 1)}"
        return f"{length / 1000:g} µm" if length >= 1000 else f"{length:g} nm"


def resized(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return `image` (y, x) or (y, x, 3) with `shape` pixels, each that of the voxel in which its centre lies."""
    down, across = (
        np.minimum(((np.arange(n) + 0.5) * m / n).astype(int), m - 1)
        for n, m in zip(shape, image.shape[:2], strict=True)
    )
    pixels: np.ndarray = image[down][:, across]
    return pixels


def hatched(image: Image2D, is_known: np.ndarray) -> Image2D:
    """Return `image` with stripes where it is not known, (y, x); as it is where all of it is."""
    if is_known.all():
        return image
    down, across = np.indices(is_known.shape)
    stripes = np.array(STRIPES, np.uint8)[(down + across) // STRIPE % 2]
    return np.where(is_known[..., None], in_colour(image), stripes)


def outlined(image: Image2D, part: Box, shape: tuple[int, ...]) -> Image2D:
    """Return `image` with a frame around `part` (y, x), in pixels of an image of `shape` that it was made of."""
    shown = in_colour(image).copy()
    sides = zip(part.start, part.stop, image.shape, shape, strict=False)
    (top, bottom), (left, right) = (_pixel_range(a * n / m, b * n / m, n) for a, b, n, m in sides)
    for thickness in (0, 1):
        a, b, c, d = (max(0, top - thickness), bottom + thickness, max(0, left - thickness), right + thickness)
        shown[[a, min(b, len(shown) - 1)], c : d + 1] = FRAME
        shown[a : b + 1, [c, min(d, shown.shape[1] - 1)]] = FRAME
    return shown


def _pixel_range(start: float, stop: float, most: int) -> tuple[int, int]:
    """Return the first and the last of `most` pixels between two places, at least one of them."""
    first = min(int(start), most - 1)
    return first, min(max(first + 1, round(stop)), most) - 1


def sides_of(shape: Shape, voxel: Sequence[float], axis: int) -> tuple[float, float]:
    """Return the lengths (down, across) of a slice across `axis` of a box of `shape`, with voxels of these lengths."""
    down, across = (n * v for i, (n, v) in enumerate(zip(shape, voxel, strict=True)) if i != axis)
    return down, across


def framed(image: Image2D, scale: Scale) -> Image2D:
    """Return `image` with a strip below it that has the scale bar."""
    width = max(image.shape[1], MIN_WIDTH)
    padding = ((0, 0), (0, width - image.shape[1]), (0, 0))[: image.ndim]
    bar = bar_strip(width, scale)
    return np.concatenate([np.pad(image, padding), bar if image.ndim == 2 else in_colour(bar)])


def bar_strip(width: int, scale: Scale) -> Image2D:
    """Return a scale bar with its length, white on black, below an image of so many pixels."""
    from PIL import Image, ImageDraw, ImageFont

    length = bar_nm(max(BAR_SHARE * width * scale.pixel, 1e-9))
    canvas = Image.new("L", (width, STRIP))
    draw, pixels = ImageDraw.Draw(canvas), max(1, round(length / scale.pixel))
    top = (STRIP - BAR_HEIGHT) // 2
    draw.rectangle((6, top, 5 + pixels, top + BAR_HEIGHT - 1), fill="white")
    font, x, baseline = ImageFont.load_default(FONT), 12.0 + pixels, STRIP - 5
    for letter in scale.text(length):
        plain = "u" if letter == "µ" else letter  # which the font of PIL lacks: a u with a tail
        draw.text((x, baseline), plain, "white", font, "ls")
        if letter == "µ":
            draw.line((x + 1, baseline - 1, x + 1, baseline + 2), "white")
        x += font.getlength(plain)
    strip: Image2D = np.asarray(canvas)
    return strip


def drawn(
    image: Image2D, sides: tuple[float, float], pixel: float, *,
    is_known: bool = True, edge: int = EDGE, part: Box | None = None,
) -> tuple[bytes, str]:  # fmt: skip
    """Return an image as a file with a scale bar, and its media type; small ones are enlarged by a whole factor.

    Args:
        sides: lengths (down, across) of the image.
        pixel: length that a pixel shows before it is enlarged.
        is_known: whether lengths are in nm; else they are in voxels.
        edge: pixels of the longer side, at most.
        part: of the image (y, x) that has a frame around it.
    """
    zoom = max(1, int(edge * pixel / max(sides) * 1.000001))
    down, across = (max(1, round(side / pixel * zoom)) for side in sides)
    shown = resized(image, (down, across))
    shown = shown if part is None else outlined(shown, part, image.shape)
    return encoded(framed(shown, Scale(pixel / zoom, is_known)))


def encoded(image: Image2D, most: int = MOST_BYTES) -> tuple[bytes, str]:
    """Return `image` as a file and its media type: PNG, or JPEG where a PNG takes more than `most` bytes."""
    from PIL import Image

    picture, data = Image.fromarray(image), io.BytesIO()
    picture.save(data, format="PNG", compress_level=3)
    if data.tell() <= most:
        return data.getvalue(), "image/png"
    for quality in QUALITIES:
        data = io.BytesIO()
        picture.save(data, format="JPEG", quality=quality, subsampling=0)
        if data.tell() <= most:
            break
    return data.getvalue(), "image/jpeg"
