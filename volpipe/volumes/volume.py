"""Volumes: the array at a location, its metadata, and a reference to it.

Not here: voxels (reader), or what the formats write (formats).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from volpipe.errors import RemoteError, SeveralVolumesError, VolumeError
from volpipe.geometry.grid import triple
from volpipe.resolve import nearest
from volpipe.volumes.formats import ome, single_file, tiff_folder
from volpipe.volumes.formats.container import (
    absolute,
    create_array,
    create_multiscale,
    locate,
    read_attributes,
    read_datasets,
    read_header,
    walk,
)
from volpipe.volumes.formats.ome import Dataset, level_keys
from volpipe.volumes.reader import (
    MAX_NAMED,
    Reader,
    View,
    Volume,
    describe_array,
    make_volume,
)
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.storage import object_store, paths
from volpipe.volumes.storage.chunk_source import describe_names
from volpipe.volumes.storage.metadata import (
    GUESSED_SIZE,
    UNKNOWN_SIZE,
    ArraySpec,
    Header,
    Lengths,
    Level,
    Multiscale,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.writer import Writer, open_writer

__all__ = [
    "ArraySpec",
    "Level",
    "Multiscale",
    "Reader",
    "View",
    "Volume",
    "Writer",
    "absolute",
    "create_array",
    "create_multiscale",
    "list_arrays",
    "open_volume",
    "open_writer",
    "resampled",
    "typed",
    "with_view",
]

log = logging.getLogger(__name__)

AS_STORED = View()


def open_volume(
    location: str | Path, key: str | None = None, level: int = 0, *, view: View = AS_STORED, is_planned: bool = False
) -> Volume:
    """Return the volume at `location`; arguments as of `volpipe.open`.

    The slices of a folder are compared, unless a plan has them already (`is_planned`): others may have come since.
    """
    container, key = locate(location, key)
    if not isinstance(container, object_store.Remote):  # there it is asked last: not all that may be read may be listed
        single_file.probe_file(container)
        _check_exists(container, key)
    with paths.reading_once():
        volume = _resolve(container, key, level)
        note = _note_on_names(volume)
    if volume.slices and not is_planned and isinstance(volume.folder, Path):
        tiff_folder.check(volume.folder)
    volume = with_view(replace(volume, notes=(*volume.notes, note)) if note else volume, view)
    count = _length(volume, "t")
    if count > 1 and view.time is None:
        raise VolumeError(
            f"{volume} has {count} points in time; choose one, 0 to {count - 1}, by input.time in a recipe, --time, or "
            "view=vp.View(time=0)"
        )
    return volume


def _note_on_names(volume: Volume) -> str:
    """Return a sentence on chunk files with other names than the metadata give; of outputs of ours no bucket is asked.

    Raises:
        VolumeError: none of the files there is a chunk.
    """
    header, folder = read_header(volume.folder), volume.folder
    is_own = volume.levels and isinstance(folder, object_store.Remote) and "volpipe" in read_attributes(folder.parent)
    return "" if header is None or is_own else describe_names(header)


def with_view(volume: Volume, view: View) -> Volume:
    """Return `volume` with `view` applied, its channel by number; values that replace the file's are in its notes.

    Raises:
        VolumeError: there is no such channel or point in time.
    """
    channel, time = _channel(volume, view.channel), _time(volume, view.time)
    chosen = View(channel, time, view.voxel_size_nm, view.origin_nm, view.incomplete)
    notes = list(volume.notes)
    if view.incomplete and volume.incomplete is not None:
        notes.append("read as it is: what is not written yet is zeros")
    if channel is not None:
        names = volume.channel_names
        notes.append(f"channel {channel}{f', {names[channel]},' if names else ''} of {volume.num_stored_channels}")
    if time is not None:
        notes.append(f"point in time {time} of {_length(volume, 't')}")
    if view.voxel_size_nm is not None:
        notes = [note for note in notes if not note.startswith((UNKNOWN_SIZE, GUESSED_SIZE))]
        notes.append(_given("voxel size", view.voxel_size_nm, volume.voxel_size_nm))
        if view.origin_nm is None and any(volume.origin_nm) and view.voxel_size_nm != volume.voxel_size_nm:
            notes.append(f"origin {_lengths(volume.origin_nm)} as the file says; input.origin_nm gives another")
    if view.origin_nm is not None:
        notes.append(_given("origin", view.origin_nm, volume.origin_nm))
    return replace(
        volume,
        view=chosen,
        voxel_size_nm=view.voxel_size_nm or volume.voxel_size_nm,
        origin_nm=view.origin_nm or volume.origin_nm,
        notes=tuple(notes),
    )


def resampled(volume: Volume, grid: Resampling | None) -> Volume:
    """Return `volume` as it is read on another `grid`, which lies where the volume does; itself without one.

    Raises:
        VolumeError: the grid is for a volume of another shape or type.
    """
    if grid is None:
        return volume
    if (volume.spatial_shape, volume.dtype.name) != (grid.stored, grid.dtype):
        raise VolumeError(
            f"{volume} is {volume.dtype} {volume.spatial_shape} (z, y, x), and was {grid.dtype} {grid.stored} when its "
            "grid for the net was planned, of which all voxels depend on that; use --fresh to start over"
        )
    size, steps = volume.voxel_size_nm or (1.0, 1.0, 1.0), grid.steps
    coarse = triple(s * n for s, n in zip(size, steps, strict=True))
    places = zip(size, volume.origin_nm, steps, strict=True)
    return replace(
        volume,
        resampling=grid,
        dtype=np.dtype(np.float32),
        voxel_size_nm=coarse,
        origin_nm=triple(o + (n - 1) / 2 * s for s, o, n in places),
        notes=(
            *volume.notes,
            f"resampled from voxels of {_lengths(size)} to {_lengths(coarse)}, those of the net's training; the output "
            "lies on these",
        ),
    )


def _given(what: str, lengths: Lengths, stored: Lengths | None) -> str:
    if stored is None or stored == lengths or (what == "origin" and not any(stored)):
        return f"{what} {_lengths(lengths)} as given"
    return f"{what} {_lengths(lengths)} as given, instead of the file's {_lengths(stored)}"


def _lengths(lengths: Lengths) -> str:
    return " × ".join(f"{length:g}" for length in lengths) + " nm"


def _length(volume: Volume, axis: str) -> int:
    return dict(zip(volume.axes, volume.shape, strict=True)).get(axis, 1)


def _channel(volume: Volume, channel: int | str | None) -> int | None:
    """Return the number of the channel that is meant; None for all, also where an array without channels has its 0."""
    names, count = volume.channel_names, volume.num_stored_channels
    if channel is None or (channel == 0 and "c" not in volume.axes):
        return None
    if isinstance(channel, int) and 0 <= channel < count:
        return channel
    text = str(channel)  # a name may look like a number: 488
    if names.count(text) > 1:
        raise VolumeError(f"{volume} has {names.count(text)} channels named {text}; choose one by number")
    if text in names:
        return names.index(text)
    hint = nearest(text, names) if isinstance(channel, str) else ""
    raise VolumeError(f"{volume} has no channel {channel}{hint}; input.channel is one of its {volume.channels}")


def _time(volume: Volume, time: int | None) -> int | None:
    count = _length(volume, "t")
    if time is None or (time == 0 and "t" not in volume.axes):
        return None
    if time >= count:
        raise VolumeError(f"{volume} has no point in time {time}; it has {count}, counted from 0")
    return time


def list_arrays(location: str | Path) -> list[Volume]:
    """Return every array under `location`, sorted by key; those that cannot be read are left out, with a warning."""
    container, key = locate(location)
    single_file.probe_file(container)
    _check_exists(container, key)
    volumes = []
    for name in sorted(f"{key}/{inner}".strip("/") for inner in walk(container / key, enter_groups=True)):
        try:
            volumes.append(describe_array(container, name))
        except RemoteError:
            raise
        except VolumeError as error:
            log.warning("%s", error)
    return volumes


def _check_exists(container: Location, key: str) -> None:
    """Raise, with what there is instead, unless there is a folder, or something in a file."""
    folder = container / key
    if isinstance(folder, object_store.Remote) and not folder.is_s3:
        return  # a web server knows of files alone
    if paths.is_folder(folder) or (
        isinstance(container, Path) and container.is_file() and single_file.exists(container, key)
    ):
        return
    if read_header(folder) is not None:  # a precomputed level of zeros alone, which has no folder
        return
    if not paths.exists(container):
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
        return describe_array(container, key)
    datasets = read_datasets(folder)
    if datasets is None:
        return _resolve(container, _only_key(container, key), level)
    headers = _check_group(folder, datasets)
    if not 0 <= level < len(datasets):
        raise VolumeError(f"{folder} has no level {level}; its levels are 0 to {len(datasets) - 1}")
    return make_volume(container, headers[level], datasets[level], level_keys(key, datasets))


def _only_key(container: Location, key: str) -> str:
    """Return the key of the only array or group of levels under `key`, or raise with what there is."""
    folder = container / key
    images = ome.plate_images(folder, read_attributes)
    if images is not None:
        raise _several(folder, "is a plate of images", images)
    _check_exists(container, key)
    names = list(walk(folder, enter_groups=False))
    if not names and isinstance(container, Path) and container.is_file():
        raise VolumeError(f"no volume in {folder}: it holds no array of numbers with voxels")
    if not names:
        raise VolumeError(
            f"no volume in {folder}: looked there and below for N5 (attributes.json with dimensions), "
            "Zarr v2 (.zarray), Zarr v3 (zarr.json of an array), OME-Zarr (multiscales), Neuroglancer precomputed "
            "(info with scales) and TIFF slices. PNG and JPEG are slices where their names have numbers"
        )
    if len(names) > 1:
        reason = single_file.why_several(folder)
        raise _several(folder, f"holds {len(names)} volumes", names, f" ({reason})" if reason else "")
    return f"{key}/{names[0]}".strip("/")


def _several(folder: Location, what: str, keys: list[str], reason: str = "") -> SeveralVolumesError:
    sentence = f"{folder} {what}{reason}; choose one by its key: {_listed(keys) or 'it names none'}"
    return SeveralVolumesError(f"{sentence}; write {typed(folder / keys[0])}" if keys else sentence, keys)


def typed(place: Location) -> str:
    """Return `place` as a user would type it: from the current folder, if it is in that."""
    here = Path.cwd()
    return str(place.relative_to(here) if isinstance(place, Path) and place.is_relative_to(here) else place)


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
