"""A look at volumes in a notebook: planes of a volume and its output, linked, with labels over them.

Not here: what is read and drawn (notebook).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.resolve import homes_known
from volpipe.runs.report import WorkReport
from volpipe.volumes.volume import Volume, open_volume
from volpipe.workflow.entries import place_of

if TYPE_CHECKING:
    from volpipe.notebook.explore import Explorer

Place = str | Path | Volume | WorkReport


@homes_known
def explore(
    volume: Place, output: Place | None = None, labels: Place | None = None, *, at: Sequence[int] | None = None
) -> Explorer:
    """Return a view of `volume` that a notebook shows: three planes, with sliders and zoom where there are widgets.

    All planes share one place and one zoom, in nm, so that what lies together is seen together. Only what is in sight
    is read: the level that fits the screen, and of a large slice without levels some chunks, evenly spread.

    Args:
        volume: or its location, as `open` takes it, or the report of a run, for its output.
        output: shown below it, such as the output of a run over it.
        labels: drawn over both, a colour for each object; also what `segment` returned.
        at: voxel (z, y, x) of `volume` to begin at; its middle where it is not given.

    Raises:
        VolpipeError: no such volume or voxel, or `labels` are no whole numbers.
    """
    from volpipe.notebook.explore import open_explorer

    output, labels = (
        None if place is None else _open_place(place, name) for place, name in ((output, "output"), (labels, "labels"))
    )
    return open_explorer(_open_place(volume, "volume"), output, labels, at)


def _open_place(value: Place, called: str) -> Volume:
    place = place_of(value, called)
    return (place if isinstance(place, Volume) else open_volume(place)).as_it_is
