"""Pictures: which pixel shows which voxel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from volpipe.errors import VolumeError
from volpipe.evaluation.pictures import CAPTION, MARGIN, draw_comparison, panel

WHITE = (255, 255, 255)


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def tile(pixels: np.ndarray, row_top: int, left: int, shape: tuple[int, int]) -> np.ndarray:
    top = row_top + CAPTION
    return pixels[top : top + shape[0], left : left + shape[1]]


def test_panel_shows_each_image_at_its_place_unchanged(tmp_path: Path) -> None:
    first = np.random.default_rng(0).integers(0, 256, (50, 240), dtype=np.uint8)
    second = np.random.default_rng(1).integers(0, 256, (30, 240), dtype=np.uint8)
    third = np.random.default_rng(2).integers(0, 256, (20, 240, 3), dtype=np.uint8)
    panel(tmp_path / "a.png", [("a", first), ("b", second), ("c", third)], columns=2)
    pixels = read(tmp_path / "a.png")
    height = MARGIN + (CAPTION + 50 + MARGIN) + (CAPTION + 20 + MARGIN)
    assert pixels.shape == (height, 3 * MARGIN + 2 * 240, 3)
    grey = tile(pixels, MARGIN, MARGIN, (50, 240))
    assert all((grey[..., c] == first).all() for c in range(3))
    assert (tile(pixels, MARGIN, 2 * MARGIN + 240, (30, 240))[..., 0] == second).all()
    assert (tile(pixels, 2 * MARGIN + CAPTION + 50, MARGIN, (20, 240)) == third).all()


def test_panel_writes_captions_above_images_and_nothing_in_margins(tmp_path: Path) -> None:
    image = np.zeros((40, 300), np.uint8)
    panel(tmp_path / "a.png", [("input, xy at z 32", image)])
    pixels = read(tmp_path / "a.png")
    caption = pixels[MARGIN : MARGIN + CAPTION, MARGIN:-MARGIN]
    assert caption.min() < 40  # ink
    assert caption.mean() > 200  # but mostly paper
    pixels = pixels.copy()
    pixels[MARGIN:-MARGIN, MARGIN:-MARGIN] = 255
    assert (pixels == WHITE).all()


def test_panel_enlarges_small_images_by_a_whole_factor(tmp_path: Path) -> None:
    image = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
    panel(tmp_path / "a.png", [("a", image)])
    shown = tile(read(tmp_path / "a.png"), MARGIN, MARGIN, (160, 240))[..., 0]  # 240 / 3 = 80
    assert (shown == np.kron(image, np.ones((80, 80), np.uint8))).all()


def test_a_narrow_image_that_is_high_is_enlarged_no_further_than_it_fits(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (1500, 3), dtype=np.uint8)
    panel(tmp_path / "a.png", [("a", image)])
    pixels = read(tmp_path / "a.png")
    assert pixels.shape == (MARGIN + CAPTION + 2 * 1500 + MARGIN, 2 * MARGIN + 240, 3)
    assert (tile(pixels, MARGIN, MARGIN, (3000, 6))[..., 0] == np.kron(image, np.ones((2, 2), np.uint8))).all()


def test_pictures_have_the_same_bytes_each_time(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (8, 16, 16), dtype=np.uint8)
    for name in ("a.png", "b.png"):
        draw_comparison(tmp_path / name, data, data[::-1])
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_compare_shows_the_middle_slices_and_colours_their_difference(tmp_path: Path) -> None:
    before = np.full((6, 250, 240), 100, np.uint8)
    after = before.copy()
    after[3, 10, 20] = 150  # on the middle xy slice: the largest change there
    after[3, 10, 21] = 75  # half as much, the other way
    after[2, 125, 30] = 90  # on the middle xz slice alone
    draw_comparison(tmp_path / "a.png", before, after)
    pixels = read(tmp_path / "a.png")
    lefts = [MARGIN + i * (240 + MARGIN) for i in range(3)]
    xy = [tile(pixels, MARGIN, left, (250, 240)) for left in lefts]
    xz = [tile(pixels, 2 * MARGIN + CAPTION + 250, left, (6, 240)) for left in lefts]
    assert (xy[0] == 100).all()
    assert tuple(xy[1][10, 20]) == (150, 150, 150)
    assert tuple(xy[2][10, 20]) == (255, 0, 0)
    assert tuple(xy[2][10, 21]) == (128, 128, 255)
    assert tuple(xy[2][0, 0]) == WHITE
    assert tuple(xz[2][2, 30]) == (0, 0, 255)
    assert (xz[2] != 255).any(axis=-1).sum() == 1


def test_compare_repeats_the_input_of_a_finer_output(tmp_path: Path) -> None:
    before = np.random.default_rng(0).integers(0, 256, (3, 120, 120), dtype=np.uint8)
    finer = np.kron(before, np.ones((4, 2, 2), np.uint8))
    draw_comparison(tmp_path / "a.png", before, finer)
    pixels = read(tmp_path / "a.png")
    shown = [tile(pixels, MARGIN, MARGIN + i * (240 + MARGIN), (240, 240)) for i in range(3)]
    assert (shown[0][..., 0] == finer[6]).all()
    assert (shown[0] == shown[1]).all()
    assert (shown[2] == WHITE).all()


def test_compare_spreads_floats_from_the_least_to_the_most_of_both(tmp_path: Path) -> None:
    before = np.zeros((300, 300), np.float32)
    after = np.full((300, 300), 0.5, np.float32)
    before[0, 0], after[0, 0] = -0.5, 1.5
    draw_comparison(tmp_path / "a.png", before, after)
    pixels = read(tmp_path / "a.png")
    old, new = (tile(pixels, MARGIN, MARGIN + i * (300 + MARGIN), (300, 300))[..., 0] for i in range(2))
    assert (old[0, 0], old[5, 5], new[5, 5], new[0, 0]) == (0, 64, 128, 255)  # 255 * (0, 1, 2, 4) / 4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((4, 8, 8), (4, 8, 12), "output 12 is not a multiple of input 8 on axis x"),
        ((8, 8), (4, 8, 8), r"cannot compare \(8, 8\) with \(4, 8, 8\)"),
    ],
)
def test_compare_refuses_shapes_that_do_not_fit(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], message: str
) -> None:
    with pytest.raises(VolumeError, match=message):
        draw_comparison(tmp_path / "a.png", np.zeros(before), np.zeros(after))


def test_compare_refuses_what_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="output holds values that are not finite"):
        draw_comparison(tmp_path / "a.png", np.zeros((4, 4)), np.full((4, 4), np.nan))


def test_panel_refuses_what_is_not_bytes(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="image 'a' is float64"):
        panel(tmp_path / "a.png", [("a", np.zeros((4, 4)))])
