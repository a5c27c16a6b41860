"""Stored zips of Zarr and N5: read in place as folders are; what cannot be read in parts is refused."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import ngff_zarr
import numpy as np
import pytest
from boxes import MiB, memory_of_boxes
from bucket import Bucket
from hypothesis import given
from hypothesis import strategies as st
from volumes import noise, write_volume

from volpipe.errors import VolumeError
from volpipe.volumes.convert import convert
from volpipe.volumes.storage import paths, zipped
from volpipe.volumes.survey import measure_footprint
from volpipe.volumes.volume import list_arrays, open_volume

DATA = noise((20, 24, 32))


def packed(folder: Path, zip_: Path, inside: str = "", compression: int = zipfile.ZIP_STORED) -> Path:
    """Write a zip of the files in `folder`, below the folder `inside` of it."""
    with zipfile.ZipFile(zip_, "w", compression) as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            archive.write(file, f"{inside}{file.relative_to(folder)}")
    return zip_


@pytest.fixture
def n5(tmp_path: Path) -> Path:
    return write_volume(tmp_path / "a.n5", DATA, 8)


def test_an_ozx_of_ngff_zarr_is_read_with_its_levels_and_size(tmp_path: Path) -> None:
    image = ngff_zarr.to_ngff_image(DATA, dims=["z", "y", "x"], scale={"z": 4.0, "y": 2.0, "x": 2.0},
                                    axes_units=dict.fromkeys("zyx", "nanometer"))  # fmt: skip
    ngff_zarr.to_ome_zarr(str(tmp_path / "a.ozx"), ngff_zarr.to_multiscales(image, [2], chunks=8), version="0.6")
    volume = open_volume(tmp_path / "a.ozx")
    np.testing.assert_array_equal(volume.open()[...], DATA)
    assert (volume.voxel_size_nm, len(volume.levels)) == ((4, 2, 2), 2)
    coarse = open_volume(tmp_path / "a.ozx", level=1)
    assert (coarse.shape, coarse.voxel_size_nm) == ((10, 12, 16), (8, 4, 4))
    assert [each.key for each in list_arrays(tmp_path / "a.ozx")] == list(volume.levels)
    assert open_volume(tmp_path / "a.ozx" / volume.levels[1]) == coarse  # a path leads into it
    assert measure_footprint(volume).num_bytes == (tmp_path / "a.ozx").stat().st_size


@pytest.mark.parametrize("inside", ["", "a.n5/", "deep/er/"])
def test_n5_in_a_zip_is_read_wherever_it_lies_there(tmp_path: Path, n5: Path, inside: str) -> None:
    volume = open_volume(packed(n5, tmp_path / "a.zip", inside))
    np.testing.assert_array_equal(volume.open()[...], DATA)
    assert convert(volume, tmp_path / "copy.npy").shape == DATA.shape
    np.testing.assert_array_equal(np.load(tmp_path / "copy.npy"), DATA)


def test_a_chunk_that_is_missing_or_named_otherwise_is_as_in_a_folder(tmp_path: Path, n5: Path) -> None:
    (n5 / "raw/1/1/1").unlink()
    np.testing.assert_array_equal(open_volume(packed(n5, tmp_path / "a.zip")).open()[8:16, 8:16, 8:16], 0)
    for file in [each for each in (n5 / "raw").rglob("*") if each.is_file() and each.name.isdecimal()]:
        file.rename(file.with_name(f"{file.name}.gz"))
    otherwise = open_volume(packed(n5, tmp_path / "b.zip"))
    assert "chunk files are named 0/0/0.gz, not 0/0/0 as the metadata say" in " ".join(otherwise.notes)
    np.testing.assert_array_equal(otherwise.open()[16:], DATA[16:])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deflated", "its member .* is compressed by the zip, so that no part of it can be read alone: unpack it, or"),
        ("cut", r"has 3000 bytes, and no list of the zip's members at its end: it is cut short"),
        ("list", r"is a damaged zip of \d+ bytes: "),
        ("json", "its member raw/attributes.json is damaged; copy the file again"),
        ("empty", "no volume in .*: it holds no array"),
    ],
)
def test_a_zip_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path, n5: Path, name: str, words: str) -> None:
    place = packed(n5, tmp_path / "a.zip", compression=zipfile.ZIP_DEFLATED if name == "deflated" else 0)
    text = bytearray(place.read_bytes())
    if name == "cut":
        text = text[:3000]
    elif name == "list":
        text[text.rfind(b"PK\x01\x02") + 1] = 0
    elif name == "json":
        text[text.index(b'"dimensions"') + 1] ^= 1
    elif name == "empty":
        text = bytearray(b"PK\x05\x06" + bytes(18))
    place.write_bytes(text)
    with pytest.raises(VolumeError, match=words):
        open_volume(place)


def test_too_many_members_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    place = tmp_path / "many.zip"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("zarr.json", "{}")
    text = bytearray(place.read_bytes())
    end = text.rfind(b"PK\x05\x06")
    record = b"PK\x06\x06" + bytes(28) + (300_001).to_bytes(8, "little") + bytes(16)
    locator = b"PK\x06\x07" + bytes(4) + end.to_bytes(8, "little") + bytes(4)
    text[end + 10 : end + 12] = b"\xff\xff"
    place.write_bytes(bytes(text[:end]) + record + locator + bytes(text[end:]))
    with pytest.raises(VolumeError, match="has 300,001 members, and volpipe reads zips of up to 300,000; unpack it"):
        open_volume(place)


def test_a_large_zip_with_a_long_list_is_read(tmp_path: Path) -> None:
    """Of more members than the short form of the list can count."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(66_000):
            archive.writestr(f"raw/{number // 1000}/{number}", b"x")
    found = zipped.find(tmp_path / "a.zip/raw/65/65999")
    assert found is not None
    assert (len(found[0].names), found[0].read(found[1])) == (66_000, b"x")


