"""Nets of the field, as their users have them: each project of docs/bring-your-net.md runs as it says.

The numbers are compared with the maker's own loop over the same windows, in plain torch and numpy.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import field
import numpy as np
import pytest
import torch
from conftest import ROOT
from graphs import export_onnx
from inline import Inline
from markdown_page import Block, blocks_of
from monai.inferers import sliding_window_inference
from scipy.ndimage import gaussian_filter
from torch import nn
from volumes import noise, write_volume
from zoo import description, out_of, write_package

import volpipe as vp

PAGE = ROOT / "docs" / "bring-your-net.md"
Net = Callable[[torch.Tensor], torch.Tensor]
Save = Callable[[Path, str], list[str]]


# --- as users have a net


def checkpoint(key: str = "", prefix: str = "") -> Save:
    """Return what saves weights in a part of a checkpoint, whose names have a prefix."""

    def save(folder: Path, name: str) -> list[str]:
        state = {prefix + key: tensor for key, tensor in getattr(field, name)().state_dict().items()}
        torch.save({key: state, "iteration": 200_000} if key else state, folder / f"{name}.pth")
        shutil.copy(field.__file__, folder / "field.py")
        return [f"net.name=field.py:{name}", f"net.weights={name}.pth"]

    return save


def torchscript(folder: Path, name: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to whoever makes such files
        traced = torch.jit.trace(getattr(field, name)(), torch.rand(1, 1, 64, 96), strict=False)
    traced.save(str(folder / f"{name}.pth"))
    return [f"net.name={name}.pth", "net.trust_model=true"]


def onnx(folder: Path, name: str) -> list[str]:
    export_onnx(folder / f"{name}.onnx", getattr(field, name)(), (1, 1, 64, 96))
    return [f"net.name={name}.onnx"]


def package(folder: Path, name: str) -> list[str]:
    net, seen = getattr(field, name)(), np.random.default_rng(1).random((1, 1, 64, 96), np.float32)
    step, least = {"y": 8, "x": 8}, {"y": 16, "x": 16}
    scaled = [{"id": "scale_linear", "kwargs": {"gain": 1 / 127.5, "offset": -1.0}}]
    about = description("0.5", "bcyx", least=least, step=step, before=scaled)
    write_package(folder / name, about, net, seen, out_of(net, seen / 127.5 - 1), shape=seen.shape)
    return [f"net.name={name}/rdf.yaml"]


def results(folder: Path, name: str) -> list[str]:
    """Write a results folder of nnU-Net with one fold."""
    (folder / "results" / "fold_0").mkdir(parents=True)
    network = {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": field.STAGES | field.NNUNET[name],
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }
    own = {
        "patch_size": [12, 32, 32], "spacing": [1.0] * 3, "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False], "architecture": network,
    }  # fmt: skip
    plans = {"configurations": {"3d_fullres": own}, "transpose_forward": [0, 1, 2]}
    labels = {"background": 0, "cell": 1, "wall": 2}
    (folder / "results" / "plans.json").write_text(json.dumps(plans))
    (folder / "results" / "dataset.json").write_text(json.dumps({"channel_names": {"0": "em"}, "labels": labels}))
    content = {
        "network_weights": field.nnunet(name).state_dict(), "init_args": {"configuration": "3d_fullres"},
        "trainer_name": "nnUNetTrainer", "inference_allowed_mirroring_axes": None,
    }  # fmt: skip
    torch.save(content, folder / "results" / "fold_0" / "checkpoint_final.pth")
    return ["net.name=nnunet:results"]


def bundle(folder: Path, name: str) -> list[str]:
    """Write a bundle of MONAI without postprocessing."""
    tree = {
        "network_def": {"_target_": name, "in_channels": 1, "out_channels": 2, **field.MONAI[name]},
        "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [16, 32, 32], "overlap": 0.5, "mode": "gaussian"},
        "preprocessing": {"_target_": "ScaleIntensityRanged", "keys": "image",
                          "a_min": 0, "a_max": 255, "b_min": -1, "b_max": 1},
    }  # fmt: skip
    for part in ("configs", "models"):
        (folder / "bundle" / part).mkdir(parents=True)
    (folder / "bundle" / "configs" / "inference.json").write_text(json.dumps(tree))
    torch.save(field.monai(name).state_dict(), folder / "bundle" / "models" / "model.pt")
    return ["net.name=monai:bundle"]


# --- as their makers run them, over the volume (z, y, x) as the net gets it


def scan(net: Net, data: np.ndarray, plan: vp.Plan) -> np.ndarray:
    """Return (c, z, y, x) of a net without padding: outputs side by side, the volume mirrored by what they lack."""
    margin = plan.net.margin
    step = [w - 2 * m for w, m in zip(plan.window, margin, strict=True)]
    counts = [-(-n // s) for n, s in zip(data.shape, step, strict=True)]
    pads = [(m, m + c * s - n) for n, m, c, s in zip(data.shape, margin, counts, step, strict=True)]
    mirrored = np.pad(data, pads, mode="reflect")
    out = np.zeros((plan.net.out_channels, *(c * s for c, s in zip(counts, step, strict=True))), np.float32)
    for index in itertools.product(*map(range, counts)):
        start = [i * s for i, s in zip(index, step, strict=True)]
        window = mirrored[tuple(slice(a, a + w) for a, w in zip(start, plan.window, strict=True))]
        place = tuple(slice(a, a + s) for a, s in zip(start, step, strict=True))
        out[:, *place] = net(torch.from_numpy(window.copy())[None, None])[0].numpy()
    return out[:, *map(slice, data.shape)]


def whole_slices(net: Net, data: np.ndarray, plan: vp.Plan) -> np.ndarray:
    """Return (c, z, y, x) of a net that gets each slice, mirrored, and those within its context as channels."""
    context, sides = plan.net.context, [64 + -n % 8 for n in data.shape[1:]]
    mirrored = np.pad(data, [(context, context), *((64, side) for side in sides)], mode="reflect")
    around = [torch.from_numpy(mirrored[i : i + 2 * context + 1].copy())[None] for i in range(len(data))]
    out = np.stack([net(slices)[0].numpy() for slices in around], 1)
    return out[:, :, 64 : 64 + data.shape[1], 64 : 64 + data.shape[2]]


def monai_windows(net: Net, data: np.ndarray, plan: vp.Plan) -> np.ndarray:
    """Return (c, z, y, x) as MONAI's sliding window joins it."""
    out = sliding_window_inference(
        torch.from_numpy(data)[None, None], plan.window, 1, net, overlap=0.5, mode="gaussian"
    )
    joined: np.ndarray = out[0].numpy()
    return joined


