"""Updates in a journal: the units whose marks they took back, and the records that still count.

Not here: how it is found what has changed (update), or the journal's lines (blockwise.journal). A journal is only ever
appended to, so that it has every update; who reads it here sees each record as if no later update had been needed::

    infer 0 1 2 3     reassemble 0 1     update: takes infer 1 2, shard 1     infer 1
    ─► infer 0 3      reassemble 0                                            infer 1     block 2 and shard 1 are open
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.journal import Kinds, Record, read_records
from volpipe.geometry.grid import ravel, unravel
from volpipe.units import count

STAGE = "update"
MARK = b'"result":"Updated"'
SHARDS = "s0"  # of level 0, whichever stage wrote them; those of coarser levels are s1 and so on
SEEN = "seen"  # what blocks read: taken back where it has changed, not of their neighbours, which keep some shards
BLOCKS = "blocks"
UNPLACED = ("solve", "number", "name", "graph")  # stages whose units are no blocks: they keep their numbers
Grids = Mapping[str, tuple[int, ...]]
Number = Callable[[str, int], int | None]  # of a unit now, by stage and number; None of one that was taken back


class TakesBack:
    """A result with which records before it may count no more, or again."""


@dataclass(frozen=True)
class Updated(TakesBack):
    """What an update took back.

    Attributes:
        at: when, seconds since 1970.
        changed: blocks that read something that has changed since.
        computed: blocks to be computed again: those, and their neighbours that add to the same shards.
        blocks: of the run.
        taken: units by stage, as ranges such as "0-3,7"; SHARDS and so on, of shards; SEEN, the blocks that changed.
        normalise: rows of the map (`Affine`) that was measured of the volume as it was, and is kept; () where none was.
        why: what else there is to say of it, "" if nothing.
        before, plan: identities of the plan until then and from then on; others where the volume has grown.
        cells: fingerprint of the selection from then on; "" where all of the region is selected.
        grids: where it has grown, blocks (z, y, x) under BLOCKS, and shards of each level, by which records until then
            are numbered.
        is_due: whether this only says that the input is about to change, all of which counts until it was compared.
    """

    at: float
    changed: int
    computed: int
    blocks: int
    taken: dict[str, str] = field(default_factory=dict)
    normalise: tuple[tuple[float, ...], ...] = ()
    why: str = ""
    before: str = ""
    plan: str = ""
    grids: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    cells: str = ""
    is_due: bool = False

    def __str__(self) -> str:
        verb = "is" if self.computed == 1 else "are"
        again = f"{self.computed:,} {verb} computed again" if self.computed else "nothing is computed again"
        if self.grids:
            return f"{self.why}: {count(self.changed, 'block')} lay at a face that has moved; {again}"
        return f"{count(self.changed, 'block')} of {self.blocks:,} read voxels that have changed; {again}"

    def kept(self, number: Number, stage: str) -> Updated:
        """Return itself: what was taken back is known already."""
        return self


def to_ranges(units: Iterable[int]) -> str:
    """Return ascending `units` as text: "0-3,7"."""
    array = np.fromiter(units, np.int64)
    if not len(array):
        return ""
    ends = np.flatnonzero(np.diff(array) > 1)
    pairs = zip(array[[0, *(ends + 1)]].tolist(), array[[*ends, -1]].tolist(), strict=True)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in pairs)


def from_ranges(text: str) -> Iterator[range]:
    """Yield the ranges of units that `text` names, as `to_ranges` has it."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield range(int(first), int(last or first) + 1)