@given(st.sets(st.text("ab/", min_size=1, max_size=6).filter(lambda name: "//" not in f"/{name}/"), max_size=12))
def test_names_in_a_zip_are_those_of_folders(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    files = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    folder = tmp_path_factory.mktemp("z")
    for name in files:
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tree" / name).write_text(name)
    (folder / "tree").mkdir(exist_ok=True)
    archive = packed(folder / "tree", folder / "a.zip")
    for inner in {"", *names, "none"}:
        there, here = folder / "tree" / inner, archive / inner
        assert paths.is_folder(here) == there.is_dir()
        assert paths.exists(here) == there.exists()
        if not inner:
            continue
        assert paths.is_file(here) == there.is_file()
        assert paths.size(here) == (there.stat().st_size if there.is_file() else None)
        assert paths.read(here, 99) == (there.read_bytes() if there.is_file() else None)
        if there.is_dir():
            assert paths.list_folders(here) == sorted(each.name for each in there.iterdir() if each.is_dir())
            assert set(paths.list_names(here, 99)) == {each.name for each in there.iterdir()}
            assert dict(paths.list_files(here)) == dict(paths.list_files(there))


def test_a_zip_is_written_to_by_nobody(tmp_path: Path, n5: Path) -> None:
    place = packed(n5, tmp_path / "a.zip")
    with pytest.raises(VolumeError, match="cannot be made: Not a directory"):
        convert(open_volume(n5), place / "b.zarr")


def test_a_box_of_a_large_zip_takes_the_memory_of_the_box(tmp_path: Path) -> None:
    script = f"""if True:
        import json, zipfile
        array = {{"zarr_format": 3, "node_type": "array", "shape": [3000, 5000, 4000], "data_type": "uint8",
                 "fill_value": 0, "chunk_grid": {{"name": "regular", "configuration": {{"chunk_shape": [64] * 3}}}},
                 "chunk_key_encoding": {{"name": "default"}}, "codecs": [{{"name": "bytes"}}]}}
        with zipfile.ZipFile({str(tmp_path / "a.zip")!r}, "w") as archive:
            archive.writestr("zarr.json", json.dumps(array))
            for place in range(20):
                archive.writestr(f"c/{{place}}/{{place}}/{{place}}", bytes(64 ** 3))"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert memory_of_boxes(tmp_path / "a.zip") < 8 * MiB


def test_a_zip_in_a_bucket_is_refused_by_name(bucket: Bucket, n5: Path, tmp_path: Path) -> None:
    bucket.files["a.zip"] = packed(n5, tmp_path / "a.zip").read_bytes()
    with pytest.raises(VolumeError, match=r"a.zip\S* is a zip, which volpipe reads on a disk alone; copy it to one"):
        open_volume(f"s3://{bucket.name}/a.zip/raw")
