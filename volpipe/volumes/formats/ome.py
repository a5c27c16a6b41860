"""OME-NGFF: the metadata of image groups, versions 0.4 (Zarr v2), 0.5 and 0.6 (Zarr v3), read, checked and written.

Not here: the arrays themselves (zarr). Earlier versions are read for what they say; 0.1 to 0.3 say no voxel size.
Specification: ngff.openmicroscopy.org/0.4, /0.5 and /0.6, whose coordinate systems are RFC-5's.
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
SYSTEM = "intrinsic"  # the coordinate system of what is written in 0.6, as ngff-zarr calls its own
MAX_TRANSFORMATIONS = 1000


@dataclass(frozen=True)
class ListedLevel:
    """One level as its group describes it.

    Attributes:
        path: its key in the group.
        axes, place, channel_names: if the group says so.
        coarseness: its voxels' size in whatever unit, to be compared with other levels'; 0 where it is not stated.
        metadata: which version of what says this, for people; "" where the array itself does.
        notes: what a user should know.
    """

    path: str
    axes: tuple[str, ...] | None = None
    place: Place | None = None
    channel_names: tuple[str, ...] = ()
    coarseness: float = 0.0
    metadata: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CoordinateSystem:
    """The coordinate system that the levels of an image are in: its name, "" before 0.6, and its axes as it has them.

    Attributes:
        around: transformations that follow those of each level.
        others: names of systems that are not taken.
    """

    name: str
    axes: object
    around: tuple[object, ...] = ()
    others: tuple[str, ...] = ()


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
    entries = [mapping(entry, "a dataset", source) for entry in datasets]
    system = _coordinate_system(image, entries, source)
    levels = [_dataset(entry, system, source, version) for entry in entries]
    if (
        finest := min(levels, key=lambda level: level.coarseness).place
    ) is not None and not finest.has_origin:  # translations of others are but half voxels
        levels = [replace(level, place=level.place and replace(level.place, has_origin=False)) for level in levels]
    metadata = described(version, system.name)
    metadata += f"; not taken: {', '.join(map(repr, system.others))}" if system.others else ""
    names = _channel_names(tree.get("omero"))
    return tuple(replace(level, channel_names=names, metadata=metadata) for level in levels)


def described(version: str, system: str) -> str:
    """Return the version of OME-Zarr, and the coordinate system that is taken, for people; "" for what is not known."""
    return (f"OME-Zarr {version}" if version else "") + (f", coordinate system {system!r}" if system else "")


def has_systems(version: str) -> bool:
    """Return whether images of this `version` have coordinate systems."""
    return version not in ("0.4", "0.5")


def _ome(attributes: Tree, source: Location) -> Tree:
    return mapping(attributes["ome"], "ome", source) if "ome" in attributes else attributes


def _coordinate_system(image: Tree, datasets: Sequence[Tree], source: Location) -> CoordinateSystem:
    """Return the coordinate system of an image: that which the transformations of its `datasets` lead to.

    Raises:
        VolumeError: they lead to none that the image describes.
    """
    if "coordinateSystems" not in image:
        outer = image.get("coordinateTransformations") or []
        return CoordinateSystem("", image.get("axes"), tuple(outer if isinstance(outer, list) else [outer]))
    listed = image["coordinateSystems"]
    if not isinstance(listed, list) or not listed:
        raise VolumeError(f"{source}: coordinateSystems is {str(listed)[:60]}, not a list of at least one")
    systems = [mapping(entry, "a coordinate system", source) for entry in listed]
    names = [str(entry.get("name")) for entry in systems]
    outputs = {_output_system(entry) for dataset in datasets for entry in _own_transformations(dataset)} - {""}
    known = [name for name in names if name in outputs]
    if outputs and len(known) != 1:
        raise VolumeError(
            f"{source}: its coordinate transformations lead to {', '.join(sorted(outputs))[:80]}, and must lead to one "
            f"of its coordinate systems {', '.join(names)[:80]}, the same for each level; name a level by its key, "
            f"{source / str(datasets[0].get('path'))}, to read it as an array by itself"
        )
    name = known[0] if known else names[-1]  # the last one is the usual one by the specification
    return CoordinateSystem(
        name, systems[names.index(name)].get("axes"), others=tuple(each[:40] for each in names if each != name)
    )


def _own_transformations(dataset: Tree) -> list[Tree]:
    """Return the transformations of a level itself."""
    own = dataset.get("coordinateTransformations")
    return [entry if isinstance(entry, dict) else {} for entry in (own if isinstance(own, list) else [own])]


def _output_system(transformation: Tree) -> str:
    """Return the coordinate system that a transformation leads to, a text in drafts of 0.6; "" if it names none."""
    output = transformation.get("output")
    return str((output.get("name") if isinstance(output, dict) else output) or "")


def _dataset(entry: Tree, system: CoordinateSystem, source: Location, version: str) -> ListedLevel:
    path = entry.get("path")
    if not isinstance(path, str) or not is_inner(path):
        raise VolumeError(f"{source}: dataset path {path!r} is not the key of an array in the group")
    axes, units = _typed_axes(system.axes)
    if "coordinateTransformations" not in entry:
        stated = transform_place(entry.get("transform"))
        size = None if stated is None else stated.voxel_size_nm
        return ListedLevel(path, axes, stated, coarseness=0.0 if size is None else math.prod(size))
    where = f"{source} (OME-Zarr {version or 'of a version that it does not say'})"
    own = _flattened(_own_transformations(entry), where)
    steps = [*own, *_flattened(system.around, where)]
    try:
        scale, shift = _composed(steps, axes)
    except ValueError as error:
        raise VolumeError(
            f"{where}: {error}. To read its voxels on their own grid, name a level by its key, {source / path}, and "
            "give the voxel size"
        ) from error
    if axes is None or not (system.name or any(tree.get("type") == "scale" for tree in own)):
        return ListedLevel(path, axes, Place())
    by_axis = [dict(zip(axes, values, strict=True)) for values in (scale, shift)]
    has_origin = any(tree.get("type") in ("translation", "affine") for tree in steps)
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


def _typed_axes(axes: object) -> tuple[tuple[str, ...] | None, tuple[object, ...]]:
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


def _flattened(entries: Sequence[object], where: str) -> list[Tree]:
    """Return transformations in the order in which they apply, those of a `sequence`, in any nesting, in its place."""
    waiting, flat = list(reversed(entries)), list[Tree]()
    while waiting:
        entry = waiting.pop()
        tree = entry if isinstance(entry, dict) else {}
        inner = tree.get("transformations") if tree.get("type") == "sequence" else None
        if isinstance(inner, list) and inner:
            waiting += reversed(inner)
        else:
            flat.append(tree)
        if len(flat) + len(waiting) > MAX_TRANSFORMATIONS:
            raise VolumeError(f"{where}: a level has more than {MAX_TRANSFORMATIONS} coordinate transformations")
    return flat


def _composed(entries: Sequence[Tree], axes: tuple[str, ...] | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scale and shift of coordinateTransformations, which apply in order: index times scale, plus shift.

    Raises:
        ValueError: they turn or bend the volume, or have other numbers than one for each axis.
    """
    rank = len(axes or ())
    scale, shift = (1.0,) * rank, (0.0,) * rank
    for tree in entries:
        kind = str(tree.get("type"))[:40]
        if kind == "identity" or (kind == "mapAxis" and tree.get(kind) == [*range(rank)]):
            continue
        if kind not in ("scale", "translation", "affine"):
            turns = ", which changes the order of the axes" if kind == "mapAxis" else ""
            raise ValueError(
                f"its coordinate transformation is of the kind {kind!r}{turns}; volpipe reads scale, translation and "
                "identity, and sequences of these"
            )
        if "path" in tree:
            raise ValueError(
                f"its coordinate transformation {kind} is kept in the array {str(tree['path'])[:60]!r}, and volpipe "
                "reads those in the metadata alone"
            )
        value = tree.get(kind)
        diagonal, offsets = _affine_parts(value, rank) if kind == "affine" else (floats(value),) * 2
        if diagonal is None or offsets is None or (axes and len(diagonal) != rank):
            raise ValueError(
                f"the coordinate transformation {kind} is {str(value)[:60]}, not one number for each of the axes "
                f"{', '.join(axes or ('that it should name',))}"
            )
        if axes and kind != "translation":
            scale = tuple(a * v for a, v in zip(scale, diagonal, strict=True))
            shift = tuple(t * v for t, v in zip(shift, diagonal, strict=True))
        if axes and kind != "scale":
            shift = tuple(t + v for t, v in zip(shift, offsets, strict=True))
    return scale, shift


