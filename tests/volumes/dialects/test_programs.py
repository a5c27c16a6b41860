"""HDF5 of programs that mean more than HDF5 says: Imaris's padded data, BigDataViewer's views and their XML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from metadata import ARRAY, Files, dataset, lay
from volumes import noise

from volpipe.errors import SeveralVolumesError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import list_arrays, open_volume


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
