"""A plan says where its volume is not what the net is made for: grey levels, voxels, constant and inverted volumes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from command import Give, giver, set_each
from nets import SMOOTH
from safetensors.torch import save_file
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.inference.statistics import sampled_affine
from volpipe.nets.trained import Trained
from volpipe.recipes.inference import Normalise
from volpipe.synthetic.volume import SyntheticVolume

SHAPE = (24, 64, 64)
RAW = SyntheticVolume(SHAPE, 6).raw(Box.from_shape(SHAPE))
LEVELS = {
    "uint8": RAW, "int8": (RAW.astype(np.int16) - 128).astype(np.int8), "uint16": RAW.astype(np.uint16) * 16,
    "float32": RAW.astype(np.float32) / 255,
}  # fmt: skip
MINE = """
import torch
def mine():
    return torch.nn.Conv3d(1, 1, 3, padding=1)
"""
OWN = ["net.name=mine.py:mine", "net.weights=mine.safetensors"]
OPEN = "while nothing says which it was trained with"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a net of the user's."""
    (tmp_path / "mine.py").write_text(MINE)
    save_file(torch.nn.Conv3d(1, 1, 3).state_dict(), tmp_path / "mine.safetensors")
    (tmp_path / "smooth.py").write_text(SMOOTH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(data: np.ndarray, *settings: str, recipe: str = "none") -> list[str]:
    """Return the warnings of a plan for `data`."""
    tifffile.imwrite("v.tif", data)
    plan = vp.plan("v.tif", out="out.zarr", recipe=recipe, settings=list(settings), site=None)
    return list(plan.warnings())


def normalised(text: str) -> Normalise:
    """Return the normalisation of settings such as "normalise.low=0 normalise.high=255"."""
    return Normalise.model_validate(dict(re.findall(r"normalise\.(\w+)=([^\s,;]+)", text)))


@pytest.mark.parametrize(
    "dtype", ["uint8", "float32", *(pytest.param(t, marks=pytest.mark.long) for t in ("int8", "uint16"))]
)
def test_the_four_usual_grey_levels_are_given_as_settings_that_mean_them(dtype: str) -> None:
    data = LEVELS[dtype]
    (note,) = [note for note in told(data, *OWN) if OPEN in note]
    seen, gets = re.search(r"voxels of (\S+) to (\S+) in", note), re.search(r"gets about (\S+) to (\S+) for", note)
    assert seen is not None and gets is not None
    assert data.min() <= float(seen[1]) < float(seen[2]) <= data.max() * (1 + 1e-5)
    assert -1.3 < float(gets[1]) < float(gets[2]) < 1.3
    stored, unit, both, standard = (normalised(part) for part in note.partition(OPEN)[2].split(";"))
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if data.itemsize == 1 else map(float, seen.groups())
    ends = np.array([[low, high]], np.float64)
    for choice, expected in ((stored, (low, high)), (unit, (0, 1)), (both, (-1, 1))):
        mapped = sampled_affine(choice, data.reshape(1, -1))
        (shift,), (scale,) = mapped.rows[:2]
        np.testing.assert_allclose((ends[0] - shift) / scale, expected, atol=1e-4)
    mapped = sampled_affine(standard, data.reshape(1, -1))
    assert (mapped.shift, mapped.scale) == (pytest.approx(data.mean(), rel=1e-4), pytest.approx(data.std(), rel=1e-4))
    for setting in ("stored", "unit", "both", "standard"):
        choice = locals()[setting].model_dump(exclude_defaults=True)
        assert not [
            each for each in told(data, *OWN, *(f"normalise.{k}={v}" for k, v in choice.items())) if OPEN in each
        ]


@pytest.mark.parametrize(
    ("settings", "recipe"),
    [
        ([], "default"), ([], "affinities"), (["net.name=identity"], "none"), (["net.name=mean"], "none"),
        (["net.name=numpy:operator:neg"], "none"), ([*OWN, "net.trained_range=[0,255]"], "none"),
    ],
)  # fmt: skip
def test_nets_that_know_their_grey_levels_are_not_told_of(settings: list[str], recipe: str) -> None:
    assert not [note for note in told(RAW, *settings, recipe=recipe) if OPEN in note]


@pytest.mark.parametrize(
    "settings", [OWN, ["net.name=smooth.py:smooth"], ["net.name=unet3d", "net.weights=mine.unet.safetensors"]]
)
def test_nets_of_the_user_are(settings: list[str]) -> None:
    from volpipe.models.unet3d import unet3d

    save_file(unet3d().state_dict(), "mine.unet.safetensors")
    assert [note for note in told(RAW, *settings) if OPEN in note]


def test_weights_that_say_what_they_learned_from_are_run_so() -> None:
    learned = Normalise(method="range", low=-100, high=300)
    Trained(voxel_sizes_nm=((40, 4, 4),), line_contrasts=(0.4,), normalise=learned).store(Path("mine.safetensors"))
    tifffile.imwrite("v.tif", 255 - RAW)
    plan = vp.plan("v.tif", out="out.zarr", recipe="none", settings=[*OWN, "input.voxel_size_nm=8,8,8"], site=None)
    assert plan.recipe.normalise == learned
    notes = "\n".join(plan.warnings())
    assert OPEN not in notes
    assert "net mine learned from voxels of 40 × 4 × 4 nm (z, y, x), and those of" in notes
    assert "are 8 × 8 × 8 nm" in notes and "looks inverted for net mine" in notes
    own = ["normalise.low=0", "normalise.high=255", "input.voxel_size_nm=40,4,4"]
    assert not told(RAW, *OWN, *own)


@pytest.mark.parametrize(
    ("recipe", "size", "sentence"),
    [
        ("superres_z4", "10,10,10", "learned from voxels of 40 × 10 × 10 nm"),
        ("superres_z2", "10,20,10", "longest along y, and in training along z"),
        ("affinities", "100,100,100", "learned from voxels of 10 × 10 × 10 nm"),
        ("default", "40,4,4", "or 20 × 10 × 10 nm"),
        ("superres_z4", "40,10,10", ""),
        ("affinities", "10,10,10", ""),
        ("default", "16,8,8", ""),
    ],
)
def test_shipped_nets_are_told_of_voxels_that_they_never_saw(recipe: str, size: str, sentence: str) -> None:
    notes = told(RAW, f"input.voxel_size_nm={size}", recipe=recipe)
    assert bool(notes) == bool(sentence) and all(sentence in note for note in notes)


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("0.01,0.01,0.01", "0.01 × 0.01 × 0.01 nm (z, y, x), below 0.1 nm: is another unit meant? If these"),
        ("0.04,0.004,0.004", "in um, give --set input.voxel_size_nm=40,4,4"),
        ("40,0.05,4", "below 0.1 nm"),
        ("0.00004,0.000004,0.000004", "in mm, give --set input.voxel_size_nm=40,4,4"),
        ("2000000,2000000,2000000", "above 1 mm: is another unit meant"),
        ("0.1,0.1,0.1", ""),
        ("1000000,1000000,1000000", ""),
    ],
)
def test_voxels_of_another_unit_are_told(size: str, sentence: str) -> None:
    notes = told(RAW, "net.name=identity", f"input.voxel_size_nm={size}")
    assert len(notes) == bool(sentence) and all(sentence in note for note in notes)


