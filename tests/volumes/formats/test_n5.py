"""N5 and Zarr: what others wrote is read, and N5 chunks written in bulk come back whole, whoever kills the writer."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import z5py
from arrays import invented, make
from bucket import Bucket
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata import ARRAY, Tree, lay, without

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.n5 import write_chunks
from volpipe.volumes.volume import ArraySpec, create_array, list_arrays, open_volume, open_writer


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
def test_n5_with_settings_that_others_add_opens(tmp_path: Path, compression: Tree, more: Tree) -> None:
    lay(tmp_path / "v", {"attributes.json": without(ARRAY, "compression") | compression | more})
    volume = open_volume(tmp_path / "v")
    assert volume.shape == (8, 10, 12)
    assert not volume.open()[...].any()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "raw": bytes, "gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": imagecodecs.zstd_encode,
    "blosc": lambda data: imagecodecs.blosc_encode(data, typesize=2),
}  # fmt: skip


def in_two(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Return what packs in two members: of pigz, bgzip and Java's streams."""
    return lambda data: pack(data[: len(data) // 3]) + pack(data[len(data) // 3 :])


def blocks_of_java(path: Path, data: np.ndarray, codec: str, mode: int, pack: Callable[[bytes], bytes]) -> None:
    """Write `data` by the block format of the N5 specification; in mode 1 the number of elements follows the sizes."""
    sizes = {"dimensions": data.shape[::-1], "blockSize": [4, 4, 4]}
    lay(path, {"attributes.json": {**sizes, "dataType": "uint16", "compression": {"type": codec}}})
    for z, y, x in np.ndindex(*(-(-n // 4) for n in data.shape)):
        block = data[z * 4 : z * 4 + 4, y * 4 : y * 4 + 4, x * 4 : x * 4 + 4]
        header = struct.pack(">HH3I", mode, 3, *block.shape[::-1]) + (struct.pack(">I", block.size) if mode else b"")
        file = path / f"{x}/{y}/{z}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(header + pack(block.astype(">u2").tobytes()))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(
    ("codec", "members"), [*((codec, 1) for codec in PACK), *((codec, 2) for codec in ("gzip", "bzip2", "xz", "zstd"))]
)
def test_blocks_with_a_length_and_streams_of_several_members_are_read(
    bucket: Bucket, tmp_path: Path, codec: str, mode: int, members: int
) -> None:
    data = np.random.default_rng(1).integers(1, 60_000, (6, 9, 10)).astype(np.uint16)
    blocks_of_java(tmp_path / "a.n5", data, codec, mode, PACK[codec] if members == 1 else in_two(PACK[codec]))
    files = [file for file in (tmp_path / "a.n5").rglob("*") if file.is_file()]
    bucket.files = {str(file.relative_to(tmp_path)): file.read_bytes() for file in files}
    for place in (tmp_path / "a.n5", "s3://cells/a.n5"):
        np.testing.assert_array_equal(open_volume(place).open()[...], data)
        np.testing.assert_array_equal(open_volume(place).open()[5, ::3, 2:9:4], data[5, ::3, 2:9:4])


def test_blocks_of_objects_are_refused_by_name(tmp_path: Path) -> None:
    blocks_of_java(tmp_path / "a.n5", np.ones((4, 4, 4), np.uint16), "raw", 2, bytes)
    with pytest.raises(VolumeError, match="mode 2, which holds an object"):
        open_volume(tmp_path / "a.n5").open()[...]


# ---- bulk


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
    write_chunks(str(tmp_path / "t.n5"), "tensors/source", (12, 0, 0, 0, 0), data[3:4])
    assert not volume.open()[12].any()
    assert [file.name for file in (tmp_path / "t.n5").iterdir() if file.name.startswith(".")] == []


@settings(max_examples=15)
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
from volpipe.volumes.formats.n5 import write_chunks
noise = np.random.default_rng(0).integers(0, 256, (48, 48, 48), np.uint8)
for i in range(10**6):
    write_chunks(sys.argv[1], "x", (0, 0, 0), noise + np.uint8(i % 200 + 1))
    print(i, flush=True)
"""


def test_a_killed_bulk_write_leaves_whole_chunks(tmp_path: Path) -> None:
    spec = ArraySpec(shape=(48, 48, 48), dtype=np.dtype("u1"), chunks=(24, 48, 48), codec="gzip")
    create_array(tmp_path / "a.n5", "x", spec, "n5")
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 48), np.uint8)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
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


def gzipped_blocks(container: Path, data: np.ndarray, chunks: tuple[int, ...]) -> dict[str, bytes]:
    """Write an array, and return the content of its files of blocks by name."""
    create_array(container, "x", ArraySpec(data.shape, data.dtype, chunks, codec="gzip"), "n5")
    open_writer(container, "x").write(Box.from_shape(data.shape), data)
    files = [file for file in (container / "x").rglob("*") if file.is_file() and file.name.isdecimal()]
    return {str(file.relative_to(container)): file.read_bytes() for file in files}


def test_the_bytes_of_a_block_depend_on_no_block_that_was_written_before(tmp_path: Path) -> None:
    """A compressor that is used again may keep something of larger blocks: tensorstore's does."""
    rng = np.random.default_rng(0)
    slopes = np.arange(128)[:, None, None]
    data = (rng.integers(0, 40, (50, 70, 33)) + slopes[:50]).astype(np.uint16)
    large = (rng.integers(0, 40, (128, 128, 128)) + slopes).astype(np.uint8)
    first = gzipped_blocks(tmp_path / "first.n5", data, (17, 32, 32))
    gzipped_blocks(tmp_path / "large.n5", large, (64, 64, 64))
    assert gzipped_blocks(tmp_path / "again.n5", data, (17, 32, 32)) == first
    np.testing.assert_array_equal(z5py.N5File(str(tmp_path / "again.n5"))["x"][:], data)
