"""The log in the folder of a training, a sweep or a search: who began what, what went wrong and why, how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import giver
from trainings import Threads, make_folder

import volpipe
from volpipe.errors import RunError, RunStopped, SiteError
from volpipe.recipes.training import LOSSES, load_training
from volpipe.training.driver import run_training
from volpipe.training.logs import open_log, read_log, read_scores
from volpipe.training.search.grid import Sweep
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.trials import run_search
from volpipe.workflow.outcome import outcome_lines

TABLES = """
validate_every = 2

[sweep]
"train.learning_rate" = [1e-3, 1e30]

[tune]
trials = 2
"train.learning_rate" = { low = 1e-4, high = 1e-2 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, TABLES)


def learn(folder: Path, workers: Threads, *settings: str) -> None:
    recipe = load_training(folder / "recipe.toml", settings)
    run_training(recipe, folder / "t", workers.start, search_path=folder)


def lines_in(folder: Path) -> list[str]:
    """Return the lines of a log without time and module."""
    lines = (folder / "volpipe.log").read_text(encoding="utf-8").splitlines()
    return [line.split(" ", 4)[-1] if line[:2] == "20" else line for line in lines]


# ---- a training


def test_scores_of_nothing_are_no_scores(tmp_path: Path) -> None:
    """Of labels that are alike; in a search they would be the best."""
    lines = ['{"step": 1, "loss": 1, "auc": NaN}', '{"step": 2, "auc": 0.5, "loss": 2}', '{"step": 3, "auc": 0.']
    (tmp_path / LOSSES).write_text("\n".join(lines))
    assert read_scores(tmp_path) == [(2, 0.5)]
    (tmp_path / LOSSES).write_text(lines[0] + "\n")
    assert [*outcome_lines(tmp_path)][1:] == [
        "held out: auc is nan: labels are alike there; give data.held_out, a box with more in it"
    ]


def test_the_log_says_who_began_what_where_and_how_it_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(folder, monkeypatch, capsys)
    assert give("train", "recipe.toml", "--config", "threads").code == 0
    begins, recipe, site, attempt, *_, end = lines_in(folder / "recipe.train")
    assert begins == f"volpipe {volpipe.__version__} train begins in {folder / 'recipe.train'}"
    said = json.loads(recipe.removeprefix("recipe: "))
    assert (said["net"]["name"], said["train"]["steps"]) == ("superres", 6)
    assert site == "starts the site threads"
    assert attempt == "recipe.train: attempt 1 with train.ranks=1 begins at step 0"
    assert end == "done after step 6"
    assert give("train", "recipe.toml", "--config", "threads").code == 0
    assert lines_in(folder / "recipe.train")[-1] == "nothing to do: all 6 steps are taken"


def test_a_worker_that_is_lost_is_in_the_log_with_its_reason(folder: Path) -> None:
    learn(folder, Threads(2, victim="t", lose=1), "train.ranks=2")
    lines = lines_in(folder / "t")
    assert "t: rank 0 of 2 failed: the worker was killed" in lines
    assert "train 0 failed (attempt 1): WorkerLost: the worker was killed" in lines
    assert "t: attempt 2 with train.ranks=2 begins at step 0" in lines
    assert lines[-1] == "done after step 6"


def test_a_training_that_goes_on_says_from_which_checkpoint(folder: Path) -> None:
    learn(folder, Threads(1), "train.steps=4")
    learn(folder, Threads(1))
    assert [line for line in lines_in(folder / "t") if "attempt" in line] == [
        "t: attempt 1 with train.ranks=1 begins at step 0",
        "t: attempt 1 with train.ranks=1 continues from the checkpoint after step 4",
    ]


def test_the_log_of_a_training_that_failed_has_the_sentence_and_what_the_worker_said(folder: Path) -> None:
    with pytest.raises(RunStopped):
        learn(folder, Threads(1), "train.learning_rate=1e30", "train.clip=0")
    lines = lines_in(folder / "t")
    assert "the work stopped" in lines
    assert any(
        line.startswith("t: rank 0 of 1 failed: ") and "give a smaller train.learning_rate" in line for line in lines
    )
    assert any("training/loop.py" in line and line.startswith("  File") for line in lines)  # where in the worker it was


