"""What is measured of a net is that of the weights that it runs with: buffers, gates and offsets that these bring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from inline import Inline
from torch import nn
from volumes import noise, write_volume

import volpipe as vp
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import load_function

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.wide = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 7, padding=3)

class Spread(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("psf", torch.zeros(1, 1, 9, 9, 9))
    def forward(self, x):
        return self.mix(x) + F.conv3d(x, self.psf, padding=4)

class Gated(Net):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return self.mix(x) + self.gate * self.wide(x)

class GatedByBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))
    def forward(self, x):
        return self.mix(x) + self.gate * self.wide(x)

class Switched(GatedByBuffer):
    def forward(self, x):
        return self.mix(x) + self.wide(x) if bool(self.gate) else self.mix(x)

class Offset(Net):
    def __init__(self):
        super().__init__()
        self.far = nn.Parameter(torch.zeros(1))
    def forward(self, x):
        places = (torch.arange(x.shape[-1]) + self.far.round().long()).clamp(0, x.shape[-1] - 1)
        return self.mix(x[..., places])

class Norm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm3d(1)
    def forward(self, x):
        return self.mix(torch.relu(self.norm(self.wide(x))))
"""
# What the weights bring to a net, and how far it sees without that and with it (z, y, x).
BROUGHT = {
    "Spread": ({"psf": torch.rand(1, 1, 9, 9, 9, generator=torch.Generator().manual_seed(1)) / 100}, 0, (4, 4, 4)),
    "Gated": ({"gate": torch.ones(1)}, 3, (3, 3, 3)),  # its gate is a parameter, which may be anything
    "GatedByBuffer": ({"gate": torch.tensor(2.0)}, 0, (3, 3, 3)),
    "Switched": ({"gate": torch.tensor(1.0)}, 0, (3, 3, 3)),
    "Offset": ({"far": torch.tensor([6.0])}, None, (0, 0, 6)),
    "Norm": ({"norm.running_mean": torch.tensor([5.0]), "norm.running_var": torch.tensor([1e-6])}, 3, (3, 3, 3)),
}
SHAPE = (14, 22, 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loaded.py").write_text(NETS)
    return tmp_path


def built(folder: Path, name: str) -> nn.Module:
    net: nn.Module = load_function(f"loaded.py:{name}", str(folder))().eval()
    return net


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in {"Norm", "Gated", "Switched"})) for name in BROUGHT],
)
def test_the_halo_is_that_of_the_weights_and_the_output_that_of_the_whole(folder: Path, name: str) -> None:
    brought, without, halo = BROUGHT[name]
    if without is not None:  # measured first, so that what is remembered of it must not be taken for the other
        assert max(describe(NetChoice(name=f"loaded.py:{name}", untrained=True), str(folder)).halo) == without
    net = built(folder, name)
    net.load_state_dict(net.state_dict() | brought)
    torch.save(net.state_dict(), folder / "w.pt")
    facts = describe(NetChoice(name=f"loaded.py:{name}", weights="w.pt"), str(folder))
    assert facts.halo == halo
    grey = noise(SHAPE).astype(np.float32) / 255
    write_volume(folder / "in.n5", grey)
    window = [2 * h + 8 for h in halo]
    settings = [f"net.name=loaded.py:{name}", "net.weights=w.pt", f"windows.shape={window}"]
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=[*settings, "normalise.method=none", "output.levels=0"])
    assert not vp.run(plan, site=Inline()).missing
    padded = torch.from_numpy(np.pad(grey, [(h, h) for h in halo], mode="reflect"))
    with torch.inference_mode():
        whole = net(padded[None, None])[0, 0].numpy()
    expected = whole[tuple(slice(h, h + n) for h, n in zip(halo, SHAPE, strict=True))]
    out = vp.open("out.zarr").open()[...].reshape(SHAPE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_a_declared_halo_is_checked_with_the_weights(folder: Path) -> None:
    net = built(folder, "Spread")
    write_volume(folder / "in.n5", noise(SHAPE))
    said = ["net.name=loaded.py:Spread", "net.weights=w.pt", "net.halo=[1,1,1]", "net.stride=[1,1,1]"]
    torch.save(net.state_dict(), folder / "w.pt")
    vp.plan("in.n5/raw", out="out.zarr", settings=said)  # its kernel is zeros
    torch.save(net.state_dict() | BROUGHT["Spread"][0], folder / "w.pt")
    with pytest.raises(vp.VolpipeError, match=r"a halo of \(1, 1, 1\), but .* would disagree .*: it is \(4, 4, 4\)"):
        vp.plan("in.n5/raw", out="out.zarr", settings=said)


def test_buffers_of_zeros_of_a_net_without_weights_are_told_of(folder: Path) -> None:
    assert any("buffer psf" in note for note in vp.net_report("loaded.py:Spread", "net.untrained=true").notes)
    net = built(folder, "Spread")
    torch.save(net.state_dict() | BROUGHT["Spread"][0], folder / "w.pt")
    assert vp.net_report("loaded.py:Spread", 'net.weights="w.pt"').notes == ()
    assert vp.net_report("loaded.py:Norm", "net.untrained=true").notes == ()  # statistics of a norm begin so
