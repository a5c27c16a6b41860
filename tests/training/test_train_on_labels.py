"""Trainings on labels: windows of volume and labels stay together, and a net learns where objects end."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import torch
from safetensors.torch import load_file
from trainings import made

from volpipe.errors import PlanError, RecipeError
from volpipe.geometry.affinities import OFFSETS, affinities
from volpipe.geometry.grid import Box
from volpipe.models.unet3d import unet3d
from volpipe.recipes.training import WEIGHTS, TrainRecipe, load_training
from volpipe.synthetic.volume import SyntheticVolume, write_sample
from volpipe.training.data.samples import Sampler
from volpipe.training.data.targets import UNKNOWN, accuracy, histograms, roc_auc, targets
from volpipe.training.logs import read_log
from volpipe.training.loop import make_train_state, train

SHAPE = (24, 30, 36)
TURNS = {"flips": ("z", "y", "x"), "swap": True}
SHORT = ((-1, 0, 0), (0, -1, 0), (0, 0, -2))

RECIPE = """
[net]
name = "unet3d"
options = { features = [6, 12], out_channels = 3, output = "sigmoid" }

[[data]]
path = "v.tif"
labels = "l.tif"
held_out = "0:14,:,:"

[affinities]
offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -2]]

[samples]
shape = [8, 16, 16]
margin = [1, 2, 2]

