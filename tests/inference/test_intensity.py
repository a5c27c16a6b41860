"""Normalisation: by statistics, which are those of the whole array however it was divided; its inverse, and the cast to
what is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from volpipe.blockwise.journal import Record
from volpipe.errors import PlanError, VolpipeError
from volpipe.inference.intensity import Affine, ClippedVoxels, to_dtype, unit_scale
from volpipe.inference.statistics import (
    NUM_BINS,
    Statistics,
    affine,
    join,
    measure,
    measure_each,
    needs_histogram,
    needs_measuring,
    percentile,
)
from volpipe.recipes.inference import Normalise

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "float32", "float64"]


def made(dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    data = rng.normal(40, 20, (7, 11, 13))
    return np.clip(data, -100, 120).astype(dtype) if dtype != "uint8" else np.clip(data, 0, 255).astype(dtype)


def travelled(found: Statistics) -> Statistics:
    """Return the statistics as a journal gives them back."""
    result = Record.from_line(Record("measure", (0,), result=found).to_line(), (Statistics,)).result
    assert isinstance(result, Statistics)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@given(cuts=st.lists(st.integers(0, 1000), max_size=6), grouping=st.integers(1, 4))
def test_parts_joined_in_any_grouping_are_the_whole(dtype: str, cuts: list[int], grouping: int) -> None:
    data = made(dtype).ravel()
    parts = [travelled(measure(part)) for part in np.split(data, sorted(cuts))]
    groups = [join(parts[i : i + grouping]) for i in range(0, len(parts), grouping)]
    assert join(reversed(groups)) == join(parts)
    whole = join(parts)
    assert whole.num == data.size
    np.testing.assert_allclose(float(whole.total / whole.num), data.mean(dtype=np.float64), rtol=1e-12)
    assert (whole.low, whole.high) == (data.min(), data.max())


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_each_channel_has_its_own_percentiles(dtype: str) -> None:
    data = np.stack([made(dtype), made(dtype, seed=1) // 3])
    choice = Normalise(method="percentile", percentiles=(10, 90), per_channel=True)
    parts = np.split(data, [3, 5], axis=2)
    first = join(travelled(measure_each(part)) for part in parts)
    second = join(travelled(measure_each(part, first.ends)) for part in parts)
    mapped = affine(choice, data.dtype, second if needs_histogram(choice, data.dtype, first) else first).apply(data)
    low, high = np.percentile(data.reshape(2, -1), (10, 90), axis=1, method="inverted_cdf").reshape(2, 2, 1, 1, 1)
    expected = (data - (low.astype(float) + high) / 2) / (high.astype(float) - low) * 2
    np.testing.assert_allclose(mapped, expected, rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zscore_gives_mean_zero_and_deviation_one(dtype: str) -> None:
    data = made(dtype)
    normal = affine(Normalise(method="zscore"), data.dtype, measure(data)).apply(data)
    assert abs(normal.mean()) < 1e-5
    assert abs(normal.std() - 1) < 1e-5


@pytest.mark.parametrize("percent", [0, 0.5, 50, 99.5, 100])
def test_percentiles_of_bytes_are_exact(percent: float) -> None:
    data = made("uint8")
    expected = np.percentile(data, percent, method="inverted_cdf")
    assert percentile(measure(data), percent, data.dtype) == expected


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("percent", [0.5, 50, 99.5])
def test_percentiles_of_other_types_are_right_to_a_bin(dtype: str, percent: float) -> None:
    data = made(dtype, seed=3)
    first = measure(data)
    assert first.counts == {}
    found = join([measure(part, (first.low, first.high)) for part in np.split(data.ravel(), 7)])
    bin_width = (first.high - first.low) / NUM_BINS
    assert (
        abs(percentile(found, percent, data.dtype) - np.percentile(data, percent, method="inverted_cdf")) <= bin_width
    )


def test_ranges_map_to_minus_one_and_one() -> None:
    data = np.array([0, 255], np.uint8)
    assert affine(Normalise(), data.dtype, None).apply(data).tolist() == [-1.0, 1.0]
    given_range = affine(Normalise(low=10, high=20), np.dtype(np.float32), None)
    assert given_range.apply(np.array([10.0, 15.0, 20.0])).tolist() == [-1.0, 0.0, 1.0]
    assert affine(Normalise(method="none"), data.dtype, None).apply(data).tolist() == [0.0, 255.0]
    assert affine(Normalise(method="zscore", mean=5, std=2), data.dtype, None).apply(data)[0] == -2.5


@pytest.mark.parametrize(
    ("choice", "dtype", "measured", "twice"),
    [
        (Normalise(), "uint8", False, False),
        (Normalise(), "int8", False, False),
        (Normalise(), "uint16", True, True),
        (Normalise(), "float32", True, True),
        (Normalise(mean=1, std=2), "uint16", False, False),
        (Normalise(method="range"), "uint16", False, False),
        (Normalise(method="range"), "float32", True, False),
        (Normalise(low=0, high=1), "float32", False, False),
        (Normalise(method="zscore"), "uint8", True, False),
        (Normalise(method="zscore", mean=1, std=1), "uint8", False, False),
        (Normalise(method="percentile"), "uint8", True, False),
        (Normalise(method="percentile"), "uint16", True, True),
        (Normalise(method="none"), "float32", False, False),
    ],
)
def test_nothing_is_measured_that_is_known(choice: Normalise, dtype: str, measured: bool, twice: bool) -> None:
    assert needs_measuring(choice, np.dtype(dtype)) is measured
    assert needs_histogram(choice, np.dtype(dtype)) is twice


def test_a_constant_volume_cannot_be_scaled_by_itself() -> None:
    data = np.full((3, 3, 3), 7, np.uint8)
    with pytest.raises(PlanError, match="constant"):
        affine(Normalise(method="zscore"), data.dtype, measure(data))
    with pytest.raises(PlanError, match="constant"):
        affine(Normalise(method="percentile"), data.dtype, measure(data))


def test_voxels_that_are_not_finite_are_named() -> None:
    with pytest.raises(PlanError, match="NaN"):
        measure(np.array([1.0, np.nan]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("normalise", [Affine(), Affine(127.5, 127.5), Affine(31000.25, 977.125), Affine(-3.7, 0.02)])
def test_every_value_of_a_small_type_comes_back(dtype: type, normalise: Affine) -> None:
    info = np.iinfo(dtype)
    values = np.arange(info.min, info.max + 1).astype(dtype)
    back = to_dtype(normalise.invert(normalise.apply(values)), np.dtype(dtype))
    assert back.dtype == dtype
    assert np.array_equal(back, values)


def test_normalised_values_are_float32_and_as_written() -> None:
    assert Affine(100.0, 50.0).apply(np.array([0, 100, 200], np.uint8)).tolist() == [-2.0, 0.0, 2.0]
    assert Affine(100.0, 50.0).apply(np.array([1], np.uint64)).dtype == np.float32


@pytest.mark.parametrize(
    ("value", "expected"), [(0.5, 0), (1.5, 2), (2.5, 2), (-0.6, 0), (254.5, 254), (255.5, 255), (1e9, 255)]
)
def test_rounding_is_half_to_even_and_the_rest_is_clipped(value: float, expected: int) -> None:
    assert to_dtype(np.array([value], np.float32), np.dtype(np.uint8))[0] == expected


@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64", "int64"])
def test_wide_types_clip_without_wrapping(dtype: str) -> None:
    info = np.iinfo(dtype)
    low, high = to_dtype(np.array([-1e30, 1e30], np.float32), np.dtype(dtype))
    assert int(low) == info.min
    assert info.max - int(high) <= 2048


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_only_voxels_beyond_the_range_count_as_clipped(dtype: str, kind: Callable[[np.ndarray], np.ndarray]) -> None:
    """Of 32 bits every voxel of probability 1 counted: float32 has 2^32 for the largest integer."""
    info, top = np.iinfo(dtype), np.float32(unit_scale(np.dtype(dtype)))
    beyond = max(np.nextafter(top, np.float32(np.inf)), top + np.float32(1))
    below = min(np.nextafter(np.float32(info.min), np.float32(-np.inf)), np.float32(info.min) - np.float32(1))
    values = np.array([top, top, info.min, 0, beyond, beyond, below], np.float32)
    tally = ClippedVoxels()
    stored = np.asarray(to_dtype(kind(values), np.dtype(dtype), tally))
    assert stored.tolist() == [info.max, info.max, info.min, 0, info.max, info.max, info.min]
    assert tally.clipped == 3


@given(st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_is_refused_for_integers_and_kept_for_floats(bad: float) -> None:
    data = np.array([1.0, bad], np.float32)
    with pytest.raises(VolpipeError, match="1 of 2 output voxels"):
        to_dtype(data, np.dtype(np.uint8))
    np.testing.assert_array_equal(to_dtype(data, np.dtype(np.float32)), data)


def test_a_map_without_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="scale above 0"):
        Affine(0.0, 0.0)


def test_probability_one_is_the_largest_integer() -> None:
    assert (unit_scale(np.dtype(np.uint8)), unit_scale(np.dtype(np.uint16)), unit_scale(np.dtype(np.float32))) == (
        255,
        65535,
        1,
    )
