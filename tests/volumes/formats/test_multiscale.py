"""Multiscale groups as volpipe writes them: OME-Zarr to the letter, the dialects of N5, and each level in its place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from volpipe.errors import VolumeError
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale, open_volume

FORMATS = ("ome-zarr-0.5", "ome-zarr-0.4", "n5", "zarr2")
AXES_OME = [{"name": "c", "type": "channel"}] + [{"name": a, "type": "space", "unit": "nanometer"} for a in "zyx"]
DATASETS_OME = [
    {
        "path": path,
        "coordinateTransformations": [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}],
    }
    for path, scale, shift in [("s0", [1, 40, 4, 8], [0, 5, 6, 7]), ("s1", [1, 40, 8, 16], [0, 5, 8, 11])]
]


def make_pyramid(path: Path, format: str, voxel: tuple[float, float, float] | None) -> None:
    arrays = {"ome-zarr-0.5": "zarr3", "ome-zarr-0.4": "zarr2"}.get(format, format)
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
