"""Where the command line prints to: standard output, and standard error.

Not here: what is printed (show), or when (cli and its like).
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

PLAIN_WIDTH = 160  # of what goes to a file or a pipe


def console(*, stderr: bool) -> Console:
    """Return what prints to a stream: as wide as its terminal, if it is one."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if known else PLAIN_WIDTH)


out, err = console(stderr=False), console(stderr=True)
