"""Nets by name: built, given weights that are data and nothing else, described, and refused with a sentence."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from torch import nn

from volpipe.errors import PlanError, VolpipeError
from volpipe.nets.facts import NetFacts
from volpipe.nets.load import build_net, check_shapes, describe, normalising_layers, weights_hash
from volpipe.recipes.inference import NetChoice

USERS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, features, 3, padding=1)

    def forward(self, x):
        return self.conv(x)

def net(features=2):
    return Net(features)

def facts():
    made = Net(3)
    made.volpipe = dict(
        in_channels=1, out_channels=3, stride=(1, 2, 2), halo=[1, 1, 1],
        window=(32, 32, 32), intensity="same"
    )
    return made

def text():
    return "no net"

def picky(features):
    raise ValueError(f"features {features} are too few")

def zero_stride():
    made = Net(1)
    made.volpipe = dict(stride=(1, 0, 1))
    return made

def asserting():
    made = Net(1)
    made.forward = forward
    return made

def forward(x):
    assert x.shape[2] % 16 == 0
    return x

constant = 3
"""


BUILT = """
import sys
from volpipe.nets.load import build_net, describe
from volpipe.recipes.inference import NetChoice
choice = NetChoice(name="theirs.py:net", untrained=True)
assert describe(choice).halo == (1, 1, 1)
build_net(choice)
print("torch" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "theirs.py").write_text(USERS, encoding="utf-8")
    return tmp_path


def test_a_net_of_the_user_is_measured_and_built_without_torchs_compiler(folder: Path) -> None:
    """Whose import takes a second of each driver and of each worker, and 70 MiB."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", BUILT], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "True False\n"


def build(folder: Path | str = "", **choice: Any) -> nn.Module:
    return build_net(NetChoice(**choice), str(folder))


def test_a_shipped_net_is_built_ready_to_infer() -> None:
    net = build(name="unet3d", options={"features": [2, 3], "norm": "batch"})
    assert type(net).__name__.lower().startswith("unet")
    assert not any(layer.training for layer in net.modules())
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert net(torch.zeros(1, 1, 8, 8, 8)).shape == (1, 1, 8, 8, 8)


def test_an_unknown_name_is_met_with_the_nearest_and_all_that_there_are() -> None:
    with pytest.raises(VolpipeError, match=r"no net 'unet3' \(did you mean 'unet3d'\?\); shipped are .*upsample"):
        build(name="unet3")
    with pytest.raises(VolpipeError, match="no net 'xyzzy'; shipped are"):
        build(name="xyzzy")


def test_a_users_net_comes_from_a_file_or_a_module_on_the_search_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "nets_of_theirs.py").write_text(USERS, encoding="utf-8")
    for name in ("theirs.py:net", f"{folder}/theirs.py:net", "nets_of_theirs:net"):
        net = build(folder, name=name, options={"features": 5})
        assert net(torch.zeros(1, 1, 4, 4, 4)).shape == (1, 5, 4, 4, 4)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"name": "theirs.py:net", "options": {"feature": 3}},
            "net theirs.py:net has no option feature .did you mean 'features'",
        ),
        ({"name": "theirs.py:picky", "options": {"features": 1}}, "net theirs.py:picky: features 1 are too few"),
        ({"name": "theirs.py:text"}, "returned str, not a torch.nn.Module"),
        ({"name": "theirs.py:nothing"}, "theirs.py has no function 'nothing'; it has .*picky"),
        ({"name": "theirs.py:constant"}, "theirs.py has no function 'constant'"),
        ({"name": "theirs.py:"}, "theirs.py has no function ''"),
        ({"name": ":net"}, "':net' names no function"),
        ({"name": "no_such_module_of_mine:net"}, "no module 'no_such_module_of_mine'"),
        ({"name": "unet3d", "options": {"features": []}}, "net unet3d: .*features"),
        ({"name": "unet3d", "options": {"depth": 3}}, "net unet3d has no option depth; it takes"),
        ({"name": "identity", "options": {"channels": 0}}, "net identity: .*channels is 0"),
        ({"name": "identity", "weights": "none.pt"}, "no weights at .*none.pt"),
    ],
)
def test_what_cannot_be_built_is_refused(folder: Path, choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(VolpipeError, match=sentence):
        build(folder, **choice)


def test_weights_come_from_safetensors_and_from_torch_files(folder: Path) -> None:
    state = {"conv.weight": torch.arange(54.0).reshape(2, 1, 3, 3, 3), "conv.bias": torch.tensor([5.0, 7.0])}
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.pt")
    for name in ("weights.safetensors", "weights.pt", f"{folder}/weights.pt"):
        loaded = build(folder, name="theirs.py:net", weights=name).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())


