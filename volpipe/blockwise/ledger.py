"""The ledger: what a journal says of the units of a schedule, for resume, status, reports and whoever watches.

Not here: the lines (journal), or what results mean (runs, segmentation, evaluation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.journal import Attempt, JournalReader, Kinds, Line, finished_by
from volpipe.blockwise.stage import Schedule, Unit
from volpipe.blockwise.usage import Totals
from volpipe.errors import RunError

LINES_AT_ONCE = 4096  # of which units are marked together


class Ledger:
    """What a journal says, as of the last look; it is read on from where it was read last.

    - A unit is done where a line has it: of its own task, or of one that finished it as well (`FINISHED`). What the
      schedule does not have is passed by.
    - A unit has failed where it was set aside, and was not done since. An attempt alone does not make it so.
    - A task counts in the totals of its stage if it did units, also where these were all taken back since: its time is
      spent. A task that failed counts among the attempts.

    Args:
        schedule: makes the schedule, of which nothing is done.
        each: called with each line.
        on_damage: as of `JournalReader`.

    Attributes:
        schedule: with what is done, and what failed.
        reasons: of failures, by stage and unit.
        totals: what tasks took over all sessions, by stage, in the order in which they came first.
        results: classes of the results that there are.
        devices, hosts: that tasks ran on.
    """

    def __init__(
        self,
        journal: Path,
        kinds: Kinds | None,
        schedule: Callable[[], Schedule] = Schedule,
        each: Callable[[Line], None] = lambda line: None,
        on_damage: Callable[[RunError], None] | None = None,
    ) -> None:
        self._make, self._each = schedule, each
        self._reader = JournalReader(journal, kinds, self._begin_schedule, on_damage)
        self._begin_schedule()

    def _begin_schedule(self) -> None:
        self.schedule, self.totals = self._make(), dict[str, Totals]()
        self.reasons, self.results = dict[Unit, str](), set[type]()
        self.devices, self.hosts = set[str](), set[str]()

    def look(self) -> Self:
        """Read what is new, and return itself.

        Raises:
            RunError: a line is damaged, or of another version.
        """
        units = self._new_units()
        first = next(units)  # where the journal is another one, everything begins anew
        self.schedule.resume(chain([first], units))
        for stage in self.schedule.stages:
            stage.failed.clear()
        for name, unit in self.reasons:
            self.schedule.by_name[name].failed.add(unit)
        return self

    def resumed(self) -> Schedule:
        """Return the schedule for a session that goes on, in which what failed is tried again."""
        schedule = self.look().schedule
        for stage in schedule.stages:
            stage.failed.clear()
        return schedule

    @property
    def missing(self) -> list[Missing]:
        """What failed when it was last tried, and what cannot be done without it."""
        return self.schedule.missing(self.reasons)

    def _new_units(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield the units that are done by new lines, of many at a time."""
        units = defaultdict[str, list[int]](list)
        for number, line in enumerate(self._reader.lines(), 1):
            self._add_line(line, units)
            if number % LINES_AT_ONCE == 0:
                yield self._units_in_schedule(units)
                units = defaultdict(list)
        yield self._units_in_schedule(units)

    def _add_line(self, line: Line, units: Mapping[str, list[int]]) -> None:
        fields, finished = line.fields, finished_by(line.kind)
        if line.kind is not None:
            self.results.add(line.kind)
        self._add_usage(line)
        units[fields.stage].extend(fields.done)
        for name, stage in finished.items():
            units[stage].extend(getattr(fields, name))
        for unit, reason in fields.failed:
            if self._has(fields.stage, unit):
                self.reasons[fields.stage, unit] = reason
        if self.reasons:
            for unit in fields.done:
                self.reasons.pop((fields.stage, unit), None)
            for name, stage in finished.items():
                for unit in getattr(fields, name):
                    self.reasons.pop((stage, unit), None)
        self._each(line)

    def _add_usage(self, line: Line) -> None:
        """Add what a task took; a line that no task left says nothing of that."""
        fields: Any = line.fields  # Any: those of a usage are among them
        if not (fields.done or fields.failed or fields.seconds or line.kind is Attempt):
            return
        totals = self.totals.get(fields.stage)
        if totals is None:
            totals = self.totals[fields.stage] = Totals()
        if line.kind is Attempt:
            totals.add_attempt(fields)
            return
        totals.failed += len(fields.failed)
        if fields.done or fields.seconds:
            totals.add(len(fields.done), fields)
            self.devices.add(fields.device)
            self.hosts.add(fields.host)

    def _has(self, name: str, unit: int) -> bool:
        stage = self.schedule.by_name.get(name)
        return stage is not None and 0 <= unit < stage.size

    def _units_in_schedule(self, units: Mapping[str, list[int]]) -> Mapping[str, np.ndarray]:
        """Return those of `units` that the schedule has."""
        known = dict[str, np.ndarray]()
        for name in units.keys() & self.schedule.by_name.keys():
            numbers = np.asarray(units[name], np.int64)
            known[name] = numbers[(numbers >= 0) & (numbers < self.schedule.by_name[name].size)]
        return known
