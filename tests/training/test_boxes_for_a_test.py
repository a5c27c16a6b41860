"""Test boxes: nothing is learnt there, nothing is chosen by them, and the chosen net alone is scored there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from command import Give, giver
from safetensors.torch import load_file
from trainings import Threads, make_folder

from volpipe.errors import PlanError, RecipeError
from volpipe.nets.load import describe
from volpipe.nets.trained import BoxScores, Trained
from volpipe.recipes.training import WEIGHTS, TrainRecipe, load_training
from volpipe.training.data.samples import Sampler
from volpipe.training.data.volumes import check_data
from volpipe.training.logs import read_log
from volpipe.training.loop import train
from volpipe.training.search.grid import Sweep
from volpipe.training.search.trials import TrialResults, run_search
from volpipe.workflow.outcome import outcome_lines

SWEEP = """
validate_every = 3

[sweep]
"train.learning_rate" = [1e-3, 1e-2]
"""
POINTWISE = """from torch import nn


def net():
    layer = nn.Conv3d(1, 1, 1)
    nn.init.constant_(layer.weight, 0.5)
    nn.init.zeros_(layer.bias)
    return layer
"""
TEST = "data.0.test=32:40,:,:"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a volume of 40 × 32 × 32 voxels, of which 0:8 is held out, and the recipe of a sweep."""
    return make_folder(tmp_path, SWEEP)


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


def test_no_window_touches_a_test_box_with_its_context(folder: Path) -> None:
    chosen = recipe(folder, "data.0.test=24:28,:,:", "degrade.kind=gaussian")
    sampler = Sampler(chosen, (2, 1, 1), str(folder))
    starts = set()
    for number in range(200):
        box = sampler.window(number).box
        assert not (box.start[0] < 28 and box.stop[0] > 24), box
        starts.add(box.start[0] >= 28)
    assert starts == {True, False}  # there are windows on both sides


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.0.test=6:14,:,:"], r"data.test of v.tif, 6:14,0:32,0:32, shares voxels with the held-out box 0:8,0:32"),
        (
            ["data.0.test=8:16,:,:", "degrade.kind=gaussian"],
            r"held-out box 0:8,0:32,0:32 with the context of its input",
        ),
        (["data.0.test=8:40,:,:"], r"held_out or test .* leaves no room in"),
        (["data.0.test=30:50,:,:"], r"data.test of v.tif: axis z: 30:50"),
    ],
)
def test_a_test_box_lies_apart_from_what_is_held_out_and_leaves_room(
    folder: Path, settings: list[str], sentence: str
) -> None:
    chosen = recipe(folder, *settings)
    with pytest.raises(PlanError, match=sentence):
        check_data(chosen, describe(chosen.net), str(folder))
    fitting = recipe(folder, "data.0.test=8:16,:,:")
    check_data(fitting, describe(fitting.net), str(folder))


def test_a_box_held_out_by_another_entry_of_the_same_volume_counts_as_well(folder: Path) -> None:
    text = (folder / "recipe.toml").read_text()
    (folder / "same.tif").symlink_to(folder / "v.tif")
    (folder / "recipe.toml").write_text(
        text.replace("[degrade]", '[[data]]\npath = "same.tif"\ntest = "4:12,:,:"\n\n[degrade]')
    )
    chosen = recipe(folder)
    with pytest.raises(
        PlanError, match=r"data.test of same.tif, 4:12,0:32,0:32, shares voxels with the held-out box 0:8"
    ):
        check_data(chosen, describe(chosen.net), str(folder))


def test_stored_windows_have_no_test_box_and_a_search_that_chooses_by_nothing_none_either(folder: Path) -> None:
    with pytest.raises(RecipeError, match="test needs voxels, not stored windows"):
        recipe(folder, TEST, "data.0.stored=true")
    with pytest.raises(RecipeError, match=r"data.test is for the best training, which a score of data.held_out tells"):
        Sweep.load(folder / "recipe.toml", [TEST, "train.validate_every=0"])


