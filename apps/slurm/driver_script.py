"""The script that runs a driver as a job of Slurm: the same command line, in the same folder, with the same settings.

Not here: the jobs of its workers, which the driver submits as it does anywhere (provider).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import SiteError

# The driver ends its run in order when its time is nearly over; it takes 20 s at most, and a few more for its jobs.
WARN_SECONDS = 90
# Of its own job, the driver hands nothing on to those that it submits.
FORGET = "for name in ${!SLURM_@}; do [ $name = SLURM_CONF ] || unset $name; done"
ELSEWHERE = "_ADDRESS"  # a setting that is true of the machine of the script's maker alone


@dataclass(frozen=True)
class DriverJob:
    """What the driver's job asks of Slurm.

    Attributes:
        time: HH:MM:SS or D-HH:MM:SS.
        cores, mem_gb: small, whatever the volume's size; of memory, 0 asks for none.
        partition, account: of the driver's job alone; None leaves them to Slurm.
    """

    time: str = "1-00:00:00"
    cores: int = 2
    mem_gb: int = 4
    partition: str | None = None
    account: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\d+-)?\d+:\d\d:\d\d", self.time):
            raise SiteError(f"--time {self.time!r}: write HH:MM:SS or D-HH:MM:SS, such as 12:00:00 or 2-00:00:00")


def driver_script(job: DriverJob, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Return an sbatch script that gives `volpipe run` with `arguments` in `folder`.

    Args:
        arguments: of `volpipe run`.
        folder: where relative paths begin.
        environment: of which VOLPIPE_... is handed on.
    """
    asked = {
        "job-name": "volpipe",
        "output": "volpipe-%j.log",
        "time": job.time,
        "cpus-per-task": str(job.cores),
        "mem": f"{job.mem_gb}G" if job.mem_gb else None,
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:TERM@{WARN_SECONDS}",
    }
    settings = {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith("VOLPIPE_") and not name.endswith(ELSEWHERE)
    }
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None),
            "#SBATCH --requeue",  # the same command goes on where it was
            FORGET,
            f"cd {shlex.quote(str(folder))} || exit 2",  # else names count from wherever the job is
            *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
            f"exec {shlex.join([sys.executable, '-m', 'volpipe', 'run', *arguments])}",
            "",
        ]
    )
