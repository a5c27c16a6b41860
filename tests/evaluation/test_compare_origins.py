"""Outputs compared by how they were made: other settings, other inputs, incomplete ones, ones in buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from bucket import Bucket
from inline import Inline, Stopped
from volumes import noise, windowed

import volpipe as vp
from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.evaluation.compare import plan_comparison
from volpipe.evaluation.differences import (
    LabelDifference,
)
from volpipe.evaluation.results import ComparisonResult

COMPONENTS: dict[str, Any] = {
    "input": {"kind": "foreground"},
    "objects": {"method": "components"},
    "output": {"block": [8, 8, 8], "chunk": [4, 4, 4], "levels": 0},
}
IDENTITY = ("net.name=identity", "output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test, in blocks of which a small volume has many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 16, 16))


def of_labels(result: ComparisonResult) -> LabelDifference:
    assert result.differences is not None and isinstance(result.differences.together, LabelDifference)
    return result.differences.together


def run(volume: str, out: str, *settings: str) -> vp.Report:
    report = vp.run(volume, out=out, site=Inline(), settings=[*IDENTITY, *settings])
    assert isinstance(report, vp.Report)
    return report


def test_what_was_done_otherwise_stands_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", noise((16, 16, 16)))
    run("raw.zarr", "a.zarr")
    run("raw.zarr", "b.zarr", "normalise.low=3", "normalise.high=190", "normalise.method=range")
    again = run("raw.zarr", "again.zarr")
    result = vp.compare("a.zarr", "b.zarr", site=Inline())
    assert isinstance(result, ComparisonResult)
    rows = {what: (a, b) for what, a, b in result.made_otherwise}
    assert rows["recipe normalise.low"] == ("–", "3.0")
    assert rows["normalised by"][0] == "shift 127.5, scale 127.5"
    assert set(rows) == {"normalised by", *(f"recipe normalise.{key}" for key in ("method", "low", "high"))}
    alike = vp.compare("a.zarr", again, site=Inline())
    assert isinstance(alike, ComparisonResult)
    assert (alike.made_otherwise, alike.is_same, alike.plan.why) == ([], True, "as their attributes say")


def test_outputs_of_different_inputs_are_refused_unless_they_are_asked_for(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "other")):
        make(tmp_path / f"{name}.zarr", noise((16, 16, 16), seed=seed))
        run(f"{name}.zarr", f"of_{name}.zarr")
    with pytest.raises(PlanError, match=r"A was made of .*/one\.zarr, B of .*/other\.zarr, .* or give --any-input"):
        vp.compare("of_one.zarr", "of_other.zarr", site=Inline())
    assert not vp.compare("of_one.zarr", "of_other.zarr", site=Inline(), any_input=True).is_same  # type: ignore[union-attr]
    run("one.zarr", "low.zarr", "input.roi=0:8,:,:")
    run("one.zarr", "high.zarr", "input.roi=8:16,:,:")
    with pytest.raises(PlanError, match=r"A (shows the box 0:8|begins at)"):
        vp.compare("low.zarr", "high.zarr", site=Inline())
    np.save("foreign.npy", noise((16, 16, 16)))
    result = vp.compare("of_one.zarr", "foreign.npy", site=Inline())
    assert isinstance(result, ComparisonResult)
    assert result.plan.notes[0].startswith("B says nothing of its input")


def test_labels_of_two_nets_have_one_input_through_what_they_were_made_of(tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", np.kron(noise((4, 4, 4)), np.ones((4, 4, 4), np.uint8)))
    for name, scale in (("old", "1.0"), ("new", "0.5")):
        settings = ("normalise.method=zscore", "normalise.mean=0", f"normalise.std={scale}")
        run("raw.zarr", f"{name}.zarr", *settings)
        vp.segment(f"{name}.zarr", COMPONENTS, out=f"{name}_labels.zarr", site=Inline())
    result = vp.compare("old_labels.zarr", "new_labels.zarr", site=Inline())
    assert isinstance(result, ComparisonResult) and result.plan.kind == "labels"
    assert ("its input: recipe normalise.std", "1.0", "0.5") in result.made_otherwise
    with pytest.raises(PlanError, match="A is labels of `volpipe segment`, B an image of a net"):
        vp.compare("old_labels.zarr", "new.zarr", site=Inline(), any_input=True)


def test_classes_of_a_net_are_compared_by_their_numbers(tmp_path: Path) -> None:
    classes = noise((16, 16, 16)) % 3
    make(tmp_path / "a_raw.zarr", classes)
    make(tmp_path / "b_raw.zarr", np.array([0, 2, 1], np.uint8)[classes])
    for name in "ab":
        run(f"{name}_raw.zarr", f"{name}.zarr", "output.kind=labels", "normalise.method=none")
    result = vp.compare("a.zarr", "b.zarr", site=Inline(), any_input=True, page="p.html")
    assert isinstance(result, ComparisonResult) and result.plan.kind == "classes"
    assert of_labels(result).num_differ == int((classes != 0).sum())
    assert of_labels(result).voi == 0 and not result.is_same
    assert result.summary[0].endswith("voxels have another class")


def test_an_output_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", noise((16, 16, 16)))
    run("raw.zarr", "a.zarr")
    with pytest.raises(Stopped):
        vp.run("raw.zarr", out="b.zarr", site=Inline(most_tasks=3), settings=IDENTITY)
    with pytest.raises(PlanError, match=r"^B is not complete, its run is not done: b\.zarr; .* reads as zeros"):
        vp.compare("a.zarr", "b.zarr", site=Inline())


def test_an_output_that_lost_a_file_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", noise((16, 16, 16)))
    run("raw.zarr", "a.zarr")
    run("raw.zarr", "b.zarr")
    Path("moved").mkdir()
    for name in ("b.zarr", "b.zarr.run"):
        Path(name).rename(f"moved/{name}")
    same = vp.compare("a.zarr", "moved/b.zarr", site=Inline())
    assert isinstance(same, ComparisonResult) and same.is_same
    next(file for file in sorted(Path("moved/b.zarr/s0/c").rglob("*")) if file.is_file()).unlink()
    with pytest.raises(vp.VolpipeError, match=r"moved/b\.zarr has lost files that its run wrote"):
        vp.compare("a.zarr", "moved/b.zarr", site=Inline())


def test_an_output_beside_itself_is_told(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr", noise((16, 16, 16)))
    assert plan_comparison("a.zarr", "a.zarr").notes[0].startswith("A and B are the same volume")


def test_outputs_in_a_bucket_are_compared(bucket: Bucket, tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", noise((16, 16, 16)))
    run("raw.zarr", "s3://cells/old/a.zarr")
    Path("a.zarr.run").rename("kept.run")  # where both runs keep theirs
    run("raw.zarr", "s3://cells/new/a.zarr", "normalise.low=3", "normalise.high=190", "normalise.method=range")
    result = vp.compare("s3://cells/old/a.zarr", "s3://cells/new/a.zarr", site=Inline(), page="p.html")
    assert isinstance(result, ComparisonResult) and result.plan.why == "as their attributes say"
    assert ("recipe normalise.low", "–", "3.0") in result.made_otherwise
