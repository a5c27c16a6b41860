"""The identity of a volume: its metadata, the state of its files and the voxels of some boxes; and its changes.

Not here: its users (workflow.driver, segmentation.driver). Of a container only the metadata and the chunk files with
the first voxels of the boxes are read: a volume of a million files costs as much as one of ten.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.errors import RunError, VolumeError
from volpipe.geometry.grid import Box, Grid
from volpipe.volumes.formats.container import absolute, inside, read_header, split
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.storage import object_store, paths
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.storage.fetched_array import noting_stamps
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Remote, Stamp
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.requests import boxes_at_once, in_turn
from volpipe.volumes.volume import Volume, open_volume

SAMPLED_BOXES, SAMPLED_EDGE, SEED = 16, 64, 0
MOST_FILES = 100_000  # of a volume, all of which are looked at: 1 s on a local disk
UNREADABLE = "unreadable"
MOST_NAMED = 2


class Sampled(BaseModel):
    """A box of voxels (z, y, x), a hash of them, and the file that holds the first of them; "" where none is known."""

    model_config = ConfigDict(frozen=True)

    box: str
    voxels: str
    file: str


class Identity(BaseModel):
    """The identity of a volume.

    Attributes:
        name: of the volume, for messages.
        metadata: what its metadata say, by name.
        files: state of its metadata, and of the files of the boxes, by name; None for one that is not there.
        boxes: those that were sampled, the same ones always.
        fingerprint: a hash of `metadata`, but for the place, and of the voxels of all boxes.
        all_files: a hash of the states of all files; "" where these were not looked at.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    metadata: dict[str, str]
    files: dict[str, Stamp | None]
    boxes: tuple[Sampled, ...]
    fingerprint: str
    all_files: str = ""


def identify_whole(volume: Volume) -> Identity:
    """Return the present identity of `volume`, with the states of all of its files, where these are not too many."""
    states = sorted(map(str, itertools.islice(_stamps(volume.folder), MOST_FILES + 1)))
    known = _content_hash("".join(states).encode()) if 0 < len(states) <= MOST_FILES else ""
    return identify(volume).model_copy(update={"all_files": known})


def _stamps(folder: Location) -> Iterator[tuple[str, Stamp | None]]:
    """Yield the files below `folder`, each with its stamp; a volume in one file has none."""
    if isinstance(folder, Path):
        for root, _, names in os.walk(folder):
            yield from ((str(Path(root, name).relative_to(folder)), paths.stamp(Path(root, name))) for name in names)
    elif folder.is_s3:
        yield from object_store.list_stamps(folder)


def identify(volume: Volume) -> Identity:
    """Return the present identity of `volume`; a box that cannot be read is marked as unreadable."""
    metadata: dict[str, object] = {
        "format": volume.format, "shape": volume.shape, "type": str(volume.dtype), "chunks": volume.chunks,
        "shards": volume.shards, "codec": volume.codec, "axes": volume.axes,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps([*metadata.values()]).encode())
    metadata |= {
        "voxel size": volume.voxel_size_nm,
        "origin": volume.origin_nm,
    }  # others may stand in a group around it
    header = read_header(volume.folder)
    root, names = _metadata_files(volume, header)
    boxes, places = _sampled_boxes(volume), _file_finder(volume, header, root)
    once = [*dict.fromkeys(boxes)]
    chunks, voxel_bytes = Grid(volume.spatial_shape, volume.spatial_chunks), volume.num_channels * volume.dtype.itemsize
    at_once = 1 if isinstance(volume.folder, Path) else boxes_at_once(once, chunks, voxel_bytes)
    contents = dict(zip(once, in_turn([partial(_content, volume, box) for box in once], at_once), strict=True))
    for box in boxes:
        digest.update(contents[box][0])
    stamps = ChainMap(*(noted for _, noted in contents.values()))
    sampled = [
        Sampled(box=str(box), voxels=_content_hash(data), file=places(box)) for box, (data, _) in contents.items()
    ]
    names += [sample.file for sample in sampled if sample.file]

    def state(file: Location) -> Stamp | None:
        """Return the stamp of `file`: that which came with its voxels, where it did."""
        return stamps[file] if isinstance(file, Remote) and file in stamps else paths.stamp(file)

    return Identity(
        name=str(volume),
        metadata={name: json.dumps(value) for name, value in metadata.items()},
        files={name: state(root / name) for name in dict.fromkeys(names)},
        boxes=tuple(sampled),
        fingerprint=digest.hexdigest()[:32],
    )


