"""Volumes in a browser: Neuroglancer on outputs and inputs, also of a run that goes on.

Not here: what is served (viewer), or printing (cli).
"""

from __future__ import annotations

from pathlib import Path

from volpipe.geometry.grid import Triple
from volpipe.viewer.viewer import Viewer, open_viewer
from volpipe.volumes.reader import Volume


def view(
    output: str | Path | Volume, *volumes: str | Path | Volume, at: Triple | None = None, bind: str = "127.0.0.1:0"
) -> Viewer:
    """Return a viewer whose `url` shows `output`, `volumes` beside it, and their difference, until it is closed.

    Args:
        output: of a run or a segmentation, also one that goes on; or any volume.
        volumes: such as its input; or their locations, as `open` takes them.
        at: voxel (z, y, x) of the output to begin at; its centre where it is not given.
        bind: port, or address and port, to listen on; 0 is any that is free.

    Raises:
        VolpipeError: no such volume or voxel, the port is taken, or Neuroglancer is not installed.
    """
    return open_viewer(output, volumes, at, bind)
