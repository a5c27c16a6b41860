"""OME-Zarr 0.6 as other software writes it, and as others read what we write; labels in an image's own group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ngff_zarr
import numpy as np
import pytest
import tensorstore
import zarr
from arrays import write_all
from metadata import GROUP3, lay, zarr3
from ngff_zarr.validate import validate
from volumes import noise

from volpipe.display.volumes import info_lines
from volpipe.errors import VolumeError
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.storage.metadata import Display
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    create_array,
    create_multiscale,
    list_arrays,
    open_volume,
)

Tree = dict[str, Any]  # Any: JSON
SCALE: Tree = {"type": "scale", "scale": [0.03, 0.004, 0.004]}
SHIFT: Tree = {"type": "translation", "translation": [3, 2, 1]}
IDENTITY: Tree = {"type": "identity"}
SIZE, ORIGIN = (30.0, 4.0, 4.0), (3000.0, 2000.0, 1000.0)


def system(name: str, axes: str = "zyx", unit: str = "micrometer") -> Tree:
    return {"name": name, "axes": [{"name": axis, "type": "space", "unit": unit} for axis in axes]}


def sequence(*steps: Tree) -> Tree:
    return {"type": "sequence", "transformations": list(steps)}


def group(*own: Tree, output: object = None, **image: object) -> dict[str, Tree]:
    """Return the files of an image of one level in OME-Zarr 0.6 with these transformations."""
    ends = {"input": {"path": "s0"}, "output": {"name": "physical"} if output is None else output}
    tree: Tree = {
        "coordinateSystems": [system("physical")],
        "datasets": [{"path": "s0", "coordinateTransformations": [ends | step for step in own]}],
    }
    attributes = {"ome": {"version": "0.6", "multiscales": [tree | image]}}
    return {"zarr.json": GROUP3 | {"attributes": attributes}, "s0/zarr.json": zarr3()["zarr.json"]}


@pytest.mark.parametrize(
    ("steps", "size", "origin"),
    [
        ([SCALE], SIZE, (0, 0, 0)),
        ([IDENTITY], (1000, 1000, 1000), (0, 0, 0)),
        ([sequence(SCALE, SHIFT)], SIZE, ORIGIN),
        ([sequence(SHIFT, SCALE)], SIZE, (90, 8, 4)),
        ([sequence(IDENTITY, sequence(SCALE, sequence(SHIFT)))], SIZE, ORIGIN),
        ([{"type": "mapAxis", "mapAxis": [0, 1, 2]}], (1000, 1000, 1000), (0, 0, 0)),
        ([{"type": "affine", "affine": [[0.03, 0, 0, 3], [0, 0.004, 0, 2], [0, 0, 0.004, 1]]}], SIZE, ORIGIN),
    ],
)
def test_scale_and_translation_in_any_nesting_say_size_and_origin(
    tmp_path: Path, steps: list[Tree], size: Sequence[float], origin: Sequence[float]
) -> None:
    volume = open_volume(lay(tmp_path / "a.zarr", group(*steps)))
    assert volume.voxel_size_nm == pytest.approx(size)
    assert volume.origin_nm == pytest.approx(origin)
    assert volume.has_origin == any(origin)
    assert (volume.axes, volume.notes) == (("z", "y", "x"), ())
    assert "format      zarr3 (OME-Zarr 0.6, coordinate system 'physical')" in [*info_lines(volume)]


def test_the_system_that_levels_lead_to_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    """What leads on to another system is not added: by the specification the first one is for processing."""
    turned = {"type": "rotation", "rotation": [[1, 0, 0], [0, 0, 1], [0, -1, 0]]}
    systems = [system("atlas"), system("physical", "xyz", "nanometer"), system("scan")]
    on = [turned | {"input": {"name": "physical"}, "output": {"name": "atlas"}}]
    files = group(SCALE, coordinateSystems=systems, coordinateTransformations=on)
    volume = open_volume(lay(tmp_path / "a.zarr", files))
    assert (volume.axes, volume.voxel_size_nm) == (("x", "y", "z"), (0.004, 0.004, 0.03))
    assert volume.metadata == "OME-Zarr 0.6, coordinate system 'physical'; not taken: 'atlas', 'scan'"
    draft = open_volume(lay(tmp_path / "b.zarr", group(SCALE, output="physical", coordinateSystems=systems)))
    assert draft.metadata == volume.metadata


@pytest.mark.parametrize(
    ("steps", "more", "words"),
    [
        ([{"type": "rotation", "rotation": np.eye(3).tolist()}], {}, "of the kind 'rotation'.*by its key, .*a.zarr/s0"),
        ([sequence(SCALE, {"type": "byDimension"})], {}, "of the kind 'byDimension'.* sequences of these"),
        ([{"type": "mapAxis", "mapAxis": [2, 1, 0]}], {}, "'mapAxis', which changes the order of the axes"),
        ([{"type": "affine", "affine": [[1, 0.1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}], {}, "turns or shears"),
        ([{"type": "affine", "affine": [[1, 0, 0], [0, 1, 0]]}], {}, r"affine is \[\[1, 0, 0\], \[0, 1, 0\]\], not"),
        ([{"type": "scale", "path": "sizes"}], {}, "scale is kept in the array 'sizes'"),
        ([{"type": "scale", "scale": [1, 2]}], {}, r"scale is \[1, 2\], not one number for each of the axes z, y, x"),
        ([{"type": "sequence", "transformations": []}], {}, "of the kind 'sequence'"),
        ([sequence(*[IDENTITY] * 1001)], {}, "more than 1000 coordinate transformations"),
        ([SCALE], {"output": {"name": "else"}}, "lead to else, and must lead to one .* physical, the same for each"),
        ([SCALE], {"coordinateSystems": []}, r"coordinateSystems is \[\], not a list"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_with_a_way_out(
    tmp_path: Path, steps: list[Tree], more: Tree, words: str
) -> None:
    place = lay(tmp_path / "a.zarr", group(*steps, **more))
    with pytest.raises(VolumeError, match=words):
        open_volume(place)
    assert open_volume(place / "s0").shape == (8, 10, 12)  # the way out


def by_ngff_zarr(folder: Path, data: np.ndarray, version: str = "0.6") -> Path:
    """Write an image of two levels, voxels of 40 × 16 × 8 nm, first centre 100, 40, 20 nm."""
    space = {"z": 0.04, "y": 0.016, "x": 0.008}
    image = ngff_zarr.to_ngff_image(
        data, dims=["z", "y", "x"], scale=space, translation={"z": 0.1, "y": 0.04, "x": 0.02},
        axes_units=dict.fromkeys("zyx", "micrometer"),
    )  # fmt: skip
    ngff_zarr.to_ome_zarr(str(folder), ngff_zarr.to_multiscales(image, [2], chunks=16), version=version)
    return folder


def test_what_ngff_zarr_writes_has_its_voxels_size_and_origin(tmp_path: Path) -> None:
    data = noise((20, 24, 32), "uint16")
    place = by_ngff_zarr(tmp_path / "a.zarr", data)
    volume = open_volume(place)
    np.testing.assert_array_equal(volume.open()[...], data)
    assert volume.voxel_size_nm == pytest.approx((40, 16, 8))
    assert volume.origin_nm == pytest.approx((100, 40, 20))
    coarse = open_volume(place, level=1)
    assert coarse.voxel_size_nm == pytest.approx((80, 32, 16))
    assert coarse.origin_nm == pytest.approx((120, 48, 24))
    assert volume.metadata.startswith("OME-Zarr 0.6, coordinate system ")


def write_image(place: Path, format: str, data: np.ndarray, *, is_labels: bool = False) -> Path:
    """Write `data` with a level of half the voxels along y and x."""
    channels = ("c",) * (data.ndim - 3)
    levels = (Level("s0"), Level("s1", (1.0, 2.0, 2.0)))
    for level, voxels in zip(levels, (data, data[..., ::2, ::2]), strict=True):
        spec = ArraySpec(voxels.shape, data.dtype, (8,) * data.ndim, axes=(*channels, "z", "y", "x"))
        create_array(place, level.key, spec, folders_of(format).name)
        write_all(place, level.key, voxels)
    shown = () if is_labels else (Display("grey", (0, 255), (1, 200)),) * (len(data) if channels else 1)
    axes = (*channels, "z", "y", "x")
    create_multiscale(place, Multiscale(levels, axes, SIZE, ORIGIN, "cells", shown, is_labels), format=format)
    return place


@pytest.mark.parametrize("kind", ["image", "label", "channels"])
def test_what_is_written_in_0_6_is_valid_and_others_read_it(tmp_path: Path, kind: str) -> None:
    data = noise((2, 9, 20, 24) if kind == "channels" else (9, 20, 24), "uint32" if kind == "label" else "uint8")
    place = write_image(tmp_path / "a.zarr", "ome-zarr-0.6", data, is_labels=kind == "label")
    attributes = json.loads((place / "zarr.json").read_text())["attributes"]
    validate(attributes, version="0.6", model="label" if kind == "label" else "image")
    validate(attributes, version="0.6", model="image")
    image = ngff_zarr.from_ome_zarr(str(place), validate=True, version="0.6").images[0]
    np.testing.assert_array_equal(np.asarray(image.data), data)
    assert [image.scale[axis] for axis in "zyx"] == pytest.approx(SIZE)
    assert [image.translation[axis] for axis in "zyx"] == pytest.approx(ORIGIN)
    assert {str(image.axes_units[axis]) for axis in "zyx"} == {"nanometer"}
    np.testing.assert_array_equal(zarr.open_group(place, mode="r")["s0"][...], data)
    spec = {"driver": "zarr3", "kvstore": f"file://{place}/s1/"}
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), data[..., ::2, ::2])
    volume = open_volume(place)
    assert (volume.voxel_size_nm, volume.origin_nm, volume.levels) == (SIZE, ORIGIN, ("s0", "s1"))
    assert open_volume(place, level=1).origin_nm == pytest.approx((3000, 2002, 1002))


def test_an_unknown_size_in_0_6_is_unknown(tmp_path: Path) -> None:
    create_array(tmp_path / "a.zarr", "s0", ArraySpec((4, 8, 8), np.dtype("u1"), (4, 8, 8)))
    create_multiscale(tmp_path / "a.zarr", Multiscale((Level("s0"),)), format="ome-zarr-0.6")
    validate(json.loads((tmp_path / "a.zarr/zarr.json").read_text())["attributes"], version="0.6")
    assert open_volume(tmp_path / "a.zarr").voxel_size_nm is None
    assert [volume.key for volume in list_arrays(tmp_path / "a.zarr")] == ["s0"]
