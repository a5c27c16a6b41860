"""Stages of kinds convert and function: what they make, refused, killed, updated and planned as any other stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from growing import edit
from inline import Inline, Stopped
from scipy.ndimage import gaussian_filter
from volumes import fingerprint, noise, write_volume

from volpipe.errors import PlanError, RecipeError, VolpipeError
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import Input
from volpipe.runs.options import RunOptions
from volpipe.volumes.convert import Choice, convert
from volpipe.volumes.volume import open_volume
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import execute, preview

SHAPE = (16, 24, 40)
FILTERS = """
import numpy as np
from scipy.ndimage import gaussian_filter

def smooth(block, *, sigma):
    return gaussian_filter(block.astype(np.float64), sigma, truncate=2).astype(np.float32)

def above(block, *, level=100):
    return (block > level).astype(np.uint32)
"""
FLOW = """
[[stage]]
name = "part"
kind = "convert"
bin = [1, 2, 2]
input = { stage = "volume", roi = "2:16,4:24,6:40", voxel_size_nm = [8, 4, 4] }
windows = { shape = [8, 8, 16], block = [1, 1, 1] }
output = { format = "n5", levels = 0 }

[[stage]]
name = "smooth"
kind = "function"
function = "filters.py:smooth"
halo = [2, 2, 2]
options = { sigma = 1.0 }
windows = { shape = [8, 8, 8], block = [1, 1, 1] }
output = { levels = 0 }

[[stage]]
name = "mask"
kind = "function"
function = "filters.py:above"
windows = { shape = [8, 8, 8], block = [1, 2, 2] }
output = { levels = 1 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filters.py").write_text(FILTERS)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    return tmp_path


def planned(folder: Path, *settings: str, text: str = FLOW, volume: str = "in.n5") -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / volume), folder / "out", folder)


def ran(plan: FlowPlan, inline: Inline | None = None, **options: bool) -> FlowReport:
    report = execute(plan, (inline or Inline(slots=2)).start, RunOptions(**options))
    assert report.is_complete
    return report


def made(folder: Path) -> list[str]:
    return [fingerprint(folder / "out" / name) for name in ("part.n5", "smooth.zarr", "mask.zarr")]


def test_stages_make_what_convert_and_the_function_make_of_the_whole(folder: Path) -> None:
    plan = planned(folder)
    ran(plan)
    part, smooth, mask = (open_volume(stage.out) for stage in plan.stages)
    write_volume(folder / "cut.n5", noise(SHAPE)[2:16, 4:24, 6:40])
    binned = convert(open_volume(folder / "cut.n5"), folder / "binned.n5", Choice(bin=(1, 2, 2)))
    assert np.array_equal(part.open()[...], binned.open()[...]) and part.dtype == np.uint8
    assert (part.format, part.shape) == ("n5", (14, 10, 17))
    whole = gaussian_filter(binned.open()[...].astype(np.float64), 1.0, truncate=2, mode="mirror").astype(np.float32)
    assert np.array_equal(smooth.open()[...], whole)
    assert np.array_equal(mask.open()[...], whole > 100) and mask.dtype == np.uint32
    assert len(mask.levels) > 1 and set(np.unique(open_volume(mask.path, level=1).open()[...])) <= {0, 1}
    assert {volume.voxel_size_nm for volume in (part, smooth, mask)} == {(8.0, 8.0, 8.0)}
    assert {volume.origin_nm for volume in (part, smooth, mask)} == {(16.0, 18.0, 26.0)}  # between two voxels of y, x


@pytest.mark.parametrize("most_tasks", [24, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 12, 34))])
def test_a_flow_that_was_killed_goes_on_to_the_same_bytes(folder: Path, most_tasks: int) -> None:
    with pytest.raises(Stopped):
        ran(planned(folder), Inline(0, 2, most_tasks))
    ran(planned(folder))
    found = made(folder)
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "out.run")
    ran(planned(folder))
    assert made(folder) == found


