"""Charts of trials for the report of a sweep or a search: the scores of each over its steps, and the last of each.

Not here: the table of trials, or the pictures of one training (training.pictures).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from volpipe.reporting.page import Chart, Draft, Item, Note
from volpipe.training.logs import read_scores
from volpipe.training.pictures import Points, curve

MOST_TRIALS, MOST_POINTS = 200, 40  # whose scores are read; points of a curve, about


def trial_pictures(folder: Path) -> list[Draft]:
    """Return the charts of the trials in `folder`."""
    return [Draft("Scores of trials", lambda: trial_items(folder), "Scores of trials")]


def trial_items(folder: Path) -> list[Item]:
    """Return the last score of each trial in `folder`, and its scores over the steps."""
    folders = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    points = {path.name: read_scores(path) for path in folders[:MOST_TRIALS]}
    known: Points = {name: some for name, some in points.items() if some}
    if not known:
        return [Note("No trial has a score yet: train.validate_every and data.held_out say when and on what.")]
    caption = f"Of the first {MOST_TRIALS} trials." if len(folders) > MOST_TRIALS else ""
    last = [some[-1] for some in known.values()]
    columns: dict[str, Sequence[object]] = {
        "trial": list(known), "score": [score for _, score in last], "step": [step for step, _ in last],
    }  # fmt: skip
    thinned = {name: some[:: max(1, len(some) // MOST_POINTS)] for name, some in known.items()}
    bars = Chart("Last score of each trial", caption, "trials", columns)
    return [bars, curve("Scores over the steps", "score", thinned)]
