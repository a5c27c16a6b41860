"""Observers: whom the loop tells of every work, of the pool, and of how far all is: metrics, logs, notifications.

Not here: listeners, which belong to one work and may end it (runs.work). What an observer raises ends no work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Work

log = logging.getLogger(__name__)

Place = tuple[int, ...]  # of a work: that of the work that it belongs to, and its number among its siblings
Works = Sequence[Work[Any]]  # a work, the last, and those that it belongs to, the outermost first


class Observer:
    """Hears what the loop does, in its thread, and does nothing; a method that is overridden must be quick."""

    def begin(self, place: Place, works: Works) -> None:
        """Hear that a work is opened."""

    def use(self, pool: WorkerPool | None) -> None:
        """Hear that the pool was started, or, None, that it is about to be stopped."""

    def move(self, place: Place, works: Works, progress: Progress) -> None:
        """Hear how far the phase is that a work waits for."""

    def end(self, place: Place, works: Works, result: object, error: BaseException | None) -> None:
        """Hear how a work ended: with a result, or by an error."""


_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` hear of all work that this thread performs meanwhile."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


class Audience:
    """The observers that listen now; one that raises is told no more."""

    def __init__(self) -> None:
        self._observers = list(_observers.get())

    def tell(self, say: Callable[[Observer], None]) -> None:
        """Call `say` with each of them."""
        for observer in list(self._observers):
            try:
                say(observer)
            except Exception:
                self._observers.remove(observer)
                log.warning("%s fails, and is told no more", type(observer).__name__, exc_info=True)
