"""Global statistics of a volume, measured once, box by box and in parallel, and joined without loss.

Not here: their use per voxel (intensity). Sums are exact fractions, so that the result does not depend on how boxes
were gathered into tasks. Voxels of 8 bits are counted value by value; the percentiles of other types come
from a histogram of NUM_BINS evenly spaced bins between minimum and maximum, made in a second pass.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from volpipe.errors import PlanError
from volpipe.inference.intensity import Affine
from volpipe.recipes.inference import Normalise, Recipe
from volpipe.volumes.values import FAR, FAR_DEVIATIONS, Sample, grey_notes, labels_note
from volpipe.volumes.volume import Volume

NUM_BINS = 4096
USED = 0.4  # of the range of 8 bits, at least, that grey levels of 8 bits fill in another type
ROUNDED = 1 + 1e-6  # by which division by 255 may leave 1
LABELS = (
    "as labels have, whose numbers are no grey levels, and of which a net sees no more than 24 bits; name the image, "
    "or give normalise.low and high if these are grey levels (`volpipe convert` copies labels)"
)


@dataclass(frozen=True)
class Statistics:
    """Statistics of voxels: number, sum, sum of squares, extremes, and counts per value or bin.

    `counts` maps a value (8 bits) or a bin number (other types, second pass) to its voxels; `channels` are those of
    each channel, where they are mapped apart.
    """

    num: int
    total: Fraction
    squares: Fraction
    low: float
    high: float
    counts: dict[int, int]
    channels: tuple[Statistics, ...] = ()

    @property
    def each(self) -> tuple[Statistics, ...]:
        """The statistics of each channel; a single one where all channels are mapped alike."""
        return self.channels or (self,)

    @property
    def ends(self) -> tuple[tuple[float, float], ...]:
        """Least and greatest value of each of `each`."""
        return tuple((each.low, each.high) for each in self.each)


def is_counted(dtype: np.dtype) -> bool:
    """Return whether voxels of `dtype` are counted value by value."""
    return np.issubdtype(dtype, np.integer) and dtype.itemsize == 1


def check_grey(choice: Normalise, volume: Volume) -> None:
    """Refuse whole numbers of 32 or 64 bits, unless `choice` says that they are grey levels: they may be labels."""
    is_open = choice.method == "auto" and choice.low is None and choice.mean is None
    if is_open and _may_be_labels(volume.stored_dtype):
        raise PlanError(f"{volume} has {volume.stored_dtype} voxels, {LABELS}")


def _may_be_labels(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.integer) and dtype.itemsize > 2


def as_trained(recipe: Recipe, sample: Sample | None) -> Recipe:
    """Return `recipe` with the method bytes where its net was trained with known grey levels, it gives none, and a
    sample of a volume of another type than 8 bits has grey levels of 8 bits.
    """
    choice = recipe.normalise
    if sample is None or recipe.net.trained_range is None or choice.method != "auto":
        return recipe
    ends = byte_ends(*sample.ends, sample.volume.dtype)
    is_open = resolve_method(choice, sample.volume.dtype).method == "percentile"
    if not is_open or ends is None or labels_note(sample, ""):
        return recipe
    low, high = ends
    taken = choice.model_copy(update={"method": "bytes", "low": low, "high": high})
    return recipe.model_copy(update={"normalise": taken})


def _fitting(choice: Normalise, dtype: np.dtype, statistics: Statistics) -> tuple[float, float] | None:
    """Return the values that become -1 and 1 by the method bytes; None where voxels lie beyond them."""
    if choice.low is None or choice.high is None:
        return byte_ends(statistics.low, statistics.high, dtype)
    is_within = choice.low <= statistics.low and statistics.high <= choice.high * ROUNDED
    return (choice.low, choice.high) if is_within else None


def byte_ends(low: float, high: float, dtype: np.dtype) -> tuple[float, float] | None:
    """Return the values that are 0 and 255 of 8 bits, for voxels of `dtype` from `low` to `high`; None of others.

    Grey levels that fill less than USED of such a range are others: nobody knows of what.
    """
    tops = (1.0, 255.0) if np.issubdtype(dtype, np.floating) else (255.0,)
    return next(((0.0, top) for top in tops if low >= 0 and high <= top * ROUNDED and high - low >= USED * top), None)


def resolve_method(choice: Normalise, dtype: np.dtype) -> Normalise:
    """Return `choice` with the method that "auto" means for voxels of `dtype`, and "bytes" for those of 8 bits."""
    if choice.method != "auto" and not (choice.method == "bytes" and is_counted(dtype)):
        return choice
    is_range = choice.low is not None or is_counted(dtype)
    method = "zscore" if choice.mean is not None else "range" if is_range else "percentile"
    return choice.model_copy(update={"method": method})


def in_own_type(choice: Normalise, dtype: np.dtype) -> Normalise:
    """Return `choice` with the method, and the ends, that it has for voxels of `dtype`, to be read in a wider type."""
    choice = resolve_method(choice, dtype)
    if choice.method != "range" or choice.low is not None or not np.issubdtype(dtype, np.integer):
        return choice
    low, high = _extremes(choice, dtype, None)
    return choice.model_copy(update={"low": low, "high": high})


def needs_measuring(choice: Normalise, dtype: np.dtype) -> bool:
    """Return whether `choice` asks for statistics that are neither given nor known from the type."""
    choice = resolve_method(choice, dtype)
    if choice.method == "range":
        return choice.low is None and np.issubdtype(dtype, np.floating)
    if choice.method == "zscore":
        return choice.mean is None
    return choice.method == "bytes" or (choice.method == "percentile" and choice.low is None)


def needs_histogram(choice: Normalise, dtype: np.dtype, statistics: Statistics | None = None) -> bool:
    """Return whether `choice` needs the second pass, once the `statistics` of the first are known."""
    choice = resolve_method(choice, dtype)
    if choice.method == "bytes":
        return statistics is None or any(s.num > 0 and _fitting(choice, dtype, s) is None for s in statistics.each)
    is_inside = choice.percentiles != (0, 100)
    return choice.method == "percentile" and choice.low is None and is_inside and not is_counted(dtype)


def is_finite(data: np.ndarray) -> bool:
    """Return whether no voxel of `data` is NaN or infinite."""
    return not np.issubdtype(data.dtype, np.floating) or bool(np.isfinite(data).all())


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
        counts = {}
        if bins is not None:
            low, high = bins
            share = (data.ravel().astype(np.float64) - low) / max(high - low, np.finfo(np.float64).tiny)
            place = np.clip((share * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
            numbers = np.bincount(place, minlength=NUM_BINS)
            counts = {int(i): int(numbers[i]) for i in np.flatnonzero(numbers)}
        wide = data.astype(np.float64)
        total, squares = Fraction(float(wide.sum())), Fraction(float((wide * wide).sum()))
    return Statistics(data.size, total, squares, float(data.min()), float(data.max()), counts)


def measure_each(data: np.ndarray, bins: Sequence[tuple[float, float]] = ()) -> Statistics:
    """Return the statistics of `data` (c, …), and those of each channel, whose histograms are between its own `bins`.

    Raises:
        PlanError: as `measure`.
    """
    channels = tuple(measure(voxels, ends) for voxels, ends in itertools.zip_longest(data, bins))
    return replace(join(channels), channels=channels)


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
        tuple(join(channel) for channel in zip(*(p.channels for p in parts), strict=True)),
    )


def affine(choice: Normalise, dtype: np.dtype, statistics: Statistics | None, *, interpolated: bool = False) -> Affine:
    """Return the map of grey levels of a volume of `dtype`; `statistics` may be None if `choice` needs none.

    Voxels that are `interpolated` swing beyond those that they are made of, and are clipped to these where their ends
    were measured.

    Raises:
        PlanError: the volume is constant, so that there is nothing to scale by.
    """
    if statistics is not None:
        mapped = Affine.of_channels([_affine(choice, dtype, each) for each in statistics.each])
        return replace(mapped, ends=statistics.ends) if interpolated else mapped
    return _affine(choice, dtype, None)


def _affine(choice: Normalise, dtype: np.dtype, statistics: Statistics | None) -> Affine:
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
    ends = None
    if choice.method == "bytes":
        assert statistics is not None
        ends = _fitting(choice, dtype, statistics)
        if ends is None and _may_be_labels(dtype):
            raise PlanError(f"{dtype} voxels reach {statistics.high:g}, and a sample had none above 255; {LABELS}")
        choice = choice.model_copy(update={"method": "percentile", "low": None, "high": None})
    low, high = ends or _extremes(choice, dtype, statistics)
    if statistics is not None and low == high and statistics.low < statistics.high:
        raise PlanError(
            f"the percentiles {choice.percentiles[0]:g} and {choice.percentiles[1]:g} of the volume are both {low:g}, "
            f"though its voxels reach from {statistics.low:g} to {statistics.high:g}: give the grey levels that "
            "the net is to see as -1 and 1, normalise.low and high"
        )
    eps = choice.eps if choice.method == "percentile" and choice.low is None else 0.0
    return Affine((low + high + eps) / 2, _spread((high - low) / 2, choice.method) + eps / 2)


@dataclass(frozen=True)
class GreyRule:
    """The rule by which grey levels of a volume are mapped, or of several that are read as one.

    Attributes:
        choices: of each volume, with its number of channels.
        dtype: which holds the voxels of all as they are stored.
    """

    choices: tuple[tuple[Normalise, int], ...]
    dtype: np.dtype

    @property
    def is_apart(self) -> bool:
        """Whether channels are measured, and mapped, apart."""
        return sum(num for _, num in self.choices) > 1 and (len(self.choices) > 1 or self.choices[0][0].per_channel)

    @property
    def needs_measuring(self) -> bool:
        return any(needs_measuring(choice, self.dtype) for choice, _ in self.choices)

    def needs_histogram(self, statistics: Statistics | None = None) -> bool:
        """Return whether the second pass is needed, once the `statistics` of the first are known."""
        each = self._of_each(statistics)
        return any(
            needs_histogram(choice, self.dtype, own) for (choice, _), own in zip(self.choices, each, strict=True)
        )

    def measure(self, data: np.ndarray, bins: Sequence[tuple[float, float]] = ()) -> Statistics:
        """Return the statistics of `data` (c, …), of each channel where they are measured apart."""
        return measure_each(data, bins) if self.is_apart else measure(data, bins[0] if bins else None)

    def affine(self, statistics: Statistics | None, *, interpolated: bool = False) -> Affine:
        """Return the map; `statistics` may be None if nothing needs any; see the function `affine`."""
        if len(self.choices) == 1:
            return affine(self.choices[0][0], self.dtype, statistics, interpolated=interpolated)
        maps = list[Affine]()
        for (choice, num), own in zip(self.choices, self._of_each(statistics), strict=True):
            maps += affine(choice, self.dtype, own, interpolated=interpolated).of_each(num)
        return Affine.of_channels(maps)

    def sampled_affine(self, samples: Sequence[np.ndarray]) -> Affine:
        """Return the map of volumes of which these are `samples` (c, …); see the function `sampled_affine`."""
        pairs = list(zip(self.choices, samples, strict=True))
        if len(pairs) == 1:
            return sampled_affine(self.choices[0][0], samples[0])
        return Affine.of_channels(
            [each for (choice, num), voxels in pairs for each in sampled_affine(choice, voxels).of_each(num)]
        )

    def _of_each(self, statistics: Statistics | None) -> list[Statistics | None]:
        """Return the statistics of each volume."""
        if statistics is None or len(self.choices) == 1:
            return [statistics] * len(self.choices)
        result, first = list[Statistics | None](), 0
        for choice, num in self.choices:
            own = statistics.channels[first : first + num]
            result.append(replace(join(own), channels=own if choice.per_channel and num > 1 else ()))
            first += num
        return result


def sampled_affine(choice: Normalise, voxels: np.ndarray) -> Affine:
    """Return the map of a volume of which `voxels` (c, …) are a sample; the identity where they are (nearly) alike.

    NaN and infinity are left out: they may lie outside the selection.
    """
    if not needs_measuring(choice, voxels.dtype):
        return affine(choice, voxels.dtype, None)
    if choice.per_channel and voxels.ndim > 1:
        alike = choice.model_copy(update={"per_channel": False})
        return Affine.of_channels([sampled_affine(alike, channel) for channel in voxels])
    voxels = voxels[np.isfinite(voxels)]
    if not voxels.size or voxels.min() == voxels.max():
        return Affine()
    statistics = measure(voxels)
    if needs_histogram(choice, voxels.dtype, statistics):
        statistics = measure(voxels, (statistics.low, statistics.high))
    try:
        return affine(choice, voxels.dtype, statistics)
    except PlanError:  # of a sample; the whole volume may differ
        return Affine()


def in_numbers(choice: Normalise, mapped: Affine) -> Normalise:
    """Return `choice` with the numbers of `mapped`, the map of one channel that it gave for a volume."""
    (shift,), (scale,) = mapped.rows
    if choice.method == "none":
        return choice
    if choice.method == "zscore":
        return Normalise(method="zscore", mean=shift, std=scale)
    return Normalise(method="range", low=shift - scale, high=shift + scale)


def mapping(choice: Normalise, dtype: np.dtype) -> str:
    """Return by which rule grey levels are mapped, and which become -1 and 1 where that is known: "8 bits: 0 … 255"."""
    choice = resolve_method(choice, dtype)
    if choice.method == "bytes":
        return (
            "8 bits" if choice.low is None or choice.high is None else f"8 bits: {_as_range(choice.low, choice.high)}"
        )
    if choice.low is not None and choice.high is not None:
        return f"given: {_as_range(choice.low, choice.high)}"
    if choice.mean is not None:
        return f"given: mean {choice.mean:g}, deviation {choice.std:g}"
    if choice.method == "range" and is_counted(dtype):
        return f"8 bits: {_as_range(*_extremes(choice, dtype, None))}"
    return {"none": "as they are", "range": "range", "zscore": "mean and deviation"}.get(choice.method, "percentiles")


def _as_range(low: float, high: float) -> str:
    return f"{low:g} … {high:g}"


def mapping_notes(recipe: Recipe, sample: Sample) -> list[str]:
    """Return what a user should know of how grey levels are mapped, by a sample, in sentences."""
    dtype, trained, is_auto = sample.volume.dtype, recipe.net.trained_range, recipe.normalise.method == "auto"
    choice = resolve_method(recipe.normalise, dtype)
    notes = labels_note(sample, "a net makes nonsense of them; name the image (`volpipe convert` copies labels)")
    if choice.method != "none" and not needs_measuring(choice, dtype):
        known = affine(choice, dtype, None)
        is_plain = (known.shift, known.scale) == (0.0, 1.0)  # as they are, said another way
        far = FAR_DEVIATIONS if choice.method == "zscore" else FAR
        (shift,), (scale,) = known.rows
        settings = {"normalise.low and high": choice.low, "normalise.mean and std": choice.mean}
        given = (name for name, value in settings.items() if value is not None)
        setting = next(given, f"normalise.method {choice.method}")
        notes += [] if is_plain else grey_notes(sample, shift, scale, setting, far)
    if trained is None or sample.is_constant:
        return notes
    if is_auto and choice.method == "range" and choice.low is None and trained != (0.0, 255.0):
        taken, (low, high) = _as_range(*_extremes(choice, dtype, None)), trained
        notes.append(
            f"the net was trained with grey levels {_as_range(low, high)} as -1 … 1, and {taken} of {dtype} are taken: "
            f"set normalise.low={low:g} and normalise.high={high:g} if the volume has those"
        )
    elif choice.method == "bytes" and choice.low is not None and choice.high is not None:
        notes.append(
            f"{sample.seen}, which are taken for grey levels of 8 bits: {_as_range(choice.low, choice.high)} of "
            f"{dtype} → -1 … 1, as 0 … 255 of uint8, if no voxel lies beyond; set normalise.low and high if they are "
            "others"
        )
    elif is_auto and choice.method == "percentile":
        low, high = choice.percentiles
        is_normal = -1 <= sample.ends[0] < 0 and sample.ends[1] <= 1
        advice = (
            "set normalise.method=none if they are normalised already"
            if is_normal
            else "set normalise.low and high to the grey levels that match those"
        )
        notes.append(
            f"{sample.seen}, which are not those of 8 bits: the net was trained with {_as_range(*trained)} as -1 … 1, "
            f"and the percentiles {low:g} and {high:g} are taken; {advice}"
        )
    return notes


def percentile(statistics: Statistics, percent: float, dtype: np.dtype) -> float:
    """Return the value below or at which `percent` of the voxels lie: exact for counted types, to a bin otherwise.

    0 and 100 are the least and the greatest.
    """
    if percent in (0, 100):
        return statistics.high if percent else statistics.low
    rank = percent / 100 * statistics.num
    total = 0
    for value, num in statistics.counts.items():
        total += num
        if total >= rank:
            if is_counted(dtype):
                return float(value)
            return statistics.low + (value + 0.5) / NUM_BINS * (statistics.high - statistics.low)
    return statistics.high


def _extremes(choice: Normalise, dtype: np.dtype, statistics: Statistics | None) -> tuple[float, float]:
    if choice.low is not None and choice.high is not None:
        return choice.low, choice.high
    if choice.method == "range" and np.issubdtype(dtype, np.integer):
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
