"""The command line: `volpipe run`, `plan` and `status`, and where it begins; the other commands have modules of their
own here.

Not here: anything that a notebook would want as well (api). Exit codes: 0 done, 1 part is missing, 2 refused,
4 interrupted; `status` has 3 too, where somebody is at work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from typer.main import get_command

import volpipe
from volpipe.blockwise.interrupts import GRACE_SECONDS, INTERRUPTED, INTERRUPTS
from volpipe.cli import outputs, workflow
from volpipe.cli.generate import command, given_to
from volpipe.cli.groups import Group, Grouped, commands
from volpipe.cli.options import Incomplete, Parents, of_incomplete, seconds
from volpipe.display.console import (
    DONE,
    INCOMPLETE,
    REFUSED,
    Notices,
    bars,
    check_folder,
    err,
    interruptible,
    lasting_streams,
    measuring_shown,
    out,
    print_as_stored,
    rendered,
    result_file,
    result_is_in_files,
    tell_report,
)
from volpipe.display.plans import (
    alternatives_table,
    estimate_table,
    forecast_summary,
    measured_line,
    plan_summary,
    plan_table,
)
from volpipe.display.progress import showing
from volpipe.display.reports import MOST_ROWS, clipped_line, print_missing, report_table, seam_line, seam_warning
from volpipe.display.workers import roster_view
from volpipe.errors import RunError, RunStopped, SettingsError, SiteError, VolpipeError
from volpipe.monitoring.command import current, watched
from volpipe.resolve import describe_error
from volpipe.runs.presence import COMMAND
from volpipe.sites.find import name_user
from volpipe.units import count, duration

if TYPE_CHECKING:
    from typer._click import Command  # typer's own copy of click, which has no other name

    from volpipe.api.requests import Request
    from volpipe.blockwise.phase import Show
    from volpipe.blockwise.pool import Capacity
    from volpipe.estimation.forecast import Forecast
    from volpipe.inference.plan import Plan
    from volpipe.runs.run_folder import RunFolder
    from volpipe.stages.kind import StagePlan
    from volpipe.workflow.driver import Listener, Report
    from volpipe.workflow.follow import Look
    from volpipe.workflow.work_plan import WorkPlan

WIDTH = 120  # of help, at most
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
START = """Start here:

\b
  volpipe sample sample.n5                    make a small volume to try things on
  volpipe info sample.n5/raw                  what a volume is
  volpipe plan sample.n5/raw                  what a run would take, before it does
  volpipe run sample.n5/raw -o restored.zarr  run the default recipe; repeat it to continue after an interruption
"""
STOPPING = f"\nstopping: what runs may finish within {GRACE_SECONDS:.0f} s; once more, and it stops at once\n"

log = logging.getLogger("volpipe.cli.app")


class Commands(Grouped):
    """All commands; one that is interrupted, and does not handle that itself, ends with its exit code too."""

    def invoke(self, *arguments: Any, **named: Any) -> Any:  # Any: click's context, and what the command returns
        try:
            return super().invoke(*arguments, **named)
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=SETTINGS,
    help="Run a neural net over a volume far larger than memory, in chunks, on whatever machines there are.",
    epilog=START,
)


@command(Group.MOST_USED, "plan", "run", place=1)
def run(
    *,
    details: Annotated[bool, typer.Option("--details", help="Print all of the plan, as `volpipe plan` does.")] = False,
    incomplete: Incomplete = False,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:
    """Run a net, or a recipe's stages, over VOLUME; run the same command again to continue an interrupted run."""
    result_is_in_files()
    with interruptible():
        asked = _request(options, incomplete=incomplete, parents=parents)
        how = given_to("run", options)
        only, update, follow = how["only"], how["update"], how["follow"]
        from volpipe.apps.pool import starting
        from volpipe.runs.options import check_stages

        if asked.has_stages:
            check_stages(only, follow)

        with starting(how["site"], asked.folder.parsl, fresh=how["fresh"]) as site, showing() as show:
            planned, config = _plan(asked, site.capacity, fresh=how["fresh"]), how["site"]
            how |= {"volume": planned.plan, "site": site}
            listening = partial(_listener, config=config, details=details, show=show)
            if asked.has_stages:
                is_complete = workflow.run(planned.plan, how, listening=listening, tell=_print_report, show=show)
                raise typer.Exit(DONE if is_complete else INCOMPLETE)
            on_look = partial(_tell_look, seconds=follow or 0.0)
            report = cast("Report", volpipe.run(**how, listener=listening(planned.stages[0], on_look=on_look)))
    if report.was_complete or (follow is not None and not report.missing):
        since = ", of its volume as it was when you asked to stop" if follow is not None else ""
        news = ", and nothing has changed" if update else " already; nothing to do (--fresh starts over)"
        out.print(f"{planned.out} is complete{since or news}")
        return
    if follow is not None:
        raise typer.Exit(INCOMPLETE)
    _print_report(report)
    tell_report(report.folder)
    if report.missing:
        raise typer.Exit(INCOMPLETE)
    out.print(f"wrote {f'the part {only} of ' if report.num_held else ''}{planned.out}")


