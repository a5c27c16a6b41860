"""Files of one array: NumPy, MRC as mrcfile and IMOD write it, and PNG and JPEG slices; odd, damaged, and real ones."""

from __future__ import annotations

import hashlib
import importlib
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import pytest
import tifffile
from boxes import MiB, check_reads, indexes
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from volumes import noise, outcomes_of_damage

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats import picture
from volpipe.volumes.formats.flat import FlatArray, RawFile
from volpipe.volumes.storage.tensorstore import transferred
from volpipe.volumes.volume import list_arrays, open_volume


def save(path: Path, data: np.ndarray) -> Path:
    np.save(path, data)
    return path


@settings(max_examples=200)
@given(st.data(), st.sampled_from(["u1", "<u2", ">u2", "<f4", ">f8"]), st.integers(0, 40))
def test_any_index_of_a_flat_array_is_what_numpy_has_there(draw: st.DataObject, dtype: str, offset: int) -> None:
    shape = tuple(draw.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    data = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    index = draw.draw(indexes(shape))
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(offset) + data.tobytes())
        file.flush()
        found = FlatArray(RawFile(Path(file.name)), offset, np.dtype(dtype), shape).read(index)
    assert found.dtype == np.dtype(dtype).newbyteorder("=")
    assert found.shape == data[index].shape
    assert np.array_equal(found, data[index])


def test_what_is_stepped_over_is_not_read(tmp_path: Path) -> None:
    shape = (1000, 5000, 4000)
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        stream.truncate(stream.tell() + int(np.prod(shape)))
    reader = open_volume(tmp_path / "a.npy").open()
    tracemalloc.start()
    try:
        for index in ((slice(0, 1000, 999),), (slice(None), slice(0, 1), slice(0, 1)), (0, slice(None), slice(7, 9))):
            found = reader[index]
            assert tracemalloc.get_traced_memory()[1] < found.nbytes + 16 * MiB
            del found
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()


def test_rows_far_from_each_other_are_read_one_by_one(tmp_path: Path) -> None:
    data = noise((3, 5, 9000), "uint8")
    array = FlatArray(RawFile(save(tmp_path / "a.npy", data)), 128, data.dtype, data.shape)
    box = (slice(1, 3), slice(1, 5, 2), slice(4000, 4900, 3))
    assert np.array_equal(array.read(box), data[box])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_fortran_order_and_all_versions(tmp_path: Path, version: tuple[int, int]) -> None:
    data = noise((2, 5, 7, 9), "int16")
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array(stream, np.asfortranarray(data), version=version)
    volume = open_volume(tmp_path / "a.npy")
    assert volume.axes == ("c", "z", "y", "x")
    assert volume.chunks == (2, 5, 1, 1)
    check_reads(volume, data)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (np.array(["a", "b"]), "holds <U1"),
        (np.zeros((2, 3), [("a", "f4"), ("b", "i2")]), "holds"),
        (np.zeros((2, 3), complex), "holds complex128"),
        (np.array([object()]), "holds object"),
        (np.zeros((0, 3)), "shape"),
        (np.float32(1), "shape"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, data: np.ndarray, match: str) -> None:
    with pytest.raises(VolumeError, match=match):
        open_volume(save(tmp_path / "a.npy", data))


def test_the_bytes_of_a_file_decide_and_not_its_name(tmp_path: Path) -> None:
    data = noise((4, 5, 6))
    save(tmp_path / "a.npy", data).rename(tmp_path / "volume.tif")
    assert open_volume(tmp_path / "volume.tif").format == "npy"
    (tmp_path / "b.h5").write_bytes(b"<html>not found</html>")
    with pytest.raises(VolumeError, match=r"b\.h5 is a file of 22 bytes in no format.*HDF5, TIFF, PNG"):
        open_volume(tmp_path / "b.h5")
    (tmp_path / "empty.npy").touch()
    with pytest.raises(VolumeError, match="0 bytes"):
        open_volume(tmp_path / "empty.npy")


def test_bytes_that_are_read_are_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 10, 10), np.uint16))
    reader, before = open_volume(tmp_path / "a.npy").open(), transferred()
    reader.read(Box((1, 0, 0), (3, 10, 10)))
    assert transferred().read - before.read == 2 * 10 * 10 * 2


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_a_packed_file_is_to_be_unpacked_first(tmp_path: Path, module: str) -> None:
    packed = importlib.import_module(module).compress(save(tmp_path / "a.npy", noise((4, 5, 6))).read_bytes())
    (tmp_path / "a.npy.packed").write_bytes(packed)
    with pytest.raises(VolumeError, match=r"a\.npy\.packed is packed by (gzip|bzip2|xz), .* unpack it first"):
        open_volume(tmp_path / "a.npy.packed")


