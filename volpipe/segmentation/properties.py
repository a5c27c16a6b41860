"""What Neuroglancer lists of the objects of a segmentation: the voxels and the box of each, by their table.

Not here: how objects are found (agglomerate), or where a format keeps this. Specification:
github.com/google/neuroglancer, src/datasource/precomputed/segment_properties.md (read 2026-11).
"""

from __future__ import annotations

import csv
import heapq
from collections.abc import Iterator
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.tasks import TABLE
from volpipe.volumes.formats.container import output_around
from volpipe.volumes.storage.metadata import Tree
from volpipe.volumes.volume import Volume

MOST = 100_000  # objects that a browser lists


def find_table(volume: Volume) -> Path | None:
    """Return the table that `volpipe segment` wrote of the objects in `volume`; None where there is none."""
    table = RunFolder.from_output(output_around(volume.folder, volume.path)).path / TABLE
    return table if table.is_file() else None


def object_rows(table: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the table of objects, by its headings.

    Raises:
        VolumeError: it is gone.
    """
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            yield from csv.DictReader(lines)
    except OSError as error:
        raise VolumeError(f"{table} is gone: {error.strerror}") from error


def object_box(row: dict[str, str]) -> Box:
    """Return the box (z, y, x) of an object in the table."""
    return Box(tuple(int(row[f"{axis}0"]) for axis in "zyx"), tuple(int(row[f"{axis}1"]) for axis in "zyx"))


def segment_properties(table: Path) -> Tree:
    """Return Neuroglancer's segment properties: voxels and box of the MOST largest objects, the largest first.

    Raises:
        VolumeError: the table is gone, or is not one of ours.
    """
    try:
        rows = heapq.nsmallest(MOST, object_rows(table), key=lambda row: -int(row["voxels"]))
        voxels = [int(row["voxels"]) for row in rows]
        texts = [f"{object_box(row)}, {int(row['voxels']):,} voxels" for row in rows]
        labels = [str(int(row["label"])) for row in rows]
    except (KeyError, ValueError, TypeError) as error:
        raise VolumeError(f"{table} is no table of objects any more: {error}") from error
    dtype = "uint32" if max(voxels, default=0) < 2**32 else "float32"
    return {
        "@type": "neuroglancer_segment_properties",
        "inline": {
            "ids": labels,
            "properties": [
                {"id": "object", "type": "label", "description": "box z,y,x, and voxels", "values": texts},
                {"id": "voxels", "type": "number", "data_type": dtype, "values": voxels},
            ],
        },
    }
