"""NIfTI: what nibabel and ITK write is read as they mean it: values, voxel size, directions, fourth axes."""

from __future__ import annotations

import base64
import gzip
import itertools
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.quaternions import quat2mat
from volumes import noise

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.container import read_header
from volpipe.volumes.volume import View, Volume, open_volume

SHAPE = (5, 6, 7)  # x, y, z
# By SimpleITK 2.5.7: 1000 × (0 … 23) in (2, 3, 4), uint16, spacing 0.5, 0.6, 2 and origin 10, -20, 30.
BY_ITK = (
    "ABzY80000000WC*WFP_*F)%Z*FfcPPF)%_Q8ekFtQw{bE3=H<OW=eu+2TXG|I78Kd02jjm14a~ofZU~Ukbz-=BLl++M+OFl{RlabI0M71nUYX3"
    "kQz8}fT~9UdD@0h)(hqf>^ry@@OKCoh(|~}$ZIGIsQ=J<pm)M(gV_wL2D=QW05=OS1wW3U51}_A0md_VdXNDC00"
)
NM = {"mm": 1e6, "micron": 1e3, "meter": 1e9}


def write(path: Path, affine: np.ndarray | None, *, unit: str | None = "mm", data: np.ndarray | None = None) -> Volume:
    image = nibabel.Nifti1Image(noise(SHAPE, "int16") if data is None else data, affine)
    if unit is not None:
        image.header.set_xyzt_units(unit)
    image.to_filename(path)
    return open_volume(path)


def turned(axes: tuple[int, ...], signs: tuple[int, ...], turn: tuple[float, ...] = (1, 0, 0, 0)) -> np.ndarray:
    """Return directions: `signs` along the axes of space `axes`, turned then."""
    order = np.zeros((3, 3))
    for column, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
        order[axis, column] = sign
    return quat2mat(np.array(turn) / np.linalg.norm(turn)) @ order


@pytest.mark.parametrize("form", ["sform", "qform"])
@pytest.mark.parametrize("turn", [(1.0, 0.0, 0.0, 0.0), (1.0, 0.05, -0.02, 0.03)])
def test_sizes_origin_and_directions_are_those_of_the_affine(
    tmp_path: Path, form: str, turn: tuple[float, ...]
) -> None:
    """Each voxel lies, by size, origin and directions, where nibabel's affine map puts it."""
    sizes, first = np.array([2.0, 3.0, 4.5]), np.array([-90.0, 12.5, 70.0])
    for axes, signs in itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3)):
        directions = turned(axes, signs, turn)
        image = nibabel.Nifti1Image(noise(SHAPE), None)
        getattr(image, f"set_{form}")(nibabel.affines.from_matvec(directions * sizes, first), code=1)
        image.header.set_xyzt_units("micron")
        image.to_filename(tmp_path / "a.nii")
        volume, affine = open_volume(tmp_path / "a.nii"), nibabel.load(tmp_path / "a.nii").affine
        assert volume.voxel_size_nm == pytest.approx(sizes[::-1] * 1000, rel=1e-6)
        ours = affine[:3, :3] / sizes @ np.array(volume.origin_nm[::-1]) / 1000
        assert ours == pytest.approx(affine[:3, 3], abs=1e-4)
        letters = nibabel.aff2axcodes(affine)
        assert volume.axcodes == "".join(letters)
        notes = [note for note in volume.notes if note.startswith("x runs")]
        is_plain = letters == ("R", "A", "S") and turn[1] == 0
        assert [note.startswith("x runs to {}, y to {}, z to {}".format(*letters)) for note in notes] == [True] * (
            not is_plain
        )
        assert all(("oblique" in note) == (turn[1] != 0) for note in notes)


