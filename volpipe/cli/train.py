"""`volpipe train`: train a net by a recipe on a site's workers, and resume an interrupted training.

Not here: the training (api.training, training). Exit codes as in app.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import volpipe
from volpipe.cli.options import Parents, SameInput, Site, TrainSettings, complete_recipe, monitored
from volpipe.display.console import bars, check_folder, interruptible, out, tell_report


@monitored("train")
def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="What to learn: a TOML file, or a shipped recipe (see `volpipe recipes`).",
            autocompletion=complete_recipe,
        ),
    ],
    config: Site = "local",
    settings: TrainSettings = None,
    out_path: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the training; by default RECIPE.train here."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the training in that folder, and start over.")] = False,
    same_input: SameInput = False,
    parents: Parents = False,
) -> None:
    """Train a net by RECIPE; run the same command again to continue from the newest checkpoint."""
    folder = out_path or Path(f"{recipe.stem}.train")
    check_folder(f"--out {folder}", folder, parents=parents)
    with interruptible("run the same command again to continue from the newest checkpoint"), bars() as progress:
        result = volpipe.train(
            recipe, out=folder, site=config, settings=settings or [], fresh=fresh, same_input=same_input,
            on_progress=lambda step, steps: progress.show("train", step, steps, "step"),
        )  # fmt: skip
    if result.was_complete:
        out.print(f"{folder} has its {result.steps:,} steps already; nothing to do (--fresh starts over)")
    if result.was_stopped:
        out.print(
            f"stopped after {result.steps:,} steps, as {folder}/stop asks; run the same command again to continue"
        )
        return
    if not result.was_complete:
        out.print(f"took {result.steps:,} steps; the weights are in {result.weights}")
    for line in result.summary:
        out.print(line)
    if result.curve is not None:
        out.print(f"the curve is in {result.curve}")
    if not result.was_complete:
        tell_report(folder)
    out.print(f"use the weights: {result.run_command}")
