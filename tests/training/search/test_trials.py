"""Trials of a sweep and of a search alike: lost workers, interrupts, and more of them than there were."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from command import begin, finish, processes_in, set_each, wait_until
from trainings import Threads, losses_in, make_folder

import volpipe as vp
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.recipes.training import WEIGHTS
from volpipe.training.logs import last_step
from volpipe.training.search.grid import Sweep
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.trials import OnEnd, TrialResult, run_search

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")
KINDS = {
    "sweep": '[sweep]\n"train.seed" = [1, 2]\n',
    "tune": 'validate_every = 2\n[tune]\ntrials = 2\npruner = "none"\n"train.seed" = { low = 1, high = 9 }\n',
}
GROWN = {"[1, 2]": "[1, 2, 3]", "trials = 2": "trials = 3"}
ALL = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    return make_folder(tmp_path, KINDS[kind])


def searched(
    kind: str, folder: Path, workers: Threads, *settings: str, on_end: OnEnd = lambda result: None
) -> list[TrialResult]:
    """Return the results by number, of trials in the folder "s"."""
    file, options = folder / "recipe.toml", {"search_path": folder, "on_end": on_end}
    if kind == "sweep":
        rows = run_search(Sweep.load(file, settings), folder / "s", workers.start, **options)
    else:
        rows = run_search(Tuning.load(file, settings), folder / "s", workers.start, **options)
    return sorted(rows, key=lambda row: row.number)


@ALL
def test_a_trial_whose_worker_is_lost_goes_on_and_one_that_is_lost_twice_is_reported(kind: str, folder: Path) -> None:
    workers = Threads(2, victim="000", lose=1)
    assert [row.state for row in searched(kind, folder, workers)] == ["done"] * 2
    assert workers.sent.count("000") == 2
    for old, new in GROWN.items():
        (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text().replace(old, new))
    rows = searched(kind, folder, Threads(1, victim="002", lose=2))
    assert [row.state for row in rows] == ["done", "done", "failed"]
    assert rows[2].reason == "the training stops after step 0: WorkerLost: the worker was killed"


@ALL
def test_what_grew_is_not_complete_before_its_new_trials_are_whatever_ends_it(kind: str, folder: Path) -> None:
    complete: list[bool] = []

    def interrupt(result: TrialResult) -> None:
        complete.append(vp.status(folder / "s").is_complete)
        raise KeyboardInterrupt

    searched(kind, folder, Threads(1))
    assert vp.status(folder / "s").state == "complete"
    for old, new in GROWN.items():
        (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text().replace(old, new))
    with pytest.raises(KeyboardInterrupt):
        searched(kind, folder, Threads(1), on_end=interrupt)
    assert (complete, vp.status(folder / "s").state) == ([False], "interrupted")
    searched(kind, folder, Threads(1))
    assert vp.status(folder / "s").state == "complete"


@pytest.mark.slow
@pytest.mark.long
@ALL
def test_told_to_stop_it_goes_on_to_the_same_bytes(kind: str, folder: Path) -> None:
    """By TERM to the driver alone, as Kubernetes and Slurm give it, in the middle of two trainings."""
    settings = ("train.steps=400", "train.checkpoint_every=5", "train.validate_every=50")
    command, place = (kind, "recipe.toml", *set_each(*settings)), folder / f"recipe.{kind}"
    process = begin(folder, *command, VOLPIPE_WORKERS="2")
    wait_until(lambda: last_step(place / "001") > 7, 120)
    process.send_signal(signal.SIGTERM)
    ended = finish(folder, process, 60)
    assert ended.code == INTERRUPTED, ended.err
    assert (
        ended.err.splitlines()[-1]
        == "volpipe: interrupted; run the same command again to continue from the newest checkpoints"
    )
    wait_until(lambda: not processes_in(folder), 30)
    assert not list(place.glob(f"*/{WEIGHTS}"))  # so that there was something left of each
    ended = finish(folder, begin(folder, *command, VOLPIPE_WORKERS="2"), 200)
    assert ended.code == 0, ended.err
    for row in searched(kind, folder, Threads(2), *settings):  # a search draws the same values by the same seed
        whole, cut = (path / f"{row.number:03}" for path in (folder / "s", place))
        assert losses_in(cut) == losses_in(whole)
        assert (cut / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
