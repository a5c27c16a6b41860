"""Pictures of results in a notebook: which slices of which voxels, and each picture once."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from arrays import in_greys
from PIL import Image
from volumes import noise, write_volume

import volpipe as vp
from volpipe.reporting.frames import STRIP
from volpipe.reporting.panels import CAPTION, MARGIN
from volpipe.volumes.volume import View, open_volume


def decoded(png: bytes) -> np.ndarray:
    """Return the pixels of a PNG, (y, x, 3)."""
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def tile(pixels: np.ndarray, top: int, column: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the image (y, x, 3) of `column` in the row that begins at `top`."""
    left, top = MARGIN + column * (shape[1] + MARGIN), top + CAPTION
    return pixels[top : top + shape[0], left : left + shape[1]]


def row_below(top: int, height: int) -> int:
    return top + CAPTION + height + STRIP + MARGIN


@pytest.fixture
def volume(tmp_path: Path) -> vp.Volume:
    """A volume of noise whose voxels are twice as long along z."""
    path = write_volume(tmp_path / "a.n5", noise((40, 60, 80)))
    return open_volume(path, view=View(voxel_size_nm=(8.0, 4.0, 4.0)))


def test_a_trial_shows_the_voxels_of_its_slices(volume: vp.Volume) -> None:
    result = vp.try_net("identity", volume, at=(20, 30, 40), size=(10, 20, 30))
    pixels = decoded(result.png())
    zoom = -(-240 // 30)
    data = np.rint(in_greys(noise((40, 60, 80))[result.box.slices])).astype(np.uint8)
    xy = np.kron(data[5], np.ones((zoom, zoom), np.uint8))
    xz = np.kron(data[:, 10], np.ones((2 * zoom, zoom), np.uint8))
    for column in (0, 1):  # the net changes nothing
        assert np.array_equal(tile(pixels, MARGIN, column, xy.shape)[..., 0], xy)
        assert np.array_equal(tile(pixels, row_below(MARGIN, len(xy)), column, xz.shape)[..., 1], xz)


def test_a_difference_is_white_where_there_is_none_and_red_where_b_is_larger() -> None:
    a = np.full((1, 240, 260), 100, np.uint8)
    b = a.copy()
    b[0, 3, 5], b[0, 4, 6] = 150, 75
    pixels = decoded(vp.side_by_side(a, b).png())
    change = tile(pixels, MARGIN, 2, (240, 256))  # 256 voxels at most, from the middle: 2 to 257
    assert tuple(change[3, 3]) == (255, 0, 0) and tuple(change[4, 4]) == (128, 128, 255)
    change = change.copy()
    change[3, 3] = change[4, 4] = 255
    assert (change == 255).all()
    shown = tile(pixels, MARGIN, 0, (240, 256))
    assert (shown == shown[0, 0]).all()


def test_html_holds_the_picture_and_the_facts(volume: vp.Volume) -> None:
    result = vp.try_net("identity", volume, size=8)
    text = result._repr_html_()
    (encoded,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(encoded) == result.png()
    assert "windows" in text and "halo" in text and str(result.box) in text


def test_a_cell_shows_the_picture_once_and_a_table(volume: vp.Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    result, shown = vp.try_net("identity", volume, size=8), []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    result._ipython_display_()
    picture, table = shown
    assert picture == {"image/png": result.png(), "text/plain": repr(result)}
    assert "<table>" in table["text/html"] and "base64" not in table["text/html"]
