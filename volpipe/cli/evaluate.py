"""`volpipe evaluate` and `compare`: an output against a reference or another output, as tables, as JSON, as pictures.

Not here: the comparing (api.labels, api.compare, evaluation). Exit codes as in app; 1 also where a limit of `compare`
is violated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe
from volpipe.cli.options import Incomplete, Parents, Site, Strict, Tolerate, monitored, number
from volpipe.display.comparisons import difference_tables, made_table, row_table, score_table
from volpipe.display.console import INCOMPLETE, PLAIN_LINE_SECONDS, check_target, err, interruptible, out
from volpipe.display.progress import showing
from volpipe.display.reports import print_missing
from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    from volpipe.evaluation.results import ComparisonResult
    from volpipe.workflow.compare import ComparisonTable

DataRange = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", parser=number, help="Greatest value less least; by default of the type."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")]
Output = Annotated[
    str, typer.Argument(metavar="A", help="An output, such as of the old net; or a batch's file or folder.")
]
OtherOutput = Annotated[
    str, typer.Argument(metavar="B", help="Another of the same input, such as of the new net; or another batch.")
]


@monitored("evaluate")
def evaluate(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="The volume that is judged, such as an output of `volpipe run`.")
    ],
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="The volume to score it against.")],
    config: Site = "local",
    labels: Annotated[bool, typer.Option("--labels", help="Both hold labels; 0 is none.")] = False,
    roi: Annotated[
        str | None, typer.Option(metavar="BOX", help="Box z0:z1,y0:y1,x0:x1 of both that is compared.")
    ] = None,
    margin: Annotated[
        str, typer.Option(metavar="Z,Y,X", help="Voxels at each face of the box that are left out.")
    ] = "0,0,0",
    given: Annotated[
        str | None,
        typer.Option(metavar="VOLUME", help="The input of the output, if that does not name it; it is interpolated."),
    ] = None,
    data_range: DataRange = None,
    ignore: Annotated[
        str | None,
        typer.Option(
            metavar="LABELS",
            help="With --labels: numbers such as 5,7 of which nothing is known: voxels with them in REFERENCE are left "
            "out; by default -1 to -3 and the last three of 32 and 64 bits; none leaves none out.",
        ),
    ] = None,
    any_place: Annotated[
        bool,
        typer.Option("--any-place", help="Score voxel by voxel though voxel sizes or origins say they lie elsewhere."),
    ] = False,
    incomplete: Incomplete = False,
    tolerate: Tolerate = 0.1,
    strict: Strict = False,
    json_out: JsonFile = None,
    picture: Annotated[Path | None, typer.Option(metavar="PNG", help="Write slices and errors to this PNG.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="HTML", help="Write the report of the evaluation to this file.")
    ] = None,
    parents: Parents = False,
) -> None:
    """Score OUTPUT against REFERENCE, block by block on the site's workers.

    Where OUTPUT has more voxels than what it was made from, interpolation of that is scored beside it.
    """
    if picture is not None and labels:
        raise VolpipeError("--picture shows images; leave it out with --labels")
    if picture is not None and picture.suffix.lower() != ".png":
        raise VolpipeError(f"--picture {picture}: a PNG is written; give a name that ends in .png")
    check_target("--json", json_out, parents=parents)
    check_target("--picture", picture, parents=parents)
    check_target("--report", report, parents=parents)
    for location in (output, reference):
        volpipe.open(location)  # refused before heavy packages are loaded
    with interruptible(), showing() as show:
        result = volpipe.evaluate(
            output, reference, labels=labels, given=given, roi=roi, margin=_sizes(margin), data_range=data_range,
            ignore=_labels(ignore, labels=labels), any_place=any_place, incomplete=incomplete, site=config,
            report=report, tolerate=0 if strict else tolerate, on_progress=show(),
        )  # fmt: skip
    if result.scores is None:
        print_missing(result)
        raise typer.Exit(INCOMPLETE)
    for note in result.notes:
        err.print(f"note: {note}")
    out.print(score_table(result.scores, result.plan.output))
    if json_out is not None:
        text = json.dumps(result.to_json(), indent=1, allow_nan=False)
        json_out.write_text(f"{text}\n", encoding="utf-8")
    if picture is not None:
        result.draw(picture)


def _sizes(text: str) -> tuple[int, int, int]:
    try:
        z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise VolpipeError(f"--margin {text!r}: write three numbers, z,y,x, such as 4,0,0") from None
    if min(z, y, x) < 0:
        raise VolpipeError(f"--margin {text!r}: give numbers from 0 up")
    return z, y, x


def _labels(text: str | None, *, labels: bool) -> tuple[int, ...] | None:
    """Return the labels that --ignore names, () for none; None where it names nothing."""
    if text is None:
        return None
    if not labels:
        raise VolpipeError("--ignore is of labels; give --labels as well, or leave it out")
    try:
        return () if text.strip() == "none" else tuple(int(part, 0) for part in text.split(","))
    except ValueError:
        raise VolpipeError(f"--ignore {text!r}: write labels, such as 5,7 or 0xfffffffffffffffd, or none") from None


@monitored("compare")
def compare(
    a: Output,
    b: OtherOutput,
    config: Site = "local",
    labels: Annotated[
        bool, typer.Option("--labels", help="Both hold labels, whatever they say of themselves; 0 is none.")
    ] = False,
    roi: Annotated[
        str | None, typer.Option(metavar="BOX", help="Box z0:z1,y0:y1,x0:x1 of both that is compared.")
    ] = None,
    data_range: DataRange = None,
    any_input: Annotated[
        bool, typer.Option("--any-input", help="Compare outputs of different inputs, or of different parts of one.")
    ] = False,
    incomplete: Incomplete = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Exit code 1 where it is violated: psnr=40 (dB, at least), differ=0.01 (share of voxels), mean=2, "
            "largest=9 (grey levels), voi=0.1 (bits); may be given several times.",
        ),
    ] = None,
    tolerate: Tolerate = 0.1,
    strict: Strict = False,
    json_out: JsonFile = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", help="The page with pictures; by default volpipe_A_B_compare.html in this folder."
        ),
    ] = None,
    parents: Parents = False,
) -> None:
    """Compare outputs A and B of one input, or two batches: how much differs, where most, and what was done otherwise.

    Their metadata say whether they are labels or images. Run the same command again to continue.
    """
    from volpipe.api.compare import default_name

    target = page or Path(f"{default_name(a, b)}.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise VolpipeError(f"--page {target}: an HTML page is written; give a name that ends in .html")
    check_target("--json", json_out, parents=parents)
    check_target("--page", target, parents=parents)
    with interruptible(), showing() as show:
        result = volpipe.compare(
            a, b, labels=labels, roi=roi, data_range=data_range, any_input=any_input, incomplete=incomplete,
            limits=limit or (), site=config, tolerate=0 if strict else tolerate, json_file=json_out, page=target,
            on_progress=show(), on_pair=_line_now_and_then(),
        )  # fmt: skip
    if isinstance(result, volpipe.ComparisonResult):
        _tell(result)
    else:
        _tell_many(result)
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


def _tell(result: ComparisonResult) -> None:
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


def _tell_many(table: ComparisonTable) -> None:
    """Print how the outputs of two batches differ, and what was not compared."""
    out.print(f"A  {table.a}\nB  {table.b}")
    out.print(row_table(table))
    for name, names in (("A", table.only_a), ("B", table.only_b)):
        if names:
            err.print(f"in {name} only: {', '.join(names)}")
    if any(row.result is None or not row.result.is_complete for row in table.rows):
        err.print("not all was compared; run the same command again to compare the rest")
