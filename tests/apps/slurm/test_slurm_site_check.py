"""The check of a site on a real Slurm of this machine: nothing where all is well, or what is wrong by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command import begin, finish, processes_in, sentences
from slurm import Slurm, kill
from slurm_runs import check_gone, new_slurm, on_slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    yield from new_slurm(tmp_path_factory, accounting=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all runs of one volume: an output says whence its voxels came."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _no_process_outlives_a_test(place: Path) -> Iterator[None]:
    yield
    kill(processes_in(place))


def check_site(folder: Path, slurm: Slurm, wait: float = 120, **settings: str) -> tuple[int, list[str]]:
    """Return the exit code of `volpipe sites check` on Slurm, and what it named; see that no job is left."""
    slow = on_slurm(folder, slurm, 0, **settings)
    command = ["sites", "check", "slurm_htex", str(folder.parent / "in.n5"), "--wait", str(wait)]
    ended = finish(slow.folder, begin(slow.folder, *command, **slow.environment), 240)
    assert "Traceback" not in ended.err
    check_gone(slow, slurm)
    return ended.code, sentences(ended)


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_finds_nothing_where_all_is_well(place: Path, slurm: Slurm) -> None:
    code, named = check_site(place / "well", slurm)
    assert (code, named) == (0, ["note: gpu: its site asks for no GPU, so nets run on CPUs there"])


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_names_gpus_that_are_none(place: Path, slurm: Slurm) -> None:
    """Slurm gives a made-up GPU, of which CUDA knows nothing."""
    code, named = check_site(place / "no-gpu", slurm, GPUS="1")
    (sentence,) = named
    assert code == 1
    assert sentence.startswith("gpu: no GPU is seen on ")


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_gives_the_last_words_of_its_jobs(place: Path, slurm: Slurm) -> None:
    code, named = check_site(place / "broken", slurm, INIT="echo no module named cuda >&2; exit 3")
    assert code == 1
    assert [sentence.partition(":")[0] for sentence in named] == ["cpu", "gpu"]
    assert all("last said: no module named cuda" in sentence for sentence in named)


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_waits_no_longer_than_it_was_told(place: Path, slurm: Slurm) -> None:
    slurm.do("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    try:
        code, named = check_site(place / "drained-nodes", slurm, wait=6)
    finally:
        slurm.do("scontrol", "update", "nodename=n[1-2]", "state=resume")
    assert code == 1
    assert [sentence.partition(":")[0] for sentence in named] == ["cpu", "gpu"]
    waiting = "no answer within 6 s, for no worker has started; its block is PENDING and last said: Slurm says PENDING"
    assert all(waiting in sentence for sentence in named)