def write(path: Path, data: np.ndarray, change: Callable[[mrcfile.mrcfile.MrcFile], None] | None = None) -> Path:
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(data)
        if change:
            change(file)
    return path


def patch(path: Path, offset: int, text: bytes) -> Path:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(text)
    return path


def test_voxel_size_is_the_cell_over_the_grid_in_angstrom(tmp_path: Path) -> None:
    def change(file: mrcfile.mrcfile.MrcFile) -> None:
        file.voxel_size = (4.0, 5.0, 6.5)  # x, y, z
        file.header.origin = (10.0, 20.0, 30.0)

    volume = open_volume(write(tmp_path / "a.mrc", noise((5, 6, 7), "int8"), change))
    assert volume.voxel_size_nm == pytest.approx((0.65, 0.5, 0.4))
    assert volume.origin_nm == pytest.approx((3.0, 2.0, 1.0))


def test_a_cell_of_zero_is_an_unknown_voxel_size(tmp_path: Path) -> None:
    volume = open_volume(write(tmp_path / "a.mrc", noise((5, 6, 7), "int8")))
    assert volume.voxel_size_nm is None


@pytest.mark.parametrize("columns", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (2, 3, 1), (1, 3, 2), (3, 1, 2)])
def test_columns_rows_and_sections_may_be_any_axes(tmp_path: Path, columns: tuple[int, int, int]) -> None:
    data = noise((5, 6, 7), "int16")

    def change(file: mrcfile.mrcfile.MrcFile) -> None:
        file.header.mapc, file.header.mapr, file.header.maps = columns
        file.header.mx, file.header.my, file.header.mz = 10, 20, 40
        file.header.cella = (100.0, 400.0, 1600.0)
        file.nstart = (1, 2, 3)  # of columns, rows, sections

    volume = open_volume(write(tmp_path / "a.mrc", data, change))
    names = ["xyz"[n - 1] for n in columns[::-1]]  # of sections, rows, columns
    assert volume.axes == tuple(names)
    assert volume.voxel_size_nm == pytest.approx((4.0, 2.0, 1.0))
    start = dict(zip(names, (3, 2, 1), strict=True))
    assert volume.origin_nm == pytest.approx((4.0 * start["z"], 2.0 * start["y"], start["x"]))
    check_reads(volume, data)
    expected = data.transpose([names.index(axis) for axis in "zyx"])
    assert np.array_equal(volume.open().read(Box.from_shape(expected.shape))[0], expected)


def test_an_extended_header_is_passed_over(tmp_path: Path) -> None:
    data = noise((5, 6, 7), "float32")

    def change(file: mrcfile.mrcfile.MrcFile) -> None:
        file.set_extended_header(np.arange(333, dtype=np.int8))

    check_reads(open_volume(write(tmp_path / "a.mrc", data, change)), data)


def test_bytes_are_signed_unless_imod_or_the_maximum_says_otherwise(tmp_path: Path) -> None:
    data = noise((5, 6, 7), "int8")
    path = write(tmp_path / "a.mrc", data)
    check_reads(open_volume(path), data)
    patch(path, 152, (1146047817).to_bytes(4, "little") + (1).to_bytes(4, "little"))
    check_reads(open_volume(path), data)
    patch(path, 156, (0).to_bytes(4, "little"))
    check_reads(open_volume(path), data.view(np.uint8))
    patch(path, 152, bytes(8))
    patch(path, 80, np.float32(200).tobytes())
    check_reads(open_volume(path), data.view(np.uint8))


def test_the_origin_of_imod_is_minus_that_of_others_without_its_flag_and_a_version(tmp_path: Path) -> None:
    def change(file: mrcfile.mrcfile.MrcFile) -> None:
        file.voxel_size = 10.0
        file.header.origin = (-10.0, -20.0, -30.0)

    path = write(tmp_path / "a.mrc", noise((5, 6, 7), "int16"), change)
    patch(path, 152, (1146047817).to_bytes(4, "little"))
    assert open_volume(path).origin_nm == pytest.approx((-3.0, -2.0, -1.0))  # as the header has a version
    patch(path, 108, bytes(4))
    assert open_volume(path).origin_nm == pytest.approx((3.0, 2.0, 1.0))
    patch(path, 156, (4).to_bytes(4, "little"))
    assert open_volume(path).origin_nm == pytest.approx((-3.0, -2.0, -1.0))


