"""The options of a run, and of what else writes or scores a volume, as everything below the public functions gets them.

Not here: how a command types them (cli.options), or what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from volpipe.blockwise.phase import TOLERATED_SHARE
from volpipe.errors import PlanError, RunError
from volpipe.geometry.grid import Box
from volpipe.runs.presence import COMMAND


@dataclass(frozen=True)
class RunOptions:
    """Options of what makes an output; those that the public functions have too mean what these say.

    Attributes:
        fresh, keep_tensors, same_input, measure_again: as of `volpipe.run`.
        site: name of the site, for the output's attributes.
        only: box of the output (z, y, x); what other shards need is left for another session.
        tolerated: share of units that may fail; see `Phase`.
        update: compute again what rests on voxels of the input that have changed; None where the command has no update.
        follow: seconds from the end of a look at the volume to the next; None: there is one look.
        replace: start over with what was made otherwise, of a batch.
        is_outside: whether others may change the volume: not that which earlier work of ours writes.
    """

    fresh: bool = False
    keep_tensors: bool = False
    site: str = ""
    only: Box | None = None
    tolerated: float = TOLERATED_SHARE
    same_input: bool = False
    update: bool | None = None
    measure_again: bool = False
    follow: float | None = None
    replace: bool = False
    is_outside: bool = True

    def __post_init__(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            RunError: saying which to give.
        """
        update, only, follow, keep = map(written, ("update", "only", "follow", "keep_tensors"))
        if self.measure_again and not self.update:
            raise RunError(f"{written('measure_again')} says how {update} goes; give that as well")
        if self.update and self.keep_tensors:
            why = f"{update} writes tensors of what has changed alone, so that {keep} would keep some of two inputs"
            raise RunError(f"{why}; leave it out, or use {written('fresh')}")
        if self.follow is not None and self.only is not None:
            why = f"{follow} takes all that changes in the volume, and {only} leaves some out"
            raise RunError(f"{why}; give one of them")

    @property
    def updates(self) -> bool:
        """Whether what was begun is updated."""
        return bool(self.update) and not self.fresh


def written(name: str, value: object = None) -> str:
    """Return an argument as whoever gives it writes it: in a shell --name, in Python name, or name=value."""
    if COMMAND.line:
        return f"--{name.replace('_', '-')}"
    return name if value is None else f"{name}={value}"


PLAIN = RunOptions()


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
