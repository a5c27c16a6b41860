"""Failures of tasks, from their tracebacks: the last line, the sentence for the user, what failures have in common.

Not here: what follows from them (loop).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from volpipe.geometry.grid import Box

OURS = r"^volpipe\.errors\.\w+: "  # before the sentence of an error that we raise, at the end of a traceback


@dataclass(frozen=True)
class Missing:
    """A unit that could not be done: which stage, which box of the output (z, y, x), and why."""

    stage: str
    unit: int
    box: Box
    reason: str


def last_line(reason: str) -> str:
    """Return the last line of a traceback, with the error's type; "" for none."""
    return reason.splitlines()[-1] if reason else ""


def message_of(reason: str) -> str:
    """Return the last line of a traceback, without the type of an error that volpipe raises: its sentence says all."""
    return re.sub(OURS, "", last_line(reason))


def is_user_error(reason: str) -> bool:
    """Return whether a traceback ends with an error that volpipe raises, whose message is written for the user."""
    return message_of(reason) != last_line(reason)


def failure_kind(reason: str) -> str:
    """Return the key by which failures are alike: the last line of the traceback, without its numbers."""
    return re.sub(r"\d+", "#", last_line(reason))
