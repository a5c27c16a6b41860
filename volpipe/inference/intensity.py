"""Intensities: normalisation before the net, its inverse and the cast to a stored type after it.

Not here: the constants (statistics), or anything that reads or writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from volpipe.errors import VolpipeError

LARGEST_WHOLE = 2**24  # up to which float32 has all whole numbers


@dataclass(frozen=True, slots=True)
class Affine:
    """One map for a whole volume: normalised = (value - shift) / scale. `scale` is above zero."""

    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.shift) and np.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"normalisation needs a finite shift and a scale above 0, not {self.shift}, {self.scale}")

    def apply(self, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return `data` of any type and shape, normalised, as float32; in `out`, if given.

        Raises:
            VolpipeError: whole numbers that are to stay as they are, such as labels, are too large for float32.
        """
        if (self.shift, self.scale) == (0.0, 1.0):
            _check_fits(data)
        normalised = np.empty(data.shape, np.float32) if out is None else out
        normalised[...] = data
        normalised -= np.float32(self.shift)
        normalised /= np.float32(self.scale)
        return normalised

    def invert(self, data: np.ndarray) -> np.ndarray:
        """Return normalised float32 `data` in the units of the volume, float32."""
        restored: np.ndarray = data * np.float32(self.scale)
        restored += np.float32(self.shift)
        return restored


def _check_fits(data: np.ndarray) -> None:
    """Refuse whole numbers that float32 would round."""
    if data.dtype.kind in "iu" and data.dtype.itemsize > 2 and data.size:
        largest = max(abs(int(data.min())), abs(int(data.max())))
        if largest > LARGEST_WHOLE:
            raise VolpipeError(
                f"a voxel is {largest:,}; nets see float32, in which whole numbers above {LARGEST_WHOLE:,} are "
                "rounded: labels as large cannot go through one (`volpipe convert` copies them); of an image give "
                "normalise.low and high"
            )


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


@dataclass(slots=True)
class Tally:
    """Number of voxels that were clipped to the range of the type that they were cast to."""

    clipped: int = 0


def to_dtype(data: np.ndarray, dtype: np.dtype, tally: Tally | None = None) -> np.ndarray:
    """Return float32 `data` of any shape as `dtype`; integers are rounded half to even, then clipped to their range.

    `tally` counts the voxels that were clipped.

    Raises:
        VolpipeError: a value is not finite and `dtype` is an integer type, which has no word for it.
    """
    if dtype.kind == "f":
        return data.astype(dtype)
    num_bad = int(data.size - np.count_nonzero(np.isfinite(data)))
    if num_bad:
        raise VolpipeError(
            f"{num_bad} of {data.size} output voxels are NaN or infinite and {dtype} cannot hold them; "
            "mend the net, or set output.dtype to float32 to see them"
        )
    info = np.iinfo(dtype)
    # float32 cannot hold the ends of 32- and 64-bit ranges: clip in float64, then once more as integers would wrap.
    exact = data if dtype.itemsize < 4 else data.astype(np.float64)
    rounded = np.rint(exact)
    # The largest 64-bit integers are no floats: the float below them is the last that fits.
    top = float(info.max) if dtype.itemsize < 8 else float(np.nextafter(float(info.max), 0.0))
    if tally is not None and data.size and (rounded.min() < info.min or rounded.max() > top):
        tally.clipped += int(np.count_nonzero(rounded < info.min)) + int(np.count_nonzero(rounded > top))
    whole: np.ndarray = rounded.clip(float(info.min), top, out=rounded).astype(dtype)
    return whole


def unit_scale(dtype: np.dtype) -> float:
    """Return the stored value of probability 1: the largest of an integer type, 1 for floats."""
    return 1.0 if dtype.kind == "f" else float(np.iinfo(dtype).max)
