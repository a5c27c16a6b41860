"""Trainings on labels that are classes: targets, losses and scores by hand, what is refused, and a run of the net."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from command import giver
from trainings import made, write_cells

from volpipe.errors import PlanError, RecipeError
from volpipe.nets.load import describe
from volpipe.recipes.training import Classes, TrainRecipe, load_training
from volpipe.training.data.samples import Sampler
from volpipe.training.data.targets import UNKNOWN, class_targets, confusion, dice, signed
from volpipe.training.data.volumes import check_data
from volpipe.training.logs import read_log
from volpipe.training.losses import class_terms
from volpipe.volumes.volume import open_volume

RECIPE = """
[net]
name = "unet3d"
options = { features = [4, 8], out_channels = 3, output = "none" }

[[data]]
path = "v.tif"
labels = "l.tif"
held_out = "0:8,:,:"

[samples]
shape = [8, 16, 16]
margin = [1, 2, 2]

[classes]
names = ["outside", "cell", "nucleus"]
balance = [1, 1, 3]
ignore = 255

[train]
steps = 300
warm_up = 5
learning_rate = 1e-2
checkpoint_every = 150
validate_every = 150
predict_every = 300
threads = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a volume of grey cells that have bright nuclei, the class of each voxel, and a recipe."""
    write_cells(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


def test_a_training_finds_the_classes_and_its_run_gives_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = giver(folder, monkeypatch, capsys)
    ended = given("train", "recipe.toml", "--config", "threads")
    assert ended.code == 0, ended.err
    last = read_log(folder / "recipe.train")[-1]
    assert last["mean dice"] > 0.9
    assert last["mean dice"] == pytest.approx(
        np.mean([last[f"dice {name}"] for name in ("outside", "cell", "nucleus")])
    )
    predicted = open_volume(folder / "recipe.train" / "tensors.n5", "tensors/unet3d/300").open()[...]
    assert predicted.shape[1] == 1 and set(np.unique(predicted)) == {0.0, 1.0, 2.0}
    ended = given("run", "v.tif", "--recipe", "recipe.train/run.toml", "--config", "threads", "-o", "out.zarr")
    assert ended.code == 0, ended.err
    out = open_volume(folder / "out.zarr").open()[...]
    assert out.dtype == np.uint8
    truth = tifffile.imread(folder / "l.tif")
    assert [(out == truth)[truth == number].mean() > 0.85 for number in range(3)] == [True] * 3
    ended = given(
        "run", "v.tif", "--recipe", "recipe.train/run.toml", "--config", "threads", "-o", "chances.zarr",
        "--set", "output.kind=image", "--set", "output.activation=softmax",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    chances = open_volume(folder / "chances.zarr").open()[...]
    np.testing.assert_allclose(chances.sum(0), 1, atol=1e-5)
    np.testing.assert_array_equal(chances.argmax(0), out)
    for name in ("out", "chances"):
        ended = given("evaluate", f"{name}.zarr", "l.tif", "--classes", "--config", "threads", "--json", f"{name}.json")
        assert ended.code == 0, ended.err
    scores, again = (json.loads((folder / f"{n}.json").read_text())["scores"]["output"] for n in ("out", "chances"))
    assert scores == again and [each["name"] for each in scores["classes"]] == ["outside", "cell", "nucleus"]
    assert scores["accuracy"] == pytest.approx((out == truth).mean()) and "nucleus" in ended.out
    truth[:4] = 255  # what the training was told to ignore; and a label that nobody named
    truth[4] = 9
    tifffile.imwrite(folder / "part.tif", truth)
    ended = given("evaluate", "out.zarr", "part.tif", "--classes", "--config", "threads", "--json", "part.json")
    assert "note: labels 9 are none of the 3 classes of the output, and are scored as more" in ended.err
    scores = json.loads((folder / "part.json").read_text())["scores"]["output"]
    assert scores["num_ignored"] == 4 * 32 * 32 and len(scores["classes"]) == 4
    assert scores["accuracy"] == pytest.approx((out == truth)[4:].mean())


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_a_target_is_the_class_or_unknown(folder: Path, dtype: type[np.generic]) -> None:
    labels = tifffile.imread(folder / "l.tif").astype(dtype)
    labels[:, :5] = 9
    tifffile.imwrite(folder / "l.tif", labels)
    chosen = recipe(folder, "classes.ignore=9", "samples.flips=[]", "samples.swap=false")
    sampler = Sampler(chosen, (1, 1, 1), str(folder))
    for number in range(5):
        due = labels[sampler.window(number).box.slices].astype(int)
        due[due == 9] = UNKNOWN
        np.testing.assert_array_equal(made(sampler, number).truth[0], due)


def test_the_loss_is_the_mean_over_known_voxels_by_weight_and_one_less_dice() -> None:
    dice_of, rng = torch.Generator().manual_seed(1), np.random.default_rng(2)
    out = torch.rand((2, 3, 4, 5, 6), generator=dice_of) * 4
    truth = rng.integers(-1, 3, (2, 1, 4, 5, 6)).astype(np.int8)
    terms = class_terms(Classes(names=("a", "b", "c"), balance=(1.0, 2.0, 5.0)), out, torch.from_numpy(truth))
    logits, index, known = out.double().numpy(), truth[:, 0].astype(int), truth[:, 0] >= 0
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    weights = np.array([1.0, 2.0, 5.0, 0.0])[index]
    entropy = -np.log(np.take_along_axis(chances, np.maximum(index, 0)[:, None], 1)[:, 0])
    assert float(terms["cross_entropy"]) == pytest.approx((entropy * weights).sum() / weights.sum(), rel=1e-5)
    shares = []
    for number in range(3):
        chance, same = chances[:, number] * known, index == number
        shares.append(2 * (chance * same).sum() / ((chance**2).sum() + same.sum()))
    assert float(terms["dice"]) == pytest.approx(1 - np.mean(shares), rel=1e-5)


def test_scores_count_known_voxels_of_each_class() -> None:
    truth, outputs = np.array([0, 0, 1, 1, -1, 2]), np.array([0, 1, 1, 1, 2, 0])
    table = confusion(outputs, truth, 4)
    assert table.sum() == 5 and table[0, 1] == 1 and table[2, 0] == 1
    np.testing.assert_allclose(dice(table), [2 / 4, 4 / 5, 0, np.nan])


def test_labels_of_64_bits_are_no_class_by_accident() -> None:
    labels = np.array([0, 2**63, 2**32 + 1], np.uint64).reshape(1, 1, 3)
    assert class_targets(signed(labels)[None], ((0,), (1,)), ()).ravel().tolist() == [0, UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["net.options.out_channels=4"], r"gives 4 channels, classes.names are 3; set the net's out_channels to 3"),
        (["net.options.output=sigmoid"], r"gives intensity 'unit', classes are learnt from logits; take off its last"),
        (['classes.names=["one"]'], r"give 2 to 127 different ones"),
        (["classes.balance=[1,2]"], r"balance has 2 weights for 3 classes"),
        (["affinities.dice=1"], r"classes are learnt from labels, and without affinities"),
        (
            ["classes={}", "net.options.output=sigmoid", "net.offsets=[[1,0,0]]"],
            r"net.offsets are not affinities",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused(folder: Path, settings: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        chosen = recipe(folder, *settings)
        check_data(chosen, describe(chosen.net), str(folder))


def test_a_label_without_a_class_is_refused_before_and_while_it_learns(folder: Path) -> None:
    labels = tifffile.imread(folder / "l.tif")
    labels[20:, 20:, 20:] = 7
    tifffile.imwrite(folder / "l.tif", labels)
    sentence = r"has label 7, classes.names are 3 classes, 0 to 2; name more, or give classes.ignore = 7"
    chosen = recipe(folder)
    with pytest.raises(PlanError, match=sentence):
        check_data(chosen, describe(chosen.net), str(folder))
    sampler = Sampler(chosen, (1, 1, 1), str(folder))
    with pytest.raises(PlanError, match=sentence):
        for number in range(50):
            made(sampler, number)
