"""`volpipe evaluate` and `compare`: an output against a reference or another output, as tables, as JSON, as pictures.

Not here: the comparing (api.labels, api.compare, evaluation). Exit codes as in app; 1 also where a limit of `compare`
is violated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import volpipe
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Parents
from volpipe.display.comparisons import difference_tables, made_table, row_table
from volpipe.display.console import (
    INCOMPLETE,
    PLAIN_LINE_SECONDS,
    err,
    interruptible,
    out,
    result_file,
    result_is_in_files,
)
from volpipe.display.progress import showing
from volpipe.display.reports import print_ending, print_missing
from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    from volpipe.evaluation.results import ComparisonResult
    from volpipe.workflow.compare import ComparisonTable


@command(Group.MOST_USED, "evaluate", place=10)
def evaluate(
    output: str, reference: str | None, labels: bool, classes: bool, skeletons: str | None, ignore: str | None,
    report: str | None,
    *,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")
    ] = None,
    picture: Annotated[str | None, typer.Option(metavar="PNG", help="Write slices and errors to this PNG.")] = None,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:  # fmt: skip
    """Score OUTPUT against REFERENCE, block by block on the site's workers.

    Where OUTPUT has more voxels than what it was made from, interpolation of that is scored beside it.
    """
    from volpipe.evaluation.results import SCORES_JSON, SCORES_PAGE, SCORES_PNG
    from volpipe.monitoring.results import results_of

    if json_file or report:
        result_is_in_files()
    of_labels = "labels" if labels else "classes" if classes else "skeletons" if skeletons else ""
    if picture is not None and of_labels:
        raise VolpipeError(f"--picture shows images; leave it out with --{of_labels}")
    if picture is not None and Path(picture).suffix.lower() != ".png":
        raise VolpipeError(f"--picture {picture}: a PNG is written; give a name that ends in .png")
    scores = result_file("--json", json_file, SCORES_JSON, parents=parents)
    slices = result_file("--picture", picture, SCORES_PNG, parents=parents)
    result_file("--report", report, SCORES_PAGE, parents=parents)
    for location in filter(None, (output, reference)):
        volpipe.open(location)  # refused before heavy packages are loaded
    with interruptible(), results_of(scores, slices), showing() as show:
        result = volpipe.evaluate(
            output, reference, labels=labels, classes=classes, skeletons=skeletons, report=report,
            ignore=_ignored_labels(ignore, is_image=not of_labels), on_progress=show(), **options,
        )  # fmt: skip
    if result.scores is None:
        print_missing(result)
        raise typer.Exit(INCOMPLETE)
    print_ending(result)
    if json_file is not None:
        result.write_json(json_file)
    if picture is not None:
        result.draw(picture)


def _ignored_labels(text: str | None, *, is_image: bool) -> tuple[int, ...] | None:
    """Return the labels that --ignore names, () for none; None where it names nothing."""
    if text is None:
        return None
    if is_image:
        raise VolpipeError("--ignore is of labels; give --labels as well, or leave it out")
    try:
        return () if text.strip() == "none" else tuple(int(part, 0) for part in text.split(","))
    except ValueError:
        raise VolpipeError(f"--ignore {text!r}: write labels, such as 5,7 or 0xfffffffffffffffd, or none") from None


@command(Group.OUTPUTS, "compare", place=3)
def compare(
    a: str, b: str, json_file: str | None, page: str | None, *, parents: Parents = False, **options: Any
) -> None:  # Any: values of options
    """Compare outputs A and B of one input, or two batches: how much differs, where most, and what was done otherwise.

    Their metadata say whether they are labels or images. Run the same command again to continue.
    """
    from volpipe.api.compare import default_name
    from volpipe.evaluation.results import COMPARED_JSON, COMPARED_PAGE

    result_is_in_files()
    target = Path(page or f"{default_name(a, b)}.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise VolpipeError(f"--page {target}: an HTML page is written; give a name that ends in .html")
    result_file("--json", json_file, COMPARED_JSON, parents=parents)
    result_file("--page", target, COMPARED_PAGE, parents=parents)
    with interruptible(), showing() as show:
        result = volpipe.compare(
            a, b, json_file=json_file, page=target, on_progress=show(), on_pair=_line_now_and_then(), **options
        )
    if isinstance(result, volpipe.ComparisonResult):
        _print_comparison(result)
    else:
        _print_table(result)
    for sentence in result.violations:
        err.print(f"limit violated: {sentence}")
    out.print(f"the page is {target}")
    if not result.is_within:
        raise typer.Exit(INCOMPLETE)


def _line_now_and_then() -> Callable[[int, int], None]:
    """Return what prints how many outputs of many are compared, not more often than now and then."""
    last = time.monotonic()

    def on_pair(done: int, num: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_LINE_SECONDS:
            last = time.monotonic()
            err.print(f"{done:,} of {num:,} outputs compared")

    return on_pair


def _print_comparison(result: ComparisonResult) -> None:
    """Print how two outputs differ."""
    plan = result.plan
    out.print(f"A  {plan.a}\nB  {plan.b}\ncompared as {plan.kind} ({plan.why}), box {plan.box}")
    for note in plan.notes:
        err.print(f"note: {note}")
    if (made := made_table(result)) is not None:
        out.print(made)
    elif plan.made_a and plan.made_b:
        out.print("made alike: by the same recipe, net, weights and versions")
    for table in difference_tables(result):
        out.print(table)
    for sentence in result.summary:
        out.print(sentence)
    print_missing(result)


def _print_table(table: ComparisonTable) -> None:
    """Print how the outputs of two batches differ, and what was not compared."""
    out.print(f"A  {table.a}\nB  {table.b}")
    out.print(row_table(table))
    for name, names in (("A", table.only_a), ("B", table.only_b)):
        if names:
            err.print(f"in {name} only: {', '.join(names)}")
    if any(row.result is None or not row.result.is_complete for row in table.rows):
        err.print("not all was compared; run the same command again to compare the rest")
