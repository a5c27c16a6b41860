"""Global statistics of a volume, measured once, box by box and in parallel, and joined without loss.

Not here: their use per voxel (intensity). Sums are exact fractions, so that the result does not depend on how boxes
were gathered into tasks. Voxels of 8 bits are counted value by value; the percentiles of other types come
from a histogram of NUM_BINS evenly spaced bins between minimum and maximum, made in a second pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from volpipe.errors import PlanError
from volpipe.inference.intensity import Affine
from volpipe.recipes.inference import Normalise
from volpipe.volumes.volume import Volume

NUM_BINS = 4096


@dataclass(frozen=True)
class Statistics:
    """Statistics of voxels: number, sum, sum of squares, extremes, and counts per value or bin.

    `counts` maps a value (8 bits) or a bin number (other types, second pass) to its voxels.
    """

    num: int
    total: Fraction
    squares: Fraction
    low: float
    high: float
    counts: dict[int, int]


def is_counted(dtype: np.dtype) -> bool:
    """Return whether voxels of `dtype` are counted value by value."""
    return dtype.kind in "iu" and dtype.itemsize == 1


def check_grey(choice: Normalise, volume: Volume) -> None:
    """Refuse whole numbers of 32 or 64 bits, unless `choice` says that they are grey levels: they may be labels."""
    dtype = volume.dtype
    is_open = choice.method == "auto" and choice.low is None and choice.mean is None
    if is_open and dtype.kind in "iu" and dtype.itemsize > 2:
        raise PlanError(
            f"{volume} has {dtype} voxels, as labels have, whose numbers are no grey levels, and of which a net sees "
            "no more than 24 bits; name the image, or give normalise.low and high if these are grey levels "
            "(`volpipe convert` copies labels)"
        )


def resolve_method(choice: Normalise, dtype: np.dtype) -> Normalise:
    """Return `choice` with the method that "auto" means for voxels of `dtype`."""
    if choice.method != "auto":
        return choice
    is_range = choice.low is not None or is_counted(dtype)
    method = "zscore" if choice.mean is not None else "range" if is_range else "percentile"
    return choice.model_copy(update={"method": method})


def needs_measuring(choice: Normalise, dtype: np.dtype) -> bool:
    """Return whether `choice` asks for statistics that are neither given nor known from the type."""
    choice = resolve_method(choice, dtype)
    if choice.method == "range":
        return choice.low is None and dtype.kind == "f"
    if choice.method == "zscore":
        return choice.mean is None
    return choice.method == "percentile" and choice.low is None


def needs_histogram(choice: Normalise, dtype: np.dtype) -> bool:
    """Return whether `choice` needs the second pass."""
    choice = resolve_method(choice, dtype)
    return choice.method == "percentile" and choice.low is None and not is_counted(dtype)


def is_finite(data: np.ndarray) -> bool:
    """Return whether no voxel of `data` is NaN or infinite."""
    return data.dtype.kind != "f" or bool(np.isfinite(data).all())


def measure(data: np.ndarray, bins: tuple[float, float] | None = None) -> Statistics:
    """Return the statistics of `data`; with `bins` (low, high), also its histogram of NUM_BINS between them.

    Raises:
        PlanError: a voxel is NaN or infinite.
    """
    if data.size == 0:
        return join([])
    if not is_finite(data):
        raise PlanError("the volume holds NaN or infinite voxels; give normalise.low and high, or mean and std")
    if is_counted(data.dtype):
        values, frequencies = np.unique(data, return_counts=True)
        counts = dict(zip(values.tolist(), frequencies.tolist(), strict=True))
        total = Fraction(sum(v * n for v, n in counts.items()))
        squares = Fraction(sum(v * v * n for v, n in counts.items()))
    else:
        counts = {} if bins is None else _binned(data, bins)
        wide = data.astype(np.float64)
        total, squares = Fraction(float(wide.sum())), Fraction(float((wide * wide).sum()))
    return Statistics(data.size, total, squares, float(data.min()), float(data.max()), counts)


def join(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of all voxels of `parts`; their order and grouping do not matter."""
    parts = [p for p in parts if p.num]
    counts = Counter[int]()
    for part in parts:
        counts.update(part.counts)
    return Statistics(
        sum(p.num for p in parts),
        sum((p.total for p in parts), Fraction(0)),
        sum((p.squares for p in parts), Fraction(0)),
        min((p.low for p in parts), default=math.inf),
        max((p.high for p in parts), default=-math.inf),
        dict(sorted(counts.items())),
    )


