"""Scores of classes are those of each class alone, whatever the blocks; the training of the net has their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arrays import make
from inline import Inline
from scored import evaluated, save

from volpipe.errors import PlanError, RunStopped
from volpipe.evaluation.driver import evaluation_work, finish
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.label_evaluation import ClassEvaluation
from volpipe.evaluation.label_scores import overlaps, total
from volpipe.evaluation.score import Scores
from volpipe.evaluation.scores import class_scores
from volpipe.runs.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def class_pair() -> tuple[np.ndarray, np.ndarray]:
    """Store classes and a reference of them here, of 0 to 2 and 7, and 255 where nothing is known; return both."""
    rng = np.random.default_rng(5)
    truth = np.kron(rng.choice([0, 1, 2, 7], (4, 5, 6)), np.ones((5, 6, 7), int)).astype(np.uint8)
    made = np.where(rng.random(truth.shape) < 0.1, np.roll(truth, 7, axis=2), truth)
    truth[:3] = 255
    save(made=made, truth=truth)
    return made, truth


@pytest.mark.parametrize("block", [(128, 128, 128), (7, 16, 9)])
def test_scores_of_classes_are_those_of_each_class_alone(block: tuple[int, int, int]) -> None:
    made, truth = class_pair()
    result = evaluated(kind="classes", ignore=255, block=block)
    scores, known = result.scores, truth != 255
    assert isinstance(scores, Scores)
    assert [each.name for each in scores.classes] == ["0", "1", "2", "7"]
    for number, each in zip((0, 1, 2, 7), scores.classes, strict=True):
        one, other = (truth == number) & known, (made == number) & known
        both = np.count_nonzero(one & other)
        assert (each.num_truth, each.num_found) == (np.count_nonzero(one), np.count_nonzero(other))
        assert each.dice == pytest.approx(2 * both / (one.sum() + other.sum()))
        assert each.iou == pytest.approx(both / np.count_nonzero(one | other))
    confusion = [[np.count_nonzero(known & (truth == a) & (made == b)) for b in (0, 1, 2, 7)] for a in (0, 1, 2, 7)]
    assert scores.confusion == tuple(map(tuple, confusion))
    assert scores.accuracy == pytest.approx((made == truth)[known].mean())
    assert scores.mean_dice == pytest.approx(np.mean([each.dice for each in scores.classes]))
    assert scores.mean_iou == pytest.approx(np.mean([each.iou for each in scores.classes]))
    assert scores.num_ignored == np.count_nonzero(~known) and "3,780 voxels of the reference" in result.notes[0]


def test_of_probabilities_the_largest_is_the_class() -> None:
    made, truth = class_pair()
    save(truth=np.where(truth > 2, 0, truth))
    made = np.where(made > 2, 2, made)
    chances = np.random.default_rng(6).random((3, *made.shape)).astype(np.float32)
    chances += made == np.arange(3)[:, None, None, None]
    make(Path("chances.zarr").absolute(), chances)
    save(made=made)
    result = evaluated(names=("chances.zarr", "truth.npy"), kind="classes")
    assert result.scores == evaluated(kind="classes").scores
    assert "channels 0 to 2 of" in result.notes[0]
    chances[1, 2, 3, 4] = np.nan
    make(Path("broken.zarr").absolute(), chances)
    with pytest.raises(RunStopped, match=r"broken\.zarr has NaN or infinite voxels"):
        evaluated(names=("broken.zarr", "truth.npy"), kind="classes")


def test_a_class_that_the_reference_leaves_out_counts_as_the_first(tmp_path: Path) -> None:
    made, truth = class_pair()
    truth[truth != 1] = np.where(truth[truth != 1] == 255, 255, 0)
    save(truth=truth)
    plan = replace(plan_evaluation("made.npy", "truth.npy", kind="classes", ignore=255), names=("a", "b", "c"))
    assert isinstance(plan, ClassEvaluation)
    result = finish(evaluation_work(plan.annotating(["b"]), RunFolder(tmp_path / "run")), Inline().start)
    known, due = truth != 255, np.where(made == 2, 0, made)
    assert isinstance(result.scores, Scores)
    assert result.scores.accuracy == pytest.approx((due == truth)[known].mean())
    assert [each.name for each in result.scores.classes if each.num_found] == ["a", "b", "7"]
    assert plan.annotating(["b", "c"]).left_out == () and plan.describe() != plan.annotating(["b"]).describe()
    with pytest.raises(PlanError, match=r"annotated names d, and the classes of .*made.npy are called a, b, c"):
        plan.annotating(["d"])
    with pytest.raises(PlanError, match=r"annotated names b, and .* are called by nothing that is still there"):
        plan_evaluation("made.npy", "truth.npy", kind="classes", annotated=["b"])
    with pytest.raises(PlanError, match=r"annotated names classes \(b\), and labels are scored; give --classes"):
        plan_evaluation("made.npy", "truth.npy", kind="labels", annotated=["b"])


def test_a_class_in_neither_has_no_score_and_no_share_in_the_means() -> None:
    scores = class_scores(overlaps(np.array([0, 0, 2]), np.array([0, 2, 2])), ("outside", "cell", "nucleus"))
    assert [(each.name, each.dice, each.iou) for each in scores.classes] == [
        ("outside", pytest.approx(2 / 3), 0.5), ("cell", None, None), ("nucleus", pytest.approx(2 / 3), 0.5),
    ]  # fmt: skip
    assert (scores.mean_dice, scores.mean_iou) == (pytest.approx(2 / 3), 0.5)
    assert scores.confusion == ((1, 0, 0), (0, 0, 0), (1, 0, 1))
    assert np.isnan(class_scores(total([])).mean_dice)


def test_what_has_no_classes_is_refused() -> None:
    truth = np.kron(np.arange(200).reshape(5, 5, 8), np.ones((6, 6, 6), int)).astype(np.uint16)
    save(truth=truth, made=truth, image=np.random.default_rng(1).integers(0, 90, truth.shape).astype(np.uint8))
    save(floats=truth.astype(np.float32))
    with pytest.raises(
        PlanError, match=r"truth\.npy has \d+ labels or more, as objects have, and classes are up to 127"
    ):
        plan_evaluation("made.npy", "truth.npy", kind="classes")
    with pytest.raises(
        PlanError, match=r"floats\.npy has float32 voxels, labels are whole numbers; leave --classes out"
    ):
        plan_evaluation("floats.npy", "truth.npy", kind="classes")
    with pytest.raises(PlanError, match=r"image\.npy looks like an image"):
        evaluated(names=("image.npy", "image.npy"), kind="classes")
