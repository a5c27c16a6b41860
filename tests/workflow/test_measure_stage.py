"""Stages of kind measure: tables that no blocks, workers or interrupts change, and functions that are refused."""

from __future__ import annotations

import csv
import json
import pickle
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tifffile
from growing import GrowingN5, edit
from inline import Inline, Stopped
from skimage.measure import regionprops_table
from typer.testing import CliRunner
from volumes import noise, write_volume

from volpipe.cli.app import app
from volpipe.errors import PlanError, RecipeError, RunError, RunStopped, VolpipeError
from volpipe.geometry.grid import Box
from volpipe.runs.options import RunOptions
from volpipe.volumes.volume import open_volume
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import execute

SHAPE = (21, 24, 40)
MEASURES = '''
import numpy as np

def objects(labels, grey, *, start):
    """What people measure of objects; labels have a halo of one voxel."""
    own = labels[1:-1, 1:-1, 1:-1]
    numbers, place = np.unique(own, return_inverse=True)
    place, n = place.ravel(), len(numbers)
    columns = {"label": numbers, "voxels": np.bincount(place, minlength=n)}
    columns["grey"] = np.bincount(place, grey[1:-1, 1:-1, 1:-1].ravel(), n).astype(np.int64)
    for axis, name in enumerate("zyx"):
        at = np.indices(own.shape)[axis].ravel() + start[axis]
        columns[f"sum_{name}"] = np.bincount(place, at, n).astype(np.int64)
        columns[f"first_{name}"] = np.full(n, np.iinfo(np.int64).max)
        columns[f"end_{name}"] = np.zeros(n, np.int64)
        np.minimum.at(columns[f"first_{name}"], place, at)
        np.maximum.at(columns[f"end_{name}"], place, at + 1)
    columns["faces"] = np.zeros(n, np.int64)
    for axis in range(3):
        for step in (-1, 1):
            differs = own != np.roll(labels, step, axis)[1:-1, 1:-1, 1:-1]
            columns["faces"] += np.bincount(place, differs.ravel(), n).astype(np.int64)
    return {name: values[numbers > 0] for name, values in columns.items()}

def pairs(labels, grey, *, start):
    """Sums of floats, and of more than 64 bits, for each pair of a huge label and a grey level."""
    keys, place = np.unique(np.stack([labels.ravel(), grey.ravel()]) // 64, axis=1, return_inverse=True)
    thirds = np.bincount(place.ravel(), 1 / (3.0 + grey.ravel()))
    numbers, huge = keys[0].astype(np.uint64) + np.uint64(2**64 - 256), np.bincount(place.ravel()) << 52
    least = -1.0 / (1 + keys[1].astype(float))
    return {"label": numbers, "level": keys[1], "thirds": thirds, "least": least, "huge": huge}

def sizes(labels, grey, *, start):
    numbers, place, voxels = np.unique(labels, return_inverse=True, return_counts=True)
    first = np.full(len(numbers), 1 << 40)
    np.minimum.at(first, place.ravel(), np.indices(labels.shape)[0].ravel() + start[0])
    return {"label": numbers, "voxels": voxels, "first_z": first}

def alone(labels, *, start):
    table = sizes(labels, None, start=start)
    return {name: values[table["label"] >= 1000] for name, values in table.items()}

def means(labels, grey, *, start):
    numbers, place = np.unique(labels // 16, return_inverse=True)
    return {"label": numbers, "mean": np.bincount(place.ravel(), grey.ravel()) / np.bincount(place.ravel())}

def here(labels, grey, *, start):
    return sizes(labels // 16, grey, start=(0, 0, 0))

def chance(labels, grey, *, start):
    return sizes(labels, grey, start=np.random.default_rng().integers(0, 1 << 40, 3))

def text(labels, grey, *, start):
    return "no table"

def nothing(labels, grey, *, start):
    return {"label": np.array([]), "voxels": np.array([]), "first_z": np.array([])}

def odd(labels, *, start, how):
    numbers, voxels = np.unique(labels, return_counts=True)
    table = {"label": numbers, "voxels": voxels, "mean": np.ones(len(numbers))}
    if (labels > 50).any():
        return {
            "nan": lambda: table | {"mean": np.where(numbers == 77, np.nan, 1.0)},
            "float": lambda: table | {"voxels": voxels / 2},
            "short": lambda: table | {"voxels": np.ones(len(voxels) + 1, int)},
            "name": lambda: {"means" if name == "mean" else name: values for name, values in table.items()},
            "fails": lambda: table["seventy-seven"],
        }[how]()
    return table
'''
BOUNDS = [f"{which}_{axis}" for which in ("first", "end") for axis in "zyx"]
FLOW = """
[[stage]]
name = "labels"
kind = "function"
function = "objects.py:made"
windows = { shape = [8, 8, 8], block = [1, 1, 2] }
output = { levels = 0, kind = "labels" }

[[stage]]
name = "objects"
kind = "measure"
function = "measures.py:objects"
other = "volume"
halo = [1, 1, 1]
block = [8, 16, 8]
[stage.combine]
voxels = "sum"
grey = "sum"
faces = "sum"
sum_z = "sum"
sum_y = "sum"
sum_x = "sum"
first_z = "min"
first_y = "min"
first_x = "min"
end_z = "max"
end_y = "max"
end_x = "max"
[stage.ratio]
mean = ["grey", "voxels"]
z = ["sum_z", "voxels"]
y = ["sum_y", "voxels"]
x = ["sum_x", "voxels"]
"""
MADE = """
import numpy as np

def made(block):
    return (block // 64).astype(np.uint32)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measures.py").write_text(MEASURES)
    (tmp_path / "objects.py").write_text(MADE)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    return tmp_path


def planned(folder: Path, *settings: str, text: str = FLOW, volume: str = "in.n5", out: str = "out") -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / volume), folder / out, folder)


def ran(plan: FlowPlan, inline: Inline | None = None, **options: bool) -> FlowReport:
    report = execute(plan, (inline or Inline(slots=2)).start, RunOptions(**options))
    assert report.is_complete
    return report


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def check_objects(rows: Sequence[dict[str, str]], labels: np.ndarray, grey: np.ndarray) -> None:
    """Compare with scikit-image, and faces with a count over the whole volume."""
    names = ("label", "area", "intensity_mean", "bbox", "centroid")
    expected = regionprops_table(labels, grey, properties=names)
    assert [int(row["label"]) for row in rows] == expected["label"].tolist()
    assert [int(row["voxels"]) for row in rows] == expected["area"].astype(int).tolist()
    for number, name in enumerate(BOUNDS):
        assert [int(row[name]) for row in rows] == expected[f"bbox-{number}"].tolist()
    for name, column in {"mean": "intensity_mean", "z": "centroid-0", "y": "centroid-1", "x": "centroid-2"}.items():
        np.testing.assert_allclose([float(row[name]) for row in rows], expected[column], rtol=1e-12)
    faces = dict.fromkeys(expected["label"].tolist(), 0)
    for axis in range(3):
        before, after = np.moveaxis(labels, axis, 0)[:-1], np.moveaxis(labels, axis, 0)[1:]
        for side in (before[before != after], after[before != after]):
            for label, num in zip(*np.unique(side, return_counts=True), strict=True):
                faces[int(label)] = faces.get(int(label), 0) + int(num)
    faces.pop(0, None)
    assert {int(row["label"]): int(row["faces"]) for row in rows} == faces


def test_a_table_is_that_of_the_whole_volume_whatever_the_blocks(folder: Path) -> None:
    plan = planned(folder)
    report = ran(plan)
    tables = [(folder / "out" / "objects.csv").read_bytes()]
    check_objects(rows_of(folder / "out" / "objects.csv"), noise(SHAPE) // 64, noise(SHAPE))
    for block in ("[64,64,64]", "[3,5,7]"):
        ran(planned(folder, f"objects.block={block}"), Inline(1, 3))
        tables.append((folder / "out" / "objects.csv").read_bytes())
    assert len({*tables}) == 1
    said = json.loads((folder / "out" / "objects.json").read_text())
    assert (said["rows"], said["columns"][:2]) == (3, ["label", "voxels"])
    assert report.stages[-1].report.lines == [f"3 rows in {Path('out') / 'objects.csv'}"]
    page = (folder / "out" / "objects.csv.run" / "report.html").read_text()
    assert "3 rows in" in page and "first_z" in page


def test_sums_are_exact_and_those_of_floats_rounded_once(folder: Path) -> None:
    text = """
