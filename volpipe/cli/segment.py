"""`volpipe segment`: objects from a volume of affinities, block by block on a site's workers.

Not here: the segmentation (api.labels, segmentation). Exit codes as in app.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

import volpipe
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Incomplete, Parents, of_incomplete
from volpipe.display import console
from volpipe.display.console import (
    INCOMPLETE,
    check_folder,
    err,
    interruptible,
    result_file,
    result_is_in_files,
    tell_report,
)
from volpipe.display.plans import time_table
from volpipe.display.progress import showing
from volpipe.display.reports import print_ending, print_missing
from volpipe.volumes.storage.result_file import json_bytes, json_kind

if TYPE_CHECKING:
    from volpipe.estimation.estimate import StageTimes
    from volpipe.segmentation.plan import SegmentPlan

FACTS = json_kind("volpipe segment --json")


@command(Group.MOST_USED, "segment", place=6)
def segment(
    affinities: str, out: str | None, site: str, settings: list[str], update: bool,
    *,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write a summary here.")] = None,
    incomplete: Incomplete = False,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:  # fmt: skip
    """Make objects of AFFINITIES, the same whatever the blocks; run the same command again to continue."""
    from volpipe.monitoring.results import results_of
    from volpipe.segmentation.kind import plan_line

    result_is_in_files()
    facts_file = result_file("--json", json_file, FACTS, parents=parents)
    if out is not None:
        from volpipe.volumes.formats.container import locate

        check_folder(f"--out {out}", locate(out)[0], parents=parents)
    times: list[StageTimes] = []

    def on_estimate(forecast: StageTimes) -> None:
        times.append(forecast)
        console.out.print(time_table(forecast, site))

    def on_plan(plan: SegmentPlan) -> None:
        for warning in plan.warnings():
            err.print(f"warning: {warning}")
        console.out.print(plan_line(plan))

    with interruptible(), results_of(facts_file), showing() as show:
        result = volpipe.segment(
            affinities, out=out, site=site, settings=[*settings, *of_incomplete(incomplete)], update=update,
            on_plan=on_plan, on_estimate=on_estimate, on_progress=show(), **options,
        )  # fmt: skip
    if result.missing:
        print_missing(result)
        tell_report(result.folder)
        raise typer.Exit(INCOMPLETE)
    if facts_file is not None:
        facts = {"out": result.out, "table": str(result.table), "objects": result.num_objects}
        facts["seconds"] = result.stage_seconds
        facts |= {} if result.num_lost is None else {"lost": result.num_lost}
        facts_file.write(json_bytes(FACTS.writer, facts))
    if result.was_complete:
        for changed in result.updates:
            console.out.print(str(changed))
        news = ", and nothing has changed" if update else " already; nothing to do (--fresh starts over)"
        console.out.print(f"{result.out} is complete{news}")
        return
    print_ending(result, *times)
    tell_report(result.folder)
