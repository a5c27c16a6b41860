"""Successive halving: of every three trials that come as far the best goes on, and a bad one takes few steps."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from trainings import Threads, losses_in, make_folder

from volpipe.blockwise import loop
from volpipe.recipes.training import LOSSES, STOP, WEIGHTS
from volpipe.training.logs import read_scores
from volpipe.training.loop import TrainLog, TrainState
from volpipe.training.search.optuna import Study, Tuning
from volpipe.training.search.trials import Trial, run_search

STEPS = 8
TUNE = f"""
steps = {STEPS}
validate_every = 2

[tune]
trials = 6
pruner = "halving"
"degrade.noise" = {{ choices = [0.0, 80.0] }}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe whose trials see clean slices, or such as nobody can make anything of."""
    make_folder(tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text().replace("steps = 6\n", "") + TUNE)
    return tmp_path


@pytest.fixture
def _in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each training wait where it validates until the search has seen its score, however slow either is.

    The search looks when the training waits: a look between the score and the waiting would stop it a rung early.
    """
    written, seen = dict[str, int](), dict[str, int]()
    watch, write = Study.watch, TrainLog.write

    def watching(study: Study, trial: Trial) -> None:
        scores = read_scores(study.folder / trial.name)
        if scores and scores[-1][0] > written.get(trial.name, 0):
            return
        watch(study, trial)
        seen[trial.name] = scores[-1][0] if scores else 0

    def writing(train_log: TrainLog, state: TrainState, entry: Mapping[str, float]) -> bool:
        stops = write(train_log, state, entry)
        written[train_log.folder.name] = state.step
        deadline = time.monotonic() + 60
        while state.step % 2 == 0 and state.step < STEPS and not stops:
            if seen.get(train_log.folder.name, 0) >= state.step:
                break
            assert time.monotonic() < deadline, f"nobody looked at the score of step {state.step}"
            time.sleep(0.005)
        return stops

    monkeypatch.setattr(Study, "watch", watching)
    monkeypatch.setattr(TrainLog, "write", writing)
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.02)


@pytest.mark.long
@pytest.mark.usefixtures("_in_step")
def test_what_is_worse_than_the_best_at_the_first_rung_takes_few_steps_and_the_rest_all(folder: Path) -> None:
    tuning = Tuning.load(folder / "recipe.toml")
    rows = sorted(run_search(tuning, folder / "t", Threads(1).start, search_path=folder), key=lambda row: row.number)
    is_bad = [row.values["degrade.noise"] > 0 for row in rows]
    lags = [bad and not all(is_bad[:number]) for number, bad in enumerate(is_bad)]  # a good one came before
    assert 2 <= sum(lags) < len(rows) - 1
    # The first rung is at step 2: what is worse there than the best before is asked to stop, and does so at step 4.
    assert [row.state for row in rows] == ["pruned" if lag else "done" for lag in lags]
    assert [row.steps for row in rows] == [4 if lag else STEPS for lag in lags]
    assert [len(losses_in(folder / "t" / f"{row.number:03}")) for row in rows] == [row.steps for row in rows]
    weights = {int(path.parent.name) for path in (folder / "t").glob(f"*/{WEIGHTS}")}
    assert weights == {number for number, lag in enumerate(lags) if not lag}


@pytest.mark.parametrize(
    ("step", "scores", "stopped"),
    [
        # Below six trials the best so far goes on; of six to eight the best two; of nine the best three.
        (2, [10, 20, 5, 15, 12, 18, 9, 17, 19], {2, 3, 4, 6, 7}),
        (4, [10, 20, 5, 15, 12, 18, 9, 17, 19], {2, 3, 4, 6, 7}),
        (6, [10, 5, 20], {1}),
    ],
)
def test_of_every_three_the_best_goes_on(folder: Path, step: int, scores: list[float], stopped: set[int]) -> None:
    """Scores are written as the trials' trainings would."""
    (folder / "t").mkdir()
    study = Study(Tuning.load(folder / "recipe.toml", ["tune.trials=9"]), folder / "t")
    for psnr in scores:
        trial = study.ask()
        (folder / "t" / trial.name).mkdir()
        (folder / "t" / trial.name / LOSSES).write_text(json.dumps({"step": step, "loss": 1.0, "psnr": psnr}) + "\n")
        study.watch(trial)
    assert {int(path.parent.name) for path in (folder / "t").glob(f"*/{STOP}")} == stopped


def test_between_rungs_nothing_is_pruned(folder: Path) -> None:
    (folder / "t").mkdir()
    study = Study(Tuning.load(folder / "recipe.toml"), folder / "t")
    good, falling = study.ask(), study.ask()
    for trial, told in ((good, {2: 20.0}), (falling, {2: 21.0, 4: 1.0})):
        place = folder / "t" / trial.name
        place.mkdir()
        for step, psnr in told.items():
            with (place / LOSSES).open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0, "psnr": psnr}) + "\n")
            study.watch(trial)
        assert not (place / STOP).exists()
