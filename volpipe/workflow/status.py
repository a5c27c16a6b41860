"""The status of anything that volpipe makes: a run, stages, labels, a training, many of them; and who works on it.

Not here: printing (cli.app). Nothing is written and no lock is taken for longer than a look.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.usage import Totals
from volpipe.errors import RemoteError, RunError, VolpipeError
from volpipe.evaluation.evaluate import Evaluation
from volpipe.geometry.grid import Triple, triple
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.recipes.training import LOSSES, WEIGHTS
from volpipe.runs.output_work import OutputWork
from volpipe.runs.presence import Driver, Sightings, find_driver
from volpipe.runs.provenance import is_sealed
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.unit_records import file_mark
from volpipe.runs.verify import check_present
from volpipe.runs.worker import Written
from volpipe.segmentation.driver import SegmentWork
from volpipe.segmentation.plan import SegmentPlan
from volpipe.training.logs import TrainingPace, read_pace
from volpipe.training.search.trials import has_trials, is_ended
from volpipe.training.task import TRAINING_FILE, Training, newest_step
from volpipe.units import count
from volpipe.volumes.formats.container import mark_in, read_attributes
from volpipe.volumes.storage import paths
from volpipe.workflow.batch_table import SUFFIX, TABLE, DatasetRow, batch_folder, find_batch, note_of, read_table
from volpipe.workflow.driver import RunWork
from volpipe.workflow.entries import Entry, find_entries, find_work
from volpipe.workflow.plan import STAGES
from volpipe.workflow.stages import LabelStage, RunStage

Kind = Literal["run", "labels", "evaluation", "stages", "training", "trials", "batch"]
KINDS: dict[str, Kind] = {stage.maker.what: stage.shown for stage in (RunStage, LabelStage)}  # of outputs
UNCOMPARED = "but what it reads is changed by another stage; the same command compares it"
NOT_THERE = "not there any more"  # begins the reason of a dataset whose output was deleted
State = Literal["complete", "running", "unseen", "interrupted", "incomplete", "not begun"]


@dataclass(frozen=True)
class Changes:
    """How much an update of an output may compute, as the states of the input's files tell.

    Attributes:
        changed: blocks whose files are not as they were; voxels were not compared.
        blocks: of the run.
        grown: voxels (z, y, x) by which the volume is longer than it was.
    """

    changed: int
    blocks: int
    grown: Triple = (0, 0, 0)

    def sentence(self, update: str) -> str:
        """Return it in words; the command `update` brings the output up to date."""
        longer = ", ".join(f"{axis} by {n:,}" for axis, n in zip("zyx", self.grown, strict=True) if n)
        grown = f"its input has grown along {longer}; " if longer else ""
        if not self.changed:
            return f"{grown}its input has not changed"
        return (
            f"{grown}{self.changed:,} of {count(self.blocks, 'block')} read files that have changed; `{update}` "
            "compares their voxels, and computes what rests on others"
        )


@dataclass(frozen=True)
class Status:
    """How far the work on an output is.

    Attributes:
        output: that is made, or the folder of a training.
        totals: what their tasks took, over all sessions.
        missing: what failed when it was last tried.
        changes: what an update would find, where that was asked for.
        parts: the stages of several, in their order.
        datasets: of a batch; `at_work` has the status of those that are under way, by number.
        folder: of the run, where its workers leave their signs of life.
        name: of one of several stages or trials.
        pace: of a training that has taken a step.
    """

    kind: Kind
    output: str
    is_complete: bool
    driver: Driver
    stages: Mapping[str, StageNote] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    remark: str = ""
    changes: Changes | None = None
    parts: tuple[Status, ...] = ()
    datasets: tuple[DatasetRow, ...] = ()
    at_work: Mapping[int, Status] = field(default_factory=dict)
    folder: Path | None = None
    name: str = ""
    pace: TrainingPace | None = None

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

    @property
    def seconds_left(self) -> float | None:
        """The time that it still takes, as its driver said last, or as its steps were fast; None where unknown."""
        if self.pace is not None and self.pace.speed and self.driver.is_at_work:
            stage = self.stages["train"]
            return (stage.all - stage.done) / self.pace.speed
        return None if self.driver.note is None else self.driver.note.seconds_left

    def to_json(self) -> dict[str, Any]:  # Any: plain values
        """Return the same in plain values; the keys are those of docs/reference/machines.md."""
        driver, note = self.driver, self.driver.note
        return {
            "kind": self.kind,
            "output": self.output,
            "name": self.name or None,
            "state": self.state,
            "process": int(driver.process) if driver.process else None,
            "host": driver.host or None,
            "since": driver.since or None,
            "last_sign_seconds": driver.silent_seconds,
            "command": (note.command or None) if note is not None else None,
            "folder": (note.folder or None) if note is not None else None,
            "done": note.part if note is not None else None,
            "seconds_left": self.seconds_left,
            "waits_until": driver.waits or None,
            "loss": self.pace.loss if self.pace is not None else None,
            "steps_per_second": self.pace.speed if self.pace is not None else None,
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "changes": None if self.changes is None else asdict(self.changes),
            "missing": [asdict(part) | {"box": str(part.box)} for part in self.missing],
            "parts": [part.to_json() for part in self.parts],
            "datasets": [asdict(row) for row in self.datasets],
        }


def find_status(output: str, *, with_changes: bool = False) -> Status:
    """Return the status of `output`, or of what is made in the folder of that name.

    Args:
        output: as the command names it.
        with_changes: whether to look at all files of the input of a run, a segmentation or stages.

    Raises:
        RunError: nobody began anything there, what is stored is damaged, or it is no run whose input can be compared.
    """
    status = Observer(output).look()
    return _with_changes(status) if with_changes else status


@dataclass(frozen=True)
class _Held:
    """What was read of a file, or of a run's folder, and what the files were then."""

    marks: tuple[object, ...]
    content: Any  # what each kind has


