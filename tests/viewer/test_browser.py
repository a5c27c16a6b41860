"""What Chromium draws, pixel by pixel, is what numpy gives, through the layer's shader; also of a run under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorstore
from arrays import write_all
from browser import PANELS, Browser, chromium
from bucket import Bucket
from command import THREADS, begin, finish, set_each, wait_until
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.viewer.progress import DONE, RUNNING, watch
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale

pytestmark = pytest.mark.browser

SHAPE = (12, 40, 56)
SIZE, ORIGIN = (30.0, 6.0, 8.0), (60.0, 3.0, 100.0)
Z = 5
AT = (Z, 20, 28)
ARRAYS = {"n5": "n5", "zarr2": "zarr2", "ome-zarr-0.4": "zarr2", "ome-zarr-0.5": "zarr3"}
NET = """
import time, torch
from pathlib import Path
class Net(torch.nn.Module):
    def forward(self, x):
        while ((x - (200 / 127.5 - 1)).abs() < 1e-3).sum() > 99 and not Path("go").exists():  # one half of the volume
            time.sleep(0.02)
        return x
def build():
    net = Net()
    net.volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 16, 16), intensity="same"
    )
    return net
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def write_group(path: Path, data: np.ndarray, format: str, *, is_labels: bool = False) -> Path:
    """Write `data` ((c,) z, y, x) as a multiscale group of one level that lies off the origin."""
    channels = data.shape[:-3]
    shards = (*channels, 8, 32, 32) if ARRAYS[format] == "zarr3" else None
    axes = ("c", "z", "y", "x")[-data.ndim :]
    spec = ArraySpec(data.shape, data.dtype, (*channels, 8, 16, 16), shards, axes)
    create_array(path, "s0", spec, ARRAYS[format])
    group = Multiscale((Level("s0"),), axes, voxel_size_nm=SIZE, origin_nm=ORIGIN, is_labels=is_labels)
    create_multiscale(path, group, format=format)
    write_all(path, "s0", data)
    return path


def colours(browser: Browser, panel: int = 0) -> np.ndarray:
    """Return the colours (y, x, 3) of the slice that is shown."""
    return browser.slice(panel, SHAPE[1:], SIZE[1:], ORIGIN[1:]).astype(int)


def in_greys(data: np.ndarray, *measured: np.ndarray) -> np.ndarray:
    """Return `data` from black to white at the percentiles of what is `measured`, by default of `data` itself."""
    low, high = np.rint(np.percentile(np.stack(measured or (data,)), [0.5, 99.5]))
    return np.clip((data - low) / (high - low), 0, 1) * 255


def grey(browser: Browser, panel: int = 0) -> np.ndarray:
    """Return the greys (y, x) of the slice that is shown, which has no colour."""
    shown = colours(browser, panel)
    assert (shown == shown[..., :1]).all()
    return shown[..., 0]


@pytest.mark.long
def test_every_voxel_of_a_slice_is_drawn_in_its_place(browser: Browser, tmp_path: Path) -> None:
    data = noise(SHAPE)
    with vp.view(write_group(tmp_path / "a.n5", data, "n5"), at=AT) as viewer:
        browser.open(viewer.url)
        assert browser.state()["position"] == pytest.approx([28 + 100 / 8, 20 + 3 / 6, Z + 60 / 30])
        np.testing.assert_allclose(grey(browser), in_greys(data)[Z], atol=1)


@pytest.mark.long
def test_voxels_of_an_unknown_size_have_no_unit_and_fill_their_panel(browser: Browser, tmp_path: Path) -> None:
    data = noise((12, 90, 60))
    np.save(tmp_path / "a.npy", data)
    with vp.view(tmp_path / "a.npy", tmp_path / "a.npy", at=(Z, 45, 30)) as viewer:
        browser.open(viewer.url)
        state = browser.state()
        assert state["dimensions"] == {axis: [1, ""] for axis in "xyz"} and state["showScaleBar"] is False
        shown = browser.slice(0, (90, 60), (1, 1), (0, 0)).astype(int)
        np.testing.assert_allclose(shown[8:, :, 0], in_greys(data)[Z, 8:], atol=1)  # buttons lie upon the first rows
        panel = browser.driver.execute_script(PANELS)[0]
        assert 0.85 < max(90 / panel[2], 60 / panel[3]) / state["crossSectionScale"] < 1
        assert (browser.picture()[panel[0] + 2, panel[1] + 2] == 0).all()  # black around it


