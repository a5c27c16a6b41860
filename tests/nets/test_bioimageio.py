"""bioimage.io packages: their own tests reproduce, runs honour what they say, and what is not served is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Give, giver
from graphs import export_onnx
from monai.inferers import sliding_window_inference
from torch import nn
from volumes import noise, write_volume
from zoo import SEEN, Smooth, changed, description, facts_of, out_of, sha256, smooth, write_package, zipped

from volpipe.errors import PlanError, VolpipeError
from volpipe.nets.bioimageio import PackageNet, compare
from volpipe.nets.bioimageio_ops import EPS, ScaleRange
from volpipe.nets.bioimageio_spec import Tolerance
from volpipe.nets.facts import with_normalisation
from volpipe.nets.load import build_net, describe
from volpipe.recipes.inference import NetChoice, Normalise, Recipe
from volpipe.volumes.volume import open_volume

FORMS = ("0.4", "0.5")
NEWER = pytest.mark.parametrize("form", [pytest.param("0.4", marks=pytest.mark.long), "0.5"])
LARGE = np.random.default_rng(1).normal(100, 9, (1, 1, 32, 32, 32)).astype(np.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "volpipe" / "packages"


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def step(form: str, kind: str, **values: Any) -> dict[str, Any]:
    return {"name" if form == "0.4" else "id": kind} | ({"kwargs": values} if values else {})


def zero_mean(form: str) -> dict[str, Any]:
    if form == "0.4":
        return step(form, "zero_mean_unit_variance", mode="per_sample", axes="zyx")
    return step(form, "zero_mean_unit_variance", axes=["z", "y", "x"])


def sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values.astype(np.float64)))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("onnx", "0.4"),
        ("torchscript", "0.5"),
        pytest.param("onnx", "0.5", marks=pytest.mark.long),
        pytest.param("torchscript", "0.4", marks=pytest.mark.long),
    ],
)
def test_a_package_says_what_its_net_is_and_passes_its_own_test(tmp_path: Path, form: str, kind: str) -> None:
    due = sigmoid(out_of(Smooth(), (SEEN - SEEN.mean()) / SEEN.std())).astype(np.float32)
    said = description(form, before=[zero_mean(form)], after=[step(form, "sigmoid")])
    folder = write_package(tmp_path / "pack", said, Smooth(), SEEN, due, kinds=(kind,))
    facts = facts_of(folder, trust_model=True)
    assert (facts.label, facts.in_channels, facts.out_channels, facts.num_parameters) == ("pack", 1, 2, 140)
    assert (facts.scale, facts.stride, facts.halo) == ((1, 1, 1), (1, 2, 2), (1, 3, 3))  # the halo was measured
    assert (facts.intensity, facts.normalise.method, facts.fixed) == ("unit", "zscore", (0, 0, 0))
    assert facts.weights_sha256 == sha256(folder / ("net.onnx" if kind == "onnx" else "net.pt"))
    net = build_net(NetChoice(name=str(folder), trust_model=True))
    assert isinstance(net, PackageNet)
    assert net.test().largest < 1e-5 < 0.5 < net.test().expected
    assert "statistics of the whole volume" in net.notes[0]


def test_a_halo_that_a_package_declares_is_taken_in_voxels_of_the_input(tmp_path: Path) -> None:
    for form in FORMS:
        assert facts_of(smooth(tmp_path / form, form, halo=5, least={"z": 12})).halo == (5, 5, 5)
    twice = description("0.5", "bczyx", least={"z": 32, "y": 32, "x": 32}, channels=1)
    for axis in twice["outputs"][0]["axes"][2:]:
        axis |= {"halo": 6, "scale": 0.5}  # twice as fine: 6 of its voxels are 3 of the input's
    net = nn.Upsample(scale_factor=2.0)
    folder = write_package(tmp_path / "fine", twice, net, LARGE, out_of(net, LARGE))
    assert (facts_of(folder).scale, facts_of(folder).halo) == ((2, 2, 2), (3, 3, 3))


def test_sizes_of_a_package_are_windows_and_strides(tmp_path: Path) -> None:
    folder = smooth(tmp_path / "steps", least={"z": 8, "y": 64, "x": 96}, step={"z": 2, "y": 16, "x": 32})
    facts = facts_of(folder)
    assert (facts.stride, facts.window, facts.fixed) == ((2, 16, 32), (64, 64, 96), (0, 0, 0))
    only = smooth(tmp_path / "only", least={"z": 12, "y": 40, "x": 44}, step={"z": 0, "y": 0, "x": 0})
    facts = facts_of(only)
    assert (facts.stride, facts.window, facts.fixed) == ((1, 2, 2), (12, 40, 44), (12, 40, 44))
    odd = smooth(tmp_path / "odd", least={"z": 4, "y": 17, "x": 17}, step={"z": 1, "y": 2, "x": 2})
    assert facts_of(odd).fixed == (0, 65, 65)  # no multiple of a stride: 17 + 24 · 2


def run_over(give: Give, net: Path, *settings: str) -> np.ndarray:
    chosen = (f"net.name={net}", "output.dtype=float32", "output.intensity=raw", *settings)
    arguments = [part for setting in chosen for part in ("--set", setting)]
    ended = give("run", "--config", "threads", *arguments, "--fresh", "-o", "out.zarr", "in.n5")
    assert ended.code == 0, ended.err
    return np.asarray(np.squeeze(open_volume("out.zarr").open()[...]))


@NEWER
def test_a_run_takes_the_statistics_of_the_whole_volume(tmp_path: Path, give: Give, form: str) -> None:
    due = sigmoid(out_of(Smooth(), (SEEN - SEEN.mean()) / SEEN.std())).astype(np.float32)
    said = description(form, before=[zero_mean(form)], after=[step(form, "sigmoid")])
    folder = write_package(tmp_path / "pack", said, Smooth(), SEEN, due)
    volume = noise((10, 44, 40))
    volume[:, :22] //= 4  # so that windows have other statistics
    write_volume(tmp_path / "in.n5", volume)
    found = run_over(give, zipped(folder, tmp_path / "pack.zip"), "windows.shape=[8,24,24]")
    values = (volume - volume.mean()) / volume.astype(np.float64).std()
    whole = out_of(Smooth(), np.pad(values, 4, mode="reflect")[None, None])[0, :, 4:-4, 4:-4, 4:-4]
    np.testing.assert_allclose(found, sigmoid(whole), atol=1e-5)


def test_percentiles_of_a_package_are_those_of_the_whole_volume(tmp_path: Path, give: Give) -> None:
    low, high = np.percentile(SEEN, (2, 97))
    scaled = np.clip((SEEN - low) / (high - low), 0, 1)
    before = [step("0.5", "scale_range", axes=["z", "y", "x"], min_percentile=2, max_percentile=97),
              step("0.5", "clip", min=0, max=1)]  # fmt: skip
    folder = write_package(
        tmp_path / "pack", description("0.5", before=before), Smooth(), SEEN, out_of(Smooth(), scaled)
    )
    volume = noise((10, 20, 24))
    write_volume(tmp_path / "in.n5", volume)
    found = run_over(give, folder)
    low, high = np.percentile(volume, (2, 97), method="inverted_cdf").astype(float)
    values = np.clip((volume - low) / (high - low), 0, 1)
    due = out_of(Smooth(), np.pad(values, 4, mode="reflect")[None, None])[0, :, 4:-4, 4:-4, 4:-4]
    np.testing.assert_allclose(found, due, atol=1e-5)


@pytest.mark.parametrize("axes", ["zyx", "bczyx", "xz"])
def test_percentiles_of_a_tensor_stay_where_it_is_and_take_nan_for_the_largest(axes: str) -> None:
    values = np.random.default_rng(2).normal(100, 9, (2, 3, 4, 5, 6)).astype(np.float32)
    values[:, :, 0, 0, 0] = np.nan
    along = tuple("bczyx".index(axis) for axis in axes)
    largest = np.nan_to_num(values.astype(np.float64), nan=1e9)  # in order, NaN come last
    low, high = np.quantile(largest, (0.1, 0.4), axis=along, keepdims=True)
    scale = ScaleRange(axes, EPS, 10.0, 40.0)
    scaled = scale(torch.from_numpy(values).requires_grad_())
    np.testing.assert_allclose(scaled.detach().numpy(), (values - low) / (high - low + EPS), rtol=1e-4, atol=1e-4)
    assert scaled.requires_grad
    assert scale(torch.from_numpy(values).to("meta")).device.type == "meta"  # as on a GPU: nothing goes to the CPU


@pytest.mark.parametrize("kind", ["zero_mean_unit_variance", pytest.param("scale_range", marks=pytest.mark.long)])
def test_the_eps_of_a_package_counts_in_a_run_as_in_its_own_test(tmp_path: Path, give: Give, kind: str) -> None:
    """In the units of what comes before it: a hundredth of the volume's."""

    def scaled(values: np.ndarray) -> np.ndarray:
        values = values / 100
        low, spread = values.mean(), values.astype(np.float64).std()
        if kind == "scale_range":
            low, spread = values.min(), np.ptp(values)
        return (values - low) / (spread + 0.1)

    before = [step("0.5", "scale_linear", gain=0.01), step("0.5", kind, axes=["z", "y", "x"], eps=0.1)]
    said = description("0.5", before=before)
    folder = write_package(tmp_path / "pack", said, Smooth(), SEEN, out_of(Smooth(), scaled(SEEN)))
    volume = noise((10, 20, 24))
    write_volume(tmp_path / "in.n5", volume)
    found = run_over(give, folder)
    due = out_of(Smooth(), np.pad(scaled(volume), 4, mode="reflect")[None, None])[0, :, 4:-4, 4:-4, 4:-4]
    np.testing.assert_allclose(found, due, atol=1e-5)


