"""The status of anything that volpipe makes: a run, stages, labels, a training, many of them; and who works on it.

Not here: printing (cli.app). Nothing is written and no lock is taken for longer than a look.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from volpipe.errors import RemoteError, RunError, VolpipeError
from volpipe.runs.presence import Driver, Sightings, find_driver
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.unit_records import file_mark
from volpipe.stages.entry import Entry
from volpipe.stages.status import Status, again, changes_of, noted_stages
from volpipe.units import count
from volpipe.volumes.formats.container import mark_in, read_attributes
from volpipe.volumes.storage import paths
from volpipe.workflow.batch_table import SUFFIX, TABLE, DatasetRow, batch_folder, find_batch, note_of, read_table
from volpipe.workflow.entries import find_entries
from volpipe.workflow.kinds import KINDS, find_work
from volpipe.workflow.run_stages import RunStage

T = TypeVar("T")
NOT_THERE = "not there any more"  # begins the reason of a dataset whose output was deleted


def find_status(output: str, *, with_changes: bool = False) -> Status:
    """Return the status of `output`, or of what is made in the folder of that name.

    Args:
        output: as the command names it.
        with_changes: whether to look at all files of the input of a run, a segmentation or stages.

    Raises:
        RunError: nobody began anything there, what is stored is damaged, or it is no run whose input can be compared.
    """
    status = StatusReader(output).look()
    return _with_changes(status) if with_changes else status


@dataclass
class StatusReader:
    """Looks at the work on `output` as often as it is asked; journals are read on from where they were read last."""

    output: str
    _held: dict[Path, tuple[object, Any]] = field(default_factory=dict)  # Any: what was read, and when of a file
    _datasets: dict[str, StatusReader] = field(default_factory=dict)  # of a batch, under way, by output
    _sightings: Sightings = field(default_factory=Sightings)  # of drivers
    _seen: Status | None = None  # at the last look, of a single work

    def look(self) -> Status:
        """Return how far the work is now; nothing is written.

        Raises:
            RunError: nobody began anything there, or what is stored is damaged.
        """
        try:
            batch = find_batch(self.output)
            return self._of_batch(batch) if batch is not None else self._of_stages() or self._of_work()
        except PermissionError as error:
            raise RunError(
                f"{error.filename} may not be read: {error.strerror}; ask its owner for the right"
            ) from error

    def driver(self, folder: Path, journal: Path) -> Driver:
        """Return the driver in `folder`; see `Looker`."""
        driver = find_driver(folder, journal)
        size = journal.stat().st_size if journal.is_file() else 0
        if driver.silent_seconds is None:
            return driver
        sign = (driver.session, None if driver.note is None else driver.note.at, size)
        return replace(driver, silent_seconds=self._sightings.silence(folder, sign, driver.silent_seconds))

    def kept(self, file: Path, read: Callable[[], T]) -> T:
        """Return what `read` gave when `file` was last changed; see `Looker`."""
        mark = file_mark(file)
        if file not in self._held or self._held[file][0] != mark:
            self._held[file] = mark, read()
        content: T = self._held[file][1]
        return content

    def _of_batch(self, folder: Path) -> Status:
        """Return the status of a batch; a dataset that its driver left is one that was interrupted."""
        driver = self.driver(folder, RunFolder(folder).log)
        rows = self.kept(folder / f"{TABLE}.json", lambda: read_table(folder)) or []
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
            folder=folder, view="datasets",
        )  # fmt: skip

    def _at_work(self, rows: Sequence[DatasetRow]) -> dict[int, Status]:
        """Return the status of each dataset that is under way and has begun."""
        outputs = {number: row.out for number, row in enumerate(rows) if row.ended == "running"}
        self._datasets = {out: self._datasets.get(out) or StatusReader(out) for out in outputs.values()}
        at_work = {}
        for number, out in outputs.items():
            with suppress(RunError):  # its folder is not there yet, or not any more
                at_work[number] = self._datasets[out].look()
        return at_work

    def _of_work(self) -> Status:
        """Return the status of a single work, of whatever kind."""
        if self.output.lower().endswith(".toml"):
            raise RunError(
                f"no batch of {self.output} was begun: there is no {batch_folder(paths.locate(self.output))}; "
                f"`volpipe batch {shlex.quote(self.output)}` begins one, and of other work name the output"
            )
        for kind in KINDS.values():
            if (status := kind.status(kind.home(self.output), self)) is not None:
                self._seen = replace(status, output=status.output or self.output)
                return self._seen
        folder = RunFolder.find(self.output)
        driver = self.driver(folder.path, folder.journal)
        if self._seen is not None and self._seen.goes:
            return replace(self._seen, is_complete=True, driver=driver, stages={}, folder=None)
        if driver.state == "running":  # its site is being started
            return Status(RunStage.shown, self.output, is_complete=False, driver=driver, folder=folder.path)
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
        driver = self.driver(folder, RunFolder(folder).log)
        is_complete = all(part.is_complete for part in parts)
        return Status("stages", self.output, is_complete, driver, parts=parts, folder=folder)

    def _of_entry(self, entry: Entry) -> Status:
        kind = KINDS[entry.kind]
        status = kind.status(entry.run, self)
        if status is None or status.goes:  # that of a stage stays
            is_done, driver = kind.is_done(entry), self.driver(entry.run.path, entry.run.journal)
            stages = {} if is_done else noted_stages(driver)
            is_volume = kind.maker is not None
            status = Status(kind.shown, entry.out, is_done, driver, stages, folder=entry.run.path, is_volume=is_volume)
        return replace(status, name=entry.name)


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
    if status.parts and status.view == "units":
        return _stages_with_changes(status)
    work = find_work(RunFolder.find(status.output))
    if work is None or work.plan.needs_scan:
        raise RunError(
            f"{status.output}: --changes is for runs of a net without a mask and input.empty, and for segmentations; "
            "leave it out, or name another output"
        )
    changes = changes_of(work)
    update = again(status.driver, "--update") or f"{work.goes_on} --update"
    return replace(status, changes=changes, remark=changes.sentence(update))


def _stages_with_changes(status: Status) -> Status:
    """Return the `status` of stages with what an update would find in those that read the volume."""
    outputs = {part.output for part in status.parts}
    works = {part.name: None if part.folder is None else find_work(RunFolder(part.folder)) for part in status.parts}
    reading = {name: work for name, work in works.items() if work and work.plan.source.path not in outputs}
    changes = {name: changes_of(work) for name, work in reading.items()}
    parts = tuple(replace(part, changes=changes.get(part.name)) for part in status.parts)
    update = again(status.driver, "--update") or "volpipe run --update"
    remark = "; ".join(f"stage {name}: {each.sentence(update)}" for name, each in changes.items())
    if any(each.changed or any(each.grown) for each in changes.values()):
        remark += "; in later stages, what rests on that is known once it is computed"
    return replace(status, parts=parts, changes=next(iter(changes.values()), None), remark=remark)


def _batches_here() -> str:
    """Return the commands that show the batches of this folder, as the end of a sentence."""
    folders = sorted(file.parent.name for file in Path.cwd().glob(f"*{SUFFIX}/{TABLE}.json"))
    return (
        f", such as {' or '.join(f'`volpipe status {shlex.quote(name)}`' for name in folders[:3])}" if folders else ""
    )
