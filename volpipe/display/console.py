"""Where the command line prints to: standard output, standard error, and files that the user names; and bars.

Not here: what is printed (plans, reports and their like), or when (cli, api).
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID
from rich.status import Status
from rich.table import Table
from rich.text import Text

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.blockwise.pace import Pace, Reading
from volpipe.display.cell import Cell
from volpipe.display.plain import plain_column, plain_console, plain_status
from volpipe.errors import VolpipeError
from volpipe.reporting.page import REPORT
from volpipe.units import plural
from volpipe.volumes.storage.paths import check_links, file_above
from volpipe.volumes.storage.result_file import Kind, ResultFile

DONE, INCOMPLETE, REFUSED, AT_WORK = 0, 1, 2, 3  # exit codes beside INTERRUPTED; AT_WORK is of `volpipe status`
PLAIN_LINE_SECONDS = 10.0
PLAIN_WIDTH = 160  # of what goes to a file or a pipe
PLAIN_LETTERS = "volpipe-plain-letters"  # name of the way to encode letters that a stream has not
IN_ASCII = {
    "×": "x", "·": "*", "²": "^2", "³": "^3", "µ": "u", "≈": "~", "≤": "<=", "≠": "!=", "→": "->", "…": "...",
    "►": ">", "✓": "ok", "─": "-", "━": "-", "╸": "-", "╺": " ", "–": "-", "’": "'", "±": "+-",
}  # fmt: skip


def console(*, stderr: bool) -> Console:
    """Return the console of a standard stream: as wide as its terminal, if it is one."""
    stream: TextIO | None = sys.stderr if stderr else sys.stdout
    known = (stream is not None and stream.isatty()) or "COLUMNS" in os.environ
    return plain_console(stderr=stderr, soft_wrap=True, width=None if known else PLAIN_WIDTH)


class LastingStream:
    """A standard stream of this process that never fails: what cannot be written is dropped.

    Letters that its encoding lacks are written as others. It is None in Python where it was closed at the start.

    Attributes:
        encoding: of which any letter may be written; click would go around a stream of ASCII.
        is_unread: whether its reader has gone, as `head` does after its lines.
        fault: why something could not be written, although somebody might read it.
    """

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115, PTH123
        self._is_closed = stream is None
        self.is_unread, self.fault = False, ""

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, as long as somebody reads."""
        with self._surviving(text):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, PLAIN_LETTERS).decode(encoding))
        return len(text)

    def write_as_stored(self, text: str) -> None:
        """Write `text` by the bytes that names have on the disk, whatever letters the stream takes."""
        with self._surviving(text):
            self._stream.flush()
            self._stream.buffer.write(os.fsencode(text))
            self._stream.flush()

    def flush(self) -> None:
        """Flush the stream, as long as somebody reads."""
        with self._surviving():
            self._stream.flush()

    def close(self) -> None:
        """Write what is left; what cannot be written goes nowhere, else Python would fail by it as it ends."""
        self.flush()
        if self._is_closed:
            self._stream.close()
        elif self.fault:
            self._drop()
            self._stream.flush()

    @contextmanager
    def _surviving(self, text: str = "") -> Iterator[None]:
        """Note why `text` cannot be written meanwhile."""
        if self._is_closed and text:
            self.fault = "it is closed"
        try:
            yield
        except BrokenPipeError:
            self.is_unread = True
            self._drop()
        except OSError as error:  # a full disk, a terminal that is gone
            self.fault = error.strerror or str(error)

    def _drop(self) -> None:
        """Drop all that is still buffered, and all that will be written."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def _as_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Return letters of ASCII for those that an encoding lacks, as `codecs` asks for them."""
    assert isinstance(error, UnicodeEncodeError)
    letters = error.object[error.start : error.end]
    plain = (IN_ASCII.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in letters)
    return "".join(plain), error.end