[[stage]]
name = "pairs"
kind = "measure"
function = "measures.py:pairs"
input = "volume"
other = "in.n5"
by = ["label", "level"]
combine = { thirds = "sum", least = "max", huge = "sum" }
block = [5, 6, 7]
"""
    plan = planned(folder, text=text)
    ran(plan)
    grey = noise(SHAPE)
    sums = dict.fromkeys(range(4), Fraction())
    for z in range(0, SHAPE[0], 5):
        for y in range(0, SHAPE[1], 6):
            for x in range(0, SHAPE[2], 7):
                block = grey[z : z + 5, y : y + 6, x : x + 7].ravel()
                for level, part in enumerate(np.bincount(block // 64, 1 / (3.0 + block), 4).tolist()):
                    sums[level] += Fraction(part)
    rows = rows_of(folder / "out" / "pairs.csv")
    assert [(int(row["label"]), int(row["level"])) for row in rows] == [(n + 2**64 - 256, n) for n in range(4)]
    for row in rows:
        level = int(row["level"])
        assert float(row["thirds"]) == float(sums[level]) and float(row["least"]) == -1.0 / (1 + level)
        assert int(row["huge"]) == int((grey // 64 == level).sum()) * 2**52 > 2**64
    tables = {(folder / "out" / "pairs.csv").read_bytes()}
    for seed in range(3):
        ran(planned(folder, text=text, out=f"out{seed}"), Inline(seed, 3))
        tables.add((folder / f"out{seed}" / "pairs.csv").read_bytes())
    assert len(tables) == 1


@pytest.mark.parametrize("most_tasks", [20, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 12, 24))])
def test_a_measurement_that_was_killed_goes_on_to_the_same_bytes(folder: Path, most_tasks: int) -> None:
    with pytest.raises(Stopped):
        ran(planned(folder), Inline(0, 2, most_tasks))
    assert not (folder / "out" / "objects.csv").exists()
    ran(planned(folder))
    table = (folder / "out" / "objects.csv").read_bytes()
    shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "out.run")
    ran(planned(folder))
    assert (folder / "out" / "objects.csv").read_bytes() == table


def test_a_table_is_made_again_when_what_it_rests_on_changes_and_not_else(folder: Path) -> None:
    table = folder / "out" / "objects.csv"
    ran(planned(folder))
    assert ran(planned(folder)).was_complete and ran(planned(folder), update=True).was_complete
    before = table.read_bytes()
    (folder / "out" / "objects.csv").write_bytes(before[:-4])  # somebody cut it
    assert [each.report.was_complete for each in ran(planned(folder)).stages] == [True, False]
    assert table.read_bytes() == before
    edit(folder / "in.n5", Box((8, 8, 8), (12, 12, 12)))  # which labels are made of, too
    ran(planned(folder), update=True)
    after = table.read_bytes()
    grey = open_volume(folder / "in.n5").open()[...]
    check_objects(rows_of(table), grey // 64, grey)
    (folder / "measures.py").write_text(MEASURES.replace("at + 1", "at"))
    assert [each.report.was_complete for each in ran(planned(folder)).stages] == [True, False]
    assert len({before, after, table.read_bytes()}) == 3


def test_a_part_is_measured_by_voxels_of_the_whole(folder: Path) -> None:
    ran(planned(folder, "objects.roi=8:21,5:24,:", "objects.block=[6,6,6]", "objects.halo=[0,0,0]",
                "objects.function=measures.py:sizes", 'objects.combine={ voxels = "sum", first_z = "min" }',
                "objects.ratio={}"))  # fmt: skip
    labels = noise(SHAPE)[8:, 5:] // 64
    rows = rows_of(folder / "out" / "objects.csv")
    assert [int(row["voxels"]) for row in rows] == np.bincount(labels.ravel()).tolist()
    assert {row["first_z"] for row in rows} == {"8"}
    refusal = planned(folder).stages[-1].folder.other_work("evaluation.json")  # of work of another kind
    assert isinstance(refusal, RunError) and str(refusal).endswith("holds a measurement; choose another --out")


ALONE = """
[[stage]]
name = "same"
kind = "convert"

