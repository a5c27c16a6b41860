"""`volpipe train`: a net learns by a recipe, on a site's worker, and goes on where an interrupted training stopped.

Not here: the training (course, lesson, train). Exit codes as in cli.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from volpipe.interrupts import INTERRUPTED
from volpipe.terminal import err, out


def train(
    recipe: Annotated[Path, typer.Argument(help="What to learn, as TOML, or the name of a shipped recipe.")],
    config: Annotated[str, typer.Option(help="Site: a shipped name (see `volpipe sites`) or a Python file.")] = "local",
    settings: Annotated[list[str] | None, typer.Option("--set", help="key=value on top of the recipe.")] = None,
    out_path: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the training; by default RECIPE.train here.")
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Delete the training in that folder, and start over.")] = False,
) -> None:
    """Train a net by RECIPE; the same command again goes on from the newest checkpoint."""
    from volpipe.apps.start import on_site
    from volpipe.course import follow
    from volpipe.resolve import shipped_recipe
    from volpipe.training import load_training

    chosen = load_training(shipped_recipe(recipe), settings or [])
    folder = out_path or Path(f"{recipe.stem}.train")
    try:
        with _shown(chosen.train.steps) as on_step:
            learnt = follow(
                chosen, folder, on_site(config), search_path=Path.cwd(), fresh=fresh, on_step=on_step
            )  # fmt: skip
    except KeyboardInterrupt:
        err.print("volpipe: interrupted; the same command again goes on from the newest checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    if learnt.was_complete:
        out.print(f"{folder} has its {learnt.steps:,} steps already; nothing to do (--fresh starts over)")
        return
    if learnt.was_stopped:
        out.print(f"stopped after {learnt.steps:,} steps, as {folder}/stop asks; the same command again goes on")
        return
    out.print(f"took {learnt.steps:,} steps; the weights are in {learnt.weights}")


@contextmanager
def _shown(steps: int) -> Iterator[Callable[[int], None]]:
    """Give a listener that shows a bar on a terminal, a line now and then elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=steps)
        yield lambda step: progress.update(task, completed=step)
