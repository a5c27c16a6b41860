"""The main job on real FIB-SEM volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from inline import Inline

from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def fibsem(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Medulla ts2, 250³ voxels of 10 nm, as an N5 volume; 250 divides by no chunk."""
    data = tifffile.imread(shared / "fibsem_medulla" / "ts2_raw.tif")
    path = tmp_path_factory.mktemp("real") / "ts2.n5"
    attributes = {"resolution": [10, 10, 10], "units": ["nm", "nm", "nm"]}
    spec = ArraySpec(data.shape, data.dtype, (64, 64, 64), codec="gzip", attributes=attributes)
    create_array(path, "raw", spec, "n5")
    open_writer(path, "raw").write(Box.from_shape(data.shape), data)
    return path


def run(folder: Path, volume: Path, *settings: str) -> Plan:
    plan = prepare(str(volume), load_recipe(None, settings), folder / "out.zarr", folder)
    assert execute(plan, Inline(slots=2).start).missing == []
    return plan


@pytest.mark.parametrize(
    ("blend", "mode"),
    [
        ("hann", "stored"),
        ("crop", "streamed"),
        pytest.param("crop", "stored", marks=pytest.mark.long),
        pytest.param("hann", "streamed", marks=pytest.mark.long),
    ],
)
def test_identity_returns_the_volume(tmp_path: Path, fibsem: Path, mode: str, blend: str) -> None:
    plan = run(
        tmp_path, fibsem, "net.name=identity", f"tensors.mode={mode}", f"windows.blend={blend}",
        "normalise.method=zscore", "windows.shape=[72,72,72]", "windows.overlap=8", "windows.block=[2,2,2]",
    )  # fmt: skip
    before, after = (open_volume(path).open()[...] for path in (fibsem, plan.out))
    assert np.array_equal(before, after)
    coarser = open_volume(plan.out, level=1)
    assert coarser.voxel_size_nm == (20.0, 20.0, 20.0)
    assert coarser.origin_nm == (5.0, 5.0, 5.0)
    mean = before.reshape(125, 2, 125, 2, 125, 2).mean(axis=(1, 3, 5))
    assert np.array_equal(coarser.open()[...], np.rint(mean).astype(np.uint8))


@pytest.mark.long
def test_super_resolution_starts_from_linear_interpolation(tmp_path: Path, fibsem: Path) -> None:
    """srgan3d z2 before training is trilinear along z: every window must agree with the whole volume's."""
    plan = run(
        tmp_path, fibsem, "net.name=srgan3d", "net.options={variant='z2',features=2,num_blocks=1}",
        "net.untrained=true", "windows.block=[2,2,2]",
    )  # fmt: skip
    data = open_volume(fibsem).open()[...].astype(np.float64)
    previous, following = np.concatenate([data[1:2], data[:-1]]), np.concatenate([data[1:], data[-2:-1]])
    expected = np.stack([0.25 * previous + 0.75 * data, 0.75 * data + 0.25 * following], axis=1)
    found = open_volume(plan.out)
    assert found.voxel_size_nm == (5.0, 10.0, 10.0)
    assert found.origin_nm == (-2.5, 0.0, 0.0)
    difference = np.abs(found.open()[...] - expected.reshape(500, 250, 250))
    assert difference.max() <= 0.5 + 1e-3  # rounding to uint8
