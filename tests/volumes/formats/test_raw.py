"""Headerless files: shape and type stand behind the name; what does not fit the file's bytes is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from volumes import noise

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.volumes.formats.container import find_format

SHAPE = (5, 6, 7)


@pytest.mark.parametrize("suffix", [".raw", ".bin", ".dat", ".vol"])
def test_a_key_says_shape_type_order_and_offset(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    for shape, stored, key in (
        (SHAPE, "<u2", "5x6x7,uint16"),
        (SHAPE, ">u2", "5x6x7,>u2"),
        (SHAPE, "<f4", "5x6x7,float32,9"),
        ((2, *SHAPE), "<i4", "2x5x6x7,<i4,512"),
        ((6, 7), "|u1", "6x7,u1"),
    ):
        data = noise(shape, np.dtype(stored).newbyteorder("=").name).astype(stored)
        file.write_bytes(b"x" * int((key.split(",")[2:] or ["0"])[0]) + data.tobytes())
        for volume in (vp.open(file / key), vp.open(file, key)):
            assert (volume.axes, volume.shape) == (("c", "z", "y", "x")[-len(shape) :], shape)
            np.testing.assert_array_equal(volume[...], data)
            assert volume.dtype == data.dtype.newbyteorder("=")


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.raw"
    file.write_bytes(noise(SHAPE, "uint16").tobytes())
    for key, words in (
        (
            "5x6x7,uint8",
            r"has 420 bytes, and 5x6x7 voxels of uint8 from byte 0 on end at byte 210, 210 bytes too early",
        ),
        ("5x6x7,uint16,8", r"from byte 8 on end at byte 428, 8 bytes too late"),
        ("5x6x7,uint17", r"no type is named uint17; write uint8"),
        ("5x0x7,uint16", r"holds 0, no number of voxels"),
        ("5x6x7", r"no volume at .*a\.raw/5x6x7; .*a\.raw holds ZxYxX,TYPE\[,OFFSET\]"),
        ("", r"a\.raw has no header: name shape, type and the byte .*a\.raw/100x512x512,uint16"),
    ):
        with pytest.raises(VolumeError, match=words):
            vp.open(file, key)


def test_a_file_that_says_what_it_is_needs_no_key(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise(SHAPE))
    (tmp_path / "a.npy").rename(tmp_path / "a.raw")
    assert find_format(tmp_path / "a.raw").name == "npy"


def test_a_copy_keeps_voxels_and_what_the_recipe_says_of_their_size(tmp_path: Path) -> None:
    data = noise(SHAPE, "uint16")
    (tmp_path / "a.raw").write_bytes(data.tobytes())
    source = vp.open(tmp_path / "a.raw", "5x6x7,uint16", view=vp.View(voxel_size_nm=(50, 8, 8)))
    copy = vp.convert(source, tmp_path / "a.zarr")
    np.testing.assert_array_equal(copy[...], data)
    assert copy.voxel_size_nm == (50, 8, 8)
