"""A sweep: one recipe with lists of values, a training for each combination, all in parallel, and a table of results.

Not here: running trials in parallel (trials), or searching for values (optuna).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from volpipe.blockwise.pool import Start
from volpipe.errors import RecipeError, RunError
from volpipe.recipes.complaints import show_value
from volpipe.recipes.toml import load_tree, typed
from volpipe.recipes.training import VARIED, TrainRecipe
from volpipe.resolve import recipe_name
from volpipe.runs.run_folder import RunFolder
from volpipe.training.driver import check_recipes, check_trainable, is_complete
from volpipe.training.search.trials import (
    OnEnd,
    Source,
    Trial,
    TrialResult,
    Trials,
    Values,
    check_folders,
    entries,
    result_of,
    with_overrides,
)
from volpipe.volumes.storage.paths import atomic_write

log = logging.getLogger(__name__)

SECTION = "sweep"
COMBINE = "combine"
SWEEP_FILE = "sweep.json"  # the values of each trial, by number


@dataclass(frozen=True)
class Sweep:
    """The trainings of a sweep.

    Attributes:
        combinations: the values of each training, in order.
        recipes: the recipe of each combination.
    """

    combinations: tuple[Values, ...]
    recipes: tuple[TrainRecipe, ...]


def load_sweep(path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Return the sweep in the TOML file at `path`, with ``key=value`` settings on top; every recipe is checked.

    Raises:
        RecipeError: no [sweep], a value that is no list, lists of different lengths for zip, or an invalid recipe.
    """
    return sweep_of(load_tree(path, settings), recipe_name(path), settings)


def sweep_of(tree: dict[str, Any], name: str, settings: Sequence[str] = ()) -> Sweep:  # Any: TOML values
    """Return the sweep in the sections `tree`, in which `settings` are already; messages call it `name`.

    Raises:
        RecipeError: as of `load_sweep`.
    """
    table = {key: tree.pop(key, None) for key in VARIED}[SECTION]
    if not isinstance(table, dict) or not table:
        raise RecipeError(f'{name} has no [sweep]; add one, such as: "train.learning_rate" = [1e-3, 3e-4]')
    how = table.pop(COMBINE, "product")
    if how not in ("product", "zip"):
        raise RecipeError(f"{name}: sweep.combine is {show_value(how)}; write product or zip")
    lists = entries(table, _is_list, section=SECTION, expected="a list of the values to try")
    combinations = combined(dict(lists), how)
    recipes = [
        typed(TrainRecipe, with_overrides(tree, values), f"{name}, trial {number}", settings)
        for number, values in enumerate(combinations)
    ]
    return Sweep(tuple(combinations), tuple(recipes))


def _is_list(value: object) -> bool:
    return isinstance(value, list) and value != []


def combined(values: Mapping[str, Sequence[Any]], how: Literal["product", "zip"]) -> list[Values]:  # Any: TOML values
    """Return every combination of `values`, the last key fastest; with "zip" the first of each, the second of each...

    Raises:
        RecipeError: lists of different lengths are to be zipped.
    """
    lengths = {key: len(options) for key, options in values.items()}
    if how == "zip" and len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise RecipeError(f"sweep.combine zip needs lists of one length: {listed}")
    rows = itertools.product(*values.values()) if how == "product" else zip(*values.values(), strict=True)
    return [dict(zip(values, row, strict=True)) for row in rows]


def run_sweep(
    sweep: Sweep, out: Path, start: Start, *, search_path: Path, fresh: bool = False, on_end: OnEnd = lambda _: None
) -> list[TrialResult]:
    """Train every combination of `sweep` in its own folder in `out`, and return the results by number.

    Complete trainings are left alone, others resume from their checkpoints; a failed one stops no other.

    Args:
        out: the sweep's folder; created if missing.
        start: context manager of the workers, called with a folder for their files.
        search_path: folder that the recipes' relative names count from.
        fresh: delete the folder's contents, and start over.
        on_end: called with the result of each trial as it ends.

    Raises:
        RecipeError: a net cannot be trained, or a trial's folder holds a training by another recipe.
        SiteError: the site cannot be used, or has fewer workers than a training has ranks.
        RunError: the folder holds other files.
    """
    for recipe in sweep.recipes:
        check_trainable(recipe.net)
    folder = RunFolder(out.absolute())
    trials = sweep_trials(sweep, folder, search_path=search_path, fresh=fresh, on_end=on_end)
    return trials.work().run(start)


def sweep_trials(
    sweep: Sweep, folder: RunFolder, *, search_path: Path, fresh: bool = False, on_end: OnEnd = lambda _: None
) -> Trials:
    """Return the trials of `sweep` in `folder`; arguments as of `run_sweep`."""
    return Trials(
        kind="sweep", file=SWEEP_FILE, folder=folder, recipe=sweep.recipes[0],
        open=partial(_open, sweep, folder.path, search_path), search_path=search_path, fresh=fresh, on_end=on_end,
    )  # fmt: skip


def _open(sweep: Sweep, folder: Path, search_path: Path) -> Source:
    """Return the trials of `sweep`, numbered as its `folder` has them, each of which is trained to its end.

    Raises:
        RecipeError: a trial's folder holds a training by another recipe.
        VolpipeError: `volpipe train` would refuse a trial.
    """
    trials = numbered(folder, sweep)
    atomic_write(folder / SWEEP_FILE, json.dumps(_known(folder, sweep), indent=1).encode())
    check_folders(trials, folder, search_path)
    left = [trial for trial in trials if not is_complete(folder / trial.name, trial.recipe)]
    check_recipes((trial.recipe for trial in left), search_path)
    log.info("%d trials, of which %d are done", len(trials), len(trials) - len(left))
    states = ("waiting" if trial in left else "done" for trial in trials)
    known = [result_of(trial, folder / trial.name, state) for trial, state in zip(trials, states, strict=True)]
    return Source(iter(left), [trial.recipe for trial in left], known)


def numbered(folder: Path, sweep: Sweep) -> list[Trial]:
    """Return the trials of `sweep`, numbered as in `folder`; new combinations get the next numbers."""
    known, combinations = _known(folder, sweep), json.loads(json.dumps(sweep.combinations))
    pairs = {known.index(values): recipe for values, recipe in zip(combinations, sweep.recipes, strict=True)}
    return [Trial(number, known[number], recipe) for number, recipe in sorted(pairs.items())]


def _known(folder: Path, sweep: Sweep) -> list[Values]:
    """Return the values of all trials that `folder` has had, and those of `sweep` that are new, by number."""
    path = folder / SWEEP_FILE
    try:
        known: list[Values] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); use --fresh to start over") from error
    combinations = json.loads(json.dumps(sweep.combinations))
    return known + [
        values for i, values in enumerate(combinations) if values not in known and values not in combinations[:i]
    ]
