"""An app: a function of volpipe that workers run, and where and how urgently they do.

Not here: any app (inference, training, segmentation, evaluation), or how one is submitted (pool). The functions are
wrapped for Parsl when a pool starts, not decorated: so they ship to workers by name, and their executors are those of
the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from volpipe.blockwise.journal import Record


@dataclass(frozen=True)
class App:
    """An app.

    Attributes:
        function: module:name; it returns a `Record`. Its module is imported where it runs, when it runs.
        label: of its executors, "cpu" or "gpu".
        priority: lower goes first, to free scratch.
    """

    function: str
    label: str
    priority: int = 5


def perform(
    function: str,
    *arguments: Any,  # Any: the app's own
    parsl_resource_specification: Mapping[str, int],
) -> Record[Any]:
    """Do what an app does, on a worker; Parsl takes a task's priority from the last argument."""
    module, _, name = function.partition(":")
    record: Record[Any] = getattr(import_module(module), name)(*arguments)
    return record
