"""Voxel sizes and origins, as every dialect of metadata gives them: 4, 5, 6 along x, y, z, in nm unless it says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from metadata import ARRAY, COSEM, GROUP3, SCALE, ZARR3, ZARRAY, Files, Tree, dataset, lay, n5, ome, ome_zarr, zarr3

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale, open_volume

Place = tuple[float, float, float]


def levels_n5(group: Tree, *, above: str = "", **coarse: object) -> Files:
    """Return the files of N5 levels s0 and s1, s1 with `coarse` among its attributes, in a group of these."""
    levels = {f"{above}s0/attributes.json": ARRAY, f"{above}s1/attributes.json": ARRAY | coarse}
    return {"attributes.json": group} | levels


def shift(z: float, y: float, x: float) -> Tree:
    return {"type": "translation", "translation": [z, y, x]}


# name: files, key, voxel size and origin, both (z, y, x) in nm
PLACES: dict[str, tuple[Files, str, Place | None, Place]] = {
    "nothing": (n5(), "", None, (0, 0, 0)),
    "resolution": (n5(resolution=[4, 5, 6], units=["nm"] * 3), "", (6, 5, 4), (0, 0, 0)),
    "resolution without a unit": (n5(resolution=[4, 5, 6], offset=[1, 2, 3]), "", None, (0, 0, 0)),
    "resolution without a unit beside pixelResolution": (
        n5(resolution=[1, 1, 1], pixelResolution={"dimensions": [4, 5, 6], "unit": "nm"}),
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "resolution and units": (n5(resolution=[4, 5, 6], units=["um", "nm", "angstrom"]), "", (0.6, 5, 4000), (0, 0, 0)),
    "resolution in an unknown unit": (n5(resolution=[4, 5, 6], units=["nm", "s", "nm"]), "", None, (0, 0, 0)),
    "offset": (n5(resolution=[4, 5, 6], units=["nm"] * 3, offset=[1, 2, 3]), "", (6, 5, 4), (3, 2, 1)),
    "pixelResolution": (n5(pixelResolution={"dimensions": [4, 5, 6], "unit": "µm"}), "", (6000, 5000, 4000), (0, 0, 0)),
    "pixelResolution as a list": (n5(pixelResolution=[4, 5, 6]), "", None, (0, 0, 0)),
    "pixelResolution without a unit": (n5(pixelResolution={"dimensions": [4, 5, 6]}), "", None, (0, 0, 0)),
    "pixelResolution in pixels": (n5(pixelResolution={"dimensions": [4, 5, 6], "unit": "pixel"}), "", None, (0, 0, 0)),
    "a resolution of nought": (n5(resolution=[4, 0, 6]), "", None, (0, 0, 0)),
    "axes": (n5(axes=["z", "x", "y"], resolution=[6, 4, 5], units=["nm"] * 3), "", (6, 5, 4), (0, 0, 0)),
    "three numbers for four axes": (
        n5(dimensions=[9, 9, 9, 3], blockSize=[4, 4, 4, 1], resolution=[4, 5, 6], units=["nm"] * 3),
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "downsamplingFactors": (
        levels_n5({"resolution": [4, 5, 6], "units": ["nm"] * 3}, downsamplingFactors=[2, 2, 1]),
        "s1",
        (6, 10, 8),
        (0, 2.5, 2),
    ),
    "downsamplingFactors of the group": (
        levels_n5({"resolution": [4, 5, 6], "units": ["nm"] * 3, "downsamplingFactors": [[1, 1, 1], [4, 2, 1]]}),
        "s1",
        (6, 10, 16),
        (0, 2.5, 6),
    ),
    "scales above a channel": (
        levels_n5(
            {"pixelResolution": {"unit": "nm", "dimensions": [4, 5, 6]}, "scales": [[1, 1, 1], [2, 2, 1]]}, above="c0/"
        ),
        "c0/s1",
        (6, 10, 8),
        (0, 2.5, 2),
    ),
    "an offset of the level's own": (
        levels_n5({"resolution": [4, 5, 6], "units": ["nm"] * 3}, downsamplingFactors=[2, 2, 1], offset=[7, 8, 9]),
        "s1",
        (6, 10, 8),
        (9, 8, 7),
    ),
    "COSEM transform": (n5(transform=COSEM), "", (6, 5, 4), (3, 2, 1)),
    "COSEM transform in x, y, z": (
        n5(
            transform={"axes": ["x", "y", "z"], "scale": [4, 5, 6], "translate": [1, 2, 3], "units": ["mm", "nm", "nm"]}
        ),
        "",
        (6, 5, 4e6),
        (3, 2, 1e6),
    ),
    "COSEM multiscales": (
        {
            "attributes.json": {"multiscales": [{"datasets": [{"path": "fine", "transform": COSEM}]}]},
            "fine/attributes.json": ARRAY | {"transform": {**COSEM, "scale": [9, 9, 9]}},
        },
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "COSEM multiscales whose arrays say it": (
        {
            "attributes.json": {"multiscales": [{"datasets": [{"path": "fine"}]}]},
            "fine/attributes.json": ARRAY | {"transform": COSEM},
        },
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "COSEM in Zarr": ({".zarray": ZARRAY, ".zattrs": {"transform": COSEM}}, "", (6, 5, 4), (3, 2, 1)),
    "resolution in Zarr": ({".zarray": ZARRAY, ".zattrs": {"resolution": [6, 5, 4]}}, "", (6, 5, 4), (0, 0, 0)),
    "voxel_size in Zarr": (
        zarr3(attributes={"voxel_size": [6, 5, 4], "offset": [3, 2, 1], "units": ["um"] * 3}),
        "",
        (6000, 5000, 4000),
        (3000, 2000, 1000),
    ),
    "OME 0.4": (
        ome_zarr(ome(dataset("0", SCALE, {"type": "translation", "translation": [3, 2, 1]}))),
        "",
        (6, 5, 4),
        (3, 2, 1),
    ),
    "OME 0.5": (
        {
            "zarr.json": GROUP3
            | {"attributes": {"ome": {"version": "0.5", "multiscales": [ome(dataset("0", SCALE))]}}},
            "0/zarr.json": ZARR3,
        },
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "OME scaled twice": (
        ome_zarr(
            ome(
                dataset("0", {"type": "scale", "scale": [2, 2, 2]}, {"type": "translation", "translation": [1, 1, 1]}),
                coordinateTransformations=[
                    {"type": "scale", "scale": [3, 2.5, 2]},
                    {"type": "translation", "translation": [10, 20, 30]},
                ],
            )
        ),
        "",
        (6, 5, 4),
        (13, 22.5, 32),
    ),
    "OME scales in a list": (
        ome_zarr(ome(dataset("0", {"type": "scale", "scale": [2, 5, 1]}, {"type": "scale", "scale": [3, 1, 4]}))),
        "",
        (6, 5, 4),
        (0, 0, 0),
    ),
    "OME translations in a list, before and after a scale": (
        ome_zarr(
            ome(
                dataset("0", shift(10, 20, 30), shift(1, 2, 3), SCALE, shift(4, 5, 6)),
                coordinateTransformations=[shift(1, 1, 1), {"type": "scale", "scale": [2, 1, 1]}],
            )
        ),
        "",
        (12, 5, 4),
        ((11 * 6 + 4 + 1) * 2, 22 * 5 + 5 + 1, 33 * 4 + 6 + 1),
    ),
    "OME without units": (
        ome_zarr({"axes": [{"name": a, "type": "space"} for a in "zyx"], "datasets": [dataset("0", SCALE)]}),
        "",
        None,
        (0, 0, 0),
    ),
    "OME 0.3": (ome_zarr({"axes": ["z", "y", "x"], "datasets": [{"path": "0"}]}), "", None, (0, 0, 0)),
    "OME axes of other names": (
        ome_zarr(
            {
                "axes": [{"name": n, "type": "space", "unit": "angstrom"} for n in ("depth", "height", "width")],
                "datasets": [dataset("0", SCALE)],
            }
        ),
        "",
        (0.6, 0.5, 0.4),
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("dialect", PLACES)
def test_voxel_size_and_origin_are_understood(tmp_path: Path, dialect: str) -> None:
    files, key, size, origin = PLACES[dialect]
    volume = open_volume(lay(tmp_path / "v", files), key or None)
    assert volume.voxel_size_nm == pytest.approx(size) if size else volume.voxel_size_nm is None
    assert volume.origin_nm == pytest.approx(origin)


def test_units_are_lengths_in_every_spelling(tmp_path: Path) -> None:
    spellings = {
        1e-3: ["pm"],
        0.1: ["angstrom", "Å", "Ångström"],
        1.0: ["nm", "nanometer", "Nanometers", "nanometre"],
        1e3: ["um", "µm", "μm", "micron", "microns", "micrometer"],
        1e6: ["mm", "millimeter"],
        1e9: ["m", "meter"],
    }
    for factor, unit in [(factor, unit) for factor, units in spellings.items() for unit in units]:
        lay(tmp_path / "v", n5(pixelResolution={"dimensions": [4, 5, 6], "unit": unit}))
        assert open_volume(tmp_path / "v").voxel_size_nm == pytest.approx((6 * factor, 5 * factor, 4 * factor)), unit


def write_webknossos(folder: Path, scale: object, order: object, mag: str = "2-2-1") -> np.ndarray:
    """Write an array (c, x, y, z) without names of axes, as WEBKNOSSOS does, and what its dataset says of it."""
    stored = np.arange(12 * 16 * 20, dtype=np.uint16).reshape(1, 12, 16, 20)
    array = zarr.create_array(
        store=str(folder / "color" / mag), shape=stored.shape, chunks=(1, 8, 8, 8), dtype=stored.dtype, zarr_format=2
    )
    array[...] = stored
    entry = {"mag": [2, 2, 1], "path": f"./color/{mag}", "axisOrder": order}
    tree = {"scale": scale, "dataLayers": [{"name": "color", "mags": [entry]}]}
    (folder / "datasource-properties.json").write_text(json.dumps(tree))
    return stored


@pytest.mark.parametrize("scale", [{"factor": [0.004, 0.004, 0.03], "unit": "micrometer"}, [4, 4, 30]])
def test_webknossos_says_axes_and_sizes_of_the_dataset_around(tmp_path: Path, scale: object) -> None:
    stored = write_webknossos(tmp_path, scale, {"c": 0, "x": 1, "y": 2, "z": 3})
    volume = open_volume(tmp_path / "color" / "2-2-1")
    assert (volume.axes, volume.spatial_shape, volume.notes) == (("c", "x", "y", "z"), (20, 16, 12), ())
    assert volume.voxel_size_nm == pytest.approx((30.0, 8.0, 8.0))
    assert volume.origin_nm == pytest.approx((0.0, 2.0, 2.0))
    box = Box((3, 4, 5), (17, 12, 12))
    assert np.array_equal(volume.open().read(box), stored[:, 5:12, 4:12, 3:17].transpose(0, 3, 2, 1))


@pytest.mark.parametrize(
    "order", [{"c": 0, "x": 1, "y": 2, "z": 4}, {"x": 0}, "cxyz", None, {"c": 0, "x": "1", "y": 2, "z": 3}]
)
def test_an_order_of_axes_that_is_none_leaves_them_a_guess_and_says_so(tmp_path: Path, order: object) -> None:
    write_webknossos(tmp_path, [4, 4, 30], order)
    volume = open_volume(tmp_path / "color" / "2-2-1")
    assert volume.axes == ("c", "z", "y", "x") and "axes guessed: c, z, y, x" in volume.notes


# ---- groups of levels that volpipe writes


FORMATS = ("ome-zarr-0.5", "ome-zarr-0.6", "ome-zarr-0.4", "n5", "zarr2")
AXES_OME = [{"name": "c", "type": "channel"}] + [{"name": a, "type": "space", "unit": "nanometer"} for a in "zyx"]
DATASETS_OME = [
    {
        "path": path,
        "coordinateTransformations": [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}],
    }
    for path, scale, shift in [("s0", [1, 40, 4, 8], [0, 5, 6, 7]), ("s1", [1, 40, 8, 16], [0, 5, 8, 11])]
]


def make_pyramid(path: Path, format: str, voxel: tuple[float, float, float] | None) -> None:
    arrays = {"ome-zarr-0.5": "zarr3", "ome-zarr-0.6": "zarr3", "ome-zarr-0.4": "zarr2"}.get(format, format)
    for key, shape in {"s0": (2, 8, 8, 8), "s1": (2, 8, 4, 4)}.items():
        spec = ArraySpec(shape=shape, dtype=np.dtype("u1"), chunks=(1, 4, 4, 4), axes=("c", "z", "y", "x"))
        create_array(path, key, spec, arrays)
    levels = (Level("s0"), Level("s1", (1.0, 2.0, 2.0)))
    group = Multiscale(levels, ("c", "z", "y", "x"), voxel, (5.0, 6.0, 7.0) if voxel else (0.0, 0.0, 0.0), "cells")
    create_multiscale(path, group, format=format, attributes={"net": "unet"})


@pytest.mark.parametrize("format", FORMATS)
def test_a_pyramid_says_where_its_levels_lie(tmp_path: Path, format: str) -> None:
    make_pyramid(tmp_path / "p", format, (40.0, 4.0, 8.0))
    make_pyramid(tmp_path / "p", format, (40.0, 4.0, 8.0))
    for level, size, origin in [(0, (40, 4, 8), (5, 6, 7)), (1, (40, 8, 16), (5, 8, 11))]:
        for volume in (open_volume(tmp_path / "p", level=level), open_volume(tmp_path / "p", f"s{level}")):
            assert volume.levels == ("s0", "s1")
            assert (volume.key, volume.axes) == (f"s{level}", ("c", "z", "y", "x"))
            assert (volume.voxel_size_nm, volume.origin_nm) == (size, origin)


@pytest.mark.parametrize("format", FORMATS)
def test_a_pyramid_of_unknown_voxel_size_stays_so(tmp_path: Path, format: str) -> None:
    make_pyramid(tmp_path / "p", format, None)
    volume = open_volume(tmp_path / "p", level=1)
    assert (volume.voxel_size_nm, volume.origin_nm, volume.shape) == (None, (0, 0, 0), (2, 8, 4, 4))
    assert volume.levels == ("s0", "s1")


def test_ome_zarr_0_5_is_written_as_its_specification_says(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "ome-zarr-0.5", (40.0, 4.0, 8.0))
    group = json.loads((tmp_path / "p/zarr.json").read_text())
    assert group == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {
            "ome": {"version": "0.5", "multiscales": [{"name": "cells", "axes": AXES_OME, "datasets": DATASETS_OME}]},
            "volpipe": {"net": "unet"},
        },
    }
    assert zarr.open_group(str(tmp_path / "p"), mode="r")["s1"].metadata.dimension_names == ("c", "z", "y", "x")


def test_ome_zarr_0_4_is_written_as_its_specification_says(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "ome-zarr-0.4", (40.0, 4.0, 8.0))
    assert json.loads((tmp_path / "p/.zattrs").read_text()) == {
        "volpipe": {"net": "unet"},
        "multiscales": [{"version": "0.4", "name": "cells", "axes": AXES_OME, "datasets": DATASETS_OME}],
    }
    assert zarr.open_group(str(tmp_path / "p"), mode="r")["s1"].metadata.dimension_separator == "/"


def test_n5_pyramids_speak_the_dialects_of_their_viewers(tmp_path: Path) -> None:
    make_pyramid(tmp_path / "p", "n5", (40.0, 4.0, 8.0))
    group = json.loads((tmp_path / "p/attributes.json").read_text())
    transforms = [
        {
            "axes": ["c", "z", "y", "x"],
            "scale": d["coordinateTransformations"][0]["scale"],
            "translate": d["coordinateTransformations"][1]["translation"],
            "units": ["", "nm", "nm", "nm"],
        }
        for d in DATASETS_OME
    ]
    assert group["scales"] == [[1, 1, 1, 1], [2, 2, 1, 1]]
    assert group["pixelResolution"] == {"dimensions": [8, 4, 40, 1], "unit": "nm"}
    assert (group["axes"], group["units"], group["resolution"]) == (
        ["x", "y", "z", "c"],
        ["nm", "nm", "nm", ""],
        [8, 4, 40, 1],
    )
    assert [d["transform"] for d in group["multiscales"][0]["datasets"]] == transforms
    assert group["volpipe"] == {"net": "unet"}
    level = json.loads((tmp_path / "p/s1/attributes.json").read_text())
    assert (level["transform"], level["downsamplingFactors"]) == (transforms[1], [2, 2, 1, 1])
    # without COSEM's transform, the older dialect must say the same
    for file in (tmp_path / "p/attributes.json", tmp_path / "p/s1/attributes.json"):
        tree = json.loads(file.read_text())
        file.write_text(json.dumps({k: v for k, v in tree.items() if k not in ("transform", "multiscales")}))
    volume = open_volume(tmp_path / "p", level=1)
    assert (volume.voxel_size_nm, volume.origin_nm) == ((40, 8, 16), (0, 2, 4))


def test_a_pyramid_needs_its_arrays(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="s0 is no zarr3 array"):
        create_multiscale(tmp_path / "p", Multiscale((Level("s0"),)))
    create_array(tmp_path / "p", "s0", ArraySpec(shape=(8, 8), dtype=np.dtype("u1"), chunks=(4, 4), axes=("y", "x")))
    with pytest.raises(VolumeError, match="has 2 axes"):
        create_multiscale(tmp_path / "p", Multiscale((Level("s0"),)))
