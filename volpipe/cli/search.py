"""`volpipe sweep` and `volpipe tune`: many trainings in parallel, over lists of values or in search of the best.

Not here: the trainings (api.training, training.search). Exit codes as in app.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import volpipe
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Parents
from volpipe.display import console
from volpipe.display.console import (
    INCOMPLETE,
    bars,
    check_folder,
    columns,
    err,
    interruptible,
    result_is_in_files,
    tell_report,
)

if TYPE_CHECKING:
    from volpipe.training.search.trials import TrialResult


@command(Group.SEARCH, "sweep")
def sweep(recipe: str, out: str | None, *, parents: Parents = False, **options: Any) -> None:  # Any: values of options
    """Train RECIPE with every combination of the lists in its [sweep]; the same command again does what is missing."""
    folder = _search_folder(recipe, out, "sweep", parents=parents)
    with _showing_trials() as on_progress:
        results = volpipe.sweep(recipe, out=folder, on_progress=on_progress, **options)
    show_results(results)
    _tell_choice(results)
    tell_report(folder)
    console.out.print(f"the table is in {folder}/table.json and table.csv, each training in its folder there")
    if not all(result.state == "done" for result in results):
        raise typer.Exit(INCOMPLETE)


@command(Group.SEARCH, "tune")
def tune(recipe: str, out: str | None, *, parents: Parents = False, **options: Any) -> None:  # Any: values of options
    """Search the ranges in the [tune] of RECIPE for the best values; run the same command again to continue."""
    folder = _search_folder(recipe, out, "tune", parents=parents)
    with _showing_trials() as on_progress:
        results = volpipe.tune(recipe, out=folder, on_progress=on_progress, **options)
    show_results(results)
    _tell_choice(results)
    tell_report(folder)
    if results[0].state != "done":
        err.print("volpipe: no trial came to its end")
        raise typer.Exit(INCOMPLETE)
    console.out.print(
        f"the best is trial {results[0].number:03}; its recipe is {folder}/best.toml, the table {folder}/table.json"
    )
    if any(result.state == "failed" for result in results):
        raise typer.Exit(INCOMPLETE)


def _search_folder(recipe: str, out: str | None, kind: str, *, parents: bool) -> Path:
    """Return the folder of the trainings; the folder around it must be there."""
    result_is_in_files()
    folder = Path(out or f"{Path(recipe).stem}.{kind}")
    check_folder(f"--out {folder}", folder, parents=parents)
    return folder


@contextmanager
def _showing_trials() -> Iterator[Callable[[int, int, TrialResult | None], None]]:
    """Yield a listener that shows a progress bar on a terminal, and prints why trials failed; end when interrupted."""
    with interruptible("run the same command again to continue from the newest checkpoints"), bars() as progress:

        def show(num_ended: int, total: int, result: TrialResult | None) -> None:
            progress.show("trainings", num_ended, total, "training")
            if result is not None and result.state == "failed":
                err.print(f"volpipe: trial {result.number} failed: {result.reason}")

        yield show


def _tell_choice(results: Sequence[TrialResult]) -> None:
    """Print by how many scores the best training was chosen, and its scores in the test boxes."""
    from volpipe.training.search.trials import TrialResults
    from volpipe.workflow.outcome import box_lines

    if isinstance(results, TrialResults) and results.best is not None:
        for line in box_lines(results.best):
            console.out.print(f"trial {results.best.name}, {line}")


def show_results(results: Sequence[TrialResult]) -> None:
    """Print the table of results."""
    keys = list(dict.fromkeys(key for row in results for key in row.values))
    table = columns("trial", *keys, "steps", "loss", "score", "seconds", "state", left=("state",))
    for row in results:
        given = (row.values.get(key, "") for key in keys)
        values = [f"{value:.5g}" if isinstance(value, float) else str(value) for value in given]
        loss, score = (f"{row.loss:.5g}" if row.loss is not None else "", f"{row.score:.2f}" if row.score else "")
        table.add_row(f"{row.number:03}", *values, str(row.steps), loss, score, f"{row.seconds:.1f}", row.state)
    console.out.print(table)
