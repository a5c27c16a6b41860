"""The watch over a running site: notices executors that will never answer, which Parsl itself waits for without end.

Not here: failures of single tasks or workers, which come back as exceptions and are tried again (blockwise.loop).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

from parsl.executors import HighThroughputExecutor
from parsl.executors.base import ParslExecutor
from parsl.jobs.states import JobState, JobStatus

from volpipe.errors import RunStopped, SiteError, VolpipeError

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
STILLBORN_TO_STOP = 3


@dataclass
class ExecutorWatch:
    """Looks after `executors` in a thread of its own, from `start` to `stop`.

    Attributes:
        proven: labels of executors that have brought back a result; blocks of theirs may come and go.
        trouble: why nothing can come back any more, if so.
    """

    executors: Sequence[ParslExecutor]
    proven: set[str] = field(default_factory=set)
    trouble: VolpipeError | None = None
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._look_again, name="volpipe-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LOOK_SECONDS)

    def check(self) -> None:
        """Raise the error that was noticed, if any.

        Raises:
            RunStopped: the interchange of an executor is gone, or its thread of results, or all of its latest blocks.
            SiteError: an executor cannot start any worker.
        """
        if self.trouble is None and any(getattr(executor, "bad_state_is_set", False) for executor in self.executors):
            self._find_trouble()
        if self.trouble is not None:
            raise self.trouble

    def _look_again(self) -> None:
        while self.trouble is None and not self._stopped.wait(LOOK_SECONDS):
            self._find_trouble()
        if self.trouble is not None:
            log.error("%s", self.trouble)
            for executor in self.executors:
                fail(executor, self.trouble)

    def _find_trouble(self) -> None:
        self.trouble = next(filter(None, map(self._trouble_of, self.executors)), None)

    def _trouble_of(self, executor: ParslExecutor) -> VolpipeError | None:
        if not isinstance(executor, HighThroughputExecutor):
            return None
        for is_lost, what in ((has_lost_interchange, "interchange"), (has_lost_results, "thread of results")):
            if is_lost(executor):
                return RunStopped(
                    f"the {what} of executor {executor.label} ended or hangs, so that no result can arrive; "
                    "run the same command again to continue"
                )
        if executor.bad_state_is_set:
            return RunStopped(
                f"executor {executor.label} was given up: {first_words(executor.executor_exception)} "
                f"(logs: {Path(executor.run_dir).resolve()}); run the same command again to continue"
            )
        if executor.label in self.proven:
            return None
        stillborn = [status for status in dict(executor.status_facade).values() if is_stillborn(status)]
        if len(stillborn) < STILLBORN_TO_STOP or executor.connected_managers():
            return None
        return SiteError(
            f"executor {executor.label} cannot start workers: {len(stillborn)} blocks ended before one reported; "
            f"the last said: {last_words(stillborn[-1])} (logs: {Path(executor.run_dir).resolve()})"
        )


def has_lost_interchange(executor: HighThroughputExecutor) -> bool:
    """Return whether the process that passes tasks and results on was started and is gone, or answers no longer."""
    if executor.interchange_proc is None:
        return False
    return executor.interchange_proc.poll() is not None or not executor.command_client.ok


def has_lost_results(executor: HighThroughputExecutor) -> bool:
    """Return whether the thread that takes results from the interchange is gone, as it is after one that is broken."""
    thread = executor._result_queue_thread
    is_expected = not executor.bad_state_is_set and not executor._result_queue_thread_exit.is_set()
    return thread is not None and is_expected and not thread.is_alive()


def first_words(error: Exception | None) -> str:
    """Return the lines of a message that say something, as one."""
    lines = (line.strip() for line in str(error).splitlines())
    return " ".join(line for line in lines if line and not line.startswith("Error "))


def is_stillborn(status: JobStatus) -> bool:
    """Return whether a block ended, or was refused by its scheduler, before a worker of it reported."""
    refused = status.state == JobState.FAILED and (status.message or "").startswith("Failed to start block")
    return refused or status.state == JobState.MISSING


def last_words(status: JobStatus) -> str:
    """Return the line in which a block's job said why it ended."""
    sources: Iterable[str | None] = (status.stderr_summary, status.stdout_summary, status.message)
    lines = (line.strip() for text in sources if text for line in reversed(text.splitlines()))
    return next((line for line in lines if line.strip("-")), "nothing")


def fail(executor: ParslExecutor, error: Exception) -> None:
    """Let every task that `executor` holds end with `error`, and cancel its blocks, which Parsl then leaves alone."""
    if not isinstance(executor, HighThroughputExecutor):
        return
    with contextlib.suppress(InvalidStateError):  # a result came just now
        executor.set_bad_state_and_fail_all(error)
    for future in list(executor.tasks.values()):
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
    cancel_blocks(executor)


def cancel_blocks(executor: ParslExecutor) -> None:
    """Cancel the blocks of `executor` that nobody has cancelled yet."""
    provider = getattr(executor, "provider", None)
    resources = getattr(provider, "resources", {})
    alive = [job for job, resource in list(resources.items()) if not resource["status"].terminal]
    names = [resources[job].get("pod_name", job) for job in alive]
    try:
        if provider is not None and alive and not all(provider.cancel(alive)):
            log.error("jobs of executor %s were not cancelled: %s; cancel them yourself", executor.label, names)
    except Exception:  # whatever a scheduler says: there is nobody else to cancel them
        log.exception("jobs of executor %s could not be cancelled: %s; cancel them yourself", executor.label, names)
