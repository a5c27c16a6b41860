"""Metadata for tests: arrays and groups as any software may describe them, laid down without a voxel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Tree = dict[str, Any]  # Any: JSON
Files = dict[str, Tree]  # by the names of the files

# attributes.json, .zarray and zarr.json of an array of 8 × 10 × 12 voxels (z, y, x)
ARRAY: Tree = {"dimensions": [12, 10, 8], "blockSize": [4, 4, 4], "dataType": "uint8", "compression": {"type": "raw"}}
ZARRAY: Tree = {
    "zarr_format": 2,
    "shape": [8, 10, 12],
    "chunks": [4, 4, 4],
    "dtype": "|u1",
    "compressor": None,
    "fill_value": 0,
    "order": "C",
    "filters": None,
}
ZARR3: Tree = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [8, 10, 12],
    "data_type": "uint8",
    "fill_value": 0,
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4, 4]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [{"name": "bytes"}],
}
GROUP: Tree = {"zarr_format": 2}
GROUP3: Tree = {"zarr_format": 3, "node_type": "group"}

# what says that a voxel is 6, 5, 4 nm (z, y, x)
SCALE: Tree = {"type": "scale", "scale": [6, 5, 4]}
COSEM: Tree = {"axes": ["z", "y", "x"], "scale": [6, 5, 4], "translate": [3, 2, 1], "units": ["nm", "nm", "nm"]}


def lay(root: Path, files: Files) -> Path:
    """Write each tree as JSON at its place under `root`, and return `root`."""
    for name, tree in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(tree), encoding="utf-8")
    return root


def n5(**more: object) -> Files:
    """Return the file of an N5 array with `more` among its attributes."""
    return {"attributes.json": ARRAY | more}


def zarr2(**more: object) -> Files:
    return {".zarray": ZARRAY | more}


def zarr3(**more: object) -> Files:
    return {"zarr.json": ZARR3 | more}


def ome_zarr(multiscale: Tree) -> Files:
    """Return the files of an OME-Zarr 0.4 group of one array, "0"."""
    return {".zgroup": GROUP, "0/.zarray": ZARRAY, ".zattrs": {"multiscales": [multiscale]}}


def ome(*datasets: Tree, **more: object) -> Tree:
    """Return a multiscale of axes z, y, x in nanometres."""
    axes = [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    return {"axes": axes, "datasets": list(datasets), **more}


def dataset(path: str, *transformations: Tree) -> Tree:
    return {"path": path, "coordinateTransformations": list(transformations)}


def without(tree: Tree, *keys: str) -> Tree:
    return {key: value for key, value in tree.items() if key not in keys}
