"""Labels of which nothing is known, by their type; and levels of a pyramid, by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.geometry.labels import ignored, in_64_bits, is_ignored, reserved
from volpipe.geometry.levels import SMALLEST_LEVEL, level_factors, level_shape

MOST = 2**64


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        ("uint8", ()), ("uint16", ()), ("int8", (-1, -2, -3)), ("int64", (-1, -2, -3)),
        ("uint32", (2**32 - 1, 2**32 - 2, 2**32 - 3)), ("uint64", (MOST - 1, MOST - 2, MOST - 3)),
    ],
)  # fmt: skip
def test_the_last_numbers_of_wide_types_are_reserved(dtype: str, numbers: tuple[int, ...]) -> None:
    assert reserved(np.dtype(dtype)) == ignored(np.dtype(dtype), None) == numbers


@pytest.mark.parametrize(
    ("dtype", "ignore", "numbers"),
    [
        ("uint8", 5, (5,)), ("uint8", 255, (255,)), ("uint8", 256, ()), ("uint8", -1, (255,)),
        ("uint8", (5, 7), (5, 7)),
        ("int8", -1, (-1,)), ("int8", MOST - 1, (-1,)), ("int8", 200, ()), ("uint64", -2, (MOST - 2,)),
        ("uint64", MOST - 1, (MOST - 1,)), ("int64", MOST - 3, (-3,)), ("int64", 2**63, (-(2**63),)),
        ("uint32", MOST - 1, ()), ("uint16", (), ()), ("uint16", (-1, 0, 70000), (65535, 0)),
    ],
)  # fmt: skip
def test_labels_to_ignore_are_those_of_the_type(dtype: str, ignore: object, numbers: tuple[int, ...]) -> None:
    assert ignored(np.dtype(dtype), ignore) == numbers  # type: ignore[arg-type]


def test_voxels_with_such_a_label_are_unknown() -> None:
    labels = np.array([0, 5, 255, 7], np.uint8)
    assert is_ignored(labels, (5, -1)).tolist() == [False, True, True, False]
    assert is_ignored(labels, None).tolist() == [False] * 4
    assert is_ignored(np.array([-1, -4, 3]), None).tolist() == [True, False, False]
    assert [in_64_bits(n) for n in (3, -1, MOST + 2)] == [3, MOST - 1, 2]


@given(st.tuples(*[st.integers(1, 40)] * 3), st.tuples(*[st.integers(1, 9)] * 3))
def test_a_level_has_a_voxel_for_each_box_that_there_is_a_part_of(
    shape: tuple[int, int, int], factor: tuple[int, int, int]
) -> None:
    expected = tuple(len({i // f for i in range(n)}) for n, f in zip(shape, factor, strict=True))
    assert level_shape(shape, factor) == expected


@pytest.mark.parametrize(
    ("levels", "shape", "voxel", "factors"),
    [
        (0, (64, 64, 64), (1, 1, 1), [(1, 1, 1)]),
        (2, (64, 64, 64), (1, 1, 1), [(1, 1, 1), (2, 2, 2), (4, 4, 4)]),
        (3, (64, 64, 64), (4, 1, 1), [(1, 1, 1), (1, 2, 2), (1, 4, 4), (2, 8, 8)]),
        (1, (64, 64, 64), (1.5, 1, 1), [(1, 1, 1), (1, 2, 2)]),
        (1, (64, 64, 64), (1.49, 1, 1), [(1, 1, 1), (2, 2, 2)]),
        (9, (1, 3, 2), (1, 1, 1), [(1, 1, 1), (1, 2, 2), (1, 4, 2)]),
        (2, (1, 8, 8), (1, 4, 4), [(1, 1, 1), (1, 2, 2), (1, 4, 4)]),
        ("auto", (SMALLEST_LEVEL, 9, 9), (1, 1, 1), [(1, 1, 1)]),
        ("auto", (SMALLEST_LEVEL + 1, 9, 9), (1, 1, 1), [(1, 1, 1), (2, 2, 2)]),
        ("auto", (250, 9, 9), (1, 1, 1), [(1, 1, 1), (2, 2, 2), (4, 4, 4)]),
    ],
)  # fmt: skip
def test_levels_tend_to_cubes_and_end_when_they_are_small(
    levels: int, shape: tuple[int, int, int], voxel: tuple[float, float, float], factors: list[tuple[int, int, int]]
) -> None:
    found = level_factors(levels, shape, voxel)
    assert list(found) == factors
    assert level_factors(levels, shape, voxel, found[:2]) == found
    steps = [tuple(b // a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(found)]
    assert all(set(step) <= {1, 2} and max(step) == 2 for step in steps)
