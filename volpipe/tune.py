"""Tuning: trainings of one recipe with values that Optuna chooses, side by side; those that lag behind are stopped.

Not here: how trainings go on side by side (trials), or values that are given as lists (sweep).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from volpipe.complaints import show_value
from volpipe.course import check_slots, check_trainable, logged
from volpipe.errors import RecipeError, RunError, RunStopped
from volpipe.folder import RunFolder
from volpipe.formats.files import atomic_write
from volpipe.pool import Start, WorkerPool
from volpipe.presence import present
from volpipe.provenance import to_toml
from volpipe.recipe import Section, differences, load_tree, typed
from volpipe.resolve import recipe_name
from volpipe.training import STOP, VARIED, TrainRecipe
from volpipe.trials import (
    Abreast,
    Row,
    Trial,
    Values,
    abreast,
    check_place,
    placed,
    read_scores,
    row_of,
    spelt,
    store_table,
)

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

SECTION = "tune"
STUDY, BEST = "study.jsonl", "best.toml"  # in the folder of a tuning
FOLDER = "folder"  # of a study's trial, where it is not named after its number: it goes on with one that died
RECIPE, SEARCH = "recipe", "search"  # what a study was begun with
FAILURES_TO_STOP = 3  # of the first trials, without one that did not fail

OnRow = Callable[[Row], None]


class Range(Section):
    """Numbers from `low` to `high`, both included; whole ones where both are. log: their logarithms are even."""

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _ascends(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low {self.low} must be below high {self.high}, and above 0 for log")
        return self

    @property
    def ends(self) -> tuple[Any, ...]:  # Any: TOML values
        return self.low, self.high

    def suggested(self, trial: optuna.Trial, key: str) -> Any:  # Any: a TOML value
        """Return what Optuna has `trial` try for `key`."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, float(self.low), float(self.high), log=self.log)


class Choices(Section):
    """One of some values."""

    choices: tuple[Any, ...] = Field(min_length=1)  # Any: TOML values

    @property
    def ends(self) -> tuple[Any, ...]:  # Any: TOML values
        return self.choices

    def suggested(self, trial: optuna.Trial, key: str) -> Any:  # Any: a TOML value
        """Return what Optuna has `trial` try for `key`."""
        return json.loads(trial.suggest_categorical(key, [json.dumps(each) for each in self.choices]))


class Search(Section):
    """What is searched, and how.

    trials: how many trainings there are in all.
    seed: of what Optuna draws.
    pruner: a training whose score is below the median of the others at the same step is stopped; or of every three
    the best goes on ("halving"); or all are left to end ("none").
    ranges: by keys of the recipe.
    """

    trials: int = Field(20, ge=1)
    seed: int = Field(0, ge=0)
    pruner: Literal["median", "halving", "none"] = "median"
    ranges: dict[str, Range | Choices] = Field(min_length=1)


@dataclass(frozen=True)
class Tuning:
    """A search, and the recipe whose values it changes, as read and typed."""

    search: Search
    tree: dict[str, Any]  # Any: TOML values
    recipe: TrainRecipe

    def recipe_with(self, values: Mapping[str, Any]) -> TrainRecipe:  # Any: TOML values
        """Return the recipe of one training.

        Raises:
            RecipeError: the values do not fit it.
        """
        return typed(TrainRecipe, placed(self.tree, values), f"the recipe with {spelt(values)}")


def load_tuning(path: Path, settings: Sequence[str] = ()) -> Tuning:
    """Return the tuning in the TOML file at `path`, with ``key=value`` settings on top; the ends of ranges are tried.

    Raises:
        RecipeError: no [tune], a range that is none or leads nowhere, or a recipe that gives no scores.
    """
    tree, name = load_tree(path, settings), recipe_name(path)
    table = {name: tree.pop(name, None) for name in VARIED}[SECTION]
    if not isinstance(table, dict):
        raise RecipeError(
            f'{name} has no [tune]; add one, such as: "train.learning_rate" = {{ low = 1e-4, high = 1e-2, log = true }}'
        )
    known = {key: table.pop(key) for key in ("trials", "seed", "pruner") if key in table}
    ranges = {
        key: typed(Choices if "choices" in value else Range, value, f"{name}, [tune], {key}")
        for key, value in _ranges(table)
    }
    search = typed(Search, known | {"ranges": ranges}, f"{name}, [tune]")
    if "train.ranks" in ranges:
        raise RecipeError(f"{name}: train.ranks changes no score beyond rounding; give it in [train], not in [tune]")
    tuning = Tuning(search, tree, typed(TrainRecipe, tree, path, settings))
    for key, values in search.ranges.items():
        for value in values.ends:
            tuning.recipe_with({key: value})
    if not tuning.recipe.train.validate_every:
        raise RecipeError(f"{name}: trials are compared by their scores; give train.validate_every and data.held_out")
    return tuning


