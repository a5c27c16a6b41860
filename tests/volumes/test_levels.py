"""Levels of pyramids: voxel sizes are as they state, or as their lengths can only mean; the finest is level 0."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from volumes import noise

from volpipe.geometry.grid import Box
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.storage.metadata import level_factor
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    create_array,
    create_multiscale,
    list_arrays,
    open_volume,
    open_writer,
)

ROUNDINGS: dict[str, Callable[[float], int]] = {"down": math.floor, "up": math.ceil, "to even": round}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_a_factor_by_lengths_is_the_true_one_or_unknown(factor: int, rounding: str) -> None:
    """Of all lengths to 70, each level made from the one before; known wherever one number alone gives the lengths."""
    num_known = 0
    for length in range(1, 71):
        lengths = [length]
        for level in range(1, 5):
            lengths.append(max(1, ROUNDINGS[rounding](lengths[-1] / factor)))
            found = level_factor(lengths)
            is_flat = set(lengths[-2:]) == {1}  # whether a slice was divided, none can tell
            assert found in (None, factor**level) or (is_flat and length == 1), (lengths, found)
            num_known += found is not None
            if length > factor**2 and level == 1:
                fits = [f for f in range(1, 71) if lengths[1] in (length // f, -(-length // f))]
                assert (found is not None) == (len(fits) == 1), (lengths, fits)
    assert num_known > 70


def test_lengths_that_no_whole_number_gives_are_unknown() -> None:
    assert level_factor([100, 66]) is level_factor([10, 20]) is level_factor([12, 3]) is None
    assert level_factor([33, 17, 9]) == 4
    assert level_factor([7, 7, 7]) == level_factor([1, 1]) == 1


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("shape", [(1, 33, 47), (9, 33, 46), (10, 64, 65)])
def test_levels_of_tiff_have_whole_factors_of_the_voxel_size(
    tmp_path: Path, shape: tuple[int, int, int], factor: int
) -> None:
    data, size = noise(shape), {f"PhysicalSize{axis}": value for axis, value in zip("XYZ", (4, 5, 40), strict=True)}
    units = {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    with tifffile.TiffWriter(tmp_path / "a.tif", ome=True) as tif:
        tif.write(data, subifds=2, tile=(16, 16), metadata={"axes": "ZYX", **size, **units})
        for step in (factor, factor**2):
            tif.write(data[:, ::step, ::step], subfiletype=1, tile=(16, 16))
    for level in range(3):
        f = factor**level
        volume = open_volume(tmp_path / "a.tif", level=level)
        assert np.array_equal(volume[...].reshape(-1), data[:, ::f, ::f].reshape(-1))
        assert volume.voxel_size_nm == (40, 5 * f, 4 * f)
        assert volume.origin_nm == (0, (f - 1) / 2 * 5, (f - 1) / 2 * 4)


def test_a_level_that_several_factors_give_has_an_unknown_voxel_size_and_says_why(tmp_path: Path) -> None:
    data = noise((5, 12, 64))
    size = {f"PhysicalSize{axis}": 4 for axis in "XYZ"} | {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as tif:
        tif.write(data, subifds=1, tile=(16, 16), metadata={"axes": "ZYX", **size})
        tif.write(data[:, ::4, ::4], subfiletype=1, tile=(16, 16))
    volume = open_volume(tmp_path / "a.ome.tif", level=1)
    assert volume.voxel_size_nm is None
    assert "12 to 3 voxels along y" in volume.notes[-1]


def test_a_level_of_n5_of_which_nothing_is_said_has_no_voxel_size(tmp_path: Path) -> None:
    data = noise((8, 8, 8))
    for level in range(2):
        create_array(tmp_path / "a.n5", f"s{level}", ArraySpec(data.shape, data.dtype, (8, 8, 8)), "n5")
    group = {"n5": "2.0.0", "resolution": [4, 4, 40], "units": ["nm"] * 3}
    (tmp_path / "a.n5/attributes.json").write_text(json.dumps(group))
    assert open_volume(tmp_path / "a.n5/s0").voxel_size_nm == (40, 4, 4)
    assert open_volume(tmp_path / "a.n5/s1").voxel_size_nm is None
    (tmp_path / "a.n5/attributes.json").write_text(json.dumps(group | {"scales": [[1, 1, 1], [2, 2, 1]]}))
    assert open_volume(tmp_path / "a.n5/s1").voxel_size_nm == (40, 8, 8)


def turn_lists(tree: object) -> object:
    """Return JSON in which the lists of levels are turned round."""
    if isinstance(tree, dict):
        names = ("datasets", "scales") if "downsamplingFactors" not in tree else ()
        is_levels = {key: key in names and isinstance(value, list) for key, value in tree.items()}
        return {
            key: turn_lists(value[::-1]) if is_levels[key] else turn_lists(value)  # type: ignore[index]
            for key, value in tree.items()
        }
    return [turn_lists(entry) for entry in tree] if isinstance(tree, list) else tree


def without_scales(tree: object) -> object:
    """Return JSON of OME-Zarr 0.1, which says no scale of a level."""
    if isinstance(tree, dict):
        return {key: without_scales(value) for key, value in tree.items() if key != "coordinateTransformations"}
    return [without_scales(entry) for entry in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("has_scales", [True, False])
@pytest.mark.parametrize(
    ("format", "file"),
    [
        ("ome-zarr-0.5", "zarr.json"),
        ("ome-zarr-0.4", ".zattrs"),
        ("zarr2", ".zattrs"),
        ("precomputed", "info"),
    ],
)
def test_the_finest_level_is_level_0_in_whatever_order_they_are_listed(
    tmp_path: Path, format: str, file: str, has_scales: bool
) -> None:
    data, path = noise((8, 16, 32)), tmp_path / ("a.precomputed" if format == "precomputed" else "a.zarr")
    factors = [(1.0, 1.0, 1.0), (1.0, 2.0, 2.0), (2.0, 4.0, 4.0)]
    parts = [data[:: int(z), :: int(y), :: int(x)] for z, y, x in factors]
    for level, part in enumerate(parts):
        spec = ArraySpec(part.shape, part.dtype, (4, 4, 4), codec="gzip")
        create_array(path, f"s{level}", spec, folders_of(format).name)
        open_writer(path, f"s{level}").write(Box.from_shape(part.shape), part)
    levels = tuple(Level(f"s{level}", factor) for level, factor in enumerate(factors))
    create_multiscale(path, Multiscale(levels, voxel_size_nm=(40.0, 4.0, 4.0)), format=format)
    as_listed = [open_volume(path, level=level) for level in range(3)]
    tree = turn_lists(json.loads((path / file).read_text()))
    is_bare = not has_scales and format.startswith("ome")
    (path / file).write_text(json.dumps(without_scales(tree) if is_bare else tree))
    for level, part in enumerate(parts):
        volume = open_volume(path, level=level)
        assert np.array_equal(volume[...], part)
        assert volume.levels == ("s0", "s1", "s2")
        assert any("not listed finest first: level 0 is s0" in note for note in volume.notes)
        assert not any("finest first" in note for note in as_listed[level].notes)
        if not is_bare:
            assert (volume.voxel_size_nm, volume.origin_nm) == (
                as_listed[level].voxel_size_nm, as_listed[level].origin_nm,
            )  # fmt: skip
    assert {volume.key: volume.shape for volume in list_arrays(path)} == {
        f"s{level}": part.shape for level, part in enumerate(parts)
    }
    assert open_volume(path / "s1").levels == ("s0", "s1", "s2")


def test_levels_of_tiff_in_any_order_are_finest_first(tmp_path: Path) -> None:
    data = noise((4, 64, 65))
    size = {f"PhysicalSize{axis}": 4 for axis in "XYZ"} | {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as tif:
        tif.write(data, subifds=2, tile=(16, 16), metadata={"axes": "ZYX", **size})
        for step in (4, 2):
            tif.write(data[:, ::step, ::step], subfiletype=1, tile=(16, 16))
    for level, step in enumerate((1, 2, 4)):
        volume = open_volume(tmp_path / "a.ome.tif", level=level)
        assert np.array_equal(volume[...], data[:, ::step, ::step])
        assert volume.voxel_size_nm == (4, 4 * step, 4 * step)
