"""Chaos: a run that is killed, frozen, starved and lied to, then given again to its end; for tests and scripts/chaos.

Each disturbance is a row: what was marked before it, what the net had begun, and what was computed once more after it.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from command import command_of, processes_in
from disturbance import Slow

from volpipe.apps.htex.processes import INTERCHANGE, WORKERS
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.inference.output import LEFT_BEHIND
from volpipe.reporting.page import REPORT

END_SECONDS = 240
GONE_SECONDS = 25  # orphans end after a heartbeat's threshold of 10 s
KILLS = ("worker", "manager", "driver", "interchange")
FROZEN = ("frozen worker", "frozen manager", "frozen driver")
SIGNALS = ("TERM", "INT")
LIES = {"read errors": "eio=0.05", "write errors": "enospc=0.05", "slow reads": "slow=0.2", "clock": "clock=90000"}
LIES["all lies"] = ",".join(LIES.values())
SCRATCH = ("tensors.*", "calibration", "ids.zarr", "pieces", "edges", "painted.npy", "names.npz")
DISKS = {"full disk": "size={}k", "no inodes": "nr_inodes={}", "read-only": "ro"}
COLUMNS = "{:>5} {:>5}  {:<16} {:>7} {:>5} {:>7} {:>7} {:>6} {:>6}"
HEAD = COLUMNS.format("round", "kill", "what", "after", "code", "marked", "flying", "again", "wrong")


@dataclass
class Row:
    """One disturbance.

    Attributes:
        what: was done.
        seconds: after which, since the last one.
        marked: blocks that the journal had.
        flying: blocks that the net had begun and that were not marked.
        again: of those, how many it was given once more afterwards.
        wrong: how many marked ones it was given once more, which may be none.
        code: how the session ended; None where it went on.
        session, begun: which one it was, and how many windows the net had been given in it.
    """

    what: str
    seconds: float
    marked: set[int] = field(repr=False)
    flying: set[int] = field(repr=False)
    session: int = 0
    begun: int = 0
    again: int = 0
    wrong: int = 0
    code: int | None = None

    def told(self, round_number: int, number: int) -> str:
        code = "-" if self.code is None else str(self.code)
        counts = (len(self.marked), len(self.flying), self.again, self.wrong)
        return COLUMNS.format(round_number, number, self.what, f"{self.seconds:.1f} s", code, *counts)


@dataclass
class Round:
    """One run, disturbed as `dice` has it, then given again until it is complete.

    Attributes:
        slow: the run.
        dice: decides what happens, and when.
        rows: what happened.
        troubles: what must not be.
    """

    slow: Slow
    dice: random.Random
    latest: float = 4.0
    rows: list[Row] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def disturb(self, what: str) -> None:
        """Do `what` to the run, which is begun, or begun once more, where there is none."""
        if self.slow.process is None or self.slow.process.poll() is not None:
            self.slow.begin()
            self.slow.wait_for_calls(1)
        seconds = self.dice.uniform(0, self.latest)
        self._wait(seconds)
        row = self._look(what, seconds)
        if what in FROZEN:
            self._freeze(what.split()[1])
        elif what in KILLS:
            self._signal(what, signal.SIGKILL)
        else:
            self.slow.interrupt(signal.Signals[f"SIG{what}"])
        if what in ("driver", *SIGNALS):
            self._end(row, (-signal.SIGKILL, 0) if what == "driver" else (INTERRUPTED, 1, 0))
        self.rows.append(row)

    def lie(self, what: str) -> None:
        """Run one session whose workers read, write or tell the time wrongly."""
        self._end_session()
        honest = self.slow.environment
        self.slow.environment = honest | {"FAULTS": LIES[what], "FAULTS_SEED": str(self.dice.randrange(10**6))}
        self._session(what)
        self.slow.environment = honest

    def starve(self, what: str, remount: Callable[[str], None]) -> None:
        """Run one session on a disk that has too little, or may not be written any more."""
        self._end_session()
        used = DISKS[what].format(self.dice.randint(180, 300) if what == "full disk" else self.dice.randint(45, 80))
        for run in self.slow.runs:  # it alone is larger than the disk is to be
            (run / REPORT).unlink(missing_ok=True)
        with contextlib.suppress(subprocess.CalledProcessError):  # it holds more already
            remount(used)
        self._session(what)
        remount("rw,size=50m,nr_inodes=100000")

    def finish(self, whole: str) -> None:
        """Give the command again, undisturbed, and look at what is left: bytes, files and processes."""
        self.slow.hurry()
        self._end_session()
        self.slow.begin()
        ended = self.slow.finish(END_SECONDS)
        if ended.code != 0:
            self.troubles.append(f"the last session ended with {ended.code}: {ended.err}")
        self._count()
        if ended.code == 0 and self.slow.made() != whole:
            self.troubles.append("the output differs from that of an undisturbed run")
        everything = (path for folder in (self.slow.out, *self.slow.runs) for path in folder.rglob("*"))
        left = [path.name for path in everything if LEFT_BEHIND.fullmatch(path.name)]
        left += [p.name for run in self.slow.runs for name in SCRATCH for p in run.glob(name)]
        if left:
            self.troubles.append(f"files are left: {left}")
        stop = time.monotonic() + GONE_SECONDS
        while (alive := processes_in(self.slow.folder)) and time.monotonic() < stop:
            time.sleep(0.2)
        if alive:
            self.troubles.append(f"processes are left: {[command_of(p)[:80] for p in alive]}")
        wrong = sum(row.wrong for row in self.rows)
        if wrong:
            self.troubles.append(f"{wrong} blocks were computed again although they were marked")

    def _session(self, what: str) -> None:
        started = time.monotonic()
        self.slow.begin()
        row = self._look(what, 0.0)
        self._end(row, (0, 1, 2))
        row.seconds = time.monotonic() - started
        self.rows.append(row)

    def _end_session(self) -> None:
        """Let a run that is still there go on to its own end."""
        if self.slow.process is not None and self.slow.process.poll() is None:
            self._wait(END_SECONDS)
        if self.slow.process is not None:
            code = self.slow.finish(END_SECONDS).code
            if code not in (0, 1, 2, INTERRUPTED, -signal.SIGKILL):
                self.troubles.append(f"a session ended with {code}")

    def _end(self, row: Row, codes: tuple[int, ...]) -> None:
        ended = self.slow.finish(END_SECONDS)
        now = self._look(row.what, row.seconds)  # a driver marks until it ends
        row.code, row.marked, row.flying, row.begun = ended.code, now.marked, now.flying, now.begun
        if ended.code not in codes or "Traceback" in ended.err.splitlines()[-1:]:
            self.troubles.append(f"{row.what}: ended with {ended.code}: {ended.err}")

    def _wait(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        assert self.slow.process is not None
        while self.slow.process.poll() is None and time.monotonic() < stop:
            time.sleep(0.02)

    def _look(self, what: str, seconds: float) -> Row:
        marked = self.slow.marked()  # first: a block that is marked meanwhile counts as flying
        calls = self.slow.calls(self.slow.num_sessions)
        return Row(what, seconds, marked, set(calls) - marked, self.slow.num_sessions, len(calls))

    def _count(self) -> None:
        """Tell for each disturbance what the net was given again after it."""
        for row in self.rows:
            later = {b for n in range(row.session + 1, self.slow.num_sessions + 1) for b in self.slow.calls(n)}
            if row.code is None:  # what a dead driver's workers still compute is lost, and no waste of another session
                later.update(self.slow.calls(row.session)[row.begun :])
            row.again, row.wrong = len(later & row.flying), len(later & row.marked)

    def _signal(self, whom: str, number: signal.Signals) -> list[psutil.Process]:
        chosen = self._processes(whom)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in chosen:
                process.send_signal(number)
        return chosen

    def _processes(self, whom: str) -> list[psutil.Process]:
        """Return the process to be disturbed: one of the workers at random, or the one that there is."""
        if whom == "worker":
            workers = self.slow.workers()
            return [self.dice.choice(workers)] if workers else []
        words = {"manager": WORKERS, "interchange": INTERCHANGE, "driver": "-m volpipe run"}[whom]
        found = [p for p in processes_in(self.slow.folder) if words in command_of(p)]
        pools = [p for p in found if "forkserver" not in command_of(p)]
        return pools if whom != "driver" else [p for p in pools if p.pid == self._driver_pid]

    @property
    def _driver_pid(self) -> int:
        assert self.slow.process is not None
        return self.slow.process.pid

    def _freeze(self, whom: str) -> None:
        stopped = self._signal(whom, signal.SIGSTOP)
        self._wait(self.dice.uniform(0.2, 3.0))
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
