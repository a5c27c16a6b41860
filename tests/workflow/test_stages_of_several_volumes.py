"""Stages of several volumes: a function gets a block of each, an image's and its mask's, that stages or files hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from growing import edit
from inline import Inline, Stopped
from scipy.ndimage import gaussian_filter
from volumes import fingerprint, noise, write_volume

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box
from volpipe.runs.options import RunOptions
from volpipe.volumes.volume import open_volume
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import execute, preview

SHAPE = (16, 24, 40)
FILTERS = """
import numpy as np
from scipy.ndimage import gaussian_filter

def smooth(block):
    return gaussian_filter(block.astype(np.float64), 1.0, truncate=2).astype(np.float32)

def above(block):
    return (block > 128).astype(np.uint8)

def masked(image, mask, labels):
    assert (image.dtype, mask.dtype, labels.dtype) == (np.float32, np.uint8, np.uint32)
    return np.where(mask, image, 0) + np.float32(labels % 2)

def alone(image):
    return image
"""
FLOW = """
[[stage]]
name = "smooth"
kind = "function"
function = "filters.py:smooth"
halo = [2, 2, 2]
windows = { shape = [8, 8, 8], block = [1, 1, 1] }
output = { levels = 0 }

[[stage]]
name = "mask"
kind = "function"
function = "filters.py:above"
input = "volume"
windows = { shape = [8, 8, 8], block = [1, 2, 2] }
output = { levels = 0 }

[[stage]]
name = "both"
kind = "function"
function = "filters.py:masked"
input = { stage = "smooth", also = ["mask", { path = "labels.n5", key = "raw" }] }
windows = { shape = [8, 8, 40], block = [1, 2, 1] }
output = { levels = 0 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filters.py").write_text(FILTERS)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    write_volume(tmp_path / "labels.n5", noise(SHAPE, "uint32", seed=1), chunk=8)
    return tmp_path


def planned(folder: Path, text: str = FLOW) -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml")
    assert flow is not None
    return plan_flow(flow, str(folder / "in.n5"), folder / "out", folder)


def ran(plan: FlowPlan, inline: Inline | None = None, **options: bool) -> FlowReport:
    report = execute(plan, (inline or Inline(slots=2)).start, RunOptions(**options))
    assert report.is_complete
    return report


def expected(folder: Path) -> np.ndarray:
    image, labels = (open_volume(folder / name).open()[...] for name in ("in.n5", "labels.n5"))
    smooth = gaussian_filter(image.astype(np.float64), 1.0, truncate=2, mode="mirror").astype(np.float32)
    return np.where(image > 128, smooth, 0) + np.float32(labels % 2)


def test_a_function_of_an_image_a_mask_and_labels_is_that_of_the_whole(folder: Path) -> None:
    plan = planned(folder)
    assert plan.stages[-1].plan.source.given == ((1, "float32"), (1, "uint8"), (1, "uint32"))
    preview(plan, None)
    ran(plan)
    np.testing.assert_array_equal(open_volume(folder / "out" / "both.zarr").open()[...], expected(folder))
    assert ran(planned(folder)).stages[-1].report.was_complete


@pytest.mark.parametrize("most_tasks", [30, pytest.param(5, marks=pytest.mark.long)])
def test_a_flow_that_was_killed_goes_on_to_the_same_bytes(folder: Path, most_tasks: int) -> None:
    with pytest.raises(Stopped):
        ran(planned(folder), Inline(0, 2, most_tasks))
    ran(planned(folder))
    found = fingerprint(folder / "out" / "both.zarr")
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "out.run")
    ran(planned(folder))
    assert fingerprint(folder / "out" / "both.zarr") == found


@pytest.mark.parametrize("name", ["labels.n5", pytest.param("in.n5", marks=pytest.mark.long)])
def test_an_update_follows_a_change_of_any_volume(folder: Path, name: str) -> None:
    ran(planned(folder))
    edit(folder / name / "raw", Box((0, 0, 0), (4, 4, 4)), 3)
    with pytest.raises(VolpipeError, match="changed"):
        ran(planned(folder))
    ran(planned(folder), update=True)
    np.testing.assert_array_equal(open_volume(folder / "out" / "both.zarr").open()[...], expected(folder))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"mask", {', '"maks", {'), "stage both: .*maks"),
        (('"mask", {', '"both", {'), "stage both, input.also.0: it reads itself"),
        (('["mask"', '["small.n5"'), r"stage both: input\.also\.0 .*small\.n5.* has \(16, 24, 8\) voxels"),
        (("filters.py:masked", "filters.py:alone"), "stage both: function .*alone fails .*takes 1 positional"),
    ],
)
def test_what_a_stage_cannot_read_is_refused(folder: Path, change: tuple[str, str], sentence: str) -> None:
    write_volume(folder / "small.n5", noise((16, 24, 8)))
    with pytest.raises(VolpipeError, match=sentence):
        planned(folder, FLOW.replace(*change))


def test_convert_joins_volumes_as_channels(folder: Path) -> None:
    text = (
        '[[stage]]\nname = "joined"\nkind = "convert"\ninput = { stage = "volume", also = ["volume", "labels.n5/raw"] }'
    )
    ran(planned(folder, text))
    one, other, labels = open_volume(folder / "out" / "joined.zarr").open()[...]
    np.testing.assert_array_equal(one, noise(SHAPE))
    np.testing.assert_array_equal(other, noise(SHAPE))
    np.testing.assert_array_equal(labels, noise(SHAPE, "uint32", seed=1))
