"""Checks of a command before a job gives it elsewhere: of its volume, its recipe, its net and its site.

Not here: the scripts and manifests of jobs (slurm, k8s). What is wrong is refused; what cannot be seen
from here is a warning on standard error, so that standard output stays the script alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperGroup

from volpipe.cli.options import RESULT_FILES
from volpipe.display.console import check_folder, err
from volpipe.errors import RemoteError, SettingsError, SiteError, VolpipeError
from volpipe.resolve import nearest, places_of, shipped_recipe

if TYPE_CHECKING:
    from volpipe.recipes.inference import ArrayInput, Recipe
    from volpipe.recipes.workflow import Flow

ALONE = ("local", "local_gpu", "threads")  # sites that compute where the driver is
# Options that name what a command writes.
OUTPUTS = {"out": "--out", **{name: option for name, option in RESULT_FILES.items() if name != "metrics"}}
MAKERS = ("run", "plan", "segment", "train", "sweep", "tune")  # commands that write to their folder without --out
IN_ITS_FOLDER = ("evaluate", "compare")  # commands that always do
TRAININGS = ("train", "sweep", "tune")
STREAM = "-"  # for standard error, in place of a file
T = TypeVar("T")
OnOutput = Callable[[str, str], None]


def command_options(context: typer.Context, command: Sequence[str]) -> dict[str, Any]:  # Any: values of options
    """Return the options of `command`, such as run …; what it refuses itself is refused.

    Raises:
        VolpipeError: there is no such command.
    """
    root = context.find_root()
    chosen: Any = root.command  # Any: a command of typer's own copy of click
    words = list(command)
    while isinstance(chosen, TyperGroup) and words:
        name, *words = words
        if name not in chosen.commands:
            raise VolpipeError(
                f"there is no command `volpipe {shlex.join(command)}`: {name} is none{nearest(name, chosen.commands)}"
            )
        chosen = chosen.commands[name]
    # The root is the parent, whose setting -h is: a command keeps the help options of the first context that it gets.
    options: dict[str, Any] = chosen.make_context(command[0], words, root).params
    return places_of(options)


def check_command(
    name: str,
    given: Mapping[str, Any],  # Any: values of options
    folder: Path,
    on_output: OnOutput = lambda what, place: None,
) -> None:
    """Refuse what is wrong in the options `given` to the command `name`, which a job gives in `folder`.

    `on_output` is called with each output, in words and its place.
    """
    here = folder if folder.is_dir() else None
    for what, place in _named_outputs(name, given, folder):
        on_output(what, place)
    if name in ("run", "plan"):
        _check_run(given, here)
    elif name == "segment":
        from volpipe.recipes.segmentation import load_segmentation

        settings = given.get("settings") or []
        labels = _load_as_in_job(given.get("recipe"), here, lambda path: load_segmentation(path, settings))
        check_volume(given["affinities"], here, None if labels is None else labels.input)
    elif name == "evaluate":
        check_volume(given["output"], here)
        check_volume(given["reference"], here)
    elif name == "batch":
        _check_batch(given, here, on_output)
    elif name in TRAININGS:
        from volpipe.recipes.training import load_training
        from volpipe.training.search.grid import Sweep
        from volpipe.training.search.optuna import Tuning

        load: Callable[..., object] = {"train": load_training, "sweep": Sweep.load, "tune": Tuning.load}[name]
        _load_as_in_job(given["recipe"], here, lambda path: load(path, given.get("settings") or []))


def _named_outputs(name: str, given: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:  # Any: as above
    """Yield each output of the command `name`, given in `folder`, in words and its place; not those of a batch's file.

    A command whose output has a place by default writes to its folder.
    """
    for key, option in OUTPUTS.items():
        if given.get(key) is not None and str(given[key]) != STREAM:
            yield f"{option} {given[key]}", str(given[key])
    if name in IN_ITS_FOLDER or (name in MAKERS and given.get("out") is None):
        yield "the folder of the job", str(folder)


def _load_as_in_job(recipe: str | Path | None, folder: Path | None, load: Callable[[Path | None], T]) -> T | None:
    """Return what `load` makes of `recipe` as a job in `folder` has it; None where that cannot be seen from here.

    Relative names are read in the folder of this command where that of the job is not here.
    """
    from volpipe.recipes.toml import NO_RECIPE

    path = None if recipe is None else Path(recipe)
    if path is None or path == NO_RECIPE or shipped_recipe(path) != path:
        return load(path)
    if path.is_absolute() and not path.parent.exists():
        warn(f"{path} cannot be seen from here; whether it is there was not checked")
        return None
    if folder is not None and folder != Path.cwd():
        return load(folder / path)
    is_unseen = folder is None and not path.is_absolute()
    if is_unseen and path.suffix and not path.exists():
        raise VolpipeError(
            f"there is no {path} in this folder, where it is read because the job's own cannot be seen from here; put "
            "a copy here, or give the path from the root that it has for the job"
        )
    loaded = load(path)
    if is_unseen:
        warn(f"{path} was read in this folder; the job reads it in its own, which cannot be seen from here")
    return loaded


def _check_batch(given: Mapping[str, Any], folder: Path | None, on_output: OnOutput) -> None:  # Any: as above
    from volpipe.recipes.batch import load_batch

    first, *others = given["volumes"]
    is_file = not others and first.endswith(".toml") and "://" not in first
    batch = _load_as_in_job(first, folder, lambda path: load_batch(path or Path())) if is_file else None
    tables = () if batch is None else batch.dataset
    if given.get("out") is None:
        if not is_file:
            raise VolpipeError("batch: it needs a place for its outputs; give --out, a folder or a name with {stem}")
        for place in () if batch is None else (batch.out, *(table["out"] for table in tables if "out" in table)):
            on_output(f'out = "{place}" of {first}', str(place))
    chosen = given.get("recipe") or (None if batch is None else batch.recipe)
    for recipe in {table.get("recipe", chosen) for table in tables} | {chosen}:
        _load_as_in_job(recipe, folder, lambda path: _work(path, given.get("settings") or []))


def _check_run(given: Mapping[str, Any], folder: Path | None) -> None:  # Any: values of options
    from volpipe.api.requests import request
    from volpipe.nets.facts import check_named
    from volpipe.recipes.inference import Recipe
    from volpipe.recipes.workflow import VOLUME

    settings, out = given.get("settings") or [], given.get("out")

    def load(path: Path | None) -> Recipe | Flow:
        if out is None:
            return _work(path, settings)
        roi, mask = given.get("roi"), given.get("mask")
        return request(given["volume"], path, out=out, settings=settings, roi=roi, mask=mask).work

    work = _load_as_in_job(given.get("recipe"), folder, load)
    if work is None:
        check_volume(given["volume"], folder)
        return
    if isinstance(work, Recipe):
        readers: list[ArrayInput | None] = [work.input]
        choices = [work]
    else:
        readers = [stage.input for stage in work.stages if stage.reads == VOLUME]
        choices = [stage.choice for stage in work.stages if isinstance(stage.choice, Recipe)]
    for reader in filter(None, readers):
        check_volume(given["volume"], folder, reader)
    if folder is not None:
        for choice in choices:
            check_named(choice.net, folder)


def _work(recipe: Path | None, settings: Sequence[str]) -> Recipe | Flow:
    """Return the recipe of one net, or of several stages, in the file at `recipe`; None for the default one."""
    from volpipe.recipes.inference import load_recipe
    from volpipe.recipes.workflow import has_stages

    if recipe is None or not has_stages(recipe):
        return load_recipe(recipe, settings)
    from volpipe.workflow.recipe import find_flow

    flow = find_flow(recipe, settings)
    assert flow is not None
    return flow


def check_output(given: Mapping[str, Any]) -> None:  # Any: values of options
    """Refuse an output of a run for which there is no folder, or that this user may not write."""
    from volpipe.estimation.limits import check_access
    from volpipe.volumes.formats.container import locate

    out = given.get("out")
    place = Path.cwd() / "output" if out is None else locate(out)[0]
    check_folder(f"--out {out}", place, parents=given["parents"])
    check_access(None, place)


def check_volume(location: str, folder: Path | None, choice: ArrayInput | None = None) -> None:
    """Refuse a volume that is not there; warn of one that cannot be seen from here: not mounted, or not to be reached.

    Args:
        location: as the command gives it.
        folder: from which relative paths count; None where that is not here.
        choice: which array, by the recipe; without it, the one that there is.
    """
    from volpipe.recipes.inference import ArrayInput
    from volpipe.volumes.volume import open_volume

    if "://" not in location:
        place = Path(location)
        if folder is None and not place.is_absolute():
            warn(f"{location} cannot be seen from here; whether it is there was not checked")
            return
        place = (folder or Path()) / place
        mount = place.parent.parent  # the root is everywhere, and says nothing
        if not place.parent.exists() and (mount == mount.parent or not mount.exists()):
            warn(f"{place.parent} is not here; whether {place.name} is in it was not checked")
            return
        location = str(place)
    choice = choice or ArrayInput()
    try:
        open_volume(location, choice.key, choice.level, view=choice.view)
    except RemoteError as error:
        warn(f"{location} cannot be looked at from here: {error}")


def check_site(site: str, cores: int, *, is_given: bool) -> None:
    """Refuse a site that does not exist, or whose settings are wrong.

    Warn of one that cannot be used here, and of one that would compute in the driver's own job, on its `cores`.
    """
    from volpipe.sites.find import find_site, try_site

    find_site(site)
    try:
        try_site(site, Path.cwd())
    except SettingsError:
        raise
    except SiteError as error:
        warn(f"{error}; whether the job can use it was not checked")
    if site.removesuffix(".py") in ALONE:
        start = "" if is_given else "you gave no --config: "
        warn(
            f"{start}site {site} computes all blocks in the driver's own job, on its {cores} cores; "
            "--config slurm_htex starts jobs for them"
        )


def warn(sentence: str) -> None:
    """Print a warning."""
    err.print(f"volpipe: warning: {sentence}")
