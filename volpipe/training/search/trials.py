"""Trials: trainings of one recipe with other values, in parallel on a site's workers, each in its own folder.

Not here: the choice of values (grid, optuna), or the driver of one training (training.driver).
"""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.pool import Start, WorkerPool
from volpipe.blockwise.work import POOL, RELEASED, Ended, Steps, Together, Work
from volpipe.errors import RecipeError, RunStopped
from volpipe.nets.trained import Trained
from volpipe.recipes.complaints import show_value
from volpipe.recipes.toml import load_tree
from volpipe.recipes.training import VARIED, WEIGHTS, TrainRecipe
from volpipe.resolve import recipe_name
from volpipe.runs.held_work import Counts, HeldWork
from volpipe.runs.presence import Presence, present
from volpipe.runs.report import Ending
from volpipe.runs.run_folder import RunFolder
from volpipe.training.driver import (
    check_recipes,
    check_slots,
    claim_folder,
    is_complete,
    log_beginning,
    trained,
    training_work,
)
from volpipe.training.logs import read_log, read_scores
from volpipe.training.search.pages import CHOICE, TABLE, read_table, trials_page
from volpipe.training.task import STAGE, Training, newest_step
from volpipe.units import count
from volpipe.volumes.identity import Identity
from volpipe.volumes.storage.paths import atomic_write
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

SWEEP_FILE, STUDY = "sweep.json", "study.jsonl"  # by which a folder of trials is known, of lists and of ranges
UNFINISHED = "unfinished"  # a file there, from when trials begin until the table has them

Values = dict[str, Any]  # Any: TOML values, by the keys of a recipe such as train.learning_rate
Tree = Mapping[str, Any]


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


class TrialResults(list[TrialResult]):
    """The results of all trials of a search; a trial in one of the states `ended` is over.

    Attributes:
        best: the folder of the trial with the highest score, once all are over; None where there is none.
    """

    def __init__(self, rows: Iterable[TrialResult], ended: Sequence[str], best: Path | None = None) -> None:
        super().__init__(rows)
        self.ended, self.best = ended, best

    @property
    def ending(self) -> Ending:
        """How the search ended."""
        return Ending.of_many([row.reason for row in self if row.state not in self.ended], len(self), "trainings")


class TrialSource:
    """Where trials come from, with their values: here a list of them.

    Attributes:
        trials: to begin, or to go on with, as they are asked for.
        recipes: of these, as far as ranks go.
        known: results, as they are when it begins.
    """

    def __init__(
        self, trials: Iterable[Trial], recipes: Sequence[TrainRecipe], known: Sequence[TrialResult] = ()
    ) -> None:
        self.trials, self.recipes, self.known = iter(trials), recipes, known

    def watch(self, trial: Trial) -> None:
        """Read the scores of a trial under way, and ask it to stop if it lags behind."""

    def keep(self, result: TrialResult) -> None:
        """Keep a result; an error raised here stops the other trials."""

    def ordered(self, rows: list[TrialResult]) -> list[TrialResult]:
        """Return the results of all trials in the order of their table, from those that are known by now."""
        return rows