def _ranges(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: TOML values
    """Yield key and range of each, whose keys may be quoted with their dots, or be tables.

    Raises:
        RecipeError: something is no range.
    """
    for key, value in table.items():
        if not isinstance(value, Mapping):
            raise RecipeError(
                f"tune: {prefix}{key} is {show_value(value)}; give a range {{ low = ..., high = ... }} or "
                "{ choices = [...] }"
            )
        if value.keys() & {"low", "high", "log", "choices"}:
            yield f"{prefix}{key}", value
        else:
            yield from _ranges(value, f"{prefix}{key}.")


def run_tuning(
    tuning: Tuning, out: Path, start: Start, *, search_path: Path, fresh: bool = False, on_row: OnRow = lambda row: None
) -> list[Row]:
    """Train until there are as many trials as `tuning` asks for; return what became of each, the best first.

    The same call goes on with what its folder holds: trials that died under way are taken up again.

    Args:
        tuning: what is done.
        out: the folder; made where it is missing.
        start: starts the workers, and stops them on every way out; it is given a folder for their files.
        search_path: folder that the recipe's relative names count from.
        fresh: delete what is in the folder, and start over.
        on_row: told what became of each trial, as it ends.

    Raises:
        RecipeError: a net cannot be trained, or the folder holds a search of another recipe or other ranges.
        RunStopped: the first trials all fail.
        RunError: Optuna is not installed, or the folder holds something else.
    """
    _check_installed()
    for key, values in tuning.search.ranges.items():
        for value in values.ends:
            check_trainable(tuning.recipe_with({key: value}).net)
    folder = RunFolder(out.absolute())
    with folder.locked() as session:
        check_place(folder, STUDY, fresh=fresh)
        with logged(folder, "tune", tuning.recipe), present(folder.path, session):
            log.info("search: %s", tuning.search.model_dump_json(exclude_defaults=True))
            study = Study(tuning, folder.path)
            if study.has_more:
                with start(folder.parsl) as workers, abreast(workers, folder.path, search_path) as trainings:
                    _search(study, workers, trainings, on_row)
            rows = study.rows()
            store_table(rows, folder.path)
            done = sum(row.state == "done" for row in rows)
            log.info("%d of %d trials are done; the first of the table is %03d", done, len(rows), rows[0].number)
            return rows


def _search(study: Study, workers: WorkerPool, trainings: Abreast, on_row: OnRow) -> None:
    """Begin trials while there is room, and stop those that lag behind, until there are enough."""
    check_slots(study.tuning.recipe, workers.slots)
    failed: list[Row] | None = []
    while study.has_more or trainings.trials:
        while study.has_more and trainings.has_room(study.tuning.recipe):
            trial = study.ask()
            check_slots(trial.recipe, workers.slots)
            trainings.begin(trial)
        for row in trainings.ended():
            study.tell(row)
            on_row(row)
            failed = None if failed is None or row.state != "failed" else [*failed, row]
            if failed and len(failed) == FAILURES_TO_STOP:
                raise RunStopped(f"the first {FAILURES_TO_STOP} trials all fail, so the search stops: {row.reason}")
        for trial in trainings.trials:
            study.watch(trial)


class Study:
    """The trials of a tuning, in Optuna's storage in `folder`.

    Args:
        tuning: what is searched.
        folder: of the tuning, held by this driver.

    Raises:
        RecipeError: the folder holds a search of another recipe, or of other ranges.
    """

    def __init__(self, tuning: Tuning, folder: Path) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.tuning, self.folder = tuning, folder
        self._study = _open(tuning, folder)
        self._check_same()
        self._asked: dict[str, optuna.Trial] = {}
        self._reported: dict[str, set[int]] = {}
        for trial in self._study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # of a driver that died
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial(trial.params, {FOLDER: _folder_of(trial)})

    @property
    def has_more(self) -> bool:
        """Whether a trial is still to begin: a new one, or one that died."""
        from optuna.trial import TrialState

        trials = self._study.get_trials(deepcopy=False)
        waiting = any(trial.state == TrialState.WAITING for trial in trials)
        return waiting or len({_folder_of(trial) for trial in trials}) < self.tuning.search.trials

    def ask(self) -> Trial:
        """Return the next trial, with values that Optuna chose."""
        trial = self._study.ask()
        values = {key: each.suggested(trial, key) for key, each in self.tuning.search.ranges.items()}
        name = str(trial.user_attrs.get(FOLDER, f"{trial.number:03}"))
        trial.set_user_attr(FOLDER, name)
        self._asked[name], self._reported[name] = trial, set()
        return Trial(int(name), values, self.tuning.recipe_with(values))

    def watch(self, trial: Trial) -> None:
        """Hand on the scores that `trial` logged, and ask its training to stop where it lags behind."""
        if self._report(trial.name) and self._asked[trial.name].should_prune():
            log.info("trial %s lags behind, and is asked to stop", trial.name)
            (self.folder / trial.name / STOP).touch()

    def _report(self, name: str) -> bool:
        """Hand on the scores that the trial in the folder `name` logged meanwhile; return whether there were any."""
        told = self._reported[name]
        new = [(step, score) for step, score in read_scores(self.folder / name) if step not in told]
        for step, score in new:
            told.add(step)
            self._asked[name].report(score, step)
        return bool(new)

    def tell(self, row: Row) -> None:
        """Keep what became of a trial; the recipe of the best so far is in best.toml."""
        from optuna.trial import TrialState

        self._report(f"{row.number:03}")
        trial = self._asked.pop(f"{row.number:03}")
        if row.state == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        elif row.state == "failed" or row.score is None or row.score != row.score:
            trial.set_user_attr("reason", row.reason)
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, row.score)
            self._store_best()

    def rows(self) -> list[Row]:
        """Return what became of every trial, the best first, then by number."""
        from optuna.trial import TrialState

        states = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        last = {_folder_of(trial): trial for trial in self._study.get_trials()}  # of each folder, as it was begun last
        rows = []
        for name, trial in sorted(last.items()):
            values = {key: self._plain(key, value) for key, value in trial.params.items()}
            found = Trial(int(name), values, self.tuning.recipe_with(values))
            reason = str(trial.user_attrs.get("reason", ""))
            rows.append(row_of(found, self.folder / name, states.get(trial.state, "waiting"), reason))
        return sorted(rows, key=lambda row: (row.state != "done", -(row.score or 0.0), row.number))

    def _plain(self, key: str, value: Any) -> Any:  # Any: a TOML value
        return json.loads(value) if isinstance(self.tuning.search.ranges[key], Choices) else value

    def _store_best(self) -> None:
        best = self._study.best_trial
        values: Values = {key: self._plain(key, value) for key, value in best.params.items()}
        atomic_write(self.folder / BEST, to_toml(self.tuning.recipe_with(values)).encode())

    def _check_same(self) -> None:
        """Refuse another recipe or other ranges than the study was begun with; more trials are welcome."""
        begun = self._study.user_attrs
        if not begun:
            self._study.set_user_attr(RECIPE, self.tuning.recipe.model_dump(mode="json"))
            self._study.set_user_attr(SEARCH, self.tuning.search.model_dump(mode="json"))
            return
        old = TrainRecipe.model_validate(begun[RECIPE]), Search.model_validate(begun[SEARCH])
        changed = differences(old[0], self.tuning.recipe) + [
            f"tune.{line}" for line in differences(old[1], self.tuning.search) if not line.startswith("trials:")
        ]
        if changed:
            raise RecipeError(
                f"{self.folder} holds a search of another recipe ({'; '.join(changed)}); restore it to go on, choose "
                "another --out, or use --fresh to start over"
            )


def _check_installed() -> None:
    try:
        import optuna  # noqa: F401  # whether it is there
    except ImportError as error:
        raise RunError("volpipe tune needs Optuna: pip install 'volpipe[tune]'") from error


def _open(tuning: Tuning, folder: Path) -> optuna.Study:
    """Return the study that is stored in `folder`, begun where there is none."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = folder / STUDY
    _mend(path)
    storage = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name="volpipe", direction="maximize", load_if_exists=True)
    # Begun anew with the same seed, a sampler would draw again what it drew.
    study.sampler = optuna.samplers.TPESampler(seed=tuning.search.seed + len(study.get_trials(deepcopy=False)))
    study.pruner = _pruner(tuning)
    return study


def _pruner(tuning: Tuning) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if tuning.search.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=3)
    if tuning.search.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(tuning.recipe.train.validate_every, reduction_factor=3)
    return pruners.NopPruner()


def _mend(path: Path) -> None:
    """Cut a line that a killed driver left unfinished off the storage, which would else spoil the next."""
    if path.is_file():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def _folder_of(trial: optuna.trial.FrozenTrial) -> str:
    return str(trial.user_attrs.get(FOLDER, f"{trial.number:03}"))
