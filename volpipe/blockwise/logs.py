"""The log of a run's folder.

Not here: what the command line prints. Works that are done side by side have a log each: a line goes to that of the
work for which it was written, and to those of the works that it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from volpipe.errors import FullDiskError, RunStopped, VolpipeError
from volpipe.resolve import describe_error
from volpipe.syntax import LogFormatter

log = logging.getLogger(__name__)

_speaker: ContextVar[tuple[int, ...]] = ContextVar("speaker")
_levels: list[int] = []  # that volpipe's logger had before each of the logs that are open, the first one's first


@contextmanager
def speaking(place: tuple[int, ...]) -> Iterator[None]:
    """Let what is logged meanwhile be of the work at `place`, and of those whose places begin it."""
    before = _speaker.set(place)
    try:
        yield
    finally:
        _speaker.reset(before)


def speaker() -> tuple[int, ...]:
    """Return the place of the work that speaks now, () where none does."""
    return _speaker.get(())


class LogFile(logging.FileHandler):
    """A log that ends where its disk is full: what the work says of that reaches the user another way."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave out a line that cannot be written, without a traceback on the terminal."""

    def close(self) -> None:
        """Close the file; what a full disk does not take is lost, and no error in place of the work's own."""
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write volpipe's own log to the file at `path` meanwhile, as far as it is of the work that speaks now."""
    handler, own = LogFile(path, encoding="utf-8"), _speaker.get(())
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(lambda record: _speaker.get(own)[: len(own)] == own)
    logger = logging.getLogger("volpipe")
    _levels.append(logger.level)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt:
        log.warning("interrupted; run the same command again to continue")
        raise
    except FullDiskError as error:  # part of the work may be done: no refusal
        log.exception("the work stopped")
        raise RunStopped(str(error)) from error
    except VolpipeError:
        log.exception("the work stopped")
        raise
    except Exception as error:  # a full disk, a lost mount, a fault of ours: the user gets a sentence, the log the rest
        log.exception("the work stopped")
        raise RunStopped(
            f"{describe_error(error)} (traceback: {path}); run the same command again to continue"
        ) from error
    finally:
        logger.removeHandler(handler)
        if not _levels[1:]:
            logger.setLevel(_levels[0])
        _levels.pop()
        handler.close()


@contextmanager
def warned(lack: str) -> Iterator[None]:
    """Warn of what something that is complete lacks because it cannot be read, which is no reason to fail."""
    try:
        yield
    except VolpipeError as error:
        log.warning("%s: %s", lack, error)