def test_the_sform_counts_before_the_qform_and_that_before_the_pixdim(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(noise(SHAPE), None)
    image.header.set_xyzt_units("mm")
    image.set_qform(np.diag([2, 2, 2, 1]), code=1)
    image.header["pixdim"][1:4] = 3
    sizes = []
    for sform, qform in ((1, 1), (0, 1), (0, 0)):
        image.header["srow_x"], image.header["srow_y"], image.header["srow_z"] = np.eye(4)[:3] * [4, 4, 4, 1]
        image.header["sform_code"], image.header["qform_code"] = sform, qform
        (tmp_path / "a.nii").write_bytes(bytes(image.header.structarr.tobytes()) + b"\0" * 4 + noise(SHAPE).tobytes())
        volume = open_volume(tmp_path / "a.nii")
        sizes.append(volume.voxel_size_nm)
        assert any("which counts" in note for note in volume.notes) == bool(sform)
        assert volume.has_origin == bool(sform or qform)
        assert volume.axcodes == ("RAS" if sform or qform else "")
    assert sizes == [(4e6,) * 3, (3e6,) * 3, (3e6,) * 3]


@pytest.mark.parametrize("unit", [*NM, "unknown", None])
def test_units_are_nanometres_and_none_is_taken_as_mm_and_said(tmp_path: Path, unit: str | None) -> None:
    volume = write(tmp_path / "a.nii", np.diag([1.0, 2, 3, 1]), unit=unit)
    factor = NM.get(unit or "", 1e6)
    assert volume.voxel_size_nm == pytest.approx((3 * factor, 2 * factor, factor))
    assert any(note.startswith("voxel size guessed: it says 3 × 2 × 1 without a unit") for note in volume.notes) == (
        unit not in NM
    )


def test_a_map_that_spans_no_space_and_a_shear_are_said(tmp_path: Path) -> None:
    sheared = np.array([[1.0, 0, 0], [0, 2, 0.5], [0, 0, 3]])
    for steps, size, words in (
        (
            np.array([[1.0, 0, 0], [0, 2, 2], [0, 0, 0]]),
            None,
            "voxel size unknown: its affine map, 1 0 0; 0 2 2; 0 0 0",
        ),
        (np.diag([np.nan, 2, 3]), None, "spans no space"),
        (np.zeros((3, 3)), None, "spans no space"),
        (sheared, (1e6 * np.sqrt(3**2 + 0.5**2), 2e6, 1e6), "its axes meet at 80.5°; they are read as if"),
    ):
        header = nibabel.Nifti1Header()
        header.set_data_shape(SHAPE)
        header.set_data_dtype(np.uint8)
        header.set_xyzt_units("mm")
        header["sform_code"], header["magic"], header["vox_offset"] = 1, b"n+1", 352
        header["srow_x"], header["srow_y"], header["srow_z"] = np.column_stack([steps, [7, 8, 9]])
        (tmp_path / "a.nii").write_bytes(header.structarr.tobytes() + b"\0" * 4 + noise(SHAPE).tobytes())
        volume = open_volume(tmp_path / "a.nii")
        assert volume.voxel_size_nm == (None if size is None else pytest.approx(size))
        assert any(words in note for note in volume.notes), volume.notes


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_slope_and_intercept_are_applied_as_nibabel_does(tmp_path: Path, dtype: str, suffix: str) -> None:
    stored, path = noise(SHAPE, dtype), tmp_path / f"a{suffix}"
    cases = ((0.5, -3.0, False), (1.0, 7.0, False), (1.0, 0.0, True), (0.0, 5.0, True), (np.nan, 0.0, True))
    for slope, inter, is_same in cases:
        image = nibabel.Nifti1Image(stored, np.eye(4), dtype=dtype)
        image.header.set_xyzt_units("mm")
        plain = tmp_path / "plain.nii"
        image.to_filename(plain)
        content = bytearray(plain.read_bytes())
        content[112:120] = np.array([slope, inter], "<f4").tobytes()
        path.write_bytes(gzip.compress(bytes(content)) if suffix == ".nii.gz" else content)
        volume, expected = open_volume(path), np.asanyarray(nibabel.load(path).dataobj).T
        assert volume.dtype == (
            dtype if is_same else "float32" if stored.itemsize < 3 or dtype == "float32" else "float64"
        )
        np.testing.assert_array_equal(volume[...], expected.astype(volume.dtype))
        assert any("scl_slope" in note for note in volume.notes) != is_same


def test_a_fourth_axis_is_channels_and_two_more_are_refused(tmp_path: Path) -> None:
    data = noise((5, 6, 7, 3), "int16")
    for shape in ((5, 6, 7, 3), (5, 6, 7, 1, 3)):
        volume = write(tmp_path / "a.nii", np.eye(4), data=data.reshape(shape))
        assert (volume.axes, volume.shape) == (("c", "z", "y", "x"), (3, 7, 6, 5))
        np.testing.assert_array_equal(volume[...], data.T)
        assert any("is read as 3 channels" in note for note in volume.notes)
    one = open_volume(tmp_path / "a.nii", view=View(channel=2))
    np.testing.assert_array_equal(one.crop(Box((0, 0, 0), (7, 6, 5)))[0], data.T[2])
    assert write(tmp_path / "a.nii", np.eye(4), data=data[..., :1]).axes == ("z", "y", "x")
    with pytest.raises(VolumeError, match=r"has the axes 5 × 6 × 7 × 3 × 2; volpipe reads x, y, z and one more"):
        write(tmp_path / "a.nii", np.eye(4), data=np.stack([data, data], -1))
    plane = write(tmp_path / "a.nii", np.diag([2.0, 3, 4, 1]), data=data[..., 0, 0])
    assert (plane.shape, plane.voxel_size_nm) == ((1, 6, 5), (4e6, 3e6, 2e6))


def test_colours_are_channels_and_other_types_are_refused_by_name(tmp_path: Path) -> None:
    colours = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
    data = noise((*SHAPE, 3))
    volume = write(tmp_path / "a.nii", np.eye(4), data=data.view(colours)[..., 0])
    assert volume.axes == ("z", "y", "x", "c")
    np.testing.assert_array_equal(volume[...], data.transpose(2, 1, 0, 3))
    with pytest.raises(VolumeError, match=r"holds complex floats \(datatype 32\); volpipe reads"):
        write(tmp_path / "a.nii", np.eye(4), data=np.zeros(SHAPE, np.complex64))


def test_a_pair_is_named_by_its_header_and_its_forerunner_is_refused(tmp_path: Path) -> None:
    data = noise(SHAPE, "int16")
    nibabel.Nifti1Pair(data, np.eye(4)).to_filename(tmp_path / "a.hdr")
    with pytest.raises(VolumeError, match=r"a\.img has the voxels of a NIfTI pair; name its header, .*a\.hdr"):
        open_volume(tmp_path / "a.img")
    (tmp_path / "a.img.gz").write_bytes(gzip.compress((tmp_path / "a.img").read_bytes()))
    (tmp_path / "a.img").unlink()
    np.testing.assert_array_equal(open_volume(tmp_path / "a.hdr")[...], data.T)
    (tmp_path / "a.img.gz").unlink()
    with pytest.raises(VolumeError, match=r"its voxels, a\.img, are not beside it"):
        open_volume(tmp_path / "a.hdr")
    nibabel.AnalyzeImage(data, np.eye(4)).to_filename(tmp_path / "b.hdr")
    with pytest.raises(VolumeError, match=r"b\.hdr is ANALYZE 7\.5"):
        open_volume(tmp_path / "b.hdr")


def test_what_itk_writes_has_its_values_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.nii.gz").write_bytes(base64.b85decode(BY_ITK))
    volume = open_volume(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(volume[...], (np.arange(24, dtype=np.uint16) * 1000).reshape(2, 3, 4))
    assert volume.voxel_size_nm == pytest.approx((2e6, 0.6e6, 0.5e6))
    assert volume.origin_nm == pytest.approx((30e6, -20e6, 10e6))  # along the file's own axes, which are ITK's
    assert "x runs to L, y to P, z to S" in " ".join(volume.notes)


# ---- gzip


def test_any_place_of_a_packed_file_is_read_however_it_was_packed(tmp_path: Path) -> None:
    """Places in the index, parts as of bgzip, the last block, and places that were read before."""
    data = noise((170, 160, 200), "uint8", 5) % 7
    plain = tmp_path / "plain.nii"
    nibabel.Nifti1Image(data, np.eye(4)).to_filename(plain)
    content, rng = plain.read_bytes(), np.random.default_rng(1)
    cuts = [0, 100, 2_000_000, 4_500_000, len(content)]
    parts = b"".join(gzip.compress(content[a:b], 1) for a, b in itertools.pairwise(cuts))
    for packed in (gzip.compress(content, 1), parts, parts + b"\0" * 512):
        (tmp_path / "a.nii.gz").write_bytes(packed)
        for reader in (
            open_volume(tmp_path / "a.nii.gz").open(),
            open_volume(tmp_path / "a.nii.gz").open(cache_bytes=9 << 20),
        ):
            for z in (199, 0, *rng.integers(0, 200, 12).tolist(), 199):
                np.testing.assert_array_equal(reader[z], data[..., z].T)


def test_damage_of_a_packed_file_is_an_error_not_a_volume(tmp_path: Path) -> None:
    data = noise(SHAPE, "int16")
    path = tmp_path / "a.nii.gz"
    nibabel.Nifti1Image(data, np.eye(4)).to_filename(path)
    whole = path.read_bytes()
    for place in (-8, -5, len(whole) // 2, len(whole) - 30):  # the checksum, and voxels
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(VolumeError, match=r"a\.nii\.gz cannot be unpacked behind byte \d+: .*damaged"):
            open_volume(path)[...]
    for length in (len(whole) - 1, len(whole) - 8):  # voxels are whole, and what tells so is not
        path.write_bytes(whole[:length])
        with pytest.raises(VolumeError, match=rf"ends at byte {length}.*cut short"):
            open_volume(path)[...]


def test_large_packed_files_are_said_to_be_slow(tmp_path: Path) -> None:
    notes = []
    for planes in (10, 20):
        nibabel.Nifti1Image(np.zeros((2000, 2000, planes), np.uint8), np.eye(4)).to_filename(tmp_path / "a.nii.gz")
        header = read_header(tmp_path / "a.nii.gz")
        assert header is not None
        notes.append([note for note in header.notes if "packed by gzip, in one piece" in note])
    assert notes[0] == []
    assert len(notes[1]) == 1


@pytest.mark.parametrize("name", ["image.nii.gz", "scan.raw/14x20x24,uint8"])
def test_a_run_over_a_file_has_its_voxels_and_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = noise((14, 20, 24))
    image = nibabel.Nifti1Image(data.T, nibabel.affines.from_matvec(np.diag([0.004, 0.004, 0.04]), [1, 2, 3]))
    image.header.set_xyzt_units("micron")
    image.to_filename("image.nii.gz")
    Path("scan.raw").write_bytes(data.tobytes())
    recipe = {"net": {"name": "identity"}, "windows": {"shape": (8, 8, 8), "overlap": (4, 4, 4), "blend": "hann"}}
    vp.run(name, recipe, out="out.zarr", site="threads")
    out = vp.open("out.zarr")
    np.testing.assert_array_equal(out[...], data)
    if name == "image.nii.gz":
        assert (out.voxel_size_nm, out.origin_nm) == ((40, 4, 4), (3000, 2000, 1000))
