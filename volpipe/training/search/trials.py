"""Trials: trainings of one recipe with different values, in parallel on a site's workers, each in its own folder.

Not here: the choice of values (grid, optuna), or the driver of one training (training.driver).
"""

from __future__ import annotations

import copy
import csv
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RecipeError, RunError
from volpipe.recipes.complaints import show_value
from volpipe.recipes.training import TrainRecipe, check_same
from volpipe.runs.run_folder import RunFolder
from volpipe.training.driver import (
    BOOKKEEPING,
    TICK_SECONDS,
    TrainingFailed,
    TrainingRun,
    claim,
    is_complete,
    newest_step,
)
from volpipe.training.logs import read_log
from volpipe.training.task import Training

log = logging.getLogger(__name__)

TABLE = "table"  # in a folder of trials: table.json and table.csv
SCORES = ("psnr", "auc")  # log keys of a validation, of images and of affinities; higher is better

Values = dict[str, Any]  # Any: TOML values, by the keys of a recipe such as train.learning_rate


@dataclass(frozen=True)
class Trial:
    """One training of many: its number, its own values, and its recipe with them."""

    number: int
    values: Values
    recipe: TrainRecipe

    @property
    def name(self) -> str:
        return f"{self.number:03}"


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial, a row of the table.

    Attributes:
        number: of the trial.
        values: of the trial.
        steps: number of steps up to its newest checkpoint.
        loss: of the last logged step, None without any.
        score: of the last validation (PSNR in dB, or area under the curve), None without any.
        seconds: of its steps, over all sessions.
        state: done, pruned, failed, or waiting.
        reason: why it failed, in a line.
    """

    number: int
    values: Values
    steps: int
    loss: float | None
    score: float | None
    seconds: float
    state: str
    reason: str = ""


def with_overrides(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:  # Any: TOML values
    """Return a copy of a recipe's `tree` with `values` at their keys; a number in a key is an index into a list.

    Raises:
        RecipeError: a key leads through a value that is no table.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(tree))
    for key, value in values.items():
        *sections, last = key.split(".")
        node: Any = changed
        for section in sections:
            try:
                node = node[int(section)] if isinstance(node, list) else node.setdefault(section, {})
            except (ValueError, IndexError) as error:
                raise RecipeError(f"{key}: the recipe has no {section} there, but {len(node)} tables") from error
            if not isinstance(node, dict | list):
                raise RecipeError(f"{key}: {section} is {show_value(node)}, not a table")
        if not isinstance(node, dict):
            raise RecipeError(f"{key}: {last} is to be set in a list; name the table, such as data.0.path")
        node[last] = value
    return changed


def format_values(values: Mapping[str, Any]) -> str:  # Any: TOML values
    """Return `values` in a line, such as train.seed = 1, train.batch = 2."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def read_scores(folder: Path) -> list[tuple[int, float]]:
    """Return step and score of each validation in the log of the training in `folder`."""
    entries = read_log(folder, lambda line: any(f'"{name}"' in line for name in SCORES))
    return [(int(entry["step"]), next(entry[name] for name in SCORES if name in entry)) for entry in entries]


def result_of(trial: Trial, folder: Path, state: str, reason: str = "") -> TrialResult:
    """Return the result of `trial` from its training's log in `folder`."""
    entries = read_log(folder)
    steps, scores = newest_step(folder), read_scores(folder)
    return TrialResult(
        trial.number,
        trial.values,
        steps,
        float(entries[-1]["loss"]) if entries else None,
        scores[-1][1] if scores else None,
        sum(float(line["seconds"]) for line in entries),
        state,
        reason,
    )


def store_table(rows: Sequence[TrialResult], folder: Path) -> None:
    """Write `rows` into `folder`, as JSON and as CSV, with a column for each value."""
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    table = [
        {"trial": row.number, **{key: row.values.get(key) for key in keys}}
        | {name: getattr(row, name) for name in ("steps", "loss", "score", "seconds", "state", "reason")}
        for row in rows
    ]
    (folder / f"{TABLE}.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    with (folder / f"{TABLE}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]) if table else ["trial"])
        writer.writeheader()
        writer.writerows(table)


def check_folders(trials: Iterable[Trial], folder: Path) -> None:
    """Refuse trials whose folders hold trainings by other recipes.

    Raises:
        RecipeError: with the folder and the keys that differ.
    """
    for trial in trials:
        old = Training.load(folder / trial.name)
        if old is None:
            continue
        try:
            check_same(old.recipe, trial.recipe, newest_step(folder / trial.name))
        except RecipeError as error:
            raise RecipeError(f"{folder / trial.name}: {error}") from error


class TrialPool:
    """Trials running in parallel, no more than the site's workers take at once.

    Args:
        workers: of the site.
        folder: parent of the trials' folders.
        search_path: folder that the recipes' relative names count from.
    """

    def __init__(self, workers: WorkerPool, folder: Path, search_path: Path) -> None:
        self._workers, self._folder, self._search_path = workers, folder, search_path
        self._running: dict[str, tuple[Trial, TrainingRun, ExitStack]] = {}

    @property
    def trials(self) -> list[Trial]:
        """The running trials."""
        return [trial for trial, _, _ in self._running.values()]

    def has_room(self, recipe: TrainRecipe) -> bool:
        """Return whether the workers can take a training by `recipe` now."""
        busy = sum(trial.recipe.train.ranks for trial in self.trials)
        return not busy or busy + recipe.train.ranks <= self._workers.slots["gpu"]

    def begin(self, trial: Trial) -> None:
        """Begin or resume the training of `trial`."""
        folder = RunFolder(self._folder / trial.name)
        training = Training(recipe=trial.recipe, search_path=str(self._search_path))
        with ExitStack() as stack:
            session = stack.enter_context(folder.locked())
            claim(folder, training)
            log.info("trial %s begins: %s", trial.name, format_values(trial.values))
            run = TrainingRun(folder, training, self._workers, session)
            self._running[trial.name] = trial, run, stack.pop_all()

    def wait(self) -> list[TrialResult]:
        """Wait up to `TICK_SECONDS`, and return the results of the trials that ended."""
        futures = [future for _, run, _ in self._running.values() for future in run.futures]
        wait(futures, TICK_SECONDS, FIRST_COMPLETED)
        results = []
        for name, (trial, run, stack) in list(self._running.items()):
            folder, state, reason = self._folder / name, "done", ""
            try:
                if not run.poll():
                    continue
            except TrainingFailed as error:
                state, reason = "failed", str(error)
                log.warning("trial %s failed: %s\n%s", name, error, error.detail)
            if state == "done" and not is_complete(folder, trial.recipe):
                state = "pruned"  # by a file "stop"
            del self._running[name]
            stack.close()
            row = result_of(trial, folder, state, reason)
            log.info("trial %s ended: %s after step %d, loss %s, score %s", name, state, row.steps, row.loss, row.score)
            results.append(row)
        return results

    def close(self) -> None:
        """Unlock the folders of the running trials."""
        for _, _, stack in self._running.values():
            stack.close()


def check_place(folder: RunFolder, file: str, *, fresh: bool) -> None:
    """Refuse a folder that holds other files but no `file` to resume from, or clear it if `fresh`.

    Raises:
        RunError: with one of the files.
    """
    if fresh:
        folder.clear()
    others = [entry.name for entry in folder.path.iterdir() if entry.name not in BOOKKEEPING]
    if others and not (folder.path / file).is_file():
        raise RunError(
            f"{folder.path} holds {others[0]} and no {file}; choose another --out, or use --fresh to delete it"
        )
