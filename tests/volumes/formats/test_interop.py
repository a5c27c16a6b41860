"""N5, Zarr and OME-Zarr that other software wrote: arrays decode to known bytes, and wrong ones are refused."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED

from volpipe.errors import VolumeError
from volpipe.volumes.volume import list_arrays, open_volume

pytestmark = pytest.mark.real

FOLDER = SHARED / "interop"
EXPECTED: dict[str, Any] = (  # Any: JSON
    json.loads((FOLDER / "EXPECTED.json").read_text()) if (FOLDER / "EXPECTED.json").is_file() else {}
)
AGREED = [name for name, fact in EXPECTED.items() if fact["equal"]]
STRINGS = [name for name, fact in EXPECTED.items() if "U" in fact["dtype"] or "S" in fact["dtype"]]


@pytest.fixture(scope="module")
def interop() -> Path:
    if not EXPECTED:
        pytest.skip("the folder of volumes by other software is not beside the project")
    return FOLDER


def decoded(name: str) -> np.ndarray:
    return open_volume(FOLDER / name).open()[...]


@pytest.mark.parametrize("name", AGREED or ["none"])
def test_arrays_decode_to_the_bytes_that_other_readers_agree_on(interop: Path, name: str) -> None:
    fact = EXPECTED[name]
    data = decoded(name)
    stored = data.astype(np.dtype(fact["dtype"]))  # the hash of a big-endian array is that of big-endian bytes
    assert hashlib.sha256(stored.tobytes()).hexdigest() == fact["sha256"]
    volume = open_volume(interop / name)
    assert (list(volume.shape), volume.dtype) == (fact.get("shape", fact.get("shape_numpy")), data.dtype)
    if fact["format"].startswith("zarr"):
        assert (list(volume.chunks), volume.shards and list(volume.shards)) == (fact["chunks"], fact["shards"])


@pytest.mark.parametrize("name", STRINGS or ["none"])
def test_strings_are_refused_with_the_reason(interop: Path, name: str) -> None:
    with pytest.raises(VolumeError, match=r"dtype .* is not supported; volpipe reads integers"):
        open_volume(interop / name)


def test_odd_arrays_of_numbers_are_read_too(interop: Path) -> None:
    v2, v3 = "neuroglancer/zarr/zarr_v2/from_zarr-python/data.zarr", "neuroglancer/zarr/zarr_v3/from_zarrita/data.zarr"
    np.testing.assert_array_equal(decoded(f"{v2}/1d.contiguous.lz4.i2"), [1, 2, 3, 4])
    np.testing.assert_array_equal(decoded(f"{v3}/3d.chunked.mixed.i2.F"), np.arange(27).reshape(3, 3, 3))
    np.testing.assert_array_equal(decoded(f"{v3}/1d.contiguous.b1"), [1, 0, 1, 0])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_each_level_of_an_ome_zarr_has_its_place(interop: Path, version: str) -> None:
    location = interop / f"neuroglancer/zarr/ome_zarr/simple_{version}"
    places = [((1, 4, 30), (0, 0, 0)), ((1, 8, 60), (0, 2, 15)), ((1, 16, 120), (0, 6, 45))]
    for level, place in enumerate(places):
        volume = open_volume(location, level=level)
        assert (volume.voxel_size_nm, volume.origin_nm) == place
        assert volume.levels == ("scale0/image", "scale1/image", "scale2/image")


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("image-01", (1, 1000, 1000), (1, 1000, 1000)),
        ("image-02", (1, 200, 200), (1, 1000, 1000)),
        ("image-03", (2, 100, 100), (1000, 1000, 1000)),
        ("image-04", (2, 64, 64), (1000, 1000, 1000)),
    ],
)
def test_valid_ome_zarr_opens_with_its_voxel_size(
    interop: Path, name: str, shape: tuple[int, ...], size: tuple[float, ...]
) -> None:
    volume = open_volume(interop / f"ome_zarr_examples/data/valid/{name}.zarr")
    assert (volume.spatial_shape, volume.voxel_size_nm) == (shape, size)


def test_questionable_ome_zarr_opens_with_a_warning(interop: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        volume = open_volume(interop / "ome_zarr_examples/data/warning/image-01.zarr")
    assert volume.dtype == np.int64
    assert "different types: int64, float64" in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("image-01", "no volume in .*OME-Zarr"),
        ("image-02", "multiscales is empty"),
        ("image-03", "names the array '0', which does not exist"),
        ("image-04", "'1' has 2 axes, level 0 3"),
    ],
)
def test_invalid_ome_zarr_is_refused_with_the_reason(interop: Path, name: str, reason: str) -> None:
    with pytest.raises(VolumeError, match=reason):
        open_volume(interop / f"ome_zarr_examples/data/invalid/{name}.zarr")


def test_a_plate_names_its_images(interop: Path) -> None:
    plate = interop / "ome_zarr_examples/data/valid/plate-01.zarr"
    with pytest.raises(VolumeError, match=r"plate of images.* A/1/0, A/2/0, B/1/0, B/2/0"):
        open_volume(plate)
    assert open_volume(plate, "B/2/0").key == "B/2/0/0"


@pytest.mark.parametrize("dialect", ["modern", "deprecated"])
def test_n5_viewer_pyramids_have_their_voxel_size_per_level(interop: Path, tmp_path: Path, dialect: str) -> None:
    source = interop / f"neuroglancer/n5/n5_viewer_multiscale_{dialect}"
    volumes = list_arrays(source)
    assert [volume.shape for volume in volumes] == [(20, 10), (10, 5), (5, 3)]
    assert [volume.voxel_size_nm for volume in volumes] == [None] * 3  # its y axis is in seconds
    for file in source.rglob("attributes.json"):
        copy = tmp_path / "copy" / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text().replace('"s"', '"nm"'))
    places = [((1, 20, 10), (0, 0, 0)), ((1, 40, 20), (0, 10, 5)), ((1, 80, 40), (0, 30, 15))]
    for level, (size, origin) in enumerate(places):
        volume = open_volume(tmp_path / "copy", level=level)
        assert (volume.voxel_size_nm, volume.origin_nm) == (size, origin)


def test_a_container_of_several_arrays_names_them(interop: Path) -> None:
    with pytest.raises(VolumeError, match="choose one by its key: gzip, raw"):
        open_volume(interop / "z5py_n5/z5py.n5")
    assert open_volume(interop / "z5py_n5/z5py.n5", "gzip").codec == "gzip 5"
