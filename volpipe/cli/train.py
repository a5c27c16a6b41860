"""`volpipe train`: train a net by a recipe on a site's workers, and resume an interrupted training.

Not here: the training (course, lesson, train). Exit codes as in cli.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.cli.display.console import bars, check_folder, err, out
from volpipe.cli.options import Parents, Site, TrainSettings, complete_recipe

if TYPE_CHECKING:
    from volpipe.recipes.training import TrainRecipe


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
    parents: Parents = False,
) -> None:
    """Train a net by RECIPE; the same command again goes on from the newest checkpoint."""
    from volpipe.recipes.training import load_training

    chosen = load_training(recipe, settings or [])
    folder = out_path or Path(f"{recipe.stem}.train")
    check_folder(f"--out {folder}", folder, parents=parents)
    from volpipe.apps.pool import on_site
    from volpipe.training.driver import run_training

    try:
        with _progress(chosen.train.steps) as on_step:
            result = run_training(
                chosen, folder, on_site(config), search_path=Path.cwd(), fresh=fresh, on_step=on_step
            )  # fmt: skip
    except KeyboardInterrupt:
        err.print("volpipe: interrupted; the same command again goes on from the newest checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    if result.was_complete:
        out.print(f"{folder} has its {result.steps:,} steps already; nothing to do (--fresh starts over)")
    if result.was_stopped:
        out.print(f"stopped after {result.steps:,} steps, as {folder}/stop asks; the same command again goes on")
        return
    if not result.was_complete:
        out.print(f"took {result.steps:,} steps; the weights are in {result.weights}")
    _print_outcome(chosen, folder)


def _print_outcome(chosen: TrainRecipe, folder: Path) -> None:
    """Print the losses and scores of a training, and the command that runs its weights."""
    from volpipe.workflow.outcome import draw_curve, outcome_lines, run_command

    for line in outcome_lines(folder):
        out.print(line, markup=False)
    picture = draw_curve(folder)
    if picture is not None:
        out.print(f"the curve is in {picture}", markup=False)
    out.print(f"use the weights: {run_command(chosen, folder, str(Path.cwd()))}", markup=False)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[int], None]]:
    """Yield a listener that shows a progress bar on a terminal."""
    with bars() as progress:
        yield lambda step: progress.show("train", step, steps, "step")
