"""Nets that see far: their halo is found, or it is said how far they see; what sees all of a window is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from inline import Inline
from torch import nn
from volumes import noise, write_volume

import volpipe as vp
from volpipe.inference.tiling import own_window
from volpipe.nets.load import describe
from volpipe.nets.receptive_field import measure_geometry
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import load_function

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, ins, outs, stride):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1), nn.BatchNorm2d(outs), nn.ReLU())
        self.second, self.short = nn.Conv2d(outs, outs, 3, 1, 1), nn.Conv2d(ins, outs, 1, stride)
    def forward(self, x):
        return torch.relu(self.second(self.first(x)) + self.short(x))

class Residual(nn.Module):
    '''Half of a ResNet-18 with the way back: a stem, a pool and two stages that halve, batch norm alone.'''
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 7, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
        self.downs = nn.ModuleList([Block(2, 4, 2), Block(4, 4, 2)])
        self.ups = nn.ModuleList([nn.Conv2d(8, 4, 3, 1, 1), nn.Conv2d(6, 4, 3, 1, 1), nn.Conv2d(6, 2, 3, 1, 1)])
        self.head = nn.Conv2d(2, 1, 3, 1, 1)
    def forward(self, x):
        a = self.stem(x)
        b = F.max_pool2d(a, 3, 2, 1)
        c = self.downs[0](b)
        y = self.downs[1](c)
        for up, skip in zip(self.ups, (c, b, a)):
            y = torch.relu(up(torch.cat([F.interpolate(y, scale_factor=2.0), skip], 1)))
        return self.head(F.interpolate(y, scale_factor=2.0))

def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args)
def dilated(conv, steps): return nn.Sequential(*[conv(1, 1, 3, padding=d, dilation=d) for d in steps])
def residual(): return seeded(Residual)
def wide(): return seeded(dilated, nn.Conv2d, (1, 2, 4, 8, 16, 32, 64, 128))
def wider(): return seeded(dilated, nn.Conv2d, [2**n for n in range(12)])
def far(): return seeded(dilated, nn.Conv3d, [2**n for n in range(9)])

class Excite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
    def forward(self, x):
        y = self.conv(x)
        return y * torch.sigmoid(y.mean((2, 3), keepdim=True))
class Attend(Excite):
    def forward(self, x):
        y = self.conv(x).flatten(2)
        return (torch.softmax(y * y.std(), -1) * y).sum(-1, keepdim=True)[..., None] + x
class Coordinates(Excite):
    def forward(self, x):
        return self.conv(x + torch.linspace(0, 1, x.shape[-1]))
def excite(): return seeded(Excite)
def attend(): return seeded(Attend)
def coordinates(): return seeded(Coordinates)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reach.py").write_text(NETS)
    return tmp_path


def difference(folder: Path, name: str, shape: tuple[int, int, int], *settings: str) -> float:
    """Return by how much a run differs from the net over each whole slice, mirrored, as a share of the range."""
    grey = noise(shape).astype(np.float32) / 255
    write_volume(folder / "in.n5", grey)
    named = [f"net.name=reach.py:{name}", "net.untrained=true", "normalise.method=none", "output.levels=0"]
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=[*named, *settings])
    assert not vp.run(plan, site=Inline()).missing
    side = 512  # a multiple of every stride here
    padded = np.pad(grey, [(0, 0), (side, side), (side, side)], mode="reflect")
    net: nn.Module = load_function(f"reach.py:{name}", str(folder))().eval()
    with torch.inference_mode():
        whole = net(torch.from_numpy(padded)[:, None])[:, 0].numpy()
    expected = whole[:, side : side + shape[1], side : side + shape[2]]
    out = vp.open("out.zarr").open()[...].reshape(shape)
    return float(np.abs(out - expected).max() / np.ptp(expected))


def facts_of(folder: Path, name: str) -> vp.NetReport:
    return vp.net_report(f"reach.py:{name}", "net.untrained=true")


def test_a_net_of_slices_that_sees_255_pixels_has_that_halo(folder: Path) -> None:
    facts = describe(NetChoice(name="reach.py:wide", untrained=True), str(folder))
    assert (facts.halo, facts.stride, facts.tile_invariant) == ((0, 255, 255), (1, 1, 1), True)
    assert own_window(facts) == (1, 1020, 1020)  # of many slices it would be a billion numbers
    assert difference(folder, "wide", (2, 40, 50)) < 1e-5


def test_a_residual_u_net_with_batch_norm_is_the_whole(folder: Path) -> None:
    report = facts_of(folder, "residual")
    assert report.geometry is not None and (report.geometry.whole_window, report.geometry.further) == ("", "")
    # Where a change of 16 pixels in the middle comes through, by the net itself: its halo is that, but for a stride.
    net: nn.Module = load_function("reach.py:residual", str(folder))().double().eval()
    before = torch.rand(1, 1, 512, 512, dtype=torch.float64)
    after = before.clone()
    after[..., 256:272, 256:272] += 1e3
    with torch.inference_mode():
        rows = (net(before) != net(after))[0, 0].any(1).nonzero().flatten()
    seen = max(271 - int(rows[0]), int(rows[-1]) - 256)
    assert seen - 15 <= max(report.facts.halo) <= seen + 16
    assert report.facts.stride == (1, 16, 16)
    assert difference(folder, "residual", (1, 208, 336), "windows.shape=[1,320,320]") < 1e-5


@pytest.mark.parametrize(("name", "seen", "halo"), [("wider", 2048, (0, 512, 512)), ("far", 256, (64, 64, 64))])
def test_a_net_that_sees_further_than_was_tried_says_so_and_has_a_halo(
    folder: Path, name: str, seen: int, halo: tuple[int, int, int]
) -> None:
    report = facts_of(folder, name)
    assert report.geometry is not None and report.geometry.whole_window == ""
    assert f"sees more than {seen} voxels along axis y" in report.geometry.further
    assert (report.facts.halo, report.facts.tile_invariant) == (halo, False)
    write_volume(folder / "in.n5", noise((4, 40, 50)))
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=[f"net.name=reach.py:{name}", "net.untrained=true"])
    assert (plan.blend, plan.lattice.placement) == ("crop", "lattice")
    (caution,) = [each for each in plan.warnings() if "sees further" in each]
    assert f"the halo of {list(halo)} voxels" in caution and "seams may show" in caution


@pytest.mark.parametrize(
    ("name", "words", "others"),
    [
        ("excite", "sees all 6144 of a window: a change at one of its faces changes all of them", "coordinates"),
        ("attend", "sees all 6144 of a window: a change at one of its faces changes all of them", "coordinates"),
        ("coordinates", "depends on the place in the window, as by coordinates", "norms, attention"),
    ],
)
def test_the_reason_why_tiles_differ_is_one_that_a_trial_shows(
    folder: Path, name: str, words: str, others: str
) -> None:
    report = facts_of(folder, name)
    assert report.geometry is not None
    assert words in report.geometry.whole_window and others not in report.geometry.whole_window
    assert report.facts.window == (1, 512, 512)  # no stamps of 64 pixels of a slice


def test_a_net_without_padding_whose_last_layer_pads_far_is_measured() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv3d(1, 1, 3), nn.Conv3d(1, 1, (1, 1, 71), padding=(0, 0, 35)))

    found = measure_geometry(build)
    assert (found.margin, found.whole_window, found.halo[:2]) == ((1, 1, 1), "", (1, 1))
    assert 36 <= found.halo[2] <= 65  # of a net with a margin it is known by steps