def fingerprint(volume: Volume) -> str:
    """Return a hash of what the metadata of `volume` say and of the voxels of some boxes, the same ones always."""
    return identify(volume).fingerprint


def _sampled_boxes(volume: Volume) -> list[Box]:
    rng, grid = np.random.default_rng(SEED), Grid(volume.spatial_shape, (SAMPLED_EDGE,) * 3)
    indices = [tuple(int(rng.integers(n)) for n in grid.counts) for _ in range(SAMPLED_BOXES)]
    return [grid.box(grid.number(index)) for index in indices]


def _content(volume: Volume, box: Box) -> tuple[bytes, dict[Remote, Stamp | None]]:
    """Return the voxels of `box`, and the stamps that came with them."""
    with noting_stamps() as stamps:
        try:
            return np.ascontiguousarray(volume.as_it_is.open().read(box)).tobytes(), stamps
        except VolumeError:
            return UNREADABLE.encode(), stamps


def _content_hash(content: bytes) -> str:
    return UNREADABLE if content == UNREADABLE.encode() else hashlib.sha256(content).hexdigest()[:16]


def _metadata_files(volume: Volume, header: Header | None) -> tuple[Location, list[str]]:
    """Return the folder that names of the files of `volume` count from, and those of its metadata."""
    arrays = format_named(volume.format).arrays
    if arrays is not None:
        file = arrays.metadata_at(volume.folder, header)
        return file.parent, [file.name]
    within = split(volume.folder)
    if within is None:
        return volume.folder, []
    root, others = within[0].parent, () if header is None else header.data_files or ()
    return root, [within[0].name, *(os.path.relpath(file, root) for file in others)]


