"""The report of a training: how far it is, its losses and scores in numbers, its recipe, and what its tasks took.

Not here: curves and pictures of samples (the work's own `pictures`), or the reports of many (training.search).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from volpipe.blockwise.stage import Schedule, Stage
from volpipe.errors import RunError
from volpipe.recipes.toml import Section as RecipeSection
from volpipe.recipes.training import WEIGHTS
from volpipe.reporting.page import Draft, Facts, Item, Note, Page, Sheet
from volpipe.runs.pages import Parts, Taken, page_of
from volpipe.runs.provenance import toml
from volpipe.runs.run_folder import RunFolder
from volpipe.training.logs import read_log
from volpipe.training.task import STAGE, RankResult, Training
from volpipe.units import brief

SHOWN = ("loss", "psnr", "ssim", "auc")
HIGHER = ("psnr", "ssim", "auc")  # is better


def training_page(folder: RunFolder, newest_step: int, pictures: Sequence[Draft] = ()) -> Page:
    """Return the report of the training in `folder`, whose newest checkpoint is of that step.

    Raises:
        RunError: there is no training.
    """
    training = Training.load(folder.path)
    if training is None:
        raise RunError(f"{folder.path} holds no training")
    recipe, entries = training.recipe, _entries(folder.path)
    schedule = Schedule(Stage(STAGE, recipe.train.ranks, marked=False))
    taken = Taken.read(folder, lambda: schedule, (RankResult,))
    done = max([newest_step, *(int(entry["step"]) for entry in entries[-1:])])
    facts: dict[str, str | Sequence[str]] = {
        "net": f"{recipe.net.name}" + (f", {toml(recipe.net.options)}" if recipe.net.options else ""),
        "data": [f"{data.path}" for data in recipe.data],
        "steps": f"{done:,} of {recipe.train.steps:,}; newest checkpoint after step {newest_step:,}",
        "time of steps": brief(sum(float(entry.get("seconds", 0.0)) for entry in entries)),
    }
    weights = folder.path / WEIGHTS
    if weights.is_file():
        facts["weights"] = str(weights)
    is_complete = weights.is_file() and newest_step >= recipe.train.steps
    origin: list[Item] = [Facts("Recipe: what differs from the defaults", changed_keys(recipe))]
    what = f"The training of {recipe.net.name}."
    parts = Parts(folder.path.name, what, facts, _scores(entries), pictures, origin)
    return page_of(folder, taken, parts, is_complete=is_complete)


def changed_keys(recipe: RecipeSection) -> dict[str, str]:
    """Return the keys of a recipe that differ from the defaults, with their sections, and values as TOML has them."""
    entries: dict[str, str] = {}
    for name, section in recipe.model_dump(mode="json", exclude_defaults=True).items():
        tables = section if isinstance(section, list) else [section]
        for number, table in enumerate(tables):
            prefix = f"{name}.{number}" if tables is section else name
            values = table if isinstance(table, Mapping) else {"": table}
            entries |= {f"{prefix}.{key}".rstrip("."): toml(value) for key, value in values.items()}
    return entries


def _entries(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Return the log of a training; none where it is damaged, which its own page says nothing of."""
    try:
        return list(read_log(folder))
    except ValueError:
        return []


def _scores(entries: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the first, the last and the best of losses and scores."""
    rows = []
    for name in SHOWN:
        values = [(int(entry["step"]), float(entry[name])) for entry in entries if entry.get(name) is not None]
        if not values:
            continue
        best = (max if name in HIGHER else min)(values, key=lambda pair: pair[1])
        rows.append((name, *(f"{value:.4g} (step {step:,})" for step, value in (values[0], values[-1], best))))
    if not rows:
        return [Note("No step is logged yet.")]
    return [Sheet("Losses and scores", ("", "first", "last", "best"), rows)]
