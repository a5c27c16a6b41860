"""Functions on arrays in the place of a net: their results do not depend on blocks, or they are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from inline import Inline
from scipy.ndimage import gaussian_filter
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SHAPE = (20, 30, 41)
FILTERS = """
import numpy as np
from scipy.ndimage import gaussian_filter, grey_dilation, label

calls = 0

def smooth(block, *, sigma=1.0):
    block += 0  # in place: the block is the function's own
    return gaussian_filter(block.astype(np.float64), sigma).astype(np.float32)

def above(block, *, level):
    return block > level

def negative(block):
    return -block.astype(np.int64)

def same(block):
    return block

def gradient(block):
    return np.stack([np.gradient(block.astype(np.float32), axis=axis) for axis in range(3)])

def mean_of_channels(block):
    return block.mean(axis=0, dtype=np.float32)

def core(block):
    return block[1:-1, 1:-1, 1:-1]

def text(block):
    return "no array"

def imaginary(block):
    return block * 1j

def fails(block):
    raise ValueError("too dark")

def dark_fails(block):
    if not block[0, 0, 0]:
        raise ValueError("too dark")
    return block

def undefined(block):
    with np.errstate(invalid="ignore"):
        return np.where(block == 0, np.float32(np.nan), np.float32(1))

def fickle(block):
    return block.astype(np.float64 if block[0, 0, 0] else np.int64)

def random(block):
    global calls
    calls += 1
    return block + np.uint8(calls)

def objects(block):
    return label(block > block.mean())[0].astype(np.uint32)

def grown(block, *, size):
    return grey_dilation(block, size=size)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "filters.py").write_text(FILTERS)
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    return tmp_path


def run(folder: Path, function: str, *settings: str, out: str = "out.zarr", volume: str = "in.n5") -> Report:
    recipe = load_recipe(Path("none"), [f"net.name=numpy:filters.py:{function}", "output.levels=0", *settings])
    return execute(prepare(str(folder / volume), recipe, folder / out, folder), Inline(slots=2).start)


def result(report: Report) -> np.ndarray:
    assert report.is_complete
    return open_volume(report.plan.out).open()[...]


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        ["windows.shape=[20,24,19]", "windows.block=[1,2,1]"],
        pytest.param(["windows.shape=[18,18,18]", "output.format=n5", "windows.block=[2,1,3]"], marks=pytest.mark.long),
    ],
)
def test_blocks_of_a_filter_are_the_filter_of_the_whole_bit_for_bit(folder: Path, sizes: list[str]) -> None:
    report = run(folder, "smooth", "net.halo=[8,8,8]", "net.options={ sigma = 2.0 }", *sizes)
    whole = gaussian_filter(noise(SHAPE).astype(np.float64), 2.0, mode="mirror").astype(np.float32)
    assert np.array_equal(result(report), whole)
    assert result(report).dtype == np.float32


@pytest.mark.parametrize("format", ["ome-zarr-0.5", "n5"])
def test_a_box_of_a_volume_is_that_box_of_the_whole(folder: Path, format: str) -> None:
    box = ["input.roi=3:17,5:30,7:33", f"output.format={format}", "windows.shape=[10,10,10]", "windows.block=[2,2,2]"]
    report = run(folder, "grown", "net.halo=[1,1,1]", "net.options={ size = [3, 3, 3] }", *box)
    data = np.pad(noise(SHAPE), 1, mode="reflect")
    places = [slice(i, i + n) for i, n in zip((3, 5, 7), (14, 25, 26), strict=True)]
    shifted = [data[i:, j:, k:][tuple(places)] for i in range(3) for j in range(3) for k in range(3)]
    assert np.array_equal(result(report), np.maximum.reduce(shifted))


def test_voxels_come_as_they_are_stored_and_go_as_they_are_given(folder: Path) -> None:
    labels = noise(SHAPE).astype(np.uint64) + 2**60
    create_array(folder / "labels.zarr", "raw", ArraySpec(SHAPE, np.dtype(np.uint64), (8, 8, 8), (24, 32, 48)))
    open_writer(folder / "labels.zarr", "raw").write(Box.from_shape(SHAPE), labels)
    same = result(run(folder, "same", out="same.zarr", volume="labels.zarr/raw"))
    assert same.dtype == np.uint64 and np.array_equal(same, labels)
    box = ["input.roi=3:17,5:30,7:33", "windows.shape=[8,8,8]", "windows.block=[2,2,2]"]  # shards of several blocks
    part = run(folder, "same", *box, out="part.zarr", volume="labels.zarr/raw")
    assert part.plan.num_sums and np.array_equal(result(part), labels[3:17, 5:30, 7:33])
    above = result(run(folder, "above", "net.options={ level = 100 }", out="above.zarr"))
    assert above.dtype == np.uint8 and np.array_equal(above, noise(SHAPE) > 100)
    negative = result(run(folder, "negative", out="negative.zarr"))
    assert negative.dtype == np.int64 and np.array_equal(negative, -noise(SHAPE).astype(np.int64))
    wide = result(run(folder, "above", "net.options={ level = 9 }", "output.dtype=float32", out="wide.zarr"))
    assert wide.dtype == np.float32 and np.array_equal(wide, noise(SHAPE) > 9)


