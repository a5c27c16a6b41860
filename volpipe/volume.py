"""Volumes: which array a location means, what it says of itself, and a reference to it.

Not here: voxels (access), or what the formats write (formats).
"""

from __future__ import annotations

import logging
from pathlib import Path

from volpipe.access import Reader, Volume, Writer, open_writer
from volpipe.errors import RemoteError, VolumeError
from volpipe.formats import files, ome, remote, single
from volpipe.formats.container import (
    absolute,
    check_files,
    create_array,
    create_multiscale,
    inside,
    locate,
    read_attributes,
    read_datasets,
    read_header,
    read_place,
    walk,
)
from volpipe.formats.files import Location
from volpipe.formats.metadata import ArraySpec, Header, Level, Multiscale, usual_axes
from volpipe.formats.ome import Dataset

__all__ = [
    "ArraySpec",
    "Level",
    "Multiscale",
    "Reader",
    "Volume",
    "Writer",
    "absolute",
    "create_array",
    "create_multiscale",
    "list_arrays",
    "open_volume",
    "open_writer",
]

log = logging.getLogger(__name__)

MAX_NAMED = 20


def open_volume(location: str | Path, key: str | None = None, level: int = 0) -> Volume:
    """Return the volume at `location`: an array, a level of a multiscale group, or the only one of these inside.

    Args:
        location: an N5 or Zarr container, an HDF5, TIFF, MRC or .npy file, a folder of TIFF slices, or a path into one;
            on a disk, or for N5 and Zarr also s3://bucket/… or https://host/… .
        key: the array or group in it; needed where there are several.
        level: of the multiscale group, 0 for the finest.

    Raises:
        VolumeError: nothing there, several to choose from, or metadata that are broken, wrong or not supported.
    """
    container, key = locate(location, key)
    if not isinstance(container, remote.Remote):  # there it is asked last: not all that may be read may be listed
        single.probe_file(container)
        _check_exists(container, key)
    volume = _resolve(container, key, level)
    if volume.format == "tiff" and files.is_folder(container / volume.key):
        check_files(container / volume.key)
    length = dict(zip(volume.axes, volume.shape, strict=True))
    if length.get("t", 1) > 1:
        raise VolumeError(f"{volume} has {length['t']} points in time; volpipe reads one: save it on its own")
    return volume


def list_arrays(location: str | Path) -> list[Volume]:
    """Return every array under `location`, sorted by key; those that cannot be read are left out, with a warning."""
    container, key = locate(location)
    single.probe_file(container)
    _check_exists(container, key)
    volumes = []
    for name in sorted(f"{key}/{inner}".strip("/") for inner in walk(container / key, enter_groups=True)):
        try:
            volumes.append(_describe(container, name))
        except RemoteError:
            raise
        except VolumeError as error:
            log.warning("%s", error)
    return volumes


def _check_exists(container: Location, key: str) -> None:
    """Raise, with what there is instead, unless there is a folder, or something in a file."""
    folder = container / key
    if isinstance(folder, remote.Remote) and not folder.is_s3:
        return  # a web server knows of files alone
    if files.is_folder(folder) or (
        isinstance(container, Path) and container.is_file() and single.exists(container, key)
    ):
        return
    if not files.exists(container):
        raise VolumeError(f"no volume at {folder}")
    names = list(walk(container, enter_groups=False))
    raise VolumeError(f"no volume at {folder}; {container} holds {_listed(names) or 'no arrays'}")


def _listed(names: list[str]) -> str:
    text = ", ".join(name or "an array at its root" for name in names[:MAX_NAMED])
    return text + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _resolve(container: Location, key: str, level: int) -> Volume:
    folder = container / key
    if read_header(folder) is not None:
        if level:
            raise VolumeError(f"{folder} is one array, which has no level {level}; name the group that it is in")
        return _describe(container, key)
    datasets = read_datasets(folder)
    if datasets is None:
        return _resolve(container, _only_key(container, key), level)
    headers = _check_group(folder, datasets)
    if not 0 <= level < len(datasets):
        raise VolumeError(f"{folder} has no level {level}; its levels are 0 to {len(datasets) - 1}")
    return _volume(container, headers[level], datasets[level], _keys(key, datasets))


