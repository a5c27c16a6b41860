"""What a run leaves on disk: what other libraries read, where it lies, its levels, its types, one writer per shard."""

from __future__ import annotations

import json
from collections import Counter
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import z5py
import zarr
from conftest import ROOT
from inline import Inline

import volpipe
from volpipe.errors import PlanError, RunStopped
from volpipe.geometry.affinities import OFFSETS
from volpipe.geometry.grid import Box
from volpipe.inference.output import create_output, planned_volume
from volpipe.inference.output_plan import levels_of
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.volume import Multiscale, Writer, create_multiscale, open_volume
from volpipe.volumes.writer import ShardStream
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

FORMATS = ["ome-zarr-0.5", "ome-zarr-0.6", "ome-zarr-0.4", "n5", "zarr2"]
VOXEL, ORIGIN = (16.0, 8.0, 4.0), (160.0, -80.0, 40.0)  # of the input, nm, (z, y, x)
SHAPE = (10, 18, 21)
SHAPE16 = (16, 16, 16)

TWO_CHANNELS = """
import torch

class Net(torch.nn.Module):
    volpipe = dict(out_channels=2, intensity="same", scale=(2, 1, 1))

    def forward(self, x):
        return torch.cat([x, -x], 1).repeat_interleave(2, 2)

def net():
    return Net()
"""


def noise(shape: tuple[int, ...] = SHAPE, dtype: str = "uint8", low: int = 1, high: int = 255) -> np.ndarray:
    return np.random.default_rng(3).integers(low, high, shape, dtype, endpoint=True)


def write_input(path: Path, data: np.ndarray, voxel: tuple[float, ...] = VOXEL) -> Path:
    """Write `data` (z, y, x) with zarr-python as an OME-Zarr image at ORIGIN, with voxels of `voxel` nm."""
    group = zarr.open_group(path, mode="w", zarr_format=3)
    group.create_array("s0", data=data, chunks=(8, 8, 8))
    place = [{"type": "scale", "scale": voxel}, {"type": "translation", "translation": ORIGIN}]
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    datasets = [{"path": "s0", "coordinateTransformations": place}]
    image: Any = {"axes": axes, "datasets": datasets}
    group.attrs["ome"] = {"version": "0.5", "multiscales": [image]}
    return path


WINDOWS = (
    "windows.shape=[8,8,8]", "windows.overlap=4", "windows.block=[3,2,2]", "windows.blend=hann",
    "output.shard=[4,4,4]", "output.chunk=[4,2,4]", "output.levels=2",
)  # fmt: skip


def planned(folder: Path, data: np.ndarray, *settings: str, voxel: tuple[float, ...] = VOXEL) -> Plan:
    source = write_input(folder / "in.zarr", data, voxel)
    return prepare(str(source), load_recipe(None, settings), folder / "out.zarr", folder)


def ran(plan: Plan) -> Report:
    report = execute(plan, Inline(seed=1).start)
    assert report.missing == []
    return report


def read(plan: Plan, level: int) -> np.ndarray:
    """Return a level of the output as a library other than ours sees it."""
    if plan.recipe.output.format == "n5":
        return np.asarray(z5py.File(plan.out, mode="r")[f"s{level}"][...])
    return np.asarray(zarr.open_array(Path(plan.out) / f"s{level}", mode="r")[...])


