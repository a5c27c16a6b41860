"""Levels of a pyramid: their number, and their factors against level 0 per axis.

Not here: their voxels (pyramid), or their metadata (inference.output).
"""

from __future__ import annotations

from typing import Literal

from volpipe.geometry.grid import Triple, triple

FINEST: tuple[Triple, ...] = ((1, 1, 1),)  # the factors of level 0 alone
SMALLEST_LEVEL = 64  # a pyramid ends when no axis is longer


def level_factors(
    levels: int | Literal["auto"],
    shape: tuple[int, ...],
    voxel: tuple[float, ...],
    begun: tuple[Triple, ...] = FINEST,
) -> tuple[Triple, ...]:
    """Return the downsampling of each level against level 0; an axis with the longest voxels waits for the others.

    Args:
        levels: how many beside level 0; "auto": until no axis is longer than SMALLEST_LEVEL.
        shape: of level 0, voxels (z, y, x).
        voxel: its size (z, y, x), in any unit.
        begun: the factors of levels that there are, which others follow.
    """
    factors = list(begun)
    while True:
        last = factors[-1]
        sizes = level_shape(shape, last)
        goes_on = max(sizes) > SMALLEST_LEVEL if levels == "auto" else len(factors) <= levels
        if not goes_on or max(sizes) == 1:
            return tuple(factors)
        lengths = [v * f for v, f in zip(voxel, last, strict=True)]
        # An axis is halved when its voxels are shorter than 3/2 of the shortest: the level tends to cubes.
        shortest = min(length for length, n in zip(lengths, sizes, strict=True) if n > 1)
        axes = zip(last, lengths, sizes, strict=True)
        factors.append(triple(f * 2 if length < 1.5 * shortest and n > 1 else f for f, length, n in axes))


def level_shape(shape: tuple[int, ...], factor: Triple) -> Triple:
    """Return the voxels (z, y, x) of the level that is coarser by `factor` than level 0 of `shape`."""
    return triple(-(-n // f) for n, f in zip(shape, factor, strict=True))