class Search(ABC):
    """A recipe with values to vary, each combination of which is a training of its own.

    Attributes:
        kind: of the command, and the section of the recipe that says what is varied; `example` is one.
        file: by which a folder of such trainings is known.
        ended: states of trainings of which nothing is left.
    """

    kind: ClassVar[str]
    file: ClassVar[str]
    example: ClassVar[str]
    ended: ClassVar[Sequence[str]] = ("done",)

    @property
    @abstractmethod
    def recipes(self) -> Sequence[TrainRecipe]:
        """The recipes of all trainings; of a search in ranges, those with the ends of each range."""

    @property
    @abstractmethod
    def num(self) -> int:
        """Number of trainings."""

    @classmethod
    def load(cls, path: Path, settings: Sequence[str] = ()) -> Self:
        """Return the search in the TOML file at `path`, with ``key=value`` settings on top; recipes are checked.

        Raises:
            RecipeError: its section is missing, or a value there, or in a recipe, does not fit.
        """
        return cls.of(load_tree(path, settings), recipe_name(path), settings)

    @classmethod
    def of(cls, tree: dict[str, Any], name: str, settings: Sequence[str] = ()) -> Self:  # Any: TOML values
        """Return the search in the sections `tree`, in which `settings` are already; messages call it `name`.

        Raises:
            RecipeError: as of `load`.
        """
        table = {key: tree.pop(key, None) for key in VARIED}[cls.kind]
        if not isinstance(table, dict) or not table:
            raise RecipeError(f"{name} has no [{cls.kind}]; add one, such as: {cls.example}")
        search = cls.varying(table, tree, name, settings)
        if any(recipe.has_test and not recipe.train.validate_every for recipe in search.recipes):
            raise RecipeError(
                f"{name}: data.test is for the best training, which a score of data.held_out tells; give "
                "train.validate_every and data.held_out, or leave data.test out"
            )
        return search

    @classmethod
    @abstractmethod
    def varying(cls, table: Values, tree: Values, name: str, settings: Sequence[str]) -> Self:
        """Return the search that varies what its section `table` says in the other sections."""

    @abstractmethod
    def left(self, folder: Path) -> Sequence[TrainRecipe]:
        """Return the recipes that are not trained yet in `folder`, whose volumes are checked before any begins."""

    @abstractmethod
    def source(self, folder: Path, search_path: Path) -> TrialSource:
        """Return where trials come from in `folder`, which is held.

        Raises:
            RecipeError: the folder holds other trainings.
        """

    @abstractmethod
    def best(self, folder: Path, *, is_open: bool = False) -> Path | None:
        """Return the folder of the best training of all; None while some are left.

        Args:
            is_open: whether the session that trains them asks, which has yet to end.
        """

    def check_same(self, folder: Path, search_path: Path) -> None:  # noqa: B027
        """Refuse a folder with trainings by other recipes, as far as that shows before its lock is held."""


def run_search(
    search: Search, out: Path, start: Start, *, search_path: Path, fresh: bool = False,
    on_end: OnEnd = lambda result: None,
) -> list[TrialResult]:  # fmt: skip
    """Train the trials of `search` that are not complete, each in its own folder in `out`, and return all results.

    Complete trainings are left alone, others resume from their checkpoints; a failed one stops no other.

    Args:
        out: created if missing.
        start: context manager of the workers, called with a folder for their files.
        search_path: folder that the recipe's relative names count from.
        fresh: delete the folder's contents, and start over.
        on_end: called with the result of each trial as it ends.

    Raises:
        RecipeError: a net cannot be trained, or the folder holds trainings by another recipe.
        SiteError: the site cannot be used, or has fewer workers than a training has ranks.
        RunStopped: the first trials of a search in ranges all fail.
        RunError: the folder holds other files.
    """
    folder = RunFolder(out.absolute())
    trials = Trials(search, folder, search_path, fresh=fresh, on_end=on_end)
    check_recipes(search.recipes if fresh else search.left(folder.path), search_path)
    return trials.work().run(start)


