"""Nets as people have them: what is measured of them, and that their tiles are those of the whole, by plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import giver, set_each
from graphs import export_onnx, write_graph
from onnx import helper
from test_trust import script
from torch import nn

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import align_up
from volpipe.nets.facts import NetFacts
from volpipe.nets.load import build_net, check_geometry, check_shapes, describe
from volpipe.nets.net_geometry import NetArray
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import load_function

NETS = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

class Pair(nn.Sequential):
    def __init__(self, ins, outs, pad=0, dims=3):
        conv = nn.Conv3d if dims == 3 else nn.Conv2d
        super().__init__(conv(ins, outs, 3, padding=pad), nn.ReLU(), conv(outs, outs, 3, padding=pad), nn.ReLU())

def cropped(data, size):
    for axis, n in enumerate(size, 2):
        data = data.narrow(axis, (data.shape[axis] - n) // 2, n)
    return data

class ValidUNet(nn.Module):
    """Without padding, with cropped skips; `even` crops so that the output keeps its grid, and refuses odd pools."""
    def __init__(self, factors, even, channels=2):
        super().__init__()
        widths = [2 * 2**level for level in range(len(factors) + 1)]
        self.factors, self.even = factors, even
        self.down = nn.ModuleList(Pair(a, b) for a, b in zip([1, *widths], widths))
        self.up = nn.ModuleList(Pair(a + b, a) for a, b in zip(widths, widths[1:]))
        self.head = nn.Conv3d(widths[0], channels, 1)

    def forward(self, x):
        skips = []
        for level, down in enumerate(self.down):
            if level:
                factor = self.factors[level - 1]
                if self.even and any(n % f for n, f in zip(x.shape[2:], factor)):
                    raise RuntimeError(f"Can not downsample shape {tuple(x.shape)} with factor {factor}")
                x = F.max_pool3d(x, factor)
            x = down(x)
            skips.append(x)
        skips.pop()
        for level in reversed(range(len(self.factors))):
            x = F.interpolate(x, scale_factor=tuple(map(float, self.factors[level])))
            if self.even:
                total = [1, 1, 1]
                for factor in self.factors[level:]:
                    total = [a * b for a, b in zip(total, factor)]
                x = cropped(x, [(n - 4) // t * t + 4 for n, t in zip(x.shape[2:], total)])
            x = self.up[level](torch.cat([cropped(skips[level], x.shape[2:]), x], 1))
        return self.head(x)

class PaddedUNet(nn.Module):
    def __init__(self, dims=3, ins=1, norm=nn.Identity):
        super().__init__()
        self.first, self.second, self.last = Pair(ins, 4, 1, dims), Pair(4, 8, 1, dims), Pair(12, 4, 1, dims)
        self.norm, self.head = norm(4), (nn.Conv3d if dims == 3 else nn.Conv2d)(4, 3, 1)
        self.pool = F.max_pool3d if dims == 3 else F.max_pool2d
    def features(self, x):
        a = self.norm(self.first(x))
        return self.last(torch.cat([a, F.interpolate(self.second(self.pool(a, 2)), scale_factor=2.0)], 1))
    def forward(self, x):
        return self.head(self.features(x))

class Slices(PaddedUNet):
    def forward(self, x):
        h = self.features(x)
        return {"sem_logits": self.head(h), "ctr": {"hmp": h[:, :1], "offsets": h[:, 1:3]}, "score": h.mean((2, 3))}

class Supervised(PaddedUNet):
    def forward(self, x):
        h = self.features(x)
        return [self.head(h), self.head(F.avg_pool3d(h, 2)), self.head(F.avg_pool3d(h, 4))]

class UnevenPair(PaddedUNet):
    def forward(self, x):
        h = self.head(self.features(x))
        return h, h[:, :, 1:]

@dataclass
class Maps:
    affinities: torch.Tensor
    shape: torch.Tensor

class Multitask(PaddedUNet):
    def forward(self, x):
        h = self.features(x)
        return Maps(self.head(h), h[:, :2])

class InPlace(PaddedUNet):
    def forward(self, x):
        x.mul_(0.5).add_(1)
        return super().forward(x)

class Extreme(PaddedUNet):
    def forward(self, x):
        return super().forward(x) / x.amax((2, 3, 4), keepdim=True).clamp(min=1e-3)

def seeded(make, *args, **named):
    torch.manual_seed(0)
    return make(*args, **named)

def stack(*layers): return seeded(nn.Sequential, *layers)
def conv(*args): return nn.Conv3d(*args)
def convolutions(): return seeded(lambda: stack(conv(1, 3, (3, 5, 1)), nn.ReLU(), conv(3, 2, (1, 3, 3))))
def valid_unet(): return seeded(ValidUNet, [(2, 2, 2), (2, 2, 2)], False)
def lsd(): return seeded(ValidUNet, [(1, 3, 3), (1, 3, 3)], True, 10)
def cellmap(): return seeded(ValidUNet, [(2, 2, 2), (2, 2, 2)], True, 14)
def even(): return seeded(conv, 1, 2, 2)
def half_padded(): return seeded(lambda: stack(conv(1, 3, 3, 1, (1, 0, 0)), nn.ReLU(), conv(3, 2, 3, 1, (1, 0, 1))))
def finer(): return nn.ConvTranspose3d(3, 2, (4, 1, 1), (4, 1, 1))
def valid_finer(): return seeded(lambda: stack(conv(1, 3, 5), nn.ReLU(), finer()))
def encoder(): return seeded(lambda: stack(conv(1, 3, 3, 2, 1), nn.ReLU(), conv(3, 2, 3, (1, 2, 2), 1)))
def in_plane(): return seeded(lambda: stack(conv(1, 3, 3, 1, 1), nn.ReLU(), nn.AvgPool3d((1, 2, 2))))
def thirds(): return seeded(lambda: stack(conv(1, 3, 3, (1, 3, 3), 1), nn.ReLU(), conv(3, 1, 3, 1, 1)))
def valid_encoder(): return seeded(lambda: stack(conv(1, 3, 3, (1, 2, 2)), nn.ReLU(), conv(3, 2, 3)))
def unet(): return seeded(PaddedUNet)
def unet2d(): return seeded(Slices, 2)
def context(): return seeded(PaddedUNet, 2, 5)
def valid2d(): return seeded(lambda: stack(nn.Conv2d(1, 3, 5), nn.ReLU(), nn.Conv2d(3, 2, 3)))
def supervised(): return seeded(Supervised)
def uneven_pair(): return seeded(UnevenPair)
def multitask(): return seeded(Multitask)
def two_channels(): return seeded(PaddedUNet, 3, 2)
def in_place(): return seeded(InPlace)
def halved(): return seeded(lambda: conv(1, 2, 3, 1, 1).half())
def instance(): return seeded(PaddedUNet, norm=nn.InstanceNorm3d)
def extreme(): return seeded(Extreme)
def nothing():
    net = PaddedUNet()
    net.forward = lambda x: {"loss": None}
    return net
'''


@dataclass(frozen=True)
class Expected:
    """Facts by pencil, in voxels (z, y, x), of those that are not the usual."""

    margin: Sequence[int] = (0, 0, 0)
    stride: Sequence[int] = (1, 1, 1)
    remainder: Sequence[int] = (0, 0, 0)
    scale: Sequence[int] = (1, 1, 1)
    shrink: Sequence[int] = (1, 1, 1)
    channels: tuple[int, int] = (1, 2)
    more_halo: Sequence[int] = (0, 0, 0)  # beyond the margin


EXPECTED: dict[str, Expected] = {
    "convolutions": Expected((1, 3, 1)),
    "valid_unet": Expected((20, 20, 20), (4, 4, 4)),  # 4 convolutions at full size, 4 at half, 2 at a quarter
    # A window of 9 b + 52 becomes b at a ninth, 3 b - 6 at a third and 9 b - 27: it loses 39 before and 40 behind.
    "lsd": Expected((10, 40, 40), (1, 9, 9), (0, 7, 7), channels=(1, 10)),
    "cellmap": Expected((20, 20, 20), (4, 4, 4), channels=(1, 14)),
    "even": Expected((1, 1, 1)),
    "half_padded": Expected((0, 2, 1), more_halo=(2, 0, 1)),
    "valid_finer": Expected((2, 2, 2), scale=(4, 1, 1)),
    "encoder": Expected(stride=(2, 4, 4), shrink=(2, 4, 4), more_halo=(3, 3, 3)),
    "in_plane": Expected(stride=(1, 2, 2), shrink=(1, 2, 2), channels=(1, 3), more_halo=(1, 1, 1)),
    "thirds": Expected(stride=(1, 3, 3), shrink=(1, 3, 3), channels=(1, 1), more_halo=(2, 4, 4)),
    "valid_encoder": Expected((2, 3, 3), (1, 2, 2), shrink=(1, 2, 2)),
    "two_channels": Expected(stride=(2, 2, 2), channels=(2, 3), more_halo=(9, 9, 9)),
    "in_place": Expected(stride=(2, 2, 2), channels=(1, 3), more_halo=(9, 9, 9)),
    "halved": Expected(more_halo=(1, 1, 1)),
}
# Whose sizes are of one kind with those of another: with -m long.
ALIKE = {"convolutions", "valid_unet", "cellmap", "encoder", "thirds", "in_place"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "brought.py").write_text(NETS)
    return tmp_path


def check(facts: NetFacts, expected: Expected) -> None:
    found = (facts.margin, facts.stride, facts.remainder, facts.scale, facts.shrink)
    assert found == (expected.margin, expected.stride, expected.remainder, expected.scale, expected.shrink)
    assert (facts.in_channels, facts.out_channels) == expected.channels
    assert facts.halo == tuple(m + more for m, more in zip(expected.margin, expected.more_halo, strict=True))
    assert facts.tile_invariant


def check_tiles(own: nn.Module, choice: NetChoice, facts: NetFacts, folder: Path) -> None:
    """Compare a tile with the net's own output for the whole, away from faces as far as the facts say."""
    net = build_net(choice, str(folder))
    axes = list(zip(facts.margin, facts.stride, facts.remainder, facts.halo, facts.scale, facts.shrink, strict=True))
    tile = [r + align_up(2 * h + 5 * s - r, s) for _, s, r, h, _, _ in axes]
    shift = [s * math.ceil(5 / s) for _, s, *_ in axes]
    whole = torch.rand(1, facts.in_channels, *(t + 2 * a for t, a in zip(tile, shift, strict=True)))
    inner = [(h - m + s - 1) // s * s for m, s, _, h, _, _ in axes]
    with torch.inference_mode():
        due, cut = own(whole.clone()), whole
        for axis, odd in enumerate((n - m) % 2 for n, m in zip(whole.shape[2:], due.shape[2:], strict=True)):
            if odd and facts.scale[axis] == facts.shrink[axis] == 1:  # it lacks one more behind
                due = due.narrow(2 + axis, 1, due.shape[2 + axis] - 1)
        for axis, (start, size) in enumerate(zip(shift, tile, strict=True), 2):
            cut = cut.narrow(axis, start, size)
        out = net(cut.contiguous())
    assert out.shape[2:] == tuple((t - 2 * m) * s // r for t, (m, _, _, _, s, r) in zip(tile, axes, strict=True))
    for axis, (inside, start, size, (m, _, _, _, scale, shrink)) in enumerate(
        zip(inner, shift, tile, axes, strict=True), 2
    ):
        count = (size - 2 * m - 2 * inside) * scale // shrink
        out = out.narrow(axis, inside * scale // shrink, count)
        due = due.narrow(axis, (start + inside) * scale // shrink, count)
    assert float(due.std()) > 0
    torch.testing.assert_close(out, due, rtol=0, atol=2e-6 * float(due.abs().max()))


def own_net(folder: Path, name: str) -> nn.Module:
    """Return the net as its maker's code builds it."""
    net: nn.Module = load_function("brought.py:" + name, str(folder))().float().eval()
    return net


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in EXPECTED])
def test_a_net_is_measured_and_its_tiles_are_those_of_the_whole(folder: Path, name: str) -> None:
    choice = NetChoice(name=f"brought.py:{name}", untrained=True)
    facts = describe(choice, str(folder))
    check(facts, EXPECTED[name])
    check_tiles(own_net(folder, name), choice, facts, folder)
    check_geometry(choice, facts, facts.window, str(folder))
    check_shapes(choice, facts, facts.window, str(folder))


def saved(folder: Path, name: str, kind: str) -> NetChoice:
    """Return the choice of a file of `kind` with the net `name`."""
    net, shape = own_net(folder, name), (2, 1, 72, 72, 72)
    shape = shape if "2d" not in name else (2, 1, 64, 64)
    path = folder / f"net.{kind}"
    if kind == "onnx":
        export_onnx(path, net, shape)
    elif kind == "pt":
        script(path, net)
    else:
        sizes = dict.fromkeys((0, *range(2, len(shape))), torch.export.Dim.AUTO)
        torch.export.save(torch.export.export(net, (torch.rand(shape),), dynamic_shapes=(sizes,)), path)
    return NetChoice(name=path.name, trust_model=kind != "onnx")


FILES = {("convolutions", "onnx"), ("encoder", "pt"), ("encoder", "onnx"), ("valid2d", "pt2")}  # the others: -m long


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.long] * ((name, kind) not in FILES))
        for name in ("convolutions", "encoder", "valid2d")
        for kind in ("pt", "pt2", "onnx")
    ],
)
def test_a_net_in_a_file_is_measured_as_its_module_is(folder: Path, name: str, kind: str) -> None:
    facts = describe(NetChoice(name=f"brought.py:{name}", untrained=True), str(folder))
    choice = saved(folder, name, kind)
    ignored = {"label", "weights_sha256", "num_parameters", "identity"}
    found = describe(choice, str(folder))
    assert found.model_dump(exclude=ignored) == facts.model_dump(exclude=ignored)
    if name != "valid2d":
        check_tiles(own_net(folder, name), choice, found, folder)


