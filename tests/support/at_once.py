"""Calls that are made at the same time: held back until they are, and counted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")
ANSWER_SECONDS = 20.0  # for others to ask, too


class Together(Generic[P, R]):
    """`function`, whose first `num` calls are answered once all of them are made.

    Attributes:
        most: calls that went on at the same time.
    """

    def __init__(self, function: Callable[P, R], num: int) -> None:
        self._function, self._num, self._numbers = function, num, itertools.count()
        self._barrier, self._lock = threading.Barrier(num, timeout=ANSWER_SECONDS), threading.Lock()
        self._now = self.most = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if next(self._numbers) < self._num:
                self._barrier.wait()
            return self._function(*args, **kwargs)
        finally:
            with self._lock:
                self._now -= 1
