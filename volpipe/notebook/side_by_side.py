"""Two images side by side with their difference, laid over each other by their voxel sizes where both know them.

Not here: scores of whole volumes on workers (evaluation), or a viewer (viewer). A coarser image is enlarged by
repeating its voxels, along z for instance::

    a, voxels of 16 nm    |   0   |   1   |   2   |        repeated: 0 0 1 1 2 2
    b, voxels of  8 nm    | 0 | 1 | 2 | 3 | 4 | 5 |        origins are centres: half a voxel apart here
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.evaluation.psnr import psnr
from volpipe.geometry.grid import Box, Shape, Triple, triple
from volpipe.notebook.boxes import Sizes, checked_at, checked_size
from volpipe.notebook.pictures import Drawn, channel_note, first_channel, slices_of
from volpipe.notebook.try_out import TryOut, divided, repeated, squeezed
from volpipe.reporting.panels import Panel
from volpipe.reporting.shades import display_range, diverge, shaded
from volpipe.reporting.slices import middle_of, part_around, voxel_at
from volpipe.segmentation.driver import SegmentationResult
from volpipe.tables import html_facts
from volpipe.units import shape
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.volume import Volume, open_volume
from volpipe.workflow.driver import Report

AXES = "zyx"
SHOWN = (64, 256, 256)  # voxels (z, y, x) of a box whose size is not given, at most
SLIVER = 0.01  # of a voxel: what rounding of lengths in nm may leave
CALLED = ("a", "b")
UNPLACED: Lengths = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Image:
    """Voxels that may be read box by box, and their place as far as it is known.

    Attributes:
        name: for captions and refusals.
        shape: (z, y, x).
        num_channels: of what `read` returns, (c, z, y, x).
        unit: of the lengths below: "nm", "voxels of a volume of …" that does not say their size, "" of an array alone.
        voxel: its lengths (z, y, x).
        origin: centre of the first voxel, (z, y, x).
        read: returns the voxels of a box (z, y, x).
        is_part: whether it is known to be a box of its volume.
    """

    name: str
    shape: Triple
    num_channels: int
    dtype: np.dtype
    unit: str
    voxel: Lengths
    origin: Lengths
    read: Callable[[Box], np.ndarray]
    is_part: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class SideBySide(Drawn):
    """Two images over the same box, on the finer of their grids, and how they differ.

    Attributes:
        a, b: voxels (z, y, x), of several channels (c, z, y, x), in their own types.
        box: that is compared, in voxels of `a` repeated by `factors`.
        factors: how often voxels of `a`, and of `b`, are repeated along z, y, x.
        voxel_size_nm: of the voxels here, None where it is unknown.
        rmse: root of the mean squared difference, of voxels that are finite in both.
        psnr: in dB by the range of the type of `a`, infinite where nothing differs; None where that is not of 8 or 16
            bits.
        largest: difference.
        share: of voxels that differ, from 0 to 1.
        num_nonfinite: voxels that are NaN or infinite in one of them.
    """

    a: np.ndarray
    b: np.ndarray
    names: tuple[str, str]
    box: Box
    factors: tuple[Triple, Triple]
    voxel_size_nm: Lengths | None
    rmse: float
    psnr: float | None
    largest: float
    share: float
    num_nonfinite: int

    def __repr__(self) -> str:
        factors = zip(CALLED, self.factors, strict=True)
        enlarged = "".join(f", {name} enlarged {shape(factor)}" for name, factor in factors if factor != (1, 1, 1))
        return f"<SideBySide of {self.names[0]} and {self.names[1]} at {self.box}{enlarged}: {self._number_line}>"

    @property
    def difference(self) -> np.ndarray:
        """b - a, float64; NaN where one of them is not finite."""
        return _finite_change(self.a, self.b)

    @property
    def _number_line(self) -> str:
        noise = "" if self.psnr is None else f", PSNR {self.psnr:.2f} dB"
        bad = f", {self.num_nonfinite:,} voxels are not finite" if self.num_nonfinite else ""
        return f"RMSE {self.rmse:.4g}{noise}, largest {self.largest:.4g}, {100 * self.share:.3g} % differ{bad}"

    def panels(self) -> Iterator[list[Panel]]:
        """Yield slices of `a`, `b` and their difference, three of a size."""
        a, b, change = (first_channel(data) for data in (self.a, self.b, self.difference))
        limits = display_range(a, b)
        for part in slices_of(a.shape, self.box.start):
            nm, shown = part.nm(self.voxel_size_nm), change[part.index]
            about = f"{self.names[0]}{channel_note(self.a)}\n{part.name}, {limits[0]:.4g} to {limits[1]:.4g}"
            largest = float(np.nanmax(np.abs(shown), initial=0.0, where=np.isfinite(shown)))
            scale = f"blue -{largest:.3g}, red +{largest:.3g}" if largest > 0 else "none"
            yield [
                Panel(about, shaded(a[None, *part.index], limits), nm),
                Panel(f"{self.names[1]}\n{part.name}, same greys", shaded(b[None, *part.index], limits), nm),
                Panel(f"difference b - a\n{scale}", diverge(shown, largest), nm),
            ]

    def _html_table(self) -> str:
        noise = "no range of the type" if self.psnr is None else f"{self.psnr:.2f} dB"
        rows: dict[str, object] = {
            "a": f"{self.names[0]}, {self.a.dtype}, repeated {self.factors[0]}",
            "b": f"{self.names[1]}, {self.b.dtype}, repeated {self.factors[1]}",
            "box": self.box,
            "RMSE": f"{self.rmse:.4g}",
            "PSNR": noise,
            "largest difference": f"{self.largest:.4g}",
            "voxels that differ": f"{100 * self.share:.3g} %",
        } | ({"not finite": f"{self.num_nonfinite:,} voxels"} if self.num_nonfinite else {})
        return html_facts(rows, caption="side by side")


def side_by_side(a: object, b: object, *, at: Sequence[int] | None = None, size: Sizes | None = None) -> SideBySide:
    """Return two images over a box; arguments as of `volpipe.side_by_side`."""
    one, other = image_of(a, "a"), image_of(b, "b")
    if one.num_channels != other.num_channels:
        raise VolumeError(
            f"a, {one.name}, has {one.num_channels} channels and b, {other.name}, has {other.num_channels}; give one "
            "of each, such as array[0]"
        )
    factors, shift = _lay_over(one, other)
    whole = Box.from_shape(one.shape).scaled(factors[0])
    shared = whole & Box.from_shape(other.shape).scaled(factors[1]).shift(shift)
    if shared.is_empty:
        raise VolumeError(f"a, {one.name}, and b, {other.name}, share no voxel: a covers {whole}, b begins at {shift}")
    box = _chosen(one, factors[0], shared, at, size)
    first = _enlarged(one, factors[0], box)
    second = _enlarged(other, factors[1], box.relative_to(shift))
    nm = divided(one.voxel, factors[0]) if one.unit == "nm" else None
    names = one.name, other.name
    return SideBySide(squeezed(first), squeezed(second), names, box, factors, nm, **_numbers_of(first, second))


def image_of(value: object, called: str) -> Image:
    """Return an array, a volume, its location, or the output of a run or of a try-out, as an image.

    Raises:
        VolumeError: it is none of these, or has other axes.
    """
    if isinstance(value, str | Path):
        return image_of(open_volume(value), called)
    if isinstance(value, Report | SegmentationResult):
        return _report_image(value)
    if isinstance(value, Volume):
        return _volume_image(value)
    if isinstance(value, TryOut):
        return _try_out_image(value)
    if not hasattr(value, "__array__"):
        raise VolumeError(
            f"{called} is {type(value).__name__}; give an array, a volume, its path, the report of a run, or what "
            "vp.try_net returned"
        )
    return _array_image(np.asarray(value), "an array")


def _volume_image(value: Volume) -> Image:
    name = "/".join(str(value.folder).split("/")[-2:])
    image = Image(name, value.spatial_shape, value.num_channels, value.dtype, "", UNPLACED, UNPLACED, value.crop)
    return _placed(image, value.voxel_size_nm, value.origin_nm, image.shape)


def _report_image(report: Report | SegmentationResult) -> Image:
    """Return the output of `report` as an image; without a voxel size its place is in voxels of the run's input."""
    volume, plan = open_volume(report.plan.out), report.plan
    image, place = _volume_image(volume), (volume.voxel_size_nm, volume.origin_nm, plan.source.shape)
    if isinstance(report, SegmentationResult):
        return _placed(image, *place)
    net, plan = report.plan.net, report.plan
    image = replace(image, is_part=not plan.is_whole)
    start = plan.roi_box.start if plan.grid is None else plan.grid.roi[0]
    return _placed(image, *place, start, divided(net.shrink, net.scale))


