"""Batches: many volumes and what to do with each, planned, checked and run together on one pool of workers.

Not here: the work (workflow.batch), or printing (cli).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from volpipe.api.arguments import capacity_of, site_of
from volpipe.api.progress import rows_shown
from volpipe.api.requests import check, request
from volpipe.api.runs import plan_request
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RecipeError
from volpipe.inference.output import suffix_of
from volpipe.monitoring.exposition import monitored
from volpipe.recipes.batch import BatchDataset, BatchRecipe, home, list_datasets, load_batch
from volpipe.recipes.inference import Recipe
from volpipe.resolve import homes_known
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.sizing import Sizing
from volpipe.volumes.formats.container import SUFFIXES
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location
from volpipe.workflow.batch import AT_ONCE, BatchListener, BatchPlan, Prepare, execute_batch, plan_batch
from volpipe.workflow.batch_table import BatchReport, batch_folder
from volpipe.workflow.work_plan import WorkPlan


@homes_known
def batch(
    volumes: str | Path | Sequence[str | Path],
    recipe: str | Path | None = None,
    *,
    out: str | Path | None = None,
    site: str | Path | WorkerPool = "local",
    settings: Sequence[str] = (),
    at_once: int | None = None,
    fresh: bool = False,
    replace: bool = False,
    dry_run: bool = False,
    tolerate: float = 0.1,
    same_input: bool = False,
    update: bool = False,
    trust_model: bool = False,
    parents: bool = True,
    search_path: Path | None = None,
    progress: bool | None = None,
    listener: BatchListener | None = None,
    metrics: str | int | Path | None = None,
) -> BatchReport:
    """Run a recipe over many volumes; call it again to continue; it leaves alone what is complete and unchanged.

    Args:
        volumes: a batch's file; or volumes, 'patterns/*.n5/raw', CSV and text files of them, s3://bucket/prefix.
        recipe: what to do: a shipped recipe (see `volpipe recipes`) or a TOML file; without one, the batch's own or the
            default recipe.
        out: folder of the outputs, or a name for each, such as 'done/{stem}_{recipe}.zarr'; also {key}, s3://.
        site, same_input, update, metrics: as of `run`.
        trust_model, search_path: as of `plan`.
        settings: ``key=value`` on top of the recipe, below those of single datasets.
        at_once: datasets that may be at work at a time.
        fresh: delete all outputs and their runs, and start over.
        replace: start over with outputs of another recipe, net, input or version.
        dry_run: say what each dataset is, unchanged or why not; run nothing.
        tolerate: share of a dataset's blocks that may fail before it stops. With 0 the first stops it.
        parents: make folders for the outputs, where there are none.
        progress, listener: show how far each dataset is (None: in a notebook, below its cell), or call the listener.

    Returns: a row for each dataset; those that failed say why.

    Raises:
        BatchError, SiteError, RunError: what is wrong with each dataset; no such site; another driver has the batch.
    """
    tree, folder = _batch_of(volumes, recipe, out)
    start, name = site_of(site)
    sizing = Sizing(None if dry_run else capacity_of(site, folder), fresh)
    options = RunOptions(
        fresh=fresh, replace=replace, site=name, tolerated=tolerate, same_input=same_input, update=update
    )  # fmt: skip
    at_once = at_once or tree.at_once or AT_ONCE
    prepare = partial(_plan, settings=settings, trust_model=trust_model, search_path=search_path, sizing=sizing)
    with monitored(metrics, "batch", recipe), _listening(progress, listener) as hears:
        plan = _planned(tree, folder, prepare, options, at_once, hears, parents=parents)
        if dry_run:
            return BatchReport(plan.rows, plan.folder.path, notes=plan.notes)
        return execute_batch(plan, start, prepare, options, at_once, hears)


def _planned(
    tree: BatchRecipe,
    folder: RunFolder,
    prepare: Prepare,
    options: RunOptions,
    at_once: int,
    listener: BatchListener,
    *,
    parents: bool,
) -> BatchPlan:
    """Return the plan of all datasets of `tree`, and tell `listener`.

    Without `parents`, an output whose folder is not there is refused, but for the batch's own folder.
    """
    datasets, mistakes = list_datasets(tree)
    plan = plan_batch(
        folder, datasets, prepare,
        mistakes=mistakes,
        options=options,
        at_once=at_once,
        check_out=lambda target: None if parents else _check_folder(target, home(tree.out)),
        on_dataset=lambda number: listener.on_dataset(number, len(datasets)),
    )  # fmt: skip
    listener.on_plan(plan)
    return plan


@contextmanager
def _listening(progress: bool | None, listener: BatchListener | None) -> Iterator[BatchListener]:
    """Give `listener`, or one that shows the datasets where they are to be shown."""
    with rows_shown(progress, has_listener=listener is not None) as shown:
        if listener is not None or shown is None:
            yield listener or BatchListener()
        else:
            yield BatchListener(shown.plan, lambda plan: shown.begin(plan.rows), shown.start, shown.end, shown.move)


def _batch_of(
    volumes: str | Path | Sequence[str | Path], recipe: str | Path | None, out: str | Path | None
) -> tuple[BatchRecipe, RunFolder]:
    """Return the batch that the arguments describe, and its folder."""
    given = [str(volumes)] if isinstance(volumes, str | Path) else [str(volume) for volume in volumes]
    files = [name for name in given if name.endswith(".toml") and "://" not in name]
    if files and len(given) > 1:
        raise RecipeError(f"{files[0]} is a batch of its own; give it alone, or volumes without it")
    changes = {"recipe": None if recipe is None else str(recipe), "out": None if out is None else str(out)}
    changes = {key: value for key, value in changes.items() if value is not None}
    if files:
        file = Path(files[0])
        return load_batch(file).model_copy(update=changes), RunFolder(batch_folder(paths.locate(file)))
    if out is None:
        raise RecipeError("a batch needs a place for its outputs; give a folder or a name with {stem}: -o restored/")
    tree = BatchRecipe(volumes=tuple(given), **changes)
    return tree, RunFolder(batch_folder(home(tree.out)))


def _plan(
    dataset: BatchDataset, settings: Sequence[str], trust_model: bool, search_path: Path | None, sizing: Sizing
) -> WorkPlan:
    """Return the plan of `dataset`; the output of a run gets a suffix by its format where it has none."""
    own = (*settings, *dataset.settings)
    asked = request(
        dataset.volume, dataset.recipe, out=dataset.out, settings=own, for_volume=dataset.region,
        trust_model=trust_model, search_path=search_path,
    )  # fmt: skip
    if isinstance(asked.work, Recipe) and paths.locate(asked.out).suffix.lower() not in SUFFIXES:
        place, suffix = paths.locate(asked.out), suffix_of(asked.work.output.format)
        asked = dataclasses.replace(asked, out=str(place.parent / f"{place.name}{suffix}"))
    check(asked)
    return plan_request(asked, sizing)


def _check_folder(out: Location, inside: Location) -> None:
    """Refuse an output whose folder is not there, unless it is the batch's own or in that, which is made."""
    if isinstance(out, Path) and (file := paths.file_above(out)) is not None:
        raise RecipeError(f"out {out}: {file} is a file, and no folder; choose another place")
    if isinstance(out, Path) and not out.parent.exists():
        is_own = isinstance(inside, Path) and inside.parent.exists() and out.is_relative_to(inside)
        if not is_own:
            raise RecipeError(f"out {out}: there is no folder {out.parent}; make it first, or give --parents")
