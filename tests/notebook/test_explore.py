"""A look at volumes: every voxel in its place, nothing read but what is in sight, a picture without widgets."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import in_greys, write_all
from hypothesis import given, settings
from hypothesis import strategies as st
from neuroglancer.segment_colors import hex_string_from_segment_id
from PIL import Image
from volumes import noise, write_volume

import volpipe as vp
from volpipe.notebook import cuts
from volpipe.notebook.cuts import AXES, Plane, Region, Stack
from volpipe.notebook.explore import ADVICE
from volpipe.reporting.panels import CAPTION, MARGIN
from volpipe.reporting.shades import colours
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, Reader, View, Volume, create_array, create_multiscale

SHAPE = (24, 40, 56)
SIZE, ORIGIN = (30.0, 6.0, 8.0), (60.0, 3.0, 100.0)


def placed(path: Path, data: np.ndarray, size: Any = SIZE, origin: Any = ORIGIN, chunk: int = 16) -> Volume:
    """Return the volume of `data`, written in chunks of 16, at a place of its own."""
    write_volume(path, data, chunk)
    return vp.open(path, view=View(voxel_size_nm=size, origin_nm=origin))


def region(plane: Plane, at: tuple[float, ...], low: Any, high: Any, pixel: float) -> Region:
    return Region(plane, (at[0], at[1], at[2]), low, high, pixel)


def damage(folder: Path, *spared: Path) -> None:
    """Make every chunk below `folder` unreadable but those that are `spared`."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.startswith(("attributes", "zarr.json", ".z")) and file not in spared:
            file.write_bytes(b"\xff" * 9)


@settings(max_examples=60)
@given(data=st.data(), plane=st.sampled_from(list(AXES)), pixel=st.sampled_from([1.0, 6.0, 17.0, 40.0, 400.0]))
def test_a_cut_is_its_voxels(
    volume: tuple[Volume, np.ndarray], data: st.DataObject, plane: Plane, pixel: float
) -> None:
    stack, voxels = Stack.from_volume(volume[0]), volume[1]
    faces = [(o - s / 2, o + (n - 0.5) * s) for o, n, s in zip(ORIGIN, SHAPE, SIZE, strict=True)]
    starts = [data.draw(st.floats(low - 50, high + 50)) for low, high in faces]
    ends = [start + data.draw(st.floats(1, 500)) for start in starts]
    axis, down, across = AXES[plane]
    asked = region(plane, tuple(starts), (starts[down], starts[across]), (ends[down], ends[across]), pixel)
    cut = stack.cut(asked)
    index = math.floor((starts[axis] - ORIGIN[axis]) / SIZE[axis] + 0.5)
    if cut is None:
        is_apart = [ends[a] <= faces[a][0] or starts[a] >= faces[a][1] for a in (down, across)]
        assert not 0 <= index < SHAPE[axis] or any(is_apart)
        return
    assert cut.index == index and cut.is_known.all()
    where: list[Any] = [index] * 3
    for a, low, n, step in zip((down, across), cut.low, cut.data.shape[1:], cut.steps, strict=True):
        assert step == max(1, int(pixel * 1.001 / SIZE[a])) or n == 1
        first = (low - ORIGIN[a]) / SIZE[a] + 0.5
        assert first == pytest.approx(round(first))
        where[a] = np.minimum(round(first) + (step - 1) // 2 + step * np.arange(n), SHAPE[a] - 1)
    plain = np.moveaxis(voxels, axis, 0)[index]
    plain = plain if down < across else plain.T
    np.testing.assert_array_equal(cut.data[0], plain[np.ix_(where[down], where[across])])


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> tuple[Volume, np.ndarray]:
    data = noise(SHAPE)
    return placed(tmp_path_factory.mktemp("volume") / "a.n5", data), data


def message(explorer: vp.Explorer, size: tuple[int, int], pixel: float, row: int = 0) -> dict[str, Any]:
    """Return what a browser asks for: one plane xy of `size` pixels around the middle."""
    panels = [{"row": row, "plane": "xy", "size": size}]
    shades, at = explorer.shades, list(explorer.at)
    return {"kind": "view", "number": 1, "at": at, "pixel": pixel, "level": None, "shades": shades, "panels": panels}


def test_nothing_is_read_but_what_is_in_sight(tmp_path: Path) -> None:
    data = noise((32, 64, 64))
    volume = placed(tmp_path / "a.n5", data, (8.0, 8.0, 8.0), (0.0, 0.0, 0.0))
    explorer = vp.explore(volume, at=(20, 40, 40))
    damage(tmp_path / "a.n5", tmp_path / "a.n5/raw/2/2/1")  # x, y, z: the chunk around 20, 40, 40
    content, pictures = explorer.draw(message(explorer, (10, 12), 8.0))
    assert [(each["what"], each["index"]) for each in content["pictures"]] == [("image", 20)]
    shown = np.asarray(Image.open(io.BytesIO(pictures[0])))
    np.testing.assert_array_equal(shown[..., 0], data[20, 35:46, 34:47])
    assert (shown[..., 3] == 255).all()
    sent: list[dict[str, Any]] = []
    widget = type("Widget", (), {"send": lambda self, content, buffers=None: sent.append(content)})()
    explorer._answer(widget, message(explorer, (100, 100), 8.0), [])
    assert sent[0]["kind"] == "refusal" and "a.n5" in sent[0]["text"]  # the others are damaged indeed


def test_the_coarsest_level_that_fits_is_read(tmp_path: Path) -> None:
    path, data = tmp_path / "a.zarr", noise((16, 64, 64))
    levels = {"s0": 1, "s1": 2, "s2": 4}
    for name, factor in levels.items():
        part = np.ascontiguousarray(data[:, ::factor, ::factor])
        create_array(path, name, ArraySpec(part.shape, part.dtype, (16, 16, 16)), "zarr2")
        write_all(path, name, part)
    group = Multiscale(tuple(Level(name, (1, f, f)) for name, f in levels.items()), voxel_size_nm=(40.0, 10.0, 10.0))
    create_multiscale(path, group, format="ome-zarr-0.4")
    explorer = vp.explore(path)
    damage(path / "s0")
    damage(path / "s2")
    for pixel, is_readable in ((20.0, True), (39.0, True), (40.0, False), (19.0, False)):
        asked = message(explorer, (32, 32), pixel)
        if is_readable:
            content, _ = explorer.draw(asked)
            assert content["pictures"][0]["level"] == 1 and content["pictures"][0]["steps"] == (1, 1)
        else:
            with pytest.raises(vp.VolpipeError, match=r"a\.zarr"):
                explorer.draw(asked)


def test_some_chunks_of_a_large_slice_are_read_each_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise((8, 128, 128)) | 1
    stack = Stack.from_volume(placed(tmp_path / "a.n5", data, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), 8))
    boxes, read = [], Reader.read
    monkeypatch.setattr(Reader, "read", lambda self, box: boxes.append(box) or read(self, box))
    monkeypatch.setattr(cuts, "MAX_BYTES", 40 * 8**3)
    cut = stack.cut(region("xy", (4, 64, 64), (-0.5, -0.5), (127.5, 127.5), 1.0))
    assert cut is not None
    assert len(boxes) == round(cut.share * 256) and 20 <= len(boxes) <= 40
    assert cut.is_known.sum() == len(boxes) * 64
    np.testing.assert_array_equal(cut.data[0], np.where(cut.is_known, data[4], 0))
    boxes.clear()
    assert stack.cut(region("xy", (4, 64, 64), (-0.5, -0.5), (47.4, 47.4), 1.0)).share == 1.0  # type: ignore[union-attr]
    assert len(boxes) == 1


