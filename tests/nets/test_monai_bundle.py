"""MONAI bundles: the numbers of MONAI's own sliding window and transforms, and what is refused, by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from inline import Inline
from monai.inferers import SlidingWindowInferer
from monai.networks import nets as monai_nets
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    LoadImage,
    NormalizeIntensity,
    Orientation,
    ScaleIntensity,
    ScaleIntensityRange,
    ScaleIntensityRangePercentiles,
    Spacing,
)
from volumes import noise, write_volume

from volpipe.errors import VolpipeError
from volpipe.inference.plan import Plan
from volpipe.nets.load import build_net
from volpipe.nets.makers import TurnedNet
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

UNET = {
    "_target_": "UNet", "spatial_dims": 3, "in_channels": 1, "out_channels": 3, "channels": [4, 8], "strides": [2],
    "num_res_units": 1, "norm": "@norm",
}  # fmt: skip
PLAIN = UNET | {"_target_": "monai.networks.nets.UNet", "num_res_units": 0, "out_channels": 2}
INFERER = {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "sw_batch_size": 4, "overlap": 0.5}


def bundle(folder: Path, network: dict[str, Any], **more: Any) -> Path:
    """Write a bundle with untrained weights, whose numbers are as those of trained ones."""
    tree = {
        "norm": "INSTANCE",
        "network_def": network,
        "network": "$@network_def.to(@device)",
        "inferer": INFERER,
    } | more
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "configs" / "inference.json").write_text(json.dumps(tree))
    torch.manual_seed(0)
    torch.save(original(network, tree["norm"]).state_dict(), folder / "models" / "model.pt")
    return folder


def original(network: dict[str, Any], norm: str) -> torch.nn.Module:
    arguments = {key: norm if value == "@norm" else value for key, value in network.items() if key != "_target_"}
    net: torch.nn.Module = getattr(monai_nets, network["_target_"].rpartition(".")[2])(**arguments)
    return net


def planned(folder: Path, data: np.ndarray, *settings: str) -> Plan:
    write_volume(folder / "in.n5", data)
    recipe = load_recipe(None, ["net.name=monai:bundle", "output.levels=0", *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / "out.zarr", folder)


def ran(plan: Plan) -> np.ndarray:
    assert execute(plan, Inline().start).missing == []
    return open_volume(plan.out).open()[...]


def steps(*transforms: dict[str, Any]) -> dict[str, Any]:
    read = [{"_target_": "LoadImaged", "keys": "image"}, {"_target_": "EnsureChannelFirstd", "keys": "image"}]
    return {"_target_": "Compose", "transforms": [*read, *({"keys": "image", **each} for each in transforms)]}


@pytest.mark.parametrize(
    ("described", "transform"),
    [
        ({"_target_": "ScaleIntensityd"}, ScaleIntensity()),
        (
            {"_target_": "ScaleIntensityRanged", "a_min": 20, "a_max": 200, "b_min": -1, "b_max": 2, "clip": True},
            ScaleIntensityRange(20, 200, -1, 2, clip=True),
        ),
        ({"_target_": "ScaleIntensityRanged", "a_min": 20, "a_max": 200}, ScaleIntensityRange(20, 200)),
        ({"_target_": "NormalizeIntensityd"}, NormalizeIntensity()),
        ({"_target_": "NormalizeIntensityd", "subtrahend": 90, "divisor": 40}, NormalizeIntensity(90, 40)),
        (
            {"_target_": "ScaleIntensityRangePercentilesd", "lower": 0, "upper": 100, "b_min": 0, "b_max": 1},
            ScaleIntensityRangePercentiles(0, 100, 0, 1),
        ),
    ],
)
@pytest.mark.parametrize(
    ("network", "norm", "mode"),
    [pytest.param(UNET, "BATCH", "constant", marks=pytest.mark.long), (PLAIN, "INSTANCE", "gaussian")],
)
def test_numbers_are_those_of_monai(
    tmp_path: Path, network: dict[str, Any], norm: str, mode: str, described: dict[str, Any], transform: Any
) -> None:
    data = noise((14, 27, 33))
    inferer = INFERER | {"mode": mode}
    bundle(tmp_path / "bundle", network, norm=norm, preprocessing=steps(described), inferer=inferer)
    net = original(network, norm)
    net.load_state_dict(torch.load(tmp_path / "bundle" / "models" / "model.pt"))
    window = SlidingWindowInferer((16, 16, 16), 4, 0.5, mode)
    with torch.inference_mode():
        image = torch.as_tensor(transform(data[None].astype(np.float32)))
        expected = window(image[None], net.eval())[0].numpy()
    np.testing.assert_allclose(ran(planned(tmp_path, data)), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_expressions_of_numbers_are_calculated_and_references_followed(tmp_path: Path) -> None:
    network = UNET | {"out_channels": "$@classes + 1", "channels": "$[@width, @width * 2]", "_desc_": "a net"}
    inferer = INFERER | {
        "roi_size": "$[@patch::size // 2] * 3",
        "overlap": "$1/4",
        "_target_": "SlidingWindowInfererAdapt",
    }
    folder = bundle(tmp_path / "bundle", UNET, inferer=inferer, classes=2, width=4, patch={"size": 32})
    tree = json.loads((folder / "configs" / "inference.json").read_text())
    (folder / "configs" / "inference.json").write_text(json.dumps(tree | {"network_def": network}))
    plan = planned(tmp_path, noise((16, 20, 40)))
    assert (plan.window, plan.overlap, plan.net.out_channels) == ((16, 16, 16), (4, 4, 4), 3)


@pytest.mark.parametrize(
    ("pixdim", "size", "is_taken"),
    [
        ([8, 8, 8], [8, 8, 8], True), ([1, 1, 1], [1000, 1000, 1000], True), (-1, [8, 4, 4], True),
        ([8, -1, -1], [8, 4, 4], True), ([8, 8, 8], [8, 4, 4], False), ([1, 1, 1], [8, 4, 4], False),
        ("$[@side] * 3", [8, 4, 4], False), (8, [8, 4, 4], False),
    ],
)  # fmt: skip
def test_spacing_is_taken_where_voxels_have_it(tmp_path: Path, pixdim: Any, size: list[int], is_taken: bool) -> None:
    bundle(tmp_path / "bundle", UNET, preprocessing=steps({"_target_": "Spacingd", "pixdim": pixdim}), side=8)
    if is_taken:
        planned(tmp_path, noise((16, 16, 16)), f"input.voxel_size_nm={size}")
        return
    with pytest.raises(VolpipeError, match=r"was trained on voxels of .* its maker's tools would resample"):
        planned(tmp_path, noise((16, 16, 16)), f"input.voxel_size_nm={size}")


def test_transforms_that_change_no_numbers_are_taken(tmp_path: Path) -> None:
    before = steps({"_target_": "EnsureTyped"}, {"_target_": "CastToTyped", "dtype": "$torch.float32"})
    after = steps({"_target_": "Activationsd", "sigmoid": True}, {"_target_": "Invertd"}, {"_target_": "SaveImaged"})
    bundle(tmp_path / "bundle", UNET, preprocessing=before, postprocessing=after["transforms"])
    plan = planned(tmp_path, noise((16, 16, 16)))
    assert (plan.recipe.normalise.method, plan.recipe.output.activation) == ("none", "sigmoid")


def nifti(file: Path, data: np.ndarray, affine: np.ndarray | None) -> None:
    """Write `data` (x, y, z) as programs of medicine do, without a direction where `affine` is None."""
    image = nibabel.Nifti1Image(data, affine)
    image.header.set_xyzt_units("mm")
    image.to_filename(file)


def planned_over(file: Path, *settings: str) -> Plan:
    recipe = load_recipe(None, ["net.name=monai:bundle", "output.levels=0", *settings])
    return prepare(str(file), recipe, file.parent / "out.zarr", file.parent)


XYZ = 'net.options={axes="xyz"}'


@pytest.mark.parametrize("is_program", [False, True])
def test_a_net_that_counts_x_y_z_runs_as_in_monai(tmp_path: Path, is_program: bool) -> None:
    lengths, roi, shares = (1.0, 2.0, 3.0), [12, 16, 20], [0.5, 0.25, 0.0]
    inferer = INFERER | {"roi_size": roi, "overlap": shares, "mode": "gaussian"}
    before = steps({"_target_": "Orientationd", "axcodes": "RAS"}, {"_target_": "Spacingd", "pixdim": list(lengths)})
    bundle(tmp_path / "bundle", PLAIN, norm="INSTANCE", preprocessing=before, inferer=inferer)
    net = original(PLAIN, "INSTANCE").eval()
    net.load_state_dict(torch.load(tmp_path / "bundle" / "models" / "model.pt"))
    if is_program:
        (tmp_path / "bundle" / "models" / "model.pt").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, to whoever makes such files
            torch.jit.trace(net, torch.zeros(1, 1, *roi)).save(str(tmp_path / "bundle" / "models" / "model.ts"))
    nifti(tmp_path / "in.nii.gz", noise((30, 22, 25)), np.diag([*lengths, 1.0]))
    load = Compose([LoadImage(), EnsureChannelFirst(), Orientation("RAS", labels=None), Spacing(lengths)])
    with torch.inference_mode():
        image = torch.as_tensor(load(tmp_path / "in.nii.gz")).as_tensor()
        expected = SlidingWindowInferer(roi, 4, shares, "gaussian")(image[None], net)[0].numpy()
    expected = expected.transpose(0, 3, 2, 1)
    plan = planned_over(tmp_path / "in.nii.gz", XYZ, f"net.trust_model={str(is_program).lower()}")
    assert (plan.window, plan.overlap) == ((20, 16, 12), (0, 4, 6))
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_all_that_a_turned_net_gives_is_turned_back() -> None:
    conv = torch.nn.Conv3d(1, 2, (1, 3, 5))

    class Several(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": conv(x), "b": (x, [x.flatten(1)])}

    x = torch.rand(1, 1, 7, 8, 9)
    out = TurnedNet(Several(), (2, 1, 0))(x)
    assert torch.equal(out["a"], conv(x.transpose(2, 4).contiguous()).transpose(2, 4))
    assert torch.equal(out["b"][0], x) and out["b"][1][0].shape == (1, 504)
    rows = TurnedNet(torch.nn.Identity(), (2, 1, 0)), TurnedNet(torch.nn.Flatten(1), (2, 1, 0))
    assert torch.equal(rows[0](x[:, :, 0]), x[:, :, 0])
    assert torch.equal(rows[1](x[:, :, 0]), x[:, :, 0].transpose(2, 3).flatten(1))


def test_lengths_of_slices_are_turned_as_well(tmp_path: Path) -> None:
    flat = PLAIN | {"spatial_dims": 2}
    before = steps({"_target_": "Spacingd", "pixdim": [4, 8]})
    bundle(tmp_path / "bundle", flat, preprocessing=before, inferer=INFERER | {"roi_size": [16, 32]})
    write_volume(tmp_path / "in.n5", noise((3, 40, 40)))
    plan = planned_over(tmp_path / "in.n5", XYZ, "input.voxel_size_nm=[30,8,4]")
    assert (plan.window, plan.net.spacing) == ((1, 32, 16), (0, 8, 4))


def test_it_is_asked_in_which_order_a_net_counts_axes(tmp_path: Path) -> None:
    data = noise((20, 18, 16))
    bundle(tmp_path / "bundle", PLAIN, norm="INSTANCE", preprocessing=steps())
    nifti(tmp_path / "in.nii", data, np.eye(4))
    head = "NRRD0004\ntype: uint8\ndimension: 3\nsizes: 20 18 16\nencoding: raw\n\n"
    (tmp_path / "in.nrrd").write_bytes(head.encode() + data.tobytes(order="F"))
    for name, title in (("in.nii", "NIfTI"), ("in.nrrd", "NRRD")):
        words = rf"from {title} with axes x, y, z.* reads .*{name} as z, y, x; set net\.options\.axes=xyz .*=zyx if"
        with pytest.raises(VolpipeError, match=words):
            planned_over(tmp_path / name)
    bundle(tmp_path / "unsaid", PLAIN, norm="INSTANCE", preprocessing=[])
    with pytest.raises(VolpipeError, match=r"set net\.options\.axes=xyz if it did"):
        planned_over(tmp_path / "in.nii", f"net.name=monai:{tmp_path / 'unsaid'}")
    of_others = planned(tmp_path, data.T)
    plan = planned_over(tmp_path / "in.nii", 'net.options={axes="zyx"}')
    (note,) = [note for note in of_others.notes.fit if "net.options.axes=xyz if" in note]
    assert "load NIfTI and NRRD as x, y, z" in note and note not in plan.notes.fit
    np.testing.assert_array_equal(ran(plan), ran(of_others.changed(out=str(tmp_path / "other.zarr"))))


@pytest.mark.parametrize(
    ("affine", "settings", "words"),
    [
        (np.diag([-1, 1, 1, 1]), [XYZ], r"x, y, z run to R, A, S, .*those of .*nii run to L, A, S; write the"),
        (None, [XYZ], r"run to R, A, S, .*nii does not say where its axes run; take Orientation out if they run so"),
        (np.eye(4), [], r"names the transform Orientation, .* set net\.options\.axes=xyz where the axes of a"),
        (np.eye(4), ['net.options={axes="zyx"}'], r"names the transform Orientation, which is not done here"),
        (np.eye(4), ['net.options={axes="yxz"}'], r"and axes, xyz or zyx, in which its net counts them; correct"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_loaded_so", [False, True])
def test_volumes_that_run_elsewhere_are_refused(
    tmp_path: Path, affine: np.ndarray | None, settings: list[str], words: str, is_loaded_so: bool
) -> None:
    loaded = [{"_target_": "LoadImaged", "keys": "image", "as_closest_canonical": True}]
    turned = steps({"_target_": "Orientationd", "axcodes": "RAS"})
    bundle(tmp_path / "bundle", PLAIN, norm="INSTANCE", preprocessing=loaded if is_loaded_so else turned)
    nifti(tmp_path / "in.nii", noise((20, 18, 16)), affine)
    with pytest.raises(VolpipeError, match=words):
        planned_over(tmp_path / "in.nii", *settings)


@pytest.mark.parametrize("given", [{"axcodes": "RAX"}, {"axcodes": 5}, {}, {"axcodes": "RAS", "labels": [["a", "b"]]}])
def test_an_orientation_that_is_not_done_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    bundle(tmp_path / "bundle", PLAIN, norm="INSTANCE", preprocessing=steps({"_target_": "Orientationd", **given}))
    with pytest.raises(
        VolpipeError, match=r"Orientation with .* is not done here; write its axcodes alone, such as RAS"
    ):
        build_net(load_recipe(None, ["net.name=monai:bundle", XYZ]).net, str(tmp_path))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("name", "transform"), [("NormalizeIntensity", NormalizeIntensity), ("ScaleIntensity", ScaleIntensity)]
)
def test_several_channels_are_mapped_alike_or_apart(tmp_path: Path, name: str, transform: Any, apart: bool) -> None:
    network = PLAIN | {"in_channels": 2}
    data = np.stack([noise((16, 16, 16)), noise((16, 16, 16), seed=1) // 9 + 3])
    described = {"_target_": f"{name}d", "channel_wise": apart}
    bundle(tmp_path / "bundle", network, norm="INSTANCE", preprocessing=steps(described))
    net = original(network, "INSTANCE").eval()
    net.load_state_dict(torch.load(tmp_path / "bundle" / "models" / "model.pt"))
    with torch.inference_mode():
        image = torch.as_tensor(transform(channel_wise=apart)(data.astype(np.float32)))
        expected = net(image[None])[0].numpy()
    np.testing.assert_allclose(ran(planned(tmp_path, data)), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_what_follows_the_net_makes_classes_of_its_numbers(tmp_path: Path) -> None:
    after = steps({"_target_": "Activationsd", "softmax": True}, {"_target_": "AsDiscreted", "argmax": True})
    bundle(tmp_path / "bundle", UNET, postprocessing=after)
    plan = planned(tmp_path, noise((16, 16, 20)))
    assert (plan.is_classes, plan.num_channels, plan.out_dtype) == (True, 1, "uint8")
    assert plan.recipe.normalise.method == "none"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"inferer": {"_target_": "SimpleInferer"}}, "it has the inferer SimpleInferer; give an inferer Sliding"),
        ({"inferer": INFERER | {"roi_size": [-1, 16, 16]}}, r"inferer.roi_size is \[-1, 16, 16\], not lengths above 0"),
        ({"inferer": INFERER | {"padding_mode": "reflect"}}, "pads small volumes otherwise than with zeros"),
        (
            {"preprocessing": steps({"_target_": "Orientationd", "axcodes": "RAS"})},
            "transform Orientation, .*axes of a",
        ),
        (
            {"preprocessing": steps({"_target_": "CropForegroundd"})},
            "transform CropForeground, .*the box with input.roi",
        ),
        (
            {"preprocessing": steps({"_target_": "ScaleIntensityFixedMeand"})},
            "transform ScaleIntensityFixedMeand, which",
        ),
        (
            {"preprocessing": steps({"_target_": "CastToTyped", "dtype": "$np.uint8"})},
            r"CastToType rounds .* to \$np.uint8",
        ),
        ({"preprocessing": "$monai.transforms.Compose(@norm)"}, "preprocessing is the expression .*write its value"),
        (
            {"preprocessing": steps({"_target_": "Spacingd", "pixdim": "wide"})},
            "Spacing has the pixdim 'wide'; write three",
        ),
        (
            {"preprocessing": steps({"_target_": "ScaleIntensityd", "minv": None})},
            "ScaleIntensity with .* maps no grey",
        ),
        ({"postprocessing": steps({"_target_": "KeepLargestConnectedComponentd"})}, "out, and do that to the output"),
        (
            {"postprocessing": steps({"_target_": "AsDiscreted", "argmax": True, "to_onehot": 3})},
            "AsDiscrete with to_one",
        ),
        ({"postprocessing": steps({"_target_": "AsDiscreted", "threshold": 0.5})}, "AsDiscrete without argmax is not"),
        ({"network_def": UNET | {"dimensions": 3}}, "network_def cannot be built: TypeError: .*dimensions"),
        (
            {"dataset": {"_target_": "Dataset", "transform": {"_target_": "Lambdad"}}},
            "names the transform Lambdad, which",
        ),
        ({"preprocessing": steps({"_target_": "NormalizeIntensityd", "nonzero": True})}, "voxels that are not zero"),
        ({"network_def": UNET | {"out_channels": "$len([1])"}}, r"network_def.out_channels is the expression '\$len"),
        ({"loop": "@loop", "network_def": UNET | {"out_channels": "@loop"}}, "refers to @loop, which leads to itself"),
        ({"inferer": INFERER | {"roi_size": "$[16] * 10**9"}}, r"inferer.roi_size is the expression"),
        ({"network_def": UNET | {"norm": "@nothing"}}, "network_def.norm refers to @nothing, which is not there"),
        ({"network_def": {"_target_": "os.system", "command": "true"}}, "it names os.system, and classes come from"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    folder = bundle(tmp_path / "bundle", UNET)
    file = folder / "configs" / "inference.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    with pytest.raises(VolpipeError, match=rf"MONAI bundle .*: .*{words}"):
        build_net(load_recipe(None, ["net.name=monai:bundle"]).net, str(tmp_path))


def test_a_program_of_a_bundle_runs_where_it_is_trusted(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle", UNET, norm="BATCH")
    net = original(UNET, "BATCH").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, to whoever makes such files
        torch.jit.trace(net, torch.zeros(1, 1, 16, 16, 16)).save(str(folder / "models" / "model.ts"))
    (folder / "models" / "model.pt").unlink()
    with pytest.raises(VolpipeError, match=r"model\.ts is TorchScript, which is code"):
        planned(tmp_path, noise((16, 16, 16)))
    (tmp_path / "in.n5").rename(tmp_path / "before.n5")
    assert planned(tmp_path, noise((16, 16, 16)), "net.trust_model=true").net.out_channels == 3
