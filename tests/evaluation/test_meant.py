"""An evaluation says which volume is judged by which, and what does not look like what it is given as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import Give, giver
from scored import evaluated, save
from volumes import windowed, write_volume

import volpipe as vp
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.geometry.grid import Box
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.orientation import orders, turned

SHAPE = (48, 48, 48)
CELLS = SyntheticVolume(SHAPE, 5, (10.0, 10.0, 10.0)).labels(Box.from_shape(SHAPE))
EIGHT = ["net.name=mean", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop")]


@pytest.fixture(autouse=True)
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    return giver(tmp_path, monkeypatch, capsys)


def notes_of(output: np.ndarray, truth: np.ndarray, kind: str = "labels") -> str:
    save(made=output, truth=truth)
    return "\n".join(plan_evaluation("made.npy", "truth.npy", kind=kind).notes)


def test_the_command_says_which_is_judged_by_which(give: Give) -> None:
    save(made=CELLS, truth=CELLS)
    lines = give("evaluate", "--labels", "--config", "threads", "made.npy", "truth.npy").out.splitlines()
    head = [line.split() for line in lines[:2]]
    assert [(name, Path(path).name) for name, path in head] == [("output", "made.npy"), ("reference", "truth.npy")]


def test_a_reference_that_volpipe_made_is_told_unless_both_are_made_or_it_is_a_part(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, (8, 8, 16), np.uint8)
    write_volume(tmp_path / "in.n5", data)
    for name, settings in (("made", EIGHT), ("copy", ["net.name=identity", *EIGHT[1:]])):
        vp.run("in.n5/raw", out=f"{name}.zarr", settings=settings, site="threads")
    exchanged = "is an output of volpipe, and the output"
    for output, truth, is_told in (
        ("in.n5/raw", "made.zarr", True), ("made.zarr", "in.n5/raw", False), ("made.zarr", "made.zarr", False),
        ("in.n5/raw", "copy.zarr", False),
    ):  # fmt: skip
        notes = [note for note in plan_evaluation(output, truth).notes if exchanged in note]
        assert bool(notes) == is_told, (output, truth)


def test_labels_and_references_of_other_axes_are_told() -> None:
    assert not notes_of(CELLS, CELLS)
    for order in [*orders(SHAPE)][1::11]:
        assert "does not seem to lie on" in notes_of(CELLS, turned(CELLS, order))


def test_classes_that_are_scored_as_objects_are_told() -> None:
    mask = (CELLS > 0).astype(np.uint8)
    assert notes_of(mask, CELLS).count("has one label alone, 1") == 1
    assert notes_of(mask, mask).count("has one label alone, 1") == 2
    assert "one label" not in notes_of(mask, mask, "classes")


def test_a_reference_of_one_object_is_told_beside_its_perfect_scores() -> None:
    truth = np.pad(np.ones((3, 3, 3), int), 2)
    save(made=truth, truth=truth, two=np.where(truth, 1 + (np.indices(truth.shape)[0] > 3), 0))
    result = evaluated(kind="labels")
    assert result.scores is not None and result.scores.rand_error == 0.0  # type: ignore[union-attr]
    assert [note for note in result.notes if "has one object alone" in note]
    assert not [note for note in evaluated(names=("two.npy", "two.npy"), kind="labels").notes if "one object" in note]


def test_a_part_that_is_scored_is_laid_on_the_output_where_it_lies() -> None:
    part, size = CELLS[8:40, 4:44, :40], (10.0, 10.0, 10.0)
    save(whole=CELLS, part=part, wrong=part[:, ::-1])
    whole, *parts = (
        vp.open(f"{name}.npy", view=vp.View(voxel_size_nm=size, origin_nm=origin))
        for name, origin in (("whole", (0.0, 0.0, 0.0)), ("part", (80.0, 40.0, 0.0)), ("wrong", (80.0, 40.0, 0.0)))
    )
    notes = [plan_evaluation(whole, part, kind="labels").notes for part in parts]
    assert [sum("does not seem to lie on" in note for note in each) for each in notes] == [0, 1]