codecs.register_error(PLAIN_LETTERS, _as_plain_letters)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Let a command work on, and end with its own exit code, where its words cannot be printed.

    Where they are all that it was asked for (`result_is_in_files` was not called), it ends as one that is not complete.
    """
    before = sys.stdout, sys.stderr
    stdout, stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, stdout), cast(TextIO, stderr)
    _result.is_in_files = False
    try:
        yield
    except SystemExit as end:
        stdout.flush()
        if stdout.fault and not _result.is_in_files:
            err.print(f"volpipe: standard output cannot be written: {stdout.fault}")
            raise SystemExit(end.code or INCOMPLETE) from None
        raise
    finally:
        for stream in (stdout, stderr):
            stream.close()
        sys.stdout, sys.stderr = before


@dataclass
class _Result:
    """Where the result of the command of this process is."""

    is_in_files: bool = False


_result = _Result()


def result_is_in_files() -> None:
    """Note that the result of this command is in files, so that it does not fail where its words cannot be printed."""
    _result.is_in_files = True


def print_as_stored(text: str) -> None:
    """Print what another program will read: names by the bytes that they have on the disk."""
    stream = sys.stdout
    assert isinstance(stream, LastingStream)
    stream.write_as_stored(text)


def is_unread() -> bool:
    """Return whether nobody reads standard output any more."""
    return bool(getattr(sys.stdout, "is_unread", False))


@contextmanager
def interruptible(advice: str = "run the same command again to continue") -> Iterator[None]:
    """Turn Ctrl-C, TERM and a closed terminal into a sentence with `advice`; journals are whole at any moment."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"volpipe: interrupted; {advice}")
        raise SystemExit(INTERRUPTED) from None


def rendered(*parts: RenderableType) -> str:
    """Return tables as plain text, for the log."""
    text = io.StringIO()
    console = plain_console(width=PLAIN_WIDTH, file=text, soft_wrap=True, force_jupyter=False)  # else below a cell
    for part in parts:
        console.print(part)
    return text.getvalue()


