"""A sweep: one recipe with lists of values, a training for each combination, all side by side, one table at the end.

Not here: how trainings go on side by side (trials), or values that are searched for (tune).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from volpipe.complaints import show_value
from volpipe.course import check_slots, check_trainable, is_complete, logged
from volpipe.errors import RecipeError, RunError
from volpipe.folder import RunFolder
from volpipe.formats.files import atomic_write
from volpipe.pool import Start
from volpipe.presence import present
from volpipe.recipe import load_tree, typed
from volpipe.resolve import recipe_name
from volpipe.training import VARIED, TrainRecipe
from volpipe.trials import Row, Trial, Values, abreast, check_folders, check_place, placed, row_of, store_table

log = logging.getLogger(__name__)

SECTION = "sweep"
COMBINE = "combine"
SWEEP_FILE = "sweep.json"  # the values of each trial, by number

OnRow = Callable[[Row], None]


@dataclass(frozen=True)
class Sweep:
    """What is swept.

    Attributes:
        combinations: the values of each training, in order.
        recipes: one for each.
    """

    combinations: tuple[Values, ...]
    recipes: tuple[TrainRecipe, ...]


def load_sweep(path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Return the sweep in the TOML file at `path`, with ``key=value`` settings on top; every recipe is checked.

    Raises:
        RecipeError: no [sweep], a value that is no list, lists of different lengths for zip, or a recipe that is wrong.
    """
    tree = load_tree(path, settings)
    table = {name: tree.pop(name, None) for name in VARIED}[SECTION]
    if not isinstance(table, dict) or not table:
        raise RecipeError(f'{recipe_name(path)} has no [sweep]; add one, such as: "train.learning_rate" = [1e-3, 3e-4]')
    how = table.pop(COMBINE, "product")
    if how not in ("product", "zip"):
        raise RecipeError(f"{recipe_name(path)}: sweep.combine is {show_value(how)}; write product or zip")
    combinations = combined(dict(lists(table)), how)
    recipes = [
        typed(TrainRecipe, placed(tree, values), f"{recipe_name(path)}, trial {number}", settings)
        for number, values in enumerate(combinations)
    ]
    return Sweep(tuple(combinations), tuple(recipes))


def lists(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:  # Any: TOML values
    """Yield key and values of each list in `table`, whose keys may be quoted with their dots, or be tables.

    Raises:
        RecipeError: a value is no list, or an empty one.
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from lists(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield f"{prefix}{key}", value
        else:
            raise RecipeError(f"sweep: {prefix}{key} is {show_value(value)}; give a list of the values to try")


def combined(values: Mapping[str, Sequence[Any]], how: Literal["product", "zip"]) -> list[Values]:  # Any: TOML values
    """Return every combination of `values`, the last key fastest; with "zip" the first of each, the second of each...

    Raises:
        RecipeError: lists of different lengths are to be zipped.
    """
    lengths = {key: len(each) for key, each in values.items()}
    if how == "product":
        return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise RecipeError(f"sweep.combine zip needs lists of one length: {told}")
    return [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]


def run_sweep(
    sweep: Sweep, out: Path, start: Start, *, search_path: Path, fresh: bool = False, on_row: OnRow = lambda row: None
) -> list[Row]:
    """Train every combination of `sweep` in a folder of its own in `out`, and return what became of each.

    Trainings that are complete are left alone, others go on from their checkpoints; one that fails stops no other.

    Args:
        sweep: what is done.
        out: the folder; made where it is missing.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        search_path: folder that the recipes' relative names count from.
        fresh: delete what is in the folder, and start over.
        on_row: told what became of each trial, as it ends.

    Raises:
        RecipeError: a net cannot be trained, or a trial's folder holds a training by another recipe.
        SiteError: the site cannot be used, or has fewer workers than a training has ranks.
        RunError: the folder holds something else.
    """
    for recipe in sweep.recipes:
        check_trainable(recipe.net)
    folder = RunFolder(out.absolute())
    with folder.locked() as session:
        check_place(folder, SWEEP_FILE, fresh=fresh)
        with logged(folder, "sweep", sweep.recipes[0]), present(folder.path, session):
            trials = _number(folder.path, sweep)
            check_folders(trials, folder.path)
            left = [trial for trial in trials if not is_complete(folder.path / trial.name, trial.recipe)]
            rows = {t.number: row_of(t, folder.path / t.name, "waiting" if t in left else "done") for t in trials}
            log.info("%d trials, of which %d are done", len(trials), len(trials) - len(left))
            if left:
                try:
                    for row in _train(left, folder, start, search_path):
                        rows[row.number] = row
                        on_row(row)
                finally:
                    store_table(list(rows.values()), folder.path)
            log.info("%d of %d trials are done", sum(row.state == "done" for row in rows.values()), len(rows))
            return list(rows.values())


def _train(left: Sequence[Trial], folder: RunFolder, start: Start, search_path: Path) -> Iterator[Row]:
    """Yield what became of each trial that is left, as it ends."""
    waiting = list(left)
    with start(folder.parsl) as workers, abreast(workers, folder.path, search_path) as trainings:
        for trial in waiting:
            check_slots(trial.recipe, workers.slots)
        while waiting or trainings.trials:
            while waiting and trainings.has_room(waiting[0].recipe):
                trainings.begin(waiting.pop(0))
            yield from trainings.ended()


def _number(folder: Path, sweep: Sweep) -> list[Trial]:
    """Return the trials of `sweep`, numbered as in `folder`; combinations that are new there get the next numbers."""
    path = folder / SWEEP_FILE
    try:
        known: list[Values] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); use --fresh to start over") from error
    plain = json.loads(json.dumps(sweep.combinations))
    known += [values for i, values in enumerate(plain) if values not in known and values not in plain[:i]]
    atomic_write(path, json.dumps(known, indent=1).encode())
    pairs = {known.index(values): recipe for values, recipe in zip(plain, sweep.recipes, strict=True)}
    return [Trial(number, known[number], recipe) for number, recipe in sorted(pairs.items())]