def _file_finder(volume: Volume, header: Header | None, root: Location) -> Callable[[Box], str]:
    """Return a function from a box to the file with its first voxel, counted from `root`.

    "" for a volume in one file, and where the file is not known.
    """
    if header is None or split(volume.folder) is not None:
        return lambda box: ""
    chosen = {"c": int(volume.view.channel or 0), "t": volume.view.time or 0}

    def place(box: Box) -> list[int]:
        start = chosen | dict(zip("zyx", volume.stored_box(box).start, strict=True))
        return [start.get(axis, 0) for axis in volume.axes]

    if header.has_slices:
        return lambda box: header.slice_name(place(box))
    chunk_files, key = ChunkFiles(header), "/".join(inside(volume.folder, root))

    def name(box: Box) -> str:
        first = place(box)
        file = chunk_files.name(tuple(i // n for i, n in zip(first, header.write_unit, strict=True)))
        return f"{key}/{file}" if key and file else file

    return name


def changes(old: Identity, new: Identity) -> list[str]:
    """Return the differences of two states of a volume, in words; unreadable boxes do not count."""
    pairs = ((name, old.metadata.get(name), now) for name, now in new.metadata.items())
    differences = [f"{name} {before} is now {now}" for name, before, now in pairs if before != now]
    unread = {sample.file for sample in (*old.boxes, *new.boxes) if sample.voxels == UNREADABLE}
    both = [name for name in old.files if name in new.files and name not in unread]
    differences += _some(
        [
            f"{name} was {_stamp_words(old.files[name])} and is now {_stamp_words(new.files[name])}"
            for name in both
            if not paths.is_same(old.files[name], new.files[name])
        ]
    )
    if not differences and "" != old.all_files != new.all_files != "":
        differences.append("files beside those of the voxels that are compared were written since")
    if differences or not is_alike(old, new):
        differences.append(_voxels(old, new))
    return differences


def is_alike(old: Identity, new: Identity) -> bool:
    """Return whether metadata and sampled voxels are the same, whatever the times of files say."""
    return old.metadata == new.metadata and not _other_boxes(old, new)


def _other_boxes(old: Identity, new: Identity) -> list[str]:
    before = {sample.box: sample.voxels for sample in old.boxes}
    return [
        sample.box for sample in new.boxes
        if sample.voxels != before.get(sample.box) and UNREADABLE not in (sample.voxels, before.get(sample.box))
    ]  # fmt: skip


def _voxels(old: Identity, new: Identity) -> str:
    num, other = len(new.boxes), _other_boxes(old, new)
    boxes = "1 box" if num == 1 else f"{num} boxes"
    if not other:
        return f"the voxels that were compared ({boxes}) are the same"
    return f"the voxels that were compared differ in {len(other)} of {boxes}, such as {other[0]}"


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - MOST_NAMED
    return [*lines[:MOST_NAMED], *([f"{rest} more files likewise"] if rest > 0 else [])]


def _stamp_words(stamp: Stamp | None) -> str:
    if stamp is None:
        return "not there"
    when = time.strftime("%F %T", time.localtime(stamp.time_ns / 1e9)) if stamp.time_ns else f"tag {stamp.tag}"
    return f"{stamp.num_bytes:,} bytes of {when}"


def read_identities(file: Path) -> dict[str, Identity] | None:
    """Return the identities that are noted in `file`, by their part in the run; None where there is no such file.

    Raises:
        RunError: it cannot be understood.
    """
    if not file.is_file():
        return None
    try:
        return {what: Identity.model_validate(tree) for what, tree in json.loads(file.read_bytes()).items()}
    except (ValueError, AttributeError, ValidationError) as error:
        raise RunError(f"{file} cannot be understood; run with --fresh to start over") from error


def store_identities(file: Path, identities: Mapping[str, Identity]) -> None:
    """Write the identities of volumes to `file`, whole or not at all."""
    trees = {what: identity.model_dump(mode="json") for what, identity in identities.items()}
    paths.write(file, json.dumps(trees, indent=1).encode())


def has_moved(noted: Identity, volume: Volume) -> bool:
    """Return whether files of `volume` that are `noted` in its identity are in other states; no voxel is read."""
    root, _ = _metadata_files(volume, read_header(volume.folder))
    return any(not paths.is_same(stamp, paths.stamp(root / name)) for name, stamp in noted.files.items())


def real_place(volume: Volume) -> tuple[object, ...]:
    """Return a value that is the same for all names of the volume's array, and of other levels of its group.

    Links, symbolic and hard, and relative names count as what they lead to; in a bucket the address counts.
    """
    place = volume.folder
    if isinstance(place, Path) and place.resolve() != place:
        volume = open_volume(place.resolve())
    key = volume.levels[0] if volume.levels else volume.key
    folder = absolute(volume.path) / key
    within = split(folder)
    if within is not None:
        return *_file_number(within[0]), within[1]
    header = read_header(folder)
    if not isinstance(folder, Path) or header is None:
        return (str(folder),)
    arrays = format_named(header.format).arrays
    if arrays is None:
        return _file_number(folder)
    file = arrays.metadata_at(folder, header)
    # Levels that share a file of metadata are told apart by their key.
    return *_file_number(Path(str(file))), *(() if file.parent == folder else (key,))


def _file_number(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_dev, state.st_ino


def input_changes(file: Path, now: Mapping[str, Identity], *, accept: bool) -> dict[str, list[str]]:
    """Return what differs of the volumes `now` from those that are noted in `file`, in words, by what they are.

    Those whose compared voxels are the same do not count where `accept` says so, whatever the times of their files.
    """
    before = read_identities(file) or {}
    return {
        what: differences
        for what, identity in now.items()
        if what in before and not (accept and is_alike(before[what], identity))
        if (differences := changes(before[what], identity))
    }


def check_same_inputs(
    file: Path,
    now: Mapping[str, Identity],
    *,
    accept: bool,
    noted: str = "",
    can_update: bool = False,
    work: str = "output",
) -> None:
    """Refuse to go on with volumes that have changed since they were noted in `file`.

    Args:
        file: of the run; where there is none, as by an earlier version, `noted` counts, the fingerprint in the output.
        now: the volumes by what they are, such as "volume" and "mask".
        accept: whether files of other times or sizes will do where the voxels that are compared are the same.
        noted: "" where there is none.
        can_update: whether the work has an --update, which takes an input that has changed.
        work: what was begun, for messages.

    Raises:
        RunError: with what differs, and what to do.
    """
    before, update = read_identities(file), "use --update to compute what has changed, " if can_update else ""
    if before is None:
        if noted and noted != now["volume"].fingerprint:
            raise RunError(
                f"the volume {now['volume'].name} is not the one that this output was made of: its metadata or the "
                f"voxels of 16 boxes differ; put it back, {update}choose another --out, or use --fresh to start over"
            )
        return
    for what, differences in input_changes(file, now, accept=accept).items():
        identity, alike = now[what], is_alike(before[what], now[what])
        choices = f"{update}or use --fresh to start over" if update else "use --fresh to start over"
        touched = f"If it was only copied or touched, use --same-input to continue with it; else {choices}"
        other = f"Put the old one back, {update}choose another --out, or use --fresh to start over"
        raise RunError(
            f"the {what} {identity.name} has changed since this {work} was begun: {'; '.join(differences)}. "
            f"{touched if alike else other}"
        )
