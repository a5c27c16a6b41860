"""Searches: they find the best of a range, stop what lags behind, and go on with what died."""

from __future__ import annotations

import builtins
import json
import signal
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from command import begin, finish, giver, processes_in, wait_until
from trainings import Threads, losses_in, make_folder

from volpipe.errors import RecipeError, RunError, RunStopped
from volpipe.recipes.training import LOSSES, STOP, WEIGHTS, load_training
from volpipe.training.logs import last_step
from volpipe.training.loop import checkpoints, train
from volpipe.training.search import optuna as optuna_module
from volpipe.training.search.optuna import BEST, Range, Study, Tuning
from volpipe.training.search.trials import STUDY, OnEnd, TrialResult, run_search

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

TUNE = """
validate_every = 2

[tune]
trials = 4
pruner = "none"
"train.learning_rate" = { low = 1e-4, high = 1e-2, log = true }
samples.shape = { choices = [[4, 16, 16], [6, 16, 16]] }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, TUNE)


def tuned(
    folder: Path, workers: Threads, *settings: str, fresh: bool = False, on_end: OnEnd = lambda result: None
) -> list[TrialResult]:
    tuning = Tuning.load(folder / "recipe.toml", settings)
    return run_search(tuning, folder / "t", workers.start, search_path=folder, fresh=fresh, on_end=on_end)


# ---- recipes


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("[tune]", "[tne]", r"has no \[tune\]; add one"),
        ("trials = 4", "trials = 0", r"trials: 0 is not a whole number from 1$"),
        ("low = 1e-4", "low = 1.0", r"low 1.0 must be below high 0.01"),
        ("low = 1e-4", "low = -1.0", r"low -1.0 must be below high 0.01, and above 0 for log"),
        ("low = 1e-4", "low = -1e-4", r"above 0 for log"),
        ("log = true", "lg = true", r"train.learning_rate: unknown key lg \(did you mean 'log'"),
        ("train.learning_rate", "train.learning_rte", r"unknown key train.learning_rte \(did you mean"),
        (
            "{ choices = [[4, 16, 16], [6, 16, 16]] }",
            "[4, 16, 16]",
            r"tune: samples.shape is \[4, 16, 16\]; give a range",
        ),
        ("[6, 16, 16]", "[6, 16, 18]", r"swap needs as many voxels on y as on x"),
        ("train.learning_rate", "train.ranks", r"train.ranks changes no score"),
        ("validate_every = 2", "", r"trials are compared by their scores; give train.validate_every"),
    ],
)
def test_a_search_that_is_wrong_is_refused_before_it_starts(folder: Path, old: str, new: str, sentence: str) -> None:
    text = (folder / "recipe.toml").read_text()
    assert old in text
    (folder / "recipe.toml").write_text(text.replace(old, new))
    with pytest.raises(RecipeError, match=sentence):
        Tuning.load(folder / "recipe.toml")


def test_ranges_of_whole_numbers_give_whole_numbers() -> None:
    assert Range(low=1, high=4).ends == (1, 4)
    assert isinstance(Range.model_validate({"low": 1, "high": 4}).low, int)
    assert isinstance(Range.model_validate({"low": 1.0, "high": 4}).low, float)


def test_without_optuna_the_command_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def importing(name: str, *rest: Any) -> Any:
        if name == "optuna":
            raise ImportError("no module")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(RunError, match=r"pip install 'volpipe\[tune\]'"):
        tuned(folder, Threads(1))


# ---- searches


def test_trials_stay_in_their_ranges_and_the_best_has_the_highest_score(folder: Path) -> None:
    workers = Threads(2)
    rows = tuned(folder, workers)
    assert sorted(row.number for row in rows) == [0, 1, 2, 3]
    assert (workers.most, {row.state for row in rows}) == (2, {"done"})
    assert all(1e-4 <= row.values["train.learning_rate"] <= 1e-2 for row in rows)
    assert all(row.values["samples.shape"] in ([4, 16, 16], [6, 16, 16]) for row in rows)
    logged = {
        name.name: json.loads(name.joinpath(LOSSES).read_text().splitlines()[-1]) for name in (folder / "t").glob("0*")
    }
    best = max(logged, key=lambda name: logged[name]["psnr"])
    assert rows[0].number == int(best)
    assert [row.score for row in rows] == sorted((entry["psnr"] for entry in logged.values()), reverse=True)


def test_the_recipe_of_the_best_trains_to_its_weights(folder: Path) -> None:
    best = tuned(folder, Threads(1), "tune.trials=2")[0]
    assert "tune" not in tomllib.loads((folder / "t" / BEST).read_text())
    train(load_training(folder / "t" / BEST), folder / "again", str(folder))
    assert (folder / "again" / WEIGHTS).read_bytes() == (folder / "t" / f"{best.number:03}" / WEIGHTS).read_bytes()


def test_the_same_seed_draws_the_same_values_and_a_search_that_goes_on_draws_others(folder: Path) -> None:
    first = [row.values for row in sorted(tuned(folder, Threads(1), "tune.trials=2"), key=lambda row: row.number)]
    again = tuned(folder, Threads(1), "tune.trials=2", fresh=True)
    assert [row.values for row in sorted(again, key=lambda row: row.number)] == first
    more = sorted(tuned(folder, Threads(1), "tune.trials=4"), key=lambda row: row.number)
    assert [row.values for row in more[:2]] == first
    rates = [row.values["train.learning_rate"] for row in more]
    assert len(set(rates)) == 4


def test_a_search_of_another_recipe_or_other_ranges_is_refused(folder: Path) -> None:
    tuned(folder, Threads(1), "tune.trials=1")
    with pytest.raises(RecipeError, match=r"another recipe \(samples.swap: true -> false\)"):
        tuned(folder, Threads(1), "samples.swap=false")
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("high = 1e-2", "high = 1e-1"))
    with pytest.raises(RecipeError, match=r"tune.ranges.train.learning_rate.high: 0.01 -> 0.1"):
        tuned(folder, Threads(1))


# ---- trials that stop, fail and die


def test_a_training_that_is_asked_to_stop_ends_where_it_validates_and_can_go_on(folder: Path) -> None:
    recipe = Tuning.load(folder / "recipe.toml").recipe
    train(recipe, folder / "whole", str(folder))
    (folder / "cut").mkdir()
    (folder / "cut" / STOP).touch()
    assert train(recipe, folder / "cut", str(folder)) == 2
    assert [path.stem for path in checkpoints(folder / "cut" / "checkpoints")] == ["000000002"]
    assert not (folder / "cut" / WEIGHTS).exists()
    (folder / "cut" / STOP).unlink()
    train(recipe, folder / "cut", str(folder))
    assert losses_in(folder / "cut") == losses_in(folder / "whole")


def test_what_lags_behind_the_median_is_stopped_and_what_does_not_is_not(folder: Path) -> None:
    """Three trials that are done set the median; scores of a fourth are written as its training would."""
    tuned(folder, Threads(1), "tune.trials=3", "tune.pruner=median")
    study = Study(Tuning.load(folder / "recipe.toml", ["tune.trials=5", "tune.pruner=median"]), folder / "t")
    good, bad = study.ask(), study.ask()
    for trial, psnr in ((good, 99.0), (bad, 1.0)):
        (folder / "t" / trial.name).mkdir()
        (folder / "t" / trial.name / LOSSES).write_text(json.dumps({"step": 2, "loss": 1.0, "psnr": psnr}) + "\n")
        study.watch(trial)
    assert not (folder / "t" / good.name / STOP).exists()
    assert (folder / "t" / bad.name / STOP).exists()


@pytest.mark.long
def test_a_trial_that_is_to_be_pruned_stops_in_order_and_its_worker_takes_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.number == 1

    monkeypatch.setattr(optuna_module, "_pruner", lambda tuning: Second())
    rows = {row.number: row for row in tuned(folder, Threads(1), "tune.trials=3", "train.steps=120")}
    assert [rows[number].state for number in range(3)] == ["done", "pruned", "done"]
    assert 0 < rows[1].steps < 120
    assert rows[1].steps % 2 == 0  # where it validates
    assert not (folder / "t" / "001" / WEIGHTS).exists()


def test_where_the_first_trials_all_fail_the_search_stops(folder: Path) -> None:
    with pytest.raises(RunStopped, match=r"the first 3 trials all fail, .* the loss is (nan|inf)"):
        tuned(folder, Threads(1), "degrade.noise=1e38", "degrade.whole=false")


def test_trials_of_a_driver_that_died_go_on_in_their_folders_and_count_once(folder: Path) -> None:
    """The storage is left as a killed driver would: one trial under way, and a line that was cut off."""
    tuning = Tuning.load(folder / "recipe.toml")
    (folder / "t").mkdir()
    died = Study(tuning, folder / "t").ask()
    train(
        died.recipe.model_copy(update={"train": died.recipe.train.model_copy(update={"steps": 4})}),
        folder / "x",
        str(folder),
    )
    with (folder / "t" / STUDY).open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    workers = Threads(1)
    rows = {row.number: row for row in tuned(folder, workers)}
    assert sorted(rows) == [0, 2, 3, 4]  # the dead one went on as trial 1 of Optuna's, in its own folder
    assert workers.sent[0] == "000"
    assert rows[0].values == died.values
    assert {row.state for row in rows.values()} == {"done"}


# ---- the command


@pytest.mark.long
@pytest.mark.slow
def test_killed_with_its_workers_a_search_goes_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGKILL of every process, on Parsl's own workers."""
    text = (folder / "recipe.toml").read_text().replace("steps = 6", "steps = 60")
    (folder / "recipe.toml").write_text(text)
    process = begin(folder, "tune", "recipe.toml", VOLPIPE_WORKERS="2")
    wait_until(lambda: last_step(folder / "recipe.tune" / "000") > 3, 120)
    for killed in [process, *processes_in(folder)]:
        with suppress(psutil.NoSuchProcess):  # some end with those before them
            killed.send_signal(signal.SIGKILL)
    assert finish(folder, process).code == -signal.SIGKILL
    wait_until(lambda: not processes_in(folder), 30)
    monkeypatch.setenv("VOLPIPE_WORKERS", "2")
    ended = giver(folder, monkeypatch, capsys)("tune", "recipe.toml")
    assert ended.code == 0, ended.err
    assert "the best is trial 0" in ended.out
    trained = [path.parent.name for path in (folder / "recipe.tune").glob(f"*/{WEIGHTS}")]
    assert len(trained) == 4
    for name in trained:
        assert [
            json.loads(line)["step"] for line in (folder / "recipe.tune" / name / LOSSES).read_text().splitlines()
        ] == [*range(1, 61)]
