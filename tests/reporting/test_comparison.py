"""Pictures of runs: their pixels are the voxels, differences those of numpy; holes are seen, and so are sentences."""

from __future__ import annotations

import io
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bucket import Bucket
from inline import Inline, Stopped
from PIL import Image
from volumes import noise, windowed, write_volume

from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.reporting import overview
from volpipe.reporting.frames import FRAME, STRIP, STRIPES
from volpipe.reporting.page import Chart, Item, Picture, Sentence
from volpipe.workflow.driver import RunWork
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

BLOCKS = windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop")  # of 16 voxels
SAME = ("net.name=identity", "normalise.method=none", *BLOCKS)


def ramp(shape: tuple[int, int, int] = (40, 48, 56)) -> np.ndarray:
    z, y, x = np.indices(shape)
    return (2 * z + y + x).astype(np.uint8)


def plan_of(folder: Path, data: np.ndarray, *settings: str, voxel: Sequence[float] = (8, 8, 8)) -> Plan:
    path = write_volume(folder / "in.n5", data)
    size = f"input.voxel_size_nm={[float(v) for v in voxel]}" if voxel else "input.level=0"
    recipe = load_recipe(None, [*settings, size])
    return prepare(f"{path}/raw", recipe, folder / "out.zarr", folder)


def drawn(plan: Plan, title: str = "") -> list[Item]:
    """Return the items of the sections, or of one of them, as a report has them."""
    sections = RunWork(plan).page().sections
    return [item for section in sections if title in ("", section.title) for item in section.items]


def pictures(items: Sequence[Item]) -> dict[str, np.ndarray]:
    """Return the pixels of each picture by its title; drawings have none."""
    shown = [item for item in items if isinstance(item, Picture) and item.media_type != "image/svg+xml"]
    return {item.title: np.array(Image.open(io.BytesIO(item.image))) for item in shown}


def notes(items: Sequence[Item]) -> str:
    return " ".join(item.text for item in items if isinstance(item, Sentence))


