"""Volumes: what is written comes back, through other people's readers too, and what is said of it is understood."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import z5py
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Delta, Zstd

from volpipe.errors import VolumeError
from volpipe.formats import store
from volpipe.formats.n5 import write_chunks
from volpipe.grid import Box, Grid
from volpipe.volume import (
    ArraySpec,
    Level,
    Multiscale,
    Volume,
    create_array,
    create_multiscale,
    list_arrays,
    open_volume,
    open_writer,
)

Files = Mapping[str, Mapping[str, Any]]
AXES = ("t", "c", "z", "y", "x")
N5_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
ARRAY = {"dimensions": [12, 10, 8], "blockSize": [4, 4, 4], "dataType": "uint8", "compression": {"type": "raw"}}
ZARRAY = {
    "zarr_format": 2,
    "shape": [8, 10, 12],
    "chunks": [4, 4, 4],
    "dtype": "|u1",
    "compressor": None,
    "fill_value": 0,
    "order": "C",
    "filters": None,
}
ZARR3 = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [8, 10, 12],
    "data_type": "uint8",
    "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4, 4]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [{"name": "bytes"}],
}
GROUP = {"zarr_format": 2}


def lay(root: Path, files: Files) -> Path:
    """Write each tree as JSON at its place under `root`."""
    for name, tree in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(tree), encoding="utf-8")
    return root


def without(tree: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def invented(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return random values of the whole range of `dtype`, with a corner of zeros."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        data = rng.normal(size=shape).astype(kind)
    else:
        limits = np.iinfo(kind)
        data = rng.integers(limits.min, limits.max, size=shape, dtype=kind, endpoint=True)
    data[tuple(slice(0, n // 2) for n in shape)] = 0
    return data


def write_all(path: Path, key: str, data: np.ndarray) -> None:
    writer = open_writer(path, key)
    cells = Grid(data.shape, writer.header.write_unit)
    for number in range(len(cells)):
        box = cells.box(number)
        writer.write(box, data[box.slices])


def make(path: Path, data: np.ndarray, format: str = "zarr3", key: str = "", **choices: Any) -> Volume:
    spec = {"chunks": tuple(min(4, n) for n in data.shape), "axes": AXES[-data.ndim :]} | choices
    create_array(path, key, ArraySpec(shape=data.shape, dtype=data.dtype, **spec), format)
    write_all(path, key, data)
    return open_volume(path, key)


@st.composite
def arrays(draw: st.DrawFn, *, dtypes: tuple[str, ...], sharded: bool = False) -> tuple[np.ndarray, ArraySpec]:
    rank = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 13)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    shards = tuple(c * draw(st.integers(1, 3)) for c in chunks) if sharded else None
    data = invented(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))
    codec = draw(st.sampled_from(["raw", "gzip", "zstd"]))
    return data, ArraySpec(shape=shape, dtype=data.dtype, chunks=chunks, shards=shards, axes=AXES[-rank:], codec=codec)


def check_round_trip(data: np.ndarray, spec: ArraySpec, format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.n5" if format == "n5" else "a.zarr")
        create_array(path, "volumes/raw", spec, format)
        write_all(path, "volumes/raw", data)
        if format == "n5":
            other = z5py.N5File(str(path), "r")["volumes/raw"][...]
        else:
            other = zarr.open_array(str(path / "volumes/raw"), mode="r")[...]
        volume = open_volume(path)
        assert (volume.key, volume.format, volume.axes) == ("volumes/raw", format, spec.axes)
        assert (volume.shape, volume.dtype, volume.chunks, volume.shards) == (
            data.shape,
            data.dtype,
            spec.chunks,
            spec.shards,
        )
        np.testing.assert_array_equal(volume.open()[...], data)
        np.testing.assert_array_equal(other, data)


@settings(max_examples=25, deadline=None)
@given(arrays(dtypes=N5_DTYPES))
def test_n5_comes_back_and_z5py_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "n5")


@settings(max_examples=15, deadline=None)
@given(arrays(dtypes=(*N5_DTYPES, "float16")))
def test_zarr_v2_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr2")


@settings(max_examples=15, deadline=None)
@given(arrays(dtypes=(*N5_DTYPES, "float16")))
def test_zarr_v3_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr3")


@settings(max_examples=20, deadline=None)
@given(arrays(dtypes=("uint8", "int16", "float32", "uint64"), sharded=True))
def test_sharded_zarr_comes_back_and_zarr_python_reads_it(made: tuple[np.ndarray, ArraySpec]) -> None:
    check_round_trip(*made, "zarr3")


@pytest.mark.parametrize("codec", ["gzip", "raw", "zstd", "blosc", "xz", "bzip2"])
def test_n5_that_z5py_wrote_is_read(tmp_path: Path, codec: str) -> None:
    data = invented((7, 9, 10), "uint16")
    with z5py.N5File(str(tmp_path / "a.n5"), "w") as file:
        file.create_dataset("x", data=data, chunks=(4, 4, 4), compression=codec)
    np.testing.assert_array_equal(open_volume(tmp_path / "a.n5").open()[...], data)


@pytest.mark.parametrize(
    ("dtype", "choices"),
    [
        (">u2", {}),
        (">f8", {"order": "F"}),
        ("<i4", {"order": "F"}),
        ("bool", {}),
        ("float16", {}),
        ("<i4", {"filters": [Delta(dtype="<i4")]}),
        ("<u2", {"compressors": Zstd(3, checksum=True)}),
    ],
)
def test_zarr_v2_that_zarr_python_wrote_is_read(tmp_path: Path, dtype: str, choices: dict[str, Any]) -> None:
    data = np.arange(5 * 6 * 7).reshape(5, 6, 7).astype(dtype)
    array = zarr.create_array(
        str(tmp_path / "a"), shape=data.shape, chunks=(2, 4, 7), dtype=dtype, zarr_format=2, **choices
    )
    array[...] = data
    read = open_volume(tmp_path / "a").open().read(Box.of((5, 6, 7)))
    np.testing.assert_array_equal(read[0], data)
    assert read.dtype == (np.uint8 if dtype == "bool" else np.dtype(dtype).newbyteorder("="))


def test_old_nested_zarr_without_separator_is_not_taken_for_empty(tmp_path: Path) -> None:
    data = invented((6, 6, 6), "uint8")
    make(tmp_path / "a.zarr", data, "zarr2")
    metadata = json.loads((tmp_path / "a.zarr/.zarray").read_text())
    del metadata["dimension_separator"]
    lay(tmp_path, {"a.zarr/.zarray": metadata})
    np.testing.assert_array_equal(open_volume(tmp_path / "a.zarr").open()[...], data)


@pytest.mark.parametrize("fill", [7, -1])
@pytest.mark.parametrize("format", ["zarr2", "zarr3"])
def test_missing_chunks_are_fill(tmp_path: Path, format: str, fill: int) -> None:
    spec = ArraySpec(shape=(9, 9), dtype=np.dtype("int16"), chunks=(4, 4), axes=("y", "x"), fill=fill)
    create_array(tmp_path / "a", "", spec, format)
    open_writer(tmp_path / "a", "").write(Box((4, 4), (8, 8)), np.full((4, 4), 3, np.int16))
    expected = np.full((9, 9), fill, np.int16)
    expected[4:8, 4:8] = 3
    np.testing.assert_array_equal(open_volume(tmp_path / "a").open()[...], expected)


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


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(-25, 20)] * 3), st.tuples(*[st.integers(1, 12)] * 3))
def test_mirrored_reads_equal_a_padded_volume(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    volume, data = mirrored_volume()
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    padded = np.pad(data, [(0, 0), *[(40, 40)] * 3], mode="reflect")
    np.testing.assert_array_equal(volume.open().read_mirrored(box), padded[:, *box.shift((40, 40, 40)).slices])


_mirrored: list[tuple[tempfile.TemporaryDirectory[str], Volume, np.ndarray]] = []


def mirrored_volume() -> tuple[Volume, np.ndarray]:
    if not _mirrored:
        folder = tempfile.TemporaryDirectory()
        data = invented((2, 7, 5, 1), "uint16")
        _mirrored.append((folder, make(Path(folder.name) / "a", data), data))
    return _mirrored[0][1:]


def test_mirrored_reads_touch_each_voxel_once(tmp_path: Path) -> None:
    reader = make(tmp_path / "a", invented((8, 8, 8), "uint8")).open()
    array, seen = reader._array, []

    class Recorder:
        def read(self, index: store.Index) -> np.ndarray:
            seen.append(array.read(index))
            return seen[-1]

    reader._array = Recorder()
    assert reader.read_mirrored(Box((-30, 2, 7), (-26, 4, 30))).shape == (1, 4, 2, 23)
    assert [data.shape for data in seen] == [(3, 2, 8)]  # -30:-26 shows 2, 1, 0, 1; 7:30 shows 7 … 0 … 7 6


def test_reads_outside_the_volume_are_refused(tmp_path: Path) -> None:
    reader = make(tmp_path / "a", invented((4, 5, 6), "uint8")).open()
    for box in (Box((0, 0, 0), (4, 5, 7)), Box((-1, 0, 0), (2, 2, 2)), Box((1, 1, 1), (1, 2, 2))):
        with pytest.raises(VolumeError, match="leaves the volume"):
            reader.read(box)


def test_raw_reads_index_like_numpy(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    reader = make(tmp_path / "a", data, "n5").open()
    for index in (
        np.s_[...],
        np.s_[1],
        np.s_[-1, 2:4],
        np.s_[..., ::2],
        np.s_[1:3, ..., -2],
        np.s_[4:2],
        np.s_[:, -3:99],
    ):
        np.testing.assert_array_equal(reader[index], data[index])
    for wrong in ([1, 2], np.s_[::-1], 9, np.s_[0, 0, 0, 0]):
        with pytest.raises(IndexError):
            reader[wrong]


def test_dask_wraps_a_reader(tmp_path: Path) -> None:
    dask_array = pytest.importorskip("dask.array")
    data = invented((5, 6, 7), "int32")
    reader = make(tmp_path / "a", data, "n5").open()
    np.testing.assert_array_equal(dask_array.from_array(reader, chunks=3)[1:, ::2].compute(), data[1:, ::2])


def test_volumes_and_readers_travel_by_value(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    volume = make(tmp_path / "a", data)
    assert pickle.loads(pickle.dumps(volume)) == volume
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


def test_importing_brings_no_format_library() -> None:
    code = "import sys, volpipe.volume; print({'tensorstore', 'zarr', 'z5py', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.stdout.strip() == "set()"


def try_to_read(volume: Volume, answer: Any) -> None:
    try:
        answer.put(volume.open()[0, 0, 0])
    except VolumeError as error:
        answer.put(str(error))


@pytest.mark.parametrize(("method", "fact"), [("fork", "forked"), ("spawn", "0")])
def test_a_forked_process_is_told_and_a_spawned_one_reads(tmp_path: Path, method: str, fact: str) -> None:
    volume = make(tmp_path / "a", invented((8, 8, 8), "uint8"))
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
    assert store.num_threads() == 3
    monkeypatch.setenv("VOLPIPE_THREADS", "many")
    with pytest.raises(VolumeError, match="VOLPIPE_THREADS"):
        store.num_threads()
    monkeypatch.delenv("VOLPIPE_THREADS")
    assert store.num_threads() == os.cpu_count()


@pytest.mark.parametrize(("format", "chunk"), [("n5", "0/0/0"), ("zarr2", "0/0/0"), ("zarr3", "c/0/0/0")])
def test_a_damaged_chunk_names_its_volume(tmp_path: Path, format: str, chunk: str) -> None:
    volume = make(tmp_path / "a", np.ones((4, 4, 4), np.uint8), format, codec="gzip")
    file = tmp_path / "a" / chunk
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(VolumeError, match=str(tmp_path / "a")):
        volume.open()[...]


# Writing


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
        writer.write(Box.of((4, 4, 4)), np.ones((4, 4, 4), np.uint16))
    with pytest.raises(VolumeError, match="does not fill"):
        writer.write(Box.of((4, 4, 4)), np.ones((4, 4, 1), np.uint8))
    with pytest.raises(VolumeError, match="create it"):
        open_writer(tmp_path / "a", "y")


def test_writers_read_what_others_wrote_meanwhile(tmp_path: Path) -> None:
    create_array(tmp_path / "a", "x", ArraySpec(shape=(8, 8, 8), dtype=np.dtype("u1"), chunks=(4, 4, 4)))
    writer, box = open_writer(tmp_path / "a", "x"), Box((0, 0, 4), (4, 4, 8))
    assert not writer.read(box).any()
    zarr.open_array(str(tmp_path / "a/x"), mode="r+")[...] = 5
    assert (writer.read(box) == 5).all()


def test_windows_are_written_in_bulk(tmp_path: Path) -> None:
    data = invented((5, 2, 6, 7, 8), "float32")
    data[3] = 0
    spec = ArraySpec(
        shape=(20, 2, 6, 7, 8),
        dtype=data.dtype,
        chunks=(1, 2, 6, 7, 8),
        axes=("batch", "channel", "z", "y", "x"),
        codec="gzip",
    )
    create_array(tmp_path / "t.n5", "tensors/source", spec, "n5")
    write_chunks(str(tmp_path / "t.n5"), "tensors/source", (11, 0, 0, 0, 0), data)
    volume = open_volume(tmp_path / "t.n5", "tensors/source")
    assert volume.axes == ("batch", "c", "z", "y", "x")
    np.testing.assert_array_equal(volume.open().read_raw(slice(11, 16)), data)
    folder = tmp_path / "t.n5/tensors/source/0/0/0/0"
    assert sorted(file.name for file in folder.iterdir()) == ["11", "12", "13", "15"]
    write_chunks(str(tmp_path / "t.n5"), "tensors/source", (12, 0, 0, 0, 0), data[3:4], fsync=True)
    assert not volume.open()[12].any()
    assert [file.name for file in (tmp_path / "t.n5").iterdir() if file.name.startswith(".")] == []


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from(["gzip", "zstd", "raw"]),
    st.integers(0, 9),
)
def test_bulk_writes_come_back(shape: tuple[int, ...], chunks: tuple[int, ...], codec: str, level: int) -> None:
    data = invented(shape, "uint16", level)
    with tempfile.TemporaryDirectory() as folder:
        spec = ArraySpec(shape=shape, dtype=data.dtype, chunks=chunks, codec=codec, codec_level=level)
        create_array(folder, "x", spec, "n5")
        write_chunks(folder, "x", (0, 0, 0), data)
        np.testing.assert_array_equal(open_volume(folder, "x").open()[...], data)
        np.testing.assert_array_equal(z5py.N5File(folder, "r")["x"][...], data)


WRITE_FOREVER = """
import sys, numpy as np
from volpipe.formats.n5 import write_chunks
noise = np.random.default_rng(0).integers(0, 256, (48, 48, 48), np.uint8)
for i in range(10**6):
    write_chunks(sys.argv[1], "x", (0, 0, 0), noise + np.uint8(i % 200 + 1))
    print(i, flush=True)
