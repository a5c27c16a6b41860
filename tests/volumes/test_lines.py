"""Dark lines are told from bright ones, whatever the grey levels of areas are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.lines import line_contrast

SHAPE = (40, 96, 96)
REAL = (
    "fibsem_medulla/ts1_raw.tif", "fibsem_medulla/ts2_raw.tif", "fibsem_medulla/tiny96_raw.tif",
    "gala_tinyfib/train_image.tif", "gala_tinyfib/test_image.tif", "vnc_sstem_NC/stack1_z0-5_raw.tif",
)  # fmt: skip


def measured(folder: Path, data: np.ndarray) -> float | None:
    np.save(folder / "v.npy", data)
    return line_contrast(vp.open(folder / "v.npy"))


@pytest.mark.parametrize("size", [(10.0, 10.0, 10.0), (16.0, 8.0, 8.0), (30.0, 6.0, 6.0)])
def test_membranes_are_dark_lines_and_inverted_ones_bright(tmp_path: Path, size: tuple[float, float, float]) -> None:
    raw = SyntheticVolume(SHAPE, 4, size).raw(Box.from_shape(SHAPE))
    dark = measured(tmp_path, raw)
    assert dark is not None and dark > 0.3
    assert measured(tmp_path, 255 - raw) == pytest.approx(-dark)
    assert measured(tmp_path, raw * np.float32(3.5) - 70) == pytest.approx(dark, abs=1e-4)  # contrast is not in it


def test_areas_however_dark_are_no_lines(tmp_path: Path) -> None:
    z, y, x = np.mgrid[: SHAPE[0], : SHAPE[1], : SHAPE[2]]
    few, many = ((y // 24 + x // 24) % 4 < num for num in (1, 3))
    noise = np.random.default_rng(0).normal(0, 5, SHAPE)
    for areas in (few, many):
        found = measured(tmp_path, (np.where(areas, 60, 180) + noise + 0 * z).astype(np.uint8))
        assert found is not None and abs(found) < 0.1


@pytest.mark.parametrize("data", [np.zeros(SHAPE, np.uint8), np.full((4, 8, 8), 3.0), np.full(SHAPE, np.nan)])
def test_nothing_is_known_of_volumes_without_lines(tmp_path: Path, data: np.ndarray) -> None:
    assert measured(tmp_path, data) is None


def test_noise_is_neither(tmp_path: Path) -> None:
    found = measured(tmp_path, np.random.default_rng(0).integers(0, 255, SHAPE, np.uint8))
    assert found is not None and abs(found) < 0.05


@pytest.mark.real
@pytest.mark.parametrize("name", REAL)
def test_membranes_of_real_volumes_are_dark(tmp_path: Path, shared: Path, name: str) -> None:
    data = tifffile.imread(shared / name)
    found = measured(tmp_path, data)
    assert found is not None and found > 0.1
    assert measured(tmp_path, 255 - data) == pytest.approx(-found)