def test_what_helps_where_chunks_are_left_out_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MAX_BYTES", 16**3)
    volume = placed(tmp_path / "a.n5", noise((8, 160, 160)))
    explorer = vp.explore(volume, at=(4, 72, 72))
    content, _ = explorer.draw(message(explorer, (200, 200), 8.0))
    (note,) = content["notes"]
    assert note.startswith("1 % of the chunks in sight are read") and "--set net.name=identity" in note
    vp.run(volume, {"net": {"name": "identity"}}, out=tmp_path / "copy.zarr", site="threads")
    copy = vp.open(tmp_path / "copy.zarr")
    assert len(copy.levels) > len(volume.levels) and (copy[...] == volume[...]).all()
    labels = vp.explore(placed(tmp_path / "labels.n5", noise((8, 160, 160)).astype(np.uint64)))
    content, _ = labels.draw(message(labels, (200, 200), 8.0))
    assert content["notes"][0].endswith("zoom in to see all")  # of labels a run makes no copy
    assert explorer.draw(message(explorer, (8, 8), 8.0))[0]["notes"] == []


def test_an_output_of_smaller_voxels_and_labels_lie_where_they_are(tmp_path: Path) -> None:
    before = noise((8, 16, 16))
    first = placed(tmp_path / "a.n5", before, (40.0, 10.0, 10.0), (0.0, 0.0, 0.0))
    second = placed(tmp_path / "b.n5", before.repeat(4, axis=0), (10.0, 10.0, 10.0), (-15.0, 0.0, 0.0))
    labels = np.zeros((8, 16, 16), np.uint64)
    labels[:, 4:9, 5:7] = 2**40
    third = placed(tmp_path / "c.n5", labels, (40.0, 10.0, 10.0), (0.0, 0.0, 0.0))
    explorer = vp.explore(first, second, third, at=(3, 8, 8))
    for row in (0, 1):
        content, pictures = explorer.draw(message(explorer, (20, 20), 10.0, row))
        assert [each["what"] for each in content["pictures"]] == ["image", "labels"]
        assert all(each["low"] == (-5, -5) and each["high"] == (155, 155) for each in content["pictures"])
        image, over = (np.asarray(Image.open(io.BytesIO(each))) for each in pictures)
        np.testing.assert_allclose(image[..., 0], in_greys(before[3]), atol=0.51)
        np.testing.assert_array_equal(over[..., 3] > 0, labels[3] > 0)
        assert {tuple(colour) for colour in over[labels[3] > 0][:, :3].tolist()} == {
            tuple(colours(labels[:1, 4, 5])[0].tolist())
        }


