"""NumPy's files, as NumPy writes them, and what lies flat in a file."""

from __future__ import annotations

import importlib
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from boxes import MiB, check_reads, indexes
from hypothesis import given, settings
from hypothesis import strategies as st
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.flat import FlatArray, RawFile
from volpipe.volumes.storage.tensorstore import transferred
from volpipe.volumes.volume import open_volume


def save(path: Path, data: np.ndarray) -> Path:
    np.save(path, data)
    return path


@settings(max_examples=200)
@given(st.data(), st.sampled_from(["u1", "<u2", ">u2", "<f4", ">f8"]), st.integers(0, 40))
def test_any_index_of_a_flat_array_is_what_numpy_has_there(draw: st.DataObject, dtype: str, offset: int) -> None:
    shape = tuple(draw.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    data = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    index = draw.draw(indexes(shape))
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(offset) + data.tobytes())
        file.flush()
        found = FlatArray(RawFile(Path(file.name)), offset, np.dtype(dtype), shape).read(index)
    assert found.dtype == np.dtype(dtype).newbyteorder("=")
    assert found.shape == data[index].shape
    assert np.array_equal(found, data[index])


def test_what_is_stepped_over_is_not_read(tmp_path: Path) -> None:
    shape = (1000, 5000, 4000)
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        stream.truncate(stream.tell() + int(np.prod(shape)))
    reader = open_volume(tmp_path / "a.npy").open()
    tracemalloc.start()
    try:
        for index in ((slice(0, 1000, 999),), (slice(None), slice(0, 1), slice(0, 1)), (0, slice(None), slice(7, 9))):
            found = reader[index]
            assert tracemalloc.get_traced_memory()[1] < found.nbytes + 16 * MiB
            del found
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()


def test_rows_far_from_each_other_are_read_one_by_one(tmp_path: Path) -> None:
    data = noise((3, 5, 9000), "uint8")
    array = FlatArray(RawFile(save(tmp_path / "a.npy", data)), 128, data.dtype, data.shape)
    box = (slice(1, 3), slice(1, 5, 2), slice(4000, 4900, 3))
    assert np.array_equal(array.read(box), data[box])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_fortran_order_and_all_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    data = noise((2, 5, 7, 9), "int16")
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array(stream, np.asfortranarray(data), version=version)
    volume = open_volume(tmp_path / "a.npy")
    assert volume.axes == ("c", "z", "y", "x")
    assert volume.chunks == (2, 5, 1, 1)
    check_reads(volume, data)


def test_a_file_cut_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", noise((4, 5, 6)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(VolumeError, match=f"has {len(whole) - 1} bytes, its header asks for {len(whole)}"):
        open_volume(path)
    path.write_bytes(whole[:50])
    with pytest.raises(VolumeError, match=r"a\.npy"):
        open_volume(path)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.array(["a", "b"]), "holds <U1"),
        (np.zeros((2, 3), [("a", "f4"), ("b", "i2")]), "holds"),
        (np.zeros((2, 3), complex), "holds complex128"),
        (np.array([object()]), "holds object"),
        (np.zeros((0, 3)), "shape"),
        (np.float32(1), "shape"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, data: np.ndarray, match: str) -> None:
    with pytest.raises(VolumeError, match=match):
        open_volume(save(tmp_path / "a.npy", data))


def test_the_bytes_of_a_file_decide_and_not_its_name(tmp_path: Path) -> None:
    data = noise((4, 5, 6))
    save(tmp_path / "a.npy", data).rename(tmp_path / "volume.tif")
    assert open_volume(tmp_path / "volume.tif").format == "npy"
    (tmp_path / "b.h5").write_bytes(b"<html>not found</html>")
    with pytest.raises(VolumeError, match=r"b\.h5 is a file of 22 bytes in no format.*HDF5, TIFF, MRC and \.npy"):
        open_volume(tmp_path / "b.h5")
    (tmp_path / "empty.npy").touch()
    with pytest.raises(VolumeError, match="0 bytes"):
        open_volume(tmp_path / "empty.npy")


def test_bytes_that_are_read_are_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 10, 10), np.uint16))
    reader, before = open_volume(tmp_path / "a.npy").open(), transferred()
    reader.read(Box((1, 0, 0), (3, 10, 10)))
    assert transferred().read - before.read == 2 * 10 * 10 * 2


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_a_packed_file_is_to_be_unpacked_first(tmp_path: Path, module: str) -> None:
    packed = importlib.import_module(module).compress(save(tmp_path / "a.npy", noise((4, 5, 6))).read_bytes())
    (tmp_path / "a.npy.packed").write_bytes(packed)
    with pytest.raises(VolumeError, match=r"a\.npy\.packed is packed by (gzip|bzip2|xz), .* unpack it first"):
        open_volume(tmp_path / "a.npy.packed")
