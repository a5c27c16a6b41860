"""Results folders of nnU-Net: its numbers by its own formulas, and by itself in an environment of its own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet
from inline import Inline
from scipy.ndimage import gaussian_filter
from volumes import noise, write_volume

from volpipe.errors import PlanError, VolpipeError
from volpipe.inference.plan import Plan
from volpipe.nets.load import build_net
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import execute
from volpipe.workflow.prepare import prepare

PEER = Path(__file__).parent / "nnunet_peer.py"
PATCH = {3: [16, 16, 24], 2: [16, 24]}


def architecture(dims: int) -> dict[str, Any]:
    return {
        "n_stages": 2, "features_per_stage": [4, 8], "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
        "kernel_sizes": [[3] * dims] * 2, "strides": [[1] * dims, [2] * dims], "n_conv_per_stage": [1, 1],
        "n_conv_per_stage_decoder": [1], "conv_bias": True,
        "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
        "dropout_op": None, "dropout_op_kwargs": None, "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }  # fmt: skip


def original(dims: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    conv, norm = {3: (torch.nn.Conv3d, torch.nn.InstanceNorm3d), 2: (torch.nn.Conv2d, torch.nn.InstanceNorm2d)}[dims]
    built = {"conv_op": conv, "norm_op": norm, "nonlin": torch.nn.LeakyReLU}
    net: torch.nn.Module = PlainConvUNet(1, num_classes=3, **(architecture(dims) | built), deep_supervision=False)
    return net.eval()


def results(folder: Path, dims: int = 3, *, folds: int = 2, flips: Any = (0, 2), **configuration: Any) -> Path:
    """Write a results folder as nnU-Net's trainer does, numpy's numbers among the weights included."""
    name = "3d_fullres" if dims == 3 else "2d"
    own = {
        "patch_size": PATCH[dims], "spacing": [8.0] * dims, "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": architecture(dims), "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
    }  # fmt: skip
    plans = {"configurations": {name: own | configuration}, "transpose_forward": [0, 1, 2]}
    folder.mkdir()
    (folder / "plans.json").write_text(json.dumps(plans))
    labels = {"background": 0, "cell": 1, "wall": 2}
    (folder / "dataset.json").write_text(json.dumps({"channel_names": {"0": "zscore"}, "labels": labels}))
    for fold in range(folds):
        (folder / f"fold_{fold}").mkdir()
        content = {
            "network_weights": original(dims, fold).state_dict(), "_best_ema": np.float64(0.5),
            "logging": {"train_losses": [np.float32(1.5)]}, "trainer_name": "nnUNetTrainer",
            "init_args": {"configuration": name, "fold": fold}, "inference_allowed_mirroring_axes": flips,
        }  # fmt: skip
        torch.save(content, folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder


def planned(folder: Path, data: np.ndarray, *settings: str) -> Plan:
    write_volume(folder / "in.n5", data)
    size = "input.voxel_size_nm=[8,8,8]"
    recipe = load_recipe(None, ["net.name=nnunet:results", "output.levels=0", size, *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / "out.zarr", folder)


def ran(plan: Plan) -> np.ndarray:
    assert execute(plan, Inline().start).missing == []
    return open_volume(plan.out).open()[...]


def by_formulas(data: np.ndarray, dims: int, flips: tuple[int, ...]) -> np.ndarray:
    """Return logits (c, z, y, x) as nnU-Net's `predict_logits_from_preprocessed_data` joins them, in float64."""
    image = (data - data.mean()) / data.std()
    patch = ([1] if dims == 2 else []) + PATCH[dims]
    starts = []
    for n, w in zip(data.shape, patch, strict=True):
        count = int(np.ceil((n - w) / (w * 0.5))) + 1 if w > 1 else n
        starts.append([int(np.round((n - w) / max(1, count - 1) * i)) for i in range(count)])
    spot = np.zeros(PATCH[dims])
    spot[tuple(n // 2 for n in PATCH[dims])] = 1
    weights = gaussian_filter(spot, [n / 8 for n in PATCH[dims]], 0, mode="constant", cval=0)
    weights = (10 * weights / weights.max()).astype(np.float16).astype(np.float64)
    weights[weights == 0] = weights[weights > 0].min()
    weights = weights.reshape(patch)
    forms = [form for n in range(len(flips) + 1) for form in itertools.combinations(flips, n)]
    nets = [original(dims, fold) for fold in range(2)]
    total, weight = np.zeros((3, *data.shape)), np.zeros(data.shape)
    for start in itertools.product(*starts):
        place = tuple(slice(a, a + w) for a, w in zip(start, patch, strict=True))
        window = torch.from_numpy(image[place].astype(np.float32))[None, None]
        window = window[:, :, 0] if dims == 2 else window
        with torch.inference_mode():
            outs = [torch.flip(net(torch.flip(window, axes)), axes) for net in nets for axes in _axes(forms)]
        mean = torch.stack(outs).mean(0)[0].numpy().reshape(3, *patch)
        total[:, *place] += mean * weights
        weight[place] += weights
    logits: np.ndarray = total / weight
    return logits


def _axes(forms: list[tuple[int, ...]]) -> list[list[int]]:
    return [[2 + axis for axis in form] for form in forms]


@pytest.mark.parametrize(("dims", "flips"), [(3, (0, 2)), (2, (0, 1)), (3, ())])
def test_numbers_are_those_of_nnunet(tmp_path: Path, dims: int, flips: tuple[int, ...]) -> None:
    data = noise((23, 30, 41)) if dims == 3 else noise((5, 30, 41))
    results(tmp_path / "results", dims, flips=flips or None)
    expected = by_formulas(data.astype(np.float64), dims, flips)
    classes = planned(tmp_path, data)
    assert (classes.is_classes, classes.lattice.placement, classes.out_dtype) == (True, "even", "uint8")
    assert np.mean(ran(classes) == expected.argmax(axis=0)) >= 0.999
    (tmp_path / "numbers").mkdir()
    (tmp_path / "results").rename(tmp_path / "numbers" / "results")
    numbers = ran(planned(tmp_path / "numbers", data, "output.kind=image", "output.activation=softmax"))
    raised = np.exp(expected - expected.max(axis=0))
    np.testing.assert_allclose(numbers, raised / raised.sum(axis=0), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scheme", "properties", "mapped"),
    [
        ("RescaleTo01Normalization", {}, lambda x: (x - x.min()) / (x.max() - x.min())),
        ("NoNormalization", {}, lambda x: x),
        (
            "CTNormalization",
            {"mean": 100.0, "std": 40.0, "percentile_00_5": 30.0, "percentile_99_5": 190.0},
            lambda x: (np.clip(x, 30, 190) - 100) / 40,
        ),
    ],
)
def test_grey_levels_are_mapped_by_the_plans(tmp_path: Path, scheme: str, properties: Any, mapped: Any) -> None:
    folder = results(tmp_path / "results", folds=1, flips=None, normalization_schemes=[scheme])
    plans = json.loads((folder / "plans.json").read_text())
    plans["foreground_intensity_properties_per_channel"] = {"0": properties}
    (folder / "plans.json").write_text(json.dumps(plans))
    data = noise((16, 16, 24))  # one window
    with torch.inference_mode():
        window = torch.from_numpy(mapped(data.astype(np.float32)))
        expected = original(3, 0)(window[None, None])[0].numpy()
    numbers = ran(planned(tmp_path, data, "output.kind=image"))
    np.testing.assert_allclose(numbers, expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_a_volume_of_other_voxels_is_refused(tmp_path: Path) -> None:
    results(tmp_path / "results")
    with pytest.raises(PlanError, match=r"trained on voxels of 8 × 8 × 8 \(z, y, x\), those of .* are 8 × 4 × 4 nm"):
        planned(tmp_path, noise((16, 16, 24)), "input.voxel_size_nm=[8,4,4]")
    assert planned(tmp_path, noise((16, 16, 24)), "input.voxel_size_nm=[8000,8000,8000]").net.spacing == (8, 8, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"previous_stage": "3d_lowres"}, ".*second stage of nnU-Net's cascade"),
        ({"normalization_schemes": ["MyNormalization"]}, "its normalisation MyNormalization is not one of nnU-Net's"),
        ({"use_mask_for_norm": [True]}, "use_mask_for_norm takes statistics over the voxels that are not zero"),
        (
            {"architecture": {"network_class_name": "os.system", "arch_kwargs": {}}},
            "it names os.system, and classes come from dynamic_network_architectures alone",
        ),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    results(tmp_path / "results", **change)
    with pytest.raises(VolpipeError, match=rf"nnU-Net's folder .*: {words}"):
        build_net(load_recipe(None, ["net.name=nnunet:results"]).net, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("{folds=[0,7]}", "no fold_7 in .*results, which has fold_0, fold_1"),
        ("{checkpoint='latest.pth'}", "no latest.pth in .*fold_0"),
        ("{fold=[0]}", "has no option fold .did you mean 'folds'"),
        ("{configuration='3d_low'}", "has no configuration '3d_low'; it has 3d_fullres"),
    ],
)
def test_options_that_name_nothing_are_refused(tmp_path: Path, options: str, words: str) -> None:
    results(tmp_path / "results")
    with pytest.raises(VolpipeError, match=words):
        build_net(load_recipe(None, ["net.name=nnunet:results", f"net.options={options}"]).net, str(tmp_path))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("configuration", ["3d_fullres", "2d"])
def test_classes_are_those_of_nnunet_itself(tmp_path: Path, configuration: str) -> None:
    """nnU-Net plans, trains a few steps on two folds, and predicts; it is installed for that, beside these packages."""
    venv.create(tmp_path / "peer", with_pip=True)
    python = str(tmp_path / "peer" / "bin" / "python")
    beside = next(path for path in sys.path if path.endswith("site-packages"))
    site = next((tmp_path / "peer").glob("lib/python*/site-packages"))
    (site / "beside.pth").write_text(beside)
    installed = [f"torch=={torch.__version__.partition('+')[0]}", "nnunetv2==2.8.1"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *installed], check=True)
    subprocess.run([python, str(PEER), str(tmp_path), configuration], check=True)
    (tmp_path / "results").symlink_to(next(tmp_path.glob(f"res/*/nnUNetTrainer__nnUNetPlans__{configuration}")))
    data, expected = np.load(tmp_path / "image.npy"), np.load(tmp_path / "classes.npy")
    assert np.mean(ran(planned(tmp_path, data)) == expected) >= 0.999
