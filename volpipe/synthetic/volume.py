"""A synthetic electron-microscopy volume of any size, with its truth, for tests, demos and benchmarks.

Not a simulation of a microscope, and no substitute for real tissue for training or evaluating a net.

Every voxel is a function of the seed and of its own coordinates, so that boxes in any order and by any number of
processes have the same bytes. Three rules make that true, here and in render, tissue, neurites and random_field:

* random numbers are hashes of lattice coordinates, never drawn in sequence;
* the blur reads a halo around its box and adds its terms in a fixed order;
* voxels see only ``+ - * /``, square roots, rounding and minima, one at a time. IEEE 754 defines these to the
  last bit, while exp, log, sin and sums by BLAS depend on the machine and on a value's place in its array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from volpipe.errors import RecipeError
from volpipe.geometry.grid import Box, Grid
from volpipe.synthetic.neurites import number_cells
from volpipe.synthetic.random_field import Array
from volpipe.synthetic.render import render
from volpipe.synthetic.tissue import HALF_MEMBRANE, grow, vesicles

CYTOPLASM, MEMBRANE, MITOCHONDRION, VESICLE = range(4)  # values of `organelles`

_TILE = (64, 128, 128)  # voxels computed at once

KEYS: dict[str, np.dtype] = {"raw": np.dtype(np.uint8), "labels": np.dtype(np.uint64)}  # the arrays


@dataclass(frozen=True)
class SyntheticVolume:
    """A synthetic volume (z, y, x), computed where it is read; it holds no voxel.

    Attributes:
        shape: the volume in voxels.
        seed: any integer; another seed gives another tissue.
        voxel_size_nm: edge of a voxel per axis (z, y, x); tissue is recognisable from about 2 to 40 nm.
        noise: times the usual noise, whose deviation is 6 grey levels; 0 leaves the same picture without noise.
    """

    shape: tuple[int, int, int]
    seed: int = 0
    voxel_size_nm: tuple[float, float, float] = (16.0, 8.0, 8.0)
    noise: float = 1.0

    def __post_init__(self) -> None:
        for axis, n, size in zip("zyx", self.shape, self.voxel_size_nm, strict=True):
            if n < 1:
                raise RecipeError(f"sample shape is {n} on axis {axis}; give at least 1 voxel")
            if not 0 < size < math.inf:
                raise RecipeError(f"sample voxel size is {size} nm on axis {axis}; give a length above 0")
        if not 0 <= self.noise < math.inf:
            raise RecipeError(f"sample noise is {self.noise}; give 0 for none, 1 for the usual or another factor")

    def raw(self, box: Box) -> Array:
        """Return the picture of `box` (z, y, x), uint8: dark membranes and organelles in grey cytoplasm."""
        return self._compute_tiles(box, np.uint8, lambda tile: render(self.seed, tile, self.voxel_size_nm, self.noise))

    def labels(self, box: Box) -> Array:
        """Return the cell of each voxel of `box` (z, y, x), uint64 from 1; 0 is membrane."""
        return self._compute_tiles(box, np.uint64, self._label_tile)

    def organelles(self, box: Box) -> Array:
        """Return the kind of each voxel of `box` (z, y, x), uint8: CYTOPLASM, MEMBRANE and so on."""
        return self._compute_tiles(box, np.uint8, self._organelle_tile)

    def _compute_tiles(self, box: Box, dtype: type[np.generic], make: Callable[[Box], Array]) -> Array:
        """Return `box`, computed tile by tile to bound the memory."""
        for axis, a, b, n in zip("zyx", box.start, box.stop, self.shape, strict=True):
            if a < 0 or b > n:
                raise ValueError(f"box {a}:{b} leaves the sample 0:{n} on axis {axis}; clip it first")
        out = np.empty(box.shape, dtype)
        if box.is_empty:
            return out
        tiles = Grid(box.shape, _TILE)
        for number in range(len(tiles)):
            tile = tiles.box(number)
            out[tile.slices] = make(tile.shift(box.start))
        return out

    def _label_tile(self, box: Box) -> Array:
        tissue = grow(self.seed, box, self.voxel_size_nm)
        labels: Array = number_cells(tissue.roots, self.shape, self.voxel_size_nm)[tissue.cell]
        labels[tissue.wall < HALF_MEMBRANE] = 0
        return labels

    def _organelle_tile(self, box: Box) -> Array:
        tissue = grow(self.seed, box, self.voxel_size_nm)
        out = np.full(box.shape, CYTOPLASM, np.uint8)
        out[vesicles(tissue) < 0] = VESICLE
        out[tissue.mitochondrion < 0] = MITOCHONDRION
        out[tissue.wall < HALF_MEMBRANE] = MEMBRANE
        return out


def write_sample(
    path: Path,
    sample: SyntheticVolume,
    *,
    chunk: int = 64,
    format: str = "n5",
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write `sample` at `path` as the arrays `raw` (uint8) and `labels` (uint64), 2 x 2 x 2 chunks at a time.

    Args:
        path: a new or existing container of `format`.
        chunk: edge of the chunks in voxels.
        format: n5, zarr2 or zarr3.
        workers: number of processes; the bytes do not depend on it.
        on_progress: called with the number of boxes written and the number of boxes, after each.

    Raises:
        VolumeError: `path` holds one of the arrays with other metadata.
    """
    from volpipe.runs.presence import COMMAND
    from volpipe.volumes.completeness import mark_complete, mark_incomplete
    from volpipe.volumes.convert import in_processes
    from volpipe.volumes.formats.container import read_header
    from volpipe.volumes.volume import ArraySpec, create_array

    chunks = tuple(min(chunk, n) for n in sample.shape)
    size = sample.voxel_size_nm[::-1] if format == "n5" else sample.voxel_size_nm  # N5 counts x, y, z
    attributes = {"resolution": list(size), "units": ["nm"] * 3, "seed": sample.seed}
    if sample.noise != 1:
        attributes["noise"] = sample.noise
    for array, dtype in KEYS.items():
        if format == "n5" and read_header(path / array) is None:  # its attributes may be there before the array
            mark_incomplete(path, format, COMMAND.completing, key=array)
        create_array(path, array, ArraySpec(sample.shape, dtype, chunks, codec="gzip", attributes=attributes), format)
        mark_incomplete(path, format, COMMAND.completing, key=array)
    boxes = Grid(sample.shape, (2 * chunk,) * 3)
    written = in_processes(partial(_write_box, path, sample, boxes), range(len(boxes)), workers, path)
    for done, _ in enumerate(written, start=1):
        if on_progress is not None:
            on_progress(done, len(boxes))
    for key in KEYS:
        mark_complete(path, format, key=key)


def _write_box(path: Path, sample: SyntheticVolume, boxes: Grid, number: int) -> None:
    from volpipe.volumes.volume import open_writer

    box = boxes.box(number)
    open_writer(path, "raw").write(box, sample.raw(box))
    open_writer(path, "labels").write(box, sample.labels(box))
