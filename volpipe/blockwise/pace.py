"""The pace of a run: how far its stages are, tasks under way included, and the time that all of it still takes.

Not here: where the readings come from (phase, notes), or how they are shown (display). Arithmetic alone: the clock is
given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from volpipe.blockwise.notes import TaskNote

LEAST_SECONDS = 5.0  # after the first task began, before which nothing is said
LEAST_STEPS = 8  # that were seen, before which a speed is an accident of when one looks
MOST_SAMPLES = 256
SMOOTHING = 0.1  # of the time left, over which the end that is shown follows the one that is computed
LEAST_SMOOTHING = 2.0  # seconds
LARGEST_CREDIT = 0.95  # of a task that should have ended by now


@dataclass(frozen=True)
class Prospect:
    """What a driver knows before the first task.

    Attributes:
        planned: seconds of a worker per unit, by stage, where blocks were tried.
        num_windows, num_voxels: for the net, and of the output that it makes; 0 where they are not counted.
    """

    planned: Mapping[str, float] = field(default_factory=dict)
    num_windows: int = 0
    num_voxels: int = 0


@dataclass(frozen=True)
class Reading:
    """How far a stage is.

    Attributes:
        done: units of this session, parts of those under way included.
        left: units, less those parts.
        seconds: that workers spent on what is done.
        decides: whether the time left is unknown as long as this stage's is.
    """

    done: float
    left: float
    seconds: float
    decides: bool = False


@dataclass
class Pace:
    """How fast a run goes.

    The speed is that of the latter half of the time since the first task began, so that the loading of nets, long waits
    and slow starts are forgotten as the run goes on. The end that follows from it is smoothed.

    Attributes:
        planned: seconds of a worker per unit by stage, of stages of which nothing is done.
    """

    planned: Mapping[str, float] = field(default_factory=dict)
    _samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _end: float | None = None
    _last: float = 0.0
    _steps: int = 0

    def seconds_left(self, now: float, first_task: float, readings: Mapping[str, Reading]) -> float | None:
        """Return the time left at `now`, None while that is not known.

        Args:
            now: seconds, of any clock.
            first_task: when the first task began, by the same.
            readings: of all stages that are not complete, and of those that are.
        """
        if not any(reading.done for reading in readings.values()):
            return None
        if not self._samples:
            self._samples.append((first_task, {}))
        if now > self._samples[-1][0]:
            self._add_reading(now, {name: reading.done for name, reading in readings.items()})
        weights = {name: self._weight(name, reading) for name, reading in readings.items()}
        if any(r.decides and r.left > 0 and not weights[name] for name, r in readings.items()):
            return None
        if now - first_task < LEAST_SECONDS or self._steps < LEAST_STEPS:
            return None
        speed = self._speed(now, first_task, weights)
        if speed > 0:
            left = sum(reading.left * weights[name] for name, reading in readings.items()) / speed
            self._smooth(now, now + left)
        return None if self._end is None else max(0.0, self._end - now)

    def _weight(self, name: str, reading: Reading) -> float:
        """Return the seconds that a worker takes for a unit, 0 where that is unknown."""
        return reading.seconds / reading.done if reading.done else self.planned.get(name, 0.0)

    def _speed(self, now: float, first_task: float, weights: Mapping[str, float]) -> float:
        """Return the seconds of work done per second, over the latter half of the time."""
        middle = (first_task + now) / 2
        done, before = self._samples[-1][1], self._at(middle)
        work = sum(weight * (done.get(name, 0.0) - before.get(name, 0.0)) for name, weight in weights.items())
        return work / max(1e-9, now - middle)

    def _at(self, moment: float) -> dict[str, float]:
        """Return what was done at `moment`, on a straight line between two samples."""
        i = next((n for n, (at, _) in enumerate(self._samples) if at >= moment), len(self._samples) - 1)
        if i == 0:
            return self._samples[0][1]
        (start, before), (stop, after) = self._samples[i - 1], self._samples[i]
        share = (moment - start) / (stop - start)
        return {name: (1 - share) * before.get(name, 0.0) + share * done for name, done in after.items()}

    def _add_reading(self, now: float, done: dict[str, float]) -> None:
        self._steps += done != self._samples[-1][1]
        self._samples.append((now, done))
        if len(self._samples) > MOST_SAMPLES:
            del self._samples[1:-1:2]

    def _smooth(self, now: float, end: float) -> None:
        if self._end is None:
            self._end = end
        else:
            step = (now - self._last) / max(LEAST_SMOOTHING, SMOOTHING * (end - now))
            self._end += min(1.0, step) * (end - self._end)
        self._last = now


def credit(task: TaskNote, seconds_per_unit: float) -> tuple[float, float]:
    """Return the units that a task under way has done, and the seconds that they took.

    It says so itself; before its first unit or window, they follow from its time and that of a unit, 0 where unknown.
    """
    if task.done:
        return min(task.done, float(task.num_units)), task.seconds
    if not seconds_per_unit:
        return 0.0, 0.0
    units = min(LARGEST_CREDIT * task.num_units, task.seconds / seconds_per_unit)
    return units, units * seconds_per_unit
