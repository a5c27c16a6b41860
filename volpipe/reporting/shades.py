"""Shades: values of voxels as greys and colours, which of them are black and white, and the length of a scale bar.

Not here: pictures of them (frames, panels), or which voxels (slices).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Range = tuple[float, float]
Image2D = np.ndarray[Any, Any]  # (y, x) grey or (y, x, 3) red, green, blue; uint8

DARK, BRIGHT = 0.5, 99.5  # percentiles shown black and white
LARGEST = 99.5  # percentile of the absolute differences that is full blue or red
OPACITY = 0.55  # of labels over an image


def display_range(*images: np.ndarray) -> Range:
    """Return the values to show black and white: percentiles of all that is finite in `images`.

    Where those are one value, as of a few bright voxels on black, they are the ends; white is above black always.
    """
    parts = [image[np.isfinite(image)].astype(np.float64) for image in images]
    values = np.concatenate(parts) if parts else np.zeros(0)
    if not values.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(values, (DARK, BRIGHT)))
    if high <= low:
        low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1.0


def display_change(change: np.ndarray, *, is_whole: bool = False) -> float:
    """Return the difference to show in full blue or red; 0 where there is none.

    Args:
        change: differences; what is not finite is left out.
        is_whole: whether they are of whole numbers, of which less than 1 is none.
    """
    values = np.abs(change[np.isfinite(change)])
    if not values.any():
        return 0.0
    return max(1.0 if is_whole else 0.0, float(np.percentile(values, LARGEST)) or float(values.max()))


def grey(image: np.ndarray, limits: Range) -> Image2D:
    """Return `image` (y, x) as uint8, from black at and below the lower limit to white at the upper.

    White is one above black where the upper limit is not above the lower, as of an image of one value.
    """
    low, high = limits
    scaled: Image2D = (image.astype(np.float64) - low) * (255 / (high - low if high > low else 1.0))
    np.clip(scaled, 0, 255, out=scaled)
    shown: Image2D = np.rint(scaled)
    return shown.astype(np.uint8)


def diverge(change: np.ndarray, largest: float) -> Image2D:
    """Return `change` (y, x) as (y, x, 3) uint8: blue at -largest, white at 0, red at +largest; NaN and such black."""
    finite = np.isfinite(change)
    share = np.where(finite, change, 0.0) / (largest if largest > 0 else np.inf)
    red = 1 + np.clip(share, -1, 0)
    blue = 1 - np.clip(share, 0, 1)
    colour = np.stack([red, np.minimum(red, blue), blue], axis=-1)
    shown: Image2D = np.where(finite[..., None], np.rint(colour * 255), 0)
    return shown.astype(np.uint8)


def in_colour(image: Image2D) -> Image2D:
    """Return a grey image (y, x) as red, green and blue; one of colours as it is."""
    return image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=-1)


def shaded(data: np.ndarray, limits: Range) -> Image2D:
    """Return channels (c, y, x) as an image: greys of one, red, green and blue of more; NaN and infinities are red."""
    finite = np.isfinite(data).all(axis=0)
    channels = [grey(np.where(finite, channel, limits[0]), limits) for channel in data[:3]]
    if len(channels) == 1 and finite.all():
        return channels[0]
    channels = channels * 3 if len(channels) == 1 else channels + [np.zeros_like(channels[0])] * (3 - len(channels))
    image = np.stack(channels, axis=-1)
    image[~finite] = (255, 0, 0)
    return image


def coloured(labels: np.ndarray, below: Image2D | None = None) -> Image2D:
    """Return labels (y, x), each in a colour of its own, over the image `below`, or over black; 0 is clear."""
    numbers, places = np.unique(labels, return_inverse=True)
    shown = colours(numbers)[places.reshape(labels.shape)]
    base = np.zeros_like(shown) if below is None else in_colour(below)
    share = np.where(labels == 0, 0.0, 1.0 if below is None else OPACITY)[..., None]
    image: Image2D = np.rint(base * (1 - share) + shown * share).astype(np.uint8)
    return image


def colours(labels: np.ndarray) -> np.ndarray:
    """Return the colour of each of `labels`, (n, 3), uint8, as Neuroglancer has it: a hash of the number."""
    numbers = labels.astype(np.uint64)
    state = np.zeros(len(numbers), np.uint32)
    for word in (numbers & np.uint64(0xFFFFFFFF), numbers >> np.uint64(32)):
        state = _hashed(state, word.astype(np.uint32))
    hue, saturation = (state & 0xFF) / 255.0, 0.5 + 0.5 * ((state >> 8) & 0xFF) / 255.0
    sector, rest = np.divmod(hue * 6, 1)
    low, down, up = 1 - saturation, 1 - saturation * rest, 1 - saturation * (1 - rest)
    one, number = np.ones_like(low), sector.astype(int) % 6
    red = np.choose(number, [one, down, low, low, up, one])
    green = np.choose(number, [up, one, one, down, low, low])
    blue = np.choose(number, [low, low, up, one, one, down])
    shown: np.ndarray = np.rint(np.stack([red, green, blue], axis=-1) * 255)
    return shown.astype(np.uint8)


def _hashed(state: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return Neuroglancer's hashCombine (src/gpu_hash/hash_function.ts), uint32."""
    value = value * np.uint32(0xCC9E2D51)
    value = (value << np.uint32(15)) | (value >> np.uint32(17))
    state = state ^ (value * np.uint32(0x1B873593))
    state = (state << np.uint32(13)) | (state >> np.uint32(19))
    combined: np.ndarray = state * np.uint32(5) + np.uint32(0xE6546B64)
    return combined


def bar_nm(most: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is at most `most`."""
    power = 10.0 ** np.floor(np.log10(most))
    return float(max(step * power for step in (1, 2, 5) if step * power <= most * (1 + 1e-9)))