def level_boxes(shape: tuple[int, ...], step: tuple[int, ...]) -> dict[tuple[int, ...], tuple[slice, ...]]:
    """Return for each voxel of the coarser level the voxels that it joins, clipped to `shape`."""
    counts = [-(-n // s) for n, s in zip(shape, step, strict=True)]
    return {
        at: tuple(slice(i * s, (i + 1) * s) for i, s in zip(at, step, strict=True))
        for at in product(*map(range, counts))
    }


def block_means(fine: np.ndarray, step: tuple[int, ...]) -> np.ndarray:
    """Return the mean of the voxels that are there, half to even, over the last three axes."""
    boxes = level_boxes(fine.shape[-3:], step)
    shape = tuple(max(at[i] for at in boxes) + 1 for i in range(3))
    coarse = np.zeros((*fine.shape[:-3], *shape))
    for at, box in boxes.items():
        z, y, x = at
        in_z, in_y, in_x = box
        coarse[..., z, y, x] = fine[..., in_z, in_y, in_x].astype(np.float64).mean(axis=(-3, -2, -1))
    return coarse


def check_means(plan: Plan) -> None:
    for level in (1, 2):
        means = block_means(read(plan, level - 1), plan.step(level))
        assert np.array_equal(read(plan, level), np.rint(means).astype(plan.dtype))


@pytest.mark.long
@pytest.mark.parametrize("format_", FORMATS)
def test_an_enlarged_volume_is_what_other_libraries_read(tmp_path: Path, format_: str) -> None:
    data = noise()
    plan = planned(
        tmp_path, data, "net.name=upsample", "net.options={scale=[2,1,1]}", f"output.format={format_}", *WINDOWS
    )
    assert 0 < plan.num_sums < len(plan.shards())
    ran(plan)
    assert np.array_equal(read(plan, 0), np.repeat(data, 2, axis=0))
    check_means(plan)


@pytest.mark.parametrize(
    "format_", ["ome-zarr-0.5", "n5", *(pytest.param(f, marks=pytest.mark.long) for f in ("ome-zarr-0.4", "zarr2"))]
)
def test_channels_are_what_other_libraries_read(tmp_path: Path, format_: str) -> None:
    data = noise()
    (tmp_path / "two.py").write_text(TWO_CHANNELS, encoding="utf-8")
    plan = planned(tmp_path, data, "net.name=two.py:net", f"output.format={format_}", *WINDOWS)
    assert 0 < plan.num_sums < len(plan.shards())
    ran(plan)
    big = np.repeat(data, 2, axis=0)
    assert np.array_equal(read(plan, 0), np.stack([big, 255 - big]))  # -x of -1..1 is 255 - v of 0..255
    check_means(plan)


def expected_places(factors: list[tuple[int, int, int]]) -> list[tuple[list[float], list[float]]]:
    """Return voxel size and centre of the first voxel of each level of an output twice as fine along z.

    The corner of the volume, half a voxel before its first centre, is the same for every level.
    """
    corner = [o - v / 2 for o, v in zip(ORIGIN, VOXEL, strict=True)]
    places = []
    for factor in factors:
        size = [v / s * f for v, s, f in zip(VOXEL, (2, 1, 1), factor, strict=True)]
        places.append((size, [c + v / 2 for c, v in zip(corner, size, strict=True)]))
    return places


FACTORS = [(1, 1, 1), (1, 1, 2), (2, 2, 4)]  # output voxels are 8, 8, 4 nm


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_level_lies_where_it_is(tmp_path: Path, format_: str, channels: int) -> None:
    (tmp_path / "two.py").write_text(TWO_CHANNELS, encoding="utf-8")
    net = ["net.name=upsample", "net.options={scale=[2,1,1]}"] if channels == 1 else ["net.name=two.py:net"]
    plan = planned(tmp_path, noise(), *net, f"output.format={format_}", *WINDOWS)
    create_output(plan, {})
    assert list(plan.factors) == FACTORS
    for level, (size, origin) in enumerate(expected_places(FACTORS)):
        found = open_volume(plan.out, level=level)
        assert found.axes == (("z", "y", "x") if channels == 1 else ("c", "z", "y", "x"))
        assert found.num_channels == channels
        assert found.levels == ("s0", "s1", "s2")
        np.testing.assert_allclose(found.voxel_size_nm or (), size)
        np.testing.assert_allclose(found.origin_nm, origin)


@pytest.mark.parametrize(("format_", "channels"), [("ome-zarr-0.5", 1), ("ome-zarr-0.5", 2), ("ome-zarr-0.4", 1)])
def test_ome_metadata_say_axes_units_and_places(tmp_path: Path, format_: str, channels: int) -> None:
    (tmp_path / "two.py").write_text(TWO_CHANNELS, encoding="utf-8")
    net = ["net.name=upsample", "net.options={scale=[2,1,1]}"] if channels == 1 else ["net.name=two.py:net"]
    plan = planned(tmp_path, noise(), *net, f"output.format={format_}", *WINDOWS)
    create_output(plan, {})
    if format_ == "ome-zarr-0.5":
        said = json.loads((Path(plan.out) / "zarr.json").read_text(encoding="utf-8"))["attributes"]["ome"]
        assert said["version"] == "0.5"
        (image,) = said["multiscales"]
    else:
        (image,) = json.loads((Path(plan.out) / ".zattrs").read_text(encoding="utf-8"))["multiscales"]
        assert image["version"] == "0.4"
    space = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    assert image["axes"] == [{"name": "c", "type": "channel"}] * (channels - 1) + space
    assert image["name"] == "out"
    first = [0.0] * (channels - 1)
    assert image["datasets"] == [
        {
            "path": f"s{level}",
            "coordinateTransformations": [
                {"type": "scale", "scale": [s + 1 for s in first] + size},
                {"type": "translation", "translation": first + origin},
            ],
        }
        for level, (size, origin) in enumerate(expected_places(FACTORS))
    ]


def test_the_most_frequent_label_wins_ragged_edges_included(tmp_path: Path) -> None:
    labels = noise((11, 13, 9), "uint16", 0, 3) * 1000
    plan = planned(
        tmp_path, labels, "net.name=identity", "normalise.method=none", "output.kind=labels", "windows.shape=[8,8,8]",
        "output.shard=[8,8,4]", "output.chunk=[4,4,4]", "output.levels=2",
    )  # fmt: skip
    ran(plan)
    assert read(plan, 0).dtype == np.uint16
    assert np.array_equal(read(plan, 0), labels)
    for level in (1, 2):
        fine, coarse = read(plan, level - 1), read(plan, level)
        for at, box in level_boxes(fine.shape, plan.step(level)).items():
            values, counts = np.unique(fine[box], return_counts=True)
            assert coarse[at] in values[counts == counts.max()]


def test_means_round_half_to_even(tmp_path: Path) -> None:
    data = np.zeros((2, 2, 129), np.uint8)
    data[0, 0, 0::2] = np.arange(0, 65) % 7 * 4  # an eighth of each pair of columns: halves among the means
    plan = planned(tmp_path, data, "net.name=identity", "output.levels=1", "windows.shape=[2,2,16]", voxel=(8, 8, 8))
    assert plan.factors == ((1, 1, 1), (2, 2, 2))
    ran(plan)
    means = block_means(data, (2, 2, 2))
    assert {0.5, 1.5, 2.5} <= set(np.unique(means))
    assert np.array_equal(read(plan, 1), np.rint(means))


def test_the_output_says_where_it_came_from(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, noise(), "net.name=unet3d", "net.options={features=[2,3],seed=4}", "net.untrained=true",
        "normalise.method=zscore", "output.levels=0",
    )  # fmt: skip
    ran(plan)
    said: Any = dict(zarr.open_group(plan.out, mode="r").attrs)["volpipe"]
    assert said["version"] == volpipe.__version__
    assert said["net"]["label"] == "unet3d"
    assert said["net"]["weights_sha256"] == plan.net.weights_sha256
    assert len(plan.net.weights_sha256) == 64
    assert said["net"]["num_parameters"] == plan.net.num_parameters > 100
    assert said["recipe"]["net"]["options"] == {"features": [2, 3], "seed": 4}
    assert said["recipe"]["normalise"]["method"] == "zscore"
    assert said["normalise"]["shift"] == pytest.approx(noise().mean(), rel=1e-9)
    assert said["normalise"]["scale"] == pytest.approx(noise().std(), rel=1e-9)
    assert said["windows"] == {
        "shape": [*plan.window],
        "overlap": [*plan.overlap],
        "channels_last": plan.channels_last,
        "precision": "float32",
        "block": [*plan.block],
        "blend": "crop",
    }
    assert said["packages"]["torch"] == version("torch")
    assert said["packages"]["tensorstore"] == version("tensorstore")
    assert said["input"]["path"] == str(tmp_path / "in.zarr")
    assert said["input"]["key"] == "s0"
    assert said["input"]["shape"] == [*SHAPE]
    assert said["input"]["voxel_size_nm"] == [*VOXEL]


@pytest.mark.parametrize("format_", FORMATS)
def test_every_shard_of_every_level_is_written_once(
    tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: Counter[tuple[str, Box]] = Counter()
    write, close = Writer.write, ShardStream.close

    def counted(writer: Writer, box: Box, data: np.ndarray) -> None:
        if "out.zarr" in writer.header.folder.parts:
            written[writer.header.folder.name, box] += 1
        write(writer, box, data)

    def closed(stream: ShardStream) -> None:
        if "out.zarr" in stream._header.folder.parts:
            written[stream._header.folder.name, stream._box] += 1
        close(stream)

    monkeypatch.setattr(Writer, "write", counted)
    monkeypatch.setattr(ShardStream, "close", closed)
    plan = planned(tmp_path, noise(), "net.name=identity", f"output.format={format_}", *WINDOWS)
    ran(plan)
    shards = {
        (f"s{level}", Box(tuple(s.start for s in box), tuple(min(s.stop, n) for s, n in zip(box, shape, strict=True))))
        for level, shape in enumerate([(10, 18, 21), (10, 18, 11), (10, 9, 6)])
        for box in level_boxes(shape, (4, 4, 4)).values()
    }
    assert plan.factors == ((1, 1, 1), (1, 1, 2), (1, 2, 4))
    assert written == Counter(shards)
    if format_ == "ome-zarr-0.5":
        for level in range(3):
            files = [path for path in (tmp_path / "out.zarr" / f"s{level}" / "c").rglob("*") if path.is_file()]
            assert len(files) == sum(name == f"s{level}" for name, _ in shards)
    else:
        assert not list((tmp_path / "out.zarr").rglob("*__lock"))


UNIT = """
import torch

class Net(torch.nn.Module):
    volpipe = dict(intensity="unit")

    def forward(self, x):
        return torch.sigmoid(x)

def net():
    return Net()
"""


@pytest.mark.parametrize(("dtype", "top"), [("auto", 255), ("uint16", 65535), ("float32", 1)])
def test_probabilities_fill_the_range_of_an_integer_type(tmp_path: Path, dtype: str, top: int) -> None:
    data = noise(dtype="uint16", low=0, high=65535)
    (tmp_path / "unit.py").write_text(UNIT, encoding="utf-8")
    plan = planned(
        tmp_path, data, "net.name=unit.py:net", f"output.dtype={dtype}", "normalise.low=30000", "normalise.high=31000",
        "output.levels=0",
    )  # fmt: skip
    ran(plan)
    found = read(plan, 0)
    assert found.dtype == ("uint8" if dtype == "auto" else dtype)
    probabilities = 1 / (1 + np.exp(-(data.astype(np.float64) - 30500) / 500))
    np.testing.assert_allclose(found, probabilities * top, rtol=0, atol=0.5 + 1e-2 if top > 1 else 1e-6)
    assert found.min() < 1e-9
    assert found.max() == top


@pytest.mark.parametrize(
    ("dtype", "intensity", "expected"),
    [("uint16", "same", "uint16"), ("int16", "same", "int16"), ("uint8", "raw", "float32")],
)
def test_same_intensities_keep_the_type_and_raw_ones_are_float32(
    tmp_path: Path, dtype: str, intensity: str, expected: str
) -> None:
    info = np.iinfo(dtype)
    data = noise(dtype=dtype, low=info.min, high=info.max)
    plan = planned(tmp_path, data, "net.name=identity", f"output.intensity={intensity}", "output.levels=0")
    ran(plan)
    found = read(plan, 0)
    assert found.dtype == expected
    if intensity == "same":
        assert np.array_equal(found, data)
    else:
        np.testing.assert_allclose(found, data / 127.5 - 1, atol=1e-6)


HOLE = """
import torch

class Net(torch.nn.Module):
    volpipe = dict(intensity="same")

    def forward(self, x):
        return torch.where((x == 200).any(), torch.nan, x)

def net():
    return Net()
"""


def test_a_block_with_nan_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    data = noise(high=199)
    data[2, 9, 4] = 200  # in the second block along y, and too far from the end for its mirror image to see it
    settings = [
        "net.name=../hole.py:net", "normalise.method=none", "windows.shape=[8,8,8]", "windows.block=[1,1,1]",
        "output.levels=1",
    ]  # fmt: skip
    (tmp_path / "hole.py").write_text(HOLE, encoding="utf-8")
    for name in ("integers", "floats"):
        (tmp_path / name).mkdir()
    plan = planned(tmp_path / "integers", data, *settings)
    report = execute(plan, Inline().start)
    missing, coarser = report.missing
    assert (missing.stage, coarser.stage) == ("infer", "pyramid 1")
    assert missing.box == Box((0, 8, 0), (8, 16, 8))
    assert "net net gave 512 NaN and 0 infinite voxels in box 0:8,8:16,0:8 of the output" in missing.reason
    expected = data.copy()
    expected[missing.box.slices] = 0
    assert np.array_equal(read(plan, 0), expected)
    coarse, means = read(plan, 1), np.rint(block_means(data, plan.step(1)))
    assert np.count_nonzero(coarse) > 0
    assert np.array_equal(coarse[coarse > 0], means[coarse > 0])
    assert not report.was_complete

    floats = planned(tmp_path / "floats", data, *settings, "output.dtype=float32", "infer.nonfinite=keep")
    ran(floats)
    assert np.array_equal(np.isnan(read(floats, 0)), expected == 0)


def test_a_net_that_gives_nothing_but_nan_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "hole.py").write_text(HOLE, encoding="utf-8")
    data = np.full(SHAPE, 200, np.uint8)
    plan = planned(
        tmp_path, data, "net.name=hole.py:net", "normalise.method=none", "windows.shape=[8,8,8]",
        "windows.block=[1,1,1]",
    )  # fmt: skip
    with pytest.raises(
        RunStopped,
        match=r"running the net \(infer\) failed.*mend the net, .* infer.nonfinite=keep and output.dtype=float32",
    ):
        execute(plan, Inline().start)


# ---- what viewers are told


def told_to_viewers(plan: Plan) -> dict[str, Any]:
    """Return the attributes of the output's group that OME-Zarr knows."""
    if plan.recipe.output.format == "ome-zarr-0.5":
        said: dict[str, Any] = json.loads((Path(plan.out) / "zarr.json").read_text())["attributes"]["ome"]
        return said
    attributes: dict[str, Any] = json.loads((Path(plan.out) / ".zattrs").read_text())
    return attributes


@pytest.mark.parametrize("format_", ["ome-zarr-0.5", "ome-zarr-0.4"])
@pytest.mark.parametrize(("dtype", "limits"), [("uint8", [0, 255]), ("int16", [-32768, 32767]), ("float32", None)])
def test_an_image_is_shown_by_its_own_range(tmp_path: Path, format_: str, dtype: str, limits: list[int] | None) -> None:
    data = np.linspace(20, 110, 4096).reshape(SHAPE16).astype(dtype)
    settings = ("net.name=identity", "normalise.method=none", f"output.format={format_}", "output.levels=1")
    plan = planned(tmp_path, data, *settings)
    ran(plan)
    (channel,) = told_to_viewers(plan)["omero"]["channels"]
    assert (channel["label"], channel["color"], channel["active"]) == ("out", "FFFFFF", True)
    window, coarse = channel["window"], read(plan, 1)
    expected = np.percentile(coarse.astype(float), [0.1, 99.9])
    assert [window["start"], window["end"]] == pytest.approx(expected, abs=1e-3 if limits is None else 1)
    assert window["start"] <= expected[0] + 1e-3 and expected[1] - 1e-3 <= window["end"]
    ends = limits or [coarse.min(), coarse.max()]
    assert [window["min"], window["max"]] == pytest.approx(ends)
    assert "image-label" not in told_to_viewers(plan)


@pytest.mark.parametrize("value", [0, 7, 255])
def test_an_image_of_one_value_has_a_window_all_the_same(tmp_path: Path, value: int) -> None:
    plan = planned(tmp_path, np.full(SHAPE16, value, np.uint8), "net.name=identity", "normalise.method=none")
    ran(plan)
    window = told_to_viewers(plan)["omero"]["channels"][0]["window"]
    assert 0 <= window["start"] < window["end"] <= 255
    assert window["start"] <= value <= window["end"]


def test_zeros_that_a_mask_leaves_do_not_count(tmp_path: Path) -> None:
    data = noise(SHAPE16, low=100, high=200)
    data[2:] = 0
    plan = planned(
        tmp_path, data, "net.name=identity", "normalise.method=none", "input.empty=0", "windows.shape=[2,16,16]",
        "output.levels=0",
    )  # fmt: skip
    ran(plan)
    window = told_to_viewers(plan)["omero"]["channels"][0]["window"]
    assert 100 <= window["start"] < window["end"] <= 200


@pytest.mark.parametrize(("format_", "said"), [("ome-zarr-0.5", {}), ("ome-zarr-0.4", {"version": "0.4"})])
def test_labels_are_said_to_be_labels(tmp_path: Path, format_: str, said: dict[str, str]) -> None:
    settings = ("net.name=identity", "normalise.method=none", "output.kind=labels", f"output.format={format_}")
    plan = planned(tmp_path, noise(SHAPE16), *settings)
    ran(plan)
    assert told_to_viewers(plan)["image-label"] == said
    assert "omero" not in told_to_viewers(plan)


def test_channels_of_affinities_are_named_by_their_offsets(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_CHANNELS)
    settings = (f"net.name={tmp_path}/two.py:net", "normalise.method=none", "net.offsets=[[-1,0,0],[0,3,-9]]")
    plan = planned(tmp_path, noise(SHAPE16), *settings)
    assert planned_volume(plan).channel_names == ("z-1", "y+3 x-9")
    ran(plan)
    assert open_volume(plan.out).channel_names == ("z-1", "y+3 x-9")
    with pytest.raises(PlanError, match=r"net\.offsets names 1 channel, net .* makes 2"):
        planned(tmp_path / "again", noise(SHAPE16), *settings[:2], "net.offsets=[[-1,0,0]]")


def test_the_shipped_affinities_name_the_offsets_of_their_channels() -> None:
    assert load_recipe(ROOT / "configs/affinities.toml").net.offsets == OFFSETS
    assert load_recipe(ROOT / "configs/affinities.toml", ["net.name=identity"]).net.offsets is None


def test_the_same_voxels_are_shown_alike_after_a_kill(tmp_path: Path) -> None:
    plan = planned(tmp_path, noise(SHAPE16), "net.name=identity", *WINDOWS)
    ran(plan)
    file = Path(plan.out) / "zarr.json"
    before = file.read_bytes()
    folder = RunFolder.from_output(Path(plan.out))
    create_multiscale(plan.out, Multiscale(levels_of(plan.factors)))  # as a session leaves it that is killed
    assert b"omero" in before and b"omero" not in file.read_bytes()
    lines = folder.sessions.read_text().splitlines(keepends=True)
    folder.sessions.write_text("".join(lines[:-1]))
    assert execute(plan, Inline().start).was_complete
    assert file.read_bytes() == before
