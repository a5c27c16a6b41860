"""The apps of a run: from a volume to windows, through the net, to the output and its coarser levels."""

from __future__ import annotations

from volpipe.apps.app import App

APPS = {
    "rehearse": App("volpipe.estimation.calibrate:try_blocks", "gpu", 9),
    "scan": App("volpipe.runs.worker:scan", "cpu", 9),
    "measure": App("volpipe.runs.worker:measure", "cpu", 9),
    "histogram": App("volpipe.runs.worker:measure", "cpu", 9),
    "factor": App("volpipe.runs.worker:factor", "cpu", 9),
    "infer": App("volpipe.runs.worker:infer", "gpu", 5),
    "reassemble": App("volpipe.runs.worker:reassemble", "cpu", 2),
    "pyramid": App("volpipe.runs.worker:coarsen", "cpu", 1),
    "discard": App("volpipe.runs.worker:discard", "cpu", 0),
}
