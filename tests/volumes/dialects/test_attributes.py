"""What attributes and programs say of axes, sizes and values, in many spellings: understood, or unknown and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import z5py
import zarr
from metadata import ARRAY, Files, dataset, lay
from volumes import noise

from volpipe.errors import SeveralVolumesError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import View, Volume, list_arrays, open_volume

pytestmark = pytest.mark.usefixtures("_one_hdf5_process")

SIZE = [0.5, 0.25, 0.125]  # z, y, x
UM = (500.0, 250.0, 125.0)
Attributes = dict[str, Any]  # Any: JSON


def write(folder: Path, format: str, data: np.ndarray, attributes: Attributes) -> Volume:
    """Write an array with attributes by the library of its format, and return it as volpipe sees it."""
    if format == "hdf5":
        with h5py.File(folder / "a.h5", "w") as file:
            file["raw"] = data
            file["raw"].attrs.update(attributes)
        return open_volume(folder / "a.h5")
    if format == "n5":
        with z5py.N5File(str(folder / "a.n5"), "w") as container:
            container.create_dataset("raw", data=data, chunks=(4,) * data.ndim, compression="gzip")
        tree = json.loads((folder / "a.n5/raw/attributes.json").read_text())
        (folder / "a.n5/raw/attributes.json").write_text(json.dumps(tree | attributes))
        return open_volume(folder / "a.n5/raw")
    zarr.create_array(str(folder / "a"), data=data, zarr_format=int(format[-1])).attrs.update(attributes)
    return open_volume(folder / "a")


UNDERSTOOD: list[Attributes] = [
    {"resolution": SIZE, "units": "um"},
    {"resolution": SIZE, "units": "um, um, um"},
    {"resolution": SIZE, "units": "[um,um,um]"},
    {"resolution": SIZE, "units": "['µm', 'µm', 'µm']"},
    {"resolution": SIZE, "units": ["um"]},
    {"resolution": SIZE, "units": ["um"] * 4},
    {"voxel_size": SIZE, "unit": "micrometre"},
    {"voxel_size": SIZE, "units": {"z": "um", "y": "microns", "x": "micrometers"}},
    {"voxel_size": [500, 0.25, 1250], "units": ["nm", "Microns", "Å"]},
    {"voxel_size": [500, 250, 1250], "units": "nm nm angstrom"},
    {"voxel_size": "0.5 x 0.25 x 0.125 um"},
    {"voxel_size": "0.5, 0.25, 0.125", "units": "um"},
    {"resolution": ["0.5 um", "0.25 um", "0.125 um"]},
    {"resolution": SIZE, "resolution_unit": "um", "units": "counts"},
    {"resolution": "high", "voxelsize": SIZE, "unit": "um"},
    {"element_size_um": SIZE},
    {"resolution": 0.5, "units": ["um"] * 3},
    {"voxel_size": {"x": 0.125, "y": 0.25, "z": 0.5}, "units": "um"},
    {"voxel_size_nm": list(UM)},
    {"resolution": [1, 1, 1], "pixelResolution": {"dimensions": SIZE[::-1], "unit": "um"}},
    {"pixelWidth": 0.125, "pixelHeight": 0.25, "pixelDepth": 0.5, "pixelUnit": "um"},
    {"transform": {"axes": ["z", "y", "x"], "scale": SIZE, "translate": [0, 0, 0], "units": "um"}},
]


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "hdf5"])
@pytest.mark.parametrize("number", range(len(UNDERSTOOD)))
def test_sizes_and_units_are_understood_in_every_spelling(tmp_path: Path, format: str, number: int) -> None:
    attributes = UNDERSTOOD[number]
    if format == "hdf5":  # which has no objects; n5-hdf5 keeps them as text
        attributes = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in attributes.items()}
    volume = write(tmp_path, format, noise((4, 5, 6)), attributes)
    assert volume.voxel_size_nm == pytest.approx((500,) * 3 if attributes.get("resolution") == 0.5 else UM)
    assert not any("voxel size" in note for note in volume.notes)


NOT_UNDERSTOOD: list[tuple[Attributes, str]] = [
    ({"resolution": SIZE, "units": "pixel"}, "0.5 × 0.25 × 0.125 in the unit 'pixel'"),
    ({"resolution": SIZE, "units": ["um", "nm"]}, "its units are ['um', 'nm'], for the axes z, y, x"),
    ({"resolution": SIZE, "units": ["um", "um", "nm", "nm"]}, "its units are"),
    ({"resolution": SIZE, "units": ["um", "lightyear", "um"]}, "in the unit 'lightyear'"),
    ({"resolution": SIZE, "units": ""}, "without a unit"),
    ({"resolution": SIZE, "units": ["", "", ""]}, "without a unit"),
    ({"resolution": SIZE, "units": 7}, "in the unit '7'"),
    ({"resolution": [0.5, 0, 0.125], "units": "um"}, "must be above 0"),
    ({"resolution": [0.5, -1, 0.125], "units": "um"}, "must be above 0"),
    ({"resolution": [0.5, float("nan"), 0.125], "units": "um"}, "its resolution is"),
    ({"resolution": "high"}, "its resolution is high"),
    ({"resolution": [0.5, 0.25], "units": "um"}, "its resolution has 2 numbers for the axes z, y, x"),
    ({"voxelsize": SIZE}, "without a unit"),
    ({"voxel_size": json.dumps({"x": 1, "y": 1})}, "its voxel_size is [None, 1, 1]"),
    ({"transform": json.dumps({"axes": ["y", "x"], "scale": [4, 4], "units": ["nm"] * 2})}, "nothing of z"),
    ({"pixelWidth": 0.125, "pixelHeight": 0.25, "pixelUnit": "um"}, "nothing of z"),
]


@pytest.mark.parametrize("format", ["zarr2", "hdf5"])
@pytest.mark.parametrize("number", range(len(NOT_UNDERSTOOD)))
def test_what_is_not_understood_is_unknown_and_said(tmp_path: Path, format: str, number: int) -> None:
    attributes, words = NOT_UNDERSTOOD[number]
    volume = write(tmp_path, format, noise((4, 5, 6)), attributes)
    assert volume.voxel_size_nm is None
    assert [note for note in volume.notes if note.startswith("voxel size unknown: ") and words in note]


def test_a_size_without_a_word_of_a_unit_is_nm_by_habit_and_said(tmp_path: Path) -> None:
    volume = write(tmp_path, "zarr2", noise((4, 5, 6)), {"resolution": [40, 4, 4]})
    assert volume.voxel_size_nm == (40, 4, 4)
    words = "voxel size guessed: it says 40 × 4 × 4 without a unit, taken as nm; input.voxel_size_nm gives another"
    assert words in volume.notes
    given = open_volume(tmp_path / "a", view=View(voxel_size_nm=(30.0, 4.0, 4.0)))
    assert words not in given.notes


def test_an_offset_that_fits_no_axes_counts_as_0_and_is_said(tmp_path: Path) -> None:
    volume = write(tmp_path, "zarr2", noise((4, 5, 6)), {"resolution": [40, 4, 4], "units": "nm", "offset": [7, 8]})
    assert (volume.voxel_size_nm, volume.origin_nm) == ((40, 4, 4), (0, 0, 0))
    assert "its offset is [7, 8], for the axes z, y, x; it counts as 0" in volume.notes


def test_attributes_of_hdf5_are_text_in_every_type(tmp_path: Path) -> None:
    units = [
        np.bytes_(b"um"),
        np.array([b"um"] * 3, "S8"),
        np.array(["um"] * 3, h5py.string_dtype()),
        np.array([b"um"] * 3, object),
        "\xb5m".encode("latin-1"),
        np.array([["um"] * 3], h5py.string_dtype()),
    ]
    for number, unit in enumerate(units):
        with h5py.File(tmp_path / "a.h5", "a") as file:
            file[f"raw{number}"] = noise((4, 5, 6))
            file[f"raw{number}"].attrs["resolution"] = SIZE
            if isinstance(unit, np.ndarray) and unit.dtype == object and isinstance(unit.flat[0], bytes):
                file[f"raw{number}"].attrs.create("units", unit, dtype=h5py.string_dtype("ascii"))
            else:
                file[f"raw{number}"].attrs["units"] = unit
    for number in range(len(units)):
        assert open_volume(tmp_path / "a.h5", f"raw{number}").voxel_size_nm == pytest.approx(UM), number


# ---- axes


NAMES: list[tuple[Attributes, str]] = [
    ({"axis_names": ["x", "y", "z"]}, "xyz"),
    ({"axis_names": ["c^", "z", "y", "x"]}, "czyx"),
    ({"axis_names": ["Z", "Y", "X", "channels"]}, "zyxc"),
    ({"axes": ["x", "y", "z"]}, "xyz"),
    ({"axes": "xyz"}, "xyz"),
    ({"axes": "x, z, y"}, "xzy"),
    ({"axes": [{"name": "x", "type": "space"}, {"name": "y"}, {"name": "z"}]}, "xyz"),
    ({"_ARRAY_DIMENSIONS": ["time", "x", "y", "z"]}, "txyz"),
    ({"dimension_names": ["width", "height", "depth"]}, "xyz"),
    ({"transform": {"axes": ["x", "y", "z"], "scale": [4, 5, 40], "units": ["nm"] * 3}}, "xyz"),
]


@pytest.mark.parametrize("format", ["zarr2", "zarr3", "hdf5"])
@pytest.mark.parametrize("number", range(len(NAMES)))
def test_names_of_axes_are_honoured_and_lists_follow_them(tmp_path: Path, format: str, number: int) -> None:
    attributes, letters = NAMES[number]
    sizes = {"z": 40, "y": 5, "x": 4}
    lists = {"voxel_size": [sizes[axis] for axis in letters if axis in sizes], "units": ["nm"] * 3}
    if format == "hdf5":
        attributes = {
            key: json.dumps(value) if isinstance(value, dict) or isinstance(value[0], dict) else value
            for key, value in attributes.items()
        }
    data = noise(tuple({"x": 7, "y": 6, "z": 5, "c": 2, "t": 1}[axis] for axis in letters))
    volume = write(tmp_path, format, data, attributes | lists)
    assert (volume.axes, volume.voxel_size_nm, volume.notes) == (tuple(letters), (40, 5, 4), ())
    expected = np.einsum(f"{letters}->{''.join(axis for axis in 'tczyx' if axis in letters)}", data).reshape(
        -1, 5, 6, 7
    )
    np.testing.assert_array_equal(volume.open().read(Box((0, 0, 0), (5, 6, 7))), expected)


def test_dimensions_of_netcdf_name_the_axes(tmp_path: Path) -> None:
    data = noise((7, 6, 5))
    with h5py.File(tmp_path / "a.nc", "w") as file:
        file["raw"] = data
        for dim, (name, n) in zip(file["raw"].dims, zip("xyz", data.shape, strict=True), strict=True):
            file[name] = np.arange(n, dtype="f4")
            file[name].make_scale(name)
            dim.attach_scale(file[name])
    volume = open_volume(tmp_path / "a.nc", "raw")
    assert (volume.axes, volume.notes) == (("x", "y", "z"), ())
    np.testing.assert_array_equal(volume.open().read(Box.from_shape((5, 6, 7)))[0], data.T)


def test_names_of_axes_that_are_not_understood_are_said(tmp_path: Path) -> None:
    volume = write(tmp_path, "zarr2", noise((4, 5, 6)), {"axis_names": ["dim_0", "dim_1", "dim_2"]})
    assert volume.axes == ("z", "y", "x")
    words = "axes guessed: z, y, x; the array names them dim_0, dim_1, dim_2, which is not understood"
    assert volume.notes == (words,)


def test_an_axis_of_samples_is_refused_where_it_has_several(tmp_path: Path) -> None:
    volume = write(tmp_path, "zarr2", noise((3, 4, 5, 6)), {"axis_names": ["sample^", "z", "y", "x"]})
    with pytest.raises(VolumeError, match="axis sample has 3 entries"):
        volume.open().read(Box((0, 0, 0), (4, 5, 6)))


def test_lists_of_n5_are_in_the_order_of_the_program_that_wrote_them(tmp_path: Path) -> None:
    """Java's and neuroglancer's follow `dimensions`, x first; those of Python's programs follow numpy."""
    data = noise((7, 6, 5))  # x, y, z in numpy's order
    cases: list[tuple[Attributes, str, str]] = [
        ({"axes": ["z", "y", "x"], "resolution": [40, 5, 4], "units": ["nm"] * 3}, "xyz", "the fastest first"),
        ({"axis_names": ["x", "y", "z"], "voxel_size": [4, 5, 40], "units": ["nm"] * 3}, "xyz", ""),
        ({"_ARRAY_DIMENSIONS": ["x", "y", "z"], "resolution": [4, 5, 40], "units": "nm"}, "xyz", ""),
        ({"axes": ["x", "y", "z"], "resolution": [4, 5, 40], "units": "nm"}, "zyx", ""),
        ({"pixelResolution": {"dimensions": [4, 5, 40], "unit": "nm"}}, "zyx", "axes guessed: z, y, x"),
        ({"pixelWidth": 4, "pixelHeight": 5, "pixelDepth": 40, "pixelUnit": "nm"}, "zyx", "axes guessed: z, y, x"),
        (
            {"transform": {"axes": ["x", "y", "z"], "scale": [4, 5, 40], "units": ["nm"] * 3}},
            "zyx",
            "its transform lists the axes as x, y, z; the voxels are z, y, x",
        ),
    ]
    for number, (attributes, letters, words) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        volume = write(tmp_path / str(number), "n5", data, attributes)
        assert (volume.axes, volume.voxel_size_nm) == (tuple(letters), (40, 5, 4)), attributes
        assert words in "; ".join(volume.notes) and (words or not volume.notes), volume.notes
        expected = data.T if letters == "xyz" else data
        np.testing.assert_array_equal(volume.open().read(Box.from_shape(expected.shape))[0], expected)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"resolution": [4, 5, 6], "units": ["nm"] * 4}, None),
        ({"resolution": [4, 5, 6], "units": ["nm", "um"]}, "in the unit"),
        ({"voxel_size": [4, 5, 6], "units": "nm"}, "its voxel_size is"),
        ({"resolution": "4x5x6nm"}, "its resolution is 4x5x6nm"),
        ({"pixelResolution": {"dimensions": [4, 5, 6], "unit": "px"}}, "in the unit 'px'"),
    ],
)
def test_sizes_of_n5_not_understood_are_said(tmp_path: Path, attributes: Attributes, words: str | None) -> None:
    volume = write(tmp_path, "n5", noise((4, 5, 6)), attributes)
    assert volume.voxel_size_nm == ((6, 5, 4) if words is None else None)
    assert words is None or [note for note in volume.notes if note.startswith("voxel size unknown: ") and words in note]


