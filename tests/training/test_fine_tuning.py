"""Fine-tunings: weights that are there are scored, trained on with another volume, and scored again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from command import giver, set_each
from trainings import Threads, make_folder

import volpipe as vp
from volpipe.errors import VolpipeError
from volpipe.geometry.affinities import OFFSETS
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import LOSSES, RUN_RECIPE, WEIGHTS, Degrade, load_training
from volpipe.resolve import shipped_starts
from volpipe.training.fine_tuning import StartingWeights, fine_tuning
from volpipe.training.logs import last_step, read_log, read_pace
from volpipe.training.task import Training

SMALL = ("samples.shape=[4,16,16]", "samples.margin=[1,2,2]", "train.threads=1")
LABELLED = ("samples.shape=[16,16,16]", "train.batch=1", "train.threads=1")
PLAIN = ("degrade.blur=0", "degrade.noise=0", "degrade.uneven=0")
HELD_OUT = slice(32, 48)  # slices of 48, as many as a window has


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tissue: raw.tif and labels.tif, 48 × 32 × 32 voxels."""
    monkeypatch.chdir(tmp_path)
    vp.sample("tissue.n5", shape=(48, 32, 32), voxel_size_nm=(10, 10, 10))
    for name in ("raw", "labels"):
        tifffile.imwrite(tmp_path / f"{name}.tif", vp.open("tissue.n5", name).open()[...])
    return tmp_path


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipe.train, a training that has ended, and b.tif, another volume."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path)
    vp.train("recipe.toml", site="threads")
    tifffile.imwrite(tmp_path / "b.tif", tifffile.imread(tmp_path / "v.tif")[::-1])
    return tmp_path


def first_entry(training: Path) -> dict[str, float]:
    entries = read_log(training)
    assert [entry["step"] for entry in entries] == list(range(len(entries)))  # step 0 once
    return entries[0]


def recipe_in(training: Path) -> vp.TrainRecipe:
    known = Training.load(training)
    assert known is not None
    return known.recipe


def test_what_it_begins_with_is_scored_as_a_run_of_the_shipped_recipe_is(folder: Path) -> None:
    settings = (*SMALL, "train.steps=2")
    result = vp.train("raw.tif", start="superres_z4", site="threads", settings=settings)
    assert result.weights.parent == folder / "raw_superres_z4.train"
    truth = tifffile.imread("raw.tif")[HELD_OUT]
    given = np.rint(truth.reshape(4, 4, 32, 32).mean(1)).astype(np.uint8)
    for name, data in (("given", given), ("truth", truth)):
        np.save(f"{name}.npy", data)
    vp.run("given.npy", "superres_z4", out="out.zarr", site="threads")
    scores = vp.evaluate("out.zarr", "truth.npy", any_place=True, site="threads").scores
    assert isinstance(scores, dict)
    assert first_entry(result.weights.parent)["psnr"] == pytest.approx(scores["output"].psnr, abs=1e-3)
    assert f"held out: psnr {scores['output'].psnr:.4g} dB before, " in " ".join(result.summary)
    predictions = (result.weights.parent / "tensors.n5/tensors/superres").iterdir()
    assert sorted(path.name for path in predictions) == ["0", "2"]


@pytest.mark.long
def test_affinities_are_scored_by_what_a_run_gives_of_pairs(folder: Path) -> None:
    """Pairs are counted here one by one; a run's affinities are rounded to bytes, as those that are scored."""
    for name in ("raw", "labels"):  # windows are larger, by the halo
        tifffile.imwrite(f"{name}.tif", tifffile.imread(f"{name}.tif")[:, :16, :16])
    settings = (*LABELLED, *PLAIN, "train.steps=1")
    result = vp.train("raw.tif", start="affinities", labels="labels.tif", site="threads", settings=settings)
    raw, labels = (tifffile.imread(f"{name}.tif")[HELD_OUT] for name in ("raw", "labels"))
    np.save("held.npy", raw)
    vp.run("held.npy", "affinities", out="out.zarr", site="threads")
    outputs, areas = vp.open("out.zarr").open()[...], []
    for output, offset in zip(outputs, OFFSETS, strict=True):
        moved = [slice(max(0, o), n + min(0, o)) for o, n in zip(offset, labels.shape, strict=True)]
        here = tuple(slice(max(0, -o), n - max(0, o)) for o, n in zip(offset, labels.shape, strict=True))
        is_near = (labels[here] == labels[tuple(moved)]) & (labels[here] > 0)
        near, apart = np.sort(output[here][is_near]), output[here][~is_near]
        below = (np.searchsorted(near, apart, "left") + np.searchsorted(near, apart, "right")) / 2
        areas.append(1 - below.mean() / len(near))
    assert first_entry(result.weights.parent)["auc"] == pytest.approx(np.mean(areas), abs=1e-4)
    assert load_recipe(result.weights.parent / RUN_RECIPE).net.offsets == OFFSETS


