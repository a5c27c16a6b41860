"""Imaris 5.5 files (.ims), which are HDF5: a dataset for each level, time and channel, padded to whole chunks.

Not here: HDF5 (formats.hdf5). Attributes are lists of single letters. Format: imaris.oxinst.com, "Imaris 5.5 File
Format Description": ImageSizeX, Y and Z of a channel are its true shape, ExtMin and ExtMax of the image its corners.
"""

from __future__ import annotations

import math
import re

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.programs import Hdf5Dataset, Levels, Meaning
from volpipe.volumes.storage.metadata import Place, Tree, floats, place

DATA = re.compile(r"DataSet/ResolutionLevel (\d+)/TimePoint (\d+)/Channel (\d+)/Data")
IMAGE = "DataSetInfo/Image"
GROUP = re.compile("DataSet")
AXES = ("z", "y", "x")


def read_meaning(dataset: Hdf5Dataset) -> Meaning | None:
    """Return what Imaris means by `dataset`; None where it is none of Imaris's.

    Raises:
        VolumeError: it is smaller than the file says.
    """
    match = DATA.fullmatch(dataset.key)
    if match is None or len(dataset.shape) != 3:
        return None
    shape = _shape(dataset.attributes(dataset.key.removesuffix("/Data")))
    if shape is None:
        note = (
            "Imaris pads its data to whole chunks, and this file does not say the size of the image: ends may be zeros"
        )
        return Meaning(dataset.shape, dataset.dtype, None, (note,), axes=AXES)
    if any(n > stored for n, stored in zip(shape, dataset.shape, strict=True)):
        raise VolumeError(
            f"{dataset.file}/{dataset.key} has {dataset.shape} voxels, and the file says {shape}; it is damaged"
        )
    _, time, channel = match.groups()
    finest = _shape(dataset.attributes(f"DataSet/ResolutionLevel 0/TimePoint {time}/Channel {channel}")) or shape
    return Meaning(shape, dataset.dtype, _place(dataset.attributes(IMAGE), shape, finest), axes=AXES)


def find_levels(keys: list[str]) -> list[Levels]:
    """Return the levels in `keys`, all of a file, where these are of one channel and one point in time."""
    matches = [match for key in keys if (match := DATA.fullmatch(key))]
    if not matches or len({match.groups()[1:] for match in matches}) != 1:
        return []
    ordered = sorted(matches, key=lambda match: int(match[1]))
    return [Levels("DataSet", tuple(match[0].removeprefix("DataSet/") for match in ordered))]


def _shape(channel: Tree) -> tuple[int, ...] | None:
    sizes = [_number(channel.get(f"ImageSize{axis.upper()}")) for axis in AXES]
    return tuple(int(n) for n in sizes if n is not None and n >= 1) if all(n and n >= 1 for n in sizes) else None


def _place(image: Tree, shape: tuple[int, ...], finest: tuple[int, ...]) -> Place:
    """Return the place of a level: each axis is halved or kept from level to level, an odd end is left out."""
    corners = {
        axis: (_number(image.get(f"ExtMin{i}")), _number(image.get(f"ExtMax{i}"))) for i, axis in enumerate("xyz")
    }
    sizes, shifts = {}, {}
    for axis, n, full in zip(AXES, shape, finest, strict=True):
        low, high = corners[axis]
        if low is None or high is None:
            return Place(reason=f"it says no ExtMin and ExtMax of axis {axis}")
        ratio = max(0.0, math.log2(full / n))
        halvings = int(ratio) if full >> int(ratio) == n else round(ratio)
        sizes[axis] = (high - low) / full * 2**halvings
        shifts[axis] = low + sizes[axis] / 2
    return place(sizes, shifts, dict.fromkeys(AXES, _text(image.get("Unit")) or "um"))


def _text(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _number(value: object) -> float | None:
    try:
        numbers = floats([float(_text(value))])
    except ValueError:
        return None
    return numbers[0] if numbers else None
