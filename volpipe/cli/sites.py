"""`volpipe sites`: where a run can run, and `volpipe sites check`, which tries a site out before a run does.

Not here: how a site is tried (api.sites). Exit codes: 0 all well, 1 something would fail a run, 2 refused,
4 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import volpipe as vp
from volpipe.cli.display.console import err, interruptible, out
from volpipe.cli.display.sites import checkup_table
from volpipe.cli.display.units import duration
from volpipe.cli.options import Whole, complete_site, positive

if TYPE_CHECKING:
    from volpipe.sites.findings import Answer

FAULTY = 1
WAIT_SECONDS = 300.0

app = typer.Typer(cls=Whole, rich_markup_mode=None, help="List the shipped sites, or check one.")


@app.callback(invoke_without_command=True)
def sites(context: typer.Context) -> None:
    """List the shipped sites: where a run can run. `volpipe sites check SITE` tries one out."""
    if context.invoked_subcommand is not None:
        return
    for name, line in vp.list_sites().items():
        out.print(f"{name:<14}{line}")


@app.command()
def check(
    site: Annotated[
        str,
        typer.Argument(
            metavar="SITE", help="A shipped name (see `volpipe sites`) or a Python file.", autocompletion=complete_site
        ),
    ],
    volume: Annotated[
        str | None, typer.Argument(metavar="VOLUME", help="A volume that workers should be able to read.")
    ] = None,
    out_path: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Folder of the output, which workers should be able to write."
        ),
    ] = Path(),
    wait: Annotated[
        float, typer.Option(parser=positive, metavar="SECONDS", help="Seconds to wait for workers.")
    ] = WAIT_SECONDS,
) -> None:
    """Start one block of each executor of SITE, and print what a worker finds there, beside what is here.

    Whatever differs, or would fail a run, is named. Nothing is left running.
    """

    def on_start() -> None:
        err.print(f"starting one block of each executor of {site}; waiting for at most {duration(wait)}", markup=False)

    with interruptible("what was started is stopped"):
        checked = vp.check_site(site, out_path, volume, wait_seconds=wait, on_start=on_start, on_answer=_tell)
    out.print(checkup_table(checked))
    found = checked.findings()
    for finding in found:
        out.print(finding.sentence if finding.is_fault else f"note: {finding.sentence}", markup=False)
    num_faults = sum(finding.is_fault for finding in found)
    if num_faults:
        faults = "1 fault" if num_faults == 1 else f"{num_faults} faults"
        err.print(f"volpipe: site {site} has {faults}, named above", markup=False)
        raise typer.Exit(FAULTY)
    out.print(f"site {site}: nothing found that would fail a run", markup=False)


def _tell(answer: Answer) -> None:
    said = f"answered after {duration(answer.start_seconds)}" if answer.facts is not None else "did not answer"
    err.print(f"{answer.label} {said}", markup=False)