def test_fixed_numbers_of_a_package_are_honoured_as_they_are(tmp_path: Path, give: Give) -> None:
    before = [step("0.4", "scale_linear", gain=0.5, offset=3.0),
              step("0.4", "zero_mean_unit_variance", mode="fixed", mean=40.0, std=20.0, axes="zyx"),
              step("0.4", "clip", min=-1.5, max=2.0)]  # fmt: skip
    after = [step("0.4", "binarize", threshold=0.1)]

    def by_hand(values: np.ndarray) -> np.ndarray:
        given = np.clip((values * 0.5 + 3 - 40) / 20, -1.5, 2)
        return (out_of(Smooth(), given) > 0.1).astype(np.float32)

    folder = write_package(
        tmp_path / "pack", description("0.4", before=before, after=after), Smooth(), SEEN, by_hand(SEEN)
    )
    facts = facts_of(folder)
    assert (facts.normalise.method, facts.intensity) == ("none", "unit")
    volume = noise((9, 20, 24))
    write_volume(tmp_path / "in.n5", volume)
    due = by_hand(np.pad(volume.astype(np.float32), 4, mode="reflect")[None, None])[0, :, 4:-4, 4:-4, 4:-4]
    assert 0.1 < due.mean() < 0.9
    assert (run_over(give, folder) != due).mean() < 1e-4  # at the threshold, last bits decide


