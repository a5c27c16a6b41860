"""The mark of an output that is not complete: in its attributes from before its first voxel until after its last one.

Not here: how attributes are stored (formats.container). A kill at any moment leaves the mark; what is written whole by
then may be read, and what is not would read as zeros::

    mark ─► arrays ─► voxels … voxels ─► no mark
                        └ a session for a part of it: mark, with the box that is written
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volpipe.errors import IncompleteError, RemoteError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.container import mark_in, read_attributes, write_mark
from volpipe.volumes.formats.known import format_named
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import Location

MOST_NAMED = 4
SETTING = "to read it as it is, give --incomplete, or incomplete = true in the recipe's [input] or [[data]]"


@dataclass(frozen=True)
class Incomplete:
    """What is known of an array that is not complete.

    Attributes:
        command: that continues the work on it; "" where nobody noted one.
        folder: in which it was given.
        written: boxes of it (z, y, x) that are complete.
    """

    command: str = ""
    folder: str = ""
    written: tuple[Box, ...] = ()

    def has(self, box: Box) -> bool:
        """Return whether all of `box` (z, y, x) is written."""
        left = [box]
        for part in self.written:
            left = [piece for each in left for piece in each.without(each & part)]
        return all(piece.is_empty for piece in left)

    @property
    def parts(self) -> str:
        """The boxes that are written, for people; "" where there are none."""
        named = [str(box) for box in self.written[:MOST_NAMED]]
        more = len(self.written) - MOST_NAMED
        return " and ".join(named) + (f" and {more} more" if more > 0 else "")

    @property
    def state(self) -> str:
        """What follows the array's name for people."""
        return f" (incomplete{f', written: {self.parts}' if self.written else ''})"

    @property
    def advice(self) -> str:
        """What to do about it, in a sentence's second half."""
        if not self.command:
            return f"complete it by the command that began it, or wait for its end; {SETTING}"
        there = f"cd {shlex.quote(self.folder)} && " if self.folder not in ("", str(Path.cwd())) else ""
        return f"`{there}{self.command}` completes it; {SETTING}"


def check_written(name: str, incomplete: Incomplete, box: Box) -> None:
    """Refuse to read a `box` (z, y, x) of which not all is written.

    Raises:
        IncompleteError: with the command that completes it.
    """
    if incomplete.has(box):
        return
    if incomplete.written:
        raise IncompleteError(
            f"{name} is incomplete: only {incomplete.parts} is written, and the voxels {box} reach beyond that; what "
            f"is missing would read as zeros: {incomplete.advice}"
        )
    raise IncompleteError(
        f"{name} is incomplete: the work on it has not ended, and what is missing would read as zeros: "
        f"{incomplete.advice}"
    )


def check_still_written(container: Location, key: str, box: Box) -> None:
    """Refuse what was read of a `box` (z, y, x) where work of ours now says that this is not written.

    An array that is gone since is not looked at.

    Raises:
        IncompleteError: with the command that completes it.
    """
    place = container / key
    try:
        mark = mark_in(read_attributes(place.parent)) if key else None
    except VolumeError:
        return
    if mark is not None:
        check_written(str(place), _incomplete_from(mark, place.name), box)


def find_incomplete(header: Header, key: str) -> Incomplete | None:
    """Return what the attributes of an array, or of its group, say of what is missing; None where it is complete.

    `key` is that of the array in its container. What others made says nothing of it.
    """
    arrays = format_named(header.format).arrays
    if arrays is None:
        return None
    mark = mark_in(header.attributes)
    if mark is None and key:
        try:
            mark = mark_in(read_attributes(arrays.group_around(header)))
        except RemoteError:
            raise
        except VolumeError:  # of a group that is no more than around it
            return None
    return None if mark is None else _incomplete_from(mark, header.folder.name)


def _incomplete_from(mark: Mapping[str, Any], level: str) -> Incomplete:  # Any: JSON
    written = mark.get("written")
    entries = written.get(level) if isinstance(written, dict) else None
    return Incomplete(str(mark.get("command") or ""), str(mark.get("folder") or ""), tuple(_listed_boxes(entries)))


def _listed_boxes(entries: object) -> Iterable[Box]:
    """Yield the boxes that a mark lists; none where it is not as we write it."""
    for entry in entries if isinstance(entries, list) else ():
        ends = entry if isinstance(entry, list) and len(entry) == 2 else [[], []]
        if all(isinstance(end, list) and len(end) == 3 for end in ends):
            yield Box(tuple(map(int, ends[0])), tuple(map(int, ends[1])))


def mark_incomplete(
    container: Location, format: str, command: str, *, key: str = "", keeps_parts: bool = False
) -> None:
    """Note that the group or array `key` of a container is not complete, and what continues the work on it.

    Args:
        container: which need not exist yet.
        format: of its arrays.
        command: as a shell takes it, given in the current folder.
        keeps_parts: whether the parts that were noted as written still are.
    """
    written = _standing(container, key).get("written") if keeps_parts else None
    mark = {"command": command, "folder": str(Path.cwd()) if command else "", "written": written or {}}
    write_mark(container, key, mark, format)


def written_boxes(container: Location, level: str) -> tuple[Box, ...]:
    """Return the boxes of `level` of the incomplete output in `container` that are noted as written."""
    return _incomplete_from(_standing(container, ""), level).written


def mark_written(container: Location, format: str, written: Mapping[str, Sequence[Box]]) -> None:
    """Note which boxes (z, y, x) of each level of an incomplete output are written whole."""
    boxes = {level: [[box.start, box.stop] for box in each] for level, each in written.items()}
    write_mark(container, "", _standing(container, "") | {"written": boxes}, format)


def mark_complete(container: Location, format: str, *, key: str = "") -> None:
    """Note that the group or array `key` of a container is complete, after all else was written."""
    write_mark(container, key, None, format)


def _standing(container: Location, key: str) -> dict[str, Any]:  # Any: JSON
    return mark_in(read_attributes(container / key)) or {}


def joined(boxes: Iterable[Box]) -> list[Box]:
    """Return boxes that hold the same voxels as `boxes`, fewer where two are one."""
    result: list[Box] = []
    for box in boxes:
        new = box
        while (other := next((each for each in result if _is_box(each, new)), None)) is not None:
            result.remove(other)
            new = _box_around(other, new)
        result.append(new)
    return result


def _box_around(a: Box, b: Box) -> Box:
    return Box(tuple(map(min, a.start, b.start)), tuple(map(max, a.stop, b.stop)))


def _is_box(a: Box, b: Box) -> bool:
    return a.num_voxels + b.num_voxels - (a & b).num_voxels == _box_around(a, b).num_voxels