class Trap:
    """An object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing, protocol=2))])
def test_weights_with_code_in_them_are_refused_and_not_executed(folder: Path, save: Any) -> None:
    save({"conv.bias": Trap(folder / "sprung")}, folder / "weights.pt")
    with pytest.raises(VolpipeError, match=r"weights\.pt holds no plain tensors"):
        build(folder, name="theirs.py:net", weights="weights.pt")
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {"conv.weight": torch.zeros(2, 1, 5, 3, 3), "conv.bias": torch.zeros(2)},
            r"of another shape: conv.weight \(2, 1, 5, 3, 3\) for \(2, 1, 3, 3, 3\); give the net.options",
        ),
        ({"conv.weight": torch.zeros(2, 1, 3, 3, 3)}, "missing: conv.bias; give"),
        (
            {"conv.weight": torch.zeros(2, 1, 3, 3, 3), "conv.bias": torch.zeros(2), "other": torch.zeros(1)},
            "too many: other, which the net has no part for; let its function build that part, or save",
        ),
        ({1: torch.zeros(3)}, "missing: conv.weight and 1 more, too many: 1; give"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, state: Any, sentence: str) -> None:
    torch.save(state, folder / "weights.pt")
    with pytest.raises(VolpipeError, match=f"(?s)the weights in .*weights.pt do not fit the net.*{sentence}"):
        build(folder, name="theirs.py:net", weights="weights.pt")


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"rubbish" * 100, b"PK\x03\x04 cut off"])
def test_files_that_hold_no_weights_are_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(VolpipeError, match=f"{name} "):
        build(folder, name="theirs.py:net", weights=name)


def test_a_net_that_says_nothing_of_itself_is_measured_or_taken_at_the_recipes_word(folder: Path) -> None:
    silent = describe(NetChoice(name="theirs.py:net"), str(folder))
    assert (silent.in_channels, silent.out_channels, silent.scale) == (1, 2, (1, 1, 1))
    assert (silent.stride, silent.halo, silent.window) == ((1, 1, 1), (1, 1, 1), (64, 64, 64))
    assert (silent.label, silent.intensity, silent.num_parameters) == ("net", "raw", 2 * 27 + 2)
    said = describe(
        NetChoice(
            name="theirs.py:net", scale=(2, 1, 1), stride=(1, 4, 4), halo=(1, 3, 3), out_channels=2, intensity="unit"
        ),
        str(folder),
    )
    assert (said.scale, said.stride, said.halo) == ((2, 1, 1), (1, 4, 4), (1, 3, 3))
    assert (said.out_channels, said.intensity) == (2, "unit")


def test_a_nets_own_facts_are_taken_unless_the_recipe_says_otherwise(folder: Path) -> None:
    own = describe(NetChoice(name="theirs.py:facts"), str(folder))
    assert (own.out_channels, own.stride, own.halo) == (3, (1, 2, 2), (1, 1, 1))
    assert (own.window, own.intensity, own.tile_invariant) == ((32, 32, 32), "same", True)
    other = describe(NetChoice(name="theirs.py:facts", halo=(4, 4, 4)), str(folder))
    assert (other.halo, other.stride) == ((4, 4, 4), (1, 2, 2))


def test_facts_that_can_be_none_are_refused(folder: Path) -> None:
    with pytest.raises(
        VolpipeError,
        match=r"net theirs.py:zero_stride, in its attribute volpipe: stride: \[1, 0, 1\] is not a list of ",
    ):
        describe(NetChoice(name="theirs.py:zero_stride"), str(folder))
    with pytest.raises(
        VolpipeError, match=r"net net: halo: \[0, -1, 0\] is not a list of three whole numbers from 0 \[z, y, x\];"
    ):
        describe(NetChoice(name="theirs.py:net", halo=(0, -1, 0)), str(folder))


def facts_of(folder: Path, **choice: Any) -> tuple[NetChoice, NetFacts]:
    chosen = NetChoice(**choice)
    return chosen, describe(chosen, str(folder))


def test_an_output_of_another_shape_than_declared_is_refused(folder: Path) -> None:
    chosen, facts = facts_of(folder, name="theirs.py:net", options={"features": 2}, out_channels=2)
    check_shapes(chosen, facts, (8, 8, 8), str(folder))
    chosen, facts = facts_of(folder, name="theirs.py:net", options={"features": 2}, out_channels=1)
    with pytest.raises(PlanError, match=r"window \(8, 8, 8\) gives \(2, 8, 8, 8\).* 1 channels mean \(1, 8, 8, 8\)"):
        check_shapes(chosen, facts, (8, 8, 8), str(folder))
    chosen, facts = facts_of(folder, name="upsample", options={"scale": [2, 1, 1]}, scale=(1, 1, 1))
    with pytest.raises(PlanError, match=r"gives \(1, 16, 8, 8\), but scale \(1, 1, 1\)"):
        check_shapes(chosen, facts, (8, 8, 8))


def test_a_net_that_cannot_take_the_window_is_refused_with_its_own_words(folder: Path) -> None:
    chosen, facts = facts_of(folder, name="theirs.py:asserting")
    check_shapes(chosen, facts, (16, 8, 8), str(folder))
    with pytest.raises(PlanError, match=r"net asserting takes no window \(8, 8, 8\) of 1 channel: AssertionError"):
        check_shapes(chosen, facts, (8, 8, 8), str(folder))


def test_shapes_of_a_window_beyond_memory_are_checked_at_no_cost() -> None:
    chosen = NetChoice(name="unet3d")
    check_shapes(chosen, describe(chosen), (4096, 4096, 4096))


NORMS = [
    (nn.InstanceNorm3d(4), True),
    (nn.InstanceNorm3d(4, track_running_stats=True), False),
    (nn.GroupNorm(2, 4), True),
    (nn.BatchNorm3d(4), False),
    (nn.BatchNorm3d(4, track_running_stats=False), True),
    (nn.Conv3d(4, 4, 1), False),
]


@pytest.mark.parametrize(("layer", "expected"), NORMS, ids=lambda value: str(value)[:60])
def test_layers_that_normalise_by_window_are_found_where_they_matter(layer: nn.Module, expected: bool) -> None:
    """What is found is what makes a voxel's output depend on voxels that are no neighbours."""
    net = nn.Sequential(OrderedDict(first=nn.Conv3d(4, 4, 1), inner=nn.Sequential(layer))).eval()
    assert normalising_layers(net) == ([f"inner.0 ({type(layer).__name__})"] if expected else [])
    data = torch.randn(2, 4, 6, 6, 6, generator=torch.Generator().manual_seed(0))
    changed = data.clone()
    changed[..., 5] += 3
    with torch.inference_mode():
        assert torch.allclose(net(data)[..., :5], net(changed)[..., :5]) == (not expected)


