"""Two images side by side: laid over each other as their metadata say, and compared as numpy compares them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from volumes import noise, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import View, open_volume


def test_numbers_are_those_of_numpy() -> None:
    a, b = noise((6, 9, 10)), noise((6, 9, 10), seed=1)
    result = vp.side_by_side(a, b)
    change = b.astype(float) - a
    assert np.array_equal(result.difference, change)
    assert result.rmse == pytest.approx(math.sqrt((change**2).mean()))
    assert result.psnr == pytest.approx(20 * math.log10(255 / math.sqrt((change**2).mean())))
    assert result.largest == np.abs(change).max()
    assert result.share == np.count_nonzero(a != b) / a.size
    assert (result.names, result.num_nonfinite) == (("an array", "an array"), 0)


def test_equal_images_differ_nowhere() -> None:
    result = vp.side_by_side(noise((4, 5, 6)), noise((4, 5, 6)))
    assert (result.rmse, result.psnr, result.share) == (0.0, math.inf, 0.0)


def test_voxels_that_are_not_finite_are_counted_and_left_out() -> None:
    a = np.zeros((2, 3, 4), np.float32)
    b = a + 2
    b[0, 0, 0], a[1, 2, 3] = np.nan, np.inf
    result = vp.side_by_side(a, b)
    assert (result.num_nonfinite, result.rmse, result.largest) == (2, 2.0, 2.0)
    assert result.psnr is None  # floats have no range
    assert np.isnan(result.difference).sum() == 2
    assert "2 voxels are not finite" in repr(result)


def test_a_coarser_array_is_enlarged_by_repeating_its_voxels() -> None:
    coarse, fine = noise((3, 8, 5)), noise((12, 8, 10), seed=1)
    result = vp.side_by_side(coarse, fine)
    assert result.factors == ((4, 1, 2), (1, 1, 1))
    assert np.array_equal(result.a, np.kron(coarse, np.ones((4, 1, 2), np.uint8)))
    assert np.array_equal(result.b, fine)
    other = vp.side_by_side(fine, coarse)
    assert other.factors == ((1, 1, 1), (4, 1, 2)) and np.array_equal(other.b, result.a)


def test_at_and_size_are_in_voxels_of_the_first() -> None:
    coarse, fine = noise((6, 8, 10)), noise((24, 8, 10), seed=1)
    result = vp.side_by_side(coarse, fine, at=(3, 4, 5), size=(2, 4, 6))
    assert result.box == Box((10, 2, 2), (18, 6, 8))
    assert np.array_equal(result.b, fine[10:18, 2:6, 2:8])
    assert np.array_equal(result.a, coarse.repeat(4, axis=0)[10:18, 2:6, 2:8])


def placed(path: Path, data: np.ndarray, voxel: tuple[float, ...], origin: tuple[float, ...]) -> vp.Volume:
    """Return `data` (z, y, x) as a volume with voxels and an origin in nm."""
    z, y, x = voxel
    oz, oy, ox = origin
    return open_volume(write_volume(path, data), view=View(voxel_size_nm=(z, y, x), origin_nm=(oz, oy, ox)))


def test_volumes_are_laid_over_each_other_by_their_places(tmp_path: Path) -> None:
    whole = noise((12, 14, 16))
    a = placed(tmp_path / "a.n5", whole, (8, 4, 4), (0, 0, 0))
    b = placed(tmp_path / "b.n5", whole[2:9, 3:10, 5:16], (8, 4, 4), (16, 12, 20))
    result = vp.side_by_side(a, b)
    assert result.box == Box((2, 3, 5), (9, 10, 16))
    assert result.rmse == 0 and result.voxel_size_nm == (8, 4, 4)
    assert np.array_equal(result.a, whole[2:9, 3:10, 5:16])
    turned = vp.side_by_side(b, a)
    assert turned.rmse == 0 and turned.box == Box((0, 0, 0), (7, 7, 11))


def test_finer_voxels_begin_half_a_voxel_earlier(tmp_path: Path) -> None:
    coarse = noise((6, 8, 8))
    fine = coarse[2:].repeat(4, axis=0)  # of which the first slice has its centre 3/8 of a coarse voxel earlier
    a = placed(tmp_path / "a.n5", coarse, (16, 4, 4), (0, 0, 0))
    b = placed(tmp_path / "b.n5", fine, (4, 4, 4), (2 * 16 - 6, 0, 0))
    result = vp.side_by_side(a, b)
    assert result.factors == ((4, 1, 1), (1, 1, 1)) and result.box == Box((8, 0, 0), (24, 8, 8))
    assert result.rmse == 0 and result.voxel_size_nm == (4, 4, 4)


def test_outputs_of_runs_and_trials_lie_over_their_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    volume = vp.sample("a.n5", (16, 24, 24))
    choice = {"net": {"name": "upsample", "options": {"scale": [2, 1, 1], "mode": "nearest"}}}
    report = vp.run(volume, choice, out="out.zarr", site="threads")
    for output in (report, "out.zarr", Path("out.zarr")):
        result = vp.side_by_side(volume, output)
        assert (result.rmse, result.factors[0]) == (0.0, (2, 1, 1))
    tried = vp.try_net(choice, volume, at=(3, 20, 4), size=(4, 6, 6))
    assert vp.side_by_side(volume, tried).box == Box((2, 17, 1), (10, 23, 7))
    assert vp.side_by_side(tried, report).rmse == vp.side_by_side(volume, tried).rmse == 0


def test_trials_on_other_boxes_of_a_volume_without_voxel_sizes_are_not_mixed_up(tmp_path: Path) -> None:
    write_volume(tmp_path / "a.n5", noise((16, 16, 16)))
    first, second, far = (vp.try_net("identity", tmp_path / "a.n5/raw", at=(8, 8, x), size=6) for x in (4, 6, 13))
    result = vp.side_by_side(first, second)
    assert result.a.shape == (6, 6, 4) and result.rmse == 0
    with pytest.raises(vp.VolpipeError, match="share no voxel"):
        vp.side_by_side(first, far)


def test_a_box_without_voxel_sizes_lies_in_volume_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    volume = vp.open(write_volume(Path("a.n5"), noise((16, 16, 16))))
    choice = {"net": {"name": "upsample", "options": {"scale": [2, 1, 1], "mode": "nearest"}}}
    tried = vp.try_net("identity", volume, at=(12, 12, 4), size=8)  # of which 16 voxels are a multiple
    assert tried.box == Box((8, 8, 0), (16, 16, 8))
    report = vp.run(volume, choice, out="out.zarr", site="threads")
    part = vp.run(volume, choice, out="part.zarr", site="threads", settings=['input.roi="8:16,0:8,0:16"'])
    assert vp.open("out.zarr").voxel_size_nm is None
    for other in (volume, report, vp.try_net("identity", volume, at=(8, 8, 8), size=16)):
        for first, second in ((tried, other), (other, tried)):
            result = vp.side_by_side(first, second)
            assert (result.rmse, result.a.size) == (0.0, 8**3 * (2 if other is report else 1))
    for other in (volume, report):
        result = vp.side_by_side(other, part)
        assert (result.rmse, result.box) == (0.0, Box((16, 0, 0), (32, 8, 16)))
    with pytest.raises(vp.VolpipeError, match="share no voxel"):
        vp.side_by_side(tried, part)


def test_a_box_beside_a_volume_of_another_unit_is_refused(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.n5", noise((16, 16, 16)))
    known = vp.open(path, view=View(voxel_size_nm=(8.0, 4.0, 4.0)))
    other = vp.open(write_volume(tmp_path / "b.n5", noise((32, 16, 16))))
    tried, placed_box = (vp.try_net("identity", volume, size=8) for volume in (path, known))
    for a, b in ((tried, known), (known, tried), (tried, other), (placed_box, vp.open(path)), (tried, placed_box)):
        with pytest.raises(vp.VolpipeError, match=r"is a box of a volume, .* give both a voxel size"):
            vp.side_by_side(a, b)
    assert vp.side_by_side(tried, tried.input).rmse == 0  # an array alone is laid over it by its shape
    whole = vp.try_net("identity", path, size=16)
    assert vp.side_by_side(whole, known).rmse == vp.side_by_side(other, whole).box.start[0] == 0


def test_channels_stay_and_must_agree() -> None:
    a, b = noise((3, 4, 5, 6)), noise((3, 4, 5, 6), seed=1)
    assert vp.side_by_side(a, b).difference.shape == (3, 4, 5, 6)
    with pytest.raises(vp.VolpipeError, match="has 3 channels and b, an array, has 1"):
        vp.side_by_side(a, b[0])


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (np.zeros((4, 4, 4)), np.zeros((6, 4, 4)), "axis z: a, an array, has 4 voxels and b, an array, has 6"),
        (np.zeros(4), np.zeros(4), "of shape (4,) is no image"),
        (np.zeros((4, 4), complex), np.zeros((4, 4)), "complex128 of shape (4, 4) is no image"),
        (3, np.zeros((4, 4)), "a is int; give an array, a volume, its path"),
        ("nowhere.n5", np.zeros((4, 4)), "nowhere.n5"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: Any, b: Any, problem: str) -> None:  # Any: what a user gives
    with pytest.raises(vp.VolpipeError, match=re.escape(problem)):
        vp.side_by_side(a, b)


def test_voxels_that_lie_askew_are_refused(tmp_path: Path) -> None:
    a = placed(tmp_path / "a.n5", noise((8, 8, 8)), (8, 4, 4), (0, 0, 0))
    with pytest.raises(vp.VolpipeError, match=r"axis z: voxels of b, b\.n5/raw, lie 0\.50 of 8 nm beside those of a"):
        vp.side_by_side(a, placed(tmp_path / "b.n5", noise((8, 8, 8)), (8, 4, 4), (4, 0, 0)))
    with pytest.raises(vp.VolpipeError, match=r"axis y: voxels of a, a\.n5/raw, are 4 nm and those of b, .* 6"):
        vp.side_by_side(a, placed(tmp_path / "c.n5", noise((8, 8, 8)), (8, 6, 4), (0, 0, 0)))


def test_a_voxel_that_only_one_has_is_refused(tmp_path: Path) -> None:
    a = placed(tmp_path / "a.n5", noise((8, 8, 8)), (4, 4, 4), (0, 0, 0))
    b = placed(tmp_path / "b.n5", noise((4, 8, 8)), (4, 4, 4), (16, 0, 0))
    assert vp.side_by_side(a, b, at=(4, 0, 0), size=2).box == Box((4, 0, 0), (6, 2, 2))
    with pytest.raises(vp.VolpipeError, match="b has no voxel there"):
        vp.side_by_side(a, b, at=(3, 0, 0))
