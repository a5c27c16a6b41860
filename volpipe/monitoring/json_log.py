"""The log as JSON lines, for clusters that collect logs: one object a line, with keys that stay.

Not here: the log of a run's folder (blockwise.logs), or what is logged.
"""

from __future__ import annotations

import io
import json
import logging
import re
import socket
from datetime import UTC, datetime
from typing import Any, TextIO

from volpipe.blockwise.logs import LogFile, speaker
from volpipe.blockwise.work import LoopObserver, Place, Works
from volpipe.syntax import traceback_of
from volpipe.volumes.storage.result_file import Kind

# What is appended to: lines as `JsonLines` makes them.
LOG_FILE = Kind(
    "volpipe --log-json",
    re.compile(rb'\{"time": "[^"]+", "level": "[A-Z]+", "logger": "volpipe[^"]*", "message": "'),
)
EXTRA = ("stage", "state", "exit_code", "seconds")  # of a record, as far as whoever logs gives them
LEVELS = (
    ("volpipe: warning", logging.WARNING), ("volpipe: interrupted", logging.WARNING), ("warning", logging.WARNING),
    ("volpipe: ", logging.ERROR), ("Traceback ", logging.ERROR),
)  # fmt: skip
PRINTED = logging.getLogger("volpipe.terminal")  # what would be printed there; no handler of its own


class WorkNames(LoopObserver):
    """The names of the works that are open, by their places."""

    def __init__(self) -> None:
        self._names: dict[Place, dict[str, str]] = {}

    def begin(self, place: Place, works: Works) -> None:
        """Take note of a work's names."""
        names = {"output": works[0].name}
        for work in works[1:]:
            names[work.kind] = work.name
        self._names[place] = names

    def end(self, place: Place, works: Works, result: object, error: BaseException | None) -> None:
        """Forget a work that ended; of the outermost the output stays known."""
        if place:
            self._names.pop(place, None)

    def of(self, place: Place) -> dict[str, str]:
        """Return the names of the work at `place`, or of the one that it belongs to."""
        while place and place not in self._names:
            place = place[:-1]
        return self._names.get(place, {})


class JsonLines(logging.Formatter):
    """Makes a line of JSON of each record; what it lacks is left out."""

    def __init__(self, names: WorkNames) -> None:
        super().__init__()
        self.names = names

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        fields: dict[str, Any] = {  # Any: JSON
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "host": socket.gethostname(),
            "process": record.process,
            **self.names.of(speaker()),
            **{key: getattr(record, key) for key in EXTRA if hasattr(record, key)},
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = traceback_of(record.exc_info[1])
        return json.dumps(fields, ensure_ascii=False, default=str)


class _Lines(logging.StreamHandler[TextIO]):
    """Writes to a stream that may be gone, which is no reason to fail."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave out a line that cannot be written."""


def handler_for(target: str, stream: TextIO, names: WorkNames) -> logging.Handler:
    """Return what writes JSON lines to a file, after those that it has, or for "-" to `stream`.

    Raises:
        OSError: the file cannot be written.
    """
    handler = _Lines(stream) if target == "-" else LogFile(target, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(JsonLines(names))
    return handler


class Printed(io.TextIOBase):
    """Stands in for standard error: what is printed becomes a record, a line or several that are printed at once."""

    def __init__(self, handler: logging.Handler, stream: TextIO) -> None:
        self._handler, self._stream, self._text = handler, stream, ""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the descriptor below, for what goes past Python."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Take text, which becomes a record as its line ends."""
        self._text += text
        if self._text.endswith("\n"):
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._text = self._text.rstrip(), ""
        if text:
            level = next((level for prefix, level in LEVELS if text.startswith(prefix)), logging.INFO)
            self._handler.handle(PRINTED.makeRecord(PRINTED.name, level, "", 0, text, (), None))


def as_line(text: str) -> bytes:
    """Return the line of a warning, for what must not go through a handler, such as that of a signal."""
    record = PRINTED.makeRecord(PRINTED.name, logging.WARNING, "", 0, text.strip(), (), None)
    return f"{JsonLines(WorkNames()).format(record)}\n".encode()
