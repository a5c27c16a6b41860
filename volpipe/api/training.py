"""Trainings: of one net, of every combination of listed values, and in search of the best values.

Not here: the work (training), or printing (cli).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from volpipe.api.arguments import default_name, site_of, with_settings
from volpipe.api.progress import count_shown
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import VolpipeError
from volpipe.monitoring.exposition import monitored
from volpipe.recipes.toml import typed
from volpipe.recipes.training import VARIED, TrainRecipe, load_training
from volpipe.resolve import homes_known
from volpipe.training.driver import TrainingResult, run_training
from volpipe.training.fine_tuning import StartingWeights, fine_tuning
from volpipe.training.logs import no_better
from volpipe.training.search.grid import Sweep
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.trials import Search, TrialResult, run_search
from volpipe.training.task import Training, newest_step
from volpipe.workflow.outcome import draw_curve, outcome_lines, run_command

Tree = Mapping[str, Any]  # Any: TOML values
NO_NAME = "the recipe"  # in refusals, of one that is given as its sections
OnStep = Callable[[int, int], None]
OnTrial = Callable[[int, int, TrialResult | None], None]


@homes_known
def train(
    recipe: TrainRecipe | str | Path | Tree,
    *,
    start: str | Path | None = None,
    labels: str | Path | None = None,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    same_input: bool = False,
    search_path: str | Path | None = None,
    progress: bool | None = None,
    on_progress: OnStep | None = None,
    metrics: str | int | Path | None = None,
) -> TrainingResult:
    """Train a net; call it again to continue from the newest checkpoint.

    Args:
        recipe: what to learn: a TOML file, or a shipped recipe (see `volpipe recipes`). Also one that is loaded, or its
            sections. With `start` it is the volume to learn from.
        start: begin with the weights of a shipped recipe, or of a training's folder. What a recipe would say is taken
            from their training, with fewer steps and a part of the volume held out; `settings` change it.
        labels: with `start`: the labels of the volume, where affinities or classes are learnt.
        out: folder of the training; by default RECIPE.train here. A recipe without a name needs it.
        site, same_input, search_path, progress, metrics: as of `run`.
        settings: ``key=value``, on top of the recipe.
        fresh: delete the training in that folder, and start over.
        on_progress: called now and then with the number of steps taken and of all.

    Raises:
        RecipeError: no such recipe, an invalid one, or another than that of the training in the folder; no such start.
        VolpipeError: a volume is missing or does not fit, the site cannot be used, or the training failed.
    """
    folder, place = training_folder(recipe, out, start), Path(search_path or Path.cwd())
    if start is not None:
        chosen = _fine_tuning(recipe, start, labels, settings, folder, place, fresh=fresh)
    elif labels is None:
        chosen = _load(recipe, settings)
    else:
        raise VolpipeError("labels go with --from (start=); in a recipe they are data.labels")
    begin, _ = site_of(site)

    shown = count_shown("train", "step", progress, on_progress)
    with monitored(metrics, "train", recipe), shown as show:
        result = run_training(
            chosen, folder, begin,
            search_path=place, fresh=fresh, same_input=same_input,
            on_step=show,
        )  # fmt: skip
    if result.was_stopped:
        return result
    command = run_command(chosen, folder, str(place))
    return dataclasses.replace(
        result,
        summary=tuple(outcome_lines(folder)),
        curve=draw_curve(folder),
        run_command="" if no_better(folder) else command,
    )


@homes_known
def sweep(
    recipe: str | Path | Tree,
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    search_path: str | Path | None = None,
    progress: bool | None = None,
    on_progress: OnTrial | None = None,
    metrics: str | int | Path | None = None,
) -> list[TrialResult]:
    """Train with every combination of the lists in [sweep]; the same call again does what is missing.

    Args:
        recipe: a recipe of `volpipe train` with a table of values. Also its sections.
        out: folder; by default RECIPE.sweep here. A recipe without a name needs it.
        fresh: delete the trainings in that folder, and start over.
        site, settings, search_path, progress, metrics: as of `train`.
        on_progress: called with the number of trainings that ended and of all, and the newest result, at first None.

    Returns: the result of each combination, by number.

    Raises:
        RecipeError, VolpipeError: as of `train`; one training that fails stops no other.
    """
    return _searched(Sweep, recipe, out, site, settings, search_path, progress, on_progress, metrics, fresh=fresh)


@homes_known
def tune(
    recipe: str | Path | Tree,
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    fresh: bool = False,
    search_path: str | Path | None = None,
    progress: bool | None = None,
    on_progress: OnTrial | None = None,
    metrics: str | int | Path | None = None,
) -> list[TrialResult]:
    """Search the ranges in [tune] for the best values; call it again to continue.

    Args:
        out: folder; by default RECIPE.tune here. A recipe without a name needs it.
        recipe, site, settings, fresh, search_path, progress, on_progress, metrics: as of `sweep`.

    Returns: the results of all trials, the best first; its recipe is best.toml in the folder.

    Raises:
        RecipeError, VolpipeError: as of `train`; also where the first trials all fail.
    """
    return _searched(Tuning, recipe, out, site, settings, search_path, progress, on_progress, metrics, fresh=fresh)


def _searched(
    kind: type[Search], recipe: str | Path | Tree, out: str | Path | None, site: str | Path | WorkerPool,
    settings: Sequence[str], search_path: str | Path | None, progress: bool | None, on_progress: OnTrial | None,
    metrics: str | int | Path | None, *, fresh: bool,
) -> list[TrialResult]:  # fmt: skip
    if isinstance(recipe, str | Path):
        chosen = kind.load(Path(recipe), settings)
    else:
        chosen = kind.of(_sections_of(recipe, settings), NO_NAME, settings)
    folder, (start, _), place = _folder_of_work(recipe, out, kind.kind), site_of(site), Path(search_path or Path.cwd())
    with monitored(metrics, kind.kind, recipe), _counting(chosen.num, progress, on_progress) as on_end:
        return run_search(chosen, folder, start, search_path=place, fresh=fresh, on_end=on_end)


def training_folder(recipe: TrainRecipe | str | Path | Tree, out: str | Path | None, start: str | Path | None) -> Path:
    """Return the folder of a training; by default it is named after its recipe, or its volume and its `start`."""
    if out is None and start is not None and isinstance(recipe, str | Path):
        return Path(default_name(str(recipe), f"{Path(start).stem}.train"))
    return _folder_of_work(recipe, out, "train")


def _fine_tuning(
    volume: TrainRecipe | str | Path | Tree, start: str | Path, labels: str | Path | None, settings: Sequence[str],
    folder: Path, place: Path, *, fresh: bool,
) -> TrainRecipe:  # fmt: skip
    if not isinstance(volume, str | Path):
        raise VolpipeError("with start, give the path of the volume to learn from in place of a recipe")
    old = Training.load(folder) if newest_step(folder) and not fresh else None
    return fine_tuning(
        StartingWeights.find(str(start)), str(volume), None if labels is None else str(labels), settings, str(place),
        None if old is None else old.recipe,
    )  # fmt: skip


def _load(recipe: TrainRecipe | str | Path | Tree, settings: Sequence[str]) -> TrainRecipe:
    if isinstance(recipe, str | Path):
        return load_training(Path(recipe), settings)
    tree = _sections_of(recipe, settings)
    return typed(TrainRecipe, {key: tree[key] for key in tree if key not in VARIED}, NO_NAME, settings)


def _sections_of(recipe: TrainRecipe | Tree, settings: Sequence[str]) -> dict[str, Any]:  # Any: TOML values
    """Return the sections of `recipe` with `settings`, as a copy."""
    if isinstance(recipe, TrainRecipe):
        recipe = recipe.model_dump(mode="json")
    return with_settings(recipe, settings)


def _folder_of_work(recipe: TrainRecipe | str | Path | Tree, out: str | Path | None, kind: str) -> Path:
    """Return the folder of the work; by default it is named after the recipe.

    Raises:
        VolpipeError: neither has a name.
    """
    if out is not None:
        return Path(out)
    if isinstance(recipe, str | Path):
        return Path(f"{Path(recipe).stem}.{kind}")
    raise VolpipeError(f"this recipe has no name to call its folder by; give out, such as out='mine.{kind}'")


@contextmanager
def _counting(
    total: int, progress: bool | None, on_progress: OnTrial | None
) -> Iterator[Callable[[TrialResult], None]]:
    """Give a listener that counts results for `on_progress`, which is called at once too, and shows how many ended."""
    num_ended = 0
    newest: TrialResult | None = None

    def tell_progress(done: int, whole: int) -> None:
        assert on_progress is not None
        on_progress(done, whole, newest)

    with count_shown("trainings", "training", progress, None if on_progress is None else tell_progress) as show:

        def on_end(result: TrialResult) -> None:
            nonlocal num_ended, newest
            num_ended, newest = num_ended + 1, result
            show(num_ended, total)

        show(0, total)
        yield on_end