@pytest.mark.long
def test_an_update_makes_what_rests_on_a_changed_block_alone(folder: Path) -> None:
    plan = planned(folder)
    ran(plan)
    edit(folder / "in.n5", Box((8, 8, 8), (12, 12, 12)))
    report = ran(planned(folder), update=True)
    updates = [each.report.updates[0] for each in report.stages]
    assert all(0 < update.changed <= update.computed < update.blocks for update in updates)
    found = made(folder)
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "out.run")
    ran(planned(folder))
    assert made(folder) == found


def test_their_needs_and_times_are_planned(folder: Path) -> None:
    cost = preview(planned(folder), Inline().start)
    assert all(each.seconds is not None and each.need is not None for each in cost.stages)
    sizes = [each.need.output_bytes for each in cost.stages if each.need is not None]
    assert sizes[0] >= 14 * 10 * 17 / 2 and sizes[1] == 4 * 14 * 10 * 17 + 64 * 60  # chunks


@pytest.mark.parametrize("dtype", [np.uint64, np.int32, np.uint16, np.float32])
@pytest.mark.parametrize("format", ["n5", "ome-zarr-0.5"])
def test_a_conversion_keeps_every_number_of_a_box(folder: Path, dtype: type[np.generic], format: str) -> None:
    data = noise(SHAPE).astype(dtype)
    data = data / dtype(3) if data.dtype.kind == "f" else data + dtype(2 ** (8 * data.itemsize - 2))
    write_volume(folder / "other.n5", data, chunk=8)
    text = f"""
[[stage]]
name = "box"
kind = "convert"
input = {{ stage = "volume", roi = "3:13,5:24,7:30" }}
output = {{ format = "{format}", levels = 1 }}
windows = {{ shape = [8, 8, 8], block = [1, 1, 2] }}
"""
    plan = planned(folder, text=text, volume="other.n5")
    ran(plan)
    box = open_volume(plan.result.out)
    assert box.dtype == dtype and np.array_equal(box.open()[...], data[3:13, 5:24, 7:30])
    if data.dtype.kind != "f" and data.itemsize >= 4:  # labels, whose coarser voxels are labels too
        coarse = open_volume(plan.result.out, level=1).open()[...]
        assert set(np.unique(coarse)) <= set(np.unique(box.open()[...]))


REFUSED = [
    (RecipeError, ["part.bin=[0,1,1]"], r"part\.bin=.*three whole numbers from 1"),
    (RecipeError, ["part.net.name=identity"], r"unknown key net; there are input, windows, bin"),
    (RecipeError, ["smooth.halos=[1,1,1]"], r"unknown key halos .*halo"),
    (PlanError, ["smooth.halo=[1,2,2]"], r"^stage smooth: function filters.py:smooth sees .* 2 along z; declare"),
    (PlanError, ["smooth.options={ sigma = 1.0, order = 2 }"], r"^stage smooth: .*unexpected keyword argument 'order'"),
    (VolpipeError, ["mask.function=filters.py:below"], r"^stage mask: filters\.py has no function 'below'"),
    (VolpipeError, ["mask.function=nothing.py:below"], r"^stage mask: no Python file at .*nothing\.py"),
    (PlanError, ["mask.output.dtype=uint8"], r"^stage mask: output\.dtype uint8 cannot hold all that function above"),
    (PlanError, ["mask.windows.blend=hann"], r"^stage mask: above is a function on arrays"),
    (PlanError, ["part.input.roi=3:16,4:24,5:40"], r"^stage part: axis x: the roi begins at voxel 5"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "why"), REFUSED)
def test_refusals_name_stage_and_key(folder: Path, kind: type[Exception], settings: list[str], why: str) -> None:
    with pytest.raises(kind, match=why):
        planned(folder, *settings)


def test_a_box_of_the_command_is_of_the_stages_that_read_the_volume(folder: Path) -> None:
    (folder / "flow.toml").write_text(FLOW.replace(', roi = "2:16,4:24,6:40"', ""))
    flow = find_flow(folder / "flow.toml", for_volume=['input.roi="0:4,0:8,0:16"'])
    assert flow is not None
    assert [stage.input.roi for stage in flow.stages if isinstance(stage.input, Input)] == ["0:4,0:8,0:16", None, None]


