"""A net's weights: none without a word, the same on every worker, and found in checkpoints as people save them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import THREADS, Ended, Give, giver, set_each
from volumes import noise, write_volume

from volpipe.driver import prepare
from volpipe.errors import PlanError
from volpipe.provenance import told_by
from volpipe.recipe import load_recipe

SMALL = ("net.options={features=[2,3]}", "windows.shape=[24,24,24]", "net.untrained=true")
NETS = """
import torch
class Net(torch.nn.Module):
    scale, stride, halo, out_channels, window = (1, 1, 1), (1, 1, 1), (1, 1, 1), 1, (12, 12, 12)
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, 1, 3, padding=1)
    def forward(self, x):
        return self.conv(x)
def seeded():
    torch.manual_seed(3)
    return Net()
def unseeded():
    return Net()
def drawn_by_process():
    import os
    torch.manual_seed(os.getpid())
    return Net()
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    write_volume(tmp_path / "in.n5", noise((12, 24, 12)))
    (tmp_path / "nets.py").write_text(NETS)
    return giver(tmp_path, monkeypatch, capsys)


def run(give: Give, *settings: str, command: str = "run") -> Ended:
    return give(command, *THREADS, *set_each(*settings), "-o", "out.zarr", "in.n5")


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("net", "words"),
    [
        ("unet3d", "has 353,281 parameters and no weights, so that its output would be noise; set net.weights to a "
         "file of them, take --recipe affinities or --recipe default, which have weights for it, or set net.untrained"),
        ("superres", "take --recipe superres_z2 or --recipe superres_z4 or --recipe superres_z4_sharp, which have"),
        ("srgan3d", "set net.weights to a file of them, or set net.untrained=true to try it without"),
        ("nets.py:seeded", "net seeded has 28 parameters and no weights, so that its output would be noise; save its "
         "state dict with torch.save, and set net.weights to that file, or set net.untrained=true if its code sets"),
    ],
)  # fmt: skip
def test_a_net_without_weights_is_refused_with_the_ways_out(
    tmp_path: Path, give: Give, command: str, net: str, words: str
) -> None:
    (tmp_path / "recipe.toml").write_text(f'[net]\nname = "{net}"\n')
    ended = give(command, *THREADS, "--recipe", "recipe.toml", "-o", "out.zarr", "in.n5")
    assert ended.code == 2
    (sentence,) = ended.err.splitlines()
    assert words in sentence
    assert not (tmp_path / "out.zarr").exists()


def test_a_stage_without_weights_is_refused_by_name(tmp_path: Path, give: Give) -> None:
    (tmp_path / "flow.toml").write_text('[[stage]]\nname = "restore"\n[stage.net]\nname = "unet3d"\n')
    ended = give("run", *THREADS, "--recipe", "flow.toml", "-o", "out", "in.n5")
    assert ended.code == 2
    assert "volpipe: stage restore: net unet3d has " in ended.err
    assert "parameters and no weights" in ended.err


def test_in_a_notebook_too_and_there_the_default_recipe_has_weights(tmp_path: Path, give: Give) -> None:
    (tmp_path / "r.toml").write_text("[windows]\nblend = 'hann'\n")
    with pytest.raises(PlanError, match="no weights"):
        prepare(str(tmp_path / "in.n5"), load_recipe(tmp_path / "r.toml"), tmp_path / "out.zarr", tmp_path)
    plan = prepare(str(tmp_path / "in.n5"), load_recipe(None), tmp_path / "out.zarr", tmp_path)
    assert plan.net.num_parameters == 43_201


def test_an_untrained_net_runs_with_a_warning_that_the_log_and_the_output_keep(tmp_path: Path, give: Give) -> None:
    ended = run(give, *SMALL)
    assert ended.code == 0, ended.err
    warning = "parameters that its code makes (net.untrained=true): without training, its output is noise"
    assert ended.err.startswith("warning: net unet3d runs with the ")
    assert warning in ended.err
    assert warning in (tmp_path / "out.zarr.run" / "volpipe.log").read_text()
    assert told_by(tmp_path / "out.zarr")["recipe"]["net"]["untrained"] is True


def test_nets_without_parameters_and_files_need_no_word(tmp_path: Path, give: Give) -> None:
    for name in ("identity", "shift", "upsample"):
        recipe = load_recipe(None, [f"net.name={name}"])
        assert prepare(str(tmp_path / "in.n5"), recipe, tmp_path / "out.zarr", tmp_path).net.num_parameters == 0
