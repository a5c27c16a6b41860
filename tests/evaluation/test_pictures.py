"""Pictures of two volumes: which pixel shows which voxel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.evaluation.pictures import draw_comparison
from volpipe.reporting.panels import CAPTION, MARGIN

WHITE = (255, 255, 255)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compared(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    draw_comparison("a.png", before, after)
    return np.asarray(Image.open("a.png").convert("RGB"))


def tile(pixels: np.ndarray, column: int, shape: tuple[int, int], above: int = 0) -> np.ndarray:
    """Return the image of a column whose images are 240 pixels wide at least; those `above` have so many rows."""
    top, left = MARGIN + CAPTION + above, MARGIN + column * (max(240, shape[1]) + MARGIN)
    return pixels[top : top + shape[0], left : left + shape[1]]


def test_pictures_have_the_same_bytes_each_time() -> None:
    for name in ("a.png", "b.png"):
        draw_comparison(name, noise((8, 16, 16)), noise((8, 16, 16))[::-1])
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


def test_compare_shows_the_middle_slices_and_colours_their_difference() -> None:
    before = np.full((6, 250, 240), 100, np.uint8)
    after = before.copy()
    after[3, 10, 20] = 150  # on the middle xy slice: the largest change there
    after[3, 10, 21] = 75  # half as much, the other way
    after[2, 125, 30] = 90  # on the middle xz slice alone
    pixels = compared(before, after)
    xy = [tile(pixels, column, (250, 240)) for column in range(3)]
    xz = tile(pixels, 2, (6, 240), above=CAPTION + 250 + MARGIN)
    assert (xy[0] == 100).all() and tuple(xy[1][10, 20]) == (150, 150, 150)
    assert [tuple(xy[2][place]) for place in ((10, 20), (10, 21), (0, 0))] == [(255, 0, 0), (128, 128, 255), WHITE]
    assert tuple(xz[2, 30]) == (0, 0, 255)
    assert (xz != 255).any(axis=-1).sum() == 1


def test_compare_repeats_the_input_of_a_finer_output() -> None:
    before = noise((3, 120, 120))
    finer = np.kron(before, np.ones((4, 2, 2), np.uint8))
    one, other, difference = (tile(compared(before, finer), column, (240, 240)) for column in range(3))
    assert (one[..., 0] == finer[6]).all() and (one == other).all()
    assert (difference == WHITE).all()


def test_compare_spreads_floats_from_the_least_to_the_most_of_both() -> None:
    before, after = np.zeros((300, 300), np.float32), np.full((300, 300), 0.5, np.float32)
    before[0, 0], after[0, 0] = -0.5, 1.5
    old, new = (tile(compared(before, after), column, (300, 300))[..., 0] for column in range(2))
    assert (old[0, 0], old[5, 5], new[5, 5], new[0, 0]) == (0, 64, 128, 255)  # 255 * (0, 1, 2, 4) / 4


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (np.zeros((4, 8, 8)), np.zeros((4, 8, 12)), "output 12 is not a multiple of input 8 on axis x"),
        (np.zeros((8, 8)), np.zeros((4, 8, 8)), r"cannot compare \(8, 8\) with \(4, 8, 8\)"),
        (np.zeros((4, 4)), np.full((4, 4), np.nan), "output holds values that are not finite"),
    ],
)
def test_compare_refuses_what_does_not_fit(before: np.ndarray, after: np.ndarray, message: str) -> None:
    with pytest.raises(VolumeError, match=message):
        draw_comparison("a.png", before, after)