"""


def test_a_killed_bulk_write_leaves_whole_chunks(tmp_path: Path) -> None:
    spec = ArraySpec(shape=(48, 48, 48), dtype=np.dtype("u1"), chunks=(24, 48, 48), codec="gzip")
    create_array(tmp_path / "a.n5", "x", spec, "n5")
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 48), np.uint8)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    for delay in (0.0, 0.003, 0.011):
        command = [sys.executable, "-c", WRITE_FOREVER, str(tmp_path / "a.n5")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"0\n"
            time.sleep(delay)
            writer.kill()
        difference = open_volume(tmp_path / "a.n5", "x").open()[...] - noise
        assert all((half == half[0, 0, 0]).all() and half.all() for half in (difference[:24], difference[24:]))
    assert [volume.key for volume in list_arrays(tmp_path / "a.n5")] == ["x"]


def test_bulk_writes_of_parts_or_other_types_are_refused(tmp_path: Path) -> None:
    spec = ArraySpec(shape=(8, 8, 8), dtype=np.dtype("u1"), chunks=(4, 4, 4), codec="gzip")
    create_array(tmp_path, "x", spec, "n5")
    with pytest.raises(VolumeError, match="whole chunks"):
        write_chunks(str(tmp_path), "x", (0, 0, 2), np.ones((4, 4, 4), np.uint8))
    with pytest.raises(VolumeError, match="holds uint8"):
        write_chunks(str(tmp_path), "x", (0, 0, 0), np.ones((4, 4, 4), np.int8))
    with pytest.raises(VolumeError, match="no N5 array"):
        write_chunks(str(tmp_path), "y", (0, 0, 0), np.ones((4, 4, 4), np.uint8))


# Making


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
        ("zarr3", {"attributes": {"x": object()}}, "JSON"),
    ]:
        with pytest.raises(VolumeError, match=words):
            create_array(tmp_path / "a", "x", ArraySpec(**{**good, **change}), format)
    assert not (tmp_path / "a").exists()


def make_pyramid(path: Path, format: str, voxel: tuple[float, float, float] | None) -> None:
    arrays = {"ome-zarr-0.5": "zarr3", "ome-zarr-0.4": "zarr2"}.get(format, format)
    for key, shape in {"s0": (2, 8, 8, 8), "s1": (2, 8, 4, 4)}.items():
        spec = ArraySpec(shape=shape, dtype=np.dtype("u1"), chunks=(1, 4, 4, 4), axes=("c", "z", "y", "x"))
        create_array(path, key, spec, arrays)
    levels = (Level("s0"), Level("s1", (1.0, 2.0, 2.0)))
    group = Multiscale(levels, ("c", "z", "y", "x"), voxel, (5.0, 6.0, 7.0) if voxel else (0.0, 0.0, 0.0), "cells")
    create_multiscale(path, group, format=format, attributes={"net": "unet"})


FORMATS = ("ome-zarr-0.5", "ome-zarr-0.4", "n5", "zarr2")


@pytest.mark.parametrize("format", FORMATS)
def test_a_pyramid_says_where_its_levels_lie(tmp_path: Path, format: str) -> None:
    make_pyramid(tmp_path / "p", format, (40.0, 4.0, 8.0))
    make_pyramid(tmp_path / "p", format, (40.0, 4.0, 8.0))
    for level, size, origin in [(0, (40, 4, 8), (5, 6, 7)), (1, (40, 8, 16), (5, 8, 11))]:
        for volume in (open_volume(tmp_path / "p", level=level), open_volume(tmp_path / "p", f"s{level}")):
            assert volume.levels == ("s0", "s1")
            assert (volume.key, volume.axes) == (f"s{level}", ("c", "z", "y", "x"))
            assert (volume.voxel_size_nm, volume.origin_nm) == (size, origin)


@pytest.mark.parametrize("format", FORMATS)
def test_a_pyramid_of_unknown_voxel_size_stays_so(tmp_path: Path, format: str) -> None:
    make_pyramid(tmp_path / "p", format, None)
    volume = open_volume(tmp_path / "p", level=1)
    assert (volume.voxel_size_nm, volume.origin_nm, volume.shape) == (None, (0, 0, 0), (2, 8, 4, 4))
    assert volume.levels == ("s0", "s1")


AXES_OME = [{"name": "c", "type": "channel"}] + [{"name": a, "type": "space", "unit": "nanometer"} for a in "zyx"]
DATASETS_OME = [
    {
        "path": path,
        "coordinateTransformations": [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}],
    }
    for path, scale, shift in [("s0", [1, 40, 4, 8], [0, 5, 6, 7]), ("s1", [1, 40, 8, 16], [0, 5, 8, 11])]
]


def test_ome_zarr_0_5_is_written_as_its_specification_says(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "ome-zarr-0.5", (40.0, 4.0, 8.0))
    group = json.loads((tmp_path / "p/zarr.json").read_text())
    assert group == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "ome": {"version": "0.5", "multiscales": [{"name": "cells", "axes": AXES_OME, "datasets": DATASETS_OME}]},
            "volpipe": {"net": "unet"},
        },
    }
    assert zarr.open_group(str(tmp_path / "p"), mode="r")["s1"].metadata.dimension_names == ("c", "z", "y", "x")


def test_ome_zarr_0_4_is_written_as_its_specification_says(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "ome-zarr-0.4", (40.0, 4.0, 8.0))
    assert json.loads((tmp_path / "p/.zattrs").read_text()) == {
        "volpipe": {"net": "unet"},
        "multiscales": [{"version": "0.4", "name": "cells", "axes": AXES_OME, "datasets": DATASETS_OME}],
    }
    assert zarr.open_group(str(tmp_path / "p"), mode="r")["s1"].metadata.dimension_separator == "/"


def test_n5_pyramids_speak_the_dialects_of_their_viewers(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "n5", (40.0, 4.0, 8.0))
    group = json.loads((tmp_path / "p/attributes.json").read_text())
    transforms = [
        {
            "axes": ["c", "z", "y", "x"],
            "scale": d["coordinateTransformations"][0]["scale"],
            "translate": d["coordinateTransformations"][1]["translation"],
            "units": ["", "nm", "nm", "nm"],
        }
        for d in DATASETS_OME
    ]
    assert group["scales"] == [[1, 1, 1, 1], [2, 2, 1, 1]]
    assert group["pixelResolution"] == {"dimensions": [8, 4, 40, 1], "unit": "nm"}
    assert (group["axes"], group["units"], group["resolution"]) == (
        ["x", "y", "z", "c"],
        ["nm", "nm", "nm", ""],
        [8, 4, 40, 1],
    )
    assert [d["transform"] for d in group["multiscales"][0]["datasets"]] == transforms
    assert group["volpipe"] == {"net": "unet"}
    level = json.loads((tmp_path / "p/s1/attributes.json").read_text())
    assert (level["transform"], level["downsamplingFactors"]) == (transforms[1], [2, 2, 1, 1])
    # without COSEM's transform, the older dialect must say the same
    for file in (tmp_path / "p/attributes.json", tmp_path / "p/s1/attributes.json"):
        tree = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in tree.items() if k not in ("transform", "multiscales")}))
    volume = open_volume(tmp_path / "p", level=1)
    assert (volume.voxel_size_nm, volume.origin_nm) == ((40, 8, 16), (0, 2, 4))


def test_a_pyramid_needs_its_arrays(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="s0 is no zarr3 array"):
        create_multiscale(tmp_path / "p", Multiscale((Level("s0"),)))
    create_array(tmp_path / "p", "s0", ArraySpec(shape=(8, 8), dtype=np.dtype("u1"), chunks=(4, 4), axes=("y", "x")))
    with pytest.raises(VolumeError, match="has 2 axes"):
        create_multiscale(tmp_path / "p", Multiscale((Level("s0"),)))


# What metadata say, in every dialect; sizes 4, 5, 6 along x, y, z


def ome(datasets: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    return {"axes": axes, "datasets": datasets, **more}


def dataset(path: str, *transformations: dict[str, Any]) -> dict[str, Any]:
    return {"path": path, "coordinateTransformations": list(transformations)}


SCALE = {"type": "scale", "scale": [6, 5, 4]}
COSEM = {"axes": ["z", "y", "x"], "scale": [6, 5, 4], "translate": [3, 2, 1], "units": ["nm", "nm", "nm"]}
HALVED = {"downsamplingFactors": [2, 2, 1]}
PLACES: dict[str, tuple[Files, str, object, object]] = {
    "nothing": ({"attributes.json": ARRAY}, "", None, (0, 0, 0)),
    "resolution": ({"attributes.json": ARRAY | {"resolution": [4, 5, 6]}}, "", (6, 5, 4), (0, 0, 0)),
    "resolution and units": (
        {"attributes.json": ARRAY | {"resolution": [4, 5, 6], "units": ["um", "nm", "angstrom"]}},
        "",
        (0.6, 5, 4000),
        (0, 0, 0),
    ),
    "resolution in an unknown unit": (
        {"attributes.json": ARRAY | {"resolution": [4, 5, 6], "units": ["nm", "s", "nm"]}},
        "",
        None,
        (0, 0, 0),
    ),
    "offset": ({"attributes.json": ARRAY | {"resolution": [4, 5, 6], "offset": [1, 2, 3]}}, "", (6, 5, 4), (3, 2, 1)),
    "pixelResolution": (
        {"attributes.json": ARRAY | {"pixelResolution": {"dimensions": [4, 5, 6], "unit": "µm"}}},
        "",
        (6000, 5000, 4000),
        (0, 0, 0),
    ),
    "pixelResolution as a list": (
        {"attributes.json": ARRAY | {"pixelResolution": [4, 5, 6]}},
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "pixelResolution in pixels": (
        {"attributes.json": ARRAY | {"pixelResolution": {"dimensions": [4, 5, 6], "unit": "pixel"}}},
        "",
        None,
        (0, 0, 0),
    ),
    "a resolution of nought": ({"attributes.json": ARRAY | {"resolution": [4, 0, 6]}}, "", None, (0, 0, 0)),
    "axes": ({"attributes.json": ARRAY | {"axes": ["z", "x", "y"], "resolution": [6, 4, 5]}}, "", (6, 5, 4), (0, 0, 0)),
    "three numbers for four axes": (
        {"attributes.json": {**ARRAY, "dimensions": [9, 9, 9, 3], "blockSize": [4, 4, 4, 1], "resolution": [4, 5, 6]}},
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "downsamplingFactors": (
        {
            "s0/attributes.json": ARRAY,
            "s1/attributes.json": ARRAY | HALVED,
            "attributes.json": {"resolution": [4, 5, 6]},
        },
        "s1",
        (6, 10, 8),
        (0, 2.5, 2),
    ),
    "downsamplingFactors of the group": (
        {
            "s0/attributes.json": ARRAY,
            "s1/attributes.json": ARRAY,
            "attributes.json": {"resolution": [4, 5, 6], "downsamplingFactors": [[1, 1, 1], [4, 2, 1]]},
        },
        "s1",
        (6, 10, 16),
        (0, 2.5, 6),
    ),
    "scales above a channel": (
        {
            "c0/s0/attributes.json": ARRAY,
            "c0/s1/attributes.json": ARRAY,
            "attributes.json": {
                "pixelResolution": {"unit": "nm", "dimensions": [4, 5, 6]},
                "scales": [[1, 1, 1], [2, 2, 1]],
            },
        },
        "c0/s1",
        (6, 10, 8),
        (0, 2.5, 2),
    ),
    "an offset of the level's own": (
        {
            "s0/attributes.json": ARRAY,
            "s1/attributes.json": ARRAY | HALVED | {"offset": [7, 8, 9]},
            "attributes.json": {"resolution": [4, 5, 6]},
        },
        "s1",
        (6, 10, 8),
        (9, 8, 7),
    ),
    "COSEM transform": ({"attributes.json": ARRAY | {"transform": COSEM}}, "", (6, 5, 4), (3, 2, 1)),
    "COSEM transform in x, y, z": (
        {
            "attributes.json": ARRAY
            | {
                "transform": {
                    "axes": ["x", "y", "z"],
                    "scale": [4, 5, 6],
                    "translate": [1, 2, 3],
                    "units": ["mm", "nm", "nm"],
                }
            }
        },
        "",
        (6, 5, 4e6),
        (3, 2, 1e6),
    ),
    "COSEM multiscales": (
        {
            "attributes.json": {"multiscales": [{"datasets": [{"path": "fine", "transform": COSEM}]}]},
            "fine/attributes.json": ARRAY | {"transform": {**COSEM, "scale": [9, 9, 9]}},
        },
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "COSEM multiscales whose arrays say it": (
        {
            "attributes.json": {"multiscales": [{"datasets": [{"path": "fine"}]}]},
            "fine/attributes.json": ARRAY | {"transform": COSEM},
        },
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "COSEM in Zarr": ({".zarray": ZARRAY, ".zattrs": {"transform": COSEM}}, "", (6, 5, 4), (3, 2, 1)),
    "resolution in Zarr": ({".zarray": ZARRAY, ".zattrs": {"resolution": [6, 5, 4]}}, "", (6, 5, 4), (0, 0, 0)),
    "voxel_size in Zarr": (
        {"zarr.json": ZARR3 | {"attributes": {"voxel_size": [6, 5, 4], "offset": [3, 2, 1], "units": ["um"] * 3}}},
        "",
        (6000, 5000, 4000),
        (3000, 2000, 1000),
    ),
    "OME 0.4": (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            ".zattrs": {"multiscales": [ome([dataset("0", SCALE, {"type": "translation", "translation": [3, 2, 1]})])]},
        },
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "OME 0.5": (
        {
            "zarr.json": {
                "zarr_format": 3,
                "node_type": "group",
                "attributes": {"ome": {"version": "0.5", "multiscales": [ome([dataset("0", SCALE)])]}},
            },
            "0/zarr.json": ZARR3,
        },
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "OME scaled twice": (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            ".zattrs": {
                "multiscales": [
                    ome(
                        [
                            dataset(
                                "0",
                                {"type": "scale", "scale": [2, 2, 2]},
                                {"type": "translation", "translation": [1, 1, 1]},
                            )
                        ],
                        coordinateTransformations=[
                            {"type": "scale", "scale": [3, 2.5, 2]},
                            {"type": "translation", "translation": [10, 20, 30]},
                        ],
                    )
                ]
            },
        },
        "",
        (6, 5, 4),
        (13, 22.5, 32),
    ),
    "OME without units": (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            ".zattrs": {
                "multiscales": [
                    {"axes": [{"name": a, "type": "space"} for a in "zyx"], "datasets": [dataset("0", SCALE)]}
                ]
            },
        },
        "",
        None,
        (0, 0, 0),
    ),
    "OME 0.3": (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            ".zattrs": {"multiscales": [{"axes": ["z", "y", "x"], "datasets": [{"path": "0"}]}]},
        },
        "",
        None,
        (0, 0, 0),
    ),
    "OME axes of other names": (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            ".zattrs": {
                "multiscales": [
                    {
                        "axes": [
                            {"name": n, "type": "space", "unit": "angstrom"} for n in ("depth", "height", "width")
                        ],
                        "datasets": [dataset("0", SCALE)],
                    }
                ]
            },
        },
        "",
        (0.6, 0.5, 0.4),
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("dialect", PLACES)
def test_voxel_size_and_origin_are_understood(tmp_path: Path, dialect: str) -> None:
    files, key, size, origin = PLACES[dialect]
    volume = open_volume(lay(tmp_path / "v", files), key or None)
    assert volume.voxel_size_nm == pytest.approx(size) if size else volume.voxel_size_nm is None
    assert volume.origin_nm == pytest.approx(origin)


def test_units_are_lengths_in_every_spelling(tmp_path: Path) -> None:
    spellings = {
        1e-3: ["pm"],
        0.1: ["angstrom", "Å", "Ångström"],
        1.0: ["nm", "nanometer", "Nanometers", "nanometre"],
        1e3: ["um", "µm", "μm", "micron", "microns", "micrometer"],
        1e6: ["mm", "millimeter"],
        1e9: ["m", "meter"],
    }
    for factor, unit in itertools.chain(*[[(f, u) for u in us] for f, us in spellings.items()]):
        lay(tmp_path / "v", {"attributes.json": ARRAY | {"pixelResolution": {"dimensions": [4, 5, 6], "unit": unit}}})
        assert open_volume(tmp_path / "v").voxel_size_nm == pytest.approx((6 * factor, 5 * factor, 4 * factor)), unit


@pytest.mark.parametrize(
    "compression",
    [
        {"compression": {"type": "gzip", "level": -1, "nthreads": 4}},
        {"compressionType": "gzip"},
        {"compression": {"type": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0, "nthreads": 1}},
        {"compression": {"type": "zstd", "level": 3, "checksum": True}},
        {},
        {"compression": {"type": "xz", "preset": 6}},
    ],
)
@pytest.mark.parametrize("more", [{}, {"resolution": "4 nm"}, {"axes": "xyz", "units": 3}, {"offset": {}}])
def test_n5_with_settings_that_others_add_opens(
    tmp_path: Path, compression: dict[str, Any], more: dict[str, Any]
) -> None:
    lay(tmp_path / "v", {"attributes.json": without(ARRAY, "compression") | compression | more})
    volume = open_volume(tmp_path / "v")
    assert volume.shape == (8, 10, 12)
    assert not volume.open()[...].any()


# Finding


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


def test_a_series_in_time_is_refused(tmp_path: Path) -> None:
    data = np.zeros((3, 4, 4, 4), np.uint8)
    with pytest.raises(VolumeError, match="3 points in time"):
        make(tmp_path / "a", data, axes=("t", "z", "y", "x"))


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


DEEP = {"axes": [{"name": "x"}]}
BROKEN: list[tuple[Files, str]] = [
    ({"attributes.json": ARRAY | {"dimensions": [12, -1, 8]}}, "attributes.json: dimensions .* -1"),
    ({"attributes.json": ARRAY | {"dimensions": [12, 0, 8]}}, "holds 0"),
    ({"attributes.json": ARRAY | {"dimensions": [1] * 9, "blockSize": [1] * 9}}, "1 to 8 integers"),
    ({"attributes.json": ARRAY | {"dimensions": "large"}}, "dimensions 'large'"),
    ({"attributes.json": ARRAY | {"dimensions": [12, 10.5, 8]}}, "holds 10.5"),
    ({"attributes.json": ARRAY | {"dimensions": [12, 10, 2**63]}}, "no number of voxels"),
    ({"attributes.json": ARRAY | {"blockSize": [4, 0, 4]}}, "blockSize"),
    ({"attributes.json": ARRAY | {"blockSize": [4, 4]}}, "2 axes, the shape has 3"),
    ({"attributes.json": ARRAY | {"blockSize": [10**6, 10**6, 10**6]}}, "GiB"),
    ({"attributes.json": without(ARRAY, "blockSize")}, "blockSize None"),
    ({"attributes.json": ARRAY | {"dataType": "string"}}, "dataType 'string'"),
    ({"attributes.json": ARRAY | {"compression": {"type": "lz4"}}}, "lz4"),
    ({"attributes.json": ARRAY | {"compression": {"type": "jpeg"}}}, "'jpeg'"),
    ({"attributes.json": ARRAY | {"compression": 7}}, "compression 7"),
    ({".zarray": ZARRAY | {"shape": []}}, "zarray: shape"),
    ({".zarray": ZARRAY | {"zarr_format": 1}}, "zarr_format 1"),
    ({".zarray": ZARRAY | {"dtype": "<U7"}}, "dtype '<U7'"),
    ({".zarray": ZARRAY | {"dtype": [["r", "|u1"]]}}, "dtype"),
    ({".zarray": ZARRAY | {"dtype": "nonsense"}}, "'nonsense'"),
    ({".zarray": ZARRAY | {"dtype": "<c8"}}, "'<c8'"),
    ({".zarray": ZARRAY | {"dimension_separator": "-"}}, "'-'"),
    ({"zarr.json": ZARR3 | {"data_type": "string"}}, "data_type 'string'"),
    ({"zarr.json": ZARR3 | {"data_type": {"name": "struct"}}}, "data_type"),
    ({"zarr.json": ZARR3 | {"chunk_grid": {"name": "rectilinear"}}}, "'rectilinear'"),
    ({"zarr.json": ZARR3 | {"codecs": []}}, "codecs"),
    (
        {"zarr.json": ZARR3 | {"codecs": [{"name": "transpose", "configuration": {"order": [0, 0, 1]}}]}},
        "each of 3 axes",
    ),
    ({"zarr.json": ZARR3 | {"storage_transformers": [{"name": "x"}]}}, "storage_transformers"),
    ({"zarr.json": ZARR3 | {"surprise": {"name": "x", "must_understand": True}}}, "'surprise'"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": []}}, "multiscales is empty"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": []}]}}, "no datasets"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": [{"path": "0"}]}]}}, "'0', which does not exist"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": [{"path": "../0"}]}]}}, r"'../0' is not the key"),
    (
        {".zgroup": GROUP, ".zattrs": {"multiscales": [DEEP | {"datasets": [{"path": "0"}]}]}, "0/.zarray": ZARRAY},
        "'0' has 3 axes, the group's axes 1",
    ),
    (
        {"0/.zarray": ZARRAY, ".zattrs": {"multiscales": [ome([dataset("0", {"type": "scale", "scale": [1]})])]}},
        "coordinate transformation",
    ),
    ({"0/.zarray": ZARRAY, ".zattrs": {"multiscales": [ome([dataset("0", {"type": "affine"})])]}}, "affine"),
    (
        {
            ".zgroup": GROUP,
            "0/.zarray": ZARRAY,
            "1/.zarray": {**ZARRAY, "shape": [8, 8], "chunks": [4, 4]},
            ".zattrs": {"multiscales": [{"datasets": [{"path": "0"}, {"path": "1"}]}]},
        },
        "'1' has 2 axes, level 0 3",
    ),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_metadata_are_refused_with_the_reason(tmp_path: Path, number: int) -> None:
    files, words = BROKEN[number]
    with pytest.raises(VolumeError, match=words):
        open_volume(lay(tmp_path / "v", files))


NO_OBJECTS = ["{", "[1, 2]", '"x"', "\x00\xff", "[" * 100_000, '{"dimensions": 1' + "0" * 5000 + "}", ""]


@pytest.mark.parametrize("number", range(len(NO_OBJECTS)))
@pytest.mark.parametrize("name", ["attributes.json", "zarr.json", ".zarray", ".zattrs"])
def test_files_that_hold_no_json_object_are_named(tmp_path: Path, name: str, number: int) -> None:
    text = NO_OBJECTS[number]
    lay(tmp_path / "v", {".zgroup": GROUP})
    (tmp_path / "v" / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(VolumeError, match=name):
        open_volume(tmp_path / "v")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_metadata_raise_anything_but_a_volume_error(data: st.DataObject) -> None:
    """Any part of good metadata, replaced by any JSON, is refused or opened."""
    odd = st.recursive(
        st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3) | st.just("gzip"),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["name", "type", "id", "configuration", "axes", "scale", "path", "datasets", "dimensions"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=5,
    )
    group = {
        "ome": {"multiscales": [ome([dataset("0", SCALE)])]},
        "resolution": [1, 1, 1],
        "transform": COSEM,
        "downsamplingFactors": [1, 1, 1],
        "scales": [[1, 1, 1]],
        "plate": {"wells": [{"path": "A"}]},
    }
    sharding = {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [2, 2, 2], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]},
    }
    name, tree = data.draw(
        st.sampled_from(
            [
                ("attributes.json", ARRAY | group | {"pixelResolution": {"unit": "nm", "dimensions": [1, 1, 1]}}),
                (".zarray", ZARRAY | {"compressor": {"id": "zstd", "level": 1}}),
                (".zattrs", group),
                ("zarr.json", {**ZARR3, "codecs": [sharding], "attributes": group}),
                ("zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": group}),
            ]
        )
    )
    tree = json.loads(json.dumps(tree))
    node: Any = tree
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
        else:
            node[key] = data.draw(odd)
            break
    with tempfile.TemporaryDirectory() as folder:
        files = {"v/s0/attributes.json": ARRAY} if name == "attributes.json" else {"v/0/.zarray": ZARRAY}
        lay(Path(folder), {**files, f"v/{name}": tree})
        try:
            volume = open_volume(Path(folder) / "v")
            if np.prod(volume.shape, dtype=float) < 1e6:
                volume.open()[...]
        except VolumeError as error:
            assert str(error)