class Last(nn.Module):
    """A net (n, y, x, c) of slices whose channels come last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, (5, 3), padding=(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


@NEWER
def test_slices_with_axes_in_another_order_are_served(tmp_path: Path, give: Give, form: str) -> None:
    torch.manual_seed(1)
    net = Last().eval()
    seen = SEEN[0, :, 0, :, :, None]
    folder = tmp_path / "pack"
    write_package(folder, description(form, "byxc"), net, seen, out_of(net, seen), shape=(1, 24, 20, 1), kinds=())
    export_onnx(folder / "net.onnx", net, (1, 24, 20, 1), free=False)
    changed(folder, lambda said: said.update(weights={"onnx": {"source": "net.onnx", "opset_version": 17}}))
    facts = facts_of(folder)
    assert (facts.halo, facts.fixed, facts.out_channels) == ((0, 2, 1), (0, 24, 20), 2)
    volume = noise((3, 40, 30))
    write_volume(tmp_path / "in.n5", volume)
    due = net.conv(
        torch.from_numpy(np.pad(volume.astype(np.float32), ((0, 0), (2, 2), (2, 2)), mode="reflect"))[:, None]
    )
    expected = due.detach().numpy()[:, :, 2:-2, 2:-2].swapaxes(0, 1)
    np.testing.assert_allclose(run_over(give, folder), expected, rtol=1e-4, atol=1e-3)


Change = Callable[[Path], object]


def said(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda folder: changed(folder, change)


def second(what: str) -> Change:
    def double(found: dict[str, Any]) -> None:
        key, test = {"inputs": ("name", "test_inputs"), "outputs": ("name", "test_outputs")}[what]
        found[what].append(found[what][0] | {key: "other"})
        found[test] *= 2

    return said(double)


BROKEN: dict[str, tuple[Change, str]] = {
    "other test": (
        lambda folder: np.save(folder / "out.npy", out_of(Smooth(), SEEN) + np.float32(0.5)),
        r"does not reproduce its own test: with its onnx weights the largest difference is 0\.5",
    ),
    "no array": (lambda folder: (folder / "in.npy").write_bytes(b"\x93NUMPY"), r"in\.npy holds no test tensor"),
    "objects": (
        lambda folder: np.save(folder / "in.npy", np.array([{}]), allow_pickle=True), r"in\.npy holds no test tensor",
    ),
    "fewer axes": (lambda folder: np.save(folder / "in.npy", SEEN[0]), r"in\.npy has 4 axes, its package says bczyx"),
    "other weights": (
        lambda folder: (folder / "net.onnx").write_bytes((folder / "net.onnx").read_bytes() + b"\0"),
        r"its file net\.onnx has SHA-256 [0-9a-f]{64}, the description says .*it is another file",
    ),
    "no weights": (lambda folder: (folder / "net.onnx").unlink(), r"its file net\.onnx is missing"),
    "no test": (lambda folder: (folder / "out.npy").unlink(), r"its file out\.npy is missing"),
    "elsewhere": (
        said(lambda found: found["weights"]["onnx"].update(source="../net.onnx")), "outside of its folder|describes no",
    ),
    "on the web": (
        said(lambda found: found["weights"]["onnx"].update(source="https://example.org/net.onnx")), "is on the web",
    ),
    "two inputs": (second("inputs"), r"it has 2 inputs \(raw, other\); packages of one are run"),
    "two outputs": (second("outputs"), r"it has 2 outputs \(made, other\)"),
    "keras": (
        said(lambda found: found.update(weights={"keras_hdf5": {"source": "in.npy", "tensorflow_version": "2.1"}})),
        "it has weights of keras_hdf5; onnx, torchscript, pytorch_state_dict are run",
    ),
    "unknown step": (
        said(lambda found: found["inputs"][0].update(preprocessing=[{"name": "melt"}])), "describes no model: .*melt",
    ),
    "by channel": (
        said(lambda found: found["outputs"][0].update(postprocessing=[zero_mean("0.4")])),
        "zero_mean_unit_variance of the output rests on statistics that nobody knows",
    ),
    "clip first": (
        said(lambda found: found["inputs"][0].update(
            preprocessing=[step("0.4", "clip", min=0, max=1), zero_mean("0.4")])),
        "clip before zero_mean_unit_variance makes other statistics",
    ),
    "shrinking": (
        said(lambda found: found["outputs"][0]["shape"].update(offset=[0, 0.5, 0, -4, -4])),
        r"makes \(6, 24, 20\) voxels in its own test, where its description says \(6, 16, 12\)",
    ),
    "uneven": (
        said(lambda found: found["outputs"][0]["shape"].update(offset=[0, 0.5, 0, -1.5, 0])),
        r"along y, its output has 1 times the voxels of its input and -3; .*as many voxels lost on both sides",
    ),
    "in time": (
        said(lambda found: [found[side][0].update(axes="bctyx") for side in ("inputs", "outputs")]),
        "its axes are bctyx; b, c, z, y, x are run",
    ),
    "a list": (lambda folder: (folder / "rdf.yaml").write_text("- 1\n"), "holds list, not a description"),
    "no YAML": (lambda folder: (folder / "rdf.yaml").write_text("a: [1\n"), "is no YAML that can be read"),
    "a bomb": (
        lambda folder: (folder / "rdf.yaml").write_text(
            "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))),
        "has 72 aliases",
    ),
    "a dataset": (said(lambda found: found.update(type="dataset")), "describes (no model|a dataset)"),
    "nothing": (lambda folder: (folder / "rdf.yaml").unlink(), r"no bioimage.io package at .*no bioimageio.yaml"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smooth(tmp_path_factory.mktemp("whole") / "pack", "0.4")


@pytest.mark.parametrize("name", BROKEN)
def test_a_package_that_is_broken_or_not_served_is_refused(tmp_path: Path, whole: Path, name: str) -> None:
    folder = zipped_copy(whole, tmp_path / "pack")
    facts_of(folder, halo=(1, 3, 3))
    change, sentence = BROKEN[name]
    change(folder)
    with pytest.raises(VolpipeError, match=sentence):
        facts_of(folder, halo=(1, 3, 3))


def zipped_copy(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_code_in_a_package_is_run_only_where_it_is_trusted(tmp_path: Path) -> None:
    folder = smooth(tmp_path / "pack", kinds=("torchscript",))
    with pytest.raises(VolpipeError, match=r"has its net as torchscript, which is code .*; add --trust-model"):
        facts_of(folder)
    assert facts_of(folder, trust_model=True).halo == (1, 3, 3)


CODE = """
import pathlib, torch
pathlib.Path(__file__).with_name("ran").touch()
class Scale(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, features, 1)
    def forward(self, x):
        return self.conv(x)
