"""A volume that one work writes while another reads it: which shards are there, and whose turn that makes it.

Not here: the shards of a volume (runs, segmentation), or what its reader does with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from volpipe.blockwise.stage import Schedule, Stage
from volpipe.geometry.grid import Box, Grid, mirrored


@dataclass
class Feed:
    """Shards of one level of an array of an output, "" of the only one.

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
    own = stage.waits

    def waits(unit: int) -> bool:
        return (own is not None and own(unit)) or feed.lacks(stage, unit, box(unit))

    stage.waits = waits
    stage.look_again()
    return stage


class FedSchedule(Schedule):
    """A schedule whose stages read a volume that other work may still be writing."""

    def __init__(self, *stages: Stage, feed: Feed | None) -> None:
        super().__init__(*stages)
        self.feed = feed

    @property
    def is_waiting(self) -> bool:
        """Whether voxels are still to be written that a unit needs."""
        return self.feed is not None and not self.feed.is_closed and any(s.num_left for s in self.fed_stages)

    @property
    def fed_stages(self) -> list[Stage]:
        """The stages whose units read the volume."""
        return self.stages

    def starved(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units of which a part of the volume was never written."""
        if self.feed is None or not self.feed.is_closed:
            return
        for stage in self.fed_stages:
            if stage.num_left:
                yield from ((stage, unit) for unit in range(stage.size) if stage.has(unit) and not stage.taken[unit])

    def kept_back(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units that cannot be done because something that they need was not made."""
        return self.starved()
