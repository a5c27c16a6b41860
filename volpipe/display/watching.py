"""Work that is watched from another terminal: a table drawn again and again, or a plain line now and then.

Not here: how far the work is (workflow.status), or what is printed of it once (reports).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from volpipe.display.batches import Now, live_table
from volpipe.display.console import PLAIN_LINE_SECONDS, columns, is_unread
from volpipe.display.plain import plain_console
from volpipe.display.reports import waiting_line
from volpipe.units import count, duration, size

if TYPE_CHECKING:
    from volpipe.blockwise.notes import StageNote
    from volpipe.stages.status import Status
    from volpipe.training.logs import TrainingPace

LOOK_SECONDS = 2.0  # between two looks, as often as a driver notes how far it is
MOST_OF_TIME = 4  # between two looks at least as many times what a look takes: a slow disk is not asked all the time
LONGEST_PAUSE = 10.0  # after a look that took long, as the first one at a long journal
SIGN_SECONDS = 6.0  # within which a driver shows a sign of life, whatever its clock says
BAR_WIDTH = 16
OTHER_LINES = 7  # of a terminal, beside those of a table: its heading and its caption, and two sentences


def follow(
    look: Callable[[], Status], console: Console, seconds: float | None, show: Callable[[Status], None] | None = None
) -> Status:
    """Show what `look` returns until the work has ended, or nobody reads it any more; return what it was then.

    Args:
        console: a table is drawn on a terminal; elsewhere a line is printed now and then.
        seconds: between two looks; without a terminal between two lines.
        show: called at each look instead.
    """
    if show is not None:
        return _each(look, seconds or LOOK_SECONDS, show)
    if not console.is_terminal:
        return _each(look, min(seconds or LOOK_SECONDS, LOOK_SECONDS), _Lines(console, seconds or PLAIN_LINE_SECONDS))
    with drawing(console) as draw:
        draw(Text("reading what its journals say …"))
        return _each(look, seconds or LOOK_SECONDS, lambda status: draw(view(status, console.height)))


@contextmanager
def drawing(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Give a function that draws on a terminal in the place of its last drawing, which is gone at the end."""
    wrapping = plain_console(file=console.file)
    with Live(console=wrapping, auto_refresh=False, transient=True) as live:
        yield lambda drawn: live.update(drawn, refresh=True)


def _each(look: Callable[[], Status], seconds: float, show: Callable[[Status], None]) -> Status:
    first = time.monotonic()
    while True:
        began = time.monotonic()
        status = look()
        now = time.monotonic()
        may_be_alive = status.state == "unseen" and now - first < SIGN_SECONDS
        if status.state != "running" and not may_be_alive:
            return status
        show(status)
        if is_unread():
            return status
        time.sleep(max(seconds, min(MOST_OF_TIME * (now - began), LONGEST_PAUSE)))


class _Lines:
    """Prints a line of a status, not more often than every so many seconds."""

    def __init__(self, console: Console, seconds: float) -> None:
        self._console, self._seconds, self._last = console, seconds, -seconds

    def __call__(self, status: Status) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._console.print(f"{time.strftime('%F %T')} {plain_line(status)}")


def plain_line(status: Status) -> str:
    """Return how far the work is, as one line."""
    parts = [_stage_words(name, note) for name, note in _stages(status) if note.done or note.in_flight or note.failed]
    if status.pace is not None:
        parts += [f"loss {status.pace.loss:.4g}", _speed(status.pace)]
    left = "" if status.seconds_left is None else f"; about {duration(status.seconds_left)} left"
    if status.driver.waits:
        left = f"; {waiting_line(status.driver)}"
    return f"{status.output}: {', '.join(parts) or 'starting'}{left}"


def _stage_words(name: str, note: StageNote) -> str:
    extra = [f"{note.in_flight:,} in flight"] * bool(note.in_flight) + [f"{note.failed:,} failed"] * bool(note.failed)
    return f"{name} {note.done:,}/{note.all:,}" + (f" ({', '.join(extra)})" if extra else "")


def _stages(status: Status) -> Iterator[tuple[str, StageNote]]:
    """Yield the stages of a work, and of works that it consists of, by name."""
    yield from status.stages.items()
    for part in status.parts:
        yield from ((f"{part.name} {name}", note) for name, note in part.stages.items())


