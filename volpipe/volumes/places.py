"""Whether two volumes that are paired voxel by voxel lie at the same place, by their voxel sizes and origins.

Not here: a mask, which is laid over a volume at the place where it lies (inference.roi), or the volumes' shapes::

    A   |----|----|----|----|             one place: voxels of one size, first voxels less than half a voxel apart
    B             |----|----|----|----|   elsewhere: refused
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from volpipe.errors import PlanError
from volpipe.geometry.grid import Triple
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume

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
            f"{self.name} {self.volume} has voxels of {_text(size)} nm (z, y, x), their centres from the origin "
            f"{_text(origin)} to {_text(tuple(ends))} nm"
        )


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
        return _unknown(a, b) if size != other else []
    notes = []
    for axis, factor, room, one, two, at, there in zip(
        AXES, factors, slack, size, other, a.volume.origin_nm, b.volume.origin_nm, strict=True
    ):
        if not math.isclose(one * factor, two, rel_tol=SAME_SIZE):
            times = f" and not {factor} times as much" if factor > 1 else ""
            raise PlanError(
                f"axis {axis}: voxels of {a.name} are {one:g} nm long, of {b.name} {two:g} nm{times}: "
                f"{places(a, b)}; {advice}"
            )
        apart = (there - at) / one - (factor - 1) / 2
        if abs(apart) > HALF * room + SLIVER:
            raise PlanError(
                f"axis {axis}: {a.name} begins at {at:g} nm, {b.name} at {there:g} nm: {places(a, b)}; {advice}"
            )
        if abs(apart) > SLIVER:
            notes.append(f"{b.name} lies {apart:.2g} voxels beside {a.name} along {axis}; they are paired all the same")
    return notes


def places(a: Paired, b: Paired) -> str:
    """Return where both lie, and what they have in common, for people."""
    return f"{a.place}; {b.place}; they have {_common(a.volume, b.volume)} in common"


def _common(a: Volume, b: Volume) -> str:
    """Return the box that both cover, in nm, for people."""
    sides = []
    for axis in range(3):
        ends = [_side(volume, axis) for volume in (a, b)]
        low, high = max(start for start, _ in ends), min(stop for _, stop in ends)
        if low >= high:
            return "no place"
        sides.append(f"{AXES[axis]} {low:g} … {high:g}")
    return f"{', '.join(sides)} nm"


def _side(volume: Volume, axis: int) -> tuple[float, float]:
    size = 1.0 if volume.voxel_size_nm is None else volume.voxel_size_nm[axis]
    start = volume.origin_nm[axis] - size / 2
    return start, start + size * volume.spatial_shape[axis]


def _unknown(a: Paired, b: Paired) -> list[str]:
    known, unknown = (a, b) if b.volume.voxel_size_nm is None else (b, a)
    return [
        f"{unknown.name} {unknown.volume} has no voxel size, so that nobody knows whether it lies where {known.name} "
        f"does, whose voxels are {_text(known.volume.voxel_size_nm or ())} nm; they are paired voxel by voxel"
    ]


def _text(lengths: Lengths | tuple[float, ...]) -> str:
    return " × ".join(f"{length:g}" for length in lengths)
