"""The objects of a segmentation, as Neuroglancer lists them: voxels and box of each, from the run's table.

Not here: how they are made (segmentation).
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volpipe.errors import VolumeError
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.tasks import TABLE
from volpipe.volumes.volume import Volume, absolute

MOST = 100_000  # objects that a browser lists


@dataclass(frozen=True)
class Objects:
    """The table of a segmentation's objects, in the file at `table`."""

    table: Path

    def answer(self, name: str) -> bytes | None:
        """Return the bytes called `name` of the table as Neuroglancer's segment properties; None of another name."""
        return json.dumps(self._properties()).encode() if name == "info" else None

    def _properties(self) -> dict[str, Any]:  # Any: JSON
        """Return voxels and bounding box of the largest objects, the largest first.

        Raises:
            VolumeError: the table is gone, or is not one of ours.
        """
        try:
            with self.table.open(encoding="utf-8", newline="") as lines:
                rows = sorted(csv.DictReader(lines), key=lambda row: -int(row["voxels"]))[:MOST]
            voxels = [int(row["voxels"]) for row in rows]
            texts = [f"{_box(row)}, {int(row['voxels']):,} voxels" for row in rows]
            labels = [str(int(row["label"])) for row in rows]
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise VolumeError(f"{self.table} is no table of objects any more: {error}") from error
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


def find_objects(volume: Volume) -> Objects | None:
    """Return the table that `volpipe segment` wrote for `volume`; None where there is none."""
    table = RunFolder.from_output(absolute(volume.path)).path / TABLE
    return Objects(table) if table.is_file() else None


def _box(row: dict[str, str]) -> str:
    """Return the box (z, y, x) of an object in the table."""
    return ",".join(f"{int(row[f'{axis}0'])}:{int(row[f'{axis}1'])}" for axis in "zyx")
