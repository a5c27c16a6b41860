"""The tasks of journals, added up in one pass: by stage, worker, node and session, and over time in bins.

Not here: tables and charts of that (tasks), or which units are done (blockwise.ledger). A journal of 10^7 lines is read
in bounded memory: sums and bins are kept, and single tasks only while there are few. A line that is damaged is left out
and counted; whether a run can go on with such a journal is for the ledger to say, which reads it strictly.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from volpipe.blockwise.journal import Attempt, JournalReader, Line
from volpipe.blockwise.usage import Totals, Usage
from volpipe.errors import RunError
from volpipe.reporting.block_map import BlockMap

MOST_TASKS = 2_000  # that are kept one by one
MOST_FAILURES = 200  # kept one by one, the latest
MOST_SLOWEST = 12
MOST_WORKERS = 2_000  # told apart; tasks of later ones count as their nodes'
MOST_NODES = 2_000
MOST_KINDS = 100  # of reasons
NUM_BINS = 256
LEAST_SECONDS = 1 / 128  # of a bin
ANY = 0  # pid of workers that are not told apart

Worker = tuple[str, int]  # host and pid


@dataclass(frozen=True, slots=True)
class Task:
    """One task, as a bar of a timeline; `reason` is that of one that failed, "" of others.

    Attributes:
        is_lost: whether only where its worker was lost is known: when it was sent, and until when it was waited for.
    """

    stage: str
    units: tuple[int, ...]
    began: float
    seconds: float
    queued_seconds: float
    host: str
    pid: int
    read_bytes: int
    written_bytes: int
    peak_bytes: int
    reason: str = ""

    @property
    def worker(self) -> Worker:
        return self.host, self.pid

    @property
    def is_lost(self) -> bool:
        return not self.host


class Bins:
    """Seconds of tasks in bins of time that become wider as the time does; one row of them for each key."""

    def __init__(self) -> None:
        self.seconds, self.first = LEAST_SECONDS, -1  # of a bin; the number of the first, counted from 1970
        self.rows: dict[tuple[str, Worker], array[float]] = {}

    def add(self, key: tuple[str, Worker], began: float, ended: float) -> None:
        """Add the seconds between these times."""
        low, high = int(began / self.seconds), int(ended / self.seconds)
        if self.first < 0:
            self.first = low
        if low < self.first or high >= self.first + NUM_BINS:
            self._widen(min(low, self.first), max(high, self.first + NUM_BINS - 1))
            low, high = int(began / self.seconds), int(ended / self.seconds)
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = array("d", bytes(8 * NUM_BINS))
        if low == high:
            row[low - self.first] += ended - began
            return
        row[low - self.first] += (low + 1) * self.seconds - began
        for number in range(low + 1, high):
            row[number - self.first] += self.seconds
        row[high - self.first] += ended - high * self.seconds

    def _widen(self, low: int, high: int) -> None:
        """Make bins so wide that those numbered `low` to `high` are NUM_BINS at the most."""
        times = 0
        while (high >> times) - (low >> times) >= NUM_BINS:
            times += 1
        first = low >> times
        for key, row in self.rows.items():
            wider = array("d", bytes(8 * NUM_BINS))
            for number, value in enumerate(row):
                if value:
                    wider[(self.first + number >> times) - first] += value
            self.rows[key] = wider
        self.seconds, self.first = self.seconds * (1 << times), first


@dataclass
class JournalTally:
    """The sums of journals.

    Args:
        sessions: when each began, seconds since 1970, ascending.
        maps: of blocks, by the stages whose tasks are added to them.

    Attributes:
        sums: by stage and worker.
        by_session: of each, those before the first counted to that; nothing where there is only one.
        bins: of the tasks' time, with that of failed ones.
        tasks: one by one; empty where they are more than MOST_TASKS.
        failures: tasks that failed, the latest.
        slowest: of all, the slowest per unit first.
        reasons: how many tasks failed for which, as far as there are few.
        scratch_bytes, most_scratch_bytes: as they are now, and at their highest.
        num_damaged, first_damaged: lines that were left out, and where the first of them is.
    """

    sessions: Sequence[float] = ()
    maps: Mapping[str, BlockMap] = field(default_factory=dict)
    sums: dict[tuple[str, Worker], Totals] = field(default_factory=dict)
    by_session: list[Totals] = field(init=False)
    bins: Bins = field(default_factory=Bins)
    tasks: list[Task] = field(default_factory=list)
    num_tasks: int = 0
    failures: deque[Task] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    scratch_bytes: int = 0
    most_scratch_bytes: int = 0
    num_damaged: int = 0
    first_damaged: str = ""
    _slowest: list[tuple[float, int, Task]] = field(default_factory=list)
    _workers: set[Worker] = field(default_factory=set)
    _nodes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.by_session = [Totals() for _ in self.sessions or (0.0,)]

    @property
    def slowest(self) -> list[Task]:
        return [task for _, _, task in sorted(self._slowest, reverse=True)]

    @property
    def stages(self) -> dict[str, Totals]:
        """Totals by stage, in the order in which they came first."""
        return self._by(lambda stage, worker: stage)

    @property
    def workers(self) -> dict[Worker, Totals]:
        return self._by(lambda stage, worker: worker)

    @property
    def nodes(self) -> dict[str, Totals]:
        return self._by(lambda stage, worker: worker[0])

    @property
    def all(self) -> Totals:
        return self._by(lambda stage, worker: "").get("", Totals())

    def _by(self, key: Any) -> dict[Any, Totals]:  # Any: a function of stage and worker, and what it gives
        result: dict[Any, Totals] = {}
        for (stage, worker), sums in self.sums.items():
            result.setdefault(key(stage, worker), Totals()).join(sums)
        return result

    def read(self, journal: Path, prefix: str = "") -> None:
        """Add the journal, whose stages are called with `prefix`; nothing where there is no file."""
        for line in JournalReader(journal, None, on_damage=self.note_damage).lines():
            self.add(line, prefix)

    def note_damage(self, damage: RunError) -> None:
        """Count a line that is left out."""
        self.num_damaged += 1
        self.first_damaged = self.first_damaged or str(damage).partition(" is damaged")[0]

    def add(self, line: Line, prefix: str = "") -> None:
        """Add a line, whose stage is called with `prefix`."""
        fields, stage = line.fields, f"{prefix}{line.fields.stage}"
        if line.kind is Attempt:
            self._add_attempt(stage, fields)
            return
        if fields.failed:
            self._sums(stage, self._worker(fields)).failed += len(fields.failed)
        if not (fields.done or fields.seconds):
            return
        worker, seconds = self._worker(fields), max(0.0, fields.seconds)
        for sums in self._both(stage, worker, fields.started):
            sums.add(len(fields.done), fields)
        self.scratch_bytes += fields.scratch_bytes
        self.most_scratch_bytes = max(self.most_scratch_bytes, self.scratch_bytes)
        self.num_tasks += 1
        if fields.started > 0:
            self.bins.add((stage, worker), fields.started, fields.started + seconds)
        if fields.stage in self.maps:
            self.maps[fields.stage].add(fields.done, seconds, worker[0])
        pace = seconds / len(fields.done) if fields.done else 0.0
        is_slow = len(self._slowest) < MOST_SLOWEST or pace > self._slowest[0][0]
        if is_slow or self.num_tasks <= MOST_TASKS:
            task = Task(
                stage, fields.done, fields.started, seconds, fields.queued_seconds, *worker,
                fields.read_bytes, fields.written_bytes, fields.peak_bytes,
            )  # fmt: skip
            if is_slow and fields.done:
                heapq.heappush(self._slowest, (pace, self.num_tasks, task))
                if len(self._slowest) > MOST_SLOWEST:
                    heapq.heappop(self._slowest)
            if task.began and self.num_tasks <= MOST_TASKS:
                self.tasks.append(task)
        if self.num_tasks > MOST_TASKS:
            self.tasks = []

    def _add_attempt(self, stage: str, fields: Any) -> None:  # Any: those of a line
        """Add a task that failed."""
        worker, seconds = self._worker(fields), max(0.0, fields.seconds)
        if fields.stage in self.maps:
            self.maps[fields.stage].add_attempt(fields.units)
        for sums in self._both(stage, worker, fields.started):
            sums.add_attempt(fields)
        task = Task(
            stage, fields.units, fields.started, seconds, 0.0, *worker, 0, 0, fields.peak_bytes, fields.reason or "?"
        )
        self.failures.append(task)
        kind = (stage, fields.reason)
        if kind in self.reasons or len(self.reasons) < MOST_KINDS:
            self.reasons[kind] += 1
        if fields.started > 0 and seconds and task.host:
            self.bins.add((stage, worker), fields.started, fields.started + seconds)

    def _sums(self, stage: str, worker: Worker) -> Totals:
        sums = self.sums.get((stage, worker))
        if sums is None:
            sums = self.sums[stage, worker] = Totals()
        return sums

    def _both(self, stage: str, worker: Worker, began: float) -> tuple[Totals, ...]:
        """Return the sums to which a task counts: those of its stage and worker, and of its session if of several."""
        own = self._sums(stage, worker)
        if len(self.by_session) < 2:
            return (own,)
        return own, self.by_session[max(0, bisect_right(self.sessions, began) - 1)]

    def _worker(self, usage: Usage) -> Worker:
        """Return the worker of a task, told apart from others as long as they are not too many."""
        worker = usage.host, usage.pid
        if worker in self._workers:
            return worker
        if len(self._workers) < MOST_WORKERS and (worker[0] in self._nodes or len(self._nodes) < MOST_NODES):
            self._workers.add(worker)
            self._nodes.add(worker[0])
            return worker
        return (worker[0], ANY) if worker[0] in self._nodes else ("others", ANY)
