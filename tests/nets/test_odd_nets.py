"""Nets whose code takes or returns something unusual: they give the numbers of their convolution, or a sentence."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import export_onnx
from inline import Inline
from monai.inferers import sliding_window_inference
from torch import nn
from volumes import noise, write_volume

import volpipe as vp
from volpipe.nets.load import build_net
from volpipe.recipes.inference import NetChoice

# Each is one convolution, (1 channel) -> (1 or 2 channels), in some disguise.
NETS = '''
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, call, outs=2, dims=3):
        super().__init__()
        torch.manual_seed(0)
        self.conv = (nn.Conv3d if dims == 3 else nn.Conv2d)(1, outs, 3, padding=1)
        self.call = call
    def forward(self, x, mask=None, scale=1.0):
        return self.call(self.conv, x)

class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        return self[name]

Pair = namedtuple("Pair", "maps loss")
def plain(): return Odd(lambda conv, x: conv(x))
def nested(): return Odd(lambda conv, x: ((None, (conv(x),)), None))
def model_output(): return Odd(lambda conv, x: ModelOutput(loss=None, logits=conv(x)))
def named(): return Odd(lambda conv, x: Pair(conv(x), torch.tensor(0.5)))
def attributes(): return Odd(lambda conv, x: SimpleNamespace(sample=conv(x)))
def no_channels(): return Odd(lambda conv, x: conv(x)[:, 0], 1)
def squeezed(): return Odd(lambda conv, x: conv(x).squeeze(), 1)
def squeezed_windows(): return Odd(lambda conv, x: conv(x).squeeze(0) if len(x) == 1 else conv(x))
def squeezed_slices(): return Odd(lambda conv, x: conv(x)[:, 0], 1, 2)
def and_a_vector(): return Odd(lambda conv, x: (conv(x)[:, 0], conv(x).mean((2, 3, 4))), 1)
def half_inside(): return Odd(lambda conv, x: conv(x).half())
def double_inside(): return Odd(lambda conv, x: conv(x).double())
def needs_one(): return Odd(lambda conv, x: conv(x) if len(x) == 1 else 1 / 0)
def only_24(): return Odd(lambda conv, x: conv(x.reshape(len(x), 1, 24, 24, 24)))
def threshold(): return Odd(lambda conv, x: conv(x) > 0, 1)
def classes(): return Odd(lambda conv, x: conv(x).argmax(1))

def only_where_asked(): return Odd(lambda conv, x: conv(x.reshape(len(x), 1, 6, 24, 20)))

def only_anisotropic():
    net = Odd(lambda conv, x: conv(x.reshape(len(x), 1, 6, 24, 24)))
    net.volpipe = dict(fixed=(6, 24, 24))
    return net

class Places(nn.Module):
    """Adds something of its own to each place of a window of 16 voxels."""
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.places = nn.Conv3d(1, 2, 3, padding=1), nn.Parameter(torch.randn(1, 2, 16, 16, 16))
    def forward(self, x):
        return self.conv(x) + self.places

def complex_numbers(): return Odd(lambda conv, x: torch.fft.fftn(conv(x), dim=(2, 3, 4)))
def sparse(): return Odd(lambda conv, x: conv(x).to_sparse())
def no_channel_axis(): return Odd(lambda conv, x: conv(x[:, None]) if x.ndim == 4 else 1 / 0)
def channels_last(): return Odd(lambda conv, x: conv(x.permute(0, 4, 1, 2, 3)))
def lazy(): return nn.Sequential(nn.LazyConv3d(2, 3))
def vector(): return Odd(lambda conv, x: conv(x).mean((2, 3, 4)))
def text(): return Odd(lambda conv, x: "no")
def lacking(): return Odd(lambda conv, x: __import__("nowhere_to_be_found"))
def noisy(): return Odd(lambda conv, x: nn.functional.dropout(conv(x), 0.5))
'''
SHAPE = (11, 29, 34)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.py").write_text(NETS)
    write_volume(tmp_path / "in.n5", noise(SHAPE).astype(np.float32) / 255)
    return tmp_path


def ran(*settings: str) -> np.ndarray:
    """Return the output (c, z, y, x) of a run over the volume of the folder."""
    plan = vp.plan("in.n5/raw", out="out.zarr", settings=["normalise.method=none", "output.levels=0", *settings])
    assert not vp.run(plan, site=Inline()).missing
    out: np.ndarray = vp.open("out.zarr").open()[...]
    return out.reshape(-1, *out.shape[-3:])


def conv_of(folder: Path, name: str) -> nn.Module:
    conv: nn.Module = build_net(NetChoice(name=f"odd.py:{name}", untrained=True), str(folder)).net.conv
    return conv.float()


def mirrored(conv: nn.Module) -> np.ndarray:
    """Return (c, z, y, x) of a convolution over the mirrored volume, slice by slice where it is one of slices."""
    grey = noise(SHAPE).astype(np.float32) / 255
    flat = isinstance(conv, nn.Conv2d)
    padded = torch.from_numpy(np.pad(grey, [(0, 0) if flat else (1, 1), (1, 1), (1, 1)], mode="reflect"))
    with torch.inference_mode():
        out = conv(padded[:, None]).movedim(1, 0) if flat else conv(padded[None, None])[0, :, 1:-1]
    inner: np.ndarray = out[..., 1:-1, 1:-1].numpy()
    return inner


@pytest.mark.parametrize(
    "name",
    [
        "nested", "attributes", "no_channels", "squeezed_windows", "and_a_vector", "half_inside", "needs_one",
        "only_anisotropic",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("model_output", "named", "squeezed", "squeezed_slices", "double_inside", "only_24")
        ),
    ],
)  # fmt: skip
def test_an_odd_net_gives_the_numbers_of_its_convolution(folder: Path, name: str) -> None:
    out, expected = ran(f"net.name=odd.py:{name}", "net.untrained=true"), mirrored(conv_of(folder, name))
    rounding = 1e-3 if name == "half_inside" else 1e-6
    np.testing.assert_allclose(out, expected, rtol=0, atol=rounding * np.ptp(expected))


def test_a_window_that_its_user_chooses_is_tried_as_the_only_one(folder: Path) -> None:
    own = ["net.name=odd.py:only_where_asked", "net.untrained=true"]
    with pytest.raises(vp.VolpipeError, match=r"takes no window of \(32, 32, 32\)"):
        ran(*own)
    out, expected = ran(*own, "windows.shape=[6,24,20]"), mirrored(conv_of(folder, "only_where_asked"))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * np.ptp(expected))


def test_sigmoids_are_no_classes(folder: Path) -> None:
    with pytest.raises(
        vp.VolpipeError, match=r"output\.activation=sigmoid says that the channels .* no exclusive classes"
    ):
        ran("net.name=odd.py:plain", "net.untrained=true", "output.kind=classes", "output.activation=sigmoid")


def test_a_net_of_one_size_that_knows_places_is_tiled_as_its_maker_does(folder: Path) -> None:
    out = ran("net.name=odd.py:Places", "net.untrained=true")  # in a volume that is smaller along z
    net = build_net(NetChoice(name="odd.py:Places", untrained=True), str(folder))
    image = torch.from_numpy(noise(SHAPE).astype(np.float32) / 255)[None, None]
    with torch.inference_mode():
        expected = sliding_window_inference(image, (16, 16, 16), 1, net, overlap=0.5, mode="gaussian")[0].numpy()
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.ptp(expected))


GEOMETRY = ("net.scale=[1,1,1]", "net.stride=[1,1,1]", "net.halo=[1,1,1]")


@pytest.mark.parametrize("name", ["threshold", "classes"])
def test_classes_of_a_net_are_numbers_where_its_sizes_are_declared(folder: Path, name: str) -> None:
    out, numbers = ran(f"net.name=odd.py:{name}", "net.untrained=true", *GEOMETRY), mirrored(conv_of(folder, name))
    expected = numbers > 0 if name == "threshold" else numbers.argmax(0)[None]
    assert (out != expected).mean() < 1e-3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "threshold",
            "no gradient comes through it, as through classes of argmax.*set net.scale, net.stride, net.halo",
        ),
        ("classes", "no gradient comes through it, as through classes of argmax.*let it return numbers from before"),
        ("complex_numbers", r"for a window \(1, 1, 32, 32, 32\) it gives complex64 numbers, \(1, 2, 32, 32, 32\); let"),
        ("sparse", r"for a window \(1, 1, 32, 32, 32\) it gives sparse_coo numbers, \(1, 2, 32, 32, 32\); let"),
        (
            "no_channel_axis",
            r"no window of \(32, 32, 32\) voxels and 1 channel, float32: .*take \(n, c, z, y, x\) of any n",
        ),
        (
            "channels_last",
            r"no window .*take \(n, c, z, y, x\) of any n, or slices \(n, c, y, x\), and nothing",
        ),
        ("lazy", "parameters whose shape its first window makes, such as 0.weight; call it once in odd.py:lazy"),
        ("vector", r"a window \(1, 1, z, y, x\) gives 2 axes, \(1, 2\); let its forward return \(n, c, z, y, x\)"),
        ("text", r"it returns str without a tensor for a window \(1, 1, 32, 32, 32\); let its forward return one"),
        ("lacking", "its code needs what is not installed: No module named 'nowhere_to_be_found'; install it"),
        ("noisy", "gives another output for the same window each time: dropout"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(vp.VolpipeError, match=sentence) as caught:
        ran(f"net.name=odd.py:{name}", "net.untrained=true")
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


class LastChannels(nn.Module):
    """A convolution (n, z, y, x, 1) -> (n, z, y, x, 2), as TensorFlow has it."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = (nn.Conv3d if dims == 3 else nn.Conv2d)(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = x.ndim - 1
        out: torch.Tensor = self.conv(x.permute(0, last, *range(1, last))).permute(0, *range(2, last + 1), 1)
        return out


