"""Bad metadata: refused with the file and the reason, and never with anything but a VolumeError."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata import (
    ARRAY,
    COSEM,
    GROUP,
    GROUP3,
    SCALE,
    ZARR3,
    ZARRAY,
    Files,
    Tree,
    dataset,
    lay,
    n5,
    ome,
    ome_zarr,
    without,
    zarr2,
    zarr3,
)

from volpipe.errors import VolumeError
from volpipe.volumes.volume import open_volume

BROKEN: list[tuple[Files, str]] = [
    (n5(dimensions=[12, -1, 8]), "attributes.json: dimensions .* -1"),
    (n5(dimensions=[12, 0, 8]), "holds 0"),
    (n5(dimensions=[1] * 9, blockSize=[1] * 9), "1 to 8 integers"),
    (n5(dimensions="large"), "dimensions 'large'"),
    (n5(dimensions=[12, 10.5, 8]), "holds 10.5"),
    (n5(dimensions=[12, 10, 2**63]), "no number of voxels"),
    (n5(dimensions=[10**18] * 3), "more bytes than can be counted"),
    (zarr2(shape=[2**60, 2, 2], dtype="<f8"), "more bytes than can be counted"),
    (zarr3(shape=[2**62, 2, 2]), "more bytes than can be counted"),
    (zarr2(chunks=[10**6] * 3), "GiB"),
    (zarr3(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [10**6] * 3}}), "GiB"),
    (zarr3(codecs=[{"name": "sharding_indexed", "configuration": {"chunk_shape": [3, 4, 4]}}]), "multiple"),
    (zarr3(codecs=[{"name": "sharding_indexed", "configuration": {"chunk_shape": [-2, 4, 4]}}]), "holds -2"),
    (n5(blockSize=[4, 0, 4]), "blockSize"),
    (n5(blockSize=[4, 4]), "2 axes, the shape has 3"),
    (n5(blockSize=[10**6, 10**6, 10**6]), "GiB"),
    ({"attributes.json": without(ARRAY, "blockSize")}, "blockSize None"),
    (n5(dataType="string"), "dataType 'string'"),
    (n5(compression={"type": "lz4"}), "lz4"),
    (n5(compression={"type": "jpeg"}), "'jpeg'"),
    (n5(compression=7), "compression 7"),
    (zarr2(shape=[]), "zarray: shape"),
    (zarr2(zarr_format=1), "zarr_format 1"),
    (zarr2(dtype="<U7"), "dtype '<U7'"),
    (zarr2(dtype=[["r", "|u1"]]), "dtype"),
    (zarr2(dtype="nonsense"), "'nonsense'"),
    (zarr2(dtype="<c8"), "'<c8'"),
    (zarr2(dimension_separator="-"), "'-'"),
    (zarr3(data_type="string"), "data_type 'string'"),
    (zarr3(data_type={"name": "struct"}), "data_type"),
    (zarr3(chunk_grid={"name": "rectilinear"}), "'rectilinear'"),
    (zarr3(codecs=[]), "codecs"),
    ({"zarr.json": without(ZARR3, "chunk_key_encoding")}, "chunk_key_encoding None is neither"),
    (
        zarr3(chunk_key_encoding={"name": "default", "configuration": {"separator": "/../"}}),
        "is neither default nor v2",
    ),
    (zarr3(codecs=[{"name": "transpose", "configuration": {"order": [0, 0, 1]}}]), "each of 3 axes"),
    (zarr3(storage_transformers=[{"name": "x"}]), "storage_transformers"),
    (zarr3(surprise={"name": "x", "must_understand": True}), "'surprise'"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": []}}, "multiscales is empty"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": []}]}}, "no datasets"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": [{"path": "0"}]}]}}, "'0', which does not exist"),
    ({".zgroup": GROUP, ".zattrs": {"multiscales": [{"datasets": [{"path": "../0"}]}]}}, r"'../0' is not the key"),
    (
        {"attributes.json": {"multiscales": [{"datasets": [{"path": "/etc", "transform": {}}]}]}},
        "'/etc' is not the key",
    ),
    (ome_zarr({"axes": [{"name": "x"}], "datasets": [{"path": "0"}]}), "'0' has 3 axes, the group's axes 1"),
    (without(ome_zarr(ome(dataset("0", {"type": "scale", "scale": [1]}))), ".zgroup"), "coordinate transformation"),
    (without(ome_zarr(ome(dataset("0", {"type": "affine"}))), ".zgroup"), "affine"),
    (
        ome_zarr(ome(dataset("0", {"type": "sequence", "transformations": [{"type": "rotation"}]}), version="0.6")),
        r"OME-Zarr 0.6\): its coordinate transformation is of the kind 'rotation'; volpipe reads scale, [^{}]*$",
    ),
    (ome_zarr(ome(dataset("0", {"type": "scale", "path": "lookup"}))), "scale is kept in the array 'lookup'"),
    (
        ome_zarr({"datasets": [{"path": "0"}, {"path": "1"}]})
        | {"1/.zarray": ZARRAY | {"shape": [8, 8], "chunks": [4, 4]}},
        "'1' has 2 axes, level 0 3",
    ),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_broken_metadata_are_refused_with_the_reason(tmp_path: Path, number: int) -> None:
    files, words = BROKEN[number]
    with pytest.raises(VolumeError, match=words):
        open_volume(lay(tmp_path / "v", files))


def test_a_compressor_of_blosc_without_a_name_is_refused(tmp_path: Path) -> None:
    volume = open_volume(lay(tmp_path / "v", n5(compression={"type": "blosc", "cname": 7})))
    assert volume.codec == "blosc 7 5"
    with pytest.raises(VolumeError, match="cname"):
        volume.open()


NO_OBJECTS = ["{", "[1, 2]", '"x"', "\x00\xff", "[" * 100_000, '{"dimensions": 1' + "0" * 5000 + "}", ""]


@pytest.mark.parametrize("number", range(len(NO_OBJECTS)))
@pytest.mark.parametrize("name", ["attributes.json", "zarr.json", ".zarray", ".zattrs"])
def test_files_that_hold_no_json_object_are_named(tmp_path: Path, name: str, number: int) -> None:
    text = NO_OBJECTS[number]
    lay(tmp_path / "v", {".zgroup": GROUP})
    (tmp_path / "v" / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(VolumeError, match=name):
        open_volume(tmp_path / "v")


KEYS = ["name", "type", "id", "configuration", "axes", "scale", "path", "datasets", "dimensions"]
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3) | st.just("gzip"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
SAID_OF_GROUPS: Tree = {
    "ome": {"multiscales": [ome(dataset("0", SCALE))]},
    "resolution": [1, 1, 1],
    "voxel_size": [1, 1, 1],
    "units": ["nm", "nm", "nm"],
    "offset": [1, 1, 1],
    "axes": ["z", "y", "x"],
    "axis_names": ["z", "y", "x"],
    "scale_factor": 1,
    "pixelWidth": 1,
    "transform": COSEM,
    "downsamplingFactors": [1, 1, 1],
    "scales": [[1, 1, 1]],
    "plate": {"wells": [{"path": "A"}]},
}
SHARDING: Tree = {
    "name": "sharding_indexed",
    "configuration": {"chunk_shape": [2, 2, 2], "codecs": [{"name": "bytes"}], "index_codecs": [{"name": "bytes"}]},
}
GOOD: list[tuple[str, Tree]] = [
    ("attributes.json", ARRAY | SAID_OF_GROUPS | {"pixelResolution": {"unit": "nm", "dimensions": [1, 1, 1]}}),
    (".zarray", ZARRAY | {"compressor": {"id": "zstd", "level": 1}}),
    (".zattrs", SAID_OF_GROUPS),
    ("zarr.json", ZARR3 | {"codecs": [SHARDING], "attributes": SAID_OF_GROUPS}),
    ("zarr.json", GROUP3 | {"attributes": SAID_OF_GROUPS}),
]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Tree]:
    """The name and the tree of a good file, one part of it odd."""
    name, good = draw(st.sampled_from(GOOD))
    tree: Tree = json.loads(json.dumps(good))
    node: Any = tree  # Any: an object or a list of JSON
    while True:
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not (isinstance(node[key], dict | list) and node[key] and draw(st.booleans())):
            node[key] = draw(ODD)
            return name, tree
        node = node[key]


@settings(max_examples=100)
@given(damaged())
def test_no_metadata_raise_anything_but_a_volume_error(file: tuple[str, Tree]) -> None:
    """Any part of good metadata, replaced by any JSON, is refused or opened."""
    name, tree = file
    array: Files = {"s0/attributes.json": ARRAY} if name == "attributes.json" else {"0/.zarray": ZARRAY}
    with tempfile.TemporaryDirectory() as folder:
        lay(Path(folder) / "v", {**array, name: tree})
        try:
            volume = open_volume(Path(folder) / "v")
            if np.prod(volume.shape, dtype=float) < 1e6:
                volume.open()[...]
        except VolumeError as error:
            assert str(error)
