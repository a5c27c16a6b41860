"""Writing: arrays are made once, of what their format can hold, and written in whole units."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from arrays import write_all
from volumes import write_volume

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats import container
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer

# ---- making


@pytest.mark.parametrize("format", ["n5", "zarr2", "zarr3"])
def test_an_array_is_made_once(tmp_path: Path, format: str) -> None:
    spec = ArraySpec(shape=(8, 8, 8), dtype=np.dtype("u1"), chunks=(4, 4, 4), attributes={"volpipe": {"shape": (1, 2)}})
    create_array(tmp_path / "a", "b/x", spec, format)
    write_all(tmp_path / "a", "b/x", np.ones((8, 8, 8), np.uint8))
    files = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()}
    create_array(tmp_path / "a", "b/x", spec, format)
    assert {file: file.read_bytes() for file in (tmp_path / "a").rglob("*") if file.is_file()} == files
    for change in ({"dtype": np.dtype("u2")}, {"chunks": (2, 4, 4)}, {"attributes": {"volpipe": {"shape": [1, 3]}}}):
        with pytest.raises(VolumeError, match="exists already"):
            create_array(tmp_path / "a", "b/x", ArraySpec(**{**vars(spec), **change}), format)
    with pytest.raises(VolumeError, match="is an array"):
        create_array(tmp_path / "a", "b/x/y", spec, format)
    for other in {"n5", "zarr2", "zarr3"} - {format}:
        with pytest.raises(VolumeError, match=f"is {format}"):
            create_array(tmp_path / "a", "c", spec, other)


def test_specs_that_no_format_can_hold_are_refused() -> None:
    good = {"shape": (8, 8, 8), "dtype": np.dtype("u1"), "chunks": (4, 4, 4)}
    for change, words in [
        ({"shape": (8, 0, 8)}, "axis y: shape 0"),
        ({"chunks": (4, 4)}, "same 1 to 8 axes"),
        ({"shards": (8, 6, 8)}, "axis y: shard 6 is not a multiple of chunk 4; use 4 or 8"),
        ({"dtype": np.dtype("U3")}, "integer or float"),
        ({"codec": "lz4"}, "zstd"),
        ({"codec": "gzip", "codec_level": 10}, "levels 0 to 9"),
        ({"fill": -1}, "fill -1"),
    ]:
        with pytest.raises(VolumeError, match=words):
            ArraySpec(**{**good, **change})


def test_n5_and_zarr_v2_refuse_what_they_lack(tmp_path: Path) -> None:
    good = {"shape": (8, 8, 8), "dtype": np.dtype("u1"), "chunks": (4, 4, 4)}
    for format, change, words in [
        ("n5", {"shards": (8, 8, 8)}, "no shards"),
        ("zarr2", {"shards": (8, 8, 8)}, "no shards"),
        ("n5", {"dtype": np.dtype("f2")}, "N5 has no float16"),
        ("n5", {"fill": 1}, "fills with 0"),
        ("n5", {"attributes": {"dimensions": 1}}, "N5's own"),
        ("tiff", {}, "not known"),
        *(
            (format, {"codec": "compressed_segmentation", "dtype": np.dtype("u4")}, f"choose gzip or zstd for {format}")
            for format in ("n5", "zarr2", "zarr3")
        ),
        ("zarr3", {"attributes": {"x": object()}}, "JSON"),
    ]:
        with pytest.raises(VolumeError, match=words):
            create_array(tmp_path / "a", "x", ArraySpec(**{**good, **change}), format)
    assert not (tmp_path / "a").exists()


# ---- writing


@pytest.mark.parametrize(
    ("start", "shape", "shards", "words"),
    [
        ((0, 0, 2), (4, 4, 4), None, "axis x .* whole chunks of 4"),
        ((0, 0, 0), (4, 3, 4), None, "axis y"),
        ((0, 0, 0), (4, 8, 8), (8, 8, 8), "axis z .* whole shards of 8"),
        ((8, 0, 0), (4, 4, 4), None, "outside 0:10"),
        ((0, 0), (4, 4), None, "3 axes"),
    ],
)
def test_parts_of_a_write_unit_are_refused(
    tmp_path: Path, start: tuple[int, ...], shape: tuple[int, ...], shards: tuple[int, ...] | None, words: str
) -> None:
    spec = ArraySpec(shape=(10, 10, 10), dtype=np.dtype("u1"), chunks=(4, 4, 4), shards=shards)
    create_array(tmp_path / "a", "x", spec)
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    with pytest.raises(VolumeError, match=words):
        open_writer(tmp_path / "a", "x").write(box, np.ones(shape, np.uint8))


def test_other_types_and_shapes_are_refused(tmp_path: Path) -> None:
    create_array(tmp_path / "a", "x", ArraySpec(shape=(8, 8, 8), dtype=np.dtype("u1"), chunks=(4, 4, 4)))
    writer = open_writer(tmp_path / "a", "x")
    with pytest.raises(VolumeError, match="holds uint8, the data is uint16"):
        writer.write(Box.from_shape((4, 4, 4)), np.ones((4, 4, 4), np.uint16))
    with pytest.raises(VolumeError, match="does not fill"):
        writer.write(Box.from_shape((4, 4, 4)), np.ones((4, 4, 1), np.uint8))
    with pytest.raises(VolumeError, match="create it"):
        open_writer(tmp_path / "a", "y")


def test_writers_read_what_others_wrote_meanwhile(tmp_path: Path) -> None:
    create_array(tmp_path / "a", "x", ArraySpec(shape=(8, 8, 8), dtype=np.dtype("u1"), chunks=(4, 4, 4)))
    writer, box = open_writer(tmp_path / "a", "x"), Box((0, 0, 4), (4, 4, 8))
    assert not writer.read(box).any()
    zarr.open_array(str(tmp_path / "a/x"), mode="r+")[...] = 5
    assert (writer.read(box) == 5).all()


def test_a_process_keeps_a_bounded_number_of_arrays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MOST_OPENED", 3)
    monkeypatch.setattr(container, "_opened", {})
    data = np.arange(64, dtype=np.uint8).reshape(4, 4, 4)
    for number in range(5):
        write_volume(tmp_path / f"{number}.n5", data + number)
    assert len(container._opened) == 3
    newest, first = open_writer(tmp_path / "4.n5", "raw"), open_writer(tmp_path / "0.n5", "raw")
    assert open_writer(tmp_path / "4.n5", "raw") is newest
    first.write(Box.from_shape(data.shape), data + 9)
    assert np.array_equal(open_volume(tmp_path / "0.n5").open()[...], data + 9)
