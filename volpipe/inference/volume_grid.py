"""The volume's own grid, for outputs of nets that read the volume on another: which voxels of theirs it shows.

Not here: the interpolation (volumes.resampling), or the level that is made by it (pyramid)::

    volume     |--|--|--|--|--|--|      read as  |---|---|---|---|    of the net's grid
    output     |--|--|--|--|--|--|   <- made of  |---|---|---|---|    which stays in the group `net`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Index, Triple, triple
from volpipe.inference.roi import find_roi
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import Recipe
from volpipe.volumes.resampling import Order, Resampling
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume


class VolumeGrid(BaseModel):
    """The grid of a volume as it is stored, of which an output shows the box `roi`; (z, y, x)."""

    model_config = ConfigDict(frozen=True)

    shape: Triple
    voxel_size_nm: Lengths
    origin_nm: Lengths
    roi: tuple[Triple, Triple]

    def region(self, net: NetFacts) -> Box:
        """Return the voxels that the output shows, of those that `net` would make of the whole volume as it is."""
        start, stop = (
            triple(n * s // u for n, s, u in zip(corner, net.scale, net.shrink, strict=True)) for corner in self.roi
        )
        return Box(start, stop)

    def resampling(self, net: NetFacts, shape: Triple, dtype: str, *, nearest: bool) -> Resampling:
        """Return this grid, of the voxels that `net` makes of the whole volume on its own grid of `shape`.

        Labels have the nearest voxel; other voxels are interpolated linearly, and smoothed before where they become
        longer.
        """
        made = (-(-n // u) * s for n, s, u in zip(shape, net.scale, net.shrink, strict=True))
        own = (n * s // u for n, s, u in zip(self.shape, net.scale, net.shrink, strict=True))
        order: Order = 0 if nearest else 1
        grid = Resampling(triple(own), triple(made), dtype, (order, order, order))
        return grid if nearest else grid.smoothed()

    def seen(self, nets: Sequence[NetFacts], shape: Triple) -> Box:
        """Return the voxels of the nets' grid of `shape` from which what these make is interpolated."""
        unit = [math.lcm(*(net.shrink[axis] for net in nets)) for axis in range(3)]
        starts, stops = list[Index](), list[Index]()
        for net in nets:
            box = self.resampling(net, shape, "float32", nearest=False).seen(self.region(net))
            ends = list(zip(box.start, box.stop, net.scale, net.shrink, strict=True))
            starts.append(tuple(a // s * u for a, _, s, u in ends))
            stops.append(tuple(-(-b // s) * u for _, b, s, u in ends))
        start = tuple(min(along) // n * n for along, n in zip(zip(*starts, strict=True), unit, strict=True))
        return Box(start, tuple(min(max(along), n) for along, n in zip(zip(*stops, strict=True), shape, strict=True)))

    def check(self, net: NetFacts, shape: Triple) -> None:
        """Refuse a net whose coarser voxels do not fall together with those of this grid, or of its own of `shape`.

        Raises:
            PlanError: saying which.
        """
        start, stop = self.roi
        for axis, n, m, a, b, unit in zip("zyx", self.shape, shape, start, stop, net.shrink, strict=True):
            if n % unit or m % unit:
                raise PlanError(
                    f"output.grid=input, axis {axis}: net {net.label} makes one voxel of {unit}, and the {n} of the "
                    f"volume, or its {m} on the net's grid, are no multiple of that; set output.grid=net"
                )
            if a % unit or b % unit:
                raise PlanError(
                    f"output.grid=input, axis {axis}: the roi {a}:{b} cuts through a voxel of the output of net "
                    f"{net.label}, which is {unit} of the volume; begin and end at multiples of {unit}"
                )


def output_grid(recipe: Recipe, stored: Volume, volume: Volume, net: NetFacts) -> VolumeGrid | None:
    """Return the grid of the volume as it is `stored`, if the output is to lie on that; None: it lies on the net's.

    Args:
        recipe: with what the net asks for.
        volume: as the net reads it.

    Raises:
        PlanError: the recipe asks for it, and the output cannot be interpolated.
    """
    choice = recipe.output
    own = net.interpolation is not None and net.interpolation.in_nm
    if volume.resampling is None or stored.voxel_size_nm is None or choice.grid == "net":
        return None
    if choice.grid == "auto" and (choice.kind == "image" or not own):
        return None
    if recipe.net.offsets is not None and choice.kind == "image":
        raise PlanError(
            "output.grid=input: affinities (net.offsets) are of pairs of voxels of the net's grid, and between those "
            "of the volume they would be of others; leave output.grid out"
        )
    roi = find_roi(recipe.input.roi, stored)
    return VolumeGrid(
        shape=stored.spatial_shape,
        voxel_size_nm=stored.voxel_size_nm,
        origin_nm=stored.origin_nm,
        roi=(triple(roi.start), triple(roi.stop)),
    )


def output_place(
    net: NetFacts, size: Lengths | None, origin: Lengths, corner: Triple
) -> tuple[Lengths | None, Lengths]:
    """Return voxel size and origin of an output that begins at the voxel `corner` of a volume of such a place.

    An output scaled by s has voxels v/s, and its first voxel's centre lies (1/s - 1)/2 input voxels from that of the
    first voxel that it shows; s is below 1 where it is coarser. Where the size is unknown, output voxels are the unit.
    """
    scale = triple(s / u for s, u in zip(net.scale, net.shrink, strict=True))
    places = zip(origin, corner, scale, size or scale, strict=True)
    fine = None if size is None else triple(v / s for v, s in zip(size, scale, strict=True))
    return fine, triple(o + (r + (1 / s - 1) / 2) * v for o, r, s, v in places)
