"""Functions for notebooks: try a net, look at two volumes, at seams, at blends and at what windows cost.

Not here: what they do (notebook), and how it is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volpipe.api.arguments import load
from volpipe.errors import VolpipeError
from volpipe.nets.files import is_program
from volpipe.notebook.boxes import Sizes
from volpipe.notebook.own_nets import is_module, named
from volpipe.recipes.inference import Recipe, load_recipe
from volpipe.recipes.workflow import has_stages
from volpipe.resolve import homes_known, nearest, shipped, shipped_recipes
from volpipe.volumes.volume import Volume

if TYPE_CHECKING:
    from torch import nn

    from volpipe.notebook.blends import Blends
    from volpipe.notebook.seams import Seams
    from volpipe.notebook.side_by_side import SideBySide
    from volpipe.notebook.try_out import TryOut
    from volpipe.notebook.windows import WindowCosts
    from volpipe.workflow.driver import Report

    NetLike = nn.Module | Recipe | str | Path | Mapping[str, Any]  # Any: TOML values


@homes_known
def try_net(
    net: NetLike,
    volume: str | Path | Volume,
    *,
    at: Sequence[int] | None = None,
    size: Sizes | None = None,
    settings: Sequence[str] = (),
    device: str | None = None,
) -> TryOut:
    """Return a box of `volume` before and after a net, which runs in this process; a notebook shows both.

    The voxels are those that `run` writes there. There is no site, and nothing is written.

    Args:
        net: a torch module (n, c, z, y, x); a shipped net, module:function, file.py:function, a file or a package; or a
            recipe, by a shipped name, a TOML file, a `Recipe` or its sections.
        volume: a location, as `open` takes it, or a volume; the recipe's [input] chooses no other array than that.
        at: voxel (z, y, x) of the volume in the middle of the box; without it the middle of a window near the volume's.
        size: voxels (z, y, x) of the box, or one number; without it the core of the window that `at` is in.
        settings: ``key=value`` on top of the recipe, such as "windows.blend=hann".
        device: "cpu" or "cuda"; without it a GPU if there is one, as in a run.

    Raises:
        VolpipeError: no such net or volume, they do not fit each other, or the box leaves the volume.
    """
    from volpipe.notebook.try_out import try_out

    with _recipe_of(net, settings) as recipe:
        return try_out(recipe, volume, at, size, device or "")


@homes_known
def side_by_side(a: object, b: object, *, at: Sequence[int] | None = None, size: Sizes | None = None) -> SideBySide:
    """Return two images over a box, their difference b - a and how large it is; a notebook shows all three.

    Where both know their voxel sizes they are laid over each other by them, and the coarser is enlarged by repeating
    its voxels; else their shapes are the same, or whole multiples. What `try_net` and `run` returned knows its place in
    its volume in any case.

    Args:
        a, b: an array (y, x), (z, y, x) or (c, z, y, x); a volume or its location; the report of a run; or what
            `try_net` returned, for its output.
        at: voxel (z, y, x) of `a` in the middle of the box; without it the middle of what both have.
        size: voxels (z, y, x) of `a`, or one number; without it 64 × 256 × 256 of the finer voxels, or as many as there
            are.

    Raises:
        VolpipeError: the two cannot be laid over each other, a box of a volume beside another volume included, or the
            box leaves them.
    """
    from volpipe.notebook.side_by_side import side_by_side

    return side_by_side(a, b, at=at, size=size)


@homes_known
def seams(result: Report | str | Path) -> Seams:
    """Return the seam score of an output along each axis; a notebook shows how voxels differ across and beside faces.

    Args:
        result: the report of a run, or the path of its output; its run's folder lies beside it.

    Raises:
        VolpipeError: no such run, it is not complete, or its output is labels.
    """
    from volpipe.notebook.seams import seams

    return seams(result)


@homes_known
def blends(
    net: NetLike,
    volume: str | Path | Volume,
    *,
    at: Sequence[int] | None = None,
    size: Sizes | None = None,
    settings: Sequence[str] = (),
    device: str | None = None,
) -> Blends:
    """Return the output over a box by crop, hann and gaussian windows, and their errors against the whole.

    The whole is one window over the box and the net's halo. Errors are in the units of the output, before rounding.

    Args:
        net, volume, settings, device: as of `try_net`.
        at: voxel (z, y, x) in the middle of the box; without it a corner where windows meet, near the volume's middle.
        size: voxels (z, y, x) of the box, or one number; without it half as large as a window.

    Raises:
        VolpipeError: as `try_net`; or the net takes windows of one size alone.
    """
    from volpipe.notebook.blends import blends

    with _recipe_of(net, settings) as recipe:
        return blends(recipe, volume, at, size, device or "")


@homes_known
def windows(
    net: NetLike,
    *,
    settings: Sequence[str] = (),
) -> WindowCosts:
    """Return seconds and memory of windows of several sizes, and the one to choose; a minute or so.

    Args:
        net, settings: as of `try_net`.

    Raises:
        VolpipeError: no such net, or not one window could be tried.
    """
    from volpipe.notebook.windows import windows

    with _recipe_of(net, settings) as recipe:
        return windows(recipe, Path.cwd(), is_here=is_module(net))


@contextmanager
def _recipe_of(
    net: NetLike,
    settings: Sequence[str],
) -> Iterator[Recipe]:
    """Yield the recipe that `net` means; of a torch module the defaults of every key, without weights to load."""
    if is_module(net):
        with named(net) as name:
            yield load(Recipe, {"net": {"name": name, "untrained": True}}, settings)
    elif isinstance(net, Recipe | Mapping):
        yield load(Recipe, net, settings)
    elif isinstance(net, str | Path):
        yield _recipe_named(str(net), settings)
    else:
        raise VolpipeError(
            f"a net is a torch module, a name, a file or a recipe, not {type(net).__name__}; vp.load_net(name) "
            "returns a module"
        )


def _recipe_named(name: str, settings: Sequence[str]) -> Recipe:
    """Return the recipe of that name, or the default one with the net of that name.

    Raises:
        VolpipeError: there is neither; or the recipe has several stages.
    """
    if name.endswith(".toml") or name in shipped_recipes():
        if has_stages(Path(name)):
            raise VolpipeError(f"{name} is a recipe of several stages; give the recipe of one, or its net")
        return load(Recipe, name, settings)
    nets = shipped("volpipe.models")
    if name not in nets and ":" not in name and not is_program(name) and not name.endswith(".py"):
        known = [*nets, *shipped_recipes()]
        raise VolpipeError(
            f"no net or recipe {name!r}{nearest(name, known)}; nets are {', '.join(nets)}, recipes "
            f"{', '.join(shipped_recipes())}; or give a torch module, file.py:function, file.pt, file.pt2, file.onnx, "
            "package.zip, recipe.toml"
        )
    return load_recipe(None, [f"net.name={json.dumps(name)}", *settings])
