"""Nets whose windows would disagree are refused before a run, by what they do, not by what they say of themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import Give, giver, set_each
from graphs import export_onnx
from torch import nn
from volumes import noise, write_volume
from zoo import changed, smooth

from volpipe.display import console
from volpipe.errors import PlanError, VolpipeError
from volpipe.inference.plan import Plan
from volpipe.nets import load, receptive_field
from volpipe.nets.load import describe
from volpipe.nets.net_geometry import SlowNetError
from volpipe.nets.receptive_field import TimeLimit, measure_geometry
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.workflow.prepare import prepare

# Nets by what they say and do; each sees three voxels to each side unless its name says otherwise.
NETS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, **said):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv3d(1, 2, 5, padding=2), nn.Conv3d(2, 1, 3, padding=1)
        self.volpipe = said
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
def says(kind, halo, stride=1):
    return kind(scale=(1,) * 3, stride=(stride,) * 3, halo=(halo,) * 3, out_channels=1)
class Mean(Net):
    def forward(self, x):
        return super().forward(x - x.mean())
class Excite(Net):
    def forward(self, x):
        y = self.a(x)
        return self.b(y * torch.sigmoid(y.mean((2, 3, 4), keepdim=True)))
class Pool(Net):
    def forward(self, x):
        return self.b(nn.functional.interpolate(nn.functional.max_pool3d(self.a(x), 2), scale_factor=2))
class Drop(Net):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, True)
class Hidden(Net):
    def __init__(self, **said):
        super().__init__(**said)
        self.extra = float(torch.rand(1, generator=torch.Generator().manual_seed(torch.seed() % 2**31)))
    def forward(self, x):
        return super().forward(x) + self.extra
def mean(): return Mean()
def excite(): return Excite()
def mean_says_6(): return says(Mean, 6)
def says_2(): return says(Net, 2)
def says_3(): return says(Net, 3)
def says_9(): return says(Net, 9)
def pool_says_1(): return says(Pool, 6)
def pool_says_2(): return says(Pool, 6, 2)
def drop(): return says(Drop, 3)
def hidden(): return says(Hidden, 3)
def unseeded():
    net = says(Net, 3)
    torch.seed()
    nn.init.normal_(net.a.weight)
    return net
"""
ALLOWED = "net.accept_tile_variance=true"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nets.py").write_text(NETS)
    write_volume(tmp_path / "in.n5", noise((24, 24, 24)))
    return tmp_path