def test_a_stack_of_volumes_is_refused_unless_it_is_of_one(tmp_path: Path) -> None:
    stack = noise((2, 5, 6, 7), "int16")
    with mrcfile.new(tmp_path / "one.mrc") as file:
        file.set_data(stack[:1])
    check_reads(open_volume(tmp_path / "one.mrc"), stack[:1])
    with mrcfile.new(tmp_path / "two.mrc") as file:
        file.set_data(stack)
    with pytest.raises(VolumeError, match="has 2 points in time"):
        open_volume(tmp_path / "two.mrc")


def test_a_single_image_is_a_volume_of_one_plane(tmp_path: Path) -> None:
    data = noise((6, 7), "int16")
    check_reads(open_volume(write(tmp_path / "a.mrc", data)), data[np.newaxis])


def test_what_is_damaged_or_unknown_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mrc", noise((5, 6, 7), "int16"))
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(VolumeError, match="has 700 bytes, an MRC header has 1024"):
        open_volume(path)
    for offset, text, match in (
        (12, (4).to_bytes(4, "little"), "mode 4, complex floats"),
        (12, (77).to_bytes(4, "little"), "mode 77 and shape"),
        (0, (-7).to_bytes(4, "little", signed=True), r"shape \(-7, 6, 5\) make no MRC header"),
        (64, (1).to_bytes(4, "little") * 3, r"axes \[1, 1, 1\]"),
        (92, (-2000).to_bytes(4, "little", signed=True), "extended header"),
    ):
        path.write_bytes(whole)
        with pytest.raises(VolumeError, match=match):
            open_volume(patch(path, offset, text))


@pytest.mark.parametrize("name", ["a.st", "a.dat"])
@pytest.mark.parametrize(("dtype", "order"), [("int16", "<"), ("float32", ">"), ("int8", "<"), ("int8", ">")])
@pytest.mark.parametrize("marks", [b"MAP \x11\x11\0\0", b"MAP \x44\x44\0\0", bytes(8), b"PAM!\x44\x44\0\0"])
def test_headers_without_the_mark_or_with_another_stamp_are_read_with_a_note(
    tmp_path: Path, name: str, dtype: str, order: str, marks: bytes
) -> None:
    data = noise((5, 6, 7), dtype)
    path = write(tmp_path / name, data)
    raw = bytearray(path.read_bytes()[:1024])
    for first, last in ((0, 104), (108, 208), (216, 224)):  # numbers of four bytes; labels and marks are text
        words = np.frombuffer(bytes(raw[first:last]), "<i4")
        raw[first:last] = words.astype(f"{order}i4").tobytes()
    raw[208:216] = marks
    path.write_bytes(bytes(raw) + data.astype(data.dtype.newbyteorder(order)).tobytes())
    volume = open_volume(path)
    check_reads(volume, data)
    stamped = {0x44: "<", 0x11: ">"}.get(marks[4], order)
    text = "; ".join(volume.notes)
    assert ("its machine stamp says" in text) == (stamped != order)
    assert ("no mark 'MAP '" in text) == (not marks.startswith(b"MAP"))


def test_a_file_that_is_no_mrc_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "a.mrc").write_bytes(b"no header at all" * 100)
    (tmp_path / "a.any").write_bytes(np.array([4, 4, 4, 0], "<i4").tobytes() + bytes(2000))
    for name in ("a.mrc", "a.any"):
        with pytest.raises(VolumeError, match="in no format"):
            open_volume(tmp_path / name)


