"""The region of interest of a recipe: a box of voxels, and a mask laid over the volume.

Not here: its windows, blocks and shards, or voxels of the mask (selection).
"""

from __future__ import annotations

import math
import re

from pydantic import BaseModel, ConfigDict

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.volumes.places import Paired, places
from volpipe.volumes.storage.metadata import nanometres
from volpipe.volumes.volume import Volume

AXES = "zyx"
BOUND = re.compile(r"\s*(\d+|-?\d+(?:\.\d*)?(?=\s*[^\d\s.]))\s*([^\d\s.]*)\s*")  # a length may be broken or negative
PART = re.compile(",".join([r"(\d*):(\d*)"] * 3))
SLIVER = 1e-6  # of a voxel: what rounding of sizes in nm may leave


class Mask(BaseModel):
    """The place of a mask over a volume, (z, y, x).

    Attributes:
        path, key: of its array.
        shape: in voxels of its own.
        step: voxels of the volume per voxel of the mask.
        start: where its first voxel begins, in voxels of the volume.
        inside: first voxel of the volume and one past the last that it covers; None where it covers all.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    key: str
    shape: tuple[int, int, int]
    step: tuple[float, float, float]
    start: tuple[float, float, float]
    inside: tuple[Triple, Triple] | None = None

    @property
    def note(self) -> str:
        """What a user should know of its place; "" where it covers all of the volume, voxel by voxel or as a level."""
        if self.inside is not None:
            return (
                f"covers the box {Box(*self.inside)} (z, y, x) of the volume alone; outside of it nothing is selected"
            )
        if all(map(_is_whole, self.step, self.shape)):
            return ""
        steps = " × ".join(f"{step:.3g}" for step in self.step)
        return f"stretched over the volume: its voxels are {steps} of the volume's; is it of a part only?"

    def under(self, axis: int, start: int, stop: int) -> tuple[int, int]:
        """Return the voxels of the mask, first and one past last, that lie over the volume's `start:stop` on `axis`.

        None where it covers nothing of that. Past the ends of a mask of the whole volume, its last voxel counts.
        """
        if self.inside is not None:
            start, stop = max(start, self.inside[0][axis]), min(stop, self.inside[1][axis])
            if start >= stop:
                return 0, 0
        first = math.floor((start - self.start[axis]) / self.step[axis] + SLIVER)
        last = math.ceil((stop - self.start[axis]) / self.step[axis] - SLIVER)
        first = min(max(first, 0), self.shape[axis] - 1)
        return first, min(max(last, first + 1), self.shape[axis])


def find_roi(text: str | None, volume: Volume) -> Box:
    """Return the box of voxels (z, y, x) that ``z0:z1,y0:y1,x0:x1`` names in `volume`; all of it without a text.

    A bound is a number of voxels, a share of the axis such as 75%, or a length in the volume's own coordinates: of
    "100nm:900nm" the voxels count whose centres lie from 100 nm to before 900 nm. Without a bound, the region reaches
    the face.

    Raises:
        PlanError: it cannot be parsed, is empty, or leaves the volume.
    """
    shape = volume.spatial_shape
    if text is None:
        return Box.from_shape(shape)
    parts = text.split(",")
    if len(parts) != 3 or any(part.count(":") != 1 for part in parts):
        raise PlanError(f"roi {text!r}: write z0:z1,y0:y1,x0:x1, such as 0:64,100:300,: (a bare : is a whole axis)")
    bounds = [_bounds(part, axis, volume) for axis, part in enumerate(parts)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def find_part(text: str, shape: tuple[int, ...]) -> Box:
    """Return the box that ``z0:z1,y0:y1,x0:x1`` names in an output of `shape`, in voxels of the output.

    Raises:
        PlanError: it cannot be parsed, is empty, or leaves the output.
    """
    match = PART.fullmatch(text.replace(" ", ""))
    if match is None:
        raise PlanError(f"--only {text!r}: write z0:z1,y0:y1,x0:x1 in voxels of the output, such as 0:64,100:300,:")
    lows, highs = match.groups()[::2], match.groups()[1::2]
    sides = [(int(low or 0), int(high or size)) for low, high, size in zip(lows, highs, shape, strict=True)]
    for axis, (start, stop), size in zip(AXES, sides, shape, strict=True):
        if not start < stop <= size:
            raise PlanError(
                f"--only {text}, axis {axis}: {start}:{stop} is empty or leaves the output, which is "
                f"{Box.from_shape(shape)}; give a start below the stop, and a stop of {size} at most"
            )
    return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


def _bounds(part: str, axis: int, volume: Volume) -> tuple[int, int]:
    size = volume.spatial_shape[axis]
    low, high = part.split(":")
    start = math.floor(_bound(low, axis, volume)) if low.strip() else 0
    stop = math.ceil(_bound(high, axis, volume)) if high.strip() else size
    if start >= size or stop > size:
        fits = f"{start if start < size else 0}:{min(stop, size)}"
        raise PlanError(f"roi, axis {AXES[axis]}: {start}:{stop} leaves the volume of {size} voxels; use {fits}, say")
    if start > stop:
        raise PlanError(f"roi, axis {AXES[axis]}: {part.strip()} ends before it begins; turn it round")
    if start == stop:
        raise PlanError(f"roi, axis {AXES[axis]}: {part.strip()} holds no voxel; end it at {start + 1} or more")
    return start, stop


def _bound(text: str, axis: int, volume: Volume) -> float:
    """Return the voxel at which a bound lies: a number, which counts stored voxels, or a length."""
    match = BOUND.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if number and not unit:
        return int(number) if volume.resampling is None else int(number) / volume.resampling.steps[axis]
    if number and unit == "%":
        return round(float(number) / 100 * volume.spatial_shape[axis])
    factor = nanometres(unit)
    if not number or factor is None:
        raise PlanError(
            f"roi, axis {AXES[axis]}: {text.strip()!r} is neither a number of voxels nor a length; write 120, "
            "or 960nm, or 75%"
        )
    if volume.voxel_size_nm is None:
        raise PlanError(
            f"roi, axis {AXES[axis]}: {text.strip()} needs a voxel size, which {volume} lacks; write the box in "
            "voxels, or give one: --set input.voxel_size_nm=40,8,8 (z, y, x) of a run, or `volpipe convert`"
        )
    place = (float(number) * factor - volume.origin_nm[axis]) / volume.voxel_size_nm[axis]
    if place < -0.5 - SLIVER:
        raise PlanError(
            f"roi, axis {AXES[axis]}: {text.strip()} lies before the volume, whose first voxel is at "
            f"{volume.origin_nm[axis]:g} nm; leave the bound open"
        )
    return max(0, math.ceil(place - SLIVER))


def _is_whole(step: float, length: int) -> bool:
    """Return whether a pyramid may have a level of `length` voxels, each `step` finer ones, its end rounded."""
    factor, num_coarse = (step, length) if step >= 1 else (1 / step, length * step)
    return abs(round(factor) * num_coarse - factor * num_coarse) < round(factor)


def lay_mask(mask: Volume, volume: Volume) -> Mask:
    """Return the place of `mask` over `volume`: by voxel sizes and origins if both have them, else stretched over it.

    Raises:
        PlanError: the mask has channels, or leaves the volume.
    """
    if mask.num_channels != 1:
        raise PlanError(f"mask {mask} has {mask.num_channels} channels; a mask has one: save it on its own")
    sizes, shape = volume.spatial_shape, mask.spatial_shape
    if mask.voxel_size_nm is None or volume.voxel_size_nm is None:
        step = triple(n / m for n, m in zip(sizes, shape, strict=True))
        return Mask(path=mask.path, key=mask.key, shape=shape, step=step, start=(0.0, 0.0, 0.0))
    step = triple(m / v for m, v in zip(mask.voxel_size_nm, volume.voxel_size_nm, strict=True))
    moved = (m - o for m, o in zip(mask.origin_nm, volume.origin_nm, strict=True))
    start = triple(d / v - (s - 1) / 2 for d, v, s in zip(moved, volume.voxel_size_nm, step, strict=True))
    for axis, n, m, a, s in zip(AXES, sizes, shape, start, step, strict=True):
        if a < -_slack(s) / 2 or a + m * s > n + _slack(s):
            where = places(Paired("the mask", mask), Paired("the volume", volume))
            raise PlanError(
                f"mask {mask}, axis {axis}: {m} voxels of {s:g} of the volume's cover {a:g} to {a + m * s:g}, the "
                f"volume is 0 to {n}: {where}; use a mask that lies within it, or correct its voxel size and origin"
            )
    sides = [_covered(*each) for each in zip(sizes, shape, start, step, strict=True)]
    inside = triple(low for low, _ in sides), triple(high for _, high in sides)
    is_all = inside == ((0, 0, 0), sizes)
    return Mask(path=mask.path, key=mask.key, shape=shape, step=step, start=start, inside=None if is_all else inside)


def _slack(step: float) -> float:
    """Return by how many voxels of a volume a grid with steps of `step` voxels may end elsewhere.

    Coarser grids differ by half a voxel in what they call their origin, and by one in how they round their end.
    """
    return abs(step - 1) + 0.01


def _covered(size: int, length: int, start: float, step: float) -> tuple[int, int]:
    """Return the voxels of a volume of `size`, along an axis, that a mask of `length` voxels covers."""
    low = 0 if start <= _slack(step) / 2 else math.floor(start + SLIVER)
    stop = start + length * step
    return low, size if stop >= size - _slack(step) else math.ceil(stop - SLIVER)