def test_a_folder_in_which_nothing_began_but_a_log_is_no_others(folder: Path) -> None:
    with pytest.raises(SiteError, match=r"train.ranks is 2"):
        learn(folder, Threads(1), "train.ranks=2")
    assert "train.ranks is 2" in (folder / "t" / "volpipe.log").read_text()
    learn(folder, Threads(2), "train.ranks=2")
    assert lines_in(folder / "t")[-1] == "done after step 6"


def test_an_interrupt_and_an_error_that_nobody_foresaw_are_in_the_log(folder: Path) -> None:
    recipe = load_training(folder / "recipe.toml")

    def interrupt(step: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(recipe, folder / "t", Threads(1).start, search_path=folder, on_step=interrupt)
    assert lines_in(folder / "t")[-1] == "interrupted; run the same command again to continue"

    @contextmanager
    def start(place: Path) -> Iterator[Threads]:
        raise ZeroDivisionError("a fault")
        yield

    with pytest.raises(RunStopped, match=r"a fault .*\(traceback: .*volpipe.log\)"):
        run_training(recipe, folder / "u", start, search_path=folder)
    assert "ZeroDivisionError: a fault" in lines_in(folder / "u")


# ---- trials


def test_a_sweep_logs_each_trial_its_values_and_why_one_failed(folder: Path) -> None:
    sweep = Sweep.load(folder / "recipe.toml", ["train.clip=0"])
    run_search(sweep, folder / "s", Threads(1, victim="000", lose=1).start, search_path=folder)
    lines = lines_in(folder / "s")
    assert lines[0] == f"volpipe {volpipe.__version__} sweep begins in {folder / 's'}"
    assert "trial 000 begins: train.learning_rate = 0.001" in lines
    assert "000: rank 0 of 1 failed: the worker was killed" in lines
    assert "000: attempt 2 with train.ranks=1 begins at step 0" in lines
    assert any(line.startswith("trial 000 ended: done after step 6, loss 0.") for line in lines)
    assert any(line.startswith("trial 001 failed: ") and "give a smaller train.learning_rate" in line for line in lines)
    assert any(line.startswith("trial 001 ended: failed after step 0, loss ") for line in lines)
    assert lines[-1] == "1 of 2 trials are done"
    assert not (folder / "s" / "001" / "volpipe.log").exists()


def test_a_search_logs_each_trial_and_why_one_failed(folder: Path) -> None:
    tuning = Tuning.load(folder / "recipe.toml")
    rows = run_search(tuning, folder / "u", Threads(1, victim="001", lose=2).start, search_path=folder)
    lines = lines_in(folder / "u")
    assert lines[0] == f"volpipe {volpipe.__version__} tune begins in {folder / 'u'}"
    assert json.loads(lines[2].removeprefix("search: "))["trials"] == 2
    rate = next(row for row in rows if row.number == 0).values["train.learning_rate"]
    assert f"trial 000 begins: train.learning_rate = {rate}" in lines
    assert any(line.startswith("trial 001 failed: the training stops after step 0: WorkerLost") for line in lines)
    assert lines[-1] == "1 of 2 trials are done"


def test_folders_of_trials_in_which_only_a_log_is_are_taken_and_others_are_not(folder: Path) -> None:
    sweep = Sweep.load(folder / "recipe.toml")
    (folder / "s").mkdir()
    (folder / "s" / "volpipe.log").touch()
    (folder / "s" / "mine.log").touch()
    with pytest.raises(RunError, match=r"holds mine.log and no sweep.json"):
        run_search(sweep, folder / "s", Threads(1).start, search_path=folder)
    (folder / "s" / "mine.log").unlink()
    assert len(run_search(sweep, folder / "s", Threads(1).start, search_path=folder)) == 2


def test_the_log_of_a_run_names_its_site_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(folder, monkeypatch, capsys)
    assert give("run", "v.tif", "--out", "o.zarr", "--config", "threads", "--set", "net.name=identity").code == 0
    assert "starts the site threads" in lines_in(folder / "o.zarr.run")


def test_what_a_rank_of_a_killed_driver_still_writes_is_not_in_the_log_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "losses.jsonl").touch()
    with open_log(tmp_path, 0) as write:
        for step in range(1, 60):
            write({"step": step, "time": 0.0, "loss": 1.0})
        with open_log(tmp_path, 3) as next_write:
            write({"step": 60, "time": 0.0, "loss": 1.0})
            next_write({"step": 4, "time": 0.0, "loss": 2.0})
            write({"step": 61, "time": 0.0, "loss": 1.0})
    assert [(entry["step"], entry["loss"]) for entry in read_log(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
