"""The driver of a run: what it says of itself in its note, and who it is, and whether it is alive, as others see it.

Not here: notes (blockwise.notes), or what is done for good (journal). Whether a driver is alive the folder's lock says,
as far as this machine sees it.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from volpipe.blockwise.notes import DRIVER, Note, StageNote, keeping_notes, read_note, write_note
from volpipe.volumes.storage.lock import find_holder

SECONDS = 2.0  # between two writings, at least
NOTIFY, ONLY = "--notify", "--only"
FRESH_SECONDS = 60.0  # a sign of life that is older says nothing
HOLDER = re.compile(r"process (\d+) on (\S+) since ([\d-]+ [\d:]+)(?: \((\d+)\))?")

State = Literal["running", "stopped", "interrupted", "unseen", "ended"]
"""running: a driver holds the folder · stopped: the last one met an error · interrupted: it was stopped, or killed ·
unseen: it was on another machine, and this one cannot know · ended: it came to its end, or there was none."""


class _Command:
    """The command of this process, as a shell takes it to go on, and when it was given, seconds since 1970.

    The line is "" where there is none, as in a notebook. It is stored and shown: whom to notify is left out, as an
    address that may be posted to is a secret.
    """

    line = ""
    began = 0.0

    def give(self, arguments: Sequence[str], began: float | None) -> None:
        """Take note of the command that begins."""
        pairs = zip(("", *arguments), arguments, strict=False)
        kept = [now for before, now in pairs if before != NOTIFY and now.partition("=")[0] not in ("--fresh", NOTIFY)]
        self.line = shlex.join(["volpipe", *kept])
        self.began = time.time() if began is None else began

    @property
    def completing(self) -> str:
        """The line without --only: it completes what this process leaves incomplete."""
        words = shlex.split(self.line)
        pairs = zip(("", *words), words, strict=False)
        return shlex.join(now for before, now in pairs if before != ONLY and now.partition("=")[0] != ONLY)


COMMAND = _Command()


@dataclass
class Presence:
    """A driver's note, kept up to date."""

    path: Path
    note: Note
    _last: float = 0.0

    def tell(
        self, stages: Mapping[str, StageNote], part: float | None = None, seconds_left: float | None = None
    ) -> None:
        """Take note of how far the stages are, and write that now and then."""
        was_waiting = bool(self.note.waits)
        self.note = replace(
            self.note, stages={**self.note.stages, **stages}, part=part, seconds_left=seconds_left, waits=0.0
        )
        if was_waiting or time.monotonic() - self._last >= SECONDS:
            self._write_note()

    def wait(self, until: float) -> None:
        """Say now and then that nothing is done until then, seconds since 1970."""
        is_news, self.note = not self.note.waits, replace(self.note, waits=until, seconds_left=None)
        if is_news or time.monotonic() - self._last >= SECONDS:
            self._write_note()

    def leave(self, ended: str) -> None:
        """Say how the work ended."""
        self.note = replace(self.note, ended=ended, seconds_left=None, waits=0.0)
        self._write_note()

    def _write_note(self) -> None:
        self._last = time.monotonic()
        self.note = replace(self.note, at=time.time())
        write_note(self.path, self.note)


@contextmanager
def present(folder: Path, session: str) -> Iterator[Presence]:
    """Give the presence of the driver that holds `folder` as `session`; at the end it says how that went.

    Notes of workers are kept meanwhile.
    """
    note = Note(session, socket.gethostname(), os.getpid(), command=COMMAND.line, folder=str(Path.cwd()))
    presence = Presence(folder / DRIVER, note)
    presence.tell({})
    try:
        with keeping_notes(folder):
            yield presence
    except KeyboardInterrupt:
        presence.leave("interrupted")
        raise
    except BaseException:
        presence.leave("stopped")
        raise
    presence.leave("ended")


@dataclass(frozen=True)
class Driver:
    """The driver of a run, as it is seen from here.

    Attributes:
        process, host, since: which it is or was; "" where nobody says.
        note: what it said last, None where it said nothing.
        silent_seconds: since its last sign of life, None where there was none.
        began: when it began, seconds since 1970; 0 where nobody says.
        session: its whole name, as its workers know it; "" where there was none.
    """

    state: State
    process: str = ""
    host: str = ""
    since: str = ""
    note: Note | None = None
    silent_seconds: float | None = None
    began: float = 0.0
    session: str = ""

    @property
    def is_at_work(self) -> bool:
        """Whether it works, or worked a moment ago on a machine that cannot be asked."""
        fresh = self.silent_seconds is not None and self.silent_seconds < FRESH_SECONDS
        return self.state == "running" or (self.state == "unseen" and fresh)

    @property
    def waits(self) -> float:
        """Until when a driver waits for its input to change, seconds since 1970; 0 where it does not, or is away."""
        return self.note.waits if self.note is not None and self.is_at_work else 0.0

    @property
    def name(self) -> str:
        """Which process, where, since when."""
        return f"process {self.process} on {self.host} since {self.since}" if self.process else "another process"


def find_driver(folder: Path, journal: Path) -> Driver:
    """Return the driver that works in `folder`, or the last one that did, from its lock, its note and its `journal`."""
    holder = find_holder(folder)
    if holder is None:
        return Driver("ended")
    note = read_note(folder / DRIVER)
    if note is not None and note.session != holder.name:
        note = None
    words = HOLDER.match(holder.name)
    process, host, since, began = words.groups() if words else ("", "", "", None)
    state, silence = _driver_state(holder.is_held, host, note), _silence(note, journal)
    return Driver(state, process, host, since, note, silence, int(began or 0) / 1e9, holder.name)


def _driver_state(is_held: bool | None, host: str, note: Note | None) -> State:
    if is_held:
        return "running"
    if note is not None and note.ended in ("ended", "stopped", "interrupted"):
        states: dict[str, State] = {"ended": "ended", "stopped": "stopped", "interrupted": "interrupted"}
        return states[note.ended]
    if is_held is None or (host and host != socket.gethostname()):
        return "unseen"  # not every shared file system tells machines of each other's locks
    return "interrupted"


def _silence(note: Note | None, journal: Path) -> float | None:
    """Return the seconds since the last sign of life; clocks of two machines may differ somewhat."""
    signs = [note.at] if note is not None else []
    with suppress(OSError):
        signs.append(journal.stat().st_mtime)
    return max(0.0, time.time() - max(signs)) if signs else None


@dataclass(frozen=True)
class _Sighting:
    """What was seen of a process, since when by our own clock, and whether it was something else before."""

    content: object
    since: float
    is_moving: bool = False


@dataclass
class Sightings:
    """Signs of life of processes, whose clocks may differ: what changes is a sign, whatever its time."""

    _latest: dict[Hashable, _Sighting] = field(default_factory=dict)

    def silence(self, process: Hashable, content: object, age: float) -> float:
        """Return the seconds since `process` came to have such `content`, which by its own time is so old."""
        now = time.monotonic()
        seen = self._latest.get(process, _Sighting(content, now))
        if seen.content != content:
            seen = _Sighting(content, now, is_moving=True)
        self._latest[process] = seen
        return now - seen.since if seen.is_moving else max(now - seen.since, age)
