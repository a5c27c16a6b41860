"""`volpipe evaluate`: an output against a reference, as a table, as JSON and as a picture.

Not here: the comparing (evaluate). Exit codes as in cli.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from volpipe.cli.display.console import check_target, out
from volpipe.cli.display.scores import label_table, score_table
from volpipe.cli.options import Parents, Site, number
from volpipe.errors import RunError, VolpipeError

DataRange = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", parser=number, help="Greatest value less least; by default of the type."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the scores to this file.")]


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
    json_out: JsonFile = None,
    picture: Annotated[Path | None, typer.Option(metavar="PNG", help="Write slices and errors to this PNG.")] = None,
    parents: Parents = False,
) -> None:
    """Score OUTPUT against REFERENCE, block by block on the site's workers.

    Where OUTPUT has more voxels than what it was made from, interpolation of that is scored beside it.
    """
    if picture is not None and labels:
        raise VolpipeError("--picture shows images; leave it out with --labels")
    _check_volumes(output, reference)
    check_target("--json", json_out, parents=parents)
    check_target("--picture", picture, parents=parents)
    if picture is not None and picture.suffix.lower() != ".png":
        raise VolpipeError(f"--picture {picture}: a PNG is written; give a name that ends in .png")
    from volpipe.apps.pool import on_site
    from volpipe.evaluation.evaluate import describe_scores, plan_evaluation
    from volpipe.evaluation.evaluate import evaluate as judge

    found = plan_evaluation(
        output,
        reference,
        given=given or _said_input(output),
        roi=roi,
        margin=_sizes(margin),
        kind="labels" if labels else "image",
        data_range=data_range,
    )
    with tempfile.TemporaryDirectory(prefix="volpipe-evaluate-", dir=Path.cwd()) as folder:
        scored = judge(found, on_site(config), Path(folder))
    if isinstance(scored, dict):
        out.print(score_table(scored, found.output))
    else:
        out.print(label_table(scored))
    if json_out is not None:
        text = json.dumps(describe_scores(found, scored), indent=1, allow_nan=False)
        json_out.write_text(f"{text}\n", encoding="utf-8")
    if picture is not None:
        from volpipe.evaluation.panels import draw

        draw(picture, found)


def _check_volumes(*locations: str) -> None:
    """Refuse volumes that cannot be opened, before heavy packages are loaded."""
    from volpipe.volumes.volume import open_volume

    for location in locations:
        open_volume(location)


def _said_input(output: str) -> str | None:
    """Return what an output of a run was made from, None where that is not said, gone, or only a part was computed."""
    from volpipe.runs.provenance import read_origin
    from volpipe.volumes.volume import open_volume

    try:
        origin = read_origin(output)
        if origin.recipe.input.roi is not None:
            return None
        open_volume(origin.volume)
    except (VolpipeError, RunError):
        return None
    return origin.volume


def _sizes(text: str) -> tuple[int, int, int]:
    try:
        z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise VolpipeError(f"--margin {text!r}: write three numbers, z,y,x, such as 4,0,0") from None
    if min(z, y, x) < 0:
        raise VolpipeError(f"--margin {text!r}: give numbers from 0 up")
    return z, y, x