def _affine_parts(matrix: object, rank: int) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return scale and translation of an affine `matrix` of `rank` rows.

    Raises:
        ValueError: it does more than that.
    """
    rows = [floats(row) for row in matrix] if isinstance(matrix, list) else []
    numbers = [row for row in rows if row is not None and len(row) == rank + 1]
    if len(numbers) != rank or len(rows) != rank:
        return None, None
    if any(v for i, row in enumerate(numbers) for j, v in enumerate(row[:-1]) if i != j):
        raise ValueError(
            "its coordinate transformation 'affine' turns or shears the volume; volpipe only scales and moves"
        )
    return tuple(row[i] for i, row in enumerate(numbers)), tuple(row[-1] for row in numbers)


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


def group_attributes(
    multiscale: Multiscale,
    version: str,
    attributes: Mapping[str, Any],  # Any: JSON
    *,
    source: str = "",
) -> Tree:
    """Return the attributes of an image group in OME-NGFF `version`, 0.4 to 0.6, with `attributes` beside them.

    `source` is the image whose labels these are, counted from their group; "" where none is known.
    """
    unknown = [axis for axis in multiscale.axes if axis not in TYPES]
    if unknown:
        raise VolumeError(f"OME-Zarr has no axis {unknown[0]!r}; use {', '.join(TYPES)}")
    axes = [_axis(axis, known=multiscale.voxel_size_nm is not None) for axis in multiscale.axes]
    datasets: list[Tree] = []
    for level in multiscale.levels:
        steps: list[Tree] = [
            {"type": "scale", "scale": multiscale.scale(level)},
            {"type": "translation", "translation": multiscale.shift(level)},
        ]
        ends = {"input": {"path": level.key}, "output": {"name": SYSTEM}}
        steps = [{"type": "sequence", **ends, "transformations": steps}] if has_systems(version) else steps
        datasets.append({"path": level.key, "coordinateTransformations": steps})
    image: Tree = {"name": multiscale.name}
    image |= {"coordinateSystems": [{"name": SYSTEM, "axes": axes}]} if has_systems(version) else {"axes": axes}
    image["datasets"] = datasets
    more: Tree = {"omero": _omero(multiscale.displays)} if multiscale.displays else {}
    label = {"source": {"image": source}} if source else {}
    if version == "0.4":
        more |= {"image-label": {"version": version} | label} if multiscale.is_labels else {}
        return plain({"multiscales": [{"version": version} | image], **attributes, **more})
    more |= {"image-label": label} if multiscale.is_labels else {}
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
