"""Workers of this machine start while a run is planned; none of them, and none of their files, stay unless it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import IDENTITY, begin, finish, processes_in, wait_until
from parsl.config import Config

from volpipe.apps import pool
from volpipe.apps.pool import starting
from volpipe.errors import SiteError


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of pools, which are none."""
    told: list[str] = []

    @contextmanager
    def start_pool(config: Config) -> Iterator[str]:
        told.append("started")
        try:
            yield f"pool {len(told)}"
        finally:
            told.append("stopped")

    monkeypatch.setattr(pool, "start_pool", start_pool)
    return told


def test_a_pool_that_nobody_takes_is_stopped_and_leaves_no_folder(tmp_path: Path, pools: list[str]) -> None:
    folder = tmp_path / "out.zarr.run" / "parsl"
    with pytest.raises(KeyError), starting("local", folder):
        assert pools == ["started"] and folder.is_dir()
        raise KeyError
    assert pools == ["started", "stopped"]
    assert [*tmp_path.iterdir()] == []


def test_the_first_run_takes_the_pool_that_was_begun_and_the_next_one_another(tmp_path: Path, pools: list[str]) -> None:
    folder = tmp_path / "out.zarr.run" / "parsl"
    with starting("local", folder) as site:
        (folder.parent / "lock").touch()  # the run's
        with site.start(folder) as first:
            assert pools == ["started"]
        assert pools == ["started", "stopped"]
        with site.start(folder) as second:
            assert pools == ["started", "stopped", "started"]
    assert (first, second) == ("pool 1", "pool 3")
    assert pools == ["started", "stopped"] * 2
    assert sorted(folder.parent.iterdir()) == [folder.parent / "lock", folder]


@pytest.mark.parametrize("site", ["threads", "slurm_htex"])
def test_nothing_is_begun_but_of_workers_on_this_machine(
    tmp_path: Path, pools: list[str], monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "cpu")
    with starting(site, tmp_path / "out.zarr.run" / "parsl") as found:
        assert found.capacity.num_workers > 0
    assert pools == [] and [*tmp_path.iterdir()] == [tmp_path / "sbatch"]


def test_nothing_is_begun_where_a_run_is_there_or_its_folder_cannot_be(tmp_path: Path, pools: list[str]) -> None:
    (tmp_path / "old.zarr.run").mkdir()
    (tmp_path / "file").touch()
    places = {"old.zarr.run": False, "missing/out.zarr.run": False, "file/out.zarr.run": False, "out.zarr.run": True}
    for place, fresh in places.items():
        with starting("local", tmp_path / place / "parsl", fresh=fresh):
            assert pools == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fresh",)], ids=["new", "fresh"])
def test_a_run_on_workers_that_were_begun_comes_to_its_end(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "my data; ü {1}"
    folder.mkdir()
    assert finish(folder, begin(folder, "sample", "in.n5", "--shape", "16,32,32")).code == 0
    ended = finish(folder, begin(folder, "run", *IDENTITY, *options, "-o", "out.zarr", "in.n5/raw"))
    assert ended.code == 0, ended.err
    assert [path.name for path in (folder / "out.zarr.run" / "parsl").iterdir()] == ["000"]
    assert [*tmp_path.iterdir()] == [folder]


def test_jobs_of_a_cluster_are_not_sent_from_a_folder_that_their_shells_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "cpu")
    start = pool.on_site("slurm_htex")
    with pytest.raises(SiteError, match=r"' ' in its path; choose another --out"), start(tmp_path / "my data"):
        pass
    assert [*tmp_path.iterdir()] == [tmp_path / "sbatch"]


@pytest.mark.slow
def test_a_plan_that_is_refused_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    assert finish(tmp_path, begin(tmp_path, "sample", "in.n5", "--shape", "16,32,32")).code == 0
    before = sorted(tmp_path.iterdir())
    windows = ("--set", "windows.shape=[7,7,7]")
    ended = finish(tmp_path, begin(tmp_path, "run", *windows, "-o", "out.zarr", "in.n5/raw"))
    assert (ended.code, ended.out) == (2, "") and "window" in ended.err
    assert sorted(tmp_path.iterdir()) == before
    wait_until(lambda: not processes_in(tmp_path), 10)