def test_the_score_of_a_test_is_that_of_the_last_weights_on_its_voxels_alone(folder: Path) -> None:
    (folder / "net.py").write_text(POINTWISE)
    chosen = recipe(
        folder, "net.name=net.py:net", "net.options={}", "degrade.kind=none", "samples.margin=[0,0,0]", TEST
    )
    train(chosen, folder / "t", str(folder))
    truth = tifffile.imread(folder / "v.tif")[32:].astype(np.float32)
    weights = load_file(folder / "t" / WEIGHTS)
    made = (truth / 127.5 - 1) * weights["weight"].item() + weights["bias"].item()
    made = np.clip(np.rint((made + 1) * 127.5), 0, 255)
    due = 10 * np.log10(255**2 / np.square(made - truth).mean())
    trained = Trained.of(folder / "t" / WEIGHTS)
    assert trained is not None and trained.test is not None and trained.held_out is not None
    assert trained.test.scores == {"psnr": pytest.approx(due, abs=0.01)}
    assert (trained.test.boxes, trained.test.num_values) == (("32:40,0:32,0:32 of v.tif",), 1)
    logged = [entry["psnr"] for entry in read_log(folder / "t") if "psnr" in entry]
    assert trained.held_out == BoxScores(
        boxes=("0:8,0:32,0:32 of v.tif",), scores={"psnr": logged[-1]}, num_values=len(logged)
    )
    lines = [*outcome_lines(folder / "t")]
    assert f"best of {len(logged)} values" in lines[1]
    assert lines[2] == (
        f"test: psnr {due:.4g} dB in 32:40,0:32,0:32 of v.tif, by which nothing was chosen (1 value looked at)"
    )


def test_the_best_of_a_sweep_alone_is_tested_and_says_what_chose_it(folder: Path) -> None:
    search, workers = Sweep.load(folder / "recipe.toml", [TEST]), Threads(2)

    def swept() -> TrialResults:
        results = run_search(search, folder / "s", workers.start, search_path=folder)
        assert isinstance(results, TrialResults)
        return results

    results = swept()
    best = max(results, key=lambda row: row.score or 0.0)
    assert results.best == folder / "s" / f"{best.number:03}"
    assert sorted(workers.sent) == sorted(["000", "001", f"{best.number:03}"])
    trained = [Trained.of(folder / "s" / name / WEIGHTS) for name in ("000", "001")]
    assert [each is not None and each.test is not None for each in trained] == [
        best.number == number for number in range(2)
    ]
    chosen = trained[best.number]
    assert chosen is not None and chosen.held_out is not None and chosen.test is not None
    assert (chosen.held_out.num_values, chosen.held_out.chose) == (4, "the best of 2 trainings")
    assert chosen.held_out.scores["psnr"] == pytest.approx(best.score)
    stored = json.loads((folder / "s" / "choice.json").read_text())
    assert stored == {"trial": best.number, **chosen.model_dump(mode="json", include={"held_out", "test"})}

    alone = load_training(folder / "recipe.toml", [TEST, f"train.learning_rate={best.values['train.learning_rate']}"])
    train(alone, folder / "t", str(folder))
    again = Trained.of(folder / "t" / WEIGHTS)
    assert again is not None and again.test == chosen.test
    assert (folder / "t" / WEIGHTS).read_bytes() == (results.best / WEIGHTS).read_bytes()

    assert [row.state for row in swept()] == ["done", "done"] and len(workers.sent) == 3  # it is not tested once more
    assert json.loads((folder / "s" / "choice.json").read_text()) == stored


def test_a_sweep_prints_and_reports_what_chose_its_best(folder: Path, give: Give) -> None:
    ended = give("sweep", "recipe.toml", "--config", "threads", "--out", "s", "--set", TEST)
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "which chose the best of 2 trainings (4 values looked at), so that this score flatters it" in said
    assert "in 32:40,0:32,0:32 of v.tif, by which nothing was chosen (1 value looked at)" in said
    page = (folder / "s" / "report.html").read_text()
    assert "which chose the best of 2 trainings (4 values looked at)" in page and "32:40,0:32,0:32 of v.tif" in page
    ended = give("sweep", "recipe.toml", "--config", "threads", "--out", "plain")
    assert ended.code == 0, ended.err
    assert "; data.test gives a box by which nothing is chosen" in " ".join(ended.out.split())