@dataclass
class Observer:
    """Looks at the work on `output` as often as it is asked; journals are read on from where they were read last."""

    output: str
    _held: dict[Path, _Held] = field(default_factory=dict)
    _datasets: dict[str, Observer] = field(default_factory=dict)  # of a batch, under way, by output
    _sightings: Sightings = field(default_factory=Sightings)  # of drivers
    _is_evaluation: bool = False  # what was seen at the last look

    def look(self) -> Status:
        """Return how far the work is now; nothing is written.

        Raises:
            RunError: nobody began anything there, or what is stored is damaged.
        """
        try:
            batch = find_batch(self.output)
            if batch is not None:
                return self._of_batch(batch)
            return (
                self._of_stages()
                or self._of_training(Path(self.output))
                or self._of_trials(Path(self.output))
                or self._of_run()
            )
        except PermissionError as error:
            raise RunError(
                f"{error.filename} may not be read: {error.strerror}; ask its owner for the right"
            ) from error

    def _driver(self, folder: Path, journal: Path) -> Driver:
        """Return the driver in `folder`; of one that was seen before, a new sign counts, not what its clock says."""
        driver = find_driver(folder, journal)
        size = journal.stat().st_size if journal.is_file() else 0
        if driver.silent_seconds is None:
            return driver
        sign = (driver.session, None if driver.note is None else driver.note.at, size)
        return replace(driver, silent_seconds=self._sightings.silence(folder, sign, driver.silent_seconds))

    def _kept(self, path: Path, files: Sequence[Path], read: Callable[[], Any]) -> Any:  # Any: what each kind has
        """Return what `read` gave of `path` when its `files` were last changed."""
        marks = tuple(map(file_mark, files))
        held = self._held.get(path)
        if held is None or held.marks != marks:
            held = self._held[path] = _Held(marks, read())
        return held.content

    def _work(self, folder: RunFolder) -> RunWork | SegmentWork | None:
        """Return the work whose plan lies in `folder`, None where there is none."""
        names = (Plan.FILE, SegmentPlan.FILE)
        work: RunWork | SegmentWork | None = self._kept(
            folder.path, [folder.path / name for name in names], lambda: find_work(folder)
        )
        return work

    def _of_batch(self, folder: Path) -> Status:
        """Return the status of a batch; a dataset that its driver left is one that was interrupted."""
        driver = self._driver(folder, RunFolder(folder).log)
        rows = self._kept(folder, [folder / f"{TABLE}.json"], lambda: read_table(folder)) or []
        if not driver.is_at_work and driver.state != "unseen":
            rows = [replace(row, ended="interrupted") if row.ended == "running" else row for row in rows]
        if not driver.is_at_work:
            rows = list(map(_as_it_stands, rows))
        lacking = [row for row in rows if row.ended == "incomplete" and row.reason.startswith(NOT_THERE)]
        note, at_work = note_of(rows), self._at_work(rows)
        is_complete = note.done == len(rows)
        stages = {"datasets": note}
        remark = ""
        if lacking:
            remark = f"of {count(len(lacking), 'dataset')} the output is not there any more, such as {lacking[0].out}"
        return Status(
            "batch", self.output, is_complete, driver, stages, remark=remark, datasets=tuple(rows), at_work=at_work,
            folder=folder,
        )  # fmt: skip

    def _at_work(self, rows: Sequence[DatasetRow]) -> dict[int, Status]:
        """Return the status of each dataset that is under way and has begun."""
        outputs = {number: row.out for number, row in enumerate(rows) if row.ended == "running"}
        self._datasets = {out: self._datasets.get(out) or Observer(out) for out in outputs.values()}
        at_work = {}
        for number, out in outputs.items():
            with suppress(RunError):  # its folder is not there yet, or not any more
                at_work[number] = self._datasets[out].look()
        return at_work

    def _of_run(self) -> Status:
        if self.output.lower().endswith(".toml"):
            raise RunError(
                f"no batch of {self.output} was begun: there is no {batch_folder(paths.locate(self.output))}; "
                f"`volpipe batch {shlex.quote(self.output)}` begins one, and of other work name the output"
            )
        folder = RunFolder.find(self.output)
        driver, work = self._driver(folder.path, folder.journal), self._work(folder)
        if work is not None:
            return _of_work(work, driver)
        if (folder.path / Evaluation.mark).is_file():
            self._is_evaluation = True
            return Status("evaluation", self.output, False, driver, _noted(driver), folder=folder.path)
        if self._is_evaluation:  # its folder goes when all is scored
            return Status("evaluation", self.output, is_complete=True, driver=driver)
        if driver.state == "running":  # its site is being started
            return Status("run", self.output, is_complete=False, driver=driver, folder=folder.path)
        if Path(self.output).is_file():
            raise RunError(
                f"{self.output} is a file, and no output: a batch of the volumes in it is named after its outputs; "
                f"name its folder{_batches_here()}"
            )
        raise RunError(f"no run of {self.output} was started: {folder.path} holds no plan")

    def _of_stages(self) -> Status | None:
        entries = find_entries(self.output)
        if entries is None:
            return None
        own = RunFolder.for_stages(paths.locate(self.output))
        folder = own.path if own.path.is_dir() else Path(self.output)
        parts = tuple(map(self._of_entry, entries))
        driver = self._driver(folder, RunFolder(folder).log)
        is_complete = all(part.is_complete for part in parts)
        return Status("stages", self.output, is_complete, driver, parts=parts, folder=folder)

    def _of_entry(self, entry: Entry) -> Status:
        driver, work = self._driver(entry.run.path, entry.run.journal), self._work(entry.run)
        if work is not None:
            return replace(_of_work(work, driver), name=entry.name)
        stage = STAGES[entry.kind]
        if stage.shown == "training":
            training = self._of_training(entry.run.path) or self._of_trials(entry.run.path)
            if training is not None:
                return replace(training, name=entry.name)
        is_complete = stage.is_done(entry)
        stages = {} if is_complete else _noted(driver)
        return Status(stage.shown, entry.out, is_complete, driver, stages, folder=entry.run.path, name=entry.name)

    def _of_training(self, folder: Path) -> Status | None:
        training = self._kept(folder, [folder / TRAINING_FILE], lambda: Training.load(folder))
        if training is None:
            return None
        steps, newest = training.recipe.train.steps, newest_step(folder)
        driver, pace = self._driver(folder, folder / LOSSES), read_pace(folder)
        done = max(newest, 0 if pace is None else pace.step)
        stages = {"train": StageNote(min(done, steps), steps)}
        has_weights = (folder / WEIGHTS).is_file()
        remark = (
            "its weights are gone; the same command makes them again" if newest >= steps and not has_weights else ""
        )
        is_complete = newest >= steps and has_weights
        return Status(
            "training", str(folder), is_complete, driver, stages, remark=remark, folder=folder, pace=pace
        )  # fmt: skip

    def _of_trials(self, folder: Path) -> Status | None:
        if not has_trials(folder):
            return None
        parts = tuple(
            replace(part, name=path.name)
            for path in sorted(folder.glob("[0-9]*"))
            if path.is_dir() and (part := self._of_training(path)) is not None
        )
        driver = self._driver(folder, folder / "volpipe.log")
        return Status("trials", str(folder), is_ended(folder), driver, parts=parts, folder=folder)