def _only_key(container: Location, key: str) -> str:
    """Return the key of the only array or group of levels under `key`, or raise with what there is."""
    folder = container / key
    images = ome.plate_images(read_attributes(folder), folder, read_attributes)
    if images is not None:
        raise VolumeError(f"{folder} is a plate of images; choose one by its key: {_listed(images) or 'it names none'}")
    _check_exists(container, key)
    names = list(walk(folder, enter_groups=False))
    if not names and isinstance(container, Path) and container.is_file():
        raise VolumeError(f"no volume in {folder}: it holds no array of numbers with voxels")
    if not names:
        raise VolumeError(
            f"no volume in {folder}: looked there and below for N5 (attributes.json with dimensions), "
            "Zarr v2 (.zarray), Zarr v3 (zarr.json of an array), OME-Zarr (multiscales) and TIFF slices"
        )
    if len(names) > 1:
        raise VolumeError(f"{folder} holds {len(names)} volumes; choose one by its key: {_listed(names)}")
    return f"{key}/{names[0]}".strip("/")


def _check_group(folder: Location, datasets: tuple[Dataset, ...]) -> list[Header]:
    """Return the headers of all levels of a group; raise unless they exist and have the same axes."""
    headers = []
    for dataset in datasets:
        header = read_header(folder / dataset.path)
        if header is None:
            raise VolumeError(
                f"{folder} names the array {dataset.path!r}, which does not exist; the copy is "
                "incomplete or the metadata are wrong"
            )
        headers.append(header)
        ranks = {"level 0": len(headers[0].shape), "the group's axes": len(dataset.axes or header.shape)}
        for what, rank in ranks.items():
            if len(header.shape) != rank:
                raise VolumeError(f"{folder}: array {dataset.path!r} has {len(header.shape)} axes, {what} {rank}")
    if len({header.dtype for header in headers}) > 1:
        log.warning("%s: its levels have different types: %s", folder, ", ".join(str(h.dtype) for h in headers))
    return headers


def _describe(container: Location, key: str) -> Volume:
    """Return the volume of the one array `key`, with what the groups around it say of it."""
    header = read_header(container / key)
    if header is None:
        raise VolumeError(f"no array at {container / key}")
    parts = Path(key).parts
    for depth in reversed(range(len(parts))):
        group, inner = "/".join(parts[:depth]), "/".join(parts[depth:])
        try:
            datasets = read_datasets(container / group) or ()
        except RemoteError:
            raise
        except VolumeError as error:
            log.info("%s", error)
            continue
        for dataset in datasets:
            if dataset.path.strip("/") == inner:
                return _volume(container, header, dataset, _keys(group, datasets))
    return _volume(container, header, Dataset(key), ())


def _keys(group: str, datasets: tuple[Dataset, ...]) -> tuple[str, ...]:
    return tuple(f"{group}/{dataset.path}".strip("/") for dataset in datasets)


def _volume(container: Location, header: Header, dataset: Dataset, levels: tuple[str, ...]) -> Volume:
    rank = len(header.shape)
    axes = dataset.axes if dataset.axes and len(dataset.axes) == rank else header.axes or usual_axes(rank)
    where = dataset.place or read_place(header, container)
    key = "/".join(inside(header.folder, container))
    return Volume(
        path=str(container),
        key=key,
        format=header.format,
        shape=header.shape,
        dtype=header.dtype,
        chunks=header.chunks,
        shards=header.shards,
        axes=axes,
        voxel_size_nm=where.voxel_size_nm,
        origin_nm=where.origin_nm,
        codec=header.codec,
        levels=levels,
    )
