"""The pace of a run: how far its stages are, tasks under way included, and the time that all of it still takes.

Not here: where the readings come from (loop, heartbeat), or how they are shown (display). Arithmetic alone: the clock
is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from volpipe.blockwise.heartbeat import Beat

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
        beats: the run's folder, if its workers say there how far they are; None where nobody is to look.
    """

    planned: Mapping[str, float] = field(default_factory=dict)
    num_windows: int = 0
    num_voxels: int = 0
    beats: Path | None = None


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
            self._add(now, {name: reading.done for name, reading in readings.items()})
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

    def _add(self, now: float, done: dict[str, float]) -> None:
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


@dataclass
class _Flight:
    """A task in flight: its units, when it was sent, and when a worker took it; None while it waits."""

    units: int
    sent: float
    began: float | None


_Key = tuple[str, int]  # stage and first unit


@dataclass
class Flights:
    """Tasks in flight: as many as there are workers are under way, the others wait, first come first served."""

    slots: Mapping[str, int]  # workers by label
    _tasks: dict[str, dict[_Key, _Flight]] = field(default_factory=dict)  # under way or waiting
    _waiting: dict[str, dict[_Key, _Flight]] = field(default_factory=dict)  # those that wait, the first to begin first

    def add(self, label: str, stage: str, unit: int, num_units: int, now: float) -> None:
        """Take note of a task that was sent, whose first unit is `unit`."""
        tasks, waiting = self._tasks.setdefault(label, {}), self._waiting.setdefault(label, {})
        begins = len(tasks) - len(waiting) < self.slots[label]
        tasks[stage, unit] = task = _Flight(num_units, now, now if begins else None)
        if not begins:
            waiting[stage, unit] = task

    def remove(self, label: str, stage: str, unit: int, now: float) -> float:
        """Take note of a task that came back, and return when it was sent; one that waited begins."""
        tasks, waiting = self._tasks[label], self._waiting[label]
        sent = tasks.pop((stage, unit)).sent
        if waiting.pop((stage, unit), None) is None and waiting:
            waiting.pop(next(iter(waiting))).began = now
        return sent

    def done_by_beats(self, beats: Mapping[int, Beat]) -> dict[str, float]:
        """Return by stage the units that tasks under way have done as their `beats` say, which are as for `parts`."""
        tasks = [(own.get(("infer", unit)), beat) for unit, beat in beats.items() for own in self._tasks.values()]
        done = sum(self._part(task, 0.0, 0.0, 0.0, beat)[0] for task, beat in tasks if task is not None)
        return {"infer": done} if done else {}

    def parts(
        self, now: float, first_task: float, seconds_per_unit: Mapping[str, float], beats: Mapping[int, Beat]
    ) -> dict[str, tuple[float, float]]:
        """Return by stage the units that tasks under way have done, and the seconds that they took so far.

        They are what the task's beat says; without a beat, they follow from the time since it began and that of a unit.

        Args:
            now: seconds since 1970.
            first_task: when the first task began; 0 where none has come back.
            seconds_per_unit: by stage, of units that are done.
            beats: of "infer" tasks, by their first unit.
        """
        parts: dict[str, tuple[float, float]] = {}
        for tasks in self._tasks.values():
            for (stage, unit), task in tasks.items():
                beat = beats.get(unit) if stage == "infer" else None
                done, seconds = self._part(task, now, first_task, seconds_per_unit.get(stage, 0.0), beat)
                before = parts.get(stage, (0.0, 0.0))
                parts[stage] = before[0] + done, before[1] + seconds
        return parts

    @staticmethod
    def _part(task: _Flight, now: float, first_task: float, pace: float, beat: Beat | None) -> tuple[float, float]:
        if beat is not None and beat.at >= task.sent:  # not an earlier attempt's
            done = min(beat.done, float(task.units))
            return done, beat.seconds if done else 0.0
        if task.began is None or not pace or not first_task:
            return 0.0, 0.0
        share = min(LARGEST_CREDIT, max(0.0, now - max(task.began, first_task)) / (pace * task.units))
        return share * task.units, share * task.units * pace
