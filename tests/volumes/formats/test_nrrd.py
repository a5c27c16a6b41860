"""NRRD: what pynrrd and ITK write is read as they mean it, and what is odd in headers is refused."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from typing import Any

import nrrd
import numpy as np
import pytest
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.volumes.formats.nrrd import TYPES
from volpipe.volumes.volume import Volume, open_volume

SHAPE = (7, 6, 5)  # z, y, x
DATA = noise(SHAPE, "int16")
# By SimpleITK 2.5.7: 1000 × (0 … 23) in (2, 3, 4), uint16, spacing 0.5, 0.6, 2 and origin 10, -20, 30; also with the
# same plus 1 as a second component.
BY_ITK = (
    "PEt}tFfcGQ3L_vxZ*6dFWprgAPEt}tAZBT7Wgup6a&2LBAaihKV`*k-V_|e@Z*CxAbUF$nAZT=Sa5^t9bY*32E^}{na${v?Z*pg4E^cLXFK%*j"
    "WG`lKa&2LBE@*UZYzlOFaAi6mb#8NMXKrO=AaiJMa&!u0X>Db0b7^mGIv_I&b8ul}WjY{iWoC3OaBp*TWpZh6axHUpaAk67Z*mHAX?kUIIv_M4"
    "Gaxbwb8ul}Wgui}a%E$5X>V?GIv^-8E;TGLEHEh`C@?HAE;TthIXO8wIXO8wIXO8wIXEmZDIh2?EHErGDGF<8Ze(*hAY^ZCVQFq4WN&R@X>K57"
    "Z*5^|ZVF{?WNBe;Iv{LmbaZTG3T19%Z)9n1XF4EfdTDS9b8ul}Wgu^IX=iC}Iv^-9Ff1)HFf21LDGCZ7iwFP!0000017l!#!F+*z2loR04&egv"
    "2x$j-4P^oKA6gIeP8e-4n_<;pm*EuPX5ppa#}V`)^hP8AaT}q`FaQ7m"
)
VECTORS_BY_ITK = (
    "PEt}tFfcGQ3L_vxZ*6dFWprgAPEt}tAZBT7Wgup6a&2LBAaihKV`*k-V_|e@Z*CxAbUF$nAZT=Sa5^t9bY*32E^}{na${v?Z*pg4E^cLXFK%*j"
    "WG`lKa&2LBE@*UZYzlOFaAi6mb#8NMXKrO=AaiJMa&!u0X>Db0b7^mGIv_L(b8ul}WjY{iWoC3OaBp*TWpZh6axHUpaAk67Z*mHAX?kUIIv_G2"
    "G$1n|G758WVPj<=WNC6`V{~b6ZgV;yZf|a7ASf^{H7qbJFexA?Ff1@GH90vsIXO8wIXO8wIXO8wI4m$JASf^_Ff1}D3TtU@WOF(oc4cF9Z*m}H"
    "Z*5^|ZXjfDZDDC{AY^ZCVQFp(Wo~3?VQxAgY-x0KY-I{%Zewp`X>MmaAZL1Ma0+v9VPj<=Z*pm8X>K|oC^0ZBEiy1HGcYL%3LlFI0000000094"
    "U;v;000031=mY5k&<D{6xC^-ppbw!Bh!cqua2IhGSQ}XzKp#OLC?hE&5GN5Q_$v7-;4a}V$TG<?ur{$am^zs{fIfjfXhLa1P)1QkI7&H6AWk7p"
    "2vP}B@Ky0u*jd?Gz7hgCU;qFB"
)


def write(folder: Path, header: dict[str, Any], data: np.ndarray = DATA) -> Volume:  # Any: pynrrd's
    nrrd.write(str(folder / "a.nrrd"), data, {"encoding": "raw"} | header, index_order="C")
    return open_volume(folder / "a.nrrd")


def headed(folder: Path, lines: str, data: bytes = DATA.tobytes(), name: str = "a.nhdr") -> Volume:
    """Return the volume of the bytes `data` behind, or beside, a header of some usual lines and `lines`."""
    head = f"NRRD0004\n# a comment\ntype: short\ndimension: 3\nsizes: 5 6 7\nendian: little\n{lines}\n"
    if name == "a.nhdr":
        (folder / "a.bytes").write_bytes(data)
    (folder / name).write_bytes(head.encode() + (b"\n" + data if name == "a.nrrd" else b""))
    return open_volume(folder / name)


def test_directions_spacings_and_units_say_the_size(tmp_path: Path) -> None:
    steps = np.array([[2.0, 0, 0], [0, -3, 0], [0, 0, 4]])
    by_space = {"space": "left-posterior-superior", "space directions": steps, "space origin": [1.0, 2, 3]}
    guess = "voxel size guessed: it says 4 × 3 × 2 without a unit, taken as mm"
    turned = "x runs to L, y to A, z to S"
    for header, size, origin, words in (
        (by_space | {"space units": ["um"] * 3}, (4000, 3000, 2000), (3000, -2000, 1000), [turned]),
        (by_space, (4e6, 3e6, 2e6), (3e6, -2e6, 1e6), [turned, guess]),
        (
            {"space dimension": 3, "space directions": steps},
            None,
            (0, 0, 0),
            ["x runs to +x, y to -y", "without a unit"],
        ),
        (by_space | {"space units": ["um", "um", "nm"]}, None, (0, 0, 0), ["its space units are um, um, nm"]),
        ({"spacings": [4.0, 5, 0.06], "units": ["nm", "nm", "um"]}, (60, 5, 4), (0, 0, 0), []),
        ({"spacings": [4.0, -5, 6], "units": ["nm"] * 3}, (6, 5, 4), (0, 0, 0), ["its spacing along y is below 0"]),
        ({"spacings": [4.0, 5, 6]}, None, (0, 0, 0), ["it says z, y, x 6 × 5 × 4 without a unit"]),
        ({"spacings": [4.0, np.nan, 6], "units": ["nm"] * 3}, None, (0, 0, 0), ["says no spacing of y"]),
        ({}, None, (0, 0, 0), ["says no spacing of x, y, z"]),
    ):
        volume = write(tmp_path, header)
        assert volume.voxel_size_nm == (None if size is None else pytest.approx(size)), header
        assert volume.origin_nm == pytest.approx(origin)
        assert volume.axcodes == ("LAS" if size is not None and "space" in header else "")
        assert all(any(word in note for note in volume.notes) for word in words), volume.notes
        assert len(volume.notes) == len(words)
        np.testing.assert_array_equal(volume[...], DATA)


def test_what_itk_writes_has_its_values_sizes_and_channels(tmp_path: Path) -> None:
    data = (np.arange(24, dtype=np.uint16) * 1000).reshape(2, 3, 4)
    for content, axes, expected in ((BY_ITK, "zyx", data), (VECTORS_BY_ITK, "zyxc", np.stack([data, data + 1], -1))):
        (tmp_path / "a.nrrd").write_bytes(base64.b85decode(content))
        volume = open_volume(tmp_path / "a.nrrd")
        assert "".join(volume.axes) == axes
        np.testing.assert_array_equal(volume[...], expected)
        assert volume.voxel_size_nm == pytest.approx((2e6, 0.6e6, 0.5e6))
        assert volume.origin_nm == pytest.approx((30e6, -20e6, 10e6))


def test_kinds_and_directions_name_axes(tmp_path: Path) -> None:
    four, rows = noise((3, *SHAPE), "uint8"), np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    none = np.full(3, np.nan)
    of_space: dict[str, Any] = {"space": "RAS", "space units": ["mm"] * 3}
    for header, axes in (
        ({"kinds": ["domain", "domain", "domain", "list"]}, "czyx"),
        (of_space | {"space directions": np.vstack([rows, none])}, "czyx"),
        (of_space | {"space directions": np.vstack([none, rows])}, "zyxc"),
        ({"kinds": ["RGB-color", "domain", "domain", "domain"]}, "zyxc"),
    ):
        nrrd.write(str(tmp_path / "a.nrrd"), four, {"encoding": "raw"} | header, index_order="C")
        volume = open_volume(tmp_path / "a.nrrd")
        assert "".join(volume.axes) == axes
        np.testing.assert_array_equal(volume[...], four)
    with pytest.raises(VolumeError, match="has 3 points in time; choose one"):
        write(tmp_path, {"kinds": ["domain", "domain", "domain", "time"]}, four)
    guessed = write(tmp_path, {}, four)
    assert (guessed.axes, guessed.notes[0]) == (("c", "z", "y", "x"), "axes guessed: c, z, y, x")
    for kinds in (["list", "vector", "domain", "domain"], ["complex", "domain", "domain", "domain"]):
        with pytest.raises(VolumeError, match=r"volpipe reads (up to three of space|space, time and lists)"):
            write(tmp_path, {"kinds": kinds}, four)


def test_every_name_of_every_type_is_known(tmp_path: Path) -> None:
    data = noise(SHAPE, "uint8")
    for name, dtype in TYPES.items():
        stored = np.ascontiguousarray(np.broadcast_to(data, SHAPE)).astype(dtype)
        head = f"NRRD0001\ntype: {name}\ndimension: 3\nsizes: 5 6 7\nendian: little\nencoding: raw\n\n"
        (tmp_path / "a.nrrd").write_bytes(head.encode() + stored.tobytes())
        volume = open_volume(tmp_path / "a.nrrd")
        np.testing.assert_array_equal(volume[...], nrrd.read(str(tmp_path / "a.nrrd"), index_order="C")[0])
        assert volume.dtype == stored.dtype


def test_skipped_lines_and_bytes_are_those_of_teem(tmp_path: Path) -> None:
    content, packed = DATA.tobytes(), gzip.compress(b"12345" + DATA.tobytes())
    for lines, data in (
        ("encoding: raw\nline skip: 2\nbyte skip: 3", b"one\ntwo\nabc" + content),
        ("encoding: raw\nbyte skip: -1", b"any header of others" + content),
        ("encoding: gzip\nbyte skip: 5", packed),
        ("encoding: gz\nline skip: 1\nbyte skip: 5", b"a line\n" + packed),
    ):
        volume = headed(tmp_path, f"{lines}\ndata file: a.bytes", data)
        np.testing.assert_array_equal(volume[...], DATA)
        if "raw" in lines:  # of packed data, pynrrd skips bytes twice
            np.testing.assert_array_equal(nrrd.read(str(tmp_path / "a.nhdr"), index_order="C")[0], DATA)
    np.testing.assert_array_equal(
        headed(tmp_path, 'encoding: raw\nmy key:=1: 2\nlabels: "x" "y" "z"', name="a.nrrd")[...], DATA
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("encoding: bzip2", r"has the encoding 'bzip2'; volpipe reads raw and gzip"),
        ("encoding: hex", r"has the encoding 'hex'"),
        ("", r"has the encoding ''"),
        ("encoding: raw\ndata file: LIST\na.1\na.2", r"names a list of data files"),
        ("encoding: raw\ndata file: a.%03d 1 7 1", r"names a list of data files, a\.%03d 1 7 1"),
        ("encoding: raw\ndata file: none.raw", r"names the data file none\.raw, which is not there"),
        ("encoding: raw\ndata file: ../a.raw", r"refers to \.\./a\.raw, which does not lie in its folder"),
        ("encoding: raw\ntype: block", r"holds the type 'block'"),
        ("encoding: raw\nendian: middle", r"endian 'middle' of values of type short"),
        ("encoding: raw\nsizes: 5 6", r"sizes '5 6' of dimension '3' cannot be"),
        ("encoding: raw\nbyte skip: -2\ndata file: a.bytes", r"-2 bytes cannot be skipped"),
        ("encoding: raw\nline skip: 99\ndata file: a.bytes", r"has no 99 lines to skip"),
        ("encoding: gzip\nbyte skip: -1\ndata file: a.bytes", r"-1 bytes cannot be skipped of data that are gzip"),
        ("encoding: raw\nbyte skip: 1\ndata file: a.bytes", r"a\.bytes has 420 bytes, its header asks for 421"),
        ("encoding: raw\nno field", r"has the line 'no field', which is no field"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(VolumeError, match=words):
        headed(tmp_path, lines)
