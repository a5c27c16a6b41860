"""Checks of a command before a job gives it elsewhere: of its volume, its recipe, its net and its site.

Not here: the scripts and manifests of jobs (cli_slurm, cli_k8s). What is wrong is refused; what cannot be seen
from here is a warning on standard error, so that standard output stays the script alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from volpipe.display.console import err
from volpipe.errors import RemoteError

if TYPE_CHECKING:
    from volpipe.recipes.inference import ArrayInput

ALONE = ("local", "local_gpu", "threads")  # sites that compute where the driver is


def command_options(context: typer.Context, command: Sequence[str]) -> dict[str, Any]:  # Any: values of options
    """Return the options of `command`, such as run …; what it refuses itself is refused."""
    root = context.find_root()
    assert isinstance(root.command, TyperGroup)
    # The root is the parent, whose setting -h is: a command keeps the help options of the first context that it gets.
    return root.command.commands[command[0]].make_context(command[0], list(command[1:]), root).params


def check_command(name: str, given: Mapping[str, Any], folder: Path) -> None:  # Any: values of options
    """Refuse what is wrong in the options `given` to the command `name`, which a job gives in `folder`."""
    is_here = folder.is_dir()
    if name in ("run", "plan"):
        _check_run(given, folder if is_here else None)
    elif name == "segment":
        from volpipe.recipes.segmentation import load_segmentation

        chosen = load_segmentation(given.get("recipe"), given.get("settings") or [])
        check_volume(given["affinities"], folder if is_here else None, chosen.input)
    elif name == "train" and is_here:
        from volpipe.recipes.training import load_training

        load_training(given["recipe"], given.get("settings") or [])


def _check_run(given: Mapping[str, Any], folder: Path | None) -> None:  # Any: values of options
    from volpipe.recipes.inference import Recipe, load_recipe
    from volpipe.recipes.segmentation import SegmentRecipe
    from volpipe.recipes.workflow import VOLUME, Comparison, find_flow

    recipe, settings = given.get("recipe"), given.get("settings") or []
    flow = None if recipe is None else find_flow(recipe, settings)
    if flow is None:
        choices: list[tuple[Recipe | SegmentRecipe, bool]] = [(load_recipe(recipe, settings), True)]
    else:
        choices = [
            (stage.choice, stage.reads == VOLUME) for stage in flow.stages if not isinstance(stage.choice, Comparison)
        ]
    for choice, reads_volume in choices:
        if reads_volume:
            check_volume(given["volume"], folder, choice.input)
        if isinstance(choice, Recipe) and folder is not None:
            from volpipe.nets.facts import check_named

            check_named(choice.net, folder)


def check_volume(location: str, folder: Path | None, choice: ArrayInput) -> None:
    """Refuse a volume that is not there; warn of one that cannot be seen from here: not mounted, or not to be reached.

    Args:
        location: as the command gives it.
        folder: from which relative paths count; None where that is not here.
        choice: which array, by the recipe.
    """
    from volpipe.volumes.volume import open_volume

    if "://" not in location:
        place = Path(location).expanduser()
        if folder is None and not place.is_absolute():
            warn(f"{location} cannot be seen from here; whether it is there was not checked")
            return
        place = (folder or Path()) / place
        mount = place.parent.parent  # the root is everywhere, and says nothing
        if not place.parent.exists() and (mount == mount.parent or not mount.exists()):
            warn(f"{place.parent} is not here; whether {place.name} is in it was not checked")
            return
        location = str(place)
    try:
        open_volume(location, choice.key, choice.level, view=choice.view)
    except RemoteError as error:
        warn(f"{location} cannot be looked at from here: {error}")


def check_site(site: str, cores: int, *, is_given: bool) -> None:
    """Refuse a site that does not exist; warn of one that would compute in the driver's own job, on its `cores`."""
    from volpipe.sites.find import find_site

    find_site(site)
    if site.removesuffix(".py") in ALONE:
        start = "" if is_given else "you gave no --config: "
        warn(
            f"{start}site {site} computes all blocks in the driver's own job, on its {cores} cores; "
            "--config slurm_htex starts jobs for them"
        )


def warn(sentence: str) -> None:
    """Print a warning."""
    err.print(f"volpipe: warning: {sentence}")
