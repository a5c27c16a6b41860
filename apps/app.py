"""The apps: functions of volpipe that workers run, and where and how urgently they do.

Not here: how one is submitted (pool). The functions are wrapped for Parsl when a pool starts, not decorated: so they
ship to workers by name, and their executors are those of the site.
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


APPS = {
    # a run: from a volume to windows, through the net, to the output and its coarser levels
    "calibrate": App("volpipe.estimation.calibrate:try_blocks", "gpu", 9),
    "scan": App("volpipe.runs.worker:scan", "cpu", 9),
    "measure": App("volpipe.runs.worker:measure", "cpu", 9),
    "histogram": App("volpipe.runs.worker:measure", "cpu", 9),
    "reread": App("volpipe.runs.worker:look", "cpu", 9),
    "factor": App("volpipe.runs.worker:factor", "cpu", 9),
    "infer": App("volpipe.runs.worker:infer", "gpu", 5),
    "reassemble": App("volpipe.runs.worker:reassemble", "cpu", 2),
    "pyramid": App("volpipe.runs.worker:coarsen", "cpu", 1),
    "discard": App("volpipe.runs.worker:discard", "cpu", 0),
    # a net: timed on a GPU
    "time_net": App("volpipe.estimation.measure:time_net", "gpu"),
    # a training: one for each of its ranks
    "train": App("volpipe.training.task:train_task", "gpu"),
    # a segmentation: from affinities to fragments, their edges, the graph solved in boxes, labels and coarser levels
    "find_fragments": App("volpipe.segmentation.tasks:fragments", "cpu"),
    "find_edges": App("volpipe.segmentation.tasks:edges", "cpu"),
    "solve_boxes": App("volpipe.segmentation.graph:solve_boxes", "cpu"),
    "number_objects": App("volpipe.segmentation.graph:number_objects", "cpu"),
    "name_fragments": App("volpipe.segmentation.graph:name_fragments", "cpu"),
    "finish_graph": App("volpipe.segmentation.graph:finish_graph", "cpu"),
    "paint": App("volpipe.segmentation.tasks:paint", "cpu"),
    "coarsen_labels": App("volpipe.segmentation.tasks:coarsen", "cpu"),
    "look_fragments": App("volpipe.segmentation.tasks:look", "cpu"),
    "try_segmentation": App("volpipe.segmentation.estimate:try_blocks", "cpu"),
    # an evaluation, or a comparison of two outputs: scores or differences of blocks
    "reduce": App("volpipe.evaluation.subject:reduce_blocks", "cpu"),
}


def perform(
    function: str,
    *arguments: Any,  # Any: the app's own
    parsl_resource_specification: Mapping[str, int],
) -> Record[Any]:
    """Do what an app does, on a worker; Parsl takes a task's priority from the last argument."""
    module, _, name = function.partition(":")
    record: Record[Any] = getattr(import_module(module), name)(*arguments)
    return record