def test_a_training_goes_on_with_another_volume_as_any_other(trained: Path) -> None:
    settings = (*SMALL, "train.steps=8")
    result = vp.train("b.tif", start="recipe.train", site="threads", settings=settings)
    folder, recipe = trained / "b_recipe.train", recipe_in(trained / "b_recipe.train")
    assert (result.weights.parent, result.steps) == (folder, 8)
    assert recipe.net.weights == str(trained / "recipe.train" / WEIGHTS)
    assert recipe.data[0].held_out == "32:40,0:32,0:32"
    assert recipe.train.learning_rate == pytest.approx(0.2 * 2e-3)
    weights, log = result.weights.read_bytes(), read_log(folder)
    (folder / "checkpoints" / "000000008.pt").unlink()
    result.weights.unlink()
    (trained / "b.tif").rename(trained / "c.tif")  # what was chosen by the volume stays
    shutil.copy2(trained / "c.tif", trained / "b.tif")
    assert vp.train("b.tif", start="recipe.train", site="threads", settings=settings, same_input=True).steps == 8
    assert result.weights.read_bytes() == weights
    (trained / "b.tif").unlink()
    assert vp.train("b.tif", start="recipe.train", site="threads", settings=settings).was_complete
    shutil.copy2(trained / "c.tif", trained / "b.tif")
    shutil.rmtree(folder / "checkpoints")  # as one that was killed before the first
    vp.train("b.tif", start="recipe.train", site="threads", settings=settings)
    assert first_entry(folder)["psnr"] == log[0]["psnr"]


def test_weights_that_are_no_better_are_not_recommended(trained: Path) -> None:
    settings = (*SMALL, "train.steps=30", "train.learning_rate=0.5")
    result = vp.train("b.tif", start="recipe.train", site="threads", settings=settings)
    scores = [entry["psnr"] for entry in read_log(result.weights.parent) if "psnr" in entry]
    assert scores[-1] < scores[0]
    sentence = f"no better than before: {scores[0]:.5g} before, {scores[-1]:.5g} after step 30"
    assert sentence in result.summary[-1]
    assert result.run_command == ""
    assert sentence in (result.weights.parent / "report.html").read_text()


