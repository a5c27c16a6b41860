"""Intensities: normalisation before the net, its inverse and the cast to a stored type after it.

All of it takes arrays of numpy and tensors of any device alike, and gives the same bits for both: stages without a net
do not load torch. Not here: the constants (statistics), or anything that reads or writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    import torch

    Array = TypeVar("Array", np.ndarray, torch.Tensor)

LARGEST_WHOLE = 2**24  # up to which float32 has all whole numbers


@dataclass(frozen=True, slots=True)
class Affine:
    """One map for a whole volume: normalised = (value - shift) / scale. `scale` is above zero.

    Attributes:
        shift, scale: one for all channels, or one for each.
        ends: least and greatest value, for all channels or for each, to which values are clipped before; none where
            they are not.
    """

    shift: float | tuple[float, ...] = 0.0
    scale: float | tuple[float, ...] = 1.0
    ends: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (np.isfinite(self.shift).all() and np.isfinite(self.scale).all() and np.all(np.asarray(self.scale) > 0)):
            raise ValueError(f"normalisation needs a finite shift and a scale above 0, not {self.shift}, {self.scale}")

    @classmethod
    def of_channels(cls, maps: Sequence[Affine]) -> Affine:
        """Return one map of several channels: that of channel i is `maps[i]`."""
        if len(maps) == 1:
            return maps[0]
        ends = tuple(pair for each in maps for pair in each.ends)
        return cls(tuple(float(each.shift) for each in maps), tuple(float(each.scale) for each in maps), ends)  # type: ignore[arg-type]  # of one channel each

    def of_each(self, num: int) -> list[Affine]:
        """Return the map of each of `num` channels."""
        rows = [row * num if len(row) == 1 else row for row in self.rows]
        return [Affine.from_rows([(value,) for value in channel]) for channel in zip(*rows, strict=True)]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float]]) -> Affine:
        """Return the map whose `rows` these are."""
        shift, scale = (row[0] if len(row) == 1 else tuple(row) for row in rows[:2])
        return cls(shift, scale, tuple(zip(*rows[2:], strict=True)))

    @property
    def rows(self) -> tuple[tuple[float, ...], ...]:
        """Shifts and scales, and least and greatest values where there are any."""
        numbers = (each if isinstance(each, tuple) else (each,) for each in (self.shift, self.scale))
        return (*numbers, *zip(*self.ends, strict=True))

    @property
    def as_json(self) -> dict[str, object]:
        """The map as the attributes of an output hold it."""
        return {"shift": self.shift, "scale": self.scale} | ({"ends": self.ends} if self.ends else {})

    def apply(self, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return `data` of any type and shape, normalised, as float32; in `out`, if given.

        Raises:
            VolpipeError: as `check`.
        """
        self.check(data)
        normalised = np.empty(data.shape, np.float32) if out is None else out
        normalised[...] = data
        self.normalise(normalised)
        return normalised

    def normalise(self, data: Array) -> None:
        """Change float32 `data` (…, c, z, y, x) from the units of the volume to normalised values, in place."""
        if self.ends:
            low, high = (constant(data, row) for row in zip(*self.ends, strict=True))
            library(data).maximum(data, low, out=data)
            library(data).minimum(data, high, out=data)
        data -= constant(data, self.shift)
        data /= constant(data, self.scale)

    def invert(self, data: Array) -> Array:
        """Return normalised float32 `data` in the units of the volume, float32."""
        restored: Array = data * constant(data, self.scale)
        restored += constant(data, self.shift)
        return restored

    def check(self, data: np.ndarray) -> None:
        """Refuse whole numbers that are to stay as they are, such as labels, and that float32 would round.

        Raises:
            VolpipeError: with the largest.
        """
        is_kept = (np.asarray(self.shift) == 0.0) & (np.asarray(self.scale) == 1.0)  # of all channels, or of each
        is_wide = data.dtype.itemsize > 2 and data.dtype.kind in "iu" and data.size > 0
        if not (is_wide and is_kept.any()):
            return
        data = data if is_kept.ndim == 0 else data[..., is_kept, :, :, :]
        largest = max(abs(int(data.min())), abs(int(data.max())))
        if largest > LARGEST_WHOLE:
            raise VolpipeError(
                f"a voxel is {largest:,}; nets see float32, in which whole numbers above {LARGEST_WHOLE:,} are "
                "rounded: labels as large cannot go through one (`volpipe convert` copies them); of an image give "
                "normalise.low and high"
            )


