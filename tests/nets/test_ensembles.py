"""Ensembles: in one pass what numpy makes of the separate runs, and refusals of nets that do not go together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from inline import Inline, Stopped
from scipy.stats import mode
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.estimation.measure import processor
from volpipe.estimation.memory import array_bytes, net_bytes
from volpipe.nets.cache import known_speeds
from volpipe.nets.facts import FLOAT32
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice
from volpipe.resolve import load_function
from volpipe.runs.provenance import read_provenance

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    intensity = "raw"
    def __init__(self, seed=0, channels=3, size=3):
        super().__init__()
        self.volpipe = dict(
            in_channels=1, out_channels=channels, scale=(1, 1, 1), stride=(1, 1, 1), halo=(size // 2,) * 3,
            intensity=self.intensity,
        )
        torch.manual_seed(seed)
        self.conv = nn.Conv3d(1, channels, size, padding=size // 2)
    def forward(self, x):
        return self.conv(x)

class Norm(Net):
    def __init__(self, seed=0, channels=3):
        super().__init__(seed, channels)
        self.norm = nn.InstanceNorm3d(channels)
    def forward(self, x):
        return self.norm(self.conv(x)) + 0.1 * x

class Unit(Net):
    intensity = "unit"
"""
TWO = '{name="own.py:Net",options={seed=1,size=7}},{name="own.py:Net",options={seed=2}}'
SHAPE = (20, 27, 34)
SEEDS = (1, 2, 3, 4)
COMBINED = {
    "mean": lambda outputs: np.mean(outputs, axis=0),
    "median": lambda outputs: np.median(outputs, axis=0),
    "vote": lambda outputs: mode(outputs, axis=0).mode,
}
CROP = windowed((16, 16, 16), (2, 2, 2), (2, 2, 2), "crop")
EDGE = windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "gaussian", "edge")
HANN = windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "hann")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(NETS)
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return tmp_path


def saved(folder: Path, name: str = "Net", seeds: tuple[int, ...] = SEEDS, **options: int) -> list[str]:
    """Write the weights of nets of these seeds, and return the names of their files."""
    for seed in seeds:
        net = load_function(f"own.py:{name}", str(folder))(seed=seed, **options)
        torch.save(net.state_dict(), folder / f"{name}{seed}.pt")
    return [f"{name}{seed}.pt" for seed in seeds]


def made(out: str, *settings: str, site: Inline | None = None) -> np.ndarray:
    """Return the output of a run over the volume of the folder."""
    plan = vp.plan("in.n5/raw", out=out, settings=["output.levels=0", *settings])
    assert not vp.run(plan, site=site or Inline()).missing
    data: np.ndarray = vp.open(out)[...]
    return data


def ensemble(files: list[str], combine: str) -> list[str]:
    return [f"net.ensemble={','.join(files)}", f"net.combine={combine}"]


