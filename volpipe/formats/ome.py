"""OME-NGFF: the metadata of image groups, versions 0.4 (Zarr v2) and 0.5 (Zarr v3), read, checked and written.

Not here: the arrays themselves (zarr). Earlier versions are read for what they say; 0.1 to 0.3 say no voxel size.
Specification: ngff.openmicroscopy.org/0.4 and /0.5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from volpipe.errors import VolumeError
from volpipe.formats import cosem
from volpipe.formats.files import Location
from volpipe.formats.metadata import SYNONYMS, Multiscale, Place, Tree, floats, mapping, place, plain

log = logging.getLogger(__name__)

TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
MAX_LISTED = 20
MAX_WELLS = 2000
MAX_LEVELS = 100


@dataclass(frozen=True)
class Dataset:
    """One level as its group describes it: where it is, and, if the group says so, its axes and its place."""

    path: str
    axes: tuple[str, ...] | None = None
    place: Place | None = None


def read_datasets(attributes: Tree, source: Location) -> tuple[Dataset, ...] | None:
    """Return the levels that the attributes of a group name, finest first; None where they describe no image.

    Raises:
        VolumeError: they describe one wrongly; `source` is named.
    """
    said = _ome(attributes, source)
    if "multiscales" not in said:
        return None
    images = said["multiscales"]
    if not isinstance(images, list) or not images:
        raise VolumeError(f"{source}: multiscales is empty; it must describe at least one image")
    if len(images) > 1:
        log.info("%s describes %d images of the same data; the first is read", source, len(images))
    image = mapping(images[0], "multiscales[0]", source)
    datasets = image.get("datasets")
    if not isinstance(datasets, list) or not datasets:
        raise VolumeError(f"{source}: multiscales[0] has no datasets; it must name at least one array")
    if len(datasets) > MAX_LEVELS:
        raise VolumeError(f"{source}: multiscales[0] names {len(datasets)} datasets; volpipe reads up to {MAX_LEVELS}")
    return tuple(_dataset(mapping(entry, "a dataset", source), image, source) for entry in datasets)


def _ome(attributes: Tree, source: Location) -> Tree:
    return mapping(attributes["ome"], "ome", source) if "ome" in attributes else attributes


def _dataset(entry: Tree, image: Tree, source: Location) -> Dataset:
    path = entry.get("path")
    if not isinstance(path, str) or not _is_inner(path):
        raise VolumeError(f"{source}: dataset path {path!r} is not the key of an array in the group")
    if "coordinateTransformations" not in entry:
        axes, _ = _axes(image.get("axes"))
        return Dataset(path, axes, cosem.read_place(entry.get("transform")))
    axes, units = _axes(image.get("axes"))
    scale, shift = _transformations(entry["coordinateTransformations"], axes, source)
    outer, moved = _transformations(image.get("coordinateTransformations") or [], axes, source)
    if axes is None or scale is None:
        return Dataset(path, axes, Place())
    outer = outer or (1.0,) * len(axes)
    size = {axis: s * o for axis, s, o in zip(axes, scale, outer, strict=True)}
    origin = {axis: t * o + m for axis, t, o, m in zip(axes, shift, outer, moved, strict=True)}
    return Dataset(path, axes, place(size, origin, dict(zip(axes, units, strict=True))))


def _is_inner(path: str) -> bool:
    """Tell whether `path` stays in the group that names it."""
    return ".." not in PurePosixPath(path).parts and not PurePosixPath(path).is_absolute()


def _axes(said: object) -> tuple[tuple[str, ...] | None, tuple[object, ...]]:
    """Return the axes as t, c, z, y, x by their type, and their units; None where the image names none (0.1, 0.2)."""
    if not isinstance(said, list) or not said:
        return None, ()
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in said]
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return None, ()
    names = [SYNONYMS.get(entry["name"].lower(), entry["name"].lower()) for entry in entries]
    if not set(names) <= set(TYPES):  # names are free, types are not: spatial axes come last, slowest first
        space = [i for i, entry in enumerate(entries) if entry.get("type", "space") == "space"]
        for i, axis in zip(reversed(space), "xyz", strict=False):
            names[i] = axis
        for i, entry in enumerate(entries):
            names[i] = {"channel": "c", "time": "t"}.get(str(entry.get("type")), names[i])
    return tuple(names), tuple(entry.get("unit") for entry in entries)


def _transformations(
    said: object, axes: tuple[str, ...] | None, source: Location
) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    """Return the scale (None where none is said) and the translation of a list of coordinateTransformations."""
    rank = len(axes or ())
    scale: tuple[float, ...] | None = None
    shift = (0.0,) * rank
    for entry in said if isinstance(said, list) else [said]:
        said_one = entry if isinstance(entry, dict) else {}
        kind = said_one.get("type")
        if kind == "identity":
            continue
        values = floats(said_one.get(str(kind))) if kind in ("scale", "translation") else None
        if values is None or (axes and len(values) != rank):
            raise VolumeError(
                f"{source}: coordinate transformation {entry} is no scale or translation with one "
                f"number for each of the axes {axes}"
            )
        if kind == "scale":
            scale = values
        else:
            shift = values
    return scale, shift


def plate_images(attributes: Tree, folder: Location, read: Callable[[Location], Tree]) -> list[str] | None:
    """Return the keys of the images of the plate at `folder`, the first few; None where it is no plate.

    Args:
        attributes: of the group at `folder`.
        folder: where the plate lies.
        read: returns the attributes of a group, given its folder.
    """
    plate = _ome(attributes, folder).get("plate")
    if not isinstance(plate, dict):
        return None
    images: list[str] = []
    wells = plate.get("wells")
    for well in wells[:MAX_WELLS] if isinstance(wells, list) else []:
        path = str(well.get("path")) if isinstance(well, dict) else "?"
        if not _is_inner(path):
            continue
        said = _ome(read(folder / path), folder / path).get("well")
        fields = said.get("images") if isinstance(said, dict) else None
        images += [f"{path}/{f.get('path')}" for f in fields or [] if isinstance(f, dict)]
        if len(images) >= MAX_LISTED:
            break
    return images


def group_attributes(multiscale: Multiscale, version: str, attributes: Mapping[str, Any]) -> Tree:  # Any: JSON
    """Return the attributes of an image group in OME-NGFF `version` "0.4" or "0.5", with `attributes` beside them."""
    unknown = [axis for axis in multiscale.axes if axis not in TYPES]
    if unknown:
        raise VolumeError(f"OME-Zarr has no axis {unknown[0]!r}; use {', '.join(TYPES)}")
    image: Tree = {
        "name": multiscale.name,
        "axes": [_axis(axis, known=multiscale.voxel_size_nm is not None) for axis in multiscale.axes],
        "datasets": [
            {
                "path": level.key,
                "coordinateTransformations": [
                    {"type": "scale", "scale": multiscale.scale(level)},
                    {"type": "translation", "translation": multiscale.shift(level)},
                ],
            }
            for level in multiscale.levels
        ],
    }
    if version == "0.4":
        return plain({"multiscales": [{"version": version} | image], **attributes})
    return plain({"ome": {"version": version, "multiscales": [image]}, **attributes})


def _axis(axis: str, *, known: bool) -> Tree:
    entry = {"name": axis, "type": TYPES[axis]}
    return entry | {"unit": "nanometer"} if known and TYPES[axis] == "space" else entry