def _try_out_image(result: TryOut) -> Image:
    """Return the output of `result` as an image; without a voxel size its place is in voxels of the tried volume."""
    image = _array_image(result.output, f"{result.facts.net} at {result.box}")
    image = replace(image, is_part=result.box.shape != result.volume_shape)
    place = result.out_voxel_size_nm, result.out_origin_nm, result.volume_shape
    return _placed(image, *place, result.box.start, result.out_voxel)


def _placed(
    image: Image, size_nm: Lengths | None, origin_nm: Lengths, whole: Triple,
    start: Shape = (0, 0, 0), voxel: Lengths = (1.0, 1.0, 1.0),
) -> Image:  # fmt: skip
    """Return `image` in nm where its voxel size is known, else in voxels of a volume of shape `whole`.

    Args:
        start: voxel of that volume in which the image begins.
        voxel: lengths of the image's voxels, in voxels of that volume.
    """
    if size_nm is not None:
        return replace(image, unit="nm", voxel=size_nm, origin=origin_nm)
    origin = triple(a + (v - 1) / 2 for a, v in zip(start, voxel, strict=True))
    return replace(image, unit=f"voxels of a volume of {shape(whole)}", voxel=voxel, origin=origin)


def _array_image(data: np.ndarray, name: str) -> Image:
    if data.ndim not in (2, 3, 4) or not data.size or data.dtype.kind not in "iufb":
        raise VolumeError(
            f"{name}: {data.dtype} of shape {data.shape} is no image; give numbers (y, x), (z, y, x) or (c, z, y, x)"
        )
    data = data.astype(np.uint8) if data.dtype.kind == "b" else data
    full = data.reshape((1,) * (4 - data.ndim) + data.shape)
    shape = triple(full.shape[1:])
    return Image(name, shape, len(full), full.dtype, "", UNPLACED, UNPLACED, lambda box: full[:, *box.slices])


