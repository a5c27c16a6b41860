"""Trials: trainings of one recipe with different values, in parallel on a site's workers, each in its own folder.

Not here: the choice of values (grid, optuna), or the driver of one training (training.driver).
"""

from __future__ import annotations

import copy
import csv
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import POOL, RELEASED, Ended, Errand, Steps, Together
from volpipe.errors import RecipeError
from volpipe.recipes.complaints import show_value
from volpipe.recipes.training import TrainRecipe
from volpipe.reporting.page import Page
from volpipe.runs.presence import present
from volpipe.runs.run_folder import RunFolder
from volpipe.training.driver import LearningWork, TrainingFailed, TrainingWork, check_slots, is_complete, newest_step
from volpipe.training.logs import read_log
from volpipe.training.search.pages import trials_page
from volpipe.training.task import STAGE, Training

log = logging.getLogger(__name__)

TABLE = "table"  # in a folder of trials: table.json and table.csv
UNFINISHED = "unfinished"  # a file there, from when trials begin until the table has them
SCORES = ("psnr", "auc", "mean dice")  # log keys of a validation, one for each kind; higher is better

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


OnEnd = Callable[[TrialResult], None]


def entries(
    table: Mapping[str, Any], is_entry: Callable[[object], bool], *, section: str, expected: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:  # Any: TOML values
    """Yield key and value of each entry of a recipe's `section`; keys are dotted and quoted, or nested tables.

    Raises:
        RecipeError: a value is neither an entry nor a table; the message says what is `expected`.
    """
    for key, value in table.items():
        if is_entry(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from entries(value, is_entry, section=section, expected=expected, prefix=f"{prefix}{key}.")
        else:
            raise RecipeError(f"{section}: {prefix}{key} is {show_value(value)}; give {expected}")


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
    (folder / UNFINISHED).unlink(missing_ok=True)


def check_folders(trials: Iterable[Trial], folder: Path, search_path: Path) -> None:
    """Refuse trials whose folders hold trainings by other recipes, or by other code of their nets.

    Raises:
        RecipeError: with the folder, and the keys that differ or the net.
    """
    for trial in trials:
        old = Training.load(folder / trial.name)
        if old is None:
            continue
        try:
            old.check_same(Training.begin(trial.recipe, search_path), newest_step(folder / trial.name))
        except RecipeError as error:
            raise RecipeError(f"{folder / trial.name}: {error}") from error


@dataclass(kw_only=True)
class TrialsWork(LearningWork[list[TrialResult]]):
    """Trials, each in a folder of its own in that of them all.

    Attributes:
        search_path: folder that the recipes' relative names count from.
        on_end: called with the result of each trial as it ends.
        running: trials that are being trained, by name.
    """

    search_path: Path
    on_end: OnEnd
    running: dict[str, Trial] = field(default_factory=dict)

    def page(self, *, with_pictures: bool = True) -> Page:
        """Return the report of the trials; see `HeldWork`."""
        return trials_page(self.folder, with_pictures=with_pictures)

    @abstractmethod
    def keep(self, result: TrialResult) -> None:
        """Take note of the result of a trial; what this raises stops the others."""

    def side_by_side(
        self, trials: Iterable[Trial], recipes: Sequence[TrainRecipe], on_tick: Callable[[], None] = lambda: None
    ) -> Steps[None]:
        """Train `trials`, of these `recipes` as far as ranks go; the next is asked for when the workers have room.

        Raises:
            SiteError: a training has more ranks than the site has workers.
            VolpipeError: a trial's folder is another driver's, or holds other files.
        """
        pool: WorkerPool = yield POOL
        for recipe in recipes:
            check_slots(recipe, pool.slots)
        (self.folder.path / UNFINISHED).touch()
        works = (Errand(trial.name, partial(self._trial, trial)) for trial in trials)
        at_once = pool.slots["gpu"] // min(recipe.train.ranks for recipe in recipes)
        yield Together(works, self._end, at_once=at_once, on_tick=on_tick)
        yield RELEASED

    def _trial(self, trial: Trial) -> Steps[None]:
        """Begin or resume the training of `trial`."""
        training = Training.begin(trial.recipe, self.search_path)
        work = TrainingWork(folder=RunFolder(self.folder.path / trial.name), training=training, same_input=True)
        with work.folder.locked() as session:
            work.claim()
            log.info("trial %s begins: %s", trial.name, format_values(trial.values))
            self.running[trial.name] = trial
            steps = trial.recipe.train.steps
            with work.reporting(), present(work.folder.path, session) as presence:
                yield from work.trained(session, lambda step: presence.tell({STAGE: StageNote(step, steps)}))

    def _end(self, ended: Ended[None]) -> None:
        """Hand on how a trial ended."""
        name, error = ended.work.name, ended.error
        if error is not None and not isinstance(error, TrainingFailed):
            raise error
        trial, folder = self.running.pop(name), self.folder.path / name
        state = "done" if is_complete(folder, trial.recipe) else "pruned"  # by a file "stop"
        if error is not None:
            state = "failed"
            log.warning("trial %s failed: %s", name, error)
        row = result_of(trial, folder, state, str(error or ""))
        log.info("trial %s ended: %s after step %d, loss %s, score %s", name, state, row.steps, row.loss, row.score)
        self.on_end(row)
        self.keep(row)
