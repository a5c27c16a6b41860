"""Workers as `volpipe status --workers` shows them: how many there are and what they take, then a line for each task.

Not here: the workers (workflow.roster), or when they are looked at (cli.outputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress, groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from volpipe.display.console import columns
from volpipe.display.watching import OTHER_LINES, headline
from volpipe.units import count, duration, listed, size

if TYPE_CHECKING:
    from volpipe.stages.status import Status
    from volpipe.workflow.roster import Worker, WorkerTask

BOX = "box z,y,x"
NAMES = ("process", "cpu", "memory", "gpu", "task", BOX, "time", "done")
OWN = 4  # of them are of the process
LEFT = ("process", "task", BOX)
GAP, LEAST_BOX = 1, 10  # letters: between columns, and of a box that is folded
MOST_NAMED = 3  # workers in a sentence


def roster_view(status: Status, workers: Sequence[Worker], width: int, height: int | None = None) -> RenderableType:
    """Return the workers of the work with this `status`, as a terminal of that size shows them; None shows all."""
    alive = [worker for worker in workers if worker.is_alive]
    most = None if height is None else max(1, height - OTHER_LINES)
    notes = [Text(sentence) for sentence in sentences(workers)]
    return Group(Text(headline(status)), *notes, *_tables(alive, width, most))


def sentences(workers: Sequence[Worker]) -> Iterator[str]:
    """Yield how many workers there are, what they take together, and which are not as they should be."""
    from volpipe.workflow.roster import wrong_clocks

    alive = [worker for worker in workers if worker.is_alive]
    yield _totals(alive) if alive else "no worker has shown itself yet: they start, or their tasks are short"
    silent = [worker for worker in workers if not worker.is_alive and not worker.is_left]
    if silent:
        named = [f"{_worker_name(each)} for {duration(each.silent_seconds)}" for each in silent]
        yield f"silent: {listed(named, MOST_NAMED)} (killed, frozen, or on a machine that cannot be reached)"
    left = [worker for worker in workers if worker.is_left]
    if left:
        yield f"of a driver before this one: {listed([*map(_worker_name, left)], MOST_NAMED)}"
    for host, seconds in wrong_clocks(alive).items():
        way = "ahead of" if seconds > 0 else "behind"
        yield f"the clock of {host} is {duration(abs(seconds))} {way} that of the file system"


def _worker_name(worker: Worker) -> str:
    return f"{worker.note.host} process {worker.note.pid}"


def _totals(workers: Sequence[Worker]) -> str:
    notes = [worker.note for worker in workers]
    num_idle = sum(not worker.tasks for worker in workers)
    nodes = f" on {count(num, 'node')}" if (num := len({note.host for note in notes})) > 1 else ""
    idle = f", {num_idle:,} without a task" if num_idle else ""
    return (
        f"{count(len(workers), 'worker')}{nodes}{idle}; {count(sum(len(worker.tasks) for worker in workers), 'task')}; "
        f"CPU {sum(note.cpu_percent for note in notes):,.0f} %, memory {size(sum(note.memory_bytes for note in notes))}"
    )


def _tables(workers: Sequence[Worker], width: int, most: int | None) -> Iterator[RenderableType]:
    """Yield the name and the table of each node: a line for each task, those under way longest of more than `most`."""
    if not workers:
        return
    rows: list[tuple[Worker, WorkerTask | None]] = [(w, task) for w in workers for task in w.tasks or (None,)]
    longest = sorted(range(len(rows)), key=lambda n: 0.0 if (task := rows[n][1]) is None else -task.note.seconds)[:most]
    shown = [rows[number] for number in sorted(longest)]
    widths = _widths([_cells(worker, task) for worker, task in shown], width)
    yield _task_table([], widths)  # its heading
    for node, of_node in groupby(shown, key=lambda row: row[0].note.host):
        yield Text(node)
        table = _task_table(list(of_node), widths)
        table.show_header = False
        yield table
    if len(rows) > len(shown):
        yield Text(f"… {len(rows) - len(shown):,} more")


def _task_table(rows: Sequence[tuple[Worker, WorkerTask | None]], widths: Sequence[int]) -> Table:
    """Return the tasks of a node, in columns of such `widths`, alike for all nodes; 0 leaves a column out."""
    table, before = columns(*compress(NAMES, widths), left=LEFT, fold=True), None
    table.padding = (0, GAP, 0, 0)
    for column, width in zip(table.columns, filter(None, widths), strict=True):
        column.width = width
    for worker, task in rows:
        cells = _cells(worker, task)
        if worker.place == before:  # threads share what their process takes
            cells[:OWN] = [""] * OWN
        table.add_row(*compress(cells, widths))
        before = worker.place
    return table


def _widths(rows: Sequence[list[str]], width: int) -> list[int]:
    """Return the width of each column, so that with boxes folded all fit into `width`; 0 of one that is empty."""
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [max(letters, len(name)) if letters else 0 for letters, name in zip(longest, NAMES, strict=True)]
    others = sum(letters + GAP for letters in widths) - widths[NAMES.index(BOX)]
    widths[NAMES.index(BOX)] = min(widths[NAMES.index(BOX)], max(LEAST_BOX, width - others))
    return widths


def _cells(worker: Worker, task: WorkerTask | None) -> list[str]:
    note = worker.note
    gpu = "" if note.device_percent is None else f"{note.device_percent:.0f} % {size(note.device_used_bytes or 0)}"
    own = [f"  {note.pid}", f"{note.cpu_percent:.0f} %", size(note.memory_bytes), gpu]
    if task is None:
        return [*own, "waits", "", "", ""]
    name = f"{task.work} {task.note.stage} {task.note.unit}".strip()
    return [*own, name, task.note.box.replace(",", ", "), _clock(task.note.seconds), f"{task.share:.0%}"]


def _clock(seconds: float) -> str:
    """Return a time in few letters: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