"""


@NEWER
def test_a_state_dict_is_loaded_into_the_code_of_the_package(tmp_path: Path, form: str) -> None:
    net = nn.Module()
    net.conv = nn.Conv3d(1, 2, 1)
    due = net.conv(torch.from_numpy(SEEN)).detach().numpy()
    folder = write_package(tmp_path / "pack", description(form), net, SEEN, due, kinds=())
    (folder / "code.py").write_text(CODE)
    torch.save(net.state_dict(), folder / "net.pth")
    entry: dict[str, Any] = {"source": "net.pth", "sha256": sha256(folder / "net.pth"), "pytorch_version": "2.6"}
    digest = sha256(folder / "code.py")
    if form == "0.4":
        entry |= {"architecture": "code.py:Scale", "architecture_sha256": digest, "kwargs": {"features": 2}}
    else:
        entry["architecture"] = {"source": "code.py", "callable": "Scale", "kwargs": {"features": 2}, "sha256": digest}
    changed(folder, lambda found: found.update(weights={"pytorch_state_dict": entry}))
    with pytest.raises(VolpipeError, match="has its net as pytorch_state_dict, which is code"):
        facts_of(folder)
    assert not (folder / "ran").exists()
    assert facts_of(folder, trust_model=True).halo == (0, 0, 0)
    (folder / "code.py").write_text(CODE + "\n")
    with pytest.raises(VolpipeError, match=r"its file code\.py has SHA-256"):
        facts_of(folder, trust_model=True)


def test_data_is_preferred_to_code_and_the_recipe_may_choose(tmp_path: Path) -> None:
    folder = smooth(tmp_path / "pack", kinds=("torchscript", "onnx"))
    assert facts_of(folder).weights_sha256 == sha256(folder / "net.onnx")
    chosen = facts_of(folder, trust_model=True, options={"weights": "torchscript"})
    assert chosen.weights_sha256 == sha256(folder / "net.pt")
    for options, sentence in (({"weights": "keras"}, "has no keras weights; it has onnx, torchscript"),
                              ({"depth": 3}, "whose one option is the format of weights")):  # fmt: skip
        with pytest.raises(VolpipeError, match=sentence):
            facts_of(folder, options=options)


def test_what_a_package_tolerates_of_itself_counts(tmp_path: Path) -> None:
    folder = smooth(tmp_path / "pack")
    expected = out_of(Smooth(), SEEN)
    np.save(folder / "out.npy", expected + np.float32(0.005) * np.abs(expected).max())
    with pytest.raises(VolpipeError, match="does not reproduce"):
        facts_of(folder, halo=(1, 3, 3))
    tolerance = {"relative_tolerance": 0.0, "absolute_tolerance": float(0.006 * np.abs(expected).max())}
    for entries, passes in (
        ([tolerance], True),
        ([tolerance | {"weights_formats": ["torchscript"]}], False),
        ([tolerance | {"output_ids": ["made"], "weights_formats": ["onnx"]}], True),
    ):
        config = {"bioimageio": {"reproducibility_tolerance": entries}}
        changed(folder, lambda found, config=config: found.update(config=config))
        if passes:
            assert facts_of(folder, halo=(1, 3, 3)).halo == (1, 3, 3)
        else:
            with pytest.raises(VolpipeError, match="does not reproduce"):
                facts_of(folder, halo=(1, 3, 3))


def test_differences_are_counted_against_the_tolerance() -> None:
    due = np.array([0.0, 1.0, -10.0, 5.0])
    assert compare(due, due, None, False).is_reproduced
    assert compare(due + 0.9e-3, due, None, False).is_reproduced  # 1e-4 of 10
    assert not compare(due + 1.1e-3, due, None, False).is_reproduced
    assert not compare(np.full(4, np.nan), due, None, False).is_reproduced
    found = due + np.array([0, 0, 0.5, 0])
    outcome = compare(found, due, Tolerance(0.01, 0.1, 250_000), False)
    assert (outcome.largest, outcome.expected, outcome.mismatched, outcome.is_reproduced) == (0.5, 10.0, 250_000, True)
    assert not compare(found, due, Tolerance(0.01, 0.1, 249_000), False).is_reproduced


def test_a_recipe_that_normalises_otherwise_than_its_package_is_refused(tmp_path: Path, give: Give) -> None:
    due = out_of(Smooth(), (SEEN - SEEN.mean()) / SEEN.std())
    folder = write_package(tmp_path / "pack", description("0.5", before=[zero_mean("0.5")]), Smooth(), SEEN, due)
    write_volume(tmp_path / "in.n5", noise((10, 24, 24)))
    name = ("--set", f"net.name={folder}")
    ended = give("plan", "--quick", *name, "--set", "normalise.method=percentile", "in.n5")
    assert ended.code == 2
    said = " ".join(ended.err.split())
    assert "net pack asks for normalise.method=zscore, not percentile; leave the recipe's [normalise] out" in said
    given = ("--set", "normalise.method=zscore", "--set", "normalise.mean=3", "--set", "normalise.std=2")
    for settings in ((), given):
        ended = give("plan", "--quick", *name, *settings, "in.n5")
        assert ended.code == 0, ended.err
        assert "asks for zscore: statistics of the whole volume, not of each window" in " ".join(ended.out.split())


def test_numbers_that_a_recipe_gives_take_the_place_of_the_volumes(tmp_path: Path) -> None:
    facts = facts_of(smooth(tmp_path / "pack"), halo=(1, 3, 3))
    asking = facts.model_copy(update={"normalise": Normalise(method="percentile", percentiles=(2, 97))})
    given = Recipe(normalise=Normalise(method="percentile", low=3, high=9))
    assert with_normalisation(given, asking) == given
    assert with_normalisation(Recipe(), asking).normalise == asking.normalise
    assert with_normalisation(given, facts.model_copy(update={"normalise": None})) == given
    with pytest.raises(
        PlanError, match=r"normalise\.method=percentile, normalise\.percentiles=\[2\.0, 97\.0\], not perc"
    ):
        with_normalisation(Recipe(normalise=Normalise(method="percentile")), asking)


def test_the_command_prints_how_the_packages_own_test_goes(tmp_path: Path, give: Give) -> None:
    folder = smooth(tmp_path / "pack")
    ended = give("net", "pack/rdf.yaml", "--no-costs")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert (
        "net pack, 140 parameters, 1 → 2 channels package Small net, onnx weights; its own test is reproduced:" in said
    )
    assert "exact halo 1 3 3 1 × 3 × 3" in said
    np.save(folder / "out.npy", np.zeros_like(out_of(Smooth(), SEEN)))
    ended = give("net", "./pack", "--no-costs")
    assert ended.code == 2
    assert "does not reproduce its own test: with its onnx weights the largest difference is" in " ".join(
        ended.err.split()
    )


def test_a_package_of_one_size_runs_over_a_volume_of_another(tmp_path: Path, give: Give) -> None:
    folder = smooth(tmp_path / "pack", least={"z": 8, "y": 24, "x": 28}, step={"z": 0, "y": 0, "x": 0})
    volume = noise((10, 30, 34))
    write_volume(tmp_path / "in.n5", volume)
    padded = np.pad(volume.astype(np.float32), 4, mode="reflect")[None, None]
    due = out_of(Smooth(), padded)[0, :, 4:-4, 4:-4, 4:-4]
    np.testing.assert_allclose(run_over(give, folder), due, rtol=1e-4, atol=1e-3)


def test_a_window_below_the_least_of_a_package_is_refused(tmp_path: Path, give: Give) -> None:
    smooth(tmp_path / "pack", least={"z": 4, "y": 32, "x": 32})
    write_volume(tmp_path / "in.n5", noise((10, 50, 50)))
    ended = give("plan", "--set", "net.name=./pack", "--set", "windows.shape=[8,32,16]", "in.n5")
    assert ended.code == 2
    assert "takes windows of (4, 32, 32) voxels or more, not (8, 32, 16)" in " ".join(ended.err.split())


def test_no_window_below_the_least_of_a_package_is_chosen_for_a_small_volume(tmp_path: Path, give: Give) -> None:
    folder = smooth(tmp_path / "pack", least={"z": 4, "y": 32, "x": 64})
    volume = noise((10, 22, 50))
    write_volume(tmp_path / "in.n5", volume)
    padded = np.pad(volume.astype(np.float32), 4, mode="reflect")[None, None]
    due = out_of(Smooth(), padded)[0, :, 4:-4, 4:-4, 4:-4]
    np.testing.assert_allclose(run_over(give, folder), due, rtol=1e-4, atol=1e-3)


def test_classes_of_channels_that_are_no_classes_are_refused(tmp_path: Path, give: Give) -> None:
    due = sigmoid(out_of(Smooth(), SEEN)).astype(np.float32)
    said = description("0.5", after=[step("0.5", "sigmoid")])
    write_package(tmp_path / "pack", said, Smooth(), SEEN, due)
    write_volume(tmp_path / "in.n5", noise((10, 22, 24)))
    ended = give("plan", "--quick", "--set", "net.name=./pack", "--set", "output.kind=classes", "in.n5")
    assert ended.code == 2
    assert "are regions, which may overlap (channel 0, channel 1)" in " ".join(ended.err.split())


def test_no_package_at_a_path_is_said(tmp_path: Path) -> None:
    for name, sentence in (("none.zip", "no net at .*none.zip"), ("./none", "no net at .*none")):
        with pytest.raises(VolpipeError, match=sentence):
            describe(NetChoice(name=name), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_net_without_a_test_is_refused(tmp_path: Path) -> None:
    folder = smooth(tmp_path / "pack")
    changed(folder, lambda found: found["outputs"][0].pop("test_tensor"))
    with pytest.raises((VolpipeError, PlanError), match=r"brings no test of made|describes no model"):
        facts_of(folder)


class Valid(nn.Module):
    """A net without padding: (n, 1, z, y, x) -> (n, 2, z - 2, y - 4, x - 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 3, 3), nn.Conv3d(3, 2, (1, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


@pytest.mark.parametrize("form", FORMS)
def test_a_package_whose_output_is_smaller_has_a_margin(tmp_path: Path, form: str) -> None:
    said, net = description(form, least={"z": 6, "y": 17, "x": 16}), Valid()
    if form == "0.4":
        said["outputs"][0]["shape"]["offset"] = [0, 0.5, -1, -2, -2]
    else:
        for axis, offset in zip(said["outputs"][0]["axes"][2:], (-2, -4, -4), strict=True):
            axis["size"]["offset"] = offset
    seen = SEEN[..., :23, :]  # 17 + 3 · 2
    facts = facts_of(write_package(tmp_path / "pack", said, net, seen, out_of(net, seen)))
    assert (facts.margin, facts.halo) == ((1, 2, 2), (1, 2, 2))
    assert (facts.stride, facts.remainder, facts.fixed) == ((1, 2, 2), (0, 1, 0), (0, 0, 0))


class Two(Smooth):
    """A net that gives a number for each channel beside its image."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # two
        image = super().forward(x)
        return image.mean((2, 3, 4)), image


@pytest.mark.parametrize("output", [None, "made", 1])
def test_the_image_of_a_package_with_several_outputs_is_taken(tmp_path: Path, output: str | int | None) -> None:
    said = description("0.5")
    numbers = {"id": "score", "axes": said["outputs"][0]["axes"][:2], "data": {"type": "float32"}}
    np.save(tmp_path / "score.npy", out_of(Smooth(), SEEN).mean((2, 3, 4)))
    said["outputs"].insert(0, numbers | {"test_tensor": {"source": "score.npy"}})
    folder = write_package(tmp_path / "pack", said, Two(), SEEN, out_of(Smooth(), SEEN))
    np.save(folder / "score.npy", np.load(tmp_path / "score.npy"))
    facts = facts_of(folder, output=output)
    assert (facts.out_channels, facts.halo, facts.stride) == (2, (1, 3, 3), (1, 2, 2))
    with pytest.raises(VolpipeError, match=r"it has no output 'scores'; it has score, made: set net\.output to one"):
        facts_of(folder, output="scores")


class TwoValid(Valid):
    """A net without padding with a second image, which is smaller by two voxels more along y and x."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Conv3d(2, 1, (1, 3, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]  # two
        image = super().forward(x)
        return image, self.third(image)


@pytest.mark.parametrize(
    ("output", "margin", "halo"),
    [("made", (1, 2, 2), 0), pytest.param("edges", (1, 3, 3), 0, marks=pytest.mark.long), ("edges", (1, 3, 3), 2)],
)
def test_each_output_of_a_package_without_padding_runs_as_the_whole(
    tmp_path: Path, give: Give, output: str, margin: tuple[int, ...], halo: int
) -> None:
    """With the output's own offset, halo and postprocessing."""
    torch.manual_seed(2)
    net, said = TwoValid(), description("0.5", least={"z": 8, "y": 16, "x": 16}, step={"z": 1, "y": 1, "x": 1})
    said["outputs"].append(description("0.5", channels=1, after=[step("0.5", "sigmoid")])["outputs"][0])
    said["outputs"][1] |= {"id": "edges", "test_tensor": {"source": "edges.npy"}}
    for tensor, sides in zip(said["outputs"], ((1, 2, 2), (1, 3, 3)), strict=True):
        for axis, side in zip(tensor["axes"][2:], sides, strict=True):
            axis["size"]["offset"] = -2 * side
            axis |= {"halo": halo} if halo else {}
    images = [image.detach().numpy() for image in net((torch.from_numpy(LARGE) - 100) / 9)]
    said["inputs"][0]["preprocessing"] = [step("0.5", "scale_linear", gain=1 / 9, offset=-100 / 9)]
    np.save(tmp_path / "edges.npy", sigmoid(images[1]).astype(np.float32))
    folder = write_package(tmp_path / "pack", said, net, LARGE, images[0], shape=(1, 1, 8, 16, 16))
    (tmp_path / "edges.npy").rename(folder / "edges.npy")
    facts = facts_of(folder, output=output)
    assert (facts.margin, facts.halo) == (margin, tuple(m + halo for m in margin))
    volume = noise((10, 30, 34))
    write_volume(tmp_path / "in.n5", volume)
    padded = np.pad((volume.astype(np.float32) - 100) / 9, [(m, m) for m in margin], mode="reflect")
    with torch.inference_mode():
        whole = net(torch.from_numpy(padded)[None, None])[["made", "edges"].index(output)][0].numpy()
    due = sigmoid(whole) if output == "edges" else whole
    found = run_over(give, folder, f"net.output={output}", "windows.shape=[10,24,24]")
    np.testing.assert_allclose(found.reshape(due.shape), due, atol=1e-5 * np.ptp(due))


def test_slices_of_a_package_that_looks_at_whole_windows_are_weighed_one_by_one(tmp_path: Path, give: Give) -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 1)).eval()
    seen = SEEN[:, :, 0, :16, :16]
    folder = write_package(
        tmp_path / "pack", description("0.5", "bcyx"), net, seen, out_of(net, seen), shape=seen.shape
    )
    volume = noise((12, 40, 45))
    write_volume(tmp_path / "in.n5", volume)
    slices = torch.from_numpy(volume.astype(np.float32))[:, None]
    with torch.inference_mode():
        due = sliding_window_inference(slices, (32, 32), 1, net, overlap=0.5, mode="gaussian").numpy().swapaxes(0, 1)
    found = run_over(give, folder, "windows.shape=[8,32,32]")
    np.testing.assert_allclose(found, due, rtol=0, atol=1e-5 * np.ptp(due))