[[stage]]
name = "alone"
kind = "measure"
function = "measures.py:alone"
combine = { voxels = "sum", first_z = "min" }
block = [8, 8, 8]
"""


def test_a_table_of_nothing_has_its_headings_and_one_of_a_volume_that_has_grown_all_of_it(folder: Path) -> None:
    volume, table = GrowingN5(folder), folder / "out" / "alone.csv"
    data = np.zeros((26, 24, 40), np.uint32)
    data[18:] = 1007
    shutil.rmtree(volume.path)
    volume.show(data[:16])
    ran(planned(folder, text=ALONE))
    assert table.read_text() == "label,voxels,first_z\n"
    volume.show(data)
    ran(planned(folder, text=ALONE), update=True)
    assert table.read_text() == f"label,voxels,first_z\n1007,{8 * 24 * 40},18\n"
    assert ran(planned(folder, text=ALONE)).was_complete


def test_a_function_that_is_edited_after_the_plan_stops_the_stage(folder: Path) -> None:
    plan = planned(folder, text=SIZES)
    (folder / "measures.py").write_text(f"{MEASURES}\nx = 1\n")
    with pytest.raises(RunStopped, match=r"the code of function measures.py:sizes is \w+… here, and \w+… in the plan"):
        ran(plan)


def test_rows_that_fail_are_named_with_their_block(folder: Path) -> None:
    """Of what random voxels do not show: the block at z 16 alone has labels above 50."""
    data = np.ones(SHAPE, np.uint32)
    data[16:, :8, :8] = 77
    write_volume(folder / "labels.n5", data, chunk=8)
    text = """
