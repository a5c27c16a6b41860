"""JPEG XL in chunks of precomputed and pages of TIFF: values as imagecodecs has them, damage and bombs refused."""

from __future__ import annotations

import json
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from bucket import Bucket
from hypothesis import given
from hypothesis import strategies as st
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.volume import open_volume, open_writer

BOX = "0-8_0-8_0-8"


def write_chunk(folder: Path, picture: bytes, *, dtype: str = "uint8", num_channels: int = 1) -> Path:
    """Write a volume of one chunk, 8 × 8 × 8, that holds `picture`."""
    level = {"key": "s0", "size": [8, 8, 8], "chunk_sizes": [[8, 8, 8]], "resolution": [4, 4, 40], "encoding": "jxl"}
    info = {
        "@type": "neuroglancer_multiscale_volume",
        "type": "image",
        "data_type": dtype,
        "num_channels": num_channels,
    }
    (folder / "s0").mkdir(parents=True)
    (folder / "info").write_text(json.dumps(info | {"scales": [level]}))
    (folder / "s0" / BOX).write_bytes(picture)
    return folder


@pytest.mark.parametrize("lossless", [True, False])
def test_a_chunk_has_the_values_of_imagecodecs(tmp_path: Path, lossless: bool) -> None:
    picture = imagecodecs.jpegxl_encode(noise((64, 8)), lossless=lossless, level=None if lossless else 80)
    volume = open_volume(write_chunk(tmp_path / "a", picture))
    expected = imagecodecs.jpegxl_decode(picture).reshape(8, 8, 8)
    np.testing.assert_array_equal(volume.open()[...], expected)
    assert (volume.codec, volume.voxel_size_nm) == ("jxl", (40, 4, 4))
    with pytest.raises(VolumeError, match="an array of JPEG XL cannot be written"):
        open_writer(tmp_path / "a", "s0")


def test_channels_are_those_of_the_picture(tmp_path: Path) -> None:
    data = noise((64, 8, 3))
    volume = open_volume(write_chunk(tmp_path / "a", imagecodecs.jpegxl_encode(data, lossless=True), num_channels=3))
    np.testing.assert_array_equal(volume.open()[...], np.moveaxis(data, -1, 0).reshape(3, 8, 8, 8))
    assert volume.axes == ("c", "z", "y", "x")


def test_chunks_in_a_bucket_are_read_too(tmp_path: Path, bucket: Bucket) -> None:
    data = noise((64, 8))
    place = write_chunk(tmp_path / "a", imagecodecs.jpegxl_encode(data, lossless=True))
    bucket.files |= {f"v/{file.relative_to(place)}": file.read_bytes() for file in place.rglob("*") if file.is_file()}
    np.testing.assert_array_equal(open_volume(f"s3://{bucket.name}/v").open()[...], data.reshape(8, 8, 8))


GOOD = imagecodecs.jpegxl_encode(noise((64, 8)), lossless=True)


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        (GOOD[: len(GOOD) // 2], "JPEG XL: "),
        (GOOD[:2] + bytes(40), "JPEG XL: |unpacks to"),
        (b"no picture", "the chunk is no picture in JPEG XL"),
        (imagecodecs.png_encode(noise((64, 8))), "the chunk is no picture in JPEG XL"),
        (imagecodecs.jpegxl_encode(noise((64, 8), "uint16"), lossless=True), "1 channels of uint16, .* say 1 of uint8"),
        (
            imagecodecs.jpegxl_encode(noise((64, 8, 3)), lossless=True),
            "3 channels of uint8, the metadata say 1 of uint8",
        ),
        (imagecodecs.jpegxl_encode(noise((64, 4)), lossless=True), "[Ll]ength|bytes|voxels"),
        (imagecodecs.jpegxl_encode(np.zeros((4096, 4096), np.uint8)), "more than 4 times the chunk's 512 voxels"),
        (imagecodecs.jpegxl_encode(np.zeros((3, 64, 8), np.uint8), photometric="gray"), "times|channels|JPEG XL"),
    ],
)
def test_a_damaged_or_wrong_picture_is_refused_by_its_file(tmp_path: Path, picture: bytes, words: str) -> None:
    volume = open_volume(write_chunk(tmp_path / "a", picture))
    with pytest.raises(VolumeError, match=rf"chunk \(0, 0, 0\) in {tmp_path}/a/s0/{BOX} cannot be read: .*({words})"):
        volume.open()[...]


@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([0, 3, 4]), st.booleans(), st.booleans())
def test_the_size_of_a_picture_is_known_before_it_is_decoded(
    height: int, width: int, colours: int, is_lossless: bool, is_wide: bool
) -> None:
    shape = (height, width, colours) if colours else (height, width)
    data = np.full(shape, 9, np.uint16 if is_wide else np.uint8)
    picture = imagecodecs.jpegxl_encode(data, lossless=is_lossless, effort=1)
    assert decoded_size.count_values(picture) == height * width * (4 if colours == 4 else 3)


def test_an_animation_counts_as_more_than_fits() -> None:
    picture = imagecodecs.jpegxl_encode(np.zeros((5, 8, 8), np.uint8), photometric="gray")
    frames = imagecodecs.jpegxl_decode(picture).shape
    counted = decoded_size.count_values(picture)
    assert counted is not None and counted >= np.prod(frames)


def test_pages_of_tiff_are_read_and_a_bomb_is_refused(tmp_path: Path) -> None:
    data, place = noise((3, 40, 48)), tmp_path / "a.tif"
    lossless = {"compression": "jpegxl", "compressionargs": {"lossless": True}}
    tifffile.imwrite(place, data, photometric="minisblack", **lossless)
    volume = open_volume(place)
    assert volume.codec == "jpegxl"
    np.testing.assert_array_equal(volume.open()[...], data)
    tifffile.imwrite(place, noise((1, 120, 160)), photometric="minisblack", **lossless)
    with tifffile.TiffFile(place) as file:
        page = file.pages[0]
        (offset,), (count,) = page.dataoffsets, page.databytecounts
    text = bytearray(place.read_bytes())
    bomb = imagecodecs.jpegxl_encode(np.zeros((8192, 8192), np.uint8))
    assert len(bomb) <= count
    text[offset : offset + len(bomb)] = bomb
    place.write_bytes(text)
    with pytest.raises(VolumeError, match=r"unpacks to 201326592 values and has 19200: it is damaged"):
        open_volume(place).open()[...]
