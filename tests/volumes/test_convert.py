"""Copies from every format to every other: the same voxels, the same voxel size, whole or absent, in bounded memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import h5py
import mrcfile
import numpy as np
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from inline import Inline
from volumes import fingerprint, noise

import volpipe
from volpipe.cli.options import parse_sizes
from volpipe.errors import VolpipeError, VolumeError
from volpipe.evaluation.origins import provenances_of
from volpipe.geometry.grid import Box
from volpipe.recipes.inference import load_recipe
from volpipe.volumes import convert as module
from volpipe.volumes.convert import CODECS, Choice, convert, read_record
from volpipe.volumes.storage.quota import Quota
from volpipe.volumes.volume import ArraySpec, View, Volume, create_array, open_volume, open_writer, with_view
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

FORMATS = tuple(CODECS)
pytestmark = pytest.mark.usefixtures("_one_hdf5_process")

SIZE, ORIGIN = (6.5, 5.0, 4.0), (30.0, 20.0, 10.0)  # nm, z y x
ENDINGS = {
    "n5": "n5",
    "hdf5": "h5",
    "tiff": "tif",
    "mrc": "mrc",
    "npy": "npy",
    "precomputed": "precomputed",
}  # the others are .zarr


def make(path: Path, data: np.ndarray, chunk: int = 16) -> Volume:
    """Write `data`, (z, y, x) or (c, z, y, x), as N5 with a voxel size and an origin."""
    attributes = {"resolution": SIZE[::-1], "offset": ORIGIN[::-1], "units": ["nm"] * 3}
    spec = ArraySpec(
        data.shape, data.dtype, tuple(min(chunk, n) for n in data.shape), axes=("c", "z", "y", "x")[-data.ndim :],
        codec="gzip", attributes=attributes,
    )  # fmt: skip
    create_array(path, "raw", spec, "n5")
    open_writer(path, "raw").write(Box.from_shape(data.shape), data)
    return open_volume(path)


def place_of(folder: Path, format: str, name: str = "copy") -> Path:
    return folder / f"{name}.{ENDINGS.get(format, 'zarr')}"


def voxels(volume: Volume) -> np.ndarray:
    """Return all voxels as (c, z, y, x)."""
    return volume.open().read(Box.from_shape(volume.spatial_shape))


@pytest.mark.parametrize("format", FORMATS)
def test_a_copy_has_the_voxels_and_the_place_of_the_original(tmp_path: Path, format: str) -> None:
    data = noise((40, 37, 51), "uint16")
    told: list[tuple[int, int]] = []
    made = convert(
        make(tmp_path / "a.n5", data), place_of(tmp_path, format), Choice(format), on_progress=lambda *n: told.append(n)
    )
    assert np.array_equal(voxels(made)[0], data)
    assert made.dtype == data.dtype
    assert made.voxel_size_nm == (None if format == "npy" else pytest.approx(SIZE))
    assert made.origin_nm == (pytest.approx(ORIGIN) if format not in ("npy", "tiff") else (0, 0, 0))
    assert told == [(i, len(told)) for i in range(1, len(told) + 1)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.n5", place_of(tmp_path, format).name]


@pytest.mark.parametrize("format", ["n5", "ome-zarr-0.5", "tiff"])
@pytest.mark.parametrize("limit", [2**27, 2**10, 2**9, 2**8])  # bytes that are read at once: all, slabs, rows, pieces
def test_a_binned_copy_has_means_and_lies_in_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, limit: int
) -> None:
    monkeypatch.setattr(module, "MAX_BOX_BYTES", limit)
    data, sizes, downsample = noise((40, 36, 51)), [], module.downsample

    def noted(part: np.ndarray, *how: Any) -> np.ndarray:
        sizes.append(part.nbytes)
        return downsample(part, *how)

    monkeypatch.setattr(module, "downsample", noted)
    copy = convert(make(tmp_path / "a.n5", data), place_of(tmp_path, format), Choice(format, bin=(4, 2, 1)))
    assert max(sizes) <= limit
    expected = np.rint(data.reshape(10, 4, 18, 2, 51).mean(axis=(1, 3))).astype(np.uint8)
    np.testing.assert_array_equal(voxels(copy)[0], expected)
    assert copy.voxel_size_nm == pytest.approx((4 * SIZE[0], 2 * SIZE[1], SIZE[2]))
    if format != "tiff":  # which has no origin
        corner = [o - v / 2 for o, v in zip(ORIGIN, SIZE, strict=True)]
        assert [o - v / 2 for o, v in zip(copy.origin_nm, copy.voxel_size_nm, strict=True)] == pytest.approx(corner)


def test_what_has_no_mean_is_not_binned(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5", noise((40, 36, 51)))
    with pytest.raises(
        VolumeError, match=r"axis x of .* has 51 voxels, which 2 does not divide; .* whole number of bins"
    ):
        convert(source, tmp_path / "b.n5", Choice(bin=(4, 2, 2)))
    with pytest.raises(VolumeError, match=r"axis z .* which 0 does not divide"):
        convert(source, tmp_path / "b.n5", Choice(bin=(0, 1, 1)))
    with pytest.raises(VolumeError, match="holds uint64, which volpipe takes for labels"):
        convert(make(tmp_path / "c.n5", noise((8, 8, 8), "uint64")), tmp_path / "b.n5", Choice(bin=(2, 2, 2)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.n5", "c.n5"]


def test_every_format_becomes_every_other(tmp_path: Path) -> None:
    data = noise((11, 12, 13), "int16")
    first = make(tmp_path / "a.n5", data)
    made = {format: convert(first, place_of(tmp_path, format, f"from_{format}"), Choice(format)) for format in FORMATS}
    for (old, source), new in itertools.product(made.items(), FORMATS):
        is_given = (old, new) == ("npy", "precomputed")  # the one that cannot do without a size, of one that has none
        source = with_view(source, View(voxel_size_nm=SIZE)) if is_given else source
        copy = convert(source, place_of(tmp_path, new, f"{old}_to_{new}"), Choice(new))
        assert np.array_equal(voxels(copy)[0], data)
        known = "npy" not in (old, new) or is_given
        assert copy.voxel_size_nm == (pytest.approx(SIZE) if known else None)


def test_other_software_reads_what_is_written(tmp_path: Path) -> None:
    data = noise((11, 12, 13), "uint16")
    source = make(tmp_path / "a.n5", data)
    for name in ("b.h5", "b.tif", "b.ome.tif", "b.mrc", "b.npy", "b.zarr"):
        convert(source, tmp_path / name)
    with h5py.File(tmp_path / "b.h5") as file:
        assert np.array_equal(file["raw"][...], data)
        assert file["raw"].attrs["resolution"].tolist() == list(SIZE)
        assert file["raw"].attrs["element_size_um"] == pytest.approx([v / 1000 for v in SIZE])
        assert [dim.label for dim in file["raw"].dims] == ["z", "y", "x"]
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert np.array_equal(file.asarray(), data)
        assert (file.imagej_metadata["spacing"], file.imagej_metadata["unit"]) == (6.5, "nm")
        assert file.imagej_metadata["slices"] == 11
        assert file.pages[0].resolution == pytest.approx((1 / 4, 1 / 5))
    with tifffile.TiffFile(tmp_path / "b.ome.tif") as file:
        assert np.array_equal(file.asarray(), data)
        assert 'PhysicalSizeZ="6.5" PhysicalSizeZUnit="nm"' in file.ome_metadata
    assert mrcfile.validate(tmp_path / "b.mrc")
    with mrcfile.open(tmp_path / "b.mrc") as file:
        assert np.array_equal(file.data, data)
        assert [float(file.voxel_size[axis]) for axis in "xyz"] == pytest.approx([40, 50, 65])
        assert (float(file.header.dmin), float(file.header.dmax)) == (data.min(), data.max())
        assert float(file.header.rms) == pytest.approx(data.std(), rel=1e-5)
    assert np.array_equal(np.load(tmp_path / "b.npy"), data)
    assert np.array_equal(zarr.open_array(tmp_path / "b.zarr/s0", mode="r")[...], data)


@pytest.mark.parametrize("format", ["n5", "zarr2", "zarr3", "ome-zarr-0.4", "ome-zarr-0.5", "hdf5"])
def test_a_copy_says_what_it_was_made_from_and_how_that_was_made(tmp_path: Path, format: str) -> None:
    original, attributes = make(tmp_path / "in.n5", noise((20, 20, 20))), tmp_path / "in.n5" / "attributes.json"
    made = {"recipe": {"net": "unet3d"}, "input": {"path": "gone.n5", "key": "raw", "fingerprint": "f"}}
    attributes.write_text(json.dumps(json.loads(attributes.read_text()) | {"volpipe": made}))
    copy = convert(original, place_of(tmp_path, format), Choice(format))
    record = read_record(copy)
    assert (record["version"], record["made"]) == (volpipe.__version__, made)
    provenances = [(provenance.fingerprint, provenance.said["recipe"]) for provenance in provenances_of(copy)]
    assert provenances == ([] if format == "hdf5" else [("f", made["recipe"])])
    source = record["copied_from"]
    assert (source["path"], source["key"], source["bin"]) == (str(original.path), original.key, [1, 1, 1])
    again = read_record(convert(copy, tmp_path / "again.n5"))
    assert again["made"] == record and again["copied_from"]["path"] == str(copy.path)


def test_a_copy_of_a_file_without_attributes_says_where_it_is_from(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise((8, 8, 8)))
    tifffile.imwrite(tmp_path / "a.tif", noise((8, 8, 8)))
    for name in ("a.npy", "a.tif"):
        record = read_record(convert(open_volume(tmp_path / name), tmp_path / f"{name}.n5"))
        assert record["copied_from"]["path"].endswith(name) and "made" not in record


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint64", "float16", "float32", "float64"])
def test_types_are_kept_or_refused(tmp_path: Path, dtype: str) -> None:
    data = noise((5, 12, 13), dtype)
    np.save(tmp_path / "a.npy", data)
    source = open_volume(tmp_path / "a.npy", view=View(voxel_size_nm=SIZE))
    lacking = {"n5": ("float16",), "mrc": ("int32", "uint64", "float64"), "precomputed": ("float16", "float64")}
    for format in FORMATS:
        if dtype in lacking.get(format, ()):
            with pytest.raises(VolumeError, match=f"has no {dtype}"):
                convert(source, place_of(tmp_path, format, format), Choice(format))
            continue
        made = convert(source, place_of(tmp_path, format, format), Choice(format))
        assert np.array_equal(voxels(made)[0], data)
        assert made.dtype == ("uint16" if (format, dtype) == ("mrc", "uint8") else dtype)


def test_channels_are_kept_and_mrc_refuses_them(tmp_path: Path) -> None:
    data = noise((2, 11, 12, 13), "uint16")
    source = make(tmp_path / "a.n5", data)
    for format in FORMATS:
        if format == "mrc":
            with pytest.raises(VolumeError, match="MRC has no channels, and the volume has 2"):
                convert(source, tmp_path / "a.mrc")
            continue
        made = convert(source, place_of(tmp_path, format, format), Choice(format))
        assert np.array_equal(voxels(made), data)
        assert made.num_channels == 2
    assert made.axes == ("c", "z", "y", "x")
    again = convert(open_volume(tmp_path / "tiff.tif"), tmp_path / "again.n5")
    assert np.array_equal(voxels(again), data)


@pytest.mark.parametrize(("format", "codec"), [(format, codec) for format in FORMATS for codec in CODECS[format]])
def test_every_codec(tmp_path: Path, format: str, codec: str) -> None:
    data = noise((9, 12, 13), "uint32" if codec == "compressed_segmentation" else "uint16")
    made = convert(make(tmp_path / "a.n5", data), place_of(tmp_path, format), Choice(format, codec=codec))
    expected = {"gzip": "deflate", "zstd": "zstd", "raw": "raw"}[codec] if format == "tiff" else codec
    assert made.codec.split()[0] == expected
    assert np.array_equal(voxels(made)[0], data)


@pytest.mark.long
@pytest.mark.parametrize("format", FORMATS)
def test_workers_do_not_change_a_byte(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BOX_BYTES", 1)
    monkeypatch.setattr(module, "MAX_BOX_BYTES", 20_000)  # so that there are many boxes
    data = noise((40, 37, 51), "uint16")
    source = make(tmp_path / "a.n5", data)
    small = {"chunk": (8, 16, 16)} if format not in ("tiff", "mrc", "npy") else {}
    small |= {"shard": (16, 32, 32)} if format in ("zarr3", "ome-zarr-0.5", "precomputed") else {}
    told: list[tuple[int, int]] = []
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        convert(
            source, place_of(tmp_path / str(workers), format), Choice(format, **small), workers=workers,
            on_progress=lambda *n: told.append(n),
        )  # fmt: skip
    assert len(told) > 10
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "2")
    assert np.array_equal(voxels(open_volume(place_of(tmp_path / "2", format)))[0], data)


@settings(max_examples=25)
@given(draw=st.data())
def test_any_boxes_copy_every_voxel_once(tmp_path_factory: pytest.TempPathFactory, draw: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("any")
    data = noise(tuple(draw.draw(st.integers(1, 20)) for _ in range(3)), "uint8", 1)
    source = make(folder / "a.n5", data, chunk=draw.draw(st.integers(1, 9)))
    format = draw.draw(st.sampled_from(["n5", "zarr3", "hdf5", "tiff", "npy"]))
    chunk = tuple(draw.draw(st.integers(1, 9)) for _ in range(3)) if format not in ("tiff", "npy") else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_BOX_BYTES", draw.draw(st.integers(1, 2000)))
        patch.setattr(module, "MAX_BOX_BYTES", draw.draw(st.integers(1, 2000)))
        made = convert(source, place_of(folder, format), Choice(format, chunk=chunk))
    assert np.array_equal(voxels(made)[0], data)


def test_an_array_joins_a_container_that_exists(tmp_path: Path) -> None:
    data = noise((9, 12, 13))
    source = make(tmp_path / "a.n5", data)
    made = convert(source, tmp_path / "a.n5/copies/second")
    assert (made.path, made.key) == (str(tmp_path / "a.n5"), "copies/second")
    assert np.array_equal(voxels(made)[0], data)
    assert np.array_equal(voxels(open_volume(tmp_path / "a.n5/raw"))[0], data)
    made = convert(source, tmp_path / "b.zarr/images/one")
    assert made.key == "images/one/s0"
    convert(source, tmp_path / "b.zarr/images/two")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.n5", "b.zarr"]
    made = convert(source, tmp_path / "c.h5/deep/raw")
    assert made.key == "deep/raw"
    with pytest.raises(VolumeError, match="is n5; zarr3 cannot be written into it"):
        convert(source, tmp_path / "a.n5/third", Choice("zarr3"))


def test_nothing_is_overwritten_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5", noise((9, 12, 13)))
    (tmp_path / "b.tif").write_bytes(b"precious")
    (tmp_path / "c.zarr").mkdir()
    (tmp_path / "d.npy.partial").touch()
    (tmp_path / "f.npy.partial").mkdir()
    (tmp_path / "f.npy.partial/mine").touch()
    expected = {
        ("b.tif", Choice()): "exists already",
        ("c.zarr", Choice()): "exists already",
        ("a.n5", Choice()): "exists already",
        ("a.n5/raw", Choice()): "exists already",
        ("a.n5/raw/inside", Choice()): "inside the volume",
        ("f.npy", Choice()): r"f\.npy\.partial exists, and is no copy that was stopped",
        ("d.npy", Choice()): r"d\.npy\.partial cannot be made: File exists",
        ("e.xyz", Choice()): "no format is known by that name",
        ("e.xyz", Choice("jpeg")): "format 'jpeg' is not known; use n5",
        ("e.tif/raw", Choice()): "would be a file of one array",
        ("e.h5", Choice(codec="zstd")): "hdf5 is not written with codec 'zstd'; use gzip, raw",
        ("e.tif", Choice(chunk=(8, 8, 8))): "tiff has no chunks",
        ("e.n5", Choice(shard=(8, 8, 8))): "n5 has no shards",
        ("e.zarr", Choice(chunk=(8, 8, 8), shard=(12, 8, 8))): "shard 12 is not a multiple of chunk 8",
    }
    before = fingerprint(tmp_path)
    for (name, choice), match in expected.items():
        with pytest.raises(VolumeError, match=match):
            convert(source, tmp_path / name, choice)
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize("name", ["b.h5", "b.tif", "b.npy"])
def test_a_copy_in_one_file_is_stored_before_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    synced, fsync = list[tuple[str, int]](), os.fsync

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((str(path), path.stat().st_size if path.is_file() else 0))
        fsync(descriptor)

    np.save(tmp_path / "a.npy", noise((8, 8, 8)))
    monkeypatch.setattr(os, "fsync", note)
    convert(open_volume(tmp_path / "a.npy"), tmp_path / name)
    *_, (draft, size), (folder, _) = synced
    assert draft.startswith(f"{tmp_path}/") and size == (tmp_path / name).stat().st_size and folder == str(tmp_path)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    data = noise((40, 50, 60))
    source = make(tmp_path / "a.n5", data)
    (tmp_path / "a.n5/raw/2/2/2").write_bytes(b"damage")
    for format, workers in itertools.product(("n5", "ome-zarr-0.5", "hdf5", "tiff", "npy"), (1, 2)):
        with pytest.raises(VolumeError, match=r"a\.n5:raw"):
            convert(source, place_of(tmp_path, format), Choice(format), workers=workers)
    assert [p.name for p in tmp_path.iterdir()] == ["a.n5"]


def test_a_place_where_nothing_can_be_made_is_an_error(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5", noise((9, 12, 13)))
    (tmp_path / "file").touch()
    with pytest.raises(VolumeError, match="cannot be made"):
        convert(source, tmp_path / "file/b.zarr")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.n5", "file"]


def test_what_others_make_meanwhile_stays(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5", noise((9, 12, 13)))
    for name in ("b.npy", "b.zarr", "a.n5/second"):
        place = tmp_path / name
        with pytest.raises(VolumeError, match="was made by somebody else meanwhile"):
            convert(source, place, on_progress=lambda done, total, place=place: place.mkdir())
        assert place.is_dir()
        assert not list(place.iterdir())
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_too_small_for_a_raw_copy_is_refused_before_the_start(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": (10000,) * 3})
        stream.truncate(stream.tell() + 10**12)
    for name in ("b.tif", "b.mrc", "b.npy"):
        with pytest.raises(VolumeError, match=r"needs \d+ bytes and .* has \d+; make room"):
            convert(open_volume(tmp_path / "a.npy"), tmp_path / name)


def test_a_quota_too_small_for_a_copy_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "a.n5", noise((9, 12, 13)))
    found = [Quota("user ada", None, 5), Quota("group lab", 9 * 12 * 13 - 1, None)]
    monkeypatch.setattr(module, "find_quotas", lambda folder: found if folder == tmp_path else [])
    with pytest.raises(VolumeError, match=r"needs 1404 bytes and the quota of group lab leaves 1403; make room"):
        convert(source, tmp_path / "b.npy")
    found[1] = Quota("group lab", 9 * 12 * 13, None)
    convert(source, tmp_path / "b.npy")


def test_sizes_are_one_number_or_three() -> None:
    assert parse_sizes("64", "--chunk") == (64, 64, 64)
    assert parse_sizes("1,2,3", "--chunk") == (1, 2, 3)
    assert parse_sizes("1x2x3", "--shape") == (1, 2, 3)
    for text in ("", "1,2", "0", "a", "1,2,3,4", "1,,2"):
        with pytest.raises(VolpipeError, match="--chunk"):
            parse_sizes(text, "--chunk")


@pytest.mark.parametrize("name", ["b.h5", "b.tif", "b.mrc", "b.npy", "slices"])
def test_a_run_reads_every_format_where_it_lies(tmp_path: Path, name: str) -> None:
    data = noise((20, 30, 40), "int16")
    if name == "slices":
        (tmp_path / name).mkdir()
        for z, plane in enumerate(data):
            tifffile.imwrite(tmp_path / name / f"{z}.tif", plane)
    else:
        convert(make(tmp_path / "a.n5", data), tmp_path / name, Choice(codec="raw"))
    chosen = ["net.name=identity", "windows.shape=[16,16,16]", "windows.block=[1,1,2]", "normalise.method=zscore"]
    plan = prepare(str(tmp_path / name), load_recipe(None, chosen), tmp_path / "out.zarr", tmp_path)
    assert execute(plan, Inline(slots=2).start).missing == []
    assert np.array_equal(voxels(open_volume(tmp_path / "out.zarr"))[0], data)


@pytest.mark.real
@pytest.mark.parametrize(
    "name", ["fibsem_medulla/tiny96_raw.tif", "gala_tinyfib/test_gt.tif", "confocal_plant/1135_raw.tif"]
)
def test_real_volumes_keep_their_hash_through_every_format(shared: Path, tmp_path: Path, name: str) -> None:
    folder, _, file = name.partition("/")
    noted = json.loads((shared / "MANIFEST.json").read_text())[folder]
    (expected,) = (entry["sha256_array"] for entry in noted if entry["file"] == file)
    volume = open_volume(shared / name)
    for format in (format for format in FORMATS if format != "mrc"):  # which would make 16 bits of 8
        placed = with_view(volume, View(voxel_size_nm=SIZE))  # which precomputed cannot do without
        volume = convert(placed, place_of(tmp_path, format, format), Choice(format))
        assert hashlib.sha256(voxels(volume).tobytes()).hexdigest() == expected
