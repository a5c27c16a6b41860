"""The apps of a segmentation: from affinities to fragments, their edges, the graph, labels and coarser levels.

Not here: what they do (volpipe.segmentation.tasks, volpipe.segmentation.estimate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from volpipe.apps.app import App, Resources
from volpipe.blockwise.journal import Record

if TYPE_CHECKING:
    from volpipe.runs.worker import Written
    from volpipe.segmentation.estimate import SegmentCosts, SegmentTrial
    from volpipe.segmentation.tasks import EdgeCounts, FragmentCounts, Objects, SegmentJob


def find_fragments(job: SegmentJob, unit: int, parsl_resource_specification: Resources) -> Record[FragmentCounts]:
    from volpipe.segmentation import tasks

    return tasks.fragments(job, unit)


def find_edges(job: SegmentJob, unit: int, parsl_resource_specification: Resources) -> Record[EdgeCounts]:
    from volpipe.segmentation import tasks

    return tasks.edges(job, unit)


def agglomerate(job: SegmentJob, unit: int, parsl_resource_specification: Resources) -> Record[Objects]:
    from volpipe.segmentation import tasks

    return tasks.graph(job, unit)


def paint(job: SegmentJob, unit: int, parsl_resource_specification: Resources) -> Record[Written]:
    from volpipe.segmentation import tasks

    return tasks.paint(job, unit)


def coarsen_labels(job: SegmentJob, unit: int, parsl_resource_specification: Resources) -> Record[Written]:
    from volpipe.segmentation import tasks

    return tasks.coarsen(job, unit)


def try_segmentation(trial: SegmentTrial, unit: int, parsl_resource_specification: Resources) -> Record[SegmentCosts]:
    from volpipe.segmentation import estimate

    return estimate.try_blocks(trial, unit)


APPS = {
    "find_fragments": App(find_fragments, "cpu"),
    "find_edges": App(find_edges, "cpu"),
    "agglomerate": App(agglomerate, "cpu"),
    "paint": App(paint, "cpu"),
    "coarsen_labels": App(coarsen_labels, "cpu"),
    "try_segmentation": App(try_segmentation, "cpu"),
}