[[stage]]
name = "odd"
kind = "measure"
function = "measures.py:odd"
combine = { voxels = "sum", mean = "max" }
block = [8, 8, 8]
options = { how = "HOW" }
"""
    for how, why in {
        "nan": r"block 16:21,0:8,0:8: column mean is nan where label is 77",
        "float": r"column voxels has the type float64; give int64",
        "short": r"it returned label \(1,\), voxels \(2,\), mean \(1,\); let it return arrays \(rows,\) label, voxels",
        "name": r"it returned label \(1,\), voxels \(1,\), means \(1,\); let it",
        "fails": r"it fails: KeyError: 'seventy-seven' \(measures.py, line \d+\)",
    }.items():
        report = execute(
            planned(folder, text=text.replace("HOW", how), volume="labels.n5"), Inline().start, RunOptions()
        )
        assert not report.is_complete and not (folder / "out" / "odd.csv").exists()
        (missing,) = report.stages[0].report.missing
        assert missing.box == Box((16, 0, 0), (21, 8, 8)) and re.search(why, missing.reason)
        shutil.rmtree(folder / "out.run", ignore_errors=True)


REFUSED = [
    (PlanError, ["function=measures.py:means"], r"column mean is \S+ and not \S+ where label is \d+; the table would"),
    (PlanError, ["function=measures.py:here"], r"gives other rows of .* column first_z is \d+ and not \d+ where label"),
    (PlanError, ["function=measures.py:chance"], r"gives other rows of 5:17,7:17,3:17 than of 5:17,7:17,3:17"),
    (PlanError, ["halo=[1,1,1]"], r"gives other rows of 5:10,.* column voxels is \d+ and not \d+"),
    (PlanError, ["by=[\"object\"]"], r"it returned label \(\d+,\), voxels .*; let it return arrays \(rows,\) object"),
    (PlanError, ["function=measures.py:text"], r"it returned str; let it return arrays"),
    (PlanError, ["function=measures.py:nothing"], r"column label has the type float64; give whole numbers"),
    (PlanError, ["options={ level = 3 }"], r"fails: TypeError: .*unexpected keyword argument 'level'.*random voxels"),
    (VolpipeError, ["function=measures.py:gone"], r"has no function 'gone'"),
    (PlanError, ["other=small.n5"], r"21 × 24 × 40 voxels \(z, y, x\), and other .* has 8 × 8 × 8"),
    (PlanError, ["roi=0:99,:,:"], r"roi"),
    (RecipeError, ["combine.voxels=mean"], r"combine.voxels=mean: 'mean' is not one of sum, min, max"),
    (RecipeError, ["ratio.mean=[\"grey\",\"voxel\"]"], r"ratio: combine has no column grey"),
    (RecipeError, ["ratio.voxels=[\"voxels\",\"first_z\"]"], r"2 columns are named voxels"),
    (RecipeError, ["by=[]"], r"by is empty"),
    (RecipeError, ["block=[0,8,8]"], r"block=.* is not a list of three whole numbers from 1"),
    (RecipeError, ["other=sizes"], r"reads itself"),
]  # fmt: skip
SIZES = """
[[stage]]
name = "sizes"
kind = "measure"
function = "measures.py:sizes"
other = "volume"
combine = { voxels = "sum", first_z = "min" }
"""


@pytest.mark.parametrize(("kind", "settings", "why"), REFUSED)
def test_what_would_depend_on_blocks_or_does_not_fit_is_refused(
    folder: Path, kind: type[Exception], settings: list[str], why: str
) -> None:
    write_volume(folder / "small.n5", noise((8, 8, 8)), chunk=8)
    if "means" in settings[0]:
        settings = [*settings, 'combine={ mean = "max" }']
    with pytest.raises(kind, match=f"sizes.*{why}"):
        planned(folder, *(f"sizes.{setting}" for setting in settings), text=SIZES)


def test_the_command_plans_it_tells_its_rows_and_lists_it(folder: Path) -> None:
    (folder / "flow.toml").write_text(SIZES)
    for command in (("plan", "--recipe", "flow.toml", "in.n5", "--config", "threads"),
                    ("run", "--recipe", "flow.toml", "in.n5", "-o", "out", "--config", "threads"),
                    ("status", "out")):  # fmt: skip
        ended = CliRunner().invoke(app, command)
        assert ended.exit_code == 0, ended.output
        assert "sizes" in ended.output
        assert command[0] != "run" or "256 rows in out/sizes.csv" in " ".join(ended.output.split())
    plan = planned(folder, text=SIZES).stages[0].plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.real
def test_objects_of_ts2_are_those_of_scikit_image(folder: Path, shared: Path) -> None:
    grey, labels = (
        tifffile.imread(shared / "fibsem_medulla" / f"ts2_{name}.tif")[60:130, 40:150, 30:160]
        for name in ("raw", "bodies_gt")
    )
    write_volume(folder / "grey.n5", grey, chunk=32)
    write_volume(folder / "cells.n5", labels.astype(np.uint32), chunk=32)
    text = FLOW.partition('[[stage]]\nname = "objects"')[2]
    text = f'[[stage]]\nname = "objects"{text}'.replace('other = "volume"', 'other = "grey.n5"')
    tables = set()
    for block in ("[128,128,128]", "[32,64,32]", "[17,50,41]"):
        ran(planned(folder, f"objects.block={block}", text=text, volume="cells.n5"))
        tables.add((folder / "out" / "objects.csv").read_bytes())
    assert len(tables) == 1
    check_objects(rows_of(folder / "out" / "objects.csv"), labels.astype(np.int64), grey)