def view(status: Status, height: int) -> RenderableType:
    """Return how far the work is, as a terminal of so many lines shows it."""
    most = max(1, height - OTHER_LINES)
    table = {"units": _stage_table, "steps": _training_table, "datasets": _dataset_table}[status.view](status, most)
    last = waiting_line(status.driver) if status.driver.waits else f"{status.driver.name} is at work"
    return Group(Text(headline(status)), table, Text(last))


def headline(status: Status) -> str:
    """Return what is made, how much of it is done, and the time that is left."""
    note, left = status.driver.note, status.seconds_left
    parts = [f"{note.part:.0%} done"] if note is not None and note.part is not None else []
    if status.datasets:
        parts = [f"{status.stages['datasets'].done:,} of {count(len(status.datasets), 'dataset')} done"]
    parts += [f"about {duration(left)} left"] if left is not None else []
    return f"{status.output}: {', '.join(parts) or 'at work'}"


def _dataset_table(status: Status, most: int) -> Table:
    """Return a line for each dataset of a batch."""
    return live_table(status.datasets, {n: _now(part) for n, part in status.at_work.items()}, most)


def _now(status: Status) -> Now:
    """Return how far a dataset of a batch is, since its driver began."""
    now = Now(time.monotonic() - max(0.0, time.time() - status.driver.began))
    open_stages = [(name, note) for name, note in _stages(status) if note.all and note.done < note.all]
    busy = [f"{name} {note.done / note.all:.0%}" for name, note in open_stages if note.done or note.in_flight]
    if len(busy) == 1 and status.driver.note is not None and status.driver.note.part is not None:
        busy = [f"{busy[0].rpartition(' ')[0]} {status.driver.note.part:.0%}"]  # with tasks that are under way
    left = [] if status.seconds_left is None else [f"{duration(status.seconds_left)} left"]
    now.stages = {text: text for text in (busy or ["starting"]) + left}
    return now


def _stage_table(status: Status, most: int) -> Table:
    """Return a table with a line for each stage, of several works with the stages of each."""
    table = columns("stage", "", "done", "in flight", "failed", left=("stage", ""), caption=_took(status))
    rows = list(_stages(status)) + [(part.name, None) for part in status.parts if not part.stages]
    for name, note in rows[:most]:
        if note is None:
            table.add_row(name, "", "not begun", "", "")
            continue
        numbers = (f"{number:,}" if number else "" for number in (note.in_flight, note.failed))
        table.add_row(name, _bar(note), f"{note.done:,} / {note.all:,}", *numbers)
    return table


def _bar(note: StageNote, width: int = BAR_WIDTH) -> ProgressBar:
    return ProgressBar(total=max(1, note.all), completed=note.done, width=width)


def _took(status: Status) -> str | None:
    """Return what the tasks took so far, None before the first has come back."""
    totals = [took for part in (status, *status.parts) for took in part.totals.values()]
    if not totals:
        return None
    return (
        f"{count(sum(took.tasks for took in totals), 'task')} in {duration(sum(took.seconds for took in totals))} of "
        f"workers; read {size(sum(took.read_bytes for took in totals))}, "
        f"wrote {size(sum(took.written_bytes for took in totals))}, "
        f"peak memory {size(max(took.peak_bytes for took in totals))}"
    )


def _training_table(status: Status, most: int) -> Table:
    """Return a line for each training; of many those that are under way first."""
    names = ("training", "", "steps", "loss", "speed", "left", "state")
    table = columns(*names, left=("training", "", "state"))
    for column in table.columns[2:]:
        column.no_wrap = True
    parts = sorted(status.parts or (status,), key=lambda part: part.state != "running")
    for part in sorted(parts[:most], key=lambda part: part.name):
        note, pace, left = part.stages["train"], part.pace, part.seconds_left
        table.add_row(
            part.name or Path(part.output).name,
            _bar(note, BAR_WIDTH // 2),
            f"{note.done:,} / {note.all:,}",
            "" if pace is None else f"{pace.loss:.4g}",
            "" if pace is None or part.state != "running" else _speed(pace),
            duration(left),
            part.state,
        )
    if len(parts) > most:
        table.add_row(f"… and {len(parts) - most:,} more")
    return table


def _speed(pace: TrainingPace) -> str:
    """Return steps per second, or the seconds that a step takes where those are many."""
    if not pace.speed:
        return ""
    return f"{pace.speed:.1f} steps/s" if pace.speed >= 1 else f"{1 / pace.speed:.1f} s/step"
