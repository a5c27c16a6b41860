"""Work that goes on with its volume: complete, it looks again and again for what has grown or changed meanwhile.

Not here: how that is found and computed (runs.update, runs.growth), or the printing (cli). Each look is a whole session
of an update, so that a kill at any point leaves what any update leaves. Between two looks there are no workers::

    look ─ run ─┐ wait ┌ look ─ nothing ─┐ wait ┌ look ─ update ─┐ wait …
        workers                                         workers
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from volpipe.blockwise.work import Steps, Until
from volpipe.errors import PlanError, VolpipeError
from volpipe.inference.plan import Plan
from volpipe.reporting.page import Page
from volpipe.resolve import describe_error
from volpipe.runs.held_work import HeldWork
from volpipe.runs.options import RunOptions
from volpipe.runs.presence import Presence
from volpipe.runs.stage_work import SILENT, Listener
from volpipe.units import duration
from volpipe.volumes.storage.lock import check_holder
from volpipe.workflow.driver import Report, RunWork
from volpipe.workflow.prepare import prepare_again

log = logging.getLogger(__name__)

STOP = "stop"  # a file in the run's folder: one look more, and the work ends
MOST_ALIKE, MOST_FAILED = 10, 100  # looks, one after the other, that fail by the same sentence, and by any


@dataclass(frozen=True)
class Look:
    """One look at a volume that is followed, and what came of it.

    Attributes:
        number: the first has 0.
        report: how the work ended that was found; None where an error ended it.
        error: that which did.
    """

    number: int
    report: Report | None
    error: VolpipeError | None = None

    @property
    def reason(self) -> str:
        """Why the output is not what the volume was when this look began; "" if it is."""
        if self.report is None:
            return str(self.error)
        return self.report.open_reason


class _Looks:
    """Looks at a volume, one after the other; each is the work of the first, or an update of it.

    They end by a signal, as any work does, or after the look that follows on a file STOP in the folder.

    Args:
        first: the work at the beginning, which may go on with what was begun.
        again: returns its update, for the volume as it is at that moment; it is given the work of the look before.
        seconds: from the end of a look to the next one.
        on_look: called after each look.

    Attributes:
        work: of all looks together.
    """

    def __init__(
        self,
        first: RunWork,
        again: Callable[[RunWork], RunWork],
        seconds: float,
        on_look: Callable[[Look], None],
    ) -> None:
        self.latest, self.again, self.seconds, self.on_look = first, again, seconds, on_look
        self.stop = first.folder.path / STOP
        self.work = HeldWork[Report](
            "follow", first.folder, claim=first.claim, held_steps=self._looks_steps, page=self._page, name=first.name
        )
        self._num_failed, self._num_alike, self._sentence = 0, 0, ""

    def _page(self, *, with_pictures: bool = True) -> Page:
        return self.latest.page(with_pictures=with_pictures)

    def _looks_steps(self, name: str, presence: Presence) -> Steps[Report]:
        """Do the work, and its updates, until somebody asks to stop; return how the last look ended.

        Raises:
            VolpipeError: the first look failed by it, or the last of too many, or another driver holds the folder.
        """
        is_last = self.stop.exists()  # before each look, which then sees all that was written until that moment
        look: Look = Look(0, (yield from self._work_steps(self.latest, name, presence)))
        while True:
            self._count_failures(look)
            self.on_look(look)
            is_given_up = self._num_alike >= MOST_ALIKE or self._num_failed >= MOST_FAILED
            if look.report is not None and (is_last or is_given_up):
                if is_last:
                    self.stop.unlink(missing_ok=True)
                return look.report
            if look.error is not None and is_given_up:
                raise look.error
            yield from self._wait(presence)
            check_holder(self.work.folder.path, name)
            is_last = self.stop.exists()
            look = yield from self._look_again(look.number + 1, name, presence)

    def _work_steps(self, work: RunWork, name: str, presence: Presence) -> Steps[Report]:
        """Do the work of a look, and write its report, which says that the volume is followed."""
        with work.held.reporting():
            report = yield from work.held_steps(name, presence)
            presence.wait(time.time() + self.seconds)
        return report

    def _look_again(self, number: int, name: str, presence: Presence) -> Steps[Look]:
        """Look at the volume as it is now, and do what that asks for."""
        presence.tell({})
        try:
            work = self.again(self.latest)
            work.claim()
            self.latest = work
            return Look(number, (yield from self._work_steps(work, name, presence)))
        except VolpipeError as error:
            return Look(number, None, error)
        except OSError as error:
            described = VolpipeError(describe_error(error))
            described.__cause__ = error
            return Look(number, None, described)

    def _wait(self, presence: Presence) -> Steps[None]:
        """Let time pass without workers; a file STOP ends that early."""
        end, until = time.monotonic() + self.seconds, time.time() + self.seconds

        def is_over() -> bool:
            presence.wait(until)
            return time.monotonic() >= end or self.stop.exists()

        self.work.waits = True
        yield Until(is_over, is_pause=True)
        self.work.waits = False

    def _count_failures(self, look: Look) -> None:
        """Count looks that failed one after the other, and those that failed alike, and did nothing else."""
        if not look.reason or (look.report is not None and look.report.updates):
            self._num_failed, self._num_alike, self._sentence = 0, 0, ""
            return
        self._num_failed += 1
        self._num_alike = self._num_alike + 1 if look.reason == self._sentence else 1
        self._sentence = look.reason
        log.warning(
            "look %d at the volume: %s; it is tried again in %s (the same for the %d. time of %d)",
            look.number, look.reason, duration(self.seconds), self._num_alike, MOST_ALIKE,
        )  # fmt: skip


def check_seconds(follow: float | None) -> None:
    """Refuse a time from the end of a look to the next that is none."""
    if follow is not None and not 0 < follow < math.inf:
        raise PlanError(f"follow is {follow:g} s; give the seconds from the end of one look to the next")


def following_work(plan: Plan, options: RunOptions, listener: Listener = SILENT) -> HeldWork[Report]:
    """Return the work that runs `plan`, or resumes it, and follows its volume until somebody asks to stop.

    It gives how the last look ended. Workers are started for each look that finds something.

    Args:
        options: its `follow` is given.
        listener: its `on_look` is called after each look.
    """
    assert options.follow is not None
    first = RunWork(plan, dataclasses.replace(options, update=True), listener)
    return _Looks(first, updated_again, options.follow, listener.on_look).work


def updated_again(work: RunWork) -> RunWork:
    """Return the update of a run for its volume as it is now; of its listener, who has heard of the plan, progress."""
    options = dataclasses.replace(work.options, fresh=False, measure_again=False)
    return RunWork(prepare_again(work.plan), options, Listener(on_progress=work.listener.on_progress))
