"""Weights are a partition of unity: at every voxel they sum to one, whatever the blend, overlap and window."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.geometry.blend import FAMILIES, profile, span, support
from volpipe.geometry.grid import Lattice


@st.composite
def axes(draw: st.DrawFn) -> tuple[Lattice, int]:
    window = draw(st.integers(1, 20))
    lattice = Lattice(
        (draw(st.integers(1, 60)),) * 3, (window,) * 3, (draw(st.integers(0, window - 1)),) * 3, (2, 2, 2)
    )
    return lattice, draw(st.integers(1, 3))


@pytest.mark.parametrize("family", FAMILIES)
@given(axes())
def test_weights_sum_to_one_at_every_voxel(family: str, drawn: tuple[Lattice, int]) -> None:
    lattice, scale = drawn
    size = lattice.shape[0] * scale
    total = np.zeros(size)
    for index in range(lattice.counts[0]):
        weights = span(family, lattice, 0, index, scale)
        first = (index * lattice.stride[0] - lattice.margin[0]) * scale
        assert first + weights.start >= 0 and first + weights.stop <= size
        total[first + weights.start : first + weights.stop] += weights.weights
    np.testing.assert_allclose(total, 1.0, atol=3e-7)


@pytest.mark.parametrize("family", FAMILIES)
@given(axes())
def test_a_window_reaches_no_farther_than_its_support(family: str, drawn: tuple[Lattice, int]) -> None:
    lattice, _ = drawn
    before, after = (reach[0] for reach in support(lattice, family))
    for index in range(lattice.counts[0]):
        weights = span(family, lattice, 0, index)
        core = index * lattice.stride[0]
        first = core - lattice.margin[0]
        assert first + weights.start >= core - before
        assert first + weights.stop <= core + lattice.stride[0] + after


def test_crop_weights_are_exactly_one_on_the_core() -> None:
    lattice = Lattice((20, 20, 20), (10, 10, 10), (4, 4, 4), (1, 1, 1))
    for index, width in enumerate((6, 6, 6, 2)):
        weights = span("crop", lattice, 0, index)
        assert weights.start == 2
        assert weights.weights.tolist() == [1.0] * width


def test_profiles_are_what_their_formulas_say() -> None:
    np.testing.assert_allclose(profile("hann", 4), [0.1464466, 0.8535534, 0.8535534, 0.1464466], atol=1e-7)
    np.testing.assert_allclose(profile("gaussian", 2), [np.exp(-2.0)] * 2)
    assert profile("constant", 3).tolist() == [1, 1, 1]
    for family in FAMILIES:
        assert (profile(family, 4096) > 0).all()
        np.testing.assert_allclose(profile(family, 9), profile(family, 9)[::-1])


def test_two_hann_windows_at_half_overlap_need_no_normalising() -> None:
    """sin² and its shift by half a window sum to one by themselves: inside, the weights are the plain profile."""
    lattice = Lattice((64, 64, 64), (16, 16, 16), (8, 8, 8), (1, 1, 1))
    np.testing.assert_allclose(span("hann", lattice, 0, 3).weights, profile("hann", 16), atol=1e-7)
