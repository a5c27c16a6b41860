"""Volumes: found by location and key, read as (c, z, y, x), used as arrays, and carried to others by value."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import invented, make, write_all
from bucket import Bucket
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata import ARRAY, GROUP, ZARR3, lay

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    View,
    Volume,
    create_array,
    create_multiscale,
    list_arrays,
    open_volume,
    open_writer,
)

# ---- finding


def test_the_only_volume_is_found(tmp_path: Path) -> None:
    lay(tmp_path / "a.n5", {"volumes/raw/attributes.json": ARRAY})
    for location, key in [
        ("a.n5", None),
        ("a.n5", "volumes/raw"),
        ("a.n5", "/volumes/raw/"),
        ("a.n5/volumes", None),
        ("a.n5/volumes/raw", None),
        ("a.n5/volumes", "raw"),
        ("./x/../a.n5", None),
    ]:
        volume = open_volume(tmp_path / location, key)
        assert (volume.path, volume.key, volume.levels) == (str(tmp_path / "a.n5"), "volumes/raw", ())


def test_an_array_is_its_own_container(tmp_path: Path) -> None:
    lay(tmp_path / "plain", {"zarr.json": ZARR3})
    volume = open_volume(f"file://{tmp_path}/plain")
    assert (volume.path, volume.key) == (str(tmp_path / "plain"), "")


def test_several_volumes_are_named(tmp_path: Path) -> None:
    lay(tmp_path / "a.n5", {f"{key}/attributes.json": ARRAY for key in ("raw", "em/s0", "em/s1")})
    with pytest.raises(VolumeError, match="holds 2 volumes; choose one by its key: em, raw"):
        open_volume(tmp_path / "a.n5")
    with pytest.raises(VolumeError, match=r"no volume at .*rwa; .*a.n5 holds em, raw"):
        open_volume(tmp_path / "a.n5", "rwa")
    assert [volume.key for volume in list_arrays(tmp_path / "a.n5")] == ["em/s0", "em/s1", "raw"]
    assert open_volume(tmp_path / "a.n5", "em", 1).key == "em/s1"
    assert open_volume(tmp_path / "a.n5", "em").levels == ("em/s0", "em/s1")
    assert open_volume(tmp_path / "a.n5/em/s1").levels == ("em/s0", "em/s1")
    with pytest.raises(VolumeError, match="no level 2; its levels are 0 to 1"):
        open_volume(tmp_path / "a.n5", "em", 2)
    with pytest.raises(VolumeError, match="no level 1"):
        open_volume(tmp_path / "a.n5", "raw", 1)


def test_arrays_that_cannot_be_read_are_listed_as_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lay(tmp_path / "a.n5", {"good/attributes.json": ARRAY, "bad/attributes.json": ARRAY | {"dataType": "object"}})
    assert [volume.key for volume in list_arrays(tmp_path / "a.n5")] == ["good"]
    assert "bad/attributes.json: dataType 'object'" in caplog.text


def test_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "stack.tif").write_bytes(b"II")
    with pytest.raises(VolumeError, match=r"attributes.json.*zarray.*zarr.json.*OME-Zarr"):
        open_volume(tmp_path / "empty")
    with pytest.raises(VolumeError, match=f"no volume at {tmp_path}/typo"):
        open_volume(tmp_path / "typo")
    with pytest.raises(VolumeError, match="is a file"):
        open_volume(tmp_path / "stack.tif")
    with pytest.raises(VolumeError, match="not ftp://"):
        open_volume("ftp://host/a.zarr")
    with pytest.raises(VolumeError, match="leaves the container"):
        open_volume(tmp_path / "empty", "../typo")
    with pytest.raises(VolumeError, match="no volume at"):
        list_arrays(tmp_path / "typo")


def test_a_plate_lists_its_images(tmp_path: Path) -> None:
    lay(
        tmp_path / "p.zarr",
        {
            ".zgroup": GROUP,
            ".zattrs": {"plate": {"wells": [{"path": "A/1"}, {"path": "B/2"}]}},
            "A/1/.zattrs": {"well": {"images": [{"path": "0"}, {"path": "1"}]}},
            "B/2/.zattrs": {"well": {"images": [{"path": "0"}]}},
        },
    )
    with pytest.raises(VolumeError, match="plate of images; choose one by its key: A/1/0, A/1/1, B/2/0"):
        open_volume(tmp_path / "p.zarr")


# ---- opening, here and in other processes


def test_volumes_and_readers_travel_by_value(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    volume = make(tmp_path / "a", data)
    again = pickle.loads(pickle.dumps(volume))
    assert again == volume and hash(again) == hash(volume)
    assert len(pickle.dumps(volume)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(volume.open(cache_bytes=1000)))[...], data)


def test_a_process_opens_a_volume_once_until_it_changes(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    volume = make(tmp_path / "a", data)
    assert volume.open() is open_volume(tmp_path / "a").open()
    assert volume.open() is not volume.open(cache_bytes=10_000)
    assert open_writer(tmp_path / "a", "") is open_writer(str(tmp_path / "a"), "")
    before = volume.open()
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data + 1, codec="gzip")
    assert volume.open() is not before
    np.testing.assert_array_equal(volume.open()[...], data + 1)
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data[:4])
    with pytest.raises(VolumeError, match="open it again"):
        volume.open()


@pytest.mark.parametrize("array_format", ["n5", "zarr2", "zarr3"])
def test_a_volume_that_has_grown_is_read_as_it_was(tmp_path: Path, array_format: str) -> None:
    data = invented((10, 8, 6), "int32")
    before = make(tmp_path / "a", data[:6], format=array_format)
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data, format=array_format)
    reader = before.open()
    assert reader.shape == (6, 8, 6)
    np.testing.assert_array_equal(reader[...], data[:6])
    np.testing.assert_array_equal(reader.read_mirrored(Box((4, 0, 0), (8, 8, 6)))[0], data[[4, 5, 4, 3]])
    with pytest.raises(VolumeError, match="leaves the volume"):
        reader.read(Box((0, 0, 0), (7, 8, 6)))
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data.astype("int16"), format=array_format)
    with pytest.raises(VolumeError, match="open it again"):
        before.open()


def test_importing_brings_no_format_library() -> None:
    code = "import sys, volpipe.volumes.volume; print({'tensorstore', 'zarr', 'z5py', 'torch'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "set()"


def try_to_read(volume: Volume, answer: Any) -> None:  # Any: a queue, of a type that its process chooses
    """Put the first voxel, or what was said instead, in the queue `answer`."""
    try:
        answer.put(volume.open()[0, 0, 0])
    except VolumeError as error:
        answer.put(str(error))


@pytest.mark.parametrize(
    ("place", "method", "fact"),
    [
        ("a", "fork", "was forked from one"),
        ("s3://cells/a", "fork", "was forked from one"),
        ("s3://cells/a", "spawn", "0"),
        pytest.param("a", "spawn", "0", marks=pytest.mark.long),
    ],
)
def test_a_forked_process_is_told_and_a_spawned_one_reads(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, method: str, fact: str
) -> None:
    monkeypatch.chdir(tmp_path)
    volume = make(place, invented((8, 8, 8), "uint8"))  # type: ignore[arg-type]
    volume.open()[...]
    processes = multiprocessing.get_context(method)
    answer = processes.SimpleQueue()
    child = processes.Process(target=try_to_read, args=(volume, answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert fact in str(answer.get())


def test_threads_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLPIPE_THREADS", "3")
    assert tensorstore.num_threads() == 3
    monkeypatch.setenv("VOLPIPE_THREADS", "many")
    with pytest.raises(VolumeError, match="VOLPIPE_THREADS"):
        tensorstore.num_threads()
    monkeypatch.delenv("VOLPIPE_THREADS")
    assert tensorstore.num_threads() == os.cpu_count()


@pytest.mark.parametrize(
    "order",
    [("z", "y", "x"), ("x", "z", "y"), ("y", "x"), ("c", "z", "y", "x"), ("t", "x", "y", "z", "c"), ("y", "x", "c")],
)
def test_voxels_are_read_as_czyx_whatever_the_stored_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    length = {"t": 1, "c": 3, "z": 5, "y": 6, "x": 7}
    data = invented(tuple(length[axis] for axis in order), "uint8")
    volume = make(tmp_path / "a", data, axes=order)
    box = Box((0, 1, 2), (min(4, volume.spatial_shape[0]), 5, 6))
    read = volume.open().read(box)
    assert volume.spatial_shape == (5 if "z" in order else 1, 6, 7)
    assert volume.num_channels == (3 if "c" in order else 1)
    for c, z, y, x in np.ndindex(*read.shape):
        place = {"t": 0, "c": c, "z": z, "y": y + 1, "x": x + 2}
        assert read[c, z, y, x] == data[tuple(place[axis] for axis in order)]
    np.testing.assert_array_equal(volume.open().read_mirrored(box, num_channels=1), read[:1])
    if volume.num_channels > 1:
        np.testing.assert_array_equal(volume.open().read(box, num_channels=2), read[:2])


@pytest.fixture(scope="module")
def two_channels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Volume, np.ndarray]:
    """A volume (c, z, y, x), one voxel thin along x, and its data."""
    data = invented((2, 7, 5, 1), "uint16")
    return make(tmp_path_factory.mktemp("two_channels") / "a", data), data


@settings(max_examples=40)
@given(st.tuples(*[st.integers(-25, 20)] * 3), st.tuples(*[st.integers(1, 12)] * 3))
def test_mirrored_reads_equal_a_padded_volume(
    two_channels: tuple[Volume, np.ndarray], start: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    volume, data = two_channels
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    padded = np.pad(data, [(0, 0), *[(40, 40)] * 3], mode="reflect")
    np.testing.assert_array_equal(volume.open().read_mirrored(box), padded[:, *box.shift((40, 40, 40)).slices])


def test_mirrored_reads_touch_each_voxel_once(tmp_path: Path) -> None:
    reader = make(tmp_path / "a", invented((8, 8, 8), "uint8")).open()
    array, seen = reader._array, []

    class Recorder:
        def read(self, index: tensorstore.Index) -> np.ndarray:
            seen.append(array.read(index))
            return seen[-1]

    reader._array = Recorder()
    assert reader.read_mirrored(Box((-30, 2, 7), (-26, 4, 30))).shape == (1, 4, 2, 23)
    assert [data.shape for data in seen] == [(3, 2, 8)]  # -30:-26 shows 2, 1, 0, 1; 7:30 shows 7 … 0 … 7 6


def test_an_index_that_numpy_refuses_or_that_goes_backwards_is_refused(tmp_path: Path) -> None:
    reader = make(tmp_path / "a", invented((5, 6, 7), "int32"), "n5").open()
    for wrong in ([1, 2], np.s_[::-1], 9, np.s_[0, 0, 0, 0]):
        with pytest.raises(IndexError):
            reader[wrong]


def test_a_cache_is_read_instead_of_the_file(tmp_path: Path) -> None:
    data = invented((8, 8, 8), "uint8", 1)
    volume = make(tmp_path / "a", data)
    reader = volume.open(cache_bytes=2**20)
    reader[...]
    for file in (tmp_path / "a/c").rglob("*"):
        if file.is_file():
            file.unlink()
    np.testing.assert_array_equal(reader[...], data)
    assert not volume.open()[...].any()


def test_numpy_takes_it(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "uint8")
    volume = make(tmp_path / "a", data)
    np.testing.assert_array_equal(np.asarray(volume), data)
    assert np.asarray(volume, np.float32).dtype == np.float32
    assert np.subtract(volume, data).max() == 0
    with pytest.raises(ValueError, match="leave out copy=False"):
        np.array(volume, copy=False)


@pytest.mark.parametrize(
    "order", [("z", "y", "x"), ("x", "z", "y"), ("c", "z", "y", "x"), ("t", "x", "y", "z", "c"), ("y", "x")]
)
def test_dask_has_it_by_stored_chunks(tmp_path: Path, order: tuple[str, ...]) -> None:
    length = {"t": 1, "c": 3, "z": 5, "y": 6, "x": 7}
    data = invented(tuple(length[axis] for axis in order), "uint8")
    volume = make(tmp_path / "a", data, axes=order)
    array = volume.dask()
    axes = [axis for axis in "czyx" if axis in order]
    expected = volume.crop(Box((0, 0, 0), volume.spatial_shape))
    assert array.shape == tuple(length[axis] for axis in axes) and array.dtype == np.uint8
    assert array.chunksize == tuple(min(4, length[axis]) for axis in axes)
    np.testing.assert_array_equal(array.compute(scheduler="threads"), expected.reshape(array.shape))
    np.testing.assert_array_equal(array[..., ::-1].compute(), expected.reshape(array.shape)[..., ::-1])


def test_dask_reads_a_chunk_only_when_it_is_needed(tmp_path: Path) -> None:
    volume = make(tmp_path / "a", np.ones((4, 4, 8), np.uint8), format="zarr2")
    (last,) = [path for path in (tmp_path / "a").rglob("*1") if path.is_file()]
    last.write_bytes(b"broken")
    array = volume.dask()
    assert array[..., :4].sum().compute() == 64
    with pytest.raises(VolumeError):
        array.compute()


def test_a_chosen_channel_is_what_is_read_or_slices_are_refused(tmp_path: Path) -> None:
    data = invented((3, 5, 6, 7), "uint8")
    make(tmp_path / "a", data)
    volume = open_volume(tmp_path / "a", view=View(channel=1))
    np.testing.assert_array_equal(volume.dask().compute(), data[1])
    np.testing.assert_array_equal(volume.crop(Box((1, 2, 3), (4, 5, 6))), data[1:2, 1:4, 2:5, 3:6])
    for use in (lambda: volume[0], lambda: np.asarray(volume)):
        with pytest.raises(VolumeError, match=r"all stored axes \(c, z, y, x\).*use crop\(box\) or dask\(\)"):
            use()


def test_a_crop_leaves_no_volume(tmp_path: Path) -> None:
    volume = make(tmp_path / "a", invented((5, 6, 7), "uint8"))
    with pytest.raises(VolumeError, match="leaves the volume"):
        volume.crop(Box((0, 0, 0), (5, 6, 8)))


def pyramid(path: Path, shape: tuple[int, ...], axes: tuple[str, ...]) -> list[np.ndarray]:
    """Write two levels at `path` and return their voxels."""
    half = tuple(n // 2 if axis in "zyx" else n for n, axis in zip(shape, axes, strict=True))
    arrays = [invented(shape, "uint8"), invented(half, "uint8", seed=1)]
    for key, data in zip(("s0", "s1"), arrays, strict=True):
        create_array(path, key, ArraySpec(data.shape, data.dtype, (4,) * data.ndim, axes=axes), "zarr3")
        write_all(path, key, data)
    levels = (Level("s0"), Level("s1", (2.0, 2.0, 2.0)))
    create_multiscale(path, Multiscale(levels, axes, (16.0, 8.0, 8.0)))
    return arrays


def test_a_level_leads_to_the_others(tmp_path: Path) -> None:
    arrays = pyramid(tmp_path / "a", (8, 8, 8), ("z", "y", "x"))
    finest = open_volume(tmp_path / "a")
    coarse = finest.level(1)
    assert coarse == open_volume(tmp_path / "a", level=1) and coarse.voxel_size_nm == (32, 16, 16)
    np.testing.assert_array_equal(coarse[...], arrays[1])
    assert coarse.level(0) == finest
    for number in (2, -1):
        with pytest.raises(VolumeError, match=f"has no level {number}; its levels are 0 to 1"):
            finest.level(number)
    with pytest.raises(VolumeError, match="none: it is an array by itself"):
        make(tmp_path / "b", arrays[0]).level(0)


def test_a_level_keeps_the_channel_and_takes_no_foreign_size(tmp_path: Path) -> None:
    arrays = pyramid(tmp_path / "a", (2, 8, 8, 8), ("c", "z", "y", "x"))
    coarse = open_volume(tmp_path / "a", view=View(channel=1)).level(1)
    assert "channel 1 of 2" in coarse.notes
    np.testing.assert_array_equal(coarse.dask().compute(), arrays[1][1])
    with pytest.raises(VolumeError, match="open level 1 with its own"):
        open_volume(tmp_path / "a", view=View(voxel_size_nm=(9, 9, 9))).level(1)


def test_it_shows_itself_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = make(tmp_path / "a", invented((5, 6, 7), "uint8"))
    assert repr(volume) == f"<Volume {tmp_path / 'a'}: (5, 6, 7) uint8, voxel size unknown>"
    monkeypatch.chdir(tmp_path)  # where a notebook is, names are as they were given there
    assert repr(volume) == "<Volume a: (5, 6, 7) uint8, voxel size unknown>"
    assert "<caption>a</caption>" in volume._repr_html_() and str(volume) == str(tmp_path / "a")
    monkeypatch.chdir("/")
    pyramid(tmp_path / "b", (8, 8, 8), ("z", "y", "x"))
    assert repr(open_volume(tmp_path / "b")) == f"<Volume {tmp_path / 'b'}:s0: (8, 8, 8) uint8, 16 × 8 × 8 nm>"


def test_it_shows_itself_as_a_table_whatever_its_name(tmp_path: Path) -> None:
    pyramid(tmp_path / "<b>&.zarr", (8, 8, 8), ("z", "y", "x"))
    table = open_volume(tmp_path / "<b>&.zarr")._repr_html_()
    assert "&lt;b&gt;&amp;.zarr:s0" in table and "<b>" not in table
    for part in ("(8, 8, 8) (z, y, x)", "uint8", "16 × 8 × 8 nm", "(4, 4, 4)", "zstd", "s0, s1", "512 bytes"):
        assert part in table
    np.save(tmp_path / "c.npy", np.zeros((8, 8, 8), np.uint8))
    size = (tmp_path / "c.npy").stat().st_size
    assert f"<tr><th>on disk</th><td>{size:,} bytes</td></tr>" in Volume._repr_html_(open_volume(tmp_path / "c.npy"))
