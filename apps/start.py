"""Parsl, started and stopped around a run: the executors of a site, and how many workers they make.

Not here: sites (configs), or what is sent to them (stages).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor

import volpipe
from volpipe.apps.stages import Apps
from volpipe.run import Executors, Submit
from volpipe.sites import load_site
from volpipe.worker import Job

LABELS = ("cpu", "gpu")
UNKNOWN_SLOTS = 8  # workers assumed of an executor that does not say


@dataclass
class Started:
    """A running Parsl: executors for "cpu" and "gpu" stages, and their workers."""

    labels: dict[str, list[str]]
    slots: Mapping[str, int]
    prioritised: set[str]

    def submitter(self, job: Job) -> Submit:
        """Return what sends units of a stage, together with `job`, to these executors."""
        return Apps(job, self.labels, self.prioritised).submit


def on_site(name: str) -> Callable[[Path], AbstractContextManager[Executors]]:
    """Return what starts the site `name`, to be given to a run.

    Raises:
        SiteError: when it is started: no such site, or one that cannot be used here.
    """
    return lambda folder: started(load_site(name, folder))


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