def planned(folder: Path, name: str, *settings: str) -> Plan:
    recipe = load_recipe(None, [f"net.name=nets.py:{name}", "net.untrained=true", *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / "out.zarr", folder)


@pytest.mark.parametrize("name", ["mean", "excite"])
def test_a_net_that_looks_at_its_whole_window_by_code_is_tiled_at_the_edge(folder: Path, name: str) -> None:
    plan = planned(folder, name)
    assert (plan.net.halo, plan.net.tile_invariant) == ((0, 0, 0), False)
    assert (plan.lattice.placement, plan.blend) == ("edge", "gaussian")
    assert planned(folder, name, ALLOWED, "net.halo=[2,2,2]").net.halo == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mean_says_6",
            r"is declared to have a halo of \(6, 6, 6\), but it looks at its whole window: no shift along axis z",
        ),
        (
            "says_2",
            r"a halo of \(2, 2, 2\), but .* would disagree .*: it is \(3, 3, 3\); set net\.halo=\[3, 3, 3\]",
        ),
        (
            "pool_says_1",
            r"a stride of \(1, 1, 1\), but .* would disagree .*: it is \(2, 2, 2\); set net\.stride=",
        ),
    ],
)
def test_what_a_net_says_of_itself_is_looked_at(folder: Path, name: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planned(folder, name)
    planned(folder, name, ALLOWED)


def test_halos_that_are_exact_or_larger_pass_and_are_remembered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("says_3", "says_9", "pool_says_2"):
        planned(folder, name)
    monkeypatch.setattr(load, "find_disagreement", lambda *arguments: pytest.fail("it was looked at again"))
    for name in ("says_3", "says_9", "pool_says_2"):
        planned(folder, name)
    (folder / "nets.py").write_text(NETS + "# edited\n")
    monkeypatch.setattr(load, "find_disagreement", lambda *arguments: "halo along z")
    with pytest.raises(PlanError, match="halo"):
        planned(folder, "says_3")


@pytest.mark.parametrize("name", ["says_3", pytest.param("pool_says_2", marks=pytest.mark.long)])
def test_a_recipe_may_not_say_less_than_is_so(folder: Path, name: str) -> None:
    with pytest.raises(PlanError, match=r"a halo of \(1, 1, 1\), but with that its windows would disagree"):
        planned(folder, name, "net.halo=[1,1,1]", "net.stride=[1,1,1]")
    identity = load_recipe(None, ["net.name=shift", "net.options={offset=[2,0,0]}", "net.halo=[1,0,0]"])
    with pytest.raises(PlanError, match=r"net\.halo \(1, 0, 0\) is less than the halo \(2, 0, 0\) of net shift"):
        prepare(str(folder / "in.n5"), identity, folder / "out.zarr", folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("drop", "net drop gives another output for the same window each time: dropout"),
        ("hidden", "net hidden differs from one call of its function to the next, beside its weights"),
        ("unseeded", r"draws other weights at each call of its function \(\w{8}… and \w{8}…\).* torch\.manual_seed"),
    ],
)
@pytest.mark.parametrize("more", [(), (ALLOWED,)])
def test_a_net_that_is_not_the_same_twice_is_refused(
    folder: Path, name: str, words: str, more: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError, match=words):
        planned(folder, name, *more)


def test_a_graph_that_declares_too_little_is_refused(folder: Path) -> None:
    export_onnx(folder / "net.onnx", nn.Conv3d(1, 1, 5, padding=2), (1, 1, 12, 12, 12), free=False)
    said = ["net.name=net.onnx", "net.stride=[1,1,1]", "net.scale=[1,1,1]", "net.out_channels=1"]
    with pytest.raises(
        PlanError, match=r"a halo of \(1, 1, 1\), but with that its windows would disagree .*\(2, 2, 2\)"
    ):
        prepare(str(folder / "in.n5"), load_recipe(None, [*said, "net.halo=[1,1,1]"]), folder / "out.zarr", folder)
    plan = prepare(str(folder / "in.n5"), load_recipe(None, [*said, "net.halo=[2,2,2]"]), folder / "o.zarr", folder)
    assert plan.net.halo == (2, 2, 2)


# --- measuring ends


class Flat(nn.Module):
    """A net of slices that pools by four and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.interpolate(nn.functional.max_pool2d(self.first(x), 4), scale_factor=4.0)
        out: torch.Tensor = self.second(y)
        return out


def test_a_graph_of_fixed_slices_is_measured_slice_by_slice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_onnx(folder / "flat.onnx", Flat(), (1, 1, 128, 128), free=False)
    voxels = 0
    plain = receptive_field.run_net

    def counted(net: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
        nonlocal voxels
        voxels += windows.numel()
        return plain(net, windows)

    for module in ("volpipe.nets.receptive_field", "volpipe.nets.receptive_field_probe"):
        monkeypatch.setattr(f"{module}.run_net", counted)
    facts = describe(NetChoice(name="flat.onnx"), str(folder))
    # y, x: one voxel of the second convolution, up to three to the end of a pool, one of the first
    assert (facts.stride, facts.halo, facts.fixed) == ((1, 4, 4), (0, 5, 5), (0, 128, 128))
    assert voxels < 80 * 128**2  # of 32 slices each, and 8 of them for each plane, it was 5,000


class Clock:
    """Seconds that go by with each look at it."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_measuring_ends_in_time_and_says_what_is_known_and_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "volpipe.nets.receptive_field")
    with pytest.raises(SlowNetError) as caught:
        measure_geometry(Flat3d, 1, TimeLimit(clock=Clock(2.0), wall=Clock(2.0)))
    assert re.fullmatch(
        r"measuring took more than 60 s of processor time; "
        r"known so far: scale \(1, 1, 1\), stride along z 1.*; missing: .*halo along x",
        str(caught.value),
    )
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "measures the scale of the net, 0 s of 60 s of processor time; known so far: nothing"
    assert len(lines) == 30  # one look at the clock is to see whether it is late
    assert "known so far: scale (1, 1, 1), stride along z 1" in lines[-1]


