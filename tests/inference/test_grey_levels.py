"""Grey levels of any type come back in the volume's own scale, and the plan says what the net sees them as."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import IDENTITY, Give, giver, set_each
from volumes import windowed, write_volume

import volpipe as vp
from volpipe.errors import PlanError, RecipeError
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import Affine
from volpipe.inference.statistics import affine, measure, sampled_affine
from volpipe.recipes.inference import Normalise, load_recipe
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.formats.container import read_attributes
from volpipe.volumes.volume import open_volume

SHAPE = (16, 24, 32)
RECIPES = ("default", "affinities", "superres_z2", "superres_z4", "superres_z4_sharp")
DENOISER = set_each("windows.shape=[36,44,52]", "windows.overlap=20", "windows.block=[1,1,1]")
SMALL = set_each(*windowed((8, 12, 16), (0, 0, 0), (2, 1, 1), "crop"), "output.levels=0")


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def specimen(dtype: str) -> np.ndarray:
    """Return 12-bit grey levels in 16 bits with a hot voxel, or floats of 0 to 1."""
    levels = np.random.default_rng(0).normal(1200, 60, SHAPE)
    levels[3, 4, 5] = 4095
    return np.rint(levels).astype(dtype) if dtype == "uint16" else (levels / 4095).astype(dtype)


def run(give: Give, *options: str) -> tuple[np.ndarray, dict[str, Any], str]:
    """Return the output of a run over ``in.n5``, what its attributes say, and what it printed."""
    ended = give("run", "--fresh", "--config", "threads", *SMALL, *options, "-o", "out.zarr", "in.n5/raw")
    assert ended.code == 0, ended.err
    said: dict[str, Any] = read_attributes(Path("out.zarr").absolute())["volpipe"]
    return open_volume("out.zarr").open()[...], said, " ".join((ended.out + ended.err).split())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_identity_on_a_shipped_recipe_gives_back_the_volume(
    tmp_path: Path, give: Give, recipe: str, dtype: str
) -> None:
    data = specimen(dtype)
    write_volume(tmp_path / "in.n5", data)
    out, said, printed = run(give, "--recipe", recipe, *IDENTITY)
    error = np.abs(out.astype(np.float64) - data.astype(np.float64)).max()
    assert (out.dtype, error <= (1 if dtype == "uint16" else 1e-3 * np.ptp(data))) == (data.dtype, True)
    low, high = np.percentile(data, [0.5, 99.5])
    ends = [said["normalise"]["shift"] + sign * said["normalise"]["scale"] for sign in (-1, 1)]
    np.testing.assert_allclose(ends, [low, high], atol=np.ptp(data) / 4096 * 2)
    # Of identity nothing was trained, so that no range follows.
    assert f"percentiles 0.5 … 99.5 of {dtype}, measured → -1 … 1 output" in printed
    assert f"grey levels: {ends[0]:.6g} … {ends[1]:.6g} of the volume → -1 … 1" in printed


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_the_default_recipe_keeps_the_mean_of_16_bits_and_of_floats(tmp_path: Path, give: Give, dtype: str) -> None:
    """Over 0 … 65535 it came back 54 grey levels darker, almost one deviation."""
    data = SyntheticVolume(SHAPE, 3).raw(Box.from_shape(SHAPE)) * np.float64(2) + 1000
    data = data if dtype == "uint16" else data / 1510
    write_volume(tmp_path / "in.n5", data.astype(dtype))
    out, _, printed = run(give, *DENOISER)
    assert abs(out.mean() - data.mean()) < 0.05 * data.std()
    assert "measured → -1 … 1; the net was trained with 0 … 255" in printed


def test_8_bits_keep_the_range_of_their_type(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", specimen("uint16").astype(np.uint8))
    _, said, printed = run(give, *DENOISER)
    assert said["normalise"] == {"shift": 127.5, "scale": 127.5}
    assert "0 … 255 of uint8 → -1 … 1; the net was trained with 0 … 255" in printed
    assert "grey levels:" not in printed


def test_the_plan_of_a_net_of_ones_own_says_that_nobody_gave_its_numbers(tmp_path: Path, give: Give) -> None:
    """A net trained on 0 … 1 gave nonsense from -1 … 1, and nothing said that anything could be set."""
    write_volume(tmp_path / "in.n5", specimen("uint16").astype(np.uint8))
    net = ["--recipe", "none", *DENOISER, *set_each("net.untrained=true", "net.options={features=[2,4]}")]
    _, _, printed = run(give, *net)
    assert "0 … 255 of uint8 → -1 … 1, by default; set normalise if the net was trained otherwise" in printed
    _, said, printed = run(give, *net, *set_each("normalise.low=-255", "normalise.high=255"))
    assert said["normalise"] == {"shift": 0.0, "scale": 255.0}  # 0 … 255 are 0 … 1
    assert "-255 … 255 of uint8, given → -1 … 1 output" in printed


def test_numbers_that_are_given_count_before_any_measuring(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", specimen("uint16"))
    _, said, printed = run(give, *IDENTITY, *set_each("normalise.low=1000", "normalise.high=1510"))
    assert said["normalise"] == {"shift": 1255.0, "scale": 255.0}
    assert "1000 … 1510 of uint16, given → -1 … 1" in printed
    _, said, printed = run(give, *IDENTITY, *set_each("normalise.mean=1200", "normalise.std=60"))
    assert said["normalise"] == {"shift": 1200.0, "scale": 60.0}
    assert "mean 1200, deviation 60 of uint16 → 0, 1" in printed


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["normalise.method=range", "normalise.mean=3", "normalise.std=1"], "mean and std are for method zscore"),
        (["normalise.method=zscore", "normalise.low=3", "normalise.high=4"], "low and high are for method range"),
        (["normalise.mean=3", "normalise.std=1", "normalise.low=3", "normalise.high=4"], "without low and high"),
    ],
)
def test_numbers_that_a_method_does_not_take_are_refused(settings: list[str], sentence: str) -> None:
    """They were left out without a word."""
    with pytest.raises(RecipeError, match=sentence):
        load_recipe(None, settings)


def test_a_constant_volume_is_refused(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", np.full(SHAPE, 7, np.uint16))
    ended = give("run", "--config", "threads", *SMALL, *DENOISER, "-o", "out.zarr", "in.n5/raw")
    assert ended.code == 2
    assert "the volume is constant, there is no spread to scale by; use none" in " ".join(ended.err.split())


def test_a_volume_that_is_nearly_all_one_value_is_refused_with_its_ends() -> None:
    data = np.zeros((20, 20, 20), np.uint16)
    data[3, 4, 5] = 4000
    counts = measure(data, (0.0, 4000.0))
    with pytest.raises(PlanError, match=r"percentiles 0.5 and 99.5 of the volume are both .* from 0 to 4000: give"):
        affine(Normalise(), data.dtype, counts)
    assert sampled_affine(Normalise(), data) == Affine()


@pytest.mark.parametrize("place", ["beside the mask", "outside the roi"])
def test_nan_where_nothing_is_wanted_does_not_matter(tmp_path: Path, give: Give, place: str) -> None:
    data, mask = specimen("float32"), np.zeros(SHAPE, np.uint8)
    mask[:, :, :16] = 1
    data[5:, :, 20:] = np.nan
    write_volume(tmp_path / "in.n5", data)
    write_volume(tmp_path / "mask.n5", mask)
    part = ["--mask", "mask.n5/raw"] if place == "beside the mask" else ["--roi", ":,:,0:16"]
    out, said, _ = run(give, *IDENTITY, *part)
    np.testing.assert_allclose(out[..., :16], data[..., :16], atol=1e-3)
    whole = sampled_affine(Normalise(), data)
    assert said["normalise"] == {"shift": pytest.approx(whole.shift), "scale": pytest.approx(whole.scale)}


@pytest.mark.parametrize(("num", "called"), [(3, "3 voxels"), (1, "1 voxel")])
def test_nan_in_what_is_wanted_is_refused_with_its_box(tmp_path: Path, give: Give, num: int, called: str) -> None:
    data = specimen("float32")
    data[2, 3, 20 : 20 + num] = np.nan
    write_volume(tmp_path / "in.n5", data)
    ended = give("run", "--config", "threads", *SMALL, *IDENTITY, "-o", "out.zarr", "in.n5/raw")
    assert ended.code == 1
    said = " ".join(ended.err.split())
    verb = "is" if num == 1 else "are"
    assert f"{called} of the volume in box 0:16,0:12,16:32 {verb} NaN or infinite, so the volume has no mean" in said
    assert "volpipe: measuring the intensities of the volume (measure 1) failed, and every block needs" in said
    assert "normalise.low and high" in said


@pytest.mark.parametrize("blend", ["crop", "hann"])
def test_what_is_clipped_is_counted_and_told(tmp_path: Path, give: Give, blend: str) -> None:
    """The net adds 0.1 of its range, so that all levels from 243 on leave 8 bits."""
    (tmp_path / "net.py").write_text(
        "import torch\nclass Up(torch.nn.Module):\n    volpipe = {'intensity': 'same'}\n"
        "    def forward(self, x):\n        return x + 0.1\ndef build():\n    return Up()\n"
    )
    data = np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8)
    write_volume(tmp_path / "in.n5", data)
    division = set_each(*windowed((8, 12, 16), (0, 0, 0) if blend == "crop" else (4, 4, 4), (2, 1, 1), blend))
    _, _, printed = run(give, *division, *set_each("net.name=net.py:build"))
    num = int((np.rint(data.astype(np.float64) + 12.75) > 255).sum())
    assert f"{num / data.size:.2%} of the output ({num:,} voxels) lay beyond 0 … 255 of uint8" in printed
    assert read_attributes(tmp_path / "out.zarr/run")["volpipe"]["clipped"] == {
        "voxels": num, "share": pytest.approx(num / data.size)
    }  # fmt: skip


def test_a_thousandth_that_is_clipped_is_no_news(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", specimen("uint16").astype(np.uint8))
    assert not re.search("lay beyond", run(give, *IDENTITY)[2])


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [("float32", 255), ("float64", 255), ("float32", 1), ("uint16", 1), ("int16", 1), ("uint32", 1)],
)
def test_grey_levels_of_8_bits_in_another_type_are_seen_as_those_of_8_bits(
    tmp_path: Path, give: Give, dtype: str, factor: int
) -> None:
    data = SyntheticVolume(SHAPE, 3).raw(Box.from_shape(SHAPE))
    write_volume(tmp_path / "in.n5", data)
    of_bytes, _, plain = run(give, *DENOISER)
    assert "warning" not in plain
    shutil.rmtree("in.n5")
    write_volume(tmp_path / "in.n5", (data / factor).astype(dtype))
    out, said, printed = run(give, *DENOISER)
    assert np.abs(np.clip(out * factor, 0, 255) - of_bytes.astype(np.float64)).max() <= 0.6
    assert said["normalise"] == {"shift": 127.5 / factor, "scale": 127.5 / factor}
    top = 255 // factor
    assert f"warning: {tmp_path}/in.n5:raw has {dtype} voxels of" in printed
    assert f"which are taken for grey levels of 8 bits: 0 … {top} of {dtype} → -1 … 1, as 0 … 255 of uint8" in printed


@pytest.mark.long
def test_a_voxel_beyond_8_bits_that_no_sample_has_gives_percentiles_to_all(tmp_path: Path, give: Give) -> None:
    shape = (16, 128, 128)
    data = SyntheticVolume(shape, 3).raw(Box.from_shape(shape)).astype(np.uint16)
    data[7, 1, 1] = 4000
    write_volume(tmp_path / "in.n5", data)
    _, said, printed = run(give, *DENOISER)
    low, high = np.percentile(data, [0.5, 99.5])
    ends = [said["normalise"]["shift"] + sign * said["normalise"]["scale"] for sign in (-1, 1)]
    np.testing.assert_allclose(ends, [low, high], atol=4)
    assert "has uint16 voxels from 21 to 4000, which are no grey levels of 8 bits: percentiles are taken" in printed


@pytest.mark.parametrize(
    ("data", "settings", "sentence"),
    [
        (
            np.arange(24576, dtype=np.uint8).reshape(SHAPE[0], 24, 64),
            ["normalise.low=0", "normalise.high=1"],
            "would see",
        ),
        (np.linspace(-1, 1, 12288, dtype=np.float32).reshape(SHAPE), [], "set normalise.method=none if they are norm"),
        (specimen("uint16"), [], "the net was trained with 0 … 255 as -1 … 1, and the percentiles 0.5 and 99.5 are"),
        (
            specimen("uint16").astype(np.uint8),
            ["net.trained_range=[20,200]"],
            "set normalise.low=20 and normalise.high",
        ),
        (
            np.kron(np.arange(60).reshape(3, 4, 5), np.ones((8, 8, 16))).astype(np.uint16),
            [],
            "looks like labels, whose",
        ),
    ],
)
def test_what_a_net_did_not_learn_is_a_warning_of_the_plan(
    tmp_path: Path, data: np.ndarray, settings: list[str], sentence: str
) -> None:
    write_volume(tmp_path / "in.n5", data)
    plan = vp.plan(tmp_path / "in.n5/raw", out=tmp_path / "out.zarr", settings=settings, site=None)
    assert [warning for warning in plan.warnings() if sentence in warning]
