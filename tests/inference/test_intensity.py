"""Normalisation, its inverse, and the cast to what is stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.errors import VolpipeError
from volpipe.inference.intensity import Affine, to_dtype, unit_scale


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
