"""Parsl, started and stopped around a run: the executors of a site, and how many workers they make.

Not here: sites (configs), or what is sent to them (stages).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor

import volpipe
from volpipe.apps.stages import Apps
from volpipe.worker import Job

LABELS = ("cpu", "gpu")
UNKNOWN_SLOTS = 8  # workers assumed of an executor that does not say


@dataclass(frozen=True)
class Started:
    """A running Parsl: executors for "cpu" and "gpu" stages, and their workers."""

    labels: dict[str, list[str]]
    slots: dict[str, int]
    prioritised: set[str]

    def apps(self, job: Job) -> Apps:
        """Return the apps that send `job` to these executors."""
        return Apps(job, self.labels, self.prioritised)


@contextmanager
def started(config: Config) -> Iterator[Started]:
    """Start the executors of `config`; on every way out stop them and cancel what they started."""
    _find_commands()
    logging.getLogger("parsl").setLevel(logging.ERROR)
    labels = {label: _with_label(config.executors, label) for label in LABELS}
    slots = {
        label: sum(_num_workers(e) for e in config.executors if e.label in chosen) for label, chosen in labels.items()
    }
    prioritised = {e.label for e in config.executors if isinstance(e, HighThroughputExecutor)}
    kernel = parsl.load(config)
    try:
        # The first block is otherwise started by a poll that may be seconds away.
        kernel.job_status_poller.poll()
        yield Started(labels, slots, prioritised)
    finally:
        kernel.cleanup()
        parsl.clear()


def _find_commands() -> None:
    """Let Parsl find its own commands, and workers find a checkout that is not installed."""
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if scripts not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, path])
    root = str(Path(volpipe.__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if (Path(root) / "pyproject.toml").is_file() and root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


def _with_label(executors: Sequence[ParslExecutor], label: str) -> list[str]:
    """Return the executors named `label` or `label_...`; where there are none, all of them."""
    named = [e.label for e in executors if e.label == label or e.label.startswith(f"{label}_")]
    return named or [e.label for e in executors]


def _num_workers(executor: ParslExecutor) -> int:
    if isinstance(executor, ThreadPoolExecutor):
        return int(executor.max_threads or UNKNOWN_SLOTS)
    if isinstance(executor, HighThroughputExecutor) and executor.provider is not None:
        per_node = executor.max_workers_per_node
        if per_node == float("inf"):
            return UNKNOWN_SLOTS
        return int(per_node) * int(executor.provider.max_blocks) * int(executor.provider.nodes_per_block)
    return UNKNOWN_SLOTS
