"""Folders of TIFF slices: their order, their shapes, and what else may lie beside them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tifffile
from boxes import check_reads
from volumes import noise, write_volume

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.tiff_folder import OPEN_SLICES, natural
from volpipe.volumes.volume import View, list_arrays, open_volume


def write(folder: Path, data: np.ndarray, names: list[str] | None = None, **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, plane in zip(names or [f"slice_{i}.tif" for i in range(len(data))], data, strict=True):
        tifffile.imwrite(folder / name, plane, **settings)
    return folder


@pytest.mark.parametrize(
    "settings", [{}, {"compression": "zlib", "tile": (16, 16)}, {"byteorder": ">", "bigtiff": True}]
)
def test_slices_are_a_volume_in_natural_order(tmp_path: Path, settings: dict[str, object]) -> None:
    data = noise((5, 20, 31), "uint16")
    names = ["slice_1.tif", "slice_2.TIF", "slice_09.tiff", "slice_10.tif", "slice_100.tif"]
    volume = open_volume(write(tmp_path / "raw", data, names, **settings))
    assert (volume.format, volume.axes, volume.shape) == ("tiff", ("z", "y", "x"), data.shape)
    assert volume.voxel_size_nm is None
    check_reads(volume, data)


def test_slices_to_which_others_come_are_read_as_they_were(tmp_path: Path) -> None:
    data = noise((9, 20, 31))
    folder = write(tmp_path / "raw", data[:5])
    volume = open_volume(folder)
    first = volume.open()
    write(folder, data)
    for reader in (first, volume.open()):
        assert np.array_equal(reader[...], data[:5])
    assert np.array_equal(volume.open().read_mirrored(Box((3, 0, 0), (7, 20, 31)))[0], data[[3, 4, 3, 2]])
    assert open_volume(folder).shape == data.shape


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["slice_0a.tif"], "has other slices than when it was opened; open it again"),  # between two
        (["slice_9.tif"], ""),  # behind
        (["slice_9.tif", "slice_2.tif"], "has other slices"),  # one is gone besides
        (["slice_2.tif"], r"was uint8 \(5, 20, 31\) and is now uint8 \(4, 20, 31\); open it again"),
    ],
)
def test_slices_in_other_places_are_not_read_as_those_before(tmp_path: Path, names: list[str], said: str) -> None:
    """Each of these names comes, or goes where it is there."""
    folder = write(tmp_path / "raw", noise((5, 20, 31)))
    volume = open_volume(folder)
    for name in names:
        if (folder / name).exists():
            (folder / name).unlink()
        else:
            write(folder, noise((1, 20, 31)), [name])
    with pytest.raises(VolumeError, match=said) if said else nullcontext():
        volume.open()


def test_few_slices_are_open_however_many_volumes_and_sessions_read_them(tmp_path: Path) -> None:
    data = noise((OPEN_SLICES // 2 + 8, 4, 4))
    for number in range(4):
        volume = open_volume(write(tmp_path / str(number), data))
        for session in ("a", "b", "c"):
            assert np.array_equal(volume.open(session=session, live=True)[...], data)
    files = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert 0 < sum(file.is_relative_to(tmp_path) for file in files) <= OPEN_SLICES


def test_names_are_sorted_as_people_do() -> None:
    names = ["b1.tif", "a10.tif", "a2.tif", "a2b10.tif", "a2b9.tif", "A3.tif", "a02.tif", "7.tif", "a.tif"]
    assert sorted(names, key=natural) == [
        "7.tif", "a02.tif", "a2.tif", "a2b9.tif", "a2b10.tif", "A3.tif", "a10.tif", "a.tif", "b1.tif",
    ]  # fmt: skip


def test_colours_of_slices_are_channels(tmp_path: Path) -> None:
    data = noise((4, 12, 13, 3))
    volume = open_volume(write(tmp_path / "raw", data, photometric="rgb"))
    assert volume.axes == ("z", "y", "x", "c")
    check_reads(volume, data)


def test_slices_that_differ_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw", noise((4, 12, 13)))
    tifffile.imwrite(folder / "slice_2.tif", noise((12, 14)))
    tifffile.imwrite(folder / "slice_3.tif", noise((12, 13), "uint16"))
    with pytest.raises(VolumeError, match=r"slice_2\.tif is uint8 \(12, 14\), slice_3\.tif is uint16 \(12, 13\)"):
        open_volume(folder)


def test_a_stack_among_slices_and_a_damaged_slice_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw", noise((4, 12, 13)))
    whole = (folder / "slice_1.tif").read_bytes()
    (folder / "slice_1.tif").write_bytes(whole[:-1])
    with pytest.raises(VolumeError, match=rf"slice_1\.tif has {len(whole) - 1} bytes, .* asks for {len(whole)}"):
        open_volume(folder)
    tifffile.imwrite(folder / "slice_1.tif", noise((5, 12, 13)), metadata={"axes": "ZYX"})
    with pytest.raises(VolumeError, match=r"slice_1\.tif is not a single slice"):
        open_volume(folder)


def test_a_slice_that_changed_since_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "raw", noise((4, 12, 13)))
    reader = open_volume(folder).open()
    tifffile.imwrite(folder / "slice_2.tif", noise((12, 14)))
    assert reader[:2].shape == (2, 12, 13)
    with pytest.raises(VolumeError, match=r"slice_2\.tif is uint8 \(12, 14\), and the other slices"):
        reader[2]


def test_other_files_and_hidden_ones_do_not_count(tmp_path: Path) -> None:
    data = noise((3, 12, 13))
    folder = write(tmp_path / "raw", data)
    (folder / "._slice_0.tif").write_bytes(b"left by another system")
    (folder / "Thumbs.db").write_bytes(b"of yet another")
    (folder / "notes.json").write_text(json.dumps({}))
    (folder / "parts.tif").mkdir()
    check_reads(open_volume(folder), data)


def test_a_folder_with_a_container_is_not_one_of_slices(tmp_path: Path) -> None:
    data = noise((20, 12, 13))
    write_volume(tmp_path / "all/cells.n5", data)
    tifffile.imwrite(tmp_path / "all/preview.tif", data[0])
    check_reads(open_volume(tmp_path / "all"), data)


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match=r"no volume in .* TIFF slices"):
        open_volume(tmp_path)


def test_folders_of_slices_beside_each_other_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "all/raw", noise((3, 12, 13)))
    write(tmp_path / "all/labels", noise((3, 12, 13), "uint32"))
    assert [(v.key, v.dtype.name) for v in list_arrays(tmp_path / "all")] == [("labels", "uint32"), ("raw", "uint8")]
    with pytest.raises(VolumeError, match="holds 2 volumes; choose one by its key: labels, raw"):
        open_volume(tmp_path / "all")
    assert open_volume(tmp_path / "all", "labels").shape == (3, 12, 13)


@pytest.mark.parametrize(
    ("names", "note"),
    [
        (["s1.tif", "s2.tif", "s4.tif", "s5.tif"], "no slice has the number 3:"),
        (["s08.tif", "s09.tif", "s12.tif", "s13.tif"], "no slice has the number 10 to 11:"),
        (["s0.tif", "s10.tif", "s20.tif", "s40.tif"], "no slice has the number 30:"),
        (["s3_c1.tif", "s4_c1.tif", "s5_c1.tif"], ""),
        (["s0.tif", "s10.tif", "s20.tif"], ""),
        (["a1_z1.tif", "a2_z9.tif", "a3_z2.tif"], ""),
        (["first.tif", "second.tif"], ""),
        (["s1.tif"], ""),
    ],
)
def test_numbers_that_lack_a_slice_are_noted(names: list[str], note: str, tmp_path: Path) -> None:
    notes = " ".join(open_volume(write(tmp_path / "raw", noise((len(names), 8, 8)), names)).notes)
    assert note in notes
    assert ("no slice" in notes) == bool(note)


@pytest.mark.parametrize(
    "names",
    [
        [f"z{i - 6}.tif" for i in range(12)],
        [f"stack_z{i - 6:+03}.tif" for i in range(12)],
        [f"z{i * 0.25}um.tif" for i in range(12)],
        [f"z{(i - 3) * 0.5:g}.tif" for i in range(12)],
        [f"img-{i}.tif" for i in range(1, 13)],
        [f"scan1.{i}.tif" for i in range(1, 13)],
        [f"slice_{i}_z={i * 8 / 3:.3f}.tif" for i in range(12)],
    ],
)
def test_slices_are_in_the_order_of_their_numbers(tmp_path: Path, names: list[str]) -> None:
    data = noise((12, 8, 9))
    volume = open_volume(write(tmp_path / "raw", data, names))
    check_reads(volume, data)
    assert volume.notes == ()


@pytest.mark.parametrize("name", ["z{z:02}_ch{c:02}.tif", "C{c}-cells_{z}.tif", "img_c{c}_z{z}.tif"])
def test_channels_in_names_are_an_axis(tmp_path: Path, name: str) -> None:
    data = noise((11, 2, 8, 9))
    names = [name.format(z=z, c=c) for z in range(11) for c in range(2)]
    volume = open_volume(write(tmp_path / "raw", data.reshape(-1, 8, 9), names))
    assert volume.axes == ("z", "c", "y", "x")
    assert volume.notes[0].startswith("2 channels by the names of the files")
    check_reads(volume, data)
    second = open_volume(tmp_path / "raw", view=View(channel=1))
    assert np.array_equal(second.open().read(Box((3, 0, 0), (11, 8, 9)))[0], data[3:, 1])
    file = tmp_path / "raw" / names[2 * 5 + 1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(VolumeError, match=file.name):
        volume.open()[5, 1]


def test_times_in_names_are_an_axis_and_one_is_chosen(tmp_path: Path) -> None:
    data = noise((3, 4, 2, 8, 9))
    names = [f"t{t}_z{z}_c{c}.tif" for t in range(3) for z in range(4) for c in range(2)]
    folder = write(tmp_path / "raw", data.reshape(-1, 8, 9), names)
    with pytest.raises(VolumeError, match="has 3 points in time; choose one"):
        open_volume(folder)
    volume = open_volume(folder, view=View(time=2))
    assert np.array_equal(volume.open().read(Box((0, 0, 0), (4, 8, 9))), data[2].swapaxes(0, 1))


SLICES = [f"s{i:02}.tif" for i in range(6)]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([*SLICES, "average_projection.tif"], r"average_projection\.tif does not fit the names of the other 6 slices"),
        ([*SLICES, "s03 (1).tif", "s03 copy.tif"], r"s03 \(1\)\.tif, s03 copy\.tif do not fit"),
        ([*SLICES, "Copy of s03.tif"], r"Copy of s03\.tif does not fit"),
        ([*SLICES, "s3.tif"], r"s03\.tif and s3\.tif have the same numbers"),
        ([*SLICES, "s03.tiff"], r"s03\.tif and s03\.tiff have the same numbers"),
        ([f"s{i}_{c}.tif" for i in range(6) for c in ("red", "green")], "6 like s0_green.tif, 6 like s0_red.tif"),
        (
            [f"s{i}_x{x}_y{y}.tif" for i in range(2) for x in range(2) for y in range(2)],
            r"2 tiles \(x\), 2 tiles \(y\)",
        ),
        ([f"s{i:02}_{c}.tif" for i in range(6) for c in range(2)], "count in 2 numbers, 6 × 2"),
        ([f"z{i}_ch{c}.tif" for i in range(6) for c in range(2)][:-1], r"the 11 names .* 2 channels \(ch\)"),
        ([f"img{i}_ch{i % 2}.tif" for i in range(6)], r"2 channels \(ch\)"),
    ],
)
def test_names_of_more_than_one_stack_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    folder = write(tmp_path / "raw", noise((len(names), 8, 9)), names)
    with pytest.raises(VolumeError, match=words):
        open_volume(folder)


def test_an_order_that_is_guessed_is_noted(tmp_path: Path) -> None:
    blocks = [f"b{b}_s{i}.tif" for b in range(2) for i in range(3 + b)]
    volume = open_volume(write(tmp_path / "blocks", noise((7, 8, 9)), blocks))
    assert "in the order of the first: b0_s0.tif, b0_s1.tif" in volume.notes[0]
    volume = open_volume(write(tmp_path / "words", noise((2, 8, 9)), ["first.tif", "second.tif"]))
    assert "first.tif to second.tif" in volume.notes[0]
    volume = open_volume(write(tmp_path / "times", noise((3, 8, 9)), [f"t{i}.tif" for i in range(3)]))
    assert volume.notes == ("the numbers after t are taken for slices",)


def test_each_slice_is_read_by_its_own_tags_or_named(tmp_path: Path) -> None:
    data = noise((4, 12, 13))
    folder = write(tmp_path / "raw", data)
    tifffile.imwrite(folder / "slice_1.tif", data[1], compression="lzw", predictor=2, tile=(16, 16))
    tifffile.imwrite(folder / "slice_2.tif", data[2], photometric="minisblack", byteorder=">")
    reader = open_volume(folder).open()
    assert np.array_equal(reader[...], data)
    tifffile.imwrite(folder / "slice_2.tif", data[2], photometric="miniswhite")
    with pytest.raises(VolumeError, match=r"slice_2\.tif is uint8 \(12, 13\) \(grey whose white is 0\)"):
        open_volume(folder)
    tifffile.imwrite(folder / "slice_2.tif", data[2], photometric="minisblack")
    colormap = noise((3, 256), "uint16")
    tifffile.imwrite(folder / "slice_3.tif", data[3], photometric="palette", colormap=colormap)
    with pytest.raises(VolumeError, match=r"slice_3\.tif is uint8 \(12, 13\) \(palette\)"):
        reader[3]
    with pytest.raises(VolumeError, match=r"slice_3\.tif is uint8 \(12, 13\) \(palette\)"):
        open_volume(folder)


@pytest.mark.parametrize("other", ["info", "attributes.json", "zarr.json"])
def test_new_names_of_slices_count_whatever_lies_beside_them(tmp_path: Path, other: str) -> None:
    data = noise((4, 12, 13))
    folder = write(tmp_path / "raw", data)
    (folder / other).write_text('{"zarr_format": 3, "node_type": "group"}')
    volume = open_volume(folder)
    assert np.array_equal(volume.open()[...], data)
    (folder / "slice_0.tif").rename(folder / "slice_9.tif")
    with pytest.raises(VolumeError, match="has other slices than when it was opened"):
        volume.open()
    assert np.array_equal(open_volume(folder).open()[...], np.roll(data, -1, axis=0))
