"""How far the run is that writes an output, cell by cell, while it is shown.

Not here: the work, or who shows it. All that is known of the engine is read in `OutputWatch`: the plan, the journal's
records, the notes of workers and the presence of the driver.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.journal import JournalReader, Record
from volpipe.blockwise.notes import read_tasks
from volpipe.errors import RunError
from volpipe.geometry.grid import Box, Grid
from volpipe.inference.output_plan import OutputPlan
from volpipe.runs.output_work import OutputWork
from volpipe.runs.presence import Driver, find_driver
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Written
from volpipe.units import count
from volpipe.volumes.storage import paths
from volpipe.workflow.driver import RunWork
from volpipe.workflow.kinds import find_work
from volpipe.workflow.status import find_status

WAITING, RUNNING, DONE, FAILED = range(4)  # of a cell
NOTHING = Box((0, 0, 0), (0, 0, 0))
NAMES = {DONE: "done", RUNNING: "running", FAILED: "failed", WAITING: "waiting"}


@dataclass(frozen=True)
class ShardProgress:
    """How far a run is.

    Attributes:
        cells: state of each shard of the output (z, y, x), uint8.
        sentence: the same for people.
        version: changes with the cells.
    """

    cells: np.ndarray
    sentence: str

    @property
    def version(self) -> str:
        return hashlib.sha256(self.cells.tobytes()).hexdigest()[:16]


@dataclass
class OutputWatch:
    """The run that writes an output, watched through its journal, which is read on from where it was read last.

    Attributes:
        array: of the output, where that has several; shards of all have the same numbers.
    """

    work: OutputWork[Any, Any]
    array: str = ""
    _done: set[int] = field(default_factory=set)  # cells
    _failed: dict[tuple[str, int], None] = field(default_factory=dict)  # stage and unit
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # several requests look at once

    def __post_init__(self) -> None:
        self.folder, self._schedule = self.work.folder, self.work.schedule()
        self._reader = JournalReader(self.folder.journal, self.work.kinds, self._forget)

    @property
    def grid(self) -> Grid:
        """The shards of the array: each is written at once."""
        plan: OutputPlan = self.work.plan.array(self.array)
        return plan.shards(plan.finest)

    def look(self) -> ShardProgress:
        """Return the state of each shard now."""
        self._read_journal()
        whole = self.work.plan.shards(self.work.plan.finest)
        states = np.zeros(len(whole), np.uint8)
        driver = find_driver(self.folder.path, self.folder.journal)
        for box in self._boxes_under_way() if driver.is_at_work else ():
            states[list(whole.touching(box))] = RUNNING
        for stage, unit in list(self._failed):
            states[list(whole.touching(self._unit_box(stage, unit)))] = FAILED
        states[list(self._done)] = DONE
        return ShardProgress(states.reshape(whole.counts), _progress_sentence(states, driver))

    def written_boxes(self, most: int) -> list[Box]:
        """Return boxes of shards that are written, `most` of them, spread over all."""
        self._read_journal()
        done = sorted(self._done)
        return [self.grid.box(number) for number in done[:: -(-len(done) // most) or 1]]

    def written(self, box: Box) -> np.ndarray:
        """Return which voxels of `box` of the output are written, (z, y, x), bool."""
        self._read_journal()
        mask = np.zeros(box.shape, bool)
        for shard in self.grid.touching(box) if self._done else ():
            if shard in self._done:
                mask[(self.grid.box(shard) & box).relative_to(box.start).slices] = True
        return mask

    def _read_journal(self) -> None:
        """Take note of what the journal has since the last time; of all where it was begun anew."""
        with self._lock:
            for line in self._reader.lines():
                self._take_record(line.record())

    def _forget(self) -> None:
        self._done, self._failed = set(), {}

    def _take_record(self, record: Record[Any]) -> None:
        if isinstance(record.result, Written):
            self._done |= {shard for level, shard, _ in record.result.checksums if level == self.work.plan.finest}
        for unit in record.units:
            self._failed.pop(unit, None)
        self._failed |= {(record.stage, unit): None for unit, _ in record.failed}

    def _boxes_under_way(self) -> Iterator[Box]:
        """Yield the boxes of tasks whose workers say how far they are; others are counted in the sentence alone."""
        if isinstance(self.work, RunWork):
            tasks = read_tasks(self.folder.path)
            plan = self.work.plan
            yield from (plan.shown_box(plan.sum_box(unit)) for stage, unit in tasks if stage == "infer")

    def _unit_box(self, name: str, unit: int) -> Box:
        """Return the box (z, y, x) of the output that a unit makes; none of a coarser level."""
        stage = self._schedule.by_name.get(name)
        return NOTHING if stage is None or name.startswith("pyramid") else self._schedule.box(stage, unit)


def watch(output: str, array: str = "") -> OutputWatch | None:
    """Return the run that writes `output`; None where nobody began one, and where it is complete.

    Of several arrays of the output one is watched.

    Raises:
        RunError: what it stored is damaged, or of another version.
    """
    place = paths.locate(output)
    if not RunFolder.from_output(place).path.is_dir():
        return None
    work = find_work(RunFolder.from_output(place))
    if work is None or work.is_complete or array not in {each.folder for each in work.plan.arrays}:
        return None
    return OutputWatch(work, array)


def outputs_of(folder: str) -> list[str]:
    """Return the outputs of a folder of several stages that are volumes; [] of anything else."""
    if "://" in folder or not Path(folder).is_dir():
        return []
    try:
        status = find_status(folder)
    except RunError:  # nobody began anything there
        return []
    return [part.output for part in status.parts if part.is_volume and paths.exists(paths.locate(part.output))]


def _progress_sentence(states: np.ndarray, driver: Driver) -> str:
    counts = {name: int(np.count_nonzero(states == state)) for state, name in NAMES.items()}
    parts = [f"{counts['done']:,} of {len(states):,} shards written"]
    parts += [f"{counts[name]:,} {name}" for name in ("running", "failed") if counts[name]]
    note = driver.note
    if driver.is_at_work and note is not None:
        in_flight = sum(stage.in_flight for stage in note.stages.values())
        parts += [f"{count(in_flight, 'task')} at work"] if in_flight else []
        parts += [f"{note.seconds_left:,.0f} s left"] if note.seconds_left else []
    elif not driver.is_at_work and counts["done"] < len(states):
        parts.append("nobody works on it")
    return ", ".join(parts)
