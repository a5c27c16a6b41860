"""The apps of an evaluation: scores of blocks."""

from __future__ import annotations

from volpipe.apps.app import App

APPS = {
    "score": App("volpipe.evaluation.evaluate:score", "cpu"),
    "try_scoring": App("volpipe.evaluation.estimate:try_block", "cpu"),
}