def test_a_valid_u_net_of_onnx_is_measured(folder: Path) -> None:
    choice = saved(folder, "valid_unet", "onnx")
    check(describe(choice, str(folder)), EXPECTED["valid_unet"])


# --- nets of slices


def of_slices(net: nn.Module, volume: np.ndarray, plane: str, key: str | None = None) -> np.ndarray:
    """Return (C, z, y, x) of a net that runs over each slice (c, rows, columns) of a volume (c, z, y, x) by itself."""
    axis = {"yx": 1, "zx": 2, "zy": 3}[plane]
    with torch.inference_mode():
        outs = [net(torch.from_numpy(part[None].copy())) for part in np.moveaxis(volume, axis, 0)]
    return np.stack([(out[key] if key else out)[0].numpy() for out in outs], axis)


@pytest.mark.parametrize(
    "planes",
    [*(pytest.param((plane,), marks=pytest.mark.long) for plane in ("yx", "zx", "zy")), ("yx", "zx", "zy")],
)
def test_a_net_of_slices_runs_over_each_slice_of_a_plane(folder: Path, planes: tuple[str, ...]) -> None:
    choice = NetChoice(name="brought.py:unet2d", untrained=True, output="sem_logits", plane=planes)
    facts = describe(choice, str(folder))
    halo = {"yx": (0, 9, 9), "zx": (9, 0, 9), "zy": (9, 9, 0)}
    assert facts.halo == tuple(max(sizes) for sizes in zip(*(halo[plane] for plane in planes), strict=True))
    assert (facts.planes, facts.out_channels, facts.in_channels) == (planes, 3, 1)
    volume = np.random.default_rng(0).random((1, 8, 12, 10)).astype(np.float32)
    net = own_net(folder, "unet2d")
    due = np.mean([of_slices(net, volume, plane, "sem_logits") for plane in planes], axis=0)
    out = build_net(choice, str(folder))(torch.from_numpy(volume)[None])
    np.testing.assert_allclose(out[0], due, atol=1e-6)


