"""The shipped weights that make slices finer: what their cards say, and that they beat cubic interpolation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from cards import card, checked_facts
from command import giver
from inline import Inline

from volpipe.evaluation.driver import evaluation_work, finish
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import load_training
from volpipe.resolve import shipped_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

FACTORS = {
    "superres_z4": 4, "superres_z2": 2, "superres_z4_noisy": 4, "superres_z2_noisy": 2, "superres_z4_sharp": 4
}  # fmt: skip


@pytest.fixture(params=FACTORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_card_has_the_sums_and_sizes_of_the_file(name: str) -> None:
    facts = checked_facts(name, shipped_recipe(Path(name)))
    assert facts.tile_invariant and facts.scale == (FACTORS[name], 1, 1)


def test_the_card_has_the_steps_of_the_recipe_that_made_it(name: str) -> None:
    training = load_training(shipped_recipe(Path(f"train_{name}")))
    assert training.net.options == load_recipe(shipped_recipe(Path(name))).net.options
    assert f"{training.train.steps:,} steps" in card(name)
    assert [data.path for data in training.data] == ["fibsem_medulla/ts1_raw.tif"]


def test_the_command_makes_finer_slices_of_the_right_size_at_the_right_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    factor = FACTORS[name]
    spread = (
        35 if name in ("superres_z4", "superres_z2") else 15
    )  # of noise; its grain must not reach 0, where it would be clipped
    data = np.random.default_rng(0).integers(125 - spread, 125 + spread, (10, 24, 26)).astype(np.uint8)
    attributes = {"resolution": [8, 8, 40], "units": ["nm"] * 3}  # of N5: x, y, z
    create_array(tmp_path / "v.n5", "raw", ArraySpec(data.shape, data.dtype, data.shape, attributes=attributes), "n5")
    open_writer(tmp_path / "v.n5", "raw").write(Box.from_shape(data.shape), data)
    ended = giver(tmp_path, monkeypatch, capsys)("run", "--recipe", name, "--config", "threads", "v.n5/raw")
    assert ended.code == 0, ended.err
    made = open_volume(tmp_path / "v_raw_superres.zarr")
    assert made.shape == (10 * factor, 24, 26) and made.dtype == np.uint8
    assert made.voxel_size_nm == (40 / factor, 8.0, 8.0)
    assert made.origin_nm == pytest.approx(((1 / factor - 1) / 2 * 40, 0.0, 0.0))
    means = made.open()[...].reshape(10, factor, 24, 26).mean(1)
    if name.endswith("noisy"):
        assert np.std(means - data.mean()) < 0.8 * np.std(data)
    else:
        np.testing.assert_allclose(means, data, atol=0.51)  # but for the rounding of each slice


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "noise", "least"),
    [
        ("superres_z4", 0, 1.0),
        ("superres_z2", 0, 0.3),
        ("superres_z4_noisy", 0, 0.8),
        ("superres_z4_noisy", 6, 3.0),
        ("superres_z2_noisy", 6, 3.0),
    ],
)
def test_on_tissue_that_they_never_saw_they_beat_the_cubic_spline(
    name: str, noise: float, least: float, tmp_path: Path, shared: Path
) -> None:
    """A part of ts2; the cards have the scores of more. With noise, contrast is lower, as in the cards."""
    factor = FACTORS[name]
    truth = tifffile.imread(shared / "fibsem_medulla" / "ts2_raw.tif")[:96, 60:188, 60:188]
    if noise:
        truth = np.rint(0.6 * truth + 30).astype(np.uint8)
    means = truth.reshape(96 // factor, factor, 128, 128).mean(1, dtype=np.float64)
    means += np.random.default_rng(7).normal(0, noise, means.shape)
    inputs = np.rint(means).clip(0, 255).astype(np.uint8)
    tifffile.imwrite(tmp_path / "truth.tif", truth)
    tifffile.imwrite(tmp_path / "given.tif", inputs)
    plan = prepare(
        str(tmp_path / "given.tif"), load_recipe(shipped_recipe(Path(name))), tmp_path / "out.zarr", tmp_path
    )
    assert execute(plan, Inline(slots=2).start).missing == []
    found = plan_evaluation(
        plan.out, str(tmp_path / "truth.tif"), given=str(tmp_path / "given.tif"), margin=(2 * factor, 8, 8)
    )
    scored = finish(evaluation_work(found, RunFolder(tmp_path / "scores.run")), Inline().start).scores
    assert isinstance(scored, dict)
    assert scored["output"].psnr > scored["cubic"].psnr + least
    assert scored["output"].ssim > scored["cubic"].ssim


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_the_sharp_weights_restore_power_along_z_at_a_price_in_fidelity(tmp_path: Path, shared: Path) -> None:
    """A part of ts2; spectra are those of the middle 64 voxels, within 30 degrees of z."""
    truth = tifffile.imread(shared / "fibsem_medulla" / "ts2_raw.tif")[:96, 80:176, 80:176]
    tifffile.imwrite(tmp_path / "given.tif", np.rint(truth.reshape(24, 4, 96, 96).mean(1)).astype(np.uint8))
    made = {}
    for name in ("superres_z4", "superres_z4_sharp"):
        recipe = load_recipe(shipped_recipe(Path(name)))
        plan = prepare(str(tmp_path / "given.tif"), recipe, tmp_path / f"{name}.zarr", tmp_path)
        assert execute(plan, Inline(slots=2).start).missing == []
        made[name] = open_volume(plan.out).open()[...]
    due = power_along_z(truth)
    faithful, sharp = (power_along_z(made[name]) / due for name in made)
    assert (faithful < 0.05).all()
    assert (sharp > 4 * faithful).all() and (sharp < 1.1).all()
    errors = [np.mean((made[name].astype(float) - truth) ** 2) for name in made]
    assert errors[0] < errors[1] < 1.6 * errors[0]


def power_along_z(volume: np.ndarray) -> np.ndarray:
    """Return the power of `volume` (z, y, x) within 30 degrees of z, at 0.25 to 0.375 and 0.375 to 0.5 cycles/voxel."""
    window = np.hanning(65)[:64]
    cube = volume[16:80, 16:80, 16:80].astype(float)
    power = np.abs(np.fft.fftn((cube - cube.mean()) * np.einsum("i,j,k->ijk", window, window, window))) ** 2
    z, y, x = np.meshgrid(*[np.fft.fftfreq(64)] * 3, indexing="ij")
    length = np.sqrt(z**2 + y**2 + x**2)
    near = np.abs(z) >= np.cos(np.pi / 6) * length
    return np.array([power[near & (length >= low) & (length < low + 0.125)].sum() for low in (0.25, 0.375)])