def _print_report(report: Report, started: float | None = None) -> None:
    """Print how a run ended that `started` then (seconds since 1970; None: with this command), and what is missing."""
    for update in report.updates:
        out.print(str(update))
    out.print(report_table(report, started=started or COMMAND.began))
    if report.normalise is not None and (grey := measured_line(report.plan, report.normalise)):
        out.print(grey)
    if clipped := clipped_line(report):
        err.print(clipped)
    if report.seams:
        from volpipe.runs.seams import blind_spot

        out.print(seam_line(report.seams, blind_spot(report.plan)))
    if warning := seam_warning(report.seams):
        err.print(warning)
    if report.kept.total:
        err.print(
            f"blocks of the output hold {report.kept} voxels, kept as infer.nonfinite=keep says "
            "(the journal has each block; a voxel that several reach counts in each)"
        )
    if report.num_held:
        held = f"{count(report.num_held, 'block')} beyond --only {'is' if report.num_held == 1 else 'are'} not done"
        out.print(f"{held}; the same command without it does the rest")
    print_missing(report)


@command(Group.MOST_USED, "plan", place=2, without=("fresh",))
def plan(
    site: str,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Try no block: no times, and upper bounds of bytes.")] = False,
    incomplete: Incomplete = False,
    parents: Parents = False,
    **options: Any,  # Any: values of options
) -> None:
    """Print what `volpipe run` with the same options would read, write and take, after trying a few blocks."""
    with interruptible():
        asked = _request(options, incomplete=incomplete, parents=parents)
        planned = _plan(asked, _capacity(site, asked, is_quick=quick))
        if asked.has_stages:
            workflow.show_plan(planned.plan, None if quick else site, site)
            return
        out.print(plan_summary(planned.plan))
        with bars() as shown:
            on_try = partial(shown.show_seconds, "trying blocks")
            found = cast("Forecast", volpipe.estimate(planned.plan, site=None if quick else site, on_try=on_try))
    out.print(forecast_summary(found, site))
    _print_details(found)
    found.check()
    found.warn_of_room()


def _print_details(found: Forecast) -> None:
    """Print how the work is divided, what its stages take, and what was turned down."""
    out.print()
    out.print(plan_table(found.plan))
    out.print()
    out.print(estimate_table(found.estimate))
    out.print()
    out.print(alternatives_table(found.alternatives()))


@command(Group.MOST_USED, "status", place=4, cls=outputs.Watchable)
def status(
    output: str, changes: bool,
    *,
    every: Annotated[bool, typer.Option("--all", help="List all boxes that failed, not the first of them.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead; with --watch one a line at each look.")
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="[SECONDS]", parser=seconds,
            help="Show it until the work ends, looking every so many seconds; it writes nothing, and stops nothing.",
        ),
    ] = None,
    workers: Annotated[
        bool,
        typer.Option("--workers", help="Show each worker: the CPU, memory and GPU that it takes now, and its task."),
    ] = False,
    table: Annotated[
        str | None,
        typer.Option("--csv", metavar="FILE", help="Write what each stage took to this file, too: a row for each."),
    ] = None,
    others: Annotated[
        list[str] | None, typer.Argument(metavar="MORE", help="More outputs, one after the other.")
    ] = None,
) -> None:  # fmt: skip
    """Print how far a run, its stages, labels, a training or a batch is, who is at work on it, and what failed."""
    if others and (as_json or watch is not None):
        option = "--json" if as_json else "--watch"
        raise RunError(f"{option} is for one output, and {1 + len(others)} are named; give a command for each")
    rows = result_file("--csv", table, outputs.stages_kind())
    statuses = []
    for each in (output, *(others or ())):
        found = (
            volpipe.status(each, changes=changes)
            if watch is None
            else outputs.watched(each, watch or None, as_json=as_json, with_workers=workers)
        )
        statuses.append(found)
        present = outputs.present_workers(found) if workers else None
        if as_json:
            print_as_stored(json.dumps(outputs.status_json(found, present), indent=1 if watch is None else None) + "\n")
            continue
        outputs.show_status(found, None if every else MOST_ROWS)
        if present is not None and found.state == "running":
            out.print(roster_view(found, present, out.width))
    if rows is not None:
        outputs.write_stages([output, *(others or ())], rows)
    raise typer.Exit(max(map(outputs.code_of, statuses)))


def version(wanted: bool) -> None:
    if wanted:
        from volpipe.commit import commit

        out.print(f"{volpipe.__version__} (commit {commit()})")
        raise typer.Exit


for entry in (entry for entries in commands().values() for entry in entries):
    if isinstance(entry.run, typer.Typer):
        app.add_typer(entry.run, name=entry.name)
    else:
        app.command(entry.name, cls=entry.parser)(entry.run)


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and the commit.")
    ] = False,
) -> None:
    """Options before the command."""


