"""The watch over a command: metrics, log and notification, opened as it begins and closed at its end.

Not here: what these are, or the options of the command line (cli.options). Where none is asked for, nothing heavy is
imported.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from volpipe.display.console import INCOMPLETE, REFUSED, Notices
from volpipe.errors import NOTICE, VolpipeError
from volpipe.monitoring.exposition import monitored
from volpipe.runs.presence import COMMAND
from volpipe.volumes.storage.result_file import ResultFile

if TYPE_CHECKING:
    from volpipe.monitoring.ending import Witness
    from volpipe.monitoring.notify import Address
    from volpipe.runs.report import Ending, State

log = logging.getLogger(__name__)

STANDARD_ERROR = "-"  # as a target of the log
INTERRUPTED_BY = "interrupted; run the same command again to continue"


@dataclass
class CommandWatch:
    """Whoever watches the command of this process, from its options to its end.

    Attributes:
        sentence: with which it ended, where that was with a fault.
        is_stopped: whether too much failed.
        is_json: whether standard error gets JSON lines.
    """

    command: str = ""
    sentence: str = ""
    is_stopped: bool = False
    is_json: bool = False
    address: Address | None = None
    witness: Witness | None = None
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def begin(self, command: str, recipe: object, metrics: str | None, log_json: str | None, url: str | None) -> str:
        """Open all that is asked for, and return the place of the metrics, "" without.

        The address comes first, so that a refusal of the others is told there.

        Raises:
            VolpipeError: it cannot be used.
        """
        self.command = command
        if url is not None:
            from volpipe.monitoring.notify import parse_address

            self.address = parse_address(url)
        if metrics is None and log_json is None and url is None:
            return ""
        from volpipe.blockwise.work import observing
        from volpipe.monitoring.ending import Witness

        self.witness = Witness()
        self._stack.enter_context(observing(self.witness))
        if log_json is not None:
            self._stack.enter_context(self._logging(log_json))
        return self._stack.enter_context(monitored(metrics, command, recipe))

    @contextmanager
    def _logging(self, target: str) -> Iterator[None]:
        """Let the log go to `target` as JSON lines meanwhile."""
        from volpipe.blockwise.work import observing
        from volpipe.monitoring.json_log import LOG_FILE, Printed, WorkNames, handler_for

        is_terminal, logger, names = target == STANDARD_ERROR, logging.getLogger("volpipe"), WorkNames()
        place = target
        if not is_terminal:
            file = ResultFile.named("--log-json", target, LOG_FILE)
            file.check()
            place = str(file.path.absolute())
        try:
            handler = handler_for(place, sys.stderr, names)
        except OSError as error:
            raise VolpipeError(f"--log-json {target}: it cannot be written ({error.strerror}); give another") from error
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        with ExitStack() as stack:
            stack.callback(handler.close)
            stack.callback(logger.setLevel, level)
            stack.callback(logger.removeHandler, handler)
            stack.enter_context(observing(names))
            if is_terminal:
                for notices in [each for each in logger.handlers if isinstance(each, Notices)]:
                    logger.removeHandler(notices)  # they are in the log
                stack.enter_context(redirect_stderr(cast(TextIO, Printed(handler, sys.stderr))))
                self.is_json = True
            yield

    def close(self, code: int, error: BaseException | None = None) -> None:
        """Tell whoever watches that the command ended with an exit code, or by an error that nobody foresaw.

        A fault of that is a warning, and does not change how the command ended.
        """
        try:
            with self._stack:
                if self.witness is not None:
                    self._tell_ending(code, error)
        except Exception:
            log.warning("a watcher or a hook could not learn that the command ended", exc_info=True, extra=NOTICE)

    def _tell_ending(self, code: int, error: BaseException | None) -> None:
        ending = self._ending(code, error)
        seconds = round(time.time() - COMMAND.began, 3)
        extra = {"state": ending.state, "exit_code": code, "seconds": seconds}
        level = logging.INFO if ending.state == "complete" else logging.WARNING
        if self.address is not None:
            self._notify(ending, code, seconds)
        sentence = f": {ending.message}" if ending.message else ""
        log.log(level, "volpipe %s ended, %s%s", self.command, ending.state, sentence, extra=extra, exc_info=error)

    def _ending(self, code: int, error: BaseException | None) -> Ending:
        """Return how the command ended: its exit code says more than how its work did."""
        from volpipe.blockwise.interrupts import INTERRUPTED
        from volpipe.monitoring.ending import ending_by
        from volpipe.runs.report import Ending

        assert self.witness is not None
        if error is not None:
            return ending_by(error)
        of_work = self.witness.ending or Ending("complete", 0)
        states: dict[int, State] = {INCOMPLETE: "incomplete", REFUSED: "refused", INTERRUPTED: "interrupted"}
        state = states.get(code, of_work.state if code == 0 else "failed")
        if state == "incomplete" and self.is_stopped:
            state = "stopped"
        if state == of_work.state:
            return Ending(state, of_work.missing, of_work.message or self.sentence)
        return Ending(state, None, self.sentence or (INTERRUPTED_BY if state == "interrupted" else of_work.message))

    def _notify(self, ending: Ending, code: int, seconds: float) -> None:
        from volpipe.blockwise.interrupts import INTERRUPTS
        from volpipe.monitoring.notify import notify

        assert self.witness is not None and self.address is not None
        message = {
            "what": self.command, "output": self.witness.output or None, "state": ending.state, "exit_code": code,
            "seconds": seconds, "missing": ending.missing, "message": ending.message, "command": COMMAND.line,
            "folder": str(Path.cwd()), "report": self.witness.report,
        }  # fmt: skip
        with INTERRUPTS.closing():  # how the command ended is decided
            notify(self.address, message)

    def as_printed(self, text: str) -> bytes:
        """Return `text` as standard error takes it now, for a handler of signals."""
        if not self.is_json:
            return text.encode()
        from volpipe.monitoring.json_log import as_line

        return as_line(text)


_watch = CommandWatch()


def current() -> CommandWatch:
    """Return whoever watches the command of this process."""
    return _watch


@contextmanager
def watched() -> Iterator[CommandWatch]:
    """Give a new watch over the command that is about to run, closed as it ends; by its fault, with a traceback."""
    global _watch
    watch = _watch = CommandWatch()
    try:
        yield watch
    except SystemExit as end:
        watch.close(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
        raise
    except BaseException as error:
        is_json = watch.is_json
        watch.close(1, error)
        if is_json and isinstance(error, Exception):  # the traceback is in the log
            sys.exit(1)
        raise
    watch.close(0)
