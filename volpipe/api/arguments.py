"""Arguments of the public functions: a recipe by any of its names, and a site by name, file or started pool.

Not here: what is done with them (runs, training, …).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from volpipe.blockwise.pool import Capacity, Site, Start, WorkerPool
from volpipe.recipes.toml import Section, load_tree, set_values, typed
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.container import locate
from volpipe.volumes.volume import Volume

Named = str | Path | None  # a shipped recipe's name, or a file
S = TypeVar("S", bound=Section)


def load(
    model: type[S],
    recipe: S | Named | Mapping[str, Any],  # Any: TOML values
    settings: Sequence[str] = (),
    default: Path | None = None,
) -> S:
    """Return a recipe of the kind `model`.

    Args:
        model: the kind.
        recipe: one that is loaded, a shipped name, a path, or its sections; None for `default`.
        settings: ``key=value``, on top.
        default: the file that None stands for; without it, the defaults of every key.

    Raises:
        RecipeError: no such recipe, an unknown key, or a value that does not fit.
    """
    if isinstance(recipe, model):
        sections: Mapping[str, Any] = recipe.model_dump()
    elif isinstance(recipe, Mapping):
        sections = recipe
    else:
        path = Path(str(recipe)) if recipe is not None else default
        return typed(model, load_tree(path, settings), path, settings)
    return typed(model, with_settings(sections, settings), None, settings)


def with_settings(sections: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:  # Any: TOML values
    """Return a copy of `sections` with ``key=value`` settings on top."""
    tree = copy.deepcopy(dict(sections))
    set_values(tree, settings)
    return tree


def site_of(site: str | Path | WorkerPool | Site, folder: RunFolder | None = None) -> tuple[Start, str]:
    """Return what starts `site`, and its name; a pool that is started already stays up.

    Args:
        site: a shipped name, a Python file, a pool, or a site that was found.
        folder: of the run; with it, a site that cannot be used here is refused now.

    Raises:
        SiteError: no such site, or it cannot be used here.
    """
    if isinstance(site, Site):
        return site.start, site.name
    if isinstance(site, str | Path):
        from volpipe.apps.pool import on_site

        return on_site(str(site), None if folder is None else folder.parsl), str(site)
    return lambda folder: nullcontext(site), ""


def capacity_of(site: str | Path | WorkerPool | Site | None, folder: RunFolder) -> Capacity | None:
    """Return what `site` gives its workers, by which a plan chooses windows; None where nothing is known.

    Args:
        site: a shipped name, a Python file, a pool that is started, or a site that was found; None for no site.
        folder: of the run.

    Raises:
        SiteError: no such site, or it cannot be used here.
    """
    if isinstance(site, Site):
        return site.capacity
    if not isinstance(site, str | Path):
        return None if site is None else site.capacity or Capacity(None, site.slots["gpu"], site.on_gpu)
    from volpipe.apps.capacity import capacity_at

    return capacity_at(str(site), folder.parsl)


def default_name(volume: str | Volume, ending: str, inner: str | None = None) -> str:
    """Return a name in this folder: of the container, the key in it where it was given, and `ending`."""
    location = str(volume) if isinstance(volume, str) else f"{volume.path}/{volume.key}"
    container, key = locate(location, inner)
    return "_".join([container.stem, *filter(None, key.split("/")), ending])
