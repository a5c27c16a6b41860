"""What is measured of nets from outside, against what they are made of, and `volpipe net`, which prints it."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Ended, Give, giver
from nets import run as run_net
from test_halos import NETS
from torch import nn
from volumes import noise, write_volume

from volpipe.errors import VolpipeError
from volpipe.estimation import measure, window_search
from volpipe.estimation.halo_search import halo_errors, real_window
from volpipe.estimation.measure import arithmetics_here, processor
from volpipe.estimation.window_search import windows_to_try
from volpipe.models.unet3d import unet3d
from volpipe.nets.cache import known_speeds
from volpipe.nets.facts import FLOAT32, NetSpeeds, WindowSpeed, WindowSpeeds
from volpipe.nets.load import describe
from volpipe.nets.net_geometry import Geometry
from volpipe.nets.receptive_field import measure_geometry
from volpipe.recipes.inference import NetChoice, load_recipe
from volpipe.volumes.volume import open_volume

SOME = (
    "identity",
    "shift-y",
    "upsample-linear",
    "unet-one-level",
    "unet-anisotropic",
    "unet-residual",
    "superres-2",
    "z4-1",
)

# Two convolutions, one that looks two voxels back along z alone, a pool and its way back; it says nothing of itself.
SILENT = """
import torch
from torch import nn
class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(1, 2, (3, 1, 1))
        self.second = nn.Conv3d(2, 1, 3, padding=1)
    def forward(self, x):
        y = self.first(nn.functional.pad(x, (0, 0, 0, 0, 2, 0)))
        y = nn.functional.max_pool3d(y, (1, 1, 2))
        return self.second(nn.functional.interpolate(y, scale_factor=(1, 1, 2)))
def build(seed=3):
    torch.manual_seed(seed)
    return Silent().eval()
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "net.py").write_text(SILENT)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", SOME)
def test_scale_stride_and_halo_of_shipped_nets_are_found_by_the_gradient(name: str) -> None:
    net = NETS[name]()
    found = measure_geometry(NETS[name], net.volpipe["in_channels"])
    own = net.volpipe
    assert (found.scale, found.stride, found.halo) == (own["scale"], own["stride"], own["halo"])


def test_a_net_that_looks_to_one_side_has_a_field_on_that_side() -> None:
    found = measure_geometry(NETS["shift-y"])
    assert (found.before, found.after, found.halo, found.receptive_field) == (
        (0, 0, 0),
        (0, 3, 0),
        (0, 3, 0),
        (1, 4, 1),
    )


def test_measuring_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(1)
    due = torch.rand(3)
    torch.manual_seed(1)
    measure_geometry(NETS["unet-one-level"])
    assert torch.equal(torch.rand(3), due)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()


class Shrinking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 1:-1, 1:-1, 1:-1]


def test_a_net_that_looks_at_its_whole_window_says_why() -> None:
    found = measure_geometry(Attention)
    assert "no shift along axis z by up to 64 voxels leaves the output as it is" in found.whole_window


def test_a_net_that_crops_has_a_margin() -> None:
    found = measure_geometry(Shrinking)
    assert (found.margin, found.halo, found.stride, found.whole_window) == ((1, 1, 1), (1, 1, 1), (1, 1, 1), "")


