"""Places of volumes: the raster of each level, and whether two that are paired voxel by voxel lie at one place.

Not here: a mask, which is laid over a volume at the place where it lies (inference.roi), or the volumes' shapes::

    A   |----|----|----|----|             one place: voxels of one size, first voxels less than half a voxel apart
    B             |----|----|----|----|   elsewhere: refused
    C        |----|----|                  a part: voxels of one size, of another number, whole voxels apart
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from volpipe.errors import NOTICE, PlanError
from volpipe.geometry.grid import Box, Shape, Triple, triple
from volpipe.volumes.formats.ome_zarr import label_place
from volpipe.volumes.storage.metadata import Lengths, shown
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.volume import View, Volume, open_volume

log = logging.getLogger(__name__)

AXES = "zyx"
HALF = 0.5  # of a voxel, by which two volumes may lie apart
SLIVER = 0.01  # of a voxel: what rounding of lengths may leave
SAME_SIZE = 1e-3  # of a voxel's length, by which two may differ: programs round sizes to three or four digits
SAME: Triple = (1, 1, 1)
MEND = "correct the place of one (`volpipe convert --voxel-size-nm … --origin-nm …` makes a copy that has another)"


@dataclass(frozen=True)
class Paired:
    """A volume of a pair, and what it is called in sentences."""

    name: str
    volume: Volume

    @property
    def place(self) -> str:
        """Its place, for people."""
        size, origin = self.volume.voxel_size_nm, self.volume.origin_nm
        if size is None:
            return f"{self.name} {self.volume} has no voxel size"
        ends = (o + (n - 1) * s for o, n, s in zip(origin, self.volume.spatial_shape, size, strict=True))
        return (
            f"{self.name} {self.volume} has voxels of {shown(size)} nm (z, y, x), their centres from the origin "
            f"{shown(origin)} to {shown(tuple(ends))} nm"
        )


def warn_of_image(out: Location, shape: Shape, voxel_size_nm: Lengths | None, origin_nm: Lengths) -> None:
    """Tell the user where labels at `out` lie otherwise than the image in whose labels that is.

    Args:
        shape, voxel_size_nm, origin_nm: of the labels (z, y, x).
    """
    place = label_place(out)
    if place is None:
        return
    image = open_volume(str(place.image), view=View(time=0, incomplete=True))
    if voxel_size_nm is None or image.voxel_size_nm is None:
        is_alike = tuple(shape) == image.spatial_shape and voxel_size_nm == image.voxel_size_nm
    else:
        own, its = (tuple(shape), voxel_size_nm), (image.spatial_shape, image.voxel_size_nm)
        is_alike = all(
            abs(a - b) <= HALF * size and abs(n * v - m * size) <= HALF * size
            for a, b, n, v, m, size in zip(origin_nm, image.origin_nm, *own, *its, strict=True)
        )
    if not is_alike:
        log.warning(
            "%s do not lie as their image does: they have %s voxels (%s, origin %s nm), it has %s (%s, origin %s nm)",
            *(out, shown(shape), _size_words(voxel_size_nm), shown(origin_nm)),
            *(shown(image.spatial_shape), _size_words(image.voxel_size_nm), shown(image.origin_nm)),
            extra=NOTICE,
        )


def _size_words(size: Lengths | None) -> str:
    return "of unknown size" if size is None else f"of {shown(size)} nm"


def check_same_place(a: Paired, b: Paired, advice: str, *, factors: Triple = SAME, slack: Triple = SAME) -> list[str]:
    """Refuse volumes that lie elsewhere; return what a user should know of their places otherwise, in sentences.

    Args:
        advice: ends the refusal: how to pair them all the same.
        factors: voxels of `a` per voxel of `b` (z, y, x).
        slack: voxels of `a` (z, y, x), by half of which they may lie apart.

    Raises:
        PlanError: their voxels have other sizes, or they begin elsewhere; with both places.
    """
    size, other = a.volume.voxel_size_nm, b.volume.voxel_size_nm
    if size is None or other is None:
        known, unknown = (a, b) if other is None else (b, a)
        note = (
            f"{unknown.name} {unknown.volume} has no voxel size, so that nobody knows whether it lies where "
            f"{known.name} does, whose voxels are {shown(size or other or ())} nm; they are paired voxel by voxel"
        )
        return [note] if size != other else []
    notes = []
    for axis, factor, room, one, two, at, there in zip(
        AXES, factors, slack, size, other, a.volume.origin_nm, b.volume.origin_nm, strict=True
    ):
        if not math.isclose(one * factor, two, rel_tol=SAME_SIZE):
            raise _other_size(a, b, axis, advice, factor)
        apart = (there - at) / one - (factor - 1) / 2
        if abs(apart) > HALF * room + SLIVER:
            raise PlanError(
                f"axis {axis}: {a.name} begins at {at:g} nm, {b.name} at {there:g} nm: {places(a, b)}; {advice}"
            )
        if abs(apart) > SLIVER:
            notes.append(f"{b.name} lies {apart:.2g} voxels beside {a.name} along {axis}; they are paired all the same")
    return notes


def find_part(a: Paired, b: Paired, advice: str) -> Box:
    """Return the voxels of `a` at which those of `b` lie, which has another shape; they may leave `a`.

    Raises:
        PlanError: it is not known, their voxels have other sizes, or they are not whole voxels apart; with both places.
    """
    size, other = a.volume.voxel_size_nm, b.volume.voxel_size_nm
    shapes = a.volume.spatial_shape, b.volume.spatial_shape
    for each, own, whole in ((a, *shapes), (b, *shapes[::-1])):
        is_placed = each.volume.has_origin or all(n >= m for n, m in zip(own, whole, strict=True))
        if each.volume.voxel_size_nm is None or not is_placed:
            lacking = "origin" if each.volume.voxel_size_nm else "voxel size"
            raise PlanError(
                f"{a.name} {a.volume} has shape {shapes[0]}, {b.name} {b.volume} {shapes[1]} (z, y, x), and the "
                f"metadata of {each.name} state no {lacking}, by which one is known to be a part of the other; {advice}"
            )
    assert size is not None and other is not None
    start = list[int]()
    for axis, one, two, n, at, there in zip(
        AXES, size, other, shapes[1], a.volume.origin_nm, b.volume.origin_nm, strict=True
    ):
        apart = (there - at) / one
        # over all that lies between and in B, sizes may add up to half a voxel
        if abs(two / one - 1) > min(SAME_SIZE, HALF / (abs(apart) + n)):
            raise _other_size(a, b, axis, advice)
        if abs(apart - round(apart)) > SLIVER:
            raise PlanError(
                f"axis {axis}: {a.name} begins at {at:.12g} nm, {b.name} at {there:.12g} nm: these are {apart:.6g} "
                f"voxels of {one:.6g} nm, no whole number (remainder {apart - round(apart):.3g}): {places(a, b)}; "
                f"{advice}"
            )
        start.append(round(apart))
    return Box.from_shape(shapes[1]).shift(tuple(start))


def _other_size(a: Paired, b: Paired, axis: str, advice: str, factor: int = 1) -> PlanError:
    one, two = ((each.volume.voxel_size_nm or UNKNOWN_SIZE_NM)[AXES.index(axis)] for each in (a, b))
    times = f" and not {factor} times as much" if factor > 1 else ""
    return PlanError(
        f"axis {axis}: voxels of {a.name} are {one:g} nm long, of {b.name} {two:g} nm{times}: {places(a, b)}; {advice}"
    )


def places(a: Paired, b: Paired) -> str:
    """Return where both lie, and what they have in common, for people."""
    return f"{a.place}; {b.place}; they have {_common(a.volume, b.volume)} in common"


def _common(a: Volume, b: Volume) -> str:
    """Return the box that both cover, in nm, for people."""
    sides = []
    for axis in range(3):
        ends = [_length_along(volume, axis) for volume in (a, b)]
        low, high = max(start for start, _ in ends), min(stop for _, stop in ends)
        if low >= high:
            return "no place"
        sides.append(f"{AXES[axis]} {low:g} … {high:g}")
    return f"{', '.join(sides)} nm"


def _length_along(volume: Volume, axis: int) -> tuple[float, float]:
    size = 1.0 if volume.voxel_size_nm is None else volume.voxel_size_nm[axis]
    start = volume.origin_nm[axis] - size / 2
    return start, start + size * volume.spatial_shape[axis]


UNKNOWN_SIZE_NM: Lengths = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Raster:
    """One level of a layer: voxels (z, y, x), their size, and the centre of the first."""

    shape: Triple
    voxel_size_nm: Lengths
    origin_nm: Lengths = (0.0, 0.0, 0.0)

    @classmethod
    def from_volume(cls, volume: Volume) -> Raster:
        return cls(volume.spatial_shape, volume.voxel_size_nm or UNKNOWN_SIZE_NM, volume.origin_nm)

    def every(self, step: Triple) -> Raster:
        """Return the raster of one voxel in `step` (z, y, x), each in the middle of those that it stands for."""
        sizes = zip(self.voxel_size_nm, step, strict=True)
        moves = zip(self.origin_nm, self.voxel_size_nm, step, strict=True)
        shape = triple(-(-n // s) for n, s in zip(self.shape, step, strict=True))
        return Raster(shape, triple(v * s for v, s in sizes), triple(o + v * (s - 1) / 2 for o, v, s in moves))


def levels_of(volume: Volume) -> tuple[Volume, ...]:
    """Return `volume` and the coarser levels of its group; itself alone where it was given a place of its own."""
    if volume.key not in volume.levels or volume.view.voxel_size_nm is not None or volume.view.origin_nm is not None:
        return (volume,)
    coarser = (volume.level(number) for number in range(volume.levels.index(volume.key) + 1, len(volume.levels)))
    return (volume, *(v for v in coarser if (v.dtype, v.axes, v.format) == (volume.dtype, volume.axes, volume.format)))


def rasters_of(levels: Sequence[Volume]) -> tuple[Raster, ...]:
    """Return the rasters of a group's levels; without voxel sizes the coarser ones cover what the first does."""
    base = Raster.from_volume(levels[0])
    if all(level.voxel_size_nm is not None for level in levels):
        return tuple(map(Raster.from_volume, levels))
    rasters = [base]
    for level in levels[1:]:
        step = triple(max(1, round(n / m)) for n, m in zip(base.shape, level.spatial_shape, strict=True))
        rasters.append(replace(base.every(step), shape=level.spatial_shape))
    return tuple(rasters)


def extent_nm(raster: Raster) -> Lengths:
    """Return the lengths (z, y, x) of the whole raster."""
    return triple(n * v for n, v in zip(raster.shape, raster.voxel_size_nm, strict=True))
