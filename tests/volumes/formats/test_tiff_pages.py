"""TIFF pages that are stored in different ways, or whose values are no plain grey: right, or refused with the page."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from boxes import check_reads
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.volume import list_arrays, open_volume

ODD = 5  # the page that differs: tifffile itself compares four others


def write_pages(path: Path, data: np.ndarray, usual: dict[str, Any], odd: dict[str, Any]) -> Path:
    """Write each plane as a page, the one at ODD with `odd` settings."""
    with tifffile.TiffWriter(path) as file:
        for z, plane in enumerate(data):
            settings = {"photometric": "minisblack"} | usual | (odd if z == ODD else {})
            file.write(settings.pop("data", plane), metadata=None, contiguous=False, **settings)
    return path


def write_tag(path: Path, tag: int, value: int) -> None:
    """Give the page at ODD another value of a tag."""
    with tifffile.TiffFile(path) as file:
        place = file.pages[ODD].aspage().tags[tag].valueoffset
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(struct.pack("<H", value))


@pytest.mark.parametrize("usual", [{}, {"compression": "lzw"}, {"compression": "lzw", "tile": (16, 16)}])
@pytest.mark.parametrize(
    "odd",
    [
        {"compression": "lzw", "predictor": 2},
        {"compression": "zlib"},
        {"compression": None},
        {"compression": "lzw", "rowsperstrip": 3},
        {"compression": "zstd", "tile": (32, 16), "predictor": 2},
    ],
)
def test_a_page_stored_in_another_way_is_read_by_its_own_tags(
    tmp_path: Path, usual: dict[str, Any], odd: dict[str, Any]
) -> None:
    data = noise((12, 20, 24), "uint16")
    check_reads(open_volume(write_pages(tmp_path / "a.tif", data, usual, odd)), data)


@pytest.mark.parametrize("form", [{"imagej": True}, {"ome": True}, {}])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_one_page_that_differs_is_read_right_or_named_in_every_dialect(
    tmp_path: Path, form: dict[str, Any], compression: str | None
) -> None:
    data = noise((12, 20, 24), "uint16")
    path = tmp_path / "a.tif"
    settings = {
        "photometric": "minisblack",
        "compression": compression,
        "rowsperstrip": 20,
        "metadata": {"axes": "ZYX"},
    }
    tifffile.imwrite(path, data, **settings | form)
    write_tag(path, 262, 0)  # white is 0
    expected = data.copy()
    expected[ODD] = 65535 - data[ODD]
    volume = open_volume(path)
    check_reads(volume, expected)
    assert any("MINISWHITE" in note for note in volume.notes)
    write_tag(path, 262, 1)
    write_tag(path, 257, 19)
    with pytest.raises(VolumeError, match=r"page 5, .*uint16 \(19, 24\) .*first uint16 \(20, 24\)"):
        open_volume(path)


@pytest.mark.parametrize(("dtype", "black"), [("uint8", 255), ("uint16", 65535), ("int16", -1), ("float32", None)])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_where_white_is_zero_values_are_inverted_and_it_is_said(
    tmp_path: Path, dtype: str, black: int | None, compression: str | None
) -> None:
    data = noise((5, 20, 24), dtype)
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="miniswhite", compression=compression)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, data if black is None else data.dtype.type(black) - data)
    assert "MINISWHITE" in volume.notes[-1]


@pytest.mark.parametrize("bits", [2, 4, 12, 14])
def test_packed_values_are_unpacked_and_inverted_within_their_bits(tmp_path: Path, bits: int) -> None:
    data = (noise((5, 20, 25), "uint16") % 2**bits).astype(np.uint8 if bits < 9 else np.uint16)
    for photometric, expected in (("minisblack", data), ("miniswhite", 2**bits - 1 - data)):
        path = tmp_path / f"{photometric}.tif"
        tifffile.imwrite(path, data, bitspersample=bits, photometric=photometric)
        check_reads(open_volume(path), expected)


def test_masks_as_tifffile_writes_them_keep_true_as_one(tmp_path: Path) -> None:
    data = noise((5, 20, 24)) > 99
    tifffile.imwrite(tmp_path / "a.tif", data)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, data.astype(np.uint8))
    assert "MINISWHITE" in volume.notes[-1]


@pytest.mark.parametrize(
    ("shape", "settings", "note"),
    [
        ((5, 32, 48), {"photometric": "palette", "colormap": noise((3, 256), "uint16")}, "palette"),
        ((5, 32, 48), {"photometric": "palette", "colormap": np.tile(np.arange(256, dtype="u2") * 257, (3, 1))}, ""),
        ((5, 32, 48, 3), {"photometric": "rgb"}, ""),
        ((5, 32, 48, 4), {"photometric": "rgb", "extrasamples": ["unassalpha"], "compression": "lzw"}, ""),
        ((5, 4, 32, 48), {"photometric": "separated", "planarconfig": "separate"}, "CMYK"),
        ((5, 32, 48, 3), {"photometric": "cielab"}, "CIELAB"),
        ((5, 32, 48, 3), {"photometric": "ycbcr"}, "YCbCr"),
        ((5, 32, 48, 3), {"photometric": "rgb", "compression": "jpeg", "subsampling": (2, 2)}, ""),
        ((5, 32, 48), {"photometric": "minisblack", "compression": "jpeg"}, ""),
    ],
)
def test_colours_are_what_tifffile_reads_and_named_where_they_are_not_rgb(
    tmp_path: Path, shape: tuple[int, ...], settings: dict[str, Any], note: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noise(shape), **settings)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, tifffile.imread(tmp_path / "a.tif"))
    notes = [text for text in volume.notes if "guessed" not in text]
    assert len(notes) == bool(note)
    assert note in " ".join(notes)


@pytest.mark.parametrize("dtype", ["uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_predictors_of_both_byte_orders(tmp_path: Path, dtype: str, byteorder: str) -> None:
    data = noise((5, 20, 24), dtype)
    predictor = 2 if dtype == "uint16" else 3
    settings = {"photometric": "minisblack", "compression": "lzw", "predictor": predictor, "rowsperstrip": 7}
    tifffile.imwrite(tmp_path / "a.tif", data, byteorder=byteorder, **settings)
    check_reads(open_volume(tmp_path / "a.tif"), data)


def test_unknown_interpretations_are_refused_by_number(tmp_path: Path) -> None:
    write_pages(tmp_path / "a.tif", noise((ODD + 1, 20, 24)), {}, {})
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as file:
        for page in file.pages:
            page.aspage().tags[262].overwrite(32845)
    with pytest.raises(VolumeError, match="photometric interpretation 32845"):
        open_volume(tmp_path / "a.tif")


@pytest.mark.parametrize("settings", [{}, {"compression": "zlib"}, {"photometric": "rgb"}])
@pytest.mark.parametrize("has_descriptions", [True, False])
def test_images_written_one_by_one_are_a_stack(
    tmp_path: Path, settings: dict[str, Any], has_descriptions: bool
) -> None:
    data = noise((12, 20, 24, 3) if settings.get("photometric") else (12, 20, 24))
    for plane in data:
        described = {} if has_descriptions else {"metadata": None}
        tifffile.imwrite(tmp_path / "a.tif", plane, append=True, **{"photometric": "minisblack"} | settings | described)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, data)
    assert any("12 images of one page" in note for note in volume.notes) == has_descriptions
    assert [each.key for each in list_arrays(tmp_path / "a.tif")] == [""]
    if has_descriptions:
        check_reads(open_volume(tmp_path / "a.tif", "7"), data[7])


def test_images_of_different_shapes_are_not_joined(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for n in (20, 20, 21):
            file.write(noise((n, 24)))
    with pytest.raises(
        VolumeError, match=r"holds 3 volumes \(page 2, .*\(21, 24\).*\); choose one by its key: 0, 1, 2"
    ):
        open_volume(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"data": noise((19, 24), "uint16")}, r"uint16 \(19, 24\) \(grey\) and the first uint16 \(20, 24\)"),
        ({"data": noise((20, 24), "int16")}, "int16"),
        ({"data": noise((20, 24, 3), "uint16"), "photometric": "rgb"}, "RGB"),
    ],
)
def test_a_page_of_another_kind_is_refused_by_its_number(tmp_path: Path, odd: dict[str, Any], words: str) -> None:
    path = write_pages(tmp_path / "a.tif", noise((12, 20, 24), "uint16"), {}, odd)
    with pytest.raises(VolumeError, match=f"page 5, counted from 0, is .*{words}.*choose one by its key: 0, 1"):
        open_volume(path)
    assert any("page 5 of the file" in note for note in open_volume(path, "0").notes)
