"""PNG and JPEG slices: read as Pillow reads them, grey where colours are equal, refused where they are cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from boxes import check_reads
from PIL import Image
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.formats import picture
from volpipe.volumes.volume import list_arrays, open_volume


def write(folder: Path, data: np.ndarray, suffix: str = ".png", mode: str | None = None, **settings: Any) -> Path:
    """Write each plane as a picture, of another mode than its array has where that is given."""
    folder.mkdir(exist_ok=True)
    for z, plane in enumerate(data):
        image = Image.fromarray(plane)
        (image.convert(mode) if mode else image).save(folder / f"z{z - 2}{suffix}", **settings)
    return folder


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_folder_of_png_is_a_volume(tmp_path: Path, dtype: str) -> None:
    data = noise((5, 20, 31), dtype)
    volume = open_volume(write(tmp_path / "raw", data))
    assert (volume.axes, volume.dtype, volume.notes) == (("z", "y", "x"), data.dtype, ())
    check_reads(volume, data)
    one = open_volume(tmp_path / "raw/z1.png")
    check_reads(one, data[3])


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_is_decoded_as_pillow_does_and_noted_as_lossy(tmp_path: Path, suffix: str, mode: str) -> None:
    folder = write(tmp_path / "raw", noise((5, 20, 31)), suffix, mode)
    volume = open_volume(folder)
    expected = [np.asarray(Image.open(folder / f"z{z - 2}{suffix}").convert("L")) for z in range(5)]
    check_reads(volume, np.stack(expected))
    assert "JPEG is lossy" in volume.notes[0]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P"])
def test_equal_colours_are_grey_and_it_is_said(tmp_path: Path, mode: str) -> None:
    data = noise((5, 20, 31))
    volume = open_volume(write(tmp_path / "raw", data, mode=mode))
    assert volume.notes == ("the colours of each pixel are equal: they are read as one grey value",)
    check_reads(volume, data)
    check_reads(open_volume(tmp_path / "raw/z0.png"), data[2])


def test_other_colours_are_channels(tmp_path: Path) -> None:
    data = noise((5, 20, 31, 4))
    volume = open_volume(write(tmp_path / "raw", data))
    assert volume.axes == ("z", "y", "x", "c")
    check_reads(volume, data)


def test_colours_among_pictures_without_are_named_when_they_are_read(tmp_path: Path) -> None:
    data = np.repeat(noise((6, 20, 31))[..., np.newaxis], 3, axis=-1)
    data[1, 3, 4, 2] ^= 1
    reader = open_volume(write(tmp_path / "raw", data)).open()
    assert np.array_equal(reader[2:], data[2:, ..., 0])
    with pytest.raises(VolumeError, match=r"z-1\.png has colours"):
        reader[1]


def test_grey_values_of_one_bit_are_scaled_and_it_is_said(tmp_path: Path) -> None:
    data = noise((3, 20, 31)) > 99
    volume = open_volume(write(tmp_path / "raw", data))
    check_reads(volume, data * np.uint8(255))
    assert volume.notes == ("grey values of 1 bits are scaled to 0 to 255",)


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_picture_that_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    folder = write(tmp_path / "raw", noise((5, 200, 310)), suffix)
    file = folder / f"z1{suffix}"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 3 // 4])
    reader = open_volume(folder).open()
    with pytest.raises(VolumeError, match=rf"z1\{suffix}.* cut short"):
        reader[3]
    file.write_bytes(whole[:20])
    with pytest.raises(VolumeError, match=rf"z1\{suffix} is no whole PNG or JPEG"):
        open_volume(folder)


@pytest.mark.parametrize(("suffix", "mode"), [(".png", "L"), (".png", "RGBA"), (".jpg", "RGB")])
def test_any_damaged_byte_is_an_error_or_a_picture(tmp_path: Path, suffix: str, mode: str) -> None:
    file = write(tmp_path / "raw", noise((1, 20, 31)), suffix, mode) / f"z-2{suffix}"
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    outcomes = set()
    for _ in range(120):
        broken = bytearray(whole)
        broken[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        file.write_bytes(broken)
        try:
            open_volume(file).open()[...]
            outcomes.add("read")
        except VolumeError:
            outcomes.add("refused")
    assert "refused" in outcomes


def test_pictures_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(noise((20, 31, 4)), mode="CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(VolumeError, match=r"a\.jpg is a JPEG of 8 bits and 4 colours"):
        open_volume(tmp_path / "a.jpg")
    folder = write(tmp_path / "raw", noise((5, 20, 31)))
    Image.fromarray(noise((20, 31), "uint16")).save(folder / "z1.png")
    with pytest.raises(VolumeError, match=r"z1\.png is uint16 \(20, 31\)"):
        open_volume(folder)


def test_kinds_of_files_do_not_mix(tmp_path: Path) -> None:
    data = noise((5, 20, 31))
    folder = write(tmp_path / "raw", data)
    Image.fromarray(data[0]).save(folder / "overview.jpg")
    volume = open_volume(folder)
    check_reads(volume, data)
    assert volume.notes == ("overview.jpg: no slice by its name",)
    tifffile.imwrite(folder / "z9.tif", data[0])
    with pytest.raises(VolumeError, match=r"z9\.tif is among 5 slices of PNG"):
        open_volume(folder)


def test_pictures_without_numbers_are_no_volume(tmp_path: Path) -> None:
    write(tmp_path / "slices", noise((5, 20, 31)))
    (tmp_path / "figures").mkdir()
    for name in ("overview.png", "histogram.png"):
        Image.fromarray(noise((20, 31))).save(tmp_path / "figures" / name)
    assert [volume.key for volume in list_arrays(tmp_path)] == ["slices"]


def test_a_picture_takes_no_more_memory_than_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "raw", noise((5, 20, 31)))
    file = folder / "z-2.png"
    header = bytearray(file.read_bytes())
    header[16:24] = bytes([0x7F, 0xFF, 0xFF, 0xFF] * 2)
    file.write_bytes(header)
    with pytest.raises(VolumeError, match=r"z-2\.png: a picture of"):
        picture.read_header(file)