def affine(choice: Normalise, dtype: np.dtype, statistics: Statistics | None) -> Affine:
    """Return the map of grey levels of a volume of `dtype`; `statistics` may be None if `choice` needs none.

    Raises:
        PlanError: the volume is constant, so that there is nothing to scale by.
    """
    choice = resolve_method(choice, dtype)
    if choice.method == "none":
        return Affine()
    if choice.method == "zscore":
        if choice.mean is not None and choice.std is not None:
            return Affine(choice.mean, choice.std)
        assert statistics is not None
        mean = statistics.total / statistics.num
        deviation = math.sqrt(max(Fraction(0), statistics.squares / statistics.num - mean * mean))
        return Affine(float(mean), _spread(deviation, choice.method) + choice.eps)
    low, high = _ends(choice, dtype, statistics)
    if statistics is not None and low == high and statistics.low < statistics.high:
        raise PlanError(
            f"the percentiles {choice.percentiles[0]:g} and {choice.percentiles[1]:g} of the volume are both {low:g}, "
            f"though its voxels reach from {statistics.low:g} to {statistics.high:g}: give the grey levels that "
            "the net is to see as -1 and 1, normalise.low and high"
        )
    eps = choice.eps if choice.method == "percentile" and choice.low is None else 0.0
    return Affine((low + high + eps) / 2, _spread((high - low) / 2, choice.method) + eps / 2)


def sampled_affine(choice: Normalise, voxels: np.ndarray) -> Affine:
    """Return the map of a volume of which `voxels` are a sample; the identity where they are (nearly) alike.

    NaN and infinity are left out: they may lie outside the selection.
    """
    if not needs_measuring(choice, voxels.dtype):
        return affine(choice, voxels.dtype, None)
    voxels = voxels[np.isfinite(voxels)]
    if not voxels.size or voxels.min() == voxels.max():
        return Affine()
    statistics = measure(voxels)
    if needs_histogram(choice, voxels.dtype):
        statistics = measure(voxels, (statistics.low, statistics.high))
    try:
        return affine(choice, voxels.dtype, statistics)
    except PlanError:  # of a sample; the whole volume may differ
        return Affine()


def percentile(statistics: Statistics, percent: float, dtype: np.dtype) -> float:
    """Return the value below or at which `percent` of the voxels lie: exact for counted types, to a bin otherwise."""
    rank = percent / 100 * statistics.num
    total = 0
    for value, num in statistics.counts.items():
        total += num
        if total >= rank:
            if is_counted(dtype):
                return float(value)
            return statistics.low + (value + 0.5) / NUM_BINS * (statistics.high - statistics.low)
    return statistics.high


def _ends(choice: Normalise, dtype: np.dtype, statistics: Statistics | None) -> tuple[float, float]:
    if choice.low is not None and choice.high is not None:
        return choice.low, choice.high
    if choice.method == "range" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        return float(info.min), float(info.max)
    assert statistics is not None
    if choice.method == "range":
        return statistics.low, statistics.high
    low, high = (percentile(statistics, p, dtype) for p in choice.percentiles)
    return low, high


def _spread(scale: float, method: str) -> float:
    if not scale > 0:
        raise PlanError(f"normalise.method {method}: the volume is constant, there is no spread to scale by; use none")
    return scale


def _binned(data: np.ndarray, bins: tuple[float, float]) -> dict[int, int]:
    low, high = bins
    share = (data.ravel().astype(np.float64) - low) / max(high - low, np.finfo(np.float64).tiny)
    place = (share * NUM_BINS).astype(np.int64)
    counts = np.bincount(np.clip(place, 0, NUM_BINS - 1), minlength=NUM_BINS)
    return {int(i): int(counts[i]) for i in np.flatnonzero(counts)}