@pytest.mark.parametrize(
    ("least", "greatest", "is_unsigned", "words"),
    [
        (0, -1, False, "bytes are read as signed"),
        (0, 0, False, "bytes are read as signed"),
        (float("nan"), 1, False, "bytes are read as signed"),
        (-3, 90, False, ""),
        (0, 255, True, ""),
        (0, 127, False, ""),
        (-5, 200, True, "the header says -5 to 200, which no byte has"),
    ],
)
def test_the_sign_of_bytes_is_by_their_range_or_assumed_with_a_note(
    tmp_path: Path, least: float, greatest: float, is_unsigned: bool, words: str
) -> None:
    data = noise((5, 6, 7), "int8")
    path = patch(write(tmp_path / "a.mrc", data), 76, np.array([least, greatest], "<f4").tobytes())
    volume = open_volume(path)
    check_reads(volume, data.view(np.uint8) if is_unsigned else data)
    notes = [note for note in volume.notes if "bytes are" in note]
    assert (words in notes[0]) if words else not notes


def test_what_a_header_leaves_open_is_said(tmp_path: Path) -> None:
    def change(file: mrcfile.mrcfile.MrcFile) -> None:
        file.voxel_size = 8.0
        file.nstart = (5, 0, 0)
        file.header.origin = (80.0, 0.0, 0.0)

    data = noise((5, 6, 7), "int16")
    path = write(tmp_path / "a.mrc", data, change)
    whole = path.read_bytes()
    cases: list[tuple[int, bytes, str]] = [
        (len(whole), bytes(512), "512 bytes behind its voxels"),
        (52, np.array([90, 90, 120], "<f4").tobytes(), "angles of 120 degrees"),
        (80, np.float32(40_000).tobytes(), "the header says up to 40000: larger ones are negative"),
        (0, b"", "two places, ORIGIN and NSTART"),
        (28, np.array([0, 0, 0], "<i4").tobytes(), "voxel size unknown: its header says a cell of"),
        (40, np.array([7, 6, 5], "<f4").tobytes(), "a voxel of 1 Å is also what programs write"),
        (36, np.array([1], "<i4").tobytes() + whole[40:88] + bytes(4), "a stack of 5 images and not a volume"),
    ]
    for offset, text, words in cases:
        path.write_bytes(whole)
        volume = open_volume(patch(path, offset, text))
        check_reads(volume, data)
        assert [note for note in volume.notes if words in note], (words, volume.notes)
    path.write_bytes(whole)
    for offset, text in (
        (152, (1146047817).to_bytes(4, "little") + (17).to_bytes(4, "little")),
        (220, (1).to_bytes(4, "little") + b"SerialEMCCD: Dose frac. image, 4 bits packed  r/f 0".ljust(80)),
    ):
        path.write_bytes(whole)
        patch(path, 12, (0).to_bytes(4, "little"))
        with pytest.raises(VolumeError, match="two values of 4 bits"):
            open_volume(patch(path, offset, text))
    path.write_bytes(whole)
    for mode, match in ((101, "values of 4 bits"), (3, "complex integers"), (16, "RGB colours")):
        with pytest.raises(VolumeError, match=f"mode {mode}, {match}"):
            open_volume(patch(path, 12, mode.to_bytes(4, "little")))


@pytest.mark.real
@pytest.mark.parametrize("name", ["EMD-3001.map", "EMD-3197.map"])
def test_maps_of_the_data_bank_are_as_mrcfile_reads_them(shared: Path, name: str) -> None:
    path = shared / "mrc_maps" / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = mrcfile.open(path, permissive=True)
    with file:
        data, size = file.data.astype(file.data.dtype.newbyteorder("=")), file.voxel_size
        volume = open_volume(path)
        found = volume.open()[...]
        assert hashlib.sha256(found.tobytes()).digest() == hashlib.sha256(data.tobytes()).digest()
        assert volume.voxel_size_nm == pytest.approx((size.z / 10, size.y / 10, size.x / 10))
        columns = [int(file.header[name]) for name in ("maps", "mapr", "mapc")]
        assert volume.axes == tuple("xyz"[n - 1] for n in columns)


