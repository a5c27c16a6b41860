"""The log of a run's folder.

Not here: what the command line prints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from volpipe.errors import RunStopped, VolpipeError
from volpipe.resolve import describe_error

log = logging.getLogger(__name__)


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write volpipe's own log to the file at `path` meanwhile."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("volpipe")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    except VolpipeError:
        log.exception("the run stopped")
        raise
    except Exception as error:  # a full disk, a lost mount, a fault of ours: the user gets a sentence, the log the rest
        log.exception("the run stopped")
        raise RunStopped(
            f"{describe_error(error)} (traceback: {path}); the same command again goes on from here"
        ) from error
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
