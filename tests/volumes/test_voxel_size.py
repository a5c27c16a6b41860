"""Voxel sizes and origins, as every dialect of metadata gives them: 4, 5, 6 along x, y, z, in nm unless it says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from metadata import ARRAY, COSEM, GROUP3, SCALE, ZARR3, ZARRAY, Files, Tree, dataset, lay, n5, ome, ome_zarr, zarr3

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_volume

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
