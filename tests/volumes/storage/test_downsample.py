"""Coarser voxels: the mean over pairs along some axes is tensorstore's, to the bit; and threads that are its own."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import tensorstore as ts

from volpipe.volumes.storage import tensorstore
from volpipe.volumes.storage.tensorstore import downsample

STEPS = [(1, *step) for step in product((1, 2), repeat=3) if step != (1, 1, 1)]


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return voxels of all values, with whole blocks of the largest and halves of every kind among them."""
    rng, top = np.random.default_rng(0), np.iinfo(dtype).max
    data = rng.integers(0, top, shape, dtype, endpoint=True)
    data[:, :4] = top
    data[:, 4:8] = rng.integers(0, 4, data[:, 4:8].shape, dtype)
    return data


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_means_of_pairs_are_those_of_tensorstore(dtype: str, step: tuple[int, ...]) -> None:
    data = values(dtype, (2, 16, 10, 14))
    expected = ts.downsample(ts.array(data), list(step), "mean").read().result()
    with patch.object(ts, "downsample", side_effect=AssertionError("this is done without it")):
        result = downsample(data, step, "mean")
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_means_of_part_of_an_array_are_its_own(dtype: str) -> None:
    """Its voxels do not lie one after the other."""
    part = values(dtype, (3, 24, 20, 20))[1:, 2:18, 1:9, 3:17]
    np.testing.assert_array_equal(downsample(part, (1, 2, 2, 2), "mean"), downsample(part.copy(), (1, 2, 2, 2), "mean"))


@pytest.mark.parametrize(
    ("shape", "step", "dtype", "method"),
    [
        ((1, 15, 10, 14), (1, 2, 2, 2), "uint8", "mean"),  # the last plane has no other
        ((1, 16, 10, 13), (1, 2, 2, 2), "uint16", "mean"),
        ((1, 16, 12, 12), (1, 4, 2, 2), "uint8", "mean"),
        ((16, 10, 14), (1, 2, 2), "uint8", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "int16", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "uint64", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "uint8", "mode"),
    ],
)
def test_all_else_is_left_to_tensorstore(
    shape: tuple[int, ...], step: tuple[int, ...], dtype: str, method: str
) -> None:
    data = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    expected = ts.downsample(ts.array(data), list(step), "mode" if method == "mode" else "mean").read().result()
    np.testing.assert_array_equal(downsample(data, step, method), expected)


def test_what_is_encoded_does_not_wait_behind_what_is_read() -> None:
    """On an H100 it did for a quarter of a second for each slab, as long as the GPU computed one (2026-11-27)."""
    assert tensorstore.context(encodes=True) is tensorstore.context(encodes=True)
    assert tensorstore.context(encodes=True) is not tensorstore.context()
