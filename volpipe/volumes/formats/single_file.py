"""Volumes in one file or a folder of slices: the format, by its first bytes, and the arrays in it.

Not here: the formats themselves (hdf5, tiff, tiff_folder, mrc, npy, picture). A key names an array inside the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.volumes.formats import flat, hdf5, hdf5_probe, mrc, npy, picture, tiff, tiff_folder
from volpipe.volumes.formats.ome import Dataset
from volpipe.volumes.storage.metadata import Header, Tree
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import StoredArray

FORMATS = ("hdf5", "tiff", "mrc", "npy", "picture")
MRC_MAP = 208  # where "MAP " stands
MOST_LOOKED_AT = 212  # bytes of a file whose kind is unknown
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


def split(folder: Location) -> tuple[Path, str] | None:
    """Return the file that `folder` is, or leads on inside of, and the key there; None where no file is on its way."""
    if not isinstance(folder, Path):
        return None
    for file in (folder, *folder.parents):
        if file.is_dir():
            return None
        if file.is_file():
            return file, "/".join(folder.relative_to(file).parts)
    return None


def find_format(file: Path) -> str:
    """Return "hdf5", "tiff", "mrc", "npy" or "picture", by the bytes of the file and not by its name.

    Raises:
        VolumeError: it is none of these, or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            start = stream.read(mrc.SIZE)
    except OSError as error:
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    if start[:4] in tiff.MAGICS:
        return "tiff"
    if start.startswith(npy.MAGIC):
        return "npy"
    if start.startswith(picture.MAGICS):
        return "picture"
    if start[MRC_MAP:].startswith(mrc.MARK):
        return "mrc"
    if _is_hdf5(file):
        return "hdf5"
    packer = next((name for mark, name in PACKED.items() if start.startswith(mark)), "")
    if packer:
        raise VolumeError(f"{file} is packed by {packer}, so that no box of it can be read; unpack it first")
    if mrc.is_unmarked(file, start):
        return "mrc"
    raise VolumeError(
        f"{file} is a file of {file.stat().st_size} bytes in no format that volpipe knows{_looks(start)}: it reads "
        "HDF5, TIFF, MRC and .npy files, PNG and JPEG, and N5 and Zarr folders"
    )


def _looks(start: bytes) -> str:
    """Return what the first bytes of a file look like, for people; "" where that is unknown."""
    start = start[:MOST_LOOKED_AT]
    if not start:
        return ", for it is empty"
    try:
        is_text = start.decode().replace("\n", " ").replace("\t", " ").replace("\r", " ").isprintable()
    except UnicodeDecodeError:
        is_text = False
    return ", and looks like a text" if is_text else ""


def _is_hdf5(file: Path) -> bool:
    """Tell whether the signature stands at byte 0, 512, 1024 and so on, as HDF5 allows (MATLAB puts it at 512)."""
    size, offset = file.stat().st_size, 0
    with file.open("rb") as stream:
        while offset + 8 <= size:
            stream.seek(offset)
            if stream.read(8) == hdf5.MAGIC:
                return True
            offset = max(512, 2 * offset)
    return False


def probe_file(folder: Location) -> None:
    """Raise where `folder` is, or leads into, a file whose metadata crash or hang the library that reads them."""
    within = split(folder)
    if within is not None and find_format(within[0]) == "hdf5":
        hdf5_probe.check(within[0])


def read_header(file: Path, key: str) -> Header | None:
    """Return the header of the array `key` in `file`, None where that is none, but may hold some."""
    format = find_format(file)
    if format == "hdf5":
        return hdf5.read_header(file, key)
    if format == "tiff":
        return tiff.read_header(file, key)
    if key:
        return None
    if format == "picture":
        header = picture.read_header(file)
        return picture.without_colours(header) if picture.has_equal_colours(header, [file]) else header
    return mrc.read_header(file) if format == "mrc" else npy.read_header(file)


def read_attributes(file: Path, key: str) -> Tree:
    """Return the attributes of the group or array `key` in `file`."""
    if find_format(file) == "hdf5":
        return hdf5.read_attributes(file, key)
    header = read_header(file, key)
    return dict(header.attributes) if header else {}


def read_datasets(file: Path, key: str) -> tuple[Dataset, ...] | None:
    """Return the levels at `key` that the file itself names, finest first; None where it names none."""
    format = find_format(file)
    if format == "hdf5":
        levels = hdf5.read_levels(file, key)
        return None if levels is None else tuple(Dataset(inner) for inner in levels)
    return tiff.read_datasets(file, key) if format == "tiff" else None


def why_several(folder: Location) -> str:
    """Return why a file at `folder` holds several arrays where a stack may be meant, "" where it does not say."""
    within = split(folder)
    return tiff.why_several(within[0]) if within is not None and find_format(within[0]) == "tiff" else ""


def exists(file: Path, key: str) -> bool:
    """Tell whether there is an array, or a group of them, at `key` in `file`."""
    format = find_format(file)
    if format == "hdf5":
        return hdf5.exists(file, key)
    return tiff.exists(file, key) if format == "tiff" else not key


def walk(file: Path, key: str, *, enter_groups: bool) -> Iterator[str]:
    """Yield the keys, counted from `key`, of all arrays there; groups of levels count as one unless entered."""
    if find_format(file) == "hdf5":
        names = list(hdf5.walk(file, key))
        groups = {} if enter_groups else hdf5.groups_of_levels(key, names)
        yield from names if enter_groups else sorted({groups.get(name) or _group(name, names) for name in names})
    elif read_header(file, key) is not None:
        yield ""
    elif not key:
        yield from tiff.walk(file, enter_groups=enter_groups)
    else:
        yield from (dataset.path for dataset in read_datasets(file, key) or ()) if enter_groups else ("",)


def _group(name: str, names: Sequence[str]) -> str:
    """Return the group of levels s0, s1 … that the array `name` is one of, or `name`."""
    parent, _, last = name.rpartition("/")
    is_level = re.fullmatch(r"s\d+", last) and f"{parent}/s0".lstrip("/") in names
    return parent if is_level else name


def open_array(header: Header, cache_bytes: int) -> StoredArray:
    """Return the array of `header`; where voxels must be decoded, `cache_bytes` of them are kept in memory."""
    if header.format == "hdf5":
        return hdf5.Hdf5Array(header, cache_bytes)
    if header.format in ("mrc", "npy"):
        return flat.open_array(header)
    if "names" in header.known:
        return tiff_folder.SliceArray(header, cache_bytes)
    if header.format == "picture":
        return picture.open_array(header, cache_bytes)
    return tiff.open_array(header, cache_bytes)