def updates_in(path: Path, kinds: Kinds, plan: str, *, with_due: bool = True) -> list[tuple[int, Updated]]:
    """Return the updates in the journal at `path`, each with the number of its line.

    They lead to the plan of identity `plan`: one to another plan that was killed before that was stored does not count.
    One that is due counts until the input was compared, and not at all without `with_due`.
    """
    if not path.is_file():
        return []
    status = path.stat()
    marked = _marked(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    updates: list[tuple[int, Updated]] = []
    for number, line in reversed(marked):
        update = Record.from_line(line, kinds).result
        if isinstance(update, Updated) and update.plan == plan:
            updates.insert(0, (number, update))
            plan = update.before
    compared = max((n for n, update in updates if not update.is_due and not update.grids), default=-1)
    return [(n, update) for n, update in updates if not update.is_due or (with_due and n > compared)]


@lru_cache(maxsize=64)  # it is asked often, of a journal of which 10^6 lines take a fifth of a second
def _marked(path: Path, state: tuple[int, ...]) -> list[tuple[int, bytes]]:
    """Return the lines of updates, each with its number, of the journal at `path` in that `state` of its file."""
    with path.open("rb") as lines:
        return [(n, line) for n, line in enumerate(lines) if MARK in line and line.endswith(b"\n")]


def is_due(path: Path, kinds: Kinds, plan: str) -> bool:
    """Return whether an update of the work whose journal is at `path` is due."""
    return any(update.is_due for _, update in updates_in(path, kinds, plan))


def standing_history(path: Path, kinds: Kinds, plan: str) -> list[Updated]:
    """Return the updates in the journal at `path` that found something."""
    updates = (update for _, update in updates_in(path, kinds, plan, with_due=False))
    return [update for update in updates if any(update.taken.values()) or update.grids]


def standing_records(
    path: Path, kinds: Kinds, plan: str, grids: Grids, *, with_due: bool = True
) -> Iterator[Record[Any]]:  # Any: one of `kinds`
    """Yield the records of the journal at `path`, as `read_records`, less the units that updates took back.

    Units are numbered as the plan of identity `plan` has them, whose `grids` are as in `Updated`; `with_due` is as of
    `updates_in`.
    """
    return records_after(path, kinds, updates_in(path, kinds, plan, with_due=with_due), grids)


def records_after(
    path: Path, kinds: Kinds, updates: Sequence[tuple[int, Updated]], grids: Grids
) -> Iterator[Record[Any]]:  # Any: one of `kinds`
    """Yield the records of the journal at `path`, less the units that `updates`, each after a line, took back."""
    if not updates:
        yield from read_records(path, kinds)
        return
    lines = [number for number, _ in updates]
    history = _History([update for _, update in updates], grids)
    num_before = 0  # updates
    for number, record in enumerate(read_records(path, kinds)):
        num_before += num_before < len(lines) and number > lines[num_before]
        yield _standing(record, partial(history.number, num_before))


def key_of(stage: str) -> str:
    """Return by which key updates take back units of `stage`: those of stages that write shards, by these."""
    if stage in ("reassemble", "paint"):
        return SHARDS
    return f"s{stage.removeprefix('pyramid ')}" if stage.startswith("pyramid ") else stage


class _History:
    """What became of units through `updates`, which lead to `grids`."""

    def __init__(self, updates: Sequence[Updated], grids: Grids) -> None:
        self._now = grids
        self._grids = [grids]  # by which records are numbered, after so many updates
        for update in reversed(updates):
            self._grids.insert(0, update.grids or self._grids[0])
        self._last: dict[str, np.ndarray] = {}  # update that took each unit back last, counted from 1; 0: none
        for number, update in enumerate(updates, 1):
            for key, text in update.taken.items():
                for units in from_ranges(text):
                    self._take(key, number, units)

    def number(self, num_before: int, key: str, unit: int) -> int | None:
        """Return the present number of a unit that was noted after `num_before` updates; None where it was taken."""
        now, last = self._renumbered(num_before, key, unit), self._last.get(key)
        return None if last is not None and now < len(last) and last[now] > num_before else now

    def _renumbered(self, num_updates: int, key: str, unit: int) -> int:
        if key in UNPLACED:
            return unit
        grid = key if re.fullmatch(r"s\d+", key) else BLOCKS
        before, now = self._grids[num_updates].get(grid), self._now.get(grid)
        return unit if before == now or before is None or now is None else ravel(unravel(unit, before), now)

    def _take(self, key: str, number: int, units: range) -> None:
        now = [self._renumbered(number, key, unit) for unit in units]
        last = self._last.get(key, np.zeros(0, np.int32))
        self._last[key] = last = np.pad(last, (0, max(0, max(now) + 1 - len(last))))
        last[now] = number


def _standing(record: Record[Any], number: Number) -> Record[Any]:
    """Return what of `record` still counts."""
    key = key_of(record.stage)
    numbers = (number(key, unit) for unit in record.done)
    done = tuple(unit for unit in numbers if unit is not None)
    failed = ((number(key, unit), reason) for unit, reason in record.failed)
    result: Any = record.result  # of any kind
    if hasattr(result, "kept"):
        result = result.kept(number, record.stage)
    elif record.done and not done:
        result = None
    return dataclasses.replace(
        record, done=done, failed=tuple((unit, why) for unit, why in failed if unit is not None), result=result
    )
