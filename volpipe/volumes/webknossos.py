"""The WEBKNOSSOS dialect: `datasource-properties.json` of a dataset names the axes and the voxel size of its layers.

Not here: how the arrays are stored (zarr); their own metadata name no axes. N5 is left out: nobody tried in which order
it is meant there. The file lies in the dataset's folder,
its arrays in `LAYER/MAG`. Schema: webknossos-libs, webknossos/dataset/properties.py (read 2026-11).
"""

from __future__ import annotations

import logging
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import listed_place
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.storage.metadata import Place, Tree, floats, read_json

FILE = "datasource-properties.json"
DEPTH = 3  # folders above an array in which the file is looked for

log = logging.getLogger(__name__)


def read_dataset(folder: Path) -> ListedLevel | None:
    """Return what the dataset around the array in `folder` says of it; None where there is none that names it."""
    for root in folder.parents[:DEPTH]:
        try:
            tree = read_json(root / FILE)
        except VolumeError as error:
            log.info("%s", error)
            return None
        if tree is not None:
            return _described(tree, folder.relative_to(root).as_posix())
    return None


def _described(tree: Tree, path: str) -> ListedLevel | None:
    for layer in _dicts(tree.get("dataLayers")):
        for mag in _dicts(layer.get("mags")):
            sizes = floats(mag.get("mag"))
            if sizes is not None and len(sizes) == 3 and path in _paths(layer, mag, sizes):
                axes = _axes(mag.get("axisOrder"))
                return None if axes is None else ListedLevel(path, axes, _place(tree.get("scale"), sizes))
    return None


def _paths(layer: Tree, mag: Tree, sizes: tuple[float, ...]) -> set[str]:
    """Return where an array of a layer may lie: where its entry says, or in a folder named after its magnification."""
    names = {"-".join(f"{size:g}" for size in sizes)} | ({f"{sizes[0]:g}"} if len(set(sizes)) == 1 else set())
    path = mag.get("path")
    return {f"{layer.get('name')}/{name}" for name in names} | (
        {path.removeprefix("./")} if isinstance(path, str) else set()
    )


def _axes(order: object) -> tuple[str, ...] | None:
    """Return the names of the axes as they are stored, None where they are not numbered from 0."""
    if not isinstance(order, dict) or not {"x", "y", "z"} <= order.keys() <= {"c", "x", "y", "z"}:
        return None
    names = sorted(order, key=lambda name: str(order[name]))
    return tuple(names) if [order[name] for name in names] == [*range(len(names))] else None


def _place(scale: object, sizes: tuple[float, ...]) -> Place:
    """Return the place of an array whose voxels are `sizes` (x, y, z) of the dataset's."""
    factor, unit = (scale.get("factor"), scale.get("unit")) if isinstance(scale, dict) else (scale, "nanometer")
    voxel = floats(factor)
    if voxel is None or len(voxel) != 3:
        return Place(reason=f"{FILE} has the scale {str(factor)[:40]}")
    shift = [(s - 1) / 2 * v for v, s in zip(voxel, sizes, strict=True)]  # of the first voxel's centre
    return listed_place("xyz", [v * s for v, s in zip(voxel, sizes, strict=True)], shift, [unit] * 3)


def _dicts(value: object) -> list[Tree]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
