"""OME-NGFF: the metadata of image groups, versions 0.4 (Zarr v2) and 0.5 (Zarr v3), read, checked and written.

Not here: the arrays themselves (zarr). Earlier versions are read for what they say; 0.1 to 0.3 say no voxel size.
Specification: ngff.openmicroscopy.org/0.4 and /0.5.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import transform_place
from volpipe.volumes.storage.metadata import SYNONYMS, Display, Multiscale, Place, Tree, floats, mapping, place, plain
from volpipe.volumes.storage.paths import Location

log = logging.getLogger(__name__)

TYPES = {"t": "time", "c": "channel", "z": "space", "y": "space", "x": "space"}
MAX_LISTED = 20
MAX_WELLS = 2000
MAX_LEVELS = 100
INCOMPLETE = " (incomplete)"  # at the end of an image's name, which viewers show


@dataclass(frozen=True)
class ListedLevel:
    """One level as its group describes it.

    Attributes:
        path: its key in the group.
        axes, place, channel_names: if the group says so.
        coarseness: its voxels' size in whatever unit, to be compared with other levels'; 0 where it is not stated.
        notes: what a user should know.
    """

    path: str
    axes: tuple[str, ...] | None = None
    place: Place | None = None
    channel_names: tuple[str, ...] = ()
    coarseness: float = 0.0
    notes: tuple[str, ...] = ()


def level_keys(group: str, datasets: tuple[ListedLevel, ...]) -> tuple[str, ...]:
    """Return the keys of the levels `datasets` of the group whose key is `group`."""
    return tuple(f"{group}/{dataset.path}".strip("/") for dataset in datasets)


def read_datasets(attributes: Tree, source: Location) -> tuple[ListedLevel, ...] | None:
    """Return the levels that the attributes of a group name, in that order; None where they describe no image.

    Raises:
        VolumeError: they describe one wrongly; `source` is named.
    """
    tree = _ome(attributes, source)
    if "multiscales" not in tree:
        return None
    images = tree["multiscales"]
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
    version = str(tree.get("version") or image.get("version") or "")[:20]
    levels = [_dataset(mapping(entry, "a dataset", source), image, source, version) for entry in datasets]
    if (
        finest := min(levels, key=lambda level: level.coarseness).place
    ) is not None and not finest.has_origin:  # translations of others are but half voxels
        levels = [replace(level, place=level.place and replace(level.place, has_origin=False)) for level in levels]
    names = _channel_names(tree.get("omero"))
    return tuple(replace(level, channel_names=names) for level in levels)


def _ome(attributes: Tree, source: Location) -> Tree:
    return mapping(attributes["ome"], "ome", source) if "ome" in attributes else attributes


def _dataset(entry: Tree, image: Tree, source: Location, version: str) -> ListedLevel:
    path = entry.get("path")
    if not isinstance(path, str) or not is_inner(path):
        raise VolumeError(f"{source}: dataset path {path!r} is not the key of an array in the group")
    if "coordinateTransformations" not in entry:
        axes, _ = _axes(image.get("axes"))
        stated = transform_place(entry.get("transform"))
        size = None if stated is None else stated.voxel_size_nm
        return ListedLevel(path, axes, stated, coarseness=0.0 if size is None else math.prod(size))
    axes, units = _axes(image.get("axes"))
    where = f"{source} (OME-Zarr {version or 'of a version that it does not say'})"
    inner, outer = entry["coordinateTransformations"], image.get("coordinateTransformations") or []
    own = inner if isinstance(inner, list) else [inner]
    around = outer if isinstance(outer, list) else [outer]
    scale, shift = _composed([*own, *around], axes, where)
    if axes is None or not any(tree.get("type") == "scale" for tree in own):
        return ListedLevel(path, axes, Place())
    by_axis = [dict(zip(axes, values, strict=True)) for values in (scale, shift)]
    has_origin = any(entry.get("type") == "translation" for entry in [*own, *around])
    placed = place(by_axis[0], by_axis[1], dict(zip(axes, units, strict=True)))
    return ListedLevel(path, axes, replace(placed, has_origin=has_origin), coarseness=math.prod(scale))


def _channel_names(omero: object) -> tuple[str, ...]:
    """Return the labels of the channels in a group's `omero`, () where not all have one."""
    channels = omero.get("channels") if isinstance(omero, dict) else None
    entries = channels if isinstance(channels, list) else []
    names = tuple(entry.get("label") for entry in entries if isinstance(entry, dict))
    return tuple(str(name) for name in names) if all(isinstance(name, str) and name for name in names) else ()


