"""HDF5 files: as h5py writes them, with everything that the format allows between a dataset and its bytes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from boxes import check_reads
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats import hdf5
from volpipe.volumes.volume import list_arrays, open_volume

pytestmark = pytest.mark.usefixtures("_one_hdf5_process")


@pytest.mark.parametrize(
    ("settings", "codec", "chunks"),
    [
        ({}, "raw", (1, 30, 40)),
        ({"chunks": (8, 16, 16)}, "raw", (8, 16, 16)),
        ({"chunks": (8, 16, 16), "compression": "gzip", "compression_opts": 7, "shuffle": True}, "gzip 7", (8, 16, 16)),
        ({"chunks": (8, 16, 16), "compression": "lzf", "fletcher32": True}, "lzf", (8, 16, 16)),
        ({"chunks": (5, 30, 40), "scaleoffset": 0}, "raw", (5, 30, 40)),
        ({"chunks": (8, 16, 16), "maxshape": (None, 30, 40)}, "raw", (8, 16, 16)),
    ],
)
def test_every_layout_and_filter(
    tmp_path: Path, settings: dict[str, object], codec: str, chunks: tuple[int, ...]
) -> None:
    data = noise((20, 30, 40), "uint16")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("deep/in/raw", data=data, **settings)
    volume = open_volume(tmp_path / "a.h5/deep/in/raw")
    assert (volume.path, volume.key) == (str(tmp_path / "a.h5"), "deep/in/raw")
    assert (volume.codec, volume.chunks) == (codec, chunks)
    check_reads(volume, data)


def test_external_linked_and_virtual_datasets(tmp_path: Path) -> None:
    data = noise((6, 7, 9), "int16")
    (tmp_path / "voxels.bin").write_bytes(data.tobytes())
    with h5py.File(tmp_path / "parts.h5", "w") as file:
        file["a"], file["b"] = data[:2], data[2:]
    layout = h5py.VirtualLayout(data.shape, data.dtype)
    layout[:2] = h5py.VirtualSource(tmp_path / "parts.h5", "a", data[:2].shape)
    layout[2:] = h5py.VirtualSource(tmp_path / "parts.h5", "b", data[2:].shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("external", data.shape, data.dtype, external=str(tmp_path / "voxels.bin"))
        file.create_virtual_dataset("virtual", layout)
        file["soft"] = h5py.SoftLink("/external")
        file["linked"] = h5py.ExternalLink("parts.h5", "b")
        file["nowhere"] = h5py.SoftLink("/gone")
    for key in ("external", "virtual", "soft"):
        check_reads(open_volume(tmp_path / "a.h5", key), data)
    check_reads(open_volume(tmp_path / "a.h5", "linked"), data[2:])
    with pytest.raises(VolumeError, match=r"no volume at .*nowhere"):
        open_volume(tmp_path / "a.h5", "nowhere")


def test_a_virtual_dataset_whose_source_is_missing_is_refused(tmp_path: Path) -> None:
    """HDF5 itself shows zeros in its place."""
    layout = h5py.VirtualLayout((4, 6, 8), np.uint8)
    layout[:] = h5py.VirtualSource("parts.h5", "a", (4, 6, 8))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("raw", layout)
    with pytest.raises(VolumeError, match=r"of which parts\.h5 is missing"):
        open_volume(tmp_path / "a.h5")
    data = noise((4, 6, 8))
    with h5py.File(tmp_path / "parts.h5", "w") as file:
        file["a"] = data
    check_reads(open_volume(tmp_path / "a.h5"), data)


def virtual_of_two(folder: Path) -> Path:
    """Write a virtual dataset of low.h5 and high.h5, whose voxels are 1 and 2; a.h5 of those is in another file."""
    layout = h5py.VirtualLayout((8, 6, 8), np.uint8)
    for number, name in enumerate(("low", "high")):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["raw"] = np.full((4, 6, 8), number + 1, np.uint8)
        layout[4 * number : 4 * number + 4] = h5py.VirtualSource(f"{name}.h5", "raw", (4, 6, 8))
    nested = h5py.VirtualLayout((8, 6, 8), np.uint8)
    nested[:] = h5py.VirtualSource("both.h5", "raw", (8, 6, 8))
    for name, each in (("both", layout), ("a", nested)):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_virtual_dataset("raw", each)
    return folder


@pytest.mark.parametrize(("name", "is_nested"), [("both.h5", False), ("a.h5", True)])
def test_a_source_that_goes_from_an_open_virtual_dataset_is_an_error(
    tmp_path: Path, name: str, is_nested: bool
) -> None:
    """HDF5 itself shows zeros in its place, and the voxels again once it is back."""
    volume = open_volume(virtual_of_two(tmp_path) / name)
    low, high = Box((0, 0, 0), (4, 6, 8)), Box((4, 0, 0), (8, 6, 8))
    reader = volume.open()
    (tmp_path / "high.h5").rename(tmp_path / "away")
    with pytest.raises(VolumeError, match=r"high\.h5 cannot be opened"):
        reader.read(high)
    if not is_nested:  # else it is not known which files of the nested one fill a box
        assert (reader.read(low) == 1).all()
    (tmp_path / "away").rename(tmp_path / "high.h5")
    assert (reader.read(high) == 2).all() and (reader.read(low) == 1).all()


def test_a_file_that_goes_before_it_is_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = noise((4, 6, 8))
    header = hdf5.read_header(tmp_path / "a.h5", "raw")
    assert header is not None
    (tmp_path / "a.h5").unlink()
    with pytest.raises(VolumeError, match=r"a\.h5 cannot be opened: No such file"):
        hdf5.Hdf5Array(header, 0)


@pytest.mark.parametrize("settings", [{}, {"chunks": (4, 6, 8)}, {"chunks": (4, 6, 8), "compression": "gzip"}])
def test_a_file_that_is_written_over_is_read_anew(tmp_path: Path, settings: dict[str, Any]) -> None:
    """HDF5 knows a file by its inode, and takes what it has open already from its own caches."""
    for value in (1, 2):
        with h5py.File(tmp_path / f"{value}.h5", "w") as file:
            file.create_dataset("raw", data=np.full((4, 6, 8), value, np.uint8), **settings)
    path, box = tmp_path / "1.h5", Box.from_shape((4, 6, 8))
    before = open_volume(path).open(cache_bytes=2**20, session="a")
    assert (before.read(box) == 1).all()
    path.write_bytes((tmp_path / "2.h5").read_bytes())
    os.utime(path, (1, 1))  # the clocks of some file systems tell no two writes within a second apart
    assert (open_volume(path).open(cache_bytes=2**20, session="b").read(box) == 2).all()
    with pytest.raises(VolumeError, match="written since it was opened"):
        before.read(box)
    assert (open_volume(path).open(cache_bytes=2**20, session="a").read(box) == 2).all()


def test_voxels_never_written_are_the_fill_value(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("raw", (20, 20, 20), "u2", chunks=(8, 8, 8), fillvalue=7)[:4] = 9
    expected = np.full((20, 20, 20), 7, np.uint16)
    expected[:4] = 9
    check_reads(open_volume(tmp_path / "a.h5"), expected)


def test_the_only_volume_is_found_among_tables(tmp_path: Path) -> None:
    data = noise((4, 6, 8))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["volumes/raw"] = data
        file["volumes/table"] = noise((4, 2))
        file["counts"] = noise((40,))
        file["name"] = "a text"
        file["point"] = 4.0
        file["empty"] = h5py.Empty("f4")
        file["type"] = np.dtype("f4")
        file["rows"] = np.zeros((3, 3, 3), [("a", "f4"), ("b", "i2")])
    volume = open_volume(tmp_path / "a.h5")
    assert volume.key == "volumes/raw"
    check_reads(volume, data)
    check_reads(open_volume(tmp_path / "a.h5", "volumes/table"), noise((4, 2)))


def test_several_volumes_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["volumes/raw"], file["volumes/labels"] = noise((4, 6, 8)), noise((4, 6, 8), "uint32")
        file["other/raw"], file["name"] = noise((4, 6, 8)), "a text"
    names = ["other/raw", "volumes/labels", "volumes/raw"]
    with pytest.raises(VolumeError, match=f"holds 3 volumes; choose one by its key: {', '.join(names)}"):
        open_volume(tmp_path / "a.h5")
    with pytest.raises(VolumeError, match=rf"no volume at .*typo; .*a\.h5 holds {', '.join(names)}"):
        open_volume(tmp_path / "a.h5", "typo")
    assert open_volume(tmp_path / "a.h5/other").key == "other/raw"
    with caplog.at_level(logging.WARNING):
        assert [v.key for v in list_arrays(tmp_path / "a.h5")] == names
        assert [v.key for v in list_arrays(tmp_path / "a.h5/volumes")] == names[1:]
    assert not caplog.records


def test_images_are_found_where_there_are_no_volumes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = noise((6, 8))
    assert open_volume(tmp_path / "a.h5").axes == ("y", "x")


def test_a_group_of_levels_is_one_volume(tmp_path: Path) -> None:
    data = noise((8, 8, 8))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["cells/s0"], file["cells/s1"] = data, data[::2, ::2, ::2]
    volume = open_volume(tmp_path / "a.h5")
    assert (volume.key, volume.levels) == ("cells/s0", ("cells/s0", "cells/s1"))
    check_reads(open_volume(tmp_path / "a.h5", level=1), data[::2, ::2, ::2])


def test_attributes_are_those_of_the_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = noise((4, 6, 8))
        file["raw"].attrs.update(
            {"a": 1, "b": [1.5, 2.5], "c": "text", "d": np.bytes_(b"bytes"), "e": h5py.Empty("f4")}
        )
    assert open_volume(tmp_path / "a.h5").attributes == {"a": 1, "b": [1.5, 2.5], "c": "text", "d": "bytes"}


def test_axes_are_those_of_dimension_labels_and_of_axistags(tmp_path: Path) -> None:
    tags = json.dumps({"axes": [{"key": key, "typeFlags": 2} for key in "zyxc"]})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for key in ("tagged", "labelled", "neither"):
            file[key] = noise((4, 5, 6, 2))
        file["tagged"].attrs["axistags"] = tags
        for dim, label in zip(file["labelled"].dims, "xyzc", strict=True):
            dim.label = label
    assert open_volume(tmp_path / "a.h5", "tagged").axes == ("z", "y", "x", "c")
    assert open_volume(tmp_path / "a.h5", "labelled").spatial_shape == (6, 5, 4)
    assert open_volume(tmp_path / "a.h5", "neither").axes == ("c", "z", "y", "x")


def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["rows"] = np.zeros((3, 3, 3), [("a", "f4"), ("b", "i2")])
        file["names"] = ["a", "b"]
        file["waves"] = np.zeros((3, 3, 3), complex)
        file.create_dataset("none", (0, 3, 3), "u1")
        file["point"] = 4.0
        file["time"] = noise((5, 1, 3, 3, 3))
    expected = {
        "rows": "holds",
        "names": "holds object",
        "waves": "holds complex128",
        "none": "holds no voxels",
        "point": "holds no voxels",
        "time": "5 points in time",
    }
    for key, match in expected.items():
        with pytest.raises(VolumeError, match=match):
            open_volume(tmp_path / "a.h5", key)


def test_a_file_without_volumes_says_so_and_speaks_of_no_folders(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("empty")
    with pytest.raises(VolumeError, match=r"no volume in .*a\.h5: it holds no array of numbers with voxels$"):
        open_volume(tmp_path / "a.h5")


def test_a_filter_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4, 4, 4))
        settings.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
        dataset = h5py.h5d.create(file.id, b"raw", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((4, 4, 4)), settings)
        dataset.write_direct_chunk((0, 0, 0), b"compressed by another", 0)
    with pytest.raises(VolumeError, match=r"a\.h5/raw is compressed with HDF5 filter 32015 \(zstd\).*HDF5_PLUGIN_PATH"):
        open_volume(tmp_path / "a.h5")


def test_the_signature_may_stand_behind_a_block_of_the_user(tmp_path: Path) -> None:
    data = noise((4, 6, 8))
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file["raw"] = data
    check_reads(open_volume(tmp_path / "a.mat"), data)
