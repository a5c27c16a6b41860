"""Axes and voxel sizes in TIFF files: OME-XML, ImageJ's and tifffile's descriptions, resolution tags.

Not here: pages and voxels (tiff). Objects of tifffile come in as arguments; nothing is opened.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.storage.metadata import Lengths, Place, nanometres, place

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage, TiffPageSeries

UNNAMED = "IQ"  # tifffile's letters for axes of which the file says nothing
INCH, CENTIMETER = 2, 3  # of the tag ResolutionUnit
WHITE_IS_ZERO, GREY = 0, 1  # of the tag PhotometricInterpretation
RGB_DECODERS = (6, 7, 33007, 34892)  # compressions that are JPEG, from which RGB comes
COLOURS = {  # what values are, and what a user should know of them, by PhotometricInterpretation
    WHITE_IS_ZERO: ("grey", ""),
    GREY: ("grey", ""),
    2: ("RGB", ""),
    3: (
        "palette",
        "the voxels are numbers of colours in a palette, which may be no grey values",
    ),
    4: ("a mask", ""),
    5: ("CMYK", "the channels are inks (CMYK): more is darker"),
    6: ("YCbCr", "the channels are luma and two differences of colours (YCbCr), not red, green and blue"),
    8: ("CIELAB", "the channels are L*, a* and b* (CIELAB), not red, green and blue"),
    9: ("ICCLAB", "the channels are L*, a* and b* (ICCLAB), not red, green and blue"),
    32803: ("a mosaic", "neighbouring pixels have filters of different colours before them (CFA)"),
    34892: ("raw", ""),
}


def axes(series: TiffPageSeries, file: Path) -> tuple[str, ...]:
    """Return the axes of a series as t, c, z, y, x; samples (colours) are channels, others in lower case.

    Axes without a name are taken for z, then c, then t, the fastest first.

    Raises:
        VolumeError: it has channels and samples, or another axis twice.
    """
    names = ["c" if letter == "S" else letter.lower() for letter in series.axes]
    left = iter([name for name in "zct" if name not in names])
    for i in reversed(range(len(names))):
        if series.axes[i] in UNNAMED:
            names[i] = next(left, f"d{i}")
    if len(set(names)) < len(names):
        raise VolumeError(
            f"{file} has axes {series.axes} of {tuple(series.shape)}; save channels, colours and times on their own"
        )
    return tuple(names)


def read_place(tif: TiffFile, series: TiffPageSeries, number: int, names: tuple[str, ...]) -> Place:
    """Return the voxel size of `series`, the one with this number, whose axes are `names`; no origin is read.

    OME's, or else the spacing and unit of ImageJ's or tifffile's description with the resolution of the first page.
    Without a unit there only a resolution per centimetre counts: one per inch is about printing. The size is unknown of
    an image of two dimensions that does not say how thick it is, and where tag and description have different units.
    """
    if series.kind == "ome":
        sizes, units = _ome(tif.ome_metadata or "", number)
    else:
        description = _description(tif, number)
        reason = _contradiction(description, series.keyframe, is_imagej=tif.is_imagej)
        if reason:
            return Place(reason=reason)
        sizes, units = _described(description, series.keyframe, is_stack=series.kind == "imagej" and "z" in names)
    missing = [axis for axis in "zyx" if axis not in sizes]
    if missing and sizes:
        known = ", ".join(f"{axis} {sizes[axis]:g} {units[axis]}" for axis in "zyx" if axis in sizes)
        return Place(reason=f"it says {known}, and nothing of {', '.join(missing)}")
    return place(sizes, {}, units)


def _ome(text: str, number: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return voxel size and unit per axis of image `number` of an OME-XML document; µm where no unit is said."""
    attributes = next((element.attrib for element in _elements(text, number, "Pixels")), {})
    lengths = {axis: _number(attributes.get(f"PhysicalSize{axis.upper()}")) for axis in "zyx"}
    sizes = {axis: length for axis, length in lengths.items() if length}
    return sizes, {axis: attributes.get(f"PhysicalSize{axis.upper()}Unit", "µm") for axis in sizes}


