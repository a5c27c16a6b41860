"""Charts and pictures of all other work: sizes, curves, trials, evaluations, flows and batches; drawn in Chromium."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import in_greys
from browser import Browser
from inline import Inline
from PIL import Image
from test_comparison import drawn, pictures, plan_of, ramp
from trainings import make_folder
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.api.outputs import find_page
from volpipe.blockwise.stage import Stage
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.pictures import evaluation_items
from volpipe.evaluation.results import evaluation_parts
from volpipe.geometry.grid import Grid
from volpipe.recipes.training import LOSSES
from volpipe.reporting import histogram
from volpipe.reporting.block_map import BlockMap
from volpipe.reporting.frames import MOST_BYTES, STRIP, encoded, hatched, resized
from volpipe.reporting.histogram import sizes_chart
from volpipe.reporting.page import Chart, Page, PageSection, Picture, ReportLink, Sheet
from volpipe.reporting.render import write_page
from volpipe.reporting.shades import colours as label_colours
from volpipe.reporting.tasks import colours_of
from volpipe.training.pages import curves
from volpipe.training.search.pages import trial_items
from volpipe.volumes.volume import open_volume
from volpipe.workflow.batch_table import DatasetRow
from volpipe.workflow.pages import dataset_sheet
from volpipe.workflow.work_plan import execute


def table(folder: Path, sizes: np.ndarray) -> Path:
    path = folder / "objects.csv"
    path.write_text("label,voxels,z0\n" + "".join(f"{i},{n},0\n" for i, n in enumerate(sizes.tolist(), 1)))
    return path


def test_sizes_of_objects_are_counted(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).lognormal(5, 3, 1000).astype(np.int64) + 1
    chart = sizes_chart(table(tmp_path, sizes), len(sizes))
    low, high, count = (np.array(chart.data[name]) for name in ("low", "high", "count"))
    assert [int(((sizes >= a) & (sizes < b)).sum()) for a, b in zip(low, high, strict=True)] == count.tolist()
    assert count.sum() == 1000
    median = f"{np.median(sizes):,.0f}"
    assert chart.caption == f"1,000 objects, half of them of up to {median} voxels, the largest of {sizes.max():,}."


def test_sizes_of_a_large_table_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 200_000)
    monkeypatch.setattr(histogram, "MOST_BYTES", 2**18)
    chart = sizes_chart(table(tmp_path, sizes), len(sizes))
    assert "Estimated from" in chart.caption and "may not be among these" in chart.caption
    expected = np.histogram(sizes, [*chart.data["low"], chart.data["high"][-1]])[0]  # type: ignore[list-item]
    assert sum(chart.data["count"]) == pytest.approx(200_000)  # type: ignore[arg-type]
    np.testing.assert_allclose(chart.data["count"], expected, atol=0.01 * len(sizes))  # type: ignore[arg-type]


def test_curves_are_those_of_the_log_thinned(tmp_path: Path) -> None:
    lines = [
        {"step": i, "loss": 100.0 / i, "rate": 1e-3, "seconds": 1.0} | ({"psnr": 20 + i / 1e4} if i % 1000 == 0 else {})
        for i in range(1, 20_001)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / LOSSES).write_text(text + '{"step": 20001, "lo')
    charts = {item.title: item for item in curves(tmp_path) if isinstance(item, Chart)}
    losses = charts["Losses"].data
    assert 300 < len(losses["x"]) < 1000
    np.testing.assert_allclose(losses["y"], 100.0 / np.array(losses["x"]))  # type: ignore[arg-type]
    assert charts["Losses"].changes["encoding"]["y"]["scale"] == {"type": "log"}  # type: ignore[index]
    scores = charts["Score of held-out voxels: PSNR, dB"].data
    assert list(scores["x"]) == list(range(1000, 20_001, 1000))
    assert set(charts["Learning rate"].data["y"]) == {1e-3}


def test_a_value_that_is_known_once_is_a_number_and_no_chart(tmp_path: Path) -> None:
    lines = [{"step": i, "loss": 1.0 / i, "rate": 1e-3} | ({"auc": 0.75} if i == 3 else {}) for i in (1, 2, 3)]
    (tmp_path / LOSSES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [*curves(tmp_path)]
    assert [item.title for item in shown if isinstance(item, Chart)] == ["Losses", "Learning rate"]
    assert [item.rows for item in shown if isinstance(item, Sheet)] == [[("auc", "0.75", "3")]]
    (tmp_path / LOSSES).write_text(json.dumps(lines[0]) + "\n")
    assert not any(isinstance(item, Chart) for item in curves(tmp_path))


def test_a_trial_with_one_score_is_a_number_and_no_chart(tmp_path: Path) -> None:
    (tmp_path / "000").mkdir()
    (tmp_path / "000" / LOSSES).write_text('{"step": 4, "loss": 1.0, "psnr": 30.0}\n')
    (item,) = trial_items(tmp_path)
    assert isinstance(item, Sheet) and item.rows == [("000", 30.0, 4)]


def test_a_training_shows_its_held_out_windows(tmp_path: Path) -> None:
    make_folder(tmp_path, "validate_every = 3\npredict_every = 3\n")
    vp.train(tmp_path / "recipe.toml", out=tmp_path / "trained", site="threads", search_path=tmp_path)
    page, _ = find_page(str(tmp_path / "trained"))
    items = [item for section in page.sections for item in section.items]
    shown = pictures(items)
    assert {f"{name}, window {i}" for name in ("Input", "Prediction", "Truth") for i in range(4)} <= set(shown)
    tensors = open_volume(tmp_path / "trained/tensors.n5", "tensors/truth").open()
    truth = tensors.read_raw((0, 0, slice(None), 8))  # z down, x across, in the middle of y
    pixels = shown["Truth, window 0"][:-STRIP]
    zoom = pixels.shape[0] // truth.shape[0]
    order = np.argsort(truth.ravel(), kind="stable")
    assert (np.diff(pixels[zoom // 2 :: zoom, zoom // 2 :: zoom].astype(int).ravel()[order]) >= 0).all()
    assert any(isinstance(item, Chart) and item.title.startswith("Score of held-out") for item in items)


def test_trials_are_charted_by_their_scores(tmp_path: Path) -> None:
    for number, best in enumerate((30.0, 35.5)):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        entries = [{"step": i, "loss": 1.0} | ({"psnr": best - 6 + i} if i % 2 == 0 else {}) for i in range(1, 7)]
        (folder / LOSSES).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "002").mkdir()
    bars, lines = (item for item in trial_items(tmp_path) if isinstance(item, Chart))
    assert bars.data == {"trial": ["000", "001"], "score": [30.0, 35.5], "step": [6, 6]}
    assert list(zip(lines.data["series"], lines.data["x"], strict=True)) == [
        (trial, step) for trial in ("000", "001") for step in (2, 4, 6)
    ]


def test_an_evaluation_shows_what_it_compares(tmp_path: Path) -> None:
    data = noise((16, 20, 24))
    truth, output = write_volume(tmp_path / "t.n5", data), write_volume(tmp_path / "o.n5", np.roll(data, 1, axis=2))
    shown = pictures([*evaluation_items(plan_evaluation(f"{output}/raw", f"{truth}/raw"))])
    image = shown["xy reference"][:-STRIP]
    zoom = image.shape[0] // 20
    expected = in_greys(data[7])
    np.testing.assert_allclose(image[zoom // 2 :: zoom, zoom // 2 :: zoom], expected, atol=1)
    assert "xz output" in shown and sum(title.startswith("error") for title in shown) >= 1


def test_the_table_of_scores_has_numbers_alone() -> None:
    scores = {"output": {"psnr": 34.5, "half": None, "curve": (1.0, 0.5)}}
    sheets = [item for item in evaluation_parts({"output": "a"}, {"scores": scores}).summary if isinstance(item, Sheet)]
    assert [(sheet.names, sheet.rows) for sheet in sheets] == [(("", "psnr", "half"), [("output", "34.5000", "")])]


def test_scores_of_labels_without_a_reference_stand_in_the_report_as_unknown() -> None:
    scores = {"output": {"split": None, "merge": None, "rand_error": None, "num_truth": 0, "num_found": 3}}
    parts = evaluation_parts({"output": "a"}, {"kind": "labels", "scores": scores})
    (rows,) = [dict(item.rows) for item in parts.summary if isinstance(item, Sheet)]
    assert rows["VOI split + merge"] == "nan + nan = nan bits"
    assert (rows["adapted Rand error"], rows["objects"]) == ("nan", "3 found, 0 in the reference")


def test_labels_of_an_evaluation_are_coloured_alike(tmp_path: Path) -> None:
    labels = np.zeros((8, 8, 8), np.uint32)
    labels[:, :4], labels[:, 4:] = 7, 9
    volumes = [f"{write_volume(tmp_path / name, labels)}/raw" for name in ("a.n5", "b.n5")]
    shown = pictures([*evaluation_items(plan_evaluation(*volumes, kind="labels"))])
    image = shown["xy output"][:-STRIP]
    assert {tuple(pixel) for row in image for pixel in row} == {tuple(c) for c in label_colours(np.array([7, 9]))}
    np.testing.assert_array_equal(shown["xy output"], shown["xy reference"])


def test_pictures_stay_small_and_exact_as_long_as_they_can() -> None:
    small = noise((40, 40, 3))
    data, media_type = encoded(small)
    assert media_type == "image/png"
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(data))), small)
    data, media_type = encoded(np.random.default_rng(0).integers(0, 256, (400, 400), np.uint8), MOST_BYTES)
    assert media_type == "image/jpeg" and len(data) <= 2 * MOST_BYTES


def test_resized_pixels_are_those_of_the_voxels_at_their_centres() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(3, 4)
    np.testing.assert_array_equal(resized(image, (6, 8)), image.repeat(2, 0).repeat(2, 1))
    np.testing.assert_array_equal(resized(image, (1, 2)), [[5, 7]])
    known = np.ones((3, 4), bool)
    assert hatched(image, known) is image


NET = "net.name=identity"
BLOCKS = windowed((8, 8, 8), (0, 0, 0), (2, 2, 2), "crop")


def test_a_flow_shows_the_output_of_each_stage(tmp_path: Path) -> None:
    write_volume(tmp_path / "a.n5", ramp((40, 40, 40)))
    stage = '[[stage]]\nname = "{}"\nnet = {{ name = "identity" }}\nnormalise = {{ method = "none" }}\n'
    (tmp_path / "flow.toml").write_text(stage.format("first") + stage.format("second"))
    vp.run(tmp_path / "a.n5/raw", tmp_path / "flow.toml", out=tmp_path / "flow", site="threads")
    page, _ = find_page(str(tmp_path / "flow"))
    shown = pictures([item for section in page.sections for item in section.items])
    assert set(shown) == {"first", "second"}
    np.testing.assert_array_equal(shown["first"], shown["second"])
    assert len(np.unique(shown["first"])) > 20


@pytest.mark.browser
def test_a_batch_has_a_thumbnail_of_each_complete_dataset(tmp_path: Path, browser: Browser) -> None:
    inputs = [f"{write_volume(tmp_path / name, ramp((40, 40, 40)))}/raw" for name in ("a.n5", "b.n5", "c.n5")]
    out = str(tmp_path / "many" / "{stem}.zarr")
    vp.batch(inputs, out=out, site="threads", settings=[NET, "normalise.method=none"])
    (tmp_path / "many/c.zarr").rename(tmp_path / "gone.zarr")
    page, folder = find_page(str(next(tmp_path.glob("*.batch"))))
    (sheet,) = [i for s in page.sections for i in s.items if isinstance(i, Sheet) and i.names[0] == "dataset"]
    links = [row[0] for row in sheet.rows]
    assert all(isinstance(link, ReportLink) and (folder / link.target).is_file() for link in links)
    images = [np.array(Image.open(io.BytesIO(link.image))) if link.image else None for link in links]
    assert [None if image is None else image.shape for image in images] == [(128, 128), (128, 128), None]
    assert images[0] is not None and (np.diff(images[0][64].astype(int)) >= 0).all() and np.ptp(images[0]) > 150
    write_page(page, folder / "again.html")
    browser.open_file(folder / "again.html")
    sizes = browser.driver.execute_script("return [...document.images].map((image) => image.naturalWidth);")
    assert sizes == [128, 128]
    heights = browser.driver.execute_script("return [...document.images].map((image) => image.clientHeight);")
    assert max(heights) <= 48


@pytest.mark.browser
def test_a_batch_fits_into_a_page_with_its_reasons_on_lines_of_their_own(tmp_path: Path, browser: Browser) -> None:
    reason = "its volume has voxels that are not finite, and so on at length; mend it " * 4
    rows = [
        DatasetRow(f"a_volume_with_a_rather_long_name_{i}.n5/raw", f"/lab/of/somebody/a/long/way/down/output_{i}.zarr",
                   "default", "new", shape=(1000, 20000, 20000), num_blocks=123456, output_bytes=10**12,
                   output_files=9999, ended="failed" if i else "done", reason=reason if i else "", wall_seconds=99.0,
                   cpu_seconds=9e6, read_bytes=10**12, written_bytes=10**12, missing=i * 1000, seams={"z": 1.0})
        for i in range(3)
    ]  # fmt: skip
    page = Page("a batch", "not complete", [PageSection("Datasets", [dataset_sheet(tmp_path, rows, {})])])
    write_page(page, tmp_path / "page.html")
    browser.open_file(tmp_path / "page.html")
    wide = browser.driver.execute_script(
        "return [...document.querySelectorAll('.wide')].map((each) => [each.scrollWidth, each.clientWidth]);"
    )
    assert all(scrolled <= shown for scrolled, shown in wide), wide  # in a window of 1280
    cells = browser.driver.find_elements("css selector", "td.sentence")
    assert [cell.text for cell in cells] == [reason.strip()] * 2
    assert all(cell.size["width"] > 1000 for cell in cells)


@pytest.mark.browser
def test_pictures_are_as_wide_as_a_third_of_the_page(tmp_path: Path, browser: Browser) -> None:
    image, media_type = encoded(noise((40, 40)))
    page = Page(
        "a run", "complete", [PageSection("Slices", [Picture(f"{i}", "", image, media_type) for i in range(3)])]
    )
    write_page(page, tmp_path / "page.html")
    browser.open_file(tmp_path / "page.html")
    places = browser.driver.execute_script(
        "return [...document.images].map((image) => [image.clientWidth, image.getBoundingClientRect().top]);"
    )
    assert len({top for _, top in places}) == 1 and all(380 < width < 427 for width, _ in places)


def profiles(tmp_path: Path) -> list[Any]:
    """Return the chart of profiles of a net whose windows disagree, and of one whose do not."""
    (tmp_path / "net.py").write_text(
        "import torch\nclass Tilted(torch.nn.Module):\n"
        "    volpipe = dict(intensity='raw', stride=(1, 1, 1), halo=(0, 0, 0))\n"
        "    def forward(self, x):\n        return x + x.mean() * 20\ndef build():\n    return Tilted()\n"
    )
    data = np.random.default_rng(0).normal(0, 1, (64, 64, 64)).astype(np.float32)
    settings = ("net.name=net.py:build", "net.accept_tile_variance=true", "normalise.method=none")
    tilted = plan_of(tmp_path, data, *settings, *BLOCKS)
    execute(tilted, Inline().start)
    return drawn(tilted, "Seams")


def test_a_seam_is_a_peak_at_the_faces(tmp_path: Path) -> None:
    (chart,) = profiles(tmp_path)
    rows = list(zip(chart.data["axis"], chart.data["distance"], chart.data["difference"], strict=True))
    for axis in ("along z", "along y", "along x"):
        own = {distance: difference for name, distance, difference in rows if name == axis}
        assert set(own) == set(range(-4, 5))
        assert own[0] > 1.2 * max(difference for distance, difference in own.items() if distance)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.float32])
def test_a_histogram_counts_each_value_once(dtype: type) -> None:
    values = np.random.default_rng(0).integers(0, 120, (2, 5, 7)).astype(dtype) - dtype(
        3 if dtype is not np.uint8 else 0
    )
    chart = histogram.histogram("Greys", {"input": values, "output": values[:0]})
    bins = zip(chart.data["low"], chart.data["high"], chart.data["series"], strict=True)
    own = [(low, high) for low, high, series in bins if series == "input"]
    last = own[-1][1]
    expected = [
        int(((values >= low) & ((values < high) | (high == last) & (values == high))).sum()) for low, high in own
    ]
    assert list(chart.data["count"]) == expected + [0] * len(own)
    assert sum(expected) == values.size


@pytest.mark.browser
def test_the_legend_of_many_stages_is_seen_whole(tmp_path: Path, browser: Browser) -> None:
    colours = colours_of([f"stage_{i}_of_many: pyramid" for i in range(30)])
    changes = {"encoding": {"color": {"scale": {"domain": list(colours), "range": list(colours.values())}}}}
    data = {"began": [0, 1], "began_elapsed": [0, 1], "stage": [next(iter(colours))] * 2, "tasks": [1, 1]}
    chart = Chart("Tasks at work", "", "at_work", data, changes)
    write_page(Page("a flow", "complete", [PageSection("Timeline", [chart])]), tmp_path / "page.html")
    browser.open_file(tmp_path / "page.html")
    pixels = browser.driver.execute_script("""
        const canvas = document.querySelector("canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add((data[i] << 16) + (data[i + 1] << 8) + data[i + 2]);
        return [...found];""")
    assert {f"#{pixel:06x}" for pixel in pixels} >= set(colours.values())


@pytest.mark.browser
def test_every_chart_is_drawn_without_a_complaint(tmp_path: Path, browser: Browser) -> None:
    blocks = BlockMap("infer", Grid((64, 64, 64), (16, 16, 16)))
    for unit in range(60):
        blocks.add([unit], 1.0 + unit, f"node{unit % 3}")
    blocks.add_attempt([5])
    stage = Stage("infer", len(blocks.grid))
    stage.done[:60] = True
    blocks.close(stage)
    log = "".join(json.dumps({"step": i, "loss": 1 / i, "rate": 0.1, "psnr": float(i)}) + "\n" for i in range(1, 5))
    for trial in ("000", "001"):
        (tmp_path / trial).mkdir()
        (tmp_path / trial / LOSSES).write_text(log)
    sizes = sizes_chart(table(tmp_path, np.array([1, 1, 5, 70_000])), 4)
    values = {"input": noise((9, 9, 9), "uint16"), "output": noise((9, 9, 9), "uint16", seed=1)}
    charts = [*blocks.items(), sizes, histogram.histogram("Greys", values), *profiles(tmp_path)]
    charts += [*curves(tmp_path / "000"), *trial_items(tmp_path)]
    assert {item.kind for item in charts if isinstance(item, Chart)} >= {
        "block_times", "block_nodes", "sizes", "histogram", "seams", "lines", "trials",
    }  # fmt: skip
    write_page(Page("charts", "complete", [PageSection("Charts", charts)]), tmp_path / "page.html")
    browser.open_file(tmp_path / "page.html")
    assert browser.drawn_pixels() > 1000
