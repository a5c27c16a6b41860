"""`volpipe evaluate`: an output against a reference, as a table, as JSON and as a picture.

Not here: the comparing (api.labels, evaluation). Exit codes as in app.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import volpipe
from volpipe.cli.options import Parents, Site, Strict, Tolerate, monitored, number
from volpipe.display.console import INCOMPLETE, check_target, interruptible, out
from volpipe.display.progress import showing
from volpipe.display.reports import print_missing
from volpipe.display.scores import score_table
from volpipe.errors import VolpipeError

DataRange = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", parser=number, help="Greatest value less least; by default of the type."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the scores to this file.")]


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
    for location in (output, reference):
        volpipe.open(location)  # refused before heavy packages are loaded
    check_target("--json", json_out, parents=parents)
    check_target("--picture", picture, parents=parents)
    check_target("--report", report, parents=parents)
    if picture is not None and picture.suffix.lower() != ".png":
        raise VolpipeError(f"--picture {picture}: a PNG is written; give a name that ends in .png")
    with interruptible(), showing() as show:
        result = volpipe.evaluate(
            output, reference, labels=labels, given=given, roi=roi, margin=_sizes(margin), data_range=data_range,
            site=config, tolerate=0 if strict else tolerate, report=report, on_progress=show(),
        )  # fmt: skip
    if result.scores is None:
        print_missing(result)
        raise typer.Exit(INCOMPLETE)
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
