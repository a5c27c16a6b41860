"""Attributes of arrays, as programs name them: axes, voxel size and unit, and what the values mean.

Not here: the files that they are stored in (formats). What is said in no way that is understood counts as unknown, and
the reason is a note: a wrong axis or size would do more harm than none. Dialects: funlib.persistence (`axis_names`,
`voxel_size`, `offset`, `units`), COSEM (`transform`), xarray (`_ARRAY_DIMENSIONS`), CREMI (`resolution`), ilastik and
plant-seg (`element_size_um`), n5-viewer and n5-ij (`pixelResolution`, `pixelWidth`), CF conventions 1.11, section 8.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from volpipe.volumes.storage.metadata import GUESSED_SIZE, SYNONYMS, Place, floats, lengths, place, shown

Attributes = Mapping[str, Any]  # Any: JSON
T = TypeVar("T")

AXES = ("axis_names", "axes", "_ARRAY_DIMENSIONS", "dimension_names", "DIMENSION_LABELS")
SIZE = re.compile(r"(resolution|voxelsize|elementsize|pixelsize|spacing)(nm|um|µm|micron|angstrom|mm)?")
SIZES = ("resolution", "voxelsize", "elementsize", "pixelsize", "spacing")  # the first that says a size counts
IN_NM = ("resolution", "voxel_size")  # without a unit: funlib's habit, and CREMI's
UNITS = ("units", "unit", "voxelunits", "voxelunit", "spatialunits", "spatialunit")
IMAGEJ = {"z": "pixelDepth", "y": "pixelHeight", "x": "pixelWidth"}
IN_NM_NOTE = "without a unit, taken as nm; input.voxel_size_nm gives another"
MAX_SHOWN = 60
# One rule for tables of colours: the numbers are read as they are stored, and a note says that a table is not applied.
INVERTING_TABLE = (
    "white is the least number in the file (MINISWHITE, an inverting table of colours): the numbers are read as they "
    "are stored, as ImageJ and scikit-image do, and are not inverted as they are shown"
)
PALETTE = (
    "the voxels are numbers of colours in a palette, which is not applied: labels are these numbers, and grey values "
    "would be others"
)
COLOUR_CHANNELS = "the channels are red, green and blue: neither labels nor classes"


def read_axes(attributes: Attributes, rank: int, *others: object) -> tuple[tuple[str, ...] | None, str]:
    """Return the names of the axes of an array, in its own order; None, and what it calls them, where that is odd.

    Args:
        attributes: of the array.
        rank: its number of axes.
        others: names that its format keeps elsewhere; they count first.
    """
    transform, tags = (
        _json_object(attributes.get(key)) or {} for key in ("transform", "axistags")
    )  # these are ilastik's
    entries = tags.get("axes")
    keys = [tag.get("key") for tag in entries if isinstance(tag, dict)] if isinstance(entries, list) else []
    values = [*others, *(attributes.get(key) for key in AXES), keys, transform.get("axes")]
    axes = next((axes for value in values if (axes := named_axes(value, rank))), None)
    odd = next((", ".join(map(str, names)) for value in values if (names := _list_entries(value)) and any(names)), "")
    return axes, "" if axes else _cut_text(odd)


def named_axes(value: object, rank: int) -> tuple[str, ...] | None:
    """Return `value`, a list or a text, as names of `rank` axes: t, c, z, y, x where it means these; None if odd."""
    names = _list_entries(value) or []
    names = [name.get("name") if isinstance(name, dict) else name for name in names]
    if len(names) == 1 and isinstance(names[0], str) and len(names[0]) == rank:
        names = list(names[0])
    if len(names) != rank or not all(isinstance(name, str) for name in names):
        return None
    plain_names = [str(name).strip().rstrip("^").lower() for name in names]  # funlib marks channels: c^
    axes = tuple(SYNONYMS.get(name, name) for name in plain_names)
    return axes if len(set(axes)) == rank and {"x", "y"} & set(axes) else None


def read_place(attributes: Attributes, axes: Sequence[str]) -> Place:
    """Return where an array says that it lies: lists are in the order of its own `axes`, those of n5-viewer x, y, z.

    The first size with a unit counts, or else one that is nm by habit, or else the first reason why it is unknown.
    """
    found = [
        transform_place(attributes.get("transform"), axes),
        *(_of_key(key, attributes, axes) for key in size_keys(attributes)),
        viewer_place(attributes, axes),
    ]
    places = [each for each in found if each is not None]
    return min(places, key=lambda each: (each.voxel_size_nm is None, bool(each.reason)), default=Place())


def transform_place(value: object, stored: Sequence[str] = ()) -> Place | None:
    """Return the place in COSEM's attribute `transform`, whose lists follow its own `axes`; None where it has none.

    Args:
        value: the attribute.
        stored: axes of the array, where they are known: the transform must name those of space.
    """
    tree = _json_object(value)
    if tree is None or not isinstance(tree.get("axes"), list):
        return None
    axes = [str(name).lower() for name in tree["axes"]]
    scale = floats(tree.get("scale"))
    if scale is None or len(scale) != len(axes):
        return Place(reason=f"its transform has scale {_cut_text(tree.get('scale'))}") if "scale" in tree else None
    missing = [axis for axis in stored if axis in "zyx" and axis not in axes]
    if missing:
        return Place(reason=f"its transform says nothing of {', '.join(missing)}")
    return listed_place(axes, scale, tree.get("translate"), tree.get("units"))


def viewer_place(attributes: Attributes, axes: Sequence[str]) -> Place | None:
    """Return the place in n5-viewer's `pixelResolution` (x, y, z) or n5-ij's `pixelWidth`; None of neither."""
    pixel = attributes.get("pixelResolution")
    entry = _json_object(pixel) or {"dimensions": pixel, "unit": attributes.get("pixelUnit")}
    numbers, unit = floats(entry.get("dimensions")), entry.get("unit")
    if numbers is not None and len(numbers) == 3:
        return _complete(dict(zip("xyz", numbers, strict=True)), None, unit or "", axes)
    if IMAGEJ["x"] not in attributes:
        return None
    numbers = floats([attributes[name] for name in IMAGEJ.values() if name in attributes])
    if numbers is None:
        return Place(reason=f"its {IMAGEJ['x']} is {_cut_text(attributes[IMAGEJ['x']])}")
    names = [axis for axis, name in IMAGEJ.items() if name in attributes]
    return _complete(dict(zip(names, numbers, strict=True)), None, unit or "", axes)


def listed_place(axes: Sequence[str], scale: Sequence[float], shift: object, units: object) -> Place:
    """Return the place of an array whose attributes are lists in the order of `axes`; without a shift, of 0."""
    return _complete(dict(zip(axes, scale, strict=True)), shift, units, axes, in_nm=True)


def units_by_axis(value: object, axes: Sequence[str]) -> dict[str, object] | None:
    """Return the unit of each spatial axis, from one for all or a list in the order of `axes`; None if it fits none."""
    spatial = [axis for axis in axes if axis in "zyx"]
    tree = _json_object(value)
    if tree is not None:
        return {axis: tree.get(axis) for axis in spatial}
    names = _list_entries(value)
    if names is None:
        return dict.fromkeys(spatial, str(value))
    if len(set(map(str, names))) == 1:
        return dict.fromkeys(spatial, names[0])
    return by_axis(names, axes)


def by_axis(values: Sequence[T], axes: Sequence[str]) -> dict[str, T] | None:
    """Return `values` by axis: one for each of `axes`, or for those of space alone, or of space and time."""
    for names in (list(axes), [axis for axis in axes if axis in "zyx"], [axis for axis in axes if axis in "tzyx"]):
        if len(values) == len(names):
            return dict(zip(names, values, strict=True))
    return None


def value_notes(attributes: Attributes) -> tuple[str, ...]:
    """Return what a user should know of values that mean others, by CF and HDF5 Image: they are read as stored."""
    notes = []
    scale, shift = _number_attribute(attributes, "scale_factor", 1.0), _number_attribute(attributes, "add_offset", 0.0)
    if (scale, shift) != (1.0, 0.0):
        notes.append(
            f"values are read as they are stored; the file means {scale:g} × value + {shift:g} (scale_factor, "
            "add_offset): copy it with these values if the net needs them"
        )
    for key in ("_FillValue", "missing_value"):
        fill = _number_attribute(attributes, key, None)
        if fill is not None and not any(f" {fill:g} " in note for note in notes[-1:]):
            notes.append(f"voxels of value {fill:g} are no data ({key}); they are read as any other")
    if str(attributes.get("IMAGE_SUBCLASS")).strip("\0") == "IMAGE_INDEXED":  # HDF5 Image and Palette 1.2
        notes.append(PALETTE)
    if _number_attribute(attributes, "IMAGE_WHITE_IS_ZERO", 0.0):
        notes.append(INVERTING_TABLE)
    return tuple(notes)


def palette_notes(colours: bytes) -> tuple[str, ...]:
    """Return what a user should know of the numbers of a palette, whose colours are red, green and blue, a byte each.

    () where number n is the grey value n, as of most grey pictures with a palette.
    """
    is_grey = colours == bytes(n for n in range(len(colours) // 3) for _ in range(3))
    return () if colours and is_grey else (PALETTE,)


def is_unsigned(attributes: Attributes) -> bool:
    """Tell whether signed integers are meant as unsigned, as netCDF says it."""
    value = attributes.get("_Unsigned")
    return str(value[0] if isinstance(value, list) and value else value).lower() in ("true", "1")


def size_keys(attributes: Attributes) -> Iterator[str]:
    """Yield the keys of `attributes` that may say a voxel size, the most usual first."""
    kinds = {key: match[1] for key in attributes if (match := SIZE.fullmatch(_bare(key)))}
    yield from sorted(kinds, key=lambda key: (SIZES.index(kinds[key]), key))


def _of_key(key: str, attributes: Attributes, axes: Sequence[str]) -> Place:
    """Return the place that the attribute `key` and those of its unit and of the offset say."""
    match = SIZE.fullmatch(_bare(key))
    assert match is not None
    kind, value, units = match[1], attributes[key], _unit_of(key, attributes, match[2])
    tree = _json_object(value)
    if tree is not None:
        value = [tree.get(axis) for axis in axes if axis in "zyx"]
    numbers = floats([value]) or floats(value) or _numbers_in(value)
    if numbers is None and (size := lengths(value)) is not None:
        numbers, units = size, "nm"
    if numbers is None:
        return Place(reason=f"its {key} is {_cut_text(value)}")
    names = [axis for axis in "zyx" if axis in axes or len(numbers) == 3] if kind == "elementsize" else axes
    spatial = [axis for axis in axes if axis in "zyx"]
    scale = dict.fromkeys(spatial, numbers[0]) if len(numbers) == 1 else by_axis(numbers, names)
    if scale is None:
        return Place(reason=f"its {key} has {len(numbers)} numbers for the axes {', '.join(axes)}")
    return _complete(scale, attributes.get("offset"), units, axes, in_nm=key in IN_NM)


def _unit_of(key: str, attributes: Attributes, suffix: str | None) -> object:
    """Return the unit of the attribute `key`: its own `suffix`, or what another attribute says; None for neither."""
    if suffix:
        return suffix
    plain = {_bare(name): value for name, value in attributes.items()}
    names = (f"{_bare(key)}units", f"{_bare(key)}unit", *UNITS)
    return next((plain[name] for name in names if plain.get(name) is not None), None)


def _complete(
    scale: Mapping[str, float], shift: object, units: object, axes: Sequence[str], *, in_nm: bool = False
) -> Place:
    """Return the place of sizes of all spatial `axes`, shifted by a list; without a word of a unit nm, if `in_nm`."""
    sizes = {axis: size for axis, size in scale.items() if axis in axes}
    missing = [axis for axis in axes if axis in "zyx" and axis not in sizes]
    if missing:
        numbers = ", ".join(f"{axis} {size:g}" for axis, size in sizes.items())
        return Place(reason=f"it says {numbers}, and nothing of {', '.join(missing)}")
    is_habit = units is None and in_nm
    by_name = units_by_axis("nm" if is_habit else "" if units is None else units, axes)
    if by_name is None:
        return Place(reason=f"its units are {_cut_text(units)}, for the axes {', '.join(axes)}")
    shifts = by_axis(floats(shift) or (), axes)
    result = place(sizes, shifts or {}, by_name)
    if result.voxel_size_nm is None:
        return result
    numbers = shown([sizes[axis] for axis in "zyx" if axis in sizes])
    odd = f"its offset is {_cut_text(shift)}, for the axes {', '.join(axes)}; it counts as 0"
    notes = [f"{GUESSED_SIZE}: it says {numbers} {IN_NM_NOTE}"] if is_habit else []
    notes += [odd] if shift is not None and shifts is None else []
    return replace(result, reason="; ".join(notes))


def _json_object(value: object) -> dict[str, Any] | None:  # Any: JSON
    """Return an object, or that in a text, as which HDF5 keeps it; None of others."""
    value = _json_or_value(value, "{")
    return value if isinstance(value, dict) else None


def _json_or_value(value: object, start: str) -> object:
    """Return what a text that starts so holds as JSON; the value itself if it is no such text."""
    try:
        return json.loads(value) if isinstance(value, str) and value.lstrip().startswith(start) else value
    except (ValueError, RecursionError):
        return value


def _list_entries(value: object) -> list[Any] | None:  # Any: JSON
    """Return the entries of a list, or of a text of several: "nm, nm, nm", "[z,y,x]", "z y x"; None of others."""
    value = _json_or_value(value, "[")
    if isinstance(value, str):
        text = value.strip(" \t\n\0[](){}")
        parts = re.split(r"[,;]", text) if re.search(r"[,;]", text) else text.split() or [""]
        return [part.strip(" '\"") for part in parts]
    entries = list(value) if isinstance(value, list | tuple) else None
    return _list_entries(entries[0]) if entries and len(entries) == 1 and isinstance(entries[0], list) else entries


def _numbers_in(value: object) -> tuple[float, ...] | None:
    """Return the numbers of a text or a list that are all of them, without a unit: "4, 4, 40"."""
    try:
        return floats([float(entry) for entry in _list_entries(value) or [] if not isinstance(entry, bool)]) or None
    except (TypeError, ValueError, OverflowError):
        return None


def _number_attribute(attributes: Attributes, key: str, other: float | None) -> float | None:
    value = attributes.get(key)
    numbers = floats(value if isinstance(value, list) else [value])
    return numbers[0] if numbers is not None and len(numbers) == 1 else other


def _bare(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "").replace(" ", "")


def _cut_text(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