def test_a_net_of_neighbouring_slices_gets_them_as_channels(folder: Path) -> None:
    choice = NetChoice(name="brought.py:context", untrained=True, context=2)
    facts = describe(choice, str(folder))
    assert (facts.in_channels, facts.halo, facts.context) == (1, (2, 9, 9), 2)
    volume = np.random.default_rng(0).random((7, 8, 10)).astype(np.float32)
    out = build_net(choice, str(folder))(torch.from_numpy(volume)[None, None])[0]
    with torch.inference_mode():
        due = own_net(folder, "context")(torch.from_numpy(volume[None, 1:6]))[0]  # of slice 3, and two to each side
    np.testing.assert_allclose(out[:, 3], due, atol=1e-6)


def test_slices_of_a_net_without_padding_keep_their_plane(folder: Path) -> None:
    choice = NetChoice(name="brought.py:valid2d", untrained=True, plane="zy")
    facts = describe(choice, str(folder))
    assert (facts.margin, facts.halo, facts.stride) == ((3, 3, 0), (3, 3, 0), (1, 1, 1))
    volume = np.random.default_rng(0).random((1, 16, 17, 5)).astype(np.float32)
    due = of_slices(own_net(folder, "valid2d"), volume, "zy")
    np.testing.assert_allclose(build_net(choice, str(folder))(torch.from_numpy(volume)[None])[0], due, atol=1e-6)


