"""`volpipe sweep` and `volpipe tune`: many trainings in parallel, over lists of values or in search of the best.

Not here: the trainings (api.training, training.search). Exit codes as in app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe
from volpipe.cli.options import Parents, Site, TrainSettings, complete_recipe, monitored
from volpipe.display.console import INCOMPLETE, bars, check_folder, columns, err, interruptible, out, tell_report

if TYPE_CHECKING:
    from volpipe.training.search.trials import TrialResult

RecipePath = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE", help="A recipe of `volpipe train` with a table of values.", autocompletion=complete_recipe
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="Folder; by default RECIPE.sweep or RECIPE.tune here."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete the trainings in that folder, and start over.")]


def command(kind: str, help: str) -> Callable[..., None]:
    """Return the command `kind`, "sweep" or "tune", whose help is `help`."""

    def trials(
        recipe: RecipePath, config: Site = "local", settings: TrainSettings = None, out_path: Folder = None,
        fresh: Fresh = False, parents: Parents = False,
    ) -> None:  # fmt: skip
        folder = out_path or Path(f"{recipe.stem}.{kind}")
        check_folder(f"--out {folder}", folder, parents=parents)
        search, tell = (volpipe.sweep, _tell_sweep) if kind == "sweep" else (volpipe.tune, _tell_tuning)
        with _shown() as on_progress:
            results = search(
                recipe, out=folder, site=config, settings=settings or [], fresh=fresh, on_progress=on_progress
            )  # fmt: skip
        show_results(results)
        tell_report(folder)
        if not tell(results, folder):
            raise typer.Exit(INCOMPLETE)

    trials.__doc__ = help
    return monitored(kind)(trials)


def _tell_sweep(results: Sequence[TrialResult], folder: Path) -> bool:
    """Print where the results are, and return whether all trainings are done."""
    out.print(f"the table is in {folder}/table.json and table.csv, each training in its folder there")
    return all(result.state == "done" for result in results)


def _tell_tuning(results: Sequence[TrialResult], folder: Path) -> bool:
    """Print which trial is the best, and return whether none failed."""
    if results[0].state != "done":
        err.print("volpipe: no trial came to its end")
        return False
    out.print(
        f"the best is trial {results[0].number:03}; its recipe is {folder}/best.toml, the table {folder}/table.json"
    )
    return all(result.state != "failed" for result in results)


sweep = command(
    "sweep",
    "Train RECIPE with every combination of the lists in its [sweep]; the same command again does what is missing.",
)
tune = command(
    "tune", "Search the ranges in the [tune] of RECIPE for the best values; run the same command again to continue."
)


@contextmanager
def _shown() -> Iterator[Callable[[int, int, TrialResult | None], None]]:
    """Yield a listener that shows a progress bar on a terminal, and prints why trials failed; end when interrupted."""
    with interruptible("run the same command again to continue from the newest checkpoints"), bars() as progress:

        def show(num_ended: int, total: int, result: TrialResult | None) -> None:
            progress.show("trainings", num_ended, total, "training")
            if result is not None and result.state == "failed":
                err.print(f"volpipe: trial {result.number} failed: {result.reason}")

        yield show


def show_results(results: Sequence[TrialResult]) -> None:
    """Print the table of results."""
    keys = list(dict.fromkeys(key for row in results for key in row.values))
    table = columns("trial", *keys, "steps", "loss", "score", "seconds", "state", left=("state",))
    for row in results:
        values = [_format_value(row.values.get(key, "")) for key in keys]
        loss, score = (f"{row.loss:.5g}" if row.loss is not None else "", f"{row.score:.2f}" if row.score else "")
        table.add_row(f"{row.number:03}", *values, str(row.steps), loss, score, f"{row.seconds:.1f}", row.state)
    out.print(table)


def _format_value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