def test_a_busy_machine_refuses_no_net_that_takes_little_of_its_processor() -> None:
    facts = measure_geometry(Flat3d, 1, TimeLimit(clock=Clock(0.1), wall=Clock(2.0)))  # a minute goes by in 30 windows
    assert (facts.stride, facts.halo) == ((1, 4, 4), (0, 5, 5))
    with pytest.raises(SlowNetError, match="measuring took more than 1200 s; known so far"):
        measure_geometry(Flat3d, 1, TimeLimit(clock=Clock(0.0), wall=Clock(30.0)))


def test_the_time_of_measuring_is_that_of_a_processor() -> None:
    watch = TimeLimit()
    started, wall = watch.clock(), watch.wall()
    time.sleep(0.3)
    assert watch.clock() - started < 0.1 < 0.3 <= watch.wall() - wall


class Flat3d(nn.Module):
    """The same net as one of three dimensions, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Flat()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, z, y, w = x.shape
        out: torch.Tensor = self.inner(x.movedim(2, 1).reshape(n * z, c, y, w)).reshape(n, z, -1, y, w).movedim(1, 2)
        return out


def test_a_net_that_is_too_slow_is_refused_with_the_keys_to_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(folder, monkeypatch, capsys)
    (folder / "nets.py").write_text(NETS + "    \nclass Slow(Net):\n    def forward(self, x):\n"
                                    "        import time\n        stop = time.thread_time() + 0.02\n"
                                    "        while time.thread_time() < stop: pass\n        return super().forward(x)\n"
                                    "def slow(): return Slow()\n")  # fmt: skip
    monkeypatch.setattr(console, "PLAIN_LINE_SECONDS", 0.0)
    monkeypatch.setattr(TimeLimit, "__init__", short(TimeLimit.__init__))
    started = time.monotonic()
    for command in (["plan", "--quick"], ["net"]):
        place = ["nets.py:slow"] if command == ["net"] else ["in.n5", *set_each("net.name=nets.py:slow")]
        ended = give(*command, *place, *set_each("net.untrained=true"))
        assert ended.code == 2
        assert "measuring took more than 0 s of processor time; known so far: scale (1, 1, 1)" in ended.err
        assert "set net.scale, net.stride, net.halo, which it does not declare" in ended.err
        assert "measures the scale of the net, 0 s of 0 s of processor time" in ended.err
    assert time.monotonic() - started < 30


def short(plain: Callable[..., None]) -> Callable[..., None]:
    def init(watch: TimeLimit) -> None:
        plain(watch, most_seconds=0.2)

    return init


@pytest.mark.parametrize("broken", [{"source": "https://example.org/net.pt"}, {"sha256": "0" * 64}])
def test_a_package_runs_by_the_weights_that_are_there(folder: Path, broken: dict[str, str]) -> None:
    package = smooth(folder / "package")
    other = {"source": "net.pt", "pytorch_version": "2.6", "sha256": "0" * 64} | broken
    changed(package, lambda said: said["weights"].update(torchscript=other))
    assert describe(NetChoice(name=str(package)), str(folder)).halo == (1, 3, 3)
    with pytest.raises(VolpipeError, match=r"is on the web|net\.pt is missing"):
        describe(NetChoice(name=str(package), options={"weights": "torchscript"}, trust_model=True), str(folder))
    first = {"source": "https://example.org/net.onnx", "opset_version": 17}
    changed(package, lambda said: said["weights"].update(onnx=first))
    with pytest.raises(VolpipeError, match=r"on the web|missing|is code"):
        describe(NetChoice(name=str(package)), str(folder))
