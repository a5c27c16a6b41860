"""Greys, colours and bars of pictures: what numpy and arithmetic give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from volpipe.reporting import shades
from volpipe.reporting.frames import Scale


@given(st.floats(1e-3, 1e9))
def test_a_bar_is_the_longest_round_length_that_fits(most: float) -> None:
    bars = [step * 10.0**power for power in range(-5, 11) for step in (1, 2, 5)]
    assume(all(abs(bar / most - 1) > 1e-6 for bar in bars))
    assert shades.bar_nm(most) == pytest.approx(max(bar for bar in bars if bar <= most))


def test_a_bar_may_be_as_long_as_there_is_room() -> None:
    for length in (0.5, 2.0, 50.0, 2e6):
        assert shades.bar_nm(length) == shades.bar_nm(length * (1 - 1e-12)) == pytest.approx(length)


def test_lengths_are_in_micrometres_from_a_thousand_nm() -> None:
    scale = Scale(8.0)
    assert [scale.text(nm) for nm in (0.5, 500.0, 999.0, 1000.0, 2500.0)] == [
        "0.5 nm", "500 nm", "999 nm", "1 µm", "2.5 µm"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_whole", "largest"),
    [
        (np.zeros(9), False, 0.0), (np.zeros(9), True, 0.0), (np.full(9, -0.25), False, 0.25),
        (np.full(9, 0.25), True, 1.0), (np.full(9, -7.0), True, 7.0),
        (np.array([np.nan, np.inf, 3.0, -3.0]), False, 3.0), (np.array([np.nan, -np.inf]), False, 0.0),
        (np.r_[np.zeros(99_999), 4.0], False, 4.0),
    ],
)  # fmt: skip
def test_the_difference_in_full_colour_is_near_the_largest(change: np.ndarray, is_whole: bool, largest: float) -> None:
    assert shades.display_change(change, is_whole=is_whole) == pytest.approx(largest)


@given(st.floats(-100, 100), st.floats(0, 100))
def test_greys_go_from_one_limit_to_the_other(low: float, span: float) -> None:
    values = np.linspace(low - 5, low + span + 5, 50).reshape(5, 10)
    width = span if low + span > low else 1.0
    expected = np.rint(np.clip((values - low) * (255 / width), 0, 255)).astype(np.uint8)
    found = shades.grey(values, (low, low + span))
    assert found.dtype == np.uint8 and np.abs(found.astype(int) - expected).max() <= 1


def test_channels_are_red_green_and_blue_and_holes_are_red() -> None:
    data = np.array([[[0.0, 1.0]], [[1.0, 0.5]], [[0.0, np.nan]], [[9.0, 9.0]]])
    image = shades.shaded(data, (0.0, 1.0))
    np.testing.assert_array_equal(image[0], [[0, 255, 0], [255, 0, 0]])
    two = shades.shaded(data[:2], (0.0, 1.0))
    np.testing.assert_array_equal(two[0], [[0, 255, 0], [255, 128, 0]])
    one = shades.shaded(np.array([[[0.2, np.inf]]]), (0.0, 1.0))
    np.testing.assert_array_equal(one[0], [[51, 51, 51], [255, 0, 0]])
    assert shades.shaded(data[:1], (0.0, 1.0)).shape == (1, 2)


def test_labels_lie_over_the_image_and_zero_is_clear() -> None:
    labels, below = np.array([[0, 5, 5, 9]]), np.array([[10, 20, 30, 40]], np.uint8)
    alone, over = shades.coloured(labels), shades.coloured(labels, below)
    np.testing.assert_array_equal(alone[0, 0], [0, 0, 0])
    np.testing.assert_array_equal(over[0, 0], [10, 10, 10])
    np.testing.assert_array_equal(alone[0, 1:3], shades.colours(np.array([5, 5])))
    grey = np.array([[20] * 3, [30] * 3, [40] * 3])
    mixed = grey * (1 - shades.OPACITY) + alone[0, 1:] * shades.OPACITY
    np.testing.assert_allclose(over[0, 1:], mixed, atol=0.51)


def test_differences_of_nothing_are_white_and_the_rest_by_its_sign() -> None:
    change = np.array([[0.0, 2.0, -2.0, 4.0, -9.0, np.nan, np.inf, 1.0]])
    image = shades.diverge(change, 4.0)
    np.testing.assert_array_equal(
        image[0],
        [[255] * 3, [255, 128, 128], [128, 128, 255], [255, 0, 0], [0, 0, 255], [0] * 3, [0] * 3, [255, 191, 191]],
    )
    np.testing.assert_array_equal(shades.diverge(change[:, :2], 0.0)[0], [[255] * 3, [255] * 3])
