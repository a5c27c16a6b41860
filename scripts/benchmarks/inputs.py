"""Input volumes, made once and kept: electron microscopy from the sample generator, repeated to the wanted shape.

Not here: outputs, which every measurement throws away.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.row import Setting
from volpipe.geometry.grid import Box, Grid
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.volume import ArraySpec, create_array, open_writer

TILE = (128, 128, 128)
CHUNK = (64, 64, 64)
CODECS = {"n5": "gzip", "zarr2": "zstd"}


def volume(setting: Setting, shape: tuple[int, int, int], array_format: str = "n5") -> str:
    """Return the place of a volume (z, y, x), uint8, in chunks of 64³: N5 with gzip, or Zarr v2 with zstd."""
    path = setting.cache / f"{'x'.join(map(str, shape))}.{'n5' if array_format == 'n5' else 'zarr'}"
    done = path.with_suffix(path.suffix + ".done")
    if not done.exists():
        _write(path, shape, array_format)
        done.touch()
    return f"{path}/raw"


def volumes(setting: Setting, shape: tuple[int, int, int], num: int) -> list[str]:
    """Return the places of `num` volumes as `volume` makes them, links to one: each is a dataset of its own."""
    source = Path(volume(setting, shape)).parent
    folder = source.with_name(f"{source.stem}-many")
    folder.mkdir(exist_ok=True)
    places = [folder / f"{number:05}.n5" for number in range(num)]
    for place in places:
        if not place.exists():
            place.symlink_to(source)
    return [f"{place}/raw" for place in places]


def _write(path: Path, shape: tuple[int, int, int], array_format: str) -> None:
    tile = np.asarray(SyntheticVolume(TILE, 0).raw(Box.from_shape(TILE)))
    spec = ArraySpec(shape, tile.dtype, CHUNK, codec=CODECS[array_format])
    create_array(path, "raw", spec, array_format)
    boxes = Grid(shape, TILE)

    def write(number: int) -> None:
        box = boxes.box(number)
        open_writer(path, "raw").write(box, np.ascontiguousarray(tile[Box.from_shape(box.shape).slices]))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(write, range(len(boxes))))
