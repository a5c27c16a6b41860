"""Where the command line prints to: standard output, standard error, and files that the user names.

Not here: what is printed (show), or when (cli and its like).
"""

from __future__ import annotations

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


def check_target(option: str, path: Path | None, *, parents: bool) -> None:
    """Refuse a file that cannot be written at the end, before there is anything to write; `parents` makes its folder.

    Raises:
        VolpipeError: there is no folder for it, or it is one.
    """
    if path is None:
        return
    if path.is_dir():
        raise VolpipeError(f"{option} {path}: it is a folder; name a file in it")
    check_folder(f"{option} {path}", path, parents=parents)
    path.parent.mkdir(parents=True, exist_ok=True)


def check_folder(what: str, place: object, *, parents: bool) -> None:
    """Refuse an output at `place` on a disk whose folder is not there, which is a typo more often than not.

    Args:
        what: the option and its value.
        place: a path, or a place in a bucket, which has no folders.
        parents: whether folders are to be made.

    Raises:
        VolpipeError: there is no folder for it.
    """
    if isinstance(place, Path) and not parents and not place.absolute().parent.exists():
        raise VolpipeError(f"{what}: there is no folder {place.parent}; make it first, or give --parents")


out, err = console(stderr=False), console(stderr=True)
