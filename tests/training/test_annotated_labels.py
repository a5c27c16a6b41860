"""Labels as annotators leave them: classes that a crop leaves out, regions that overlap, and scribbles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from command import Give, giver
from trainings import made, write_cells

from volpipe.errors import PlanError, RecipeError
from volpipe.geometry.grid import Box
from volpipe.nets.load import build_net, describe
from volpipe.recipes.training import Classes, TrainRecipe, load_training
from volpipe.training.data.augment import PairMaker
from volpipe.training.data.labelled import densest
from volpipe.training.data.samples import Sampler
from volpipe.training.data.targets import (
    UNKNOWN,
    class_numbers,
    class_targets,
    partial_targets,
    region_counts,
    region_dice,
    region_targets,
    signed,
)
from volpipe.training.data.volumes import check_data
from volpipe.training.logs import read_log
from volpipe.training.loop import train
from volpipe.training.losses import class_terms
from volpipe.volumes.volume import open_volume

HEAD = """
[net]
name = "unet3d"
options = {{ features = [4, 8], out_channels = {channels}, output = "none" }}

[[data]]
path = "v.tif"
labels = "l.tif"
{data}

[samples]
shape = [8, 16, 16]
margin = [1, 2, 2]

[train]
steps = 2
batch = 2
warm_up = 1
learning_rate = 1e-2
checkpoint_every = 2
threads = 1

[classes]
"""
PARTS = HEAD.format(channels=3, data='annotated = ["cell"]\n\n[[data]]\npath = "v.tif"\nlabels = "m.tif"') + (
    'names = ["outside", "cell", "nucleus"]\n'
)
REGIONS = HEAD.format(channels=2, data='held_out = "0:8,:,:"') + (
    'names = ["whole", "core"]\nregions = true\nlabels = [[1, 2], 2]\nregions_class_order = [1, 2]\nignore = 9\n'
)
SCRIBBLES = HEAD.format(channels=2, data='held_out = "0:8,:,:"') + (
    'names = ["background", "cell"]\nlabels = [1, 2]\nignore = 0\n'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a volume of grey cells with bright nuclei, and the class of each voxel: 0, 1, 2."""
    write_cells(tmp_path)
    return tmp_path


def recipe(folder: Path, text: str, *settings: str) -> TrainRecipe:
    (folder / "recipe.toml").write_text(text)
    return load_training(folder / "recipe.toml", settings)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def dice_of(chance: np.ndarray, inside: np.ndarray) -> float:
    return float((2 * (chance * inside).sum() + 1e-6) / ((chance**2).sum() + (inside**2).sum() + 1e-6))


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


# ---- classes that a crop does not annotate


def partial_loss(logits: np.ndarray, labels: np.ndarray, left_out: list[list[int]]) -> tuple[float, float]:
    """Return cross-entropy and Dice loss: the chances of classes that are left out count as those of the first."""
    chances, known = softmax(logits.astype(float)), labels >= 0
    for chance, missing in zip(chances, left_out, strict=True):
        chance[0] += chance[missing].sum(0)
        chance[missing] = 0
    of_label = np.take_along_axis(chances, np.maximum(labels, 0)[:, None], 1)[:, 0]
    has_loss = set(range(chances.shape[1])) - set.intersection(*map(set, left_out))
    overlaps = [dice_of(chances[:, number] * known, (labels == number).astype(float)) for number in has_loss]
    return float(-np.log(of_label[known]).mean()), 1 - float(np.mean(overlaps))


