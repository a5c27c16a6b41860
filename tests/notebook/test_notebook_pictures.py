"""Pictures of results: which pixel shows which voxel, and that nothing is left behind."""

from __future__ import annotations

import base64
import io
import math
import re
import sys
import tracemalloc
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from arrays import in_greys
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot
from PIL import Image
from volumes import noise, write_volume

import volpipe as vp
from volpipe.notebook.pictures import BAR, CAPTION, MARGIN, Panel, panels_png
from volpipe.reporting.shades import bar_nm, grey
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
    return top + CAPTION + height + BAR + MARGIN


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


@pytest.mark.parametrize(("most", "length"), [(100, 100), (99.9, 50), (49, 20), (19, 10), (1.2, 1), (0.7, 0.5)])
def test_a_scale_bar_is_a_round_length(most: float, length: float) -> None:
    assert bar_nm(most) == pytest.approx(length)


def test_a_scale_bar_has_the_length_that_it_names() -> None:
    pixels = decoded(panels_png([[Panel("a", np.full((50, 300), 255, np.uint8), (2.0, 2.0))]]))
    below = pixels[MARGIN + CAPTION + 50 + 2 :]
    rows = [int((row.max(axis=-1) == 0).sum()) for row in below[:, MARGIN : MARGIN + 120]]
    assert max(rows) == 50  # 100 nm of 2 nm: 30 % of 600 nm is at most 180


def test_large_slices_are_thinned_out() -> None:
    data = noise((1100, 1200))
    pixels = decoded(panels_png([[Panel("a", data)]]))
    assert np.array_equal(tile(pixels, MARGIN, 0, (367, 400))[..., 0], data[::3, ::3])


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    voxels=st.lists(st.tuples(st.floats(1, 60), st.floats(1, 60)), min_size=3, max_size=3),
)
@settings(max_examples=30, deadline=None)
def test_panels_are_stretched_by_their_voxels_and_thinned_as_if_they_were_drawn_whole(
    shapes: list[tuple[int, int]], voxels: list[tuple[float, float]]
) -> None:
    panels = [Panel("a", noise(shape), nm) for shape, nm in zip(shapes, voxels, strict=False)]
    shortest = min(min(nm) for nm in voxels[: len(panels)])
    whole = [
        panel.pixels.repeat(max(1, round(y / shortest)), axis=0).repeat(max(1, round(x / shortest)), axis=1)
        for panel, (y, x) in zip(panels, voxels, strict=False)
    ]
    height, width = (max(pixels.shape[axis] for pixels in whole) for axis in (0, 1))
    step = max(math.ceil(width / 512), math.ceil(height / 1024))
    zoom = max(1, min(math.ceil(240 / width), 1024 // height))
    drawn = decoded(panels_png([[panel] for panel in panels]))
    top = MARGIN
    for pixels in whole:
        expected = np.kron(pixels[::step, ::step], np.ones((zoom, zoom), np.uint8))
        assert max(expected.shape) <= 1024
        assert np.array_equal(tile(drawn, top, 0, expected.shape)[..., 0], expected)
        top = row_below(top, len(expected))


def test_memory_of_a_picture_is_bounded_whatever_the_voxels() -> None:
    voxels = np.zeros((1500, 1500), np.uint8)
    panels = [[Panel("a", voxels, (50.0, 50.0))], [Panel("b", voxels[:4], (0.5, 50.0))], [Panel("c", voxels[:, :1])]]
    panels_png(panels)  # loads what draws
    tracemalloc.start()
    pixels = decoded(panels_png(panels))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pixels) < 3 * (1024 + CAPTION + BAR + MARGIN) + MARGIN
    assert most < 64 << 20  # stretched, the first alone is of 22 GB


def test_an_image_of_one_value_is_drawn_black() -> None:
    image = np.full((2, 3), 7.0)
    for limits in ((7.0, 7.0), (7.0, 5.0)):
        assert (grey(image, limits) == 0).all() and (grey(image + 1, limits) == 255).all()


def test_no_figure_is_left_open_and_no_style_changed(volume: vp.Volume) -> None:
    pyplot.close("all")  # those of pages of the docs that ran in this process before
    with matplotlib.rc_context({"figure.facecolor": "black", "savefig.bbox": "tight", "text.color": "white"}):
        styled = vp.try_net("identity", volume, size=8).png()
        assert matplotlib.rcParams["figure.facecolor"] == "black"
    assert styled == vp.try_net("identity", volume, size=8).png()
    assert pyplot.get_fignums() == []


def test_html_holds_the_picture_and_the_facts(volume: vp.Volume) -> None:
    result = vp.try_net("identity", volume, size=8)
    text = result._repr_html_()
    (encoded,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(encoded) == result._repr_png_() == result.png()
    assert "windows" in text and "halo" in text and str(result.box) in text


def test_a_cell_shows_the_picture_once_and_the_table_below_it(
    volume: vp.Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, shown = vp.try_net("identity", volume, size=8), []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    result._ipython_display_()
    picture, table = shown
    assert picture == {"image/png": result.png(), "text/plain": repr(result)}
    assert "<table>" in table["text/html"] and "base64" not in table["text/html"]


def test_without_matplotlib_texts_and_tables_are_there(volume: vp.Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = vp.try_net("identity", volume, size=8)
    with pytest.raises(vp.VolpipeError, match=re.escape("pip install 'volpipe[notebook]'")):
        result.png()
    assert result._repr_png_() is None
    assert "pip install" in result._repr_html_() and str(result.box) in result._repr_html_()
    assert "<TryOut of identity" in repr(result)


def test_matplotlib_is_loaded_where_something_is_drawn_alone(volume: vp.Volume) -> None:
    import subprocess

    code = "import sys, volpipe as vp; vp.try_net, vp.side_by_side; print('matplotlib' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
