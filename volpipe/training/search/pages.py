"""The report of a sweep or a search: the table of its trials with links to their reports, and their scores.

Not here: the report of one training (training.pages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volpipe.nets.trained import BoxScores
from volpipe.recipes.training import LOSSES
from volpipe.reporting.page import REPORT, Chart, Draft, Item, Page, PageSection, ReportLink, Sentence, Sheet
from volpipe.reporting.tally import JournalTally
from volpipe.runs.pages import Parts, Several, page_of
from volpipe.runs.run_folder import RunFolder
from volpipe.training.logs import read_scores
from volpipe.training.pages import Points, curve
from volpipe.training.task import Training, newest_step
from volpipe.units import brief, count
from volpipe.volumes.storage.metadata import read_json

TABLE = "table.json"  # in a folder of trials, with the same as table.csv
CHOICE = "choice.json"  # there: the trial that the held-out boxes chose, by how many values, and its test
FIXED = ("trial", "steps", "loss", "score", "seconds", "state", "reason")
MOST_JOURNALS = 200  # of trials whose tasks are shown together
MOST_TRIALS, MOST_POINTS = 200, 40  # whose scores are read; points of a curve, about


def trials_page(folder: RunFolder, *, with_pictures: bool = True) -> Page:
    """Return the report of the trials in `folder`, while they are trained as well."""
    path = folder.path
    rows = read_table(path)
    known = {str(row["trial"]).zfill(3) for row in rows}
    folders = sorted(entry for entry in path.glob("[0-9]*") if entry.is_dir() and entry.name not in known)
    for entry in folders:
        if Training.load(entry) is not None:  # a trial that no session has put into the table
            state = "begun" if (entry / LOSSES).is_file() else "waiting"
            rows.append({"trial": int(entry.name), "steps": newest_step(entry), "state": state})
    done = sum(row["state"] == "done" for row in rows)
    is_complete = bool(rows) and all(row["state"] in ("done", "pruned") for row in rows)
    tally, names = JournalTally(), [str(row["trial"]).zfill(3) for row in rows]
    for name in names[:MOST_JOURNALS]:
        tally.read(path / name / folder.journal.name, prefix=f"{name} ")
    facts = {"trials": f"{len(rows):,}, {done:,} of them done"} | _choice_facts(path)
    table = PageSection("Trials", [_trial_sheet(path, rows) if rows else Sentence("No trial has begun.")])
    charts = [Draft("Scores of trials", lambda: trial_items(path), "Scores of trials")] if with_pictures else []
    what = f"{count(len(rows), 'training')} side by side."
    parts = Parts(path.name, what, facts, pictures=charts, sections=[table])
    return page_of(folder, Several(tally), parts, is_complete=is_complete)


def _choice_facts(path: Path) -> dict[str, str]:
    """Return which trial was chosen, by how many values, and how it did in the test boxes."""
    chosen = read_json(path / CHOICE)
    if chosen is None:
        return {}
    scores = {key: BoxScores.model_validate(chosen[key]) for key in ("held_out", "test") if chosen.get(key)}
    best = f"trial {str(chosen['trial']).zfill(3)}: {scores['held_out'].summary()}"
    return {"best": best} | ({"test": scores["test"].summary()} if "test" in scores else {})


def read_table(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Return the rows of the table that a session left in the folder of trials; none before the first has ended."""
    try:
        rows = json.loads((path / TABLE).read_text(encoding="utf-8"))
        return [row for row in rows if isinstance(row, dict) and "trial" in row]
    except (OSError, ValueError, TypeError):
        return []


def _trial_sheet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Sheet:
    values = list(dict.fromkeys(key for row in rows for key in row if key not in FIXED))
    ordered = sorted(rows, key=lambda row: (row.get("score") is None, -(row.get("score") or 0.0), row["trial"]))
    lines = []
    for row in ordered:
        name = str(row["trial"]).zfill(3)
        report = path / name / REPORT
        trial: object = ReportLink(name, f"{name}/{REPORT}") if report.is_file() else name
        seconds = brief(row["seconds"]) if row.get("seconds") is not None else ""
        own, scores = ([_cell_text(row.get(key)) for key in keys] for keys in (values, ("loss", "score")))
        lines.append((trial, *own, row.get("steps"), *scores, seconds, row.get("state"), row.get("reason") or ""))
    names = ("trial", *values, "steps", "loss", "score", "time of steps", "state", "reason")
    return Sheet("", names, lines, "The best score first: PSNR in dB, or area under the curve, of held-out samples.")


def _cell_text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- charts


def trial_items(folder: Path) -> list[Item]:
    """Return the last score of each trial in `folder`, and its scores over the steps."""
    folders = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    points = {path.name: read_scores(path) for path in folders[:MOST_TRIALS]}
    known: Points = {name: some for name, some in points.items() if some}
    if not known:
        return [Sentence("No trial has a score yet: train.validate_every and data.held_out say when and on what.")]
    caption = f"Of the first {MOST_TRIALS} trials." if len(folders) > MOST_TRIALS else ""
    last = [some[-1] for some in known.values()]
    columns: dict[str, Sequence[object]] = {
        "trial": list(known), "score": [score for _, score in last], "step": [step for step, _ in last],
    }  # fmt: skip
    thinned = {name: some[:: max(1, len(some) // MOST_POINTS)] for name, some in known.items()}
    if len(known) > 1:
        items: list[Item] = [Chart("Last score of each trial", caption, "trials", columns)]
    else:
        items = [Sheet("Last score", list(columns), [*zip(*columns.values(), strict=True)])]
    if any(len(some) > 1 for some in known.values()):
        items.append(curve("Scores over the steps", "score", thinned))
    return items
