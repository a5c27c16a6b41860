"""`volpipe slurm …`: what helps on a cluster with Slurm.

Not here: runs, which any site runs by `volpipe run`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from volpipe.apps.slurm.driver_script import DriverJob, driver_script
from volpipe.cli.groups import Group, several
from volpipe.cli.job import check_command, check_output, check_site, command_options
from volpipe.cli.options import positive, whole
from volpipe.display.console import print_as_stored

slurm = several("slurm", Group.SITES, 2, "Run the driver as a job of Slurm.")


@slurm.callback()
def options() -> None:
    """Run the driver as a job of Slurm."""


@slurm.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def script(
    context: typer.Context,
    time: Annotated[
        str, typer.Option(metavar="TIME", help="How long the driver may run: HH:MM:SS or D-HH:MM:SS.")
    ] = DriverJob.time,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Partition of the driver's job; its workers have their site's.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(metavar="NAME", help="Account of the driver's job; without it, the site's.")
    ] = None,
    cores: Annotated[
        int, typer.Option(parser=positive, metavar="N", help="Cores of the driver's job.")
    ] = DriverJob.cores,
    mem_gb: Annotated[
        int | None,
        typer.Option(
            parser=whole,
            metavar="N",
            help=f"Memory of the driver's job, by default {DriverJob.mem_gb}; 0 asks for none, as mem_gb = 0 of the "
            "site does.",
        ),
    ] = None,
) -> None:
    """Print an sbatch script that runs `volpipe run` with the other arguments as a job."""
    job = DriverJob(time, cores, partition=partition)
    # What `volpipe run` would refuse is refused now rather than in the job, as far as it is known here.
    given = command_options(context, ["run", *context.args])
    check_command("run", given, Path.cwd())
    check_output(given)
    check_site(given["site"], cores, is_given=any(word.startswith("--config") for word in context.args))
    site = str(given["site"])
    from volpipe.apps.settings import slurm_settings

    settings = slurm_settings(site)
    if mem_gb is None:
        mem_gb = 0 if str(settings.get("mem_gb")) == "0" else job.mem_gb
    job = replace(job, mem_gb=mem_gb, account=account or settings.get("account"))
    print_as_stored(driver_script(job, context.args, Path.cwd(), os.environ))