# --- several outputs


@pytest.mark.parametrize(
    ("name", "output", "channels", "arrays"),
    [
        ("supervised", None, 3, ()),
        pytest.param("supervised", 0, 3, (), marks=pytest.mark.long),
        ("multitask", "shape", 2, ()),
        pytest.param("multitask", 0, 3, (), marks=pytest.mark.long),
        pytest.param(
            "multitask", "all", 5, (NetArray("affinities", 0, 3), NetArray("shape", 3, 5)), marks=pytest.mark.long
        ),
        ("supervised", "all", 9, tuple(NetArray(str(i), 3 * i, 3 * i + 3, (2**i,) * 3) for i in range(3))),
        ("unet2d", "ctr.offsets", 2, ()),
    ],
)
def test_one_of_several_outputs_is_taken(
    folder: Path, name: str, output: int | str | None, channels: int, arrays: tuple[NetArray, ...]
) -> None:
    choice = NetChoice(name=f"brought.py:{name}", untrained=True, output=output)
    facts = describe(choice, str(folder))
    assert (facts.out_channels, facts.arrays) == (channels, arrays)
    assert len(facts.outputs) > 1


def test_one_output_of_a_graph_is_taken_by_name(folder: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    write_graph(folder / "two.onnx", nodes, outputs=("y", "z"))
    window = torch.rand(1, 1, 4, 4, 4)
    out = build_net(NetChoice(name="two.onnx", output="z"), str(folder))(window)
    assert torch.equal(out, -window)
    with pytest.raises(VolpipeError, match=r"gives 2 outputs .*: y \(1, .*, z \(1, .*such as net\.output=y"):
        describe(NetChoice(name="two.onnx"), str(folder))


# --- nets that look at their whole window, and what is refused


@pytest.mark.parametrize(("name", "channels"), [("instance", 3), ("extreme", 3)])
def test_a_net_that_looks_at_its_whole_window_has_its_channels_and_sizes_measured(
    folder: Path, name: str, channels: int
) -> None:
    facts = describe(NetChoice(name=f"brought.py:{name}", untrained=True), str(folder))
    assert not facts.tile_invariant
    assert (facts.in_channels, facts.out_channels, facts.scale, facts.stride) == (1, channels, (1, 1, 1), (2, 2, 2))


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (
            {"name": "brought.py:multitask"},
            r"gives 2 outputs for a window \(1, 32, 32, 32\): affinities \(3, 32, 32, 32\), shape \(2, 32, 32, 32\); "
            "name the one to take, such as net.output=affinities",
        ),
        ({"name": "brought.py:multitask", "output": "shapes"}, r"no output 'shapes' \(did you mean 'shape'\?\); it"),
        ({"name": "brought.py:uneven_pair", "output": "all"}, "its outputs have different grids: 0 .*; net.output=all"),
        ({"name": "brought.py:unet", "plane": "zx"}, "is a net of volumes .* leave net.plane out"),
        ({"name": "brought.py:context", "context": 1}, "takes no window .* expected input"),
        ({"name": "brought.py:nothing"}, "it returns dict without a tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_by_what_was_found(folder: Path, choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(VolpipeError, match=sentence) as caught:
        describe(NetChoice(**choice, untrained=True), str(folder))
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_prints_what_a_net_takes_and_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(folder, monkeypatch, capsys)
    ended = give("net", "brought.py:valid_encoder", "--no-costs")
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.split())
    assert "1 → 2 channels it is a net of volumes a window (1, 32, 32, 32) gives (2, 28, 13, 13); it takes" in words
    assert "windows of 5, 6, 7, … along z; 8, 10, 12, … along y; 8, 10, 12, … along x (voxels)" in words
    assert "halo 2 × 3 × 3 keeps errors below 0.0039" in words
    assert "scale 1 1/2 1/2" in words and "margin 2 3 3 2 × 3 × 3" in words
    ended = give("net", "brought.py:unet2d", "--no-costs", *set_each("net.output=ctr.hmp", "net.plane=zy"))
    words = " ".join(ended.out.split())
    assert "it is a net of slices (zy)" in words and "it takes windows of multiples of " in words
    assert "it gives 4 outputs: sem_logits (3, " in words and "; ctr.hmp is taken" in words
