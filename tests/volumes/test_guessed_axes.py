"""Arrays that name no axes: the last may be of colours, as NumPy has pictures; in every format, and said as a guess."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from boxes import check_reads
from volumes import noise

from volpipe.volumes.volume import open_volume


def write(folder: Path, format: str, data: np.ndarray) -> Path:
    """Write `data` without names of axes, and return where it is."""
    if format == "npy":
        np.save(folder / "a.npy", data)
    elif format == "tiff":
        tifffile.imwrite(folder / "a.npy", data, photometric="minisblack")
    elif format == "hdf5":
        with h5py.File(folder / "a.h5", "w") as file:
            file["raw"] = data
        return folder / "a.h5"
    else:
        zarr.create_array(str(folder / "a.zarr"), data=data, zarr_format=2 if format == "zarr2" else 3)
        return folder / "a.zarr"
    return folder / "a.npy"


@pytest.mark.parametrize("format", ["npy", "tiff", "hdf5", "zarr2", "zarr3"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5, 20, 24, 3), "zyxc"),
        ((40, 20, 24, 4), "zyxc"),
        ((40, 20, 24, 2), "zyxc"),
        ((24, 20, 3), "yxc"),
        ((2, 24, 20), "zyx"),
        ((3, 24, 20, 30), "czyx"),
        ((24, 20, 30), "zyx"),
        ((3, 9, 8, 4), "czyx"),
        ((24, 20, 2), "zyx"),
    ],
)
def test_a_short_last_axis_is_of_channels(tmp_path: Path, format: str, shape: tuple[int, ...], axes: str) -> None:
    data = noise(shape)
    volume = open_volume(write(tmp_path, format, data))
    if format == "tiff" and axes == "czyx":
        axes = "".join(volume.axes)  # of planes, which tifffile names
        assert axes[-2:] == "yx"
    assert "".join(volume.axes) == axes
    assert volume.notes[0] == f"axes guessed: {', '.join(axes)}"
    assert volume.num_channels == (shape[axes.index("c")] if "c" in axes else 1)
    check_reads(volume, data)


def test_names_count_before_a_guess(tmp_path: Path) -> None:
    data = noise((24, 20, 30, 3))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = data
        file["raw"].attrs["axis_names"] = ["c^", "z", "y", "x"]
    assert open_volume(tmp_path / "a.h5").axes == ("c", "z", "y", "x")
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="minisblack", metadata={"axes": "CZYX"})
    assert open_volume(tmp_path / "a.tif").axes == ("c", "z", "y", "x")
