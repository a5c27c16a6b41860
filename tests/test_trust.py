"""Code and data: files of code run where the user says so alone, pickles never, and nobody else writes to a run."""

from __future__ import annotations

import ast
import io
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from arrays import invented, make
from command import THREADS, Give, giver
from conftest import ROOT, TEST_PATH
from pydantic import ValidationError
from torch import nn
from volumes import write_volume

from volpipe.api.runs import request
from volpipe.errors import PlanError, RunError, VolpipeError
from volpipe.nets.facts import NetFacts
from volpipe.nets.load import build_net, check_shapes, describe
from volpipe.recipes.inference import NetChoice
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.volume import open_volume


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


class Doubling(nn.Module):
    """A net (n, 1, z, y, x) that doubles, with some of its facts."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 1, bias=False)
        self.norm = nn.GroupNorm(1, 1) if norm else nn.Identity()
        self.volpipe = {"halo": [0, 2, 2]}
        nn.init.constant_(self.conv.weight, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.conv(x))
        return out


SCRIPT = """
import sys, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)
torch.jit.script(torch.load(sys.argv[1], weights_only=False)).save(sys.argv[2])
"""


def script(path: Path, net: nn.Module) -> None:
    """Write `net` as TorchScript; by a process of its own, since what torch has compiled before changes what it can."""
    torch.save(net, path.with_suffix(".whole"))
    environment = os.environ | {"PYTHONPATH": TEST_PATH}
    subprocess.run([sys.executable, "-c", SCRIPT, path.with_suffix(".whole"), path], env=environment, check=True)
    path.with_suffix(".whole").unlink()


def export(path: Path, net: nn.Module) -> None:
    dims = {0: torch.export.Dim("n"), **{i: torch.export.Dim(f"d{i}") for i in (2, 3, 4)}}
    torch.export.save(torch.export.export(net, (torch.zeros(2, 1, 8, 8, 8),), dynamic_shapes=(dims,)), path)


KINDS: dict[str, Callable[[Path, nn.Module], None]] = {"net.pt": script, "net.pt2": export}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_code_is_loaded_only_where_it_is_trusted(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name, Doubling().eval())
    with pytest.raises(VolpipeError, match=rf"{name} is a file of .*, which is code .*; add --trust-model"):
        build_net(NetChoice(name=name), str(tmp_path))
    choice = NetChoice(name=name, trust_model=True, scale=(1, 1, 1))
    facts = describe(choice, str(tmp_path))
    assert (facts.label, facts.num_parameters, facts.tile_invariant) == ("net", 1, True)
    assert facts.halo == ((0, 2, 2) if name == "net.pt" else (0, 0, 0))
    check_shapes(choice, facts, (12, 16, 20), str(tmp_path))
    with pytest.raises(PlanError, match=r"but scale \(2, 2, 2\)"):
        check_shapes(choice, facts.model_copy(update={"scale": (2, 2, 2)}), (12, 16, 20), str(tmp_path))
    seen = torch.rand(1, 1, 5, 6, 7)
    torch.testing.assert_close(build_net(choice, str(tmp_path))(seen), seen * 2)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_norms_by_window_are_found_in_files_of_code(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name, Doubling(norm=True).eval())
    assert not describe(NetChoice(name=name, trust_model=True), str(tmp_path)).tile_invariant


@pytest.mark.long
def test_other_code_is_another_net(tmp_path: Path) -> None:
    choice = NetChoice(name="net.pt", trust_model=True)
    script(tmp_path / "net.pt", Doubling())
    before = describe(choice, str(tmp_path))
    script(tmp_path / "net.pt", nn.Sequential(Doubling(), nn.ReLU()))
    assert describe(choice, str(tmp_path)).weights_sha256 != before.weights_sha256


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_of_code_is_refused(tmp_path: Path, name: str) -> None:
    choice = NetChoice(name=name, trust_model=True)
    with pytest.raises(VolpipeError, match=f"no net at .*{name}"):
        build_net(choice, str(tmp_path))
    torch.save(Doubling().state_dict(), tmp_path / name)
    with pytest.raises(VolpipeError, match=f"{name} is no file of .*weights alone go to net.weights"):
        build_net(choice, str(tmp_path))
    with pytest.raises(VolpipeError, match="takes no options"):
        build_net(choice.model_copy(update={"options": {"a": 1}}), str(tmp_path))


class Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors", "a.bin"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    torch.save({"weight": Bomb(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(VolpipeError, match=f"{name} holds no plain tensors"):
        build_net(NetChoice(name="unet3d", weights=name), str(tmp_path))
    with pytest.raises(VolpipeError):
        build_net(NetChoice(name=name), str(tmp_path))
    assert not (tmp_path / "ran").exists()
    torch.load(io.BytesIO((tmp_path / name).read_bytes()), weights_only=False)
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.long
def test_the_command_line_trusts_a_model_when_told_to(
    tmp_path: Path,
    give: Give,
) -> None:
    data = invented((16, 16, 16), "uint8") // 4
    make(tmp_path / "in.zarr", data)
    (tmp_path / "nets").mkdir()
    script(tmp_path / "nets/double.pt", Doubling())
    choices = ("--set", "net.name=nets/double.pt", "--set", "normalise.method=none", "--set", "output.dtype=uint8")
    refused = give("run", *THREADS, *choices, "in.zarr")
    assert refused.code == 2 and "add --trust-model" in refused.err
    ended = give("run", *THREADS, *choices, "--trust-model", "in.zarr")
    assert ended.code == 0, ended.err
    np.testing.assert_array_equal(open_volume(tmp_path / "in_double.zarr").open()[...], data * 2)


@pytest.mark.parametrize("name", ["../../out/net.pt", "/abs/net.pt2", "m.py:net", "net"])
def test_no_name_of_a_net_leads_the_output_elsewhere(name: str) -> None:
    asked = request("/data/in.n5", {"net": {"name": name, "untrained": True}, "output": {"format": "n5"}})
    assert asked.out == "in_net.n5"


def test_arrays_of_one_name_in_two_containers_get_outputs_of_their_own(tmp_path: Path) -> None:
    for name in ("a.n5", "b.n5"):
        write_volume(tmp_path / name, np.zeros((4, 4, 4), np.uint8))
    recipe = {"net": {"name": "identity"}, "output": {"format": "n5"}}
    outs = [request(f"{tmp_path}/{place}", recipe).out for place in ("a.n5/raw", "b.n5/raw", "a.n5")]
    assert outs == ["a_raw_identity.n5", "b_raw_identity.n5", "a_identity.n5"]


@pytest.mark.parametrize("label", ["../x", "/x", "..", "a/b", "", "."])
def test_no_label_leads_tensors_elsewhere(label: str) -> None:
    with pytest.raises(ValidationError, match="label"):
        NetFacts(
            label=label, in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0),
            window=(8, 8, 8), intensity="raw", tile_invariant=True, num_parameters=0, weights_sha256="",
        )  # fmt: skip


def modes(folder: Path) -> dict[str, str]:
    """Return what everybody may write to in `folder`, itself included, by its mode."""
    paths = [folder, *folder.rglob("*")]
    return {str(p): oct(p.stat().st_mode) for p in paths if not p.is_symlink() and p.stat().st_mode & stat.S_IWOTH}


def test_nobody_else_writes_to_a_run_whatever_the_umask(tmp_path: Path, give: Give) -> None:
    make(tmp_path / "in.zarr", invented((16, 16, 16), "uint8"))
    before = os.umask(0)
    try:
        choices = ("--set", "net.name=identity", "--set", "tensors.mode=stored", "--keep-tensors")
        ended = give("run", *THREADS, *choices, "-o", "out.zarr", "in.zarr")
        assert os.umask(0) == 0  # as it was
    finally:
        os.umask(before)
    assert ended.code == 0, ended.err
    assert len(list((tmp_path / "out.zarr.run").rglob("*"))) > 10
    assert modes(tmp_path / "out.zarr.run") == {}
    assert modes(tmp_path / "out.zarr") == {}


def test_a_run_folder_that_everybody_may_write_to_is_closed_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.from_output(tmp_path / "out.zarr")
    folder.path.mkdir()
    folder.path.chmod(0o777)
    with folder.locked():
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o775

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder.path.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(RunError, match="anybody may write to it"), folder.locked():
        pass


def test_no_file_of_numbers_is_loaded_as_code() -> None:
    """numpy's files without pickles, as is its default, and torch's with `weights_only`."""
    loads = [
        (f"{file.relative_to(ROOT)}:{call.lineno}", ast.unparse(call.func), ast.unparse(call))
        for file in sorted((ROOT / "volpipe").rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("np.load", "torch.load")
    ]
    assert {function for _, function, _ in loads} == {"np.load", "torch.load"}
    wrong = [
        place for place, function, call in loads
        if "allow_pickle=True" in call or (function == "torch.load" and "weights_only=True" not in call)
    ]  # fmt: skip
    assert wrong == []
