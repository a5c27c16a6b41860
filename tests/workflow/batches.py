"""Batches of small volumes in the process of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from inline import Inline
from volumes import windowed

import volpipe as vp
from volpipe.workflow.batch_table import BatchReport

SHAPE = (16, 24, 16)
WINDOWS = windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop")
IDENTITY = ("net.name=identity", *WINDOWS)
FIRST = """
[[stage]]
name = "first"
net = { name = "identity" }
windows = { shape = [8, 8, 8], overlap = 0, block = [1, 1, 1] }
"""
SECOND = """
[[stage]]
name = "second"
net = { name = "identity" }
windows = { shape = [8, 8, 8], overlap = 0, block = [2, 2, 2] }
"""
OBJECTS = """
[[stage]]
name = "objects"
kind = "label"
input = { stage = "first", kind = "foreground" }
objects = { method = "components", threshold = 0.5 }
output = { block = [8, 8, 8], chunk = [4, 4, 4] }
"""
FLOW, LABELLED = FIRST + SECOND, FIRST + OBJECTS


class NoPool(Inline):
    """Workers that nobody may ask."""

    def submit(self, app: str, *arguments: object) -> object:  # type: ignore[override]
        raise AssertionError(f"{app} was asked for")


def give(volumes: object = "raw/*.n5/raw", *settings: str, **arguments: object) -> BatchReport:
    """Return how the batch ends that writes into `done`."""
    defaults = {"out": "done", "site": Inline(), "settings": [*IDENTITY, *settings]}
    return vp.batch(volumes, **(defaults | arguments))  # type: ignore[arg-type]


def endings(report: BatchReport) -> list[str]:
    return [row.ended for row in report.rows]


def refused(volumes: object = "raw/*.n5/raw", *settings: str, **arguments: object) -> dict[str, str]:
    """Return what is wrong, by dataset, after a look that nothing was written."""
    before = sorted(Path.cwd().rglob("*"))
    with pytest.raises(vp.BatchError) as error:
        give(volumes, *settings, **arguments)
    assert sorted(Path.cwd().rglob("*")) == before
    sentences: dict[str, str] = {}
    for what, sentence in error.value.mistakes:
        sentences[what] = f"{sentences.get(what, '')}{sentence}; "
    return sentences