def test_a_class_that_is_not_annotated_has_no_loss_and_the_first_stands_for_it() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 4, 3, 4, 5)).astype(np.float32) * 2
    labels = rng.integers(-1, 4, (2, 3, 4, 5))
    labels[0][labels[0] == 2] = 0
    labels[0][labels[0] == 3] = 1  # the first annotates class 1 alone
    flags = [(True, True, False, False), (True,) * 4]
    targets = partial_targets(torch.from_numpy(labels.astype(np.int8))[:, None], 4, flags)
    assert torch.equal(class_numbers(targets)[:, 0], torch.from_numpy(labels.astype(np.int8)))
    assert (targets[0, 2:] == UNKNOWN).all() and (targets[:, 0][torch.from_numpy(labels == 2)] == 0).all()
    out = torch.from_numpy(logits).requires_grad_()
    terms = class_terms(Classes(names=("a", "b", "c", "d")), out, targets)
    entropy, overlap = partial_loss(logits, labels, [[2, 3], []])
    assert terms["cross_entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert terms["dice"].item() == pytest.approx(overlap, rel=1e-5)
    sum(terms.values()).backward()
    assert torch.isfinite(out.grad).all()


def test_a_voxel_of_the_first_label_costs_nothing_whichever_class_was_left_out_there() -> None:
    labels = torch.zeros((1, 1, 2, 2, 2), dtype=torch.int8)
    logits = torch.full((1, 3, 2, 2, 2), -20.0)
    logits[:, 2] = 20.0  # sure of a class that nobody annotated
    for flags, is_free in (((True, True, False), True), ((True, True, True), False)):
        terms = class_terms(Classes(names=("a", "b", "c"), dice=0.0), logits, partial_targets(labels, 3, [flags]))
        assert (float(terms["cross_entropy"]) < 1e-6) == is_free


def test_labels_that_are_all_annotated_give_the_loss_of_classes_of_which_none_is_left_out() -> None:
    rng = np.random.default_rng(4)
    out = torch.from_numpy(rng.normal(size=(2, 3, 3, 4, 5)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(-1, 3, (2, 1, 3, 4, 5)).astype(np.int8))
    choice = Classes(names=("a", "b", "c"), balance=(1.0, 2.0, 3.0))
    whole, parts = (class_terms(choice, out, each) for each in (labels, partial_targets(labels, 3, [(True,) * 3] * 2)))
    assert {name: float(value) for name, value in whole.items()} == pytest.approx(
        {name: float(value) for name, value in parts.items()}, rel=1e-6
    )


def test_crops_that_annotate_different_classes_are_learnt_from_together(folder: Path) -> None:
    classes = tifffile.imread(folder / "l.tif")
    tifffile.imwrite(folder / "m.tif", classes)
    tifffile.imwrite(folder / "l.tif", np.minimum(classes, 1) * (classes != 2))  # nuclei look like what is outside
    chosen = recipe(folder, PARTS)
    check_data(chosen, describe(chosen.net), str(folder))
    train(chosen, folder / "t", str(folder))
    sampler = Sampler(chosen, (1, 1, 1), str(folder))
    maker, windows = PairMaker(sampler), [sampler.window(number) for number in range(2)]
    inputs, _ = maker.pair([maker.load(window) for window in windows])
    logits = build_net(chosen.net, str(folder))(inputs).detach().numpy()[:, :, 1:-1, 2:-2, 2:-2]
    labels = np.stack([maker.pair([maker.load(window)])[1][0].numpy() for window in windows])
    labels = np.where((labels == UNKNOWN).all(1), -1, (labels == 1).argmax(1))[:, 1:-1, 2:-2, 2:-2]
    left_out = [[2] if window.source.annotated else [] for window in windows]
    assert sorted(map(len, left_out)) in ([0, 0], [0, 1], [1, 1])
    entropy, overlap = partial_loss(logits, labels, left_out)
    first = read_log(folder / "t")[0]
    assert first["cross_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert first["dice"] == pytest.approx(overlap, rel=1e-4)


def test_a_class_that_is_left_out_counts_as_the_first_where_scores_are(folder: Path) -> None:
    classes = tifffile.imread(folder / "l.tif")
    tifffile.imwrite(folder / "l.tif", (classes == 1).astype(np.uint16))
    text = PARTS.replace('annotated = ["cell"]', 'annotated = ["cell"]\nheld_out = "0:8,:,:"')
    tifffile.imwrite(folder / "m.tif", classes)
    chosen = recipe(folder, text, "train.validate_every=2")
    train(chosen, folder / "t", str(folder))
    last = read_log(folder / "t")[-1]
    assert {name for name in last if name.startswith("dice ")} == {"dice outside", "dice cell"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (['data.0.annotated=["lysosome"]'], "lysosome is no class; name some of classes.names, outside, cell, nucleus"),
        (["classes={}", 'net.options.output="sigmoid"'], "cell is no class; name some of classes.names, which are"),
        (["classes.labels=[0,1]"], "labels are of 2 classes, names are 3"),
        (["classes.labels=[0,1,1]"], "1 is of two classes; set regions = true if classes overlap"),
        (["classes.labels=[0,1,2]", "classes.ignore=2"], "ignore names label 2, which is in labels too"),
        (["classes.regions=true"], "regions need labels, a list for each of names"),
        (["classes.regions_class_order=[1,2,3]"], "regions_class_order is for classes that overlap"),
        (
            ["classes.regions=true", "classes.labels=[1,2,3]", "classes.regions_class_order=[1]"],
            "regions_class_order has 1 labels for 3 names",
        ),
        (["samples.labelled=2"], "labelled"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(folder: Path, settings: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe(folder, PARTS, *settings)


def test_labels_of_a_class_that_is_left_out_are_refused(folder: Path) -> None:
    tifffile.imwrite(folder / "m.tif", tifffile.imread(folder / "l.tif"))
    chosen = recipe(folder, PARTS)  # its first labels have nuclei
    with pytest.raises(PlanError, match=r"has labels of nucleus, which data.annotated leaves out: it names cell"):
        check_data(chosen, describe(chosen.net), str(folder))


# ---- regions


def test_a_voxel_is_in_all_regions_that_list_its_label() -> None:
    labels = signed(np.array([0, 1, 2, 9, 2], np.uint16).reshape(1, 1, 5))[None]
    both = region_targets(labels, ((1, 2), (2,)), (9,), [(True, True)])
    assert both[0, :, 0, 0].tolist() == [[0, 1, 1, UNKNOWN, 1], [0, 0, 1, UNKNOWN, 1]]
    one = region_targets(labels, ((1, 2), (2,)), (9,), [(True, False)])
    assert one[0, 0, 0, 0].tolist() == [0, 1, 1, UNKNOWN, 1] and (one[0, 1] == UNKNOWN).all()
    numbers = signed(np.array([[[1, 2**64 - 1, 5]]], np.uint64))[None]
    assert class_targets(numbers, ((5,), (1,)), (2**64 - 1,)).ravel().tolist() == [1, UNKNOWN, 0]


@pytest.mark.parametrize("balance", [(), (3.0, 1.0)])
def test_the_loss_of_regions_is_binary_cross_entropy_and_one_less_dice_over_known_voxels(
    balance: tuple[float, ...],
) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, 2, 3, 4, 5)).astype(np.float32)
    truth = rng.integers(-1, 2, logits.shape).astype(np.int8)
    truth[1, 1] = UNKNOWN  # not annotated
    choice = Classes(names=("a", "b"), labels=((1, 2), (2,)), regions=True, balance=balance)
    terms = class_terms(choice, torch.from_numpy(logits), torch.from_numpy(truth))
    chance, known = 1 / (1 + np.exp(-logits.astype(float))), truth >= 0
    entropy = -np.where(truth == 1, np.log(chance), np.log(1 - chance))
    weights = known * np.where(truth == 1, np.array(balance or (1.0, 1.0)).reshape(1, 2, 1, 1, 1), 1.0)
    assert terms["cross_entropy"].item() == pytest.approx((entropy * weights).sum() / weights.sum(), rel=1e-5)
    overlaps = [dice_of((chance * known)[:, c], (truth[:, c] == 1).astype(float)) for c in range(2)]
    assert float(terms["dice"]) == pytest.approx(1 - np.mean(overlaps), rel=1e-5)


def test_scores_of_regions_count_known_voxels_above_a_half() -> None:
    chances = np.array([0.9, 0.6, 0.4, 0.9, 0.1]).reshape(1, 1, 1, 5)
    truth = np.array([1, 0, 1, UNKNOWN, 0]).reshape(1, 1, 1, 5)
    counts = region_counts(chances, truth)
    assert counts.tolist() == [[1, 2, 2]] and region_dice(counts).tolist() == [0.5]
    assert np.isnan(region_dice(np.zeros((1, 3), int))).all()


def test_a_net_of_regions_is_trained_scored_and_run_to_labels(folder: Path, give: Give) -> None:
    (folder / "recipe.toml").write_text(REGIONS)
    ended = give(
        "train", "recipe.toml", "--config", "threads", "--set", "train.validate_every=2", "--set", "train.steps=20",
        "--set", "train.checkpoint_every=20", "--set", "train.predict_every=20",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    last = read_log(folder / "recipe.train")[-1]
    run = ("run", "v.tif", "--recipe", "recipe.train/run.toml", "--config", "threads")
    assert give(*run, "-o", "labels.zarr").code == 0
    out = [part for key in ("kind=image", "labels=[]", "intensity=raw") for part in ("--set", f"output.{key}")]
    ended = give(*run, *out, "-o", "chances.zarr")
    assert ended.code == 0, ended.err
    labels, chances = (open_volume(folder / f"{name}.zarr").open()[...] for name in ("labels", "chances"))
    due = np.where(chances[1] > 0.5, 2, np.where(chances[0] > 0.5, 1, 0))
    np.testing.assert_array_equal(labels, due)
    truth = tifffile.imread(folder / "l.tif")[:8]
    box = open_volume(folder / "recipe.train" / "validation.zarr", "s0").open()[...]
    assert box.shape[1:] == truth.shape
    assert 0 <= last["mean dice"] <= 1 and {"dice whole"} <= set(last)
    predicted = open_volume(folder / "recipe.train" / "tensors.n5", "tensors/unet3d/20").open()[...]
    assert predicted.shape[1] == 2 and 0 <= predicted.min() <= predicted.max() <= 1
    ended = give("evaluate", "labels.zarr", "l.tif", "--classes", "--config", "threads", "--json", "s.json")
    assert ended.code == 0, ended.err
    scores = json.loads((folder / "s.json").read_text())["scores"]["output"]
    assert scores["accuracy"] == pytest.approx((labels == tifffile.imread(folder / "l.tif")).mean())


def test_a_label_in_no_region_is_refused(folder: Path) -> None:
    labels = tifffile.imread(folder / "l.tif")
    labels[16:] = 7
    tifffile.imwrite(folder / "l.tif", labels)
    chosen = recipe(folder, REGIONS)
    sentence = (
        r"has label 7, which is of no class: classes.labels are 0, 1, 2; list it there, or give classes.ignore = 7"
    )
    with pytest.raises(PlanError, match=sentence):
        check_data(chosen, describe(chosen.net), str(folder))


# ---- scribbles


def scribble(folder: Path) -> np.ndarray:
    """Leave 30 voxels of the labels, 1 outside and 2 inside of cells, and 0 elsewhere; return them."""
    classes = tifffile.imread(folder / "l.tif")
    places = np.random.default_rng(7).choice(np.arange(10, 32 * 32 * 32), 30, replace=False)
    known = np.zeros(classes.size, np.uint8)
    known[places] = 1 + (classes.ravel()[places] > 0)
    labels = known.reshape(classes.shape)
    tifffile.imwrite(folder / "l.tif", labels)
    return labels


def test_windows_lie_about_scribbles_each_of_which_is_drawn(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = scribble(folder)
    chosen = recipe(folder, SCRIBBLES, "samples.flips=[]", "samples.swap=false")
    check_data(chosen, describe(chosen.net), str(folder))
    assert "windows are drawn about those that are (samples.labelled)" in caplog.text
    sampler, seen = Sampler(chosen, (1, 1, 1), str(folder)), np.zeros(labels.shape, bool)
    for number in range(300):
        box = sampler.window(number).box
        assert box.start[0] >= 8, box  # what is held out has scribbles too
        seen[box.slices] = True
        assert labels[box.slices][1:-1, 2:-2, 2:-2].any(), box  # within the margin, where the loss is
    counted = (slice(9, -1), slice(2, -2), slice(2, -2))
    assert seen[counted][labels[counted] > 0].all()
    target = made(sampler, 0).truth
    np.testing.assert_array_equal(target[0], labels[sampler.window(0).box.slices].astype(int) - 1)
    anywhere = Sampler(recipe(folder, SCRIBBLES, "samples.labelled=0"), (1, 1, 1), str(folder))
    assert not all(labels[anywhere.window(number).box.slices].any() for number in range(300))


def test_a_volume_with_few_scribbles_is_learnt_scored_and_run(folder: Path, give: Give) -> None:
    labels = scribble(folder)
    (folder / "recipe.toml").write_text(SCRIBBLES)
    ended = give("train", "recipe.toml", "--config", "threads", "--set", "train.validate_every=2")
    assert ended.code == 0, ended.err
    log = read_log(folder / "recipe.train")
    assert all(entry["loss"] > 0 and entry["norm"] > 0 for entry in log)
    run = ("--recipe", "recipe.train/run.toml", "--config", "threads")
    assert give("run", "v.tif", *run, "-o", "out.zarr").code == 0
    out = open_volume(folder / "out.zarr").open()[...]
    assert set(np.unique(out)) <= {1, 2}
    tifffile.imwrite(
        folder / "part.tif", tifffile.imread(folder / "v.tif")[:8]
    )  # mirrored where it ends, as a score is
    assert give("run", "part.tif", *run, "-o", "part.zarr").code == 0
    found, truth = open_volume(folder / "part.zarr").open()[...], labels[:8]
    for number, name in ((1, "background"), (2, "cell")):
        both = ((found == number) & (truth == number)).sum()
        due = 2 * both / ((found == number)[truth > 0].sum() + (truth == number).sum())
        assert log[-1][f"dice {name}"] == pytest.approx(due)
    ended = give("evaluate", "out.zarr", "l.tif", "--classes", "--config", "threads", "--json", "s.json")
    assert ended.code == 0, ended.err
    scores = json.loads((folder / "s.json").read_text())["scores"]["output"]
    assert scores["num_ignored"] == int((labels == 0).sum())
    assert scores["accuracy"] == pytest.approx((out == labels)[labels > 0].mean())
    assert {each["name"] for each in scores["classes"]} >= {"background", "cell"}
    ended = give(
        "train", "--from", "recipe.train", "v.tif", "--labels", "l.tif", "--out", "more", "--config", "threads",
        "--set", "train.steps=2", "--set", "data.0.test=0:8,:,:",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "test: mean dice" in ended.out and "held out: mean dice" in ended.out


def test_labels_without_a_known_voxel_are_refused(folder: Path) -> None:
    labels = np.zeros((32, 32, 32), np.uint8)
    labels[2, :4] = 1
    tifffile.imwrite(folder / "l.tif", labels)
    sampler = Sampler(recipe(folder, SCRIBBLES), (1, 1, 1), str(folder))
    with pytest.raises(PlanError, match=r"have no known voxel in 1:31,2:30,2:30, outside of what is held out"):
        sampler.window(0)


def test_a_large_held_out_box_is_scored_where_scribbles_are() -> None:
    labels = np.zeros((40, 30, 20), np.uint8)
    labels[1, 2, 3], labels[31, 5:9, 5] = 1, 2
    whole = Box((0, 0, 0), (40, 30, 20))
    box = densest(whole, (8, 8, 8), lambda part: labels[part.slices], 0)
    assert box.shape == (8, 8, 8) and whole.contains(box) and (labels[box.slices] == 2).sum() == 4
