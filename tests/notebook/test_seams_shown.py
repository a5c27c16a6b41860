"""Seams of an output as a score and a profile around faces; blends on a box, whose errors are those of numpy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inline import Inline
from plans import facts, planned, volume
from torch import nn
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.inference.selection import Selection
from volpipe.runs.seams import ROUNDING, seam_squares


def shown(monkeypatch: pytest.MonkeyPatch, data: np.ndarray) -> None:
    """Let outputs hold `data` (z, y, x)."""
    monkeypatch.setattr("volpipe.inference.output.read_voxels", lambda plan, level, box: data[box.slices][np.newaxis])


def test_a_profile_is_the_mean_square_of_steps_by_their_distance_from_a_face(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 at faces, of 2 beside them, and of 1 elsewhere."""
    plan = planned("net.name=identity", "windows.shape=[10,10,10]", "windows.overlap=0", "windows.block=[1,1,1]")
    steps = {0: 3, 1: 2, 9: 2}
    along = np.cumsum([0, *(steps.get(i % 10, 1) for i in range(1, 40))]).astype(np.uint8)
    shown(monkeypatch, np.broadcast_to(along[:, None, None], (40, 40, 40)))
    z, y, x = (each.profile for each in seam_squares(Selection(plan)))
    assert dict(zip(z.distances, z.differences, strict=True)) == {
        distance: steps.get(distance % 10, 1) ** 2 for distance in range(-5, 6)
    }
    assert set(y.differences) == set(x.differences) == {0.0}


@pytest.mark.parametrize(("stride", "scale"), [(1, 1), (2, 1), (2, 2)])
def test_the_score_is_a_ratio_of_two_steps_of_the_profile(
    monkeypatch: pytest.MonkeyPatch, stride: int, scale: int
) -> None:
    net = facts(stride=(stride,) * 3, scale=(scale,) * 3)
    settings = ("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop"))
    plan = planned(*settings, of=volume((40, 44, 48)), net=net)
    shown(monkeypatch, noise(plan.out_shape))
    sample = seam_squares(Selection(plan))
    profiles, scores = [each.profile for each in sample], [each.score for each in sample]
    assert [p.axis for p in profiles] == [s.axis for s in scores] == ["z", "y", "x"]
    for profile, score in zip(profiles, scores, strict=True):
        by_distance = dict(zip(profile.distances, profile.differences, strict=True))
        inside = (by_distance[-profile.step] + by_distance[profile.step]) / 2
        assert profile.step == stride * scale and profile.num_pairs == score.num_pairs
        assert (by_distance[0] + ROUNDING) / (inside + ROUNDING) == pytest.approx(score.value)


@pytest.fixture
def choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sections of a recipe, in a folder with a volume of noise."""
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", noise((32, 36, 40)))
    return {"net": {"name": "identity"}, "windows": {"shape": (8, 8, 8), "block": (2, 2, 2)}}


def test_reports_and_paths_show_the_scores_of_the_run(choice: dict[str, Any]) -> None:
    report = vp.run("in.n5/raw", choice, out="out.zarr", site="threads")
    assert isinstance(report, vp.Report)
    for result in (report, "out.zarr", Path("out.zarr")):
        seams = vp.seams(result)
        assert list(seams.scores) == report.seams
        assert [profile.axis for profile in seams.profiles] == ["z", "y", "x"]
        assert f"z {report.seams[0].value:.2f}" in repr(seams)
    assert seams.png().startswith(b"\x89PNG") and "<td>no step</td>" in seams._repr_html_()


def test_an_output_of_one_window_has_no_faces(choice: dict[str, Any]) -> None:
    vp.run("in.n5/raw", {"net": {"name": "identity"}}, out="out.zarr", site="threads")
    seams = vp.seams("out.zarr")
    assert "no faces to score" in repr(seams)
    assert not seams.has_picture and "no faces, or too few" in seams._repr_html_()
    with pytest.raises(vp.VolpipeError, match="no faces of windows to draw"):
        seams.png()


def test_an_output_that_is_not_complete_is_refused(choice: dict[str, Any], tmp_path: Path) -> None:
    with Inline().start(tmp_path) as pool:
        vp.run("in.n5/raw", choice, out="out.zarr", site=pool, only="0:16,0:16,0:16")
    with pytest.raises(vp.VolpipeError, match=r"out\.zarr is not complete"):
        vp.seams("out.zarr")


def test_what_has_no_run_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(vp.VolpipeError, match=re.escape("has no run of a net")):
        vp.seams("in.n5/raw")
    with pytest.raises(vp.VolpipeError, match="not of ndarray"):
        vp.seams(np.zeros((4, 4)))  # type: ignore[arg-type]
    vp.run("in.n5/raw", choice | {"output": {"kind": "labels"}}, out="labels.zarr", site="threads")
    with pytest.raises(vp.VolpipeError, match="holds labels"):
        vp.seams("labels.zarr")


# ---- blends


SHAPE = (24, 28, 32)
SETTINGS = ("windows.shape=[16,16,16]", "net.intensity=same")


class Smooth(nn.Module):
    """A net that sees two voxels to each side, and fills with zeros beyond its window."""

    def __init__(self) -> None:
        super().__init__()
        self.volpipe = {"scale": (1, 1, 1), "stride": (1, 1, 1), "halo": (2, 2, 2)}
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


@pytest.mark.long
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
        def __init__(self) -> None:
            super().__init__()
            self.volpipe |= {"fixed": (16, 16, 16)}

    with pytest.raises(vp.VolpipeError, match=r"takes windows of \(16, 16, 16\) voxels alone"):
        vp.blends(Fixed(), place)
