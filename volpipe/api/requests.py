"""What is asked for: a volume, a recipe and an output, checked as far as that needs neither a site nor torch.

Not here: the plan, or the run (runs). A command checks this first, and starts workers while it imports the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volpipe.api.arguments import default_name, load
from volpipe.errors import VolpipeError
from volpipe.inference.output import FOLDERS, check_name, suffix_of, with_format
from volpipe.nets.facts import check_named
from volpipe.nets.files import label_of
from volpipe.recipes.inference import Recipe
from volpipe.recipes.workflow import VOLUME, Flow, has_stages, named
from volpipe.resolve import default_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.container import absolute
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import Volume, open_volume

RecipeLike = Recipe | str | Path | Mapping[str, Any] | None  # Any: TOML values


@dataclass(frozen=True)
class Request:
    """A volume, a recipe and an output, checked as far as that needs neither a site nor torch.

    Attributes:
        volume: a location, or a volume that is open.
        work: a recipe of one net, or of several stages.
        out: of one net its output, of stages the folder of their outputs.
        search_path: folder that the recipe's relative names count from.
    """

    volume: str | Volume
    work: Recipe | Flow
    out: str
    search_path: Path

    @property
    def has_stages(self) -> bool:
        return isinstance(self.work, Flow)

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        if isinstance(self.work, Recipe):
            return RunFolder.from_output(paths.locate(self.out))
        return RunFolder.for_stages(absolute(self.out))


def request(
    volume: str | Path | Volume,
    recipe: RecipeLike = None,
    *,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    roi: str | None = None,
    mask: str | None = None,
    trust_model: bool = False,
    search_path: Path | None = None,
    for_volume: Sequence[str] = (),
) -> Request:
    """Return what is asked for; arguments as of `plan`. The volume is opened first: most mistakes are about it.

    `for_volume` has settings for what reads the volume itself: the run, or the first of the stages.
    """
    search_path = search_path or Path.cwd()
    volume = volume if isinstance(volume, Volume) else str(volume)
    region = [f"input.{key}={json.dumps(value)}" for key, value in (("roi", roi), ("mask", mask)) if value is not None]
    region += for_volume
    trust = ["net.trust_model=true"] if trust_model else []
    flow = None
    if isinstance(recipe, str | Path) and has_stages(Path(recipe)):
        from volpipe.workflow.recipe import find_flow  # which knows all kinds of work

        flow = find_flow(Path(recipe), settings, for_volume=region, for_runs=trust)
    if flow is not None:
        target = str(out or default_name(volume, Path(flow.source).stem))
        _check_flow(flow, volume, out)
        return Request(volume, flow, target, search_path)
    chosen = load(Recipe, recipe, [*settings, *region, *trust], default_recipe())
    suffix = suffix_of(chosen.output.format)
    target = str(out or default_name(volume, label_of(chosen.net.name), chosen.input.key) + suffix)
    return Request(volume, with_format(chosen, target), target, search_path)


def check(asked: Request) -> None:
    """Refuse a volume or a net that is not there, before anything heavy is loaded."""
    if isinstance(asked.work, Flow):
        for stage in asked.work.stages:
            choice = stage.input
            if stage.reads == VOLUME and choice is not None and isinstance(asked.volume, str):
                with named(stage.name):
                    open_volume(asked.volume, choice.key, choice.level, view=choice.view)
        return
    if isinstance(asked.volume, str):
        choice = asked.work.input
        open_volume(asked.volume, choice.key, choice.level, view=choice.view)
    check_named(asked.work.net, asked.search_path)


def _check_flow(flow: Flow, volume: str | Volume, out: str | Path | None) -> None:
    """Refuse a place for the outputs of stages that would be one array."""
    if isinstance(volume, Volume):
        raise VolpipeError(f"the stages of {flow.source} open the volume themselves; give its location: {volume}")
    if out is None:
        return
    check_name(str(out))
    if Path(out).suffix.lower() in FOLDERS:
        raise VolpipeError(
            f"--out {out}: a recipe of stages writes a folder with an output of each; give a name without "
            f"{Path(out).suffix}"
        )
