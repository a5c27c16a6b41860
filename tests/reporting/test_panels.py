"""Panels: which pixel shows which voxel, bars are as long as they say, and memory is bounded."""

from __future__ import annotations

import io
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from volumes import noise

from volpipe.reporting.frames import STRIP
from volpipe.reporting.panels import CAPTION, CURVE_HEIGHT, CURVE_WIDTH, FRAME, MARGIN, MOST, Panel, curve, panels_png
from volpipe.reporting.shades import bar_nm, diverge, grey


def drawn(*rows: list[Panel], **options: int) -> np.ndarray:
    """Return the pixels of a picture, (y, x, 3)."""
    return np.asarray(Image.open(io.BytesIO(panels_png(rows, **options))))


def tile(pixels: np.ndarray, column: int, shape: tuple[int, int], above: int = 0) -> np.ndarray:
    """Return the image of a column whose images are 240 pixels wide at least; those `above` have so many rows."""
    top, left = MARGIN + CAPTION + above, MARGIN + column * (max(240, shape[1]) + MARGIN)
    return pixels[top : top + shape[0], left : left + shape[1]]


def test_each_image_is_in_its_place_unchanged() -> None:
    first, second, third = noise((50, 240)), noise((30, 240), seed=1), noise((20, 240, 3), seed=2)
    pixels = drawn([Panel("a", first), Panel("b", second)], [Panel("c", third)])
    above = CAPTION + 50 + MARGIN
    assert pixels.shape == (MARGIN + above + CAPTION + 20 + MARGIN, 3 * MARGIN + 2 * 240, 3)
    assert (tile(pixels, 0, (50, 240)) == first[..., None]).all()
    assert (tile(pixels, 1, (30, 240)) == second[..., None]).all()
    assert (tile(pixels, 0, (20, 240), above) == third).all()


def test_captions_stand_above_images_notes_below_and_nothing_in_margins() -> None:
    panel = Panel("input, xy at z 32\n0 to 255", np.zeros((40, 300), np.uint8))
    pixels = drawn([panel]).copy()
    lines = pixels[MARGIN : MARGIN + CAPTION - 1, MARGIN:-MARGIN]
    for caption in (lines[: CAPTION // 2], lines[CAPTION // 2 :]):
        assert caption.min() < 40 and caption.mean() > 200  # ink, but mostly paper
    noted = np.asarray(Image.open(io.BytesIO(panels_png([[panel]], ["a note"]))))
    np.testing.assert_array_equal(noted[: len(pixels)], pixels)
    assert (noted[len(pixels) - MARGIN :] < 128).any()
    pixels[MARGIN : -MARGIN + 1, MARGIN - 1 : -MARGIN + 1] = 255
    assert (pixels == 255).all()


@pytest.mark.parametrize("length", [100, 50, 20, 10, 1, 0.5])
def test_a_scale_bar_is_a_round_length(length: float) -> None:
    assert bar_nm(length) == bar_nm(1.99 * length) == pytest.approx(length)


def test_a_scale_bar_has_the_length_that_it_names() -> None:
    pixels = drawn([Panel("a", np.full((50, 300), 255, np.uint8), (2.0, 2.0))])
    (bar,) = {int(row.min(-1).argmax()) for row in pixels[-STRIP // 2 - MARGIN :][:1, MARGIN + 6 :]}
    assert bar == 50  # 100 nm of 2 nm: 30 % of 600 nm is at most 180


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    voxels=st.lists(st.tuples(st.floats(1, 60), st.floats(1, 60)), min_size=3, max_size=3),
    most=st.integers(480, 1024),
)
@settings(max_examples=30, deadline=None)
def test_panels_are_stretched_by_their_voxels_and_thinned_as_if_they_were_drawn_whole(
    shapes: list[tuple[int, int]], voxels: list[tuple[float, float]], most: int
) -> None:
    panels = [Panel("a", noise(shape), nm) for shape, nm in zip(shapes, voxels, strict=False)]
    shortest = min(min(nm) for nm in voxels[: len(panels)])
    whole = [
        panel.pixels.repeat(max(1, round(y / shortest)), axis=0).repeat(max(1, round(x / shortest)), axis=1)
        for panel, (y, x) in zip(panels, voxels, strict=False)
    ]
    height, width = (max(pixels.shape[axis] for pixels in whole) for axis in (0, 1))
    step = math.ceil(max(width, height) / most)
    zoom = max(1, min(math.ceil(240 / width), most // height))
    pixels, above = drawn(*([panel] for panel in panels), most=most), 0
    for image in whole:
        expected = np.kron(image[::step, ::step], np.ones((zoom, zoom), np.uint8))
        assert max(expected.shape) <= most
        assert np.array_equal(tile(pixels, 0, expected.shape, above)[..., 0], expected)
        above += CAPTION + len(expected) + STRIP + MARGIN


def test_memory_of_a_picture_is_bounded_whatever_the_voxels() -> None:
    voxels = np.zeros((1500, 1500), np.uint8)
    panels = [[Panel("a", voxels, (50.0, 50.0))], [Panel("b", voxels[:4], (0.5, 50.0))], [Panel("c", voxels[:, :1])]]
    panels_png(panels)  # loads what draws
    tracemalloc.start()
    pixels = drawn(*panels)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pixels) < 3 * (MOST + CAPTION + STRIP + MARGIN) + MARGIN
    assert most < 64 << 20  # stretched, the first alone is of 22 GB


def test_an_image_of_one_value_is_drawn_black() -> None:
    image = np.full((2, 3), 7.0)
    for limits in ((7.0, 7.0), (7.0, 5.0)):
        assert (grey(image, limits) == 0).all() and (grey(image + 1, limits) == 255).all()


def test_differences_are_blue_white_and_red_and_black_where_they_are_none() -> None:
    shown = diverge(np.array([[-2.0, 0.0, 1.0, 9.0, np.nan, np.inf]]), 2.0)
    black, white = [0] * 3, [255] * 3
    assert shown.tolist() == [[[0, 0, 255], white, [255, 128, 128], [255, 0, 0], black, black]]
    assert diverge(np.zeros((1, 1)), 0.0).tolist() == [[white]]


def test_a_curve_goes_through_its_points() -> None:
    image = curve([(-1, 1.0), (0, 3.0), (1, 2.0)], low=0.0, marked=0.0)
    assert image.shape == (CURVE_HEIGHT, CURVE_WIDTH, 3)
    dark, red = (image.max(-1) < 50), (image[..., 0] > 1.5 * image[..., 1].clip(1))
    rows = [np.flatnonzero(dark[:, column]).mean() for column in (2, CURVE_WIDTH // 2, CURVE_WIDTH - 3)]
    np.testing.assert_allclose(rows, [CURVE_HEIGHT * share for share in (2 / 3, 0, 1 / 3)], atol=6)
    assert np.flatnonzero(red.any(0)).tolist() in ([CURVE_WIDTH // 2 - 1], [CURVE_WIDTH // 2])
    assert tuple(panel_corner(image)) == FRAME


def panel_corner(image: np.ndarray) -> list[int]:
    """Return the pixel beside the first of an image: that of the line around it."""
    return drawn([Panel("a", image)])[MARGIN + CAPTION - 1, MARGIN - 1].tolist()
