"""Volumes on a disk that tests put into buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import ArraySpec, create_array, open_writer
from volpipe.workflow.prepare import prepare

DATA = np.random.default_rng(3).integers(0, 60_000, (20, 24, 28)).astype(np.uint16)
LAYOUTS = {"n5": ("n5", None), "zarr2": ("zarr2", None), "zarr3": ("zarr3", None), "shards": ("zarr3", (16, 16, 16))}


def make(path: str | Path, key: str = "raw", layout: str = "zarr3") -> None:
    """Write DATA as an array of 8³ chunks."""
    format, shards = LAYOUTS[layout]
    create_array(path, key, ArraySpec(DATA.shape, DATA.dtype, (8, 8, 8), shards, codec="gzip"), format)
    open_writer(path, key).write(Box.from_shape(DATA.shape), DATA)


SETTINGS = [
    "net.name=shift", "normalise.method=range", "windows.shape=[16,16,16]", "windows.block=[1,1,1]", "output.levels=1",
]  # fmt: skip


def plan_of(volume: Path | str, out: str | Path, folder: Path) -> Plan:
    return prepare(str(volume), load_recipe(None, SETTINGS), out, folder)
