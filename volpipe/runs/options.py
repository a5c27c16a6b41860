"""The options of a run, and of what else writes or scores a volume, as everything below the public functions gets them.

Not here: what a command calls them (cli.options), or what they do.
"""

from __future__ import annotations

from volpipe.errors import PlanError
from volpipe.runs.presence import COMMAND


def written(name: str, value: object = None) -> str:
    """Return an argument as whoever gives it writes it: in a shell --name, in Python name, or name=value."""
    if COMMAND.line:
        return f"--{name.replace('_', '-')}"
    return name if value is None else f"{name}={value}"


def check_stages(only: object, follow: float | None) -> None:
    """Refuse for a recipe of stages what is for one net.

    Raises:
        PlanError: saying what to do instead.
    """
    if only is not None:
        raise PlanError(f"{written('only')} is for one net; leave it out, or give the stages a {written('roi')}")
    if follow is not None:
        raise PlanError(
            f"{written('follow')} is for one net; leave it out, and give {written('update', True)} when the volume has "
            "changed"
        )