def is_inner(path: str) -> bool:
    """Tell whether `path` stays in the group that names it."""
    return ".." not in PurePosixPath(path).parts and not PurePosixPath(path).is_absolute()


def _axes(axes: object) -> tuple[tuple[str, ...] | None, tuple[object, ...]]:
    """Return the axes as t, c, z, y, x by their type, and their units; None where the image names none (0.1, 0.2)."""
    if not isinstance(axes, list) or not axes:
        return None, ()
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in axes]
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


def _composed(
    entries: Sequence[object], axes: tuple[str, ...] | None, where: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scale and shift of coordinateTransformations, which apply in order: index times scale, plus shift."""
    rank = len(axes or ())
    scale, shift = (1.0,) * rank, (0.0,) * rank
    for entry in entries:
        tree = entry if isinstance(entry, dict) else {}
        kind = tree.get("type")
        if kind == "identity":
            continue
        if kind not in ("scale", "translation"):
            raise VolumeError(
                f"{where}: its coordinate transformation is of the kind {str(kind)[:40]!r}; volpipe reads scale and "
                "translation alone (OME-Zarr 0.4 and 0.5): write the array with these"
            )
        values = floats(tree.get(kind))
        if values is None or (axes and len(values) != rank):
            raise VolumeError(
                f"{where}: the coordinate transformation {kind} is {str(tree.get(kind))[:60]}, not one number for each "
                f"of the axes {', '.join(axes or ('that it should name',))}"
            )
        if axes and kind == "scale":
            scale = tuple(a * v for a, v in zip(scale, values, strict=True))
            shift = tuple(t * v for t, v in zip(shift, values, strict=True))
        elif axes:
            shift = tuple(t + v for t, v in zip(shift, values, strict=True))
    return scale, shift


def plate_images(folder: Location, read: Callable[[Location], Tree]) -> list[str] | None:
    """Return the keys of the images of the plate at `folder`, the first few; None where it is no plate.

    `read` returns the attributes of a group, given its folder.
    """
    plate = _ome(read(folder), folder).get("plate")
    if not isinstance(plate, dict):
        return None
    images: list[str] = []
    wells = plate.get("wells")
    for well in wells[:MAX_WELLS] if isinstance(wells, list) else []:
        path = str(well.get("path")) if isinstance(well, dict) else "?"
        if not is_inner(path):
            continue
        well_tree = _ome(read(folder / path), folder / path).get("well")
        fields = well_tree.get("images") if isinstance(well_tree, dict) else None
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
    more: Tree = {"omero": _omero(multiscale.displays)} if multiscale.displays else {}
    if version == "0.4":
        more |= {"image-label": {"version": version}} if multiscale.is_labels else {}
        return plain({"multiscales": [{"version": version} | image], **attributes, **more})
    more |= {"image-label": {}} if multiscale.is_labels else {}
    return plain({"ome": {"version": version, "multiscales": [image], **more}, **attributes})


def named(attributes: Tree, *, is_incomplete: bool) -> Tree:
    """Return the `attributes` of a group, the names of whose images say whether they are incomplete."""
    tree = attributes.get("ome", attributes)
    images = tree.get("multiscales") if isinstance(tree, dict) else None
    if not isinstance(images, list):
        return attributes
    suffix = INCOMPLETE if is_incomplete else ""
    entries = [
        image | {"name": str(image["name"]).removesuffix(INCOMPLETE) + suffix} if "name" in image else image
        for image in images
    ]
    new = tree | {"multiscales": entries}
    return attributes | {"ome": new} if "ome" in attributes else new


def _omero(displays: Sequence[Display]) -> Tree:
    """Return the rendering of channels that both versions took over from OMERO: white on black."""
    channels = []
    for display in displays:
        (low, high), (start, end) = display.limits, display.window
        window = {"min": low, "max": high, "start": start, "end": end}
        channels.append({"active": True, "color": "FFFFFF", "label": display.name, "window": window})
    return {"channels": channels}


def _axis(axis: str, *, known: bool) -> Tree:
    entry = {"name": axis, "type": TYPES[axis]}
    return entry | {"unit": "nanometer"} if known and TYPES[axis] == "space" else entry
