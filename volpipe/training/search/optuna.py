"""Tuning: trainings of one recipe with values from Optuna, in parallel; those that lag behind are stopped.

Not here: running trials in parallel (trials), or lists of values (grid).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from volpipe.errors import RecipeError, RunError, RunStopped
from volpipe.recipes.toml import Section, differences, typed
from volpipe.recipes.training import STOP, TrainRecipe
from volpipe.runs.provenance import to_toml
from volpipe.training.logs import read_scores
from volpipe.training.search.trials import (
    STUDY,
    Search,
    Trial,
    TrialResult,
    TrialSource,
    Values,
    best_trial,
    entries,
    format_values,
    result_of,
    with_overrides,
)
from volpipe.volumes.storage.paths import atomic_write

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

EXAMPLES = "a range { low = ..., high = ... } or { choices = [...] }"
BEST = "best.toml"  # in the folder of a tuning
FOLDER = "folder"  # attribute of Optuna's trial: its folder, which is another's where it resumes one that died
RECIPE, SEARCH = "recipe", "search"  # attributes of a study: its recipe and its ranges
FAILURES_TO_STOP = 3  # the search stops if the first trials all fail


class Range(Section):
    """Numbers from low to high inclusive, whole numbers if both are."""

    low: int | float
    """The smallest value."""
    high: int | float
    """The largest value."""
    log: bool = False
    """Uniform in the logarithm."""

    @model_validator(mode="after")
    def _ascends(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low {self.low} must be below high {self.high}, and above 0 for log")
        return self

    @property
    def ends(self) -> tuple[Any, ...]:  # Any: TOML values
        return self.low, self.high

    def suggest(self, trial: optuna.Trial, key: str) -> Any:  # Any: a TOML value
        """Return Optuna's value of `key` for `trial`."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, float(self.low), float(self.high), log=self.log)


class Choices(Section):
    """A choice among listed values."""

    choices: tuple[Any, ...] = Field(min_length=1)  # Any: TOML values
    """The values."""

    @property
    def ends(self) -> tuple[Any, ...]:  # Any: TOML values
        return self.choices

    def suggest(self, trial: optuna.Trial, key: str) -> Any:  # Any: a TOML value
        """Return Optuna's value of `key` for `trial`."""
        return json.loads(trial.suggest_categorical(key, [json.dumps(choice) for choice in self.choices]))


class TuneSection(Section):
    """The search space and its pruner: the table `[tune]` of a training's recipe."""

    trials: int = Field(20, ge=1)
    """Number of trainings in all."""
    seed: int = Field(0, ge=0)
    """Of Optuna's sampler."""
    pruner: Literal["median", "halving", "none"] = "median"
    """"median" stops a training whose score is below the median of the others at the same step. "halving" continues the
    best of every three. "none" lets all end."""
    ranges: dict[str, Range | Choices] = Field(min_length=1)
    """Ranges and choices, by keys of the recipe."""


