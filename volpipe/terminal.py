"""Where the command line prints to: standard output, standard error, and files that the user names.

Not here: what is printed (show), or when (cli and its like).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from volpipe.errors import VolpipeError

PLAIN_WIDTH = 160  # of what goes to a file or a pipe


def console(*, stderr: bool) -> Console:
    """Return what prints to a stream: as wide as its terminal, if it is one."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if known else PLAIN_WIDTH)


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


class Notices(logging.Handler):
    """Prints what is logged with `volpipe.errors.NOTICE`; all else is for files."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "notice", False):
            err.print(f"volpipe: {record.getMessage()}", markup=False)


out, err = console(stderr=False), console(stderr=True)