def _elements(text: str, number: int, name: str) -> list[ElementTree.Element]:
    """Return the elements `name` of the Pixels of image `number` in an OME-XML document, itself included."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return []
    pixels = list(root.iterfind(".//{*}Pixels"))
    inner = pixels[number].iter() if number < len(pixels) else ()
    return [element for element in inner if element.tag.rpartition("}")[2] == name]


def _described(
    description: dict[str, Any], page: TiffPage, *, is_stack: bool
) -> tuple[dict[str, float], dict[str, str]]:  # Any: text or number
    """Return voxel size and unit per axis; an ImageJ stack without a spacing has one of 1, which ImageJ leaves out."""
    unit, *others = (unescaped(str(description.get(name, ""))) for name in ("unit", "yunit", "zunit"))
    sizes = {
        axis: size for axis, name in (("y", "YResolution"), ("x", "XResolution")) if (size := _inverse(page, name))
    }
    if nanometres(unit) is None and _resolution_unit(page) == CENTIMETER:
        return sizes, {"y": "cm", "x": "cm"}
    if not unit.strip():
        return {}, {}
    spacing = _number(description.get("spacing", 1.0 if is_stack else None))
    units = {"x": unit} | {axis: other or unit for axis, other in zip("yz", others, strict=True)}
    return sizes | ({"z": spacing} if spacing else {}), units


def _contradiction(description: dict[str, Any], page: TiffPage, *, is_imagej: bool) -> str:  # Any: text or number
    """Return why the unit of a description does not go with that of the resolution tags, "" where it may.

    ImageJ takes its own unit and writes none into the tag, others count pixels per centimetre beside it (Bio-Formats
    3676: 400 nm became 0.04 nm). An inch beside tifffile's description is what tifffile writes without being asked.
    """
    unit, size = unescaped(str(description.get("unit", ""))), _inverse(page, "XResolution")
    tag = {INCH: ("inch", 25.4e6), CENTIMETER: ("cm", 1e7)}.get(_resolution_unit(page), ("", 0.0))
    factor = nanometres(unit)
    if factor is None or size is None or not tag[0] or tag[1] == factor or (tag[0] == "inch" and not is_imagej):
        return ""
    return f"it says x {size:g} {tag[0]} by its resolution, and the unit {unit[:20]!r} in its description"


def _resolution_unit(page: TiffPage) -> int:
    tag = page.tags.get("ResolutionUnit")
    return int(tag.value) if tag is not None and isinstance(tag.value, int) else 0


def unescaped(text: str) -> str:
    """Return `text` with the letters that ImageJ writes as \\u00B5 and the like."""
    return re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)


def _description(tif: TiffFile, number: int) -> dict[str, Any]:  # Any: text or number
    """Return the description by ImageJ or tifffile on the first page of a series."""
    if tif.is_imagej:
        return dict(tif.imagej_metadata or {})
    shaped = tif.shaped_metadata or ()
    return dict(shaped[number]) if number < len(shaped) else {}


def _inverse(page: TiffPage, name: str) -> float | None:
    """Return the edge of a pixel, in the unit of the resolution tag `name`, a fraction."""
    tag = page.tags.get(name)
    value = None if tag is None else tag.value
    if not isinstance(value, tuple) or len(value) != 2 or 0 in value:
        return None
    return _number(value[1] / value[0])


def _number(value: object) -> float | None:
    """Return `value` as a length: above zero and finite; None where it is none."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def channel_names(tif: TiffFile, series: TiffPageSeries, number: int) -> tuple[str, ...]:
    """Return the names of the channels of `series`, as OME has them; () where not all have one."""
    if series.kind != "ome":
        return ()
    names = tuple(element.get("Name", "") for element in _elements(tif.ome_metadata or "", number, "Channel"))
    return names if all(names) else ()


def colours(page: TiffPage) -> str:
    """Return what the values of `page` are: "grey", or the name of another photometric interpretation.

    Raises:
        VolumeError: volpipe does not know that.
    """
    number = GREY if page.photometric is None else int(page.photometric)
    if number not in COLOURS:
        raise VolumeError(
            f"{page.parent.filename} has pages of photometric interpretation {number}, which is not known; "
            "save grey values"
        )
    name, _ = COLOURS[number]
    return "RGB" if name == "YCbCr" and page.compression in RGB_DECODERS else name


def white(page: TiffPage) -> int | None:
    """Return the value of black in a `page` whose white is 0, which is read the other way round; None of others.

    Bits stay: tifffile writes masks of Python as if white were 0, and true is 1 in them.
    """
    kind = np.dtype(page.dtype).kind
    if page.photometric != WHITE_IS_ZERO or kind not in "ui":
        return None
    return -1 if kind == "i" else 2 ** int(page.bitspersample) - 1


def colour_notes(page: TiffPage) -> tuple[str, ...]:
    """Return what a user should know of the values of `page`, () of grey values and RGB."""
    black = white(page)
    if black is not None:
        return (f"white is 0 in the file (MINISWHITE): a stored value v is read as {black} - v",)
    if page.photometric == WHITE_IS_ZERO:
        kind = "bits" if page.dtype == np.bool_ else "floats"
        return (f"white is the least value in the file (MINISWHITE): {kind} are read as they are stored",)
    name = colours(page)
    is_ramp = name == "palette" and page.colormap is not None and _is_ramp(page.colormap)
    return () if is_ramp else tuple(note for other, note in COLOURS.values() if other == name and note)


def _is_ramp(colormap: np.ndarray) -> bool:
    """Return whether the colours of a palette (3, n) are greys that grow with their number."""
    ramp = np.round(np.arange(colormap.shape[1]) / max(1, colormap.shape[1] - 1) * 255).astype(int)
    return all(np.array_equal(channel >> 8, ramp) for channel in colormap)


def coarser(finest: Place, names: tuple[str, ...], series: TiffPageSeries, level: int) -> Place:
    """Return where a level lies: its voxels join as many of the finest as their numbers say."""
    if finest.voxel_size_nm is None or not level:
        return finest
    coarse = series.levels[level]
    factors = {axis: full / n for axis, full, n in zip(names, series.shape, coarse.shape, strict=True) if axis in "zyx"}
    size = [v * factors.get(axis, 1.0) for axis, v in zip("zyx", finest.voxel_size_nm, strict=True)]
    shift = [(factors.get(axis, 1.0) - 1) / 2 * v for axis, v in zip("zyx", finest.voxel_size_nm, strict=True)]
    return Place((size[0], size[1], size[2]), (shift[0], shift[1], shift[2]))


def write_arguments(
    style: str, letters: str, voxel_size_nm: Lengths | None
) -> dict[str, Any]:  # Any: arguments of tifffile
    """Return the arguments with which tifffile writes axes and voxel size (z, y, x) in a `style` of description."""
    metadata: dict[str, object] = {"axes": letters}
    if voxel_size_nm is None:
        return {"metadata": metadata}
    z, y, x = voxel_size_nm
    if style == "ome":
        for axis, size in zip("ZYX", voxel_size_nm, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "nm"}
        return {"metadata": metadata}
    metadata |= {"spacing": z, "unit": "nm"}
    return {"metadata": metadata, "resolution": (1 / x, 1 / y), "resolutionunit": "none"}
