"""Pools of workers, as work sees them: an app is submitted by its name, and its record comes back.

Not here: how workers are started (apps.pool), or any app (apps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from volpipe.blockwise.journal import Record

Submit = Callable[[str, Sequence[int]], "Future[Record[Any]]"]  # of a stage and its units; Any: its own


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: its name, as its driver gives it, and its memory in bytes."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Capacity:
    """What a site gives its workers, as far as that is known before they start; the same each time.

    Attributes:
        worker_bytes: memory of each, None where the site does not say.
        num_workers: that run nets.
        on_gpu: whether these have a GPU each.
        gpu: which one, of this machine, or as it was found on the site (`volpipe net --config`); None where nobody
            knows.
        is_here: whether they are on this machine, so that this process sees their GPUs as well.
        in_process: whether they are threads of this process; nobody plans by that.
    """

    worker_bytes: int | None
    num_workers: int
    on_gpu: bool
    gpu: Gpu | None = None
    is_here: bool = True
    in_process: bool = field(default=False, compare=False)


class WorkerPool(Protocol):
    """Workers of a site that were started, in whatever way.

    Attributes:
        slots: how many tasks of "cpu" and of "gpu" apps run at a time.
        shared: whether the workers of "cpu" and of "gpu" apps are the same ones.
        worker_bytes: memory of each worker, None where it is not known.
        worker_threads: cores of each worker that runs nets without a GPU, None where the site does not say.
        on_gpu: whether all workers that run nets see a GPU, their own or a shared one.
        node_directory: folder on the nodes' own disks in which workers keep chunks of the input, None where they do
            not.
        is_here: whether all workers are on the driver's machine.
        address: at which workers reach the driver, and ranks of a training each other.
        capacity: by which plans choose windows, None where nothing is known.
    """

    slots: Mapping[str, int]
    shared: bool
    worker_bytes: int | None
    worker_threads: int | None
    on_gpu: bool
    node_directory: str | None
    is_here: bool
    address: str
    capacity: Capacity | None

    def num_connected(self) -> int:
        """Return how many workers are ready now; from any thread, which may have to wait for the answer."""

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:  # Any: the app's own
        """Return the record to come of the app of that name (see apps/), on a worker.

        Raises:
            RunStopped, SiteError: no worker can answer any more.
        """


Start = Callable[[Path], AbstractContextManager[WorkerPool]]  # of a folder for the site's files


@dataclass(frozen=True)
class Site:
    """A site that was found, some of which may be starting already.

    Attributes:
        start: starts its pool, or takes that which is starting.
        capacity: what it gives workers.
    """

    name: str
    start: Start
    capacity: Capacity


def followed(
    future: Future[Record[Any]],  # Any: of its task
    change: Callable[[Record[Any]], Record[Any]] = lambda record: record,
    translate: Callable[[BaseException], BaseException] = lambda error: error,
) -> Future[Record[Any]]:
    """Return the future of what `change` makes of the record of `future`, and `translate` of its error."""
    changed: Future[Record[Any]] = Future()

    def hand_on(done: Future[Record[Any]]) -> None:
        error = done.exception()
        if error is None:
            changed.set_result(change(done.result()))
        else:
            changed.set_exception(translate(error))

    future.add_done_callback(hand_on)
    return changed
