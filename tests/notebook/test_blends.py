"""Blends on a box: their errors are those of numpy against the net over the whole mirrored volume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from volumes import noise, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box

SHAPE = (24, 28, 32)
SETTINGS = ("windows.shape=[16,16,16]", "net.intensity=same")


class Smooth(nn.Module):
    """A net that sees two voxels to each side, and fills with zeros beyond its window."""

    scale = stride = (1, 1, 1)
    halo = (2, 2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 5, padding=2, bias=False)
        with torch.no_grad():
            self.conv.weight.fill_(1 / 125)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return out


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a volume of noise."""
    monkeypatch.chdir(tmp_path)
    return write_volume(tmp_path / "in.n5", noise(SHAPE)) / "raw"


def smoothed() -> np.ndarray:
    """Return the mean of the 125 voxels around each voxel, of the volume mirrored at its faces."""
    padded = np.pad(noise(SHAPE).astype(np.float64), 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5, 5))
    mean: np.ndarray = windows.mean(axis=(-3, -2, -1))
    return mean


@pytest.mark.parametrize("at", [(12, 14, 16), (0, 27, 0)])
def test_errors_are_those_against_the_whole(place: Path, at: tuple[int, int, int]) -> None:
    result = vp.blends(Smooth(), place, at=at, size=(12, 13, 14), settings=SETTINGS)
    np.testing.assert_allclose(result.whole[0], smoothed()[result.box.slices], rtol=1e-5)
    assert [blend.name for blend in result.blends] == ["crop", "hann", "gaussian"]
    for blend in result.blends:
        change = blend.output.astype(np.float64) - result.whole
        assert blend.largest == np.abs(change).max()
        assert blend.rmse == pytest.approx(np.sqrt((change**2).mean()))
    assert result["crop"].largest < 1e-3  # the order of sums, of values up to 255
    assert result["hann"].rmse > 0.1  # zeros beyond a window's edge count where a window ends inside
    assert result["crop"].cost == pytest.approx((16 / 12) ** 3) and result["hann"].cost == 8


def test_a_box_without_a_place_lies_around_a_corner_of_windows(place: Path) -> None:
    result = vp.blends("identity", place, settings=["windows.shape=[10,10,10]"])
    assert result.box == Box((8, 8, 18), (13, 13, 23))  # 10 × 10 × 20 is the corner nearest to the middle
    assert all(blend.largest < 1e-4 for blend in result.blends)
    with pytest.raises(vp.VolpipeError, match="no blend 'bump' was tried; there are crop, hann, gaussian"):
        result["bump"]


def test_a_coarser_net_is_blended_on_its_own_grid(place: Path) -> None:
    result = vp.blends(nn.AvgPool3d((1, 2, 3)), place, at=(12, 14, 31), size=7, settings=["windows.shape=[16,16,18]"])
    assert (result.box, result.out_box) == (Box((9, 10, 24), (16, 18, 32)), Box((9, 5, 8), (16, 9, 11)))
    assert all(blend.output.shape == (1, 7, 4, 3) and blend.largest < 1e-5 for blend in result.blends)
    assert result.png().startswith(b"\x89PNG")


def test_tables_have_a_row_for_each_blend(place: Path) -> None:
    result = vp.blends("identity", place, settings=["windows.shape=[10,10,10]"])
    assert [line.split()[0] for line in repr(result).splitlines()[2:]] == ["crop", "hann", "gaussian"]
    assert result._repr_html_().count("<tr") == 4 and result.png().startswith(b"\x89PNG")


def test_a_net_of_one_size_has_no_whole(place: Path) -> None:
    class Fixed(Smooth):
        fixed = (16, 16, 16)

    with pytest.raises(vp.VolpipeError, match=r"takes windows of \(16, 16, 16\) voxels alone"):
        vp.blends(Fixed(), place)
