"""Trainings by the public functions: by name, by sections and with settings, on sites and on pools that are started."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from trainings import Threads, losses_in, make_folder

import volpipe as vp
from volpipe.errors import RecipeError, VolpipeError
from volpipe.recipes.training import load_training

SWEEP = '[sweep]\n"train.learning_rate" = [1e-3, 1e-2]\n'
TUNE = 'validate_every = 3\n[tune]\ntrials = 2\n"train.learning_rate" = { low = 1e-4, high = 1e-2 }\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_folder(tmp_path)


def test_a_training_gives_its_weights_the_same_by_file_by_sections_and_by_recipe(folder: Path) -> None:
    steps: list[tuple[int, int]] = []
    result = vp.train("recipe.toml", site="threads", on_progress=lambda *step: steps.append(step))
    assert result.weights == folder / "recipe.train" / "weights.safetensors"
    assert (result.steps, result.was_complete) == (6, False)
    assert steps and steps[-1][1] == 6
    assert result.summary[0].startswith("loss: ")
    assert (result.curve or folder).is_file()
    assert result.run_command.startswith("volpipe run --recipe recipe.train/run.toml v.tif")
    tree = tomllib.loads((folder / "recipe.toml").read_text())
    with Threads(1).start(folder) as pool:
        for number, recipe in enumerate((tree, load_training(folder / "recipe.toml"))):
            again = vp.train(recipe, out=folder / f"{number}.train", site=pool)
            assert again.weights.read_bytes() == result.weights.read_bytes()
    assert vp.train("recipe.toml", site="threads").was_complete


def test_settings_are_on_top_of_sections_which_stay_as_they_were(folder: Path) -> None:
    tree = tomllib.loads((folder / "recipe.toml").read_text())
    with Threads(1).start(folder) as pool:
        settings = ["train.steps=2", "data.0.held_out=0:4,:,:"]
        assert vp.train(tree, out="a.train", site=pool, settings=settings).steps == 2
        assert vp.train(load_training(folder / "recipe.toml"), out="b.train", site=pool, settings=settings).steps == 2
    assert tree == tomllib.loads((folder / "recipe.toml").read_text())


def test_names_of_a_recipe_count_from_the_search_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    with Threads(1).start(folder) as pool:
        with pytest.raises(VolpipeError, match=r"v\.tif"):
            vp.train(folder / "recipe.toml", site=pool)
        assert vp.train(folder / "recipe.toml", site=pool, search_path=folder).steps == 6


def test_a_sweep_trains_every_combination_and_counts_them(folder: Path) -> None:
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text() + SWEEP)
    counts: list[tuple[int, int, vp.TrialResult | None]] = []
    with Threads(2).start(folder) as pool:
        results = vp.sweep("recipe.toml", site=pool, on_progress=lambda *count: counts.append(count))
        tree = tomllib.loads((folder / "recipe.toml").read_text())
        again = vp.sweep(tree, out="again", site=pool)
    assert [result.state for result in results] == ["done", "done"]
    assert [count[:2] for count in counts] == [(0, 2), (1, 2), (2, 2)]
    assert counts[0][2] is None
    assert counts[1][2] in results
    assert [result.loss for result in again] == [result.loss for result in results]
    assert losses_in(folder / "recipe.sweep" / "001") == losses_in(folder / "again" / "001")


def test_a_search_gives_the_best_trial_first(folder: Path) -> None:
    pytest.importorskip("optuna")
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text() + TUNE)
    tree, counts = tomllib.loads((folder / "recipe.toml").read_text()), []
    with Threads(1).start(folder) as pool:
        results = vp.tune(tree, out="t", site=pool, on_progress=lambda *count: counts.append(count[:2]))
        assert vp.tune(tree, out="t", site=pool) == results
    assert {result.state for result in results} == {"done"}
    assert (results[0].score or 0) >= (results[1].score or 0)
    assert counts == [(0, 2), (1, 2), (2, 2)]
    assert (folder / "t" / "best.toml").is_file()


@pytest.mark.parametrize("work", [vp.train, vp.sweep, vp.tune])
def test_what_is_wrong_is_refused_before_a_folder_is_made(folder: Path, work: object) -> None:
    assert callable(work)
    tree = tomllib.loads((folder / "recipe.toml").read_text() + f"{SWEEP}{TUNE.partition(chr(10))[2]}")
    with pytest.raises(RecipeError, match=r"no recipe at nothing\.toml"):
        work("nothing.toml", site="threads")
    tree["train"] |= {"validate_every": 3, "stepps": 1}
    with pytest.raises(RecipeError, match=r"unknown key train.stepps \(did you mean"):
        work(tree, out="x", site="threads")
    del tree["train"]["stepps"]
    with pytest.raises(VolpipeError, match="this recipe has no name to call its folder by; give out"):
        work(tree, site="threads")
    assert sorted(path.name for path in folder.iterdir()) == ["recipe.toml", "v.tif"]
