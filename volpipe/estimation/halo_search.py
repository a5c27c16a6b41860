"""The error of a halo smaller than the exact one: the difference of a tile and the whole.

Not here: how the exact halo is measured (receptive_field), or what windows cost (window_search).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.inference.statistics import sampled_affine
from volpipe.inference.tiling import around_core
from volpipe.nets.net_geometry import Geometry
from volpipe.recipes.inference import Recipe
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.units import count
from volpipe.volumes.volume import open_volume

SEED = 0  # of the invented volume
CORE = 32  # voxels along an axis of the tile that halos are tried on, at least: it is in whole strides
HALO_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class HaloError:
    """The difference of a tile with `halo` (z, y, x) and the whole: the largest, and the root mean square."""

    halo: Triple
    largest: float
    rms: float


def halo_errors(
    net: Callable[[np.ndarray], np.ndarray], voxels: np.ndarray, geometry: Geometry, core: Triple
) -> Iterator[HaloError]:
    """Yield the errors of halos from none, or the margin, to the exact one, ascending.

    Args:
        net: (1, c, z, y, x) -> (1, C, z', y', x'), float32.
        voxels: (c, z, y, x), normalised: `core` with the exact halo around it, as `real_window` has them.
        core: the tile without its halo, in whole strides.
    """
    exact = geometry.aligned_halo()
    whole = _middle(net(voxels[None])[0], exact, core, geometry)
    for halo in dict.fromkeys(map(geometry.aligned_halo, HALO_SHARES)):
        sides = zip(exact, *around_core(geometry, halo), core, strict=True)
        cut = tuple(slice(e - before, e + c + after) for e, before, after, c in sides)
        is_whole = halo == exact
        tile = whole if is_whole else _middle(net(np.ascontiguousarray(voxels[:, *cut])[None])[0], halo, core, geometry)
        difference = np.abs(tile.astype(np.float64) - whole)
        yield HaloError(halo, float(difference.max()), float(np.sqrt(np.square(difference).mean())))


def _middle(out: np.ndarray, halo: Triple, core: Triple, geometry: Geometry) -> np.ndarray:
    """Return the core's part of an output (c, z, y, x)."""
    sides = zip(halo, core, geometry.margin, geometry.ratios, strict=True)
    return out[:, *(slice(ratio.out(h - m), ratio.out(h - m + c)) for h, c, m, ratio in sides)]


def real_window(
    recipe: Recipe, in_channels: int, geometry: Geometry, core: Triple, location: str | None = None
) -> np.ndarray:
    """Return voxels (c, z, y, x), normalised as in a run: `core` with the exact halo around it.

    They lie in the middle of the volume at `location`, mirrored at its faces; without a location they are invented.

    Raises:
        VolpipeError: the volume cannot be read, or has not the net's channels.
    """
    around = around_core(geometry, geometry.aligned_halo())
    shape = triple(map(sum, zip(core, *around, strict=True)))
    if location is None:
        raw = SyntheticVolume(shape, seed=SEED).raw(Box.from_shape(shape))
        voxels = np.repeat(raw[None], in_channels, axis=0)
    else:
        volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
        if volume.num_channels != in_channels:
            raise VolpipeError(f"the net takes {count(in_channels, 'channel')}, {volume} has {volume.num_channels}")
        start = tuple((n - w) // 2 for n, w in zip(volume.spatial_shape, shape, strict=True))
        stop = tuple(a + w for a, w in zip(start, shape, strict=True))
        voxels = volume.open().read_mirrored(Box(start, stop))
    return sampled_affine(recipe.normalise, voxels).apply(voxels)
