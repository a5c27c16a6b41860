"""The stages of a run as Parsl apps: which function, on which executors, how urgent.

Not here: what the functions do (volpipe.worker). They are wrapped when a run starts, not decorated: so they ship to
workers by name, and their executors are those of the site. Parsl takes a task's priority from the argument that they
do not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from parsl import python_app
from parsl.executors.base import ParslExecutor

from volpipe import rehearsal, worker
from volpipe.apps.executors import in_our_words
from volpipe.journal import Record
from volpipe.worker import Job

Resources = Mapping[str, int]


def measure(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return worker.measure(job, units)


def rehearse(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return rehearsal.try_blocks(job, units)


def scan(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return worker.scan(job, units)


def factor(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return worker.factor(job, units)


def infer(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return worker.infer(job, units)


def reassemble(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record:
    return worker.reassemble(job, units)


def coarsen(job: Job, units: Sequence[int], level: int, parsl_resource_specification: Resources) -> Record:
    return worker.coarsen(job, units, level)


def discard(job: Job, units: Sequence[int], what: str, parsl_resource_specification: Resources) -> Record:
    return worker.discard(job, units, what)


@dataclass(frozen=True)
class App:
    """An app's function, the label of its executors, and its priority: lower goes first, to free scratch early."""

    function: Callable[..., Record]
    label: str
    priority: int


APPS = {
    "rehearse": App(rehearse, "gpu", 9),
    "scan": App(scan, "cpu", 9),
    "measure": App(measure, "cpu", 9),
    "histogram": App(measure, "cpu", 9),
    "factor": App(factor, "cpu", 9),
    "infer": App(infer, "gpu", 5),
    "reassemble": App(reassemble, "cpu", 2),
    "pyramid": App(coarsen, "cpu", 1),
    "discard": App(discard, "cpu", 0),
}


class Apps:
    """The apps of one run, bound to its job and to the executors of the site.

    Args:
        job: what every task is told.
        labels: executors (by label) for "cpu" and for "gpu" stages.
        prioritised: labels of executors that take a priority.
        executors: of which some may know why a worker was lost.
    """

    def __init__(
        self, job: Job, labels: dict[str, list[str]], prioritised: set[str], executors: Sequence[ParslExecutor] = ()
    ) -> None:
        self.job = job
        self._executors = executors
        self._prioritised = prioritised
        self._labels = labels
        self._wrapped = {name: python_app(app.function, executors=labels[app.label]) for name, app in APPS.items()}

    def labels_of(self, stage: str) -> list[str]:
        """Return the labels of the executors that run `stage`."""
        return self._labels[APPS[stage.partition(" ")[0]].label]

    def submit(self, stage: str, units: Sequence[int]) -> Future[Record]:
        """Send `units` of `stage` to a worker; "pyramid 2" and "discard sum" carry their argument in their name."""
        name, _, argument = stage.partition(" ")
        app = APPS[name]
        takes_priority = set(self.labels_of(stage)) <= self._prioritised
        arguments: list[int | str] = []
        if argument:
            arguments = [int(argument) if argument.isdigit() else argument]
        future: Future[Record] = self._wrapped[name](
            self.job,
            list(units),
            *arguments,
            parsl_resource_specification={"priority": app.priority} if takes_priority else {},
        )
        return translated(future, self._executors)


def translated(theirs: Future[Record], executors: Sequence[ParslExecutor] = ()) -> Future[Record]:
    """Return a future that ends as `theirs` does, with errors in our own words."""
    ours: Future[Record] = Future()

    def hand_on(done: Future[Record]) -> None:
        error = done.exception()
        if error is None:
            ours.set_result(done.result())
        else:
            ours.set_exception(in_our_words(error, executors))

    theirs.add_done_callback(hand_on)
    return ours
