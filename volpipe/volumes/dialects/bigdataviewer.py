"""BigDataViewer's HDF5 files and the XML beside these and its N5: views by time and setup, levels, voxel size, type.

Not here: HDF5 and N5 (formats.hdf5, formats.n5), whose attributes say all but the unit. Datasets of HDF5 are
`t00000/s00/LEVEL/cells`; `s00/resolutions` has the factors of levels (x, y, z). Java wrote unsigned voxels as signed
ones, and reads 16-bit ones without an attribute `dataType` as unsigned (bigdataviewer-core, Hdf5ImageLoader).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.programs import Hdf5Dataset, Levels, Meaning, unsigned
from volpipe.volumes.storage.metadata import Lengths, Place, floats, place
from volpipe.volumes.storage.paths import check_beside

GROUP = re.compile(r"t\d+/s\d+")
CELLS = re.compile(r"(t(\d+)/s(\d+))/(\d+)/cells")
N5_VIEW = re.compile(r"setup(\d+)/timepoint(\d+)/s\d+")
AXES = ("z", "y", "x")
MARK = b"<SpimData"
MARK_BYTES = 4096  # from the start, in which the mark stands
MAX_XML_BYTES = 2**24
MAX_FILES = 100  # of XML, beside a file, that are looked into


def read_meaning(dataset: Hdf5Dataset) -> Meaning | None:
    """Return what BigDataViewer means by `dataset`; None where it is none of its views."""
    match = CELLS.fullmatch(dataset.key)
    factors = dataset.table(f"s{match[3]}/resolutions") if match is not None and len(dataset.shape) == 3 else None
    if match is None or factors is None:
        return None
    dtype, notes = _dtype(dataset, dataset.attributes(f"s{match[3]}").get("dataType"))
    level = int(match[4])
    factor = floats(factors[level]) if level < len(factors) else None
    if factor is None or len(factor) != 3:
        return Meaning(
            dataset.shape, dtype, Place(reason=f"s{match[3]}/resolutions has no level {level}"), notes, axes=AXES
        )
    where, more = _place(dataset.file, int(match[2]), int(match[3]), factor[::-1])
    return Meaning(dataset.shape, dtype, where, (*notes, *more), axes=AXES)


def find_levels(keys: list[str]) -> list[Levels]:
    """Return the levels of each view in `keys`, all of a file."""
    views: dict[str, dict[int, str]] = {}
    for match in filter(None, map(CELLS.fullmatch, keys)):
        views.setdefault(match[1], {})[int(match[4])] = f"{match[4]}/cells"
    return [Levels(group, tuple(levels[n] for n in sorted(levels))) for group, levels in views.items() if 0 in levels]


def read_n5_place(container: Path, key: str, factor: Lengths) -> Place | None:
    """Return the place of a level in BigDataViewer's N5, of `factor` voxels (z, y, x), by the XML beside it, if any."""
    match = N5_VIEW.fullmatch(key)
    if match is None or _describing(container) is None:
        return None
    return _place(container, int(match[2]), int(match[1]), factor)[0]


def read_container(path: Path) -> Path | None:
    """Return the container whose views the XML file `path` describes; None where it is no such file.

    Raises:
        VolumeError: it is one, of a container that volpipe does not read, or that is not there.
    """
    if path.suffix.lower() != ".xml" or not path.is_file():
        return None
    with path.open("rb") as stream:
        if MARK not in stream.read(MARK_BYTES):
            return None
    root = _root(path)
    loader = None if root is None else root.find("./SequenceDescription/ImageLoader")
    kind = "" if loader is None else loader.get("format", "")
    entry = (
        None
        if loader is None
        else next((loader.find(name) for name in ("hdf5", "n5", "zarr") if loader.find(name) is not None), None)
    )
    if root is None or entry is None or not entry.text:
        raise VolumeError(
            f"{path} describes images of the kind {kind or 'unknown'!r}; volpipe reads those in HDF5 and N5"
        )
    base = (root.findtext("BasePath") or ".").strip()
    container = check_beside(str(Path(base) / entry.text.strip()), path)
    if not container.exists():
        raise VolumeError(f"{path} describes {container}, which is not there; put it beside the XML file")
    return container


