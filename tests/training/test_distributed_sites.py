"""Ranks in jobs of a real Slurm, and in pods: they meet, and where one is taken away another takes its place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cluster import Cluster
from command import begin, finish, processes_in, wait_until
from pods import IMAGE, SITE, cluster_for
from slurm import Slurm, kill, lacking, running_slurm
from trainings import Threads, losses_in, make_folder

from volpipe.recipes.training import WEIGHTS, load_training
from volpipe.training.driver import run_training
from volpipe.training.logs import last_step

pytestmark = [pytest.mark.slow, pytest.mark.long]  # test_ranks.py has a quicker sibling

SLURM = {
    "PARTITION": "main", "CORES": "1", "MEM_GB": "1", "GPUS": "0", "MAX_JOBS": "2", "WALLTIME": "00:10:00",
    "LONGEST_TASK": "30", "START_SECONDS": "30", "ADDRESS": "127.0.0.1", "HEARTBEAT": "2", "POLL_SECONDS": "1",
}  # fmt: skip
PODS = {
    "IMAGE": IMAGE, "CORES": "1", "GPUS": "0", "MAX_PODS": "2", "MEMORY": "4Gi", "UID": str(os.getuid()),
}  # fmt: skip
SETTINGS = ("train.ranks=2", "train.steps=300", "train.checkpoint_every=5")


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := lacking():
        pytest.skip(f"no {', '.join(missing)} here; `make test` installs them where it may")
    with running_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_for(tmp_path_factory.mktemp("pods")) as cluster:
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "t").mkdir()
    yield make_folder(tmp_path / "t")
    kill(processes_in(tmp_path / "t"))


def check(folder: Path, site: str, environment: Mapping[str, str], harm: Callable[[], object]) -> None:
    """Train on `site`, do `harm` in the middle, and compare with an undisturbed training in threads of this process."""
    recipe = load_training(folder / "recipe.toml", SETTINGS)
    run_training(recipe, folder / "whole", Threads(2).start, search_path=folder)
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    told = {"XDG_CONFIG_HOME": str(folder / "no-settings"), **environment}
    process = begin(folder, "train", "recipe.toml", "--config", site, "--out", "cut", *options, **told)
    wait_until(lambda: last_step(folder / "cut") > 7, 200)
    harm()
    ended = finish(folder, process, 250)
    assert ended.code == 0, ended.err
    assert losses_in(folder / "cut") == losses_in(folder / "whole")
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()
    assert "attempt 2 of" in (folder / "cut" / "ranks.json").read_text()
    wait_until(lambda: not processes_in(folder), 60)


@pytest.mark.slurm
def test_two_jobs_train_together_and_a_cancelled_one_is_replaced(folder: Path, slurm: Slurm) -> None:
    def cancel_one() -> None:
        _, second = slurm.jobs()
        slurm.do("scancel", second)

    settings = {f"VOLPIPE_SLURM_{name}": value for name, value in SLURM.items()}
    check(folder, "slurm_single", settings | slurm.environment, cancel_one)
    wait_until(lambda: not slurm.jobs(), 60)


def test_two_pods_train_together_and_a_deleted_one_is_replaced(folder: Path, cluster: Cluster) -> None:
    def delete_one() -> None:
        _, second = cluster.names("Running")
        cluster.delete_pod(second)

    (folder / "site.py").write_text(SITE.format(pending=60))
    settings = {f"VOLPIPE_K8S_{name}": value for name, value in PODS.items()}
    settings["VOLPIPE_K8S_CLAIMS"] = f"scratch:{folder.parent}"
    check(folder, "site.py", settings | cluster.environment, delete_one)
    wait_until(lambda: not cluster.names() and not cluster.stray(), 60)