# ---- values


@pytest.mark.parametrize("format", ["zarr2", "hdf5"])
def test_values_that_mean_others_are_read_as_stored_and_said(tmp_path: Path, format: str) -> None:
    meant = {"scale_factor": 0.5, "add_offset": 10.0, "_FillValue": -999, "missing_value": -999}
    volume = write(tmp_path, format, noise((4, 5, 6), "int16"), meant)
    text = "; ".join(volume.notes)
    assert "the file means 0.5 × value + 10" in text and text.count("voxels of value -999 are no data") == 1
    (tmp_path / "b").mkdir()
    plain = write(tmp_path / "b", format, noise((4, 5, 6)), {"scale_factor": 1.0, "_FillValue": float("nan")})
    assert plain.notes == ("axes guessed: z, y, x",)


def test_signed_integers_that_netcdf_means_as_unsigned_are_read_so(tmp_path: Path) -> None:
    data = noise((4, 5, 6), "int16")
    volume = write(tmp_path, "hdf5", data, {"_Unsigned": "true"})
    assert volume.dtype == np.uint16
    np.testing.assert_array_equal(volume.open()[...], data.view(np.uint16))


def letters(value: object) -> np.ndarray:
    """Return a text as Imaris keeps it: an array of single letters."""
    return np.array([letter.encode() for letter in str(value)], "S1")