@pytest.mark.parametrize("value", [0, 255])
def test_a_constant_volume_is_told(value: int) -> None:
    (note,) = told(np.full(SHAPE, value, np.uint8), recipe="default")
    assert f"{value} alone in 27 sampled boxes: is it the right array" in note


def test_what_is_told_stands_in_the_report_and_in_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    write_volume(tmp_path / "in.n5", noise((16, 16, 16)))
    windows = windowed((8, 8, 8), (2, 2, 2), (1, 1, 1), "crop")
    settings = set_each(*OWN, *windows, "input.voxel_size_nm=0.001,0.001,0.001")
    ended = give("run", "--config", "threads", "--recipe", "none", *settings, "-o", "out.zarr", "in.n5/raw")
    assert ended.code == 0
    report = Path("out.zarr.run/report.html").read_text(encoding="utf-8")
    for sentence in (OPEN, "below 0.1 nm"):
        assert sentence in ended.err and sentence in report
    tifffile.imwrite(
        "flat.tif",
        np.zeros(SHAPE, np.uint8),
        imagej=True,
        resolution=(1e9, 1e9),
        metadata={"spacing": 1e-9, "unit": "um"},
    )
    printed = give("info", "flat.tif").out
    assert "all are alike: is it the right array" in printed and "below 0.1 nm" in printed