def is_tensor(data: object) -> bool:
    """Return whether `data` is a tensor of torch, not an array or a scalar of numpy."""
    return not isinstance(data, np.ndarray | np.generic)


def library(data: object) -> Any:  # Any: numpy or torch, whose functions of these names agree
    """Return the module whose functions take `data`."""
    return sys.modules["torch"] if is_tensor(data) else np


def constant(data: Array, value: float | tuple[float, ...]) -> Array:
    """Return `value` as a float32 of the kind of `data`, on its device; one for each channel (c, 1, 1, 1).

    torch divides by a number of Python's on a GPU by multiplying with its inverse, which has other last bits.
    """
    place = {"device": data.device} if is_tensor(data) else {}
    if isinstance(value, tuple):
        row: Array = library(data).asarray(value, dtype=library(data).float32, **place)
        return row.reshape(-1, 1, 1, 1)
    number: Array = library(data).full((), value, dtype=library(data).float32, **place)
    return number


@dataclass(frozen=True, slots=True)
class Nonfinite:
    """Numbers of voxels that are NaN, and that are infinite."""

    nan: int = 0
    infinite: int = 0

    @property
    def total(self) -> int:
        return self.nan + self.infinite

    def __add__(self, other: Nonfinite) -> Nonfinite:
        return Nonfinite(self.nan + other.nan, self.infinite + other.infinite)

    def __str__(self) -> str:
        return f"{self.nan:,} NaN and {self.infinite:,} infinite"


ALL_FINITE = Nonfinite()


class ClippedVoxels:
    """Number of voxels that were clipped to the range of the type that they were cast to."""

    def __init__(self) -> None:
        self.clipped = 0
        self.elsewhere: torch.Tensor | None = None  # clipped on a GPU, and not counted in `clipped` yet

    def add(self, rounded: Array, low: float, top: float) -> None:
        """Count the voxels of `rounded` that are below `low` or above `top`."""
        of = library(rounded)
        if is_tensor(rounded) and str(rounded.device) != "cpu":
            num = of.count_nonzero((rounded < low) | (rounded > top))  # to ask for it now would make the GPU wait
            self.elsewhere = num if self.elsewhere is None else self.elsewhere + num
        elif rounded.min() < low or rounded.max() > top:
            self.clipped += int(of.count_nonzero(rounded < low)) + int(of.count_nonzero(rounded > top))


def to_dtype(data: Array, dtype: np.dtype, tally: ClippedVoxels | None = None) -> Array:
    """Return float32 `data` of any shape as `dtype`; integers are rounded half to even, then clipped to their range.

    `tally` counts the voxels that were clipped. Whoever has a tensor knows that it is finite: nobody looks here.

    Raises:
        VolpipeError: a value of an array is not finite and `dtype` is an integer type, which has no word for it.
    """
    if np.issubdtype(dtype, np.floating):
        return _typed(data, dtype)
    if not is_tensor(data):
        voxels = np.asarray(data)
        num_bad = int(voxels.size - np.count_nonzero(np.isfinite(voxels)))
        if num_bad:
            raise VolpipeError(
                f"{num_bad} of {voxels.size} output voxels are NaN or infinite and {dtype} cannot hold them; "
                "mend the net, or set output.dtype to float32 to see them"
            )
    info = np.iinfo(dtype)
    # float32 cannot hold the ends of 32- and 64-bit ranges: clip in float64, then once more as integers would wrap.
    exact = data if dtype.itemsize < 4 else _typed(data, np.dtype(np.float64))
    rounded: Array = library(exact).round(exact)
    # The largest 64-bit integers are no floats: the float below them is the last that fits.
    low, top = float(info.min), float(info.max) if dtype.itemsize < 8 else float(np.nextafter(float(info.max), 0.0))
    if tally is not None and 0 not in data.shape:
        tally.add(rounded, low, max(top, float(np.float32(top))))  # float32 has the top of 32 bits as one more
    clipped: Array = library(rounded).clip(rounded, low, top, out=rounded)
    return _typed(clipped, dtype)


def _typed(data: Array, dtype: np.dtype) -> Array:
    """Return `data` in the type `dtype`."""
    values: Any = data  # Any: an array or a tensor, which call it otherwise
    typed: Array = values.to(getattr(library(data), dtype.name)) if is_tensor(data) else values.astype(dtype)
    return typed


def unit_scale(dtype: np.dtype) -> float:
    """Return the stored value of probability 1: the largest of an integer type, 1 for floats."""
    return 1.0 if np.issubdtype(dtype, np.floating) else float(np.iinfo(dtype).max)
