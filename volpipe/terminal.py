"""Where the command line prints to: standard output, standard error, and files that the user names.

Not here: what is printed (show), or when (cli and its like).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from volpipe.errors import VolpipeError

PLAIN_LINE_SECONDS = 10.0
PLAIN_WIDTH = 160  # of what goes to a file or a pipe


def console(*, stderr: bool) -> Console:
    """Return what prints to a stream: as wide as its terminal, if it is one."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if known else PLAIN_WIDTH)


class _Shown(logging.Handler):
    """Shows what the measuring of a net says in the log: in one line on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._last = console, time.monotonic()
        self.status: Status | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(record.getMessage())
        if self._console.is_terminal:
            if self.status is None:
                self.status = self._console.status(text)
                self.status.start()
            self.status.update(text)
        elif time.monotonic() - self._last >= PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            self._console.print(text)


@contextmanager
def measuring_shown() -> Iterator[None]:
    """Show how far the measuring of a net is, which may take a minute, where one is measured meanwhile."""
    logger, handler = logging.getLogger("volpipe.reach"), _Shown(err)
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


def check_target(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written at the end, before there is anything to write.

    Raises:
        VolpipeError: there is no folder for it, or it is one.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = (
            "it is a folder; name a file in it" if path.is_dir() else f"there is no folder {path.parent}; make it first"
        )
        raise VolpipeError(f"{option} {path}: {why}")


out, err = console(stderr=False), console(stderr=True)
