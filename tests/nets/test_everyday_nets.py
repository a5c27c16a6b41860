"""Nets whose code makes numbers of its own types, or takes gradients: measured as they compute, run as the whole.

Each is two convolutions of 3 voxels, with something that people write around them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from command import Give, giver, set_each
from inline import Inline
from torch import nn
from volumes import noise, write_volume

import volpipe as vp
from volpipe.geometry.grid import align_up
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import load_function

NETS = """
import sys
import warnings
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self, call=None, dims=3, **more):
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv3d if dims == 3 else nn.Conv2d
        self.a, self.b, self.call = conv(1, 2, 3, padding=1, **more), conv(2, 1, 3, padding=1, **more), call
    def both(self, x):
        return self.b(torch.relu(self.a(x)))
    def forward(self, x):
        return self.call(self, x)

def with_kernel(call, dtype):
    net = Net(call)
    net.register_buffer("k", torch.rand(1, 1, 3, 3, 3, dtype=dtype))
    return net

def sampled(x):
    dims = x.ndim - 2
    theta = torch.eye(dims, dims + 1)[None].expand(len(x), dims, dims + 1)
    return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)

def gradient(net, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.both(x).square().sum(), x)[0]

def gradient_in_place(net, x):
    x.requires_grad_()
    return torch.autograd.grad(net.both(x).square().sum(), x)[0]

def autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return net.both(x).float()

def gathered(net, x):
    places = (torch.arange(x.shape[-1]) + 3).clamp(max=x.shape[-1] - 1)
    return net.both(x.gather(-1, places.expand(x.shape)))

def deformed(net, x):
    offsets = 2 * torch.tanh(net.a(x)[:, :1])
    places = (torch.arange(x.shape[-1]).expand(x.shape) + offsets).round().long()
    return net.both(x.gather(-1, places.clamp(0, x.shape[-1] - 1)))

def pooled(net, x):
    y = F.avg_pool3d(net.a(x), 2)
    return net.b(F.interpolate(y, size=x.shape[2:], mode="trilinear"))

class NoGradient(Net):
    @torch.no_grad()
    def forward(self, x):
        return self.both(x)

class Inference(Net):
    @torch.inference_mode()
    def forward(self, x):
        return self.both(x)

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(1, 1, 3, padding=1)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.float())

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, g):
        return 2 * g

def cast(): return Net(lambda net, x: net.both(x.float()))
def cast_by_to(): return Net(lambda net, x: torch.sigmoid(net.both(x.to(torch.float32))))
def cast_slices(): return Net(lambda net, x: net.both(x.float()), 2)
def kernel(): return Net(lambda net, x: net.both(F.conv3d(x, torch.ones(1, 1, 3, 3, 3) / 27, padding=1)))
def grid(): return Net(lambda net, x: net.both(sampled(x)))
def grid_slices(): return Net(lambda net, x: net.both(sampled(x)), 2)
def matrix():
    m = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    return Net(lambda net, x: net.b(torch.einsum("bczyx,dc->bdzyx", net.a(x), m)))
def half(): return Net(lambda net, x: net.both(x.half()).float()).half()
def bfloat(): return Net(autocast)
def double_buffer():
    return with_kernel(lambda net, x: net.both(F.conv3d(x.double(), net.k, padding=1).float()), torch.float64)
def double_parameters(): return Net(lambda net, x: net.both(x.double()).float()).double()
def complex_kernel():
    return with_kernel(lambda net, x: net.both(F.conv3d(x.to(net.k.dtype), net.k, padding=1).abs()), torch.complex64)
def quantised(): return Net(lambda net, x: net.both(torch.quantize_per_tensor(x, 0.01, 0, torch.qint8).dequantize()))
def to_numpy(): return Net(lambda net, x: torch.from_numpy(np.square(net.both(x).detach().numpy())))
def scripted():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to whoever scripts
        return nn.Sequential(torch.jit.script(Cast()), torch.jit.script(Cast()))
def no_gradient(): return NoGradient()
def inference(): return Inference()
def own_function(): return Net(lambda net, x: net.both(Doubled.apply(x)))
def checkpointed(): return Net(lambda net, x: checkpoint(net.both, x, use_reentrant=False))
def in_place(): return Net(lambda net, x: net.b(net.a(x.mul_(0.5).add_(1)).relu_()))
def zeros(): return Net(lambda net, x: net.both(torch.cat([x, x.new_zeros(x.shape)], 1).sum(1, keepdim=True)))
def mirrors(): return Net(lambda net, x: net.both(x), padding_mode="reflect")
def mirrors_far(): return Net(lambda net, x: net.both(F.pad(x, (20, 20, 0, 0, 0, 0), mode="reflect")[..., 40:]))
def tied():
    net = Net(lambda net, x: net.b(net.c(net.a(x)[:, :1])))
    net.c = net.a
    return net
def by_gradient(): return Net(gradient)
def by_gradient_in_place(): return Net(gradient_in_place)
def gather(): return Net(gathered)
def deform(): return Net(deformed)
def pool(): return Net(pooled)

def attribute(): return Net(lambda net, x: net.nothing(x))
def stops(): return Net(lambda net, x: sys.exit(3))
def key(): return Net(lambda net, x: {}["no such key"])
def state():
    net = Net(lambda net, x: net.both(x))
    net.state_dict = lambda *args, **kwargs: 1 / 0
    return net
