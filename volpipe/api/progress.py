"""Progress of the public functions: below the cell of a notebook, on a terminal where that is asked for.

Not here: what is drawn (display), or progress itself (blockwise.phase). A script that does not ask imports none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from volpipe.blockwise.phase import Show
    from volpipe.display.batches import RowsShown
    from volpipe.display.cell import Cell

Counted = Callable[[int, int], None]  # how many are done, of how many
P = ParamSpec("P")


def _is_shown(progress: bool | None, *, has_listener: bool) -> bool:
    """Return whether work is shown: as `progress` says, None in a notebook, unless the caller listens himself."""
    if progress is not None:
        return progress
    if has_listener or "IPython" not in sys.modules:
        return False
    from volpipe.display.cell import is_notebook

    return is_notebook()


def _notebook_cell() -> Cell | None:
    """Return a display below the cell that runs, None where there is no notebook."""
    from volpipe.display.cell import Cell, is_notebook

    return Cell() if is_notebook() else None


@contextmanager
def stages_shown(progress: bool | None, *, has_listener: bool = False) -> Iterator[Callable[..., Show]]:
    """Give a function that returns a listener of stages, by the name of the work and the voxels of its average block.

    Args:
        progress: whether anything is shown; None: in a notebook, unless the caller listens himself.
        has_listener: whether he does.
    """
    if not _is_shown(progress, has_listener=has_listener):
        yield lambda name="", voxels_per_block=0.0: lambda progress: None
        return
    from volpipe.display.progress import showing

    with showing(_notebook_cell()) as show:
        yield show


@contextmanager
def progress_shown(progress: bool | None, on_progress: Show | None) -> Iterator[Show]:
    """Give a listener of one work that calls `on_progress`, if given, and shows the work; `progress` as above."""
    with stages_shown(progress, has_listener=on_progress is not None) as show:
        yield show() if on_progress is None else both(on_progress, show())


@contextmanager
def count_shown(name: str, noun: str, progress: bool | None, on_progress: Counted | None) -> Iterator[Counted]:
    """Give a listener that calls `on_progress`, and shows under `name` how many of a `noun` are done; as above."""
    listener = on_progress or (lambda done, whole: None)
    if not _is_shown(progress, has_listener=on_progress is not None):
        yield listener
        return
    from volpipe.display.console import bars

    with bars(_notebook_cell()) as shown:
        yield both(listener, lambda done, whole: shown.show(name, done, whole, noun))


@contextmanager
def rows_shown(progress: bool | None, *, has_listener: bool = False) -> Iterator[RowsShown | None]:
    """Give what shows the datasets of a batch, None where nothing is shown; arguments as above."""
    if not _is_shown(progress, has_listener=has_listener):
        yield None
        return
    from volpipe.display.batches import showing_rows

    with showing_rows(_notebook_cell()) as shown:
        yield shown


def both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls both, in this order."""

    def call_both(*arguments: P.args, **named: P.kwargs) -> None:
        first(*arguments, **named)
        second(*arguments, **named)

    return call_both