@dataclass(frozen=True)
class Tuning(Search):
    """A search, and the recipe whose values it varies, as a tree and typed."""

    kind, file, ended = "tune", STUDY, ("done", "pruned")  # others were asked to stop
    example = '"train.learning_rate" = { low = 1e-4, high = 1e-2, log = true }'
    search: TuneSection
    tree: Values
    recipe: TrainRecipe

    @classmethod
    def varying(cls, table: Values, tree: Values, name: str, settings: Sequence[str]) -> Self:
        """Return the search in ranges, the ends of which are tried; see `Search`."""

        def is_range(value: object) -> bool:
            return isinstance(value, Mapping) and bool(value.keys() & {"low", "high", "log", "choices"})

        options = {key: table.pop(key) for key in ("trials", "seed", "pruner") if key in table}
        ranges = {
            key: typed(Choices if "choices" in value else Range, value, f"{name}, [tune], {key}")
            for key, value in entries(table, is_range, section=cls.kind, expected=EXAMPLES)
        }
        search = typed(TuneSection, options | {"ranges": ranges}, f"{name}, [tune]")
        if "train.ranks" in ranges:
            raise RecipeError(
                f"{name}: train.ranks changes no score beyond rounding; give it in [train], not in [tune]"
            )
        tuning = cls(search, tree, typed(TrainRecipe, tree, name, settings))
        assert tuning.recipes, "a search has ranges"
        if not tuning.recipe.train.validate_every:
            raise RecipeError(
                f"{name}: trials are compared by their scores; give train.validate_every and data.held_out"
            )
        return tuning

    def recipe_with(self, values: Mapping[str, Any]) -> TrainRecipe:  # Any: TOML values
        """Return the recipe with `values`.

        Raises:
            RecipeError: a value does not fit the recipe.
        """
        return typed(TrainRecipe, with_overrides(self.tree, values), f"the recipe with {format_values(values)}")

    @property
    def recipes(self) -> list[TrainRecipe]:
        """The recipes with each end of each range alone, and with the first, and the last, end of all ranges together.

        Raises:
            RecipeError: as of `recipe_with`.
        """
        ranges = self.search.ranges
        each = [{key: value} for key, values in ranges.items() for value in values.ends]
        all_ends = [{key: values.ends[end] for key, values in ranges.items()} for end in (0, -1)]
        return [self.recipe_with(values) for values in (*each, *all_ends)]

    @property
    def num(self) -> int:
        return self.search.trials

    def left(self, folder: Path) -> Sequence[TrainRecipe]:
        _check_installed()
        return () if (folder / STUDY).exists() else self.recipes

    def source(self, folder: Path, search_path: Path) -> TrialSource:
        _check_installed()
        return Study(self, folder)

    def best(self, folder: Path, *, is_open: bool = False) -> Path | None:
        return best_trial(folder, self.num, is_open=is_open)