FAULTS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, last, channels=1, size=3):
        super().__init__()
        torch.manual_seed(1)
        self.last, self.conv = last, nn.Conv3d(channels, 1, size, padding=size // 2)
    def forward(self, x):
        return self.last(self.conv(x))
class Blind(Net):
    def forward(self, x):
        return x * 0 + 1
def pair(): return Net(lambda y: (y, y))
def two(): return Net(lambda y: y, channels=2)
def flat(): return Net(lambda y: y.mean((3, 4)))
def shrinks(): return Net(lambda y: y[..., 1:-1])
def mean(): return Net(lambda y: y - y.mean())
def cut(): return Net(lambda y: y.detach())
def blind(): return Blind(None)
def rounds(): return Net(lambda y: y.round())
def deep(): return nn.Sequential(*(nn.Conv3d(1, 1, (3, 1, 1), padding=(1, 0, 0)) for _ in range(120)), nn.Sigmoid())
def far(): return Net(lambda y: y + y.flip(4).cumsum(4).flip(4) * 1e-9)
"""
KEYS = "set net.scale, net.stride, net.halo, which it does not declare"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pair", ["it gives 2 outputs for a window (1, 32, 32, 32)", "such as net.output=0"]),
        ("flat", ["gives 3 axes, (1, 1, 32); let its forward return (n, c, z, y, x)"]),
        (
            "blind",
            ["no input voxel acts on output voxel", "a threshold, argmax or rounding, which hide it; or " + KEYS],
        ),
    ],
)
def test_each_fault_of_a_net_has_its_own_sentence_that_says_what_to_write(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    with pytest.raises(VolpipeError) as caught:
        describe(NetChoice(name=f"faults.py:{name}"), str(tmp_path))
    assert str(caught.value).startswith(f"net faults.py:{name}: ")
    assert [part for part in words if part not in str(caught.value)] == []
    assert "{" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "channels"),
    [("mean", 1), ("far", 1), ("two", 2), ("shrinks", 1), ("rounds", 1), ("deep", 1), ("cut", 1)],
)
def test_what_no_key_gives_is_measured(tmp_path: Path, name: str, channels: int) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    facts = describe(NetChoice(name=f"faults.py:{name}"), str(tmp_path))
    assert (facts.in_channels, facts.tile_invariant) == (channels, name not in ("mean", "far"))
    assert not facts.tile_invariant or facts.halo == ((120, 0, 0) if name == "deep" else (1, 1, 1))


def test_a_declared_net_that_returns_a_tuple_is_refused_with_the_key_to_set(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((20, 24, 28)))
    (tmp_path / "faults.py").write_text(FAULTS)
    keys = ["net.scale=[1,1,1]", "net.stride=[1,1,1]", "net.halo=[1,1,1]", "net.out_channels=1", "net.untrained=true"]
    settings = [part for key in ("net.name=faults.py:pair", *keys) for part in ("--set", key)]
    ended = give("plan", "--quick", *settings, "in.n5")
    assert ended.code == 2
    assert "net pair: it gives 2 outputs for a window" in ended.err and "such as net.output=0" in ended.err


@pytest.mark.parametrize("name", ["faults.py", "./faults.py"])
def test_a_python_file_without_a_function_is_refused_with_the_functions_that_it_has(tmp_path: Path, name: str) -> None:
    (tmp_path / "faults.py").write_text(
        "raise RuntimeError('it is not run')\ndef one(): ...\ndef _no(): ...\nclass Two: ..."
    )
    with pytest.raises(VolpipeError, match=rf"set net.name={re.escape(name)}:one; it has one, Two$"):
        describe(NetChoice(name=name), str(tmp_path))
    (tmp_path / "faults.py").write_text("x = 1")
    with pytest.raises(VolpipeError, match=rf"set net.name={re.escape(name)}:FUNCTION; it has none: define one"):
        describe(NetChoice(name=name), str(tmp_path))
    (tmp_path / "faults.py").unlink()
    with pytest.raises(VolpipeError, match=r"no Python file at .*faults\.py"):
        describe(NetChoice(name=name), str(tmp_path))


def test_what_a_net_does_not_say_of_itself_is_measured_and_what_it_says_is_not(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SILENT)
    found = describe(NetChoice(name="net.py:build"), str(tmp_path))
    # z: 1 + 2 before, 1 after; y: 1; x: a voxel of the coarse grid to each side of a voxel's own, which has two
    assert (found.scale, found.stride, found.halo) == ((1, 1, 1), (1, 1, 2), (3, 1, 2))
    given = describe(NetChoice(name="net.py:build", halo=(4, 4, 4), stride=(2, 2, 2)), str(tmp_path))
    assert (given.stride, given.halo) == ((2, 2, 2), (4, 4, 4))


def test_a_run_of_a_silent_net_gives_what_it_gives_for_the_whole_volume(tmp_path: Path, give: Give) -> None:
    volume = noise((20, 24, 28))
    write_volume(tmp_path / "in.n5", volume)
    settings = ["net.name=net.py:build", "normalise.method=none", "windows.shape=[12,12,12]", "infer.exact=true"]
    settings += ["net.untrained=true"]
    arguments = [part for setting in (*settings, "output.dtype=float32") for part in ("--set", setting)]
    ended = give("run", "--config", "threads", *arguments, "-o", tmp_path / "out.zarr", tmp_path / "in.n5")
    assert ended.code == 0, ended.err
    scope: dict[str, object] = {}
    exec(SILENT, scope)
    padded = np.pad(volume.astype(np.float32), 4, mode="reflect")
    net = scope["build"]()  # type: ignore[operator]
    due = run_net(net, padded)[4:-4, 4:-4, 4:-4]
    found = open_volume(tmp_path / "out.zarr").open()[:]
    assert np.abs(np.squeeze(found) - due).max() <= 1e-6 * np.abs(due).max()


def test_the_error_of_a_halo_is_the_difference_of_tile_and_whole() -> None:
    net = unet3d(features=(2, 3))
    found = measure_geometry(lambda: unet3d(features=(2, 3)))
    voxels = np.random.default_rng(4).normal(size=(1, 36, 36, 36)).astype(np.float32)  # 10 + 16 + 10 voxels

    def run(windows: np.ndarray) -> np.ndarray:
        return run_net(net, windows[0, 0])[None, None]

    rows = {row.halo: row for row in halo_errors(run, voxels, found, (16, 16, 16))}
    assert list(rows) == sorted(rows)
    assert rows[10, 10, 10].largest <= 1e-6
    tile = run_net(net, voxels[0, 10:26, 10:26, 10:26])
    difference = np.abs(tile - run_net(net, voxels[0])[10:26, 10:26, 10:26])
    assert rows[0, 0, 0].largest == pytest.approx(difference.max(), rel=1e-5)
    assert rows[0, 0, 0].rms == pytest.approx(np.sqrt((difference.astype(np.float64) ** 2).mean()), rel=1e-5)
    assert rows[0, 0, 0].largest > rows[4, 4, 4].largest > rows[10, 10, 10].largest


def wide() -> nn.Module:
    """Return a net of valid convolutions that takes large windows alone."""
    return nn.Sequential(nn.Conv3d(1, 1, 21), nn.AvgPool3d(2), nn.Upsample(scale_factor=2), nn.Conv3d(1, 1, 15))


@pytest.mark.parametrize(
    ("build", "num_large"), [(lambda: unet3d(features=(1, 2, 2)), 0), (wide, 6)], ids=["padded", "valid"]
)
def test_a_net_is_measured_by_few_windows(build: Callable[[], nn.Module], num_large: int) -> None:
    """Of valid convolutions six are large: two with random parameters, two as it runs, and two that see types."""
    seen = list[int]()

    def counted() -> nn.Module:
        net = build()
        net.register_forward_pre_hook(lambda net, given: None if given[0].is_meta else seen.append(given[0].numel()))
        return net

    measure_geometry(counted)
    assert len(seen) < 160
    assert sum(size > 32**3 for size in seen) == num_large


PADDED_SOMEWHERE = {
    "valid": lambda: nn.Sequential(nn.Conv3d(1, 2, 3), nn.Conv3d(2, 1, 5, padding=2)),
    "strided": lambda: nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 1, (3, 2, 2), (1, 2, 2), (1, 0, 0))),
    "of 4 k + 2": lambda: nn.Sequential(
        nn.Conv3d(1, 2, 3),
        nn.AvgPool3d(2),
        nn.Conv3d(2, 2, 3),
        nn.AvgPool3d(2),
        nn.Upsample(scale_factor=4),
        nn.Conv3d(2, 1, 3, padding=1),
    ),
}


@pytest.mark.parametrize("kind", PADDED_SOMEWHERE)
def test_halos_are_tried_on_windows_that_the_net_takes(kind: str) -> None:
    """A net of convolutions is the same function everywhere: its exact halo leaves nothing, none leaves something."""
    torch.manual_seed(5)
    net = PADDED_SOMEWHERE[kind]()
    found = measure_geometry(PADDED_SOMEWHERE[kind])
    voxels = real_window(load_recipe(None, []), 1, found, (16, 16, 16))

    def run(windows: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            out: np.ndarray = net(torch.from_numpy(windows)).numpy()
        return out

    rows = list(halo_errors(run, voxels, found, (16, 16, 16)))
    assert (rows[0].halo, found.remainder) == (found.margin, (2, 2, 2) if kind == "of 4 k + 2" else (0, 0, 0))
    assert rows[-1].halo == found.aligned_halo() and rows[-1].largest < 1e-5 < 0.01 < rows[0].largest


def test_field_and_halo_follow_from_both_sides() -> None:
    found = Geometry((1, 1, 1), (2, 2, 2), (3, 0, 5), (1, 4, 5))
    assert (found.halo, found.receptive_field) == ((3, 4, 5), (5, 5, 11))


def rows_of(ended: Ended, first: str) -> list[list[str]]:
    return [line.split() for line in ended.out.splitlines() if line.startswith(first)]


@pytest.mark.long
@pytest.mark.slow
def test_the_command_prints_what_was_measured_and_the_window_to_choose(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_search, "GROWTHS", (0.5, 1.0))  # larger windows would be tried for half a minute
    write_volume(tmp_path / "in.n5", noise((20, 24, 28)))
    ended = give("net", "net.py:build", tmp_path / "in.n5", "--set", "windows.blend=hann")
    assert ended.code == 0, ended.err
    assert rows_of(ended, "stride") == [["stride", "1", "1", "2", "1", "×", "1", "×", "2"]]
    assert rows_of(ended, "receptive") == [["receptive", "field", "5", "3", "5"]]
    assert rows_of(ended, "exact") == [["exact", "halo", "3", "1", "2", "3", "×", "1", "×", "2"]]
    assert rows_of(ended, "3 × 1 × 2")[0][5] == "0"
    assert len(re.findall(r" s +[0-9,]+$", ended.out, re.MULTILINE)) >= 2
    choice = re.search(r"choose net\.halo=\[3, 1, 2\] windows\.shape=\[(\d+), (\d+), (\d+)\] infer\.batch=1", ended.out)
    assert choice is not None
    assert int(choice[3]) % 2 == 0


def test_a_net_that_declares_too_small_a_halo_is_named(tmp_path: Path, give: Give) -> None:
    ended = give("net", "net.py:build", "--set", "net.halo=[1,1,2]", "--no-costs")
    assert ended.code == 1
    assert ended.err.strip() == (
        "net build: halo is (3, 1, 2), not (1, 1, 2): windows will disagree at their faces; set net.halo to it"
    )


def test_a_net_that_looks_at_its_whole_window_is_named(tmp_path: Path, give: Give) -> None:
    (tmp_path / "recipe.toml").write_text('[net]\nname = "unet3d"\noptions = { norm = "instance", features = [2, 3] }')
    ended = give("net", "unet3d", "--recipe", "recipe.toml", "--no-costs")
    assert ended.code == 0
    assert "looks at whole windows: downs.0" in ended.out
    assert rows_of(ended, "stride") == [["stride", "2", "2", "2", "2", "×", "2", "×", "2"]]


@pytest.mark.parametrize(
    ("site", "said"),
    [("local", "the GPUs of site local are of this machine, where plans"), ("nowhere.py", "no site 'nowhere.py'")],
)
def test_a_site_that_cannot_time_a_net_is_refused_before_anything_is_measured(
    give: Give, monkeypatch: pytest.MonkeyPatch, site: str, said: str
) -> None:
    def measured(*arguments: object, **named: object) -> None:
        pytest.fail("a net was measured")

    monkeypatch.setattr("volpipe.net_report", measured)
    monkeypatch.setattr("volpipe.apps.net_times.has_gpu", lambda executor: True)
    ended = give("net", "unet3d", "--config", site)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


@pytest.mark.long
@pytest.mark.slow
def test_a_net_is_timed_on_a_core_of_this_machine_and_its_plans_know_that(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(window_search, "GROWTHS", (1.0, 1.5))
    monkeypatch.setattr(measure, "has_bfloat16", lambda: False)
    ended = give("net", "net.py:build", "--config", "local")
    assert ended.code == 0, ended.err
    assert f"Mvoxel/s on one core of {processor()}; plans for local choose windows by them" in ended.out
    choice = NetChoice(name="net.py:build", untrained=True)
    known = known_speeds(choice, describe(choice, str(tmp_path)), str(tmp_path), processor())
    assert known is not None
    assert [each.arithmetic for each in known.speeds] == arithmetics_here()
    windows = windows_to_try(describe(choice, str(tmp_path)), (3, 1, 2))
    assert all([speed.window for speed in each.windows] == windows for each in known.speeds)


@pytest.mark.parametrize(
    ("windows", "name", "said"),
    [(0, "net.py:build", "no window of net build could be timed here"), (1, "identity", "has no parameters")],
)
def test_a_net_of_which_no_time_can_be_kept_is_an_error(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch, windows: int, name: str, said: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    timed = [WindowSpeed(window=(32, 32, 32), seconds=1.0)] * windows
    measured = NetSpeeds(
        processor=processor(), speeds=[WindowSpeeds(arithmetic=FLOAT32, bytes_per_voxel=1, windows=timed)]
    )
    monkeypatch.setattr(measure, "measure_speeds", lambda *arguments, **named: measured)
    ended = give("net", name, "--config", "local")
    assert ended.code == 2 and said in ended.err
    choice = NetChoice(name="net.py:build", untrained=True)
    assert known_speeds(choice, describe(choice, str(tmp_path)), str(tmp_path), processor()) is None


def test_a_folder_that_cannot_be_written_is_named_before_a_net_is_timed_at_a_site(
    give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    ended = give("net", "unet3d", "--config", "slurm_htex")
    assert (ended.code, ended.out) == (2, "")
    assert "give the command in a folder that you and the workers can write" in ended.err
