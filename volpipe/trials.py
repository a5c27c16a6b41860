"""Trials: trainings of one recipe with other values, side by side on a site's workers, each in a folder of its own.

Not here: which values (sweep, tune), or what one training does (course).
"""

from __future__ import annotations

import copy
import csv
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volpipe.complaints import show_value
from volpipe.course import OURS, TICK_SECONDS, Course, Senders, TrainingFailed, claim, is_complete, newest
from volpipe.errors import RecipeError, RunError
from volpipe.folder import RunFolder
from volpipe.lesson import Training
from volpipe.training import TrainRecipe, check_same
from volpipe.training_logs import read_log

log = logging.getLogger(__name__)

TABLE = "table"  # of a folder of trials: table.json and table.csv
SCORES = ("psnr", "auc")  # what a validation logs: of images, of affinities; more is better

Values = dict[str, Any]  # Any: TOML values, by the keys of a recipe such as train.learning_rate


@dataclass(frozen=True)
class Trial:
    """A training to be done: its place among all, its own values, and the recipe that has them."""

    number: int
    values: Values
    recipe: TrainRecipe

    @property
    def name(self) -> str:
        return f"{self.number:03}"


@dataclass(frozen=True)
class Row:
    """What became of a trial.

    Attributes:
        values: that are its own.
        steps: that were taken and kept.
        loss: of the last step that was logged, None where there is none.
        score: of the last validation (PSNR in dB, or area under the curve), None where there is none.
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


def placed(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:  # Any: TOML values
    """Return a copy of a recipe's `tree` with `values` at their keys; a number in a key counts the tables of a list.

    Raises:
        RecipeError: a key leads through something that is no table.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(tree))
    for key, value in values.items():
        *sections, last = key.split(".")
        place: Any = changed
        for section in sections:
            try:
                place = place[int(section)] if isinstance(place, list) else place.setdefault(section, {})
            except (ValueError, IndexError) as error:
                raise RecipeError(f"{key}: the recipe has no {section} there, but {len(place)} tables") from error
            if not isinstance(place, dict | list):
                raise RecipeError(f"{key}: {section} is {show_value(place)}, not a table")
        if not isinstance(place, dict):
            raise RecipeError(f"{key}: {last} is to be set in a list; name the table, such as data.0.path")
        place[last] = value
    return changed


def spelt(values: Mapping[str, Any]) -> str:  # Any: TOML values
    """Return `values` in a line, such as train.seed = 1, train.batch = 2."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def read_scores(folder: Path) -> list[tuple[int, float]]:
    """Return step and score of each validation that is logged in the training's `folder`."""
    entries = read_log(folder, lambda line: any(f'"{name}"' in line for name in SCORES))
    return [(int(entry["step"]), next(entry[name] for name in SCORES if name in entry)) for entry in entries]


def row_of(trial: Trial, folder: Path, state: str, reason: str = "") -> Row:
    """Return what became of `trial`, whose training is in `folder`."""
    entries = read_log(folder)
    steps, scores = newest(folder), read_scores(folder)
    return Row(
        trial.number,
        trial.values,
        steps,
        float(entries[-1]["loss"]) if entries else None,
        scores[-1][1] if scores else None,
        sum(float(line["seconds"]) for line in entries),
        state,
        reason,
    )


def store_table(rows: Sequence[Row], folder: Path) -> None:
    """Write `rows` into `folder`, as JSON and as CSV, with a column for each value."""
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    plain = [
        {"trial": row.number, **{key: row.values.get(key) for key in keys}}
        | {name: getattr(row, name) for name in ("steps", "loss", "score", "seconds", "state", "reason")}
        for row in rows
    ]
    (folder / f"{TABLE}.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    with (folder / f"{TABLE}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(plain[0]) if plain else ["trial"])
        writer.writeheader()
        writer.writerows(plain)


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
            check_same(old.recipe, trial.recipe, newest(folder / trial.name))
        except RecipeError as error:
            raise RecipeError(f"{folder / trial.name}: {error}") from error


class Abreast:
    """Trainings under way side by side: no more than the site's workers take at once.

    Args:
        workers: of the site.
        folder: that the trials' folders are in.
        search_path: folder that the names in their recipes count from.
    """

    def __init__(self, workers: Senders, folder: Path, search_path: Path) -> None:
        self._workers, self._folder, self._search_path = workers, folder, search_path
        self._under_way: dict[str, tuple[Trial, Course, ExitStack]] = {}

    @property
    def trials(self) -> list[Trial]:
        """Those that are under way."""
        return [trial for trial, _, _ in self._under_way.values()]

    def has_room(self, recipe: TrainRecipe) -> bool:
        """Return whether a training by `recipe` would begin at once."""
        busy = sum(trial.recipe.train.ranks for trial in self.trials)
        return not busy or busy + recipe.train.ranks <= self._workers.slots["gpu"]

    def begin(self, trial: Trial) -> None:
        """Begin the training of `trial`, or go on with it."""
        place = RunFolder(self._folder / trial.name)
        training = Training(recipe=trial.recipe, search_path=str(self._search_path))
        with ExitStack() as stack:
            session = stack.enter_context(place.locked())
            claim(place, training)
            log.info("trial %s begins: %s", trial.name, spelt(trial.values))
            course = Course(place, training, self._workers, session)
            self._under_way[trial.name] = trial, course, stack.pop_all()

    def ended(self) -> list[Row]:
        """Wait a moment, and return what became of the trials that ended meanwhile."""
        futures = [future for _, course, _ in self._under_way.values() for future in course.futures]
        wait(futures, TICK_SECONDS, FIRST_COMPLETED)
        rows = []
        for name, (trial, course, stack) in list(self._under_way.items()):
            folder, state, reason = self._folder / name, "done", ""
            try:
                if not course.look():
                    continue
            except TrainingFailed as error:
                state, reason = "failed", str(error)
                log.warning("trial %s failed: %s\n%s", name, error, error.detail)
            if state == "done" and not is_complete(folder, trial.recipe):
                state = "pruned"  # it was asked to stop
            del self._under_way[name]
            stack.close()
            row = row_of(trial, folder, state, reason)
            log.info("trial %s ended: %s after step %d, loss %s, score %s", name, state, row.steps, row.loss, row.score)
            rows.append(row)
        return rows

    def close(self) -> None:
        """Let go of the folders of those under way."""
        for _, _, stack in self._under_way.values():
            stack.close()


@contextmanager
def abreast(workers: Senders, folder: Path, search_path: Path) -> Iterator[Abreast]:
    """Give what trains side by side in `folder`."""
    trainings = Abreast(workers, folder, search_path)
    try:
        yield trainings
    finally:
        trainings.close()


def check_place(folder: RunFolder, file: str, *, fresh: bool) -> None:
    """Refuse a folder that holds something, but not the `file` of what is to go on; or clear it.

    Raises:
        RunError: it holds something else.
    """
    if fresh:
        folder.clear()
    others = [entry.name for entry in folder.path.iterdir() if entry.name not in (*OURS, f".{file}")]
    if others and not (folder.path / file).is_file():
        raise RunError(
            f"{folder.path} holds {others[0]} and no {file}; choose another --out, or use --fresh to delete it"
        )
