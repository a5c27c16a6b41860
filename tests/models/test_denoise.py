"""The shipped denoiser: it is what its card says, it takes noise off, and its tiles join as the plan promises."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from inline import Inline
from safetensors.torch import load_file

from volpipe.geometry.grid import Box
from volpipe.nets.load import build_net, describe
from volpipe.recipes.inference import load_recipe
from volpipe.synthetic.volume import MEMBRANE, SyntheticVolume, write_sample
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

RECIPE = ROOT / "configs" / "default.toml"
WEIGHTS = ROOT / "models" / "unet3d_denoise.safetensors"
CARD = ROOT / "models" / "unet3d_denoise.md"
HELD_OUT = 950  # neither a seed of the training nor one of the card's scores
SHAPE = (48, 64, 64)
INSIDE = (slice(9, -9),) * 3  # where the net sees nothing of the padding


@cache
def net() -> Any:  # torch types every attribute of a module as Tensor | Module, so that none can be used
    return build_net(load_recipe(RECIPE).net)


def denoised(greys: np.ndarray) -> np.ndarray:
    """Return grey levels (z, y, x), not rounded, as one window of the net gives them."""
    x = torch.from_numpy(greys.astype(np.float32))[None, None] / 127.5 - 1
    with torch.inference_mode():
        out: np.ndarray = net()(x)[0, 0].numpy()
    return (out.astype(np.float64) + 1) * 127.5


def picture(noise: float) -> np.ndarray:
    return SyntheticVolume(SHAPE, HELD_OUT, noise=noise).raw(Box.from_shape(SHAPE)).astype(np.float64)


def psnr(truth: np.ndarray, data: np.ndarray) -> float:
    return 20 * math.log10(255 / float(np.sqrt(np.mean((truth - data)[INSIDE] ** 2))))


def script() -> ModuleType:
    """Return scripts/train_denoise as a module."""
    loader = SourceFileLoader("train_denoise", str(ROOT / "scripts" / "train_denoise"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


# ---- what is shipped


def test_card_describes_the_weights_that_are_shipped() -> None:
    card = CARD.read_text(encoding="utf-8")
    num = sum(math.prod(tensor.shape) for tensor in load_file(WEIGHTS).values())
    assert f"{num:,} parameters" in card
    assert f"{WEIGHTS.stat().st_size:,} bytes" in card
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() in card
    assert describe(load_recipe(RECIPE).net).weights_sha256 in card


def test_weights_are_small_and_finite() -> None:
    assert WEIGHTS.stat().st_size < 1_000_000
    for name, tensor in load_file(WEIGHTS).items():
        assert tensor.dtype == torch.float32, name
        assert torch.isfinite(tensor).all(), name


def test_default_recipe_builds_the_net_with_the_shipped_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the weights are found from anywhere
    state = build_net(load_recipe(RECIPE).net, str(tmp_path)).state_dict()
    shipped = load_file(WEIGHTS)
    assert state.keys() == shipped.keys()
    assert all(torch.equal(state[name], shipped[name]) for name in shipped)


# ---- what it does to a picture


@pytest.mark.parametrize(("noise", "least"), [(0.5, 2.0), (1.0, 5.0), (2.0, 6.0)])
def test_held_out_tissue_comes_nearer_to_the_truth(noise: float, least: float) -> None:
    truth, noisy = picture(0.0), picture(noise)
    assert psnr(truth, denoised(noisy)) - psnr(truth, noisy) > least  # decibels


def test_tissue_without_noise_stays_as_it_is() -> None:
    truth = picture(0.0)
    assert psnr(truth, denoised(truth)) > 40


@pytest.mark.parametrize(("gain", "offset"), [(0.6, 30.0), (0.8, 50.0), (0.8, 0.0)])
def test_another_contrast_or_brightness_is_denoised_as_well(gain: float, offset: float) -> None:
    truth = gain * picture(0.0) + offset
    noisy = np.clip(np.rint(truth + np.random.default_rng(0).normal(0, 6, SHAPE)), 0, 255)
    assert psnr(truth, denoised(noisy)) - psnr(truth, noisy) > 4


def test_membranes_stay_as_dark_as_they_are() -> None:
    truth, out = picture(0.0)[INSIDE], denoised(picture(1.0))[INSIDE]
    membrane = (SyntheticVolume(SHAPE, HELD_OUT).organelles(Box.from_shape(SHAPE)) == MEMBRANE)[INSIDE]
    assert membrane.mean() > 0.05
    assert abs(out[membrane].mean() - truth[membrane].mean()) < 1
    assert out[membrane].std() > 0.95 * truth[membrane].std()


def test_every_place_of_the_nets_grid_is_denoised_alike() -> None:
    error = np.abs(denoised(picture(1.0)) - picture(0.0))[10:-10, 10:-10, 10:-10]
    places = [error[z::2, y::2, x::2].mean() for z, y, x in np.ndindex(2, 2, 2)]
    assert max(places) < 1.1 * min(places)


# ---- how its tiles join


def test_a_voxel_sees_its_halo_and_nothing_beyond() -> None:
    first, last = 10, 27  # of what voxels 18 and 19 see: 18 reaches 8 before and 9 after, 19 the reverse
    window = np.random.default_rng(0).uniform(0, 255, (38, 38, 38))
    pair = (slice(18, 20),) * 3
    kept = np.zeros(window.shape, bool)
    kept[(slice(first, last + 1),) * 3] = True
    assert np.array_equal(denoised(np.where(kept, window, 0))[pair], denoised(window)[pair])
    for axis in range(3):
        for seen in (first, last):
            changed = window.copy()
            np.moveaxis(changed, axis, 0)[seen] = 0
            assert not np.array_equal(denoised(changed)[pair], denoised(window)[pair]), f"axis {'zyx'[axis]}"


def test_run_by_the_default_recipe_equals_the_net_over_the_whole(tmp_path: Path) -> None:
    sample = SyntheticVolume((37, 50, 44), HELD_OUT)
    write_sample(tmp_path / "in.n5", sample)
    recipe = load_recipe(RECIPE, ["windows.shape=[36,40,44]", "windows.block=[1,2,1]"])
    plan = prepare(str(tmp_path / "in.n5" / "raw"), recipe, tmp_path / "out.zarr", tmp_path)
    assert plan.net.tile_invariant
    assert plan.net.halo == (9, 9, 9)
    assert plan.overlap == (20, 20, 20)  # twice the halo, which its stride of 2 rounds up to 10
    assert execute(plan, Inline().start).missing == []
    found = open_volume(plan.out).open()[...]
    padded = np.pad(sample.raw(Box.from_shape(sample.shape)), ((10, 11), (10, 10), (10, 10)), mode="reflect")
    expected = denoised(padded)[10:-11, 10:-10, 10:-10].clip(0, 255)
    assert found.dtype == np.uint8
    assert np.abs(found - expected).max() < 0.501  # rounding, and another order of sums


# ---- how it was trained


def test_training_patches_are_one_picture_without_and_with_noise() -> None:
    train = script()
    boxes = [train.clean_box(seed) for seed in (1, 2)]
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        clean, noisy = train.draw_patch(boxes, rng)
        assert clean.shape == noisy.shape == (1, 1, train.PATCH, train.PATCH, train.PATCH)
        assert max(clean.abs().max(), noisy.abs().max()) <= 1
        inside = clean.abs() < 0.6  # where noise is not clipped
        added = (noisy - clean)[inside] * 127.5
        assert abs(added.mean()) < 0.3
        assert added.std() < 1.02 * 2.5 * 6


def test_training_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    train = script()
    monkeypatch.setattr(train, "PATCH", 24)
    boxes = [torch.rand(26, 26, 26, generator=torch.Generator().manual_seed(0))]
    states = []
    for _ in range(2):
        trained = train.build_net()
        assert [step for step, _ in train.train(trained, boxes, 3)] == [1, 2, 3]
        states.append(trained.state_dict())
    untrained = train.build_net().state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in untrained)
    assert not all(torch.equal(states[0][name], untrained[name]) for name in untrained)


def test_held_out_seeds_were_not_trained_on() -> None:
    train = script()
    assert not {*train.HELD_OUT_SEEDS, HELD_OUT} & {*train.TRAINING_SEEDS}
