"""Trials: trainings of one recipe with different values, in parallel on a site's workers, each in its own folder.

Not here: the choice of values (grid, optuna), or the driver of one training (training.driver).
"""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import POOL, RELEASED, Ended, Steps, Together, Work
from volpipe.errors import RecipeError
from volpipe.recipes.complaints import show_value
from volpipe.recipes.training import WEIGHTS, TrainRecipe
from volpipe.runs.presence import Presence, present
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import Counts, HeldWork
from volpipe.training.driver import (
    TrainingFailed,
    check_slots,
    claim_folder,
    is_complete,
    log_beginning,
    trained,
    training_work,
)
from volpipe.training.logs import read_log, read_scores
from volpipe.training.search.pages import TABLE, read_table, trials_page
from volpipe.training.task import STAGE, Training, newest_step
from volpipe.volumes.identity import Identity
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

UNFINISHED = "unfinished"  # a file there, from when trials begin until the table has them

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


def result_of(trial: Trial, folder: Path, state: str, reason: str = "") -> TrialResult:
    """Return the result of `trial` from its training's log in `folder`."""
    entries, scores = [entry for entry in read_log(folder) if entry["step"]], read_scores(folder)
    return TrialResult(
        trial.number,
        trial.values,
        newest_step(folder),
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
    (folder / TABLE).write_text(json.dumps(table, indent=1), encoding="utf-8")
    with (folder / TABLE).with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]) if table else ["trial"])
        writer.writeheader()
        writer.writerows(table)


def is_ended(folder: Path) -> bool:
    """Return whether all trials that were asked for in `folder` have ended, with weights where they were not pruned."""
    rows = read_table(folder)
    done = [row for row in rows if row["state"] == "done"]
    has_weights = all((folder / f"{row['trial']:03}" / WEIGHTS).is_file() for row in done)
    is_over = bool(done) and all(row["state"] in ("done", "pruned") for row in rows)
    return is_over and has_weights and not (folder / UNFINISHED).exists()


def best_trial(folder: Path, asked: Sequence[Values] | int = 0) -> Path | None:
    """Return the folder of the trial with the highest score, the first of equal ones; None while some are left.

    Args:
        folder: of all trials.
        asked: the values of those that count, or how many there have to be.
    """
    rows = read_table(folder) if is_ended(folder) else []
    if isinstance(asked, int):
        is_all = len(rows) >= asked
    else:
        wanted = json.loads(json.dumps(asked))
        rows = [row for row in rows if {key: row.get(key) for key in wanted[0]} in wanted]
        is_all = len(rows) == len(wanted)
    done = [row for row in rows if row["state"] == "done" and row["score"] is not None]
    scored = [row for row in done if not math.isnan(row["score"])]
    if not (is_all and scored):
        return None
    best = max(scored, key=lambda row: (row["score"], -row["trial"]))
    return folder / f"{best['trial']:03}"


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


@dataclass(frozen=True)
class Source:
    """Where trials come from, with their values; without functions, a list of them.

    Attributes:
        trials: to begin, or to go on with, as they are asked for.
        recipes: of these, as far as ranks go.
        known: results, as they are when it begins.
        watch: looks at the scores of a trial under way, and stops one that lags behind.
        keep: takes note of a result; what it raises stops the others.
        ordered: returns the results of all trials in the order of their table, from those that are known by now.
    """

    trials: Iterator[Trial]
    recipes: Sequence[TrainRecipe]
    known: Sequence[TrialResult] = ()
    watch: Callable[[Trial], None] = lambda trial: None
    keep: Callable[[TrialResult], None] = lambda result: None
    ordered: Callable[[list[TrialResult]], list[TrialResult]] = lambda rows: rows


@dataclass(kw_only=True)
class Trials:
    """Trials, each in a folder of its own in that of them all.

    Attributes:
        kind: "sweep" or "tune".
        file: by which the folder is known.
        recipe: the first of all, for the log.
        open: opens the source of trials in the folder, which is held.
        search_path: folder that the recipes' relative names count from.
        fresh: whether to delete the folder's contents, and start over.
        on_end: called with the result of each trial as it ends.
        rows: the results that are known, by number.
        running: trials that are being trained, by name.
        identities: of the volumes of trials that have begun.
    """

    kind: str
    file: str
    folder: RunFolder
    recipe: TrainRecipe
    open: Callable[[], Source]
    search_path: Path
    fresh: bool
    on_end: OnEnd
    rows: dict[int, TrialResult] = field(default_factory=dict)
    running: dict[str, Trial] = field(default_factory=dict)
    identities: dict[Volume, Identity] = field(default_factory=dict)

    def work(self) -> HeldWork[list[TrialResult]]:
        """Return the work of all trials."""
        return HeldWork(
            self.kind, self.folder, claim=partial(claim_folder, self.folder, self.file, fresh=self.fresh),
            held_steps=self._held_steps, page=partial(trials_page, self.folder), counts=self._counts,
        )  # fmt: skip

    def _counts(self) -> Counts:
        states = Counter(row.state for row in list(self.rows.values()))
        running = {"waiting": max(0, states["waiting"] - len(self.running)), "running": len(self.running)}
        return {"trials": {**states, **running}}

    def _held_steps(self, name: str, presence: Presence) -> Steps[list[TrialResult]]:
        """Train what is not complete, and return the results of all."""
        log_beginning(self.folder, self.kind, self.recipe)
        source, folder = self.open(), self.folder.path
        self.rows = {row.number: row for row in source.known}
        first = next(source.trials, None)
        try:
            if first is not None:
                yield from self._side_by_side(source, chain([first], source.trials))
        finally:
            rows = source.ordered(list(self.rows.values()))
            store_table(rows, folder)
        (folder / UNFINISHED).unlink(missing_ok=True)
        log.info("%d of %d trials are done", sum(row.state == "done" for row in rows), len(rows))
        return rows

    def _side_by_side(self, source: Source, trials: Iterable[Trial]) -> Steps[None]:
        """Train `trials` of `source`; the next is asked for when the workers have room.

        Raises:
            SiteError: a training has more ranks than the site has workers.
            VolpipeError: a trial's folder is another driver's, or holds other files.
        """
        pool: WorkerPool = yield POOL
        for recipe in source.recipes:
            check_slots(recipe, pool.slots)
        (self.folder.path / UNFINISHED).touch()
        works = (Work(trial.name, partial(self._trial, trial), "trial") for trial in trials)
        at_once = pool.slots["gpu"] // min(recipe.train.ranks for recipe in source.recipes)

        def watch() -> None:
            for trial in self.running.values():
                source.watch(trial)

        yield Together(works, partial(self._end, source), at_once=at_once, on_tick=watch)
        yield RELEASED

    def _trial(self, trial: Trial) -> Steps[None]:
        """Begin or resume the training of `trial`."""
        training = Training.begin(trial.recipe, self.search_path, is_trial=True)
        folder = RunFolder(self.folder.path / trial.name)
        work = training_work(folder, training, same_input=True, known=self.identities)
        with work.folder.locked() as session:
            work.claim()
            log.info("trial %s begins: %s", trial.name, format_values(trial.values))
            self.running[trial.name] = trial
            steps = trial.recipe.train.steps
            with work.reporting(), present(work.folder.path, session) as presence:
                yield from trained(
                    work.folder.path, training, session, lambda step: presence.tell({STAGE: StageNote(step, steps)})
                )

    def _end(self, source: Source, ended: Ended[None]) -> None:
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
        self.rows[row.number] = row
        source.keep(row)