def _dtype(dataset: Hdf5Dataset, named: object) -> tuple[np.dtype, tuple[str, ...]]:
    """Return the type that is meant, and a note where that is a habit of the program and not said."""
    stored = dataset.dtype
    if isinstance(named, str):
        try:
            meant = np.dtype(named)
        except TypeError:
            return stored, (f"the file says voxels of the type {named[:20]}; they are read as {stored}, as stored",)
        if meant.kind in "iu" and stored.kind in "iu" and meant.itemsize == stored.itemsize:
            return meant, ()
        return stored, () if meant == stored else (f"the file says {meant}; voxels are read as {stored}, as stored",)
    if stored.kind != "i" or stored.itemsize > 2:
        return stored, ()
    meant = unsigned(stored)
    return meant, (f"voxels are stored as {stored} and read as {meant}, as BigDataViewer means them",)


def _place(file: Path, time: int, setup: int, factor: tuple[float, ...]) -> tuple[Place, tuple[str, ...]]:
    """Return the place of a level by the XML beside `file`, and a note where its view is moved or turned there."""
    path = _describing(file)
    root = None if path is None else _root(path)
    if path is None or root is None:
        return Place(
            reason=f"BigDataViewer says it in {file.with_suffix('.xml').name}, which is not beside the file"
        ), ()
    view = next(
        (entry for entry in root.iterfind(".//ViewSetup") if (entry.findtext("id") or "").strip() == str(setup)), None
    )
    text = "" if view is None else view.findtext("./voxelSize/size") or ""
    try:
        sizes = floats([float(number) for number in text.split()])
    except ValueError:
        sizes = None
    if view is None or sizes is None or len(sizes) != 3:
        return Place(reason=f"{path.name} says no voxel size of setup {setup}"), ()
    finest = dict(zip("xyz", sizes, strict=True))
    by_level = dict(zip(AXES, factor, strict=True))
    size = {axis: finest[axis] * by_level[axis] for axis in AXES}
    shift = {axis: (by_level[axis] - 1) / 2 * finest[axis] for axis in AXES}
    unit = (view.findtext("./voxelSize/unit") or "").strip()
    notes = (f"{path.name} moves or turns the view; volpipe leaves it at 0",) if _is_moved(root, time, setup) else ()
    return replace(place(size, shift, dict.fromkeys(AXES, unit)), has_origin=False), notes


def _describing(file: Path) -> Path | None:
    """Return the XML file that describes `file`: of its name, or the only other one beside it that names it."""
    own = file.with_suffix(".xml")
    if own.is_file():
        return own
    naming = [path for path in sorted(file.parent.glob("*.xml"))[:MAX_FILES] if _mentions(path, file.name)]
    return naming[0] if len(naming) == 1 else None


def _mentions(path: Path, name: str) -> bool:
    try:
        return path.stat().st_size <= MAX_XML_BYTES and name.encode() in path.read_bytes()
    except OSError:
        return False


def _root(path: Path) -> ElementTree.Element | None:
    """Return the root of an XML file of SpimData, None where it is none."""
    try:
        status = path.stat()
        return _parsed(path, status.st_mtime_ns, status.st_size) if status.st_size <= MAX_XML_BYTES else None
    except (OSError, ElementTree.ParseError, ValueError):
        return None


@lru_cache(maxsize=4)
def _parsed(path: Path, _time: int, _size: int) -> ElementTree.Element | None:
    """Return the root of an XML file, read once in each of its states: a file of HDF5 has thousands of views."""
    root = ElementTree.parse(path).getroot()
    return root if root.tag == "SpimData" else None


def _is_moved(root: ElementTree.Element, time: int, setup: int) -> bool:
    """Tell whether the transforms of a view do more than scale it."""
    for view in root.iterfind(".//ViewRegistration"):
        if (view.get("timepoint"), view.get("setup")) == (str(time), str(setup)):
            for text in view.iterfind(".//affine"):
                numbers = (text.text or "").split()
                if any(float(number) for i, number in enumerate(numbers) if i % 5) if _are_numbers(numbers) else True:
                    return True
    return False


def _are_numbers(texts: list[str]) -> bool:
    try:
        return len([float(text) for text in texts]) == 12
    except ValueError:
        return False
