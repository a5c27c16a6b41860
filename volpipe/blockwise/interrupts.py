"""Ctrl-C, TERM and a closed terminal: the first lets a run finish what is under way, the second ends it at once.

Not here: the handlers, which the command line installs, or what is printed. Signals belong to the process, and so does
INTERRUPTS; where nobody installed it, as in a notebook, Python's own Ctrl-C ends a run at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 4  # exit code of a command that was asked to stop: run the same command again to continue
GRACE_SECONDS = 20.0  # less than the 30 s that Slurm and Kubernetes leave between TERM and KILL
SAME_SECONDS = 0.5  # a terminal and a wrapper of the command may both send what was one Ctrl-C


class Interrupts:
    """What signals ask of a run."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: another command begins."""
        self.asked_at: float | None = None
        self._is_patient = False
        self._is_closing = False

    def ask(self) -> bool:
        """Take note of a signal, and return whether what is under way may finish.

        Raises:
            KeyboardInterrupt: it may not: this is the second one, or nothing is under way that could finish.
        """
        now = time.monotonic()
        if self._is_closing or (self.asked_at is not None and now - self.asked_at < SAME_SECONDS):
            return False
        if self._is_patient and self.asked_at is None:
            self.asked_at = now
            return True
        self._is_closing = True
        raise KeyboardInterrupt

    @property
    def is_asked(self) -> bool:
        """Whether nothing new should start."""
        return self.asked_at is not None

    @property
    def is_overdue(self) -> bool:
        """Whether what is under way has had its time."""
        return self.asked_at is not None and time.monotonic() - self.asked_at > GRACE_SECONDS

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Let the first signal pass meanwhile; `check` raises what it asked for."""
        self._is_patient = True
        try:
            yield
        finally:
            self._is_patient = False

    def check(self) -> None:
        """Raise what a signal asked for while there was patience.

        Raises:
            KeyboardInterrupt: somebody asked to stop.
        """
        if self.is_asked:
            self._is_closing = True
            raise KeyboardInterrupt

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Let no signal keep jobs from being cancelled."""
        before, self._is_closing = self._is_closing, True
        try:
            yield
        finally:
            self._is_closing = before


INTERRUPTS = Interrupts()
