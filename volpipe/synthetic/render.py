"""Pictures of synthetic tissue: grey levels of a microscope, with its blur, sections and noise.

Not here: places of structures (tissue), or a model of a microscope; greys were chosen by eye.
"""

from __future__ import annotations

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.synthetic.random_field import Array, Stream, smooth, uniform, white_noise
from volpipe.synthetic.tissue import Tissue, grow, vesicles

_NOISE = 6.0  # grey levels, deviation
_HALO = (2, 1, 1)  # voxels that the blur reads on each side


def render(seed: int, box: Box, voxel_size_nm: tuple[float, float, float], noise: float) -> Array:
    """Return the picture of `box` (z, y, x), uint8, with `noise` times the usual noise."""
    start = tuple(a - h for a, h in zip(box.start, _HALO, strict=True))
    stop = tuple(b + h for b, h in zip(box.stop, _HALO, strict=True))
    grey = blur(paint(grow(seed, Box(start, stop), voxel_size_nm)))
    grey += np.float32(_NOISE * noise) * white_noise(seed, box)
    grey += sections(seed, box)
    levels: Array = np.rint(grey.clip(0, 255)).astype(np.uint8)
    return levels


def paint(tissue: Tissue) -> Array:
    """Return the grey levels (z, y, x), float32, of `tissue` as a perfect microscope would see them."""
    seed, at = tissue.seed, tissue.at
    shade = 154.0 + 50.0 * uniform(seed, Stream.SHADE, tissue.roots)
    grey = shade.astype(np.float32)[tissue.cell]
    for stream, spacing, amplitude in ((Stream.GRAIN, 16.0, 75.0), (Stream.MOTTLE, 50.0, 60.0)):
        grey += smooth(seed, stream, at, spacing) * amplitude
    vesicle = vesicles(tissue)
    _cover(grey, 200.0, _ramp(vesicle, 0.0, -6.0))
    _cover(grey, 25.0, _ramp(np.abs(vesicle + 3.0), 10.0, 3.0))
    between_folds = _ramp(tissue.crista, 0.25, 0.75) * _ramp(tissue.mitochondrion, -8.0, -20.0)
    _cover(grey, 62.0, _ramp(tissue.mitochondrion, 4.0, -4.0), plus=between_folds * 60)
    _cover(grey, 40.0, _ramp(np.abs(tissue.mitochondrion), 10.0, 3.0))
    place = smooth(seed, Stream.PLACE, at, 260.0)
    reticulum = _ramp(np.abs(smooth(seed, Stream.RETICULUM, at, 150.0)), 0.035, 0.012)
    reticulum = reticulum * _ramp(place, 0.12, 0.25) * _ramp(tissue.wall, 18.0, 28.0)
    _cover(grey, 90.0, reticulum * _ramp(tissue.mitochondrion, 10.0, 20.0) * 0.7)
    _cover(grey, 25.0, _ramp(tissue.wall, 34.0, 12.0) * _ramp(place, -0.30, -0.42))
    _cover(grey, 38.0, _ramp(tissue.wall, 15.0, 6.0))
    lit: Array = grey * (smooth(seed, Stream.SHADING, at, 2500.0) * 0.2 + 1.0)
    return lit


def _cover(grey: Array, level: float, weight: Array, plus: Array | float = 0.0) -> None:
    """Move `grey` towards `level` and `plus` by `weight` 0 to 1, in place."""
    grey += (level - grey + plus) * weight


def _ramp(values: Array, zero: float, one: float) -> Array:
    """Return a smooth step (z, y, x), float32: 0 at and beyond `zero`, 1 at and beyond `one`."""
    t = ((values - zero) * (1 / (one - zero))).clip(0, 1)
    step: Array = t * t * (3 - t - t)
    return step


def blur(grey: Array) -> Array:
    """Return `grey` less its halo, blurred by section and beam: 1 4 6 4 1 along z, 1 2 1 along y and x."""
    wide = grey[:-4] + grey[4:] + 4 * (grey[1:-3] + grey[3:-1]) + 6 * grey[2:-2]
    tall = wide[:, :-2] + wide[:, 2:] + 2 * wide[:, 1:-1]
    out: Array = (tall[:, :, :-2] + tall[:, :, 2:] + 2 * tall[:, :, 1:-1]) * (1 / 256)
    return out


def sections(seed: int, box: Box) -> Array:
    """Return the offset of each section (z, 1, 1), float32 grey levels."""
    z = np.arange(box.start[0], box.stop[0])
    light = uniform(seed, Stream.SECTION, np.stack([z, np.zeros_like(z), np.zeros_like(z)]))
    return (light * 4.0 - 2.0).astype(np.float32)[:, None, None]