def test_labels_are_not_binned(folder: Path) -> None:
    write_volume(folder / "labels.n5", noise(SHAPE).astype(np.uint32), chunk=8)
    with pytest.raises(
        PlanError, match=r"^stage part: bin \[1, 2, 2\]: .* holds uint32, which volpipe takes for labels"
    ):
        planned(folder, volume="labels.n5")


COMPARED = """
[[stage]]
name = "smooth"
kind = "function"
function = "filters.py:smooth"
halo = [2, 2, 2]
options = { sigma = 1.0 }
windows = { shape = [12, 12, 12], block = [1, 1, 1] }

[[stage]]
name = "mask"
kind = "function"
function = "filters.py:above"

[[stage]]
name = "other"
kind = "function"
input = "smooth"
function = "filters.py:above"
options = { level = 110 }

[[stage]]
name = "images"
kind = "compare"
input = "smooth"
other = "known.n5/raw"
data_range = 255.0

[[stage]]
name = "masks"
kind = "compare"
input = "mask"
other = "other"
data_range = 1.0
"""


def test_a_comparison_is_of_stages_or_of_a_path_and_is_made_again_when_that_changes(folder: Path) -> None:
    whole = gaussian_filter(noise(SHAPE).astype(np.float64), 1.0, truncate=2, mode="mirror").astype(np.float32)
    known = whole + noise(SHAPE, seed=1).astype(np.float32) / 100
    write_volume(folder / "known.n5", known, chunk=8)
    plan = planned(folder, text=COMPARED)
    cost = preview(plan, Inline().start)
    assert cost.seconds is not None and all(each.seconds is not None for each in cost.stages)
    report = ran(plan)
    images, masks = (json.loads((folder / "out" / f"{name}.json").read_text()) for name in ("images", "masks"))
    error = np.mean((whole.astype(np.float64) - known) ** 2)
    assert images["differences"]["together"]["psnr"] == pytest.approx(10 * np.log10(255**2 / error), abs=1e-3)
    differ = np.count_nonzero((whole > 100) != (whole > 110))
    assert masks["differences"]["together"]["num_differ"] == differ > 0
    assert [stage["name"] for stage in json.loads((folder / "out.run" / "flow.json").read_text())["stages"]][
        -1
    ] == "masks"
    assert ran(planned(folder, text=COMPARED)).was_complete
    assert any("differ" in line for line in report.stages[-1].report.summary)
    edit(folder / "known.n5", Box((0, 0, 0), (2, 2, 2)))
    again = ran(planned(folder, text=COMPARED))
    assert [each.report.was_complete for each in again.stages] == [True, True, True, False, True]
    (folder / "out" / "masks.json").unlink()
    assert ran(planned(folder, text=COMPARED)).is_complete
    assert json.loads((folder / "out" / "masks.json").read_text())["differences"] == masks["differences"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["masks.other=part"], r"^stage masks: .*part"),
        (["images.input.level=1"], r"stage images: level is no key of a stage of kind compare"),
        (["masks.other=masks"], r"stage masks, other: it reads itself"),
        (["images.roi=0:99,:,:"], r"^stage images: "),
        (["images.other=small.n5"], r"^stage images: A has 16 × 24 × 40 voxels \(z, y, x\), B 8 × 8 × 8"),
        (["masks.input=images"], r"masks, input: images makes scores and no volume"),
    ],
)
def test_what_cannot_be_compared_is_refused(folder: Path, settings: list[str], why: str) -> None:
    write_volume(folder / "known.n5", noise(SHAPE).astype(np.float32), chunk=8)
    write_volume(folder / "small.n5", noise((8, 8, 8)).astype(np.float32), chunk=8)
    with pytest.raises(VolpipeError, match=why):
        planned(folder, *settings, text=COMPARED)