@cache
def _commands() -> Command:
    """Return all commands, made once for all that a process is given: typer takes 20 ms to read their options."""
    return get_command(app)


def main(began: float | None = None) -> None:
    """Run the command line, given at `began` (seconds since 1970; None: now).

    What a user can put right is one sentence, anything else is a traceback.
    """
    COMMAND.give(sys.argv[1:], began)
    INTERRUPTS.reset()
    name_user()
    signal.signal(signal.SIGTERM, _interrupt)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background, and under nohup
            signal.signal(number, _interrupt)
    logging.getLogger("volpipe").addHandler(Notices())
    with lasting_streams(), watched() as watch:
        try:
            _commands()(prog_name="volpipe")
        except KeyboardInterrupt:  # before the command began
            _fail("interrupted", INTERRUPTED)
        except RunStopped as error:
            from volpipe.blockwise.failures import is_user_error

            if error.detail and not is_user_error(error.detail):
                err.print(error.detail)
            watch.is_stopped = True
            _fail(str(error), INCOMPLETE, error)
        except VolpipeError as error:
            _fail(str(error), REFUSED)
        except OSError as error:
            _fail(describe_error(error), REFUSED)


def _fail(sentence: str, code: int, error: Exception | None = None) -> NoReturn:
    """Print the notes of `error` and `sentence`, and end with `code`."""
    current().sentence = sentence
    err.print("\n".join((*getattr(error, "__notes__", ()), f"volpipe: {sentence}")))
    sys.exit(code)


def _interrupt(signum: int, frame: Any) -> None:  # Any: a frame, unused
    if INTERRUPTS.ask():
        # Not through the console: what was interrupted may be printing.
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), current().as_printed(STOPPING))


def _tell_look(look: Look, seconds: float) -> None:
    """Print what came of a look at a volume that is followed; nothing where nothing had changed."""
    if look.report is None:
        return  # the log has said why
    if not look.report.was_complete:
        _print_report(look.report, None if look.number == 0 else time.time() - look.report.seconds)
        if look.number == 0:
            tell_report(look.report.folder)
    if look.number == 0 or not look.report.was_complete:
        told = "is not complete" if look.report.missing else "is complete"
        again = f"looks again {duration(seconds)} later, and so on; Ctrl-C ends that"
        out.print(f"{time.strftime('%F %T')} {look.report.plan.out} {told}; {again}")


def _listener(
    stage: StagePlan, *, config: str, details: bool, show: Callable[..., Show],
    on_look: Callable[[Look], None] = lambda look: None,
) -> Listener:  # fmt: skip
    """Return a listener that prints the plan of a run, all of it where `details` are asked for, and shows progress.

    `on_look` prints what came of a look at a volume that is followed.
    """
    from volpipe.workflow.driver import Listener

    def on_estimate(found: Forecast) -> None:
        out.print(forecast_summary(found, config))
        if details:
            _print_details(found)
        log.info("plan:\n%s", rendered(plan_table(found.plan), estimate_table(found.estimate)))

    def on_plan(plan: Plan, folder: RunFolder) -> None:
        out.print(plan_summary(plan))

    return Listener(on_plan, on_estimate, show(stage.name, stage.voxels_per_block), on_look)


def _request(options: Mapping[str, Any], *, incomplete: bool, parents: bool) -> Request:  # Any: values of options
    """Return what is asked for; what needs neither a site nor torch to be refused is refused."""
    from volpipe.api.requests import check, request
    from volpipe.volumes.formats.container import absolute, locate

    given = {name: value for name, value in given_to("plan", options).items() if name not in ("site", "fresh")}
    asked, target = request(**given, for_volume=of_incomplete(incomplete)), given["out"]
    if not asked.has_stages:
        check_folder(f"--out {asked.out}", locate(asked.out)[0], parents=parents)
    elif target is not None:
        check_folder(f"--out {target}", absolute(target), parents=parents)
    check(asked)
    return asked


def _capacity(config: str, asked: Request, *, is_quick: bool) -> Capacity | None:
    """Return what the site `config` gives workers; a quick plan does without one that cannot be used here."""
    from volpipe.api.arguments import capacity_of

    try:
        return capacity_of(config, asked.folder)
    except SettingsError:
        raise
    except SiteError as error:
        if not is_quick:
            raise
        err.print(f"warning: {error}; the plan has the net's own windows, a run on {config} may choose others")
        return None


def _plan(asked: Request, capacity: Capacity | None, *, fresh: bool = False) -> WorkPlan:
    """Return the plan, with its warnings printed; without a `capacity` it has the net's own windows."""
    from volpipe.api.runs import plan_request
    from volpipe.stages.sizing import Sizing

    with measuring_shown():
        planned = plan_request(asked, Sizing(capacity, fresh))
    for warning in planned.warnings():
        err.print(f"warning: {warning}")
    return planned


if __name__ == "__main__":
    main()
