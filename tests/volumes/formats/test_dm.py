"""DigitalMicrograph: RosettaSciIO reads the files of the tests as volpipe does; the largest image counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dm_files import write_dm
from rsciio.digitalmicrograph import file_reader
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.volume import open_volume

SHAPE = (5, 6, 7)
NM = [(4.0, "nm", 0.0), (0.008, "µm", -2.0), (50.0, "nm", 0.0)]  # x, y, z


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("shape", [SHAPE, (6, 7)])
@pytest.mark.parametrize("order", "<>")
def test_rosettasciio_reads_the_same_voxels_sizes_and_places(
    tmp_path: Path, version: int, shape: tuple[int, ...], order: str
) -> None:
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "float64"):
        data, path = noise(shape, dtype), tmp_path / f"a.dm{version}"
        write_dm(path, data.astype(data.dtype.newbyteorder(order)), version, calibrations=NM[: len(shape)])
        volume, theirs = open_volume(path), file_reader(str(path))[1]  # behind the small picture
        np.testing.assert_array_equal(volume[...], data)
        if order == "<":  # it takes the voxels of big-endian files for little-endian, and their tags as they are
            np.testing.assert_array_equal(theirs["data"], data)
        assert volume.dtype == data.dtype
        places = {axis["name"]: (axis["scale"], axis["offset"], axis["units"]) for axis in theirs["axes"]}
        assert volume.voxel_size_nm is not None
        for axis, size, origin in zip("zyx", volume.voxel_size_nm, volume.origin_nm, strict=True):
            scale, offset, unit = places.get(axis, (1.0, 0.0, "nm"))
            factor = {"nm": 1, "µm": 1000}[unit]
            assert (size, origin) == (pytest.approx(scale * factor), pytest.approx(offset * factor))
        assert volume.voxel_size_nm == ((50.0, 8.0, 4.0) if len(shape) == 3 else (1.0, 8.0, 4.0))
        assert volume.notes == ()


@pytest.mark.parametrize("order", "<>")
def test_the_largest_image_is_read_and_others_are_said(tmp_path: Path, order: str) -> None:
    data, path = noise(SHAPE, "uint16").astype(f"{order}u2"), tmp_path / "a.dm4"
    write_dm(path, data, 4, others=(noise((3, 4), "uint8").astype("u1"),))
    volume = open_volume(path)
    np.testing.assert_array_equal(volume[...], data)
    assert "it holds 2 images, of which the largest is read" in volume.notes


def test_units_that_are_no_lengths_and_missing_ones_are_said(tmp_path: Path) -> None:
    for calibrations, words in (
        ([(4.0, "nm", 0.0), (4.0, "nm", 0.0), (0.5, "eV", 0.0)], "it says z, y, x 0.5 × 4 × 4 in the unit 'eV'"),
        ([(4.0, "1/nm", 0.0)] * 3, "in the unit '1/nm'"),
        ([], "it says z, y, x 1 × 1 × 1 without a unit"),
        ([(4.0, "nm", 0.0)] * 2, "it says no scale of z"),
    ):
        write_dm(tmp_path / "a.dm3", noise(SHAPE), calibrations=calibrations)
        volume = open_volume(tmp_path / "a.dm3")
        assert volume.voxel_size_nm is None
        assert words in volume.notes[0]


def test_other_kinds_of_voxels_and_four_axes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.dm3"
    write_dm(path, np.zeros(SHAPE, np.complex64))
    with pytest.raises(VolumeError, match="holds complex floats; volpipe reads integers and floats"):
        open_volume(path)
    write_dm(path, np.zeros(SHAPE, np.int32), kind="rgb")
    with pytest.raises(VolumeError, match="holds RGB colours"):
        open_volume(path)
    write_dm(path, noise((2, *SHAPE)))
    with pytest.raises(VolumeError, match="has the axes 7 × 6 × 5 × 2, fastest first"):
        open_volume(path)
