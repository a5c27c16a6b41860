"""A row of the bench: what is measured, what it may be at most, what it should be, and what it was.

Not here: how anything is measured (the other files), or how it is printed (report).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

OVER = "OVER"  # the verdict on a row whose median is above its limit


@dataclass(frozen=True)
class Setting:
    """Where and how large to measure.

    Attributes:
        cache: folder for input volumes and packages, kept between runs.
        scratch: empty folder for outputs.
        short: smaller sizes, for a quick check; the numbers are then no measure of anything.
    """

    cache: Path
    scratch: Path
    short: bool

    def cube(self, size: int) -> tuple[int, int, int]:
        """Return the shape of a cube of `size` voxels per axis, half of it where sizes are short."""
        side = size // 2 if self.short else size
        return side, side, side


@dataclass(frozen=True)
class Outcome:
    """One measurement of a row.

    Attributes:
        value: in the row's unit.
        sides: what it was made from, by name: seconds, bytes or counts.
    """

    value: float
    sides: dict[str, float]


Measure = Callable[[Setting, int], Iterator[Outcome]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: as it is chosen on the command line.
        what: the ratio in words.
        most: what it may be.
        aim: what it should be.
        measure: yields as many outcomes as it is asked for; both sides of each are taken in one session, in turn.
        unit: of value, most and aim; "" for a ratio.
        why: kept beside the numbers: the sizes, and how the two sides were made comparable.
        is_quick: whether the short form of the bench takes it: seconds at small sizes, at which its limit holds too.
    """

    name: str
    what: str
    most: float
    aim: float
    measure: Measure
    unit: str = ""
    why: str = ""
    is_quick: bool = False


@dataclass
class Measured:
    """A row with what came out, and the load of the machine meanwhile (of one minute, before and after)."""

    row: Row
    outcomes: list[Outcome] = field(default_factory=list)
    loads: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(outcome.value for outcome in self.outcomes)

    @property
    def spread(self) -> tuple[float, float]:
        values = [outcome.value for outcome in self.outcomes]
        return min(values), max(values)

    @property
    def verdict(self) -> str:
        if self.median <= self.row.aim:
            return "aim"
        return "within" if self.median <= self.row.most else OVER


def take(row: Row, setting: Setting, repeats: int) -> Measured:
    """Return `row` measured `repeats` times."""
    started, before = time.perf_counter(), os.getloadavg()[0]
    outcomes = list(row.measure(setting, repeats))
    return Measured(row, outcomes, (before, os.getloadavg()[0]), time.perf_counter() - started)


def compared(repeats: int, ours: Callable[[], float], theirs: Callable[[], float], name: str) -> Iterator[Outcome]:
    """Yield ratios of seconds, ours by theirs; the side that goes first changes from one to the next."""
    for i in range(repeats):
        if i % 2:
            other, own = theirs(), ours()
        else:
            own, other = ours(), theirs()
        yield Outcome(own / other, {"run": own, name: other})