def voxels(pixels: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the pixel in the middle of each voxel of a picture whose voxels are squares of pixels."""
    image = pixels[:-STRIP]
    zoom = image.shape[0] // shape[0]
    assert image.shape[:2] == (shape[0] * zoom, shape[1] * zoom)
    return image[zoom // 2 :: zoom, zoom // 2 :: zoom]


def greys(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 255)


def test_slices_of_input_and_output_are_their_voxels_and_do_not_differ(tmp_path: Path) -> None:
    data = ramp()
    plan = plan_of(tmp_path, data, *SAME)
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    shown, planes = pictures(items), {"xy": data[20], "xz": data[:, 24], "yz": data[:, :, 28]}
    low, high = np.percentile(np.concatenate([plane.ravel() for plane in planes.values()]), (0.5, 99.5))
    for name, plane in planes.items():
        for title in ("Input", "Output"):
            np.testing.assert_allclose(voxels(shown[f"{title}, {name}"], plane.shape), greys(plane, low, high), atol=1)
    assert f"Greys go from {low:.4g} (black) to {high:.4g} (white), alike" in notes(items)
    assert "The difference is output less input: there is none." in notes(items)
    assert set(shown) == {f"{title}, {name}" for title in ("Input", "Output") for name in planes}


def test_the_difference_is_that_of_the_voxels(tmp_path: Path) -> None:
    data = noise((20, 24, 28), "float32")
    (tmp_path / "net.py").write_text(
        "import torch\nclass Half(torch.nn.Module):\n"
        "    volpipe = dict(intensity='same', stride=(1, 1, 1), halo=(0, 0, 0), tile_invariant=True)\n"
        "    def forward(self, x):\n        return x / 2\ndef build():\n    return Half()\n"
    )
    plan = plan_of(tmp_path, data, "net.name=net.py:build", "normalise.method=none", "output.dtype=float32", *BLOCKS)
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    planes = {"xy": data[10], "xz": data[:, 12], "yz": data[:, :, 14]}
    changes = {name: plane.astype(float) / -2 for name, plane in planes.items()}
    full = np.percentile(np.abs(np.concatenate([change.ravel() for change in changes.values()])), 99.5)
    for name, change in changes.items():
        share = np.clip(change / full, -1, 1)
        red, blue = np.minimum(1, 1 + share) * 255, np.minimum(1, 1 - share) * 255
        pixels = voxels(pictures(items)[f"Difference, {name}"], change.shape).astype(float)
        np.testing.assert_allclose(pixels[..., 0], red, atol=1)
        np.testing.assert_allclose(pixels[..., 2], blue, atol=1)
    captions = {item.title: item.caption for item in items if isinstance(item, Picture)}
    assert captions["Difference, xy"].startswith(f"mean {changes['xy'].mean():+.2g}, of absolute values ")
    assert captions["Difference, xy"].endswith("z 10, y 0:24, x 0:28")


def test_a_finer_output_is_compared_by_its_means(tmp_path: Path) -> None:
    data = noise((10, 24, 28))
    scale = ("net.name=upsample", "net.options={scale=[4,1,1],mode='nearest'}", "normalise.method=none", *BLOCKS)
    plan = plan_of(tmp_path, data, *scale, voxel=(40, 10, 10))
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    shown = pictures(items)
    inputs, outputs = (voxels(shown[f"{title}, xz"], (40, 28)) for title in ("Input", "Output"))
    np.testing.assert_array_equal(inputs, outputs)
    np.testing.assert_array_equal(inputs, voxels(shown["Input, xz"], (40, 28))[::4].repeat(4, axis=0))
    assert len(np.unique(inputs[::4])) > 50
    assert "output, of which the mean of 4 × 1 × 1 voxels is taken, less input: there is none" in notes(items)
    assert "z 22, y 0:24, x 0:28" in [item.caption for item in items if isinstance(item, Picture)]


def test_a_coarser_output_is_compared_by_means_of_the_input(tmp_path: Path) -> None:
    """Along x the last voxel of the output has one of the input, and neither is shown."""
    data = noise((12, 24, 28), "float32")
    (tmp_path / "net.py").write_text(
        "import torch\nclass Mean(torch.nn.AvgPool3d):\n    volpipe = {'intensity': 'same'}\n"
        "def build():\n    return Mean((1, 2, 3))\n"
    )
    plan = plan_of(
        tmp_path, data, "net.name=net.py:build", "normalise.method=none", "windows.shape=[6,12,12]",
        "output.dtype=float32", voxel=(),
    )  # fmt: skip
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    shown = pictures(items)
    inputs, outputs = (voxels(shown[f"{title}, xy"], (24, 27)) for title in ("Input", "Output"))
    data = data[:, :, :27]
    means = data[6].reshape(12, 2, 9, 3).mean(axis=(1, 3))
    seen = [data[6], data[:, 12:14], data[:, :, 15:18]]  # as thick as a voxel of the output
    low, high = np.percentile(np.concatenate([part.ravel() for part in seen]), (0.5, 99.5))
    np.testing.assert_allclose(inputs, greys(data[6], low, high), atol=1)
    np.testing.assert_allclose(outputs, greys(means, low, high).repeat(2, axis=0).repeat(3, axis=1), atol=1)
    assert "output less input, of which the mean of 1 × 2 × 3 voxels is taken: " in notes(items)
    changes = [item.caption for item in items if isinstance(item, Picture) and "Difference" in item.title]
    assert all(float(caption.split()[1].rstrip(",")) == pytest.approx(0, abs=1e-6) for caption in changes)


def test_voxels_that_are_no_cubes_are_shown_in_their_proportions(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ramp((10, 40, 60)), *SAME, voxel=(30, 10, 10))
    execute(plan, Inline().start)
    shown = pictures(drawn(plan, "Slices"))
    zoom = 368 // 60
    assert shown["Input, xy"].shape[:2] == (40 * zoom + STRIP, 60 * zoom)
    assert shown["Input, xz"].shape[:2] == (30 * zoom + STRIP, 60 * zoom)


@pytest.mark.parametrize(("voxel", "length"), [((8, 8, 8), 100.0), ((), 10.0)])
def test_the_bar_is_as_long_as_it_says(tmp_path: Path, voxel: tuple[int, ...], length: float) -> None:
    plan = plan_of(tmp_path, ramp(), *SAME, voxel=voxel)
    execute(plan, Inline().start)
    pixels = pictures(drawn(plan, "Slices"))["Input, xy"]
    bar = pixels[-STRIP // 2 - 1] == 255
    first = int(np.flatnonzero(bar)[0])
    num = int(np.flatnonzero(~bar[first:])[0])
    zoom = pixels.shape[1] // 56
    assert num == round(length / (voxel[0] if voxel else 1) * zoom)


def hatched(items: Sequence[Item], plane: str = "xy") -> np.ndarray:
    """Return which voxels of a slice of an output, of 32 × 32, are hatched."""
    pixels = voxels(pictures(items)[f"Output, {plane}"], (32, 32))
    if pixels.ndim == 2:  # greys alone
        return np.zeros(pixels.shape, bool)
    return (pixels[..., None, :] == np.array(STRIPES)).all(axis=-1).any(axis=-1)


def test_what_is_not_written_is_hatched(tmp_path: Path) -> None:
    data = ramp((32, 32, 32))
    plan = plan_of(tmp_path, data, *SAME)
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=4).start)
    schedule = RunWork(plan).records.resumed()
    done = [unit for unit in range(8) if schedule.by_name["infer"].done[unit]]
    assert 0 < len(done) < 8
    known = np.zeros(data.shape, bool)
    for unit in done:
        known[plan.blocks.box(unit).slices] = True
    items = drawn(plan, "Slices")
    captions = {item.title: item.caption for item in items if isinstance(item, Picture)}
    y = int(captions["Output, xz"].split(", ")[1].removeprefix("y "))
    pixels = voxels(pictures(items)["Output, xz"], (32, 32))
    stripes = (pixels[..., None, :] == np.array(STRIPES)).all(axis=-1).any(axis=-1)
    np.testing.assert_array_equal(stripes, ~known[:, y])
    assert known[:, y].any()
    assert "What is not written yet, or was set aside, is hatched." in notes(items)


def test_what_is_damaged_is_hatched_with_a_sentence_and_the_input_shown_still(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ramp((32, 32, 32)), *SAME)
    execute(plan, Inline().start)
    chunk = tmp_path / "out.zarr/s0/c/1/1/1"
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    items = drawn(plan)
    assert "A part cannot be read, and is hatched: " in notes(items) and str(chunk) in notes(items)
    pixels = voxels(pictures(items)["Output, xy"], (32, 32))
    stripes = (pixels[..., None, :] == np.array(STRIPES)).all(axis=-1).any(axis=-1)
    hole = np.zeros((32, 32), bool)
    hole[16:, 16:] = True
    np.testing.assert_array_equal(stripes, hole)
    (tmp_path / "in.n5").rename(tmp_path / "gone.n5")
    assert "The input cannot be shown: no volume at" in notes(drawn(plan))
    assert "Output, xy" in pictures(drawn(plan)) and "Input, xy" not in pictures(drawn(plan))


def test_a_file_that_is_gone_is_a_hole_and_not_black(tmp_path: Path) -> None:
    data = ramp((32, 32, 32))
    data[:, :16, :16] = 0  # of which no file is written
    plan = plan_of(tmp_path, data, *SAME)
    execute(plan, Inline().start)
    assert not (tmp_path / "out.zarr/s0/c/1/0/0").exists()
    (tmp_path / "out.zarr/s0/c/1/1/1").unlink()
    items = drawn(plan, "Slices")
    hole = np.zeros((32, 32), bool)
    hole[16:, 16:] = True
    np.testing.assert_array_equal(hatched(items), hole)
    assert f"{tmp_path}/out.zarr has lost files that were written, such as {tmp_path}/out.zarr/s0/c/1/1/1" in notes(
        items
    )
    assert f"`volpipe verify {tmp_path}/out.zarr` names all" in notes(items)
    assert "there is none" in notes(items)


def test_where_a_slice_is_gone_others_are_shown(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ramp((32, 32, 32)), *SAME)
    execute(plan, Inline().start)
    shutil.rmtree(tmp_path / "out.zarr/s0/c/1")
    items = drawn(plan, "Slices")
    assert hatched(items).all()
    for plane in ("xz", "yz"):
        holes = hatched(items, plane)
        np.testing.assert_array_equal(holes, np.broadcast_to((np.arange(32) >= 16)[:, None], (32, 32)))
    assert "has lost files that were written" in notes(items)


def test_so_is_one_of_a_run_that_has_not_ended(tmp_path: Path) -> None:
    """Its output does not say yet which files it has; the journal does."""
    plan = plan_of(tmp_path, ramp((32, 32, 32)), *SAME)
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=4).start)
    before = hatched(drawn(plan, "Slices"))
    written = [path for path in sorted((tmp_path / "out.zarr/s0/c").rglob("*")) if path.is_file()]
    assert not before.all() and "are gone" not in notes(drawn(plan, "Slices"))
    for path in written:
        path.unlink()
    items = drawn(plan, "Slices")
    assert hatched(items).all()
    assert "files that the run wrote are gone; `volpipe verify` names them all" in notes(items)
    assert "there is none" not in notes(items)


def test_an_output_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ramp((32, 32, 32)), *SAME)
    execute(plan, Inline().start)
    (tmp_path / "out.zarr").rename(tmp_path / "gone.zarr")
    items = drawn(plan)
    assert "The output cannot be shown: no array at" in notes(items)
    assert {title.partition(",")[0] for title in pictures(items)} == {"Input"}


def test_histograms_count_what_the_slices_show(tmp_path: Path) -> None:
    data = noise((30, 32, 34), "uint16")
    plan = plan_of(tmp_path, data, *SAME)
    execute(plan, Inline().start)
    (chart,) = [item for item in drawn(plan, "Slices") if isinstance(item, Chart)]
    values = np.concatenate([data[15].ravel(), data[:, 16].ravel(), data[:, :, 17].ravel()])
    rows = list(zip(*(chart.data[name] for name in ("series", "low", "high", "count", "share")), strict=True))
    assert [row[0] for row in rows] == ["input"] * (len(rows) // 2) + ["output"] * (len(rows) // 2)
    for _, low, high, count, share in rows:
        assert isinstance(low, float) and isinstance(high, float)
        expected = int(np.count_nonzero((values >= low) & (values < high)))
        assert count == expected and share == pytest.approx(expected / len(values), abs=1e-6)
    assert sum(row[3] for row in rows) == 2 * len(values)  # type: ignore[misc]


def test_channels_are_colours(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nclass Three(torch.nn.Module):\n    volpipe = dict(\n"
        "        intensity='unit', stride=(1, 1, 1), halo=(0, 0, 0), tile_invariant=True, out_channels=4\n    )\n"
        "    def forward(self, x):\n        return torch.cat([x, 1 - x, x * 0, x * 0 + 1], 1)\n"
        "def build():\n    return Three()\n"
    )
    data = noise((16, 20, 24), "float32") > 0
    plan = plan_of(tmp_path, data.astype(np.float32), "net.name=net.py:build", "normalise.method=none", *BLOCKS)
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    pixels = voxels(pictures(items)["Output, xy"], (20, 24))
    expected = np.stack([data[8], ~data[8], np.zeros_like(data[8])], axis=-1) * 255
    np.testing.assert_array_equal(pixels, expected)
    assert "Of the 4 channels of the output red is channel 0, green is channel 1, blue is channel 2." in notes(items)
    assert not any(title.startswith("Difference") for title in pictures(items))


def test_what_is_no_number_is_red(tmp_path: Path) -> None:
    data = noise((16, 16, 16), "float32")
    data[8, 3, 5], data[8, 4, 5] = math.nan, math.inf
    plan = plan_of(tmp_path, data, *SAME, "output.dtype=float32", "infer.nonfinite=keep")
    execute(plan, Inline().start)
    pixels = voxels(pictures(drawn(plan, "Slices"))["Output, xy"], (16, 16))
    red = (pixels == (255, 0, 0)).all(axis=-1)
    assert np.argwhere(red).tolist() == [[3, 5], [4, 5]]


def test_a_large_output_has_a_picture_of_the_whole_with_a_frame(tmp_path: Path) -> None:
    data = ramp((16, 480, 520)) // 2
    plan = plan_of(tmp_path, data, "net.name=identity", "normalise.method=none", "windows.blend=crop",
                   *windowed((16, 64, 64), (0, 0, 0), (1, 4, 4), "crop")[:3], "output.levels=2")  # fmt: skip
    execute(plan, Inline().start)
    items = drawn(plan, "Overview")
    shown = pictures(items)
    assert sorted(shown) == [f"Whole {name}, {plane}" for name in ("input", "output") for plane in ("xy", "xz", "yz")]
    captions = {item.caption for item in items if isinstance(item, Picture)}
    assert captions == {"Level 0, 16 × 480 × 520 voxels"}
    image = shown["Whole output, xy"][:-STRIP]
    yellow = (image == FRAME).all(axis=-1)
    rows, columns = np.flatnonzero(yellow.any(axis=1)), np.flatnonzero(yellow.any(axis=0))
    detail = {item.title: item.caption for item in drawn(plan, "Slices") if isinstance(item, Picture)}["Output, xy"]
    place = [[int(n) for n in side.split()[1].split(":")] for side in detail.split(", ")[1:]]
    ratio = image.shape[0] / 480
    for ends, (first, last) in zip((rows, columns), place, strict=True):
        assert ends[0] == pytest.approx(first * ratio, abs=3) and ends[-1] == pytest.approx(last * ratio, abs=3)


def test_a_level_that_is_hardly_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MOST_BYTES", 2**21)  # too few for level 0
    division = windowed((16, 64, 64), (0, 0, 0), (1, 2, 2), "crop")
    plan = plan_of(
        tmp_path, ramp((16, 480, 520)) // 2, "net.name=identity", "normalise.method=none", *division, "output.levels=2"
    )
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=6).start)
    items = drawn(plan, "Overview")
    assert pictures(items) == {}
    assert "There is no picture of the whole output at level 1: a shard of it waits for all finer ones" in notes(items)
    assert "Output, xy" in pictures(drawn(plan, "Slices"))


def test_the_whole_of_an_input_with_levels_is_shown_too(tmp_path: Path) -> None:
    data = ramp((16, 480, 520)) // 2
    path = write_volume(tmp_path / "plain.n5", data, 64)
    first = load_recipe(None, ["net.name=identity", "normalise.method=none", "output.levels=2"])
    execute(prepare(f"{path}/raw", first, tmp_path / "levels.zarr", tmp_path), Inline().start)
    recipe = load_recipe(None, ["net.name=identity", "normalise.method=none", "output.levels=2"])
    plan = prepare(str(tmp_path / "levels.zarr"), recipe, tmp_path / "out.zarr", tmp_path)
    execute(plan, Inline().start)
    shown = pictures(drawn(plan, "Overview"))
    assert len(shown) == 6
    np.testing.assert_array_equal(shown["Whole input, xy"], shown["Whole output, xy"])


def test_the_slices_of_a_region_lie_in_it(tmp_path: Path) -> None:
    data = ramp()
    plan = plan_of(tmp_path, data, *SAME, "input.roi=8:24,16:48,10:30")
    execute(plan, Inline().start)
    items = drawn(plan, "Slices")
    captions = {item.title: item.caption for item in items if isinstance(item, Picture)}
    z = int(captions["Output, xy"].split(",")[0].removeprefix("z "))
    shown = pictures(items)
    np.testing.assert_array_equal(shown["Input, xy"], shown["Output, xy"])
    expected = data[8 + z, 16:48, 10:30].astype(float)
    pixels = voxels(shown["Output, xy"], (32, 20)).astype(float)
    order = np.argsort(expected.ravel(), kind="stable")
    assert (np.diff(pixels.ravel()[order]) >= 0).all() and len(np.unique(pixels)) > 20
    assert captions["Output, xy"].endswith("y 0:32, x 0:20")


def test_an_output_in_a_bucket_is_shown_too(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, ramp((24, 24, 24)), *SAME)
    execute(plan, Inline().start)
    recipe = load_recipe(None, [*SAME, "input.voxel_size_nm=[8.0, 8.0, 8.0]"])
    remote = prepare(str(tmp_path / "in.n5/raw"), recipe, "s3://cells/remote.zarr", tmp_path)
    execute(remote, Inline().start)
    here, there = (pictures(drawn(each)) for each in (plan, remote))
    assert here.keys() == there.keys() and len(here) == 6
    for title, image in here.items():
        np.testing.assert_array_equal(image, there[title])
    for name in [name for name in bucket.files if "/s0/c/" in name]:
        del bucket.files[name]
    assert re.search(r"s3://cells/remote\.zarr\?\S+ has lost files that were written, such as ", notes(drawn(remote)))
