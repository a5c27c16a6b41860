"""A sweep: one recipe with lists of values, a training for each combination, all in parallel, and a table of results.

Not here: running trials in parallel (trials), or searching for values (optuna).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from volpipe.errors import RecipeError, RunError
from volpipe.recipes.complaints import show_value
from volpipe.recipes.toml import typed
from volpipe.recipes.training import TrainRecipe
from volpipe.training.driver import is_complete
from volpipe.training.search.trials import (
    SWEEP_FILE,
    Search,
    Trial,
    TrialSource,
    Values,
    best_trial,
    entries,
    result_of,
    with_overrides,
)
from volpipe.training.task import Training, newest_step
from volpipe.volumes.storage.paths import atomic_write

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sweep(Search):
    """The trainings of a sweep: the values of each, in order, and its recipe."""

    kind, file, example = "sweep", SWEEP_FILE, '"train.learning_rate" = [1e-3, 3e-4]'
    combinations: tuple[Values, ...]
    trained: tuple[TrainRecipe, ...]

    @classmethod
    def varying(cls, table: Values, tree: Values, name: str, settings: Sequence[str]) -> Self:
        """Return the sweep over lists, of one length where they are zipped; see `Search`."""
        how = table.pop("combine", "product")
        if how not in ("product", "zip"):
            raise RecipeError(f"{name}: sweep.combine is {show_value(how)}; write product or zip")
        lists = entries(
            table, lambda value: isinstance(value, list) and value != [], section=cls.kind,
            expected="a list of the values to try",
        )  # fmt: skip
        combinations = combined(dict(lists), how)
        recipes = [
            typed(TrainRecipe, with_overrides(tree, values), f"{name}, trial {number}", settings)
            for number, values in enumerate(combinations)
        ]
        return cls(tuple(combinations), tuple(recipes))

    @property
    def recipes(self) -> Sequence[TrainRecipe]:
        return self.trained

    @property
    def num(self) -> int:
        return len(self.trained)

    def left(self, folder: Path) -> list[TrainRecipe]:
        return [trial.recipe for trial in self._incomplete(folder)]

    def _incomplete(self, folder: Path) -> list[Trial]:
        return [trial for trial in self.trials(folder) if not is_complete(folder / trial.name, trial.recipe)]

    def source(self, folder: Path, search_path: Path) -> TrialSource:
        """Return the trials that are not complete, numbered as `folder` has them; see `Search`."""
        trials, left = self.trials(folder), self._incomplete(folder)
        atomic_write(folder / SWEEP_FILE, json.dumps(self._known_values(folder), indent=1).encode())
        self.check_same(folder, search_path)
        log.info("%d trials, of which %d are done", len(trials), len(trials) - len(left))
        known = [result_of(each, folder / each.name, "waiting" if each in left else "done") for each in trials]
        return TrialSource(left, [trial.recipe for trial in left], known)

    def best(self, folder: Path, *, is_open: bool = False) -> Path | None:
        return best_trial(folder, self.combinations, is_open=is_open)

    def check_same(self, folder: Path, search_path: Path) -> None:
        """Refuse trials whose folders hold trainings by other recipes, or by other code of their nets.

        Raises:
            RecipeError: with the folder, and the keys that differ or the net.
        """
        for trial in self.trials(folder):
            old = Training.load(folder / trial.name)
            if old is None:
                continue
            try:
                old.check_same(Training.begin(trial.recipe, search_path), newest_step(folder / trial.name))
            except RecipeError as error:
                raise RecipeError(f"{folder / trial.name}: {error}") from error

    def trials(self, folder: Path) -> list[Trial]:
        """Return the trials, numbered as in `folder`; new combinations get the next numbers."""
        known, combinations = self._known_values(folder), json.loads(json.dumps(self.combinations))
        pairs = {known.index(values): recipe for values, recipe in zip(combinations, self.recipes, strict=True)}
        return [Trial(number, known[number], recipe) for number, recipe in sorted(pairs.items())]

    def _known_values(self, folder: Path) -> list[Values]:
        """Return the values of all trials that `folder` has had, and those that are new, by number."""
        path = folder / SWEEP_FILE
        try:
            known: list[Values] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        except ValueError as error:
            raise RunError(f"{path} is damaged ({error}); use --fresh to start over") from error
        combinations = json.loads(json.dumps(self.combinations))
        new = (each for i, each in enumerate(combinations) if each not in known and each not in combinations[:i])
        return [*known, *new]


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
