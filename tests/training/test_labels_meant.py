"""Labels that are not what is meant are told before a training starts, and what it learned from stands beside it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tifffile
from trainings import SHORT, Threads, make_folder

from volpipe.geometry.grid import Box
from volpipe.nets.trained import Trained
from volpipe.recipes.inference import NetChoice, Normalise
from volpipe.recipes.training import LOSSES, load_training
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.training.driver import check_recipes, run_training
from volpipe.training.logs import near_chance
from volpipe.volumes.orientation import orders, turned
from volpipe.workflow.outcome import outcome_lines

SHAPE = (64, 64, 64)
TISSUE = SyntheticVolume(SHAPE, 5, (10.0, 10.0, 10.0))
RAW, LABELS = (part(Box.from_shape(SHAPE)) for part in (TISSUE.raw, TISSUE.labels))
RECIPE = """
[net]
name = "unet3d"
options = { features = [4, 8], out_channels = 9, output = "sigmoid" }

[[data]]
path = "v.tif"
labels = "l.tif"

[samples]
shape = [20, 24, 24]
"""


def told(folder: Path, caplog: pytest.LogCaptureFixture, raw: np.ndarray, labels: np.ndarray, more: str = "") -> str:
    """Return what is said before a training on `labels`."""
    tifffile.imwrite(folder / "v.tif", raw)
    tifffile.imwrite(folder / "l.tif", labels.astype(np.uint16))
    (folder / "recipe.toml").write_text(RECIPE + more)
    with caplog.at_level(logging.WARNING):
        check_recipes([load_training(folder / "recipe.toml")], folder)
    return caplog.text


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (turned(LABELS, [*orders(SHAPE)][9]), "does not seem to lie on"),
        (LABELS.swapaxes(1, 2), "the axes in the order z, x, y"),
        (LABELS > 0, "has one label alone, 1"),
        (LABELS, ""),
    ],
)
def test_labels_that_are_not_meant_are_told_before_a_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: np.ndarray, sentence: str
) -> None:
    said = told(tmp_path, caplog, RAW, labels)
    assert sentence in said and bool(said) == bool(sentence)


def test_classes_are_classes_where_they_are_learnt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = '[classes]\nnames = ["outside", "cell"]\n'
    recipe = RECIPE.replace("out_channels = 9", "out_channels = 2").replace('"sigmoid"', '"none"')
    (tmp_path / "recipe.toml").write_text(recipe + more)
    tifffile.imwrite(tmp_path / "v.tif", RAW)
    tifffile.imwrite(tmp_path / "l.tif", (LABELS > 0).astype(np.uint8))
    with caplog.at_level(logging.WARNING):
        check_recipes([load_training(tmp_path / "recipe.toml")], tmp_path)
    assert not caplog.text


def test_a_constant_volume_is_told_before_a_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "7 alone in 27 sampled boxes" in told(tmp_path, caplog, np.full_like(RAW, 7), LABELS)


@pytest.mark.parametrize(
    ("aucs", "is_told"), [([0.5, 0.52], True), ([0.9, 0.55], True), ([0.5, 0.93], False), ([], False)]
)
def test_a_score_near_chance_is_said(tmp_path: Path, aucs: list[float], is_told: bool) -> None:
    entries = [{"step": step, "time": 0.0, "loss": 1.0, "auc": auc} for step, auc in enumerate(aucs)]
    (tmp_path / LOSSES).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert bool(near_chance(tmp_path)) == is_told
    assert any("is chance" in line for line in outcome_lines(tmp_path)) == is_told


def test_a_training_writes_what_it_learned_from_beside_its_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, train=SHORT.replace("steps = 6", "steps = 2"))
    tifffile.imwrite(
        folder / "v.tif", tifffile.imread(folder / "v.tif"), imagej=True, resolution=(100, 100),
        metadata={"spacing": 0.02, "unit": "um", "axes": "ZYX"},
    )  # fmt: skip
    result = run_training(load_training(folder / "recipe.toml"), folder / "out", Threads(1).start, search_path=folder)
    trained = Trained.beside(NetChoice(name="superres", weights=str(result.weights)), "")
    assert trained is not None
    # the net's input has voxels twice as long along z
    np.testing.assert_allclose(trained.voxel_sizes_nm, [(40.0, 10.0, 10.0)], rtol=1e-6)
    assert trained.normalise == Normalise(method="range", low=0, high=255)