class Modeless(Net):
    def eval(self):
        raise RuntimeError("there is no mode")
def mode(): return Modeless(lambda net, x: net.both(x))
"""
# Voxels to each side, by pencil: one for each convolution, and what the code around them adds.
TWO = (2, 2, 2)
HALOS = {
    "cast": TWO, "cast_by_to": TWO, "cast_slices": (0, 2, 2), "kernel": (3, 3, 3), "grid": TWO,
    "grid_slices": (0, 2, 2),
    "matrix": TWO, "half": TWO, "bfloat": TWO, "double_buffer": (3, 3, 3), "double_parameters": TWO,
    "complex_kernel": (3, 3, 3), "quantised": TWO, "to_numpy": TWO, "scripted": TWO, "no_gradient": TWO,
    "inference": TWO, "own_function": TWO, "checkpointed": TWO, "in_place": TWO, "zeros": TWO, "mirrors": TWO,
    "mirrors_far": (2, 2, 22), "tied": (3, 3, 3), "by_gradient": (4, 4, 4), "by_gradient_in_place": (4, 4, 4),
    "gather": (2, 2, 5), "deform": (3, 3, 4), "pool": (4, 4, 4),
}  # fmt: skip
# What computes alike, by code like that of another: with -m long.
ALIKE = {
    "cast", "cast_by_to", "kernel", "grid", "grid_slices", "matrix", "bfloat", "double_buffer", "double_parameters",
    "quantised", "to_numpy", "no_gradient", "own_function", "checkpointed", "in_place", "zeros", "mirrors", "tied",
    "by_gradient", "gather",
}  # fmt: skip
SHAPE = (14, 26, 30)
# A grid of places is made in float32 for the whole window, and half precision has 11 bits.
ROUNDING = {"grid": 1e-5, "grid_slices": 1e-5, "half": 1e-2, "bfloat": 1e-2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "everyday.py").write_text(NETS)
    return tmp_path


def of_the_whole(net: nn.Module, grey: np.ndarray, halo: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    """Return (z, y, x) of what `net` gives for the whole, mirrored by its halo in whole strides, by torch alone."""
    sides = [align_up(h, s) for h, s in zip(halo, stride, strict=True)]
    padded = torch.from_numpy(np.pad(grey, [(side, side) for side in sides], mode="reflect"))
    windows = padded[:, None] if halo[0] == 0 else padded[None, None]
    out = net(windows.clone()).detach().numpy()
    out = out[:, 0] if halo[0] == 0 else out[0, 0]
    whole: np.ndarray = out[tuple(slice(side, side + n) for side, n in zip(sides, SHAPE, strict=True))]
    return whole


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in HALOS])
def test_a_net_is_measured_as_it_computes_and_gives_the_numbers_of_the_whole(folder: Path, name: str) -> None:
    facts = describe(NetChoice(name=f"everyday.py:{name}", untrained=True), str(folder))
    assert facts.tile_invariant
    assert facts.halo == HALOS[name]
    grey = noise(SHAPE).astype(np.float32) / 255
    write_volume(folder / "in.n5", grey)
    stride = facts.stride
    window = [align_up(h, s) * 2 + 12 for h, s in zip(facts.halo, stride, strict=True)]
    settings = [f"net.name=everyday.py:{name}", "net.untrained=true", "normalise.method=none", "output.levels=0"]
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=[*settings, f"windows.shape={window}"])
    assert plan.lattice.num_windows > 1
    assert not vp.run(plan, site=Inline()).missing
    out = vp.open("out.zarr").open()[...].reshape(SHAPE)
    net: nn.Module = load_function(f"everyday.py:{name}", str(folder))().eval()
    expected = of_the_whole(net, grey, facts.halo, stride)
    np.testing.assert_allclose(out, expected, rtol=0, atol=ROUNDING.get(name, 1e-6) * np.ptp(expected))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "attribute",
            "no window of (32, 32, 32) voxels and 1 channel, float32: 'Net' object has no attribute 'nothing'",
        ),
        ("stops", "no window of (32, 32, 32) voxels and 1 channel, float32: 3"),
        ("key", "no window of (32, 32, 32) voxels and 1 channel, float32: 'no such key'"),
        ("state", "its code fails: ZeroDivisionError: division by zero"),
        ("mode", "its code fails: RuntimeError: there is no mode"),
    ],
)
@pytest.mark.parametrize("command", ["net", "plan", "run"])
def test_code_that_fails_is_a_sentence_with_its_own_words(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
    command: str,
) -> None:
    give: Give = giver(folder, monkeypatch, capsys)
    write_volume(folder / "in.n5", noise(SHAPE))
    place = [f"everyday.py:{name}"] if command == "net" else ["in.n5", *set_each(f"net.name=everyday.py:{name}")]
    more = {"net": [], "plan": ["--quick"], "run": ["--config", "threads", "-o", "out.zarr"]}[command]
    ended = give(command, *more, *place, *set_each("net.untrained=true"))
    said = " ".join(ended.err.split())
    assert ended.code == 2
    assert f"net everyday.py:{name}: " in said and words in said
    assert "Traceback" not in ended.err and not Path("out.zarr").exists()