def _as_it_stands(row: DatasetRow) -> DatasetRow:
    """Return the row of a dataset that was complete as its output is now: gone, or being made again."""
    if not row.is_complete:
        return row
    try:
        outputs = [paths.locate(entry.out) for entry in find_entries(row.out) or ()] or [paths.locate(row.out)]
        gone = [str(out) for out in outputs if not paths.exists(out)]
        if gone:
            return replace(row, ended="incomplete", reason=f"{NOT_THERE}: {', '.join(gone)}; --replace makes it again")
        if any(mark_in(read_attributes(out)) is not None for out in outputs):
            return replace(row, ended="incomplete", reason="other work on its output has not ended")
    except RemoteError as error:
        return replace(row, reason=f"whether its output is there cannot be seen: {error}")
    except VolpipeError:  # its metadata are broken, which verifying tells
        return row
    return row


def _with_changes(status: Status) -> Status:
    """Return `status` with what an update of that output would find."""
    if status.kind == "stages":
        return _stages_with_changes(status)
    work = find_work(RunFolder.find(status.output))
    if not isinstance(work, OutputWork) or (isinstance(work, RunWork) and work.plan.needs_scan):
        raise RunError(
            f"{status.output}: --changes is for runs of a net without a mask and input.empty, and for segmentations; "
            "leave it out, or name another output"
        )
    changes = _changes_of(work)
    update = _again(status.driver, "--update") or f"{work.goes_on} --update"
    return replace(status, changes=changes, remark=changes.sentence(update))


