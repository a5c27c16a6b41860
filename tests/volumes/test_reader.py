"""Reading: voxels come as (c, z, y, x) from any stored order, mirrored past the faces, or as stored, like numpy's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from arrays import invented, make
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.volume import Volume


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


@pytest.mark.parametrize(("format", "chunk"), [("n5", "0/0/0"), ("zarr2", "0/0/0"), ("zarr3", "c/0/0/0")])
def test_a_damaged_chunk_names_its_volume(tmp_path: Path, format: str, chunk: str) -> None:
    volume = make(tmp_path / "a", np.ones((4, 4, 4), np.uint8), format, codec="gzip")
    file = tmp_path / "a" / chunk
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(VolumeError, match=str(tmp_path / "a")):
        volume.open()[...]
