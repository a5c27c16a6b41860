"""An app: a plain function that workers run, and where and how urgently they do.

Not here: any app (inference, training, segmentation, evaluation), or how one is submitted (pool). The functions are
wrapped for Parsl when a pool starts, not decorated: so they ship to workers by name, and their executors are those of
the site. Parsl takes a task's priority from their last argument, which they do not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from volpipe.blockwise.journal import Record

Resources = Mapping[str, int]


@dataclass(frozen=True)
class App:
    """A function, the label of its executors ("cpu" or "gpu"), and its priority: lower goes first, to free scratch."""

    function: Callable[..., Record[Any]]  # Any: the app's own
    label: str
    priority: int = 5
