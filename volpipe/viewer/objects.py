"""The objects of a segmentation, as Neuroglancer lists and draws them: voxels and box of each, and its surface.

Not here: how they are made (segmentation).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Shape
from volpipe.segmentation.properties import find_table, object_box, object_rows, segment_properties
from volpipe.volumes.places import Raster, levels_of, rasters_of
from volpipe.volumes.volume import Volume

MESH_VOXELS = 2**24  # of the box that a surface is made from; a larger object's is that of a coarser level
MESH = re.compile(r"mesh/(\d{1,20})(:0)?")


@dataclass(frozen=True)
class ObjectTable:
    """The objects of a segmentation.

    Attributes:
        table: the file that lists them.
        volume: their labels.
    """

    table: Path
    volume: Volume

    def answer(self, name: str) -> bytes | None:
        """Return the bytes called `name`: of Neuroglancer's segment properties, or of its meshes; None of another name.

        Raises:
            VolumeError: the table is gone, or is not one of ours; or an object is too large to be drawn.
        """
        if name == "objects/info":
            return json.dumps(segment_properties(self.table)).encode()
        if name == "mesh/info":
            return json.dumps({"@type": "neuroglancer_legacy_mesh"}).encode()
        match = MESH.fullmatch(name)
        if match is None:
            return None
        return json.dumps({"fragments": [match[1]]}).encode() if match[2] else self._mesh(int(match[1]))

    def _mesh(self, label: int) -> bytes | None:
        """Return the surface of an object in nm, as faces of its voxels; None where there is no such object."""
        box = next((object_box(row) for row in object_rows(self.table) if int(row["label"]) == label), None)
        if box is None:
            return None
        levels = levels_of(self.volume)
        for level, raster in zip(levels, rasters_of(levels), strict=True):
            part = _coarser(box, self.volume.spatial_shape, raster.shape)
            if part.num_voxels <= MESH_VOXELS:
                corners = faces(level.open().read(part)[0] == label) + np.array(part.start)
                return encode_mesh(corners, raster)
        raise VolumeError(
            f"object {label} is too large to be drawn: {box} of {self.volume}, which has no coarser level"
        )


def find_objects(volume: Volume) -> ObjectTable | None:
    """Return the table that `volpipe segment` wrote for `volume`; None where there is none."""
    table = find_table(volume)
    return None if table is None else ObjectTable(table, volume)


def faces(mask: np.ndarray) -> np.ndarray:
    """Return the outer faces of the voxels of `mask` (z, y, x): corners (faces, 4, 3), zyx, from 0."""
    inside, parts = np.pad(mask, 1).astype(np.int8), []
    for axis in range(3):
        first, second = np.zeros((2, 3), int)
        first[(axis + 1) % 3] = second[(axis + 2) % 3] = 1
        around = np.array([0 * first, first, first + second, second])
        steps = np.diff(inside, axis=axis)
        for sign, turn in ((1, around), (-1, around[::-1])):  # so that every face is seen from outside
            place = np.argwhere(steps == sign) - 1
            place[:, axis] += 1
            parts.append(place[:, np.newaxis] + turn)
    return np.concatenate(parts)


def encode_mesh(corners: np.ndarray, raster: Raster) -> bytes:
    """Return faces of four `corners` (faces, 4, 3), zyx of `raster`, as a fragment of Neuroglancer's meshes, in nm.

    Corners are shared by the faces that meet there, so that light falls on a surface as if it were smooth.
    """
    span = corners.max(axis=(0, 1)) + 1
    unique, number = np.unique(
        np.ravel_multi_index(tuple(np.moveaxis(corners, -1, 0)), tuple(span)), return_inverse=True
    )
    shared = np.stack(np.unravel_index(unique, tuple(span)), axis=1)
    vertices = ((shared - 0.5) * raster.voxel_size_nm + raster.origin_nm)[:, ::-1].astype("<f4")
    triangles = number.reshape(-1, 4)[:, [0, 1, 2, 0, 2, 3]].astype("<u4")
    return len(vertices).to_bytes(4, "little") + vertices.tobytes() + triangles.tobytes()


def _coarser(box: Box, shape: Shape, coarse: Shape) -> Box:
    """Return the box of a coarser level, of shape `coarse`, that covers `box` of the level of `shape`."""
    steps = [max(1, round(n / m)) for n, m in zip(shape, coarse, strict=True)]
    start = tuple(a // s for a, s in zip(box.start, steps, strict=True))
    return Box(start, tuple(-(-b // s) for b, s in zip(box.stop, steps, strict=True))) & Box.from_shape(coarse)
