"""The apps of a segmentation: from affinities to fragments, their edges, the graph, labels and coarser levels."""

from __future__ import annotations

from volpipe.apps.app import App

APPS = {
    "find_fragments": App("volpipe.segmentation.tasks:fragments", "cpu"),
    "find_edges": App("volpipe.segmentation.tasks:edges", "cpu"),
    "agglomerate": App("volpipe.segmentation.tasks:graph", "cpu"),
    "paint": App("volpipe.segmentation.tasks:paint", "cpu"),
    "coarsen_labels": App("volpipe.segmentation.tasks:coarsen", "cpu"),
    "try_segmentation": App("volpipe.segmentation.estimate:try_blocks", "cpu"),
}