def test_a_folder_of_neuroglancers_own_format_is_drawn_in_its_place(browser: Browser, tmp_path: Path) -> None:
    data = noise(SHAPE)
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": str(tmp_path / "a")},
        "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
        "scale_metadata": {"size": list(reversed(SHAPE)), "resolution": [8, 6, 30], "chunk_size": [16, 16, 8],
                           "encoding": "raw", "voxel_offset": [10, 20, 30]},
    }  # fmt: skip
    tensorstore.open(spec, create=True).result()[..., 0].write(data.T).result()
    with vp.view(tmp_path / "a", at=AT) as viewer:
        browser.open(viewer.url)
        centre = (20.5 * 6, 10.5 * 8)  # its corner lies at the offset
        shown = browser.slice(0, SHAPE[1:], SIZE[1:], centre).astype(int)
        np.testing.assert_allclose(shown[..., 0], in_greys(data)[Z], atol=1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_sharded_precomputed_of_ours_is_drawn_in_its_place(browser: Browser, tmp_path: Path, dtype: str) -> None:
    data = noise(SHAPE, "uint8").astype(dtype) // (64 if dtype == "uint64" else 1)
    codec, path = "compressed_segmentation" if dtype == "uint64" else "gzip", tmp_path / "a.precomputed"
    create_array(path, "s0", ArraySpec(SHAPE, data.dtype, (4, 8, 8), (8, 16, 16), codec=codec), "precomputed")
    write_all(path, "s0", data)
    group = Multiscale((Level("s0"),), voxel_size_nm=SIZE, origin_nm=(75.0, *ORIGIN[1:]))
    create_multiscale(path, group, format="precomputed")
    with vp.view(path, at=AT) as viewer:
        browser.open(viewer.url)
        if dtype == "uint64":
            shown = colours(browser)
            seen = [{tuple(c) for c in shown[data[Z] == label].tolist()} for label in range(4)]
            assert [len(own) for own in seen] == [1] * 4  # a label has one colour,
            assert len(set.union(*seen)) == 4  # and no two the same
        else:
            np.testing.assert_allclose(grey(browser), in_greys(data)[Z], atol=1)


@pytest.mark.long
def test_input_output_and_difference_stand_side_by_side(browser: Browser, tmp_path: Path) -> None:
    before, after = noise(SHAPE), noise(SHAPE, seed=1)
    first = write_group(tmp_path / "raw.n5", before, "n5")
    second = write_group(tmp_path / "out.zarr", after, "ome-zarr-0.5")
    with vp.view(second, first, at=AT) as viewer:
        browser.open(viewer.url)
        np.testing.assert_allclose(grey(browser, 0), in_greys(before)[Z], atol=1)
        np.testing.assert_allclose(grey(browser, 1), in_greys(after, before)[Z], atol=1)
        change = after.astype(float) - before
        share = np.clip(change[Z] / np.percentile(np.abs(change), 99.5), -1, 1)
        red, blue = 255 * (1 + np.minimum(share, 0)), 255 * (1 - np.maximum(share, 0))  # white where nothing changed
        np.testing.assert_allclose(colours(browser, 2), np.stack([red, np.minimum(red, blue), blue], -1), atol=2)


@pytest.mark.long
def test_sixteen_bits_are_stretched_alike_in_input_and_output(browser: Browser, tmp_path: Path) -> None:
    before = (noise(SHAPE, "uint16").astype(int) // 100 + 1000).astype(np.uint16)
    first = write_group(tmp_path / "raw.n5", before, "n5")
    second = write_group(tmp_path / "out.zarr", before // 2, "ome-zarr-0.4")
    with vp.view(second, first, at=AT) as viewer:
        browser.open(viewer.url)
        for panel, data in enumerate((before, before // 2)):
            np.testing.assert_allclose(grey(browser, panel), in_greys(data, before)[Z], atol=2)
        moved = {"grey": {"range": [1100, 1300], "window": [0, 2000]}}
        browser.driver.execute_script(
            "viewer.layerManager.managedLayers[0].layer.shaderControlState.restoreState(arguments[0]);", moved
        )
        browser.settle()
        for panel, data in enumerate((before, before // 2)):  # those of the output move along
            np.testing.assert_allclose(grey(browser, panel), np.clip((data[Z] - 1100.0) / 200, 0, 1) * 255, atol=2)


@pytest.mark.long
def test_channels_are_red_green_and_blue(browser: Browser, tmp_path: Path) -> None:
    data = noise((3, *SHAPE))
    with vp.view(write_group(tmp_path / "a.zarr", data, "ome-zarr-0.5"), at=AT) as viewer:
        browser.open(viewer.url)
        np.testing.assert_allclose(colours(browser), np.moveaxis(in_greys(data)[:, Z], 0, -1), atol=1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_each_object_has_a_colour_of_its_own(browser: Browser, tmp_path: Path, dtype: str) -> None:
    labels = np.zeros(SHAPE, dtype)
    labels[:, :20, :28], labels[:, 20:, 5:30], labels[3:, :, 40:] = 7, 200, np.iinfo(dtype).max
    path = write_group(tmp_path / "a.zarr", labels, "ome-zarr-0.5", is_labels=True)
    with vp.view(path, at=AT) as viewer:
        browser.open(viewer.url)
        shown = colours(browser)
        seen = {int(label): {tuple(c) for c in shown[labels[Z] == label].tolist()} for label in np.unique(labels[Z])}
        assert len(seen) == 4 and all(len(each) == 1 for each in seen.values())
        assert len(set.union(*seen.values())) == 4


@pytest.mark.long
def test_objects_of_a_segmentation_are_listed_with_their_voxels_and_boxes(browser: Browser, tmp_path: Path) -> None:
    foreground = np.zeros(SHAPE, np.float32)
    foreground[2:9, 3:20, 5:30], foreground[4:6, 25:35, 5:30] = 1, 1
    np.save(tmp_path / "a_foreground.npy", foreground)
    choices = ["input.kind=foreground", "objects.method=components"]
    vp.segment(tmp_path / "a_foreground.npy", out=tmp_path / "out.zarr", site="threads", settings=choices)
    with vp.view(tmp_path / "out.zarr", at=AT) as viewer:
        browser.open(viewer.url)
        browser.driver.execute_script("viewer.selectedLayer.visible = true;")
        browser.wait("return document.querySelectorAll('.neuroglancer-segment-list-entry').length >= 2", 20)
        text = browser.driver.find_element("tag name", "body").text
        objects = [f"2:9,3:20,5:30, {7 * 17 * 25:,} voxels", f"4:6,25:35,5:30, {2 * 10 * 25} voxels"]
        assert 0 < text.index(objects[0]) < text.index(objects[1])  # the largest first
        browser.driver.execute_script("viewer.layout.restoreState('3d'); viewer.selectedLayer.visible = false;")
        browser.driver.execute_script("viewer.showPerspectiveSliceViews.value = false;")  # the surface alone
        browser.settle()
        empty = browser.picture()[100:700, 200:1100]
        browser.driver.execute_script("""const layer = viewer.layerManager.managedLayers[0].layer;
            layer.displayState.segmentationGroupState.value.visibleSegments.add(1n);""")
        wait_until(lambda: (browser.picture()[100:700, 200:1100] != empty).any(-1).mean() > 0.02, 20)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "format"),
    [
        ("s3", "n5"),
        ("http", "ome-zarr-0.5"),
        pytest.param("s3", "ome-zarr-0.5", marks=pytest.mark.long),
        pytest.param("http", "n5", marks=pytest.mark.long),
    ],
)
def test_what_a_bucket_shows_to_all_is_drawn_from_there(
    browser: Browser, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: str, scheme: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # keys would make us read it for the browser
        monkeypatch.delenv(name)
    data, name = noise(SHAPE), "a.n5" if format == "n5" else "a.zarr"
    path = write_group(tmp_path / name, data, format)
    bucket.files = {str(f.relative_to(tmp_path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    bucket.readable = bucket.listable = bucket.is_open = True
    place = f"s3://cells/{name}" if scheme == "s3" else f"{bucket.url}/cells/{name}"
    with vp.view(place, at=AT) as viewer:
        browser.open(viewer.url)
        np.testing.assert_allclose(grey(browser), in_greys(data)[Z], atol=1)
        assert f"{bucket.url}/cells/{name}" in str(browser.state()["layers"][0]["source"])


@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_run_is_watched_while_it_is_made(browser: Browser, tmp_path: Path) -> None:
    data = noise((8, 32, 32))
    data[0, 16:] = 200  # by which the net knows the half that waits
    write_volume(tmp_path / "in.n5", data)
    (tmp_path / "net.py").write_text(NET)
    process = begin(
        tmp_path, "run", *THREADS, "-o", "out.zarr", "in.n5",
        *set_each("net.name=net.py:build", "output.dtype=uint8",
                  "output.shard=[8,16,16]", "output.chunk=[8,16,16]",
                  *windowed((8, 16, 16), (0, 0, 0), (1, 1, 1), "crop")),
    )  # fmt: skip

    def states() -> list[int]:
        run = watch(str(tmp_path / "out.zarr")) if (tmp_path / "out.zarr.run" / "journal.jsonl").is_file() else None
        return [] if run is None else run.look().cells.ravel().tolist()

    # A shard runs once its worker gave a sign: after the journal has the others.
    wait_until(lambda: states() == [DONE, DONE, RUNNING, RUNNING], 60)
    with vp.view(tmp_path / "out.zarr", at=(4, 16, 16)) as viewer:
        browser.open(viewer.url)
        browser.driver.execute_script("viewer.layout.reset(); viewer.state.restoreState({layout: 'xy'});")
        browser.driver.execute_script("viewer.layerManager.managedLayers[1].setVisible(false)")
        browser.settle()

        def shown() -> np.ndarray:
            return browser.slice(0, (32, 32), (1, 1), (0, 0)).astype(int)[..., 0]

        measured = data[:, :16]  # what is written
        half = np.where(np.arange(32)[:, None] < 16, in_greys(data, measured)[4], 0)
        np.testing.assert_allclose(shown(), half, atol=1)
        browser.driver.execute_script("viewer.layerManager.managedLayers[0].setVisible(false)")
        browser.driver.execute_script("viewer.layerManager.managedLayers[1].setVisible(true)")
        browser.settle()
        marks = browser.slice(0, (32, 32), (1, 1), (0, 0)).astype(int)
        assert (marks[:16, :, 1] > marks[:16, :, 0]).all()  # green: done
        assert (marks[16:, :, 0] > marks[16:, :, 1]).all() and (marks[16:, :, 1] > marks[16:, :, 2]).all()  # yellow
        browser.driver.execute_script("viewer.layerManager.managedLayers[0].setVisible(true)")
        browser.driver.execute_script("viewer.layerManager.managedLayers[1].setVisible(false)")
        assert "2 of 4 shards written" in browser.driver.find_element("id", "volpipe").text
        (tmp_path / "go").touch()
        assert finish(tmp_path, process).code == 0
        wait_until(lambda: np.abs(shown() - in_greys(data, measured)[4]).max() <= 1, 20)
