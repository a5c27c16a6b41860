"""Updates: what of the records before it an update takes back, and what they say from then on.

Not here: how it is found what has changed (update), or how a journal is written anew (blockwise.journal)::

    infer 0 1 2 3     reassemble 0 1     update: takes infer 1 2, shard 1
    ─► infer 0 3      reassemble 0       update             blocks 1 and 2, and shard 1, are open
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from volpipe.blockwise.journal import Attempt, Kinds, Record, TakesBack, read_records
from volpipe.geometry.grid import ravel, unravel
from volpipe.units import count

STAGE = "update"
SHARDS = "s0"  # of level 0, whichever stage wrote them; those of coarser levels are s1 and so on
SEEN = "seen"  # what blocks read: taken back where it has changed, not of their neighbours, which keep some shards
BLOCKS = "blocks"
UNPLACED = ("solve", "number", "name", "graph")  # stages whose units are no blocks: they keep their numbers
Grids = Mapping[str, tuple[int, ...]]
Number = Callable[[str, int], int | None]  # of a unit now, by key and number; None of one that was taken back
Remainder = Callable[[Record[Any]], Record[Any]]


@dataclass(frozen=True)
class Updated(TakesBack):
    """An update of an output.

    Attributes:
        at: when, seconds since 1970.
        changed: blocks that read something that has changed since.
        computed: blocks to be computed again: those, and their neighbours that add to the same shards.
        blocks: of the run.
        normalise: rows of the map (`Affine`) that was measured of the volume as it was, and is kept; () where none was.
        why: what else there is to say of it, "" if nothing.
        plan: identity of the plan from then on where the volume has grown; "" where it has not.
        cells: fingerprint of the selection from then on; "" where all of the region is selected.
        taken: units by stage, as ranges such as "0-3,7"; SHARDS and so on, of shards; SEEN, the blocks that changed.
        before, now: where it has grown, blocks (z, y, x) under BLOCKS, and shards of each level, by which records were
            numbered until then, and are from then on.
    """

    at: float
    changed: int
    computed: int
    blocks: int
    normalise: tuple[tuple[float, ...], ...] = ()
    why: str = ""
    plan: str = ""
    cells: str = ""
    taken: dict[str, str] = field(default_factory=dict)
    before: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    now: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        verb = "is" if self.computed == 1 else "are"
        again = f"{self.computed:,} {verb} computed again" if self.computed else "nothing is computed again"
        if self.plan:
            return f"{self.why}: {count(self.changed, 'block')} lay at a face that has moved; {again}"
        return f"{count(self.changed, 'block')} of {self.blocks:,} read voxels that have changed; {again}"

    def remainder(self) -> Remainder:
        """Return what gives the rest of a record; see `TakesBack`."""
        return remainder(self.taken, self.before, self.now)

    def noted(self) -> Self:
        """Return it without the units that it takes back."""
        return dataclasses.replace(self, taken={}, before={}, now={})


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


def updates_in(journal: Path, kinds: Kinds) -> list[Updated]:
    """Return the updates that `journal` has, oldest first."""
    results = (record.result for record in read_records(journal, kinds, ["computed"]))
    return [result for result in results if isinstance(result, Updated)]


@dataclass(frozen=True)
class UnitEntries:
    """Entries of a result that are units of one key, or begin with one."""

    key: str

    def rest(self, entries: Iterable[Any], number: Number) -> Iterator[Any]:  # Any: units, or what begins with one
        """Yield the rest of `entries`, with the numbers of now."""
        for entry in entries:
            is_unit = isinstance(entry, int)
            unit = number(self.key, entry if is_unit else entry[0])
            if unit is not None:
                yield unit if is_unit else (unit, *entry[1:])


@dataclass(frozen=True)
class ShardEntries:
    """Entries of a result that begin with the level and the number of a shard."""

    def rest(self, entries: Iterable[Any], number: Number) -> Iterator[Any]:  # Any: of a shard
        """Yield the rest of `entries`, with the numbers of now."""
        for level, shard, *more in entries:
            unit = number(f"s{level}", shard)
            if unit is not None:
                yield (level, unit, *more)


Entries = Mapping[str, UnitEntries | ShardEntries]  # what those of a result are of, by the names of its fields


class UnitResult:
    """A result of a task, a dataclass whose fields have entries for its units, of which an update takes back some.

    Attributes:
        ENTRIES: what the entries are of, by the names of the fields.
    """

    ENTRIES: ClassVar[Entries]

    def rest(self, number: Number) -> Self | None:
        """Return what of it still counts, with the numbers of now; None where nothing does."""
        rest = {name: tuple(own.rest(getattr(self, name), number)) for name, own in self.ENTRIES.items()}
        if not any(rest.values()):
            return None
        changed: Self = dataclasses.replace(self, **rest)  # type: ignore[type-var]  # those that have it are dataclasses
        return changed


def key_of(stage: str) -> str:
    """Return by which key updates take back units of `stage`: those of stages that write shards, by these."""
    if stage in ("reassemble", "paint"):
        return SHARDS
    return f"s{stage.removeprefix('pyramid ')}" if stage.startswith("pyramid ") else stage


def remainder(taken: Mapping[str, str], before: Grids | None = None, now: Grids | None = None) -> Remainder:
    """Return what gives the rest of a record, less the units that are `taken`; arguments are as of `Updated`.

    Units that are taken are numbered as they are from then on, and so is what is given.
    """
    last = {key: max((part[-1] for part in from_ranges(text)), default=-1) for key, text in taken.items()}
    flags = {key: np.zeros(size + 1, bool) for key, size in last.items()}
    for key, text in taken.items():
        for part in from_ranges(text):
            flags[key][part.start : part.stop] = True

    def renumbered(key: str, unit: int) -> int:
        if not before or not now or key in UNPLACED:
            return unit
        grid = key if re.fullmatch(r"s\d+", key) else BLOCKS
        if grid not in before or grid not in now:
            return unit
        return ravel(unravel(unit, before[grid]), now[grid])

    def number(key: str, unit: int) -> int | None:
        unit, own = renumbered(key, unit), flags.get(key)
        return None if own is not None and unit < len(own) and own[unit] else unit

    return partial(_rest, number=number, renumbered=renumbered)


def _rest(record: Record[Any], number: Number, renumbered: Callable[[str, int], int]) -> Record[Any]:
    """Return the rest of `record`; itself where that is all."""
    key, result = key_of(record.stage), record.result
    done = tuple(now for unit in record.done if (now := number(key, unit)) is not None)
    failed = tuple((now, why) for unit, why in record.failed if (now := number(key, unit)) is not None)
    if isinstance(result, Attempt):  # its time is lost, whatever becomes of its units
        result = dataclasses.replace(result, units=tuple(renumbered(key, unit) for unit in result.units))
    elif isinstance(result, UnitResult):
        result = result.rest(number)
    elif record.done and not done:
        result = None
    rest_of_it = dataclasses.replace(record, done=done, failed=failed, result=result)
    return record if rest_of_it == record else rest_of_it