class Study(TrialSource):
    """The trials of a tuning as they are asked for, until there are all, in Optuna's storage in `folder`.

    Args:
        folder: the search's folder, locked by this driver.

    Raises:
        RecipeError: the folder holds a search of another recipe, or of other ranges.
    """

    def __init__(self, tuning: Tuning, folder: Path) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        super().__init__(self._trials(), [tuning.recipe])
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.tuning, self.folder = tuning, folder
        path = folder / STUDY
        # A killed driver may have left the last line unfinished, which would spoil the next one.
        if path.is_file() and not (data := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(storage=storage, study_name="volpipe", direction="maximize", load_if_exists=True)
        # With the same seed, a new sampler would draw the same values again.
        study.sampler = optuna.samplers.TPESampler(seed=tuning.search.seed + len(study.get_trials(deepcopy=False)))
        study.pruner = _pruner(tuning)
        self._study = study
        self._check_same_search()
        self._asked: dict[str, optuna.Trial] = {}
        self._reported: dict[str, set[int]] = {}
        self._ended: list[str] = []  # states, in the order of their ends
        log.info("search: %s", tuning.search.model_dump_json(exclude_defaults=True))
        for trial in self._study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # of a driver that died
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial(trial.params, {FOLDER: _folder_of(trial)})

    def _trials(self) -> Iterator[Trial]:
        """Yield trials, new ones and those of a driver that died, until the search has had its number."""
        from optuna.trial import TrialState

        def has_more() -> bool:
            trials = self._study.get_trials(deepcopy=False)
            waiting = any(trial.state == TrialState.WAITING for trial in trials)
            return waiting or len({_folder_of(trial) for trial in trials}) < self.tuning.search.trials

        while has_more():
            yield self.ask()

    def ask(self) -> Trial:
        """Return the next trial, with values from Optuna."""
        trial = self._study.ask()
        values = {key: value.suggest(trial, key) for key, value in self.tuning.search.ranges.items()}
        name = str(trial.user_attrs.get(FOLDER, f"{trial.number:03}"))
        trial.set_user_attr(FOLDER, name)
        self._asked[name], self._reported[name] = trial, set()
        return Trial(int(name), values, self.tuning.recipe_with(values))

    def watch(self, trial: Trial) -> None:
        """Report the logged scores of `trial` to Optuna, and stop its training if it lags behind."""
        if self._report(trial.name) and self._asked[trial.name].should_prune():
            log.info("trial %s lags behind, and is asked to stop", trial.name)
            (self.folder / trial.name / STOP).touch()

    def _report(self, name: str) -> bool:
        """Report the new scores in the folder `name` to Optuna; return whether there were any."""
        reported = self._reported[name]
        new = [(step, score) for step, score in read_scores(self.folder / name) if step not in reported]
        for step, score in new:
            reported.add(step)
            self._asked[name].report(score, step)
        return bool(new)

    def keep(self, result: TrialResult) -> None:
        """Store a result, and the recipe of the best so far in best.toml.

        Raises:
            RunStopped: the first trials all failed.
        """
        from optuna.trial import TrialState

        self._report(f"{result.number:03}")
        trial = self._asked.pop(f"{result.number:03}")
        if result.state == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
        elif result.state == "failed" or result.score is None:
            trial.set_user_attr("reason", result.reason or "it has no score")
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, result.score)
            best = self._study.best_trial
            values: Values = {key: self._toml_value(key, value) for key, value in best.params.items()}
            atomic_write(self.folder / BEST, to_toml(self.tuning.recipe_with(values)).encode())
        self._ended.append(result.state)
        if self._ended == ["failed"] * FAILURES_TO_STOP:
            raise RunStopped(f"the first {FAILURES_TO_STOP} trials all fail, so the search stops: {result.reason}")

    def ordered(self, rows: list[TrialResult]) -> list[TrialResult]:
        """Return the results of all trials, of earlier sessions too, the best first, then by number."""
        from optuna.trial import TrialState

        states = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        last = {_folder_of(trial): trial for trial in self._study.get_trials()}  # of each folder, as it was begun last
        results = []
        for name, trial in sorted(last.items()):
            values = {key: self._toml_value(key, value) for key, value in trial.params.items()}
            own = Trial(int(name), values, self.tuning.recipe_with(values))
            reason = str(trial.user_attrs.get("reason", ""))
            results.append(result_of(own, self.folder / name, states.get(trial.state, "waiting"), reason))
        return sorted(results, key=lambda result: (result.state != "done", -(result.score or 0.0), result.number))

    def _toml_value(self, key: str, value: Any) -> Any:  # Any: a TOML value
        return json.loads(value) if isinstance(self.tuning.search.ranges[key], Choices) else value

    def _check_same_search(self) -> None:
        """Refuse a recipe or ranges that differ from the study's; the number of trials may change."""
        stored = self._study.user_attrs
        if not stored:
            self._study.set_user_attr(RECIPE, self.tuning.recipe.model_dump(mode="json"))
            self._study.set_user_attr(SEARCH, self.tuning.search.model_dump(mode="json"))
            return
        old = TrainRecipe.model_validate(stored[RECIPE]), TuneSection.model_validate(stored[SEARCH])
        changed = differences(old[0], self.tuning.recipe) + [
            f"tune.{line}" for line in differences(old[1], self.tuning.search) if not line.startswith("trials:")
        ]
        if changed:
            raise RecipeError(
                f"{self.folder} holds a search of another recipe ({'; '.join(changed)}); take that back to continue, "
                "choose another --out, or use --fresh to start over"
            )


def _check_installed() -> None:
    try:
        import optuna  # noqa: F401  # whether it is there
    except ImportError as error:
        raise RunError("volpipe tune needs Optuna: pip install 'volpipe[tune]'") from error


def _pruner(tuning: Tuning) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if tuning.search.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=3)
    if tuning.search.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(tuning.recipe.train.validate_every, reduction_factor=3)
    return pruners.NopPruner()


def _folder_of(trial: optuna.trial.FrozenTrial) -> str:
    return str(trial.user_attrs.get(FOLDER, f"{trial.number:03}"))
