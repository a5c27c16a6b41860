"""The apps of a run: from a volume to windows, through the net, to the output and its coarser levels.

Not here: what they do (volpipe.runs.worker).
"""

from __future__ import annotations

from collections.abc import Sequence

from volpipe.apps.app import App, Resources
from volpipe.blockwise.journal import Record
from volpipe.estimation.calibrate import try_blocks
from volpipe.estimation.estimate import UnitCosts
from volpipe.inference.statistics import Statistics
from volpipe.runs import worker
from volpipe.runs.worker import Cells, Inferred, Job, Written


def measure(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[Statistics]:
    return worker.measure(job, units)


def calibrate(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[UnitCosts]:
    return try_blocks(job, units)


def scan(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[Cells]:
    return worker.scan(job, units)


def factor(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[None]:
    return worker.factor(job, units)


def infer(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[Inferred]:
    return worker.infer(job, units)


def reassemble(job: Job, units: Sequence[int], parsl_resource_specification: Resources) -> Record[Written]:
    return worker.reassemble(job, units)


def coarsen(job: Job, units: Sequence[int], level: int, parsl_resource_specification: Resources) -> Record[Written]:
    return worker.coarsen(job, units, level)


def discard(job: Job, units: Sequence[int], what: str, parsl_resource_specification: Resources) -> Record[None]:
    return worker.discard(job, units, what)


APPS = {
    "rehearse": App(calibrate, "gpu", 9),
    "scan": App(scan, "cpu", 9),
    "measure": App(measure, "cpu", 9),
    "histogram": App(measure, "cpu", 9),
    "factor": App(factor, "cpu", 9),
    "infer": App(infer, "gpu", 5),
    "reassemble": App(reassemble, "cpu", 2),
    "pyramid": App(coarsen, "cpu", 1),
    "discard": App(discard, "cpu", 0),
}
