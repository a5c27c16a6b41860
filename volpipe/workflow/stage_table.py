"""The table of stages: what each stage of flows took, read and wrote, in numbers, a row for each flow and stage.

Not here: adding up (blockwise.usage), or the same for people in reports (pages).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from volpipe.blockwise.usage import Totals
from volpipe.errors import RunError
from volpipe.reporting.tally import JournalTally
from volpipe.runs.pages import disk_use
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import StageWork
from volpipe.stages.entry import Entry
from volpipe.volumes.storage import paths
from volpipe.workflow.batch_table import find_batch, read_table
from volpipe.workflow.entries import find_entries
from volpipe.workflow.kinds import KINDS, find_work


@dataclass(frozen=True)
class StageRow:
    """What a stage took, over all sessions; None where it is not known, as of a GPU that was not there.

    Attributes:
        flow: output of all stages; of one run its own.
        stage, kind: as the flow says them.
        complete: whether nothing is left to do.
        input: the volume, or the output of another stage, that it reads.
        output: that it makes.
        tasks: that did something.
        files: of the output, as they are on a disk now.
        seconds: from the first task to the last.
        task_seconds, cpu_seconds: of all tasks, wall and processor time.
        cpu_percent: of one processor, while tasks ran.
        peak_memory_bytes: of the largest worker.
        gpu_percent: mean utilisation by NVML while tasks of a net ran, of all processes.
        peak_gpu_memory_bytes: the most in use, by PyTorch, or by NVML of all processes.
    """

    flow: str
    stage: str
    kind: str
    complete: bool
    input: str
    output: str
    tasks: int
    files: int | None
    seconds: float | None
    task_seconds: float
    cpu_seconds: float
    cpu_percent: float | None
    read_bytes: int
    written_bytes: int
    peak_memory_bytes: int | None
    gpu_percent: float | None
    peak_gpu_memory_bytes: int | None

    @classmethod
    def of(cls, entry: Entry, totals: Totals, *, flow: str, is_complete: bool) -> StageRow:
        """Return the row of the stage `entry`, whose tasks took `totals`."""
        busy, on_device = totals.device_busy_seconds, totals.device_task_seconds
        return cls(
            flow, entry.name, entry.kind, is_complete, entry.reads, entry.out, totals.tasks, num_files(entry.out),
            totals.ended - totals.began if totals.began else None,
            totals.seconds, totals.cpu_seconds, _percent(totals.cpu_seconds, totals.seconds),
            totals.read_bytes, totals.written_bytes, totals.peak_bytes or None,
            _percent(busy, on_device) if busy else None,  # NVML says nothing in place of 0
            totals.device_bytes or None,
        )  # fmt: skip


def _percent(part: float, whole: float) -> float | None:
    return round(100 * part / whole, 1) if whole > 0 else None


def num_files(out: str) -> int | None:
    """Return the number of files of an output on a disk; None of a remote one, or of too many to look at."""
    place = paths.locate(out)
    if isinstance(place, Path) and place.is_file():
        return 1
    use = disk_use(out)
    return None if use is None else use[1]


def stage_rows(output: str) -> Iterator[StageRow]:
    """Yield a row for each stage of the flow, of each flow of the batch, or of the one run, that `output` names.

    Raises:
        RunError: nobody began anything there, or what is stored is damaged.
    """
    if (batch := find_batch(output)) is not None:
        for dataset in read_table(batch) or ():
            if dataset.ended != "waiting":
                yield from stage_rows(dataset.out)
        return
    entries, alone = find_entries(output), None
    if entries is None:
        entries, alone = _alone(output)
    for entry in entries:
        tally = JournalTally()
        for journal in entry.journals:
            tally.read(journal)
        if tally.num_damaged:
            raise RunError(f"{tally.first_damaged} is damaged, so that its tasks cannot be added up; restore the file")
        is_complete = KINDS[entry.kind].is_done(entry) if alone is None else alone.is_complete
        yield StageRow.of(entry, tally.all, flow=output, is_complete=is_complete)


def _alone(output: str) -> tuple[list[Entry], StageWork[Any]]:
    """Return the only stage of a run that no flow began, and its work."""
    folder = RunFolder.find(output)
    work = find_work(folder)
    if work is None:
        raise RunError(f"{output} has no table of stages: {folder.path} holds no plan of a run, labels or stages")
    place = f"{work.plan.source.path} {work.plan.source.key}".strip()
    return [Entry(name=work.what, kind=work.what, reads=place, out=work.plan.out, folder=str(folder.path))], work


def to_csv(rows: Iterable[StageRow]) -> str:
    """Return `rows` as CSV: numbers as they are, nothing where one is not known."""
    text = io.StringIO()
    names: Sequence[str] = [field.name for field in fields(StageRow)]
    lines = csv.DictWriter(text, names, lineterminator="\n")
    lines.writeheader()
    lines.writerows(asdict(row) for row in rows)
    return text.getvalue()
