"""What a segmentation refuses: recipes and volumes that do not fit, folders of others, too little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from segmented import Crowd, blobs, labelled, noisy, recipe

from volpipe.errors import PlanError, RecipeError, RunError, RunStopped, VolumeError
from volpipe.geometry.affinities import OFFSETS
from volpipe.geometry.grid import Box
from volpipe.recipes.segmentation import SegmentRecipe, load_segmentation
from volpipe.segmentation import boxes
from volpipe.segmentation.boundary_maps import read_probabilities
from volpipe.segmentation.driver import plan_segmentation


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the graph in boxes of few blocks, and number objects by few voxels, as of a large volume."""
    monkeypatch.setattr(boxes, "EDGE", 8)
    monkeypatch.setattr(boxes, "SLAB", 1000)


@pytest.fixture
def chances(tmp_path: Path) -> Path:
    """Noisy affinities (9, 13, 22, 17) of blobs at a.zarr, uint8."""
    make(tmp_path / "a.zarr", noisy(blobs((13, 22, 17)), 0.2))
    return tmp_path / "a.zarr"


@pytest.mark.parametrize(
    ("data", "choices", "sentence"),
    [
        (np.zeros((3, 4, 4, 4), np.uint8), {}, r"has 3 channels, input.offsets 9; name as many"),
        (np.zeros((4, 4, 4), np.uint8), {}, r"has 1 channel, .* say input.kind=foreground"),
        (
            np.zeros((2, 4, 4, 4), np.uint8),
            {"input": {"kind": "membrane", "channel": 2}},
            "has no channel 2; .* its 2 channels",
        ),
        (np.zeros((9, 4, 4, 4), np.int16), {}, r"has int16 voxels; probabilities are floats .* output.dtype=uint8"),
        (np.zeros((9, 4, 4, 4), np.uint8), {"output": {"block": (6, 6, 6), "chunk": (4, 4, 4)}}, "6 voxels on axis z"),
        (np.zeros((9, 4, 4, 4), np.uint8), {"output": {"block": (4096, 4096, 4096)}}, "more voxels than a task can"),
    ],
)
def test_what_does_not_fit_is_refused(data: np.ndarray, choices: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    make(tmp_path / "a.zarr", data)
    with pytest.raises((PlanError, VolumeError), match=sentence):
        plan_segmentation(
            str(tmp_path / "a.zarr"), SegmentRecipe.model_validate(choices), tmp_path / "l.zarr", tmp_path
        )


@pytest.mark.parametrize(
    ("dtype", "top"), [(np.float32, 255), (np.float64, 100), (np.uint16, 255), (np.int16, 1000), (np.uint8, 100)]
)
def test_affinities_of_another_range_are_labelled_as_in_bytes_once_it_is_given(
    dtype: type, top: int, tmp_path: Path
) -> None:
    affinities = noisy(blobs((13, 22, 17)), 0.2)
    made = make(tmp_path / "a.zarr", np.rint(affinities / 255 * top).astype(dtype))
    given = recipe((8, 8, 8)).model_dump()
    if dtype is not np.uint8:
        with pytest.raises(PlanError, match=r"set input\.range=\[0, |set input.range to the values that mean 0 and 1"):
            plan_segmentation(made.path, SegmentRecipe.model_validate(given), tmp_path / "l.zarr", tmp_path)
    given["input"] |= {"range": (0, top)}
    plan = plan_segmentation(made.path, SegmentRecipe.model_validate(given), tmp_path / "l.zarr", tmp_path)
    seen = read_probabilities(plan.recipe.input, made.open(), Box.from_shape((13, 22, 17)))
    np.testing.assert_array_equal(seen, np.rint(np.rint(affinities / 255 * top) / top * 255))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["objects.treshold=0.4"], "did you mean 'threshold'"),
        (["input.offsets=[[0,0,-1]]"], "offsets must begin with those to the nearest"),
        (["input.offsets=[[-1,0,0],[0,-1,0],[0,0,-1],[0,0,0]]"], "leads nowhere"),
        (
            [f"input.offsets={json.dumps(OFFSETS[:3])}", "objects.agglomerate=mutex"],
            "agglomerate mutex needs affinities to farther voxels",
        ),
        (["objects.small_voxels=9", "objects.agglomerate=mutex"], "small_voxels is for method watershed with agglom"),
        (["objects.small_voxels=9", "objects.method=components"], "small_voxels is for method watershed with agglom"),
        (
            ["objects.small_voxels=9", "objects.small_threshold=0.31"],
            r"small_threshold 0\.31 is above threshold 0\.3, from which all join; lower it",
        ),
    ],
)
def test_a_recipe_that_cannot_be_understood_is_refused(settings: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        load_segmentation(None, settings)


def test_what_is_not_of_this_labelling_is_left_alone(chances: Path, tmp_path: Path) -> None:
    out = tmp_path / "l.zarr"
    with pytest.raises(PlanError, match="would overwrite the volume"):
        plan_segmentation(str(chances), recipe((8, 8, 8)), chances, tmp_path)
    out.mkdir()
    with pytest.raises(RunError, match=r"no segmentation in .* made it"):
        labelled(chances, out, recipe((8, 8, 8)), fresh=True)
    out.rmdir()
    labelled(chances, out, recipe((8, 8, 8)))
    with pytest.raises(RunError, match=r"another recipe or input \(objects.threshold: 0.3 -> 0.7"):
        labelled(chances, out, recipe((8, 8, 8), threshold=0.7))
    labelled(chances, out, recipe((8, 8, 8), threshold=0.7), fresh=True)
    (tmp_path / "l.zarr").rename(tmp_path / "moved.zarr")
    with pytest.raises(RunError, match="speaks of an output that is gone"):
        labelled(chances, out, recipe((8, 8, 8), threshold=0.7))
    (tmp_path / "n.zarr.run").mkdir()
    (tmp_path / "n.zarr.run" / "plan.json").write_text("{}")
    with pytest.raises(RunError, match="holds the run of a net"):
        labelled(chances, tmp_path / "n.zarr", recipe((8, 8, 8)))


def test_memory_that_is_not_there_is_refused(chances: Path, tmp_path: Path) -> None:
    poor = Crowd()
    poor.worker_bytes = 100_000
    with pytest.raises(PlanError, match=r"--set output.block=\[4, 4, 4\], .*, or run fewer workers"):
        labelled(chances, tmp_path / "l.zarr", recipe((8, 8, 8)), poor)
    labelled(chances, tmp_path / "l.zarr", recipe((4, 4, 4)))  # and what was refused is in nobody's way
    small = recipe((8, 8, 8)).model_copy(
        update={"output": recipe((8, 8, 8)).output.model_copy(update={"graph_gib": 1e-6})}
    )
    with pytest.raises(RunStopped, match=r"the graph of [\d,]+ fragments and [\d,]+ edges takes up to"):
        labelled(chances, tmp_path / "m.zarr", small)
