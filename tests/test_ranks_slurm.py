"""Ranks in jobs of a real Slurm of this machine: they meet, and where a job is cancelled another takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command import begin, finish, processes_in, wait_until
from slurm import Slurm, kill, lacking, running_slurm
from trainings import Threads, losses_in, make_folder

from volpipe.course import follow, last_step
from volpipe.training import LOSSES, WEIGHTS, load_training

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

SETTINGS = {
    "PARTITION": "main", "CORES": "1", "MEM_GB": "1", "GPUS": "0", "MAX_JOBS": "2", "WALLTIME": "00:10:00",
    "LONGEST_TASK": "30", "START_SECONDS": "30", "ADDRESS": "127.0.0.1", "HEARTBEAT": "2", "POLL_SECONDS": "1",
}  # fmt: skip
RECIPE_SETTINGS = ("train.ranks=2", "train.steps=300", "train.checkpoint_every=5")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := lacking():
        pytest.skip(f"no {', '.join(missing)} here; `make test` installs them where it may")
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield make_folder(tmp_path)
    kill(processes_in(tmp_path))


def test_two_jobs_train_together_and_a_cancelled_one_is_replaced(folder: Path, slurm: Slurm) -> None:
    recipe = load_training(folder / "recipe.toml", RECIPE_SETTINGS)
    follow(recipe, folder / "whole", Threads(2).start, search_path=folder)
    options = [part for setting in RECIPE_SETTINGS for part in ("--set", setting)]
    environment = {f"VOLPIPE_SLURM_{name}": value for name, value in SETTINGS.items()} | slurm.environment
    environment |= {"XDG_CONFIG_HOME": str(folder / "no-settings")}
    command = ("train", "recipe.toml", "--config", "slurm_single", "--out", "cut", *options)
    process = begin(folder, *command, **environment)
    wait_until(lambda: last_step(folder / "cut" / LOSSES) > 7, 200)
    jobs = slurm.jobs()
    assert len(jobs) == 2
    slurm.do("scancel", sorted(jobs)[1])
    ended = finish(folder, process, 250)
    assert ended.code == 0, ended.err
    assert losses_in(folder / "cut") == losses_in(folder / "whole")
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()
    assert "attempt 2 of" in (folder / "cut" / "ranks.json").read_text()
    wait_until(lambda: not slurm.jobs(), 60)
    wait_until(lambda: not processes_in(folder), 60)
