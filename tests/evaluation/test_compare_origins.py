"""Outputs compared by how they were made: other settings, other inputs, incomplete ones, ones in buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from bucket import Bucket
from inline import Inline, Stopped
from scored import save
from volumes import noise, windowed

import volpipe as vp
from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.evaluation.compare import plan_comparison
from volpipe.evaluation.differences import LabelDifference

COMPONENTS: dict[str, Any] = {
    "input": {"kind": "foreground"},
    "objects": {"method": "components"},
    "output": {"block": [8, 8, 8], "chunk": [4, 4, 4], "levels": 0},
}
IDENTITY = ("net.name=identity", "output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
RANGE = ("normalise.low=3", "normalise.high=190", "normalise.method=range")
RAW = noise((16, 16, 16))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test, which has a volume, in blocks of which that has many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 16, 16))
    make(tmp_path / "raw.zarr", RAW)


def run(out: str, *settings: str, volume: str = "raw.zarr", data: np.ndarray | None = None) -> vp.Report:
    """Return the report of a run over a volume, which is written before that if `data` are given."""
    if data is not None:
        make(Path(volume).absolute(), data)
    report = vp.run(volume, out=out, site=Inline(), settings=[*IDENTITY, *settings])
    assert isinstance(report, vp.Report)
    return report


def compared(a: str, b: str | vp.Report, **options: Any) -> vp.ComparisonResult:
    result = vp.compare(a, b, site=Inline(), **options)
    assert isinstance(result, vp.ComparisonResult)
    return result


def test_what_was_done_otherwise_stands_beside_it() -> None:
    run("a.zarr")
    run("b.zarr", *RANGE)
    rows = {what: (a, b) for what, a, b in compared("a.zarr", "b.zarr").made_otherwise}
    assert rows["recipe normalise.low"] == ("–", "3.0")
    assert rows["normalised by"][0] == "shift 127.5, scale 127.5"
    assert set(rows) == {"normalised by", *(f"recipe normalise.{key}" for key in ("method", "low", "high"))}
    alike = compared("a.zarr", run("again.zarr"))
    assert (alike.made_otherwise, alike.is_same, alike.plan.why) == ([], True, "as their attributes say")
    assert plan_comparison("a.zarr", "a.zarr").notes[0].startswith("A and B are the same volume")


def test_outputs_of_different_inputs_are_refused_unless_they_are_asked_for() -> None:
    run("of_raw.zarr")
    run("of_other.zarr", volume="other.zarr", data=noise((16, 16, 16), seed=1))
    with pytest.raises(PlanError, match=r"A was made of .*/raw\.zarr, B of .*/other\.zarr, .* or give --any-input"):
        compared("of_raw.zarr", "of_other.zarr")
    assert not compared("of_raw.zarr", "of_other.zarr", any_input=True).is_same
    run("low.zarr", "input.roi=0:8,:,:")
    run("high.zarr", "input.roi=8:16,:,:")
    with pytest.raises(PlanError, match=r"A (shows the box 0:8|begins at)"):
        compared("low.zarr", "high.zarr")
    save(foreign=RAW)
    assert compared("of_raw.zarr", "foreign.npy").plan.notes[0].startswith("B says nothing of its input")


def test_labels_of_two_nets_have_one_input_through_what_they_were_made_of() -> None:
    blocks = np.kron(noise((4, 4, 4)), np.ones((4, 4, 4), np.uint8))
    for name, scale in (("old", "1.0"), ("new", "0.5")):
        settings = ("normalise.method=zscore", "normalise.mean=0", f"normalise.std={scale}")
        run(f"{name}.zarr", *settings, volume="blocks.zarr", data=blocks if name == "old" else None)
        vp.segment(f"{name}.zarr", COMPONENTS, out=f"{name}_labels.zarr", site=Inline())
    result = compared("old_labels.zarr", "new_labels.zarr")
    assert result.plan.kind == "labels"
    assert ("its input: recipe normalise.std", "1.0", "0.5") in result.made_otherwise
    with pytest.raises(PlanError, match="A is labels of `volpipe segment`, B an image of a net"):
        compared("old_labels.zarr", "new.zarr", any_input=True)


def test_classes_of_a_net_are_compared_by_their_numbers() -> None:
    classes = RAW % 3
    for name, data in (("a", classes), ("b", np.array([0, 2, 1], np.uint8)[classes])):
        run(f"{name}.zarr", "output.kind=labels", "normalise.method=none", volume=f"{name}_raw.zarr", data=data)
    result = compared("a.zarr", "b.zarr", any_input=True, page="p.html")
    assert result.differences is not None and isinstance(together := result.differences.together, LabelDifference)
    assert (result.plan.kind, together.voi, together.num_differ) == ("classes", 0, int((classes != 0).sum()))
    assert not result.is_same and result.summary[0].endswith("voxels have another class")


def test_an_output_that_is_not_complete_is_refused() -> None:
    run("a.zarr")
    with pytest.raises(Stopped):
        vp.run("raw.zarr", out="b.zarr", site=Inline(most_tasks=3), settings=IDENTITY)
    with pytest.raises(PlanError, match=r"^B is not complete, its run is not done: b\.zarr; .* reads as zeros"):
        compared("a.zarr", "b.zarr")


def test_an_output_that_lost_a_file_is_refused() -> None:
    run("a.zarr")
    run("b.zarr")
    Path("moved").mkdir()
    for name in ("b.zarr", "b.zarr.run"):
        Path(name).rename(f"moved/{name}")
    assert compared("a.zarr", "moved/b.zarr").is_same
    next(file for file in sorted(Path("moved/b.zarr/s0/c").rglob("*")) if file.is_file()).unlink()
    with pytest.raises(vp.VolpipeError, match=r"moved/b\.zarr has lost files that its run wrote"):
        compared("a.zarr", "moved/b.zarr")


def test_outputs_in_a_bucket_are_compared(bucket: Bucket) -> None:
    run("s3://cells/old/a.zarr")
    Path("a.zarr.run").rename("kept.run")  # where both runs keep theirs
    run("s3://cells/new/a.zarr", *RANGE)
    result = compared("s3://cells/old/a.zarr", "s3://cells/new/a.zarr", page="p.html")
    assert result.plan.why == "as their attributes say"
    assert ("recipe normalise.low", "–", "3.0") in result.made_otherwise
