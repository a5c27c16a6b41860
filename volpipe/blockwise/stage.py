"""Stages: units of work of one kind, a flag for each, and how many of them make a task; schedules of several stages;
and volumes that one work writes while stages of another read them.

Not here: what the stages of one kind of work wait for (runs, segmentation), or how tasks are sent (phase).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from volpipe.blockwise.failures import Missing, message_of
from volpipe.geometry.grid import Box, Grid, mirrored

NEEDS_FAILED = "needs a part that failed"
# A task's aim: far above what its begin and end take, 2 ms, or the half second that a GPU waits (H100, 2026-11-27), and
# far below what a lost worker may cost. After an interrupt a task begins no other unit.
BUNDLE_SECONDS = 30.0
LARGEST_BUNDLE = 64
LEAST_SECONDS = 0.25  # of a task whose stage has rows, which would have it smaller; with many workers, more:
FEW_WORKERS = 25  # with more, their driver would have more than 100 such tasks a second to send
SCAN_AT_ONCE = 1 << 16  # units whose flags are turned into numbers at a time
Unit = tuple[str, int]


@dataclass
class Stage:
    """Units of one kind.

    Attributes:
        name: as the journal has it.
        doing: what its tasks do, as the subject of a sentence: "running the net"; "" for its name alone.
        size: one more than the largest unit.
        num_units: how many there are; fewer than `size` where some numbers are another stage's work, or nobody's.
        label: of the executors that run it, "cpu" or "gpu".
        active: a flag for each number, whether there is such a unit; None where there are all.
        row: units after which one rests on what these left; 0 where none does. Tasks of all workers take one row at a
            time, so that what they left is there.
        waits: tells whether a unit's inputs are still missing; None for a stage that waits for nothing.
        marked: whether the journal remembers it.
        num_held: units that are not to be done in this session.
        most: units that a task takes at the most.
        num_workers: that a task takes, all at the same time.
        forgives: asked at each failure of a unit, whether it came further than at the one before, so that earlier ones
            count no more; None where units begin anew.
        box: returns what a unit stands for, in voxels (z, y, x) of the output; None for work without one.
        feed: the volume that its units read, where other work is still writing it.
    """

    name: str
    size: int
    num_units: int = -1
    label: str = "cpu"
    row: int = 0
    waits: Callable[[int], bool] | None = None
    marked: bool = True
    active: np.ndarray | None = field(default=None, repr=False)
    done: np.ndarray = field(init=False, repr=False)
    taken: np.ndarray = field(init=False, repr=False)
    failed: set[int] = field(default_factory=set)
    ready: deque[int] = field(default_factory=deque, repr=False)
    num_done: int = 0
    num_taken: int = 0
    num_held: int = 0
    most: int = LARGEST_BUNDLE
    num_workers: int = 1
    forgives: Callable[[int], bool] | None = None
    doing: str = ""
    box: Callable[[int], Box] | None = None
    feed: Feed | None = field(default=None, repr=False)
    _scan: Iterator[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_units < 0:
            self.num_units = self.size if self.active is None else int(np.count_nonzero(self.active))
        self.done = np.zeros(self.size, bool)
        self.taken = np.zeros(self.size, bool)
        self._scan = iter(()) if self.waits else self._free_units()

    def called(self, unit: int | None = None) -> str:
        """Return what failed, for a sentence: running the net (infer), or, of a unit, running the net (infer 3)."""
        name = self.name if unit is None else f"{self.name} {unit}"
        return f"{self.doing} ({name})" if self.doing else name

    @property
    def num_left(self) -> int:
        return self.num_units - self.num_done - len(self.failed) - self.num_held

    def mark(self, unit: int) -> None:
        if not self.done[unit]:
            self._mark_taken(unit)
            self.done[unit] = True
            self.num_done += 1

    def mark_all(self, units: Sequence[int] | np.ndarray) -> None:
        """Mark many units at once."""
        array = np.asarray(units, np.int64)
        self.done[array] = self.taken[array] = True
        self.num_done, self.num_taken = int(np.count_nonzero(self.done)), int(np.count_nonzero(self.taken))

    def look_again(self) -> None:
        """Go through all units once more: a resumed run has inputs that nobody will announce."""
        self._scan = self._free_units()

    def offer(self, unit: int) -> None:
        """Let `unit` start when its turn comes, if its inputs are there and nobody has it."""
        if self._may_start(unit):
            self._mark_taken(unit)
            self.ready.append(unit)

    def give_back(self, unit: int) -> None:
        """Let a unit that failed start once more, before others."""
        self.ready.appendleft(unit)

    def take(self, most: int) -> list[int]:
        """Return up to `most` units that may start, in ascending order where nothing speaks against it."""
        units: list[int] = []
        while len(units) < most:
            if self.ready:
                units.append(self.ready.popleft())
                continue
            unit = next(self._scan, None)
            if unit is None:
                break
            if self._may_start(unit):
                self._mark_taken(unit)
                units.append(unit)
        return units

    def has(self, unit: int) -> bool:
        """Return whether there is such a unit."""
        return self.active is None or bool(self.active[unit])

    def leave_out(self, units: np.ndarray) -> None:
        """Never start those of `units`, a flag for each."""
        self.taken |= units
        self.num_taken = int(np.count_nonzero(self.taken))

    def hold(self, units: np.ndarray) -> None:
        """Do none of `units`, a flag for each, in this session; to be called once, before anything is taken."""
        held = units & ~self.done
        self.num_held = int(np.count_nonzero(held if self.active is None else held & self.active))
        self.leave_out(units)

    def _mark_taken(self, unit: int) -> None:
        self.num_taken += not self.taken[unit]
        self.taken[unit] = True

    def _may_start(self, unit: int) -> bool:
        return self.has(unit) and not self.taken[unit] and not (self.waits is not None and self.waits(unit))

    def _free_units(self) -> Iterator[int]:
        for start in range(0, self.size, SCAN_AT_ONCE):
            at_once = slice(start, start + SCAN_AT_ONCE)
            free = ~self.taken[at_once] if self.active is None else ~self.taken[at_once] & self.active[at_once]
            yield from (np.flatnonzero(free) + start).tolist()


def bundle_size(pace: float, row: int = 0, num_workers: int = 1) -> int:
    """Return how many units, which take `pace` seconds each, make a task.

    Args:
        pace: of one unit.
        row: as of a `Stage`: the tasks of all workers take a row at a time, unless that would make them tiny.
        num_workers: of the stage.
    """
    pace = max(pace, 1e-6)
    size = BUNDLE_SECONDS / pace
    if row:
        size = min(size, max(row // num_workers, LEAST_SECONDS * max(1.0, num_workers / FEW_WORKERS) / pace))
    return max(1, min(int(size), LARGEST_BUNDLE))


@dataclass
class Feed:
    """A level of an array of an output, "" of the only one, that one work writes while another reads it: its shards.

    Attributes:
        is_open: whether its metadata are there, so that it can be opened.
        is_closed: whether no shard will be added any more.
    """

    level: int
    array: str = ""
    is_open: bool = False
    is_closed: bool = False
    _shards: Grid | None = None
    _written: set[int] = field(default_factory=set)
    _waiting: defaultdict[int, list[tuple[Stage, int]]] = field(default_factory=lambda: defaultdict(list))

    def open(self, shards: Grid, written: Iterable[int]) -> None:
        """Let readers begin: the metadata of the level are there, and of its `shards` those that are `written`."""
        self._shards, self._written, self.is_open = shards, set(written), True

    def add(self, shard: int) -> None:
        """Take note of a shard that was written, and offer the units that waited for it."""
        self._written.add(shard)
        for stage, unit in self._waiting.pop(shard, ()):
            stage.offer(unit)

    def lacks(self, stage: Stage, unit: int, box: Box) -> bool:
        """Return whether voxels of `box` (z, y, x) are still to be written; `unit` is then offered to `stage` later.

        Outside of the volume its voxels are mirrored.
        """
        assert self._shards is not None
        for shard in self._shards.touching(mirrored(box, self._shards.shape)):
            if shard not in self._written:
                self._waiting[shard].append((stage, unit))
                return True
        return False


def fed(stage: Stage, feed: Feed | None, box: Callable[[int], Box]) -> Stage:
    """Return `stage`, whose units wait for the `box` of `feed` that each reads, if there is one, beside all else."""
    if feed is None:
        return stage
    own, stage.feed = stage.waits, feed

    def waits(unit: int) -> bool:
        return (own is not None and own(unit)) or feed.lacks(stage, unit, box(unit))

    stage.waits = waits
    stage.look_again()
    return stage


class Schedule:
    """Stages, and which of their units may start now; of a single stage, units wait for nothing.

    They get a turn in their order: later ones first, which frees scratch.
    """

    def __init__(self, *stages: Stage) -> None:
        self.stages = list(stages)
        self.by_name = {stage.name: stage for stage in stages}

    @property
    def shown(self) -> list[Stage]:
        """The stages that have units, in the order of a voxel's life."""
        return [stage for stage in reversed(self.stages) if stage.num_units]

    @property
    def is_complete(self) -> bool:
        return all(stage.num_done == stage.num_units for stage in self.stages)

    @property
    def is_waiting(self) -> bool:
        """Whether voxels are still to be written that a unit needs."""
        return any(s.feed is not None and not s.feed.is_closed and s.num_left for s in self.stages)

    def resume(self, done: Iterable[Mapping[str, Sequence[int] | np.ndarray]]) -> None:
        """Mark what earlier sessions finished, by stage; to be called before anything is taken."""
        for by_stage in done:
            for name in by_stage.keys() & self.by_name.keys():
                self.by_name[name].mark_all(by_stage[name])
        for stage in self.stages:
            if stage.waits is not None and stage.marked:
                stage.look_again()

    def take(self, stage: Stage, most: int) -> list[int]:
        """Return up to `most` units of `stage` that may start now."""
        return stage.take(most)

    def finish(self, stage: Stage, unit: int) -> None:
        """Mark `unit` done."""
        stage.mark(unit)

    def box(self, stage: Stage, unit: int) -> Box:
        """Return the box (z, y, x) that `unit` stands for, in voxels of the output; of work without one, the unit."""
        return Box((unit, 0, 0), (unit + 1, 1, 1)) if stage.box is None else stage.box(unit)

    def starved(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units of which a part of the volume was never written."""
        for stage in self.stages:
            if stage.feed is not None and stage.feed.is_closed and stage.num_left:
                yield from ((stage, unit) for unit in range(stage.size) if stage.has(unit) and not stage.taken[unit])

    def kept_back(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units that cannot be done because something that they need was not made."""
        return self.starved()

    def missing(self, reasons: Mapping[tuple[str, int], str]) -> list[Missing]:
        """Return the units that failed, each with the sentence of its reason, and those that wait for them in vain."""
        failed = [(s, unit, message_of(reasons[s.name, unit])) for s in self.shown for unit in sorted(s.failed)]
        kept = [(s, unit, NEEDS_FAILED) for s, unit in self.kept_back() if unit not in s.failed]
        return [Missing(s.name, unit, self.box(s, unit), reason) for s, unit, reason in failed + kept]
