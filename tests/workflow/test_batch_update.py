"""Updates of batches: what has changed in each dataset is computed, and nothing else."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import IDENTITY, LABELLED, SHAPE, NoPool, endings, give, refused
from inline import Inline
from volumes import fingerprint, noise, write_volume

import volpipe as vp
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_writer


@pytest.fixture(autouse=True)
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three volumes in `raw`, in the current folder."""
    for number, name in enumerate("abc"):
        write_volume(tmp_path / "raw" / f"{name}.n5", noise(SHAPE, seed=number))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "raw"


def edit(name: str, place: tuple[int, int, int] = (3, 4, 5)) -> None:
    """Give a voxel of a volume another value."""
    data = vp.open(f"raw/{name}.n5")[...]
    data[place] += 1
    open_writer(Path(f"raw/{name}.n5"), "raw").write(Box.from_shape(SHAPE), data)


def fresh(name: str, tmp_path: Path) -> str:
    """Return the hash of what a run makes of a volume in one go, in the place of the batch's output."""
    updated = fingerprint(tmp_path / "done" / f"{name}.zarr")
    vp.run(f"raw/{name}.n5/raw", out=f"done/{name}.zarr", settings=IDENTITY, site=Inline(), fresh=True)
    assert fingerprint(tmp_path / "done" / f"{name}.zarr") == updated
    return updated


def test_an_update_computes_what_has_changed_in_each_dataset_and_says_how_much(tmp_path: Path) -> None:
    """One is as it was, one has another voxel, one has grown, and one is new."""
    give()
    before = fingerprint(tmp_path / "done" / "a.zarr")
    edit("b")
    grown = np.concatenate([noise(SHAPE, seed=2), noise((8, *SHAPE[1:]))])
    shutil.rmtree(tmp_path / "raw" / "c.n5")
    write_volume(tmp_path / "raw" / "c.n5", grown)
    write_volume(tmp_path / "raw" / "d.n5", noise(SHAPE, seed=3))
    left = give()
    assert endings(left) == ["unchanged", "failed", "failed", "done"]
    assert all("left alone: input changed" in row.reason and "--update" in row.reason for row in left.rows[1:3])
    report = give(update=True)
    assert endings(report) == ["unchanged", "done", "done", "unchanged"]
    assert [(row.changed_blocks, row.computed_blocks) for row in report.rows] == [(0, 0), (1, 1), (0, 6), (0, 0)]
    assert fingerprint(tmp_path / "done" / "a.zarr") == before
    np.testing.assert_array_equal(vp.open("done/c.zarr")[...], grown)
    for name in "bc":
        fresh(name, tmp_path)
    page = (tmp_path / "done.batch" / "report.html").read_text()
    assert "blocks changed" in page and "1 of 12, 1 computed" in page
    line = next(csv.DictReader((tmp_path / "done.batch" / "batch.csv").read_text().splitlines()[:2]))
    assert (line["changed_blocks"], line["computed_blocks"]) == ("0", "0")


@pytest.mark.long
def test_an_update_of_stages_computes_what_rests_on_what_has_changed(tmp_path: Path) -> None:
    """One is as it was, one has another voxel, one has grown; each has a net and labels."""
    (tmp_path / "flow.toml").write_text(LABELLED)
    volumes, stages = ["raw/a.n5", "raw/b.n5", "raw/c.n5"], ("first", "objects")

    def made(name: str) -> list[str]:
        return [fingerprint(tmp_path / "made" / name / f"{stage}.zarr") for stage in stages]

    def give_stages(**options: Any) -> vp.BatchReport:
        return vp.batch(volumes, "flow.toml", out="made/{stem}", site=options.pop("site", Inline()), **options)

    give_stages()
    edit("b")
    grown = np.concatenate([noise(SHAPE, seed=2), noise((8, *SHAPE[1:]))])
    shutil.rmtree(tmp_path / "raw" / "c.n5")
    write_volume(tmp_path / "raw" / "c.n5", grown)
    report = give_stages(update=True)
    assert endings(report) == ["unchanged", "done", "done"]
    same, edited, longer = report.rows
    assert same.changes.startswith("0 of") and not same.computed_blocks
    assert edited.changed_blocks and 0 < edited.computed_blocks < edited.num_blocks
    assert longer.computed_blocks and "grown" in longer.why
    updated = {name: made(name) for name in "abc"}
    assert endings(give_stages(update=True, site=NoPool())) == ["unchanged"] * 3
    give_stages(fresh=True)
    assert {name: made(name) for name in "abc"} == updated


def test_an_update_of_datasets_that_are_as_they_were_asks_for_no_worker() -> None:
    give()
    report = give(update=True, site=NoPool())
    assert endings(report) == ["unchanged"] * 3
    assert [row.changes for row in report.rows] == ["0 of 12"] * 3


def test_an_update_takes_a_changed_input_and_no_other_change(tmp_path: Path) -> None:
    give()
    edit("a")
    other = refused("raw/*.n5/raw", "output.codec=raw", update=True)
    assert all("recipe changed" in sentence for sentence in other.values()) and len(other) == 3
    report = give("raw/*.n5/raw", "output.codec=raw", update=True, replace=True)
    assert endings(report) == ["done"] * 3


def test_one_dataset_that_shrank_is_refused_with_the_rest_of_an_update() -> None:
    give()
    shutil.rmtree("raw/c.n5")
    write_volume(Path("raw/c.n5"), noise((8, *SHAPE[1:]), seed=2))
    assert "had 16 voxels and has 8" in refused(update=True)["raw/c.n5/raw"]