[train]
steps = 120
warm_up = 5
learning_rate = 2e-2
checkpoint_every = 30
validate_every = 30
threads = 1
"""


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


def of_labels(**sections: object) -> TrainRecipe:
    data = {"path": "v.tif", "labels": "l.tif"} | dict(sections.pop("data", {}))  # type: ignore[call-overload]
    samples = {"shape": (4, 8, 8)} | dict(sections.pop("samples", TURNS))  # type: ignore[call-overload]
    tree = {"net": {"name": "identity"}, "data": [data], "samples": samples, "train": {"seed": 3}}
    return TrainRecipe.model_validate(tree | sections)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a volume of bright blocks between dark walls, the number of each block, and a recipe."""
    z, y, x = (np.arange(n) for n in (32, 40, 40))
    wall = (z % 8 == 0)[:, None, None] | (y % 10 == 0)[:, None] | (x % 10 == 0)
    labels = 1 + (z // 8)[:, None, None] * 16 + (y // 10)[:, None] * 4 + x // 10
    labels[wall] = 0
    noise = np.random.default_rng(1).normal(0, 10, wall.shape)
    tifffile.imwrite(tmp_path / "v.tif", np.clip(np.where(wall, 70, 170) + noise, 0, 255).astype(np.uint8))
    tifffile.imwrite(tmp_path / "l.tif", labels.astype(np.uint16))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def numbered(tmp_path: Path) -> np.ndarray:
    """Labels that are the volume itself, so that each window tells which labels belong to it."""
    data = np.random.default_rng(5).integers(0, 3, SHAPE).astype(np.uint8)
    for name in ("v.tif", "l.tif"):
        tifffile.imwrite(tmp_path / name, data)
    return data


# ---- samples


def test_volume_and_labels_are_cut_and_turned_alike_before_affinities_are_taken(
    numbered: np.ndarray, tmp_path: Path
) -> None:
    sampler = Sampler(of_labels(), (1, 1, 1), str(tmp_path))
    for number in range(30):
        sample = made(sampler, number)
        seen = np.rint((sample.inputs[0] + 1) * 127.5).astype(int)  # of what the net sees, not of where it was cut
        near, known = affinities(seen)
        np.testing.assert_array_equal(sample.truth == 1, near & known)
        np.testing.assert_array_equal(sample.truth == UNKNOWN, ~known)
        assert sample.truth.dtype == np.int8


def test_windows_are_turned_in_all_sixteen_ways(numbered: np.ndarray, tmp_path: Path) -> None:
    sampler = Sampler(of_labels(samples=TURNS | {"shape": (24, 30, 30)}), (1, 1, 1), str(tmp_path))
    windows = {tuple(made(sampler, number).inputs[0, ::23, ::29, ::29].ravel()[:8]) for number in range(200)}
    assert len(windows) > 16  # each at several places


def test_windows_of_a_box_lie_in_it_and_its_size_is_their_share(numbered: np.ndarray, tmp_path: Path) -> None:
    tree = of_labels(data={"box": "4:12,:,50%:"}).model_dump()
    whole = TrainRecipe.model_validate(tree | {"data": [*tree["data"], tree["data"][0] | {"box": None}]})
    sampler = Sampler(whole, (1, 1, 1), str(tmp_path))
    windows = [sampler.window(number) for number in range(400)]
    boxes = [window.box for window in windows if window.source is sampler.sources[0]]
    limit = Box((4, 0, 18), (12, 30, 36))
    assert all(limit.contains(box) for box in boxes)
    assert {box.start[0] for box in boxes} == set(range(4, 9))
    share = 8 * 30 * 18 / (8 * 30 * 18 + 24 * 30 * 36)
    assert abs(len(boxes) / 400 - share) < 0.07
    with pytest.raises(PlanError, match=r"axis x: a window of 8 voxels .* than the part .*36 of .*, which has 4"):
        Sampler(of_labels(data={"box": ":,:,32:"}), (1, 1, 1), str(tmp_path))


def test_what_the_net_sees_is_as_without_labels(numbered: np.ndarray, tmp_path: Path) -> None:
    options = {"degrade": {"noise": 3.0}, "samples": TURNS | {"gain": (0.5, 1.5), "offset": 0.1}}
    with_labels = Sampler(of_labels(**options), (1, 1, 1), str(tmp_path))
    without = Sampler(of_labels(**options, data={"labels": None}), (1, 1, 1), str(tmp_path))
    for number in range(5):
        np.testing.assert_array_equal(made(with_labels, number).inputs, made(without, number).inputs)


def test_a_voxel_with_a_number_that_means_unknown_is_unknown() -> None:
    labels = np.kron(np.arange(1, 9).reshape(2, 2, 2), np.ones((4, 4, 4), int)).astype(np.uint64)
    marked = np.where(labels == 8, np.uint64(0xFFFFFFFFFFFFFFFD), labels)
    np.testing.assert_array_equal(targets(marked, SHORT), targets(labels, SHORT, ignore=8))
    np.testing.assert_array_equal(targets(marked.astype(np.int64), SHORT), targets(labels, SHORT, ignore=8))
    np.testing.assert_array_equal(targets(marked, SHORT, ignore=()), targets(labels, SHORT, ignore=()))


def test_labels_that_lie_elsewhere_than_their_volume_are_refused_unless_that_is_meant(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=np.zeros(SHAPE, np.uint8)).attrs["resolution"] = [40.0, 4.0, 4.0]
        file.create_dataset("labels", data=np.ones(SHAPE, np.uint32)).attrs["resolution"] = [40.0, 8.0, 4.0]
    data = {"path": "v.h5", "key": "raw", "labels": "v.h5", "labels_key": "labels"}
    with pytest.raises(PlanError, match=r"axis y: voxels of the volume are 4 nm long, of its labels 8 nm: .*any_place"):
        Sampler(of_labels(data=data), (1, 1, 1), str(tmp_path))
    Sampler(of_labels(data=data | {"any_place": True}), (1, 1, 1), str(tmp_path))


def test_a_voxel_of_the_label_to_ignore_is_unknown(numbered: np.ndarray, tmp_path: Path) -> None:
    sampler = Sampler(of_labels(affinities={"ignore": 2, "offsets": SHORT}), (1, 1, 1), str(tmp_path))
    sample = made(sampler, 0)
    seen = np.rint((sample.inputs[0] + 1) * 127.5)
    assert (sample.truth[:, seen == 2] == UNKNOWN).all()
    assert (sample.truth[0, 1:][(seen[1:] != 2) & (seen[:-1] != 2)] != UNKNOWN).all()


def test_a_weight_gives_a_volume_more_windows(numbered: np.ndarray, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "dark.tif", numbered * 0)
    tree = of_labels().model_dump()
    tree["data"] = [tree["data"][0], tree["data"][0] | {"path": "dark.tif", "weight": 3.0}]
    sampler = Sampler(TrainRecipe.model_validate(tree), (1, 1, 1), str(tmp_path))
    dark = np.mean([(made(sampler, number).inputs == -1).all() for number in range(400)])
    assert dark == pytest.approx(0.75, abs=0.07)


def test_blur_is_drawn_for_each_window_and_leaves_the_labels_alone(numbered: np.ndarray, tmp_path: Path) -> None:
    sharp = Sampler(of_labels(samples={"flips": (), "swap": False}), (1, 1, 1), str(tmp_path))
    still = {"samples": {"flips": (), "swap": False}, "degrade": {"blur": 2.0, "whole": False}}
    soft = Sampler(of_labels(**still), (1, 1, 1), str(tmp_path))
    deviations = [made(soft, n).inputs.std() / made(sharp, n).inputs.std() for n in range(12)]
    assert min(deviations) < 0.3 and max(deviations) > 0.6
    np.testing.assert_array_equal(made(soft, 4).truth, made(sharp, 4).truth)


def test_what_sample_writes_can_be_learnt_from(tmp_path: Path) -> None:
    write_sample(tmp_path / "s.zarr", SyntheticVolume((24, 32, 32), 3, (10.0, 10.0, 10.0)), chunk=16, format="zarr3")
    data = {"path": "s.zarr/raw", "labels": "s.zarr", "labels_key": "labels"}
    sample = made(Sampler(of_labels(data=data), (1, 1, 1), str(tmp_path)), 0)
    assert sample.inputs.shape == (1, 4, 8, 8)
    assert sample.truth.shape == (len(OFFSETS), 4, 8, 8)
    assert set(np.unique(sample.truth[:3])) == {-1, 0, 1}


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["net.options.out_channels=4"], "net unet3d gives 4 channels, affinities.offsets are 3; set the net's out_ch"),
        (["net.options.output=none"], "net unet3d gives intensity 'raw', affinities are chances from 0 to 1; give it"),
    ],
)
def test_a_net_that_gives_something_else_is_refused(folder: Path, settings: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        train(recipe(folder, *settings), folder / "t", str(folder))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('labels = "l.tif"', "", "affinities are learnt from labels; give data.labels"),
        ('labels = "l.tif"', 'labels_key = "l"', "labels_key names an array in labels, which is missing"),
        ('labels = "l.tif"', 'labels = "l.tif"\nstored = true', "labels need voxels, not stored windows"),
        (
            "[affinities]",
            '[[data]]\npath = "w.tif"\n[affinities]',
            "data.labels is given for some volumes, not for w.t",
        ),
        (
            "[train]",
            "[loss]\nl2 = 1.0\n[train]",
            "loss is for images; of labels, the weights are in aff",
        ),
        ("[train]", "[adversary]\nweight = 1.0\n[train]", "adversary is for images; leave it out"),
        ("[samples]", "bce = 0.0\n[samples]", "bce and dice are 0; give one above 0"),
        ("[-1, 0, 0]", "[0, 0, 0]", "leads to the voxel itself; leave it out"),
        ("offsets", "offset", "unknown key affinities.offset .did you mean .offsets"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(folder: Path, old: str, new: str, sentence: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(RecipeError, match=sentence):
        recipe(folder)


def test_labels_of_another_shape_or_kind_are_refused(folder: Path) -> None:
    tifffile.imwrite(folder / "l.tif", np.zeros((32, 40, 41), np.uint8))
    with pytest.raises(
        PlanError,
        match=r"v.tif has shape \(32, 40, 40\), its labels .*l.tif \(32, 40, 41\) .* of the volume state no voxel s",
    ):
        Sampler(recipe(folder), (1, 1, 1), str(folder))
    tifffile.imwrite(folder / "l.tif", np.zeros((32, 40, 40), np.float32))
    with pytest.raises(PlanError, match=r"labels .*l.tif.* have float32 voxels; give whole numbers"):
        Sampler(recipe(folder), (1, 1, 1), str(folder))


# ---- learning


@pytest.mark.long
@pytest.mark.parametrize("setting", ["affinities.dice=0", "affinities.dice=1", "train.precision=bfloat16"])
def test_a_net_learns_where_objects_end(folder: Path, setting: str) -> None:
    train(recipe(folder, setting), folder / "t", str(folder))
    lines = read_log(folder / "t")
    scored = [(line["auc"], line["accuracy"]) for line in lines if "auc" in line]
    assert len(scored) == 4
    assert scored[-1][0] > 0.9 and scored[-1][1] > 0.8
    assert np.mean([line["loss"] for line in lines[-10:]]) < 0.6 * lines[0]["loss"]
    assert ("dice" in lines[0]) == (setting == "affinities.dice=1")


def test_what_is_held_out_is_scored_as_a_run_would_store_it(folder: Path) -> None:
    train(recipe(folder, "train.steps=20"), folder / "t", str(folder))
    scored = read_log(folder / "t")[-1]
    net = unet3d(features=(6, 12), out_channels=3, output="sigmoid")
    net.load_state_dict(load_file(folder / "t" / WEIGHTS))
    volume, labels = (tifffile.imread(folder / name)[:14] for name in ("v.tif", "l.tif"))
    around = np.pad(volume, [(10, 10), (12, 12), (12, 12)], mode="reflect")  # more than the halo, of whole strides
    with torch.inference_mode():
        out = net(torch.from_numpy(around / np.float32(127.5) - 1)[None, None]).numpy()[0, :, 10:24, 12:52, 12:52]
    levels = histograms(np.rint(out * 255).astype(np.uint8), targets(labels, SHORT))
    assert scored["auc"] == pytest.approx(roc_auc(levels), abs=1e-3)
    assert scored["accuracy"] == pytest.approx(accuracy(levels), abs=1e-2)


def test_the_sigmoid_is_left_to_the_loss_while_the_net_learns_alone(folder: Path) -> None:
    state = make_train_state(recipe(folder), str(folder))
    data = torch.full((1, 1, 8, 16, 16), 3.0, device=state.device)
    with torch.inference_mode():
        torch.testing.assert_close(state.net(data).sigmoid(), state.average(data))
    assert state.logits


@pytest.mark.parametrize("exact", [True, False])
def test_the_arithmetic_of_a_training_does_not_depend_on_its_process(folder: Path, exact: bool) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32
    with cudnn.flags(enabled=True, deterministic=not exact, allow_tf32=True):
        try:
            matmul.allow_tf32 = True
            make_train_state(recipe(folder, f"train.deterministic={str(exact).lower()}"), str(folder))
            assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic) == (False, False, exact)
        finally:
            matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("box", "label", "sentence"),
    [
        (np.s_[:], 0, r"data.held_out has no two voxels of one object in .*l\.tif"),
        (np.s_[:14], 3, "data.held_out has one object alone"),
        (np.s_[:14], 65535, "data.held_out has no known label"),
        (np.s_[14:], 65535, "no window had a known label, so that nothing was learnt; give data.box"),
    ],
)
def test_labels_that_teach_nothing_or_score_nothing_end_a_training_without_weights(
    folder: Path, box: slice, label: int, sentence: str
) -> None:
    labels = tifffile.imread(folder / "l.tif").astype(np.uint16)
    labels[box] = label
    tifffile.imwrite(folder / "l.tif", labels)
    chosen = recipe(folder, "train.steps=2", "affinities.ignore=65535")
    with pytest.raises(PlanError, match=sentence):
        train(chosen, folder / "t", str(folder))
    assert not (folder / "t" / WEIGHTS).exists()


def test_stopped_and_gone_on_it_comes_to_the_same_weights(folder: Path) -> None:
    train(recipe(folder, "train.schedule=constant", "train.steps=6"), folder / "whole", str(folder))
    train(recipe(folder, "train.schedule=constant", "train.steps=3"), folder / "cut", str(folder))
    train(recipe(folder, "train.schedule=constant", "train.steps=6"), folder / "cut", str(folder))
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()


def test_predictions_lie_beside_their_targets(folder: Path) -> None:
    from volpipe.volumes.volume import open_volume

    train(recipe(folder, "train.steps=2", "train.predict_every=2", "train.validate_every=0"), folder / "t", str(folder))
    store = folder / "t" / "tensors.n5"
    truth, made = (open_volume(store, f"tensors/{key}").open()[...] for key in ("truth", "unet3d/2"))
    assert truth.shape == made.shape == (4, 3, 8, 16, 16)
    labels = tifffile.imread(folder / "l.tif")[:14]
    places = [Box((z, y, x), (z + 8, y + 16, x + 16)) for z in range(7) for y in range(25) for x in range(25)]
    assert any((truth[1] == targets(labels[box.slices], SHORT)).all() for box in places)
