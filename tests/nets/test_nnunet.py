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
from scipy.stats import mode
from skimage.transform import resize
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import PlanError, VolpipeError
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.nets.load import build_net
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

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


def original(dims: int, seed: int, channels: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    conv, norm = {3: (torch.nn.Conv3d, torch.nn.InstanceNorm3d), 2: (torch.nn.Conv2d, torch.nn.InstanceNorm2d)}[dims]
    built = {"conv_op": conv, "norm_op": norm, "nonlin": torch.nn.LeakyReLU}
    arguments = architecture(dims) | built
    net: torch.nn.Module = PlainConvUNet(channels, num_classes=3, **arguments, deep_supervision=False)
    return net.eval()


def results(
    folder: Path, dims: int = 3, *, folds: int = 2, flips: Any = (0, 2), channels: int = 1, **configuration: Any
) -> Path:
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
    labels, names = {"background": 0, "cell": 1, "wall": 2}, {str(i): "zscore" for i in range(channels)}
    (folder / "dataset.json").write_text(json.dumps({"channel_names": names, "labels": labels}))
    for fold in range(folds):
        (folder / f"fold_{fold}").mkdir()
        content = {
            "network_weights": original(dims, fold, channels).state_dict(), "_best_ema": np.float64(0.5),
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


def by_formulas(image: np.ndarray, dims: int, flips: tuple[int, ...]) -> np.ndarray:
    """Return logits (c, z, y, x) as nnU-Net's `predict_logits_from_preprocessed_data` joins them, in float64."""
    patch = ([1] if dims == 2 else []) + PATCH[dims]
    starts = []
    for n, w in zip(image.shape, patch, strict=True):
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
    total, weight = np.zeros((3, *image.shape)), np.zeros(image.shape)
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
    expected = by_formulas((data - data.mean()) / data.std(), dims, flips)
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


def rescaled(x: np.ndarray) -> np.ndarray:
    return (x - x.min()) / (x.max() - x.min())


@pytest.mark.parametrize(
    ("scheme", "mapped"), [("ZScore", lambda x: (x - x.mean()) / x.std()), ("RescaleTo01", rescaled)]
)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_each_channel_is_mapped_by_its_own_statistics(tmp_path: Path, scheme: str, mapped: Any, dtype: str) -> None:
    schemes = [f"{scheme}Normalization"] * 2
    results(tmp_path / "results", channels=2, folds=1, flips=None, normalization_schemes=schemes)
    data = np.stack([noise((16, 16, 24), dtype), noise((16, 16, 24), dtype, seed=1) // 9 + 3])  # one window
    with torch.inference_mode():
        window = torch.from_numpy(np.stack([mapped(channel.astype(np.float64)) for channel in data]).astype(np.float32))
        expected = original(3, 0, 2)(window[None])[0].numpy()
    own = ["normalise.method=zscore"] if scheme == "ZScore" else []  # of all channels, if it were not the net's
    plan = planned(tmp_path, data, "output.kind=image", *own)
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))
    checked = vp.verify(plan.out, recompute=1)
    assert (checked.is_whole, len(checked.blocks)) == (True, 1)


@pytest.mark.parametrize(
    ("schemes", "size"),
    [(["ZScoreNormalization"] * 2, "[8,8,8]"), (["CTNormalization", "NoNormalization"], "[8,4,5]")],
)
def test_modalities_in_volumes_of_their_own_are_channels(tmp_path: Path, schemes: list[str], size: str) -> None:
    folder = results(tmp_path / "results", channels=2, folds=1, flips=None, normalization_schemes=schemes)
    plans = json.loads((folder / "plans.json").read_text())
    ends = {"percentile_00_5": 60.0, "percentile_99_5": 190.0}
    plans["foreground_intensity_properties_per_channel"] = {"0": {"mean": 100.0, "std": 40.0} | ends, "1": ends}
    (folder / "plans.json").write_text(json.dumps(plans))
    one, other = noise((23, 30, 41)), noise((23, 30, 41), seed=1)
    settings = [f"input.voxel_size_nm={size}", "output.kind=image"]
    together = ran(planned(tmp_path, np.stack([one, other]), *settings))
    (tmp_path / "apart").mkdir()
    folder.rename(tmp_path / "apart" / "results")
    write_volume(tmp_path / "apart" / "image_0001.n5", other, chunk=23)
    plan = planned(tmp_path / "apart", one, *settings, "input.also=image_0001.n5/raw")
    assert plan.source.also[0].shape == plan.source.shape
    np.testing.assert_array_equal(ran(plan), together)


def test_folds_vote_for_a_class(tmp_path: Path) -> None:
    results(tmp_path / "results", folds=3)
    data, votes = noise((23, 30, 41)), list[np.ndarray]()
    for fold in range(3):
        (tmp_path / str(fold)).mkdir()
        (tmp_path / str(fold) / "results").symlink_to(tmp_path / "results")
        votes.append(ran(planned(tmp_path / str(fold), data, f"net.options={{folds=[{fold}]}}")))
    entries = ",".join(f"{{options={{folds=[{fold}]}}}}" for fold in range(3))
    voted = ran(planned(tmp_path, data, f"net.ensemble=[{entries}]", "net.combine=vote"))
    np.testing.assert_array_equal(voted, mode(votes, axis=0).mode)


def smooth(shape: tuple[int, int, int]) -> np.ndarray:
    """Return smooth noise that is saturated, in each slice, at 7 and 245, beyond which splines swing."""
    field = gaussian_filter(noise(shape).astype(np.float64), 1)
    return np.clip((field - field.mean()) / field.std() * 120 + 128, 7, 245).astype(np.uint8)


@pytest.mark.parametrize(
    ("size", "spacing", "settings"),
    [
        ((8, 4, 5), (8, 8, 8), []),
        pytest.param((9.5, 10, 12), (8, 8, 8), ["windows.block=[1,2,3]"], marks=pytest.mark.long),
        ((40, 6, 8), (30, 8, 8), ["windows.block=[1,2,1]"]),
    ],
)
def test_volumes_of_other_voxels_are_resampled(tmp_path: Path, size: Any, spacing: Any, settings: list[str]) -> None:
    """Data are normalised, then resampled by skimage as nnU-Net calls it, slice by slice where slices are thick."""
    results(tmp_path / "results", spacing=spacing)
    data = smooth((23, 52, 49))
    apart = max(size) > 3 * min(size)
    normalised = (data - data.mean()) / data.std()
    sizes = [round(v / s * n) for v, s, n in zip(size, spacing, data.shape, strict=True)]
    options = {"order": 3, "mode": "edge", "anti_aliasing": False}
    if apart:
        slices = np.stack([resize(each, sizes[1:], **options) for each in normalised])
        nearest = ((np.arange(sizes[0]) + 0.5) * len(slices) / sizes[0]).astype(int)
        image = slices[nearest]
    else:
        image = resize(normalised, sizes, **options)
    plan = planned(tmp_path, data, f"input.voxel_size_nm={list(size)}", "output.kind=image", *settings)
    assert plan.source.shape == tuple(sizes)
    voxels = plan.source.volume().crop(Box.from_shape(plan.source.shape))[0].clip(data.min(), data.max())
    np.testing.assert_allclose((voxels - data.mean()) / data.std(), image, rtol=0, atol=2e-6)
    out = ran(plan)
    expected = by_formulas(image, 3, (0, 2))
    assert out.shape == expected.shape
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4 * np.ptp(expected))
    place = open_volume(plan.out)
    assert place.voxel_size_nm == pytest.approx([v * n / m for v, n, m in zip(size, data.shape, sizes, strict=True)])
    faces = [o - v / 2 for o, v in zip(place.origin_nm, place.voxel_size_nm or (), strict=True)]
    assert faces == pytest.approx([-v / 2 for v in size])


def test_a_region_of_another_grid_is_the_crop_of_the_whole(tmp_path: Path) -> None:
    results(tmp_path / "results", folds=1, flips=None)
    size, data = "input.voxel_size_nm=[8,4,5]", smooth((23, 52, 49))
    whole = ran(planned(tmp_path, data, size))
    (tmp_path / "part").mkdir()
    (tmp_path / "results").rename(tmp_path / "part" / "results")
    part = planned(tmp_path / "part", data, size, "input.roi='3:20,10:35,:'")  # in voxels of the volume, 0.5 in y
    assert np.array_equal(ran(part), whole[3:20, 5:18])
    assert vp.verify(part.out, recompute=2).is_whole
    (tmp_path / "part" / "out.zarr").rename(tmp_path / "part" / "small.zarr")
    (tmp_path / "part" / "out.zarr.run").rename(tmp_path / "part" / "small.zarr.run")
    back = ran(planned(tmp_path / "part", data, size, "output.grid=input"))
    nearest = [((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip(data.shape, whole.shape, strict=True)]
    assert np.array_equal(back, whole[np.ix_(*nearest)])


def test_ct_is_clipped_before_it_is_resampled(tmp_path: Path) -> None:
    folder = results(tmp_path / "results", folds=1, flips=None, normalization_schemes=["CTNormalization"])
    plans = json.loads((folder / "plans.json").read_text())
    ends = {"percentile_00_5": 60.0, "percentile_99_5": 190.0}
    plans["foreground_intensity_properties_per_channel"] = {"0": {"mean": 100.0, "std": 40.0} | ends}
    (folder / "plans.json").write_text(json.dumps(plans))
    data = noise((16, 32, 38))
    image = resize(
        (data.astype(float).clip(60, 190) - 100) / 40, (16, 16, 24), order=3, mode="edge", anti_aliasing=False
    )
    out = ran(planned(tmp_path, data, "input.voxel_size_nm=[8,4,5]", "output.kind=image"))
    with torch.inference_mode():
        window = torch.from_numpy(image.astype(np.float32))
        expected = original(3, 0)(window[None, None])[0].numpy()
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_borders_of_zeros_are_told_of(tmp_path: Path) -> None:
    results(tmp_path / "results")
    data = np.maximum(noise((16, 20, 24)), 1)
    assert not any("borders" in note for note in planned(tmp_path, data).warnings())
    (tmp_path / "zeros").mkdir()
    (tmp_path / "results").rename(tmp_path / "zeros" / "results")
    data[:, -2:] = data[:1] = 0
    (note,) = [note for note in planned(tmp_path / "zeros", data).warnings() if "borders" in note]
    assert "is 0 on its faces z first, y last, as far as was looked" in note


def test_a_volume_whose_voxels_are_far_from_the_training_is_refused(tmp_path: Path) -> None:
    results(tmp_path / "results")
    with pytest.raises(PlanError, match=r"trained on voxels of 8 × 8 × 8 \(z, y, x\), those of .* are 80 × 64 × 64 nm"):
        planned(tmp_path, noise((16, 16, 24)), "input.voxel_size_nm=[80,64,64]")
    with pytest.raises(PlanError, match=r"the voxel size of .* is unknown"):
        write_volume(tmp_path / "in.n5", noise((16, 16, 24)))
        recipe = load_recipe(None, ["net.name=nnunet:results"])
        prepare(str(tmp_path / "in.n5"), recipe, tmp_path / "out.zarr", tmp_path)
    assert planned(tmp_path, noise((16, 16, 24)), "input.voxel_size_nm=[8000,8000,8000]").net.spacing == (8, 8, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"previous_stage": "3d_lowres"}, ".*second stage of nnU-Net's cascade"),
        ({"normalization_schemes": ["MyNormalization"]}, "its normalisation MyNormalization is not one of nnU-Net's"),
        (
            {"normalization_schemes": ["ZScoreNormalization", "CTNormalization"]},
            "CTNormalization beside ZScoreNormalization in one volume is not done",
        ),
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


def with_regions(folder: Path, labels: dict[str, Any], order: list[int] | None) -> None:
    """Let a results folder be one that was trained on regions."""
    tree = json.loads((folder / "dataset.json").read_text()) | {"labels": labels}
    (folder / "dataset.json").write_text(json.dumps(tree | ({} if order is None else {"regions_class_order": order})))


# Three channels: the background and what is ignored have none.
REGIONS = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "deep": 3, "ignore": 4}


@pytest.mark.parametrize(
    ("order", "flips"),
    [
        ([3, 1, 2], (0, 2)),
        ([2, 7, 300], ()),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (([1, 2, 3], ()), ([1, 2, 3], (0, 2)), ([3, 1, 2], ()), ([2, 7, 300], (0, 2)))
        ),
    ],
)
def test_labels_of_regions_are_painted_in_their_order(tmp_path: Path, order: list[int], flips: tuple[int, ...]) -> None:
    data = noise((23, 30, 41))
    with_regions(results(tmp_path / "results", flips=flips or None), REGIONS, order)
    logits = by_formulas((data - data.mean()) / data.std(), 3, flips)
    expected = np.zeros(data.shape, int)
    for chance, label in zip(1 / (1 + np.exp(-logits)), order, strict=True):
        expected[chance > 0.5] = label
    assert len(np.unique(expected)) >= (2 if flips else 4)  # else other rules would give the same
    plan = planned(tmp_path, data, "output.kind=classes")
    assert (plan.out_dtype, plan.is_labels) == ("uint16" if max(order) > 255 else "uint8", True)
    out, is_near = ran(plan), (np.abs(logits) < 1e-4).any(axis=0)
    assert np.array_equal(out[~is_near], expected[~is_near]) and is_near.mean() < 1e-3
    (tmp_path / "numbers").mkdir()
    (tmp_path / "results").rename(tmp_path / "numbers" / "results")
    plan = planned(tmp_path / "numbers", data)
    assert (plan.channel_names, plan.recipe.output.activation) == (("whole", "core", "deep"), "sigmoid")
    np.testing.assert_allclose(ran(plan), 1 / (1 + np.exp(-logits)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("order", "settings", "words"),
    [
        (None, [], r"regions, which may overlap \(whole, core, deep\), and no order of their labels is known"),
        ([1, 2], [], r"3 regions \(whole, core, deep\) and the regions_class_order \[1, 2\]"),
        ([1, 2, 3], ["output.activation=softmax"], "softmax is for classes of which a voxel has one"),
        ([1, 2, 300], ["output.dtype=uint8"], "output.dtype uint8 cannot hold 301 classes"),
    ],
)
def test_regions_that_make_no_labels_are_refused(tmp_path: Path, order: Any, settings: list[str], words: str) -> None:
    with_regions(results(tmp_path / "results"), REGIONS, order)
    with pytest.raises(VolpipeError, match=words):
        planned(tmp_path, noise((16, 16, 24)), "output.kind=classes", *settings)


def test_windows_of_its_own_plans_are_no_reason_for_a_warning(tmp_path: Path) -> None:
    results(tmp_path / "results")
    assert not any("windows.shape" in note for note in planned(tmp_path, noise((16, 20, 24))).warnings())
    (tmp_path / "other").mkdir()
    (tmp_path / "results").rename(tmp_path / "other" / "results")
    other = planned(tmp_path / "other", noise((32, 32, 32)), "windows.shape=[16,32,32]")
    assert any("set windows.shape to that of its training" in note for note in other.warnings())


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
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results").symlink_to(tmp_path / "results")
    size = "input.voxel_size_nm=[8,11,6.5]"
    probabilities = ["output.kind=image", "output.activation=softmax"]
    plan = planned(tmp_path / "other", np.load(tmp_path / "coarse.npy"), size, *probabilities)
    resampled, coarse = np.load(tmp_path / "resampled.npz"), np.load(tmp_path / "coarse.npy")
    voxels = plan.source.volume().crop(Box.from_shape(plan.source.shape))[0].clip(coarse.min(), coarse.max())
    np.testing.assert_allclose((voxels - coarse.mean()) / coarse.std(), resampled["data"], rtol=0, atol=1e-5)
    numbers, expected = ran(plan), resampled["probabilities"]
    assert np.mean(numbers.argmax(axis=0) == expected.argmax(axis=0)) >= 0.999
    inner = (slice(None), *[slice(4, -4)] * 3)  # nearer to faces nnU-Net's weights have few digits of 16 bits
    np.testing.assert_allclose(numbers[inner], expected[inner], rtol=0, atol=1e-3)