def entries(
    table: Tree, is_entry: Callable[[object], bool], *, section: str, expected: str, prefix: str = ""
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


def with_overrides(tree: Tree, values: Tree) -> dict[str, Any]:  # Any: TOML values
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


def format_values(values: Tree) -> str:
    """Return `values` in a line, such as train.seed = 1, train.batch = 2."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def result_of(trial: Trial, folder: Path, state: str, reason: str = "") -> TrialResult:
    """Return the result of `trial` from its training's log in `folder`."""
    entries, scores = [entry for entry in read_log(folder) if entry["step"]], read_scores(folder)
    loss, score = (float(entries[-1]["loss"]) if entries else None), (scores[-1][1] if scores else None)
    seconds = sum(float(line["seconds"]) for line in entries)
    return TrialResult(trial.number, trial.values, newest_step(folder), loss, score, seconds, state, reason)


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


def has_trials(folder: Path) -> bool:
    """Return whether `folder` is one of trials."""
    return any((folder / name).is_file() for name in (SWEEP_FILE, STUDY))


def is_ended(folder: Path, *, is_open: bool = False) -> bool:
    """Return whether all trials that were asked for in `folder` have ended, with weights where they were not pruned.

    Args:
        is_open: whether their session has yet to end.
    """
    rows = read_table(folder)
    done = [row for row in rows if row["state"] == "done"]
    has_weights = all((folder / f"{row['trial']:03}" / WEIGHTS).is_file() for row in done)
    is_over = bool(done) and all(row["state"] in ("done", "pruned") for row in rows)
    return is_over and has_weights and (is_open or not (folder / UNFINISHED).exists())


def best_trial(folder: Path, asked: Sequence[Values] | int = 0, *, is_open: bool = False) -> Path | None:
    """Return the folder of the trial with the highest score, the first of equal ones; None while some are left.

    Args:
        folder: of all trials.
        asked: the values of those that count, or how many there have to be.
        is_open: as of `is_ended`.
    """
    rows = read_table(folder) if is_ended(folder, is_open=is_open) else []
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


@dataclass
class Trials:
    """The trials of a search at work, each in its own folder within the search's.

    Attributes:
        search_path: folder that the recipes' relative names count from.
        fresh: whether to delete the folder's contents, and start over.
        on_end: called with the result of each trial as it ends.
        rows: the results that are known, by number.
        running: trials that are being trained, by name.
        identities: of the volumes of trials that have begun.
    """

    search: Search
    folder: RunFolder
    search_path: Path
    fresh: bool = False
    on_end: OnEnd = lambda result: None
    rows: dict[int, TrialResult] = field(default_factory=dict)
    running: dict[str, Trial] = field(default_factory=dict)
    identities: dict[Volume, Identity] = field(default_factory=dict)

    def work(self) -> HeldWork[list[TrialResult]]:
        """Return the work of all trials."""
        return HeldWork(
            self.search.kind, self.folder, claim=partial(claim_folder, self.folder, self.search.file, fresh=self.fresh),
            held_steps=self._train_trials, page=partial(trials_page, self.folder), counts=self._counts_by_state,
        )  # fmt: skip

    def _counts_by_state(self) -> Counts:
        states = Counter(row.state for row in list(self.rows.values()))
        running = {"waiting": max(0, states["waiting"] - len(self.running)), "running": len(self.running)}
        return {"trials": {**states, **running}}

    def _train_trials(self, name: str, presence: Presence) -> Steps[list[TrialResult]]:
        """Train what is not complete, and return the results of all."""
        folder = self.folder.path
        log_beginning(self.folder, self.search.kind, self.search.recipes[0])
        source = self.search.source(folder, self.search_path)
        self.rows = {row.number: row for row in source.known}
        first = next(source.trials, None)
        try:
            if first is not None:
                yield from self._side_by_side(source, chain([first], source.trials))
        finally:
            rows = source.ordered(list(self.rows.values()))
            store_table(rows, folder)
        best = self.search.best(folder, is_open=True)
        if best is not None:
            yield from self._note_choice(best)
        (folder / UNFINISHED).unlink(missing_ok=True)
        log.info("%d of %d trials are done", sum(row.state == "done" for row in rows), len(rows))
        yield RELEASED
        return TrialResults(rows, self.search.ended, best)

    def _note_choice(self, best: Path) -> Steps[None]:
        """Score the trial in the folder `best` in the test boxes, and write by which scores it was chosen.

        It goes on as a training of its own, which has no step left and scores its weights at the end.
        """
        training = Training.load(best)
        assert training is not None, "it has a score"
        known = Trained.of(best / WEIGHTS)
        if training.recipe.has_test and (known is None or known.test is None):
            with RunFolder(best).locked() as session:
                alone = training.model_copy(update={"is_trial": False})
                yield from trained(best, alone, session, lambda step: None)
            known = Trained.of(best / WEIGHTS)
        if known is None or known.held_out is None:  # a volume is gone, and the log says so
            return
        folders = [path for path in self.folder.path.glob("[0-9]*") if path.is_dir()]
        num, name = sum(len(read_scores(path)) for path in folders), f"the best of {count(len(folders), 'training')}"
        held_out, tested = known.held_out.model_copy(update={"chose": name, "num_values": num}), known.test
        if tested is not None:  # where values were added to a sweep, the best of which was tested before
            num = sum((other := Trained.of(path / WEIGHTS)) is not None and other.test is not None for path in folders)
            tested = tested.model_copy(update={"num_values": num})
        chosen = known.model_copy(update={"held_out": held_out, "test": tested})
        chosen.store(best / WEIGHTS)
        said = chosen.model_dump(mode="json", include={"held_out", "test"})
        atomic_write(self.folder.path / CHOICE, json.dumps({"trial": int(best.name), **said}, indent=1).encode())

    def _side_by_side(self, source: TrialSource, trials: Iterable[Trial]) -> Steps[None]:
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

        yield Together(works, partial(self._end_trial, source), at_once=at_once, on_tick=watch)

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

    def _end_trial(self, source: TrialSource, ended: Ended[None]) -> None:
        """Log the end of a trial, and keep its result."""
        name, error = ended.work.name, ended.error
        if error is not None and not (isinstance(error, RunStopped) and error.others_go_on):
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