def write_pictures(
    folder: Path, data: np.ndarray, suffix: str = ".png", mode: str | None = None, **settings: Any
) -> Path:
    """Write each plane as a picture, of another mode than its array has where that is given."""
    folder.mkdir(exist_ok=True)
    for z, plane in enumerate(data):
        image = Image.fromarray(plane)
        (image.convert(mode) if mode else image).save(folder / f"z{z - 2}{suffix}", **settings)
    return folder


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_png_is_a_volume_of_one_slice(tmp_path: Path, dtype: str) -> None:
    data = noise((5, 20, 31), dtype)
    check_reads(open_volume(write_pictures(tmp_path / "raw", data) / "z1.png"), data[3])


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_jpeg_is_decoded_as_pillow_does_and_noted_as_lossy(tmp_path: Path, suffix: str, mode: str) -> None:
    folder = write_pictures(tmp_path / "raw", noise((5, 20, 31)), suffix, mode)
    volume = open_volume(folder)
    expected = [np.asarray(Image.open(folder / f"z{z - 2}{suffix}").convert("L")) for z in range(5)]
    check_reads(volume, np.stack(expected))
    assert "JPEG is lossy" in volume.notes[0]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_equal_colours_are_grey_and_it_is_said(tmp_path: Path, mode: str) -> None:
    data = noise((5, 20, 31))
    volume = open_volume(write_pictures(tmp_path / "raw", data, mode=mode))
    assert volume.notes == ("the colours of each pixel are equal: they are read as one grey value",)
    check_reads(volume, data)
    check_reads(open_volume(tmp_path / "raw/z0.png"), data[2])


def test_other_colours_are_channels(tmp_path: Path) -> None:
    data = noise((5, 20, 31, 4))
    volume = open_volume(write_pictures(tmp_path / "raw", data))
    assert volume.axes == ("z", "y", "x", "c")
    check_reads(volume, data)


def test_colours_among_pictures_without_are_named_when_they_are_read(tmp_path: Path) -> None:
    data = np.repeat(noise((6, 20, 31))[..., np.newaxis], 3, axis=-1)
    data[1, 3, 4, 2] ^= 1
    reader = open_volume(write_pictures(tmp_path / "raw", data)).open()
    assert np.array_equal(reader[2:], data[2:, ..., 0])
    with pytest.raises(VolumeError, match=r"z-1\.png has colours"):
        reader[1]


def test_grey_values_of_one_bit_are_scaled_and_it_is_said(tmp_path: Path) -> None:
    data = noise((3, 20, 31)) > 99
    volume = open_volume(write_pictures(tmp_path / "raw", data))
    check_reads(volume, data * np.uint8(255))
    assert volume.notes == ("grey values of 1 bits are scaled to 0 to 255",)


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_picture_that_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    folder = write_pictures(tmp_path / "raw", noise((5, 200, 310)), suffix)
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
    file = write_pictures(tmp_path / "raw", noise((1, 20, 31)), suffix, mode) / f"z-2{suffix}"
    assert "refused" in outcomes_of_damage(file, file.stat().st_size, 120)


def test_pictures_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    Image.fromarray(noise((20, 31, 4)), mode="CMYK").save(tmp_path / "a.jpg")
    with pytest.raises(VolumeError, match=r"a\.jpg is a JPEG of 8 bits and 4 colours"):
        open_volume(tmp_path / "a.jpg")
    folder = write_pictures(tmp_path / "raw", noise((5, 20, 31)))
    Image.fromarray(noise((20, 31), "uint16")).save(folder / "z1.png")
    with pytest.raises(VolumeError, match=r"z1\.png is uint16 \(20, 31\)"):
        open_volume(folder)


def test_kinds_of_files_do_not_mix(tmp_path: Path) -> None:
    data = noise((5, 20, 31))
    folder = write_pictures(tmp_path / "raw", data)
    Image.fromarray(data[0]).save(folder / "overview.jpg")
    volume = open_volume(folder)
    check_reads(volume, data)
    assert volume.notes == ("overview.jpg: no slice by its name",)
    tifffile.imwrite(folder / "z9.tif", data[0])
    with pytest.raises(VolumeError, match=r"z9\.tif is among 5 slices of PNG"):
        open_volume(folder)


def test_pictures_without_numbers_are_no_volume(tmp_path: Path) -> None:
    write_pictures(tmp_path / "slices", noise((5, 20, 31)))
    (tmp_path / "figures").mkdir()
    for name in ("overview.png", "histogram.png"):
        Image.fromarray(noise((20, 31))).save(tmp_path / "figures" / name)
    assert [volume.key for volume in list_arrays(tmp_path)] == ["slices"]


def test_a_picture_takes_no_more_memory_than_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_pictures(tmp_path / "raw", noise((5, 20, 31)))
    file = folder / "z-2.png"
    header = bytearray(file.read_bytes())
    header[16:24] = bytes([0x7F, 0xFF, 0xFF, 0xFF] * 2)
    file.write_bytes(header)
    with pytest.raises(VolumeError, match=r"z-2\.png: a picture of"):
        picture.read_header(file)