def test_a_net_with_such_layers_is_not_tile_invariant_whatever_it_says(folder: Path) -> None:
    (folder / "norm.py").write_text(
        "import torch\n"
        "def norm():\n"
        "    net = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 1), torch.nn.GroupNorm(1, 2))\n"
        "    net.volpipe = dict(tile_invariant=True)\n"
        "    return net\n",
        encoding="utf-8",
    )
    assert not describe(NetChoice(name="norm.py:norm"), str(folder)).tile_invariant
    assert not describe(NetChoice(name="unet3d", options={"norm": "instance"})).tile_invariant
    assert describe(NetChoice(name="unet3d", options={"norm": "batch"})).tile_invariant


def layers(order: str) -> nn.Module:
    made = nn.Module()
    for name in order:
        made.add_module(name, nn.BatchNorm3d(2) if name == "n" else nn.Conv3d(1, 2, 3))
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            tensor.copy_(torch.full(tensor.shape, sum(map(ord, name))))
    return made


def test_the_hash_of_the_weights_knows_each_weight_and_no_order() -> None:
    net = layers("abn")
    first = weights_hash(net)
    assert weights_hash(layers("nba")) == first
    with torch.no_grad():
        next(net.parameters())[1, 0, 2, 2, 2] += 1e-4
    changed = weights_hash(net)
    assert changed != first
    net.get_submodule("n").get_buffer("num_batches_tracked").add_(1)
    assert len({first, changed, weights_hash(net), weights_hash(net.double()), weights_hash(layers("ab"))}) == 5


def test_weights_that_change_places_change_the_hash() -> None:
    net = layers("ab")
    swapped = layers("ab")
    swapped.load_state_dict({"a" + k[1:] if k[0] == "b" else "b" + k[1:]: v for k, v in net.state_dict().items()})
    assert weights_hash(swapped) != weights_hash(net)


def test_a_halo_is_measured_again_where_a_package_that_the_net_imports_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halo of the code before was kept, and the run had seams."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which Python knows by second and size alone
    (tmp_path / "net.py").write_text("from blocks import Net\n\ndef net():\n    return Net()\n")
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "__init__.py").write_text("from .wide import Net\n")
    for reach in (1, 3):
        (tmp_path / "blocks" / "wide.py").write_text(f"""
import torch

class Net(torch.nn.Module):
    volpipe = dict(in_channels=1, out_channels=1, intensity="same", window=(32, 32, 32))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv3d(1, 1, 3, padding={reach}, dilation={reach})

    def forward(self, x):
        return self.conv(x)
""")
        facts = describe(NetChoice(name="net.py:net", untrained=True), str(tmp_path))
        for module in ("blocks", "blocks.wide"):  # another process looks again
            sys.modules.pop(module)
        assert facts.halo == (reach, reach, reach)