def write_imaris(path: Path, data: np.ndarray, num_channels: int = 1, **changes: object) -> None:
    """Write `data` and its half in each axis as levels of an Imaris file, padded to chunks of 8 × 16 × 16."""
    with h5py.File(path, "w") as file:
        for channel in range(num_channels):
            for level, values in enumerate((data + channel, (data + channel)[: data.shape[0] // 2, ::2, ::2])):
                group = file.create_group(f"DataSet/ResolutionLevel {level}/TimePoint 0/Channel {channel}")
                padded = np.pad(values, [(0, -n % c) for n, c in zip(values.shape, (8, 16, 16), strict=True)])
                group.create_dataset("Data", data=padded, chunks=(8, 16, 16), compression="gzip")
                for axis, n in zip("ZYX", values.shape, strict=True):
                    group.attrs[f"ImageSize{axis}"] = letters(changes.get(f"ImageSize{axis}", n))
        image = file.create_group("DataSetInfo/Image")
        image.attrs["Unit"] = letters(changes.get("Unit", "um"))
        for i, (low, high) in enumerate(((1, 21), (0, 12), (-10, 10))):  # x, y, z
            image.attrs[f"ExtMin{i}"], image.attrs[f"ExtMax{i}"] = letters(f"{low:.3f}"), letters(f"{high:.3f}")


def test_imaris_has_the_shape_that_the_file_says_and_not_the_padding(tmp_path: Path) -> None:
    data = noise((10, 30, 50))
    write_imaris(tmp_path / "a.ims", data)
    volume = open_volume(tmp_path / "a.ims")
    assert (volume.shape, volume.levels, volume.notes) == ((10, 30, 50), (volume.key, volume.levels[1]), ())
    assert volume.voxel_size_nm == pytest.approx((2000, 400, 400))
    assert volume.origin_nm == pytest.approx((-10_000 + 1000, 200, 1000 + 200))  # the centre of the first voxel
    np.testing.assert_array_equal(volume[...], data)
    np.testing.assert_array_equal(
        volume.open().read_mirrored(Box((8, 28, 48), (12, 32, 52)))[0, 2:],
        data[[8, 7]][:, [28, 29, 28, 27]][:, :, [48, 49, 48, 47]],
    )
    coarse = open_volume(tmp_path / "a.ims", level=1)
    assert (coarse.shape, coarse.voxel_size_nm) == ((5, 15, 25), pytest.approx((4000, 800, 800)))
    assert coarse.origin_nm == pytest.approx((-10_000 + 2000, 400, 1000 + 400))


def test_channels_of_imaris_are_volumes_to_choose_from(tmp_path: Path) -> None:
    data = noise((10, 30, 50), "uint16") // 2
    write_imaris(tmp_path / "a.ims", data, num_channels=2, Unit="furlong")
    with pytest.raises(SeveralVolumesError, match="ResolutionLevel 0/TimePoint 0/Channel 1/Data"):
        open_volume(tmp_path / "a.ims")
    volume = open_volume(tmp_path / "a.ims/DataSet/ResolutionLevel 0/TimePoint 0/Channel 1/Data")
    np.testing.assert_array_equal(volume[...], data + 1)
    assert volume.voxel_size_nm is None and "in the unit 'furlong'" in volume.notes[-1]
    write_imaris(tmp_path / "b.ims", data, ImageSizeX=70)
    with pytest.raises(VolumeError, match=r"\(16, 32, 64\) voxels, and the file says \(10, 30, 70\)"):
        open_volume(tmp_path / "b.ims")
    write_imaris(tmp_path / "c.ims", data, ImageSizeX="wide")
    assert open_volume(tmp_path / "c.ims").shape == (16, 32, 64)
    assert "this file does not say the size of the image" in "; ".join(open_volume(tmp_path / "c.ims").notes)


XML = """<?xml version="1.0" encoding="UTF-8"?>
<SpimData version="0.2"><BasePath type="relative">.</BasePath><SequenceDescription>
<ImageLoader format="bdv.hdf5"><hdf5 type="relative">{file}</hdf5></ImageLoader><ViewSetups>
<ViewSetup><id>0</id><name>a</name><size>12 10 8</size>
<voxelSize><unit>micrometer</unit><size>0.1 0.2 0.5</size></voxelSize></ViewSetup>
<ViewSetup><id>1</id><name>b</name><size>12 10 8</size>
<voxelSize><unit>{unit}</unit><size>1 1 1</size></voxelSize></ViewSetup></ViewSetups></SequenceDescription>
<ViewRegistrations><ViewRegistration timepoint="0" setup="0"><ViewTransform type="affine">
<affine>{affine}</affine></ViewTransform></ViewRegistration></ViewRegistrations></SpimData>
"""
SCALED = "0.1 0 0 0 0 0.2 0 0 0 0 0.5 0"


def write_bdv(
    folder: Path, data: np.ndarray, views: tuple[str, ...] = ("t00000/s00",), *, affine: str = SCALED, **named: Any
) -> None:
    """Write `data` and its half along x and y as BigDataViewer does, with the XML beside it."""
    with h5py.File(folder / "a.h5", "w") as file:
        for view in views:
            file[f"{view}/0/cells"], file[f"{view}/1/cells"] = data, data[:, ::2, ::2]
            setup = file.require_group(view.rpartition("/")[2])
            if "resolutions" not in setup:
                setup["resolutions"] = np.array([[1, 1, 1], [2, 2, 1]], "f8")
                setup["subdivisions"] = np.array([[4, 4, 4], [4, 4, 4]], "i4")
            setup.attrs.update(named)
    (folder / "a.xml").write_text(XML.format(file="a.h5", unit="pixel", affine=affine))


def test_signed_voxels_of_bigdataviewer_are_unsigned_and_sized_by_the_xml(tmp_path: Path) -> None:
    data = noise((8, 10, 12), "int16")
    assert (data < 0).any()
    write_bdv(tmp_path, data)
    volume = open_volume(tmp_path / "a.h5")
    assert (volume.key, volume.levels) == ("t00000/s00/0/cells", ("t00000/s00/0/cells", "t00000/s00/1/cells"))
    assert volume.voxel_size_nm == pytest.approx((500, 200, 100))
    np.testing.assert_array_equal(volume[...], data.view(np.uint16))
    assert "voxels are stored as int16 and read as uint16, as BigDataViewer means them" in volume.notes
    coarse = open_volume(tmp_path / "a.xml", level=1)
    assert (coarse.path, coarse.voxel_size_nm) == (str(tmp_path / "a.h5"), pytest.approx((500, 400, 200)))
    assert coarse.origin_nm == pytest.approx((0, 100, 50))


@pytest.mark.parametrize(("named", "meant"), [("int16", "int16"), ("uint16", "uint16"), ("float32", "int16")])
def test_the_type_that_bigdataviewer_names_counts(tmp_path: Path, named: str, meant: str) -> None:
    data = noise((8, 10, 12), "int16")
    write_bdv(tmp_path, data, dataType=named)
    volume = open_volume(tmp_path / "a.h5")
    np.testing.assert_array_equal(volume[...], data.view(meant))
    assert ("the file says float32" in "; ".join(volume.notes)) == (named == "float32")


def test_views_of_bigdataviewer_are_volumes_to_choose_from(tmp_path: Path) -> None:
    views = ("t00000/s00", "t00000/s01", "t00001/s00")
    write_bdv(tmp_path, noise((8, 10, 12), "uint16"), views, affine="1 0 0 7 0 1 0 0 0 0 1 0")
    with pytest.raises(SeveralVolumesError, match="holds 3 volumes; choose one by its key: " + ", ".join(views)):
        open_volume(tmp_path / "a.xml")
    assert len(list_arrays(tmp_path / "a.h5")) == 6
    assert "a.xml moves or turns the view; volpipe leaves it at 0" in open_volume(tmp_path / "a.xml/t00000/s00").notes
    unknown = open_volume(tmp_path / "a.h5", "t00000/s01")
    assert unknown.voxel_size_nm is None and "in the unit 'pixel'" in unknown.notes[-1]
    (tmp_path / "a.xml").unlink()
    (tmp_path / "b.xml").symlink_to("gone.xml")
    assert "a.xml, which is not beside the file" in open_volume(tmp_path / "a.h5", views[0]).notes[-1]


def test_partitions_of_bigdataviewer_are_read_through_the_file_that_links_them(tmp_path: Path) -> None:
    data = noise((8, 10, 12), "int16")
    write_bdv(tmp_path, data)
    (tmp_path / "a.h5").rename(tmp_path / "a-00-00.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file, h5py.File(tmp_path / "a-00-00.h5", "a") as part:
        file["t00000/s00"] = h5py.ExternalLink("a-00-00.h5", "t00000/s00")
        file["s00/resolutions"] = part["s00/resolutions"][...]
        del part["s00"]
    volume = open_volume(tmp_path / "a.xml")
    np.testing.assert_array_equal(volume[...], data.view(np.uint16))
    assert volume.voxel_size_nm == pytest.approx((500, 200, 100))


def test_an_xml_of_images_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(XML.format(file="gone.h5", unit="um", affine=SCALED))
    with pytest.raises(VolumeError, match=r"a\.xml describes .*gone\.h5, which is not there"):
        open_volume(tmp_path / "a.xml")
    (tmp_path / "a.xml").write_text(XML.format(file="../gone.h5", unit="um", affine=SCALED))
    with pytest.raises(VolumeError, match=r"a\.xml refers to \.\./gone\.h5, which does not lie in its folder"):
        open_volume(tmp_path / "a.xml")
    (tmp_path / "a.xml").write_text('<SpimData version="0.2"><SequenceDescription/></SpimData>')
    with pytest.raises(VolumeError, match="describes images of the kind 'unknown'"):
        open_volume(tmp_path / "a.xml")
    (tmp_path / "b.xml").write_text("<other/>")
    with pytest.raises(VolumeError, match="looks like a text"):
        open_volume(tmp_path / "b.xml")


def test_the_n5_of_bigdataviewer_has_the_unit_of_its_xml(tmp_path: Path) -> None:
    factors = [[1, 1, 1], [2, 2, 1]]
    files: Files = {"setup0/attributes.json": {"downsamplingFactors": factors, "dataType": "uint8"}}
    files["setup0/timepoint0/attributes.json"] = {"multiScale": True, "resolution": [0.1, 0.2, 0.5]}
    files |= {f"setup0/timepoint0/s{level}/attributes.json": ARRAY for level in (0, 1)}
    lay(tmp_path / "a.n5", files)
    assert open_volume(tmp_path / "a.n5").voxel_size_nm is None
    text = XML.format(file="a.n5", unit="um", affine=SCALED).replace("hdf5", "n5")
    (tmp_path / "a.xml").write_text(text)
    for path in (tmp_path / "a.n5", tmp_path / "a.xml"):
        assert open_volume(path).voxel_size_nm == pytest.approx((500, 200, 100))
    coarse = open_volume(tmp_path / "a.xml", level=1)
    assert (coarse.path, coarse.voxel_size_nm) == (str(tmp_path / "a.n5"), pytest.approx((500, 400, 200)))
    assert coarse.origin_nm == pytest.approx((0, 100, 50))


@pytest.mark.parametrize("names", ["xyz", "zyx"])
def test_axes_of_ome_in_n5_are_in_the_order_of_java_or_of_python(tmp_path: Path, names: str) -> None:
    """Java (n5-universe) lists them as N5 does dimensions, x first; the array is stored alike."""
    sizes = {"x": 4, "y": 5, "z": 40}
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in names]
    image = {"axes": axes, "datasets": [dataset("s0", {"type": "scale", "scale": [sizes[axis] for axis in names]})]}
    lay(tmp_path / "a.n5", {"attributes.json": {"n5": "4.0.0", "multiscales": [image]}, "s0/attributes.json": ARRAY})
    volume = open_volume(tmp_path / "a.n5")
    assert (volume.axes, volume.shape, volume.voxel_size_nm) == (("z", "y", "x"), (8, 10, 12), (40, 5, 4))
