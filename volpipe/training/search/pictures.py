"""Charts of trials for the report of a sweep or a search: the scores of each over its steps, and the last of each.

Not here: the table of trials, or the pictures of one training (training.pictures).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from volpipe.reporting.page import Chart, Draft, Item, Note
from volpipe.training.logs import sampled_log
from volpipe.training.pictures import SCORES, Points, curve

MOST_TRIALS, MOST_POINTS = 200, 40  # whose scores are read; points of a curve, about


def trial_pictures(folder: Path) -> list[Draft]:
    """Return the charts of the trials in `folder`."""
    return [Draft("Scores of trials", lambda: trial_items(folder), "Scores of trials")]


def trial_items(folder: Path) -> list[Item]:
    """Return the last score of each trial in `folder`, and its scores over the steps."""
    folders = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    points = {path.name: _scores(path) for path in folders[:MOST_TRIALS]}
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


def _scores(folder: Path) -> list[tuple[float, float]]:
    """Return step and score of each validation of a trial, as far as its log can be read."""
    names = [f'"{name}"'.encode() for name in SCORES]
    entries = sampled_log(folder, 1, lambda line: any(name in line for name in names))
    return [(e["step"], next(e[name] for name in SCORES if name in e)) for e in entries if any(n in e for n in SCORES)]