@pytest.mark.parametrize("dims", [2, 3])
def test_a_graph_whose_channels_come_last_gets_them_there(folder: Path, dims: int) -> None:
    net, spaces = LastChannels(dims), "zyx"[-dims:]
    axes = {0: "n", **dict(enumerate(spaces, 1))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, which is told that there is a newer one
        torch.onnx.export(
            net, (torch.zeros(1, *[16] * dims, 1),), "last.onnx", dynamo=False, opset_version=17, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": axes, "y": axes},
        )  # fmt: skip
    np.testing.assert_allclose(ran("net.name=last.onnx"), mirrored(net.conv), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_graph_of_one_size_and_one_window_runs(folder: Path, dims: int) -> None:
    conv = LastChannels(dims).conv
    export_onnx(folder / "one.onnx", conv, (1, 1, *[16] * dims), free=False)
    np.testing.assert_allclose(ran("net.name=one.onnx"), mirrored(conv), rtol=0, atol=1e-6)


def test_files_for_two_windows_at_once_are_refused(folder: Path) -> None:
    conv = LastChannels(3).conv
    torch.export.save(torch.export.export(conv, (torch.rand(2, 1, 16, 16, 16),)), "two.pt2")
    export_onnx(folder / "two.onnx", conv, (2, 1, 16, 16, 16), free=False)
    for name in ("two.pt2", "two.onnx"):
        with pytest.raises(vp.VolpipeError, match=rf"{name} takes 2 windows at once; export it with a free batch"):
            ran(f"net.name={name}", "net.trust_model=true")
