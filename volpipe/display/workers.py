"""Workers as `volpipe top` shows them: a line for each task, below it how many workers there are and what they take.

Not here: the workers (workflow.roster), or when they are looked at (cli.outputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from volpipe.display.console import columns
from volpipe.display.watching import OTHER_LINES, headline
from volpipe.units import count, duration, size

if TYPE_CHECKING:
    from volpipe.workflow.roster import Worker, WorkerTask
    from volpipe.workflow.status import Status

LEFT = ("worker", "task", "box z,y,x")
MOST_NAMED = 3  # workers in a sentence


def roster_view(status: Status, workers: Sequence[Worker], height: int | None = None) -> RenderableType:
    """Return the workers of the work with this `status`, as a terminal of so many lines shows them; None shows all."""
    alive = [worker for worker in workers if worker.is_alive]
    most = None if height is None else max(1, height - OTHER_LINES)
    notes = [Text(sentence) for sentence in sentences(workers)]
    return Group(Text(headline(status)), *([_table(alive, most)] if alive else []), *notes)


def sentences(workers: Sequence[Worker]) -> Iterator[str]:
    """Yield how many workers there are, what they take together, and which are not as they should be."""
    from volpipe.workflow.roster import wrong_clocks

    alive = [worker for worker in workers if worker.is_alive]
    yield _totals(alive) if alive else "no worker has shown itself yet: they start, or their tasks are short"
    silent = [worker for worker in workers if not worker.is_alive and not worker.is_left]
    if silent:
        named = ", ".join(f"{_name(each)} for {duration(each.silent_seconds)}" for each in silent[:MOST_NAMED])
        yield f"silent: {_cut(named, silent)} (killed, frozen, or on a machine that cannot be reached)"
    left = [worker for worker in workers if worker.is_left]
    if left:
        yield f"of a driver before this one: {_cut(', '.join(map(_name, left[:MOST_NAMED])), left)}"
    for host, seconds in wrong_clocks(workers).items():
        way = "ahead of" if seconds > 0 else "behind"
        yield f"the clock of {host} is {duration(abs(seconds))} {way} that of the file system"


def _cut(named: str, workers: Sequence[Worker]) -> str:
    return named + (f" and {len(workers) - MOST_NAMED:,} more" if len(workers) > MOST_NAMED else "")


def _name(worker: Worker) -> str:
    return f"{worker.sign.host} process {worker.sign.pid}"


def _totals(workers: Sequence[Worker]) -> str:
    signs = [worker.sign for worker in workers]
    num_idle = sum(not worker.tasks for worker in workers)
    nodes = f" on {count(num, 'node')}" if (num := len({sign.host for sign in signs})) > 1 else ""
    idle = f", {num_idle:,} without a task" if num_idle else ""
    return (
        f"{count(len(workers), 'worker')}{nodes}{idle}; {count(sum(len(worker.tasks) for worker in workers), 'task')}; "
        f"CPU {sum(sign.cpu_percent for sign in signs):,.0f} %, memory {size(sum(sign.memory_bytes for sign in signs))}"
    )


def _table(workers: Sequence[Worker], most: int | None) -> Table:
    """Return a line for each task, those under way longest where there are more than `most`."""
    has_gpu = any(worker.sign.device_percent is not None for worker in workers)
    gpu_names = ("gpu", "gpu memory") if has_gpu else ()
    table = columns("worker", "cpu", "memory", *gpu_names, "task", "box z,y,x", "time", "done", left=LEFT)
    rows: list[tuple[Worker, WorkerTask | None]] = [(w, task) for w in workers for task in w.tasks or (None,)]
    longest = sorted(range(len(rows)), key=lambda n: -_seconds(rows[n][1]))[:most]
    before = None
    for worker, task in (rows[number] for number in sorted(longest)):
        own = _own_cells(worker, has_gpu) if worker.place != before else [""] * (3 + len(gpu_names))
        table.add_row(*own, *_task_cells(task))
        before = worker.place
    if len(rows) > len(longest):
        table.add_row(f"… {len(rows) - len(longest):,} more")
    return table


def _seconds(task: WorkerTask | None) -> float:
    return 0.0 if task is None else task.sign.seconds


def _own_cells(worker: Worker, has_gpu: bool) -> list[str]:
    """Return what a process takes; threads that do several tasks share it."""
    sign = worker.sign
    cells = [escape(f"{sign.host} {sign.pid}"), f"{sign.cpu_percent:.0f} %", size(sign.memory_bytes)]
    if not has_gpu:
        return cells
    if sign.device_percent is None:
        return [*cells, "", ""]
    return [*cells, f"{sign.device_percent:.0f} %", size(sign.device_used_bytes or 0)]


def _task_cells(task: WorkerTask | None) -> list[str]:
    if task is None:
        return ["waits", "", "", ""]
    sign = task.sign
    name = f"{task.work} {sign.stage} {sign.unit}".strip()
    return [escape(name), sign.box, duration(sign.seconds), f"{task.share:.0%}"]