def test_the_command_says_what_it_chose_and_draws_before_and_after(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(trained, monkeypatch, capsys)
    ended = give("train", "--from", "recipe.train", "b.tif", "--config", "threads", *set_each(*SMALL, "train.steps=4"))
    assert ended.code == 0
    assert "4 steps at a learning rate of 0.0004" in ended.err
    assert "box 32:40,0:32,0:32 is scored, and not learnt from" in " ".join(ended.err.split())
    assert "dB before, " in ended.out
    page = (trained / "b_recipe.train" / "report.html").read_text()
    assert all(f"{name}, window 0" in page for name in ("Input", "Before", "Prediction", "Truth"))


def test_a_log_of_no_more_than_what_it_begins_with_has_no_pace(tmp_path: Path) -> None:
    (tmp_path / LOSSES).write_text(json.dumps({"step": 0, "psnr": 30.0, "time": 1.0}) + "\n")
    assert (read_pace(tmp_path), last_step(tmp_path)) == (None, 0)


@pytest.mark.parametrize("name", shipped_starts())
def test_shipped_weights_are_those_of_their_trainings(name: str) -> None:
    run, training = load_recipe(Path(name)), load_training(Path(f"train_{name}"))
    assert (run.net.name, run.net.options) == (training.net.name, training.net.options)
    assert run.net.trained_range == (training.normalise.low, training.normalise.high)
    assert run.net.offsets in (None, training.affinities.offsets)


def test_the_held_out_end_is_one_that_labels_say_something_of(folder: Path) -> None:
    labels = tifffile.imread("labels.tif").astype(np.int32)
    labels[30:] = -1
    tifffile.imwrite("part.tif", labels)
    start = StartingWeights.find("affinities")
    assert fine_tuning(start, "raw.tif", "labels.tif", LABELLED, ".").data[0].held_out == "32:48,0:32,0:32"
    assert fine_tuning(start, "raw.tif", "part.tif", LABELLED, ".").data[0].held_out == "0:16,0:32,0:32"
    tifffile.imwrite("none.tif", np.full_like(labels, -1))
    with pytest.raises(VolpipeError, match=r"none.tif.* has one value alone in .*; give data.0.held_out"):
        fine_tuning(start, "raw.tif", "none.tif", LABELLED, ".")


@pytest.mark.parametrize(
    ("factor", "ends"), [(1, (0, 255)), (256, None)], ids=["of 8 bits", "of others"]
)  # as a run takes them
def test_grey_levels_of_other_types_are_those_that_a_run_would_take(
    folder: Path, factor: int, ends: tuple[float, float] | None
) -> None:
    wide = tifffile.imread("raw.tif").astype(np.uint16)
    wide[0, 0, :2] = 0, 255
    tifffile.imwrite("wide.tif", wide * factor)
    recipe = fine_tuning(StartingWeights.find("superres_z4"), "wide.tif", None, SMALL, ".")
    low, high = ends or np.percentile(wide * factor, (0.5, 99.5))
    assert (recipe.normalise.low, recipe.normalise.high) == pytest.approx((low, high), rel=0.05, abs=1)
    assert recipe.net.trained_range == (recipe.normalise.low, recipe.normalise.high)


def test_numbers_of_a_training_stay_only_where_they_fit_the_volume(trained: Path) -> None:
    grey = tifffile.imread("b.tif")
    tifffile.imwrite("wide.tif", grey.astype(np.uint16) * 40 + 1000)
    start = StartingWeights.find("recipe.train")
    start = replace(start, training=start.training.model_copy(update={"degrade": Degrade(kind="bin", noise=5)}))
    assert fine_tuning(start, "b.tif", None, SMALL, ".").normalise == start.run.normalise
    recipe = fine_tuning(start, "wide.tif", None, SMALL, ".")
    low, high = np.percentile(grey, (0.5, 99.5)) * 40 + 1000
    assert (recipe.normalise.low, recipe.normalise.high) == pytest.approx((low, high), rel=0.05)
    assert recipe.degrade.noise == pytest.approx(5 * (high - low) / 255, rel=0.05)
    assert recipe.net.trained_range == (recipe.normalise.low, recipe.normalise.high)
    given = fine_tuning(start, "wide.tif", None, [*SMALL, "normalise.low=0", "normalise.high=9"], ".")
    assert (given.normalise.low, given.normalise.high) == (0, 9)
    wide = replace(start, run=start.run.model_copy(update={"normalise": recipe.normalise, "net": recipe.net}))
    assert fine_tuning(wide, "wide.tif", None, SMALL, ".").normalise == recipe.normalise
    back = fine_tuning(wide, "b.tif", None, SMALL, ".")
    assert (back.normalise.low, back.normalise.high) == back.net.trained_range == (0, 255)


def test_noise_stays_what_the_net_saw_where_grey_levels_are_others(folder: Path) -> None:
    tifffile.imwrite("unit.tif", tifffile.imread("raw.tif").astype(np.float32) / 1000)
    given = (StartingWeights.find("affinities"), "unit.tif", "labels.tif")
    recipe = fine_tuning(*given, LABELLED, ".")
    low, high = recipe.normalise.low, recipe.normalise.high
    assert low is not None and high is not None and high < 0.3
    assert recipe.degrade.noise == pytest.approx(8 * (high - low) / 255)
    assert fine_tuning(*given, [*LABELLED, "degrade.noise=0.5"], ".").degrade.noise == 0.5
    assert fine_tuning(*given, [*LABELLED, "degrade.blur=0"], ".").degrade.noise == recipe.degrade.noise


@pytest.mark.parametrize(
    ("start", "labels", "settings", "sentence"),
    [
        (
            "superres_z5",
            None,
            (),
            r"no training of superres_z5 .*did you mean '.*: affinities, superres_z2",
        ),
        ("segment", None, (), "no training of segment to begin with"),
        ("superres_z4_sharp", None, (), "trained against a discriminator, which is not kept"),
        ("affinities", None, (), "affinities learns from labels; give those of raw.tif: --labels"),
        ("superres_z4", "labels.tif", (), "superres_z4 learns from the volume alone; leave out --labels labels.tif"),
        ("superres_z2", None, ("samples.shape=[16,16,16]",), r"no axis has room for a window of \(32, 16, 16\)"),
        ("superres_z2", None, (), "axis y: a window of 64 voxels .* longer than the volume"),
        ("begun.train", None, (), "the training in begun.train has no weights.safetensors yet"),
        (None, "labels.tif", (), "labels go with --from"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_a_folder_is_made(
    folder: Path, start: str | None, labels: str | None, settings: tuple[str, ...], sentence: str
) -> None:
    tifffile.imwrite("raw.tif", tifffile.imread("raw.tif")[:, :24, :24])
    recipe = load_training(Path("train_superres_z2"), ["data.0.path=raw.tif"])
    (folder / "begun.train").mkdir()
    Training.begin(recipe, folder).store(folder / "begun.train")
    before = sorted(folder.iterdir())
    with pytest.raises(VolpipeError, match=sentence):
        vp.train("raw.tif", start=start, labels=labels, site="threads", settings=settings)
    assert sorted(folder.iterdir()) == before


def test_a_start_is_no_part_of_a_folder_by_another(trained: Path) -> None:
    settings = (*SMALL, "train.steps=2")
    shutil.copytree("recipe.train", "other.train")
    with Threads(1).start(trained) as pool:
        vp.train("b.tif", start="recipe.train", out="t", site=pool, settings=settings)
        with pytest.raises(VolpipeError, match=r"another recipe \(net.weights: "):
            vp.train("b.tif", start="other.train", out="t", site=pool, settings=settings)