def monai_slices(net: Net, data: np.ndarray, plan: vp.Plan) -> np.ndarray:
    """Return (c, z, y, x) of a net of slices as MONAI's sliding window joins each slice."""
    slices = torch.from_numpy(data)[:, None]
    out = sliding_window_inference(slices, plan.window[1:], 1, net, overlap=0.5, mode="gaussian")
    joined: np.ndarray = out.numpy().swapaxes(0, 1)
    return joined


def nnunet_windows(net: Net, data: np.ndarray, plan: vp.Plan) -> np.ndarray:
    """Return (c, z, y, x) as nnU-Net places windows evenly and weighs them, in 64 bits."""
    window = (12, 32, 32)
    starts = []
    for n, w in zip(data.shape, window, strict=True):
        count = int(np.ceil((n - w) / (w * 0.5))) + 1
        starts.append([int(np.round((n - w) / max(1, count - 1) * i)) for i in range(count)])
    spot = np.zeros(window)
    spot[tuple(w // 2 for w in window)] = 1
    weights = gaussian_filter(spot, [w / 8 for w in window], 0, mode="constant", cval=0)
    weights = (10 * weights / weights.max()).astype(np.float16).astype(np.float64)
    weights[weights == 0] = weights[weights > 0].min()
    total, weight = np.zeros((3, *data.shape)), np.zeros(data.shape)
    for start in itertools.product(*starts):
        place = tuple(slice(a, a + w) for a, w in zip(start, window, strict=True))
        total[:, *place] += net(torch.from_numpy(data[place].copy())[None, None])[0].numpy() * weights
        weight[place] += weights
    joined: np.ndarray = (total / weight).astype(np.float32)
    return joined


# --- the projects of the page


@dataclass(frozen=True)
class Case:
    """A net of a project of the page.

    Attributes:
        project: its heading on the page.
        net: a function of field.py, or a name in a library of its maker.
        options: beside its file.
        part: of what the maker's code gives.
        grey: the grey level that is 0 to the net, and how many are 1.
    """

    project: str
    net: str
    save: Save
    loop: Callable[[Net, np.ndarray, vp.Plan], np.ndarray]
    options: tuple[str, ...] = ()
    part: int | str | None = None
    grey: tuple[float, float] = (127.5, 127.5)

    def __str__(self) -> str:
        return f"{self.project}-{self.net}"

    def module(self) -> nn.Module:
        library = {results: field.nnunet, bundle: field.monai}.get(self.save)
        net: nn.Module = library(self.net) if library else getattr(field, self.net)()
        return net


# Nets of larger windows that are given, run and joined as others are here: with -m long.
ALIKE = {"lsd", "dacapo", "cellmap", "banis", "SegResNet", "MedNeXt"}
OWN = ("net.name", "net.weights", "windows.shape")  # settings with other values here: smaller nets, in other files
CASES = [
    Case("LSD", "lsd", checkpoint("model_state_dict"), scan),
    Case("MTLSD", "mtlsd", checkpoint("model_state_dict"), scan, ("net.output=1",), part=1),
    Case("DaCapo", "dacapo", checkpoint("model"), scan),
    Case("CellMap", "cellmap", checkpoint("model_state_dict"), scan),
    Case(
        "BANIS",
        "banis",
        checkpoint("state_dict", "model."),
        monai_windows,
        ("windows.shape=[16,32,32]", "normalise.low=-255", "normalise.high=255"),
        grey=(0, 255),
    ),
    Case("PyTC", "pytc", checkpoint("state_dict", "model."), monai_windows, ("windows.shape=[16,32,32]",)),
    Case("SegNeuron", "segneuron", checkpoint("model_weights", "module."), monai_windows, ("net.output=0",), part=0),
    Case(
        "MitoNet",
        "mitonet",
        torchscript,
        monai_slices,
        ("net.output=sem_logits", "windows.shape=[1,32,48]", "normalise.mean=146.8", "normalise.std=32.55"),
        part="sem_logits",
        grey=(146.8, 32.55),
    ),
    Case("nnU-Net", "PlainConvUNet", results, nnunet_windows),
    Case("nnU-Net", "ResidualEncoderUNet", results, nnunet_windows),
    Case("MONAI", "UNet", bundle, monai_windows),
    Case("MONAI", "SegResNet", bundle, monai_windows),
    Case("MONAI", "MedNeXt", bundle, monai_windows),
    Case("ONNX", "slices", onnx, whole_slices),
    Case("bioimage.io", "slices", package, whole_slices),
    Case("2.5D nets", "neighbours", checkpoint(), whole_slices, ("net.context=2",)),
]


def blocks_by_project() -> dict[str, list[Block]]:
    """Return the blocks of code below each project's heading on the page."""
    section = PAGE.read_text().partition("## Can I run my net?")[2].partition("\n## ")[0]
    parts = (part.partition("\n") for part in section.split("\n### ")[1:])
    return {name: blocks_of(text) for name, _, text in parts}


def typed(blocks: list[Block]) -> dict[str, str]:
    """Return the settings of the command among these blocks."""
    (command,) = (block.text for block in blocks if block.language == "bash")
    words = shlex.split(command.replace("--trust-model", "--set net.trust_model=true"))
    return dict(after.split("=", 1) for word, after in itertools.pairwise(words) if word == "--set")


def test_each_project_of_the_page_has_a_net_here() -> None:
    text = PAGE.read_text()
    assert {case.project for case in CASES} == set(blocks_by_project())
    assert re.findall(r"^\| \[([^\]]+)\]\(#", text, re.MULTILINE) == list(blocks_by_project())


@pytest.mark.parametrize("project", blocks_by_project())
def test_the_file_beside_a_command_has_the_function_that_it_names(project: str) -> None:
    blocks = blocks_by_project()[project]
    name, _, function = typed(blocks)["net.name"].partition(":")
    files = {block.file: block.text for block in blocks if block.file}
    if not name.endswith(".py"):
        assert files == {}
        return
    tree = ast.parse(files[name])
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    packages = {node.module.partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom) and node.module}
    assert name.removesuffix(".py") not in packages  # it would find itself in place of that


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.long] * (case.net in ALIKE)) for case in CASES]
)
def test_a_net_of_the_field_gives_the_numbers_of_its_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    data = noise((18, 50, 70))
    write_volume(tmp_path / "in.n5", data)
    chosen = [*case.save(tmp_path, case.net), *case.options]
    shown, own = typed(blocks_by_project()[case.project]), dict(setting.split("=", 1) for setting in chosen)
    assert {key: own[key] for key in own if key not in OWN} == {key: shown[key] for key in shown if key not in OWN}
    assert set(own) == set(shown)
    chosen += ["output.levels=0", "output.kind=image"]
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=chosen)
    assert not vp.run(plan, site=Inline()).missing
    out = vp.open("out.zarr").open()[...]
    grey = data.astype(np.float32)
    grey = (grey - grey.mean()) / grey.std() if case.save is results else (grey - case.grey[0]) / case.grey[1]
    module = case.module()

    def net(windows: torch.Tensor) -> torch.Tensor:
        outs = module(windows)
        tensor: torch.Tensor = outs if case.part is None else outs[case.part]
        return tensor

    with torch.inference_mode():
        expected = case.loop(net, grey, plan)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_cellmaps_net_takes_windows_of_178_voxels_and_gives_56() -> None:
    assert field.cellmap().to("meta")(torch.zeros(1, 1, 178, 178, 178, device="meta")).shape == (1, 8, 56, 56, 56)
