"""What is served of a volume is the volume: tensorstore reads it over HTTP, voxel by voxel, in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tensorstore as ts
import tifffile
from arrays import make, write_all
from volumes import noise

import volpipe as vp
from volpipe.viewer.layers import open_scene
from volpipe.viewer.sources import Chunks, Folder, decoded, difference
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, View, create_array, create_multiscale

SIZE, ORIGIN = (30.0, 6.0, 8.0), (60.0, 3.0, 100.0)


def get(url: str) -> Any:  # Any: JSON
    with urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


@contextmanager
def served(volume: vp.Volume | Path, level: int = 0) -> Iterator[tuple[str, Any]]:
    """Give the address of the first layer for `volume`, and its `level` as tensorstore reads it."""
    with vp.view(volume) as viewer:
        url = f"{viewer.url}still/0/"
        spec = {"driver": "zarr3", "kvstore": {"driver": "http", "base_url": f"{url}s{level}/"}}
        yield url, ts.open(spec, read=True, open=True).result().read().result()


def places(url: str) -> list[tuple[list[float], list[float]]]:
    """Return scale and translation of each level of an OME-Zarr."""
    attributes = get(f"{url}zarr.json")["attributes"]["ome"]
    changes = [entry["coordinateTransformations"] for entry in attributes["multiscales"][0]["datasets"]]
    return [(scale["scale"], shift["translation"]) for scale, shift in changes]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float32", "float64"])
@pytest.mark.parametrize("format", ["n5", "zarr3"])
def test_voxels_are_served_as_they_are(tmp_path: Path, format: str, dtype: str) -> None:
    data = noise((9, 70, 11), "int16" if dtype == "float64" else dtype).astype(dtype)
    shards = {"shards": (8, 8, 8)} if format == "zarr3" else {}
    with served(make(tmp_path / f"a.{format[:4].rstrip('3')}", data, format, **shards)) as (_, read):
        np.testing.assert_array_equal(read, data)
        assert read.dtype == ("float32" if dtype == "float64" else dtype)  # which no browser has


def test_channels_are_served_together_or_as_a_view_has_them(tmp_path: Path) -> None:
    data = noise((3, 9, 70, 11), "uint16")
    volume = make(tmp_path / "a.zarr", data, chunks=(1, 4, 4, 4))
    for opened, expected in ((volume, data), (vp.open(tmp_path / "a.zarr", view=View(channel=1)), data[1])):
        with served(opened) as (_, read):
            np.testing.assert_array_equal(read, expected)


def test_voxels_that_are_written_anew_are_shown_as_they_are(tmp_path: Path) -> None:
    """As by an update, which leaves the metadata of an array alone."""
    box, old, new = vp.Box((0, 0, 0), (8, 8, 8)), noise((2, 8, 8, 8)), noise((2, 8, 8, 8), seed=1)
    volume = make(tmp_path / "a.zarr", old, chunks=(1, 8, 8, 8))
    raw, out = (vp.open(tmp_path / "a.zarr", view=View(channel=channel)) for channel in (0, 1))
    shown, change = decoded(volume, as_labels=False), difference(raw, out)
    assert isinstance(change, Chunks)
    for data in (old, new):
        write_all(tmp_path / "a.zarr", "", data)
        np.testing.assert_array_equal(shown.read(0, box), data)
        np.testing.assert_array_equal(change.read(0, box), data[1:].astype(np.float32) - data[:1])


def test_a_volume_of_two_axes_has_one_slice(tmp_path: Path) -> None:
    data = noise((20, 30))
    tifffile.imwrite(tmp_path / "a.tif", data)
    with served(vp.open(tmp_path / "a.tif")) as (_, read):
        np.testing.assert_array_equal(read, data[np.newaxis])


@pytest.mark.parametrize("format", ["n5", "ome-zarr-0.4", "ome-zarr-0.5"])
def test_levels_keep_their_voxels_and_places(tmp_path: Path, format: str) -> None:
    path = tmp_path / ("a.n5" if format == "n5" else "a.zarr")
    kind = {"n5": "n5", "ome-zarr-0.4": "zarr2", "ome-zarr-0.5": "zarr3"}[format]
    arrays = [noise((8, 12, 16)), noise((8, 6, 8), seed=1)]
    for number, data in enumerate(arrays):
        create_array(path, f"s{number}", ArraySpec(data.shape, data.dtype, (4, 4, 4)), kind)
        write_all(path, f"s{number}", data)
    levels = (Level("s0"), Level("s1", (1, 2, 2)))
    create_multiscale(path, Multiscale(levels, voxel_size_nm=SIZE, origin_nm=ORIGIN), format=format)
    for number, data in enumerate(arrays):
        with served(path, number) as (url, read):
            np.testing.assert_array_equal(read, data)
            assert places(url) == [([30, 6, 8], [60, 3, 100]), ([30, 12, 16], [60, 6, 104])]


def test_levels_without_a_voxel_size_cover_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    for number, data in enumerate((noise((8, 11, 16)), noise((8, 6, 8)))):
        create_array(path, f"s{number}", ArraySpec(data.shape, data.dtype, (4, 4, 4)), "zarr3")
    create_multiscale(path, Multiscale((Level("s0"), Level("s1", (1, 2, 2)))))
    assert vp.open(path).voxel_size_nm is None
    with served(path) as (url, _):
        assert places(url) == [([1, 1, 1], [0, 0, 0]), ([1, 2, 2], [0, 0.5, 0.5])]


def test_a_coarser_level_begins_at_itself_and_a_place_that_is_given_is_for_one_level(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    for number, n in enumerate((16, 8, 4)):
        create_array(path, f"s{number}", ArraySpec((n, n, n), np.dtype(np.uint8), (4, 4, 4)), "zarr3")
    levels = (Level("s0"), Level("s1", (2, 2, 2)), Level("s2", (4, 4, 4)))
    create_multiscale(path, Multiscale(levels, voxel_size_nm=(8, 8, 8)))
    with served(vp.open(path, level=1)) as (url, _):
        assert places(url) == [([16] * 3, [4] * 3), ([32] * 3, [12] * 3)]
    with served(vp.open(path, view=View(voxel_size_nm=(5, 5, 5)))) as (url, _):
        assert places(url) == [([5] * 3, [0] * 3)]


def test_a_large_volume_without_levels_gets_coarser_ones(tmp_path: Path) -> None:
    data = noise((3, 70, 603))
    np.save(tmp_path / "a.npy", data)
    volume = vp.open(tmp_path / "a.npy", view=View(voxel_size_nm=SIZE, origin_nm=ORIGIN))
    with served(volume, 1) as (url, read):
        np.testing.assert_array_equal(read, data[:, 0::2, 0::2][:, :35, :302])
        # each is the first of two voxels, drawn where both are
        assert places(url) == [
            ([30, 6, 8], [60, 3, 100]), ([30, 12, 16], [60, 6, 104]), ([30, 24, 32], [60, 12, 112]),
        ]  # fmt: skip
    with served(volume, 2) as (_, read):
        np.testing.assert_array_equal(read, np.pad(data, ((0, 0), (0, 2), (0, 1)), mode="edge")[:, 1::4, 1::4])


def test_a_folder_of_neuroglancers_own_format_is_served_as_it_lies(tmp_path: Path) -> None:
    data = noise((11, 10, 9))
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": str(tmp_path / "a")},
        "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
        "scale_metadata": {"size": [9, 10, 11], "resolution": [8, 6, 30], "chunk_size": [4, 4, 4], "encoding": "raw",
                           "voxel_offset": [5, 6, 7]},
    }  # fmt: skip
    ts.open(spec, create=True).result()[..., 0].write(data.T).result()
    with vp.view(tmp_path / "a") as viewer:
        layer = open_scene(tmp_path / "a", ()).layers[0]
        assert isinstance(layer.source, Folder) and layer.source.scheme == "neuroglancer-precomputed"
        assert (layer.raster.voxel_size_nm, layer.raster.shape) == ((30, 6, 8), (11, 10, 9))
        assert layer.raster.origin_nm == (7.5 * 30, 6.5 * 6, 5.5 * 8)  # its corner lies at the offset
        http = {"driver": spec["driver"], "kvstore": {"driver": "http", "base_url": f"{viewer.url}still/0/"}}
        np.testing.assert_array_equal(ts.open(http, read=True).result()[..., 0].read().result(), data.T)


def test_labels_of_64_bits_keep_every_bit(tmp_path: Path) -> None:
    data = np.array([0, 1, 2**53 + 1, 2**63 - 1], np.int64).reshape(1, 2, 2)
    volume = make(tmp_path / "a.zarr", data)
    source = decoded(volume, as_labels=True)
    assert source.dtype == np.uint64
    with served(volume) as (_, read):
        np.testing.assert_array_equal(read, data.astype(np.uint64))


def test_a_chunk_with_many_channels_is_smaller() -> None:
    def chunk(num_channels: int, dtype: str) -> int:
        return Chunks((), np.dtype(dtype), num_channels, lambda level, box: None).chunk[0]

    assert [chunk(1, "uint8"), chunk(8, "float32"), chunk(12, "float32"), chunk(3000, "uint8")] == [64, 64, 32, 8]