def _lay_over(one: Image, other: Image) -> tuple[tuple[Triple, Triple], Triple]:
    """Return how often voxels of both are repeated, and at which of the repeated voxels of `one` `other` begins.

    Raises:
        VolumeError: no whole factors, or the voxels lie askew, or nothing says where a box of a volume lies.
    """
    is_placed = one.unit == other.unit != ""
    if not is_placed and one.unit and other.unit:
        _check_whole(one, other)
    along = _by_place if is_placed else _by_shape
    first, second, shift = zip(*(along(one, other, axis) for axis in range(3)), strict=True)
    return (triple(first), triple(second)), triple(shift)


def _check_whole(one: Image, other: Image) -> None:
    """Refuse a box of a volume beside an image of another unit: their corners need not coincide."""
    for (called, image), (rest, beside) in permutations(zip(CALLED, (one, other), strict=True)):
        if image.is_part:
            raise VolumeError(
                f"{called}, {image.name}, is a box of a volume, which lies in {image.unit}, and {rest}, "
                f"{beside.name}, lies in {beside.unit}, so that it is unknown which voxels lie over each other; "
                "give both a voxel size, by vp.open(…, view=vp.View(voxel_size_nm=(z, y, x))), or crop them to the "
                "same box and give arrays"
            )


def _by_shape(one: Image, other: Image, axis: int) -> Triple:
    """Return how often voxels of both are repeated along `axis`, where their corners coincide, and 0 as the shift."""
    n, m = one.shape[axis], other.shape[axis]
    if max(n, m) % min(n, m):
        unknown = "a" if one.unit != "nm" else "b"
        raise VolumeError(
            f"axis {AXES[axis]}: a, {one.name}, has {n} voxels and b, {other.name}, has {m}, of which neither is a "
            f"multiple of the other, and the voxel size of {unknown} is unknown; crop both to the same box, or give "
            "volumes that say their voxel size"
        )
    return (m // n, 1, 0) if m > n else (1, n // m, 0)


def _by_place(one: Image, other: Image, axis: int) -> Triple:
    """Return how often voxels of both are repeated along `axis`, and where `other` begins, in repeated voxels."""
    size, width, unit = one.voxel[axis], other.voxel[axis], one.unit.partition(" ")[0]
    fine = min(size, width)
    pair = round(size / fine), round(width / fine)
    start = ((other.origin[axis] - width / 2) - (one.origin[axis] - size / 2)) / fine
    reach = max(one.shape[axis] * pair[0], other.shape[axis] * pair[1])
    if abs(pair[0] - size / fine) * one.shape[axis] > 0.5 or abs(pair[1] - width / fine) * other.shape[axis] > 0.5:
        raise VolumeError(
            f"axis {AXES[axis]}: voxels of a, {one.name}, are {size:g} {unit} and those of b, {other.name}, {width:g}, "
            "of which neither is a multiple of the other; resample one, or give arrays of the same shape"
        )
    if abs(start - round(start)) > SLIVER * max(1.0, reach / 1000):
        raise VolumeError(
            f"axis {AXES[axis]}: voxels of b, {other.name}, lie {start - math.floor(start):.2f} of {fine:g} {unit} "
            f"beside those of a, {one.name}; correct the origin of one, or give arrays of the same shape"
        )
    return *pair, round(start)


def _chosen(one: Image, factor: Triple, shared: Box, at: Sequence[int] | None, size: Sizes | None) -> Box:
    """Return the box to compare, in repeated voxels of `one`: around `at`, of `size`, both in its own voxels."""
    if at is None:
        middle = middle_of(shared)
    else:
        middle = tuple(a * f + f // 2 for a, f in zip(checked_at(at, one.shape), factor, strict=True))
        if not shared.contains(voxel_at(middle)):
            raise VolumeError(f"at {tuple(at)}: b has no voxel there; both have {shared}, in the finer voxels of a")
    length = triple(min(s, n) for s, n in zip(SHOWN, shared.shape, strict=True))
    if size is not None:
        asked = checked_size(size, one.shape)
        length = checked_size([s * f for s, f in zip(asked, factor, strict=True)], triple(shared.shape))
    return part_around(shared, middle, length)


def _enlarged(image: Image, factor: Triple, box: Box) -> np.ndarray:
    """Return the voxels (c, z, y, x) of `box`, in repeated voxels of `image`."""
    start = tuple(a // f for a, f in zip(box.start, factor, strict=True))
    own = Box(start, tuple(-(-b // f) for b, f in zip(box.stop, factor, strict=True)))
    return repeated(image.read(own), factor)[:, *box.relative_to(own.scaled(factor).start).slices]


def _numbers_of(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:  # Any: the numbers of SideBySide, by name
    change = _finite_change(a, b)
    finite = np.isfinite(change)
    squares = np.square(change[finite])
    num, total = squares.size, float(squares.sum())
    is_small = a.dtype.kind in "iu" and a.dtype.itemsize <= 2
    range_ = float(np.iinfo(a.dtype).max) - float(np.iinfo(a.dtype).min) if is_small else None
    return {
        "rmse": math.sqrt(total / num) if num else math.nan,
        "psnr": psnr(num, total, range_) if range_ is not None and num else None,
        "largest": float(np.abs(change[finite]).max(initial=0.0)),
        "share": float(np.count_nonzero((a != b)[finite]) / num) if num else math.nan,
        "num_nonfinite": int(finite.size - num),
    }


def _finite_change(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return b - a, float64; NaN where one of them is not finite."""
    finite = np.isfinite(a) & np.isfinite(b)
    zero = a.dtype.type(0), b.dtype.type(0)
    change = np.where(finite, b, zero[1]).astype(np.float64) - np.where(finite, a, zero[0]).astype(np.float64)
    return np.where(finite, change, np.nan)