@pytest.mark.parametrize(
    ("name", "windows"), [("Net", CROP), pytest.param("Net", HANN, marks=pytest.mark.long), ("Norm", EDGE)]
)
def test_an_ensemble_gives_what_numpy_makes_of_separate_runs(folder: Path, name: str, windows: list[str]) -> None:
    common, files = [f"net.name=own.py:{name}", *windows, "output.dtype=float32"], saved(folder, name)
    separate = [made(f"{i}.zarr", *common, f"net.weights={file}") for i, file in enumerate(files)]
    classes = [output.argmax(axis=0) for output in separate]
    for number, combine in ((3, "mean"), (3, "median"), (4, "median"), (3, "vote"), (4, "vote")):
        kind = ["output.kind=classes", "output.dtype=auto"] if combine == "vote" else []
        expected = COMBINED[combine]((classes if kind else separate)[:number])
        assert len(np.unique(expected)) > 2
        together = made(f"{combine}{number}.zarr", *common, *kind, *ensemble(files[:number], combine))
        if number == 3 and combine != "mean":
            assert vp.verify(f"{combine}{number}.zarr", recompute=1).is_whole
        if windows is CROP or combine != "mean":
            np.testing.assert_array_equal(together, expected)
        else:
            np.testing.assert_allclose(together, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_one_activation_and_one_cast_follow_what_is_combined(folder: Path) -> None:
    common, files = ["net.name=own.py:Unit", *CROP], saved(folder)
    raw = [made(f"{i}.zarr", *common, f"net.weights={file}", "output.dtype=float32") for i, file in enumerate(files)]
    scaled = 255 / (1 + np.exp(-np.median(np.float64(raw), axis=0)))
    stored = made("all.zarr", *common, *ensemble(files, "median"), "output.activation=sigmoid")
    assert stored.dtype == np.uint8
    assert np.abs(stored - scaled).max() <= 0.501  # half a level, and last bits of float32


def test_affinities_that_are_augmented_are_put_back_for_each_net(folder: Path) -> None:
    files = saved(folder)[:3]
    common = ["net.name=own.py:Net", *HANN, "infer.augment=flips", "net.offsets=[[-1,0,0],[0,-1,0],[0,0,-1]]"]
    separate = [made(f"{i}.zarr", *common, f"net.weights={file}") for i, file in enumerate(files)]
    together = made("all.zarr", *common, *ensemble(files, "median"))
    np.testing.assert_array_equal(together, np.median(separate, axis=0))


def test_nets_of_other_code_have_the_largest_halo_and_a_common_stride(folder: Path) -> None:
    common = ["net.untrained=true", "output.dtype=float32", "output.intensity=raw", "windows.overlap=[6,6,6]"]
    with pytest.raises(vp.VolpipeError, match=r"net\.ensemble\.2, Unit, differs .* Net: intensity: .*raw.* -> .*unit"):
        made("all.zarr", *common, f'net.ensemble=[{TWO},{{name="own.py:Unit"}}]')
    settings = ["net.untrained=true", f'net.ensemble=[{TWO},{{name="own.py:Norm"}}]']
    plan = vp.plan("in.n5/raw", out="all.zarr", settings=settings)
    assert not plan.net.tile_invariant
    plan = vp.plan("in.n5/raw", out="all.zarr", settings=[*common, f"net.ensemble=[{TWO}]"])
    assert plan.net.halo == (3, 3, 3)
    assert plan.net.tile_invariant
    assert [own.halo for own in plan.net.members] == [(3, 3, 3), (1, 1, 1)]
    assert not vp.run(plan, site=Inline()).missing
    options = ("net.options={seed=1,size=7}", "net.options={seed=2}")
    separate = [made(f"{i}.zarr", *common, "net.name=own.py:Net", each) for i, each in enumerate(options)]
    np.testing.assert_allclose(vp.open("all.zarr")[...], np.mean(separate, axis=0), rtol=0, atol=1e-5)


def test_a_killed_run_goes_on_to_the_bytes_of_one_go(folder: Path) -> None:
    files = saved(folder)
    settings = ["net.name=own.py:Net", *HANN, *ensemble(files, "median")]
    made("out.zarr", *settings)
    whole = fingerprint("out.zarr")
    shutil.rmtree("out.zarr")
    shutil.rmtree("out.zarr.run")
    with pytest.raises(Stopped):
        made("out.zarr", *settings, site=Inline(most_tasks=3))
    made("out.zarr", *settings, site=Inline(seed=1))
    assert fingerprint("out.zarr") == whole


def test_any_net_that_changes_is_another_ensemble(folder: Path) -> None:
    files = saved(folder)
    settings = ["net.name=own.py:Net", *CROP]
    made("out.zarr", *settings, *ensemble(files, "mean"))
    said = read_provenance("out.zarr")["net"]
    alone = [describe(NetChoice(name="own.py:Net", weights=file), str(folder)) for file in files]
    assert [each["weights_sha256"] for each in said["members"]] == [each.weights_sha256 for each in alone]
    with pytest.raises(vp.VolpipeError, match=r"net\.ensemble"):  # sums of floats depend on their order
        made("out.zarr", *settings, *ensemble(files[::-1], "mean"))
    torch.save(torch.load(files[1]), files[2])
    with pytest.raises(vp.VolpipeError, match=r"net\.weights_sha256.*the weights changed"):
        made("out.zarr", *settings, *ensemble(files, "mean"))


def test_a_plan_counts_all_nets(folder: Path) -> None:
    net, files = vp.load_net("unet3d", "net.untrained=true"), ["a.pt", "b.pt", "c.pt"]
    for number, file in enumerate(files, 1):
        torch.save({key: number * value for key, value in net.state_dict().items()}, file)
    one, mean, median = (
        vp.plan("in.n5/raw", out="o.zarr", settings=["net.name=unet3d", "windows.shape=[40,40,40]", *more], site=None)
        for more in (["net.weights=a.pt"], ensemble(files, "mean"), ensemble(files, "median"))
    )
    assert mean.net.num_parameters == 3 * one.net.num_parameters
    assert array_bytes(mean) == array_bytes(one) < array_bytes(median)
    needs = [net_bytes(each) for each in (one, mean, median)]
    weights, given = 8 * one.net.num_parameters, 12 * one.net.out_channels * 40**3
    assert [need - needs[0] for need in needs if need and needs[0]] == [0, weights, weights + given]
    speeds = [known_speeds(each.recipe.net, each.net, "", processor()) for each in (one, mean)]
    seconds = [each.of(FLOAT32).seconds(40**3) for each in speeds if each is not None]
    assert seconds[1] == pytest.approx(3 * seconds[0])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["net.combine=mean"], "there is none; give ensemble"),
        (["net.ensemble=a.pt"], "has two nets or more"),
        (["net.ensemble=a.pt,a.pt"], "entries 0 and 1 of the ensemble are the same net"),
        (["net.ensemble=a.pt,b.pt", "net.weights=c.pt"], "exclude each other"),
        (["net.ensemble=a.pt,Net2.pt"], "no weights at .*a.pt"),
        (["net.ensemble=Net1.pt,Net2.pt", "net.combine=vote"], "output.kind is image; set output.kind=classes"),
        (["net.ensemble=Net1.pt,Net2.pt", "net.combine=most"], "combine"),
        (['net.ensemble=[{name="numpy:own.py:f"},{weights="Net1.pt"}]'], "a function on arrays"),
        (['net.ensemble=[{name="unet3d",weights="Net2.pt"},{weights="Net1.pt"}]'], "Net2.pt"),
        (['net.ensemble=[{weight="Net2.pt"},"Net1.pt"]'], "weight"),
    ],
)
def test_what_cannot_be_an_ensemble_is_refused(folder: Path, settings: list[str], sentence: str) -> None:
    saved(folder)
    with pytest.raises(vp.VolpipeError, match=sentence):
        vp.plan("in.n5/raw", out="o.zarr", settings=["net.name=own.py:Net", *settings])


def test_nets_that_learned_with_other_grey_levels_are_refused_unless_these_are_given(folder: Path) -> None:
    files = saved(folder)[:2]
    for file, high in zip(files, (255, 200), strict=True):
        text = json.dumps({"normalise": {"low": 0, "high": high}})
        (folder / file).with_suffix(".trained.json").write_text(text)
    settings = ["net.name=own.py:Net", *CROP, *ensemble(files, "mean")]
    with pytest.raises(vp.VolpipeError, match=r"different grey levels, .*255.* and .*200"):
        vp.plan("in.n5/raw", out="o.zarr", settings=settings)
    plan = vp.plan("in.n5/raw", out="o.zarr", settings=[*settings, "normalise.method=none"])
    assert plan.recipe.normalise.method == "none"