def _stages_with_changes(status: Status) -> Status:
    """Return the `status` of stages with what an update would find in those that read the volume."""
    outputs = {part.output for part in status.parts}
    works = {part.name: None if part.folder is None else find_work(RunFolder(part.folder)) for part in status.parts}
    reading = {name: work for name, work in works.items() if work and work.plan.source.path not in outputs}
    changes = {name: _changes_of(work) for name, work in reading.items()}
    parts = tuple(replace(part, changes=changes.get(part.name)) for part in status.parts)
    update = _again(status.driver, "--update") or "volpipe run --update"
    remark = "; ".join(f"stage {name}: {each.sentence(update)}" for name, each in changes.items())
    if any(each.changed or any(each.grown) for each in changes.values()):
        remark += "; in later stages, what rests on that is known once it is computed"
    return replace(status, parts=parts, changes=next(iter(changes.values()), None), remark=remark)


def _changes_of(work: OutputWork[Any, Any]) -> Changes:
    source = work.plan.source
    now = zip(source.volume().spatial_shape, source.shape, strict=True)
    grown = triple(n - before for n, before in now)
    num_blocks = Selection(work.plan).num_blocks if isinstance(work, RunWork) else len(work.plan.blocks)
    return Changes(work.compared().num_open, num_blocks, grown)


def _of_work(work: RunWork | SegmentWork, driver: Driver) -> Status:
    ledger, out, is_complete = work.records.ledger(), work.plan.out, work.is_complete
    notes = {s.name: StageNote(s.num_done, s.num_units, 0, len(s.failed)) for s in ledger.schedule.shown}
    stages = _with_flights(notes, driver)
    remark = work.remark if is_complete else UNCOMPARED if work.is_uncompared else ""
    if is_complete and work.has_moved:
        remark = f"but its input has changed since: {work.remedy}"
    has_output = any(issubclass(kind, Written) for kind in ledger.results)
    try:
        if not driver.is_at_work and has_output and not paths.exists(paths.locate(out)):
            fresh = _again(driver, "--fresh") or f"{work.goes_on} --fresh"
            is_complete, remark = False, f"its output is gone; `{fresh}` makes it again"
        elif is_complete and not driver.is_at_work and not is_sealed(work.folder):
            again = _again(driver) or work.goes_on
            is_complete, remark = False, f"all is computed, and `{again}` again closes the output"
        elif is_complete and not driver.is_at_work:
            check_present(out, work.shards())
    except RunError as error:
        is_complete, remark = False, str(error)
    except RemoteError as error:
        remark = f"so its journal says; whether the output is there cannot be seen: {error}"
    return Status(
        KINDS[work.what], out, is_complete, driver, stages, ledger.totals, ledger.missing, remark,
        folder=work.folder.path,
    )  # fmt: skip


def _again(driver: Driver, *options: str) -> str:
    """Return the command of a driver with more `options`, as it works from this folder; "" where it is not known."""
    return "" if driver.note is None else driver.note.again(*options)


def _batches_here() -> str:
    """Return the commands that show the batches of this folder, as the end of a sentence."""
    folders = sorted(file.parent.name for file in Path.cwd().glob(f"*{SUFFIX}/{TABLE}.json"))
    return (
        f", such as {' or '.join(f'`volpipe status {shlex.quote(name)}`' for name in folders[:3])}" if folders else ""
    )


def _noted(driver: Driver) -> Mapping[str, StageNote]:
    """Return the stages as their driver told of them last; of work whose plan is not stored."""
    return {} if driver.note is None else driver.note.stages


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