class _Shown(logging.Handler):
    """Shows the log of the measuring of a net: in one line on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._last = console, time.monotonic()
        self.status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self._console.is_terminal:
            if self.status is None:
                self.status = plain_status(self._console, text)
                self.status.start()
            self.status.update(Text(text))
        elif time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            self._console.print(text)


@contextmanager
def measuring_shown(module: str = "volpipe.nets.receptive_field") -> Iterator[None]:
    """Show how far the measuring of a net by `module` is, which may take minutes, where one is measured meanwhile."""
    logger, handler = logging.getLogger(module), _Shown(err)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        if handler.status is not None:
            handler.status.stop()


def tell_report(folder: Path) -> None:
    """Print where the report of the work in `folder` is, if one could be written."""
    if (folder / REPORT).is_file():
        out.print(f"report: {folder / REPORT}")


def result_file(option: str, file: str | Path | None, kind: Kind, *, parents: bool = False) -> ResultFile | None:
    """Return the file of `kind` that `option` names, checked before there is anything to write; None where it does not.

    With `parents` its folder is made.

    Raises:
        VolpipeError: there is no folder for it, or what is there is nothing that this option wrote.
    """
    if file is None:
        return None
    result = ResultFile.named(option, file, kind)
    check_folder(str(result), result.path, parents=parents)
    if parents:
        result.path.parent.mkdir(parents=True, exist_ok=True)
    result.check()
    return result


def check_folder(what: str, place: object, *, parents: bool) -> None:
    """Refuse an output at `place` on a disk whose folder is not there, which is a typo more often than not.

    `what` is the option and its value; with `parents` folders are to be made. Buckets have no folders.

    Raises:
        VolpipeError: there is no folder for it, or a file in the place of one.
    """
    if not isinstance(place, Path):
        return
    if (file := file_above(place)) is not None:
        raise VolpipeError(f"{what}: {file} is a file, and no folder; choose another place")
    if not parents and not place.absolute().parent.exists():
        check_links(place.absolute().parent)
        raise VolpipeError(f"{what}: there is no folder {place.parent}; make it first, or give --parents")


@dataclass
class _Row:
    """A bar, what it began with and when, and its own pace."""

    task: TaskID
    first: float
    began: float
    pace: Pace = field(default_factory=Pace)

    def seconds_left(self, done: float, whole: float) -> float | None:
        """Return the time left by how fast the bar moved so far."""
        reading = Reading(done - self.first, whole - done, done - self.first, decides=True)
        return self.pace.seconds_left(time.monotonic(), self.began, {"": reading})


@dataclass
class Bars:
    """Bars, one below the other: name, bar, percent, done of all, how fast, time left.

    Attributes:
        progress: draws them by itself on a terminal.
        draw: called at every change with what returns them.
    """

    progress: Progress
    draw: Callable[[Callable[[], RenderableType]], None] = lambda make: None
    _rows: dict[str, _Row] = field(default_factory=dict)

    def show(self, name: str, done: float, whole: float, noun: str) -> None:
        """Move the bar `name` to `done` of `whole`, so many of a `noun`; the time left is that of the bar itself."""
        row = self._bar_of(name, done, whole)
        self.show_with(name, done, whole, noun, seconds_left=row.seconds_left(done, whole))

    def show_with(
        self, name: str, done: float, whole: float, noun: str, *, seconds_left: float | None, words: str = ""
    ) -> None:
        """Move a bar whose time left is known from elsewhere, with `words` beside its count; None shows no time."""
        row = self._bar_of(name, done, whole)
        speed = (done - row.first) / max(1e-3, time.monotonic() - row.began)
        self._move(
            row, done, whole,
            count=f"{int(done):,} of {whole:,.0f} {noun if whole == 1 else plural(noun)}{words and f', {words}'}",
            speed=_per_time(speed, noun) if done < whole else "",
            left=f"{_clock(seconds_left)} left" if seconds_left is not None and done < whole else "",
        )  # fmt: skip

    def show_seconds(self, name: str, seconds: float, most: float) -> None:
        """Move a bar of what takes `most` seconds, and less where it is over sooner."""
        seconds = min(seconds, most)
        self._move(self._bar_of(name, 0, most), seconds, most, count=f"{seconds:.0f} of {most:.0f} s")

    def _move(self, row: _Row, done: float, whole: float, count: str, speed: str = "", left: str = "") -> None:
        self.progress.update(row.task, completed=done, total=whole, count=count, speed=speed, left=left)
        self.draw(self.progress.get_renderable)

    def _bar_of(self, name: str, done: float, whole: float) -> _Row:
        if name not in self._rows:
            task = self.progress.add_task(name, total=whole, count="", speed="", left="")
            self._rows[name] = _Row(task, done, time.monotonic())
        return self._rows[name]


def _per_time(speed: float, noun: str) -> str:
    """Return how many of a noun go by in a second, or in a minute or an hour where those are few."""
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if speed * seconds >= 1 or unit == "h":
            return f"{speed * seconds:,.1f} {plural(noun)}/{unit}" if speed > 0 else ""
    raise AssertionError("unreachable")


def _clock(seconds: float) -> str:
    """Return a time left, no more precisely than it is known."""
    if seconds < 60:
        return f"{max(1.0, seconds):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:,.0f} h"


@contextmanager
def bars(cell: Cell | None = None) -> Iterator[Bars]:
    """Give bars: in `cell`, where they stay; or on standard error, if that is a terminal, and gone at the end."""
    columns: tuple[ProgressColumn, ...] = (
        plain_column("{task.description}"),
        BarColumn(),
        plain_column("{task.percentage:>3.0f} %"),
        *(plain_column(f"{{task.fields[{name}]}}") for name in ("count", "speed", "left")),
    )
    if cell is None:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
            yield Bars(progress)
        return
    try:
        yield Bars(Progress(*columns, disable=True), cell.draw)
    finally:
        cell.close()


class Notices(logging.Handler):
    """Prints what is logged with `volpipe.errors.NOTICE`; all else is for files."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "notice", False):
            err.print(f"volpipe: {record.getMessage()}")


out, err = console(stderr=False), console(stderr=True)


def columns(*names: str, left: Collection[str] | None = None, fold: bool = False, caption: str | None = None) -> Table:
    """Return an empty table without lines: columns `left`, by default the first, are of text, the others of numbers."""
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    texts = names[:1] if left is None else left
    for name in names:
        table.add_column(name, justify="left" if name in texts else "right", overflow="fold" if fold else "ellipsis")
    return table