def test_objects_have_the_colours_of_the_viewer() -> None:
    numbers = [0, 1, 2, 7, 200, 2**31, 2**32 + 5, 2**63 + 3, 2**64 - 1]
    shown = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in colours(np.array(numbers, np.uint64)).tolist()]
    assert shown == [hex_string_from_segment_id(0, number) for number in numbers]


def picture(bundle: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(bundle["image/png"])).convert("RGB"))


def test_a_picture_goes_with_the_widget_or_says_so_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise((40, 40, 40))
    explorer = placed(tmp_path / "a.n5", data, (8.0, 8.0, 8.0), (0.0, 0.0, 0.0)).show()
    bundle, _ = explorer._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"].startswith("<Explorer of ") and bundle["image/png"] == explorer.png()
    drawn = picture(bundle)
    zoom = 8  # 320 pixels of 40 voxels
    voxels = drawn[MARGIN + CAPTION + 4 :: zoom, MARGIN + 4 :: zoom][:40, :40]
    np.testing.assert_allclose(voxels[..., 0], in_greys(data[20]), atol=0.51)
    monkeypatch.setitem(sys.modules, "anywidget", None)  # as where it is not installed
    alone, _ = explorer._repr_mimebundle_()
    assert set(alone) == {"text/plain", "image/png"}
    lines = picture(alone)[len(drawn) :]
    assert len(lines) == CAPTION // 2 and (lines < 128).any() and "volpipe[notebook]" in ADVICE


def test_channels_are_colours_and_other_types_are_stretched(tmp_path: Path) -> None:
    data = np.linspace(-1, 1, 8**3, dtype=np.float32).reshape(8, 8, 8)
    data[4, 0, 0] = np.nan
    explorer = vp.explore(placed(tmp_path / "a.n5", data))
    low, high = explorer.shades[0]
    assert (low, high) == pytest.approx(np.nanpercentile(data[4], (0.5, 99.5)))
    path = tmp_path / "c.zarr"
    channels = noise((3, 8, 8, 8))
    create_array(path, "", ArraySpec(channels.shape, channels.dtype, (3, 8, 8, 8), axes=("c", "z", "y", "x")), "zarr3")
    write_all(path, "", channels)
    explorer = vp.explore(path)
    _, pictures = explorer.draw(message(explorer, (8, 8), 1.0))
    shown = np.asarray(Image.open(io.BytesIO(pictures[0])))
    np.testing.assert_allclose(np.moveaxis(shown[..., :3], -1, 0), in_greys(channels[:, 4]), atol=0.51)


def test_each_question_of_a_page_is_answered(
    volume: tuple[Volume, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    explorer = vp.explore(volume[0])
    sent: list[dict[str, Any]] = []
    widget = type("Widget", (), {"send": lambda self, content, buffers=None: sent.append(content)})()
    good = message(explorer, (10, 10), 8.0)
    for asked in (good | {"number": 7, "panels": [{"row": 3, "plane": "xy", "size": (9, 9)}]}, {"number": 8}):
        explorer._answer(widget, asked, [])
    assert [(each["kind"], each["number"]) for each in sent] == [("refusal", 7), ("refusal", 8)]
    assert "IndexError" in sent[0]["text"] and "KeyError" in sent[1]["text"]
    assert "Traceback" in caplog.text
    explorer._answer(widget, good | {"shades": [(7.0, 7.0)]}, [])
    assert sent[-1]["kind"] == "pictures"


def test_mistakes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    volume = placed(tmp_path / "a.n5", noise((8, 8, 8)))
    with pytest.raises(vp.VolpipeError, match=r"at \(8, 0, 0\): axis z of the volume has voxels 0 to 7, not 8"):
        vp.explore(volume, at=(8, 0, 0))
    for at in ((1, 2), (1.5, 2, 3)):
        with pytest.raises(vp.VolpipeError, match=r"give a voxel \(z, y, x\), such as .* in whole numbers"):
            vp.explore(volume, at=at)
    assert vp.explore(volume, at=np.array([1, 2, 3])).at == (90.0, 15.0, 124.0)
    with pytest.raises(vp.VolpipeError, match=r"b\.n5.* holds float32 .*labels are whole numbers"):
        vp.explore(volume, labels=placed(tmp_path / "b.n5", noise((8, 8, 8), "float32")))
    with pytest.raises(vp.VolpipeError, match="no volume at"):
        vp.explore(tmp_path / "c.n5")
