"""The status of anything that volpipe makes: a run, stages, labels, a training, many of them; and who works on it.

Not here: printing (cli.status). Nothing is written and no lock is taken for longer than a look.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.journal import Totals
from volpipe.errors import RemoteError, RunError
from volpipe.recipes.training import LOSSES
from volpipe.runs.presence import Driver, StageNote, find_driver
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.driver import SegmentWork
from volpipe.training.driver import newest_step
from volpipe.training.logs import last_step
from volpipe.training.search.grid import SWEEP_FILE
from volpipe.training.search.optuna import STUDY
from volpipe.training.search.trials import TABLE
from volpipe.training.task import Training
from volpipe.volumes.storage import paths
from volpipe.workflow.batch_table import DatasetRow, find_batch, note_of, read_table
from volpipe.workflow.driver import RunWork
from volpipe.workflow.entries import Entry, find_entries, find_work, is_done

Kind = Literal["run", "labels", "evaluation", "stages", "training", "trials", "batch"]
KINDS: dict[str, Kind] = {"run": "run", "segmentation": "labels", "label": "labels", "evaluate": "evaluation"}
State = Literal["complete", "running", "unseen", "interrupted", "incomplete", "not begun"]


@dataclass(frozen=True)
class Status:
    """How far the work on an output is.

    Attributes:
        output: that is made, or the folder of a training.
        totals: what their tasks took, over all sessions.
        missing: what failed when it was last tried.
        parts: the stages of several, in their order.
        datasets: of a batch.
    """

    kind: Kind
    output: str
    is_complete: bool
    driver: Driver
    stages: Mapping[str, StageNote] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    remark: str = ""
    parts: tuple[Status, ...] = ()
    datasets: tuple[DatasetRow, ...] = ()

    @property
    def state(self) -> State:
        """One word; "running": somebody works on it, "unseen": that cannot be known from here."""
        if self.driver.is_at_work or any(part.state == "running" for part in self.parts):
            return "running"
        if self.is_complete:
            return "complete"
        if self.driver.state == "unseen":
            return "unseen"
        if self.driver.state == "interrupted":
            return "interrupted"
        return "incomplete" if self.stages or self.parts else "not begun"

    def to_json(self) -> dict[str, Any]:  # Any: plain values
        """Return the same in plain values; the keys are those of docs/faults.md."""
        driver, note = self.driver, self.driver.note
        return {
            "kind": self.kind,
            "output": self.output,
            "state": self.state,
            "process": int(driver.process) if driver.process else None,
            "host": driver.host or None,
            "since": driver.since or None,
            "last_sign_seconds": driver.silent_seconds,
            "command": (note.command or None) if note is not None else None,
            "folder": (note.folder or None) if note is not None else None,
            "done": note.part if note is not None else None,
            "seconds_left": note.seconds_left if note is not None else None,
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "missing": [asdict(part) | {"box": str(part.box)} for part in self.missing],
            "parts": [part.to_json() for part in self.parts],
            "datasets": [asdict(row) for row in self.datasets],
        }


def find_status(output: str) -> Status:
    """Return the status of `output`, or of what is made in the folder of that name.

    Raises:
        RunError: nobody began anything there, or what is stored is damaged.
    """
    batch = find_batch(output)
    if batch is not None:
        return _of_batch(output, batch)
    return _of_stages(output) or _of_training(output) or _of_trials(output) or _of_run(output)


def _of_batch(output: str, folder: Path) -> Status:
    """Return the status of a batch; a dataset that its driver left is one that was interrupted."""
    driver, rows = find_driver(folder, RunFolder(folder).log), read_table(folder) or []
    if not driver.is_at_work and driver.state != "unseen":
        rows = [replace(row, ended="interrupted") if row.ended == "running" else row for row in rows]
    note = note_of(rows)
    return Status("batch", output, note.done == len(rows), driver, {"datasets": note}, datasets=tuple(rows))


def _of_run(output: str | Path) -> Status:
    folder = RunFolder.find(output)
    driver = find_driver(folder.path, folder.journal)
    work = find_work(folder)
    if work is not None:
        return _of_work(work, driver)
    if driver.state == "running":  # its site is being started
        return Status("run", str(output), is_complete=False, driver=driver)
    raise RunError(f"no run of {output} was started: {folder.path} holds no plan")


def _of_work(work: RunWork | SegmentWork, driver: Driver) -> Status:
    progress, out = work.progress(), work.plan.out
    notes = {s.name: StageNote(s.num_done, s.num_units, 0, len(s.failed)) for s in progress.schedule.shown}
    stages, is_whole = _with_flights(notes, driver), work.is_complete
    remark = work.remark if is_whole else ""
    try:
        if not paths.exists(paths.locate(out)) and work.shards():
            is_whole, remark = False, f"its output is gone; `{work.goes_on} --fresh` makes it again"
    except RemoteError as error:
        remark = f"so its journal says; whether the output is there cannot be seen: {error}"
    return Status(KINDS[work.what], out, is_whole, driver, stages, progress.totals, progress.missing, remark)


def _of_stages(output: str) -> Status | None:
    entries = find_entries(output)
    if entries is None:
        return None
    own = RunFolder.for_stages(paths.locate(output))
    folder = own.path if own.path.is_dir() else Path(output)
    parts = tuple(map(_of_entry, entries))
    driver = find_driver(folder, RunFolder(folder).log)
    return Status("stages", output, all(part.is_complete for part in parts), driver, parts=parts)


def _of_entry(entry: Entry) -> Status:
    work, driver = find_work(entry.run), find_driver(entry.run.path, entry.run.journal)
    if work is not None:
        return _of_work(work, driver)
    return Status(KINDS[entry.kind], entry.out, is_done(entry), driver)


def _of_training(output: str) -> Status | None:
    folder = Path(output)
    training = Training.load(folder)
    if training is None:
        return None
    steps = training.recipe.train.steps
    done = max(newest_step(folder), last_step(folder))
    driver = find_driver(folder, folder / LOSSES)
    is_whole = newest_step(folder) >= steps
    return Status("training", output, is_whole, driver, {"train": StageNote(min(done, steps), steps)})


def _of_trials(output: str) -> Status | None:
    folder = Path(output)
    if not any((folder / name).is_file() for name in (SWEEP_FILE, STUDY)):
        return None
    parts = tuple(
        part
        for path in sorted(folder.glob("[0-9]*"))
        if path.is_dir() and (part := _of_training(str(path))) is not None
    )
    try:
        rows = json.loads((folder / f"{TABLE}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is written at the end of a session
        rows = []
    is_whole = bool(rows) and all(row["state"] in ("done", "pruned") for row in rows)
    return Status("trials", output, is_whole, find_driver(folder, folder / "volpipe.log"), parts=parts)


def _with_flights(stages: dict[str, StageNote], driver: Driver) -> dict[str, StageNote]:
    """Return `stages` with the tasks that a driver at work has in flight, and with those that only it knows."""
    if not driver.is_at_work or driver.note is None:
        return stages
    notes = driver.note.stages
    flying = {
        name: StageNote(stage.done, stage.all, notes[name].in_flight if name in notes else 0, stage.failed)
        for name, stage in stages.items()
    }
    return {name: stage for name, stage in notes.items() if name not in stages} | flying