def test_a_function_may_give_channels_and_take_them(folder: Path) -> None:
    report = run(folder, "gradient", "net.halo=[1,1,1]", out="gradient.zarr", volume="in.n5")
    padded = np.pad(noise(SHAPE), 1, mode="reflect").astype(np.float32)
    expected = np.stack(np.gradient(padded))[:, 1:-1, 1:-1, 1:-1]
    assert np.array_equal(result(report), expected)
    mean = result(run(folder, "mean_of_channels", out="mean.zarr", volume="gradient.zarr"))
    assert np.array_equal(mean, expected.mean(axis=0, dtype=np.float32))


SEES = "sees voxels further away than its halo"
REFUSED = [
    ("smooth", ["net.halo=[2,4,3]"], rf"{SEES} \[2, 4, 3\] .*: 4 along z, 4 along x; declare halo = \[4, 4, 4\] or"),
    ("grown", ["net.options={ size = [1, 1, 9] }"], r": 4 along x; declare halo = \[0, 0, 4\] or more"),
    ("objects", ["net.halo=[4,4,4]"], rf"objects {SEES} \[4, 4, 4\].* and perhaps all of its block"),
    ("random", [], r"random gives another result for the same block each time"),
    ("core", ["net.halo=[1,1,1]"], r"core returned uint8 \(8, 8, 8\) for a block of \(10, 10, 10\) voxels; .* the ha"),
    ("text", [], r"text returned str for a block of \(8, 8, 8\) voxels"),
    ("imaginary", [], r"imaginary returned complex128 \(8, 8, 8\)"),
    ("fails", [], r"fails fails for a block of \(8, 8, 8\) voxels of uint8: ValueError: too dark \(filters"),
    ("smooth", ["net.options={ sigmas = 1 }"], r"unexpected keyword argument 'sigmas'"),
    ("smoth", [], r"filters\.py has no function 'smoth'"),
    ("negative", ["output.dtype=uint8"], r"output\.dtype uint8 cannot hold all that function negative gives, .* int64"),
    ("same", ["windows.blend=hann"], r"same is a function on arrays, .* leave out windows\.blend"),
    ("same", ["net.weights=some.pt"], r"net\.weights is for nets, and numpy:filters\.py:same is a function"),
    ("same", ["normalise.low=0", "normalise.high=9"], r"net same asks for normalise\.method=none"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "settings", "why"), REFUSED)
def test_what_would_be_wrong_is_refused_before_the_run(
    folder: Path, function: str, settings: list[str], why: str
) -> None:
    with pytest.raises(VolpipeError, match=why):
        run(folder, function, *settings)


def test_a_block_for_which_a_function_fails_is_named_with_the_reason(folder: Path) -> None:
    data = noise(SHAPE) | 1
    data[:, 16:, 32:] = 0
    write_volume(folder / "dark.n5", data, chunk=8)
    blocks = ["windows.shape=[20,16,32]", "windows.block=[1,1,1]"]
    for function, settings, why in (
        ("dark_fails", [], "function filters.py:dark_fails fails for a block of (20, 16, 32) voxels of uint8: "),
        (
            "undefined",
            [],
            "function undefined gave 2,520 NaN and 0 infinite voxels in box 0:20,16:30,32:41 of the output",
        ),
    ):
        recipe = load_recipe(
            Path("none"), [f"net.name=numpy:filters.py:{function}", "output.levels=0", *blocks, *settings]
        )
        plan = prepare(str(folder / "dark.n5"), recipe, folder / f"{function}.zarr", folder)
        report = execute(plan, Inline(slots=2).start, RunOptions(tolerated=1.0))
        assert [(part.unit, str(part.box)) for part in report.missing] == [(3, "0:20,16:30,32:41")]
        assert why in report.missing[0].reason
    with pytest.raises(VolpipeError, match=r"function fickle gave int64 for a block, and float32 when it was tried"):
        run(folder, "fickle", *blocks, out="fickle.zarr", volume="dark.n5")


def test_a_function_is_measured_as_no_net(folder: Path) -> None:
    with pytest.raises(
        VolpipeError, match=r"numpy:filters\.py:same is a function on arrays, and no net; `volpipe plan`"
    ):
        vp.net_report("numpy:filters.py:same")


def test_an_edited_function_is_refused_as_another_net(folder: Path) -> None:
    run(folder, "same")
    (folder / "filters.py").write_text(FILTERS + "\n# edited\n")
    with pytest.raises(VolpipeError, match="the code of the net changed"):
        run(folder, "same")
